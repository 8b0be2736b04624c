"""Writes a compiled program as a profile whose buffers XProf's memory viewer shows.

The profile has the program and no trace. XProf reads programs from the plane `/host:metadata` of a profile. In a real run,
the profiler writes each program there as an `HloProto` with its buffer assignment. XLA dumps the same bytes during a
compile, so this module needs no run. For example, `write_xprof(Path("logs"), "dots b8", dump)` writes the file
`logs/plugins/profile/dots_b8/jaxremat.xplane.pb`.

References:
    tsl/profiler/protobuf/xplane.proto (the fields' numbers); xla/tsl/profiler/utils/xplane_schema.cc (the names).
"""

import re
from pathlib import Path

from jaxremat.system.files import named_by, write_whole
from jaxremat.xla.dump import Dump

_NO_WORD = re.compile(r"\W+")


def write_xprof(folder: Path, run: str, dump: Dump) -> Path:
    """Writes a profile of one program for `xprof --logdir FOLDER`, and returns its path.

    Args:
        folder: the log directory.
        run: name of the profile. Each run of characters other than letters, digits and `_` becomes one `_`.
        dump: the dump of the program's compile.

    Raises:
        JaxrematError: it can't be written.
    """
    module = (re.match(r"HloModule ([^\s,]+)", dump.hlo) or [run, run])[1]
    place = folder / "plugins" / "profile" / (_NO_WORD.sub("_", run).strip("_") or "run")
    path = place / "jaxremat.xplane.pb"
    with named_by("--xprof", path, "give a folder that is yours, on a disk with room; what was computed is printed"):
        place.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_xspace(module, dump.proto))
    return path


def to_xspace(module: str, hlo_proto: bytes) -> bytes:
    """The bytes of an `XSpace` whose only plane has the program called `module`."""
    stat = _number_field(1, 1) + _bytes_field(6, hlo_proto)
    event = _number_field(1, 1) + _bytes_field(2, f"{module}(1)".encode()) + _bytes_field(5, stat)
    stat_name = _number_field(1, 1) + _bytes_field(2, b"Hlo Proto")
    plane = _bytes_field(2, b"/host:metadata") + _bytes_field(4, _entry(1, event)) + _bytes_field(5, _entry(1, stat_name))
    return _bytes_field(1, plane)


def _entry(key: int, value: bytes) -> bytes:
    return _number_field(1, key) + _bytes_field(2, value)


def _number_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes_field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
