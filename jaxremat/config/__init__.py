"""The configuration of a run: frozen dataclasses for the model and its training.

This module doesn't import JAX, so that `--help` is fast.
"""

import itertools
import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin

from jaxremat.chips.catalog import ATTACHED, CHIPS, Attention
from jaxremat.errors import UsageError, alone, bad_value, both

Dtype = Literal["bfloat16", "float16", "float32"]
#: How tokens get to their experts: each expert computes every token, or the tokens are sorted by expert.
Dispatch = Literal["dense", "ragged"]
#: How frozen kernels are stored: in the compute dtype, as int8, or in the 4 bits of QLoRA.
Quantized = Literal["none", "int8", "nf4"]
#: How equal layers run: scanned over stacked parameters, or unrolled. It isn't part of a policy, because it changes
#: the tree of the parameters.
Layout = Literal["loop", "unrolled"]
#: The tokens whose multiples the blocks of any chip's attention are.
BLOCK_TOKENS = max(chip.attention.block_tokens for chip in CHIPS)
#: The largest whole number of a size, where a field has no smaller one of its own.
MOST = 2**31 - 1
#: By field, the interval of a number that isn't whole, and the next step where the value isn't in it.
_INTERVALS = {
    "rope_theta": ("[1, inf)", "10000 and 500000 are usual ones"),
    "rotary_fraction": ("(0, 1]", "1.0 turns all features"),
    "norm_eps": ("[0, inf)", "1e-5 is a usual one"),
    "router_loss": ("[0, inf)", "0.02 is Mixtral's"),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_softcap", "logit_softcap"), ("[0, inf)", "0 switches it off")),
    "dropout": ("[0, 1)", "0.1 is GPT-2's"),
    "lora_alpha": ("(0, inf)", "8 is peft's default, and twice the rank a usual one"),
    "learning_rate": ("(0, inf)", "3e-4 is a usual one"),
    "clip_norm": ("(0, inf)", "1.0 is a usual one"),
    "weight_decay": ("[0, inf)", "0.1 is a usual one"),
}


def _help(default: Any, text: str, metavar: str | None = None, shown: str | None = None, *, most: int = MOST) -> Any:
    """A field with the help of its flag.

    Args:
        default: the field's default.
        text: the help.
        metavar: the placeholder of the value in the help; by default it is made from the field's type.
        shown: the default in words, where the value itself doesn't say enough.
        most: the largest value of a whole number.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "shown": shown or str(default), "most": most})


def _check_fields(config: Any) -> None:
    """Raises UsageError for a field whose value isn't one of its choices, or isn't in its range.

    A field whose default is 0 may be 0. A field whose default is None may be None.
    """
    for f in fields(config):
        value, known = getattr(config, f.name), f.metadata
        may_be_none = f.default is None
        if not known or (may_be_none and value is None):
            continue
        choices = [one for kind in (f.type, *get_args(f.type)) if get_origin(kind) is Literal for one in get_args(kind)]
        least, most, (within, hint) = 1 if f.default else 0, known["most"], _INTERVALS.get(f.name, ("", ""))
        allowed = ""
        if choices and value not in choices:
            allowed, hint = ", ".join(choices), "choose one of them"
        elif f.type is int and not least <= value <= most:
            allowed = f"a whole number from {least} to {most:,}"
            hint = "give a positive number" if value < least else f"at most {most}"
        elif within and not _is_in(value, within):
            allowed = f"a number in {within}"
        if allowed:
            raise _bad_field(f.name, value, allowed, hint)


def _is_in(value: float, interval: str) -> bool:
    """Whether a number is in an interval such as `[0, 1)`."""
    low, high = map(float, interval[1:-1].split(","))
    return low <= value <= high and (interval[0] == "[" or value != low) and (interval[-1] == "]" or value != high)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer like GPT-2, like Llama, or with features of both.

    Presets are in `model/presets.py`.

    Raises:
        UsageError: a value that isn't allowed.
    """

    name: str = "custom"
    vocab_size: int = _help(256, "rows of the token embedding")
    num_layers: int = _help(2, "decoder layers", most=10_000)
    embed_dim: int = _help(64, "width of the residual stream")
    num_heads: int = _help(4, "query heads")
    num_kv_heads: int = _help(4, "key and value heads (fewer than query heads: grouped attention)")
    head_dim: int = _help(16, "width of one head")
    mlp_dim: int = _help(256, "width inside the MLP")
    max_seq_len: int = _help(1024, "rows of the learned position table; unused by rope")
    positions: Literal["learned", "rope"] = _help("learned", "how position enters")
    rope_theta: float = _help(10_000.0, "base wavelength of rope")
    rope_scaling: str = _help("", "stretched rope, as JSON like config.json's rope_scaling; '' for none", "JSON", "none")
    rotary_fraction: float = _help(1.0, "share of each head's features that rope turns (Phi 3)")
    norm: Literal["layernorm", "rmsnorm", "rmsnorm-1p"] = _help("layernorm", "rmsnorm-1p scales by 1 + scale (Gemma)")
    norm_eps: float = _help(1e-5, "epsilon of the norms")
    norm_placement: Literal["pre", "post", "both"] = _help(
        "pre", "norms before attention and MLP, after them (OLMo 2), or both (Gemma 2)"
    )
    mlp: Literal["gelu", "swiglu", "geglu"] = _help("gelu", "MLP; the *glu kinds have two input projections")
    num_experts: int = _help(1, "experts: MLPs of a layer, of which a router chooses for each token; 1 is a plain MLP")
    experts_per_token: int = _help(2, "experts that each token goes to, if there are several")
    normalize_routing: bool = _help(True, "the weights of a token's experts add up to 1 (Mixtral, Qwen 3)")
    router_loss: float = _help(0.0, "times the load-balancing loss of the router, added to the training loss")
    dispatch: Dispatch = _help("dense", "dense: each expert computes every token; ragged: its own tokens, by ragged_dot")
    exact_gelu: bool = _help(False, "GELU by the error function instead of tanh")
    use_bias: bool = _help(True, "biases on projections, but for those of experts, and in LayerNorm")
    qkv_bias: bool = _help(False, "biases on query, key and value without --use-bias (Qwen 2)")
    out_bias: bool = _help(False, "a bias on attention's output projection without --use-bias")
    mlp_bias: bool = _help(False, "biases in the MLP without --use-bias")
    qk_norm: bool = _help(False, "RMSNorm over each query and key head (Qwen 3)")
    qk_norm_over: Literal["head", "projection"] = _help("head", "projection: --qk-norm is over all heads at once (OLMo 2)")
    sliding_window: int = _help(0, "tokens that a token sees, itself included; 0 for all before it")
    window_pattern: str = _help(
        "s", "layers with the sliding window (s) and with full attention (f), repeated over the layers", "s|sf|..."
    )
    query_pre_attn_scalar: float = _help(0.0, "scores are divided by its square root; 0 takes head_dim", "FLOAT", "head_dim")
    attention_softcap: float = _help(0.0, "scores become cap * tanh(score / cap) (Gemma 2); 0 for no cap")
    logit_softcap: float = _help(0.0, "logits become cap * tanh(logit / cap) (Gemma 2); 0 for no cap")
    tie_embeddings: bool = _help(True, "the output head is the token embedding")
    scale_embeddings: bool = _help(False, "multiply embeddings by sqrt(embed_dim) (Gemma)")
    lora: str = _help(
        "",
        "LoRA adapters, which alone are trained, of linear layers such as query, `wi_*` or q_proj: all by default",
        "RANK[:PATTERNS]",
        "none",
    )
    lora_alpha: float = _help(8.0, "an adapter's result is multiplied by alpha / rank; 8 is peft's default")
    quantize_base: Quantized = _help("none", "how the frozen kernels of linear layers are stored with --lora (QLoRA)")
    dropout: float = _help(0.0, "rate on embeddings and on both residual branches")
    dtype: Dtype = _help("bfloat16", "compute dtype")
    param_dtype: Dtype = _help("float32", "parameter dtype")
    attention: Attention = _help(
        "auto", f"auto takes {ATTACHED.attention.title}'s fused kernel where it compiles for the target"
    )
    attention_block: int = _help(512, "the most tokens of a block of splash attention, a multiple of 128 (TPUs)")
    scan_layers: bool = _help(
        True,
        "layers scanned over stacked parameters, or unrolled; auto compares both, as --policy auto does by default",
        "True|False|auto",
    )

    @property
    def has_experts(self) -> bool:
        """Whether the layers have experts in place of one MLP."""
        return self.num_experts > 1

    @property
    def layout(self) -> Layout:
        """How the layers run."""
        return "loop" if self.scan_layers else "unrolled"

    @property
    def rotary_dim(self) -> int:
        """The features of a head that rope turns. They are the first ones."""
        return int(self.head_dim * self.rotary_fraction)

    def windows(self, seq_len: int) -> tuple[int, ...]:
        """For each layer, how many tokens a token sees, itself included.

        `seq_len` stands for all tokens before it.
        """
        window = min(self.sliding_window or seq_len, seq_len)
        kinds = itertools.islice(itertools.cycle(self.window_pattern), self.num_layers)
        return tuple(window if kind == "s" else seq_len for kind in kinds)

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.num_heads % self.num_kv_heads:
            divisor = f"a divisor of num_heads = {self.num_heads}"
            raise _bad_field("num_kv_heads", self.num_kv_heads, divisor, "change one of the two")
        if self.attention_block % BLOCK_TOKENS:
            raise _bad_field(
                "attention_block", self.attention_block, f"a multiple of {BLOCK_TOKENS}", "512 and 2048 are usual ones"
            )
        if not re.fullmatch("[sf]+", self.window_pattern):
            raise _bad_field("window_pattern", self.window_pattern, "a text of the letters s and f", "sf is Gemma 2's")
        if 1 < self.num_experts < self.experts_per_token:
            upto = f"up to the {self.num_experts} experts"
            raise _bad_field("experts_per_token", self.experts_per_token, upto, "2 and 8 are usual ones")
        if self.lora:
            from jaxremat.config.lora import LINEAR_LAYERS, OF_MLP, parse_lora

            lora = parse_lora(self.lora)
            if lora and self.has_experts and not {*lora.layers} - {*OF_MLP}:
                raise UsageError(
                    f"--lora {self.lora} names layers of experts, which have no adapters",
                    allowed=f"of a model with experts, {', '.join(name for name in LINEAR_LAYERS if name not in OF_MLP)}",
                    next_step=f"--lora {lora.rank} for all of attention",
                )
        elif self.quantize_base != "none":
            raise UsageError(alone(f"--quantize-base {self.quantize_base}", "--lora"), next_step="add --lora 16")
        scaling = None
        if self.rope_scaling:
            from jaxremat.config.rope import parse_rope_scaling

            scaling = parse_rope_scaling(self.rope_scaling)
        if self.positions != "rope":
            return
        if self.rotary_fraction == 1 and self.head_dim % 2:
            raise _bad_field("head_dim", self.head_dim, "an even number, as rope turns pairs", f"try {self.head_dim + 1}")
        if self.rotary_dim % 2 or not self.rotary_dim:
            even = f"a share that gives an even number of the {self.head_dim} features of a head"
            raise _bad_field("rotary_fraction", self.rotary_fraction, even, "1.0 turns all features")
        if scaling:
            scaling.at(theta=self.rope_theta, dim=self.rotary_dim, seq_len=self.max_seq_len)


Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit", "lion", "sgd-momentum", "adafactor", "muon"]
Schedule = Literal["constant", "cosine", "linear"]
#: What a plan is best at: the most tokens per second, the largest batch, or the least bytes.
Objective = Literal["time", "batch", "memory"]


@dataclass(frozen=True)
class TrainConfig:
    """The training step around the model, on one device.

    A step computes the gradients of `accumulate` microbatches one after the other, and updates the parameters once.

    Raises:
        UsageError: a value that isn't allowed.
    """

    seq_len: int = _help(1024, "tokens per sequence; several lengths are compared in one table")
    loss: str = _help(
        "full",
        "cross-entropy over all logits at once, or over chunks of them; chunked:N takes N positions of each sequence, "
        "and chunked as many as cost no bytes",
        "full|chunked|chunked:N",
    )
    optimizer: Optimizer = _help("adamw", "optimizer (optax); --list optimizers has their bytes")
    accumulate: int = _help(1, "microbatches per step, each of the batch size; one update for all", most=2**20)
    grad_dtype: Dtype | None = _help(
        None,
        "dtype of gradients, and of the copy of the weights they are taken at; pays with --accumulate",
        "bfloat16|float16|float32",
        "the parameters' own",
    )
    learning_rate: float = _help(3e-4, "learning rate, at the schedule's peak")
    schedule: Schedule = _help("constant", "the learning rate after its warm-up: cosine and linear end at 0")
    warmup_steps: int = _help(0, "steps over which the learning rate rises from 0")
    decay_steps: int = _help(10_000, "steps, warm-up included, after which the schedule ends")
    clip_norm: float | None = _help(None, "gradients are scaled down to this global norm", "FLOAT", "no clipping")
    weight_decay: float = _help(0.1, "decoupled weight decay, times the learning rate")
    seed: int = _help(0, "seed of initial values, batches and dropout", most=2**32 - 1)

    def __post_init__(self) -> None:
        parse_loss(self.loss)
        _check_fields(self)
        if self.schedule != "constant" and self.warmup_steps >= self.decay_steps:
            fewer = f"fewer than the {self.decay_steps} steps of --decay-steps, which include it"
            raise _bad_field("warmup_steps", self.warmup_steps, fewer, "make one shorter or the other longer")


@dataclass(frozen=True)
class FullLoss:
    """The loss over all logits at once."""


@dataclass(frozen=True)
class ChunkedLoss:
    """The loss over the logits of `positions` of each sequence at a time.

    With None, `default_positions` of `model/loss.py` chooses the number of positions by their bytes.
    """

    positions: int | None = None


def parse_loss(text: str) -> FullLoss | ChunkedLoss:
    """The loss that `text`, the value of `--loss`, spells.

    `full` is `FullLoss()`, `chunked` is `ChunkedLoss()`, and `chunked:256` is `ChunkedLoss(256)`.

    Raises:
        UsageError: `text` is none of these.
    """
    if text == "full":
        return FullLoss()
    match = re.fullmatch(r"chunked(?::([1-9][0-9]{0,8}))?", text, re.ASCII)
    if not match:
        allowed = "full, chunked, or chunked:N with N positions from 1 up"
        raise _bad_field("loss", text, allowed, "--loss chunked chooses N itself")
    return ChunkedLoss(int(match[1]) if match[1] else None)


def check(model: ModelConfig, train: TrainConfig) -> None:
    """Raises UsageError where `model` can't be trained as `train` says."""
    if model.positions == "learned" and train.seq_len > model.max_seq_len:
        longer = f"--max-seq-len {train.seq_len} makes the table longer (and the parameters more)"
        raise _bad_field("seq_len", train.seq_len, f"up to {model.name}'s {model.max_seq_len} learned positions", longer)
    if train.seq_len == 1 and model.dtype == "float16":
        raise UsageError(
            both("--seq-len 1", "--dtype float16"),
            allowed="sequences of 2 tokens or more in float16",
            cause="JAX's attention of a single token takes a product of float16 that XLA doesn't have",
            next_step="--dtype bfloat16, or --seq-len 2",
        )


def override(config: Any, **changes: Any) -> Any:
    """`config` with those of the changes that aren't None."""
    return replace(config, **{name: value for name, value in changes.items() if value is not None})


def _bad_field(name: str, value: Any, allowed: str, next_step: str) -> UsageError:
    return bad_value(name, repr(value), allowed, next_step)


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, ascending.

    They are the sizes that the microbatches of a global batch can have.

    For example, `divisors(6)` is `(1, 2, 3, 6)`.
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys((*small, *(number // n for n in reversed(small)))))
