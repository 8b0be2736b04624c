"""Writing the files that a user names with a flag: each whole or not at all, with one message where it can't be written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxremat.errors import JaxrematError, UsageError


def write_whole(path: Path, text: str) -> None:
    """Writes `text` to the file at `path`, whole or not at all.

    Another process that reads `path` meanwhile, or after a crash, finds either all of `text` or the file as it was before.
    A path that isn't a regular file (a pipe, `/dev/stdout`) is simply written to.

    Raises:
        OSError: the folder doesn't exist, the disk is full, or the like. `path` is then as it was before.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


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
