"""Signatures: when two operations, or two layers, count as the same.

Layers are found in a traced program by comparing its equations. Two equations have the same token if they run the same operation
with the same parameters on values of the same shapes and dtypes. Numbers written in the program don't count: layer 3 may scale by
another constant than layer 4.
"""

import functools
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxremat.policy.jax_private import FUSED_ATTENTION, core
from jaxremat.policy.names import users_line
from jaxremat.policy.program import Equation, Program

#: The operations that take the time of a layer. A layer has at least one of them.
_HEAVY = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "ragged_dot",
        "ragged_dot_general",
        "pallas_call",
        "ffi_call",
        FUSED_ATTENTION,
    }
)
#: Parameters that say nothing about what an operation computes, and the places of slices: each layer may take its own slice.
_NOT_COMPARED = frozenset(
    {"name", "debug_info", "ctx_mesh", "donated_invars", "keep_unused", "inline", "start_indices", "limit_indices"}
)


@dataclass(frozen=True, eq=False)
class Facts:
    """A program, and what the search for layers knows about its equations.

    Attributes:
        program: the program.
        parameters: the numbers of the values that are made of parameters and constants alone.
        constants: the numbers of the values that no input flows into.
        fixed: the numbers of the values that no data flows into. In a program without data, such as a loss that closes over its
            batch, no parameter flows into them either.
        tokens: the `token` of each equation.
        rough: the `rough_token` of each equation.
        plain: the number of each equation's operation, whatever the shapes.
        heavy: the `weights` of the equations.
        crossing: for each place between two equations the bytes that cross it. Place n is before equation n.
    """

    program: Program
    parameters: Set[int]
    constants: Set[int]
    fixed: Set[int]
    tokens: np.ndarray
    rough: np.ndarray
    plain: np.ndarray
    heavy: np.ndarray
    crossing: np.ndarray

    def num_heavy(self, place: range) -> int:
        """The matmuls, convolutions and fused kernels in a range of equations."""
        return int(self.heavy[place.start : place.stop].sum())

    def num_of_lines(self, place: range) -> int:
        """The `num_heavy` of all that the lines of a range's matmuls make in the program.

        A gradient inside a program has the lines of what it differentiates.
        """
        lines = self.lines(place) - {""}
        return sum(int(self.heavy[n]) for n, line in self._lines.items() if n in place or line in lines)

    def lines(self, place: range) -> set[str]:
        """The lines of the user's code that make the matmuls in a range of equations."""
        return {self._lines[n] for n in place if self.heavy[n]}

    @functools.cached_property
    def _lines(self) -> dict[int, str]:
        return {n: users_line(equation.eqn) for n, equation in enumerate(self.program.equations) if self.heavy[n]}

    def kind(self, layer: range) -> tuple[int, ...]:
        """The rough tokens of the matmuls, convolutions and fused kernels, equal for layers alike."""
        return tuple(int(self.rough[n]) for n in layer if self.heavy[n])

    def exact(self, layer: range) -> tuple[int, ...]:
        """Equal for layers of the same operations."""
        return tuple(self.tokens[layer.start : layer.stop].tolist())


def read_facts(program: Program, parameters: Set[int], constants: Set[int], fixed: Set[int]) -> Facts:
    """The facts of a program. `Facts.crossing` leaves out the values of `fixed`."""
    equations = program.equations
    return Facts(
        program=program,
        parameters=parameters,
        constants=constants,
        fixed=fixed,
        tokens=np.array([token(equation) for equation in equations], np.int64),
        rough=np.array([rough_token(equation) for equation in equations], np.int64),
        plain=np.array([hash(equation.eqn.primitive.name) for equation in equations], np.int64),
        heavy=np.array(weights(equations), np.int64),
        crossing=_crossing_bytes(program, fixed),
    )


def num_heavy(eqn: Any, heavy: Callable[[Any], bool] = lambda eqn: eqn.primitive.name in _HEAVY) -> int:
    """The number of matmuls, convolutions and fused kernels in an equation and inside it.

    Those of a loop count as often as they run, if the number of its iterations is known.
    """
    if heavy(eqn):
        return 1
    inner = sum(num_heavy(e, heavy) for jaxpr in core.jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
    return inner * eqn.params["length"] if eqn.primitive.name == "scan" else inner


def weights(equations: Sequence[Equation]) -> list[int]:
    """The `num_heavy` of each equation.

    Where there are no matmuls at all, it is the number of its operations.
    """
    heavy = [num_heavy(equation.eqn) for equation in equations]
    return (
        heavy
        if any(heavy)
        else [num_heavy(e.eqn, lambda eqn: not list(core.jaxprs_in_params(eqn.params))) for e in equations]
    )


def token(equation: Equation) -> int:
    """Equal for equations that run the same operation on the same shapes and dtypes."""
    eqn = equation.eqn
    return hash((_operation_text(eqn), tuple(str(var.aval) for var in (*eqn.invars, *eqn.outvars))))


def rough_token(equation: Equation) -> int:
    """`token` without dtypes and without the operation's parameters."""
    eqn = equation.eqn
    return hash((eqn.primitive.name, tuple(getattr(var.aval, "shape", ()) for var in (*eqn.invars, *eqn.outvars))))


def num_bytes(aval: Any) -> int:
    """The bytes of a value. 0 for what isn't an array."""
    return aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


def _operation_text(eqn: Any) -> str:
    """The operation and its parameters as text, the same in every layer.

    Addresses in memory, which differ from layer to layer, are left out.
    """
    params = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if name not in _NOT_COMPARED]
    return re.sub(r"0x[0-9a-f]+", "", f"{eqn.primitive.name}[{' '.join(params)}]")


def _crossing_bytes(program: Program, uncounted: Set[int]) -> np.ndarray:
    last: dict[int, int] = {}
    for n, equation in enumerate(program.equations):
        last.update((atom, n) for atom in equation.inputs if isinstance(atom, int))
    last.update((atom, len(program.equations)) for atom in program.outputs if isinstance(atom, int))
    changes = np.zeros(len(program.equations) + 2, np.int64)
    for n, equation in enumerate(program.equations):
        for number in equation.outputs:
            if number not in uncounted and last.get(number, n) > n:
                changes[n + 1] += num_bytes(program.avals[number])
                changes[last[number] + 1] -= num_bytes(program.avals[number])
    return np.cumsum(changes)
