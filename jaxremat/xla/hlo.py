"""Reads the text of a compiled HLO module, `compiled.as_text()`, into frozen dataclasses.

The module is optimized and scheduled. The module parses text and doesn't use JAX. So a text that was saved a year ago still
reads the same. XLA prints one instruction per line, except for the metadata of a TPU's kernels. So the reader matches one
regular expression per line. It parses only the parts that this package needs. The rest of a line stays in `Instruction.attrs`.
For example, this line::

    ROOT %dot.1 = f32[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}

becomes an `Instruction` with the name `dot.1`, the opcode `dot`, one shape `f32[4,16]` and the operands `x` and `w`.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOST_MEMORY = 5  # XLA's memory space of pinned host memory, printed as S(5)

#: The line break before a line of a kernel's metadata, or before the line that ends it.
_IN_METADATA = re.compile(r'\n(?="|\}\})')
_COMMENT = re.compile(r"/\*[\w= ]*\*/")
# No array or tuple type contains ` word(`, so the first match of ` word(` is the opcode with its parenthesis.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)[ {]")
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ELEMENT = re.compile(r"%[\w.\-]+(?:#(\d+))?")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"(?:^|[ ,])(?:calls|to_apply|condition|body|branch_computations|true_computation|false_computation"
    r"|called_computations|select|scatter)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CUSTOM_CALL_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TRIP_COUNT = re.compile(r'known_trip_count\\?"\s*:\s*\{\s*\\?"n\\?"\s*:\s*\\?"?(\d+)')
_XLA_REMAT = re.compile(r"\.remat\d*(_compressed|_uncompressed)?\d*(\.|$)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{")
_TUPLE_INDEX = re.compile(r"(?:^|[ ,])index=(\d+)")
_INTEGER = re.compile(r"-?\d+")
_CYCLES = re.compile(r'"estimated_cycles"\s*:\s*"?(\d+)')
_DTYPE_BITS = re.compile(r"[a-z]+(\d+)")
#: The parts of an `op_name` that loops and checkpoints add.
STRUCTURE = re.compile(
    r"(?:^|/)(?:while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|checkpoint|rematted_computation)(?=/|$)"
)
_TRANSFORM = re.compile(r"^(?:jvp|transpose|vmap|jit|pjit)\((.*)\)$")


@dataclass(frozen=True, slots=True)
class Shape:
    """One array of an instruction's result.

    A scalar has empty `dims`. Tokens and opaque values have 0 bytes. For example, `bf16[4,8]` has 32 elements and 64 bytes.
    `layout` has the dimensions from minor to major, (1, 0) for rows one after the other.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0
    layout: tuple[int, ...] = field(default=(), compare=False)

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return (self.num_elements * _dtype_bits(self.dtype) + 7) // 8

    @property
    def on_host(self) -> bool:
        return self.memory_space == HOST_MEMORY


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Name without `%`, unique in its module.
        opcode: The opcode as printed: `dot`, `fusion`, `fusion-start`, `get-tuple-element`.
        shapes: The arrays of the result. Nested tuples are flattened in order.
        operands: Names of the operands, in order.
        attrs: The text after the operands, verbatim.
        called: Names of the computations that the instruction calls, in the printed order. A `while` has its condition first
            and then its body.
        trip_count: Trip count of a `while`, as XLA prints it, or as its condition and its counter say it. None if it isn't known.
        op_name: JAX scope of the instruction, `jit(step)/transpose(jvp())/while/body/...`; may be empty.
        custom_call_target: Target of a `custom-call`; empty for other instructions.
        is_root: Whether the instruction is the result of its computation.
        parameter_index: Position of a `parameter`; None for other instructions.
        operand_elements: For each operand the index in `%name#3` (here 3), which XLA prints for one element of a tuple; None
            for an operand without an index. Empty if no operand has an index.
        value: The value of a `constant` that is one integer or truth value; None for other instructions.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attrs: str
    called: tuple[str, ...] = ()
    trip_count: int | None = None
    op_name: str = ""
    custom_call_target: str = ""
    is_root: bool = False
    parameter_index: int | None = None
    operand_elements: tuple[int | None, ...] = ()
    value: int | None = None

    @property
    def frame(self) -> int:
        """Number of the innermost Python frame that made the instruction; 0 if the text has none.

        The number refers to the tables at the head of the module's text.
        """
        match = _FRAME.search(self.attrs)
        return int(match[1]) if match else 0

    @property
    def is_xla_remat(self) -> bool:
        """Whether XLA's own rematerialization pass made the instruction.

        The pass adds `.remat`, `.remat2` or `.remat.1` to the names of its copies.
        """
        return bool(_XLA_REMAT.search(self.name))

    @property
    def num_trips(self) -> int:
        """How often the called computations run: once where a trip count isn't known."""
        return 1 if self.trip_count is None else self.trip_count

    @property
    def runs_on_host(self) -> bool:
        """Whether the host computes it, as under `jax.experimental.compute_on`."""
        return self.custom_call_target == "HostExecute" or 'async_execution_thread="host"' in self.attrs

    @property
    def num_elements(self) -> int:
        return sum(s.num_elements for s in self.shapes)

    @property
    def num_bytes(self) -> int:
        return sum(s.num_bytes for s in self.shapes)

    @property
    def tuple_index(self) -> int:
        """Which element of a tuple a `get-tuple-element` takes; 0 for other instructions."""
        match = _TUPLE_INDEX.search(self.attrs)
        return int(match[1]) if match else 0

    @property
    def cycles(self) -> int | None:
        """The clock cycles that XLA's compiler estimates, as it does for fusions on a TPU.

        None without an estimate.
        """
        match = _CYCLES.search(self.attrs)
        return int(match[1]) if match else None

    def dims_attr(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute: (1, 2) for `lhs_contracting_dims={1,2}`; empty without it."""
        match = re.search(rf"(?:^|[ ,]){key}=\{{([\d, ]*)\}}", self.attrs)
        return _ints(match[1]) if match else ()


@dataclass(frozen=True)
class Computation:
    """A named list of instructions.

    In a scheduled module they are in the order in which they run.
    """

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters, sorted by position."""
        found = [i for i in self.instructions if i.parameter_index is not None]
        return tuple(sorted(found, key=lambda i: i.parameter_index or 0))

    def operand_shapes(self, instruction: Instruction) -> tuple[tuple[Shape, ...], ...]:
        """The arrays of each operand of `instruction`."""
        return tuple(self.by_name[name].shapes for name in instruction.operands)


@dataclass(frozen=True)
class Module:
    """All computations of one compiled program.

    Attributes:
        computations: the computations by name.
        entry: name of the computation at which the program starts.
        aliases: pairs of an output's index and the position of the parameter whose memory that output reuses.
        is_tiled: whether arrays lie in tiles, as in a TPU's program. Memory spaces other than 0 and the host's are then memory on
            the chip itself.
    """

    computations: dict[str, Computation]
    entry: str
    aliases: tuple[tuple[tuple[int, ...], int], ...] = ()
    is_tiled: bool = False

    @property
    def entry_computation(self) -> Computation:
        return self.computations[self.entry]


def parse(text: str) -> Module:
    """Reads the text of an HLO module.

    Args:
        text: What `compiled.as_text()` returns.

    Raises:
        ValueError: `text` has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, body, is_tiled = "", "", [], False
    aliases: tuple[tuple[tuple[int, ...], int], ...] = ()
    for line in _IN_METADATA.sub("", text).split("\n"):
        if not line:
            continue
        if not line[0].isspace():
            if name:
                computations[name] = Computation(name, tuple(body))
                name, body = "", []
            if line.startswith("HloModule"):
                is_tiled = ":T(" in line  # as in `{1,0:T(8,128)}`
                aliased = line.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
                aliases = tuple((_ints(output), int(parameter)) for output, parameter in _ALIAS.findall(aliased))
            elif line.rstrip().endswith("{") and (head := _COMPUTATION.match(line)):
                name = head[2]
                entry = name if head[1] else entry
        elif name and (instruction := _parse_instruction(line)):
            body.append(instruction)
    if not entry:
        raise ValueError("no ENTRY computation in this text: it is not the text of an HLO module")
    for name, computation in tuple(computations.items()):
        if any(i.opcode == "while" and i.trip_count is None for i in computation.instructions):
            counted = (
                replace(i, trip_count=_trips(computations, computation, i)) if i.opcode == "while" else i
                for i in computation.instructions
            )
            computations[name] = Computation(name, tuple(counted))
    return Module(computations, entry, aliases, is_tiled)


def _trips(computations: Mapping[str, Computation], around: Computation, loop: Instruction) -> int | None:
    """How often a loop runs whose counter goes from one constant to another.

    None if it isn't such a loop. XLA prints no counts in a TPU's program.

    Args:
        computations: all computations.
        around: the one with the loop.
        loop: the `while`.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = (computations[name] for name in loop.called)
    test, first = condition.root, around.by_name[loop.operands[0]]
    if test.opcode != "compare" or "direction=LT" not in test.attrs or {body.root.opcode, first.opcode} != {"tuple"}:
        return None
    index, limit = _element_of(condition, test, 0), condition.by_name[test.operands[1]]
    if index is None:
        return None
    start, after = _copied(around, first.operands[index]), _copied(body, body.root.operands[index])
    if start.value is None or limit.value is None or after.opcode != "add":
        return None
    steps = [_copied(body, name).value for name in after.operands]
    counts = [step for n, step in enumerate(steps) if step and step > 0 and _element_of(body, after, 1 - n) == index]
    return max(0, math.ceil((limit.value - start.value) / counts[0])) if counts else None


def _copied(computation: Computation, name: str) -> Instruction:
    """The instruction of this name, or the one whose result it copies."""
    found = computation.by_name[name]
    while found.opcode in ("copy", "bitcast") and not found.operand_elements:
        found = computation.by_name[found.operands[0]]
    return found


def _element_of(computation: Computation, instruction: Instruction, position: int) -> int | None:
    """Which element of a tuple an operand is, or copies. None if it is none."""
    while True:
        elements, source = instruction.operand_elements, computation.by_name[instruction.operands[position]]
        if elements and elements[position] is not None:
            return elements[position]
        if source.opcode == "get-tuple-element":
            return source.tuple_index
        if source.opcode not in ("copy", "bitcast"):
            return None
        instruction, position = source, 0


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a printed type: `(s32[], (bf16[4,8]{1,0:T(8,128)S(5)}))` has two.

    The second is in host memory.
    """
    return _parse_shapes(text)


def _parse_instruction(line: str) -> Instruction | None:
    if "/*" in line:
        line = _COMMENT.sub("", line)
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    opcode = head[4]
    end = _closing_parenthesis(line, head.end())
    inside, attrs = line[head.end() : end], line[end + 1 :].lstrip(", ")
    op_name = _OP_NAME.search(attrs)
    trips = _TRIP_COUNT.search(attrs) if opcode == "while" else None
    target = _CUSTOM_CALL_TARGET.search(attrs) if opcode.startswith("custom-call") else None
    return Instruction(
        name=head[2],
        opcode=opcode,
        shapes=_parse_shapes(head[3]),
        operands=() if opcode in ("constant", "parameter") else _parse_operands(inside),
        attrs=attrs,
        called=_parse_called(attrs),
        trip_count=int(trips[1]) if trips else None,
        op_name=op_name[1].replace("\\'", "'") if op_name else "",
        custom_call_target=target[1] if target else "",
        is_root=bool(head[1]),
        parameter_index=int(inside) if opcode == "parameter" else None,
        operand_elements=tuple(int(n) if n else None for n in _ELEMENT.findall(inside)) if "#" in inside else (),
        value=_parse_value(inside) if opcode == "constant" else None,
    )


def _closing_parenthesis(line: str, start: int) -> int:
    """Index of the parenthesis that closes the parenthesis just before `start`.

    Parentheses in quotes don't count.
    """
    end = line.find(")", start)
    if line.find("(", start, end) < 0 and line.find('"', start, end) < 0:
        return end
    depth = 1
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', line[start:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return start + token.start()
    return len(line)


def _parse_operands(inside: str) -> tuple[str, ...]:
    """The names of the operands.

    XLA marks names with `%`. It prints names without `%` only in texts without operand shapes.
    """
    if "%" in inside:
        return tuple(_OPERAND.findall(inside))
    return tuple(word.strip() for word in inside.split(",") if word.strip())


def _parse_value(inside: str) -> int | None:
    if inside in ("true", "false"):
        return int(inside == "true")
    return int(inside) if _INTEGER.fullmatch(inside) else None


def _parse_called(attrs: str) -> tuple[str, ...]:
    if "=%" not in attrs and "={%" not in attrs:
        return ()
    found = _CALLED.findall(_QUOTED.sub('""', attrs))
    return tuple(name.strip(" %") for group in found for name in group.strip("{}").split(",") if name.strip(" %"))


@functools.lru_cache(maxsize=65536)
def _parse_shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        minor_to_major = _ints(layout.partition(":")[0])
        shapes.append(Shape(dtype, _ints(dims), int(space[1]) if space else 0, minor_to_major))
    return tuple(shapes)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


@functools.cache
def _dtype_bits(dtype: str) -> int:
    """Bits of an element as XLA stores it: 8 for `pred`, 4 for `s4`, 64 for `c64`, 0 for tokens."""
    if dtype == "pred":
        return 8
    match = _DTYPE_BITS.match(dtype)
    return int(match[1]) if match else 0


@functools.lru_cache(maxsize=65536)
def plain_scope(op_name: str) -> str:
    """`op_name` without the parts that JAX's transformations and loops add.

    For example, `jit(step)/transpose(jvp(Net.loss))/layers/while/body/closed_call/mul` gives `Net.loss/layers/mul`.
    """
    parts: list[str] = []
    for n, part in enumerate(STRUCTURE.sub("", op_name).strip("/").split("/")):
        while match := _TRANSFORM.match(part):
            part = "" if n == 0 and part.startswith(("jit(", "pjit(")) else match[1]
        parts += [part] if part else []
    return "/".join(parts)
