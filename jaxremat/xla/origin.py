"""Finds the operation of the user's program that made a value, and a label for the value.

XLA fuses, copies and stacks values. So the instruction that owns a buffer is often a fusion, a change of shape, or the write
of one layer's slice into a stack. `find_origin` walks back from that instruction to the operation in the user's program. For
example, the fusion `loop_fusion.9`, which writes a slice into a stack of 12 layers, leads to an operation with the scope
`jit(step)/jvp(Net)/layers/while/body/mlp/wi_0/dot_general`. Its label is `mlp/wi_0/dot_general`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxremat.policy.names import OPAQUE, WrittenName
from jaxremat.xla import hlo
from jaxremat.xla.hlo import STRUCTURE, plain_scope

#: Instructions whose result has the values of their first operand, perhaps in another layout or place.
_SAME = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "reduce-precision", "copy-done", "copy-start", "optimization-barrier"}
)
#: Instructions that XLA may add itself, to cast, pad or cut an operand. Those that XLA adds have no scope.
_XLAS = frozenset({"convert", "pad", "slice", "select", "broadcast"})
#: Instructions that only refer to a value and don't make one.
_PLACES = frozenset({"parameter", "get-tuple-element", "tuple", "while", "call", "conditional"})
_CLASS = re.compile(r"[A-Z]\w*?(?<!\d)(?:\.\w+)?$")
#: Matches the attributes of a library's matmul that adds a bias. XLA gives such a call the scope of the matmul.
_BIAS = re.compile(r'"epilogue"\s*:\s*"BIAS')
_COLLECTIVE = re.compile("(reduce-scatter|all-reduce|all-gather|all-to-all|collective-permute)(-start|-done)?$")
_MAX_STEPS = 64


@dataclass(frozen=True)
class Origin:
    """The operation that made a value.

    Attributes:
        op_name: JAX scope of the operation.
        opcode: XLA's opcode of the operation.
        frame: `stack_frame_id` of the operation; 0 if XLA has none.
        num_layers: length of the stack that the value is written into slice by slice; 1 if there is no stack.
        num_elements: number of elements of the value; of one slice if the value is stacked.
        is_scratch: whether the value is a byte array from a library's custom call.
        is_carried: whether the value comes from the previous iteration of the loop. Such a value is a layer's input.
        adds_bias: whether one call of a library computes a matmul and adds a bias. `op_name` is then that of the sum, and `frame`
            that of the matmul.
        made_by: name of the instruction at which the walk back ended, or of a collective on the way that has no scope.
        element: index of the value in the result of that instruction.
    """

    op_name: str = ""
    opcode: str = ""
    frame: int = 0
    num_layers: int = 1
    num_elements: int = 0
    is_scratch: bool = False
    is_carried: bool = False
    adds_bias: bool = False
    made_by: str = ""
    element: tuple[int, ...] = ()


NO_ORIGIN = Origin()


Caller = tuple[hlo.Computation, hlo.Instruction]


def find_callers(module: hlo.Module) -> dict[str, Caller]:
    """The caller of each computation that an instruction runs once, by the computation's name.

    A `call` runs its computation in line. An instruction such as `async-start` runs it beside the rest of the program.
    """
    return {
        name: (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "call" or instruction.opcode.endswith("-start")
        for name in instruction.called
    }


def find_origin(
    module: hlo.Module,
    wrappers: Mapping[str, Caller],
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    index: tuple[int, ...],
) -> Origin:
    """The origin of one element of an instruction's result.

    Args:
        module: the compiled program.
        wrappers: the result of `find_callers`.
        computation: the computation that contains `instruction`.
        instruction: the instruction.
        index: index of the element in the result's tuple; empty if the result is one array.
    """
    callers: list[Caller] = []
    passed: list[hlo.Instruction] = []
    num_layers, num_elements = 1, 0
    collective: tuple[str, tuple[int, ...]] | None = None
    for _ in range(_MAX_STEPS):
        opcode, following = instruction.opcode, None
        if len(instruction.shapes) == 1:
            num_elements = instruction.num_elements
        elif opcode.startswith("custom-call") and len(index) == 1:
            num_elements = instruction.shapes[index[0]].num_elements
        if opcode == "fusion" and instruction.called:
            callers.append((computation, instruction))
            computation = module.computations[instruction.called[0]]
            instruction = computation.root
            continue
        if opcode == "async-start":  # its result has its operands, and then the results of what it starts
            computation, index = module.computations[instruction.called[0]], index[1:]
            instruction = computation.root
            continue
        if opcode == "conditional" and (branch := _making_branch(module, instruction, index)) is not None:
            operand = instruction.operands[1 + branch]
            callers.append((computation, replace(instruction, operands=(operand,), operand_elements=())))
            computation = module.computations[instruction.called[branch]]
            instruction = computation.root
            continue
        if opcode == "async-done":
            following, index = 0, (1, *index)
        elif opcode == "tuple" and index:
            following, index = index[0], index[1:]
        elif opcode == "get-tuple-element":
            following, index = 0, (instruction.tuple_index, *index)
        elif opcode in _SAME or (opcode in _XLAS and not instruction.op_name):
            following = 0
        elif opcode == "dynamic-update-slice" and (count := _num_slices(computation, instruction)):
            num_layers *= count
            following = 1
        elif _COLLECTIVE.match(opcode) and not instruction.op_name:  # XLA made it of others, and the operand has the scope
            collective = collective or (instruction.name, index)
            following = index[-1] if index and len(instruction.operands) > 1 else 0
            index = index if opcode.endswith("-done") else ()
        elif opcode == "parameter" and (callers or computation.name in wrappers):
            following = instruction.parameter_index or 0
            computation, instruction = callers.pop() if callers else wrappers[computation.name]
        if following is None or following >= len(instruction.operands):
            break
        if opcode in _SAME | _XLAS:
            passed.append(instruction)
        element = instruction.operand_elements[following] if instruction.operand_elements else None
        index = index if element is None else (element, *index)
        instruction = computation.by_name[instruction.operands[following]]
    is_carried = instruction.opcode == "parameter" and computation.name != module.entry
    makers = [
        *([] if instruction.opcode in _PLACES else [instruction]),
        *reversed(passed),
        *(c for _, c in reversed(callers)),
    ]
    scoped = [m for m in makers if m.op_name]
    telling = [m for m in scoped if "index_in_dim" not in m.op_name]  # a scan's own slicing isn't the maker
    reader = None if scoped else _first_reader(computation, instruction)
    maker = reader or (telling or scoped or [instruction])[0]
    return Origin(
        op_name=_scope_beside(reader) if reader else _scope_of(maker),
        opcode=instruction.opcode,
        frame=maker.frame,
        num_layers=num_layers,
        num_elements=num_elements,
        is_scratch=_is_scratch(instruction, index),
        is_carried=is_carried,
        adds_bias=_adds_bias(maker),
        made_by=collective[0] if collective else instruction.name,
        element=collective[1] if collective else index,
    )


def _first_reader(computation: hlo.Computation, instruction: hlo.Instruction) -> hlo.Instruction | None:
    """The first instruction with a scope that reads the result of a library's call without one.

    XLA drops the scope of a matmul into whose call it has folded a scale, for example.
    """
    if not instruction.opcode.startswith("custom-call"):
        return None
    results = {instruction.name}
    for other in computation.instructions:
        if results.isdisjoint(other.operands):
            continue
        if other.op_name and other.opcode not in _PLACES:
            return other
        if other.opcode == "get-tuple-element":
            results.add(other.name)
    return None


def _scope_beside(reader: hlo.Instruction) -> str:
    """The scope of a call beside the operation that reads it.

    It is `layer_0/custom-call` beside `layer_0/mul`.
    """
    return f"{reader.op_name.rpartition('/')[0]}/custom-call"


def _scope_of(maker: hlo.Instruction) -> str:
    return "" if maker.opcode in _PLACES else _scope_of_sum(maker) if _adds_bias(maker) else maker.op_name


def _making_branch(module: hlo.Module, instruction: hlo.Instruction, index: tuple[int, ...]) -> int | None:
    """The branch of a conditional that computes an element of its result.

    None if no branch does. The others have a constant in its place, or hand an operand on.
    """
    for n, name in enumerate(instruction.called):
        branch = module.computations[name]
        made = branch.root
        if made.opcode == "tuple" and index:
            made = branch.by_name[made.operands[index[0]]]
        while made.opcode in (*_SAME, "broadcast", "get-tuple-element"):
            made = branch.by_name[made.operands[0]]
        if made.operands:  # neither a parameter nor a constant, nor a fusion that fills an array
            return n
    return None


def _adds_bias(instruction: hlo.Instruction) -> bool:
    return instruction.op_name.endswith("/dot_general") and bool(_BIAS.search(instruction.attrs))


def _scope_of_sum(matmul: hlo.Instruction) -> str:
    return f"{matmul.op_name.removesuffix('/dot_general')}/add"


def _num_slices(computation: hlo.Computation, instruction: hlo.Instruction) -> int | None:
    """Slices of the stack into which a `dynamic-update-slice` writes one, or None.

    For example, the write of `[1, 32, 64]` into `[12, 32, 64]` gives 12. In another layout XLA may have `[32, 1, 64]` and
    `[32, 12, 64]`.
    """
    update = computation.by_name.get(instruction.operands[1])
    if update is None or not update.shapes or not instruction.shapes:
        return None
    whole, part = instruction.shapes[0].dims, update.shapes[0].dims
    if len(part) != len(whole) or len(whole) < 2:
        return None
    differing = [(of_whole, of_part) for of_whole, of_part in zip(whole, part, strict=True) if of_whole != of_part]
    return differing[0][0] if len(differing) == 1 and differing[0][1] == 1 else None


def _is_scratch(instruction: hlo.Instruction, index: tuple[int, ...]) -> bool:
    """Whether element `index` of a custom call's result is a library's untyped workspace."""
    if not instruction.opcode.startswith("custom-call") or len(index) != 1:
        return False
    shape = instruction.shapes[index[0]]
    return shape.dtype in ("u8", "s8") and len(shape.dims) <= 1


def label_of(origin: Origin, names: Sequence[WrittenName], made_at: str, num_devices: int = 1) -> str:
    """A readable label: the checkpoint name, or else the module path and operation in its layer.

    Args:
        origin: the origin of the value.
        names: the places where the program writes checkpoint names.
        made_at: `file:line` of the innermost frame of the operation.
        num_devices: number of devices. `names` has the sizes of whole values, and a device may have a part of each.
    """
    name = _checkpoint_name(origin, [n for n in names if is_part(origin.num_elements, n.num_elements, num_devices)], made_at)
    if name or (origin.is_carried and origin.num_layers > 1):
        return name or "layer input"
    inner = STRUCTURE.split(origin.op_name)[-1].strip("/")
    parts = plain_scope(inner or origin.op_name).split("/")
    if parts[-1] == "reduce_precision" and origin.opcode not in _PLACES:  # JAX's own cast of a residual
        parts[-1] = origin.opcode
    classes = [n for n, part in enumerate(parts[:-1]) if _CLASS.match(part)]
    inside = parts[classes[-1] + 1 :] if classes else parts
    if (
        inside[-1] == "pallas_call" and len(inside) > 2
    ):  # between the module and the kernel's name are the kernel's own scopes
        inside = [inside[0], inside[-2]]
    return "/".join(inside)


def is_part(num_elements: int, num_whole: int, num_devices: int) -> bool:
    """Whether `num_elements` can be a device's shard of a value of `num_whole` elements."""
    times, rest = divmod(num_whole, max(1, num_elements))
    return times > 0 and rest == 0 and num_devices % times == 0


def _checkpoint_name(origin: Origin, names: Sequence[WrittenName], made_at: str) -> str:
    """The checkpoint name of the value that `origin` describes; empty if none is found.

    XLA has no checkpoint names. So a name is found by the operation that made the named value, by its scope and its line.
    If that operation is a call (a custom derivative), XLA shows only the operations inside. The name is then found by the
    line and the scope of the call. A kernel of Pallas that JAX brings has no line, and its name in its scope.
    """
    scope, is_input = plain_scope(origin.op_name), origin.is_carried and origin.num_layers > 1
    for name in names:
        made_by = plain_scope(name.made_by)
        same_line = origin.adds_bias or not (name.made_at and made_at) or name.made_at == made_at
        outer, _, kind = f"/{made_by.removesuffix('_wrapper')}".rpartition("/")  # JAX lowers `x_wrapper` to `x`
        is_kernel = kind == "pallas_call"  # its results may be scratch, too
        if is_kernel and origin.element and origin.element[-1] != name.result:
            continue
        if not made_by:
            matches = is_input
        elif kind in OPAQUE and (name.made_at or not is_kernel):
            matches = bool(name.made_at) and name.made_at == made_at and f"{outer}/" in f"/{scope}/"
        else:
            matches = same_line and f"/{scope}".endswith(f"{outer}/{kind}")
        if matches:
            return name.name
    return ""
