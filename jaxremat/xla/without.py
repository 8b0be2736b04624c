"""The total of a compiled step if its layers saved more, by its memory map.

Full remat recomputes a layer's forward pass in the backward pass. A policy that saves a value adds the value's bytes from
the layer's forward pass to its backward pass, and it takes bytes away: what is no longer recomputed no longer lies in memory
while the layer's gradient runs. A scan has its layers' values until its last iteration. Unrolled layers free theirs one by
one, so where the gradient of the first layers needs the most memory, nothing is left of what the last layers saved. Values that
a layer's gradient reads first are freed when it has begun.

Example: of two layers `a` and `b`, the gradient of `a` needs 100 MiB and that of `b` needs 60 MiB. While that of `b` runs,
what both saved is live, and then what `a` saved. So there are two moments: 60 MiB beside both layers, and 100 MiB beside
`a`.

This is an estimate. It takes the order of the kernels from the full-remat step. XLA orders the kernels of each step anew.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxremat.planner.shared_budget import EqualLayers
from jaxremat.planner.steps import Moment
from jaxremat.xla import hlo
from jaxremat.xla.buffers import MemoryMap
from jaxremat.xla.compile import Compilation

#: Instructions that only refer to a value.
_VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "parameter"})
#: The scopes around a layer, and then that of its checkpoint.
_CHECKPOINTED = re.compile(r"(.*?)/(?:checkpoint|rematted_computation|remat2)(?:/|$)")


def moments_of(done: Compilation, kinds: Sequence[EqualLayers]) -> Callable[[frozenset[str]], tuple[Moment, ...]]:
    """A function from names of operations to the moments of a step that runs these once.

    A name is a module path with an operation or a checkpoint name, such as `mlp/up/dot_general` or `mlp_out`, behind the prefix
    of its kind. Names that no buffer has change nothing.

    Args:
        done: a compiled step whose dump was read. The memory map is read when the function is called first.
        kinds: the layers by kind, in the program's order.
    """
    timeline = functools.cache(lambda: _timeline(done.memory_map, done.module, kinds))
    return functools.cache(lambda gone: tuple(timeline().moments(gone, done.memory.total_bytes)))


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
        alive: by kind, how many layers have what they saved in memory, at each position.
        unread: the same, for what a layer's gradient reads first.
    """

    num_positions: int
    first: np.ndarray
    last: np.ndarray
    num_bytes: np.ndarray
    recomputed: dict[str, list[int]]
    at: dict[int, frozenset[str]]
    slices: tuple[_Slice, ...]
    alive: dict[str, np.ndarray]
    unread: dict[str, np.ndarray]

    def moments(self, gone: Collection[str], total_bytes: int) -> Iterator[Moment]:
        """The moments without these names.

        None of them has fewer bytes and fewer live layers than another one.
        """
        live, least = self._live(frozenset(map(_common_name, gone))), int(self._live(frozenset()).max())
        layers = np.stack([*self.alive.values(), *self.unread.values()])
        found, start = dict[tuple[int, ...], int](), 0
        for end in [*(np.flatnonzero((layers[:, 1:] != layers[:, :-1]).any(axis=0)) + 1), self.num_positions]:
            counts = tuple(int(n) for n in layers[:, start])
            found[counts] = max(found.get(counts, 0), int(live[start:end].max()))
            start = end
        for counts, most in found.items():
            others = ((other, high) for other, high in found.items() if other != counts)
            if not any(high >= most and all(a >= b for a, b in zip(other, counts, strict=True)) for other, high in others):
                alive, unread = counts[: len(self.alive)], counts[len(self.alive) :]
                both = (dict(zip(self.alive, of, strict=True)) for of in (alive, unread))
                yield Moment(total_bytes + min(0, most - least), *both)

    def _live(self, gone: frozenset[str]) -> np.ndarray:
        """Live bytes at each position."""
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
        return change.cumsum()[: self.num_positions]


def _timeline(map: MemoryMap, module: hlo.Module, kinds: Sequence[EqualLayers]) -> _Timeline:
    arenas = {allocation.number for allocation in map.allocations if allocation.kind == "temp"}
    buffers = [buffer for buffer in map.buffers if buffer.allocation in arenas and buffer.num_bytes]
    recomputed, made, positions_of_others = defaultdict[str, list[int]](list), defaultdict[int, set[str]](set), set[int]()
    readers = _readers(module, {operation.name: position for position, operation in enumerate(map.program)})
    windows = _windows(map, kinds)
    slices = []
    for n, buffer in enumerate(buffers):
        operation = map.program[buffer.first]
        if buffer.category == "recompute":
            prefixes = [
                prefix for prefix, found in windows.items() if any(one.gradient <= buffer.first <= one.last for one in found)
            ]
            names = {_common_name(prefix + buffer.label.removeprefix(prefix)) for prefix in prefixes or windows}
            for name in names:
                recomputed[name].append(n)
            made[buffer.first] |= names
        else:
            positions_of_others.add(buffer.first)
        if operation.op_name.endswith("/dynamic_slice"):
            slices.append(_Slice(n, tuple(position for position in readers[operation.name] if position <= buffer.last)))
    alive, unread = ({kind.prefix: np.zeros(len(map.program), np.int64) for kind in kinds} for _ in range(2))
    for kind in kinds:
        found, num_layers = windows[kind.prefix], kind.num_layers
        is_by_layer = len(found) == num_layers and not kind.layer.in_scan
        for window in found if is_by_layer else [_whole(found)] * num_layers:
            alive[kind.prefix][window.saved : window.last + 1] += 1
            unread[kind.prefix][window.saved : window.gradient or window.last + 1] += 1
    return _Timeline(
        num_positions=len(map.program),
        first=np.array([buffer.first for buffer in buffers], np.int64),
        last=np.array([buffer.last for buffer in buffers], np.int64),
        num_bytes=np.array([buffer.num_bytes for buffer in buffers], np.int64),
        recomputed=dict(recomputed),
        at={position: frozenset(names) for position, names in made.items() if position not in positions_of_others},
        slices=tuple(slice for slice in slices if slice.readers),
        alive=alive,
        unread=unread,
    )


@dataclass(frozen=True)
class _Window:
    """Where a layer or a scan saves what it saves, and where it is read.

    Attributes:
        first: the first position of its forward pass.
        saved: the position after its forward pass.
        gradient: the first position of its gradient. 0 where the gradients of single layers aren't known.
        last: the last position of its gradient.
    """

    first: int
    saved: int
    gradient: int
    last: int


def _whole(windows: Sequence[_Window]) -> _Window:
    """One window in place of several, in which everything is saved from the beginning."""
    first = min(one.first for one in windows)
    return _Window(first, first, 0, max(one.last for one in windows))


def _windows(map: MemoryMap, kinds: Sequence[EqualLayers]) -> dict[str, list[_Window]]:
    """The windows of each kind of layers.

    A kind that can't be told from others by the scopes of its layers has what it saves in memory all the time.
    """
    whole = next(((first, last) for phase, first, last in map.phases if phase == "backward"), (0, len(map.program) - 1))
    runs: list[tuple[str, int, int]] = []
    for position in range(whole[0], whole[1] + 1):
        if not (found := _CHECKPOINTED.match(map.program[position].op_name)):
            continue
        loops = [loop for loop in map.loops if whole[0] <= loop.first <= position <= loop.last <= whole[1]]
        first, last = (
            min((loop.first for loop in loops), default=position),
            max((loop.last for loop in loops), default=position),
        )
        scopes = found[1]
        if runs and runs[-1][0] == scopes:
            runs[-1] = (scopes, runs[-1][1], max(runs[-1][2], last))
        else:
            runs.append((scopes, first, last))
    forward = [(position, operation.op_name) for position, operation in enumerate(map.program[: whole[0]])]
    by_kind = defaultdict[str, list[_Window]](list)
    for scopes, first, last in runs:
        own = scopes.rpartition("/")[2]
        passes = [position for position, name in forward if f"/{own}/" in name and "transpose(" not in name] or [0]
        by_kind[re.sub(r"_?\d*\)*$", "", own.rpartition("(")[2])].append(_Window(passes[0], passes[-1] + 1, first, last))
    everywhere = [_Window(0, 0, 0, runs[-1][2] if runs else len(map.program) - 1)]
    if len(kinds) == 1:
        return {kinds[0].prefix: [window for found in by_kind.values() for window in found] or everywhere}
    named = {kind.prefix: by_kind.get(re.sub(r"_?\d*/$", "", kind.prefix), everywhere) for kind in kinds}
    if everywhere in named.values() and len(by_kind) == len(kinds):  # the gradient runs from the last kind to the first
        return {kind.prefix: found for kind, found in zip(kinds, [*by_kind.values()][::-1], strict=True)}
    return named


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
