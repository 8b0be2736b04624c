"""The rates of a device as data: peaks, the shares that kernels reach, and links.

A `DeviceSpeed` is what the predicted seconds of a step are computed from (`jaxremat/xla/clock.py`), whatever the chip is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jaxremat.chips.tables import Attention, Product, Tables

#: The classes of kernels. How near a kernel comes to the peaks depends on its class.
KernelClass = Literal[
    "matmul",
    "small matmul",
    "thin matmul",
    "library call on slices",
    "attention",
    "convolution",
    "row reduction",
    "column reduction",
    "transpose",
    "elementwise",
    "copy",
    "slice update",
    "dynamic slice",
    "gather and scatter",
    "concatenate",
    "host copy",
    "collective",
]
CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
#: By class of kernels, the share of a peak that they reach. A tuple of pairs, which can be hashed.
Shares = tuple[tuple[KernelClass, float], ...]
#: What the type of a matmul is called here that multiplies float32 without TF32.
F32_HIGHEST = "f32 highest"
#: How much longer real steps on several GPUs take than predicted, as shares of the predicted time: the least and the most over
#: published steps. `python -m experiments.published` compares them.
SEVERAL_GPUS = (-0.09, 0.15)
#: The GPUs that those steps ran on.
COMPARED_GPUS = "H100s and A100s"
#: How far two predicted steps of one model on GPUs of one kind may be off beside each other, as a share: the largest difference
#: of measured over predicted times, rounded up. Of the steps in `experiments.published`, it is 10 % between policies of gpt2 at
#: two batches on an H100, 9.1 % at one (4.3 % if the steps are predicted from the programs that ran), 4.0 % between those of
#: llama3.2-1b on an H200, and 3.8 % between meshes and numbers of H100s.
PAIRED_ERROR = 0.10


@dataclass(frozen=True)
class Protocol:
    """How a library sends: seconds to begin and of a hop, and its bandwidth.

    Hops are inside a node or between nodes. The bandwidth is a share of the link's.
    """

    base_s: float
    node_hop_s: float
    network_hop_s: float
    share: float


@dataclass(frozen=True)
class Links:
    """What connects the devices of a mesh.

    Attributes:
        num_devices: Devices in all. Those with neighbouring numbers are on one node.
        devices_of_node: Devices of one node.
        node_bytes_per_s: Bytes that a device sends to others of its node in a second.
        network_bytes_per_s: Bytes that a device sends to other nodes in a second. None if that isn't known.
        order: For each device in the order of the program's, its number. Empty where both are the same.
        protocols: How the library of collectives may send. It takes the fastest.
    """

    num_devices: int
    devices_of_node: int
    node_bytes_per_s: float
    network_bytes_per_s: float | None
    protocols: tuple[Protocol, ...]
    order: tuple[int, ...] = ()

    def number(self, device: int) -> int:
        """The number of a device of the program."""
        return self.order[device] if self.order else device

    def node_of(self, device: int) -> int:
        """The node of a device of the program."""
        return self.number(device) // self.devices_of_node

    def ring_bytes_per_s(self, group: Sequence[int]) -> float:
        """Bytes/s that a device sends where those of a group form a ring in a node."""
        return self.node_bytes_per_s

    def exchange_bytes_per_s(self, group: Sequence[int]) -> float:
        """Bytes/s that a device sends where each of a group sends to all others of a node."""
        return self.node_bytes_per_s


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
        error: How far a prediction may be off, as a share of it: the largest error of whole steps on one GPU, and of the sum of a
            profile's kernels by another profile's shares, over the classes that both have.
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
        bf16_flops: Peak FLOP/s of dense bf16 matmuls. Matmuls in f8 are predicted at this rate too.
        f32_flops: Peak FLOP/s of dense f32 matmuls. On NVIDIA GPUs this is the TF32 rate, since TF32 is XLA's default.
        plain_f32_flops: Peak FLOP/s of f32 matmuls of the highest precision. None for that of f32.
        bandwidth_bytes_per_s: Bandwidth of device memory.
        host_link_bytes_per_s: Bandwidth of one direction of the link to pinned host memory.
        clocks_per_s: Clock cycles of all multiprocessors together in a second.
        calibration: The shares.
        links: What connects several devices. None for one device.
        f16_flops: Peak FLOP/s of dense f16 matmuls. None for that of bf16.
        tables: Measured kernels of the generation. None if there are none.
        cycles_per_s: Clock cycles of XLA's own estimates that pass in a second, on a chip whose compiler estimates them. None on
            others.
        several: `interval` of several devices.
        paired_error: How far two predicted steps of one model may be off beside each other, as a share.
        row_wait_s: Seconds that n rows wait for each other in the gradient of an embedding, divided by n to the power of 1.5, as
            far as that was measured (`MOST_ROWS` of the clock).
    """

    bf16_flops: float
    f32_flops: float
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    clocks_per_s: float
    calibration: Calibration
    links: Links | None = None
    f16_flops: float | None = None
    plain_f32_flops: float | None = None
    tables: Tables | None = None
    row_wait_s: float = 0.0
    cycles_per_s: float | None = None
    several: tuple[float, float] = SEVERAL_GPUS
    paired_error: float = PAIRED_ERROR

    @property
    def has_several(self) -> bool:
        """Whether the program is one of several devices."""
        return self.links is not None and self.links.num_devices > 1

    @property
    def training_share(self) -> float:
        """Share of its speed alone that a kernel has in a training.

        Without tables it is 1, because the shares of the classes come from trainings.
        """
        return self.tables.training_share if self.tables and self.has_several else 1.0

    @property
    def beside_collective(self) -> float:
        """How many times as long a kernel takes beside a collective."""
        return self.tables.beside_collective if self.tables and self.has_several else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """How much longer a real step may take: (-0.16, 0.16) is 16 % shorter to 16 % longer.

        The shares are of the predicted time. It is no bound. For one device it is the error of the kernels' times, and for
        several that of published steps.
        """
        if self.has_several:
            return self.several
        return -self.calibration.error, self.calibration.error

    @property
    def launch_s(self) -> float:
        """Seconds that each kernel's launch adds."""
        return self.calibration.launch_s

    def peak_flops(self, dtype: str) -> float:
        """The peak FLOP/s of matmuls of the type `dtype`, such as `bf16`.

        `f32 highest` is float32 without TF32.
        """
        if dtype == F32_HIGHEST:
            return self.plain_f32_flops or self.f32_flops
        if dtype in ("f32", "f64", "c64", "c128"):
            return self.f32_flops
        return self.f16_flops or self.bf16_flops if dtype == "f16" else self.bf16_flops

    def flops_per_s(self, dtype: str, kernel_class: KernelClass = "matmul") -> float:
        """The FLOP/s that kernels of a class reach with elements of type `dtype`, such as `bf16`."""
        shares = dict(self.calibration.flops_share)
        return self.peak_flops(dtype) * shares.get(kernel_class, shares["matmul"])

    def kernel_flops_per_s(
        self, dtype: str, kernel_class: KernelClass, product: Product | None, attention: Attention | None
    ) -> float:
        """The FLOP/s that one kernel reaches.

        The tables have it, or else the share of its class.
        """
        share = None
        if self.tables and product and kernel_class != "library call on slices":
            share = self.tables.matmul_share(product, dtype)
        elif self.tables and attention:
            share = self.tables.attention_share(attention)
        if share is None:
            return self.flops_per_s(dtype, kernel_class)
        return self.peak_flops(dtype) * share

    @property
    def most_flops_per_s(self) -> float:
        """The most FLOP/s that a kernel is predicted to reach.

        It is of any shapes and any type of elements.
        """
        measured = self.tables.most_share if self.tables else 0.0
        share = max(measured, *(of_class for _, of_class in self.calibration.flops_share))
        return self.training_share * share * max(self.peak_flops(dtype) for dtype in ("bf16", "f16", "f32"))

    def bytes_per_s(self, kernel_class: KernelClass = "elementwise") -> float:
        """The bytes of device memory that kernels of a class move in a second."""
        shares = dict(self.calibration.bandwidth_share)
        return self.bandwidth_bytes_per_s * shares.get(kernel_class, shares["elementwise"])
