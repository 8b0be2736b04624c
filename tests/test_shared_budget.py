"""Several kinds of layers are planned within one budget, and no other choice of one save-set per kind is faster.

What is best is found by brute force: every legal decision of one kind with every one of the others. What the single layer that
stands for all kinds costs is compared with the layers' own costs, by the evaluator.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.planner import without_flops
from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.hull import lower_bound
from jaxremat.knapsack.prices import prices
from jaxremat.knapsack.problem import LEAST_S, Decision, Op, Problem, Value
from jaxremat.planner.candidates import candidates, fastest, named_policies
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import NoPlan, Plan
from jaxremat.planner.shared_budget import EqualLayers, as_one
from jaxremat.planner.steps import SPARSE, Cost, Steps
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import NOTHING, Mix, Names, Policy, Rule
from tests.planner_formula import find_plan
from tests.small_problems import every_decision, problems, solve_by_trying_all

EXACT = 1e-9
PREFIXES = ("encoder/", "decoder/", "blocks_x/")
NOTHING_BEYOND = {1: 0}


def fused(problem: Problem) -> frozenset[int]:
    """The values that fused attention makes."""
    return frozenset(v for op in problem.ops if op.together for v in op.outputs)


def stack(problem: Problem, num_layers: int, prefix: str, **more) -> EqualLayers:
    """Layers whose values are named as those of one of several kinds are, fused attention's apart."""
    by_primitive = fused(problem).union(problem.inputs)
    names = {v: f"{prefix}{value.name}" for v, value in enumerate(problem.values) if v not in by_primitive}
    return EqualLayers(LayerEstimate(problem, names, **more), num_layers, prefix)


@st.composite
def kinds(draw, max_kinds: int = 3, with_attention: bool = True) -> list[EqualLayers]:
    """Small layers of two or three kinds, each with prices of its own, and offloading at the price that all share."""
    found = []
    offload_price = draw(st.sampled_from([0.0, 1e-7]))
    for prefix in PREFIXES[: draw(st.integers(2, max_kinds))]:
        problem = draw(problems(max_values=4))
        ops = tuple(replace(op, together=op.together and with_attention) for op in problem.ops)
        problem = replace(problem, ops=ops, offload_s_per_byte=offload_price)
        values = [replace(v, saveable=v.saveable or n in fused(problem)) for n, v in enumerate(problem.values)]
        values = [replace(v, offloadable=v.offloadable and n not in fused(problem)) for n, v in enumerate(values)]
        found.append(stack(replace(problem, values=tuple(values)), draw(st.integers(1, 5)), prefix))
    return found


def cloud(kind: EqualLayers, attention: bool, max_offload_bytes: int = 0) -> np.ndarray:
    """Every decision of one kind as (saved bytes, offloaded bytes, seconds) in all its layers.

    Fused attention's results are kept in all of them or in none.
    """
    problem = kind.layer.problem
    all_or_none = fused(problem) if attention else frozenset()
    rows = [
        (point.saved_bytes, evaluate(problem, point.decision).offloaded_bytes, point.cost_s)
        for point in every_decision(problem, max_offload_bytes)
        if point.decision.save & fused(problem) == all_or_none
    ]
    return kind.num_layers * np.array(rows)


def best_by_hand(found: list[EqualLayers], budget: int, max_offload_bytes: int = 0) -> float:
    """The least seconds of all combinations of one decision for each kind, within the budgets."""
    ways = {False, any(fused(kind.layer.problem) for kind in found)}
    costs = []
    for attention in ways:
        clouds = [cloud(kind, attention, max_offload_bytes) for kind in found]
        together = functools.reduce(lambda a, b: (a[:, None] + b[None]).reshape(-1, 3), clouds)
        fits = (together[:, 0] <= budget) & (together[:, 1] <= max_offload_bytes)
        costs += list(together[fits, 2])
    return min(costs)


def replayed(found: list[EqualLayers], policy: Policy) -> tuple[int, float]:
    """The bytes and the seconds of a policy in all layers: what each kind's layers keep by their own names, and cost."""
    assert isinstance(policy, Rule | Names)
    save, offload = (policy.save, policy.offload) if isinstance(policy, Names) else ((), ())
    total_bytes, seconds = 0, 0.0
    for kind in found:
        problem, names = kind.layer.problem, kind.layer.names
        by_name, to_host = (frozenset(v for v, name in names.items() if name in asked) for asked in (save, offload))
        kept = Decision(by_name | (fused(problem) if policy.attention else frozenset()), to_host)
        evaluation = evaluate(problem, kept)
        total_bytes += kind.num_layers * evaluation.saved_bytes
        seconds += kind.num_layers * evaluation.cost_s
    return total_bytes, seconds


# Against brute force.


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(kinds(), st.floats(0, 1.1))
def test_no_choice_of_a_save_set_for_each_kind_is_faster(found, share):
    """The candidate fits, its text says what each kind's layers keep, and these cost what the planner says."""
    one = as_one(found)
    budget = int(share * sum(value.num_bytes for value in one.layer.problem.values))
    corrections = Corrections(base_bytes=0, budget_bytes=budget, beyond_bytes=NOTHING_BEYOND)
    best = fastest(candidates(one.layer, one.num_layers, corrections))
    assert best
    assert best.cost_s == pytest.approx(best_by_hand(found, budget), rel=EXACT, abs=1e-15)
    assert parse(str(best.policy)) == best.policy
    saved_bytes, seconds = replayed(found, best.policy)
    assert saved_bytes == best.saved_bytes <= budget
    assert seconds == pytest.approx(best.cost_s, rel=EXACT, abs=1e-15)


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(kinds(max_kinds=2, with_attention=False), st.floats(0, 1), st.floats(0.1, 1), st.booleans())
def test_the_host_s_memory_is_shared_among_the_kinds_that_may_use_it(found, share, host_share, first_may):
    """A kind without room of its own in host memory offloads nothing there, whatever room the other has."""
    room = [int(host_share * sum(value.num_bytes for value in kind.layer.problem.values)) for kind in found]
    room[0] *= first_may
    found = [replace(kind, layer=replace(kind.layer, offload_bytes=n)) for kind, n in zip(found, room, strict=True)]
    one = as_one(found)
    budget = int(share * sum(value.num_bytes for value in one.layer.problem.values))
    best = fastest(candidates(one.layer, 1, Corrections(0, budget, beyond_bytes=NOTHING_BEYOND)))
    assert best
    in_all = sum(kind.num_layers * n for kind, n in zip(found, room, strict=True))
    assert one.layer.offload_bytes == in_all
    allowed = [kind if n else _without_offloading(kind) for kind, n in zip(found, room, strict=True)]
    assert best.cost_s == pytest.approx(best_by_hand(allowed, budget, in_all), rel=EXACT, abs=1e-15)
    assert replayed(allowed, best.policy) == (best.saved_bytes, pytest.approx(best.cost_s, rel=EXACT, abs=1e-15))


def _without_offloading(kind: EqualLayers) -> EqualLayers:
    values = tuple(replace(value, offloadable=False) for value in kind.layer.problem.values)
    return replace(kind, layer=replace(kind.layer, problem=replace(kind.layer.problem, values=values)))


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(kinds(max_kinds=2), st.floats(0, 1.1))
def test_the_bound_holds_for_layers_that_each_keep_something_else(found, share):
    """Not only for one save-set per kind: the hull of the single layer is the hull of what all layers can do."""
    found = [replace(kind, num_layers=1 + kind.num_layers % 2) for kind in found]
    one = as_one(found)
    budget = int(share * sum(value.num_bytes for value in one.layer.problem.values))
    layers = []
    for kind in found:
        points = every_decision(kind.layer.problem)
        layers += kind.num_layers * [np.unique([(p.saved_bytes, p.cost_s) for p in points], axis=0)]
    together = functools.reduce(lambda a, b: np.unique((a[:, None] + b[None]).reshape(-1, 2), axis=0), layers)
    truth = together[together[:, 0] <= budget, 1].min()
    assert lower_bound(one.layer.hull, 1, budget) <= truth * (1 + EXACT) + 1e-15


# What the single layer is made of.

#: 3 layers of an encoder and 2 of a decoder, each with one value.
EXAMPLE = [
    stack(
        Problem(
            (Value("x", 4, saveable=False), Value("h", num_bytes, needed=True)),
            (Op("make", (0,), (1,), seconds, flops=1),),
            (0,),
            save_s_per_byte=0.0,
            offload_s_per_byte=0.0,
        ),
        num_layers,
        prefix,
    )
    for prefix, num_layers, num_bytes, seconds in (("encoder/", 3, 8, 2.0), ("decoder/", 2, 10, 4.0))
]


@pytest.mark.parametrize(
    ("budget", "policy", "seconds"),
    [(19, "nothing", 14), (20, "save:decoder/h", 6), (43, "save:decoder/h", 6), (44, "save:encoder/h,decoder/h", 0)],
)
def test_the_worked_example(budget, policy, seconds):
    one = as_one(EXAMPLE)
    assert [(v.num_bytes, v.num_layers) for v in one.layer.problem.values] == [(12, 3), (24, 3), (8, 2), (20, 2)]
    assert [op.recompute_s for op in one.layer.problem.ops] == [6.0, 8.0]
    best = fastest(candidates(one.layer, one.num_layers, Corrections(0, budget)))
    assert best
    assert (str(best.policy), best.cost_s) == (policy, seconds)


def test_one_kind_stays_a_stack_that_may_be_mixed():
    alone = EXAMPLE[0]
    assert as_one([alone]) is alone
    assert alone.has_groups
    found = candidates(alone.layer, alone.num_layers, Corrections(0, 20, beyond_bytes={1: 0, 3: 0}))
    assert any(isinstance(candidate.policy, Mix) for candidate in found)
    one = as_one(EXAMPLE)
    found = candidates(one.layer, one.num_layers, Corrections(0, 10**6))
    assert not any(isinstance(candidate.policy, Mix) for candidate in found), "which layer of a group has which kind?"


def test_saving_has_each_kind_s_own_price():
    """In a scan a saved byte costs; in unrolled layers it doesn't: only what the values themselves cost."""
    scanned, unrolled = EXAMPLE
    dear = replace(scanned, layer=replace(scanned.layer, problem=replace(scanned.layer.problem, save_s_per_byte=0.3)))
    one = as_one([dear, unrolled]).layer.problem
    assert one.save_s_per_byte == 0.0
    assert [value.save_s for value in one.values if value.saveable] == [pytest.approx(3 * 8 * 0.3), 0.0]
    best = fastest(candidates(as_one([dear, unrolled]).layer, 1, Corrections(0, 100)))
    assert best
    assert str(best.policy) == "save:decoder/h", "writing encoder/h takes 2.4 s in each layer, making it again takes 2 s"


def test_alternatives_are_combined_pairwise():
    def slower(kind: EqualLayers, *times: int) -> EqualLayers:
        others = (replace(kind.layer, problem=replace(kind.layer.problem, ops=_times(kind, n))) for n in times)
        return replace(kind, layer=replace(kind.layer, alternatives=tuple(others)))

    def _times(kind: EqualLayers, n: int) -> tuple[Op, ...]:
        return tuple(replace(op, recompute_s=n * op.recompute_s) for op in kind.layer.problem.ops)

    one = as_one([slower(EXAMPLE[0], 10, 100), slower(EXAMPLE[1], 1000)]).layer
    assert [op.recompute_s for op in one.problem.ops] == [6.0, 8.0]
    assert [[op.recompute_s for op in other.problem.ops] for other in one.alternatives] == [[60.0, 8000.0], [600.0, 8.0]]
    assert all(not other.alternatives for other in one.alternatives)


def test_named_policies_are_those_of_all_kinds():
    """Adding a bias is free in any number of layers, so that `dots` saves what it reads, in every kind."""

    def biased(num_layers: int, prefix: str) -> EqualLayers:
        values = (Value("x", 10, saveable=False), Value("matmul", 10), Value("biased", 20, needed=True))
        ops = (Op("matmul", (0,), (1,), 5.0, flops=7), Op("bias", (1,), (2,), LEAST_S))
        return stack(Problem(values, ops, (0,), 0.0, 0.0), num_layers, prefix)

    one = as_one([biased(24, "encoder/"), biased(7, "decoder/")])
    matmuls = {v for v, value in enumerate(one.layer.problem.values) if value.name.endswith("matmul")}
    assert named_policies(one.layer)[Rule("dots")] == matmuls
    assert sum(one.layer.problem.values[v].num_bytes for v in matmuls) == (24 + 7) * 10
    assert str(without_flops(one.layer)) == "save:encoder/matmul,decoder/matmul"
    listed = prices(one.layer.problem, Decision(), one.num_layers)
    assert {(price.name, price.num_bytes) for price in listed if "matmul" in price.name} == {
        ("encoder/matmul", 240),
        ("decoder/matmul", 70),
    }


def test_a_learned_working_set_goes_by_the_values_of_one_layer():
    """24 layers whose largest value has 10 bytes, and 2 with one of 40: only the latter is large."""

    def chain(num_layers: int, prefix: str, num_bytes: int) -> EqualLayers:
        values = (Value("x", 1, saveable=False), Value("a", 4, needed=True), Value("b", num_bytes, needed=True))
        ops = (Op("a", (0,), (1,), 1.0), Op("b", (1,), (2,), 1.0))
        return stack(Problem(values, ops, (0,), 0.0, 0.0), num_layers, prefix)

    one = as_one([chain(24, "encoder/", 10), chain(2, "decoder/", 40)]).layer
    learned = one.families[0].with_working_set_of(Decision(), -5)
    free = [value.name for v, value in enumerate(learned.problem.values) if value.saveable and v not in one.problem.inputs]
    assert free == ["encoder/a", "encoder/b", "decoder/a"]


def test_kinds_that_can_t_be_told_apart_are_rejected():
    dear = replace(EXAMPLE[1].layer.problem, offload_s_per_byte=1.0)
    offloading = [replace(EXAMPLE[0].layer, offload_bytes=1), replace(EXAMPLE[1].layer, problem=dear, offload_bytes=1)]
    for got, wrong in {
        r"\[\]": [],
        "encoder/$": [EXAMPLE[0], replace(EXAMPLE[1], prefix="encoder/")],
        "encoder/h$": [EXAMPLE[0], replace(EXAMPLE[0], prefix="decoder/")],
        r"\[0\.0, 1\.0\]": [replace(kind, layer=layer) for kind, layer in zip(EXAMPLE, offloading, strict=True)],
    }.items():
        with pytest.raises(ValueError, match=got):
            as_one(wrong)


# Plans.


def layers_at(batch: int) -> list[EqualLayers]:
    """An encoder of 6 layers and a decoder of 3 that are larger, with fused attention in both and cross-attention in one."""

    def kind(prefix: str, num_layers: int, width: int, num_attentions: int) -> EqualLayers:
        scale = width * batch
        values = [Value("x", 4 * scale, saveable=False, offloadable=False, needed=True)]
        ops = []
        for name, num_bytes, seconds in (("query", 4, 3.0), ("up", 16, 9.0), ("gate", 16, 2.0), ("down", 4, 8.0)):
            ops.append(Op(name, (len(values) - 1,), (len(values),), seconds * scale, flops=int(seconds)))
            values.append(Value(name, num_bytes * scale, needed=True))
        for n in range(num_attentions):
            ops.append(Op(f"attention{n}", (1,), (len(values), len(values) + 1), 5.0 * scale, flops=5, together=True))
            values += [Value(f"fused{n}{part}", 2 * scale, offloadable=False, needed=True) for part in ("", "+")]
        problem = Problem(tuple(values), tuple(ops), (0,), save_s_per_byte=0.01, offload_s_per_byte=1.0)
        return stack(problem, num_layers, prefix)

    return [kind("encoder/", 6, 2, 1), kind("decoder/", 3, 5, 2)]


FIXED = 1000


def compiled(policy: Policy, loss: str, batch: int) -> Cost:
    """Bytes and seconds of a step by formula: what the layers of both kinds keep and cost, beside what is always there."""
    found = layers_at(batch)
    inputs = sum(kind.num_layers * kind.layer.input_bytes for kind in found)
    _, nothing_s = replayed(found, NOTHING)
    if policy == SPARSE:
        return Cost(FIXED + inputs // 2, 100 * batch + 2 * nothing_s)
    if isinstance(policy, Rule) and policy.kind in ("none", "dots"):
        made = {name for kind in found for name in kind.layer.names.values()}
        attention = policy.attention or policy.kind == "none"
        policy = Names(tuple(sorted(name for name in made if policy.kind == "none" or "gate" not in name)), (), attention)
    saved_bytes, seconds = replayed(found, policy)
    return Cost(FIXED + inputs + saved_bytes, 100 * batch + seconds)


@functools.cache
def layer_at(batch: int) -> LayerEstimate:
    return as_one(layers_at(batch)).layer


def planned(budget: int, **options) -> Plan | NoPlan:
    one = as_one(layers_at(1))

    steps = Steps(layer_at, compiled, one.num_layers, budget, one.has_groups)
    return find_plan(steps, **{"losses": ("",), "batch": 8, "fixed_bytes": FIXED, "batches": range(1, 65), **options})


@pytest.fixture
def without_solver(monkeypatch):
    layer_at.cache_clear()
    solve_by_trying_all(monkeypatch)


@pytest.mark.usefixtures("without_solver")
def test_a_plan_of_two_kinds_fits_and_no_named_policy_that_fits_is_faster():
    """At rising budgets: from below what `nothing` takes to more than everything takes, never slower with more."""
    least, nothing, everything = (compiled(policy, "", 8).total_bytes for policy in (SPARSE, NOTHING, Rule("none")))
    assert least < nothing < everything
    assert isinstance(planned(least - 1), NoPlan)
    before, names = None, set()
    for budget in (*range(least, everything, (everything - least) // 4), everything, 2 * everything):
        found = planned(budget)
        assert isinstance(found, Plan)
        assert found.cost.total_bytes <= budget
        assert found.predicted_bytes in (None, found.cost.total_bytes)
        assert found.bound_s is not None
        assert found.bound_s <= (found.recompute_s or np.inf) * (1 + EXACT)
        for policy in named_policies(layer_at(8)):
            cost = compiled(policy, "", 8)
            assert cost.total_bytes > budget or found.cost.step_s <= cost.step_s
        assert before is None or found.cost.step_s <= before
        before = found.cost.step_s
        if budget < nothing:
            assert found.policy == SPARSE
        if isinstance(found.policy, Names):
            names |= {name.partition("/")[0] for name in found.policy.save}
    assert names == {"encoder", "decoder"}


@pytest.mark.usefixtures("without_solver")
def test_the_batch_of_two_kinds_is_chosen():
    budget = compiled(NOTHING, "", 20).total_bytes
    batches = range(4, 65, 4)
    found = planned(budget, batch=None, batches=batches)
    assert isinstance(found, Plan)
    assert found.cost.total_bytes <= budget
    at_hand = [(b, compiled(policy, "", b)) for b in batches[:5] for policy in (NOTHING, Rule("none"), Rule("dots", True))]
    assert found.batch / found.cost.step_s >= max(b / cost.step_s for b, cost in at_hand if cost.total_bytes <= budget)
    largest = planned(budget, batch=None, batches=batches, objective="batch")
    assert isinstance(largest, Plan)
    assert largest.batch > 20
    assert largest.policy == SPARSE


@pytest.mark.parametrize("num_layers", [(1, 1), (3, 1)])
def test_groups_make_sense_where_a_kind_has_several_layers(num_layers):
    one = as_one([replace(kind, num_layers=n) for kind, n in zip(EXAMPLE, num_layers, strict=True)])
    assert one.num_layers == 1
    assert one.has_groups == (max(num_layers) > 1)
    steps = Steps(lambda batch: one.layer, compiled, one.num_layers, 0, one.has_groups)
    assert steps.least == ((NOTHING, SPARSE) if max(num_layers) > 1 else (NOTHING, Rule("none")))
    assert Steps(lambda batch: one.layer, compiled, 2, 0).least == (NOTHING, SPARSE)
    assert Steps(lambda batch: one.layer, compiled, 1, 0, has_groups=False).least == (NOTHING, Rule("none"))
