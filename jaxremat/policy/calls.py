"""Runs an equation that calls a program, with something else in place of that program.

call_with(equation, values, run)    where the equation is a loop: the same loop, whose body is `run`
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxremat.policy.jax_private import is_unspecified, num_operands, shard_map_as
from jaxremat.policy.program import Equation

#: Computes a program's outputs from its inputs.
Runner = Callable[[Sequence[Any]], Sequence[Any]]


def call_with(equation: Equation, values: Sequence[Any], *, run: Runner) -> Sequence[Any]:
    """The results of an equation that calls a program, with `run` in place of the program.

    A jit with shardings becomes constraints on its arguments and results. A checkpoint is left out.
    """
    params = equation.eqn.params
    match equation.kind:
        case "scan":
            return _scan_with(equation.eqn, values, run)
        case "shard_map":
            return shard_map_as(equation.eqn, lambda *inner: tuple(run(inner)))(*values)
        case "jit":
            results = run(_constrained(values, params["in_shardings"]))
            return _constrained(results, params["out_shardings"])
        case _:
            return run(values)


def split_operands(eqn: Any, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """The operands of a loop: the constants, the initial carry, and the stacks that it slices."""
    num_consts, num_carry = num_operands(eqn)
    first = num_consts + num_carry
    return tuple(values[:num_consts]), tuple(values[num_consts:first]), tuple(values[first:])


def _scan_with(eqn: Any, values: Sequence[Any], run: Runner) -> list[Any]:
    consts, carry, slices = split_operands(eqn, values)

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = run((*consts, *carry, *slices))
        return tuple(results[: len(carry)]), tuple(results[len(carry) :])

    params = eqn.params
    carry, stacked = jax.lax.scan(
        body, carry, slices, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *stacked]


def _constrained(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    return [
        value if is_unspecified(sharding) else jax.lax.with_sharding_constraint(value, sharding)
        for value, sharding in zip(values, shardings, strict=True)
    ]
