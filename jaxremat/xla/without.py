"""The total of a compiled step if some operations weren't recomputed, by its memory map.

Full remat recomputes a layer's forward pass in the backward pass. A policy that saves a value adds the value's bytes,
and it takes bytes away: what is no longer recomputed no longer lies in memory while the layer's gradient runs.

Example: at the peak of a full-remat step, 64 MiB of `mlp/up/dot_general` are live, which a layer recomputed. A policy saves
them. The peak is then expected to be 64 MiB lower, besides the saved bytes, unless another part of the step is now the peak.

This is an estimate. It takes the order of the kernels from the full-remat step. XLA orders the kernels of each step anew.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from jaxremat.xla import hlo
from jaxremat.xla.buffers import MemoryMap
from jaxremat.xla.compile import Compilation

#: Instructions that only refer to a value.
_VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "parameter"})


def total_without(done: Compilation) -> Callable[[frozenset[str]], int]:
    """A function from names of operations to a step's total bytes without their recompute.

    A name is a module path with an operation or a checkpoint name, such as `mlp/up/dot_general` or `mlp_out`. Names that no
    buffer has change nothing.

    Args:
        done: a compiled step whose dump was read. The memory map is read when the function is called first.
    """
    timeline = functools.cache(lambda: _timeline(done.memory_map, done.module))
    return functools.cache(lambda gone: done.memory.total_bytes + timeline().change_bytes(gone))


@dataclass(frozen=True)
class _Slice:
    """A layer's slice of a stack, which XLA copies for `readers`, positions in the program."""

    buffer: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class _Timeline:
    """The buffers of the arena over the program.

    Attributes:
        num_positions: instructions in the program.
        first, last, num_bytes: of each buffer.
        recomputed: by name, the buffers of recomputed values.
        at: by position, the names of the recomputed values that are made there. Positions that make anything else have none.
        slices: the slices of stacks.
    """

    num_positions: int
    first: np.ndarray
    last: np.ndarray
    num_bytes: np.ndarray
    recomputed: dict[str, list[int]]
    at: dict[int, frozenset[str]]
    slices: tuple[_Slice, ...]

    def change_bytes(self, gone: Collection[str]) -> int:
        """Bytes by which the peak changes without these names. Not above 0."""
        return min(0, self._peak(frozenset(map(_common_name, gone))) - self._peak(frozenset()))

    def _peak(self, gone: frozenset[str]) -> int:
        first, num_bytes = self.first.copy(), self.num_bytes.copy()
        num_bytes[[buffer for name in gone for buffer in self.recomputed.get(name, ())]] = 0
        for part in self.slices:
            left = [position for position in part.readers if not (made := self.at.get(position)) or not made <= gone]
            if left:
                first[part.buffer] = max(first[part.buffer], min(left))
            else:
                num_bytes[part.buffer] = 0
        change = np.zeros(self.num_positions + 1, np.int64)
        np.add.at(change, first, num_bytes)
        np.add.at(change, self.last + 1, -num_bytes)
        return int(change.cumsum().max())


def _timeline(map: MemoryMap, module: hlo.Module) -> _Timeline:
    arenas = {allocation.number for allocation in map.allocations if allocation.kind == "temp"}
    buffers = [buffer for buffer in map.buffers if buffer.allocation in arenas and buffer.num_bytes]
    recomputed, made, positions_of_others = defaultdict[str, list[int]](list), defaultdict[int, set[str]](set), set[int]()
    readers = _readers(module, {operation.name: position for position, operation in enumerate(map.program)})
    slices = []
    for n, buffer in enumerate(buffers):
        operation = map.program[buffer.first]
        if buffer.category == "recompute":
            recomputed[_common_name(buffer.label)].append(n)
            made[buffer.first].add(_common_name(buffer.label))
        else:
            positions_of_others.add(buffer.first)
        if operation.op_name.endswith("/dynamic_slice"):
            slices.append(_Slice(n, tuple(position for position in readers[operation.name] if position <= buffer.last)))
    return _Timeline(
        num_positions=len(map.program),
        first=np.array([buffer.first for buffer in buffers], np.int64),
        last=np.array([buffer.last for buffer in buffers], np.int64),
        num_bytes=np.array([buffer.num_bytes for buffer in buffers], np.int64),
        recomputed=dict(recomputed),
        at={position: frozenset(names) for position, names in made.items() if position not in positions_of_others},
        slices=tuple(slice for slice in slices if slice.readers),
    )


def _readers(module: hlo.Module, positions: dict[str, int]) -> dict[str, list[int]]:
    """By instruction, the positions that read its result, themselves or through a view."""
    readers = defaultdict[str, list[int]](list)
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in _VIEWS or instruction.name not in positions:
                continue
            for name in instruction.operands:
                read = computation.by_name[name]
                while read.opcode in ("bitcast", "get-tuple-element") and read.operands:
                    read = computation.by_name[read.operands[0]]
                readers[read.name].append(positions[instruction.name])
    return readers


def _common_name(name: str) -> str:
    """A name that JAX and XLA share: `btd,edf->btef/dot_general` is `btd_edf_btef/dot_general`."""
    return re.sub(r"[^\w/.]+", "_", name)
