"""Predicts how long a compiled step takes, from the FLOPs and bytes of every kernel.

It also reads what kernels of each class reach. For example, a matmul of 8e12 FLOPs and 1e9 bytes takes 10 ms on a device of
1e15 FLOP/s and 4e12 bytes/s where matmuls reach 0.8 of both: the FLOPs need 10 ms, the bytes need 0.3 ms, and the longer
time counts.

The shares of the peaks that kernels reach come from real GPUs, as a `Calibration`. `python -m experiments.kernel_times`
compares the predictions with the times of those kernels, and fits the shares.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jaxremat.chips.speed import DeviceSpeed
from jaxremat.xla.collectives import collective_seconds, sent_bytes
from jaxremat.xla.hlo import Module
from jaxremat.xla.kernels import Kernel, Wait, events_of, kernels_of
from jaxremat.xla.step_facts import StepTime

#: The most rows of an embedding's gradient that were measured. Of more rows, each waits as long as one of so many.
MOST_ROWS = 2**16

_Link = Literal["host", "devices", "chip"]


@dataclass(frozen=True)
class KernelTime:
    """The predicted seconds of a kernel's launch, and its parts, of which the longest counts."""

    kernel_s: float
    flops_s: float
    bytes_s: float
    writes_s: float


def predict_step_time(module: Module, speed: DeviceSpeed) -> StepTime:
    """Predicts the seconds of one run of a compiled module; nothing is measured.

    Kernels run one after the other, each for the time of `predict_kernel_time`.

    A matmul or fused attention takes the FLOP/s of a measured table where the device has one. Any other kernel takes the share
    of a peak that its class reaches.

    Host transfers use the link to the host one at a time, and collectives the links between devices. Both overlap with the
    kernels that XLA has scheduled between the start and the point that waits for it. If a transfer or a collective takes
    longer than those kernels, the rest is exposed. Kernels beside a collective take `DeviceSpeed.beside_collective` times as
    long, because the collective takes multiprocessors and bandwidth.

    On a TPU, copies that XLA starts early fill the memory on the chip itself beside kernels, at the memory's bandwidth.

    The gradient of an embedding takes as long as with tokens that are as frequent as those of text.

    The prediction doesn't model overlapping kernels, autotuning, cache hits, elementwise arithmetic, or the input pipeline.

    The body of a loop without a known trip count counts once. `ExecutedFlops.num_unknown_loops` counts such loops.

    Args:
        module: The compiled program.
        speed: The device, with its links if the program has collectives.
    """
    return seconds_of(events_of(module), speed)


def times_of(module: Module, speed: DeviceSpeed) -> dict[str, float]:
    """The predicted seconds that each instruction takes of a step, in the order of the program.

    Those of a loop's body are for all its iterations. What is exposed of a copy or a collective counts for the instruction that
    starts it. They sum to the `step_s` of `predict_step_time`.
    """
    times = dict[str, float]()

    def spent(name: str, seconds: float) -> None:
        times[name] = times.get(name, 0.0) + seconds

    seconds_of(events_of(module), speed, spent)
    return times


def seconds_of(
    events: Sequence[Kernel | Wait], speed: DeviceSpeed, spent: Callable[[str, float], None] = lambda name, seconds: None
) -> StepTime:
    """The step time of a program's kernels, as `predict_step_time` has it.

    Args:
        events: the kernels and what they wait for, in order.
        speed: the device.
        spent: called for each event with its name and the seconds by which the step is longer.
    """
    kernels = [event for event in events if isinstance(event, Kernel)]
    collectives = [kernel for kernel in kernels if kernel.collective]
    awaited = {event.name for event in events if isinstance(event, Wait)}
    compute_s = memory_s = device_s = 0.0
    busy_s, exposed_s, free_at_s = (dict.fromkeys(get_args(_Link), 0.0) for _ in range(3))
    arrives: dict[str, tuple[_Link, float]] = {}
    # All iterations of a loop are equal, and each iteration waits for its own copies before it ends. So the time of all
    # iterations together equals the sum of their times, and each kernel counts `count` times in one go.
    for event in events:
        kernel_s, before_s = 0.0, device_s
        if isinstance(event, Kernel):
            time = predict_kernel_time(event, speed)
            compute_s += time.flops_s * event.count
            memory_s += time.bytes_s * event.count
            kernel_s = time.kernel_s * event.count / speed.training_share
            link = _link_of(event, speed, awaited)
            if link:
                link_s = kernel_s if link == "chip" else _link_seconds(event, speed) * event.count
                kernel_s = 0.0 if speed.cycles_per_s and event.name in awaited else kernel_s
                busy_s[link] += link_s
                free_at_s[link] = max(free_at_s[link], device_s) + link_s
                arrives[event.name] = link, free_at_s[link]
        if event.name in arrives and (isinstance(event, Wait) or event.name not in awaited):
            link, arrives_s = arrives[event.name]
            late_s = max(0.0, arrives_s - device_s)
            exposed_s[link] += late_s
            device_s += late_s
        device_s += _beside(kernel_s, free_at_s["devices"] - device_s, speed.beside_collective)
        spent(event.name, device_s - before_s)
    num_launches = sum(k.count for k in kernels if not k.collective)
    return StepTime(
        step_s=device_s,
        compute_s=compute_s,
        memory_s=memory_s,
        host_s=busy_s["host"],
        exposed_s=exposed_s["host"],
        launch_s=num_launches * speed.launch_s,
        flops=sum(k.flops * k.count for k in kernels),
        bytes_read=sum(k.bytes_read * k.count for k in kernels),
        bytes_written=sum(k.bytes_written * k.count for k in kernels),
        host_bytes=sum(k.host_bytes * k.count for k in kernels),
        num_kernels=num_launches,
        collective_s=busy_s["devices"],
        collective_exposed_s=exposed_s["devices"],
        collective_bytes=sum(_sent_bytes(k, speed) * k.count for k in collectives),
        num_collectives=sum(k.count for k in collectives),
    )


def _link_of(kernel: Kernel, speed: DeviceSpeed, awaited: Collection[str]) -> _Link | None:
    """What a kernel's bytes go over while others run. None for one that runs alone.

    `awaited` has the names of those that end at a point of their own.
    """
    if kernel.collective:
        return "devices"
    if kernel.host_bytes:
        return "host"
    return "chip" if speed.cycles_per_s and kernel.name in awaited else None


def _beside(kernel_s: float, busy_s: float, slowdown: float) -> float:
    """Seconds of a kernel of `kernel_s` alone, if collectives run for the next `busy_s`."""
    overlapped_s = min(kernel_s * slowdown, max(busy_s, 0.0))
    return overlapped_s + kernel_s - overlapped_s / slowdown


def peak_flops_of(module: Module, speed: DeviceSpeed) -> float:
    """The peak FLOP/s of the type in which a compiled module computes most of its FLOPs."""
    flops = Counter[str]()
    for kernel in kernels_of(module):
        flops[kernel.dtype] += kernel.flops * kernel.count
    return speed.peak_flops(max(flops, key=lambda dtype: flops[dtype], default=""))


def _link_seconds(kernel: Kernel, speed: DeviceSpeed) -> float:
    """Seconds in which one launch uses a link. A collective on one device takes none."""
    if kernel.collective:
        return collective_seconds(kernel.collective, speed.links, speed.tables) if speed.links else 0.0
    return kernel.host_bytes / speed.host_link_bytes_per_s


def _sent_bytes(kernel: Kernel, speed: DeviceSpeed) -> int:
    return sent_bytes(kernel.collective, speed.links) if kernel.collective and speed.links else 0


def predict_kernel_time(kernel: Kernel, speed: DeviceSpeed) -> KernelTime:
    """Predicts one launch of a kernel: the longest of its FLOPs, bytes and writes.

    The launch's own time is added. The FLOPs and the bytes run at the rates that kernels of its class reach. The writes are
    those of its threads: where a loop writes into a slice of a larger buffer, each thread writes a few elements, and the
    threads may take longer than the bytes. Rows that are added to the same row wait for each other, which comes on top. A
    collective takes no time of the device beside its exposed seconds.

    On a TPU, a matmul takes the cycles of XLA's own estimate, which has its shapes and its operands' bytes.
    """
    if kernel.collective:
        return KernelTime(0.0, 0.0, 0.0, 0.0)
    calibration = speed.calibration
    flops_per_s = speed.kernel_flops_per_s(kernel.dtype, kernel.kernel_class, kernel.product, kernel.attention)
    flops_s = kernel.flops / flops_per_s
    bytes_s = kernel.num_bytes / speed.bytes_per_s(kernel.kernel_class)
    threads = kernel.elements_written / calibration.elements_per_thread
    writes_s = threads / (calibration.threads_per_clock * speed.clocks_per_s)
    if speed.cycles_per_s and kernel.cycles is not None and kernel.flops:
        return KernelTime(kernel.cycles / speed.cycles_per_s, flops_s, bytes_s, 0.0)
    wait_s = speed.row_wait_s * kernel.rows_added * min(kernel.rows_added, MOST_ROWS) ** 0.5
    return KernelTime(max(flops_s, bytes_s, writes_s) + wait_s + calibration.launch_s, flops_s, bytes_s, writes_s)
