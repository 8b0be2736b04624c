"""Chooses the batch of the most tokens per second within a budget, by few compiles.

A model of the step says which batch is worth a closer look. Bytes and seconds of the full-remat step are read off compiled
steps at some batches, and taken to be straight lines between these. What saving takes and saves in the layers comes from a
layer's problem, and grows with the batch. A lower bound (`hull.py`) then says within milliseconds how fast each batch could be.

The batch that looks best is compiled, and what the compiled step takes corrects the model. This repeats until the batch that
looks best was compiled before.

Example: compiled under `nothing`, batch 8 takes 10 GiB and batch 24 takes 26 GiB. Batch 16 is then expected to take 18 GiB. In
a budget of 30 GiB, 12 GiB are left over for saving at batch 16, and 4 GiB at batch 24. The larger batch has the smaller share of
fixed costs, and the smaller batch recomputes less.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxremat.planner.candidates import best_candidate
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.curve import Curve, CurvePoint
from jaxremat.planner.estimate import LayerEstimate, policy_of
from jaxremat.planner.evaluate import evaluate
from jaxremat.planner.hull import lower_bound
from jaxremat.planner.problem import Decision, union
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy

REFERENCE_BATCH = 8  # at which a layer's problem is made; other batches scale it
_NEAR = 1.5  # up to so many times the largest batch compiled, bytes are taken to grow as they did
_MAX_LOOKED_AT = 48  # number of batches for which the best candidate is searched
_MAX_CHOSEN = 6  # batches compiled because they look best; after that, one of those that were compiled is taken
_GROWTH = 4  # the curve's next batch is at most so many times its last one: a line that is nearly flat leads anywhere
_SAME_SPEED = 3e-3  # share of the tokens per second by which two batches, or two estimates of a layer, count as equal


@dataclass(frozen=True)
class Choice:
    """A batch and a loss, and the steps to plan with the fitted estimates of a layer."""

    steps: Steps
    batch: int
    loss: str


def choose_batch(steps: Steps, losses: Sequence[str], fixed_bytes: int, batches: Sequence[int]) -> Choice:
    """The batch and the loss of the most tokens per second.

    At both, the full-remat step was compiled.

    Args:
        steps: the steps to plan.
        losses: the losses to choose among.
        fixed_bytes: bytes of the parameters and the optimizer state, for a first guess.
        batches: the batches to choose among, in rising order.

    Returns:
        The choice. Its steps have only those estimates of a layer that compiled steps agree with. The batch is the smallest one
        where no batch is expected to fit.
    """
    batches = possible(steps, fixed_bytes, batches)
    low = at_most(batches, REFERENCE_BATCH)
    after, most = len(steps.layer_at(low).alternatives) + _MAX_CHOSEN, 2 + _most_growths(batches, low)
    curves = {}
    for left, loss in zip(reversed(range(len(losses))), losses, strict=True):
        steps.expect(most * (left + 1) + after)
        curves[loss] = _curve(steps.before(most * left + after), loss, fixed_bytes, batches)
    steps = _with_agreeing_estimates(steps, losses[0], low)
    for left in range(_MAX_CHOSEN, -1, -1):
        fastest = fastest_batch(steps, curves, batches, _MAX_LOOKED_AT if left else 0)
        if fastest is None:
            break
        batch, loss = fastest.batch, fastest.loss
        if curves[loss].is_compiled(batch):
            return Choice(steps, batch, loss)
        steps.expect(left)
        curves[loss] = curves[loss].with_point(batch, steps.compile(NOTHING, loss, batch))

    def rank(loss: str) -> tuple[float, float]:
        expected = curves[loss].at(batches[0])
        return (expected.total_bytes, expected.step_s)

    return Choice(steps, batches[0], min(losses, key=rank))


def possible(steps: Steps, fixed_bytes: int, batches: Sequence[int]) -> Sequence[int]:
    """The batches at which a step could fit, and the smallest one.

    Under `nothing` a step saves the inputs of its layers.
    """
    least_bytes = max(1.0, steps.num_layers * bytes_per_sequence(steps))
    return batches[: bisect.bisect_right(batches, at_most(batches, (steps.budget_bytes - fixed_bytes) / least_bytes))]


def at_most(batches: Sequence[int], limit: float) -> int:
    """The largest batch up to the limit, or the smallest batch if all are above the limit."""
    return batches[max(0, bisect.bisect_right(batches, limit) - 1)]


# Estimates of a layer.


def _with_agreeing_estimates(steps: Steps, loss: str, batch: int) -> Steps:
    """The steps with those estimates of a layer that compiled steps agree with.

    For each alternative, the policy is compiled on which it differs most from the first estimate. The alternative stays if
    the compiled step is nearer to it. The first estimate stays where no alternative is.
    """
    layer, base = steps.layer_at(batch), steps.compile(NOTHING, loss, batch)
    kept: list[int] = []
    for n, other in enumerate(layer.alternatives):
        dispute = _largest_dispute(layer, other)
        if steps.num_layers * dispute.difference_s < _SAME_SPEED * base.step_s:
            continue
        steps.expect(len(layer.alternatives) - n + _MAX_CHOSEN)
        saved_s = (base.step_s - steps.compile(dispute.policy, loss, batch).step_s) / steps.num_layers
        if abs(saved_s - dispute.other_saved_s) < abs(saved_s - dispute.saved_s):
            kept.append(n)

    @functools.cache
    def layer_at(batch: int) -> LayerEstimate:
        layer = steps.layer_at(batch)
        first, *others = [layer.alternatives[n] for n in kept] or [layer]
        return replace(first, alternatives=tuple(others))

    return replace(steps, layer_at=layer_at)


@dataclass(frozen=True)
class _Dispute:
    """A policy, and the seconds that it saves in a layer by each of two estimates."""

    policy: Policy
    saved_s: float
    other_saved_s: float

    @property
    def difference_s(self) -> float:
        return abs(self.saved_s - self.other_saved_s)


def _largest_dispute(layer: LayerEstimate, other: LayerEstimate) -> _Dispute:
    """The policy on whose saved seconds two estimates differ most, among the hulls of `other`."""

    def saved_s(estimate: LayerEstimate, decision: Decision) -> float:
        return estimate.nothing_s - evaluate(estimate.problem, decision).cost_s

    disputes: list[_Dispute] = []
    for family in other.families:
        for point in family.hull:
            decision = union(point.decision, family.kept)
            policy = policy_of(layer, decision, family.attention)
            disputes.append(_Dispute(policy, saved_s(layer, decision), saved_s(other, decision)))
    return max(disputes, key=lambda dispute: dispute.difference_s)


# The full-remat step, by batch.


def _curve(steps: Steps, loss: str, fixed_bytes: int, batches: Sequence[int]) -> Curve:
    """The curve of a loss, from two compiled steps.

    More are compiled where these are still far below the budget.
    """
    low = at_most(batches, REFERENCE_BATCH)
    first = steps.compile(NOTHING, loss, low)
    left_bytes = max(0, steps.budget_bytes - first.total_bytes)
    # Each further sequence takes at most what the first ones take on average, and at least the inputs of its layers. The second
    # batch is guessed by the geometric mean of the two.
    most, least = (first.total_bytes - fixed_bytes) / low, steps.num_layers * bytes_per_sequence(steps)
    high = at_most(batches, max(2 * low, low + left_bytes / math.sqrt(max(1.0, most * least))))
    if high <= low:
        return Curve((CurvePoint(0, Cost(fixed_bytes, 0.0)), CurvePoint(low, first)))
    growths = _most_growths(batches, high)
    steps.expect(1 + growths)
    curve = Curve((CurvePoint(low, first), CurvePoint(high, steps.compile(NOTHING, loss, high))))
    for left in range(growths, 0, -1):
        further = at_most(batches, min(0.8 * curve.reach(steps.budget_bytes), _GROWTH * high))
        if further <= high or curve.reach(steps.budget_bytes) <= _NEAR * high:
            break
        high = further
        steps.expect(left)
        curve = curve.with_point(high, steps.compile(NOTHING, loss, high))
    return curve


def _most_growths(batches: Sequence[int], high: int) -> int:
    """How many batches a curve is compiled at beyond `high`.

    They are as many as growing to the last batch takes, and one nearer step.
    """
    growths = 1
    while high < batches[-1]:
        high, growths = high * _GROWTH, growths + 1
    return growths


def bytes_per_sequence(steps: Steps) -> float:
    """Bytes of a layer's input for one sequence, without the layer's parameters."""
    small, large = (steps.layer_at(batch).input_bytes for batch in (REFERENCE_BATCH, 2 * REFERENCE_BATCH))
    return (large - small) / REFERENCE_BATCH


# The choice.


@dataclass(frozen=True)
class _Bound:
    """A batch and a loss, and the highest speed that any plan there can reach.

    Attributes:
        batch: sequences in a step.
        loss: the loss.
        step_s: expected seconds of the full-remat step.
        left_bytes: bytes of the budget that this step leaves over, scaled to the reference batch.
        speed: sequences per second by the bound.
    """

    batch: int
    loss: str
    step_s: float
    left_bytes: int
    speed: float


@dataclass(frozen=True)
class Reached:
    """A batch and a loss, and the sequences per second of the best candidate there."""

    batch: int
    loss: str
    speed: float


def fastest_batch(
    steps: Steps, curves: dict[str, Curve], batches: Sequence[int], max_looked_at: int = _MAX_LOOKED_AT
) -> Reached | None:
    """The batch and the loss of the most sequences per second, by the model.

    The best candidate is searched for those that were compiled, and for the `max_looked_at` with the highest bounds. Among
    equally fast ones, one that was compiled is taken, because then it is the answer.

    Returns:
        None where not even the smallest batch is expected to fit, and with a `max_looked_at` of 0, where none that was compiled
        is.
    """
    layer = steps.layer_at(REFERENCE_BATCH)
    nothing_s = steps.num_layers * layer.hull[0].cost_s

    def speed(batch: int, step_s: float, residuals_s: float) -> float:
        return batch / (step_s - batch / REFERENCE_BATCH * (nothing_s - residuals_s))

    def is_compiled(choice: _Bound | Reached) -> bool:
        return curves[choice.loss].is_compiled(choice.batch)

    bounds: list[_Bound] = []
    for loss, curve in curves.items():
        for batch in batches:
            expected = curve.at(batch)
            if expected.total_bytes > steps.budget_bytes:
                break
            left_bytes = int((steps.budget_bytes - expected.total_bytes) * REFERENCE_BATCH / batch)
            bound_s = lower_bound(layer.hull, steps.num_layers, left_bytes)
            bounds.append(_Bound(batch, loss, expected.step_s, left_bytes, speed(batch, expected.step_s, bound_s)))
    bounds.sort(key=lambda bound: (-bound.speed, bound.batch))

    reached: list[Reached] = []
    for bound in (*filter(is_compiled, bounds), *bounds[:max_looked_at]):
        if reached and bound.speed <= _enough(reached):
            continue
        best = best_candidate(layer, steps.num_layers, Corrections(base_bytes=0, budget_bytes=bound.left_bytes))
        best_s = best.cost_s if best else nothing_s
        reached.append(Reached(bound.batch, bound.loss, speed(bound.batch, bound.step_s, best_s)))
    if not reached:
        return None
    equal = [choice for choice in reached if choice.speed >= _enough(reached)]
    return min(equal, key=lambda choice: (not is_compiled(choice), choice.batch, -choice.speed, choice.loss))


def _enough(reached: list[Reached]) -> float:
    """The sequences per second that count as equal to the most reached."""
    most = max(choice.speed for choice in reached)
    return most - _SAME_SPEED * abs(most)
