"""A plan was compiled, fits, and is no slower than anything else compiled for it; a formula stands in for XLA here."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxremat.knapsack.hull import lower_hull
from jaxremat.knapsack.problem import Op, Problem, Value
from jaxremat.planner.candidates import candidates, fastest
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.curve import CurvePoint, curves
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.places import WORTH
from jaxremat.planner.plan import NoPlan, Plan, find_plans
from jaxremat.planner.steps import GROUPS, SPARSE, Cost, Steps
from jaxremat.policy.spec import NOTHING, Mix, Names, Policy, Rule
from jaxremat.search.batch import spaced
from jaxremat.search.compiles import Compile, Compiles
from tests.planner_formula import BYTES, LAYERS, NAMES, SECONDS, Xla, find_plan, layer_at
from tests.small_problems import solve_by_trying_all


@pytest.fixture(autouse=True)
def without_solver(monkeypatch):
    solve_by_trying_all(monkeypatch)


def estimates_at(num_estimates: int, batch: int) -> LayerEstimate:
    """A layer by so many estimates, of which the first is right."""
    layer = layer_at(batch)
    slower = [tuple(replace(op, recompute_s=op.recompute_s * n) for op in layer.problem.ops) for n in (2, 5)]
    others = tuple(replace(layer, problem=replace(layer.problem, ops=ops)) for ops in slower)
    return replace(layer, alternatives=others[: num_estimates - 1])


def plan(xla: Xla, budget: int, most_that_fit: int | None = None, **options) -> Plan | NoPlan:
    options = {"losses": ("full", "chunked"), "fixed_bytes": xla.fixed, "batches": range(1, 65), **options}
    most = []
    steps = Steps(layer_at, xla, LAYERS, budget, most_that_fit=most_that_fit)
    steps = replace(steps, expect=lambda further: most.append(len(xla.calls) + further))
    found = find_plan(steps, **options)
    given_batch = options.get("batch") or options.get("objective") == "memory"
    is_short = most_that_fit is not None and options.get("objective", "time") == "time" and not xla.is_small
    assert not (most and is_short), "steps that are rejected in seconds aren't promised as compiles of minutes"
    assert most or most_that_fit
    assert not most or most[0] <= 26 or not given_batch, (
        "two losses, three candidates of each of two estimates, four named, twelve near"
    )
    assert len(xla.calls) <= 14 or xla.is_small or not given_batch, "where steps aren't small, none is near"
    assert all(len(xla.calls) <= at_most for at_most in most)
    assert len(xla.calls) == len(set(xla.calls)), "compiled twice"
    assert [(t.policy, t.loss, t.batch) for t in found.tried] == xla.calls
    num_fitting = sum(t.cost.total_bytes <= budget for t in found.tried)
    assert not is_short or num_fitting <= (most_that_fit or 0)
    assert not is_short or not any(isinstance(t.policy, Mix) for t in found.tried), "a mix compiles for longer"
    if isinstance(found, Plan):
        assert found.cost == Xla(xla.slip, xla.fixed)(found.policy, found.loss, found.batch)
        assert found.cost.total_bytes <= budget, "an answer fits"
        at_its_batch = [t for t in found.tried if (t.loss, t.batch) == (found.loss, found.batch)]
        best = min(t.cost.step_s for t in at_its_batch if t.cost.total_bytes <= budget)
        assert found.bound_s is not None or xla.slip < 1, "only a step that takes less than expected contradicts a bound"
        if found.bound_s is not None and found.recompute_s is not None:
            assert found.bound_s <= found.recompute_s * (1 + 1e-9)
        if options.get("objective", "time") == "time":
            assert found.cost.step_s == best, "nothing that was compiled at its batch is faster"
    return found


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1000, 60_000),
    st.sampled_from([0.7, 0.95, 1.0, 1.1, 1.4]),
    st.sampled_from([None, 1, 3, 8, 20]),
    st.booleans(),
    st.sampled_from([None, 1, 4]),
)
def test_every_budget_is_met_or_refused(budget, slip, batch, is_small, most_that_fit):
    xla = Xla(slip, is_small=is_small)
    found = plan(xla, budget, most_that_fit, batch=batch)
    floor = min(xla(SPARSE, "chunked", batch or 1).total_bytes, xla(NOTHING, "chunked", batch or 1).total_bytes)
    assert isinstance(found, Plan) == (budget >= floor)
    if isinstance(found, NoPlan):
        assert found.least.batch == (batch or 1)
        assert found.least.cost.total_bytes == floor


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(1000, 300_000),
    bend=st.sampled_from(["line", "knee", "root", "noise"]),
    size=st.integers(0, 400),
    num_estimates=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "losses": st.sampled_from([("full",), ("chunked", "full")]),
            "batch": st.sampled_from([None, None, 3]),
            "batches": st.sampled_from([range(1, 65), range(1, 2**31), (1, 2, 3, 4, 6, 12, 24)]),
            "objective": st.sampled_from(["time", "time", "batch", "memory"]),
            "named": st.booleans(),
            "fixed_bytes": st.just(1000),
        }
    ),
)
def test_a_search_takes_no_more_compiles_than_it_said(budget, bend, size, num_estimates, options):
    """Whatever the bytes by batch are, and with unrolled layers after the loop. Before a search begins, it says how many."""
    extra = {
        "line": lambda batch: 0,
        "knee": lambda batch: size * max(0, batch - 10),
        "root": lambda batch: 20 * size * batch**0.5,
        "noise": lambda batch: size * batch * random.Random(batch).random(),
    }[bend]
    searches: list[list[Compile]] = []

    def search() -> Callable[..., Steps]:
        """A search that begins: its steps, of which each compile is counted once."""
        compiles, found = Compiles(), []
        searches.append(found)

        def steps(done: dict[tuple[Policy, str, int], Cost]) -> Steps:
            def compiled(*key) -> Cost:
                if key not in done:
                    found.append(compiles.next())
                    cost = Xla(is_small=size % 2 == 0 or key[1] == "full")(*key)
                    done[key] = replace(cost, total_bytes=int(cost.total_bytes + extra(key[2])))
                return done[key]

            layers = partial(estimates_at, num_estimates)
            return Steps(layers, compiled, LAYERS, budget, stack_bytes=50, expect=compiles.expect)

        return steps

    find_plan(search()({}), **options)
    of_both = search()
    find_plans([of_both({}), of_both({})], **options)
    is_bounded = options["objective"] != "batch" or len(options["batches"]) < 100
    for found in searches:
        assert all(one.at_most is None or one.at_most >= len(found) for one in found)
        assert not is_bounded or all(one.at_most is not None for one in found)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1000, 100_000),
    st.integers(1, 3),
    st.sampled_from([None, 3]),
    st.sampled_from([("full",), ("chunked", "full")]),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_steps_that_are_begun_ahead_change_no_plan(budget, num_estimates, batch, losses, is_idle):
    """Whenever a core is idle. Each step is begun before it is compiled."""

    def tried(idle: Iterator[bool]) -> list[list[tuple[Policy, str, int]]]:
        begun, layers = set(), partial(estimates_at, num_estimates)

        def compiled(*key) -> Cost:
            assert key in begun
            return Xla()(*key)

        steps = Steps(layers, compiled, LAYERS, budget, begin=lambda *key: begun.add(key), may_guess=lambda: next(idle))
        found = find_plans([steps, replace(steps, stack_bytes=50)], losses=losses, batch=batch, batches=range(1, 65))
        return [[(t.policy, t.loss, t.batch) for t in one.plan.tried] for one in found if one.plan]

    assert tried(itertools.cycle(is_idle)) == tried(itertools.repeat(False))


def test_what_is_begun_while_the_first_step_is_compiled():
    """The other losses' first steps, and with a given batch `none`, if there is room for all residuals."""

    def begun(**options: Any) -> list[tuple[Policy, str, int]]:
        keys, at_first = list[tuple[Policy, str, int]](), list[tuple[Policy, str, int]]()

        def compiled(*key) -> Cost:
            at_first.extend([] if at_first else keys)
            return Xla()(*key)

        steps = Steps(layer_at, compiled, LAYERS, 10**6, begin=lambda *key: keys.append(key), may_guess=lambda: True)
        find_plan(steps, **options)
        return [*dict.fromkeys(at_first)]

    first, none = (NOTHING, "full", 8), (Rule("none"), "full", 8)
    assert begun(losses=("full",), batch=8) == [first, none]
    assert begun(losses=("full", "chunked"), batches=range(1, 65)) == [first, (NOTHING, "chunked", 8)]
    assert begun(losses=("full",), batch=8, named=False) == [first]


def test_more_budget_is_never_slower():
    speeds = []
    for budget in range(3000, 40_000, 3000):
        found = plan(Xla(), budget)
        assert isinstance(found, Plan)
        speeds.append(found.batch / found.cost.step_s)
    assert all(later >= earlier * (1 - 2e-3) for earlier, later in itertools.pairwise(speeds)), speeds


def test_halfway_between_two_points_of_the_hull_is_their_mix():
    hull = lower_hull(layer_at(8).problem)
    pairs = [(a, b) for a, b in itertools.pairwise(hull) if (5 in a.decision.save) == (5 in b.decision.save)]
    assert pairs
    for left, right in pairs:
        half = Xla()(NOTHING, "chunked", 8).total_bytes + LAYERS // 2 * (left.saved_bytes + right.saved_bytes)
        inputs = 8 * 20  # assumed for the second layer of a group, until a compile tells
        found = plan(Xla(), half + inputs, losses=("chunked",), batch=8)
        assert isinstance(found, Plan)
        assert isinstance(found.policy, Mix)
        assert found.cost.total_bytes == half
        assert found.predicted_bytes in (half, half + inputs)
        assert found.recompute_s is not None
        assert found.bound_s is not None
        assert found.bound_s <= found.recompute_s < LAYERS // 2 * (left.cost_s + right.cost_s) * 1.001


def test_a_wrong_model_is_corrected():
    """XLA takes 40 % more for what is saved: the first plan fails, a later one fits and still saves."""
    xla = Xla(slip=1.4)
    budget = xla(NOTHING, "chunked", 8).total_bytes + 8 * LAYERS * 60
    found = plan(Xla(slip=1.4), budget, losses=("chunked",), batch=8)
    assert isinstance(found, Plan)
    assert any(t.cost.total_bytes > budget for t in found.tried)
    assert found.policy != NOTHING
    assert found.cost.step_s < xla(NOTHING, "chunked", 8).step_s


def test_a_named_policy_that_is_faster_is_the_answer():
    class Magic(Xla):
        def __call__(self, policy, loss, batch):
            cost = super().__call__(policy, loss, batch)
            return replace(cost, step_s=1.0) if policy == Rule("dots") else cost

    found = find_plan(Steps(layer_at, Magic(), LAYERS, 10**6), losses=("full",), batch=8)
    assert isinstance(found, Plan)
    assert (found.policy, found.predicted_bytes, found.recompute_s) == (Rule("dots"), None, None)


@pytest.mark.parametrize("is_small", [False, True])
def test_small_steps_are_compiled_beyond_the_few_where_compiles_take_minutes(is_small):
    """The model expects that each value takes more than is left. In truth, none takes any bytes."""
    xla = Xla(slip=0, is_small=is_small)
    found = find_plan(Steps(layer_at, xla, LAYERS, 3260, most_that_fit=2), losses=("full",), batch=4)
    assert isinstance(found, Plan)
    assert (found.policy == NOTHING) != is_small
    assert (len(found.tried) > 2) == is_small


@pytest.mark.parametrize("is_small", [False, True])
def test_small_steps_near_to_compiled_ones_are_compiled(is_small):
    """The model expects that `b` takes somewhat more than is left. In truth, it takes no bytes where `c` isn't saved."""

    class Surprising(Xla):
        def __call__(self, policy: Policy, loss: str, batch: int) -> Cost:
            cost = super().__call__(policy, loss, batch)
            if not isinstance(policy, Names) or "b" not in policy.save:
                return cost
            of_b = LAYERS * batch * BYTES["b"] * ("c" not in policy.save)
            return replace(cost, total_bytes=cost.total_bytes - of_b)

    budget = Xla()(NOTHING, "full", 4).total_bytes + 40
    xla = Surprising(is_small=is_small)
    steps = Steps(layer_at, xla, LAYERS, budget, allows=lambda policy: isinstance(policy, Names) or policy == NOTHING)
    found = find_plan(steps, losses=("full",), batch=4)
    every = [Names(names) for n in range(1, 5) for names in itertools.combinations(NAMES[:4], n)]
    fitting = [(cost.step_s, policy) for policy in every if (cost := Surprising()(policy, "full", 4)).total_bytes <= budget]
    assert [policy for _, policy in fitting] == [Names(("b",))]
    assert isinstance(found, Plan)
    assert found.policy == (Names(("b",)) if is_small else NOTHING)
    assert len(xla.calls) <= (13 if is_small else 1)


def test_a_step_of_another_row_may_be_the_answer():
    """It is compiled before, at the batch of the plan. One at another batch is no answer."""

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        return replace(Xla()(policy, loss, batch), step_s=1.0) if policy == Names(("a",)) else Xla()(policy, loss, batch)

    for batch, is_answer in ((8, True), (4, False)):
        steps = Steps(layer_at, compiled, LAYERS, 10**6, known=((Names(("a",)), "full", batch),))
        found = find_plan(steps, losses=("full",), batch=8)
        assert isinstance(found, Plan)
        assert (found.policy == Names(("a",))) == is_answer


def test_a_step_of_another_row_that_a_plan_may_not_choose_is_no_answer():
    other = Rule("dots", attention=True)
    steps = Steps(layer_at, Xla(), LAYERS, 10**6, known=((other, "full", 8),), allows=lambda policy: policy != other)
    found = find_plan(steps, losses=("full",), batch=8, named=False)
    assert isinstance(found, Plan)
    assert other not in {step.policy for step in found.tried}


def test_fused_attention_that_no_policy_may_save_is_in_no_family():
    def as_configured(batch: int) -> LayerEstimate:
        layer = layer_at(batch)
        fused = {v for op in layer.problem.ops if op.together for v in op.outputs}
        assert fused
        values = tuple(
            replace(value, saveable=value.saveable and v not in fused) for v, value in enumerate(layer.problem.values)
        )
        return replace(layer, problem=replace(layer.problem, values=values))

    assert len(as_configured(8).families) == 1
    found = find_plan(Steps(as_configured, Xla(), LAYERS, 9_000), losses=("full",), batch=8, named=False)
    assert isinstance(found, Plan)
    assert not any("attention" in str(step.policy) for step in found.tried)


def test_a_step_of_another_row_is_known_at_any_batch():
    """Of very many batches the plan looks at some. 12,346 isn't among them."""
    batches, batch = range(1, 10**6), 12_346
    assert batch not in spaced(batches)

    def compiled(policy: Policy, loss: str, size: int) -> Cost:
        return replace(Xla()(policy, loss, size), total_bytes=size, step_s=1e-9 if size == batch else 1.0 + size)

    steps = Steps(layer_at, compiled, LAYERS, 10**6, known=((Names(("a",)), "full", batch),))
    found = find_plan(steps, losses=("full",), batch=None, batches=batches)
    assert isinstance(found, Plan)
    assert (found.policy, found.batch) == (Names(("a",)), batch)


@pytest.mark.parametrize(("budget", "policies"), [(10**6, [NOTHING, Rule("none")]), (9_000, None)])
def test_unrolled_layers_with_room_for_all_values_take_two_compiles(budget, policies):
    def unrolled_at(batch: int) -> LayerEstimate:
        layer = layer_at(batch)
        return replace(layer, problem=replace(layer.problem, save_s_per_byte=0.0), in_scan=False)

    found = find_plan(Steps(unrolled_at, Xla(), LAYERS, budget), losses=("full",), batch=8)
    assert isinstance(found, Plan)
    tried = [step.policy for step in found.tried]
    assert tried == policies or (policies is None and len(tried) > 2)


@pytest.mark.parametrize(("seconds", "has_dots"), [(1e-6, False), (5.0, True)])
def test_a_named_policy_that_cannot_be_faster_is_not_compiled(monkeypatch, seconds, has_dots):
    """Unrolled, `none` doesn't fit for the bytes of `a`. Where recomputing `a` takes no time, a choice without it is as fast."""

    def unrolled_at(batch: int) -> LayerEstimate:
        layer = layer_at(batch)
        ops = tuple(replace(op, recompute_s=seconds * batch) if op.name == "a" else op for op in layer.problem.ops)
        return replace(layer, problem=replace(layer.problem, ops=ops, save_s_per_byte=0.0), in_scan=False)

    monkeypatch.setitem(SECONDS, "a", seconds)
    budget = Xla()(Names(("b", "c", "d"), attention=True), "full", 8).total_bytes
    found = find_plan(Steps(unrolled_at, Xla(), LAYERS, budget), losses=("full",), batch=8)
    assert isinstance(found, Plan)
    tried = {step.policy for step in found.tried}
    assert Rule("none") not in tried
    assert (Rule("dots") in tried or Rule("dots", attention=True) in tried) == has_dots


def test_of_equally_fast_steps_the_one_of_the_fewest_bytes_is_the_answer():
    xla = Xla()

    def compile(policy: Policy, loss: str, batch: int) -> Cost:
        return replace(xla(policy, loss, batch), step_s=2.0 if policy == NOTHING else 1.0)

    found = find_plan(Steps(layer_at, compile, LAYERS, 6000), losses=("full",), batch=3)
    assert isinstance(found, Plan)
    equal = [step.cost.total_bytes for step in found.tried if step.cost == replace(step.cost, step_s=1.0)]
    assert found.cost.total_bytes == min(total for total in equal if total <= 6000) < max(equal)


def test_the_loss_is_chosen():
    """Full is faster where its logits fit, chunked where they would take the room that saving needs."""
    roomy, tight = (plan(Xla(), budget, batch=8) for budget in (10**6, 1000 + 8 * (12 * 20 + 20 + 12 * 30)))
    assert isinstance(roomy, Plan)
    assert isinstance(tight, Plan)
    assert (roomy.loss, tight.loss) == ("full", "chunked")


def test_the_largest_batch():
    found = plan(Xla(), 10_000, objective="batch")
    assert isinstance(found, Plan)
    floor = Xla()
    assert min(floor(policy, "chunked", found.batch + 1).total_bytes for policy in (NOTHING, SPARSE)) > 10_000


def test_the_largest_batch_has_the_faster_loss():
    """Both losses reach the cap, the full one only where whole groups of layers run again."""
    found, fixed = (
        plan(Xla(), 3000, **options) for options in ({"objective": "batch", "batches": range(1, 5)}, {"batch": 4})
    )
    assert isinstance(found, Plan)
    assert isinstance(fixed, Plan)
    assert (found.batch, found.loss, found.policy) == (4, "chunked", fixed.policy)


def test_the_bound_is_by_the_estimates_of_the_plan():
    """The first estimate is three times too high: by the right one the bound is below the plan."""
    right = layer_at(8)
    ops = tuple(replace(op, recompute_s=op.recompute_s * 3) if op.name == "d" else op for op in right.problem.ops)
    block = LayerEstimate(replace(right.problem, ops=ops), right.names, alternatives=(right,))
    for budget in range(5000, 12_000, 500):
        found = find_plan(Steps(lambda batch: block, Xla(), LAYERS, budget), losses=("full",), batch=8)
        assert isinstance(found, Plan)
        assert found.bound_s is not None
        assert found.recompute_s is None or found.bound_s <= found.recompute_s * (1 + 1e-9)


def test_what_a_named_answer_saves_is_said():
    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        cost = Xla()(policy, loss, batch)
        return replace(cost, step_s=1.0) if policy == Rule("dots", attention=True) else cost

    found = find_plan(Steps(layer_at, compiled, LAYERS, 10**6), losses=("full",), batch=8)
    assert isinstance(found, Plan)
    assert {price.name for price in found.prices if price.is_saved} == {"b", "c", "d", "fused +1"}


def test_one_layer_may_take_least_where_all_is_kept():
    """`nothing` takes 32 bytes more than `none` does."""

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        return Cost(1000 if policy == Rule("none") else 1032, 1.0)

    found = find_plan(Steps(layer_at, compiled, 1, 1010, has_groups=False), losses=("",), batch=1)
    assert isinstance(found, Plan)
    assert found.policy == Rule("none")
    assert all(more.saved_s >= 0 for more in found.more)


@pytest.mark.parametrize("first_is_right", [True, False])
def test_of_two_estimates_a_compile_chooses(first_is_right):
    """The batch and the plan are those of the right estimate alone, for one compile more."""
    right = layer_at(8)
    ops = tuple(replace(op, recompute_s=op.recompute_s / 50) if op.name == "d" else op for op in right.problem.ops)
    wrong = replace(right, problem=replace(right.problem, ops=ops))
    first, other = (right, wrong) if first_is_right else (wrong, right)

    def scaled(block: LayerEstimate, batch: int) -> LayerEstimate:
        values = (replace(value, num_bytes=value.num_bytes * batch // 8) for value in block.problem.values)
        ops = (replace(op, recompute_s=op.recompute_s * batch / 8) for op in block.problem.ops)
        return replace(block, problem=replace(block.problem, values=tuple(values), ops=tuple(ops)))

    def both_at(batch: int) -> LayerEstimate:
        return replace(scaled(first, batch), alternatives=(scaled(other, batch),))

    options = {"losses": ("full",), "fixed_bytes": 1000, "batches": range(1, 65)}
    for budget in (6000, 12_000, 24_000):
        found, alone = (find_plan(Steps(at, Xla(), LAYERS, budget), **options) for at in (both_at, layer_at))
        assert isinstance(found, Plan)
        assert isinstance(alone, Plan)
        assert (found.policy, found.batch) == (alone.policy, alone.batch)
        assert len({*found.tried} - {*alone.tried}) <= 1


def test_a_plan_is_by_the_right_estimate_from_the_first_candidate_on():
    """The first estimate sees no time in saving. `dots` was compiled before, and no plan may be slower than without it."""
    right = layer_at(8)
    ops = tuple(replace(op, recompute_s=op.recompute_s / 50) for op in right.problem.ops)
    wrong = LayerEstimate(replace(right.problem, ops=ops), right.names, alternatives=(right,))
    xla, dots = Xla(), Rule("dots")
    budget = xla(dots, "full", 8).total_bytes
    known = ((dots, "full", 8),)
    beside, alone = (
        find_plan(Steps(lambda batch: wrong, xla, LAYERS, budget, known=known), losses=("full",), batch=8)
        for known in (known, ())
    )
    assert isinstance(beside, Plan)
    assert isinstance(alone, Plan)
    assert beside.policy == alone.policy
    assert beside.cost.step_s < xla(dots, "full", 8).step_s


def test_full_remat_that_was_compiled_before_is_on_the_curve():
    """The search for the largest batch of `nothing` compiled two steps. A plan beside it takes no others to begin with."""
    known, xla = tuple((NOTHING, "chunked", batch) for batch in (8, 60)), Xla()
    options = {"losses": ("chunked",), "fixed_bytes": 1000, "batches": range(1, 65)}
    beside = find_plan(Steps(layer_at, xla, LAYERS, 40_000, known=known), **options)
    alone = find_plan(Steps(layer_at, Xla(), LAYERS, 40_000), **options)
    assert isinstance(beside, Plan)
    assert isinstance(alone, Plan)
    assert beside.batch / beside.cost.step_s >= alone.batch / alone.cost.step_s / (1 + WORTH)
    assert {batch for policy, _, batch in xla.calls if policy == NOTHING} <= {8, 60, beside.batch}


@pytest.mark.parametrize(
    ("batches", "off", "foreseen"), [((8, 40), 1, False), ((8, 40, 90), 1, True), ((8, 40, 90), 1.05, False)]
)
def test_a_batch_between_compiled_ones_is_foreseen_where_the_line_is_straight(batches, off, foreseen):
    costs = {batch: Cost(round((1000 + 100 * batch) * (off if batch == 40 else 1)), 1 + batch) for batch in batches}
    curve = curves((("full", CurvePoint(*point)) for point in costs.items()), 1000)["full"]
    assert curve.is_foreseen(30) is foreseen
    assert not curve.is_foreseen(100), "no compiled step is beyond it"


def test_a_loss_with_one_step_follows_one_with_two():
    full = [("full", CurvePoint(batch, Cost(1000 + 130 * batch, 1 + 2 * batch))) for batch in (4, 12)]
    other = ("chunked", CurvePoint(6, Cost(1000 + 100 * 6, 1 + 3 * 6)))
    assert curves([full[0], other], 900)["chunked"].at(12) == Cost(900 + 700 * 2, 2 * 19), "no line: it begins at the state"
    followed = curves([*full, other], 900)["chunked"]
    assert [followed.at(batch) for batch in (2, 6, 60)] == [Cost(1000 + 100 * n, 1 + 3 * n) for n in (2, 6, 60)]
    own = curves([*full, other, ("chunked", CurvePoint(12, Cost(2800, 40)))], 900)["chunked"]
    assert own.at(18).total_bytes == 4000
    rejected = curves([*full, ("chunked", CurvePoint(6, Cost(1600, 9.0, is_rejected=True)))], 900)["chunked"]
    assert rejected.at(3).total_bytes == 1250, "a rejected step says little, and the line goes through the state and it"


def test_one_slow_step_alone_does_not_end_the_search():
    """The step that tells two estimates apart takes far longer than either says. What the right one promises is tried."""
    right = layer_at(8)
    ops = tuple(replace(op, recompute_s=op.recompute_s * 2) if op.name == "d" else op for op in right.problem.ops)
    both = replace(right, alternatives=(replace(right, problem=replace(right.problem, ops=ops)),))
    dots, slow = Rule("dots"), list[Policy]()

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        if isinstance(policy, Names) and not slow:
            slow.append(policy)
        cost = Xla()(policy, loss, batch)
        return replace(cost, step_s=cost.step_s + 300 * (policy in slow))

    steps = Steps(lambda batch: right, Xla(), LAYERS, Xla()(dots, "full", 8).total_bytes, known=((dots, "full", 8),))
    alone = find_plan(steps, losses=("full",), batch=8)
    beside = find_plan(replace(steps, layer_at=lambda batch: both, compile=compiled), losses=("full",), batch=8)
    assert isinstance(alone, Plan)
    assert isinstance(beside, Plan)
    assert slow
    assert beside.cost.step_s == alone.cost.step_s < Xla()(dots, "full", 8).step_s


@pytest.mark.parametrize(("budget", "policy"), [(5000, GROUPS), (1900, SPARSE)])
def test_many_small_steps_are_grouped(budget, policy):
    """Where the inputs of all steps don't fit, the residuals of a group of steps may. That computes a step once less."""
    num_steps, input_bytes, residual_bytes = 400, 20, sum(BYTES.values())
    of_groups: dict[Policy, int] = {GROUPS: 20 * residual_bytes + 20 * input_bytes, SPARSE: 40 * input_bytes}

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        num_bytes = of_groups.get(policy, num_steps * input_bytes)
        return Cost(1000 + batch * num_bytes, batch * (100.0 + (1 + (policy == SPARSE)) * num_steps * 20.5))

    options = {"losses": ("full",), "fixed_bytes": 1000, "batches": (1,), "batch": 1}
    found = find_plan(Steps(layer_at, compiled, num_steps, budget), **options)
    assert isinstance(found, Plan)
    assert found.policy == policy
    assert (SPARSE in [step.policy for step in found.tried]) == (policy == SPARSE)


def test_a_sequence_of_a_small_batch_is_no_faster_than_one_of_the_smallest_that_was_compiled():
    """Large batches spill here: 12 s for each sequence, where small ones take 10. A line through both leads below 0 s."""

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        cost = Xla()(policy, loss, batch)
        return replace(cost, step_s=cost.step_s - 50 if batch <= 8 else 1.5 * (cost.step_s - 50))

    options = {"losses": ("full",), "fixed_bytes": 1000, "batches": range(1, 65)}
    found = find_plan(Steps(layer_at, compiled, LAYERS, 60_000), **options)
    assert isinstance(found, Plan)
    assert min(step.batch for step in found.tried) == found.batch == 8


@pytest.mark.parametrize("budget", [20_000, 40_000, 80_000])
def test_of_few_compiles_two_are_full_remat(budget):
    """Where each takes minutes, the others are candidates, at batches that were only read off a line."""
    found = plan(Xla(), budget, most_that_fit=4, losses=("chunked",))
    assert isinstance(found, Plan)
    assert sum(step.policy == NOTHING and step.cost.total_bytes <= budget for step in found.tried) == 2
    assert found.policy != NOTHING


def test_bytes_that_grow_faster_from_some_batch_on():
    """The batch is found by few compiles all the same, and not by one too large whose layers must run twice more."""

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        cost = Xla()(policy, loss, batch)
        return Cost(max(cost.total_bytes, 3500 + 100 * batch), 20_000 + cost.step_s)

    speeds = []
    for budget in range(5000, 20_000, 1000):
        options = {"losses": ("chunked",), "fixed_bytes": 1000, "batches": range(1, 4097)}
        found = find_plan(Steps(layer_at, compiled, LAYERS, budget), **options)
        assert isinstance(found, Plan)
        assert found.policy != SPARSE
        assert len(found.tried) <= 12
        speeds.append(found.batch / found.cost.step_s)
    assert all(later >= earlier * (1 - 2e-3) for earlier, later in itertools.pairwise(speeds)), speeds


@pytest.mark.parametrize("budget", [8000, 16_000])
def test_a_batch_that_takes_more_than_expected_is_chosen_again(budget):
    """Compiled, the batch chosen first leaves less room than it was chosen for: another one is faster, and found."""

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        cost = Xla()(policy, loss, batch)
        return Cost(cost.total_bytes + 400 * max(0, batch - 20), 2000 + cost.step_s)

    steps = Steps(layer_at, compiled, LAYERS, budget)
    found = find_plan(steps, losses=("chunked",), fixed_bytes=1000, batches=range(1, 65))
    assert isinstance(found, Plan)
    for batch in range(found.batch - 3, found.batch + 4):
        fixed = find_plan(steps, losses=("chunked",), batch=batch)
        if isinstance(fixed, Plan):
            assert found.batch / found.cost.step_s >= (1 - 2e-3) * fixed.batch / fixed.cost.step_s


@pytest.mark.parametrize("budget", [4000, 5000, 7000, 9000, 12_000])
def test_few_steps_that_fit_find_the_plan_although_rejections_mislead(budget):
    """Bytes of a rejected step are those of a program in which XLA has made room, and its seconds are too short."""
    of_formula = Xla()

    def xla(policy: Policy, loss: str, batch: int) -> Cost:
        cost = of_formula(policy, loss, batch)
        return replace(cost, total_bytes=cost.total_bytes + 900 * batch)

    def rejecting(policy: Policy, loss: str, batch: int) -> Cost:
        cost = xla(policy, loss, batch)
        return cost if cost.total_bytes <= budget else Cost(int(1.05 * budget), 0.3 * cost.step_s, is_rejected=True)

    options = {"losses": ("chunked",), "fixed_bytes": of_formula.fixed, "batches": range(1, 65)}
    right = find_plan(Steps(layer_at, xla, LAYERS, budget), **options)
    found = find_plan(Steps(layer_at, rejecting, LAYERS, budget, most_that_fit=4), **options)
    assert isinstance(right, Plan)
    assert isinstance(found, Plan)
    num_fitting = sum(step.cost.total_bytes <= budget for step in found.tried)
    assert num_fitting <= 4
    assert len(found.tried) - num_fitting <= 4, "where one was rejected, the next batch is halfway"
    assert found.batch / found.cost.step_s >= 0.99 * right.batch / right.cost.step_s


@pytest.mark.parametrize("most_that_fit", [2, 4])
def test_where_few_steps_are_compiled_none_comes_first_if_it_has_room(most_that_fit):
    found = plan(Xla(), 60_000, most_that_fit, batch=4, losses=("chunked",))
    assert [str(step.policy) for step in found.tried[:2]] == ["nothing", "none"]
    assert isinstance(found, Plan)
    assert found.policy == Rule("none")


@pytest.mark.parametrize("budget", [5000, 7000])
def test_where_few_steps_are_compiled_a_named_policy_follows_the_first_candidate(budget):
    """What the planner saves takes longer than foreseen, and another choice of its own would as well."""

    def slow(policy: Policy, loss: str, batch: int) -> Cost:
        cost = Xla()(policy, loss, batch)
        return replace(cost, step_s=1.3 * cost.step_s) if isinstance(policy, Names) else cost

    found = find_plan(Steps(layer_at, slow, LAYERS, budget, most_that_fit=4), losses=("chunked",), batch=8)
    assert isinstance(found, Plan)
    assert [isinstance(step.policy, Names) for step in found.tried] == [False, True, False]


def test_the_least_memory():
    found = plan(Xla(), 20_000, objective="memory", batch=8)
    assert isinstance(found, Plan)
    assert (found.policy, found.loss) == (SPARSE, "chunked")


def test_prices_and_what_more_budget_buys():
    found = plan(Xla(), Xla()(NOTHING, "chunked", 8).total_bytes + 8 * LAYERS * 22, losses=("chunked",), batch=8)
    assert isinstance(found, Plan)
    by_name = {price.name: price for price in found.prices}
    assert by_name["fused +1"].num_bytes == LAYERS * 8 * 12
    rates = [price.saved_s / price.num_bytes for price in found.prices]
    assert rates == sorted(rates, reverse=True)
    assert {price.name for price in found.prices if price.is_saved} <= set(by_name)
    saved = [more.saved_s for more in found.more]
    assert saved == sorted(saved)
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in saved)


def offloading_layer_at(batch: int) -> LayerEstimate:
    """The same block where host transfers cost little and offloading is allowed."""
    block = layer_at(batch)
    cheap = replace(block.problem, offload_s_per_byte=0.02)
    return replace(block, problem=cheap, offload_bytes=sum(value.num_bytes for value in cheap.values))


def test_prices_of_what_is_offloaded():
    """A value in host memory is priced as if it were saved instead of dropped."""

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        offloaded = policy.offload if isinstance(policy, Names) else ()
        least = Xla()(NOTHING, loss, batch)
        return replace(least, step_s=least.step_s - 400 * len(offloaded))

    budget = compiled(NOTHING, "full", 8).total_bytes
    found = find_plan(Steps(offloading_layer_at, compiled, LAYERS, budget), losses=("full",), batch=8)
    assert isinstance(found, Plan)
    assert isinstance(found.policy, Names)
    by_name = {price.name: price for price in found.prices}
    assert (
        {name for name, price in by_name.items() if price.is_offloaded} == set(found.policy.offload) == {"a", "b", "c", "d"}
    )
    for name in found.policy.offload:
        assert not by_name[name].is_saved
        assert by_name[name].saved_s > 0


def test_a_compiled_candidate_corrects_what_is_expected():
    """A step that took 70 bytes more than expected; then a mix that doesn't fit, and a step that takes much less."""
    layer = layer_at(8)
    best = fastest(candidates(layer, LAYERS, Corrections(0, 10**6)))
    assert best
    alone = ((1, best.decision),)
    candidate, corrections = replace(best, peak_bytes=450, group=alone), Corrections(base_bytes=1000, budget_bytes=1500)
    assert corrections.left_bytes == 500
    learned = corrections.learn(candidate, 1520)
    assert learned.expected_beyond(layer, candidate.family, 1) == 70
    assert learned.expected_beyond(layer, candidate.family, 3) == 70 + 2 * layer.input_bytes
    assert learned.expected_beyond(replace(layer, in_scan=False), candidate.family, 3) == 70
    assert learned.allows_mixes
    after_a_mix = learned.learn(replace(candidate, group=((3, best.decision),)), 1600)
    assert not after_a_mix.allows_mixes
    assert after_a_mix.expected_beyond(layer, candidate.family, 3) == 150
    (family,) = learned.learn(candidate, 1400).learned_families
    assert family.beyond_bytes == -50
    assert learned.learn(candidate, 1400).expected_beyond(layer, candidate.family, 1) == 70


def test_where_a_step_took_much_less_plans_like_it_take_the_room():
    """A step that keeps `stats` needs no second `scores`: what comes before those is saved then, and its bytes are foreseen."""
    bytes_of, seconds = (
        {"query": 10, "scores": 200, "stats": 2, "out": 20},
        {"query": 5.0, "scores": 4.0, "stats": 2.0, "out": 6.0},
    )

    def block(batch: int) -> LayerEstimate:
        values = [Value("x", 20 * batch, saveable=False, offloadable=False, needed=True)]
        values += [
            Value(name, size * batch, saveable=size < 200, offloadable=False, needed=True) for name, size in bytes_of.items()
        ]
        ops = [
            Op(name, (n,), (n + 1,), seconds[name] * batch, flops=1) for n, name in enumerate(("query", "scores", "stats"))
        ]
        ops.append(Op("out", (2, 3), (4,), seconds["out"] * batch, flops=1))
        problem = Problem(tuple(values), tuple(ops), (0,), save_s_per_byte=0.01, offload_s_per_byte=1.0)
        return LayerEstimate(problem, {1: "query", 3: "stats", 4: "out"})

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        kept = {*policy.save} if isinstance(policy, Names) else set(bytes_of) if policy == Rule("none") else set()
        total = LAYERS * (20 + sum(bytes_of[name] for name in kept)) - 300 * ("stats" in kept) + 300 * ("out" in kept)
        return Cost(1000 + batch * total, batch * (100 + sum(seconds[name] for name in seconds if name not in kept)))

    budget = compiled(NOTHING, "full", 8).total_bytes + 8 * LAYERS * 3
    found = find_plan(Steps(block, compiled, LAYERS, budget), losses=("full",), batch=8)
    assert isinstance(found, Plan)
    assert found.policy == Names(("query", "stats"))
    assert found.predicted_bytes == found.cost.total_bytes
