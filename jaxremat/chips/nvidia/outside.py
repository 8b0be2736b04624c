"""What a process takes of a GPU beyond the pool of JAX's allocator.

That is the CUDA context, modules, and workspaces of libraries.

Neither XLA's numbers nor the allocator's count it. NVML knows the memory of a process as a whole: 82 GiB, say, of which 80
are the pool, so that 2 are outside. In a container NVML often knows the process by another number, or not at all. Then the
rise of the whole card's use since before the process began is taken instead, which other processes on the card may change.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxremat.chips.nvidia.nvml import Gpu, Reading, gpu_order, read_gpus
from jaxremat.errors import DriverError, MissingDependencyError


@dataclass(frozen=True)
class Outside:
    """Bytes beyond the pool, and where they come from.

    They come from NVML's count of the process, or from the rise of the card's use.
    """

    num_bytes: int
    source: Literal["process", "card"]


def reading_or_none() -> Reading | None:
    """NVML's reading of the GPUs; None where there is none."""
    try:
        return read_gpus()
    except (DriverError, MissingDependencyError):
        return None


def outside_now(before: Reading | None, device: int, pool_bytes: int) -> Outside | None:
    """What this process takes on JAX's `device` beyond a pool of `pool_bytes`.

    It is None where it can't be known.
    """
    after = reading_or_none()
    return outside(before, after, os.getpid(), device, pool_bytes, os.environ) if after else None


def outside(
    before: Reading | None, after: Reading, pid: int, device: int, pool_bytes: int, environment: Mapping[str, str]
) -> Outside | None:
    """What the process `pid` holds beyond its pool.

    Args:
        before: a reading from before the process began with the device.
        after: a reading while it holds its memory.
        pid: the number of the process.
        device: JAX's number of the device, among those that CUDA shows.
        pool_bytes: the allocator's pool on that device.
        environment: its variables, among them perhaps CUDA_VISIBLE_DEVICES.
    """
    card = _card(after, device, environment)
    if card is None:
        return None
    used = next((p.used_bytes for p in card.processes if p.pid == pid), None)
    if used is not None and used >= pool_bytes:
        return Outside(used - pool_bytes, "process")
    earlier = _card(before, device, environment) if before else None
    if earlier and (rise := card.used_bytes - earlier.used_bytes) >= pool_bytes:
        return Outside(rise - pool_bytes, "card")
    return None


def _card(reading: Reading, device: int, environment: Mapping[str, str]) -> Gpu | None:
    order = gpu_order(environment, len(reading.gpus))
    return reading.gpus[order[device]] if device < len(order) else None
