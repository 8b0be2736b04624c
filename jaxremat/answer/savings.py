"""What computing a saved residual again would free and cost, one at a time beside all the others that are kept."""

from collections import Counter
from dataclasses import dataclass

from jaxremat.planner.evaluate import evaluate
from jaxremat.planner.problem import Decision, Problem
from jaxremat.xla.buffers import MemoryMap, held


@dataclass(frozen=True)
class Saving:
    """What rematting a buffer would bring, its name as in the map: `num_bytes` less at the peak, `cost_s` seconds a step more.

    Both are estimates: XLA lays the other program out anew, the layer at work holds one layer's share of the bytes all the
    same if the peak lies in the backward pass of the layers, and the seconds are the planner's, by the roofline.
    """

    buffer: str
    num_bytes: int
    cost_s: float


def savings(problem: Problem, memory: MemoryMap) -> tuple[Saving, ...]:
    """One for each residual at the peak that is a value of the layers; those that no policy can name have none.

    A label that only one layer holds is not of the layers, but of what comes before and after them.

    Args:
        problem: of one layer, as the planner sees it; its values go by the residuals' labels.
        memory: a compiled step of such layers.
    """
    together = {v: frozenset(op.outputs) for op in problem.ops if op.together for v in op.outputs}
    values = {value.name: v for v, value in enumerate(problem.values) if value.saveable}
    residuals = [(b, size) for b, size in held(memory, memory.peak) if b.category == "residuals" and b.label in values]
    num_layers = Counter[str]()
    for b, _ in residuals:
        num_layers[b.label] += b.num_layers
    residuals = [(b, size) for b, size in residuals if num_layers[b.label] > 1]
    groups = {b.label: together.get(values[b.label], frozenset({values[b.label]})) for b, _ in residuals}
    kept = frozenset().union(*groups.values())
    before = evaluate(problem, Decision(kept)).recompute_s
    cost_s = {label: evaluate(problem, Decision(kept - group)).recompute_s - before for label, group in groups.items()}
    return tuple(Saving(b.name, size, b.num_layers * cost_s[b.label]) for b, size in residuals)
