"""The planner: what each layer keeps, under which loss, at which batch, for the most tokens per second within a budget.

A block's decision is a 0/1 program (`solve.py`); over equal layers the best of it is a mix of two neighbouring points of a
convex hull (`frontier.py`). What that leaves out, the step's bytes and seconds around the layers, is read off compiled steps:
under `nothing`, which keeps the layers' inputs only, and saving adds its bytes to those and takes recomputing off. The answer
is always a step that was compiled and fits: if XLA says otherwise than predicted, the difference corrects the next plan; where it
took much less, its working set must be another, and only plans like it are corrected. The named policies that could fit are
compiled at the batch chosen too, and the fastest is the answer, whoever made it.

XLA is behind a callable here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxremat.policy.spec import NOTHING, Every, Policy
from jaxremat.search.batch import largest_batch
from jaxremat.search.candidates import Block, Candidate, Family, Price, candidates, families_of, named_policies, prices
from jaxremat.search.frontier import lower_bound
from jaxremat.search.problem import Decision

Objective = Literal["time", "batch", "memory"]
#: Where the inputs of all layers don't fit, or the least bytes are asked for.
SPARSE = Every("sqrt", NOTHING)
_REFERENCE_BATCH = 8
_NEAR = 1.5  # times the largest batch compiled: so far bytes are taken to go on as they did
_AS_EXPECTED = 0.01  # share of the bytes: with more to spare, the batch is chosen again
_MAX_CORRECTIONS = 3
_MAX_LOOKED_AT = 48  # batches whose best candidate is looked for
_SAME_SPEED = 1e-3  # of the tokens per second: within it, the smaller batch
_MUCH_LESS = 0.01  # share of the step under `nothing`: by so much less than expected, and its working set is another
_SURELY_TOO_BIG = 1.1  # share of the budget beyond which a named policy isn't compiled, going by its residuals


@dataclass(frozen=True)
class Cost:
    """A compiled step: its total bytes and its seconds, predicted from its kernels."""

    total_bytes: int
    step_s: float


@dataclass(frozen=True)
class Steps:
    """What is planned: a layer by batch, the compiler (called once for equal arguments), the layers, and the budget."""

    block_at: Callable[[int], Block]
    compile: Callable[[Policy, str, int], Cost]
    num_layers: int
    budget_bytes: int

    @property
    def least(self) -> tuple[Policy, ...]:
        """The policies that keep the least: one layer has no groups."""
        return (NOTHING, SPARSE) if self.num_layers > 1 else (NOTHING,)

    def fits(self, cost: Cost) -> bool:
        """Whether a compiled step is within the budget."""
        return cost.total_bytes <= self.budget_bytes

    def rank(self, cost: Cost) -> tuple[bool, float]:
        """Sorts what fits first, by seconds; what doesn't, by bytes."""
        return (False, cost.step_s) if self.fits(cost) else (True, cost.total_bytes)


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
        bound_s: no choice of values to save, in whichever layers, takes fewer such seconds within the budget, by the model.
        prices: the values of a layer, from the most seconds spared per byte.
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
    curves = {loss: _curve(steps, loss, fixed_bytes, max_batch) for loss in losses}
    while found := _fastest_batch(steps, curves, max_batch):
        at, loss = found
        expected_bytes, _ = curves[loss].at(at)
        base = steps.compile(NOTHING, loss, at)
        if steps.fits(base) and expected_bytes <= base.total_bytes * (1 + _AS_EXPECTED):
            return _plan_at(steps, loss, at)
        curves[loss] = curves[loss].with_point(at, base)
    return _plan_at(steps, min(curves, key=lambda loss: curves[loss].at(1)), 1)


def _largest(steps: Steps, losses: Sequence[str], fixed_bytes: int, max_batch: int) -> Plan | None:
    batches = range(1, max_batch + 1)

    def search(policy: Policy, loss: str) -> int:
        return largest_batch(
            lambda batch: steps.compile(policy, loss, batch).total_bytes,
            steps.budget_bytes,
            fixed_bytes=fixed_bytes,
            batches=batches,
        ).largest

    largest, loss = max((search(policy, loss), loss) for policy in steps.least for loss in losses)
    return _plan_at(steps, loss, largest) if largest else None


def _smallest(steps: Steps, losses: Sequence[str], batch: int) -> Plan | None:
    choices = [(steps.compile(policy, loss, batch).total_bytes, loss, policy) for policy in steps.least for loss in losses]
    _, loss, policy = min(choices, key=lambda choice: choice[0])
    cost = steps.compile(policy, loss, batch)
    return _as_plan(steps, loss, batch, policy, cost, None) if steps.fits(cost) else None


# The batch.


@dataclass(frozen=True)
class _Curve:
    """Bytes and seconds of the step under `nothing` by batch: compiled at some, straight between them and beyond."""

    points: tuple[tuple[int, Cost], ...]

    def with_point(self, batch: int, cost: Cost) -> "_Curve":
        return _Curve(tuple(sorted({**dict(self.points), batch: cost}.items(), key=lambda point: point[0])))

    def at(self, batch: int) -> tuple[float, float]:
        """Bytes and seconds."""
        right = next((n for n, (b, _) in enumerate(self.points) if n and b >= batch), len(self.points) - 1)
        (low, below), (high, above) = self.points[right - 1 : right + 1]
        share = (batch - low) / (high - low)
        return (
            below.total_bytes + share * (above.total_bytes - below.total_bytes),
            below.step_s + share * (above.step_s - below.step_s),
        )

    def reach(self, budget_bytes: int) -> float:
        """The batch at which the bytes are the budget, by the last two points."""
        (low, below), (high, above) = self.points[-2:]
        per_sequence = max(1.0, (above.total_bytes - below.total_bytes) / (high - low))
        return low + (budget_bytes - below.total_bytes) / per_sequence


def _curve(steps: Steps, loss: str, fixed_bytes: int, max_batch: int) -> _Curve:
    """Two compiled steps where bytes go on as they began, and else as many as it takes to come near the budget."""
    low = min(_REFERENCE_BATCH, max_batch)
    guess = _Curve(((0, Cost(fixed_bytes, 0.0)), (low, steps.compile(NOTHING, loss, low))))
    high = int(min(max_batch, max(2 * low, 0.8 * guess.reach(steps.budget_bytes))))
    if high <= low:
        return guess
    curve = _Curve(guess.points[1:]).with_point(high, steps.compile(NOTHING, loss, high))
    while high < max_batch and curve.reach(steps.budget_bytes) > _NEAR * high:
        high = int(min(max_batch, 0.8 * curve.reach(steps.budget_bytes), 4 * high))  # a flat line reaches anywhere
        curve = curve.with_point(high, steps.compile(NOTHING, loss, high))
    return curve


def _fastest_batch(steps: Steps, curves: dict[str, _Curve], max_batch: int) -> tuple[int, str] | None:
    """The batch and loss of most sequences per second by the model: by the bound first, and then by what plans reach.

    None where not even one sequence is expected to fit.
    """
    block = steps.block_at(_REFERENCE_BATCH)
    hull, families = block.hull, families_of(block)
    most_s = steps.num_layers * hull[0].cost_s

    def speed(batch: int, step_s: float, residuals_s: float) -> float:
        return batch / (step_s - batch / _REFERENCE_BATCH * (most_s - residuals_s))

    bounds: list[tuple[float, int, str, int]] = []
    for loss, curve in curves.items():
        for batch in range(1, max_batch + 1):
            num_bytes, step_s = curve.at(batch)
            if num_bytes > steps.budget_bytes:
                break
            scaled = int((steps.budget_bytes - num_bytes) * _REFERENCE_BATCH / batch)
            bounds.append((speed(batch, step_s, lower_bound(hull, steps.num_layers, scaled)), batch, loss, scaled))
    if not bounds:
        return None
    reached: list[tuple[float, int, str]] = []
    for bound, batch, loss, scaled in sorted(bounds, key=lambda b: (-b[0], b[1]))[:_MAX_LOOKED_AT]:
        if reached and bound <= max(reached)[0]:
            break
        found = candidates(block, families, steps.num_layers, scaled)
        best_s = min((c.cost_s for c in found), default=most_s)
        reached.append((speed(batch, curves[loss].at(batch)[1], best_s), batch, loss))
    enough = max(reached)[0] * (1 - _SAME_SPEED)
    batch, _, loss = min((batch, -fast, loss) for fast, batch, loss in reached if fast >= enough)
    return batch, loss


def _fastest_loss(steps: Steps, losses: Sequence[str], batch: int) -> str:
    """The loss under which the bound of the whole step is least at this batch."""
    if len(losses) == 1:
        return losses[0]
    hull = steps.block_at(batch).hull

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
    block = steps.block_at(batch)
    answers: dict[Policy, tuple[Cost, Candidate | None]] = {NOTHING: (base, None)}
    spare = steps.budget_bytes - base.total_bytes
    beyond: dict[int, int] = {}  # by the layers of a group: bytes that XLA took beyond what is saved
    for priced in (block, *block.alternatives):
        whole, mixes = families_of(priced), True
        alike: list[Family] = []  # decisions like those that took much less than expected
        for _ in range(_MAX_CORRECTIONS):
            found = candidates(priced, [*whole, *alike], steps.num_layers, spare, beyond)
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
                alike.append(whole[candidate.family.attention].like(candidate.decision, took))
            else:
                beyond[candidate.group_size] = took
    for policy, num_bytes in named_policies(block):
        if base.total_bytes + steps.num_layers * num_bytes <= _SURELY_TOO_BIG * steps.budget_bytes:
            answers.setdefault(policy, (steps.compile(policy, loss, batch), None))
    policy = min(answers, key=lambda policy: steps.rank(answers[policy][0]))
    return _as_plan(steps, loss, batch, policy, *answers[policy])


def _as_plan(steps: Steps, loss: str, batch: int, policy: Policy, cost: Cost, candidate: Candidate | None) -> Plan:
    block, base = steps.block_at(batch), steps.compile(NOTHING, loss, batch)
    hull = block.hull
    spare = max(0, steps.budget_bytes - base.total_bytes, candidate.saved_bytes if candidate else 0)
    bound_s = lower_bound(hull, steps.num_layers, spare)
    return Plan(
        policy=policy,
        loss=loss,
        batch=batch,
        cost=cost,
        predicted_bytes=base.total_bytes + candidate.expected_bytes if candidate else None,
        recompute_s=candidate.cost_s if candidate else None,
        bound_s=bound_s,
        prices=prices(block, candidate.decision if candidate else Decision(), steps.num_layers),
        more=tuple(
            (further, bound_s - lower_bound(hull, steps.num_layers, spare + further))
            for further in (2**30 << n for n in range(4))
        ),
        tried=(),
    )
