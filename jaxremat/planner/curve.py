"""Full remat by batch: bytes and seconds around the layers, on lines through few steps."""

from collections.abc import Callable
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
    """Bytes and seconds of the full-remat step by batch.

    It was compiled at `points`, in rising batches. Elsewhere it is a straight line, but below the first point a sequence takes
    no fewer seconds than there. Steps that XLA rejected are left out where two others are known.
    """

    points: tuple[CurvePoint, ...]

    @property
    def accepted(self) -> tuple[CurvePoint, ...]:
        """The points whose steps XLA compiled."""
        return tuple(point for point in self.points if not point.cost.is_rejected)

    def with_point(self, batch: int, cost: Cost) -> "Curve":
        """The curve through one more compiled step.

        With two that XLA accepted, it does without the state at batch 0.
        """
        others = (point for point in self.points if point.batch != batch)
        points = sorted((*others, CurvePoint(batch, cost)), key=lambda point: point.batch)
        has_two = sum(point.batch > 0 and not point.cost.is_rejected for point in points) > 1
        return Curve(tuple(point for point in points if point.batch or not has_two))

    def is_foreseen(self, batch: int) -> bool:
        """Whether the line is straight around a batch: it foresees a compiled neighbor."""
        points = self.accepted
        right = next((n for n, point in enumerate(points) if point.batch > batch), 0)
        between = {right - 1, right}.intersection(range(1, len(points) - 1))
        return any(points[n].is_near(Curve(points[:n] + points[n + 1 :]).at(points[n].batch)) for n in between)

    def at(self, batch: int) -> Cost:
        if compiled := next((point.cost for point in self.points if point.batch == batch), None):
            return compiled
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
