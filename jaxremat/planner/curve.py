"""Full remat by batch: bytes and seconds around the layers, on lines through few steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from jaxremat.planner.steps import Cost, Moment

_STRAIGHT = 0.01  # share by which a compiled point may be off the line through its neighbors


@dataclass(frozen=True)
class CurvePoint:
    """The full-remat step, compiled at a batch."""

    batch: int
    cost: Cost

    def is_near(self, other: Cost) -> bool:
        shares = (other.total_bytes / self.cost.total_bytes, other.step_s / self.cost.step_s)
        return all(abs(share - 1) < _STRAIGHT for share in shares)


@dataclass(frozen=True)
class Curve:
    """Bytes and seconds of the full-remat step of one loss by batch.

    It was compiled at `points`, in rising batches. Elsewhere it is a straight line, but below the first point a sequence takes
    no fewer seconds than there. The line begins at the state, at batch 0, where XLA accepted fewer than two steps. If it
    accepted one and two of another loss, it follows the line of that one (`other`). Losses differ by their logits: what they
    differ by in that step is taken to grow with the batch.
    """

    points: tuple[CurvePoint, ...]
    other: "Curve | None" = None

    @property
    def accepted(self) -> tuple[CurvePoint, ...]:
        """The points whose steps XLA compiled, and the state if it is one."""
        return tuple(point for point in self.points if not point.cost.is_rejected)

    @property
    def is_line(self) -> bool:
        """Whether the line goes through two compiled steps, of this loss or of another one."""
        return self.points[0].batch > 0 or self.other is not None

    def is_foreseen(self, batch: int) -> bool:
        """Whether the line is straight around a batch: it foresees a compiled neighbor."""
        points = self.accepted
        right = next((n for n, point in enumerate(points) if point.batch > batch), 0)
        between = {right - 1, right}.intersection(range(1, len(points) - 1))
        return any(points[n].is_near(Curve(points[:n] + points[n + 1 :]).at(points[n].batch)) for n in between)

    def at(self, batch: int) -> Cost:
        if compiled := next((point.cost for point in self.points if point.batch == batch), None):
            return compiled
        if self.other:
            here, there = self.accepted[-1], self.other.at(self.accepted[-1].batch)
            share, found = batch / here.batch, self.other.at(batch)
            total_bytes = found.total_bytes + round(share * (here.cost.total_bytes - there.total_bytes))
            step_s = found.step_s + share * (here.cost.step_s - there.step_s)
            return Cost(total_bytes, step_s, self._moments(batch, total_bytes))
        corners = self.accepted if len(self.accepted) > 1 else self.points
        right = next((n for n, point in enumerate(corners) if n and point.batch >= batch), len(corners) - 1)
        low, high = corners[right - 1 : right + 1]
        share = (batch - low.batch) / (high.batch - low.batch)
        total_bytes = round(low.cost.total_bytes + share * (high.cost.total_bytes - low.cost.total_bytes))
        step_s = low.cost.step_s + share * (high.cost.step_s - low.cost.step_s)
        if batch < low.batch:
            step_s = max(step_s, low.cost.step_s * batch / low.batch)
        return Cost(total_bytes, step_s, self._moments(batch, total_bytes))

    def _moments(self, batch: int, total_bytes: int) -> Callable[[frozenset[str]], tuple[Moment, ...]] | None:
        """`Cost.moments` at a batch, in proportion to those at the nearest compiled one."""
        known = [(point.batch, point.cost.total_bytes, point.cost.moments) for point in self.points if point.cost.moments]
        if not known:
            return None
        near, total_there, moments = min(known, key=lambda point: abs(point[0] - batch))

        def scaled(moment: Moment) -> Moment:
            return replace(moment, total_bytes=total_bytes - round((total_there - moment.total_bytes) * batch / near))

        return lambda gone: tuple(map(scaled, moments(gone)))


def curves(compiled: Iterable[tuple[str, CurvePoint]], fixed_bytes: int) -> dict[str, Curve]:
    """The curve of each loss from its compiled steps and the bytes of the state."""
    found, state = dict[str, Curve](), CurvePoint(0, Cost(fixed_bytes, 0.0))
    for loss, point in sorted(compiled, key=lambda one: one[1].batch):
        points = (*(found[loss].points if loss in found else (state,)), point)
        has_two = sum(point.batch > 0 and not point.cost.is_rejected for point in points) > 1
        found[loss] = Curve(tuple(point for point in points if point.batch or not has_two))
    other = next((curve for curve in found.values() if curve.is_line), None)
    return {loss: one if one.is_line or len(one.accepted) < 2 else replace(one, other=other) for loss, one in found.items()}
