"""Makes the planner's estimates of the layers of a workload, one for each kind of layers.

    kinds = estimate_workload(trials, speed, batch=8)    # an encoder's 6 layers, and a decoder's 6
    layers = as_one(kinds)                            # what to plan: a single layer that stands for all twelve
    layers.num_layers                                 # 1

One kind of layers is planned as it is, and `num_layers` is the number of its layers. See `planner/shared_budget.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import jax

from jaxremat.answer.layer_estimate import estimate_layer
from jaxremat.answer.layer_problem import TracedLayer, trace_layer
from jaxremat.answer.layer_share import ALONE, Parts, Share
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.errors import UsageError
from jaxremat.mesh.own_experts import SCOPE
from jaxremat.mesh.sharding import param_shardings
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.shared_budget import EqualLayers
from jaxremat.policy.found import Kind
from jaxremat.policy.spec import Names, Policy, Rule
from jaxremat.trial.trials import Trials

#: Kinds of layers, each with one of its layers as it is traced.
TracedKinds = Sequence[tuple[Kind, TracedLayer]]


def estimate_workload(
    trials: Trials, speed: DeviceSpeed, batch: int, *, offload: bool = False, waits: float = 1.0
) -> tuple[EqualLayers, ...]:
    """The layers of a workload by kind, for the planner.

    Dropout is included. The seconds are those of all microbatches of a step, and the bytes are those of one microbatch. On a
    mesh they are those of one device (`layer_share.py`). Of the collectives, the gathers of the decoder's kernels have a price.
    Experts that the mesh divides are those of one device before they exchange tokens: all experts for its own tokens are as many
    FLOPs as its own experts for all tokens, and with `dense` dispatch as many bytes. With `ragged` dispatch a device has rows for
    all tokens, which `layer_share.py` counts. Only their author's names can be saved.

    Args:
        trials: the trials of the workload.
        speed: the device's speed.
        batch: samples in a microbatch.
        offload: whether to add an alternative in which kernels hide host transfers.
        waits: exposed seconds for each second in which a gather uses the links.

    Raises:
        UsageError: no repeated layers were found, or the workload is a step.
    """
    mesh, axes = trials.target.mesh, trials.target.mesh_shape
    which = trials.factory, trials.train, mesh, batch
    if which not in trials.layers:
        trials.layers[which] = _traced_layers(trials, batch)
    traced, times = trials.layers[which], trials.train.accumulate
    shares = [Share(mesh, _parts(trials, kind), times * waits, axes) if mesh else ALONE for kind, _ in traced]
    kinds = estimate_kinds(traced, _slower(speed, times), offload=offload, shares=shares)
    as_config = trials.workload_at().as_config

    def allows(policy: Policy) -> bool:
        return (as_config is None or as_config(policy) is not None) and not any(map(_is_in_experts, policy.names()))

    return tuple(replace(kind, layer=_allowed(kind.layer, allows)) for kind in kinds)


def _traced_layers(trials: Trials, batch: int) -> TracedKinds:
    """The kinds of layers at a batch, each traced.

    Raises:
        UsageError: as `estimate_workload`.
    """
    found = trials.factory.layers_at(batch, trials.train, trials.target.mesh)
    if found is None or not found.kinds:
        looked_at = "a whole step" if found is None else "; ".join(found.looked_at)
        raise UsageError(
            f"a plan says what each layer keeps, and no repeated layers were found in {trials.factory.name}",
            allowed="layers in a lax.scan, in jax.checkpoint, in scopes with numbers, or repeated as they are",
            cause=f"looked at {looked_at}",
            next_step="name the scopes of the layers: --layers 'blocks_*', or layers= of the Workload",
        )
    return trace_kinds(found.kinds)


def trace_kinds(kinds: Iterable[Kind]) -> TracedKinds:
    """Kinds of layers that were found in a program, each with one of its layers as it is traced."""
    return tuple((kind, trace_layer(kind.function, kind.args, kind.frozen)) for kind in kinds)


def _is_in_experts(name: str) -> bool:
    return SCOPE in name.split("/")


def _allowed(layer: LayerEstimate, allows: Callable[[Policy], bool]) -> LayerEstimate:
    """The estimate, of which a plan may choose what is allowed.

    What can be saved and has no name is fused attention.
    """
    values = tuple(
        replace(
            value,
            saveable=value.saveable
            and allows(Names((layer.names[v],)) if v in layer.names else Rule("nothing", attention=True)),
            offloadable=value.offloadable and v in layer.names and allows(Names(offload=(layer.names[v],))),
        )
        for v, value in enumerate(layer.problem.values)
    )
    others = tuple(_allowed(other, allows) for other in layer.alternatives)
    return replace(layer, problem=replace(layer.problem, values=values), alternatives=others, allows=allows)


def _parts(trials: Trials, kind: Kind) -> Parts:
    """In how many parts the parameters of a kind of layers lie.

    Of parameters of one shape and dtype, it is the fewest parts.
    """
    workload, mesh = trials.workload_at(), trials.target.mesh
    assert mesh is not None, "only a mesh divides parameters"
    parts: dict[tuple[tuple[int, ...], str], int] = {}
    lying = param_shardings(mesh, workload.abstract_params, workload.logical_axes)
    for leaf, lies in zip(jax.tree.leaves(workload.abstract_params), lying, strict=True):
        if kind.in_scan and leaf.shape[:1] != (kind.num_layers,):
            continue
        key = tuple(leaf.shape[1:] if kind.in_scan else leaf.shape), str(leaf.dtype)
        of_leaf = lies.num_bytes // max(1, lies.device_bytes)
        parts[key] = min(of_leaf, parts.get(key, of_leaf))
    return parts


def estimate_kinds(
    kinds: TracedKinds, speed: DeviceSpeed, *, offload: bool = False, shares: Sequence[Share] = ()
) -> tuple[EqualLayers, ...]:
    """The estimates of kinds of layers.

    Args:
        kinds: the kinds, of `trace_kinds`. The checkpoint names of several kinds begin with their prefixes.
        speed: the device's speed.
        offload: whether to add an alternative in which kernels hide host transfers. Only layers in a scan get it.
        shares: for each kind, what one of several devices stores and computes. Empty for one device.
    """
    shares = shares or [ALONE] * len(kinds)
    return tuple(_of_kind(*kind, speed, offload, share) for kind, share in zip(kinds, shares, strict=True))


def _of_kind(kind: Kind, layer: TracedLayer, speed: DeviceSpeed, offload: bool, share: Share) -> EqualLayers:
    estimate = estimate_layer(layer, speed, in_scan=kind.in_scan, share=share)
    # Only layers in a scan may save bytes in host memory: `estimate_layer` gives the others none.
    if offload and estimate.offload_bytes:
        estimate = _with_hidden_offload(estimate, speed)
    return EqualLayers(estimate, kind.num_layers, kind.prefix)


def _slower(speed: DeviceSpeed, times: int) -> DeviceSpeed:
    """The speed of a device that is `times` times slower.

    A layer takes as long on it as `times` such layers take. Its kernels have the speed that they have in a training.
    """
    slower = times / speed.training_share
    return replace(
        speed,
        bf16_flops=speed.bf16_flops / slower,
        f32_flops=speed.f32_flops / slower,
        f16_flops=speed.f16_flops and speed.f16_flops / slower,
        plain_f32_flops=speed.plain_f32_flops and speed.plain_f32_flops / slower,
        bandwidth_bytes_per_s=speed.bandwidth_bytes_per_s / slower,
        host_link_bytes_per_s=speed.host_link_bytes_per_s / times,
        clocks_per_s=speed.clocks_per_s / slower,
        calibration=replace(speed.calibration, launch_s=speed.launch_s * slower),
    )


def _with_hidden_offload(estimate: LayerEstimate, speed: DeviceSpeed) -> LayerEstimate:
    """`estimate` with one more alternative, in which kernels hide host transfers.

    Kernels hide the transfers of what the link moves while they run. Such a transfer costs one read and one write of the
    device's memory, where saving costs three such passes.
    """
    hidden = replace(
        estimate,
        problem=replace(estimate.problem, offload_s_per_byte=estimate.problem.save_s_per_byte * 2 / 3),
        offload_bytes=int(sum(op.recompute_s for op in estimate.problem.ops) * speed.host_link_bytes_per_s),
        alternatives=(),
        assumption=f"{estimate.assumption}, host transfers are hidden",
    )
    return replace(estimate, alternatives=(*estimate.alternatives, hidden))
