"""What XLA writes beside a compile about its buffers, read into dataclasses: pure text, no JAX.

References:
    xla/service/buffer_assignment.cc, `BufferAssignment::ToString`; xla/hlo/utils/hlo_live_range.cc, `HloLiveRange::ToString`;
    xla/service/hlo.proto, `StackFrameIndexProto`, printed at the head of a module's text.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from jaxremat.errors import CompileError
from jaxremat.xla import hlo

#: Compiler options that make XLA write them; `xla_dump_to` names the folder.
OPTIONS = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)")
_PARAMETER = re.compile(r", parameter (\d+)")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r" value: <\d+ (\S+?)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    (\S+):(\d+)-(\d+)$")
_FRAME = re.compile(r"(\d+) \{(.*)\}$")
_FIELD = re.compile(r"(\w+)=(\d+)")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Dump:
    """Of one module: its scheduled HLO, buffer assignment and live ranges as text, and the `HloProto` that XProf reads."""

    hlo: str
    assignment: str
    live_ranges: str
    proto: bytes


@dataclass(frozen=True, slots=True)
class HloValue:
    """One value in an allocation; `name` always with its index, `while.2{5}`; `is_phi`: it only passes another one on."""

    name: str
    is_phi: bool
    num_bytes: int
    offset: int
    shape: str


@dataclass(frozen=True, slots=True)
class RawAllocation:
    """One line `allocation ...` and its values. `parameter` is the entry's; `color` XLA's memory space."""

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
    """The dump that a compile left in `folder`; of several modules, the largest: autotuning compiles small ones of its own.

    Raises:
        CompileError: XLA left none.
    """
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
    """The allocations of a `*buffer-assignment.txt`, with their values."""
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
    """The schedule of a `*live-range.txt`, loops opened once, and each value's first and last position by its name."""
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
    """The Python stacks of a module's instructions, by `stack_frame_id`, innermost frame first."""

    stacks: dict[int, tuple[int, int]]
    locations: dict[int, tuple[str, str, int]]

    def stack(self, frame: int) -> tuple[tuple[str, str, int], ...]:
        """(file, function, line) from the innermost frame out; JAX left its own ones out."""
        found = []
        while frame in self.stacks and len(found) < 1000:
            location, frame = self.stacks[frame]
            found.append(self.locations.get(location, ("", "", 0)))
        return tuple(found)

    def source(self, frame: int) -> str:
        """`file:line` of the innermost frame in the user's code, else of the innermost; empty where there is none."""
        stack = self.stack(frame)
        of_user = [place for place in stack if is_users(place[0])]
        return f"{(of_user or stack)[0][0]}:{(of_user or stack)[0][2]}" if stack else ""


def is_users(path: str) -> bool:
    """Whether a person would look for the cause there: not in a library, nor in how this package runs the layers."""
    if Path(path).is_relative_to(_PACKAGE):
        return Path(path).relative_to(_PACKAGE).parts[0] in ("model", "step")
    return not (path.startswith("<") or re.search(r"/(site|dist)-packages/|/lib/python3[^/]*/", path))


def short_source(source: str) -> str:
    """`file:line` with the file's own folder, `model/layers.py:63`; records have the whole path."""
    path, _, line = source.rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{line}" if path else source


def parse_frames(text: str) -> Frames:
    """The tables at the head of a module's text; empty where XLA printed none."""
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
    shift = any(parent >= number for number, parent in parents.items())  # XLA prints parents counted from one too many
    stacks = {number: (int(fields["file_location_id"]), parents[number] - shift) for number, fields in raw.items()}
    return Frames(stacks, locations)
