"""What every command does before and after its own work: it parses flags, and ends with an exit code and no traceback."""

import codecs
import dataclasses
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import tyro

from jaxremat.errors import JaxrematError, UsageError
from jaxremat.files import check_apart
from jaxremat.flags import StepFlags
from jaxremat.interrupt import EXIT_CODE, remembered
from jaxremat.policy.offload import only_our_compiles
from jaxremat.request import Request, StepFlagsT
from jaxremat.xla.gpu import nvidia_driver, target_name

FlagsT = TypeVar("FlagsT")
#: By the flag's name in version 0.1, its name now. Version 0.2 still takes the old name, with a note. Version 0.3 will not.
RENAMED_FLAGS = {"--margin": "--headroom"}
#: The flags whose values name files that a command only reads. Flags whose values are paths otherwise name files that it writes.
READ = ("lengths", "price", "data", "hf", "target", "policy", "model")
#: The errors of a stream that can't be written.
_OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF)
#: What stands in place of our own characters where a stream can't show them.
_IN_ASCII = {"±": "+-", "─": "-", "…": "...", "→": "->", "×": "x", "\u2011": "-"}
#: What a command says where this machine, and not the device, has no memory left.
OUT_OF_HOST_MEMORY = JaxrematError(
    "this machine ran out of memory",
    cause="other processes, or a limit such as ulimit -v",
    next_step="a smaller model or batch, or a machine with more memory",
)
#: What a command says below the traceback of an error that no user could have caused.
REPORT = JaxrematError(
    "this is a fault of jaxremat",
    next_step="report it with the traceback above, the command, and what python -m jaxremat.doctor --json prints",
)
#: The flags whose value may be the empty text.
MAY_BE_EMPTY = ("--rope-scaling",)


def parse_flags(kind: type[FlagsT], argv: Sequence[str], prog: str = "jaxremat") -> FlagsT:
    """The flags of one command. For --help or a wrong flag, tyro itself prints the help or an error, and exits with 0 or 2.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments, without the program's name.
        prog: the command's name in its help and notes.

    Raises:
        UsageError: a flag has an empty value, or one that takes a single value was given twice, or two name one file.
    """
    arguments = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        name = RENAMED_FLAGS.get(flag, flag)
        if name != flag:
            print(f"{prog}: {flag} is called {name} now", file=sys.stderr)
        arguments.append(f"{name}{equals}{value}")
    _check_words(kind, arguments)
    flags = tyro.cli(kind, args=arguments, prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    check_apart(*named_files(flags))
    return flags


def _check_words(kind: type, arguments: Sequence[str]) -> None:
    """Checks the arguments before they are parsed. The parser would take the last of several values.

    Raises:
        UsageError: a flag has an empty value, or one that takes a single value was given twice.
    """
    repeatable, seen = repeatable_flags(kind), set[str]()
    for argument, value in zip(arguments, [*arguments, None][1:], strict=True):
        if not argument.startswith("--"):
            continue
        name, equals, own = argument.partition("=")
        name = name.replace("_", "-")
        if (own if equals else value) == "" and name not in MAY_BE_EMPTY:
            raise UsageError(f"{name} has an empty value", next_step=f"give {name} a value, or leave it out")
        if name in seen and name not in repeatable:
            raise UsageError(f"{name} was given twice", allowed="one value of this flag", next_step=f"leave one {name} out")
        seen.add(name)


def repeatable_flags(kind: type) -> set[str]:
    """The flags of a command that may be given several times, such as `--policy`."""
    found = set[str]()
    for field in dataclasses.fields(kind):
        if tyro.conf.UseAppendAction in get_args(field.type):
            found.add(f"--{field.name.replace('_', '-')}")
        elif dataclasses.is_dataclass(group := field.default_factory):
            found |= repeatable_flags(group)
    return found


def named_files(flags: Any) -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
    """The files that a command writes, and those that it reads, with their flags: `[("--out", Path("r.jsonl"))], [...]`."""
    written, read = list[tuple[str, Path]](), list[tuple[str, Path]]()
    for field in dataclasses.fields(flags):
        value, flag = getattr(flags, field.name), f"--{field.name.replace('_', '-')}"
        if isinstance(value, Path) and field.name not in READ:
            written.append((flag, value))
        elif value and field.name in READ:
            words = [value] if isinstance(value, str | Path) else [word for group in value for word in group]
            files = [Path(str(word).removeprefix("plan:").partition(".py:")[0]) for word in words]
            read += [(flag, file) for file in files if file.is_file()]
    return written, read


def step_command(
    kind: type[StepFlagsT],
    argv: Sequence[str] | None,
    prog: str,
    check: Callable[[StepFlagsT], Request[StepFlagsT]],
    do: Callable[[Request[StepFlagsT]], int],
    *,
    kept: str = "the rows finished so far were kept",
) -> int:
    """Runs a command that compiles training steps, and returns the exit code.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments. None takes the process's own.
        prog: the command's name in its help and notes.
        check: makes the request from the flags, or raises a UsageError.
        do: does what the request asks for, and returns the exit code.
        kept: what the message of an interrupt says about the results so far.
    """

    def work() -> int:
        flags = parse_flags(kind, sys.argv[1:] if argv is None else argv, prog)
        if flags.version:
            from jaxremat import __version__

            print(f"jaxremat {__version__}")
            return 0
        request = check(flags)
        set_up_process(request.flags)
        if flags.json and argv is None:
            keep_stdout_for_records()
        return do(request)

    return run_command(work, kept=kept)


def set_up_process(flags: StepFlags) -> None:
    """Sets what must be set before JAX is imported: which platform JAX may use, and whether XLA prints its log.

    A variable that the user has set stays as it is. Apart from `leave_memory_to_others` and `--fresh`, nothing else edits the
    environment.
    """
    if not flags.verbose:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not _may_use_gpu(flags):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("jax").setLevel(logging.INFO if flags.verbose else logging.ERROR)


def leave_memory_to_others(flags: StepFlags) -> dict[str, str]:
    """Keeps this process from preallocating most of an attached GPU's memory, which the measuring processes need.

    Returns:
        The environment before this change.
    """
    environment = dict(os.environ)
    if _may_use_gpu(flags):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return environment


def _may_use_gpu(flags: StepFlags) -> bool:
    return nvidia_driver() and target_name(flags.target, on_mesh=flags.on_mesh) == "gpu"


def keep_stdout_for_records(others: int = 2) -> None:
    """Sends what C libraries print to stdout to stderr, because with --json stdout must hold only records.

    HiGHS sometimes prints to stdout, and Gloo does whenever it connects several processes.

    Args:
        others: the file descriptor that gets what C libraries print.
    """
    sys.stdout.flush()
    if sys.stdout.fileno() == 1:
        sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(others, 1)


def run_command(work: Callable[[], int], *, name: str = "jaxremat", kept: str = "") -> int:
    """Runs `work` and returns its exit code, or the exit code of its error, 130 when interrupted, 1 if stdout was closed.

    An error that isn't a `JaxrematError` is printed with its traceback and with how to report it.

    Args:
        work: the command.
        name: the name at the beginning of its messages.
        kept: what the message of an interrupt says about the results so far.
    """
    is_closed = _open_streams()
    interrupted = f"{name}: interrupted{kept and '; '}{kept}"
    with remembered(interrupted) as interrupts:
        try:
            try:
                with only_our_compiles():
                    code = work()
            finally:
                sys.stdout.flush()  # a closed pipe must raise here, not when Python ends
            if is_closed:
                print(f"{name}: {_unwritten('stdout is closed')}", file=sys.stderr)
            return code or int(is_closed)
        except JaxrematError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:
            _drop_stdout()
            return 1
        except (KeyboardInterrupt, Exception) as error:  # an interrupt can make an assertion in JAX fail
            if interrupts.pending or isinstance(error, KeyboardInterrupt):
                print(interrupted, file=sys.stderr)
                return EXIT_CODE
            if isinstance(error, MemoryError):
                print(f"{name}: {OUT_OF_HOST_MEMORY}", file=sys.stderr)
                return 1
            if isinstance(error, OSError) and error.errno in _OF_STREAMS and error.filename is None:
                _drop_stdout()
                print(f"{name}: {_unwritten(error.strerror or str(error))}", file=sys.stderr)
                return 1
            traceback.print_exc()
            print(f"{name}: {REPORT}", file=sys.stderr)
            return 1


def _open_streams() -> bool:
    """Makes the standard streams such that printing any text works, and returns whether stdout was closed.

    A stream that can't show a character, as an ASCII one can't show ±, shows another one in its place.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a file that is opened later must not get the number of a closed stream
    os.close(number)
    is_closed = sys.stdout is None
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="jaxremat")
    return is_closed


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """What stands in place of characters that a stream can't show. Python calls it for the handler of errors `jaxremat`."""
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(character, "?") for character in characters), error.end


codecs.register_error("jaxremat", _replaced)


def _drop_stdout() -> None:
    """Leads stdout nowhere, or closing it fails again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which isn't 1 with --json


def _unwritten(reason: str) -> JaxrematError:
    return JaxrematError(
        f"the answer can't be printed: {reason}", next_step="--out FILE keeps the records, whatever happens to stdout"
    )
