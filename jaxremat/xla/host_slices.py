"""Slices of stacks in host memory in a compiled program's loops, and the bytes each copies.

An offloaded value of a layer in a scan is a slice of a stack in host memory. The forward loop writes layer i with a
`dynamic-update-slice`, and the backward loop reads it with a `dynamic-slice`. The program computes the index of each. XLA may
write down next to it, in a `dynamic_slice_config`, where the iterations copy from. The copies then follow what is written down:

    dynamic-slice(%stack, %index, ...), backend_config={..."byte_offset":"0","byte_stride":"4096"...}

`misread` lists the slices whose written bytes aren't those of the computed index (`policy/offload.py` says how XLA comes to
that). The index is computed here from the text of the program, with the integers of each iteration.

References:
    xla/backends/gpu/transforms/dynamic_slice_annotator.h, xla/service/gpu/backend_configs.proto (`DynamicSliceConfig`).
"""

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from jaxremat.xla.hlo import Computation, Instruction, Module, Shape

#: An operation's operands, one integer each, and its result.
_INTEGERS: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negate": operator.neg,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "select": lambda condition, yes, no: yes if condition else no,
    "clamp": lambda low, x, high: min(max(x, low), high),
    "divide": lambda x, y: math.trunc(Fraction(x, y)) if y else -1,
    "remainder": lambda x, y: x - y * math.trunc(Fraction(x, y)) if y else x,
} | dict.fromkeys(("copy", "bitcast", "reshape", "convert", "broadcast", "copy-done", "copy-start"), lambda x: x)
_COMPARISONS: dict[str, Callable[..., int]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_DIRECTION = re.compile(r"direction=(\w+)")
_CONFIG = re.compile(r'"dynamic_slice_config":\{(.*)')
_BYTES = re.compile(r'"byte_(offset|stride)":"(-?\d+)"')
_LOOP = re.compile(r'"loop_index":"?(\d+)')
#: The iterations of a loop around the one that is looked at, and of a loop of unknown length.
_FEW_ITERATIONS = 3


@dataclass(frozen=True)
class HostSlice:
    """A slice of a stack in host memory, inside of a loop.

    Attributes:
        name: XLA's name of the instruction.
        stack: the stack.
        is_write: whether the slice is written (`dynamic-update-slice`) or read.
        op_name: JAX scope of the instruction.
        computed: the first byte of the slice in each iteration, by the index that the program computes. Iterations of several
            loops, one in the other, follow one another. None for an iteration whose index isn't known.
        written: the same by the bytes that XLA wrote down. None if it wrote none down, and then the computed ones are used.
    """

    name: str
    stack: Shape
    is_write: bool
    op_name: str
    computed: tuple[int | None, ...]
    written: tuple[int, ...] | None

    @property
    def is_right(self) -> bool:
        """Whether every iteration copies the bytes of the index that the program computes."""
        return self.written is None or self.written == self.computed

    @property
    def used(self) -> tuple[int | None, ...]:
        """The first byte of the slice in each iteration, as the copies find it."""
        return self.computed if self.written is None else self.written

    def __str__(self) -> str:
        """A phrase such as `%dynamic_slice.9 reads bf16[6] from byte 0, 64; the program says 64, 0`."""
        dims = ",".join(map(str, self.stack.dims))
        used, computed = (
            ", ".join("?" if byte is None else str(byte) for byte in some[:_FEW_ITERATIONS])
            for some in (self.used, self.computed)
        )
        does = "writes" if self.is_write else "reads"
        return f"%{self.name} {does} {self.stack.dtype}[{dims}] from byte {used}; the program says {computed}"


def host_slices(module: Module) -> tuple[HostSlice, ...]:
    """The slices of stacks in host memory in the loops of a program, in no order."""
    return tuple(_Frame(module, module.entry_computation).slices())


def misread(module: Module) -> tuple[HostSlice, ...]:
    """The slices that copy other bytes in some iteration than those of the program's index.

    An index that isn't understood counts as one of other bytes.
    """
    return tuple(found for found in host_slices(module) if not found.is_right)


@dataclass(frozen=True, eq=False)
class _Frame:
    """A computation with the call that runs it.

    Attributes:
        module: the program.
        computation: the computation.
        outer: the frame of the caller; None for the entry.
        call: the instruction that calls the computation; None for the entry.
        operands: for each parameter the operand of the call, as its position.
        values: the integers that are known, by instruction, element of a tuple, and iterations.
    """

    module: Module
    computation: Computation
    outer: "_Frame | None" = None
    call: Instruction | None = None
    operands: tuple[int, ...] = ()
    values: dict[tuple[str, int | None, tuple[int, ...]], int | None] = field(default_factory=dict)

    @functools.cached_property
    def loops(self) -> tuple[Instruction, ...]:
        """The loops that run the computation, outermost first."""
        around = self.outer.loops if self.outer else ()
        return (*around, self.call) if self.call and self.call.opcode == "while" else around

    def slices(self) -> Iterator[HostSlice]:
        """The slices of stacks in host memory, if a loop runs the computation, and of what it calls."""
        for i in self.computation.instructions:
            if self.loops and i.opcode in ("dynamic-slice", "dynamic-update-slice"):
                stack, *_ = self.computation.by_name[i.operands[0]].shapes
                if stack.on_host:
                    yield self._slice(i, stack)
            for inner in self.called(i):
                yield from inner.slices()

    def called(self, i: Instruction) -> Iterator["_Frame"]:
        """The frames of the computations that an instruction runs, but for the condition of a loop."""
        if i.opcode == "while":
            yield self._inner(i.called[1], i, (0,))
        elif i.opcode == "conditional":
            for n, name in enumerate(i.called):
                yield self._inner(name, i, (n + 1,))
        elif i.opcode in ("fusion", "call") or i.opcode.endswith("-start"):
            for name in i.called:
                yield self._inner(name, i, tuple(range(len(i.operands))))

    def _inner(self, name: str, call: Instruction, operands: tuple[int, ...]) -> "_Frame":
        return _Frame(self.module, self.module.computations[name], self, call, operands)

    def _slice(self, i: Instruction, stack: Shape) -> HostSlice:
        is_write, config = i.opcode == "dynamic-update-slice", _config(i)
        part, *_ = self.computation.by_name[i.operands[1]].shapes if is_write else i.shapes
        offset, stride, loop = config or (0, 0, 0)
        own = len(self.loops) - 1 - loop
        counts = [range(loop.trip_count or _FEW_ITERATIONS) for loop in self.loops]
        iterations = list(
            itertools.product(*(times if n == own else times[:_FEW_ITERATIONS] for n, times in enumerate(counts)))
        )
        dims = list(zip(stack.dims, part.dims, _strides(stack), strict=True))
        last = sum((size - length) * step for size, length, step in dims)

        def computed(at: tuple[int, ...]) -> int | None:
            found = [self.operand(i, 1 + is_write + n, None, at) for n in range(len(dims))]
            known = [index for index in found if index is not None]
            if len(known) < len(dims):
                return None
            of_dims = zip(known, dims, strict=True)
            return sum(min(max(index, 0), size - length) * step for index, (size, length, step) in of_dims)

        return HostSlice(
            name=i.name,
            stack=stack,
            is_write=is_write,
            op_name=i.op_name,
            computed=tuple(map(computed, iterations)),
            written=tuple(min(max(offset + stride * at[own], 0), last) for at in iterations) if config else None,
        )

    def value(self, name: str, element: int | None, at: tuple[int, ...]) -> int | None:
        """The integer that an instruction, or an element of its tuple, is in one iteration.

        It is None for what isn't an integer, or isn't understood.
        """
        key = name, element, at
        if key not in self.values:
            self.values[key] = self._computed(self.computation.by_name[name], element, at)
        return self.values[key]

    def operand(self, i: Instruction, n: int, element: int | None, at: tuple[int, ...]) -> int | None:
        """The integer that an operand of an instruction is, or an element of its tuple."""
        own = i.operand_elements[n] if i.operand_elements else None
        return self.value(i.operands[n], element if own is None else own, at)

    def _computed(self, i: Instruction, element: int | None, at: tuple[int, ...]) -> int | None:
        match i.opcode:
            case "constant":
                return i.value
            case "parameter":
                return self._parameter(i.parameter_index or 0, element, at)
            case "get-tuple-element":
                return self.operand(i, 0, i.tuple_index, at)
            case "tuple":
                return None if element is None else self.operand(i, element, None, at)
            case "fusion" | "call":
                (inner,) = self.called(i)
                return inner.value(inner.computation.root.name, element, at)
        direction = _DIRECTION.search(i.attrs) if i.opcode == "compare" else None
        operation = _COMPARISONS[direction[1]] if direction else _INTEGERS.get(i.opcode)
        if operation is None:
            return None
        found = [self.operand(i, n, None, at) for n in range(len(i.operands))]
        known = [number for number in found if number is not None]
        return int(operation(*known)) if len(known) == len(found) else None

    def _parameter(self, number: int, element: int | None, at: tuple[int, ...]) -> int | None:
        """The integer that a parameter is.

        A loop's iteration gets it from the one before, and the first one from the caller.
        """
        if self.outer is None or self.call is None:
            return None
        if self.call.opcode == "while":
            *around, iteration = at
            if iteration:
                return self.value(self.computation.root.name, element, (*around, iteration - 1))
            at = tuple(around)
        return self.outer.operand(self.call, self.operands[number], element, at)


def _config(i: Instruction) -> tuple[int, int, int] | None:
    """XLA's numbers of a slice: first byte, bytes between iterations, and its loop from inside."""
    config = _CONFIG.search(i.attrs)
    if config is None:
        return None
    numbers: dict[str, int] = {}
    for name, number in _BYTES.findall(config[1]):
        numbers[name] = numbers.get(name, 0) + int(number)  # jax 0.12 has them in "linear" too, and zeros outside of it
    loop = _LOOP.search(config[1])
    return numbers.get("offset", 0), numbers.get("stride", 0), int(loop[1]) if loop else 0


def _strides(stack: Shape) -> tuple[int, ...]:
    """Bytes from one index of each dimension to the next."""
    steps, size = [0] * len(stack.dims), stack.num_bytes // max(1, stack.num_elements)
    for dim in stack.layout or range(len(stack.dims) - 1, -1, -1):
        steps[dim], size = size, size * stack.dims[dim]
    return tuple(steps)
