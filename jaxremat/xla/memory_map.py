"""Reads the memory map of a compiled step from XLA's dump.

The reader joins XLA's values into buffers, and gives each buffer a category and a label. For example, XLA's value
`while.2{5}` may become a buffer of the category `residuals` with the label `mlp_out`.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes
from jaxremat.policy.names import WrittenName
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Allocation, Buffer, Category, Gap, Loop, MemoryMap, Operation, Phase, covered, gaps_between
from jaxremat.xla.categories import Evidence, category_of, phase_of, role_of, speaks_of_loss
from jaxremat.xla.dump import Dump, Frames, HloValue, RawAllocation, parse_assignment, parse_frames, parse_live_ranges
from jaxremat.xla.exchanges import ExchangedValue, exchanged_values
from jaxremat.xla.origin import NO_ORIGIN, Origin, find_callers, find_origin, label_of

#: Instructions that move no data. Their scopes don't show the phase of the program.
_FREE = frozenset({"parameter", "get-tuple-element", "tuple", "bitcast", "constant"})
#: XLA pads a matmul's dimensions to multiples of some number. This is the largest such number.
_MAX_PADDING = 64


@dataclass(frozen=True)
class _Chain:
    """Values that follow each other in the same bytes: updated in place, or a loop's carry."""

    values: tuple[HloValue, ...]
    first: int
    last: int
    made: int
    origin: Origin


def read_map(
    dump: Dump,
    names: Sequence[WrittenName] = (),
    roles: Mapping[str, Category] | None = None,
    mesh: MeshAxes = ONE_DEVICE,
    device_spaces: Collection[int] | None = None,
    code_bytes: int = 0,
) -> MemoryMap:
    """The memory map of the program that `dump` describes.

    Args:
        dump: the dump of a compile.
        names: the places where the program writes checkpoint names. They give labels to residuals. See
            `jaxremat.policy.names.written_names`.
        roles: categories of arguments whose path doesn't show the category. A key is the beginning of a path:
            `{"w": "parameters"}`.
        mesh: the devices that the program runs on. The map is that of one of them.
        device_spaces: XLA's memory spaces that are the device's memory (`Chip.device_spaces`). What is in others is left out,
            except for the host's.
        code_bytes: of the program's code, which counts where `device_spaces` are given.
    """
    return _Reader(dump, tuple(names), dict(roles or {}), mesh, device_spaces, code_bytes).read()


class _Reader:
    def __init__(
        self,
        dump: Dump,
        names: tuple[WrittenName, ...],
        roles: dict[str, Category],
        mesh: MeshAxes,
        device_spaces: Collection[int] | None,
        code_bytes: int,
    ):
        self.names, self.roles, self.mesh = names, roles, mesh
        self.module = hlo.parse(dump.hlo)
        self.frames: Frames = parse_frames(dump.hlo)
        self.allocations = [a for a in parse_assignment(dump.assignment) if not a.is_thread_local]
        self.program_bytes: int | None = None
        if device_spaces is not None:
            of_device = [a for a in self.allocations if a.color in device_spaces or a.on_host]
            self.allocations = [a for a in of_device if a.on_host or not a.is_constant]
            self.program_bytes = code_bytes + sum(a.num_bytes for a in of_device if a.is_constant and not a.on_host)
        self.schedule, self.ranges = parse_live_ranges(dump.live_ranges)
        self.home = {i.name: c for c in self.module.computations.values() for i in c.instructions}
        self.wrappers = find_callers(self.module)
        self.positions = {name: position for position, name in enumerate(self.schedule)}
        self.loops = self._find_loops()
        self.phases = self._find_phases()
        self.phase_at: list[Phase] = [phase for phase, first, last in self.phases for _ in range(first, last + 1)]
        entry = self.module.entry_computation.parameters
        self.arguments = {i.parameter_index: i for i in entry}
        self.parameter_elements = self._parameter_elements()
        self.exchanged = exchanged_values(self.module, mesh, roles)

    def read(self) -> MemoryMap:
        """Makes the memory map in one pass over the allocations."""
        chains = {a.number: self._chains(a) for a in self.allocations if a.is_temp}
        vocabulary = self._vocabulary([chain for of_arena in chains.values() for chain in of_arena])
        device, host = [], []
        for allocation in self.allocations:
            into = host if allocation.on_host else device
            if allocation.is_temp:
                into += [self._of_arena(allocation, chain, vocabulary) for chain in chains[allocation.number]]
            elif not allocation.is_constant:
                into.append(self._of_whole(allocation))
        arenas = [self._allocation(a) for a in self.allocations if not a.on_host]
        if self.program_bytes is not None:
            number = 1 + max((a.number for a in self.allocations), default=-1)
            arenas.append(Allocation(number, self.program_bytes, "program"))
            device.append(self._of_program(number, self.program_bytes))
        device.sort(key=lambda b: (b.allocation, b.offset, b.first))
        peak = self._peak([b for b in device if b.allocation in chains])
        live: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for buffer in device:
            if buffer.first <= peak <= buffer.last:
                live[buffer.allocation].append((buffer.offset, buffer.offset + buffer.num_bytes))
        gaps: list[Gap] = [gap for a in arenas if a.kind != "constant" for gap in gaps_between(a, live[a.number])]
        return MemoryMap(
            program=tuple(self._operation(name) for name in self.schedule),
            phases=self.phases,
            allocations=tuple(arenas),
            host_allocations=tuple(self._allocation(a) for a in self.allocations if a.on_host),
            loops=self.loops,
            buffers=tuple(device),
            host_buffers=tuple(sorted(host, key=lambda b: (b.allocation, b.offset, b.first))),
            peak=peak,
            gaps=tuple(gaps),
        )

    # The program.

    def _instruction(self, name: str) -> hlo.Instruction | None:
        return self.home[name].by_name[name] if name in self.home else None

    def _operation(self, name: str) -> Operation:
        instruction = self._instruction(name)
        if instruction is None:
            return Operation(name, "", "", "")
        return Operation(name, instruction.opcode, instruction.op_name, self.frames.source(instruction.frame))

    def _find_loops(self) -> tuple[Loop, ...]:
        found = []
        for position, name in enumerate(self.schedule):
            instruction = self._instruction(name)
            if instruction is not None and instruction.opcode == "while":
                inside = [self.positions[i.name] for c in self._under(instruction) for i in c if i.name in self.positions]
                found.append(Loop(name, min([*inside, position]), position, instruction.trip_count, None))
        found.sort(key=lambda loop: (loop.first, -loop.last))
        placed: list[Loop] = []
        for loop in found:
            around = [n for n, outer in enumerate(placed) if outer.first <= loop.first and loop.last < outer.last]
            placed.append(replace(loop, parent=max(around, key=lambda n: placed[n].first, default=None)))
        return tuple(placed)

    def _under(self, instruction: hlo.Instruction) -> list[tuple[hlo.Instruction, ...]]:
        """The instructions that run inside `instruction`, one tuple for each computation."""
        found = []
        for name in instruction.called:
            body = self.module.computations[name].instructions
            found += [
                body,
                *(inner for i in body if i.opcode in ("while", "call", "conditional") for inner in self._under(i)),
            ]
        return found

    def _loop_at(self, position: int) -> int | None:
        inside = [n for n, loop in enumerate(self.loops) if loop.first <= position < loop.last]
        return inside[-1] if inside else None

    def _find_phases(self) -> tuple[tuple[Phase, int, int], ...]:
        """Divides the program into forward, backward and update, at two cuts.

        The scopes of the operations contradict the chosen cuts as rarely as possible. Some scopes contradict any cuts:
        random keys are made outside of differentiation, a chunked loss differentiates in the forward pass, and an update
        runs as soon as its gradient is ready.
        """
        operations = [self._operation(name) for name in self.schedule]
        spoken = [None if operation.opcode in _FREE else phase_of(operation.op_name) for operation in operations]
        for loop in self.loops:  # a sum of gradients over microbatches has no scope of its own
            inside = range(loop.first, loop.last + 1)
            if any(spoken[n] in ("forward", "backward") for n in inside):
                for n in inside:
                    spoken[n] = None if spoken[n] == "update" else spoken[n]
        size = len(spoken)
        if not any(phase in ("forward", "backward") for phase in spoken):
            return (("forward", 0, size - 1),)
        sums: dict[Phase, list[int]] = {"forward": [0], "backward": [0], "update": [0]}
        for phase in spoken:
            for name, counts in sums.items():
                counts.append(counts[-1] + (phase == name))
        forward, backward, update = sums["forward"], sums["backward"], sums["update"]
        best, cuts, i = -1, (0, size), 0
        for j in range(size + 1):
            i = j if forward[j] - backward[j] >= forward[i] - backward[i] else i
            score = forward[i] + backward[j] - backward[i] + update[size] - update[j]
            if score >= best:
                best, cuts = score, (i, j)
        i, j = cuts
        runs: tuple[tuple[Phase, int, int], ...] = (("forward", 0, i - 1), ("backward", i, j - 1), ("update", j, size - 1))
        return tuple(run for run in runs if run[1] <= run[2])

    # Buffers.

    def _allocation(self, raw: RawAllocation) -> Allocation:
        of_program = "temp" if raw.is_temp else "constant" if raw.is_constant else "output"
        return Allocation(raw.number, raw.num_bytes, of_program if raw.parameter is None else "argument")

    def _role(self, path: str) -> Category:
        return role_of(path, self.roles)

    def _parameter_elements(self) -> frozenset[int]:
        """Numbers of elements of the parameters, or of all arguments if none is known as one."""
        sizes = {i.op_name or i.name: i.num_elements for i in self.arguments.values()}
        known = {n for path, n in sizes.items() if self._role(path) == "parameters"}
        return frozenset(n for n in (known or sizes.values()) if n > 1)

    def _of_whole(self, raw: RawAllocation) -> Buffer:
        """The only buffer of an argument's or an output's allocation.

        It is live for the whole program.
        """
        argument = self.arguments.get(raw.parameter) if raw.parameter is not None else None
        if argument is not None:
            path = argument.op_name or argument.name
            name, origin = argument.name + "{}", NO_ORIGIN
            shape = next((value.shape for value in raw.values if value.name == name), "")
            evidence = Evidence(role=self._role(path))
        else:
            unknown = HloValue(f"allocation.{raw.number}{{}}", False, 0, 0, "")
            value = max(raw.values, key=lambda value: self._live(value)[1], default=unknown)
            path, name, shape, origin = "", value.name, value.shape, self._origin(value)
            evidence = Evidence(is_output=True, op_name=origin.op_name)
        return Buffer(
            name=name,
            category=category_of(evidence),
            label=path or self._label(origin) or name,
            num_bytes=raw.num_bytes,
            num_layers=1,
            allocation=raw.number,
            offset=0,
            first=0,
            last=len(self.schedule) - 1,
            loop=None,
            shape=_short_shape(shape),
            op_name=origin.op_name or path,
            source=self.frames.source(origin.frame),
        )

    def _of_program(self, number: int, num_bytes: int) -> Buffer:
        """The buffer of the program's code and constants."""
        name, last = "program", len(self.schedule) - 1
        return Buffer(name, "workspace", "the program and its constants", num_bytes, 1, number, 0, 0, last, None, "", "", "")

    def _label(self, origin: Origin) -> str:
        stack = self.frames.stack(origin.frame)
        return label_of(origin, self.names, f"{stack[0][0]}:{stack[0][2]}" if stack else "", self.mesh.num_devices)

    def _live(self, value: HloValue) -> tuple[int, int]:
        end = len(self.schedule) - 1
        first, last = self.ranges.get(value.name, (0, end))
        return min(first, end), min(last, end)  # XLA ends an output one position after the program

    def _origin(self, value: HloValue) -> Origin:
        name, _, index = value.name.rstrip("}").partition("{")
        if name not in self.home:
            return NO_ORIGIN
        path = tuple(int(n) for n in index.split(",") if n)
        return find_origin(self.module, self.wrappers, self.home[name], self.home[name].by_name[name], path)

    def _chains(self, raw: RawAllocation) -> list[_Chain]:
        """Joins the values of an arena into chains.

        A value joins the chain of another value if both have the same offset and size, and if the other value is still live
        when the first one begins.
        """
        by_place: dict[tuple[int, int], list[HloValue]] = defaultdict(list)
        for value in raw.values:
            by_place[value.offset, value.num_bytes].append(value)
        groups: list[list[HloValue]] = []
        for values in by_place.values():
            end = -1
            for value in sorted(values, key=self._live):
                first, last = self._live(value)
                if end < 0 or first > end:
                    groups.append([])
                groups[-1].append(value)
                end = last if len(groups[-1]) == 1 else max(end, last)
        return [self._chain(group) for group in groups]

    def _chain(self, values: list[HloValue]) -> _Chain:
        written = [(self._origin(value), value) for value in values if not value.is_phi or self._of_branches(value)]
        stacked = [pair for pair in written if pair[0].num_layers > 1]
        named = [pair for pair in written if pair[0].op_name]
        origin, value = (stacked or named or written or [(NO_ORIGIN, values[0])])[-1]
        lives = [self._live(value) for value in values]
        return _Chain(
            values=tuple(values),
            first=min(first for first, _ in lives),
            last=max(last for _, last in lives),
            made=self._live(value)[0],
            origin=origin,
        )

    def _of_branches(self, value: HloValue) -> bool:
        """Whether a value is the result of a conditional.

        One of its branches may write zeros in place of the value.
        """
        instruction = self._instruction(value.name.partition("{")[0])
        return instruction is not None and instruction.opcode == "conditional"

    def _vocabulary(self, chains: list[_Chain]) -> int:
        """The last dimension of the logits; 0 if there are none.

        The logits are the largest value of the loss whose last dimension is also a dimension of an argument, and that hasn't
        as many elements as a parameter. A gathered parameter, such as a tied table, is none.
        """
        of_parameters = {dim for i in self.arguments.values() for shape in i.shapes for dim in shape.dims}
        of_loss = [chain for chain in chains if speaks_of_loss(chain.origin.op_name, self._functions(chain.origin))]
        made_here = [c for c in of_loss if not (found := self._exchanged(c.origin)) or found.use != "gathered"]
        shapes = [shape for chain in made_here if (shape := _shape(chain.values[0])) and len(shape.dims) > 1]
        logits = [s for s in shapes if s.dims[-1] in of_parameters and s.num_elements not in self.parameter_elements]
        return max(logits, key=lambda shape: shape.num_elements).dims[-1] if logits else 0

    def _functions(self, origin: Origin) -> tuple[str, ...]:
        """The names of the functions on the stack of `origin`, the innermost first."""
        return tuple(function for _, function, _ in self.frames.stack(origin.frame))

    def _of_arena(self, raw: RawAllocation, chain: _Chain, vocabulary: int) -> Buffer:
        origin, shape = chain.origin, _shape(chain.values[-1])
        last_dim = shape.dims[-1] if shape and shape.dims else 0
        like_parameter = shape is not None and shape.num_elements in self.parameter_elements
        sums_up = like_parameter and phase_of(self._operation(self.schedule[chain.last]).op_name) == "update"
        exchanged = self._exchanged(origin)
        evidence = Evidence(
            op_name=origin.op_name,
            functions=self._functions(origin),
            is_scratch=origin.is_scratch,
            num_layers=origin.num_layers,
            made=self.phase_at[chain.made],
            last_read="update" if sums_up else self.phase_at[chain.last],
            like_parameter=like_parameter,
            is_vocabulary_wide=0 < vocabulary <= last_dim < vocabulary + _MAX_PADDING,
            exchanged=exchanged.use if exchanged else None,
        )
        category = category_of(evidence)
        label = self._gradient_label(chain, shape) if category == "gradients" else ""
        if category == "gathered parameters" and exchanged and exchanged.path:
            label = f"gathered {exchanged.path}"
        return Buffer(
            name=chain.values[0].name,
            category=category,
            label=label or self._label(origin) or chain.values[0].name,
            num_bytes=chain.values[0].num_bytes,
            num_layers=origin.num_layers,
            allocation=raw.number,
            offset=chain.values[0].offset,
            first=chain.first,
            last=chain.last,
            loop=self._loop_at(chain.first),
            shape=_short_shape(chain.values[-1].shape),
            op_name=origin.op_name,
            source=self.frames.source(origin.frame),
        )

    def _exchanged(self, origin: Origin) -> ExchangedValue | None:
        """What a value is for a collective; None if none writes it or reads a gradient from it."""
        last = origin.element[-1] if origin.element else None
        return self.exchanged.get((origin.made_by, last)) or self.exchanged.get((origin.made_by, None))

    def _gradient_label(self, chain: _Chain, shape: hlo.Shape | None) -> str:
        """The label of a gradient: `gradient of state.params['w']`; empty without its parameter.

        The parameter has the gradient's size, and the same instruction of the update reads both.
        """
        update = self._instruction(self.schedule[chain.last])
        if update is None or shape is None:
            return ""
        read = [
            argument for name in update.operands if (argument := self._instruction(name)) and argument.opcode == "parameter"
        ]
        like = [a for a in read if a.num_elements == shape.num_elements and self._role(a.op_name) == "parameters"]
        return f"gradient of {like[0].op_name}" if like else ""

    def _peak(self, buffers: list[Buffer]) -> int:
        """The first position with the most live bytes.

        Bytes that several live buffers share count once.
        """
        sums = [0] * (len(self.schedule) + 1)
        for buffer in buffers:
            sums[buffer.first] += buffer.num_bytes
            sums[buffer.last + 1] -= buffer.num_bytes
        for position in range(1, len(sums)):
            sums[position] += sums[position - 1]
        best, peak = -1, 0
        for position in sorted(range(len(self.schedule)), key=lambda position: (-sums[position], position)):
            if sums[position] < best:
                break
            live = [b for b in buffers if b.first <= position <= b.last]
            size = sum(
                covered((b.offset, b.offset + b.num_bytes) for b in live if b.allocation == number)
                for number in {b.allocation for b in live}
            )
            if size > best or (size == best and position < peak):
                best, peak = size, position
        return peak


def _shape(value: HloValue) -> hlo.Shape | None:
    shapes = hlo.parse_shapes(value.shape)
    return shapes[0] if len(shapes) == 1 else None


def _short_shape(shape: str) -> str:
    shapes = hlo.parse_shapes(shape)
    texts = [f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in shapes]
    return texts[0] if len(texts) == 1 else f"({len(texts)} arrays)"
