"""The axes of a batch that count its samples: they grow with the `batch` of the factory.

    grown = growth("mlp", 8, batch_of(8), 16, batch_of(16))
    grown.samples(32, batch_of(32))     # Samples(number=32, leaves=(LeafSamples(axis=1), LeafSamples(is_shared=True)))

An array may grow along any axis, by any number of rows a sample, and from any size: `[time, batch, d]`, `[batch * seq, d]`,
`[2 * batch, d]` and `[batch + 1]` all do. An array that doesn't grow is the same for all microbatches, such as a mask or frozen
weights. Scalars and random keys are an exception: each microbatch has its own.

A batch without a factory can't be compared with another one. Its samples are the leading axis on which its arrays agree.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from jaxremat.errors import UsageError


@dataclass(frozen=True)
class LeafSamples:
    """How one array of a batch counts samples.

    Attributes:
        axis: the axis that grows with the batch, the first of several. None if no axis does.
        is_shared: whether all microbatches have the same value.
    """

    axis: int | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class Samples:
    """The samples of a batch.

    Attributes:
        number: how many there are. None where nobody knows.
        leaves: how each array counts them, in the order of the batch's tree.
    """

    number: int | None
    leaves: tuple[LeafSamples, ...]


@dataclass(frozen=True)
class Growth:
    """How the arrays of a batch grow with the number of its samples.

    Attributes:
        name: what the workload is called in errors.
        names: the path of each array.
        dims: for each axis of each array, its size at batch 0 and the rows that a sample adds.
    """

    name: str
    names: tuple[str, ...]
    dims: tuple[tuple[tuple[Fraction, Fraction], ...], ...]

    def samples(self, number: int, batch: Any) -> Samples:
        """The samples of `batch`, the shapes that the factory made for this number of samples.

        Raises:
            UsageError: an array has another size than one that grows evenly would have.
        """
        names, leaves = _named_leaves(batch)
        if names != self.names:
            raise _uneven(self.name, f"its batch at {number} has another structure than at other batches")
        for name, leaf, dims in zip(names, leaves, self.dims, strict=True):
            even = [base + rate * number for base, rate in dims]
            if list(leaf.shape) != even:
                expected = ", ".join(str(size) for size in even)
                raise _uneven(
                    self.name, f"{name} is {list(leaf.shape)} at batch {number}, where even growth makes [{expected}]"
                )
        axes = [next((n for n, (_, rate) in enumerate(dims) if rate), None) for dims in self.dims]
        return Samples(
            number, tuple(LeafSamples(axis, _is_shared(leaf, axis)) for leaf, axis in zip(leaves, axes, strict=True))
        )


def growth(name: str, number: int, batch: Any, other_number: int, other_batch: Any) -> Growth:
    """How a batch grows, from the shapes that a factory made for two numbers of samples.

    Args:
        name: what the workload is called in errors.
        number: samples of `batch`.
        batch: the shapes of a batch.
        other_number: samples of `other_batch`, another number.
        other_batch: the shapes of another batch.

    Raises:
        UsageError: nothing grows, or something shrinks, or the arrays differ in more than their sizes.
    """
    (names, leaves), (other_names, others) = _named_leaves(batch), _named_leaves(other_batch)
    if names != other_names:
        two = f"{len(leaves)} arrays at {number} and {len(others)} at {other_number}"
        raise _uneven(name, f"its batch has {two}, in different structures")
    dims = []
    for of, leaf, other in zip(names, leaves, others, strict=True):
        two = f"{of} is {leaf.dtype}{list(leaf.shape)} at batch {number} and {other.dtype}{list(other.shape)} at {other_number}"
        if (leaf.dtype, leaf.ndim) != (other.dtype, other.ndim):
            raise _uneven(name, two)
        rates = [Fraction(b - a, other_number - number) for a, b in zip(leaf.shape, other.shape, strict=True)]
        bases = [size - rate * number for size, rate in zip(leaf.shape, rates, strict=True)]
        if any(rate < 0 or base + rate < 0 for base, rate in zip(bases, rates, strict=True)):
            raise _uneven(name, two)
        dims.append(tuple(zip(bases, rates, strict=True)))
    if not any(rate for of_leaf in dims for _, rate in of_leaf):
        raise UsageError(
            f"{name} was called with batch {number} and {other_number}, and its batch has the same shapes at both",
            cause="samples are what grows with the keyword batch, and nothing does",
            next_step="use batch in the shapes of Workload(batch=...), or leave the keyword out for one batch",
        )
    return Growth(name, names, tuple(dims))


def _named_leaves(batch: Any) -> tuple[tuple[str, ...], list[Any]]:
    """The paths of the arrays of a batch, and the arrays.

    The paths are its structure. A tree may be made anew for each batch with functions of its own, as a `TrainState` is.
    """
    leaves = jax.tree.leaves_with_path(batch)
    return tuple(f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves), [leaf for _, leaf in leaves]


def samples_of_one(batch: Any) -> Samples:
    """The samples of a batch that can't be compared with another one.

    They are the leading axis of its arrays, if the arrays agree on it. Scalars, random keys, and arrays that begin with 1, which
    broadcast, don't count.
    """
    leaves = jax.tree.leaves(batch)
    arrays = [leaf for leaf in leaves if leaf.shape]
    sizes = {leaf.shape[0] for leaf in [leaf for leaf in arrays if not _is_like_a_key(leaf)] or arrays}
    larger = sizes - {1} or sizes
    number = next(iter(larger)) if len(larger) == 1 else None
    return Samples(number, tuple(LeafSamples(0 if number and leaf.shape[:1] == (number,) else None) for leaf in leaves))


def _is_shared(leaf: Any, axis: int | None) -> bool:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or _is_like_a_key(leaf)
    return axis is None and leaf.ndim > 0 and not is_key


def _is_like_a_key(leaf: Any) -> bool:
    """Whether an array has the shape and dtype of an old random key (`jax.random.PRNGKey`)."""
    return leaf.shape == (2,) and leaf.dtype == jnp.uint32


def _uneven(name: str, got: str) -> UsageError:
    return UsageError(
        f"the batch of {name} doesn't grow evenly: {got}",
        allowed="arrays with as many more rows for each further sample, along any axis",
        cause="samples are what grows with the keyword batch",
        next_step="pad or stack what has another size, give the number of microbatches a keyword of its own, or leave the "
        "keyword batch out for one batch",
    )
