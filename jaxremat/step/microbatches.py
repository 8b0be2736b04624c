"""How the microbatches of a step lie in its batch: stacked, joined, or shared by all.

    step_batch(workload, 4)             # shapes: [4, batch, d] of x, and [512, 512] of frozen weights, which don't grow
    parts, whole = split(workload, 4, batch)
    jax.lax.scan(lambda carry, part: (carry + loss(params, whole(part)), None), 0.0, parts)

An array with samples is stacked on a new first axis, or joined along its axis of samples if `Workload.joined_microbatches`.
Scalars and random keys are stacked. An array that is the same for all microbatches is there once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxremat.errors import UsageError
from jaxremat.workload.samples import LeafSamples
from jaxremat.workload.workload import Workload


@dataclass(frozen=True)
class Place:
    """How the microbatches of one array lie in a step's batch.

    Attributes:
        way: whether they are stacked, joined, or one.
        axis: the axis of one microbatch that counts samples. None for an array without one.
    """

    way: Literal["stacked", "joined", "shared"]
    axis: int | None


def places(workload: Workload) -> Any:
    """How the microbatches of each array lie, in the structure of the workload's batch."""

    def place(of: LeafSamples) -> Place:
        if of.is_shared:
            return Place("shared", None)
        return Place("joined" if workload.joined_microbatches and of.axis is not None else "stacked", of.axis)

    return jax.tree.unflatten(jax.tree.structure(workload.batch), [place(of) for of in workload.counted.leaves])


def step_batch(workload: Workload, accumulate: int) -> Any:
    """The shapes of a step's batch, which holds `accumulate` microbatches."""
    if accumulate == 1:
        return workload.abstract_batch

    def several(place: Place, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if place.way == "shared":
            return leaf
        shape, sharding = (accumulate, *leaf.shape), leaf.sharding
        if place.way == "joined":
            shape = tuple(accumulate * size if n == place.axis else size for n, size in enumerate(leaf.shape))
        elif isinstance(sharding, NamedSharding):
            sharding = sharding.update(spec=PartitionSpec(None, *sharding.spec))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(several, places(workload), workload.abstract_batch)


def sample_axes(workload: Workload, accumulate: int) -> list[int | None]:
    """For each array of a step's batch, the axis that counts the samples of a microbatch.

    None for an array without one.
    """
    return [
        None if place.axis is None else place.axis + (accumulate > 1 and place.way == "stacked")
        for place in jax.tree.leaves(places(workload))
    ]


def split(workload: Workload, accumulate: int, batch: Any) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
    """A step's batch for a scan over its microbatches.

    Returns:
        The arrays that differ by microbatch, with the microbatches on a first axis; and a function that makes a whole microbatch
        of the arrays of one.
    """
    leaves, tree = jax.tree.flatten(batch)
    by_leaf = list(zip(leaves, jax.tree.leaves(places(workload)), strict=True))

    def apart(leaf: jax.Array, place: Place) -> jax.Array:
        if place.way == "stacked":
            return leaf
        assert place.axis is not None, "only an array with samples is joined"
        chex.assert_is_divisible(leaf.shape[place.axis], accumulate)
        before, (size, *after) = leaf.shape[: place.axis], leaf.shape[place.axis :]
        return jnp.moveaxis(leaf.reshape(*before, accumulate, size // accumulate, *after), place.axis, 0)

    def whole(part: Sequence[Any]) -> Any:
        own = iter(part)
        return tree.unflatten([leaf if place.way == "shared" else next(own) for leaf, place in by_leaf])

    return [apart(leaf, place) for leaf, place in by_leaf if place.way != "shared"], whole


def joined(workload: Workload, microbatches: Sequence[Any]) -> Any:
    """The batch of a step, of arrays, from its microbatches.

    Raises:
        UsageError: microbatches differ in an array that a step has once.
    """

    def one(path: tuple[Any, ...], place: Place, *leaves: Any) -> Any:
        first, *others = leaves
        if place.way == "shared":
            if not all(other is first or _equal(first, other) for other in others):
                raise _not_shared(jax.tree_util.keystr(path))
            return first
        library: Any = jnp if jnp.issubdtype(first.dtype, jax.dtypes.extended) else np
        return library.concatenate(leaves, axis=place.axis) if place.way == "joined" else library.stack(leaves)

    return jax.tree_util.tree_map_with_path(one, places(workload), *microbatches)


def _equal(a: Any, b: Any) -> bool:
    """Whether two arrays are the same bit for bit. NaN equals itself then."""
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _not_shared(path: str) -> UsageError:
    return UsageError(
        f"the microbatches of a step differ in batch{path}",
        allowed="one value for all, as the array doesn't grow with the keyword batch",
        cause="with --accumulate, a step has an array that doesn't grow once",
        next_step="give the array an axis of samples, or leave --accumulate and --global-batch out",
    )
