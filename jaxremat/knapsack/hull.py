"""Goes from one layer to a stack of equal layers.

Two things are needed of one layer: the lower convex hull of what its decisions take (saved bytes) and cost (seconds), and from
it a bound that no plan for the stack can go below.

Solving one layer at several budgets and combining the results over all layers is Rockmate's plan (Zhao et al. 2023,
"Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch", ICML). Choosing a result for each
layer is a multiple-choice knapsack problem. In its linear relaxation only the lower convex hull counts. Where the layers are
equal, the best solution uses at most two vertices of it, which are neighbours (Sinha and Zoltners 1979, "The Multiple-Choice
Knapsack Problem", Operations Research 27). The bound here and the planner's mixes of two save-sets follow from that.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.problem import Decision, Problem, union
from jaxremat.knapsack.solve import DEFAULT_TIME_LIMIT_S, solve

_ROUNDING = 1e-12  # share of the highest cost on the hull: two costs that differ by less count as equal
_BELOW = 1e-9  # share of its cost by which a point must lie below a chord to count as a vertex


@dataclass(frozen=True)
class Point:
    """A decision for a layer, its saved bytes on the device, and the seconds it adds to a step."""

    saved_bytes: int
    cost_s: float
    decision: Decision


def lower_hull(
    problem: Problem, *, max_offload_bytes: int = 0, time_limit_s: float = DEFAULT_TIME_LIMIT_S
) -> tuple[Point, ...]:
    """The vertices of the lower convex hull of (saved bytes, cost) over all decisions.

    Bytes rise and costs fall from each point to the next. The result is exact to 1e-9 of the cost. Parts of the problem that
    don't depend on each other, such as two kinds of layers, are searched one by one.

    Args:
        problem: one layer.
        max_offload_bytes: bytes that each single decision may offload.
        time_limit_s: seconds for each of the 0/1 programs, of which a point takes two.

    Raises:
        ValueError: `max_offload_bytes` is negative.
        TimeoutError: a program ran out of time, so that the hull would be a guess.
    """
    if max_offload_bytes < 0:
        raise ValueError(f"a budget counts bytes from 0 up, got {max_offload_bytes}")
    offloadable_bytes = problem.num_bytes(v for v, value in enumerate(problem.values) if value.offloadable)
    if 0 < max_offload_bytes < offloadable_bytes:  # what may be offloaded is shared by all parts
        return _hull_of_part(problem, max_offload_bytes, time_limit_s)
    parts = _independent_parts(problem)
    return _sum_of([_hull_of_part(part, max_offload_bytes, time_limit_s) for part in parts], problem)


def _independent_parts(problem: Problem) -> list[Problem]:
    """The parts of a problem that share no operation and no value but its inputs.

    Only parts in which one can decide are among them. Values have the same indices in all parts.
    """
    beside = [set(makers) for makers in problem.reads]
    for index, makers in enumerate(problem.reads):
        for other in makers:
            beside[other].add(index)
    parts, left = [], set(range(len(problem.ops)))
    while left:
        found, new = set[int](), {left.pop()}
        while new:
            found |= new
            new = set().union(*(beside[index] for index in new)) - found
        left -= found
        ops = tuple(problem.ops[index] for index in sorted(found))
        made = {v: problem.values[v] for op in ops for v in op.outputs}
        can_decide = any(value.saveable or value.offloadable for value in made.values())
        if can_decide and any(value.needed for value in made.values()):
            parts.append(replace(problem, ops=ops, inputs=tuple(v for v in range(len(problem.values)) if v not in made)))
    return parts


def _hull_of_part(problem: Problem, max_offload_bytes: int, time_limit_s: float) -> tuple[Point, ...]:
    """The hull of a problem.

    The search starts with the two ends of the hull. Between two known points, a byte is given the price of the slope between
    them, and the layer is solved without a budget. If the result lies below the chord of the two points, both halves are
    searched; otherwise the hull has no vertex between them (Aneja and Nair 1979, "Bicriteria Transportation Problem",
    Management Science 25).
    """
    all_bytes = problem.num_bytes(range(len(problem.values)))

    def cheapest(price_s_per_byte: float, budget_bytes: int) -> Point:
        priced = replace(problem, save_s_per_byte=problem.save_s_per_byte + price_s_per_byte)
        solution = solve(priced, budget_bytes, max_offload_bytes=max_offload_bytes, time_limit_s=time_limit_s)
        if not solution.optimal:
            raise TimeoutError(f"a point of the hull isn't proved after {time_limit_s:g} s: gap {solution.gap:.1%}")
        return point_of(problem, solution.decision)

    def between(left: Point, right: Point) -> list[Point]:
        if left.saved_bytes >= right.saved_bytes or left.cost_s <= right.cost_s:
            return []
        price = _slope(left, right)
        middle = cheapest(price, all_bytes)
        chord_s = left.cost_s + price * left.saved_bytes
        if middle.cost_s + price * middle.saved_bytes >= chord_s * (1 - _BELOW):
            return []
        return [*between(left, middle), middle, *between(middle, right)]

    first, last = cheapest(0.0, 0), cheapest(0.0, all_bytes)
    return _hull([first, *between(first, last), last])


def _sum_of(hulls: Sequence[tuple[Point, ...]], problem: Problem) -> tuple[Point, ...]:
    """The hull of a problem from those of its independent parts: their Minkowski sum.

    It begins with the fewest bytes in all parts. From there, the next step is always the one of the most seconds per byte.
    """
    first = functools.reduce(union, (hull[0].decision for hull in hulls), Decision())
    points = [point_of(problem, first)]
    steps = [step for hull in hulls for step in itertools.pairwise(hull)]
    for left, right in sorted(steps, key=lambda step: -_slope(*step)):
        now, before, after = points[-1].decision, left.decision, right.decision
        decision = Decision((now.save - before.save) | after.save, (now.offload - before.offload) | after.offload)
        points.append(point_of(problem, decision))
    return _hull(points)


def point_of(problem: Problem, decision: Decision) -> Point:
    """A decision with what it takes and costs."""
    evaluation = evaluate(problem, decision)
    return Point(evaluation.saved_bytes, evaluation.cost_s, decision)


def _slope(left: Point, right: Point) -> float:
    """Seconds per byte from one point to the next."""
    return (left.cost_s - right.cost_s) / (right.saved_bytes - left.saved_bytes)


def lower_bound(points: Sequence[Point], num_layers: int, budget_bytes: int) -> float:
    """The least seconds that the layers can cost together, each with a decision of its own.

    The hull is convex. Layers that save `budget_bytes` together therefore cost at least what the hull says at their mean
    (Jensen's inequality).

    Args:
        points: the vertices of one layer's hull, as `lower_hull` returns them.
        num_layers: number of layers.
        budget_bytes: bytes that all layers together may save.

    Returns:
        Seconds. Infinity where not even the point of the fewest bytes fits.

    Raises:
        ValueError: there is no point or no layer.
    """
    if not points or num_layers < 1:
        raise ValueError(f"a bound takes at least one point and one layer, got {len(points)} and {num_layers}")
    mean_bytes = budget_bytes / num_layers
    if mean_bytes < points[0].saved_bytes:
        return math.inf
    hull_s = np.interp(mean_bytes, [point.saved_bytes for point in points], [point.cost_s for point in points])
    return num_layers * float(hull_s)


def _hull(points: list[Point]) -> tuple[Point, ...]:
    """The vertices among `points`, which come in the order of their bytes.

    A point is dropped where a point of fewer bytes costs no more, or where it isn't below the chord of its neighbours.
    """
    rounding_s = _ROUNDING * points[0].cost_s
    hull: list[Point] = []

    def on_chord_s(left: Point, right: Point, saved_bytes: int) -> float:
        share = (saved_bytes - left.saved_bytes) / (right.saved_bytes - left.saved_bytes)
        return left.cost_s + share * (right.cost_s - left.cost_s)

    for point in points:
        if hull and point.cost_s >= hull[-1].cost_s - rounding_s:
            continue
        while len(hull) > 1 and on_chord_s(hull[-2], point, hull[-1].saved_bytes) <= hull[-1].cost_s + rounding_s:
            hull.pop()
        hull.append(point)
    return tuple(hull)
