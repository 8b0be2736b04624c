"""Upper bounds of the speed of any plan, from few compiled steps, before planning.

No plan is faster than the full-remat step without the seconds that recomputing takes in it, plus the least seconds that
any choice of residuals takes in the bytes that are left (`hull.py`). The first bound takes one compile, at a batch that no step
exceeds, or at a quarter of it if XLA rejects a step so large. The bound assumes that smaller batches are as fast for each
sequence, and that their bytes lie on a straight line from those of the state. Both make the bound higher than it could be.
Further compiles, each at the batch that looks best, put the real numbers in their place.

Example: a full-remat step takes 80 ms for 8 sequences, and 20 ms of these go into recomputing. Then no plan for up to 8
sequences has more than 8 / 0.06 = 133 sequences a second.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxremat.errors import CompileError
from jaxremat.planner.batch import spaced
from jaxremat.planner.curve import Curve, CurvePoint
from jaxremat.planner.free_batch import REFERENCE_BATCH, at_most, possible
from jaxremat.planner.hull import lower_bound
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING

_MAX_FURTHER = 4  # steps compiled after the first one; the last bound is then at a batch that was compiled
_SMALLER = 4  # after a rejection by XLA, the batch is so many times smaller


@dataclass(frozen=True)
class SpeedBound:
    """No plan has more than `speed` sequences per second.

    `batch` is the batch that could have as many.
    """

    batch: int
    speed: float


def speed_bounds(steps: Steps, loss: str, fixed_bytes: int, batches: Sequence[int]) -> Iterator[SpeedBound]:
    """Yields upper bounds of the speed of any plan, from high to low, a compiled step each.

    The last one has a speed of 0 if not even the smallest batch fits under `nothing`.

    Args:
        steps: the steps to plan.
        loss: the loss.
        fixed_bytes: bytes of the parameters and the optimizer state.
        batches: the batches to choose among, in rising order.
    """
    batches = possible(steps, fixed_bytes, spaced(batches))
    steps.expect(_most_refused(batches) + 1 + _MAX_FURTHER)
    first = first_accepted(lambda batch: steps.compile(NOTHING, loss, batch), batches, batches[-1])
    curve = Curve((CurvePoint(0, Cost(fixed_bytes, 0.0)), first))
    nothing_fits = SpeedBound(batches[0], 0.0)
    for left in range(_MAX_FURTHER, -1, -1):
        found = _highest(steps, curve, batches) or nothing_fits
        if not left:
            compiled = _highest(steps, curve, [point.batch for point in curve.points]) or nothing_fits
            found = replace(found, batch=compiled.batch)
        yield found
        if not found.speed or curve.is_compiled(found.batch):
            return
        steps.expect(left)
        curve = curve.with_point(found.batch, steps.compile(NOTHING, loss, found.batch))
        curve = Curve(tuple(point for point in curve.points if point.batch))


def first_accepted(compile_step: Callable[[int], Cost], batches: Sequence[int], high: int) -> CurvePoint:
    """The step at `high`, or at the first smaller batch whose step XLA accepts.

    Each batch is a quarter of the one before, down to the smallest.

    Raises:
        CompileError: XLA rejects the step at the smallest batch, too.
    """
    while True:
        try:
            return CurvePoint(high, compile_step(high))
        except CompileError:
            if high == batches[0]:
                raise
            high = at_most(batches, high // _SMALLER)


def _most_refused(batches: Sequence[int]) -> int:
    """How many steps XLA rejects at most before it accepts one.

    The batches go from the last one down to the first.
    """
    high, refused = batches[-1], 0
    while high > batches[0]:
        high, refused = at_most(batches, high // _SMALLER), refused + 1
    return refused


def _highest(steps: Steps, curve: Curve, batches: Sequence[int]) -> SpeedBound | None:
    """The highest bound of all batches. None where no batch is expected to fit."""
    layer = steps.layer_at(REFERENCE_BATCH)

    def speed(batch: int, expected: Cost) -> float:
        left_bytes = int((steps.budget_bytes - expected.total_bytes) * REFERENCE_BATCH / batch)
        saved_s = max(
            steps.num_layers * one.hull[0].cost_s - lower_bound(one.hull, steps.num_layers, left_bytes)
            for one in (layer, *layer.alternatives)
        )
        return batch / (expected.step_s - batch / REFERENCE_BATCH * saved_s)

    expected = {batch: curve.at(batch) for batch in batches}
    fitting = {batch: cost for batch, cost in expected.items() if cost.total_bytes <= steps.budget_bytes}
    bounds = [SpeedBound(batch, speed(batch, cost)) for batch, cost in fitting.items()]
    return max(bounds, key=lambda bound: (bound.speed, -bound.batch), default=None)
