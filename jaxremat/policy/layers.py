"""`Layers`: a stack of equal Flax Linen modules under any policy.

    layers = jaxremat.Layers(Block(...), num_layers=12, policy="every:4+dots")

It takes every policy, also those for several layers (`every:K`, `one-in:K`, a mix). Flax is imported when `Layers` is called.
"""

from typing import TYPE_CHECKING, Any

from jaxremat.errors import MissingDependencyError, UsageError
from jaxremat.policy.spec import Policy
from jaxremat.policy.state import is_linen

if TYPE_CHECKING:
    import flax.linen as nn

    from jaxremat.policy import linen_stack

#: What stacks layers that aren't modules of Flax Linen.
_OTHER_WAYS = (
    "jaxremat.scan_layers(function, params, x) stacks a function, and jaxremat.with_policy(loss, policy) takes any model"
)


def Layers(
    layer: "nn.Module",
    num_layers: int,
    policy: Policy | str = "none",
    scan: bool = True,
    rngs: tuple[str, ...] = ("dropout",),
    **linen: Any,
) -> "linen_stack.Layers":
    """A Flax Linen module of `num_layers` copies of one layer, one after another.

    With `scan`, each of the layer's variables is stacked on a leading axis of `num_layers`, as `nn.scan` with
    `variable_axes={...: 0}` stacks it. Without `scan`, each layer has a subtree of its own: `layer_0`, `layer_1`, ...
    Layer i starts from the same values and draws the same dropout masks with and without `scan`, and under every policy.

    The module is called as `layers(x, *broadcast, own=())`. All layers read `broadcast`, and layer i reads `own[...][i]`.

    Args:
        layer: the Flax Linen module to repeat. It is called as `layer(x, *own, *broadcast)` and returns the next `x`, of the same
            shape and dtype. `x` is floating-point; integers (positions, masks) go in `broadcast`. What the layer sows is dropped.
        num_layers: the number of layers.
        policy: a `Policy` or its text. It may list names that the layer's author wrote, and names that `autoname` writes. In a
            scan, one that offloads is an error at the call where a GPU would compute wrong gradients (`offload.py`).
        scan: True for a scan over stacked variables, of which one layer is compiled; False for unrolled code.
        rngs: the random streams that the layer draws from when it is applied.
        linen: `name` and `parent`, as every Linen module takes them.

    Returns:
        A `jaxremat.policy.linen_stack.Layers`. That class is what a transform such as `nn.vmap` takes.

    Raises:
        MissingDependencyError: Flax isn't installed.
        UsageError: `layer` isn't a module of Flax Linen.
    """
    try:
        from jaxremat.policy import linen_stack
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"jaxremat.Layers stacks modules of Flax Linen, and the package {error.name} isn't installed",
            next_step=f"pip install flax; or without it {_OTHER_WAYS}",
        ) from error
    if not is_linen(layer):
        what = f"the class {layer.__name__}" if isinstance(layer, type) else f"a {type(layer).__name__}"
        raise UsageError(
            f"jaxremat.Layers got {what}",
            allowed="an instance of a Flax Linen module, such as Block(...)",
            next_step=_OTHER_WAYS,
        )
    return linen_stack.Layers(layer, num_layers, policy, scan, rngs, **linen)
