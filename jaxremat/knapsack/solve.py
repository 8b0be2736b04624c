"""Finds the values of a layer to save, exactly, as a 0/1 program.

Saving some activations and recomputing others is described by Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost". Checkmate states it as a 0/1 program (Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", MLSys). The program here leaves out Checkmate's schedule, because a policy decides per value, and XLA decides
when something runs. Its variables are "this value is saved", "this value is offloaded" and "this operation reruns". Without
the two budgets the program is a minimum cut, whose linear relaxation is integral (Picard 1976, "Maximal Closure of a Graph",
Management Science 22). With them it is a knapsack problem over cuts, and HiGHS branches on few variables.
"""

import graphlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, milp
from scipy.sparse import csr_array, hstack

from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.problem import Decision, Problem

DEFAULT_TIME_LIMIT_S = 10.0
_SCALE = 1e6  # the cost of recomputing everything in the program's own unit, because HiGHS stops at absolute gaps of 1e-6
_TIE = 1e-10  # price of all bytes together, as a share of that cost: of two decisions of equal cost, fewer bytes win
_PROVED = 1e-9  # distance to the bound, as a share of that cost, that is only rounding
_DIGIT_BITS = 12  # bits of a coefficient in a budget's row: with much larger coefficients HiGHS misses decisions that fit


@dataclass(frozen=True)
class Solution:
    """A decision and how good it is known to be.

    Attributes:
        decision: always legal and within the budgets.
        optimal: whether no other decision within the budgets costs less (to 1e-9 of the cost of recomputing everything).
        gap: the largest share of its cost that a better decision could save. 0 where `optimal`.
    """

    decision: Decision
    optimal: bool
    gap: float


@dataclass(frozen=True)
class Row:
    """A budget at a moment of the step, and how many bytes of each saved value are live there."""

    num_bytes: tuple[int, ...]
    budget_bytes: int


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    max_offload_bytes: int = 0,
    rows: Sequence[Row] = (),
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
) -> Solution:
    """The decision of the lowest cost (`Evaluation.cost_s`) within the budgets.

    Between equal costs, fewer bytes win.

    Args:
        problem: one layer.
        budget_bytes: bytes for the saved values of this layer. At 0 everything that is needed is recomputed.
        max_offload_bytes: bytes of host memory for its offloaded values.
        rows: further budgets of the device's memory.
        time_limit_s: seconds for solving. When they are over, the best decision so far is returned, with the gap that remains.
            If there is none so far, it saves nothing.

    Raises:
        ValueError: a budget is negative.
    """
    if budget_bytes < 0 or max_offload_bytes < 0:
        raise ValueError(f"budgets count bytes from 0 up, got {budget_bytes} and {max_offload_bytes}")
    budgets = [Row(tuple(value.num_bytes for value in problem.values), budget_bytes), *rows]
    program = _make_program(problem, budgets, max_offload_bytes)
    found, bound_s = _run(program, time_limit_s)
    decision = _without_unread(problem, found)
    cost_s = evaluate(problem, decision).cost_s
    optimal = cost_s - bound_s <= _PROVED * program.everything_s
    return Solution(decision, optimal, 0.0 if optimal else (cost_s - bound_s) / cost_s)


@dataclass(frozen=True)
class _Milp:
    """A 0/1 program: minimise `costs @ x` where `rows @ x >= needs` and `sizes @ x <= limits`.

    The vector x has three parts, [save | offload | run]. `save` and `offload` have one entry for each group of values that are
    saved as one, and `run` has one entry for each operation that could be recomputed.

    Attributes:
        groups: the groups of values.
        costs: seconds of each entry of x, with the price of its bytes by which ties are decided.
        allowed: whether an entry of x may be 1.
        rows: one row for each reason why a value must exist: the backward pass needs it, or an operation that reads it runs.
        needs: the right-hand sides of `rows`.
        sizes: rows of the device's bytes, and one of the host's, in whole numbers of the largest unit that divides all of them.
        limits: their budgets in that unit.
        everything_s: seconds of recomputing everything.
    """

    groups: list[tuple[int, ...]]
    costs: np.ndarray
    allowed: np.ndarray
    rows: csr_array
    needs: np.ndarray
    sizes: np.ndarray
    limits: np.ndarray
    everything_s: float


def _value_groups(problem: Problem) -> list[tuple[int, ...]]:
    """The groups of values that are saved as one.

    These are all outputs of a `together` operation, and every other output by itself.
    """
    return [g for op in problem.ops for g in ([op.outputs] if op.together else [(v,) for v in op.outputs]) if g]


def _make_program(problem: Problem, budgets: Sequence[Row], max_offload_bytes: int) -> _Milp:
    """The layer's 0/1 program.

    Three kinds of things are left out because they can't matter: operations that nothing needs, rows that other rows imply,
    and saving values that cost less to recompute from the inputs.
    """
    producer, above = problem.producers, _ancestors(problem)
    needed = {v for v, value in enumerate(problem.values) if value.needed and v in producer}
    ops = sorted(set().union(*(above[producer[v]] for v in needed)))
    readers: dict[int, set[int]] = {v: set() for v in range(len(problem.values))}
    for op in ops:
        for v in problem.ops[op].inputs:
            readers[v].add(op)
    groups = [g for g in _value_groups(problem) if not needed.isdisjoint(g) or any(readers[v] for v in g)]
    makers, count = [producer[g[0]] for g in groups], len(groups)

    column = {op: 2 * count + i for i, op in enumerate(ops)}
    entries: list[tuple[int, int, float]] = []
    needs: list[float] = []
    for i, (group, maker) in enumerate(zip(groups, makers, strict=True)):
        is_needed = not needed.isdisjoint(group)  # then it exists for every reader, and no row per reader is necessary
        for reader in [None] if is_needed else sorted(set().union(*(readers[v] for v in group))):
            entries += [(len(needs), at, 1.0) for at in (i, count + i, column[maker])]
            entries += [] if reader is None else [(len(needs), column[reader], -1.0)]
            needs.append(float(reader is None))

    def of_groups(numbers: Sequence[int]) -> np.ndarray:
        return np.array([sum(numbers[v] for v in g) for g in groups], np.int64)

    limits = [row.budget_bytes for row in budgets]
    live, num_bytes = [of_groups(row.num_bytes) for row in budgets], of_groups([value.num_bytes for value in problem.values])
    run_s = np.array([problem.ops[op].recompute_s for op in ops])
    scratch_s = np.array([math.fsum(problem.ops[op].recompute_s for op in above[maker]) for maker in makers])
    save_s = np.array([problem.save_seconds(g) for g in groups])
    offload_s = num_bytes * problem.offload_s_per_byte
    can_save = np.array([all(problem.values[v].saveable for v in g) for g in groups], bool) & (save_s < scratch_s)
    can_save &= np.all([of_row <= limit for of_row, limit in zip(live, limits, strict=True)], axis=0)
    can_offload = np.array([all(problem.values[v].offloadable for v in g) for g in groups], bool) & (offload_s < scratch_s)
    can_offload &= (max_offload_bytes > 0) & (num_bytes <= max_offload_bytes)

    none, everything_s = np.zeros(len(ops), np.int64), math.fsum(run_s)
    unit = max(1, int(np.gcd.reduce(np.stack([*live, num_bytes])[:, can_save | can_offload], axis=None)))
    saved = [np.concatenate([of_row // unit * can_save, 0 * num_bytes, none]) for of_row in live]
    offloaded = np.concatenate([0 * num_bytes, num_bytes // unit * can_offload, none])
    tie_s_per_byte = _TIE * everything_s / max(1, 2 * num_bytes.sum())
    return _Milp(
        groups=groups,
        costs=np.concatenate([save_s, offload_s, run_s]) + tie_s_per_byte * np.concatenate([num_bytes, num_bytes, none]),
        allowed=np.concatenate([can_save, can_offload, np.ones(len(ops), bool)]),
        rows=_sparse(entries, (len(needs), 2 * count + len(ops))),
        needs=np.array(needs),
        sizes=np.stack([*saved, offloaded]),
        limits=np.array([limit // unit for limit in (*limits, max_offload_bytes)]),
        everything_s=everything_s,
    )


def _ancestors(problem: Problem) -> list[set[int]]:
    """By operation, the operations that run when it runs and nothing is saved, itself included."""
    above: list[set[int]] = [set() for _ in problem.ops]
    for op in graphlib.TopologicalSorter(dict(enumerate(problem.reads))).static_order():
        above[op] = {op}.union(*(above[before] for before in problem.reads[op]))
    return above


def _run(program: _Milp, time_limit_s: float) -> tuple[Decision, float]:
    """The decision that HiGHS finds in time, and the least seconds of any within budget.

    The decision saves nothing where none is found.
    """
    if not program.costs.size:
        return Decision(), 0.0
    allowed = program.allowed
    scale = _SCALE / (program.everything_s or 1.0)
    budgets, limits = _in_digits(program.sizes[:, allowed], program.limits)
    num_chosen = int(allowed.sum())
    num_carries, has_budgets = budgets.shape[1] - num_chosen, bool(len(budgets))
    result = milp(
        np.append(scale * program.costs[allowed], np.zeros(num_carries)),
        integrality=np.full(num_chosen + num_carries, int(has_budgets)),  # a minimum cut is whole anyway
        bounds=Bounds(0, np.repeat([1, np.inf], [num_chosen, num_carries])),  # pyright: ignore[reportArgumentType]
        constraints=[
            (hstack([program.rows[:, allowed], csr_array((len(program.needs), num_carries))]), program.needs, np.inf),
            (csr_array(budgets), -np.inf, limits),
        ],
        # With budgets, presolve saves no time. Undoing it can lose a decision that fits; HiGHS then repairs it, and prints that.
        options={"disp": False, "presolve": not has_budgets, "mip_rel_gap": 0.0, "time_limit": time_limit_s},
    )
    bound = result.mip_dual_bound if has_budgets else result.fun
    bound_s = max(0.0, bound / scale - _TIE * program.everything_s) if bound is not None and math.isfinite(bound) else 0.0
    chosen = np.zeros_like(allowed)
    if result.x is not None:
        chosen[allowed] = result.x[:num_chosen] > 0.5
    if (program.sizes @ chosen > program.limits).any():
        return Decision(), bound_s
    on, count = chosen.tolist(), len(program.groups)
    save, offload = (
        frozenset(v for g, is_on in zip(program.groups, part, strict=True) if is_on for v in g)
        for part in (on[:count], on[count : 2 * count])
    )
    return Decision(save, offload - save), bound_s


def _in_digits(sizes: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The budgets `sizes @ x <= limits` with small coefficients.

    They are rows over [x | carries], and their limits. A budget that x can't exceed is left out. Let s = high * base + low, and
    the limit likewise. Then s @ x <= limit is the same as the two rows low @ x <= low limit + base * carry and
    high @ x + carry <= high limit, with a whole carry from 0 up. The high part is split again until it is small. No coefficient
    is large then, and nothing is rounded.
    """
    base = 1 << _DIGIT_BITS
    rows, ends = [], []
    carried: list[tuple[int, int, float]] = []
    for budget in np.flatnonzero(sizes.sum(axis=1) > limits):
        high, limit = sizes[budget], int(limits[budget])
        while limit >= base:
            carry = len(carried) // 2
            carried += [(len(rows), carry, -base), (len(rows) + 1, carry, 1)]
            rows.append(high % base)
            ends.append(limit % base)
            high, limit = high // base, limit // base
        rows.append(high)
        ends.append(limit)
    carries = _sparse(carried, (len(rows), len(carried) // 2)).toarray()
    # Divided by the base, so that the rounding of what HiGHS takes for whole numbers isn't multiplied beyond its tolerance. The
    # base is a power of two, so that the division is exact.
    digits = np.array(rows).reshape(len(rows), sizes.shape[1])
    return np.hstack([digits, carries]) / base, np.array(ends) / base


def _sparse(entries: list[tuple[int, int, float]], shape: tuple[int, int]) -> csr_array:
    """The matrix of these (row, column, coefficient)."""
    rows, columns, coefficients = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_array((coefficients, (rows, columns)), shape=shape)


def _without_unread(problem: Problem, decision: Decision) -> Decision:
    """`decision` without values that nothing reads or that are made again anyway.

    Rounding may leave such values in it.
    """
    ops = [problem.ops[op] for op in evaluate(problem, decision).recomputed]
    read = {v for v, value in enumerate(problem.values) if value.needed}.union(*(op.inputs for op in ops))
    made = {v for op in ops for v in op.outputs}
    useful = {v for g in _value_groups(problem) if made.isdisjoint(g) and not read.isdisjoint(g) for v in g}
    return Decision(decision.save & useful, decision.offload & useful)
