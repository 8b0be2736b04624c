"""Converts trees of parameters between the two layouts of repeated layers.

Scanned layers have one subtree, whose arrays have the layers on their first axis. Unrolled, each layer has a subtree
of its own:

    {"layers": {"kernel": f32[12, 8, 8]}}                                            scanned (--scan-layers True)
    {"layers": {"layer_0": {"kernel": f32[8, 8]}, ..., "layer_11": {...}}}           unrolled (--scan-layers False)

The values stay as they are, bit by bit. A train state converts as well: its optimizer has trees like that of the parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxremat.errors import UsageError

Tree = Any


def unstack_layers(tree: Tree, name: str = "layers") -> Tree:
    """A tree with a subtree for each layer: what the model with `scan_layers=False` takes.

    The values stay the same.

    Args:
        tree: a tree of arrays or of shapes (`jax.ShapeDtypeStruct`), such as parameters or a train state.
        name: the key of the stacked subtrees. Each of their leaves has the layers on its first axis.

    Raises:
        UsageError: the leaves under `name` have different numbers of layers, or there is no such subtree.
    """

    def unstack(stacked: Tree) -> Tree:
        numbers = sorted({leaf.shape[0] if jnp.shape(leaf) else 0 for leaf in jax.tree.leaves(stacked)})
        is_unrolled = not _is_mapping(stacked) or (
            bool(stacked) and {*stacked} == {f"layer_{i}" for i in range(len(stacked))}
        )
        if is_unrolled or len(numbers) != 1 or not numbers[0]:
            raise UsageError(
                f"the subtree {name!r} isn't one of stacked layers: the first axes of its leaves have {numbers} elements",
                allowed="a mapping whose arrays all have the layers on their first axis",
                cause="its layers are unrolled already, or it holds something beside them",
            )
        return {f"layer_{i}": jax.tree.map(lambda leaf, i=i: _slice(leaf, i), stacked) for i in range(numbers[0])}

    return _converted(tree, lambda key, subtree: unstack(subtree) if key == name else None, f"subtree {name!r}")


def stack_layers(tree: Tree) -> Tree:
    """A tree with one subtree for all layers: what the model with `scan_layers=True` takes.

    The values stay the same.

    Args:
        tree: a tree of arrays or of shapes (`jax.ShapeDtypeStruct`). A subtree whose keys are `layer_0`, `layer_1`,
            ... is stacked.

    Raises:
        UsageError: the layers of such a subtree differ in their paths, shapes or dtypes, or there is no such subtree.
    """

    def stack(_: Any, subtree: Tree) -> Tree:
        if not isinstance(subtree, Mapping) or not subtree or {*subtree} != {f"layer_{i}" for i in range(len(subtree))}:
            return None
        layers = [subtree[f"layer_{i}"] for i in range(len(subtree))]
        kinds = {str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), layer)) for layer in layers}
        if len(kinds) > 1:
            raise UsageError(
                f"{len(layers)} layers can't be stacked: they differ in their paths, shapes or dtypes",
                allowed="layers that are alike, as a scan runs one of them many times",
            )
        return jax.tree.map(_stack_leaves, *layers)

    return _converted(tree, stack, "subtree with the keys layer_0, layer_1 and so on")


def _converted(tree: Tree, convert: Callable[[Any, Tree], Tree | None], wanted: str) -> Tree:
    """`tree` with each subtree replaced for which `convert(key, subtree)` isn't None."""
    found = False

    def of_mapping(key: Any, subtree: Tree) -> Tree:
        nonlocal found
        if (converted := convert(key, subtree)) is not None:
            found = True
            return converted
        if isinstance(subtree, Mapping):
            return {inner: of_mapping(inner, value) for inner, value in subtree.items()}
        return jax.tree.map(lambda some: of_mapping(None, some) if _is_mapping(some) else some, subtree, is_leaf=_is_mapping)

    result = of_mapping(None, tree)
    if not found:
        raise UsageError(f"the tree has no {wanted}")
    return result


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _slice(leaf: Any, i: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i]


def _stack_leaves(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
    return jnp.stack(leaves)
