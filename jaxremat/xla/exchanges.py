"""The values that a compiled step's collectives exchange: parameters, gradients and others.

A device of a mesh has a part of each parameter. Before a matmul it gathers the whole kernel from the others, and after the
backward pass the gradients of all devices are added up. Both are collectives. What a collective exchanges follows from the
arguments that its operand depends on: a gathered parameter depends on parameters alone.

    exchanges(module, mesh)[0]  # Exchange("all-gather", "parameter", ..., arguments=("state.params['output']",))
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxremat.mesh.axes import MeshAxes
from jaxremat.xla.categories import PARAMETERS, CollectiveUse, Roles, phase_of, role_of
from jaxremat.xla.collectives import CollectiveKind, Groups, collective_of, is_collective
from jaxremat.xla.dependence import Dependences, dependences
from jaxremat.xla.flops import executed
from jaxremat.xla.hlo import Computation, Instruction, Module
from jaxremat.xla.origin import Caller, find_callers

#: What an array is that a collective sends. parameter: a part of one, that is gathered. gradient: that of a parameter, which is
#: added up over devices. value: any other.
Exchanged = Literal["parameter", "gradient", "value"]
_REFERENCES = frozenset({"bitcast", "get-tuple-element"})


@dataclass(frozen=True)
class Exchange:
    """One array that a collective sends.

    Attributes:
        kind: which collective it is.
        what: what the array is.
        name: name of the instruction.
        operand: number of the array among the instruction's operands.
        read: the value that the device sends: the name of the instruction that makes it, and the index into its result.
        dims: dimensions of what the device sends.
        num_bytes: bytes of the whole array: after an all-gather, and before any other collective.
        times: number of times that it runs in a step.
        groups: the devices of each group.
        arguments: paths of the arguments that the array depends on, sorted.
        op_name: JAX scope of the operation that needs the result, or of the one that made the array; may be empty.
        frame: `stack_frame_id` of that operation; 0 if XLA has none.
    """

    kind: CollectiveKind
    what: Exchanged
    name: str
    operand: int
    read: tuple[str, tuple[int, ...]]
    dims: tuple[int, ...]
    num_bytes: int
    times: int
    groups: Groups
    arguments: tuple[str, ...]
    op_name: str
    frame: int


def exchanges(module: Module, mesh: MeshAxes, roles: Roles | None = None) -> tuple[Exchange, ...]:
    """Each array that the collectives of a step on `mesh` send, in no order.

    `roles` is as for `role_of`.
    """
    if not any(is_collective(i) for c in module.computations.values() for i in c.instructions):
        return ()
    known, callers = dependences(module), find_callers(module)
    arguments = module.entry_computation.parameters
    params = frozenset(i.name for i in arguments if role_of(i.op_name or i.name, roles) in PARAMETERS)
    sizes = _parameter_sizes(tuple(argument for argument in arguments if argument.name in params))
    return tuple(
        exchange
        for computation, instruction, times in executed(module)
        if is_collective(instruction)
        for exchange in _of_instruction(module, mesh, known, callers, params, sizes, computation, instruction, times)
    )


@dataclass(frozen=True)
class ExchangedValue:
    """A collective's kind of value, and the path of the parameter it gathers, or else empty."""

    use: CollectiveUse
    path: str = ""


def exchanged_values(
    module: Module, mesh: MeshAxes, roles: Roles | None = None
) -> dict[tuple[str, int | None], ExchangedValue]:
    """The values that collectives make, and the gradients that they read.

    A key has the name of the instruction that makes a value, and the last index into the instruction's result. The index is
    None for an instruction that has one result. What waits for a collective has the results of what started the collective.
    """
    uses: dict[Exchanged, CollectiveUse] = {"parameter": "gathered", "gradient": "added up", "value": "exchanged"}
    instructions = {i.name: i for c in module.computations.values() for i in c.instructions}
    waits = {i.operands[0]: i.name for i in instructions.values() if i.opcode.endswith("-done")}
    found: dict[tuple[str, int | None], ExchangedValue] = {}
    for exchange in exchanges(module, mesh, roles):
        number = exchange.operand if len(instructions[exchange.name].operands) > 1 else None
        path = exchange.arguments[0] if exchange.what == "parameter" and len(exchange.arguments) == 1 else ""
        for name in (exchange.name, waits.get(exchange.name, exchange.name)):
            found[name, number] = ExchangedValue(uses[exchange.what], path)
        if exchange.what == "gradient":
            name, index = exchange.read
            found.setdefault((name, index[-1] if index else None), ExchangedValue("to add up"))
    return found


def _of_instruction(
    module: Module,
    mesh: MeshAxes,
    known: Dependences,
    callers: Mapping[str, Caller],
    params: frozenset[str],
    sizes: set[int],
    computation: Computation,
    instruction: Instruction,
    times: int,
) -> Iterator[Exchange]:
    collective = collective_of(computation, instruction)
    groups = collective.groups or (tuple(range(mesh.num_devices)),)
    arguments = module.entry_computation.parameters
    for number, operand in enumerate(instruction.operands):
        element = instruction.operand_elements[number] if instruction.operand_elements else None
        shapes = computation.by_name[operand].shapes
        shape = shapes[0] if element is None else shapes[element]
        depends_on = [arguments[n] for n in known.of(operand, element)]
        maker, index = _maker(callers, computation, operand, () if element is None else (element,))
        what: Exchanged = "value"
        if collective.kind == "all-gather" and depends_on and params.issuperset(i.name for i in depends_on):
            what = "parameter"
        elif (
            collective.kind in ("reduce-scatter", "all-reduce")
            and _size_after(instruction, number) in sizes
            and phase_of(instruction.op_name or maker.op_name) == "backward"
            and len(mesh.places(groups[0], mesh.batch_axes)) > 1  # and not devices that share their sequences
        ):
            what = "gradient"
        size = len(groups[0]) if collective.kind == "all-gather" else 1
        yield Exchange(
            kind=collective.kind,
            what=what,
            name=instruction.name,
            operand=number,
            read=(maker.name, index),
            dims=shape.dims,
            num_bytes=shape.num_bytes * size,
            times=times,
            groups=groups,
            arguments=tuple(sorted(argument.op_name or argument.name for argument in depends_on)),
            op_name=instruction.op_name or maker.op_name,
            frame=instruction.frame or maker.frame,
        )


def _parameter_sizes(params: tuple[Instruction, ...]) -> set[int]:
    """Elements of each parameter on a device, and of a layer of a stacked one.

    Scalars don't count.
    """
    shapes = [shape for param in params for shape in param.shapes]
    of_layers = (shape.num_elements // shape.dims[0] for shape in shapes if len(shape.dims) > 1)
    return {shape.num_elements for shape in shapes}.union(of_layers) - {1}


def _size_after(instruction: Instruction, number: int) -> int:
    """Elements of the result that belongs to operand `number`.

    What starts a collective may list its operands first.
    """
    return instruction.shapes[len(instruction.shapes) - len(instruction.operands) + number].num_elements


def _maker(
    callers: Mapping[str, Caller], computation: Computation, name: str, index: tuple[int, ...]
) -> tuple[Instruction, tuple[int, ...]]:
    """The instruction that makes a value, and the index in its result, past mere references."""
    instruction = computation.by_name[name]
    while True:
        if instruction.opcode in _REFERENCES:
            index = (instruction.tuple_index, *index) if instruction.opcode == "get-tuple-element" else index
            name = instruction.operands[0]
        elif instruction.opcode == "parameter" and computation.name in callers:
            number = instruction.parameter_index or 0
            computation, caller = callers[computation.name]
            name = caller.operands[number]
        else:
            return instruction, index
        instruction = computation.by_name[name]
