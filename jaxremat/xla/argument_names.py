"""Names the variables of NNX objects among a program's arguments as their author does.

`nnx.jit` hands the variables of each object over in a list, and JAX calls them `model.states[0][7]`. XLA takes its names of
arguments from JAX:

    traced = nnx.jit(step).trace(model, optimizer, batch)
    name_variables(traced.jaxpr, (model, optimizer, batch))     # XLA then has `model.layers[1].kernel`
"""

import re
from typing import Any

import jax
from jax.tree_util import keystr

from jaxremat.policy.jax_private import argument_names, name_arguments, result_names

#: The name of a variable in a list of `nnx.jit`: that of the object, and where it is in the lists.
_IN_LIST = re.compile(r"(\w+)\.states\[\d+\]\[\d+\]")


def name_variables(jaxpr: Any, args: tuple[Any, ...]) -> None:
    """Names the variables of `jitted.trace(*args).jaxpr` by their paths in the arguments.

    Where an object has a variable several times, or the program has other arguments, the names stay as they are.
    """
    names, leaves = argument_names(jaxpr), jax.tree.leaves_with_path(args)
    shapes = [(leaf.shape, leaf.dtype) for _, leaf in leaves if hasattr(leaf, "shape")]
    if shapes == [(aval.shape, aval.dtype) for aval in jaxpr.in_avals] and any(map(_IN_LIST.fullmatch, names)):
        name_arguments(jaxpr, [_name(name, path) for name, (path, _) in zip(names, leaves, strict=True)])


def _name(name: str, path: tuple[Any, ...]) -> str:
    in_list = _IN_LIST.fullmatch(name)
    return f"{in_list[1]}{keystr(path[1:]).removesuffix('.value')}" if in_list else name


def is_of_nnx(jaxpr: Any) -> bool:
    """Whether a traced program is one of `nnx.jit`, by the names of its results."""
    return any(".states[" in name for name in result_names(jaxpr))
