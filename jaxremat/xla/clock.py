"""Predicts how long a compiled step takes, from the FLOPs and bytes of every kernel.

It also reads what kernels of each class reach. For example, a matmul of 8e12 FLOPs and 1e9 bytes takes 10 ms on a device of
1e15 FLOP/s and 4e12 bytes/s where matmuls reach 0.8 of both: the FLOPs need 10 ms, the bytes need 0.3 ms, and the longer
time counts.

The shares of the peaks that kernels reach come from real GPUs, as a `Calibration`. `python -m experiments.kernel_times`
compares the predictions with the times of those kernels, and fits the shares.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from jaxremat.xla.collectives import Links, collective_seconds, sent_bytes
from jaxremat.xla.hlo import Module
from jaxremat.xla.kernels import Kernel, KernelClass, Wait, events_of, kernels_of
from jaxremat.xla.step_facts import StepTime

#: By class of kernels, the share of a peak that they reach. A tuple of pairs, which can be hashed.
Shares = tuple[tuple[KernelClass, float], ...]
_Link = Literal["host", "devices"]
#: How much longer real steps on several GPUs take than predicted, as shares of the predicted time: the least and the most over
#: published steps. `python -m experiments.published` compares them.
SEVERAL_GPUS = (-0.06, 0.36)


@dataclass(frozen=True)
class Calibration:
    """How near real kernels come to the peak rates of a device.

    Attributes:
        flops_share: Share of the peak FLOP/s that large kernels of a class reach, 0 to 1. A class that isn't here reaches
            that of `matmul`.
        bandwidth_share: Share of the bandwidth that kernels of a class reach, 0 to 1. A class that isn't here reaches that
            of `elementwise`.
        launch_s: Seconds that each kernel's launch adds.
        threads_per_clock: Threads that a multiprocessor finishes in each clock cycle, where each writes elements into a
            slice of a larger buffer.
        elements_per_thread: Elements that one such thread writes.
        error: How far a prediction may be off, as a share of it. It is the largest error of a class when one profile's shares
            predict another profile, over the classes with more than 2 % of the time of both.
        source: What the shares were fitted to.
    """

    flops_share: Shares
    bandwidth_share: Shares
    launch_s: float
    threads_per_clock: float
    elements_per_thread: int
    error: float
    source: str


@dataclass(frozen=True)
class DeviceSpeed:
    """The peak rates of a device, and the shares of them that real kernels reach.

    Attributes:
        bf16_flops: Peak FLOP/s of dense bf16 and f16 matmuls. Matmuls in f8 are predicted at this rate too.
        f32_flops: Peak FLOP/s of dense f32 matmuls. On NVIDIA GPUs this is the TF32 rate, since TF32 is XLA's default.
        bandwidth_bytes_per_s: Bandwidth of device memory.
        host_link_bytes_per_s: Bandwidth of one direction of the link to pinned host memory.
        clocks_per_s: Clock cycles of all multiprocessors together in a second.
        calibration: The shares.
        links: What connects several devices. None for one device.
    """

    bf16_flops: float
    f32_flops: float
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    clocks_per_s: float
    calibration: Calibration
    links: Links | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """How much longer a real step may take: (-0.12, 0.12) is 12 % shorter to 12 % longer.

        The shares are of the predicted time. It is no bound. For one device it is the error of the kernels' times, and for
        several that of published steps.
        """
        if self.links and self.links.num_devices > 1:
            return SEVERAL_GPUS
        return -self.calibration.error, self.calibration.error

    @property
    def launch_s(self) -> float:
        """Seconds that each kernel's launch adds."""
        return self.calibration.launch_s

    def peak_flops(self, dtype: str) -> float:
        """The peak FLOP/s of matmuls of the type `dtype`, such as `bf16`."""
        return self.f32_flops if dtype in ("f32", "f64", "c64", "c128") else self.bf16_flops

    def flops_per_s(self, dtype: str, kernel_class: KernelClass = "matmul") -> float:
        """The FLOP/s that kernels of a class reach with elements of type `dtype`, such as `bf16`."""
        shares = dict(self.calibration.flops_share)
        return self.peak_flops(dtype) * shares.get(kernel_class, shares["matmul"])

    def bytes_per_s(self, kernel_class: KernelClass = "elementwise") -> float:
        """The bytes of device memory that kernels of a class move in a second."""
        shares = dict(self.calibration.bandwidth_share)
        return self.bandwidth_bytes_per_s * shares.get(kernel_class, shares["elementwise"])


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

    Host transfers use the link to the host one at a time, and collectives the links between devices. Both overlap with the
    kernels that XLA has scheduled between the start and the point that waits for it. If a transfer or a collective takes
    longer than those kernels, the rest is exposed.

    The prediction doesn't model the bandwidth and the multiprocessors that transfers and collectives take from kernels beyond
    the bytes of the transfers, overlapping kernels, autotuning, cache hits, clock throttling, elementwise arithmetic, devices
    that wait for slower ones, or the input pipeline.

    The body of a loop without a known trip count counts once. `ExecutedFlops.num_unknown_loops` counts such loops.

    Args:
        module: The compiled program.
        speed: The device, with its links if the program has collectives.
    """
    events = events_of(module)
    kernels = [event for event in events if isinstance(event, Kernel)]
    collectives = [kernel for kernel in kernels if kernel.collective]
    awaited = {event.name for event in events if isinstance(event, Wait)}
    compute_s = memory_s = device_s = 0.0
    busy_s, exposed_s, free_at_s = (dict.fromkeys(get_args(_Link), 0.0) for _ in range(3))
    arrives: dict[str, tuple[_Link, float]] = {}
    # All iterations of a loop are equal, and each iteration waits for its own copies before it ends. So the time of all
    # iterations together equals the sum of their times, and each kernel counts `count` times in one go.
    for event in events:
        kernel_s = 0.0
        if isinstance(event, Kernel):
            time = predict_kernel_time(event, speed)
            compute_s += time.flops_s * event.count
            memory_s += time.bytes_s * event.count
            kernel_s = time.kernel_s * event.count
            if event.host_bytes or event.collective:
                link: _Link = "devices" if event.collective else "host"
                link_s = _link_seconds(event, speed) * event.count
                busy_s[link] += link_s
                free_at_s[link] = max(free_at_s[link], device_s) + link_s
                arrives[event.name] = link, free_at_s[link]
        if event.name in arrives and (isinstance(event, Wait) or event.name not in awaited):
            link, arrives_s = arrives[event.name]
            late_s = max(0.0, arrives_s - device_s)
            exposed_s[link] += late_s
            device_s += late_s
        device_s += kernel_s
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


def peak_flops_of(module: Module, speed: DeviceSpeed) -> float:
    """The peak FLOP/s of the type in which a compiled module computes most of its FLOPs."""
    flops = Counter[str]()
    for kernel in kernels_of(module):
        flops[kernel.dtype] += kernel.flops * kernel.count
    return speed.peak_flops(max(flops, key=lambda dtype: flops[dtype], default=""))


def _link_seconds(kernel: Kernel, speed: DeviceSpeed) -> float:
    """Seconds in which one launch uses a link. A collective on one device takes none."""
    if kernel.collective:
        return collective_seconds(kernel.collective, speed.links) if speed.links else 0.0
    return kernel.host_bytes / speed.host_link_bytes_per_s


def _sent_bytes(kernel: Kernel, speed: DeviceSpeed) -> int:
    return sent_bytes(kernel.collective, speed.links) if kernel.collective and speed.links else 0


def predict_kernel_time(kernel: Kernel, speed: DeviceSpeed) -> KernelTime:
    """Predicts one launch of a kernel: the longest of its FLOPs, bytes and writes.

    The launch's own time is added. The FLOPs and the bytes run at the rates that kernels of its class reach. The writes are
    those of its threads: where a loop writes into a slice of a larger buffer, each thread writes a few elements, and the
    threads may take longer than the bytes. A collective takes no time of the device beside its exposed seconds.
    """
    if kernel.collective:
        return KernelTime(0.0, 0.0, 0.0, 0.0)
    calibration = speed.calibration
    flops_s = kernel.flops / speed.flops_per_s(kernel.dtype, kernel.kernel_class)
    bytes_s = kernel.num_bytes / speed.bytes_per_s(kernel.kernel_class)
    threads = kernel.elements_written / calibration.elements_per_thread
    writes_s = threads / (calibration.threads_per_clock * speed.clocks_per_s)
    return KernelTime(max(flops_s, bytes_s, writes_s) + calibration.launch_s, flops_s, bytes_s, writes_s)
