"""Splits a pytree into the leaves that a transformation works on and the others.

It also puts the two together again, and takes slices.

    arrays, rest = partition({"x": x, "rate": 0.1}, is_array)    {"x": x, "rate": None} and {"x": None, "rate": 0.1}
    combine(arrays, rest)                                        {"x": x, "rate": 0.1}

References:
    Equinox, `equinox.partition` and `equinox.combine`, which work alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def take(tree: Any, start: Any, count: int) -> Any:
    """The entries from `start` on of stacked arrays, `count` of them."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, count), tree)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a JAX array, a traced one included."""
    return isinstance(leaf, jax.Array)


def is_float(leaf: Any) -> bool:
    """Whether something with a dtype is floating-point or complex, so that it is differentiated."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def path_text(path: Sequence[Any]) -> str:
    """The path of a leaf as text, such as `layers/mlp/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def partition(tree: Any, chosen: Callable[[Any], bool]) -> tuple[Any, Any]:
    """`tree` with only its chosen leaves, and `tree` with only its other leaves.

    The leaves left out are None.
    """
    return partition_by(tree, jax.tree.map(chosen, tree))


def partition_by(tree: Any, is_chosen: Any) -> tuple[Any, Any]:
    """`tree` with only its chosen leaves, and `tree` with only the others, by a tree of bools."""
    return (
        jax.tree.map(lambda leaf, mine: leaf if mine else None, tree, is_chosen),
        jax.tree.map(lambda leaf, mine: None if mine else leaf, tree, is_chosen),
    )


def combine(chosen: Any, others: Any) -> Any:
    """The tree that `partition` split."""
    return jax.tree.map(lambda a, b: b if a is None else a, chosen, others, is_leaf=lambda leaf: leaf is None)
