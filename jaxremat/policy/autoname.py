"""`autoname` gives a checkpoint name to every value of a layer that its author didn't name.

A policy by names can only save values that have a checkpoint name, and few layers have any. `autoname` traces a layer, and
runs the same operations with a name written on each floating-point value. Parameters, outputs and gradients stay the same. A
name is made of the module's path in the layer and the operation. Where several values would have the same name, they are
numbered in program order:

    mlp/wi_0/dot_general   mlp/mul   mlp/mul.1   attention/fused

The names depend on the layer's code. They also depend on JAX's code, where a later version of JAX turns one of its functions
into other operations. They don't depend on the batch size, the number of layers or the layer's place among the layers.

The derivatives of some operations (exp, tanh, rsqrt, max) read the operation's own result. JAX would read the result from
before it was named, so that a named `exp` would be computed twice even where the name is saved. Such an operation is
therefore named inside a `jax.custom_jvp`. Its rule is the operation's own rule, which reads the named result.

References:
    jax/_src/ad_checkpoint.py (`name_p`, whose result is what a policy can save); jax/_src/core.py (`eval_jaxpr`).
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxremat.errors import UsageError
from jaxremat.policy.jax_private import FUSED_ATTENTION, called_name, callee, core
from jaxremat.policy.names import OPAQUE, jaxpr_names
from jaxremat.policy.program import (
    CALLS,
    DERIVATIVE_CALLS,
    Equation,
    Program,
    bind_equation,
    eval_program,
    flatten,
    written_name,
)
from jaxremat.policy.state import is_linen, is_linen_class, is_module_class, on_arrays

Target = TypeVar("Target", bound=Callable[..., Any])
#: The names to write on each value, by the value's number. A value that its author named twice has two names. The result of
#: `checkpoint_name` has an entry without names: the name is written where the value is made instead.
Tags = dict[int, tuple[str, ...]]
#: By operation, what `_reads_own_result` found. The rule is traced for that, and a layer is traced at several batches.
_READS_OWN_RESULT: dict[Hashable, bool] = {}


def autoname(target: Target) -> Target:
    """`target` with a checkpoint name on every floating-point intermediate.

    Parameters, outputs and gradients are those of `target`. A value that its author named gets no other name.
    Where the author wrote one name on several values, each of these values gets a name of its own besides. Arguments,
    integers, booleans and random keys get no names. The values inside loops, branches, inner checkpoints and custom
    derivatives get no names either. The results of these operations do, and `named_values` marks them as `opaque`.

    The result can be wrapped by `remat`, `Layers`, `nn.remat`, `nn.scan` and `nn.vmap`: name the layer first, wrap it
    afterwards.

    Args:
        target: a Flax Linen module class, or a function of arrays.

    Returns:
        A class with the name and the parameter tree of `target`, or a function.

    Raises:
        UsageError: `target` is neither.
    """
    if is_linen_class(target):
        from jaxremat.policy.linen import lifted

        return lifted(
            target, "autoname", lambda layer, _, variables, args, kwargs: name_values(layer, (*variables, *args), kwargs)
        )
    check_function("autoname", target, next_step="name the class, then make instances: autoname(Block)(...)")

    def function(*args: Any, **kwargs: Any) -> Any:
        return name_values(target, args, kwargs)

    function.__name__, function.__doc__ = getattr(target, "__name__", "function"), target.__doc__
    return function  # pyright: ignore[reportReturnType]


def check_function(by: str, target: Any, *, next_step: str) -> None:
    """Raises UsageError if `target`, no module class that is allowed, is no function either."""
    if not callable(target) or isinstance(target, type) or is_linen(target) or is_module_class(type(target)):
        got = f"the class {target.__name__!r}" if isinstance(target, type) else repr(type(target).__name__)
        raise UsageError(
            f"{by} got {got} as its target",
            allowed="a module class (not an instance) of Flax Linen, or of NNX or Equinox for remat, or a function",
            next_step=next_step,
        )


def name_values(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    prefix: str = "",
    shared: Set[str] = frozenset(),
) -> Any:
    """`function(*args, **kwargs)`, traced, named and run.

    Arguments and results that aren't arrays stay as they are.

    Args:
        function: a function of arrays and NNX objects.
        args: its arguments.
        kwargs: its further arguments.
        prefix: the beginning of each name that isn't the author's.
        shared: names that the author wrote in other layers too. A value with such a name gets a name of its own besides.
    """
    with on_arrays(function, args, kwargs or {}) as call:
        jaxpr = jax.make_jaxpr(call.function)(call.arrays)
        program = flatten(jaxpr)
        tags = _choose_names(program, {value.name for value in jaxpr_names(jaxpr)}, prefix, shared)
        return call.results(
            eval_program(program, call.arrays, lambda equation, values: _bind_tagged(equation, values, tags))
        )


def names_alone(
    function: Callable[..., Any], args: Sequence[Any], prefix: str, shared: Set[str], alone: Sequence[Callable[..., Any]]
) -> dict[str, str]:
    """By name that `name_values` writes on a value: its name in the function alone.

    That is the author's, where the author wrote a name that is only `shared` because other layers have it too. It is empty where
    the functions `alone`, which are the function in other scopes, don't agree in it, or there are none.
    """
    program, taken = _traced(function, args)
    ways = [_choose_names(_traced(one, args)[0], taken, "", frozenset()) for one in alone]
    return {
        names[-1]: found.pop() if len(found := {way[n][-1] for way in ways}) == 1 else ""
        for n, names in _choose_names(program, taken, prefix, shared).items()
        if names
    }


def _traced(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Program, set[str]]:
    """A function as a program, and the names that its author wrote."""
    with on_arrays(function, args, {}) as call:
        jaxpr = jax.make_jaxpr(call.function)(call.arrays)
    return flatten(jaxpr), {value.name for value in jaxpr_names(jaxpr)}


# Which names the values get.


def _choose_names(program: Program, taken: set[str], prefix: str, shared: Set[str]) -> Tags:
    """The names of each value: its author's, or else one of its own that isn't in `taken`.

    The author's names in `shared` count as written on several values.
    """
    tags = _authors_names(program)
    times = Counter(name for names in tags.values() for name in names)
    read, taken = program.read(), set(taken)
    layer = layer_scope(program)
    for equation in program.equations:
        for number in equation.outputs if equation.kind != "name" else ():
            already = tags.get(number, ())
            real = jnp.issubdtype(program.avals[number].dtype, jnp.floating)  # complex values are never saved
            if real and number in read and all(times[name] > 1 or name in shared for name in already):
                name = unused_name(prefix + value_path(equation, layer), taken)
                taken.add(name)
                tags[number] = (*already, name)
    return tags


def _authors_names(program: Program) -> Tags:
    """The names that the author wrote, each on the value itself.

    So all readers of the value read the named value.
    """
    tags: Tags = {}
    named_where_made: dict[int, int] = {}
    made = {number for equation in program.equations for number in equation.outputs}
    for equation in program.equations:
        if equation.kind != "name":
            continue
        (before,), (after,) = equation.inputs, equation.outputs
        if isinstance(before, int) and before in made:
            origin = named_where_made.setdefault(after, named_where_made.get(before, before))
            tags[origin] = (*tags.get(origin, ()), written_name(equation.eqn))
            tags[after] = ()
    return tags


def unused_name(base: str, taken: set[str]) -> str:
    """`base` where it isn't in `taken`, else the first of `base.1`, `base.2`, ... that isn't."""
    return next(name for n in itertools.count() if (name := f"{base}.{n}" if n else base) not in taken)


def value_path(equation: Equation, layer: str = "") -> str:
    """The result of `equation`, by module path and operation, such as `mlp/wi_0/dot_general`.

    `layer` is the scope of the layer itself, which is left out of the path.
    """
    scopes = [scope.removeprefix(layer + ".") if layer else scope for scope in equation.scopes]
    if layer and equation.scopes and equation.scopes[0].partition(".")[0] == layer:
        scopes = scopes[1:]
    return "/".join(filter(None, (_word(part) for part in (*scopes, _operation_name(equation)))))


def layer_scope(program: Program) -> str:
    """The one scope that all equations are in, or empty where there isn't one.

    Under Flax that scope is the layer's own name or class. A method's scope is `NAME.method`.
    """
    outermost = {equation.scopes[0].partition(".")[0] for equation in program.equations if equation.scopes}
    return outermost.pop() if len(outermost) == 1 else ""


def _operation_name(equation: Equation) -> str:
    is_derivative_call = equation.kind in DERIVATIVE_CALLS
    inside = callee(equation.eqn).jaxpr.eqns if is_derivative_call else (equation.eqn,)
    if FUSED_ATTENTION in (equation.kind, *(eqn.primitive.name for eqn in inside)):
        return "fused"
    return called_name(equation.eqn) if is_derivative_call or equation.kind in CALLS else equation.kind


def _word(part: str) -> str:
    """`part` without the characters that the policy grammar and paths use.

    For example, `BTD,DF->BTF` (an einsum) is `BTD_DF_BTF`.
    """
    return re.sub(r"\W+", "_", part).strip("_")


# How the names are written on the values.


def _bind_tagged(equation: Equation, values: list[Any], tags: Tags) -> Sequence[Any]:
    if equation.kind == "name" and equation.outputs[0] in tags:
        return values
    names = [tags.get(number, ()) for number in equation.outputs]
    if len(names) == 1 and names[0] and _reads_own_result(equation, values):
        return [_bind_tagged_in_rule(equation, values, names[0])]
    return [_tag(result, of_result) for result, of_result in zip(bind_equation(equation, values), names, strict=True)]


def _tag(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = checkpoint_name(value, name)
    return value


def _reads_own_result(equation: Equation, values: list[Any]) -> bool:
    """Whether the derivative of `equation` reads the equation's result, as that of `exp` does."""
    if equation.kind in OPAQUE - {"custom_jvp_call"} or equation.eqn.effects:
        return False
    key = _operation(equation, values)
    if key is None:
        return _derivative_reads_result(equation, values)
    if key not in _READS_OWN_RESULT:
        _READS_OWN_RESULT[key] = _derivative_reads_result(equation, values)
    return _READS_OWN_RESULT[key]


def _operation(equation: Equation, values: list[Any]) -> Hashable | None:
    """What the derivative rule of an operation depends on. None where that can't be compared."""
    params = equation.eqn.params
    if list(core.jaxprs_in_params(params)):
        return None
    variable = {*_variable(equation)}
    operands = (jax.typeof(value) if place in variable else (type(value), value) for place, value in enumerate(values))
    key = (equation.eqn.primitive, tuple(params.items()), tuple(operands))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _derivative_reads_result(equation: Equation, values: list[Any]) -> bool:
    """`_reads_own_result`, by the derivative rule of the equation."""
    moving = [n for n in _variable(equation) if jnp.issubdtype(jnp.result_type(values[n]), jnp.inexact)]
    if not moving:
        return False
    try:
        rule = _rule(equation, values, moving, [values[n] for n in moving])
    except NotImplementedError:  # an operation without a derivative
        return False
    result, tangent = rule.outputs
    made = any(result in inner.outputs for inner in rule.equations)
    return made and (tangent == result or any(result in inner.inputs for inner in rule.equations))


def _bind_tagged_in_rule(equation: Equation, values: list[Any], names: Sequence[str]) -> Any:
    variable = _variable(equation)

    def filled(operands: Sequence[Any]) -> list[Any]:
        whole = list(values)
        for place, operand in zip(variable, operands, strict=True):
            whole[place] = operand
        return whole

    @jax.custom_jvp
    def named(*operands: Any) -> Any:
        return _tag(bind_equation(equation, filled(operands))[0], names)

    def derivative(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moves = {place: t for place, t in zip(variable, tangents, strict=True) if not isinstance(t, SymbolicZero)}
        whole = filled(operands)
        rule = _rule(equation, whole, list(moves), list(moves.values()))

        def bind(inner: Equation, inner_values: list[Any]) -> Sequence[Any]:
            results = bind_equation(inner, inner_values)
            return [_tag(r, names) if n == rule.outputs[0] else r for n, r in zip(inner.outputs, results, strict=True)]

        primal, tangent = eval_program(rule, [*(whole[place] for place in moves), *moves.values()], bind)
        return primal, tangent

    named.defjvp(derivative, symbolic_zeros=True)
    return named(*(values[place] for place in variable))


def _variable(equation: Equation) -> list[int]:
    """The positions of the operands that are values of the program, not constants written in it."""
    return [place for place, atom in enumerate(equation.inputs) if isinstance(atom, int)]


def _rule(equation: Equation, values: list[Any], moving: list[int], tangents: list[Any]) -> Program:
    """The derivative rule of `equation` along the operands at `moving`, as a program.

    The program takes these operands and their tangents, and gives the result and its tangent.
    """

    def along(operands: list[Any], tangents: list[Any]) -> tuple[Any, Any]:
        def operation(*moved: Any) -> Any:
            whole = list(values)
            for place, operand in zip(moving, moved, strict=True):
                whole[place] = operand
            return bind_equation(equation, whole)[0]

        return jax.jvp(operation, tuple(operands), tuple(tangents))

    return flatten(jax.make_jaxpr(along)([values[place] for place in moving], tangents))
