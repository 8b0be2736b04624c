"""Reads the collectives of a compiled program, and predicts how long the links are busy.

A collective is an operation of a group of devices, such as an all-gather: each device has a part of an array, and in the end each
has the whole array. For example, 8 GPUs gather an array of 1e9 bytes. They form a ring. Each sends 7/8 of the array to the next
one, which takes 2.4 ms at 370e9 bytes/s.

References:
    XLA, `xla/hlo/ir/replica_group.cc` and `mesh_and_axis.cc`: how groups of devices are printed.
"""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from jaxremat.chips.speed import Links
from jaxremat.chips.tables import Tables
from jaxremat.xla.hlo import Computation, Instruction

CollectiveKind = Literal[
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
Groups = tuple[tuple[int, ...], ...]

_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_MESH_GROUPS = re.compile(
    rf"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<devices>{_IOTA}|[\d,]*)\))? \{{(?P<axes>[^}}]*)\}}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[(?P<shape>[\d,]+)\]<=(?P<devices>" + _IOTA + ")")
_LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(?P<groups>(?:\{[\d,]*\},?)+)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """What one device does in a collective.

    Attributes:
        kind: which collective it is.
        num_bytes: Bytes of the whole array: what a device has at the end of an all-gather, and at the beginning of any other.
        groups: The devices of each group, or the pairs of a permute. Empty if all devices are one group.
    """

    kind: CollectiveKind
    num_bytes: int
    groups: Groups


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction is a collective or starts one."""
    return instruction.opcode.removesuffix("-start") in KINDS


def collective_of(computation: Computation, instruction: Instruction) -> Collective:
    """What a collective, or the instruction that starts it, sends.

    Raises:
        ValueError: its groups are printed in a form that isn't known.
    """
    kind = cast(CollectiveKind, instruction.opcode.removesuffix("-start"))
    groups = groups_of(instruction.attrs)
    operands = computation.operand_shapes(instruction)
    if kind == "ragged-all-to-all":  # after the values come the array that they are written to, and sizes
        operands = operands[:1]
    num_bytes = sum(shape.num_bytes for shapes in operands for shape in shapes)
    if kind == "all-gather" and groups:
        num_bytes *= len(groups[0])
    elif kind == "all-gather":
        is_start = instruction.opcode.endswith("-start")  # whose result has the operands, too
        num_bytes = sum(shape.num_bytes for shape in instruction.shapes) - is_start * num_bytes
    return Collective(kind, num_bytes, groups)


@functools.lru_cache(maxsize=4096)
def groups_of(attrs: str) -> Groups:
    """The groups of devices in the attributes of a collective.

    Empty if all devices are one group. XLA prints them as lists, `{{0,1},{2,3}}`; as the rows of a range of numbers that was
    reshaped and transposed, `[2,2]<=[4]`; or as axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`.

    Raises:
        ValueError: the groups are in no form that is known.
    """
    if match := _MESH_GROUPS.search(attrs):
        return _groups_of_axes(match["sizes"], match["devices"], match["axes"])
    if match := _IOTA_GROUPS.search(attrs):
        return _rows(_iota(match["devices"]).reshape(_integers(match["shape"])))
    if match := _LISTED_GROUPS.search(attrs):
        return tuple(_integers(group) for group in re.findall(r"\{([\d,]*)\}", match["groups"]))
    if "replica_groups={}" in attrs or "replica_groups=" not in attrs:
        return ()
    raise ValueError(f"groups of devices in a form that isn't known: {attrs[:200]}")


def sent_bytes(collective: Collective, links: Links) -> int:
    """Bytes that each device sends."""
    size = max(len(group) for group in _device_groups(collective, links))
    return round(collective.num_bytes * _share_sent(collective.kind, size))


def collective_seconds(collective: Collective, links: Links, tables: Tables | None = None) -> float:
    """Predicts how long a collective uses the links; nothing is measured.

    Inside a node, the measured table of the device's generation has the time, if the node has the links of the measured one. All
    other collectives take at least as long as one of few bytes in the table.

    The devices of a group form a ring, through all devices of a node and then to the next node. All network cards of a node
    that belong to devices of the group are used. An all-reduce over several nodes forms a tree of nodes. What else uses the
    links isn't modelled, nor are reductions inside a switch (NVLS, SHARP). In a slice of TPUs, rings go along all axes of its
    layout that the group spans (`chips/tpu/links.py`).
    """
    groups = _device_groups(collective, links)
    if tables is None or links.node_bytes_per_s != tables.node_bytes_per_s:
        return max(_seconds(collective, group, links) for group in groups)
    if all(len({*map(links.node_of, group)}) == 1 for group in groups):
        measured_s = tables.collective_s(collective.kind, len(groups[0]), collective.num_bytes)
        if measured_s is not None:
            return measured_s
    return max(_seconds(collective, group, links, tables.latency_s(collective.kind)) for group in groups)


def _device_groups(collective: Collective, links: Links) -> Groups:
    return collective.groups or (tuple(range(links.num_devices)),)


def _share_sent(kind: CollectiveKind, size: int) -> float:
    """Bytes that each device sends, as a share of the whole array."""
    if kind in ("collective-permute", "collective-broadcast"):
        return 1.0 * (size > 1)
    return (size - 1) / size * (2 if kind == "all-reduce" else 1)


def _seconds(collective: Collective, group: tuple[int, ...], links: Links, latency_s: float = 0.0) -> float:
    """Seconds of a group. What a node does before its bytes take `latency_s` or more."""
    of_nodes = Counter(map(links.node_of, group))
    size, num_nodes, least = len(group), len(of_nodes), min(of_nodes.values())
    if size == 1:
        return 0.0
    network = links.network_bytes_per_s or 0.0
    if num_nodes > 1 and not network:
        return math.inf
    match collective.kind:
        case "all-to-all" | "ragged-all-to-all":
            # Each pair of devices sends on its own, so that both kinds of links are busy at once.
            node_s = collective.num_bytes * (least - 1) / size / links.exchange_bytes_per_s(group)
            bytes_s = max(node_s, collective.num_bytes * (size - least) / size / network if num_nodes > 1 else 0.0)
            node_hops, network_hops = 1, int(num_nodes > 1)
        case "collective-permute":
            bytes_s = collective.num_bytes / (network if num_nodes > 1 else links.node_bytes_per_s)
            node_hops, network_hops = int(num_nodes == 1), int(num_nodes > 1)
        case kind:
            of_node = links.ring_bytes_per_s(group) if least > 1 or num_nodes == 1 else math.inf
            bandwidth = min(of_node, least * network) if num_nodes > 1 else of_node
            bytes_s = collective.num_bytes * _share_sent(kind, size) / bandwidth
            if kind == "all-reduce":
                node_hops, network_hops = 2 * (least - 1), 2 * math.ceil(math.log2(num_nodes))
            else:
                node_hops, network_hops = size - num_nodes, num_nodes - 1
    return min(
        max(p.base_s + node_hops * p.node_hop_s, latency_s) + network_hops * p.network_hop_s + bytes_s / p.share
        for p in links.protocols
    )


# Reading groups of devices.


def _groups_of_axes(sizes: str, devices: str | None, axes: str) -> Groups:
    """The groups along some axes of a mesh.

    An axis may be a part of one: `'a':(2)4` is of size 4, with 2 before it.
    """
    names: list[str] = []
    shape: list[int] = []
    parts = {name: (int(before), int(size)) for name, _, before, size in _AXIS.findall(axes) if size}
    whole = {name for name, _, _, size in _AXIS.findall(axes) if not size}
    for name, size, _, _ in _AXIS.findall(sizes):
        if name in parts:
            before, part = parts[name]
            names += [f"{name} before", name, f"{name} after"]
            shape += [before, part, int(size) // before // part]
        else:
            names.append(name)
            shape.append(int(size))
    in_group = [n for n, name in enumerate(names) if name in parts or name in whole]
    rest = [n for n in range(len(names)) if n not in in_group]
    order = _devices(devices, math.prod(shape)).reshape(shape).transpose([*rest, *in_group])
    return _rows(order.reshape(-1, math.prod(shape[n] for n in in_group)))


def _devices(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    return _iota(text) if text.startswith("[") else np.asarray(_integers(text))


def _iota(text: str) -> np.ndarray:
    """The numbers of `[2,8]T(1,0)`: 0 to 15 as 2 rows of 8, transposed."""
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return (numbers.transpose(_integers(order)) if order else numbers).reshape(-1)


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in array)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
