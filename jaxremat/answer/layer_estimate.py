"""Makes the planner's numbers: the estimate of a layer and the cost of a compiled step.

The estimate is made from a module or a function.

A layer has two problems, by two assumptions on reductions: that XLA fuses those over the last axis into other kernels, and that
it doesn't. XLA does so in many layers and not in all. The second problem becomes an alternative of the first, and compiled steps
choose between them.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxremat.answer.layer_problem import TracedLayer, layer_problem
from jaxremat.answer.layer_share import ALONE, Share
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.chips.target import Target
from jaxremat.errors import TargetError
from jaxremat.knapsack.problem import Problem
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.shared_budget import EqualLayers
from jaxremat.planner.steps import Cost
from jaxremat.xla.clock import predict_step_time
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import count_step_flops
from jaxremat.xla.without import moments_of

#: Bytes below which a host transfer takes as long as an empty one would.
_LEAST_OFFLOADED = 2**20
#: Instructions up to which XLA compiles a program within a second or two. A scan of transformer layers on a mesh has some 2,100.
_SMALL = 2000


def estimate_layer(layer: TracedLayer, speed: DeviceSpeed, *, in_scan: bool, share: Share = ALONE) -> LayerEstimate:
    """The estimate of a layer, a function whose values have checkpoint names (`autoname`).

    Args:
        layer: the layer.
        speed: the device's speed.
        in_scan: whether the layer is the body of a scan over layers.
        share: on several devices, what one of them stores and computes.
    """
    fused, unfused, found = layer_problem(layer, speed, in_scan=in_scan, share=share)
    problem, unfused = map(_without_small_transfers, (fused, unfused))
    ways = {v: found[value.name] for v, value in enumerate(problem.values) if value.name in found}
    # In unrolled layers XLA starts host transfers too late for them to free the device's memory.
    offload_bytes = sum(value.num_bytes for value in problem.values) if in_scan else 0
    names = {v: way.name for v, way in ways.items() if way.name}
    estimate = LayerEstimate(problem, names, (), offload_bytes, in_scan, assumption="reductions are fused")
    other = replace(estimate, problem=unfused, assumption="reductions are kernels of their own")
    return replace(estimate, alternatives=(other,))


def cost_of(done: Compilation, speed: DeviceSpeed, kinds: Sequence[EqualLayers] = ()) -> Cost:
    """What a compiled step takes.

    Its `moments` are there if the dump was read, and `kinds` are its layers.

    A step that XLA rejected as too large has no kernels. Its seconds are those of the requested FLOPs in large matmuls.
    """
    if done.is_too_large:
        flops = count_step_flops(done.jaxpr).total / done.mesh.num_devices
        return Cost(done.memory.total_bytes, flops / speed.flops_per_s("bf16"), is_rejected=True)
    moments = moments_of(done, kinds) if done.dump and kinds else None
    num_instructions = sum(len(one.instructions) for one in done.module.computations.values())
    step_s = predict_step_time(done.module, speed).step_s
    return Cost(done.memory.total_bytes, step_s, moments, num_instructions <= _SMALL)


def _without_small_transfers(problem: Problem) -> Problem:
    """The problem in which values of few bytes can't be offloaded."""
    values = (replace(v, offloadable=v.offloadable and v.num_bytes >= _LEAST_OFFLOADED) for v in problem.values)
    return replace(problem, values=tuple(values))


def speed_of(target: Target) -> DeviceSpeed:
    """The target's speed.

    Raises:
        TargetError: the speed isn't known.
    """
    if target.speed is None:
        raise TargetError(
            f"a plan weighs recomputing against memory traffic, and the speed of target {target.name!r} isn't known",
            allowed="a GPU that is bundled, or a file of one that is known",
            next_step="named policies (--policy none dots nothing) are compared by their bytes; or plan for a bundled "
            "GPU of the same memory: --target NAME --budget SIZE (see --list targets)",
        )
    return target.speed
