"""Says what a decision costs by replaying it over the layer.

Nothing here is shared with the solver, so that the tests can judge the solver by it.
"""

import math
from dataclasses import dataclass

from jaxremat.knapsack.problem import Decision, Problem


@dataclass(frozen=True)
class Evaluation:
    """What a decision costs in one layer.

    Attributes:
        saved_bytes: bytes of the saved values, on the device.
        offloaded_bytes: bytes of the offloaded values, in host memory.
        recompute_s: seconds of the recomputed operations.
        save_s: seconds that writing and reading the saved values costs.
        offload_s: seconds of the host transfers that no kernel hides.
        recomputed: the recomputed operations, as rising indices.
        recomputed_flops: the FLOPs of these operations.
    """

    saved_bytes: int
    offloaded_bytes: int
    recompute_s: float
    save_s: float
    offload_s: float
    recomputed: tuple[int, ...]
    recomputed_flops: int

    @property
    def cost_s(self) -> float:
        """All seconds that the decision adds to a step: for recomputing, saving and offloading."""
        return self.recompute_s + self.save_s + self.offload_s


def evaluate(problem: Problem, decision: Decision) -> Evaluation:
    """Replays `decision` over the layer.

    A value that the backward pass needs and that isn't saved is recomputed, and so is everything that this needs. An
    operation that runs makes all its outputs. A saved value costs the same whether anything reads it or not.

    Raises:
        ValueError: the decision saves something that can't be saved: an index that no value has, an input, a value that no
            policy can save (or offload), a value both saved and offloaded, or only a part of what a `together` operation
            makes.
    """
    _check(problem, decision)
    there = (decision.save | decision.offload).union(problem.inputs)
    producer = problem.producers
    recomputed: set[int] = set()
    missing = [v for v, value in enumerate(problem.values) if value.needed and v not in there]
    while missing:
        index = producer[missing.pop()]
        if index not in recomputed:
            recomputed.add(index)
            missing.extend(v for v in problem.ops[index].inputs if v not in there)
    offloaded_bytes = problem.num_bytes(decision.offload)
    return Evaluation(
        saved_bytes=problem.num_bytes(decision.save),
        offloaded_bytes=offloaded_bytes,
        recompute_s=math.fsum(problem.ops[index].recompute_s for index in recomputed),
        save_s=problem.save_seconds(decision.save),
        offload_s=offloaded_bytes * problem.offload_s_per_byte,
        recomputed=tuple(sorted(recomputed)),
        recomputed_flops=sum(problem.ops[index].flops for index in recomputed),
    )


def _check(problem: Problem, decision: Decision) -> None:
    for v in decision.save | decision.offload:
        if not 0 <= v < len(problem.values):
            raise ValueError(f"there is no value {v} to save: the problem has {len(problem.values)}")
        value = problem.values[v]
        if v in problem.inputs:
            raise ValueError(f"{value.name} is an input of the layer: there in any case, not saved by a policy")
        if v in decision.save and v in decision.offload:
            raise ValueError(f"{value.name} is both saved and offloaded")
        if v in decision.save and not value.saveable:
            raise ValueError(f"{value.name} cannot be saved")
        if v in decision.offload and not value.offloadable:
            raise ValueError(f"{value.name} cannot be offloaded")
    for op in problem.ops:
        for chosen in (decision.save, decision.offload):
            if op.together and 0 < len(chosen.intersection(op.outputs)) < len(op.outputs):
                raise ValueError(f"the outputs of {op.name} are saved all together or not at all")
