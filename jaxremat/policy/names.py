"""Checkpoint names: those that a function's values carry, and the check of a policy's names.

A checkpoint name is the tag that `jax.ad_checkpoint.checkpoint_name` gives a value:

    def layer(x): return checkpoint_name(jnp.sin(x), "sine")
    named_values(layer, jnp.ones((2, 3)))  # [NamedValue("sine", (2, 3), "float32", num_bytes=24)]

The names of the decoder's own tensors are in `maxtext.py`.
"""

import difflib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxremat.errors import UnknownNameError, nearest
from jaxremat.policy.jax_private import core, forward_rule, written_name
from jaxremat.policy.spec import LayerPolicy, Policy
from jaxremat.system.whose import is_users, package_folders, shown_file

#: Operations inside which a policy decides nothing. What is inside is recomputed whole, or isn't differentiated as written.
OPAQUE = frozenset(
    {
        "scan",
        "while",
        "cond",
        "checkpoint",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "jit",
        "shard_map",
        "pallas_call",
    }
)


#: The beginnings of frames that JAX doesn't hand to XLA. JAX has no separator after the folder of the standard library, so that
#: what is installed below that folder is left out, too.
_LEFT_OUT = ("<", sysconfig.get_path("stdlib"), *(f"{folder}{os.sep}" for folder in package_folders("jax")))

#: The most names that an error lists.
SHOWN_NAMES = 20
#: The cause and the next step where numbered operations, such as `mlp/mul.9`, don't exist.
_OF_ANOTHER_PROGRAM = (
    "the policy was planned for another program: with another dtype, without dropout or in evaluation other operations run",
    "plan this program; where no gradient is computed, leave the policy out; --list names has the names of this one",
)


@dataclass(frozen=True)
class NamedValue:
    """One value with a checkpoint name.

    Attributes:
        name: the checkpoint name.
        shape: of the value, in one layer.
        dtype: of the value, such as `bfloat16`.
        num_bytes: of the value, in one layer.
        opaque: whether the value is the result of an operation of `OPAQUE`: a loop, a branch, an inner checkpoint, a custom
            derivative or the like. `autoname` writes no names inside these.
        users_line: `file:line` in the user's code of the operation that made the value. Empty where JAX has no traceback.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    opaque: bool = False
    users_line: str = field(default="", compare=False)


def named_values(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[NamedValue]:
    """The named values of `function(*args, **kwargs)` in program order.

    The arguments may be `jax.ShapeDtypeStruct`s.
    """
    # JAX caches traces by the function's identity, and `function` may read other state by now: hence a new lambda.
    jaxpr = jax.make_jaxpr(lambda *a, **k: function(*a, **k))(*args, **kwargs)
    return jaxpr_names(jaxpr)


def jaxpr_names(jaxpr: Any) -> list[NamedValue]:
    """The named values of a traced function (`jax.make_jaxpr`) in program order."""
    return list(_walk(jaxpr.jaxpr))


def _walk(jaxpr: Any) -> Iterator[NamedValue]:
    made: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        maker = equation
        if name := written_name(equation):
            (tagged,), (source,) = equation.outvars, equation.invars
            maker = None if isinstance(source, core.Literal) else made.get(source)
            aval, from_opaque = tagged.aval, maker is not None and maker.primitive.name in OPAQUE
            line = users_line(maker) if maker else ""
            yield NamedValue(name, aval.shape, str(aval.dtype), aval.size * aval.dtype.itemsize, from_opaque, line)
        made.update(dict.fromkeys(equation.outvars, maker))
        for inner in core.jaxprs_in_params(equation.params):
            yield from _walk(inner)


def all_written_names(eqns: Iterable[Any], rules: bool = True) -> Iterator[str]:
    """The checkpoint names that equations write, in inner jaxprs too.

    Of a function of `jax.custom_vjp` they are those of its forward rule, which runs in its place where it is differentiated. The
    rule may call the function, which isn't differentiated there. Rules inside a shard_map aren't read, as its axes only exist
    while it runs.
    """
    for eqn in eqns:
        if name := written_name(eqn):
            yield name
        if rules and (rule := forward_rule(eqn)):
            yield from all_written_names(rule.eqns, rules=False)
            continue
        for inner in core.jaxprs_in_params(eqn.params):
            yield from all_written_names(inner.eqns, rules and eqn.primitive.name != "shard_map")


@dataclass(frozen=True)
class WrittenName:
    """Where a checkpoint name is written in a traced program.

    Attributes:
        name: the name.
        scope: JAX's name stack of the `checkpoint_name` call.
        made_by: the name stack and the operation that made the value. Empty for an input of the loop body or function.
        made_at: `file:line` of that operation outside of JAX, as XLA has it. Empty where JAX has no traceback.
        num_elements: of the value.
        result: its position among the results of that operation.
        users_line: `file:line` in the user's own code that leads to that operation, where `made_at` may be in a library.
    """

    name: str
    scope: str
    made_by: str
    made_at: str
    num_elements: int
    result: int = 0
    users_line: str = ""


def written_names(jaxpr: Any) -> tuple[WrittenName, ...]:
    """Every place in a traced function where a checkpoint name is written.

    Places inside loops and checkpoints are among them. The function is given as `jax.make_jaxpr` returns it.
    """
    return tuple(dict.fromkeys(_names_where_written(jaxpr.jaxpr)))


def _names_where_written(jaxpr: Any) -> Iterator[WrittenName]:
    made: dict[Any, tuple[Any, int]] = {}
    for equation in jaxpr.eqns:
        sources = [() if isinstance(var, core.Literal) else made.get(var, ()) for var in equation.invars]
        name = written_name(equation)
        if name or equation.primitive.name in ("reduce_precision", "optimization_barrier", "sharding_constraint"):
            made.update({out: source for out, source in zip(equation.outvars, sources, strict=True) if source})
        else:
            made.update({out: (equation, n) for n, out in enumerate(equation.outvars)})
        if name:
            scope, size = str(equation.source_info.name_stack), equation.outvars[0].aval.size
            maker, result = sources[0] or (None, 0)
            stack = f"{maker.source_info.name_stack}/{maker.primitive.name}".strip("/") if maker else ""
            at, line = (written_at(maker), users_line(maker)) if maker else ("", "")
            yield WrittenName(name, scope, stack, at, size, result, line)
        for inner in core.jaxprs_in_params(equation.params):
            yield from _names_where_written(inner)


def written_at(equation: Any) -> str:
    """`file:line` of an equation's innermost frame outside of JAX, as XLA has it.

    Empty where JAX has no traceback.
    """
    traceback = equation.source_info.traceback
    frames = ((f.file_name, f.line_num) for f in (traceback.frames if traceback else ()))
    return next((f"{shown_file(file)}:{line}" for file, line in frames if not file.startswith(_LEFT_OUT)), "")


def users_line(equation: Any) -> str:
    """`file:line` of an equation's innermost frame in the user's code, or else `written_at`."""
    traceback = equation.source_info.traceback
    frames = ((f.file_name, f.line_num) for f in (traceback.frames if traceback else ()))
    own = (f"{shown_file(file)}:{line}" for file, line in frames if is_users(file))
    return next(own, "") or written_at(equation)


def resolve(policy: Policy, carried: set[str], authors: set[str] | None = None) -> Policy:
    """`policy` with names that all exist in the layer.

    An alias loses the names that the layer doesn't have. For example, `resolve(parse("minimal"), {"context", "mlpwo"})` is
    `save:mlpwo`. A name that was typed must exist.

    Args:
        policy: any policy.
        carried: the checkpoint names of the layer's values, from `named_values`.
        authors: the names in `carried` that the layer's author wrote, where `autoname` wrote the others.

    Raises:
        UnknownNameError: a typed name doesn't exist, or none of an alias's names does.
    """
    return policy.map_layers(lambda part: _resolve_layer(part, carried, authors))


def _resolve_layer(policy: LayerPolicy, carried: set[str], authors: set[str] | None) -> LayerPolicy:
    known = policy.only(carried)
    missing = sorted({*policy.names()} - carried)
    if not missing or (policy.alias and known.names()):
        return known
    known = sorted(carried if authors is None else authors)
    others = sorted(carried.difference(known), key=lambda name: _distance(name, missing[0]))
    shown = (known or others)[:SHOWN_NAMES]
    by_path = f", or any other value by module path and operation, such as {others[0]}" if known and others else ""
    more = f" and {len(others) - SHOWN_NAMES} more" if not known and len(others) > SHOWN_NAMES else ""
    known += others
    misspelt = (
        "a misspelt name, which jax.checkpoint takes without a word" if known else "checkpoint_name is never called",
        nearest(missing[0], known)
        or ("choose among the names above" if known else "tag values with jax.ad_checkpoint.checkpoint_name(x, 'name')"),
    )
    numbered = {_without_number(name) for name in missing} - {*missing}
    cause, next_step = _OF_ANOTHER_PROGRAM if numbered.intersection(map(_without_number, known)) else misspelt
    raise UnknownNameError(
        f"policy {policy.alias or str(policy)!r} names {', '.join(map(repr, missing))}, and no tensor carries "
        + ("that name" if len(missing) == 1 else "those names"),
        allowed=", ".join(shown) + by_path + more or "none: no value of this layer has a checkpoint name",
        cause=cause,
        next_step=next_step,
    )


def _without_number(name: str) -> str:
    """The name of an operation without its number: `mlp/mul` of `mlp/mul.1`."""
    return re.sub(r"\.\d+$", "", name)


def _distance(name: str, typed: str) -> tuple[float, str]:
    return -difflib.SequenceMatcher(a=name, b=typed).ratio(), name
