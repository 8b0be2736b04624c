"""XLA's results for GPUs that aren't here, stored in the user's cache.

No program is compiled twice. All commands and processes share the store. A result is XLA's memory analysis with its dump of
the compiled program, or the words in which XLA rejected the program. What this package derives from them isn't stored: a
mended reader or clock takes effect. Executables aren't stored either.

    program = without_addresses(lowered.as_text(debug_info=True))
    key = result_key(program, target, options)
    store_result(key, XlaResult(5.3, memory, text, dump))
    stored_result(key)  # in another process, tomorrow: the same

The key is a hash of everything that the result depends on: the lowered program, the target's description, the compiler's options,
the environment, JAX's settings, and versions. The program's source lines belong to the key, because XLA's dump has them. So a
result is never shown with the lines of an older source, and an edit that moves lines of the program makes another key. Callers of
`begin_compile` aren't part of the program (`dump.OUTSIDE`), so that all commands have the same keys.

Each result is one file, compressed with zlib. On a dump of 1.4 MB, zlib takes 0.03 s and leaves 12 %; lzma takes 0.5 s and leaves
8 %. A file is written whole, and its time is that of its last use. Beyond the size of `SIZE`, the files unused for longest are
removed.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxremat.chips.installed import AOT_WHEELS, DEVICE_VARIABLES, LIBTPU, PLUGINS, TOOLS, VARIABLES, version_of
from jaxremat.errors import UsageError
from jaxremat.system.files import cache_folder, write_whole
from jaxremat.units import parse_bytes
from jaxremat.xla.dump import OUTSIDE, Dump
from jaxremat.xla.memory import CompiledMemory

if TYPE_CHECKING:
    from jaxremat.chips.target import Target

#: The variable of the environment with the most bytes that the store may take, such as `500MiB`. `0` turns the store off.
SIZE = "JAXREMAT_COMPILED_SIZE"
DEFAULT_SIZE = "2GiB"
#: The variable with the time, in seconds since 1970, before which results aren't used. `--fresh` sets it for all processes.
SINCE = "JAXREMAT_COMPILED_SINCE"
#: Part of each key. Another number makes all files that are there unused.
_FORMAT = 1
#: Variables of the environment that change what XLA compiles, or which libraries it finds. `TF_CLI_...` are of Terraform.
_VARIABLE = re.compile(rf"({VARIABLES}|TF|XLA)_(?!CLI_)\w+|LD_LIBRARY_PATH|LD_PRELOAD")
#: Those among them that only change what XLA prints, or what it does with a device.
_OF_PRINTS_OR_DEVICES = re.compile(rf"TF_CPP_\w+|XLA_(PYTHON_)?CLIENT_\w+|{DEVICE_VARIABLES}")
#: JAX's settings that say where a process runs, and what JAX caches of other compiles.
_OF_PROCESS = re.compile(r"jax_(enable_compilation|compilation|persistent)_cache\w*|jax_platforms|jax_platform_name")
#: A line of a program's text that defines a location: `#loc7 = loc(callsite(#loc5 at #loc6))`.
_LOCATION = re.compile(r"^(#loc\d*) = (.*)(?:\n|\Z)", re.MULTILINE)
_REFERENCE = re.compile(r"#loc\d*")
_CALL = re.compile(r"loc\(callsite\((#loc\d*) at (#loc\d*)\)\)")
#: An operation that says in Python how a mesh divides it, by the address of its functions in this process.
_DIVIDED_IN_PYTHON = re.compile(r'(@CustomSPMDPartitioning\([^\n]*?backend_config = ")(\d+)')


@dataclass(frozen=True)
class XlaResult:
    """What XLA returned for a program.

    Attributes:
        compile_s: seconds that XLA took when it compiled the program, however long ago.
        memory: XLA's memory analysis.
        hlo_text: the scheduled, optimized HLO of the executable. The dump has it as it was some passes before.
        dump: the compiled program and its buffers, as XLA wrote them. A stored result has them.
        is_too_large: whether XLA rejected the program as too large. `memory` then has the bytes that it needs, and nothing
            else is known.
    """

    compile_s: float
    memory: CompiledMemory
    hlo_text: str
    dump: Dump | None
    is_too_large: bool = False


@dataclass(frozen=True)
class _Stored:
    """A file of the store: a result, or XLA's rejection, and when it was made, in s since 1970."""

    made_s: float
    result: XlaResult | None
    rejection: str


def is_size(text: str) -> bool:
    """Whether `text` says how many bytes the store may take."""
    with contextlib.suppress(UsageError):
        return text == "0" or parse_bytes(text, needs_unit=False) > 0
    return False


def ignore_older_results() -> None:
    """Makes this process, and those that it starts, ignore the results that were stored before.

    Theirs are stored and used.
    """
    os.environ[SINCE] = repr(time.time())


def is_ignored(made_s: float) -> bool:
    """Whether what was stored at a time, in seconds since 1970, isn't used (`SINCE`)."""
    return made_s < float(os.environ.get(SINCE, "0"))


def result_key(program: str, target: "Target", options: Mapping[str, Any]) -> str | None:
    """The key of a program's result.

    Args:
        program: the lowered program with its locations, of `without_addresses`.
        target: the GPUs, which aren't here.
        options: the compiler options, without those that only say where XLA writes.

    Returns:
        None if the store is turned off, and if an option or XLA_FLAGS names a file. XLA may read the file, whose content isn't
        in the key, or write it, which a stored result wouldn't.

    Raises:
        UsageError: the variable of the store's size has no size.
    """
    import jax

    from jaxremat.policy.jax_private import xla_flags

    flags = [*os.environ.get("XLA_FLAGS", "").split(), *(f"--{name}={value}" for name, value in options.items())]
    if not _size() or any(map(_names_file, flags)):
        return None
    mesh = target.mesh_shape
    settings = {
        **_made_by(),
        "target": [
            *(target.text, mesh.nodes, mesh.num_devices, [device.id for device in target.devices]),
            *([mesh.topology] if mesh.topology else []),
        ],
        "options": options,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if _VARIABLE.fullmatch(name) and not _OF_PRINTS_OR_DEVICES.fullmatch(name)
        },
        "flags": hashlib.sha256(xla_flags()).hexdigest(),
        "jax": {name: value for name, value in jax.config.values.items() if not _OF_PROCESS.fullmatch(name)},
    }
    text = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.sha256(f"{text}\0{_without_callers(program)}".encode()).hexdigest()


def kernels_path(target: "Target") -> Path:
    """The file of the compiled kernels that all processes share (`xla/saved_kernels.py`).

    It is one of the store, so that it is removed like a result.
    """
    text = json.dumps({**_made_by(), "compute_capability": target.compute_capability}, sort_keys=True)
    return _folder() / f"kernels-{hashlib.sha256(text.encode()).hexdigest()}"


def _made_by() -> dict[str, Any]:
    """What compiles: its versions and tools, and the format of the store."""
    return {"format": _FORMAT, "versions": _versions(), "tools": [_state(shutil.which(name)) for name in TOOLS]}


def without_addresses(program: str) -> str:
    """The text of a program without addresses of this process.

    On a mesh, fused attention says in Python how it is divided (`custom_partitioning`). The lowered text has the address of its
    functions, which know the mask and the window, for example. What JAX's own functions are called with stands in place of the
    address here. It says the same in any process, because the functions are those of JAX's version. An operation of
    another package still has its address, and a program with it isn't found in the store by another process.

    Args:
        program: the lowered program with its locations, `lowered.as_text(debug_info=True)`, while `lowered` exists.
    """
    from jaxremat.policy.jax_private import divided_in_python

    return _DIVIDED_IN_PYTHON.sub(lambda found: found[1] + (divided_in_python(found[2]) or found[2]), program)


def _names_file(flag: str) -> bool:
    name, _, value = flag.partition("=")
    return not name.startswith("--") or name.startswith("--xla_dump") or "/" in value or bool(value and Path(value).exists())


@functools.cache
def _versions() -> dict[str, str | None]:
    """The versions of what compiles: jax, its plugins, and the wheels that these name."""
    named = [word for plugin in PLUGINS if version_of(plugin) for word in metadata.requires(plugin) or ()]
    wheels = [match[0] for word in named if (match := re.match(r"[\w.-]+", word))]
    return {name: version_of(name) for name in ("jax", "jaxlib", *PLUGINS, *wheels, *AOT_WHEELS, LIBTPU)}


def _state(path: str | None) -> tuple[str, int, int] | None:
    """What tells one program of the PATH from another: its path, size and time."""
    return (path, (found := os.stat(path)).st_size, found.st_mtime_ns) if path else None


def _without_callers(program: str) -> str:
    """A program's text with a hash for each location, without callers of `begin_compile`.

    MLIR numbers locations in the order in which it meets them, and those of the callers are among them.
    """
    definitions = dict(_LOCATION.findall(program))

    def is_outside(name: str) -> bool:
        definition = definitions.get(name, "")
        call = _CALL.fullmatch(definition)
        return is_outside(call[1]) if call else definition.startswith(f'loc("{OUTSIDE}"(')

    @functools.cache
    def digest(name: str) -> str:
        definition = definitions.get(name, name)
        if is_outside(name):
            return OUTSIDE
        if (call := _CALL.fullmatch(definition)) and is_outside(call[2]):
            return digest(call[1])
        inside = _REFERENCE.sub(lambda found: digest(found[0]) if found[0] != name else name, definition)
        return hashlib.sha256(inside.encode()).hexdigest()[:16]

    return _REFERENCE.sub(lambda found: digest(found[0]), _LOCATION.sub("", program))


def stored_result(key: str) -> XlaResult | None:
    """The result stored under `key`; None if there is none. A damaged file is removed.

    Raises:
        RuntimeError: XLA rejected the program.
    """
    import msgspec

    path = _folder() / key
    try:
        stored = msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=_Stored)
    except OSError:
        return None
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError):
        _remove(path)
        return None
    if is_ignored(stored.made_s):
        return None
    with contextlib.suppress(OSError):  # somebody else's store, which can be read
        os.utime(path)
    if stored.rejection:
        raise RuntimeError(stored.rejection)
    return stored.result


def store_result(key: str, result: XlaResult | str) -> None:
    """Stores a result, or XLA's words about a program that it rejected.

    Where the store can't be written, nothing is stored, and one warning says so.
    """
    import msgspec

    folder = _folder()
    stored = _Stored(time.time(), *((None, result) if isinstance(result, str) else (result, "")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / key, zlib.compress(msgspec.msgpack.encode(stored)))
    except OSError as error:
        found = f"what XLA compiles can't be stored in {folder} ({error.strerror}), and is compiled each time"
        warnings.warn(f"jaxremat: {found}; XDG_CACHE_HOME names another place", stacklevel=1)
    else:
        _remove_oldest(folder, _size())


def _remove_oldest(folder: Path, most_bytes: int) -> None:
    """Removes the longest unused files, until all others have at most `most_bytes`."""
    found = []
    for entry in os.scandir(folder):
        try:
            found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        except OSError:
            continue  # another process has removed it
    num_bytes = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if num_bytes <= most_bytes:
            return
        _remove(Path(path))
        num_bytes -= size


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_folder() / "compiled"


def _size() -> int:
    """The most bytes that the store may take; 0 if it is turned off.

    Raises:
        UsageError: the variable of the environment has no size.
    """
    text = os.environ.get(SIZE, DEFAULT_SIZE)
    if not is_size(text):
        raise UsageError(f"{SIZE}={text} isn't a size", allowed="a size such as 2GiB, or 0", next_step=f"unset {SIZE}")
    return 0 if text == "0" else parse_bytes(text, needs_unit=False)
