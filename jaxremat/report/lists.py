"""`--list`: what there is to choose from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from jaxremat.model.presets import PRESETS
from jaxremat.policy.spec import JAX_ALIASES, MAXTEXT_ALIASES
from jaxremat.report.table import list_table
from jaxremat.units import gib
from jaxremat.xla.gpu import bundled_names, load_gpu

if TYPE_CHECKING:
    from jaxremat.policy.names import NamedValue

_POLICIES = (
    ("none", "no wrapper: what differentiation asks for is kept"),
    ("everything", "checkpointed, and every value kept"),
    ("nothing", "only each layer's input; the layer is run again"),
    ("dots", "the results of matmuls"),
    ("dots-no-batch", "the results of matmuls without batch dimensions"),
    ("save:NAME,...", "the tensors with these checkpoint names"),
    ("offload:NAME,...", "the same, kept in pinned host memory; joins save: with +"),
    ("RULE+attention", "any of the above, and fused attention's outputs"),
    ("every:K", "only the input of each group of K layers"),
    ("every:sqrt", "every:K with K the rounded root of the layers"),
    ("every:K+INNER", "the same, with a policy for the layers while a group is run again"),
    ("one-in:K", "the first of every K layers run again, the others left as they are"),
    ("N*POLICY|N*POLICY", "N layers by one policy, the next N by another, and again; of names, in quotes"),
)


def policies() -> Table:
    """The grammar, then the aliases from JAX and MaxText."""
    aliases = [(alias, f"= {text.replace(',', ', ')}") for alias, text in (JAX_ALIASES | MAXTEXT_ALIASES).items()]
    return list_table("policies", ("policy", "what a layer keeps"), [*_POLICIES, *aliases], left=2)


def models() -> Table:
    """The presets with their sizes."""
    rows = [
        (
            name,
            f"{p.num_params:,}",
            str(p.config.num_layers),
            str(p.config.embed_dim),
            f"{p.config.vocab_size:,}",
            str(p.seq_len),
        )
        for name, p in PRESETS.items()
    ]
    return list_table("models", ("model", "parameters", "layers", "width", "vocabulary", "seq-len"), rows)


def targets() -> Table:
    """The GPUs that can be compiled for without having them."""
    rows = [
        ("gpu", "the attached NVIDIA GPU", "", "", ""),
        ("cpu", "this machine's CPU (memory not a GPU's)", "", "", ""),
    ]
    for name in bundled_names():
        _, gpu = load_gpu(name)
        major, minor = gpu.compute_capability
        peak = f"{gpu.peak_bf16_flops / 1e12:,.0f}" if gpu.peak_bf16_flops else "-"
        rows.append((name, gpu.description, gib(gpu.device_memory_size), f"{major}.{minor}", peak))
    return list_table("targets", ("target", "device", "memory", "cc", "bf16 TFLOP/s"), rows, left=2)


_OPTIMIZERS = {
    "adamw": "two moments",
    "adamw-bf16": "the first moment in bfloat16",
    "lion": "one moment, whose sign is the update",
    "sgd-momentum": "one moment",
    "adafactor": "row and column sums of each matrix's second moment",
    "muon": "one moment, orthogonalized, for the layers' kernels; AdamW for the others",
}


def optimizers(model: str, num_params: int, state_bytes: dict[str, int]) -> Table:
    """The optimizers with the bytes of their state, counted on the model's own parameters."""
    rows = [
        (name, _OPTIMIZERS[name], f"{num_bytes / num_params:.3f}", gib(num_bytes)) for name, num_bytes in state_bytes.items()
    ]
    title = f"optimizers: state of {model}, {num_params:,} parameters"
    return list_table(title, ("optimizer", "keeps", "bytes a parameter", "state"), rows, left=2)


def names(title: str, values: "Sequence[NamedValue]", num_layers: int) -> Table:
    """The checkpoint names of a layer's values, with their bytes in one layer and in all."""
    rows = [
        (v.name, "x".join(map(str, v.shape)), v.dtype, f"{v.num_bytes / 2**20:,.2f}", gib(v.num_bytes * num_layers))
        for v in values
    ]
    return list_table(title, ("name", "shape", "dtype", "MiB a layer", f"x {num_layers} layers"), rows)
