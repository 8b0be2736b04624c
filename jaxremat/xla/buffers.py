"""Who holds the memory of a compiled step: every buffer with its place, its life, and what it is for.

XLA gives a step one allocation for each argument and output, and one arena for all temporaries, in which values lie at fixed
offsets while they live. Constants are part of the program, and not of XLA's total. Program order is XLA's own schedule with
each loop's body in it once, so that a position stands for every iteration of the loop.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Category = Literal[
    "parameters",
    "optimizer state",
    "gradients",
    "residuals",
    "logits and loss",
    "recompute",
    "workspace",
    "outputs",
    "inputs",
    "working set",
    "other",
]
Phase = Literal["forward", "backward", "update"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
#: The seven sources that a person knows, and the categories that each is made of. What XLA needs for itself is workspace.
SOURCES: dict[str, tuple[str, ...]] = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer state",),
    "activations": ("residuals", "recompute", "working set", "logits and loss"),
    "inputs": ("inputs", "outputs"),
    "workspace": ("workspace", "other"),
    "fragmentation": ("gaps",),
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One value in device memory.

    Attributes:
        name: of its first value, as XLA has it: an instruction, with an index into its result (`loop_add_fusion.9{0}`).
            Values that XLA keeps in the same bytes one after the other (in-place updates, loop carries) are one buffer.
        category: what it is for.
        label: what a person calls it: a parameter's path, a residual's checkpoint name, else the operation
            (`mlp/wi_0/dot_general`).
        num_bytes: its size; buffers of one allocation that overlap in offset and in time share bytes.
        num_layers: how many layers' values are stacked in it; 1 where none are.
        allocation: number of the allocation that it lies in.
        offset: bytes from the start of that allocation.
        first: position in the program at which it is written.
        last: position at which it is read for the last time, included.
        loop: the innermost loop that it is born in, an index into `MemoryMap.loops`; None outside of loops.
        shape: dtype and dimensions, `bf16[32,1024,768]`.
        op_name: the JAX scope that it came from; may be empty.
        source: `file:line` of the user's code that made it; may be empty.
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
    """One position of the program: an instruction in XLA's schedule, with the JAX scope and the line it came from."""

    name: str
    opcode: str
    op_name: str
    source: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes that the allocator is asked for: an argument, an output, or the arena of temporaries."""

    number: int
    num_bytes: int
    kind: Literal["argument", "output", "temp", "constant"]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop: its positions in the program, both included; `trip_count` None where XLA doesn't know it."""

    name: str
    first: int
    last: int
    trip_count: int | None
    parent: int | None


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of an allocation that no live value covers at the peak."""

    allocation: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class MemoryMap:
    """Every buffer of a compiled step over its program.

    Attributes:
        program: the instruction at each position.
        phases: runs of positions, (phase, first, last), in order.
        allocations: of device memory, in XLA's order.
        host_allocations: of pinned host memory.
        loops: outer ones before inner ones.
        buffers: device memory only, by allocation, offset and birth.
        host_buffers: the same in pinned host memory.
        peak: the position at which the live bytes of the arena are most.
        gaps: at the peak.
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
        """The sum of the allocations but for constants: `CompiledMemory.total_bytes`."""
        return sum(a.num_bytes for a in self.allocations if a.kind != "constant")

    @property
    def host_bytes(self) -> int:
        """The same of pinned host memory."""
        return sum(a.num_bytes for a in self.host_allocations if a.kind != "constant")

    def phase_at(self, position: int) -> Phase:
        """The phase that `position` is in."""
        return next(phase for phase, first, last in self.phases if first <= position <= last)


def held(map: MemoryMap, position: int) -> list[tuple[Buffer, int]]:
    """Who holds the memory at `position`: each live buffer with the bytes that are its own, most first.

    Each byte is given to one buffer. Where several live ones share bytes, the one whose category says most has them, in the
    order of `Category`.
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


def attribution(map: MemoryMap) -> dict[str, int]:
    """Device bytes at the peak by category, the largest first and `gaps` last; their sum is `total_bytes`."""
    found: dict[str, int] = {}
    for buffer, size in held(map, map.peak):
        found[buffer.category] = found.get(buffer.category, 0) + size
    found = dict(sorted(found.items(), key=lambda pair: -pair[1]))
    return found | {"gaps": sum(gap.num_bytes for gap in map.gaps)}


def by_source(attribution: dict[str, int]) -> dict[str, int]:
    """Device bytes by the seven sources of `SOURCES`; the same sum."""
    return {source: sum(attribution.get(part, 0) for part in parts) for source, parts in SOURCES.items()}


def gaps_between(allocation: Allocation, intervals: Iterable[tuple[int, int]]) -> list[Gap]:
    """The bytes of `allocation` outside of all `intervals` (start, end)."""
    gaps, at = [], 0
    for start, end in [*sorted(intervals), (allocation.num_bytes, allocation.num_bytes)]:
        if start > at:
            gaps.append(Gap(allocation.number, at, start - at))
        at = max(at, end)
    return gaps


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of `intervals` (start, end)."""
    total, at = 0, 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, at))
        at = max(at, end)
    return total
