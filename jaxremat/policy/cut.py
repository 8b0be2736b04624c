"""Cuts a range of equations out of a program, as a function of its own.

Of the program `a = x @ w; b = sin(a); c = b + x`, the piece of the first two equations has the inputs `x` and `w` and the output
`b`: `a` isn't read outside of the piece.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxremat.policy.calls import call_with
from jaxremat.policy.jax_private import callee, core, stack_of
from jaxremat.policy.program import Equation, Program, bind_equation, eval_program, flatten
from jaxremat.policy.signature import weights

#: Two thirds of a layer's matmuls: a checkpoint that holds as many is around the layer, and not in it.
_MOST = 2 / 3


@dataclass(frozen=True, eq=False)
class Piece:
    """A range of equations as a program of its own.

    Attributes:
        program: the equations. Its inputs are the values that the range reads and doesn't make. Its outputs are the values
            that it makes and that the rest of the whole program reads. Values have the same numbers as in the whole program.
    """

    program: Program

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the values that the piece reads."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The numbers of the values that the piece gives to the rest of the program."""
        return self.program.outputs

    @property
    def args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the inputs."""
        return tuple(struct_of(self.program.avals[number]) for number in self.inputs)

    def run(self, *values: Any) -> list[Any]:
        """The piece's outputs, computed one equation after the other.

        Checkpoints around the layer are left out.
        """
        around = checkpoints_around(self.program.equations)
        return eval_program(self.program, values, lambda e, v: open_call(e, v) if e in around else bind_equation(e, v))

    def run_bare(self, *values: Any) -> list[Any]:
        """`run` without the checkpoints inside those around the layer either.

        For example, without one around each step of a scan in the layer.
        """
        return _without_checkpoints(self.program, values)


def _without_checkpoints(program: Program, values: Sequence[Any]) -> list[Any]:
    """The outputs of a program without the checkpoints that hold most of its matmuls.

    Those inside one another and inside scans are left out, too.
    """
    around, weight = checkpoints_around(program.equations), weights(program.equations)
    most = {equation for equation, own in zip(program.equations, weight, strict=True) if own >= _MOST * sum(weight)}

    def bind(equation: Equation, values: list[Any]) -> Sequence[Any]:
        if equation not in around and not (equation in most and equation.kind == "scan"):
            return bind_equation(equation, values)
        inner = functools.partial(_without_checkpoints, flatten(callee(equation.eqn)))
        return call_with(equation, values, run=inner)

    return eval_program(program, values, bind)


def cut(program: Program, start: int, stop: int) -> Piece:
    """The equations from number `start` up to but not including number `stop`."""
    inside = program.equations[start:stop]
    made = {number for equation in inside for number in equation.outputs}
    read = dict.fromkeys(atom for equation in inside for atom in equation.inputs if isinstance(atom, int))
    after = {atom for equation in program.equations[stop:] for atom in equation.inputs if isinstance(atom, int)}
    after.update(atom for atom in program.outputs if isinstance(atom, int))
    inputs = tuple(number for number in read if number not in made)
    outputs = tuple(number for equation in inside for number in equation.outputs if number in after)
    return Piece(Program(inside, inputs, (), outputs, program.avals))


def renamed(piece: Piece, scopes: Callable[[Equation], tuple[str, ...]]) -> Piece:
    """The piece with other named scopes.

    They are `scopes(equation)` in place of those that the equation is in.
    """
    equations = tuple(
        Equation(equation.eqn, equation.inputs, equation.outputs, stack_of(scopes(equation)), equation.traceback)
        for equation in piece.program.equations
    )
    old = piece.program
    return Piece(Program(equations, old.inputs, old.constants, old.outputs, old.avals))


def checkpoints_around(equations: Sequence[Equation]) -> frozenset[Equation]:
    """The checkpoint among a layer's equations that holds most of its matmuls.

    Empty if there is none.
    """
    inside = dict(zip(equations, weights(equations), strict=True))
    checkpoints = [equation for equation in equations if equation.kind == "checkpoint"]
    is_most = len(checkpoints) == 1 and inside[checkpoints[0]] >= _MOST * sum(inside.values())
    return frozenset(checkpoints if is_most else ())


def opened(equations: Sequence[Equation]) -> list[Equation]:
    """A layer's equations, with those of the checkpoint around them in its place.

    The values of the checkpoint's equations have numbers of their own.
    """
    around = checkpoints_around(equations)
    return [inner for equation in equations for inner in (_of_checkpoint(equation) if equation in around else [equation])]


def _of_checkpoint(checkpoint: Equation) -> Iterator[Equation]:
    called_at = (*checkpoint.called_at, checkpoint.traceback)
    for inner in flatten(callee(checkpoint.eqn)).equations:
        stack = checkpoint.name_stack + inner.name_stack
        yield replace(inner, name_stack=stack, called_at=(*called_at, *inner.called_at))


def open_call(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """The results of an equation that calls a jaxpr, computed without the call."""
    return core.jaxpr_as_fun(callee(equation.eqn))(*values)


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
