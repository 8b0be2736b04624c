"""Reads the files that XLA writes about the buffers of a compile into dataclasses.

The module parses text and doesn't use JAX. For example, this part of a buffer assignment::

    allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
     value: <12 x @0> (size=4096,offset=0): f32[1024]{0}

becomes a `RawAllocation` of 4096 bytes for parameter 0, with one `HloValue` that is called `x{}`.

References:
    xla/service/buffer_assignment.cc, `BufferAssignment::ToString`;
    xla/hlo/utils/hlo_live_range.cc, `HloLiveRange::ToString`;
    xla/service/hlo.proto, `StackFrameIndexProto`, printed at the head of a module's text.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from jaxremat.errors import CompileError
from jaxremat.system.files import OTHER_TMPDIR, named_by, try_in
from jaxremat.system.whose import is_users, shown_file
from jaxremat.xla import hlo

#: The function that traces a program. Its callers aren't part of the program.
OUTSIDE = "begin_compile"
#: Compiler options that make XLA write these files. The option `xla_dump_to` names the folder.
OPTIONS = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)")
_PARAMETER = re.compile(r", parameter (\d+)")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r" value: <\d+ (\S+?)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+):(\d+)-(\d+)$")
_FIELD = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True)
class Dump:
    """The dump of one module.

    Attributes:
        hlo: the scheduled HLO, as text.
        assignment: the buffer assignment, as text.
        live_ranges: the schedule and the live ranges, as text.
        proto: the `HloProto` that XProf reads.
    """

    hlo: str
    assignment: str
    live_ranges: str
    proto: bytes


@dataclass(frozen=True, slots=True)
class HloValue:
    """One value in an allocation.

    `name` always has its index, as in `while.2{5}`. `is_phi` is true for a value that only passes on another value.
    """

    name: str
    is_phi: bool
    num_bytes: int
    offset: int
    shape: str


@dataclass(frozen=True, slots=True)
class RawAllocation:
    """One line `allocation ...` and its values.

    `parameter` is the index of the entry computation's parameter that the allocation has; None if it has none. `color`
    is XLA's memory space.
    """

    number: int
    num_bytes: int
    parameter: int | None
    is_output: bool
    is_temp: bool
    is_constant: bool
    is_thread_local: bool
    color: int
    values: tuple[HloValue, ...]

    @property
    def on_host(self) -> bool:
        return self.color == hlo.HOST_MEMORY


def read_dump(folder: Path) -> Dump:
    """Reads the dump that a compile wrote to `folder`.

    If there are several modules, the largest one is read, since autotuning compiles small modules of its own.

    Raises:
        CompileError: XLA wrote no dump.
        JaxrematError: the disk is full. XLA itself says nothing of that.
    """
    with named_by("XLA's dump", folder, OTHER_TMPDIR):
        try_in(folder)
    end = "after_optimizations-buffer-assignment.txt"
    found = max(folder.glob(f"*{end}"), key=lambda path: path.stat().st_size, default=None)
    paths = [
        Path(str(found).removesuffix(end) + "after_optimizations" + rest) for rest in (".txt", "-live-range.txt", ".hlo.pb")
    ]
    if found is None or not all(path.exists() for path in paths):
        raise CompileError(
            "XLA didn't write down its buffers",
            cause="another --xla_dump_... setting in XLA_FLAGS, or a version of XLA that writes other files",
            next_step="unset XLA_FLAGS; the versions in constraints/ are known to work",
        )
    text, live_ranges, proto = paths
    return Dump(text.read_text(), found.read_text(), live_ranges.read_text(), proto.read_bytes())


def parse_assignment(text: str) -> tuple[RawAllocation, ...]:
    """The allocations of the text of a `*buffer-assignment.txt` file, with their values."""
    allocations: list[RawAllocation] = []
    head, values = "", []

    def finish() -> None:
        if head:
            words = re.sub(r"\|[^|]*\|", "", head)
            number, size = (int(word) for word in _ALLOCATION.match(words).groups())  # pyright: ignore[reportOptionalMemberAccess]
            parameter, color = _PARAMETER.search(words), _COLOR.search(words)
            allocations.append(
                RawAllocation(
                    number=number,
                    num_bytes=size,
                    parameter=int(parameter[1]) if parameter else None,
                    is_output="maybe-live-out" in words or "output shape" in words,
                    is_temp="preallocated-temp" in words,
                    is_constant=", constant" in words,
                    is_thread_local="thread-local" in words,
                    color=int(color[1]) if color else 0,
                    values=tuple(values),
                )
            )

    for line in text.split("\n"):
        if line.startswith("allocation "):
            finish()
            head, values = line, []
        elif match := _VALUE.match(line):
            name, phi, size, offset, shape = match.groups()
            values.append(HloValue(_indexed(name), bool(phi), int(size), int(offset), shape))
        elif line and not line[0].isspace() and head:
            break
    finish()
    return tuple(allocations)


def parse_live_ranges(text: str) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    """The schedule and the live ranges of the text of a `*live-range.txt` file.

    Returns:
        The names of the instructions in the order of the schedule, with each loop's body once, and for each value's name
        its first and last position: `{"x{}": (0, 12)}`.
    """
    schedule, ranges, part = [], {}, ""
    for line in text.split("\n"):
        if line.startswith("  ") and line[2:3] != " ":
            part = line.strip()
        elif part.startswith("InstructionSequence") and ":" in line:
            schedule.append(line.split(":", 1)[1].strip())
        elif part.startswith("BufferLiveRange") and (match := _RANGE.match(line)):
            ranges[_indexed(match[1])] = (int(match[2]), int(match[3]))
    return tuple(schedule), ranges


def _indexed(name: str) -> str:
    return name if name.endswith("}") else name + "{}"


@dataclass(frozen=True)
class Frames:
    """The Python stacks of a module's instructions, by `stack_frame_id`.

    Attributes:
        stacks: (number of the location, `stack_frame_id` of the caller) of each frame.
        locations: (file, function, line) of each location.
    """

    stacks: dict[int, tuple[int, int]]
    locations: dict[int, tuple[str, str, int]]

    def stack(self, frame: int) -> tuple[tuple[str, str, int], ...]:
        """The stack of `frame` as (file, function, line), the innermost frame first.

        JAX leaves out its own frames, and the callers of `begin_compile` are left out here.
        """
        found = list[tuple[str, str, int]]()
        while frame in self.stacks and len(found) < 1000:
            location, frame = self.stacks[frame]
            place = self.locations.get(location, ("", "", 0))
            if place[1] == OUTSIDE:
                break
            found.append(place)
        return tuple(found)

    def source(self, frame: int) -> str:
        """`file:line` of the innermost frame in the user's code.

        If no frame is in the user's code, the innermost frame counts. The result is empty if the stack is empty.
        """
        stack = self.stack(frame)
        of_user = [place for place in stack if is_users(place[0])]
        file, _, line = next(iter(of_user or stack), ("", "", 0))
        return f"{shown_file(file)}:{line}" if stack else ""


def short_source(source: str) -> str:
    """`file:line` with only the last folder of the path; records have the whole path.

    For example, `/home/me/model/layers.py:63` gives `model/layers.py:63`.
    """
    path, _, line = source.rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{line}" if path else source


def parse_frames(text: str) -> Frames:
    """The stacks in the tables at the head of a module's text; empty if XLA printed no tables."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in text.split("\n"):
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables[line] = {}
        elif line[:1].isdigit():
            number, _, rest = line.partition(" ")
            table[int(number)] = rest.strip('"')
        elif line.startswith(("%", "ENTRY")):
            break
    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    locations = {}
    for number, rest in tables.get("FileLocations", {}).items():
        fields = {key: int(value) for key, value in _FIELD.findall(rest)}
        file, function = files.get(fields.get("file_name_id", 0), ""), functions.get(fields.get("function_name_id", 0), "")
        locations[number] = (file, function, fields.get("line", 0))
    raw = {number: dict(_FIELD.findall(rest)) for number, rest in tables.get("StackFrames", {}).items()}
    parents = {number: int(fields.get("parent_frame_id", 0)) for number, fields in raw.items()}
    shift = any(parent >= number for number, parent in parents.items())  # XLA may print each parent one too high
    stacks = {number: (int(fields["file_location_id"]), parents[number] - shift) for number, fields in raw.items()}
    return Frames(stacks, locations)
