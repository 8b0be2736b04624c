"""The planner: what each layer keeps, under which loss, at which batch, for the most tokens per second within a budget.

A layer's decision is a 0/1 program (`solve.py`); over equal layers the best of it is a mix of two neighbouring points of a
convex hull (`hull.py`). What that leaves out, the step's bytes and seconds around the layers, is read off compiled steps:
under `nothing`, which keeps the layers' inputs only, and saving adds its bytes to those and takes recomputing off. The answer
is always a step that was compiled and fits: if XLA says otherwise than predicted, the difference corrects the next plan; where it
took much less, its working set must be another, and only plans like it are corrected. Where estimates of a layer differ,
each makes plans, and compiled steps choose. A batch that is free is chosen first (`free_batch.py`). The named policies that
could fit are compiled at the batch too, and the fastest is the answer, whoever made it.

XLA is behind a callable here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxremat.planner.candidates import Candidate, Family, Price, candidates, named_policies, prices
from jaxremat.planner.free_batch import choose_batch
from jaxremat.planner.hull import lower_bound
from jaxremat.planner.problem import Decision
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.search.batch import largest_batch

Objective = Literal["time", "batch", "memory"]
_MAX_CORRECTIONS = 3
_MUCH_LESS = 0.01  # share of the step under `nothing`: by so much less than expected, and its working set is another
_SURELY_TOO_BIG = 1.1  # share of the budget beyond which a named policy isn't compiled, going by its residuals


@dataclass(frozen=True)
class Tried:
    """A step that was compiled on the way."""

    policy: Policy
    loss: str
    batch: int
    cost: Cost


@dataclass(frozen=True)
class Plan:
    """The answer: a compiled step that fits.

    Attributes:
        policy: what the layers keep.
        loss: the loss it goes with.
        batch: sequences.
        cost: of the compiled step.
        predicted_bytes: the total that was expected of it before it was compiled; None for a named policy.
        recompute_s: seconds a step that recomputing, writing and reading residuals takes, by the model; None for a named one.
        bound_s: no choice of values to save, in whichever layers, takes fewer such seconds within the budget, by the model, in
            which saving takes the bytes of what is saved.
        prices: the values of a layer beside the rest of the plan, from the most seconds saved per byte.
        more: further bytes of budget, and the seconds a step that they could spare by the bound.
        tried: every step compiled, in order.
    """

    policy: Policy
    loss: str
    batch: int
    cost: Cost
    predicted_bytes: int | None
    recompute_s: float | None
    bound_s: float
    prices: tuple[Price, ...]
    more: tuple[tuple[int, float], ...]
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class NoPlan:
    """Nothing fits: the step of the least bytes that was compiled, at the smallest batch there may be."""

    least: Tried
    tried: tuple[Tried, ...]


def find_plan(
    steps: Steps,
    *,
    losses: Sequence[str],
    batch: int | None = None,
    fixed_bytes: int = 0,
    max_batch: int = 4096,
    objective: Objective = "time",
) -> Plan | NoPlan:
    """The best plan whose compiled step fits the budget.

    Args:
        steps: what is planned.
        losses: to choose among.
        batch: the batch; None to choose it, which `memory` can't.
        fixed_bytes: parameters and optimizer state, for a first guess.
        max_batch: no larger batch is chosen.
        objective: `time` for the most tokens per second, `batch` for the largest batch (and the fastest step there),
            `memory` for the least bytes.
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
            found = _fastest(once, losses, batch, fixed_bytes, max_batch)
        case "batch":
            found = _largest(once, losses, fixed_bytes, max_batch)
        case "memory":
            found = _smallest(once, losses, batch or 1)
    if found is None:
        least = min(tried.values(), key=lambda step: (step.batch, step.cost.total_bytes))
        return NoPlan(least, tuple(tried.values()))
    return replace(found, tried=tuple(tried.values()))


# The objectives.


def _fastest(steps: Steps, losses: Sequence[str], batch: int | None, fixed_bytes: int, max_batch: int) -> Plan | None:
    if batch is not None:
        loss = _fastest_loss(steps, losses, batch)
        return _plan_at(steps, loss, batch)
    steps, batch, loss = choose_batch(steps, losses, fixed_bytes, max_batch)
    return _plan_at(steps, loss, batch)


def _largest(steps: Steps, losses: Sequence[str], fixed_bytes: int, max_batch: int) -> Plan | None:
    batches = range(1, max_batch + 1)

    def largest_under(policy: Policy, loss: str) -> int:
        return largest_batch(
            lambda batch: steps.compile(policy, loss, batch).total_bytes,
            steps.budget_bytes,
            fixed_bytes=fixed_bytes,
            batches=batches,
        ).largest

    reached = {loss: max(largest_under(policy, loss) for policy in steps.least) for loss in losses}
    largest = max(reached.values())
    if not largest:
        return None
    loss = _fastest_loss(steps, [loss for loss in losses if reached[loss] == largest], largest)
    return _plan_at(steps, loss, largest)


def _smallest(steps: Steps, losses: Sequence[str], batch: int) -> Plan | None:
    choices = [(steps.compile(policy, loss, batch).total_bytes, loss, policy) for policy in steps.least for loss in losses]
    _, loss, policy = min(choices, key=lambda choice: choice[0])
    cost = steps.compile(policy, loss, batch)
    return _as_plan(steps, loss, batch, policy, cost, None) if steps.fits(cost) else None


def _fastest_loss(steps: Steps, losses: Sequence[str], batch: int) -> str:
    """The loss under which the bound of the whole step is least at this batch."""
    if len(losses) == 1:
        return losses[0]
    hull = steps.layer_at(batch).hull

    def rank(loss: str) -> tuple[bool, float]:
        base = steps.compile(NOTHING, loss, batch)
        if not steps.fits(base):
            return (True, base.total_bytes)
        return (False, base.step_s + lower_bound(hull, steps.num_layers, steps.budget_bytes - base.total_bytes))

    return min(losses, key=rank)


# One batch and loss.


def _plan_at(steps: Steps, loss: str, batch: int) -> Plan | None:
    """The fastest step that fits: planned, corrected by what compiling says, and compared with the named policies."""
    base = steps.compile(NOTHING, loss, batch)
    if not steps.fits(base):
        policy = steps.least[-1]
        cost = steps.compile(policy, loss, batch)
        return _as_plan(steps, loss, batch, policy, cost, None) if steps.fits(cost) else None
    layer = steps.layer_at(batch)
    answers: dict[Policy, tuple[Cost, Candidate | None]] = {NOTHING: (base, None)}
    spare = steps.budget_bytes - base.total_bytes
    beyond: dict[int, int] = {}  # by the layers of a group: bytes that XLA took beyond what is saved
    for priced in (layer, *layer.alternatives):
        mixes = True
        alike: list[Family] = []  # decisions like those that took much less than expected
        for _ in range(_MAX_CORRECTIONS):
            found = candidates(priced, [*priced.families, *alike], steps.num_layers, spare, beyond)
            found = (c for c in found if mixes or c.group_size == 1)
            candidate = min(found, key=lambda c: (c.cost_s, c.saved_bytes), default=None)
            if candidate is None or candidate.policy in answers:
                break
            cost = steps.compile(candidate.policy, loss, batch)
            answers[candidate.policy] = (cost, candidate)
            mixes = steps.fits(cost) or candidate.group_size == 1  # after a mix that was too big, what all layers take alike
            took = cost.total_bytes - base.total_bytes - candidate.saved_bytes
            if candidate.family.beyond is not None:
                alike[alike.index(candidate.family)] = replace(candidate.family, beyond=took)
            elif candidate.group_size == 1 and took < -_MUCH_LESS * base.total_bytes:
                alike.append(priced.families[candidate.family.attention].like(candidate.decision, took))
            else:
                beyond[candidate.group_size] = took
    for policy, kept in named_policies(layer).items():
        num_bytes = steps.num_layers * sum(layer.problem.values[v].num_bytes for v in kept)
        if base.total_bytes + num_bytes <= _SURELY_TOO_BIG * steps.budget_bytes:
            answers.setdefault(policy, (steps.compile(policy, loss, batch), None))
    policy = min(answers, key=lambda policy: steps.rank(answers[policy][0]))
    return _as_plan(steps, loss, batch, policy, *answers[policy])


def _as_plan(steps: Steps, loss: str, batch: int, policy: Policy, cost: Cost, candidate: Candidate | None) -> Plan:
    base = steps.compile(NOTHING, loss, batch)
    layer = candidate.layer if candidate else steps.layer_at(batch)
    room = steps.budget_bytes - base.total_bytes  # negative where `nothing` doesn't fit
    if candidate:
        decision, room = candidate.decision, max(room, candidate.saved_bytes)
    else:
        kept = named_policies(layer).get(policy, frozenset())
        decision = Decision(frozenset(v for v in kept if layer.problem.values[v].saveable))

    def bound(room: int) -> float:
        return lower_bound(layer.hull, steps.num_layers, max(0, room))

    return Plan(
        policy=policy,
        loss=loss,
        batch=batch,
        cost=cost,
        predicted_bytes=base.total_bytes + candidate.expected_bytes if candidate else None,
        recompute_s=candidate.cost_s if candidate else None,
        bound_s=bound(room),
        prices=prices(layer, decision, steps.num_layers),
        more=tuple((further, bound(room) - bound(room + further)) for further in (2**30 << n for n in range(4))),
        tried=(),
    )
