"""The files that a user names with flags.

They are read within bounds, and each is written whole or not at all.

Where a file can't be read or written, the user gets one message that names the flag and the file. `check_outputs` says so before
anything is computed, where it can be known.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NoReturn

from jaxremat.errors import JaxrematError, UsageError

#: The flags whose values name files that a command only reads. Flags whose values are paths otherwise name what it writes.
READ = ("lengths", "price", "data", "hf", "target", "policy", "model", "weights")
#: The flags whose values name folders that a command writes to.
FOLDERS = ("--xprof", "--run-dir", "--submit")
#: The next step where the folder of temporary files can't be written.
OTHER_TMPDIR = "free some room, or name another folder for temporary files: TMPDIR=/path"


def parse_json(text: str | bytes) -> Any:
    """The value that JSON text holds.

    Raises:
        ValueError: it is no JSON, as with NaN and Infinity, or is nested too deeply for Python.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def parse_toml(text: str) -> dict[str, Any]:
    """The table that TOML text holds.

    Raises:
        ValueError: it is no TOML, or is nested too deeply for Python, or has a number of too many digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes `content` to the file at `path`, whole or not at all. Text is written as UTF-8.

    Another process that reads `path` meanwhile, or after a crash, finds either all of it or the file as it was before.
    If `path` is a link, the file that it points to is written. The file's permissions stay as they are. A path that isn't a
    regular file (a pipe, `/dev/stdout`) is simply written to.

    Raises:
        OSError: the folder doesn't exist, the disk is full, or the like. `path` is then as it was before.
    """
    content = content.encode() if isinstance(content, str) else content
    if os.path.exists(path) and not path.is_file():
        path.write_bytes(content)
        return
    place = Path(os.path.realpath(path))
    mode = place.stat().st_mode if os.path.exists(place) else 0o666 & ~_umask()
    number, part = tempfile.mkstemp(dir=place.parent, prefix=".jaxremat.", suffix=".part")
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, mode)
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def cache_folder() -> Path:
    """The folder of what is saved between commands.

    It is `jaxremat` in `$XDG_CACHE_HOME`, by default in `~/.cache`.

    A user without a home, as in some containers, has a folder in which nothing is found, and in which nothing can be written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            folder = Path("/nonexistent")
    return folder / "jaxremat"


def _umask() -> int:
    """The permissions that new files don't get.

    Python can read them only by setting others for a moment.
    """
    found = os.umask(0o077)
    os.umask(found)
    return found


@contextlib.contextmanager
def named_by(flag: str, path: Path, next_step: str, error: type[JaxrematError] = JaxrematError) -> Iterator[None]:
    """A context for writing to the file or folder at `path`, which `flag` names.

    It turns an OSError into `error`.

    Args:
        flag: the flag, such as `--out`.
        path: the file or folder.
        next_step: the next step in the error's message.
        error: the class of the error to raise.
    """
    try:
        yield
    except OSError as found:
        raise unwritten(flag, path, found, next_step, error) from None


def unwritten(
    flag: str, path: Path, found: OSError, next_step: str, error: type[JaxrematError] = JaxrematError
) -> JaxrematError:
    """The error for a file or folder at `path` that can't be written.

    If the disk is full, the error says how many bytes are free.
    """
    is_full = found.errno in (errno.ENOSPC, errno.EDQUOT)
    return error(
        f"{flag} {str(path)!r} cannot be written: {found.strerror or found}",
        cause=f"its disk is full, with {free_bytes(path):,} bytes free" if is_full else "",
        next_step=next_step,
    )


def free_bytes(path: Path) -> int:
    """The bytes that are free where the file or folder at `path` lies, or would lie."""
    return shutil.disk_usage(_there(path)).free


def _there(path: Path) -> Path:
    """The path, or the folder nearest above it that exists."""
    place = Path(os.path.realpath(path))
    return next(each for each in (place, *place.parents) if os.path.exists(each))


def named_files(flags: Any) -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
    """The files that a command writes, and those that it reads, each with its flag.

    Such as `[("--out", Path("r.jsonl"))], [...]`.
    """
    written, read = list[tuple[str, Path]](), list[tuple[str, Path]]()
    for field in dataclasses.fields(flags):
        value, flag = getattr(flags, field.name), f"--{field.name.replace('_', '-')}"
        if isinstance(value, Path) and field.name not in READ:
            written.append((flag, value))
        elif value and field.name in READ:
            words = [value] if isinstance(value, str | Path) else value
            files = [re.sub(r"(\.py):.*", r"\1", str(word).removeprefix("plan:"), flags=re.DOTALL) for word in words]
            read += [(flag, Path(file)) for file in files if os.path.isfile(file)]
    return written, read


def check_outputs(flags: Any) -> None:
    """Checks that what a command writes can be written.

    This is its files and folders, and temporary ones. The check is made before anything is computed.

    Args:
        flags: the command's flags.

    Raises:
        UsageError: one can't be written.
    """
    for flag, path in named_files(flags)[0]:
        check_writable(flag, path)
    try:
        try_in(Path(tempfile.gettempdir()))
    except OSError as found:
        raise UsageError(f"no temporary file can be written: {found.strerror}", next_step=OTHER_TMPDIR) from None


def check_writable(flag: str, path: Path) -> None:
    """Checks that the file or folder at `path`, which `flag` names, can be written.

    Nothing is left behind. A file is written by another one that takes its place, so its folder must be one's own, too. `--out`
    is only appended to.

    Raises:
        UsageError: it can't be written.
    """
    kind = "folder that is yours" if flag in FOLDERS else "file in a folder that exists and is yours"
    with named_by(flag, path, f"give a {kind}, on a disk with room", UsageError):
        place = Path(os.path.realpath(path))
        if flag in FOLDERS:
            try_in(_there(place))
        elif os.path.exists(place) and not (
            place.is_file() or place.is_dir()
        ):  # a pipe, which opening would wait for, or would end
            if not os.access(place, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            is_new = False
            try:
                os.close(os.open(place, os.O_WRONLY | os.O_APPEND))
            except FileNotFoundError:
                is_new = True
            if is_new or flag != "--out":
                try_in(place.parent)  # and not the file itself, which another command may begin to write


def try_in(folder: Path) -> None:
    """Writes a page of bytes to a file without a name in `folder`.

    Raises:
        OSError: that isn't possible.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(4096))


def check_apart(written: Sequence[tuple[str, Path]], read: Sequence[tuple[str, Path]] = ()) -> None:
    """Checks that no file is written for two flags, and that none is both written and read.

    The check is made before anything is computed. Links and hard links to one file are the same file. Devices and pipes
    (`/dev/stdout`) may be named twice.

    Args:
        written: flags, each with a file that the command writes.
        read: flags, each with a file that the command reads.

    Raises:
        UsageError: two flags name one file.

    Example:
        check_apart([("--out", Path("r.jsonl")), ("--csv", Path("r.jsonl"))])   # UsageError: they name one file
    """
    pairs = [*combinations(written, 2), *product(read, written)]
    for (flag, path), (other, place) in pairs:
        if _is_one_file(path, place):
            raise UsageError(
                f"{flag} {str(path)!r} and {other} {str(place)!r} name one file",
                allowed="a file of its own for each flag",
                next_step=f"give {other} another file",
            )


def _is_one_file(path: Path, other: Path) -> bool:
    """Whether two paths lead to one regular file or folder, which needn't exist yet."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other) and (path.is_file() or path.is_dir())
    return os.path.realpath(path) == os.path.realpath(other)
