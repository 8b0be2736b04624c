"""The budget: how many bytes a step may take, with a text that says how that was computed.

A GPU of 79.11 GiB that isn't attached, with JAX's usual share of 0.75, has a budget of 59.33 GiB, and the text is
`0.75 x 79.11 GiB of device memory`.
"""

import math
from dataclasses import dataclass

from jaxremat.units import gib


@dataclass(frozen=True)
class Budget:
    """The bytes that a step may take, and a text that says how they were computed.

    `pool_bytes` is the size of the pool that JAX's allocator takes in a job, at least `num_bytes`. None for a CPU.
    """

    num_bytes: int
    terms: str
    pool_bytes: int | None = None


def make_budget(
    *,
    requested_bytes: int | None,
    mem_fraction: float,
    memory_bytes: int | None,
    in_use_bytes: int = 0,
    attached: bool = False,
    headroom: float = 0.0,
    headroom_source: str = "",
    num_devices: int = 1,
) -> Budget:
    """The budget of a run.

    Args:
        requested_bytes: the bytes requested with `--budget`. If given, nothing else counts.
        mem_fraction: the share of a device's memory that JAX's allocator takes. It is used for a GPU that isn't attached.
        memory_bytes: the allocator's limit for an attached GPU, the device's memory for another GPU, None for a CPU.
        in_use_bytes: bytes that the allocator of an attached GPU has given out already.
        attached: whether the GPU is attached, so that `memory_bytes` is the allocator's limit.
        headroom: the share of what the allocator may take that is left free.
        headroom_source: a text that says where the headroom comes from.
        num_devices: how many devices share the memory of a CPU.
    """
    limit_bytes = memory_bytes if attached or memory_bytes is None else int(mem_fraction * memory_bytes)
    if requested_bytes is not None:
        pool_bytes = limit_bytes if attached or limit_bytes is None else max(limit_bytes, requested_bytes)
        return Budget(requested_bytes, "as given with --budget", pool_bytes)
    if memory_bytes is None or limit_bytes is None:
        shared = f", divided by {num_devices} devices" if num_devices > 1 else ""
        return Budget(_available_host_bytes() // num_devices, f"this machine's available memory{shared}")
    if attached:
        terms = f"{gib(memory_bytes)} allocator limit"
        if in_use_bytes:
            terms += f" - {gib(in_use_bytes)} in use"
    else:
        share = "" if mem_fraction == 1 else f"{mem_fraction:g} x "
        terms = f"{share}{gib(memory_bytes)} of device memory"
    headroom_bytes = math.ceil(headroom * limit_bytes)
    if headroom_bytes:
        terms += f" - {gib(headroom_bytes)} headroom ({headroom:.1%}, {headroom_source})"
    return Budget(limit_bytes - in_use_bytes - headroom_bytes, terms, limit_bytes)


def _available_host_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available
