"""Measures the step time on a device in this machine.

Warm-up steps run first, then timed steps over a real batch:

    measure_step(compiled, lambda: init_state(workload, train), inputs(workload, train), device)
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxremat.chips.outside import Outside, Reading, outside_now
from jaxremat.step.inputs import placed
from jaxremat.trial.details import AllocatorBytes
from jaxremat.workload.user_code import output_to_stderr


@dataclass(frozen=True)
class StepTiming:
    """What some timed steps took.

    Attributes:
        steps_s: seconds of each step, until its results were ready.
        last_loss: of the last step. None where the step isn't made from a loss.
        peak_bytes: the allocator's high-water mark. The mark never falls while a process lives. So it is None where
            something before these steps had set it higher, and on a CPU, which has no mark.
        allocator: what the allocator said after the last step, while the state was in memory; of several devices, that of
            the highest peak. None on a CPU.
        outside: bytes of the process then on the card outside the allocator's pool; None where that can't be known.
    """

    steps_s: tuple[float, ...]
    last_loss: float | None
    peak_bytes: int | None = None
    allocator: AllocatorBytes | None = None
    outside: Outside | None = None

    @property
    def median_s(self) -> float:
        """The step time to quote."""
        return statistics.median(self.steps_s)


def measure_step(
    compiled: Callable[..., Any],
    init_state: Callable[[], Any],
    batches: Iterator[Any],
    device: Any,
    *,
    others: Sequence[Any] = (),
    shardings: Any = None,
    num_warmup: int = 2,
    num_steps: int = 10,
    num_ahead: int = 1,
    on_step: Callable[[int], None] = lambda _: None,
    before: Reading | None = None,
) -> StepTiming:
    """Runs a compiled step on `device`, as a training loop does that doesn't read each loss.

    The step is `compiled(state, batch) -> (state, loss)` or `(state, (loss, aux))`. All steps have the same batch: making batches
    isn't timed. A step begins when it is given to the device, or when the one before ends, whichever is later.

    Args:
        compiled: the compiled step, which may donate its state.
        init_state: makes the state, where it is to lie; it is called with `device` as the default device.
        batches: the batch is the first of them. Where the step has no loss, each step has its own, and may donate it.
        device: where to run, or the first of several devices.
        others: the other devices of a mesh that this process has. Of all their figures of memory the largest counts.
        shardings: how the batch lies on several devices.
        num_warmup: steps that aren't timed.
        num_steps: steps that are timed.
        num_ahead: steps that are given to the device while it computes another. With 0, each step includes the time in which the
            host starts its first kernels. That is longest with unrolled layers. Steps without a loss always take turns.
        on_step: called with the number of each step, from 0, before it is given to the device.
        before: the driver's reading from before this process began with the device.
    """
    with output_to_stderr(), jax.default_device(device):
        devices = (device, *others)
        state = jax.block_until_ready(init_state())
        peak_before = largest_peak(devices)
        given: deque[tuple[float, Any]] = deque()
        steps_s, ended, batch, loss = [], 0.0, None, None
        for i in range(num_warmup + num_steps):
            on_step(i)
            if i == 0 or loss is None:
                batch = next(batches)
                batch = jax.block_until_ready(placed(batch, shardings) if shardings else jax.device_put(batch, device))
            given_at = time.perf_counter()
            state, loss = compiled(state, batch)
            given.append((given_at, state if loss is None else loss))
            num_running = 0 if loss is None or i == num_warmup + num_steps - 1 else num_ahead
            while len(given) > num_running:
                given_at, result = given.popleft()
                jax.block_until_ready(result)
                began, ended = max(given_at, ended), time.perf_counter()
                steps_s.append(ended - began)
        jax.effects_barrier()  # until then a jax.debug.print in the step may print
        return step_timing(steps_s[num_warmup:], loss, devices, peak_before, before)


def step_timing(
    steps_s: Sequence[float], result: Any, devices: Sequence[Any], peak_before: int | None, before: Reading | None = None
) -> StepTiming:
    """The timing of steps that were run on `devices`.

    It includes what the devices say of their memory now.

    Args:
        steps_s: seconds of each step.
        result: of the last step, the loss or `(loss, aux)`. None where the step isn't made from a loss.
        devices: those that this process has. Of all their figures of memory the largest counts.
        peak_before: the allocator's high-water mark from before the steps, as `largest_peak` gives it.
        before: the driver's reading from before this process began with the devices.
    """
    allocators = [allocator for one in devices if (allocator := read_allocator(one))]
    allocator = max(allocators, key=lambda one: one.peak_bytes or 0, default=None)
    found = [_outside(before, one) for one in devices]
    outside = max((one for one in found if one), key=lambda one: one.num_bytes, default=None)
    peak = largest_peak(devices)
    rose = peak is not None and peak_before is not None and peak > peak_before
    value = result[0] if isinstance(result, tuple) else result
    last_loss = None if value is None else float(np.asarray(value))
    return StepTiming(tuple(steps_s), last_loss, peak if rose else None, allocator, outside)


def largest_peak(devices: Sequence[Any]) -> int | None:
    """The highest of the allocators' high-water marks. None on a CPU, which has no mark."""
    return max((peak for one in devices if (peak := allocator_peak(one)) is not None), default=None)


def _outside(before: Reading | None, device: Any) -> Outside | None:
    """Bytes of this process on a device outside the allocator's pool.

    None where there is no pool.
    """
    allocator = read_allocator(device)
    pool_bytes = allocator.pool_bytes if allocator else None
    return outside_now(before, device.local_hardware_id, pool_bytes) if pool_bytes else None


def read_allocator(device: Any) -> AllocatorBytes | None:
    """The allocator's figures of `device`; None on a CPU, which has no such allocator."""
    stats = device.memory_stats()
    if not stats:
        return None
    keys = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "largest_free_block_bytes")
    return AllocatorBytes(*(stats.get(key) for key in keys))


def allocator_peak(device: Any) -> int | None:
    """The most bytes that were in use at once on `device` since the process began.

    The number is that of JAX's allocator. None on a CPU.
    """
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
