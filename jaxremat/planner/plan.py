"""Makes the plan of most tokens per second in a budget: saved values, loss and batch.

A worked example. A layer makes three values one after the other, x -> a -> b -> c, and its backward pass reads all three:

    value    bytes    seconds to make it
    a        40       4
    b        40       1
    c        20       3

There are two such layers. The full-remat step, which recomputes all three values in both layers, takes 1000 bytes and spends
2 * (4 + 1 + 3) = 16 seconds on recomputing.

* A budget of 1120 bytes leaves 120 bytes for saving, 60 for each layer. The best that a layer can save in 60 bytes is `a` and
  `c`: it then recomputes only `b`. The plan is `save:a,c`, and recomputing takes 2 * 1 = 2 seconds.
* A budget of 1080 bytes leaves 80 bytes, 40 for each layer. If both saved the same, the best would be to save `a`, for
  2 * (1 + 3) = 8 seconds. It is better if one layer saves `c` (20 bytes, 4 + 1 = 5 seconds) and the other saves `a` and `c`
  (60 bytes, 1 second). The plan is this mix, `1*save:c|1*save:a,c`, and recomputing takes 5 + 1 = 6 seconds.

How a plan is made:

1. If the batch may be chosen, it is chosen first (`free_batch.py`).
2. The full-remat step is compiled. It gives the bytes and the seconds of everything around the layers.
3. The best candidate is proposed: the one of the least recomputing among those that are expected to fit. What a layer saves is
   the solution of a 0/1 program (`solve.py`), and what a stack of layers saves may be a mix (`hull.py`, `candidates.py`).
4. The candidate is compiled. If XLA takes other bytes than expected, the difference corrects what is expected of further
   candidates (`corrections.py`), and the next one is proposed.
5. The named policies that could fit are compiled too. The fastest compiled step that fits is the answer, whichever it is.

Where there are several estimates of a layer, each proposes candidates, and the compiled steps decide. The answer is always a
step that was compiled and fits. XLA is only known here as the function `Steps.compile`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxremat.config import Objective
from jaxremat.planner.batch import MAX_BATCH, largest_batch, most_tried, spaced
from jaxremat.planner.candidates import best_candidate, named_policies
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.estimate import Candidate
from jaxremat.planner.free_batch import REFERENCE_BATCH, choose_batch
from jaxremat.planner.hull import lower_bound
from jaxremat.planner.prices import FurtherBudget, Price, prices
from jaxremat.planner.problem import Decision
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy

_MAX_CANDIDATES = 3  # candidates compiled for each estimate of a layer
_SURELY_TOO_BIG = 1.1  # a named policy isn't compiled where its saved values alone exceed the budget by this factor
_FURTHER_BYTES = tuple(2**30 << n for n in range(4))  # 1, 2, 4 and 8 GiB


@dataclass(frozen=True)
class Tried:
    """A step that was compiled.

    Attributes:
        policy: what its layers save.
        loss: its loss.
        batch: sequences in the step.
        cost: what it takes.
    """

    policy: Policy
    loss: str
    batch: int
    cost: Cost


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
            the model, in which saving a value takes its bytes and no more.
        prices: what saving each value is worth beside the rest of the plan, from the most saved seconds per byte.
        assumption: what the estimate of a layer assumes by which the plan was made (`LayerEstimate.assumption`).
        more: what more budget could bring.
        tried: every compiled step, in order.
    """

    policy: Policy
    loss: str
    batch: int
    cost: Cost
    predicted_bytes: int | None
    recompute_s: float | None
    bound_s: float
    prices: tuple[Price, ...]
    assumption: str
    more: tuple[FurtherBudget, ...]
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class NoPlan:
    """Nothing fits.

    `least` is the compiled step of the fewest bytes, at the smallest batch that was compiled.
    """

    least: Tried
    tried: tuple[Tried, ...]


def find_plan(
    steps: Steps,
    *,
    losses: Sequence[str],
    batch: int | None = None,
    fixed_bytes: int = 0,
    batches: Sequence[int] = range(1, MAX_BATCH + 1),
    objective: Objective = "time",
    named: bool = True,
) -> Plan | NoPlan:
    """The best plan whose compiled step fits the budget.

    Args:
        steps: the steps to plan.
        losses: the losses to choose among.
        batch: the batch. None to choose it, which isn't possible with the objective `memory`.
        fixed_bytes: bytes of the parameters and the optimizer state, for a first guess.
        batches: the batches to choose among, in rising order.
        objective: `time` for the most tokens per second, `batch` for the largest batch (and the fastest step there),
            `memory` for the least bytes.
        named: whether the named policies that could fit are compiled too.
    """
    tried: dict[tuple[Policy, str, int], Tried] = {}

    def compile_once(policy: Policy, loss: str, batch: int) -> Cost:
        key = (policy, loss, batch)
        if key not in tried:
            tried[key] = Tried(*key, steps.compile(*key))
        return tried[key].cost

    once = replace(steps, compile=compile_once)
    match objective:
        case "time":
            found = _fastest_plan(once, losses, batch, fixed_bytes, batches, named=named)
        case "batch":
            found = _largest(once, losses, fixed_bytes, batches, named=named)
        case "memory":
            once.expect(len(steps.least) * len(losses))
            found = _smallest(once, losses, batch or batches[0])
    if found is None:
        least = min(tried.values(), key=lambda step: (step.batch, step.cost.total_bytes))
        return NoPlan(least, tuple(tried.values()))
    return replace(found, tried=tuple(tried.values()))


# The objectives.


def _fastest_plan(
    steps: Steps, losses: Sequence[str], batch: int | None, fixed_bytes: int, batches: Sequence[int], *, named: bool
) -> Plan | None:
    """The plan of the most tokens per second."""
    if batch is not None:
        steps.expect(len(losses) - 1 + most_compiles(steps, batch, named=named))
        return _plan_at(steps, _fastest_loss(steps, losses, batch), batch, named=named)
    after = most_compiles(steps, REFERENCE_BATCH, named=named)
    choice = choose_batch(steps.before(after), losses, fixed_bytes, spaced(batches))
    return _plan_at(replace(choice.steps, expect=steps.expect), choice.loss, choice.batch, named=named)


def _largest(steps: Steps, losses: Sequence[str], fixed_bytes: int, batches: Sequence[int], *, named: bool) -> Plan | None:
    """The plan of the largest batch, and of the most tokens per second there."""

    after = len(losses) - 1 + most_compiles(steps, batches[0], named=named)
    searches = [*itertools.product(losses, steps.least)]
    reached = dict.fromkeys(losses, 0)
    for left, (loss, policy) in zip(reversed(range(len(searches))), searches, strict=True):
        whole = most_tried(batches) if left else 0
        found = largest_batch(
            lambda batch, policy=policy, loss=loss: steps.compile(policy, loss, batch).total_bytes,
            steps.budget_bytes,
            fixed_bytes=fixed_bytes,
            batches=batches,
            # Without a limit of the batch, it isn't known how many compiles the searches that come later take at most.
            expect=steps.before(left * whole + after).expect if whole is not None else lambda further: None,
        )
        reached[loss] = max(reached[loss], found.largest)
    largest = max(reached.values())
    if not largest:
        return None
    loss = _fastest_loss(steps, [loss for loss in losses if reached[loss] == largest], largest)
    return _plan_at(steps, loss, largest, named=named)


def _smallest(steps: Steps, losses: Sequence[str], batch: int) -> Plan | None:
    """The plan of the least bytes."""

    def total_bytes(choice: tuple[Policy, str]) -> int:
        policy, loss = choice
        return steps.compile(policy, loss, batch).total_bytes

    policy, loss = min(itertools.product(steps.least, losses), key=total_bytes)
    answer = Answer(policy, steps.compile(policy, loss, batch))
    return as_plan(steps, answer, loss, batch, _base(steps, loss, batch)) if steps.fits(answer.cost) else None


def _fastest_loss(steps: Steps, losses: Sequence[str], batch: int) -> str:
    """The loss under which the bound of the whole step's seconds is the least at this batch."""
    if len(losses) == 1:
        return losses[0]

    def rank(loss: str) -> tuple[bool, float]:
        base = _base(steps, loss, batch)
        if not steps.fits(base):
            return (True, base.total_bytes)
        hull = steps.layer_at(batch).hull  # a compiled step may have corrected it
        return (False, base.step_s + lower_bound(hull, steps.num_layers, steps.budget_bytes - base.total_bytes))

    return min(losses, key=rank)


# One batch and loss.


@dataclass(frozen=True)
class Answer:
    """A compiled step that could be the plan's, and its candidate; None for a named policy."""

    policy: Policy
    cost: Cost
    candidate: Candidate | None = None


def _base(steps: Steps, loss: str, batch: int) -> Cost:
    """The cost of full remat: everything around the layers, and the inputs of the layers."""
    return steps.compile(NOTHING, loss, batch)


def most_compiles(steps: Steps, batch: int, *, named: bool) -> int:
    """How many compiles the best plan at one batch and loss takes at most."""
    layer = steps.layer_at(batch)
    return 1 + _MAX_CANDIDATES * (1 + len(layer.alternatives)) + (len(named_policies(layer)) if named else 0)


def _plan_at(steps: Steps, loss: str, batch: int, *, named: bool) -> Plan | None:
    """The fastest step that fits, of the candidates and, with `named`, of the named policies.

    Where not even `nothing` fits, it is the policy of the least bytes, if that fits.
    """
    base = _base(steps, loss, batch)
    if not steps.fits(base):
        steps.expect(1)
        least = Answer(steps.least[-1], steps.compile(steps.least[-1], loss, batch))
        return as_plan(steps, least, loss, batch, base) if steps.fits(least.cost) else None
    layer = steps.layer_at(batch)
    answers: dict[Policy, Answer] = {NOTHING: Answer(NOTHING, base)}
    corrections = Corrections(base.total_bytes, steps.budget_bytes, base.without)
    estimates = (layer, *layer.alternatives)
    others = could_fit(steps, batch, base, _SURELY_TOO_BIG) if named else []
    for number, estimate in enumerate(estimates):
        steps.expect(_MAX_CANDIDATES * (len(estimates) - number) + len({*others} - answers.keys()))
        for _ in range(_MAX_CANDIDATES):
            candidate = best_candidate(estimate, steps.num_layers, corrections)
            if candidate is None or candidate.policy in answers:
                break
            cost = steps.compile(candidate.policy, loss, batch)
            answers[candidate.policy] = Answer(candidate.policy, cost, candidate)
            corrections = corrections.learn(candidate, cost.total_bytes)
        corrections = corrections.for_next_estimate()
    others = [policy for policy in others if policy not in answers]
    steps.expect(len(others))
    for policy in others:
        answers[policy] = Answer(policy, steps.compile(policy, loss, batch))
    return as_plan(steps, min(answers.values(), key=lambda answer: steps.rank(answer.cost)), loss, batch, base)


def could_fit(steps: Steps, batch: int, base: Cost, factor: float) -> list[Policy]:
    """The named policies that save few enough bytes for a step of `factor` times the budget."""
    layer = steps.layer_at(batch)

    def saved_bytes(kept: frozenset[int]) -> int:
        return steps.num_layers * sum(layer.problem.values[v].num_bytes for v in kept)

    policies = named_policies(layer).items()
    return [policy for policy, kept in policies if base.total_bytes + saved_bytes(kept) <= factor * steps.budget_bytes]


def as_plan(steps: Steps, answer: Answer, loss: str, batch: int, base: Cost) -> Plan:
    """The plan of an answer, with its bound and its prices.

    `base` is the cost of the full-remat step.
    """
    candidate = answer.candidate
    layer = candidate.layer if candidate else steps.layer_at(batch)
    left_bytes = steps.budget_bytes - base.total_bytes  # negative where `nothing` doesn't fit
    if candidate:
        decision, left_bytes = candidate.decision, max(left_bytes, candidate.saved_bytes)
    else:
        kept = named_policies(layer).get(answer.policy, frozenset())
        decision = Decision(frozenset(v for v in kept if layer.problem.values[v].saveable))

    def bound_s(further_bytes: int) -> float:
        return lower_bound(layer.hull, steps.num_layers, max(0, left_bytes + further_bytes))

    return Plan(
        policy=answer.policy,
        loss=loss,
        batch=batch,
        cost=answer.cost,
        predicted_bytes=base.total_bytes + candidate.expected_bytes if candidate else None,
        recompute_s=candidate.cost_s if candidate else None,
        bound_s=bound_s(0),
        prices=prices(layer, decision, steps.num_layers),
        assumption=layer.assumption,
        more=tuple(FurtherBudget(further, bound_s(0) - bound_s(further)) for further in _FURTHER_BYTES),
        tried=(),
    )
