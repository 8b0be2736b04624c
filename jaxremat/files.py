"""The files that a user names with flags: reading them within bounds, and writing each whole or not at all.

Where a file can't be read or written, the user gets one message that names the flag and the file.
"""

import contextlib
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NoReturn

from jaxremat.errors import JaxrematError, UsageError


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
    """Writes `content` to the file at `path`, whole or not at all.

    Another process that reads `path` meanwhile, or after a crash, finds either all of it or the file as it was before.
    If `path` is a link, the file that it points to is written. The file's permissions stay as they are. A path that isn't a
    regular file (a pipe, `/dev/stdout`) is simply written to.

    Raises:
        OSError: the folder doesn't exist, the disk is full, or the like. `path` is then as it was before.
    """
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    place = Path(os.path.realpath(path))
    mode = place.stat().st_mode if place.exists() else 0o666 & ~_umask()
    number, part = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".part")
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
    """The folder of what is kept between commands: `jaxremat` in `$XDG_CACHE_HOME`, by default in `~/.cache`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path("~/.cache").expanduser()) / "jaxremat"


def _umask() -> int:
    """The permissions that new files don't get. Python can read them only by setting others for a moment."""
    found = os.umask(0o077)
    os.umask(found)
    return found


@contextlib.contextmanager
def named_by(flag: str, path: Path, next_step: str, error: type[JaxrematError] = JaxrematError) -> Iterator[None]:
    """A context for writing to the file or folder at `path`, which `flag` names. It turns an OSError into `error`.

    Args:
        flag: the flag, such as `--out`.
        path: the file or folder.
        next_step: the next step in the error's message.
        error: the class of the error to raise.
    """
    try:
        yield
    except OSError as found:
        raise error(f"{flag} {str(path)!r} cannot be written: {found.strerror}", next_step=next_step) from None


def check_writable(flag: str, path: Path) -> None:
    """Raises UsageError if the file at `path`, which `flag` names, can't be written. Called before anything is computed."""
    is_new = not path.exists()
    with named_by(flag, path, "give a file in a folder that exists and is yours", UsageError):
        path.open("a").close()
        if is_new:
            path.unlink()


def check_apart(written: Sequence[tuple[str, Path]], read: Sequence[tuple[str, Path]] = ()) -> None:
    """Checks, before anything is computed, that no file is written for two flags, and that none is both written and read.

    Links and hard links to one file are the same file. Devices and pipes (`/dev/stdout`) may be named twice.

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
    if path.exists() and other.exists():
        return os.path.samefile(path, other) and (path.is_file() or path.is_dir())
    return os.path.realpath(path) == os.path.realpath(other)
