"""Runs the user's code: its prints go to stderr, its exceptions become a `UserCodeError`.

    with user_code("importing train.py"):
        importlib.import_module("train")
    loss = wrap_user_function(loss, "the loss of train.py:workload")

stdout then holds only what the command prints, such as the records of --json. The message of the error ends with the user's
own traceback:

    the loss of train.py:workload raised ValueError.
    Traceback (most recent call last):
      File "/home/me/train.py", line 12, in loss
        return model.apply(params, batch["x"] @ batch["y"])
    ValueError: ...

The frames of JAX, Flax and this package are left out of it. With the environment variable `JAX_TRACEBACK_FILTERING=off`,
which JAX has for its own tracebacks, they stay.
"""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from jaxremat.errors import JaxrematError, UsageError, UserCodeError
from jaxremat.mesh.axes import AXES
from jaxremat.system.interrupt import raise_if_interrupted
from jaxremat.system.whose import is_pythons, is_within, package_folders

#: The packages whose frames are left out of a user's traceback.
HIDDEN = ("jax", "jaxlib", "flax", "jaxremat")
_END = object()
#: By a part of JAX's message about a sharding by names of axes: what is wrong with it, and the next step.
_MESH_ERRORS = {
    "requires a non-empty mesh in context": (
        "there is no mesh",
        "--mesh fsdp=8, or another mesh; --mesh fsdp=1 for one device",
    ),
    f"is not found in mesh: {tuple(AXES)}": (
        "--mesh has no such axis",
        "PartitionSpec(('data', 'fsdp')) for samples, and 'tensor' for heads and an MLP's width",
    ),
}


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """A context in which the user's code runs.

    Args:
        what: what is done, for the error's message, such as `importing train.py`.

    Raises:
        UserCodeError: the code raised an exception, or called `sys.exit` or `os._exit`. A `JaxrematError`, Ctrl-C, and a device
            or a machine that has run out of memory pass as they are.
        UsageError: the code says by axes of a mesh how an array lies, and the mesh doesn't have them; or it changes an NNX
            object that isn't among its arguments.
    """
    with output_to_stderr(), _exits_raised():
        try:
            yield
        except (JaxrematError, KeyboardInterrupt, GeneratorExit, MemoryError):
            raise
        except BaseException as error:
            raise_if_interrupted()  # an interrupt that JAX swallowed can raise anything
            if _is_out_of_device_memory(error):
                raise
            from jaxremat.policy.state import refused_change

            raise _of_a_mesh(what, error) or refused_change(error) or _as_user_code_error(what, error) from error


@contextlib.contextmanager
def _exits_raised() -> Iterator[None]:
    """A context in which `os._exit` raises SystemExit, so that the command ends with an answer.

    A forked child does exit.
    """
    process, leave = os.getpid(), os._exit

    def raised(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        raise SystemExit(status)

    os._exit = raised
    try:
        yield
    finally:
        os._exit = leave


def output_to_stderr() -> contextlib.redirect_stdout:
    """A context in which what Python code prints to stdout goes to stderr.

    A compiled program with `jax.debug.print` in it prints while it runs. A measured step therefore needs this context too,
    up to `jax.effects_barrier()`.
    """
    return contextlib.redirect_stdout(sys.stderr)


def wrap_user_function(function: Callable[..., Any], what: str = "the user's code") -> Callable[..., Any]:
    """The same function, each call of which runs in `user_code`.

    `inspect.signature` sees the function's own signature. A jitted function stays one.

    Args:
        function: a function of the user's.
        what: what it is, for the error's message, such as `the loss of train.py:workload`.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with user_code(what):
            return function(*args, **kwargs)

    return with_trace(wrapped, function, lambda trace: wrap_user_function(trace, what))


def with_trace(
    wrapped: Callable[..., Any], function: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """`wrapped` with `function`'s method `trace`, wrapped as well, if it is a jitted function.

    It then is compiled as that one, with its own shardings and its own donation.
    """
    if hasattr(function, "trace"):
        vars(wrapped)["trace"] = wrap(function.trace)  # pyright: ignore[reportFunctionMemberAccess]
    return wrapped


def wrap_user_batches(function: Callable[..., Any], what: str) -> Callable[..., Iterator[Any]]:
    """The same function that makes an iterator, run in `user_code`, each step of it too."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with user_code(what):
            iterator = iter(function(*args, **kwargs))
        while True:
            with user_code(what):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    return wrapped


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` as Python prints it, from the user's first frame on.

    Frames of `HIDDEN` are left out. An exception that the error was raised from, or during, is shown before it as usual,
    unless no frame of it is the user's.
    """
    found = _found_traceback(error)
    return "".join(found.format() if found.stack else found.format_exception_only()).rstrip("\n")


def _found_traceback(error: BaseException) -> traceback.TracebackException:
    found = traceback.TracebackException.from_exception(error)
    if os.environ.get("JAX_TRACEBACK_FILTERING") != "off":
        _shorten(found)
    return found


def _of_a_mesh(what: str, error: BaseException) -> UsageError | None:
    """The error of code that says how an array lies by axes of a mesh that isn't there.

    None for another error.
    """
    said = next((said for part, said in _MESH_ERRORS.items() if part in str(error)), None)
    if said is None:
        return None
    wrong, next_step = said
    frames = _found_traceback(error).stack
    place = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return UsageError(
        f"{what} says by axes of a mesh how an array lies{place}, and {wrong}",
        allowed=f"the axes of --mesh: {', '.join(AXES)}",
        cause=str(error).partition(". ")[0],
        next_step=next_step,
    )


def _as_user_code_error(what: str, error: BaseException) -> UserCodeError:
    if isinstance(error, SystemExit):
        return UserCodeError(
            f"{what} ended the process with exit code {error.code or 0}",
            cause="sys.exit or os._exit in a script's main part, which also runs when the file is imported",
            next_step='put that part under if __name__ == "__main__":',
            trace=user_traceback(error),
        )
    is_shape = "ShapeDtypeStruct" in str(error)
    return UserCodeError(
        f"{what} raised {type(error).__name__}",
        cause="it computes with a shape, as jax.eval_shape and nnx.eval_shape make them, that it reads from outside"
        * is_shape,
        next_step="give what it reads to it: in params, or in the batch" * is_shape,
        trace=user_traceback(error),
    )


def _is_out_of_device_memory(error: BaseException) -> bool:
    """Whether JAX raised this because the device's memory was full, a result of a trial."""
    from jax.errors import JaxRuntimeError

    return isinstance(error, JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _shorten(found: traceback.TracebackException) -> None:
    """Leaves only the user's frames in `found`, and in the exceptions that it tells of."""
    hidden = [folder for name in HIDDEN for folder in package_folders(name)]
    shown = [f for f in found.stack if not (is_within(f.filename, *hidden) or f.filename.startswith("<frozen "))]
    first = next((n for n, frame in enumerate(shown) if not is_pythons(frame.filename)), len(shown))
    found.stack[:] = shown[first:]
    for other in (found.__cause__, found.__context__, *(found.exceptions or ())):
        if other is not None:
            _shorten(other)
    if found.__cause__ is not None and not found.__cause__.stack:
        found.__cause__ = None
    if found.__context__ is not None and not found.__context__.stack:
        found.__context__ = None
