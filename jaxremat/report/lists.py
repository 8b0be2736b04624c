"""`--list`: what there is to choose from."""

from rich.table import Table

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.model.presets import PRESETS
from jaxremat.policy.spec import JAX_ALIASES, MAXTEXT_ALIASES
from jaxremat.report.table import list_table
from jaxremat.units import gib
from jaxremat.xla.gpu import bundled_names, load_gpu

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
)


def policies(model: ModelConfig, train: TrainConfig, batches: tuple[int, ...]) -> Table:
    """The grammar, then the aliases from JAX and MaxText."""
    aliases = [(alias, f"= {text.replace(',', ', ')}") for alias, text in (JAX_ALIASES | MAXTEXT_ALIASES).items()]
    return list_table("policies", ("policy", "what a layer keeps"), [*_POLICIES, *aliases], left=2)


def models(model: ModelConfig, train: TrainConfig, batches: tuple[int, ...]) -> Table:
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


def targets(model: ModelConfig, train: TrainConfig, batches: tuple[int, ...]) -> Table:
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


def names(model: ModelConfig, train: TrainConfig, batches: tuple[int, ...]) -> Table:
    """The checkpoint names of the model's layers, with their bytes at the (first) batch asked for, else 1."""
    from jaxremat.model.transformer import layer_names

    batch = batches[0] if batches else 1
    rows = [
        (v.name, "x".join(map(str, v.shape)), v.dtype, f"{v.num_bytes / 2**20:,.2f}", gib(v.num_bytes * model.num_layers, 3))
        for v in layer_names(model, batch, train.seq_len)
    ]
    title = f"checkpoint names of {model.name} at batch {batch}, sequence {train.seq_len}"
    return list_table(title, ("name", "shape", "dtype", "MiB a layer", f"x {model.num_layers} layers"), rows)
