"""The budget: bytes that a step may use, with every term it is made of."""

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
) -> Budget:
    """The budget of a run.

    Args:
        asked_bytes: `--budget`; wins over everything else.
        mem_fraction: share of the device's memory that JAX's allocator takes, for a GPU that isn't here.
        memory_bytes: the allocator's limit where the GPU is attached, the device's memory where it isn't, None for a CPU.
        in_use_bytes: what the allocator has given out already, where attached.
        attached: whether `memory_bytes` is the allocator's limit.
    """
    if asked_bytes is not None:
        return Budget(asked_bytes, "as asked with --budget")
    if memory_bytes is None:
        return Budget(_available_host_bytes(), "this machine's available memory")
    if attached:
        used = f" - {gib(in_use_bytes)} in use" if in_use_bytes else ""
        return Budget(memory_bytes - in_use_bytes, f"{gib(memory_bytes)} allocator limit{used}")
    return Budget(int(mem_fraction * memory_bytes), f"{mem_fraction:g} x {gib(memory_bytes)} of device memory")


def _available_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
