"""Makes the plan of most tokens per second in a budget: saved values, loss and batch.

`search.py` compiles the steps. Here its answer becomes a plan, for each of the three objectives.
"""

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxremat.config import Objective
from jaxremat.errors import CompileError
from jaxremat.knapsack.hull import lower_bound
from jaxremat.knapsack.prices import FurtherBudget, Price, prices
from jaxremat.planner.candidates import named_decision
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.known import Known, Place, Tried
from jaxremat.planner.places import possible
from jaxremat.planner.search import Search, find, outdone
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import MAX_BATCH, largest_batch, most_tried

_FURTHER_BYTES = tuple(2**30 << n for n in range(4))  # 1, 2, 4 and 8 GiB


@dataclass(frozen=True)
class Plan:
    """The answer: a compiled step that fits.

    Attributes:
        policy: what the layers save.
        loss: the loss of the step.
        batch: sequences in the step.
        cost: what the compiled step takes.
        predicted_bytes: the total bytes that were expected before the step was compiled. None for a named policy.
        recompute_s: seconds of a step for recomputing, writing and reading residuals, by the model. None for a named policy.
        bound_s: the least such seconds within the budget. No choice of values to save, in whichever layers, takes fewer by
            the model, in which saving a value takes its bytes and no more. None where a compiled step fits that saves more bytes
            than the model has room for.
        prices: what saving each value is worth beside the rest of the plan, from the most saved seconds per byte.
        more: what more budget could bring. Empty where `bound_s` is None.
        tried: every compiled step, in order.
    """

    policy: Policy
    loss: str
    batch: int
    cost: Cost
    predicted_bytes: int | None
    recompute_s: float | None
    bound_s: float | None
    prices: tuple[Price, ...]
    more: tuple[FurtherBudget, ...]
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class NoPlan:
    """Nothing fits. `least` is the step of the fewest bytes, at the smallest compiled batch."""

    least: Tried
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class Found:
    """What was found in one layout: a plan, or why there is none.

    `plan` is None where no step of the unrolled layers fits, and `rejected` says why XLA rejected one. `bound` is set for a
    scan in which no own choice of the planner's was compiled, because unrolled layers are faster: no step in it is expected to
    have more sequences per second.
    """

    plan: Plan | NoPlan | None
    rejected: str = ""
    bound: float | None = None


def find_plans(
    layouts: Sequence[Steps],
    *,
    losses: Sequence[str],
    batch: int | None = None,
    fixed_bytes: int = 0,
    batches: Sequence[int] = range(1, MAX_BATCH + 1),
    objective: Objective = "time",
    named: bool = True,
) -> list[Found]:
    """The best plan in each layout whose compiled step fits the budget.

    Args:
        layouts: the steps to plan: those of a scan or of the layers' own layout, and of the same layers, unrolled.
        losses: the losses to choose among.
        batch: the batch. None to choose it, which isn't possible with the objective `memory`.
        fixed_bytes: bytes of the parameters and the optimizer state, for a first guess.
        batches: the batches to choose among, in rising order.
        objective: `time` for the most tokens per second, `batch` for the largest batch (and the fastest step there),
            `memory` for the least bytes.
        named: whether the named policies that could fit are compiled too.
    """
    steps, *others = layouts
    first = Known(steps, losses, [batch or batches[0]], fixed_bytes)
    if objective == "batch":
        _largest(first, batches, named=named)
    elif objective == "time" and batch is None:
        known = {batch for layout in layouts for _, _, batch in layout.known if batch in batches}
        first.batches = sorted(known.union(possible(steps, fixed_bytes, batches)))
    found = [first, *(Known(unrolled, first.losses, first.batches, fixed_bytes, scanned=first) for unrolled in others)]
    if objective == "memory":
        _smallest(found)
    elif objective == "time" or first.best():
        collections.deque(find(found, named), maxlen=0)
    answers = [found_by(known, objective) for known in found]
    if objective != "memory" and not first.candidates and (bound := outdone(found)) is not None:
        answers[0] = replace(answers[0], bound=bound)
    return answers


def _largest(known: Known, batches: Sequence[int], *, named: bool) -> None:
    """Compiles the steps that prove the largest batch.

    The search continues at that batch, with the losses that reach it.
    """
    steps, after = known.steps, len(known.losses) - 1 + Search(known, named).most_left()
    pairs = [*itertools.product(known.losses, steps.least)]
    reached = dict.fromkeys(known.losses, 0)
    for left, (loss, policy) in zip(reversed(range(len(pairs))), pairs, strict=True):
        # Without a limit of the batch, it isn't known how many compiles the searches that come later take at most.
        whole = most_tried(batches) if left else 0
        later = None if whole is None else left * whole + after
        found = largest_batch(
            lambda batch, policy=policy, loss=loss: known.add(policy, Place(loss, batch)).cost.total_bytes,
            steps.budget_bytes,
            fixed_bytes=known.fixed_bytes,
            batches=batches,
            expect=lambda further, later=later: None if later is None else steps.expect(further + later),
        )
        reached[loss] = max(reached[loss], found.largest)
    largest = max(reached.values())
    known.batches = [largest or batches[0]]
    known.losses = [loss for loss in known.losses if reached[loss] == largest]


def _smallest(layouts: Sequence[Known]) -> None:
    """Compiles the policies of the least bytes, and unrolled, the one of the least in a scan."""
    first, *others = layouts
    pairs = [*itertools.product(first.steps.least, first.losses)]
    first.steps.expect(len(pairs) + len(others))
    for policy, loss in pairs:
        first.add(policy, Place(loss, first.batches[0]))
    smallest = min(first.tried.values(), key=lambda step: step.cost.total_bytes)
    for unrolled in others:
        try:
            unrolled.add(smallest.policy, Place(smallest.loss, smallest.batch))
        except CompileError as error:
            unrolled.rejected = str(error)


def found_by(known: Known, objective: Objective) -> Found:
    """The answer of a search that has ended."""
    fitting, tried = [*known.fitting()], tuple(known.tried.values())
    if not fitting and known.scanned:
        return Found(None, known.rejected)
    if not fitting:
        return Found(NoPlan(min(tried, key=lambda step: (step.batch, step.cost.total_bytes)), tried))
    best = min(fitting, key=lambda step: step.cost.total_bytes) if objective == "memory" else known.best()
    assert best, "a step fits"
    return Found(_as_plan(known, best), known.rejected)


def _as_plan(known: Known, answer: Tried) -> Plan:
    """The plan of a compiled step, with its bound and its prices."""
    steps, place = known.steps, Place(answer.loss, answer.batch)
    base, layer = known.base(place), known.layer_at(answer.batch)
    left_bytes = Corrections(base.total_bytes, steps.budget_bytes, base.moments).most_saved(layer)
    own = known.own_choices()
    candidate = own.get((answer.policy, place))

    def bound_s(further_bytes: int) -> float:
        return lower_bound(layer.hull, steps.num_layers, max(0, left_bytes + further_bytes))

    fitting = (own.get((step.policy, place)) for step in known.fitting(place))
    is_right = all(one is None or one.saved_bytes <= max(0, left_bytes) for one in fitting)
    decision = candidate.decision if candidate else named_decision(layer, answer.policy)
    return Plan(
        policy=answer.policy,
        loss=answer.loss,
        batch=answer.batch,
        cost=answer.cost,
        predicted_bytes=base.total_bytes + int(candidate.expected_bytes) if candidate else None,
        recompute_s=steps.num_layers * candidate.layer_s(layer) if candidate else None,
        bound_s=bound_s(0) if is_right else None,
        prices=prices(layer.problem, decision, steps.num_layers),
        more=tuple(FurtherBudget(further, bound_s(0) - bound_s(further)) for further in _FURTHER_BYTES) if is_right else (),
        tried=tuple(known.tried.values()),
    )
