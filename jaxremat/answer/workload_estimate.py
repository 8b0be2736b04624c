"""Makes the planner's estimate of the layers that were found in a workload.

    found = find_layers(loss, params, batch)    # 6 layers of an encoder, 6 of a decoder
    layers = estimate_kinds(found.kinds, speed)
    layers.num_layers                           # 1: one layer that stands for all twelve (`planner/shared_budget.py`)

One kind of layers is estimated as one of them, and `num_layers` is their number.
"""

from collections.abc import Sequence

from jaxremat.answer.layer_estimate import estimate_function, with_hidden_offload
from jaxremat.errors import UsageError
from jaxremat.planner.shared_budget import EqualLayers, as_one
from jaxremat.policy.found import FoundLayers, Kind
from jaxremat.xla.cost import DeviceSpeed


def estimate_found(found: FoundLayers, name: str, speed: DeviceSpeed, *, offload: bool = False) -> EqualLayers:
    """The layers that were found in a workload, as the planner takes them.

    Args:
        found: what was found.
        name: what the workload is called.
        speed: the device's speed.
        offload: whether to add an alternative in which kernels hide host transfers.

    Raises:
        UsageError: no layers were found.
    """
    if not found.kinds:
        raise UsageError(
            f"no repeated layers were found in {name}, and a plan says what each layer keeps. "
            f"Looked at: {'; '.join(found.looked_at) or 'nothing that is repeated'}",
            allowed="a loss with layers: bodies of a scan, checkpoints, numbered scopes, or repeated operations",
            next_step="name the scopes of the layers: --layers 'blocks_*', or layers= of the Workload",
        )
    return estimate_kinds(found.kinds, speed, offload=offload)


def estimate_kinds(kinds: Sequence[Kind], speed: DeviceSpeed, *, offload: bool = False) -> EqualLayers:
    """The estimate of one or several kinds of layers, and how many of that layer are to be planned.

    Args:
        kinds: the kinds, at least one. The names of several kinds begin with their prefixes.
        speed: the device's speed.
        offload: whether to add an alternative in which kernels hide host transfers. Layers outside of a loop have none.
    """
    return as_one([_of_kind(kind, speed, offload) for kind in kinds])


def _of_kind(kind: Kind, speed: DeviceSpeed, offload: bool) -> EqualLayers:
    estimate = estimate_function(kind.function, kind.args, speed, in_scan=kind.in_scan)
    if offload and kind.in_scan:
        estimate = with_hidden_offload(estimate, speed)
    return EqualLayers(estimate, kind.num_layers, kind.prefix)
