"""Files that people name with a flag: whole or not at all, and one message for each that can't be written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxremat.errors import JaxrematError, UsageError


def write_whole(path: Path, text: str) -> None:
    """Writes `text`; whoever reads `path` meanwhile, or after a crash, finds all of it or what was there before.

    What isn't a regular file (a pipe, `/dev/stdout`) is only written to.

    Raises:
        OSError: the folder isn't there, the disk is full, or the like; `path` is as it was before.
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
    """Around a write to the file or folder that `flag` names: an OSError becomes `error`, with what to do next."""
    try:
        yield
    except OSError as found:
        raise error(f"{flag} {str(path)!r} cannot be written: {found.strerror}", next_step=next_step) from None


def check_writable(flag: str, path: Path) -> None:
    """Raises UsageError, before anything is computed, if the file that `flag` names can't be written."""
    is_new = not path.exists()
    with named_by(flag, path, "give a file in a folder that exists and is yours", UsageError):
        path.open("a").close()
        if is_new:
            path.unlink()
