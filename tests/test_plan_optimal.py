"""The solver finds the best plan: beside tables solved by hand, and beside every legal decision on small random blocks.

The evaluator, which replays decisions and shares no code with the solver, judges both the solver and the brute force here.
"""

import ctypes
import itertools
import math
import random
from collections.abc import Set
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.hull import Point, lower_bound, lower_hull
from jaxremat.knapsack.problem import Decision, Op, Problem, Value
from jaxremat.knapsack.solve import solve
from jaxremat.planner.candidates import candidates, fastest
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import Plan
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Names, Policy, Rule
from tests.planner_formula import find_plan
from tests.small_problems import cost, every_decision, keep, least, problems

EXACT = 1e-9


def best(problem: Problem, budget_bytes: int, **options) -> Decision:
    """`solve`, with its claims checked on the way: proved, and within the budgets."""
    solution = solve(problem, budget_bytes, **options)
    assert solution.optimal
    assert solution.gap == 0
    evaluation = evaluate(problem, solution.decision)
    assert evaluation.saved_bytes <= budget_bytes
    assert evaluation.offloaded_bytes <= options.get("max_offload_bytes", 0)
    return solution.decision


def random_block(count: int, seed: int) -> Problem:
    """A block too large for brute force, with bytes that share no factor: the hardest for a knapsack."""
    rng = random.Random(seed)
    values = [Value("x", 0)]
    ops = []
    for v in range(1, count + 1):
        values.append(Value(f"v{v}", rng.randint(1, 10**9), needed=rng.random() < 0.4))
        reads = tuple({rng.randrange(max(0, v - 8), v) for _ in range(rng.randint(1, 3))})
        ops.append(Op(f"o{v}", reads, (v,), rng.uniform(1e-6, 1e-3)))
    return Problem(tuple(values), tuple(ops), (0,), 1e-14, 3e-12)


def chain(*, needed: Set[int], saveable: Set[int] = frozenset({1, 2, 3, 4})) -> Problem:
    """Four values, 10 bytes each, each made from the one before; making them costs 1, 2, 4 and 8 seconds."""
    values = [Value("x", 10), *(Value(f"v{v}", 10, v in saveable, False, v in needed) for v in (1, 2, 3, 4))]
    ops = [Op(f"o{v}", (v - 1,), (v,), 2.0 ** (v - 1), flops=v) for v in (1, 2, 3, 4)]
    return Problem(tuple(values), tuple(ops), (0,), 0.0, 0.0)


# x -> 1 (5 s); 1 -> 2 and 1 -> 3 (1 s each): the backward pass reads 2 and 3 only
DIAMOND = Problem(
    tuple(Value(name, 10, needed=name in ("left", "right")) for name in ("x", "stem", "left", "right")),
    (Op("stem", (0,), (1,), 5.0), Op("left", (1,), (2,), 1.0), Op("right", (1,), (3,), 1.0)),
    (0,),
    0.0,
    0.0,
)


def attention(*, together: bool) -> Problem:
    """Attention makes 8 bytes that are needed, and a byte of softmax statistics that isn't by itself."""
    values = (Value("q", 8), Value("out", 8, needed=True), Value("stats", 1))
    return Problem(values, (Op("attention", (0,), (1, 2), 10.0, together=together),), (0,), 0.0, 0.0)


ALL = {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("problem", "budget", "save", "cost_s"),
    [
        (chain(needed=ALL), 0, (), 15),
        (chain(needed=ALL), 10, (4,), 7),
        (chain(needed=ALL), 29, (3, 4), 3),
        (chain(needed=ALL), 40, (1, 2, 3, 4), 0),
        (chain(needed={4}), 40, (4,), 0),
        (chain(needed={1, 4}), 10, (4,), 1),
        (chain(needed={4}, saveable={1, 2, 3}), 40, (3,), 8),
        (chain(needed={2, 4}, saveable={1, 3}), 10, (3,), 11),
        (chain(needed={2, 4}, saveable={1, 3}), 20, (1, 3), 10),
        (chain(needed=set()), 40, (), 0),
        (DIAMOND, 0, (), 7),  # the stem runs once for both sides
        (DIAMOND, 10, (1,), 2),
        (DIAMOND, 20, (2, 3), 0),
        (DIAMOND, 30, (2, 3), 0),
        (attention(together=True), 8, (), 10),
        (attention(together=True), 9, (1, 2), 0),
        (attention(together=False), 8, (1,), 0),
    ],
)
def test_solved_by_hand(problem, budget, save, cost_s):
    decision = best(problem, budget)
    assert decision == keep(*save)
    assert cost(problem, decision) == cost_s


@pytest.mark.parametrize(("left", "cost_s"), [(-1, 1e-6), (0, 0.0), (1, 0.0), (2, 0.0)])
def test_a_byte_beside_gigabytes_is_counted(left, cost_s):
    """Given the bytes as they are, HiGHS leaves out the decision that fits: coefficients of 1 and of 1e10 in one row."""
    large = 2**33 + 1
    values = (
        Value("x", 7),
        Value("tiny", 1),
        Value("a", 0, False, needed=True),
        Value("b", large),
        Value("c", large, needed=True),
    )
    costs = {1: 1e-6, 2: 0.0, 3: 1e-6, 4: 0.0}
    ops = tuple(Op(f"o{v}", ((), (1,), (), (3,))[v - 1], (v,), seconds) for v, seconds in costs.items())
    problem = Problem(values, ops, (0,), 0.0, 0.0)
    assert cost(problem, best(problem, large + 1 + left)) == cost_s


@pytest.mark.parametrize(("budget", "policy", "recompute_s"), [(1120, "save:a,c", 2), (1080, "1*save:c|1*save:a,c", 6)])
def test_the_worked_example(budget, policy, recompute_s):
    """The example of `knapsack/`, with its real solver."""
    bytes_of, seconds = {"a": 40, "b": 40, "c": 20}, {"a": 4.0, "b": 1.0, "c": 3.0}
    values = [Value("x", 0, saveable=False), *(Value(name, size, needed=True) for name, size in bytes_of.items())]
    ops = [Op(name, (n,), (n + 1,), cost_s) for n, (name, cost_s) in enumerate(seconds.items())]
    problem = Problem(tuple(values), tuple(ops), (0,), 0.0, 0.0)
    for layer_bytes, save, cost_s in ((20, {3}, 5), (40, {1}, 4), (60, {1, 3}, 1)):  # also the example of `knapsack/`
        decision = solve(problem, layer_bytes).decision
        assert (decision.save, evaluate(problem, decision).cost_s) == (save, cost_s)
    layer = LayerEstimate(problem, {1: "a", 2: "b", 3: "c"})

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        layers = policy.layers(2) * (2 // policy.size(2))
        saved = [bytes_of if one == Rule("none") else one.save if isinstance(one, Names) else () for one in layers]
        made_again = sum(seconds[name] for names in saved for name in seconds if name not in names)
        return Cost(1000 + sum(bytes_of[name] for names in saved for name in names), 100.0 + made_again)

    assert compiled(NOTHING, "", 1) == Cost(1000, 116.0)
    found = find_plan(Steps(lambda batch: layer, compiled, 2, budget), losses=("",), batch=1)
    assert isinstance(found, Plan)
    assert (str(found.policy), found.recompute_s, found.cost) == (policy, recompute_s, Cost(budget, 100.0 + recompute_s))
    assert found.predicted_bytes == budget
    if budget == 1080:
        assert compiled(Names(("a",)), "", 1) == Cost(1080, 108.0)


@pytest.mark.parametrize(
    ("budget", "max_offload", "offload_price", "decision", "cost_s"),
    [
        (0, 100, 0.05, keep(offload=(1,)), 5.0),  # its host transfers cost half of making it again
        (0, 100, 0.2, keep(), 10.0),  # twice
        (0, 99, 0.05, keep(), 10.0),
        (100, 100, 0.05, keep(1), 1.0),
        (100, 100, 0.001, keep(offload=(1,)), 0.1),
    ],
)
def test_offloading_where_it_pays(budget, max_offload, offload_price, decision, cost_s):
    values = (Value("x", 1), Value("v", 100, needed=True))
    problem = Problem(values, (Op("o", (0,), (1,), 10.0),), (0,), 0.01, offload_price)
    assert best(problem, budget, max_offload_bytes=max_offload) == decision
    assert cost(problem, decision) == pytest.approx(cost_s)


def test_the_evaluation_counts_every_term():
    problem = replace(chain(needed=ALL), save_s_per_byte=0.5)
    evaluation = evaluate(problem, keep(2))
    assert evaluation.saved_bytes == 10
    assert evaluation.recomputed == (0, 2, 3)
    assert evaluation.recomputed_flops == 1 + 3 + 4
    assert (evaluation.recompute_s, evaluation.save_s, evaluation.offload_s) == (13.0, 5.0, 0.0)
    assert evaluation.cost_s == 18.0
    assert evaluate(chain(needed={4}), keep(1, 4)).saved_bytes == 20, "kept for nothing, and yet it takes its bytes"


@pytest.mark.parametrize(
    ("decision", "named"),
    [
        (keep(0), "x0"),
        (keep(9), "9"),
        (keep(1), "v1"),
        (keep(offload=(2,)), "v2"),
        (keep(3, offload=(3,)), "v3"),
        (keep(4), "both"),
    ],
)
def test_illegal_decisions_are_rejected(decision, named):
    values = (
        Value("x0", 1),
        Value("v1", 1, saveable=False),
        Value("v2", 1, offloadable=False),
        Value("v3", 1),
        Value("v4", 1),
        Value("v5", 1),
    )
    ops = (Op("o", (0,), (1, 2, 3), 1.0), Op("both", (3,), (4, 5), 1.0, together=True))
    with pytest.raises(ValueError, match=named):
        evaluate(Problem(values, ops, (0,), 0.0, 0.0), decision)


@pytest.mark.parametrize(
    ("ops", "inputs", "price", "got"),
    [
        ((Op("o", (0,), (1,), -1.0),), (0,), 0.0, r"-1\.0"),
        ((Op("o", (0,), (1,), 1.0),), (0,), math.nan, "nan"),
        ((Op("o", (0,), (1,), 1.0),), (), 0.0, r"\[1\] of 2"),
        ((Op("o", (0,), (1,), 1.0), Op("p", (0,), (1,), 1.0)), (0,), 0.0, r"\[0, 1, 1\] of 2"),
        ((Op("o", (2,), (1,), 1.0),), (0,), 0.0, r"o .*\(2,\)"),
        ((Op("o", (1,), (0,), 1.0), Op("p", (0,), (1,), 1.0)), (), 0.0, r"\[0, 1, 0\]|\[1, 0, 1\]"),  # a cycle
    ],
)
def test_impossible_problems_are_rejected(ops, inputs, price, got):
    with pytest.raises(ValueError, match=got):
        Problem((Value("a", 1), Value("b", 1)), ops, inputs, price, 0.0)


def test_negative_budgets_are_rejected():
    for call in (
        lambda: solve(DIAMOND, -1),
        lambda: solve(DIAMOND, 1, max_offload_bytes=-1),
        lambda: lower_hull(DIAMOND, max_offload_bytes=-1),
    ):
        with pytest.raises(ValueError, match="-1"):
            call()


# Beside every legal decision.


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_no_legal_decision_is_cheaper(problem, data):
    points = every_decision(problem)
    budget = data.draw(st.sampled_from(sorted({p.saved_bytes for p in points}))) + data.draw(st.integers(-1, 1))
    budget = max(0, budget)
    truth = least(points, budget).cost_s
    assert cost(problem, best(problem, budget)) == pytest.approx(truth, rel=EXACT, abs=0)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(problems(max_values=6), st.floats(0, 1), st.floats(0, 1))
def test_no_legal_decision_is_cheaper_with_the_host_s_memory(problem, share, host_share):
    all_bytes = sum(value.num_bytes for value in problem.values)
    budget, max_offload = int(share * all_bytes), int(host_share * all_bytes)
    truth = least(every_decision(problem, max_offload), budget).cost_s
    found = best(problem, budget, max_offload_bytes=max_offload)
    assert cost(problem, found) == pytest.approx(truth, rel=EXACT, abs=0)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(problems(ties=True), st.integers(0, 20))
def test_between_equal_costs_fewer_bytes(problem, budget):
    points = every_decision(problem)
    truth = least(points, budget).cost_s
    fewest = min(p.saved_bytes for p in points if p.cost_s <= truth * (1 + EXACT))
    assert evaluate(problem, best(problem, budget)).saved_bytes == fewest


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(problems(max_values=12))
def test_more_budget_never_costs_more(problem):
    all_bytes = sum(value.num_bytes for value in problem.values)
    costs = [cost(problem, best(problem, all_bytes * tenth // 5)) for tenth in range(6)]
    assert all(after <= before * (1 + EXACT) for before, after in itertools.pairwise(costs))


@pytest.mark.full
@settings(max_examples=50, deadline=None)
@given(problems(), st.sampled_from([0, 0, 10]))
def test_the_frontier_is_the_lower_hull_of_all_decisions(problem, max_offload):
    problem = replace(
        problem, values=tuple(replace(v, offloadable=v.offloadable and i < 5) for i, v in enumerate(problem.values))
    )
    cloud = every_decision(problem, max_offload)
    points = lower_hull(problem, max_offload_bytes=max_offload)
    for point in points:
        assert (point.saved_bytes, point.cost_s) == (
            evaluate(problem, point.decision).saved_bytes,
            cost(problem, point.decision),
        )
    assert points[0].saved_bytes == 0
    for left, right in itertools.pairwise(points):
        assert left.saved_bytes < right.saved_bytes
        assert left.cost_s > right.cost_s
    slopes = [(a.cost_s - b.cost_s) / (b.saved_bytes - a.saved_bytes) for a, b in itertools.pairwise(points)]
    assert all(after < before for before, after in itertools.pairwise(slopes))
    assert points[-1].cost_s == pytest.approx(min(p.cost_s for p in cloud), rel=EXACT, abs=0)
    for p in cloud:
        assert p.cost_s >= lower_bound(points, 1, p.saved_bytes) - EXACT * points[0].cost_s


def pareto(bytes_and_costs: np.ndarray) -> np.ndarray:
    """The rows (bytes, seconds) that no other row beats."""
    ordered = bytes_and_costs[np.lexsort((bytes_and_costs[:, 1], bytes_and_costs[:, 0]))]
    before = np.minimum.accumulate(np.concatenate([[np.inf], ordered[:-1, 1]]))
    return ordered[ordered[:, 1] < before]


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(problems(max_values=10), st.floats(0, 1.1))
def test_no_four_layers_cost_less_than_the_bound(problem, share):
    """And the planner's best, which is one save-set or two in turns, comes as near to it as whole layers can."""
    problem = replace(problem, ops=tuple(replace(op, together=False) for op in problem.ops))  # which can't differ by layer
    one = pareto(np.array([(p.saved_bytes, p.cost_s) for p in every_decision(problem)]))
    two = pareto((one[:, None] + one[None]).reshape(-1, 2))
    four = pareto((two[:, None] + two[None]).reshape(-1, 2))
    budget = int(share * 4 * one[-1, 0])
    truth = four[four[:, 0] <= budget][-1, 1]
    points = lower_hull(problem)
    bound = lower_bound(points, 4, budget)
    block = LayerEstimate(problem, {v: value.name for v, value in enumerate(problem.values)})
    found = fastest(candidates(block, 4, Corrections(0, budget, beyond_bytes=dict.fromkeys((1, 2, 4), 0))))
    assert found
    assert found.saved_bytes <= budget
    assert bound <= truth * (1 + EXACT)
    assert truth <= found.cost_s * (1 + EXACT)
    step = max((a.cost_s - b.cost_s for a, b in itertools.pairwise(points)), default=0.0)
    assert found.cost_s - bound <= step + EXACT * points[0].cost_s, "rounding costs less than one layer's step"


POINTS = (Point(0, 10.0, keep()), Point(10, 4.0, keep(1)), Point(20, 2.0, keep(1, 2)))


def test_the_bound_by_hand():
    assert lower_bound(POINTS, 4, -1) == math.inf
    assert lower_bound(POINTS, 4, 25) == pytest.approx(25.0)
    assert lower_bound(POINTS, 4, 10**9) == 8.0
    for points, num_layers in (((), 4), (POINTS, 0)):
        with pytest.raises(ValueError, match=rf"\b{len(points)} and {num_layers}$"):
            lower_bound(points, num_layers, 0)


@pytest.mark.full
def test_a_block_of_200_values():
    problem = random_block(200, seed=0)
    budget = sum(value.num_bytes for value in problem.values) // 10
    assert cost(problem, best(problem, budget)) < cost(problem, Decision())
    points = lower_hull(random_block(40, seed=1))
    assert len(points) > 10


def test_solving_prints_nothing(capfd):
    """Standard output belongs to the program's answer. HiGHS prints from C, which flushes a pipe late."""
    solve(DIAMOND, 10)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("", "")


def test_out_of_time_the_gap_is_known():
    problem = random_block(80, seed=0)
    budget = sum(value.num_bytes for value in problem.values) // 10
    solution = solve(problem, budget, time_limit_s=0.0)
    assert evaluate(problem, solution.decision).saved_bytes <= budget
    assert not solution.optimal
    assert 0 < solution.gap <= 1
    with pytest.raises(TimeoutError):
        lower_hull(problem, time_limit_s=0.0)
