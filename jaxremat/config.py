"""What a run is: frozen dataclasses for the model and its training. No JAX here, so that `--help` is instant."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from jaxremat.errors import UsageError

Attention = Literal["auto", "xla", "cudnn"]
Dtype = Literal["bfloat16", "float16", "float32"]


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: the GPT-2 kind, the Llama kind, and what lies between. See `model/presets.py`."""

    name: str = "custom"
    vocab_size: int = _help(256, "rows of the token embedding")
    num_layers: int = _help(2, "decoder layers")
    embed_dim: int = _help(64, "width of the residual stream")
    num_heads: int = _help(4, "query heads")
    num_kv_heads: int = _help(4, "key and value heads (fewer than query heads: grouped attention)")
    head_dim: int = _help(16, "width of one head")
    mlp_dim: int = _help(256, "width inside the MLP")
    max_seq_len: int = _help(1024, "rows of the learned position table; unused by rope")
    positions: Literal["learned", "rope"] = _help("learned", "how position enters")
    rope_theta: float = _help(10_000.0, "base wavelength of rope")
    norm: Literal["layernorm", "rmsnorm", "rmsnorm-1p"] = _help("layernorm", "rmsnorm-1p scales by 1 + scale (Gemma)")
    norm_eps: float = _help(1e-5, "epsilon of the norms")
    mlp: Literal["gelu", "swiglu", "geglu"] = _help("gelu", "MLP; the *glu kinds have two input projections")
    use_bias: bool = _help(True, "biases on projections")
    qk_norm: bool = _help(False, "RMSNorm over each query and key head (Qwen 3)")
    tie_embeddings: bool = _help(True, "the output head is the token embedding")
    scale_embeddings: bool = _help(False, "multiply embeddings by sqrt(embed_dim) (Gemma)")
    dropout: float = _help(0.0, "rate on embeddings and on both residual branches")
    dtype: Dtype = _help("bfloat16", "compute dtype")
    param_dtype: Dtype = _help("float32", "parameter dtype")
    attention: Attention = _help("auto", "auto takes cuDNN's fused kernel where target and shapes allow it")
    scan_layers: bool = _help(True, "layers as a loop over stacked parameters, or unrolled")

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices = getattr(self, f.name), get_args(f.type)
            if choices and value not in choices:
                raise _bad(f.name, value, ", ".join(choices), "choose one of them")
            if f.type is int and value < 1:
                raise _bad(f.name, value, "a whole number from 1 up", "give a positive number")
        if self.num_heads % self.num_kv_heads:
            raise _bad(
                "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}", "change one of the two"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise _bad("head_dim", self.head_dim, "an even number, as rope turns pairs", f"try {self.head_dim + 1}")
        if not 0 <= self.dropout < 1:
            raise _bad("dropout", self.dropout, "a rate from 0 up to but not including 1", "0.1 is GPT-2's")
        if not 1 <= self.rope_theta < math.inf:
            raise _bad("rope_theta", self.rope_theta, "a number from 1 up", "10000 and 500000 are usual ones")
        if not 0 <= self.norm_eps < math.inf:
            raise _bad("norm_eps", self.norm_eps, "zero or a small positive number", "1e-5 is a usual one")


@dataclass(frozen=True)
class TrainConfig:
    """The training step around the model. One device for now."""

    seq_len: int = _help(1024, "tokens per sequence")
    optimizer: Literal["adamw"] = _help("adamw", "optimizer (optax)")
    loss: Literal["full"] = _help("full", "cross-entropy over all logits at once")
    learning_rate: float = _help(3e-4, "constant learning rate")
    weight_decay: float = _help(0.1, "AdamW's decoupled weight decay")
    seed: int = _help(0, "seed of initial values, batches and dropout")

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise _bad("seq_len", self.seq_len, "a whole number from 1 up", "give a positive number")
        if not 0 < self.learning_rate < math.inf:
            raise _bad("learning_rate", self.learning_rate, "a positive number", "3e-4 is a usual one")
        if not 0 <= self.weight_decay < math.inf:
            raise _bad("weight_decay", self.weight_decay, "zero or a positive number", "0.1 is a usual one")
        if not 0 <= self.seed < 2**32:
            raise _bad("seed", self.seed, f"a whole number from 0 to {2**32 - 1}", "0 is the default")


def check(model: ModelConfig, train: TrainConfig) -> None:
    """Raises UsageError where `model` and `train` can't go together."""
    if model.positions == "learned" and train.seq_len > model.max_seq_len:
        raise _bad(
            "seq_len",
            train.seq_len,
            f"up to {model.name}'s {model.max_seq_len} learned positions",
            f"--max-seq-len {train.seq_len} makes the table longer (and the parameters more)",
        )


def override(config: Any, **changes: Any) -> Any:
    """`config` with the changes that aren't None."""
    return replace(config, **{name: value for name, value in changes.items() if value is not None})


def _bad(name: str, value: Any, allowed: str, next_step: str) -> UsageError:
    return UsageError(f"--{name.replace('_', '-')} got {value!r}", allowed=allowed, next_step=next_step)
