"""The budget of a target: the bytes that a step may take there.

A command's flags decide it, or their defaults.

budget, warning = budget_on(load_target("h100-80gb"))
budget.terms                                            # "0.75 x 79.11 GiB of device memory"
"""

from jaxremat.chips.installed import versions
from jaxremat.chips.target import Target
from jaxremat.search.budget import Budget, make_budget


def budget_on(
    target: Target, *, requested_bytes: int | None = None, mem_fraction: float | None = None, headroom: float | None = None
) -> tuple[Budget, str]:
    """The budget on a target, and a warning if a learned headroom couldn't be read.

    Args:
        target: the device.
        requested_bytes: the value of `--budget`, if it was given.
        mem_fraction: the value of `--mem-fraction`, if it was given.
        headroom: the value of `--headroom`, if it was given.
    """
    from jaxremat.trial.headroom import choose_headroom

    attached = target.kind == "attached"
    in_use = [(device.memory_stats() or {}).get("bytes_in_use", 0) for device in target.local_devices] if attached else [0]
    chosen, warning = choose_headroom(headroom, target.kind, target.description, versions())
    budget = make_budget(
        requested_bytes=requested_bytes,
        mem_fraction=target.chip.mem_fraction if mem_fraction is None else mem_fraction,
        memory_bytes=target.memory_bytes,
        num_devices=target.mesh_shape.num_devices,
        in_use_bytes=max(in_use),
        attached=attached,
        headroom=chosen.share,
        headroom_source=chosen.source,
    )
    return budget, warning
