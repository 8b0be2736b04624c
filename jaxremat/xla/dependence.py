"""Finds which arguments of a compiled program each of its values depends on.

For example, in a step with the arguments 0, a kernel, and 1, the tokens, the kernel's cast to bfloat16 depends on {0}, and the
result of its matmul with the embedded tokens on {0, 1}. What is gathered from several devices can so be told apart: a
parameter, or a value that was computed from the batch.

A loop's carry is followed element by element. What a loop only passes on, such as the stack of a parameter's layers, depends on
no other element of the carry.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxremat.xla.hlo import Computation, Instruction, Module

#: The arguments as the bits of a number: 0b101 is the arguments 0 and 2. A tuple has a number or a tuple for each element.
_Bits = int | tuple["_Bits", ...]
_PASSED_ON = frozenset(
    {"optimization-barrier", "opt-barrier", "all-gather-done", "all-reduce-done", "async-update", "async-done", "call-done"}
)


@dataclass(frozen=True)
class Dependences:
    """By the name of an instruction, the arguments that each element of its result depends on."""

    bits: dict[str, _Bits]

    def of(self, name: str, index: int | None = None) -> frozenset[int]:
        """Positions of the arguments that a value depends on.

        Args:
            name: of the instruction that makes the value.
            index: element of the instruction's result. None for all elements.
        """
        bits = self.bits.get(name, 0)
        some = _merged(bits if index is None or isinstance(bits, int) else bits[index])
        return frozenset(n for n in range(some.bit_length()) if some >> n & 1)


def dependences(module: Module) -> Dependences:
    """What the values of `module` depend on. Instructions inside fusions aren't listed."""
    found: dict[str, _Bits] = {}
    entry = module.entry_computation
    _run(module, entry, [1 << n for n in range(len(entry.parameters))], found)
    return Dependences(found)


def _run(module: Module, computation: Computation, arguments: Sequence[_Bits], found: dict[str, _Bits]) -> _Bits:
    """Notes the values of `computation` in `found`, and returns what its result depends on."""
    for i in computation.instructions:
        if i.parameter_index is not None:
            found[i.name] = arguments[i.parameter_index]
        else:
            found[i.name] = _result(module, i, [_operand(found, i, n) for n in range(len(i.operands))], found)
    return found[computation.root.name]


def _operand(found: dict[str, _Bits], instruction: Instruction, number: int) -> _Bits:
    bits = found[instruction.operands[number]]
    element = instruction.operand_elements[number] if instruction.operand_elements else None
    return bits if element is None or isinstance(bits, int) else bits[element]


def _result(module: Module, instruction: Instruction, operands: list[_Bits], found: dict[str, _Bits]) -> _Bits:
    match instruction.opcode:
        case "tuple":
            return tuple(operands)
        case "get-tuple-element":
            (whole,) = operands
            return whole if isinstance(whole, int) else whole[instruction.tuple_index]
        case "while":
            return _loop(module, module.computations[instruction.called[-1]], operands[0], found)
        case "call" | "call-start" | "async-start":
            return _run(module, module.computations[instruction.called[0]], operands, found)
        case "fusion" if len(instruction.shapes) > 1:
            return _run(module, module.computations[instruction.called[0]], operands, {})
        case opcode if opcode in _PASSED_ON:
            return operands[0]
        case "all-gather" | "all-gather-start" | "all-reduce" | "all-reduce-start" if len(operands) > 1:
            return tuple(operands)
    return _merged(operands)


def _loop(module: Module, body: Computation, carry: _Bits, found: dict[str, _Bits]) -> _Bits:
    """What a loop's carry depends on after any number of iterations."""
    while (after := _joined(carry, _run(module, body, [carry], found))) != carry:
        carry = after
    return carry


def _joined(some: _Bits, others: _Bits) -> _Bits:
    if isinstance(some, tuple) and isinstance(others, tuple):
        return tuple(_joined(a, b) for a, b in zip(some, others, strict=True))
    return _merged((some, others))


def _merged(bits: _Bits | Iterable[_Bits]) -> int:
    if isinstance(bits, int):
        return bits
    merged = 0
    for some in bits:
        merged |= _merged(some)
    return merged
