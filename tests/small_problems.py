"""Small problems for the planner's tests, all that could be decided in them, and a solver that tries all of it."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from jaxremat.knapsack import hull
from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.hull import Point
from jaxremat.knapsack.problem import Decision, Op, Problem, Value
from jaxremat.knapsack.solve import Row, Solution
from jaxremat.planner import candidates


def keep(*save: int, offload: tuple[int, ...] = ()) -> Decision:
    return Decision(frozenset(save), frozenset(offload))


def cost(problem: Problem, decision: Decision) -> float:
    return evaluate(problem, decision).cost_s


def every_decision(problem: Problem, max_offload_bytes: int = 0) -> list[Point]:
    """All legal decisions, as points."""
    choices = [
        [None]
        if v in problem.inputs
        else [None, *(["save"] * value.saveable), *(["offload"] * (value.offloadable and max_offload_bytes > 0))]
        for v, value in enumerate(problem.values)
    ]
    points = []
    for taken in itertools.product(*choices):
        decision = Decision(*(frozenset(v for v, how in enumerate(taken) if how == kind) for kind in ("save", "offload")))
        try:
            evaluation = evaluate(problem, decision)
        except ValueError:  # a part of what is kept together
            continue
        if evaluation.offloaded_bytes <= max_offload_bytes:
            points.append(Point(evaluation.saved_bytes, evaluation.cost_s, decision))
    return points


def least(points: list[Point], budget_bytes: int) -> Point:
    return min((p for p in points if p.saved_bytes <= budget_bytes), key=lambda p: (p.cost_s, p.saved_bytes))


def solve_by_trying_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner uses brute force in place of its solver, which takes a hundred times as long for problems this small."""
    monkeypatch.setattr(candidates, "solve", by_trying_all)
    monkeypatch.setattr(hull, "solve", by_trying_all)


def by_trying_all(
    problem: Problem, budget_bytes: int, *, max_offload_bytes: int = 0, rows: Sequence[Row] = (), time_limit_s: float = 0.0
) -> Solution:
    """What `solve` finds."""
    points = _points(replace(problem, save_s_per_byte=0.0), max_offload_bytes)
    price = problem.save_s_per_byte
    fits = [p for p in points if all(sum(row.num_bytes[v] for v in p.decision.save) <= row.budget_bytes for row in rows)]
    priced = [(p.cost_s + price * p.saved_bytes, p) for p in fits if p.saved_bytes <= budget_bytes]
    least_s = min(cost_s for cost_s, _ in priced)
    found = min((p for cost_s, p in priced if cost_s <= least_s * (1 + 1e-12)), key=lambda p: p.saved_bytes)
    return Solution(found.decision, True, 0.0)


@functools.cache
def _points(problem: Problem, max_offload_bytes: int) -> list[Point]:
    return every_decision(problem, max_offload_bytes)


@st.composite
def problems(draw, max_values: int = 9, ties: bool = False) -> Problem:
    """Small blocks: operations read any earlier values, make one or two, and come in any order."""
    count = draw(st.integers(1, max_values))
    unit = 1 if ties else draw(st.sampled_from([1, 2**20, 2**33 + 1]))  # odd and huge beside a few bytes: rounding shows
    costs = st.integers(0, 8) if ties else st.integers(0, 8) | st.floats(0.01, 20)
    sizes = st.integers(0, 4) if ties else st.tuples(st.integers(0, 9), st.integers(0, 3)).map(lambda n: n[0] * unit + n[1])
    inputs = draw(st.integers(1, 2))
    values = [Value(f"x{v}", 7, needed=draw(st.booleans())) for v in range(inputs)]
    ops = []
    while len(values) < inputs + count:
        reads = draw(st.lists(st.integers(0, len(values) - 1), max_size=3))
        made = min(draw(st.sampled_from([1, 1, 2])), inputs + count - len(values))
        outputs = tuple(range(len(values), len(values) + made))
        for v in outputs:
            num_bytes, saveable, offloadable = draw(sizes), *(draw(st.sampled_from([True, True, False])) for _ in range(2))
            values.append(Value(f"v{v}", num_bytes, saveable, offloadable, needed=draw(st.booleans())))
        ops.append(
            Op(f"o{outputs[0]}", tuple(reads), outputs, 1e-6 * draw(costs), draw(st.integers(0, 9)), draw(st.booleans()))
        )
    save_s, offload_s = (1e-6 * draw(st.sampled_from([0.0, 0.1, 0.7])) / unit for _ in range(2))
    return Problem(tuple(values), tuple(draw(st.permutations(ops))), tuple(range(inputs)), save_s, offload_s)
