"""From one layer to a stack of equal ones: the hull of what saving buys in a layer, and what no plan for the stack goes below.

Solving one layer at several budgets and combining the results over all layers is Rockmate's plan (Zhao et al. 2023,
"Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch", ICML). Which result each layer
takes is a multiple-choice knapsack; over its linear relaxation only the lower convex hull counts, with at most two
neighbouring vertices of it where the layers are equal (Sinha and Zoltners 1979, "The Multiple-Choice Knapsack Problem",
Operations Research 27): hence the bound, and the mixes of two that `candidates.py` makes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxremat.planner.evaluate import evaluate
from jaxremat.planner.problem import Decision, Problem
from jaxremat.planner.solve import DEFAULT_TIME_LIMIT_S, solve

_ROUNDING = 1e-12  # of the costliest point's cost: no vertex is told apart by less
_BELOW = 1e-9  # share by which a decision must undercut a chord to count as a vertex


@dataclass(frozen=True)
class Point:
    """What a decision takes and costs in one layer: saved bytes on the device, seconds per step."""

    saved_bytes: int
    cost_s: float
    decision: Decision


def lower_hull(
    problem: Problem, *, max_offload_bytes: int = 0, time_limit_s: float = DEFAULT_TIME_LIMIT_S
) -> tuple[Point, ...]:
    """The vertices of the lower convex hull of (saved bytes, cost) over all decisions, from fewest bytes to least cost.

    Bytes rise and costs fall from each point to the next. Found by pricing bytes at the slope between two points known and
    solving without a budget: either something lies below their chord, and both halves are searched, or nothing does (Aneja
    and Nair 1979, "Bicriteria Transportation Problem", Management Science 25). Exact to 1e-9 of the cost.

    Args:
        problem: one layer.
        max_offload_bytes: that each decision may offload, on its own.
        time_limit_s: of each of the programs, two per point.

    Raises:
        ValueError: `max_offload_bytes` is negative.
        TimeoutError: a program ran out of time, so that the hull would be a guess.
    """
    all_bytes = sum(value.num_bytes for value in problem.values)

    def cheapest(price_s_per_byte: float, budget_bytes: int) -> Point:
        priced = replace(problem, save_s_per_byte=problem.save_s_per_byte + price_s_per_byte)
        solution = solve(priced, budget_bytes, max_offload_bytes=max_offload_bytes, time_limit_s=time_limit_s)
        if not solution.optimal:
            raise TimeoutError(f"a point of the hull isn't proved after {time_limit_s:g} s: gap {solution.gap:.1%}")
        evaluation = evaluate(problem, solution.decision)
        return Point(evaluation.saved_bytes, evaluation.cost_s, solution.decision)

    def between(left: Point, right: Point) -> list[Point]:
        if left.saved_bytes >= right.saved_bytes or left.cost_s <= right.cost_s:
            return []
        price = (left.cost_s - right.cost_s) / (right.saved_bytes - left.saved_bytes)
        middle = cheapest(price, all_bytes)
        chord_s = left.cost_s + price * left.saved_bytes
        if middle.cost_s + price * middle.saved_bytes >= chord_s * (1 - _BELOW):
            return []
        return [*between(left, middle), middle, *between(middle, right)]

    first, last = cheapest(0.0, 0), cheapest(0.0, all_bytes)
    return _hull([first, *between(first, last), last])


def lower_bound(points: Sequence[Point], num_layers: int, budget_bytes: int) -> float:
    """Seconds that no choice of one decision per layer goes below, were every layer to decide on its own.

    The hull is convex, so that layers which save `budget_bytes` together cost at least what the hull does at their mean
    (Jensen). Infinite where not even the point of fewest bytes fits.

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
    """Those of `points`, in order of bytes, that are neither dominated nor on a chord of two others."""
    rounding_s = _ROUNDING * points[0].cost_s
    hull: list[Point] = []
    for point in points:
        if hull and point.cost_s >= hull[-1].cost_s - rounding_s:
            continue
        while len(hull) > 1 and _chord_s(hull[-2], point, hull[-1].saved_bytes) <= hull[-1].cost_s + rounding_s:
            hull.pop()
        hull.append(point)
    return tuple(hull)


def _chord_s(left: Point, right: Point, saved_bytes: int) -> float:
    share = (saved_bytes - left.saved_bytes) / (right.saved_bytes - left.saved_bytes)
    return left.cost_s + share * (right.cost_s - left.cost_s)
