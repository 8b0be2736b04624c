"""Errors of the machine or its settings: memory, open files, a path, a variable.

    blamed(PermissionError(13, "Permission denied", "/root/x"), os.environ)   # '/root/x' cannot be used: Permission denied

This module is loaded with every command, because a process that may not open more files can't load it later.
"""

import errno
import re
from collections.abc import Iterator, Mapping

from jaxremat.errors import JaxrematError

#: What a command says where this machine, and not the device, has no memory left.
OUT_OF_HOST_MEMORY = JaxrematError(
    "this machine ran out of memory",
    cause="other processes, or a limit such as ulimit -v",
    next_step="a smaller model or batch, or a machine with more memory",
)
TOO_MANY_FILES = JaxrematError(
    "this process may not open more files", cause="a limit such as ulimit -n", next_step="ulimit -n 1024, or more"
)
#: What the loader of libraries, Python and C++ say where memory is short.
_NO_MEMORY = re.compile(r"failed to map segment|cannot allocate memory|can't start new thread|std::bad_alloc", re.IGNORECASE)
#: The errors of a path that only its user can mend.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG)
_VARIABLES = re.compile(r"(JAX|XLA|TF|CUDA|NVIDIA)_\w+")


def blamed(error: BaseException, environment: Mapping[str, str]) -> JaxrematError | None:
    """The message of an error of the machine or its settings.

    None for any other error.

    Args:
        error: the error, with those that led to it.
        environment: the variables of this process.
    """
    errors = [*_chain(error)]
    text = "\n".join(map(str, errors))
    numbers = {one.errno for one in errors if isinstance(one, OSError)}
    if any(isinstance(one, MemoryError) for one in errors) or errno.ENOMEM in numbers or _NO_MEMORY.search(text):
        return OUT_OF_HOST_MEMORY
    if numbers & {errno.EMFILE, errno.ENFILE} or "Too many open files" in text:
        return TOO_MANY_FILES
    if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_PATHS:
        return JaxrematError(
            f"{str(error.filename)!r} cannot be used: {error.strerror}",
            next_step="give a path that is yours, on a disk with room",
        )
    for name, value in environment.items():
        is_named = name.lower() in text.lower() or (name == "JAX_PLATFORM_NAME" and "Unknown backend" in text)
        if is_named and _VARIABLES.fullmatch(name) and value != "cpu":
            return JaxrematError(
                f"JAX can't work with {name}={value}: {str(error).partition(chr(10))[0]}",
                next_step=f"unset {name}; python -m jaxremat doctor looks at all variables",
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
