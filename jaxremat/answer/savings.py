"""Says what recomputing a residual would free and cost, if all other residuals are saved.

A step of 24 layers saves a residual of 64 MiB in each. Recomputing it frees up to 1.5 GiB at the peak, and costs the seconds
of the operations that make it, 24 times.
"""

from collections import Counter
from dataclasses import dataclass

from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.problem import Decision, Problem
from jaxremat.xla.buffers import MemoryMap, held


@dataclass(frozen=True)
class Saving:
    """What recomputing a residual would bring.

    Both numbers are estimates. XLA lays out the memory of the changed program anew. If the peak lies in the backward pass of the
    layers, the layer that runs at that moment has its share of the bytes in any case. The seconds are the planner's, which
    are predicted.

    Attributes:
        buffer: the buffer's name in the memory map.
        num_bytes: bytes that the peak would be lower.
        cost_s: seconds that a step would take longer.
    """

    buffer: str
    num_bytes: int
    cost_s: float


def savings(problem: Problem, memory: MemoryMap) -> tuple[Saving, ...]:
    """A saving for each residual at the peak that a policy can save.

    Only values of the layers count. A label that only a single layer has is left out: it belongs to what comes before and after
    the layers.

    Args:
        problem: the problem of one layer. Its values have the residuals' labels as names.
        memory: the memory map of a compiled step of such layers.
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
