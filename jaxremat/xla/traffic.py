"""Counts the bytes that one launch of a kernel moves.

A kernel that reads one slice of a large buffer reads only the bytes of the slice. A kernel that updates a slice in place
writes only the slice. A fusion may need less of an operand than the whole: the count starts at the fusion's result and goes
back to its operands.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jaxremat.chips.catalog import may_have_workspace
from jaxremat.xla.hlo import HOST_MEMORY, Computation, Instruction, Module, Shape

_SLICES = ("slice", "dynamic-slice", "gather")
_WHOLE_OPERANDS = re.compile("dot|scaled-dot|convolution|custom-call|reduce-window|sort|scatter|fft|tuple|get-tuple-element")
_PROPORTIONAL = ("reduce", "concatenate", "pad", "dynamic-update-slice")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch: read and written in device memory, and moved to or from the host."""

    read: int = 0
    written: int = 0
    host: int = 0


def traffic_of(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """The bytes that one launch of `instruction` moves."""
    outside = computation.operand_shapes(instruction)
    if instruction.opcode.startswith("fusion"):
        fused = module.computations[instruction.called[0]]
        demand = _demanded_elements(module, fused)
        reads = []
        for parameter, shapes in zip(fused.parameters, outside, strict=False):
            num_bytes = sum(s.num_bytes for s in shapes) * demand[parameter.name] // max(parameter.num_elements, 1)
            reads.append((num_bytes, _space((*shapes, *parameter.shapes))))
        return _sum_traffic(module, reads, _fusion_writes(fused, fused.root))
    operands = [(sum(s.num_bytes for s in shapes), _space(shapes)) for shapes in outside]
    opcode = instruction.opcode.removesuffix("-start")
    results = [(s.num_bytes, s.memory_space) for s in _results(computation, instruction)]
    if instruction.runs_on_host:
        return Traffic(host=sum(num_bytes for num_bytes, _ in (*operands, *results)))
    if opcode == "dynamic-update-slice":
        update = operands[1][0]
        return _sum_traffic(module, operands[1:], [(update, operands[0][1])])
    if opcode == "scatter":
        num_targets = (len(operands) - 1) // 2
        updates = operands[num_targets + 1 :]
        return _sum_traffic(module, operands[num_targets:] + updates, updates)
    if opcode in _SLICES:
        return _sum_traffic(module, [(results[0][0], operands[0][1]), *operands[1:]], results)
    return _sum_traffic(module, operands, results)


def _sum_traffic(module: Module, reads: Iterable[tuple[int, int]], writes: Iterable[tuple[int, int]]) -> Traffic:
    """Sums reads and writes, each given as (bytes, memory space).

    On a TPU, what is in memory on the chip itself doesn't count.
    """
    reads, writes = list(reads), list(writes)

    def in_memory(some: list[tuple[int, int]]) -> int:
        return sum(n for n, space in some if space == 0 or (space != HOST_MEMORY and not module.is_tiled))

    host = sum(num_bytes for num_bytes, space in reads + writes if space == HOST_MEMORY)
    return Traffic(read=in_memory(reads), written=in_memory(writes), host=host)


def _space(shapes: Iterable[Shape]) -> int:
    """The memory space of arrays: the host's if one of them is there, or else the first one's."""
    spaces = [s.memory_space for s in shapes]
    return HOST_MEMORY if HOST_MEMORY in spaces else next(iter(spaces), 0)


def _results(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """The arrays that a launch writes.

    The result of an async start also lists its operands and a context. Those are left out, and so is a library's workspace.
    """
    shapes = instruction.shapes
    if instruction.opcode == "copy-start":  # (destination, source, context)
        return shapes[:1]
    if instruction.opcode.endswith("-start"):  # ((operands), results, context)
        num_operands = sum(len(s) for s in computation.operand_shapes(instruction))
        return shapes[num_operands:-1] if len(shapes) > num_operands + 1 else shapes[num_operands:]
    is_library = may_have_workspace(instruction.custom_call_target)
    if is_library and len(shapes) > 1 and shapes[-1].dtype in ("s8", "u8"):
        return shapes[:-1]
    return shapes


def _fusion_writes(fused: Computation, value: Instruction) -> list[tuple[int, int]]:
    """Pairs (bytes, memory space) that a fusion writes for an element of its root."""
    if value.opcode == "tuple":
        return [pair for name in value.operands for pair in _fusion_writes(fused, fused.by_name[name])]
    if (updated := updated_in_place(fused, value)) is not None:
        return [(updated, _space(value.shapes))] if updated else []
    if value.opcode == "get-tuple-element":
        source = fused.by_name[value.operands[0]]
        if source.opcode == "custom-call" and value.tuple_index >= len(_results(fused, source)):
            return []
    return [(s.num_bytes, s.memory_space) for s in _results(fused, value)]


def updated_in_place(fused: Computation, value: Instruction) -> int | None:
    """Bytes written in place, if `value` is an updated parameter of the fusion, or None.

    The result is 0 for a parameter that the fusion returns unchanged. XLA has already copied every buffer that must not be
    overwritten.
    """
    if value.opcode == "parameter":
        return 0
    if value.opcode == "bitcast":
        return updated_in_place(fused, fused.by_name[value.operands[0]])
    if value.opcode in ("dynamic-update-slice", "scatter"):
        before = updated_in_place(fused, fused.by_name[value.operands[0]])
        update = fused.by_name[value.operands[1 if value.opcode == "dynamic-update-slice" else -1]]
        return None if before is None else before + update.num_bytes
    return None


def _demanded_elements(module: Module, fused: Computation) -> dict[str, int]:
    """How many elements of each value a fused computation needs, by name.

    The count starts at the root and goes back to the parameters. For example, a fusion whose root slices 10 of 1000 elements
    of a parameter needs 10 elements of that parameter.
    """
    demand = {i.name: 0 for i in fused.instructions}
    demand[fused.root.name] = fused.root.num_elements
    for value in reversed(fused.instructions):  # an instruction comes after its operands
        if demand[value.name] == 0:
            continue
        for position, name in enumerate(value.operands):
            operand = fused.by_name[name]
            needed = _operand_demand(module, fused, value, operand, position, demand[value.name])
            demand[name] = min(operand.num_elements, demand[name] + needed)
    return demand


def _operand_demand(
    module: Module, fused: Computation, value: Instruction, operand: Instruction, position: int, demanded: int
) -> int:
    """How many elements of operand `position` `demanded` elements of `value` need."""
    if value.opcode == "fusion":
        nested = module.computations[value.called[0]]
        return _demanded_elements(module, nested)[nested.parameters[position].name]
    if value.opcode in _SLICES:
        return demanded if position == 0 else operand.num_elements
    if value.opcode == "dynamic-update-slice" and position == 0:
        if updated_in_place(fused, value) is not None:
            return 0
        return max(demanded - fused.by_name[value.operands[1]].num_elements, 0)
    if value.opcode == "scatter" and position == 0 and updated_in_place(fused, value) is not None:
        return fused.by_name[value.operands[-1]].num_elements
    if _WHOLE_OPERANDS.fullmatch(value.opcode):
        return operand.num_elements
    if value.opcode in _PROPORTIONAL:
        return -(-operand.num_elements * demanded // max(value.num_elements, 1))
    return demanded  # elementwise, bitcast, transpose, broadcast: at most one element for each; the caller caps the sum
