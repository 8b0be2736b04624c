"""Prices say what saving a value is worth, and further budgets what more bytes would be.

A value of 40 MiB in each of 16 layers that takes 0.1 ms to recompute is listed with 640 MiB and 1.6 ms.
"""

from dataclasses import dataclass

from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.problem import Decision, Problem


@dataclass(frozen=True)
class Price:
    """What saving a value is worth.

    Attributes:
        name: the value's name, and `+N` for N further values that are saved together with it.
        num_bytes: bytes of the value in all layers.
        saved_s: seconds that a step takes less if the value is saved than if it is recomputed.
        is_saved: whether the plan saves it.
        is_offloaded: whether the plan offloads it.
    """

    name: str
    num_bytes: int
    saved_s: float
    is_saved: bool
    is_offloaded: bool


@dataclass(frozen=True)
class FurtherBudget:
    """How many seconds a step could get shorter with that many bytes more."""

    further_bytes: int
    saved_s: float


def prices(problem: Problem, decision: Decision, num_layers: int) -> tuple[Price, ...]:
    """The price of each saveable value beside the rest of `decision`, the best saving first.

    The best has the most saved seconds per byte. Values whose saving saves no time are left out.
    """
    together = {v: frozenset(op.outputs) for op in problem.ops if op.together for v in op.outputs}
    found: list[Price] = []
    for group in dict.fromkeys(together.get(v, frozenset({v})) for v, value in enumerate(problem.values) if value.saveable):
        offload = decision.offload - group
        saved, dropped = (evaluate(problem, Decision(v, offload)) for v in (decision.save | group, decision.save - group))
        if (saved_s := num_layers * (dropped.cost_s - saved.cost_s)) > 0:
            name = problem.values[min(group)].name + f" +{len(group) - 1}" * (len(group) > 1)
            num_bytes = num_layers * problem.num_bytes(group)
            found.append(Price(name, num_bytes, saved_s, group <= decision.save, group <= decision.offload))
    return tuple(sorted(found, key=lambda price: -price.saved_s / max(1, price.num_bytes)))
