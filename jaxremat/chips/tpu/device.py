"""Describes a TPU, from a bundled data file, and chooses the layout of its chips.

JAX counts devices, and a TPU has chips. A chip of tpu7x is two devices, and one of the others is one. A slice is
the chips that links of their own connect: in two dimensions for v5e and v6e, and in three for the others. Its layout is
`2x4`, say.

    layout_of(load_tpu("v6e")[1], 8)      # "2x4"
    layout_of(load_tpu("tpu7x")[1], 8)    # "2x2x1": 4 chips
"""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from jaxremat.errors import UsageError

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Fitted:
    """What published steps say of a generation's speed.

    Attributes:
        cycles_per_s: clock cycles of XLA's estimates that pass in a second.
        matmul_share: share of the peak FLOP/s that the matmuls of the published steps reach by these cycles. It stands for
            matmuls whose cycles aren't known, as in a layer that isn't compiled yet.
        attention_share: share of the peak FLOP/s that the kernels of splash attention reach.
        bandwidth_share: share of the memory's bandwidth that kernels without a matmul reach.
        error: how much longer or shorter a real step may take than predicted, as a share: the largest of the published steps,
            rounded up.
        paired_error: how far two predicted steps of one model may be off beside each other, as a share. It is `error` where none
            were compared.
        source: the steps.
    """

    cycles_per_s: float
    matmul_share: float
    attention_share: float
    bandwidth_share: float
    error: float
    paired_error: float
    source: str


@dataclass(frozen=True)
class TpuDescription:
    """The description of one TPU, for one device as JAX counts them.

    Attributes:
        name: the generation, as JAX's topologies call it.
        description: the device in words.
        dimensions: in how many dimensions links connect the chips of a slice.
        most_chips: chips of the largest slice.
        devices_of_chip: devices of a chip.
        device_memory_size: bytes that XLA's compiler lets a program take of the device's memory.
        peak_bf16_flops: peak FLOP/s of dense bf16 matmuls.
        memory_bandwidth: bytes/s of the memory.
        link_bandwidth: bytes/s of one link to a neighbour, in one direction. None if unknown.
        network_bandwidth: bytes/s that a device sends to other slices. None if unknown.
        host_link_bandwidth: bytes/s of one direction of the link to the host's memory. None if unknown.
        fitted: how fast kernels are. None if no published step says so, and then no time is predicted.
        chip_config: libtpu's name of how a chip's cores act. None for its default.
    """

    name: str
    description: str
    dimensions: int
    most_chips: int
    devices_of_chip: int
    device_memory_size: int
    peak_bf16_flops: int
    memory_bandwidth: int
    link_bandwidth: int | None = None
    network_bandwidth: int | None = None
    host_link_bandwidth: int | None = None
    fitted: Fitted | None = None
    chip_config: str | None = None
    compute_capability: tuple[int, int] | None = None

    def to_text(self) -> str:
        """The generation. XLA's compiler knows the rest."""
        return self.name


def tpu_names() -> tuple[str, ...]:
    """The names of the bundled TPUs."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_tpu(name: str) -> TpuDescription:
    """Loads a bundled TPU by its name, such as `v6e`."""
    values = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    del values["sources"]
    fitted = Fitted(**values.pop("fitted")) if "fitted" in values else None
    return TpuDescription(name, **values, fitted=fitted)


def layout_of(tpu: TpuDescription, num_devices: int, requested: str | None = None) -> str:
    """The layout of the chips of a slice, such as `2x4`.

    Args:
        tpu: the TPU.
        num_devices: devices of the slice.
        requested: the value of `--topology`. None has a layout chosen that is as near to a square or cube as there is.

    Raises:
        UsageError: the slice has no such layout.
    """
    num_chips = math.ceil(num_devices / tpu.devices_of_chip)
    form = "x".join("ABC"[: tpu.dimensions])
    a_chip = f", {tpu.devices_of_chip} devices each" if tpu.devices_of_chip > 1 else ""
    if requested:
        sizes = (
            [int(size) for size in requested.split("x")] if re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", requested) else []
        )
        if len(sizes) != tpu.dimensions or math.prod(sizes) != num_chips:
            raise UsageError(
                f"--topology {requested} for {num_devices} devices of {tpu.name}",
                allowed=f"{form}, of {num_chips} chips{a_chip}",
                next_step=_example(tpu, num_chips) or "leave --topology out",
            )
        return requested
    if num_chips > tpu.most_chips:
        raise UsageError(
            f"a slice of {num_chips:,} chips of {tpu.name}",
            allowed=f"up to {tpu.most_chips:,} chips in a slice",
            next_step=f"--nodes {math.ceil(num_chips / tpu.most_chips)}, which are slices",
        )
    if num_chips & (num_chips - 1):
        raise UsageError(
            f"no layout is known for {num_chips} chips of {tpu.name}",
            allowed=f"a power of two of chips{a_chip}, or a --topology",
            next_step=f"--topology {form} with their product {num_chips}",
        )
    return _chosen(tpu.dimensions, num_chips)


def _example(tpu: TpuDescription, num_chips: int) -> str:
    is_power = not num_chips & (num_chips - 1)
    return f"--topology {_chosen(tpu.dimensions, num_chips)}" if is_power else ""


def _chosen(dimensions: int, num_chips: int) -> str:
    """The layout of a power of two of chips.

    It is `2x4` for 8, or `2x2x2` in three dimensions. Those are the layouts of the slices that Google Cloud has, and the
    halves of the smallest.
    """
    bits = num_chips.bit_length() - 1
    sizes = sorted(2 ** ((bits + place) // dimensions) for place in range(dimensions))
    ones = sizes.count(1) if dimensions == 3 else 0
    return "x".join(map(str, [*sizes[ones:], *sizes[:ones]]))
