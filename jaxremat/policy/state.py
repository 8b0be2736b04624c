"""A call as a function of arrays alone, whatever it is called with.

    with on_arrays(loss, (model, batch, 2), {}) as call:
        outputs = transformed(call.function)(call.arrays)   # a list of arrays in, another one out
        value = call.results(outputs)                       # what loss(model, batch, 2) returns

Arguments and results that aren't arrays, such as numbers and texts, stay as they are.

A Flax NNX object (a module, a variable, an `nnx.Rngs`) holds state that the call may change: the counter of a dropout's keys, the
mean of a BatchNorm. Each object is split into its graph and its arrays, and `call.function` works on a copy of the object. It
returns the new arrays beside the results. `call.results` writes them into the caller's own object. Variables that are shared,
also between arguments, stay shared. Variables that the call adds, removes or replaces are the caller's too.

Neither Flax nor Equinox is imported here, except by programs that use them.

References:
    `flax.nnx.split_inputs` and `flax.nnx.merge_inputs`, which work alike; `flax.nnx.update_context`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import numpy as np

from jaxremat.errors import UsageError
from jaxremat.policy.tree import combine, is_array, is_float, partition, partition_by, path_text

if TYPE_CHECKING:
    import flax.linen as nn

_TAG = "jaxremat"


@dataclass(frozen=True, eq=False)
class ArrayCall:
    """A call as a function of arrays.

    Attributes:
        function: from a list of arrays, as `arrays`, to the list of the arrays among the results.
        arrays: the arrays among the arguments.
        num_first: how many of them are the first argument's.
        results: from what `function` returned to what the call returns. It also updates the NNX objects among the arguments.
    """

    function: Callable[[Sequence[Any]], list[Any]]
    arrays: list[Any]
    num_first: int
    results: Callable[[Sequence[Any]], Any]


@contextlib.contextmanager
def on_arrays(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[ArrayCall]:
    """`function(*args, **kwargs)` as a function of arrays.

    The parts of the call may be used only inside of the context.

    Raises:
        UsageError: the function changes an NNX object that isn't among its arguments, or there are NNX variables of the
            experimental kinds that are changed in place (`ref`, `hijax`).
    """
    with _refused_changes(), _without_objects(function, tuple(args), dict(kwargs)) as (of_trees, trees, results):
        arrays, rest = partition(trees, _is_input)
        leaves, structure = jax.tree.flatten(arrays)
        of_results: list[Any] = []

        def of_arrays(leaves: Sequence[Any]) -> list[Any]:
            found, others = partition(of_trees(*combine(jax.tree.unflatten(structure, leaves), rest)), is_array)
            outputs, form = jax.tree.flatten(found)
            of_results[:] = [form, others]
            return outputs

        def whole(outputs: Sequence[Any]) -> Any:
            form, others = of_results
            return results(combine(jax.tree.unflatten(form, outputs), others))

        yield ArrayCall(of_arrays, leaves, len(jax.tree.leaves(arrays[0][:1])), whole)


def is_object(leaf: Any) -> bool:
    """Whether something is an object of Flax NNX.

    That is a module, a variable, or anything else with state.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (isinstance(leaf, nnx.Variable) or nnx.graphlib.is_graph_node(leaf))


def has_objects(tree: Any) -> bool:
    """Whether a tree has objects of Flax NNX among its leaves."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def is_module_class(target: Any) -> bool:
    """Whether something is a module class of Flax NNX or Equinox, whose instances can be called."""
    return _is_class_of(target, "flax.nnx", "equinox") and any("__call__" in vars(base) for base in target.__mro__)


def is_linen_class(target: Any) -> bool:
    """Whether something is a module class of Flax Linen."""
    return _is_class_of(target, "flax.linen")


def is_linen(target: Any) -> "TypeGuard[nn.Module]":
    """Whether something is a module of Flax Linen, an instance of such a class."""
    return is_linen_class(type(target))


def _is_class_of(target: Any, *libraries: str) -> bool:
    """Whether something is a module class of one of the libraries.

    A library that nobody has imported has made none.
    """
    bases = [getattr(sys.modules.get(name), "Module", None) for name in libraries]
    return isinstance(target, type) and any(base is not None and issubclass(target, base) for base in bases)


def split_trained(params: Any, trains: Callable[[str], bool] | None = None) -> tuple[Any, Any]:
    """`params` with only the leaves that are trained, and `params` with only the others.

    The leaves left out are None.

    The floating-point leaves are trained. In an NNX object only those of an `nnx.Param` are, as for `nnx.grad`: the others are
    state, such as the mean of a BatchNorm. Of these leaves, `trains` may choose some by their paths.
    """

    def of_object(leaf: Any) -> Any:
        from flax import nnx

        def of_part(part: Any) -> Any:
            is_param = isinstance(part, nnx.Param)
            return jax.tree.map(lambda array: is_param and is_float(array), part)

        return jax.tree.map(of_part, leaf, is_leaf=lambda part: isinstance(part, nnx.Variable))

    is_trained = jax.tree.map(lambda leaf: of_object(leaf) if is_object(leaf) else is_float(leaf), params, is_leaf=is_object)
    if trains is not None:
        is_trained = jax.tree_util.tree_map_with_path(lambda path, mine: mine and trains(path_text(path)), is_trained)
    return partition_by(params, is_trained)


def with_objects(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which returns a pair: its results, and the NNX objects among its arguments.

    `jax.jit` gives a function copies of the objects. What the function changes of them is computed only where it is returned.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args), _objects(args)

    return call


def shared_variable(tree: Any) -> str:
    """The two paths of an NNX variable that objects of a tree share. Empty if there is none.

    To JAX they are two variables.

    An `nnx.State` has each variable once. A tree that has one such state several times, as shapes of equal layers, has copies.
    """
    if not has_objects(tree):
        return ""
    from flax import nnx

    seen: dict[int, str] = {}
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable | nnx.State)):
        if isinstance(leaf, nnx.Variable) and id(leaf) in seen:
            return f"{seen[id(leaf)]} and {jax.tree_util.keystr(path)}"
        seen[id(leaf)] = jax.tree_util.keystr(path)
    return ""


def refused_change(error: BaseException) -> UsageError | None:
    """The UsageError for Flax's error that an NNX object can't be changed.

    None for another error.
    """
    if type(error).__name__ != "TraceContextError":
        return None
    return UsageError(
        f"a function changes the state of an NNX object that isn't among its arguments ({str(error).partition(' (http')[0]})",
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
        if refused := refused_change(error):
            raise refused from error
        raise


#: A call of trees of arrays: its function of `(args, kwargs)`, these arguments, and what makes the call's results.
_TreeCall = tuple[Callable[[Any, Any], Any], tuple[Any, Any], Callable[[Any], Any]]


@contextlib.contextmanager
def _without_objects(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_TreeCall]:
    """A call with every NNX object split into its graph, which JAX compares, and its arrays."""
    if not has_objects((args, kwargs)):
        yield lambda args, kwargs: function(*args, **kwargs), (args, kwargs), lambda results: results
        return
    from flax import nnx

    for _, found in nnx.iter_graph((args, kwargs), graph=True):
        if isinstance(found, nnx.Variable) and (found.ref or found.hijax):
            raise UsageError(
                f"a {type(found).__name__} that is changed in place among the arguments (ref={found.ref}, hijax={found.hijax})",
                allowed="variables with ref=False and hijax=False, which is Flax's default",
                next_step="make the model under nnx.var_defaults(ref=False, hijax=False)",
            )

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
    """Whether a leaf of the arguments is given as an array.

    NumPy arrays are, such as the batches of a data loader.
    """
    numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUMm"
    return numbers or is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
