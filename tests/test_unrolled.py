"""Unrolled layers are planned from what the loop taught, and few unrolled steps are compiled; a formula stands in for XLA."""

from dataclasses import replace

import pytest

from jaxremat.answer.planned import is_better
from jaxremat.planner.places import WORTH
from jaxremat.planner.plan import Plan, find_plans
from jaxremat.planner.steps import SPARSE, Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy, Rule
from tests.planner_formula import LAYERS, Xla, find_plan, layer_at
from tests.small_problems import solve_by_trying_all

#: The policies that a plan compiles without a choice of its own.
NAMED = {NOTHING, Rule("none"), Rule("dots"), Rule("dots", attention=True), Rule("nothing", attention=True)}


@pytest.fixture(autouse=True)
def without_solver(monkeypatch):
    solve_by_trying_all(monkeypatch)


class Unrolled(Xla):
    """Unrolled layers: saving is free, and a step takes `more` bytes than a loop does."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    def __call__(self, policy: Policy, loss: str, batch: int) -> Cost:
        cost = super().__call__(policy, loss, batch)
        saved = cost.total_bytes - Xla()(NOTHING, loss, batch).total_bytes
        return Cost(cost.total_bytes + self.more, cost.step_s - 0.01 * saved)


def unrolled_at(batch: int):
    layer = layer_at(batch)
    return replace(layer, problem=replace(layer.problem, save_s_per_byte=0.0), in_scan=False)


def both(budget: int, unrolled: Unrolled, stack_bytes: int = 0, **options) -> tuple[Plan, Plan | None]:
    """The plan in a loop, and the one for unrolled layers."""
    options = {"losses": ("full", "chunked"), "batch": None, "fixed_bytes": 1000, "batches": range(1, 65), **options}
    alone = find_plan(Steps(layer_at, Xla(), LAYERS, budget), **options)
    find_plan(Steps(layer_at, of_own := Xla(), LAYERS, budget), named=False, **options)
    layers = [
        Steps(layer_at, in_loop := Xla(), LAYERS, budget),
        Steps(unrolled_at, unrolled, LAYERS, budget, stack_bytes=stack_bytes),
    ]
    of_scan, of_unrolled = find_plans(layers, **options)
    looped, found = of_scan.plan, of_unrolled.plan
    further = [call for call in in_loop.calls if call[0] not in NAMED - {NOTHING}]
    assert len(unrolled.calls) + len(further) - len(of_own.calls) <= 8
    assert isinstance(looped, Plan)
    assert isinstance(alone, Plan)
    assert found is None or isinstance(found, Plan)
    if options.get("objective") is None:
        fastest = max(one.batch / one.cost.step_s for one in (looped, found) if one)
        assert alone.batch / alone.cost.step_s <= (1 + WORTH) * (of_scan.bound or fastest)
        assert of_scan.bound is None or of_scan.bound <= (1 + WORTH) * fastest
        assert (of_scan.bound is None) == any(one.policy not in NAMED for one in looped.tried), "it is searched or outdone"
    return looped, found


@pytest.mark.parametrize("batch", [None, 3, 8])
@pytest.mark.parametrize("budget", [4_000, 12_000, 30_000])
def test_unrolled_layers_are_faster_where_saving_is_free(budget, batch):
    xla = Unrolled()
    if batch and budget < 1000 + batch * (20 + 20 * LAYERS):
        return  # nothing fits
    looped, found = both(budget, xla, batch=batch)
    assert isinstance(found, Plan)
    assert is_better(found, looped, "time")
    assert found.cost == Unrolled()(found.policy, found.loss, found.batch)
    assert found.cost.total_bytes <= budget
    assert batch in (None, found.batch)
    assert 1 <= len(xla.calls) <= 4, "an unrolled step takes long to compile"
    assert [(t.policy, t.loss, t.batch) for t in found.tried] == xla.calls


def test_what_was_compiled_corrects_the_next_candidate():
    """An unrolled step takes more bytes than the loop taught: another candidate that fits is compiled."""
    budget = 9_000
    xla = Unrolled(more=1500)
    _, found = both(budget, xla, batch=8)
    assert isinstance(found, Plan)
    assert found.cost.total_bytes <= budget
    assert len(xla.calls) == 2
    assert found.tried[0].cost.total_bytes > budget


@pytest.mark.parametrize(("stack_bytes", "num_compiles"), [(0, 2), (600, 2), (1500, 1), (2000, 2)])
def test_unrolled_layers_do_without_the_stack_of_a_scan(stack_bytes, num_compiles):
    """Where the bytes of the stack are right, the first candidate is the answer. If not, it corrects the second one."""
    budget, xla = 9_000, Unrolled(more=-1500)
    _, found = both(budget, xla, stack_bytes, batch=8)
    _, best = both(budget, Unrolled(more=-1500), 1500, batch=8)
    assert isinstance(found, Plan)
    assert isinstance(best, Plan)
    assert found.cost == best.cost
    assert found.cost.total_bytes <= budget
    assert found.predicted_bytes == found.cost.total_bytes
    assert len(xla.calls) == num_compiles
    assert NOTHING not in {policy for policy, _, _ in xla.calls}


def test_no_unrolled_plan_where_none_fits():
    looped, found = both(9_000, Unrolled(more=100_000), batch=8)
    assert found is None
    assert looped.cost.total_bytes <= 9_000


def test_a_large_budget_has_room_for_none():
    """It is the second step that is compiled, and in a scan no further one: none can be faster there."""
    xla = Unrolled()
    looped, _ = both(10**6, xla, batch=8, losses=("full",))
    assert [policy for policy, _, _ in xla.calls] == [Rule("none")]
    assert [step.policy for step in looped.tried] == [NOTHING]


def test_a_scan_is_searched_where_it_may_be_faster():
    """Unrolled steps take a third longer than the model expects."""

    class Slow(Unrolled):
        def __call__(self, policy: Policy, loss: str, batch: int) -> Cost:
            cost = super().__call__(policy, loss, batch)
            return replace(cost, step_s=1.3 * cost.step_s)

    looped, found = both(9_000, Slow(), batch=8)
    assert found
    assert is_better(looped, found, "time")
    assert looped.policy not in NAMED


def test_the_least_bytes():
    looped, found = both(10**6, Unrolled(more=-50), batch=8, objective="memory")
    assert isinstance(found, Plan)
    assert (found.policy, found.loss, found.batch) == (looped.policy, looped.loss, 8)
    assert is_better(found, looped, "memory")


def test_the_least_bytes_may_be_those_of_full_remat():
    """Groups of layers make no sense. Unrolled, full remat is compiled, too."""
    layouts = [Steps(at, xla, LAYERS, 10**6, has_groups=False) for at, xla in ((layer_at, Xla()), (unrolled_at, Unrolled()))]
    options = {"losses": ("full",), "batch": 8, "fixed_bytes": 1000, "batches": range(1, 65)}
    plans = [one.plan for one in find_plans(layouts, objective="memory", **options)]
    assert [one.policy for one in plans if isinstance(one, Plan)] == [NOTHING, NOTHING]


def test_at_the_largest_batch_there_is_no_room_for_another_plan():
    looped, found = both(9_000, Unrolled(), objective="batch")
    assert looped.policy == SPARSE
    assert found is None


def test_unrolled_layers_are_planned_under_the_loss_that_reaches_the_largest_batch():
    looped, _ = both(2_500, Unrolled(), objective="batch", batches=range(1, 5))
    assert (looped.loss, looped.batch) == ("chunked", 4)


def test_the_estimate_is_that_of_the_loop_s_plan():
    """Compiled loops chose between two estimates of a layer. The unrolled layers are planned by the chosen one."""

    def loops_at(batch: int):
        layer = replace(layer_at(batch), assumption="right")
        slower = tuple(replace(op, recompute_s=3 * op.recompute_s) for op in layer.problem.ops)
        wrong = replace(layer, problem=replace(layer.problem, ops=slower), assumption="wrong")
        return replace(wrong, alternatives=(layer,))

    def rolled_out(batch: int):
        layer = loops_at(batch)
        wrong, right = (
            replace(one, problem=replace(one.problem, save_s_per_byte=0.0), in_scan=False)
            for one in (layer, *layer.alternatives)
        )
        return replace(wrong, alternatives=(right,))

    options = {"losses": ("chunked",), "batch": None, "fixed_bytes": 1000, "batches": range(1, 65)}
    layouts = [Steps(loops_at, Xla(), LAYERS, 9_000), Steps(rolled_out, Unrolled(), LAYERS, 9_000)]
    found = find_plans(layouts, **options)[1].plan
    by_right = find_plans([Steps(layer_at, Xla(), LAYERS, 9_000), Steps(unrolled_at, Unrolled(), LAYERS, 9_000)], **options)
    right = by_right[1].plan
    assert isinstance(found, Plan)
    assert isinstance(right, Plan)
    seconds, of_right = ({price.name: price.saved_s / plan.batch for price in plan.prices} for plan in (found, right))
    assert seconds == pytest.approx(of_right, rel=0.5), "the wrong estimate has three times the seconds"


@pytest.mark.parametrize("budget", [6_000, 12_000, 25_000])
def test_the_batch_of_unrolled_layers_is_not_chosen_by_interpolation(budget):
    """Where another batch looks best unrolled, the step under `nothing` is compiled there in a loop, before it is chosen."""
    nothing: list[int] = []

    class Uneven(Xla):
        def __call__(self, policy: Policy, loss: str, batch: int) -> Cost:
            nothing.extend([batch] if policy == NOTHING else [])
            cost = super().__call__(policy, loss, batch)
            return replace(cost, step_s=cost.step_s * (1 + 0.02 * (batch % 5) * (budget > 6_000)))

    def dearer_at(batch: int):
        layer = unrolled_at(batch)
        ops = tuple(replace(op, recompute_s=1.5 * op.recompute_s) for op in layer.problem.ops)
        return replace(layer, problem=replace(layer.problem, ops=ops))

    options = {"losses": ("full", "chunked"), "batch": None, "fixed_bytes": 1000, "batches": range(1, 65)}
    layouts = [Steps(layer_at, Uneven(), LAYERS, budget), Steps(dearer_at, Unrolled(), LAYERS, budget)]
    looped, found = (one.plan for one in find_plans(layouts, **options))
    assert isinstance(looped, Plan)
    assert isinstance(found, Plan)
    assert {step.batch for step in found.tried} - {looped.batch}
    assert {step.batch for step in found.tried} <= {*nothing}
