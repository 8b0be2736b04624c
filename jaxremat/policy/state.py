"""A call as a function of arrays alone, whatever it is called with.

    with on_arrays(loss, (model, batch, 2), {}) as call:
        outputs = transformed(call.function)(call.arrays)   # arrays in, arrays out
        value = call.results(outputs)                       # what loss(model, batch, 2) returns

Arguments and results that aren't arrays, such as numbers and texts, stay as they are.

A Flax NNX object (a module, a variable, an `nnx.Rngs`) holds state that the call may change: the counter of a dropout's keys, the
mean of a BatchNorm. Each object is split into its graph and its arrays, and `call.function` works on a copy of the object. It
returns the new arrays beside the results. `call.results` writes them into the caller's own object. Variables that are shared,
also between arguments, stay shared. Variables that the call adds, removes or replaces are the caller's too.

Flax NNX is imported only by programs that use it.

References:
    `flax.nnx.split_inputs` and `flax.nnx.merge_inputs`, which work alike; `flax.nnx.update_context`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxremat.errors import UsageError
from jaxremat.policy.tree import combine, is_array, partition

_TAG = "jaxremat"


@dataclass(frozen=True, eq=False)
class ArrayCall:
    """A call as a function of arrays.

    Attributes:
        function: from arrays in the form of `arrays` to the arrays among the results.
        arrays: the arrays among the arguments, as `(args, kwargs)` with None in place of all else.
        results: from what `function` returned to what the call returns. It also updates the NNX objects among the arguments.
    """

    function: Callable[[Any], Any]
    arrays: tuple[Any, Any]
    results: Callable[[Any], Any]


@contextlib.contextmanager
def on_arrays(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[ArrayCall]:
    """`function(*args, **kwargs)` as a function of arrays. The parts of the call may be used only inside of the context.

    Raises:
        UsageError: the function changes an NNX object that isn't among its arguments.
    """
    with _refused_changes(), _without_objects(function, tuple(args), dict(kwargs)) as (of_trees, trees, results):
        arrays, rest = partition(trees, _is_input)
        other_results: list[Any] = []

        def of_arrays(arrays: Any) -> Any:
            found, others = partition(of_trees(*combine(arrays, rest)), is_array)
            other_results[:] = [others]
            return found

        yield ArrayCall(of_arrays, arrays, lambda found: results(combine(found, *other_results)))


def is_object(leaf: Any) -> bool:
    """Whether something is an object of Flax NNX: a module, a variable, or anything else with state."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (isinstance(leaf, nnx.Variable) or nnx.graph.is_graph_node(leaf))


def refused_change(error: BaseException) -> UsageError | None:
    """The UsageError for Flax's error that an NNX object can't be changed. None for another error."""
    if type(error).__name__ != "TraceContextError":
        return None
    return UsageError(
        f"a function changes the state of an NNX object that isn't among its arguments ({error})",
        allowed="changes of the models, nnx.Rngs and variables that the function is called with",
        cause="the object, or the state that nnx.merge makes it of, comes from outside of the function; or the change is inside "
        "of a jax transformation, such as jax.lax.scan in place of nnx.scan",
        next_step="give the object to the function: loss(model, batch); for a Workload, params=model",
    )


@contextlib.contextmanager
def _refused_changes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise refused_change(error) or error from error


#: A call of trees of arrays: its function of `(args, kwargs)`, these arguments, and what makes the call's results.
_TreeCall = tuple[Callable[[Any, Any], Any], tuple[Any, Any], Callable[[Any], Any]]


@contextlib.contextmanager
def _without_objects(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_TreeCall]:
    """`function(*args, **kwargs)` with every NNX object split into its graph, which JAX compares, and its arrays."""
    if not any(map(is_object, jax.tree.leaves((args, kwargs), is_leaf=is_object))):
        yield lambda args, kwargs: function(*args, **kwargs), (args, kwargs), lambda results: results
        return
    from flax import nnx

    def of_trees(*trees: Any) -> Any:
        args, kwargs = nnx.from_tree(trees, ctxtag=_TAG, is_inner=True)
        before = jax.tree.flatten(nnx.to_tree((args, kwargs)))
        results = function(*args, **kwargs)
        changed = not _same(before, jax.tree.flatten(nnx.to_tree((args, kwargs))))
        return nnx.to_tree((_objects((args, kwargs)) if changed else None, results), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        trees = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        yield of_trees, trees, lambda found: nnx.from_tree(found, ctxtag=_TAG, is_inner=False)[1]


def _objects(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_object) if is_object(leaf)]


def _same(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> bool:
    """Whether two flattened trees are equal, and hold the same arrays."""
    return before[1] == after[1] and all(a is b for a, b in zip(before[0], after[0], strict=True))


def _is_input(leaf: Any) -> bool:
    """Whether a leaf of the arguments is given as an array. NumPy arrays are, such as the batches of a data loader."""
    numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUMm"
    return numbers or is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
