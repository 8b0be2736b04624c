"""Who holds the memory of a compiled step: every buffer with its place, its life, and what it is for.

XLA gives a step one allocation for each argument and output, and one arena for all temporaries, in which values lie at fixed
offsets while they live. Program order is XLA's own schedule with each loop's body in it once, so that a position stands for
every iteration of the loop.
"""

from dataclasses import dataclass
from typing import Literal

Category = Literal[
    "parameters",
    "optimizer state",
    "gradients",
    "residuals",
    "recompute",
    "working set",
    "logits and loss",
    "inputs",
    "outputs",
    "workspace",
    "other",
]
Phase = Literal["forward", "backward", "update"]


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
class Hole:
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
        allocations: in XLA's order; their device bytes sum to `CompiledMemory.total_bytes`.
        loops: outer ones before inner ones.
        buffers: device memory only, by allocation, offset and birth.
        host_buffers: the same in pinned host memory.
        peak: the position at which the live bytes of the arena are most.
        holes: at the peak.
    """

    program: tuple[Operation, ...]
    phases: tuple[tuple[Phase, int, int], ...]
    allocations: tuple[Allocation, ...]
    loops: tuple[Loop, ...]
    buffers: tuple[Buffer, ...]
    host_buffers: tuple[Buffer, ...]
    peak: int
    holes: tuple[Hole, ...]
