"""The batch of the most tokens per second within a budget: by a model of the step, compiled at as few batches as will do.

Under `nothing`, bytes and seconds are read off compiled steps, and taken to be straight between them. What saving takes and
saves in the layers is a problem's, and goes with the batch, so that a bound (`hull.py`) says in no time which batches are
worth a closer look. The batch chosen is compiled, and chosen again with what that says, until it was compiled before.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxremat.planner.candidates import LayerEstimate, candidates, most_disputed
from jaxremat.planner.hull import lower_bound
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING

_REFERENCE_BATCH = 8
_NEAR = 1.5  # times the largest batch compiled: so far bytes are taken to go on as they did
_MAX_LOOKED_AT = 48  # batches whose best candidate is looked for
_SAME_SPEED = 1e-3  # of the tokens per second: within it, a batch that was compiled, or the smallest; and estimates agree


def choose_batch(steps: Steps, losses: Sequence[str], fixed_bytes: int, max_batch: int) -> tuple[Steps, int, str]:
    """The batch and loss, compiled under `nothing`; the steps, left with the estimates of a layer that compiling bore out.

    Args:
        steps: what is planned.
        losses: to choose among.
        fixed_bytes: parameters and optimizer state, for a first guess.
        max_batch: no larger batch is chosen.

    Returns:
        Batch 1 where nothing is expected to fit.
    """
    curves = {loss: _curve(steps, loss, fixed_bytes, max_batch) for loss in losses}
    steps = _as_compiled(steps, losses[0], min(_REFERENCE_BATCH, max_batch))
    while found := _fastest_batch(steps, curves, max_batch):
        batch, loss = found
        if curves[loss].is_compiled(batch):
            return steps, batch, loss
        curves[loss] = curves[loss].with_point(batch, steps.compile(NOTHING, loss, batch))
    return steps, 1, min(losses, key=lambda loss: curves[loss].at(1))


def _as_compiled(steps: Steps, loss: str, batch: int) -> Steps:
    """The same with those estimates of a layer alone that are borne out where each differs most from the first."""
    layer, base = steps.layer_at(batch), steps.compile(NOTHING, loss, batch)
    right: list[int] = []
    for n, other in enumerate(layer.alternatives):
        policy, saved_s, other_s = most_disputed(layer, other)
        if steps.num_layers * abs(saved_s - other_s) < _SAME_SPEED * base.step_s:
            continue
        took_s = (base.step_s - steps.compile(policy, loss, batch).step_s) / steps.num_layers
        if abs(took_s - other_s) < abs(took_s - saved_s):
            right.append(n)

    @functools.cache
    def layer_at(batch: int) -> LayerEstimate:
        layer = steps.layer_at(batch)
        first, *others = [layer.alternatives[n] for n in right] or [layer]
        return replace(first, alternatives=tuple(others))

    return replace(steps, layer_at=layer_at)


@dataclass(frozen=True)
class _Curve:
    """Bytes and seconds of the step under `nothing` by batch: compiled at some, straight between them and beyond."""

    points: tuple[tuple[int, Cost], ...]

    def with_point(self, batch: int, cost: Cost) -> "_Curve":
        return _Curve(tuple(sorted({**dict(self.points), batch: cost}.items(), key=lambda point: point[0])))

    def is_compiled(self, batch: int) -> bool:
        return batch in dict(self.points)

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
    begun = steps.compile(NOTHING, loss, low)
    spare = max(0, steps.budget_bytes - begun.total_bytes)
    # A sequence takes what it does on average up to here, or as little as the inputs of its layers.
    most, least = (begun.total_bytes - fixed_bytes) / low, steps.num_layers * _bytes_per_sequence(steps)
    high = int(min(max_batch, max(2 * low, low + spare / math.sqrt(max(1.0, most * least)))))
    if high <= low:
        return _Curve(((0, Cost(fixed_bytes, 0.0)), (low, begun)))
    curve = _Curve(((low, begun), (high, steps.compile(NOTHING, loss, high))))
    while high < max_batch and curve.reach(steps.budget_bytes) > _NEAR * high:
        high = int(min(max_batch, 0.8 * curve.reach(steps.budget_bytes), 4 * high))  # a flat line reaches anywhere
        curve = curve.with_point(high, steps.compile(NOTHING, loss, high))
    return curve


def _bytes_per_sequence(steps: Steps) -> float:
    """Of a layer's inputs, parameters aside."""
    small, large = (
        sum(layer.problem.values[v].num_bytes for v in layer.problem.inputs)
        for layer in map(steps.layer_at, (_REFERENCE_BATCH, 2 * _REFERENCE_BATCH))
    )
    return (large - small) / _REFERENCE_BATCH


def _fastest_batch(steps: Steps, curves: dict[str, _Curve], max_batch: int) -> tuple[int, str] | None:
    """The batch and loss of most sequences per second by the model: by the bound first, and then by what plans reach.

    Of equally fast ones, one that was compiled: it is the answer. None where not even one sequence is expected to fit.
    """
    layer = steps.layer_at(_REFERENCE_BATCH)
    hull = layer.hull
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
    bounds.sort(key=lambda bound: (-bound[0], bound[1]))
    compiled = [bound for bound in bounds if curves[bound[2]].is_compiled(bound[1])]
    reached: list[tuple[float, int, str]] = []
    for bound, batch, loss, scaled in (*compiled, *bounds[:_MAX_LOOKED_AT]):
        if reached and bound <= max(reached)[0] * (1 - _SAME_SPEED):
            continue
        found = candidates(layer, layer.families, steps.num_layers, scaled)
        best_s = min((c.cost_s for c in found), default=most_s)
        reached.append((speed(batch, curves[loss].at(batch)[1], best_s), batch, loss))
    enough = max(reached)[0] * (1 - _SAME_SPEED)
    equal = [(not curves[loss].is_compiled(batch), batch, -fast, loss) for fast, batch, loss in reached if fast >= enough]
    _, batch, _, loss = min(equal)
    return batch, loss
