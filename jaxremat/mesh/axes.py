"""A mesh: how many devices there are, and over what each of its axes divides them.

`--mesh data=2,fsdp=8` is a mesh of 16 devices. Every device has sequences of its own. The parameters, their gradients and the
optimizer's state are divided over the 8 devices along the axis `fsdp`, and each part is there twice, along the axis `data`.

`--mesh fsdp=4,tensor=2` is a mesh of 8 devices in 4 groups of 2. The two devices of a group share their sequences: each computes
half of the attention heads, half of the width inside the MLP and half of the logits, and between them half of the positions.

`--mesh fsdp=2,expert=4` is a mesh of 8 devices with sequences of their own. Each computes a quarter of the experts of a layer,
for the tokens of 4 devices.

A workload may bring a mesh of its own instead, with any axes (`OwnAxes`). What such an axis divides follows from the shardings of
the workload's arrays.

This module doesn't import JAX, so that `--help` is fast.

References:
    MaxText, `configs/base.yml`, for names such as `ici_fsdp_parallelism`, inside a node, and `dcn_data_parallelism`.
"""

import abc
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxremat.errors import UsageError, nearest

#: What each axis divides.
AXES = {
    "data": "the batch; each data-parallel group has all parameters",
    "fsdp": "the batch, the parameters, their gradients and the optimizer's state",
    "expert": "the experts of each layer; the batch, and what isn't experts, as fsdp does",
    "tensor": "attention heads, the MLP's width, the vocabulary, and the positions in between; its devices share sequences",
}
#: The axes along which sequences are divided.
BATCH_AXES = ("data", "fsdp", "expert")
#: Axes of MaxText and other trainers for which there are no shardings here.
_OTHERS = ("sequence", "context", "stage", "pipeline", "fsdp_transpose", "tensor_transpose", "autoregressive")
_MAXTEXT = re.compile(r"(ici|dcn)_(\w+)_parallelism")
#: The devices of a node, where nothing else is said.
DEVICES_OF_NODE = 8
#: The most devices of a mesh: the next power of two above those of the largest machines of today.
MAX_DEVICES = 2**17
#: Gbit/s of a node, some ten times those of a rack of 72 GPUs with an adapter of 800 each.
MAX_NETWORK_GBPS = 10**6
_EXAMPLE = "--mesh data=2,fsdp=8"


class MeshAxes(abc.ABC):
    """The axes of a mesh and what they divide.

    Attributes:
        nodes: machines over which the devices are spread evenly; slices, of TPUs.
        network_gbps: Gbit/s that a node sends to others. Its devices share them evenly. None for what the target has.
        topology: how the chips of a slice of TPUs lie, such as `2x4`. None where it is chosen, and for GPUs.
    """

    nodes: int
    network_gbps: float | None
    topology: str | None

    @property
    @abc.abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis. Devices are numbered along the last axis first."""

    @property
    @abc.abstractmethod
    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which devices have samples of their own."""

    @property
    @abc.abstractmethod
    def gather_axes(self) -> tuple[str, ...]:
        """The axes along which a parameter is gathered before a layer reads it."""

    @property
    @abc.abstractmethod
    def num_param_parts(self) -> int:
        """The number of parts of a parameter that all axes of parameters divide."""

    @property
    @abc.abstractmethod
    def num_members(self) -> int:
        """How many groups of devices have a batch each, where the batch is that of a group."""

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def is_own(self) -> bool:
        """Whether a workload has brought the mesh."""
        return isinstance(self, OwnAxes)

    def places(self, devices: Iterable[int], axes: Collection[str]) -> set[tuple[int, ...]]:
        """The places of some devices along `axes`."""
        return {tuple(place[axis] for axis in self.sizes if axis in axes) for place in map(self._place, devices)}

    def _place(self, device: int) -> dict[str, int]:
        place = {}
        for axis, size in reversed([*self.sizes.items()]):
            device, place[axis] = divmod(device, size)
        return place

    @abc.abstractmethod
    def as_data(self) -> dict[str, Any]:
        """The axes as records have them; `axes_of_data` reads them back."""

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return sizes or f"{next(iter(self.sizes))}=1"


@dataclass(frozen=True)
class MeshShape(MeshAxes):
    """The sizes of the axes of `--mesh`.

    Attributes:
        data: size of the axis `data`.
        fsdp: size of the axis `fsdp`.
        tensor: size of the axis `tensor`.
        expert: size of the axis `expert`.
        nodes: machines over which the devices are spread evenly; slices, of TPUs.
        network_gbps: as in `MeshAxes`.
        topology: how the chips of a slice of TPUs lie, such as `2x4`. None where it is chosen, and for GPUs.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    nodes: int = 1
    network_gbps: float | None = None
    topology: str | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return BATCH_AXES

    @property
    def gather_axes(self) -> tuple[str, ...]:
        return ("fsdp",)

    @property
    def num_param_parts(self) -> int:
        return self.num_devices // self.data

    @property
    def num_members(self) -> int:
        """How many groups of `tensor` devices have sequences of their own.

        A batch is the number of sequences of such a group.
        """
        return self.num_devices // self.tensor

    def as_data(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class OwnAxes(MeshAxes):
    """The axes of a mesh that a workload has brought.

    A batch is whatever the workload's function makes of it, for all devices together.

    Attributes:
        named: the name and the size of each axis, in the order of the mesh.
        of_batch: the axes that divide an array of the batch.
        of_params: the axes that divide a parameter, or an array of the optimizer's state.
        nodes: machines over which the devices are spread evenly; slices, of TPUs.
        network_gbps: as in `MeshAxes`.
        topology: how the chips of a slice of TPUs lie, such as `2x4`. None where it is chosen, and for GPUs.
    """

    named: tuple[tuple[str, int], ...]
    of_batch: tuple[str, ...] = ()
    of_params: tuple[str, ...] = ()
    nodes: int = 1
    network_gbps: float | None = None
    topology: str | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        return dict(self.named)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return self.of_batch

    @property
    def gather_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.of_params if axis in self.of_batch)

    @property
    def num_param_parts(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.of_params)

    @property
    def num_members(self) -> int:
        return 1

    def as_data(self) -> dict[str, Any]:
        more = {"network_gbps": self.network_gbps, "topology": self.topology}
        return {"axes": dict(self.named), "nodes": self.nodes} | {name: one for name, one in more.items() if one is not None}


def axes_of_data(data: Mapping[str, Any]) -> MeshAxes:
    """The axes that `MeshAxes.as_data` wrote.

    Raises:
        msgspec.ValidationError: they are none.
    """
    import msgspec

    if "axes" not in data:
        return msgspec.convert(data, MeshShape)
    return OwnAxes(
        tuple(msgspec.convert(data["axes"], dict[str, int]).items()),
        nodes=msgspec.convert(data.get("nodes", 1), int),
        network_gbps=msgspec.convert(data.get("network_gbps"), float | None),
        topology=msgspec.convert(data.get("topology"), str | None),
    )


ONE_DEVICE = MeshShape()


def parse_mesh(
    text: str | None,
    devices: int | None = None,
    nodes: int | None = None,
    network_gbps: float | None = None,
    *,
    devices_of_node: int | None = DEVICES_OF_NODE,
    topology: str | None = None,
) -> MeshShape | None:
    """The mesh that the flags `--mesh`, `--devices`, `--nodes` and `--network-gbps` request.

    None for one device, if no flag was given.

    `--devices 8` alone is `fsdp=8`. An axis of size -1 takes the devices that the other axes leave. A node has at most
    `devices_of_node`, unless `nodes` says otherwise; None is one node.
    `ici_fsdp_parallelism=8,dcn_data_parallelism=2` is `data=2,fsdp=8` on 2 nodes.

    Raises:
        UsageError: an axis that isn't known, or sizes that don't go together.
    """
    if text is None and devices is None:
        if nodes is not None:
            raise _bad_mesh(f"--nodes {nodes} without devices", "--devices N or --mesh beside it", f"{_EXAMPLE} --nodes 2")
        return None
    for flag, number in (("--devices", devices), ("--nodes", nodes)):
        if number is not None and not 1 <= number <= MAX_DEVICES:
            raise _bad_mesh(f"{flag} got {number}", f"a whole number from 1 to {MAX_DEVICES:,}", f"{flag} 8")
    sizes, of_nodes = _axis_sizes(text or "fsdp=-1")
    sizes = _filled(sizes, devices, text)
    num_devices = math.prod(sizes.values())
    if num_devices > MAX_DEVICES:
        raise _bad_mesh(f"--mesh {text} has {num_devices:,} devices", f"up to {MAX_DEVICES:,} devices", _EXAMPLE)
    if devices is not None and num_devices != devices:
        raise _bad_mesh(
            f"--mesh {text} has {num_devices} devices, and --devices says {devices}",
            "a mesh of as many devices",
            "leave --devices out, or give one axis the size -1",
        )
    num_nodes = nodes or (of_nodes if of_nodes > 1 else _fewest_nodes(num_devices, devices_of_node or num_devices))
    if num_devices % num_nodes:
        raise _bad_mesh(
            f"{num_devices} devices on {num_nodes} nodes", "equally many devices on each node", f"--nodes {num_devices}"
        )
    return MeshShape(**sizes, nodes=num_nodes, network_gbps=network_gbps, topology=topology)


def _fewest_nodes(num_devices: int, devices_of_node: int) -> int:
    """The fewest nodes that have equally many devices, and at most `devices_of_node` each."""
    return next(n for n in range(math.ceil(num_devices / devices_of_node), num_devices + 1) if num_devices % n == 0)


def _axis_sizes(text: str) -> tuple[dict[str, int], int]:
    """The sizes of the axes that `text` names, and the number of nodes that MaxText's names say.

    A size may be -1.
    """
    sizes: dict[str, int] = {}
    nodes = 1
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not re.fullmatch(r"-1|[1-9][0-9]{0,5}", number):
            raise _bad_mesh(f"--mesh got {part!r}", "AXIS=N with N from 1 up, or -1 for one axis", _EXAMPLE)
        match = _MAXTEXT.fullmatch(name)
        axis, size = match[2] if match else name, int(number)
        if axis in _OTHERS and size == 1:
            continue
        if axis not in AXES:
            raise _unknown_axis(name, axis)
        known = sizes.get(axis, 1)
        if axis in sizes and (not match or -1 in (size, known)):
            raise _bad_mesh(f"--mesh {text} has the axis {axis} twice", "each axis once", _EXAMPLE)
        sizes[axis] = size * known
        nodes *= size if match and match[1] == "dcn" and size > 0 else 1
    return sizes, nodes


def _filled(sizes: dict[str, int], devices: int | None, text: str | None) -> dict[str, int]:
    """The sizes, with the axis of size -1 as large as the other axes leave it."""
    rest = [axis for axis, size in sizes.items() if size == -1]
    if not rest:
        return sizes
    if len(rest) > 1 or devices is None:
        raise _bad_mesh(
            f"--mesh {text} has {'several axes' if len(rest) > 1 else 'an axis'} of size -1",
            "one such axis, with --devices N",
            f"{_EXAMPLE.replace('8', '-1')} --devices 16",
        )
    others = math.prod(size for size in sizes.values() if size != -1)
    if devices % others:
        raise _bad_mesh(
            f"--mesh {text} over {devices} devices", f"a number of devices that {others} divides", f"--devices {others}"
        )
    return sizes | {rest[0]: devices // others}


def _unknown_axis(name: str, axis: str) -> UsageError:
    """The error of an axis that isn't known, with its name as it was typed."""
    allowed = "; ".join(f"{name} divides {what}" for name, what in AXES.items())
    if axis in _OTHERS:
        return UsageError(
            f"--mesh got the axis {axis}",
            allowed=allowed,
            cause=f"shardings over {axis} aren't there yet",
            next_step=_EXAMPLE,
        )
    place, _, _ = name.partition("_")
    known = [f"{place}_{one}_parallelism" for one in AXES] if place in ("ici", "dcn") else AXES
    return UsageError(f"--mesh got the axis {name!r}", allowed=allowed, next_step=nearest(name, known, 1) or _EXAMPLE)


def _bad_mesh(got: str, allowed: str, next_step: str) -> UsageError:
    return UsageError(got, allowed=allowed, next_step=next_step)
