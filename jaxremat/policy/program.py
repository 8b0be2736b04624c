"""A traced function as one flat list of equations.

`autoname`, the search for layers and the planner's model of a layer work on it.

A jaxpr is nested: it may have a jit inside a jit. Two calls may share one inner jaxpr, and then one variable stands for two
values. `flatten` replaces each call by the equations of what it calls, and gives each value a number of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core, source_info_util

CALLS = frozenset({"jit", "closed_call", "core_call"})
DERIVATIVE_CALLS = frozenset({"custom_jvp_call", "custom_vjp_call"})

#: A value of the program, or a constant written in it.
Atom = int | core.Literal


def written_name(eqn: Any) -> str:
    """The checkpoint name that an equation of a jaxpr writes on its operand.

    Empty for all other equations.

    Under the option `jax_remat3` of JAX 0.12, `checkpoint_name` is no primitive of its own, but a call of one.
    """
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    called = eqn.params["_prim"] if eqn.primitive.name == "call_hi_primitive" else ""
    return getattr(called, "name") if type(called).__name__ == "CheckpointName" else ""  # noqa: B009


def changes_reference(eqn: Any) -> bool:
    """Whether an equation touches an array that is changed in place (`jax.new_ref`).

    The references of a Pallas kernel aren't seen outside of the kernel, and don't count.
    """
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return any(hasattr(aval, "inner_aval") for aval in avals) or any(
        type(effect).__name__ == "InternalMutableArrayEffect" for effect in eqn.effects
    )


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation.

    Attributes:
        eqn: the equation of the jaxpr.
        inputs: the values and constants that it reads.
        outputs: the numbers of the values that it makes.
        name_stack: the named scopes that it is in, those of the calls around it included.
    """

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    name_stack: source_info_util.NameStack

    @property
    def kind(self) -> str:
        """The primitive's name.

        Under every version of JAX, `jax.checkpoint` is `checkpoint` and `checkpoint_name` is `name`.
        """
        name = self.eqn.primitive.name
        return "checkpoint" if name.startswith("remat") else "name" if written_name(self.eqn) else name

    @property
    def scopes(self) -> tuple[str, ...]:
        """The names that `jax.named_scope` gave, outermost first.

        Those of transformations (jvp, vmap) are left out.
        """
        return tuple(scope.name for scope in self.name_stack.stack if type(scope).__name__ == "Scope")


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

    def run(closed: Any, inputs: Sequence[Atom], outer: source_info_util.NameStack) -> list[Atom]:
        body = closed.jaxpr if hasattr(closed, "jaxpr") else closed
        env: dict[Any, Atom] = dict(zip(body.invars, inputs, strict=True))
        for var, value in zip(body.constvars, getattr(closed, "consts", ()), strict=True):
            env[var] = new(var)
            constants.append((env[var], value))  # pyright: ignore[reportArgumentType]

        def atom(var: Any) -> Atom:
            return var if isinstance(var, core.Literal) else env[var]

        for eqn in body.eqns:
            stack, operands = outer + eqn.source_info.name_stack, [atom(var) for var in eqn.invars]
            if eqn.primitive.name in opened and not _pins_shardings(eqn):
                env.update(zip(eqn.outvars, run(_callee(eqn), operands, stack), strict=True))
            else:
                outputs = [new(var) for var in eqn.outvars]
                env.update(zip(eqn.outvars, outputs, strict=True))
                equations.append(Equation(eqn, tuple(operands), tuple(outputs), stack))
        return [atom(var) for var in body.outvars]

    inputs = [new(var) for var in jaxpr.jaxpr.invars]
    outputs = run(jaxpr, inputs, source_info_util.new_name_stack())
    return Program(tuple(equations), tuple(inputs), tuple(constants), tuple(outputs), avals)


def eval_program(
    program: Program, arguments: Sequence[Any], bind: Callable[[Equation, list[Any]], Sequence[Any]]
) -> list[Any]:
    """The program's outputs for `arguments`.

    `bind(equation, values)` computes the results of one equation. It is called within the equation's own named scopes.
    """
    env: dict[int, Any] = {**dict(program.constants), **dict(zip(program.inputs, arguments, strict=True))}

    def value(atom: Atom) -> Any:
        return env[atom] if isinstance(atom, int) else atom.val

    for equation in program.equations:
        with scopes_of(equation):
            results = bind(equation, [value(atom) for atom in equation.inputs])
        env.update(zip(equation.outputs, results, strict=True))
    return [value(atom) for atom in program.outputs]


@contextlib.contextmanager
def scopes_of(equation: Equation) -> Iterator[None]:
    """A context in which what is traced has the equation's line, scopes and configuration."""
    source = equation.eqn.source_info
    stack = source_info_util.current_name_stack() + equation.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), equation.eqn.ctx.manager:
        yield


def bind_equation(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
    """The equation's results, computed as JAX evaluates a jaxpr (`jax.core.eval_jaxpr`)."""
    primitive = equation.eqn.primitive
    results = primitive.bind(*values, **primitive.get_bind_params(equation.eqn.params))
    return results if primitive.multiple_results else [results]


def _callee(eqn: Any) -> Any:
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def _pins_shardings(eqn: Any) -> bool:
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
