"""The decoder of --model or --hf as the model of a request.

JAX is imported where its workloads are made.

named_decoder(None, "gpt2", {})    # Model("gpt2", losses=("full", "chunked"), num_layers=12, ...)
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxremat.config import ModelConfig, check, override
from jaxremat.model.flops import model_flops
from jaxremat.model.hf import read_hf
from jaxremat.model.on_mesh import check_mesh
from jaxremat.model.presets import preset
from jaxremat.workload.model import Model

if TYPE_CHECKING:
    from jaxremat.workload.factory import WorkloadFactory


def named_decoder(hf: str | None, name: str, fields: Mapping[str, Any]) -> Model:
    """The model of --hf, or the preset of --model.

    Args:
        hf: the path of a Hugging Face `config.json`. None takes the preset.
        name: the preset's name.
        fields: the fields that flags change.

    Raises:
        UsageError: there is no such model, or the fields don't go with it.
    """
    if hf is not None:
        found = read_hf(hf, fields)
        return _requested(found.config, found.seq_len, found.line())
    return _requested(override(preset(name).config, **fields), preset(name).seq_len)


def _requested(config: ModelConfig, seq_len: int, line: str = "") -> Model:

    def factory(request: Any, target: Any, attention: str | None) -> "WorkloadFactory":
        from jaxremat.model.attention import AttentionChoice, choose_attention
        from jaxremat.model.data import check_text, load_text
        from jaxremat.model.decoder_workload import decoder_factory

        if target is None:
            return decoder_factory(config, "xla")
        data, seq_len = request.flags.data, request.train.seq_len
        chosen = AttentionChoice(attention, "") if attention else choose_attention(config, seq_len, target)
        if data or (request.flags.trains and target.kind != "deviceless"):
            check_text(load_text(data), seq_len, config.vocab_size)
        return decoder_factory(config, chosen.implementation, chosen.reason, data)

    return Model(
        config.name,
        asdict(config),
        factory,
        line,
        has_own_batch=False,
        num_layers=config.num_layers,
        losses=("full", "chunked"),
        layouts=("loop", "unrolled") if config.num_layers > 1 else (),
        num_experts=config.num_experts,
        has_tensor=True,
        max_seq_len=config.max_seq_len if config.positions == "learned" else None,
        seq_len=seq_len,
        check=lambda train: check(config, train),
        flops_at=lambda seq_len: model_flops(config, 1, seq_len),
        check_mesh=lambda mesh: check_mesh(config, mesh),
        no_effect=dict(_no_effect(config)),
    )


def _no_effect(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """The fields that change nothing beside the others, each with the reason."""
    reasons = {
        "the layers have no experts (--num-experts)": (
            not config.has_experts, "experts_per_token", "normalize_routing", "router_loss", "dispatch"),
        "positions are learned (--positions)": (
            config.positions == "learned", "rope_theta", "rope_scaling", "rotary_fraction"),
        "positions are rope's, which isn't stretched": (
            config.positions == "rope" and not config.rope_scaling, "max_seq_len"),
        "no layer has a window (--sliding-window)": (not config.sliding_window, "window_pattern"),
        "queries and keys have no norm (--qk-norm)": (not config.qk_norm, "qk_norm_over"),
        "all projections have biases (--use-bias)": (config.use_bias, "qkv_bias", "out_bias", "mlp_bias"),
        "there are no adapters (--lora)": (not config.lora, "lora_alpha"),
        "the MLP has no GELU (--mlp)": (config.mlp == "swiglu", "exact_gelu"),
    }  # fmt: skip
    for reason, (holds, *names) in reasons.items():
        yield from ((str(name), reason) for name in names if holds)
