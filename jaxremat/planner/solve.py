"""Which values of a layer to keep: exactly, as a 0/1 program, or greedily, to compare with.

Keeping some activations and making the others again is as old as Chen et al. 2016, "Training Deep Nets with Sublinear Memory
Cost"; as a 0/1 program it is Checkmate (Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", MLSys), here with the schedule left out: a policy decides per value, and XLA decides when. What remains has
the variables "this is saved", "this is offloaded" and "this operation runs again". Without its two budgets that is a minimum
cut, whose linear relaxation is integral (Picard 1976, "Maximal Closure of a Graph", Management Science 22); with them it is
a knapsack over cuts, of which HiGHS branches on few.
"""

import graphlib
import math
import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, milp
from scipy.sparse import csr_array, hstack

from jaxremat.planner.evaluate import evaluate
from jaxremat.planner.problem import Decision, Problem

DEFAULT_TIME_LIMIT_S = 10.0
_SCALE = 1e6  # what recomputing everything costs in the program: HiGHS stops at absolute gaps of 1e-6
_TIE = 1e-10  # of that, the price of all bytes together: between equal costs, fewer bytes
_PROVED = 1e-9  # of that, a distance to the bound that is only rounding
_DIGIT_BITS = 12  # of a budget's coefficients: with much larger ones HiGHS misses what fits


@dataclass(frozen=True)
class Solution:
    """A decision with its proof.

    Attributes:
        decision: legal and within the budgets in any case.
        optimal: whether no other decision within the budgets costs less (to 1e-9 of what recomputing everything costs).
        gap: share of its cost that an even better decision could save at most; 0 where `optimal`.
        seconds: that solving took.
    """

    decision: Decision
    optimal: bool
    gap: float
    seconds: float


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    max_offload_bytes: int = 0,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
) -> Solution:
    """The cheapest decision (`Evaluation.cost_s`) whose saved values fit `budget_bytes`; between equals, fewer bytes.

    Args:
        problem: one layer.
        budget_bytes: for the saved values of this layer. At 0 everything that is needed is recomputed.
        max_offload_bytes: for its offloaded values, in host memory.
        time_limit_s: after which the best decision so far (without one, the greedy one) is returned, with the gap that remains.

    Raises:
        ValueError: a budget is negative.
    """
    if budget_bytes < 0 or max_offload_bytes < 0:
        raise ValueError(f"budgets count bytes from 0 up, got {budget_bytes} and {max_offload_bytes}")
    start = time.perf_counter()
    program = _make_program(problem, budget_bytes, max_offload_bytes)
    found, bound_s = _run(program, time_limit_s)
    decision = solve_greedy(problem, budget_bytes) if found is None else _without_unread(problem, found)
    cost_s = evaluate(problem, decision).cost_s
    excess_s = cost_s - bound_s
    optimal = excess_s <= _PROVED * program.everything_s
    return Solution(decision, optimal, 0.0 if optimal else excess_s / cost_s, time.perf_counter() - start)


def solve_greedy(problem: Problem, budget_bytes: int) -> Decision:
    """Saves, one after the other, what takes most cost off per byte, until nothing helps or fits. No proof, no offloading.

    Raises:
        ValueError: the budget is negative.
    """
    if budget_bytes < 0:
        raise ValueError(f"a budget counts bytes from 0 up, got {budget_bytes}")
    groups = [g for g in _groups(problem) if all(problem.values[v].saveable for v in g)]
    decision = Decision()
    now = evaluate(problem, decision)
    while True:
        best, best_gain = None, 0.0
        for group in groups:
            trial = Decision(decision.save.union(group))
            after = evaluate(problem, trial)
            gain = (now.cost_s - after.cost_s) / max(1, after.saved_bytes - now.saved_bytes)
            if after.saved_bytes <= budget_bytes and gain > best_gain:
                best, best_gain = (trial, after), gain
        if best is None:
            return decision
        decision, now = best


@dataclass(frozen=True)
class _Milp:
    """Minimise `costs @ x` over 0/1 vectors x = [save | offload | run], where `rows @ x >= needs` and `sizes @ x <= limits`.

    Save and offload have one entry per group (values kept as one), run one per operation that could run again. Sizes and
    limits are whole numbers of the largest unit that all bytes are multiples of.
    """

    groups: tuple[tuple[int, ...], ...]
    costs: np.ndarray
    allowed: np.ndarray
    rows: csr_array
    needs: np.ndarray
    sizes: np.ndarray
    limits: np.ndarray
    bytes_of: np.ndarray
    everything_s: float


def _groups(problem: Problem) -> list[tuple[int, ...]]:
    """Values that are kept as one: all outputs of a `together` operation, and every other output by itself."""
    return [g for op in problem.ops for g in ([op.outputs] if op.together else [(v,) for v in op.outputs]) if g]


def _make_program(problem: Problem, budget_bytes: int, max_offload_bytes: int) -> _Milp:
    """Leaves out what cannot matter: dead operations, implied rows, and keeping what is cheaper to recompute from scratch."""
    producer = {v: index for index, op in enumerate(problem.ops) for v in op.outputs}
    needed = {v for v, value in enumerate(problem.values) if value.needed and v in producer}
    above = _ancestors(problem, producer)
    ops = sorted(set().union(*(above[producer[v]] for v in needed)))
    column = {op: i for i, op in enumerate(ops)}
    readers: dict[int, set[int]] = {v: set() for v in producer}
    for op in ops:
        for v in problem.ops[op].inputs:
            if v in producer:
                readers[v].add(op)
    groups = [g for g in _groups(problem) if not needed.isdisjoint(g) or any(readers[v] for v in g)]
    count = len(groups)
    makers = [producer[g[0]] for g in groups]

    entries, needs = [], []  # (row, column, coefficient)
    for i, (group, maker) in enumerate(zip(groups, makers, strict=True)):
        is_needed = not needed.isdisjoint(group)  # implies that it is there for every reader
        for reader in [None] if is_needed else sorted(set().union(*(readers[v] for v in group))):
            row = len(needs)
            entries += [(row, i, 1.0), (row, count + i, 1.0), (row, 2 * count + column[maker], 1.0)]
            if reader is not None:
                entries.append((row, 2 * count + column[reader], -1.0))
            needs.append(float(reader is None))

    run_s = np.array([problem.ops[op].recompute_s for op in ops])
    scratch_s = np.array([math.fsum(problem.ops[op].recompute_s for op in above[maker]) for maker in makers])
    num_bytes = np.array([sum(problem.values[v].num_bytes for v in g) for g in groups], np.int64)
    save_s = np.array([problem.save_seconds(g) for g in groups])
    offload_s = num_bytes * problem.offload_s_per_byte
    can_save = np.array([all(problem.values[v].saveable for v in g) for g in groups], bool)
    can_offload = np.array([all(problem.values[v].offloadable for v in g) for g in groups], bool)
    can_save &= (num_bytes <= budget_bytes) & (save_s < scratch_s)
    can_offload &= (max_offload_bytes > 0) & (num_bytes <= max_offload_bytes) & (offload_s < scratch_s)

    none = np.zeros(len(ops), np.int64)
    unit = max(1, int(np.gcd.reduce(num_bytes[can_save | can_offload])))
    saved = np.concatenate([num_bytes // unit * can_save, 0 * num_bytes, none])
    offloaded = np.concatenate([0 * num_bytes, num_bytes // unit * can_offload, none])
    return _Milp(
        groups=tuple(groups),
        costs=np.concatenate([save_s, offload_s, run_s]),
        allowed=np.concatenate([can_save, can_offload, np.ones(len(ops), bool)]),
        rows=_sparse(entries, (len(needs), 2 * count + len(ops))),
        needs=np.array(needs),
        sizes=np.stack([saved, offloaded]),
        limits=np.array([budget_bytes // unit, max_offload_bytes // unit]),
        bytes_of=np.concatenate([num_bytes, num_bytes, none]),
        everything_s=math.fsum(run_s),
    )


def _ancestors(problem: Problem, producer: dict[int, int]) -> list[set[int]]:
    """For each operation, itself and all that run again when it does and nothing is kept."""
    reads = [{producer[v] for v in op.inputs if v in producer} for op in problem.ops]
    above: list[set[int]] = [set() for _ in problem.ops]
    for op in graphlib.TopologicalSorter(dict(enumerate(reads))).static_order():
        above[op] = {op}.union(*(above[before] for before in reads[op]))
    return above


def _run(program: _Milp, time_limit_s: float) -> tuple[Decision | None, float]:
    """The program's decision, if one was found in time, and the seconds that no decision within the budgets goes below."""
    if not program.costs.size:
        return Decision(), 0.0
    allowed = program.allowed
    scale = _SCALE / (program.everything_s or 1.0)
    tie_s_per_byte = _TIE * program.everything_s / max(1, program.bytes_of.sum())
    costs = scale * (program.costs + tie_s_per_byte * program.bytes_of)[allowed]
    digits, carries, limits = _split(program.sizes[:, allowed], program.limits)
    num_chosen, num_carries = len(costs), carries.shape[1]
    result = milp(
        np.append(costs, np.zeros(num_carries)),
        integrality=np.ones(num_chosen + num_carries),
        bounds=Bounds(0, np.repeat([1, np.inf], [num_chosen, num_carries])),  # pyright: ignore[reportArgumentType]
        constraints=[
            (hstack([program.rows[:, allowed], csr_array((len(program.needs), num_carries))]), program.needs, np.inf),
            (csr_array(np.hstack([digits, carries])), -np.inf, limits),
        ],
        # Presolve saves no time here, and undoing it can lose what fits: HiGHS then repairs, and says so on stdout.
        options={"disp": False, "presolve": False, "mip_rel_gap": 0.0, "time_limit": time_limit_s},
    )
    bound = result.mip_dual_bound
    bound_s = max(0.0, bound / scale - _TIE * program.everything_s) if bound is not None and math.isfinite(bound) else 0.0
    chosen = np.zeros_like(allowed)
    if result.x is not None:
        chosen[allowed] = result.x[:num_chosen] > 0.5
    if result.x is None or (program.sizes @ chosen > program.limits).any():
        return None, bound_s
    count = len(program.groups)
    save = frozenset(v for g, on in zip(program.groups, chosen[:count], strict=True) if on for v in g)
    offload = frozenset(v for g, on in zip(program.groups, chosen[count : 2 * count], strict=True) if on for v in g)
    return Decision(save, offload - save), bound_s


def _split(sizes: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The budgets `sizes @ x <= limits` that can be exceeded, as `digits @ x + carries @ c <= limits` for whole c from 0 up.

    With s = high * base + low, and the same of the limit, s @ x <= limit is low @ x <= low limit + base * carry and
    high @ x + carry <= high limit; then high is split again. No coefficient is large, and nothing is rounded.
    """
    base = 1 << _DIGIT_BITS
    digits, ends, carried = [], [], []  # carried: (row, carry, coefficient)
    num_carries = 0
    for budget in np.flatnonzero(sizes.sum(axis=1) > limits):
        high, limit = sizes[budget], int(limits[budget])
        while limit >= base:
            carried += [(len(digits), num_carries, -base), (len(digits) + 1, num_carries, 1)]
            num_carries += 1
            digits.append(high % base)
            ends.append(limit % base)
            high, limit = high // base, limit // base
        digits.append(high)
        ends.append(limit)
    carries = np.zeros((len(digits), num_carries))
    for row, column, coefficient in carried:
        carries[row, column] = coefficient
    # Over the base (a power of two: exactly), so that what HiGHS takes for whole isn't multiplied beyond its tolerance.
    return np.array(digits).reshape(len(digits), sizes.shape[1]) / base, carries / base, np.array(ends) / base


def _without_unread(problem: Problem, decision: Decision) -> Decision:
    """The same without values that nothing reads, or that run again anyway: rounding may leave them in."""
    recomputed = evaluate(problem, decision).recomputed
    read = {v for v, value in enumerate(problem.values) if value.needed}.union(
        *(problem.ops[op].inputs for op in recomputed)
    )
    made = {v for op in recomputed for v in problem.ops[op].outputs}
    useful = {v for g in _groups(problem) if made.isdisjoint(g) and not read.isdisjoint(g) for v in g}
    return Decision(decision.save & useful, decision.offload & useful)


def _sparse(entries: list[tuple[int, int, float]], shape: tuple[int, int]) -> csr_array:
    rows, columns, coefficients = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_array((coefficients, (rows, columns)), shape=shape)
