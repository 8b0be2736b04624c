"""The budget: bytes that a step may use, with every term it is made of."""

import math
import os
from dataclasses import dataclass

from jaxremat.units import gib


@dataclass(frozen=True)
class Budget:
    """`num_bytes`, and in words how they come about, for example `0.75 x 79.11 GiB of device memory`."""

    num_bytes: int
    terms: str


def make_budget(
    *,
    asked_bytes: int | None,
    mem_fraction: float,
    memory_bytes: int | None,
    in_use_bytes: int = 0,
    attached: bool = False,
    headroom: float = 0.0,
    headroom_source: str = "",
) -> Budget:
    """The budget of a run.

    Args:
        asked_bytes: `--budget`; wins over everything else.
        mem_fraction: share of the device's memory that JAX's allocator takes, for a GPU that isn't here.
        memory_bytes: the allocator's limit where the GPU is attached, the device's memory where it isn't, None for a CPU.
        in_use_bytes: what the allocator has given out already, where attached.
        attached: whether `memory_bytes` is the allocator's limit.
        headroom: share of that limit, or of the share of memory, to leave free.
        headroom_source: where the headroom comes from.
    """
    if asked_bytes is not None:
        return Budget(asked_bytes, "as asked with --budget")
    if memory_bytes is None:
        return Budget(_available_host_bytes(), "this machine's available memory")
    if attached:
        limit_bytes, terms = memory_bytes, f"{gib(memory_bytes)} allocator limit"
        if in_use_bytes:
            terms += f" - {gib(in_use_bytes)} in use"
    else:
        limit_bytes = int(mem_fraction * memory_bytes)
        terms = f"{mem_fraction:g} x {gib(memory_bytes)} of device memory"
    headroom_bytes = math.ceil(headroom * limit_bytes)
    if headroom_bytes:
        terms += f" - {gib(headroom_bytes)} headroom ({headroom:.1%}, {headroom_source})"
    return Budget(limit_bytes - in_use_bytes - headroom_bytes, terms)


def _available_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
