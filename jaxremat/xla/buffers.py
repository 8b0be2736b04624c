"""The types of a memory map: a step's buffers, their place, live range and category.

XLA gives a step one allocation for each argument and each output, and one arena for all temporaries. Each value in the
arena has a fixed offset while it is live. Constants are part of the program, and XLA's total doesn't include them. On a TPU the
program is in the device's memory, and the total includes it with its constants.

A position is an index into XLA's own schedule. The schedule has each loop's body once, so a position of a loop stands
for every iteration.

`attribution` sums the live buffers at the peak by category. For a small model it may return
`{"residuals": 4096, "parameters": 2048, "gaps": 256}`, in bytes.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Category = Literal[
    "parameters",
    "frozen parameters",
    "optimizer state",
    "gradients",
    "residuals",
    "logits and loss",
    "recompute",
    "gathered parameters",
    "unreduced gradients",
    "collective buffers",
    "workspace",
    "outputs",
    "inputs",
    "working set",
    "other",
]
Phase = Literal["forward", "backward", "update"]
#: A number in a label that may be a layer's: more of the path is behind it.
_NUMBER = re.compile(r"\d+(?=\W)")
#: So many labels that differ in one number are those of layers.
_LAYERS = 3
CATEGORIES: tuple[Category, ...] = get_args(Category)
#: The seven sources of memory that users usually want to know, and the categories that each sums. Memory that XLA needs for
#: itself counts as workspace. On several devices a parameter that was gathered, and a gradient that is not yet added up over
#: the devices, are apart from what a device stores of them all the time.
SOURCES: dict[str, tuple[str, ...]] = {
    "parameters": ("parameters", "frozen parameters", "gathered parameters"),
    "gradients": ("gradients", "unreduced gradients"),
    "optimizer state": ("optimizer state",),
    "activations": ("residuals", "recompute", "working set", "logits and loss"),
    "inputs": ("inputs", "outputs"),
    "workspace": ("workspace", "collective buffers", "other"),
    "fragmentation": ("gaps",),
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One value in device memory.

    Attributes:
        name: XLA's name of the buffer's first value: an instruction and an index into its result, `loop_add_fusion.9{0}`.
            Values that XLA has in the same bytes one after the other (in-place updates, loop carries) are one buffer.
        category: what the buffer is for.
        label: a readable name: a parameter's path, a residual's checkpoint name, or else the operation
            (`mlp/wi_0/dot_general`).
        num_bytes: size in bytes. Buffers of one allocation that overlap in offset and in time share bytes.
        num_layers: number of layers whose values are stacked in the buffer; 1 if it isn't a stack.
        allocation: number of the allocation that contains the buffer.
        offset: bytes from the start of that allocation.
        first: position in the program at which the buffer is written.
        last: position at which the buffer is read for the last time, included.
        loop: innermost loop that writes the buffer first, as an index into `MemoryMap.loops`; None outside of loops.
        shape: dtype and dimensions, such as `bf16[32,1024,768]`.
        op_name: JAX scope of the operation that made the value; may be empty.
        source: `file:line` of the user's code that made the value; may be empty.
    """

    name: str
    category: Category
    label: str
    num_bytes: int
    num_layers: int
    allocation: int
    offset: int
    first: int
    last: int
    loop: int | None
    shape: str
    op_name: str
    source: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One position of the program: an instruction, its JAX scope and its line in the source."""

    name: str
    opcode: str
    op_name: str
    source: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """One request to the allocator, in bytes: an argument, an output, temporaries, a constant.

    All temporaries are one arena. On a TPU the program is one, too.
    """

    number: int
    num_bytes: int
    kind: Literal["argument", "output", "temp", "constant", "program"]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop with its first and last position in the program, both included.

    `trip_count` is None if XLA doesn't know it. `parent` is the index of the enclosing loop; None for an outermost loop.
    """

    name: str
    first: int
    last: int
    trip_count: int | None
    parent: int | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap: bytes of an allocation that no live buffer covers at the peak."""

    allocation: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class MemoryMap:
    """Every buffer of a compiled step, and the program over which the buffers are live.

    Attributes:
        program: the instruction at each position.
        phases: ranges of positions as (phase, first, last), in order, both ends included.
        allocations: allocations of device memory, in XLA's order.
        host_allocations: allocations of pinned host memory.
        loops: all loops; an outer loop comes before the loops inside it.
        buffers: buffers in device memory, sorted by allocation, offset and first position.
        host_buffers: buffers in pinned host memory, sorted the same way.
        peak: position at which the arena has the most live bytes.
        gaps: gaps at the peak.
    """

    program: tuple[Operation, ...]
    phases: tuple[tuple[Phase, int, int], ...]
    allocations: tuple[Allocation, ...]
    host_allocations: tuple[Allocation, ...]
    loops: tuple[Loop, ...]
    buffers: tuple[Buffer, ...]
    host_buffers: tuple[Buffer, ...]
    peak: int
    gaps: tuple[Gap, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of all device allocations without constants; equals `CompiledMemory.total_bytes`."""
        return sum(a.num_bytes for a in self.allocations if a.kind != "constant")

    @property
    def host_bytes(self) -> int:
        """The sum of all allocations of pinned host memory without constants."""
        return sum(a.num_bytes for a in self.host_allocations if a.kind != "constant")

    def phase_at(self, position: int) -> Phase:
        """The phase that contains `position`."""
        return next(phase for phase, first, last in self.phases if first <= position <= last)


def held(map: MemoryMap, position: int) -> list[tuple[Buffer, int]]:
    """The live buffers at `position`, each with the bytes counted for it, the largest first.

    Each byte is counted for one buffer only. If several live buffers share a byte, it counts for the buffer whose category
    comes first in `Category`.
    """
    own: dict[int, int] = {}
    live = [buffer for buffer in map.buffers if buffer.first <= position <= buffer.last and buffer.num_bytes]
    rank = {category: n for n, category in enumerate(CATEGORIES)}
    events = sorted(
        (buffer.allocation, offset, n, starts)
        for n, buffer in enumerate(live)
        for offset, starts in ((buffer.offset, True), (buffer.offset + buffer.num_bytes, False))
    )
    active: list[tuple[int, int, int]] = []
    ended: set[int] = set()
    before = (0, 0)
    for allocation, offset, n, starts in events:
        while active and active[0][2] in ended:
            heapq.heappop(active)
        if active:
            own[active[0][2]] = own.get(active[0][2], 0) + offset - before[1]
        before = (allocation, offset)
        if starts:
            heapq.heappush(active, (rank[live[n].category], -live[n].num_bytes, n))
        else:
            ended.add(n)
    return sorted(((live[n], size) for n, size in own.items() if size), key=lambda pair: -pair[1])


@dataclass(frozen=True, slots=True)
class Holder:
    """Buffers of equal layers, or a buffer alone, and the bytes counted for them.

    `label` is the label of each. Where the labels differ in the layer's number, it stands for all: `layers_*/mlp/dot_general`.
    """

    label: str
    buffers: tuple[Buffer, ...]
    num_bytes: int


def holders(buffers: Iterable[tuple[Buffer, int]]) -> list[Holder]:
    """Buffers with their bytes, the largest first, those of equal layers as one.

    So a scan stacks them. They are of one category and one shape, and their labels are the same but for one number, in at
    least three of them: `layers_0/mlp/dot_general`, `layers_1/mlp/dot_general` and so on. So `wi_0` and `wi_1` of a layer
    stay apart.
    """
    buffers = list(buffers)
    labels = _without_layer_numbers({(b.category, b.shape, b.label or b.name) for b, _ in buffers})
    groups: dict[tuple[str, str, str], list[tuple[Buffer, int]]] = {}
    for buffer, size in buffers:
        label = labels[buffer.category, buffer.shape, buffer.label or buffer.name]
        groups.setdefault((buffer.category, buffer.shape, label), []).append((buffer, size))
    found = [
        Holder(label, tuple(buffer for buffer, _ in some), sum(size for _, size in some))
        for (_, _, label), some in groups.items()
    ]
    return sorted(found, key=lambda group: -group.num_bytes)


def one_shape(groups: Iterable[Holder]) -> str:
    """The shape that all buffers of some groups have, such as `bf16[32,1024,768]`.

    It is empty where they have several.
    """
    shapes = {group.buffers[0].shape for group in groups}
    return shapes.pop() if len(shapes) == 1 else ""


def shape_change(before: str, after: str) -> str:
    """What became of a shape: `bf16[8] became f32[8]`, or `f32[8]` where it is the same.

    It is empty where a side has no shape.
    """
    return " became ".join(dict.fromkeys((before, after))) if before and after else ""


def _without_layer_numbers(keys: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """By category, shape and label, the label with `*` for the number of its layer, if any."""
    patterns = {key: [key[2][: m.start()] + "*" + key[2][m.end() :] for m in _NUMBER.finditer(key[2])] for key in keys}
    counts = Counter((category, shape, one) for (category, shape, _), some in patterns.items() for one in some)
    return {
        (category, shape, label): next((one for one in some if counts[category, shape, one] >= _LAYERS), label)
        for (category, shape, label), some in patterns.items()
    }


def attribution(map: MemoryMap) -> dict[str, int]:
    """Device bytes at the peak by category, sorted from large to small, with `gaps` at the end.

    The values sum to `MemoryMap.total_bytes`. An example of a result is `{"residuals": 4096, "gaps": 256}`.
    """
    found: dict[str, int] = {}
    for buffer, size in held(map, map.peak):
        found[buffer.category] = found.get(buffer.category, 0) + size
    found = dict(sorted(found.items(), key=lambda pair: -pair[1]))
    return found | {"gaps": sum(gap.num_bytes for gap in map.gaps)}


def by_source(attribution: dict[str, int]) -> dict[str, int]:
    """Device bytes by the seven sources of `SOURCES`, from `attribution`; the sum is the same.

    For example, 4096 bytes of `residuals` and 512 of `recompute` become 4608 bytes of `activations`.
    """
    return {source: sum(attribution.get(part, 0) for part in parts) for source, parts in SOURCES.items()}


def gaps_between(allocation: Allocation, intervals: Iterable[tuple[int, int]]) -> list[Gap]:
    """The gaps of `allocation` between `intervals`, given as (start, end) in bytes.

    For an allocation of 100 bytes, the intervals (0, 40) and (60, 100) leave one gap: offset 40, 20 bytes.
    """
    gaps, at = [], 0
    for start, end in [*sorted(intervals), (allocation.num_bytes, allocation.num_bytes)]:
        if start > at:
            gaps.append(Gap(allocation.number, at, start - at))
        at = max(at, end)
    return gaps


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of `intervals` of (start, end): (0, 10) and (5, 20) cover 20 bytes."""
    total, at = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, at))
        at = max(at, end)
    return total
