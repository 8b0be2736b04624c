"""Measured step time on a device that is here: real batches, warm-up, blocked, median and spread."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxremat.machine.nvml import Reading
from jaxremat.machine.outside import Outside, outside_now


@dataclass(frozen=True)
class StepTiming:
    """Seconds of the timed steps, each from dispatch until its results were ready; the last loss in nats.

    `peak_bytes` is the allocator's high-water mark of these steps. It is None on a CPU, which keeps none, and where the mark
    was set before them: it never falls in a process's life, so that a larger step before this one hides this one's.
    `allocator` is what the allocator said after the last step, while the state was there; None on a CPU. `outside` is what
    the process then held beyond the allocator's pool, None where that can't be known.
    """

    steps_s: tuple[float, ...]
    last_loss: float
    peak_bytes: int | None = None
    allocator: "Allocator | None" = None
    outside: Outside | None = None

    @property
    def median_s(self) -> float:
        """The figure to quote."""
        return statistics.median(self.steps_s)


def measure_step(
    compiled: Callable[..., Any],
    init_state: Callable[[], Any],
    batches: Iterator[np.ndarray],
    device: Any,
    *,
    num_warmup: int = 2,
    num_steps: int = 10,
    on_step: Callable[[int], None] = lambda _: None,
    before: Reading | None = None,
) -> StepTiming:
    """Runs `compiled(state, tokens) -> (state, loss)` over real batches on `device`.

    Args:
        compiled: the compiled step, which may donate its state.
        init_state: makes the state; run on the device under jit.
        batches: tokens, `int32[batch, seq_len + 1]`; copied to the device outside the timed part.
        device: where to run.
        num_warmup: steps that aren't counted.
        num_steps: steps that are.
        on_step: told the number of each step before it starts.
        before: NVML's reading from before this process began with the device.
    """
    with jax.default_device(device):
        state = jax.block_until_ready(jax.jit(init_state)())
        peak_before = allocator_peak(device)
        steps_s, loss = [], None
        for i in range(num_warmup + num_steps):
            on_step(i)
            tokens = jax.block_until_ready(jax.device_put(next(batches), device))
            started = time.perf_counter()
            state, loss = jax.block_until_ready(compiled(state, tokens))
            steps_s.append(time.perf_counter() - started)
        allocator = read_allocator(device)
        pool_bytes = allocator.pool_bytes if allocator else None
        outside = outside_now(before, device.local_hardware_id, pool_bytes) if pool_bytes else None
    peak = allocator_peak(device)
    rose = peak is not None and peak_before is not None and peak > peak_before
    return StepTiming(tuple(steps_s[num_warmup:]), float(np.asarray(loss)), peak if rose else None, allocator, outside)


@dataclass(frozen=True)
class Allocator:
    """What JAX's allocator says of its memory on a device, in bytes; a figure that it doesn't keep is None.

    In use now, the most in use since the process began, the pool taken from the device, and the largest free block in it.
    """

    in_use_bytes: int | None
    peak_bytes: int | None
    pool_bytes: int | None
    largest_free_bytes: int | None


def read_allocator(device: Any) -> Allocator | None:
    """The allocator's figures of `device`; None on a CPU, which has no such allocator."""
    stats = device.memory_stats()
    if not stats:
        return None
    keys = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "largest_free_block_bytes")
    return Allocator(*(stats.get(key) for key in keys))


def allocator_peak(device: Any) -> int | None:
    """The most bytes that JAX's allocator had given out at once on `device` since the process began; None on a CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
