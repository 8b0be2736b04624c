"""A traced function as one flat list of equations.

`autoname`, the search for layers and the planner's model of a layer work on it.

A jaxpr is nested: it may have a jit inside a jit. Two calls may share one inner jaxpr, and then one variable stands for two
values. `flatten` replaces each call by the equations of what it calls, and gives each value a number of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxremat.policy.jax_private import (
    NameStack,
    bind,
    callee,
    context_of,
    core,
    named_scopes,
    pins_shardings,
    stack_of,
    written_name,
)
from jaxremat.policy.names import written_at

CALLS = frozenset({"jit", "closed_call", "core_call"})
DERIVATIVE_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call"})

#: A value of the program, or a constant written in it.
Atom = int | core.Literal


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation.

    Attributes:
        eqn: the equation of the jaxpr.
        inputs: the values and constants that it reads.
        outputs: the numbers of the values that it makes.
        name_stack: the named scopes that it is in, those of the calls around it included.
        traceback: where it was traced. It is that of the call around it, if its own has no line outside of JAX.
        called_at: where the calls around it were traced, the outermost first.
    """

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    name_stack: NameStack
    traceback: Any = None
    called_at: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        """The primitive's name.

        Under every version of JAX, `jax.checkpoint` is `checkpoint` and `checkpoint_name` is `name`.
        """
        name = self.eqn.primitive.name
        return "checkpoint" if name.startswith("remat") else "name" if written_name(self.eqn) else name

    @property
    def scopes(self) -> tuple[str, ...]:
        """The names that `jax.named_scope` gave, outermost first."""
        return named_scopes(self.name_stack)


@dataclass(frozen=True, eq=False)
class Program:
    """A function as a flat list of equations.

    Attributes:
        equations: in program order.
        inputs: the numbers of the arguments.
        constants: the arrays that the function holds, each with its number.
        outputs: the results.
        avals: the shape and dtype of every value, by number.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    outputs: tuple[Atom, ...]
    avals: dict[int, Any]

    def read(self) -> set[int]:
        """The numbers of the values that an equation or the caller reads."""
        atoms = [*self.outputs, *(atom for equation in self.equations for atom in equation.inputs)]
        return {atom for atom in atoms if isinstance(atom, int)}


def flatten(jaxpr: Any, opened: frozenset[str] = CALLS) -> Program:
    """The program of `jaxpr`, which comes from `jax.make_jaxpr`.

    Calls are replaced by what they call.

    A jit that pins shardings stays a call, since its shardings would be lost.

    Args:
        jaxpr: the traced function.
        opened: the primitives whose calls are replaced.
    """
    avals: dict[int, Any] = {}
    equations: list[Equation] = []
    constants: list[tuple[int, Any]] = []

    def new(var: Any) -> int:
        avals[len(avals)] = var.aval
        return len(avals) - 1

    def run(closed: core.ClosedJaxpr, inputs: Sequence[Atom], outer: NameStack, called_at: tuple[Any, ...]) -> list[Atom]:
        body = closed.jaxpr
        env: dict[Any, Atom] = dict(zip(body.invars, inputs, strict=True))
        for var, value in zip(body.constvars, closed.consts, strict=True):
            env[var] = new(var)
            constants.append((env[var], value))  # pyright: ignore[reportArgumentType]

        def atom(var: Any) -> Atom:
            return var if isinstance(var, core.Literal) else env[var]

        for eqn in body.eqns:
            stack, operands = outer + eqn.source_info.name_stack, [atom(var) for var in eqn.invars]
            own = eqn.source_info.traceback if not called_at or written_at(eqn) else called_at[-1]
            if eqn.primitive.name in opened and not pins_shardings(eqn):
                env.update(zip(eqn.outvars, run(callee(eqn), operands, stack, (*called_at, own)), strict=True))
            else:
                outputs = [new(var) for var in eqn.outvars]
                env.update(zip(eqn.outvars, outputs, strict=True))
                equations.append(Equation(eqn, tuple(operands), tuple(outputs), stack, own, called_at))
        return [atom(var) for var in body.outvars]

    inputs = [new(var) for var in jaxpr.jaxpr.invars]
    outputs = run(jaxpr, inputs, stack_of(), ())
    return Program(tuple(equations), tuple(inputs), tuple(constants), tuple(outputs), avals)


def read(env: Mapping[int, Any], atom: Atom) -> Any:
    """The value of an atom as an array.

    A constant of the program (`jax.core.Literal`) may be a Python number.
    """
    if isinstance(atom, int):
        return env[atom]
    aval: Any = atom.aval
    return jnp.asarray(atom.val, None if aval.weak_type else aval.dtype)


def eval_program(
    program: Program, arguments: Sequence[Any], bind: Callable[[Equation, list[Any]], Sequence[Any]]
) -> list[Any]:
    """The program's outputs for `arguments`.

    `bind(equation, values)` computes the results of one equation. It is called within the equation's own named scopes.
    """
    env: dict[int, Any] = {**dict(program.constants), **dict(zip(program.inputs, arguments, strict=True))}

    for equation in program.equations:
        run_equation(equation, env, bind)
    return [read(env, atom) for atom in program.outputs]


def run_equation(equation: Equation, env: dict[Any, Any], bind: Callable[[Equation, list[Any]], Sequence[Any]]) -> None:
    """Adds the results of an equation to the values in `env`, by `bind` as in `eval_program`."""
    is_call = bool(list(core.jaxprs_in_params(equation.eqn.params)))
    with scopes_of(equation):
        values = [read(env, a) if is_call or isinstance(a, int) else a.val for a in equation.inputs]
        results = bind(equation, values)
    env.update(zip(equation.outputs, results, strict=True))


def scopes_of(equation: Equation) -> AbstractContextManager[None]:
    """A context in which what is traced has the equation's line, scopes and configuration."""
    return context_of(equation.eqn, equation.name_stack, equation.traceback)


def bind_equation(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
    """The equation's results, computed as JAX evaluates a jaxpr (`jax.core.eval_jaxpr`)."""
    return bind(equation.eqn, values)
