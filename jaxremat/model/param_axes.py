"""The logical axes of the decoder's parameters.

The rules of `mesh/sharding.py` say which axis of a mesh divides each.
"""

from typing import Any

#: By the name of a parameter's subtree and its own name, the logical axes of its dimensions, without that of the layers.
LOGICAL_AXES: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("query", "kernel"): ("embed", "heads", "head_dim"),
    ("query", "bias"): ("heads", "head_dim"),
    **dict.fromkeys([(name, "kernel") for name in ("key", "value")], ("embed", "kv_heads", "head_dim")),
    **dict.fromkeys([(name, "bias") for name in ("key", "value")], ("kv_heads", "head_dim")),
    ("out", "kernel"): ("heads", "head_dim", "embed"),
    **dict.fromkeys([(name, "kernel") for name in ("wi_0", "wi_1")], ("embed", "mlp")),
    ("wo", "kernel"): ("mlp", "embed"),
    **dict.fromkeys([("mlp", "wi_0"), ("mlp", "wi_1")], ("expert", "expert_embed", "mlp")),  # those of experts
    ("mlp", "wo"): ("expert", "mlp", "expert_embed"),
    ("router", "kernel"): ("embed", None),
    ("embedding", "embedding"): ("vocab", "embed"),
    ("", "position"): ("positions", "embed"),
    ("", "output"): ("embed", "vocab"),
}


def logical_axes(path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """The logical axes of a parameter's dimensions.

    None for those of norms and biases, and for the layers of a stack.

    For example, the query kernel of stacked layers has the axes (None, `embed`, `heads`, `head_dim`).

    Args:
        path: the parameter's path, as `jax.tree_util.tree_map_with_path` gives it.
        shape: the parameter's shape, stacked or not.
    """
    keys = ["", *(getattr(key, "key", str(key)) for key in path)]
    axes = LOGICAL_AXES.get((keys[-2], keys[-1])) or _beside_kernel(keys[-1], keys[-2])
    return (None,) * (len(shape) - len(axes)) + axes


def _beside_kernel(name: str, layer: str) -> tuple[str | None, ...]:
    """The axes of what a linear layer has beside its kernel.

    That are an adapter's parts, and the scales of a quantized kernel.
    """
    axes = LOGICAL_AXES.get((layer, "kernel"), ())
    num_in = 2 if layer == "out" else 1
    by_name = {"lora_a": (*axes[:num_in], None), "lora_b": (None, *axes[num_in:]), "kernel_scale": (None, *axes[num_in:])}
    return by_name.get(name, ()) if axes else ()
