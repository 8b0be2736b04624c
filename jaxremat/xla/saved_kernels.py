"""The kernels that XLA compiles for GPUs that aren't here, saved for the next program.

For each kernel XLA starts a process of the chip's assembler. It spends most of the time in which it compiles a scan there and in
LLVM. The programs of two policies share most of their kernels. XLA can save them in a file, which it reads where it begins a
program and writes at its end. What this package reads of a program doesn't depend on its kernels.

    with saved_kernels(target, own, shared) as options:    # the option with XLA's file
        lowered.compile(options)

XLA's file is of one thread, so that nobody else reads or writes it meanwhile. All threads, processes and commands share another
one, beside the results (`xla/results.py`). A thread begins with a copy of that, and replaces it where it has more. Of two threads
that do so at once, the kernels of one are lost.
"""

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxremat.system.files import write_whole
from jaxremat.xla.options import kernel_options
from jaxremat.xla.results import is_ignored

if TYPE_CHECKING:
    from jaxremat.chips.target import Target

#: A new file is begun in place of a larger one, because XLA reads all of it for each program.
MOST_BYTES = 2**24
#: The bytes of the checksum with which a shared file begins.
_CHECKSUM = 4


@contextlib.contextmanager
def saved_kernels(target: "Target", folder: Path, shared: Path | None) -> Iterator[Mapping[str, Any]]:
    """A context with the options of a compile that saves its kernels.

    Those that a program before it has saved aren't compiled.

    Args:
        target: what is compiled for. The options are empty for a device that is here.
        folder: where the files of this process are.
        shared: the file of all threads and processes. None where each thread has its own kernels alone.
    """
    own = folder / threading.current_thread().name
    options = kernel_options(target, own)
    if options and shared and (content := _kernels_in(shared)):
        own.write_bytes(content)
    before = _size(own)
    if before > MOST_BYTES:
        own.unlink()
    yield options
    if shared and _size(own) not in (0, before):
        content = own.read_bytes()
        with contextlib.suppress(OSError):  # a store that can't be written; storing the result says so
            shared.parent.mkdir(parents=True, exist_ok=True)
            write_whole(shared, _checksum(content) + content)


def _kernels_in(shared: Path) -> bytes:
    """The kernels of a shared file.

    Empty where there are none, where the file is damaged, and where `--fresh` ignores it.
    """
    with contextlib.suppress(OSError):
        whole = shared.read_bytes()
        checksum, content = whole[:_CHECKSUM], whole[_CHECKSUM:]
        if _checksum(content) == checksum and not is_ignored(shared.stat().st_mtime):
            return content
    return b""


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM, "big")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
