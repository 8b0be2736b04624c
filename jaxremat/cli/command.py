"""What every command does: it parses flags, and ends with an exit code and no traceback."""

import codecs
import errno
import functools
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypeVar

from jaxremat.chips.catalog import driver_here, target_name
from jaxremat.cli.help import HELP, HELP_ALL
from jaxremat.cli.machine.blame import blamed
from jaxremat.cli.machine.variables import check_xla_flags
from jaxremat.cli.parser import parse_argv
from jaxremat.cli.project import commands_with, project_words
from jaxremat.errors import JaxrematError
from jaxremat.policy.offload import only_our_compiles
from jaxremat.session.flags import COMMON_FLAGS, StepFlags
from jaxremat.session.request import Request, StepFlagsT
from jaxremat.system.files import check_apart, named_files
from jaxremat.system.interrupt import EXIT_CODE, remembered

FlagsT = TypeVar("FlagsT")
#: The commands, each with what it answers.
COMMANDS = {
    "run": "which rematerialization policy, which batch, how fast",
    "explain": "who holds the memory, in numbers that add up to XLA's total",
    "sweep": "many models, policies, batches and targets, each in a process of its own",
    "recommend": "which GPUs to rent, how many, and how to train on them",
    "diff": "what a change or another JAX did to bytes, FLOPs and predicted times",
    "train": "a training run under any policy or plan",
    "doctor": "what is installed, what is in the way, and what to type to mend it",
    "watch": "used, free and peak memory of the attached GPUs, live",
}
#: By the flag's name in version 0.1, its name now. Version 0.2 still takes the old name, with a note. Version 0.3 will not.
RENAMED_FLAGS = {"--margin": "--headroom"}
#: The errors of a stream that can't be written.
_OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF)
#: What stands in place of our own characters where a stream can't show them.
_IN_ASCII = {"±": "+-", "─": "-", "…": "...", "→": "->", "×": "x", "\u2011": "-"}
#: What a command says below the traceback of an error that no user could have caused.
REPORT = JaxrematError(
    "this is a fault of jaxremat",
    next_step="report it with the traceback above, the command, and what python -m jaxremat doctor --json prints",
)


def parse_flags(kind: type[FlagsT], argv: Sequence[str], name: str = "run") -> FlagsT:
    """The flags of one command. --help prints the help and exits with 0.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments, without the program's name.
        name: the command, such as `run`, or the name of an experiment.

    Raises:
        UsageError: an argument isn't a flag, a value isn't allowed, or two flags name one file. Or the project's defaults
            (`cli/project.py`) can't be read.
    """
    arguments = []
    for flag, equals, value in (argument.partition("=") for argument in argv):
        now = RENAMED_FLAGS.get(flag, flag)
        if now != flag:
            print(f"jaxremat: {flag} is called {now} now", file=sys.stderr)
        arguments.append(f"{now}{equals}{value}")
    others = f"Other commands: {', '.join(other for other in COMMANDS if other != name)}." if name in COMMANDS else ""
    prog = f"jaxremat {name}" if others else name
    if others and not {*arguments} & {*HELP, HELP_ALL}:
        if words := project_words(kind, arguments, name, [*COMMANDS]):
            print(f"jaxremat: pyproject.toml has {' '.join(words)}", file=sys.stderr)
        arguments += words
    whose = functools.partial(commands_with, commands=[*COMMANDS] if others else [])
    flags = parse_argv(kind, arguments, prog, common=COMMON_FLAGS, epilogue=others, whose=whose)
    check_apart(*named_files(flags))
    return flags


def flags_command(
    kind: type[FlagsT], argv: Sequence[str] | None, name: str, do: Callable[[FlagsT], int], *, saved: str = ""
) -> int:
    """Parses the flags of a command, does what they request, and returns the exit code.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments. None takes the process's own.
        name: the command, such as `doctor`.
        do: does what the flags request, and returns the exit code.
        saved: what the message of an interrupt says about the results so far.
    """
    return run_command(lambda: do(parse_flags(kind, sys.argv[1:] if argv is None else argv, name)), saved=saved)


def step_command(
    kind: type[StepFlagsT],
    argv: Sequence[str] | None,
    name: str,
    check: Callable[[StepFlagsT], Request[StepFlagsT]],
    do: Callable[[Request[StepFlagsT]], int],
    *,
    saved: str = "what was compiled is stored for the same command again",
) -> int:
    """Runs a command that compiles training steps, and returns the exit code.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments. None takes the process's own.
        name: the command, such as `run`.
        check: makes the request from the flags, or raises a UsageError.
        do: does what the request says, and returns the exit code.
        saved: what the message of an interrupt says about the results so far.
    """

    def work(flags: StepFlagsT) -> int:
        if flags.version:
            from jaxremat import __version__

            print(f"jaxremat {__version__}")
            return 0
        request = check(flags)
        check_xla_flags()
        set_up_process(request.flags)
        if flags.json and argv is None:
            keep_stdout_for_records()
        return do(request)

    return flags_command(kind, argv, name, work, saved=saved)


def set_up_process(flags: StepFlags) -> None:
    """Sets, before JAX is imported, which platform JAX may use, and whether XLA prints its log.

    A variable that the user has set stays as it is. Apart from `leave_memory_to_others`, `--fresh` and
    what libtpu reads when it is loaded (`chips/tpu/topology.py`), nothing else edits the environment.
    """
    if not flags.verbose:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not _may_use_gpu(flags):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Without a GPU, JAX logs the traceback of each plugin that can't start. The commands and the doctor say what is wrong.
    least = logging.ERROR if _may_use_gpu(flags) else logging.CRITICAL
    logging.getLogger("jax").setLevel(logging.INFO if flags.verbose else least)


def leave_memory_to_others(flags: StepFlags) -> dict[str, str]:
    """Leaves an attached GPU's memory to the measuring processes, without preallocating it.

    Returns:
        The environment before this change.
    """
    environment = dict(os.environ)
    if _may_use_gpu(flags):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return environment


def _may_use_gpu(flags: StepFlags) -> bool:
    return driver_here() and target_name(flags.target, on_mesh=flags.on_mesh) == "gpu"


def keep_stdout_for_records(others: int = 2) -> None:
    """Sends what C libraries print to stderr, because with --json stdout is for records alone.

    HiGHS sometimes prints to stdout, and Gloo does whenever it connects several processes.

    Args:
        others: the file descriptor that gets what C libraries print.
    """
    sys.stdout.flush()
    if sys.stdout.fileno() == 1:
        sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(others, 1)


def run_command(work: Callable[[], int], *, name: str = "jaxremat", saved: str = "") -> int:
    """Runs `work` and returns its exit code, or that of its error.

    It is 130 when interrupted, and 1 if stdout was closed.

    An error that isn't a `JaxrematError` is printed with its traceback and with how to report it.

    Args:
        work: the command.
        name: the name at the beginning of its messages.
        saved: what the message of an interrupt says about the results so far.
    """
    interrupted = f"{name}: interrupted{saved and '; '}{saved}"
    try:
        is_closed = _open_streams()
        with remembered(interrupted) as interrupts:
            try:
                return _exit_code(work, name, is_closed)
            except Exception as error:
                if interrupts.pending:  # an interrupt can make an assertion in JAX fail
                    raise KeyboardInterrupt from None
                return show_error(error, name)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return EXIT_CODE
    except OSError as error:  # there are too few files for the streams, or for hearing of signals
        return show_error(error, name)


def _exit_code(work: Callable[[], int], name: str, is_closed: bool) -> int:
    """Runs `work` and returns its exit code."""
    try:
        with only_our_compiles():
            code = work()
    except SystemExit as end:
        if end.code:  # of rich, where nobody reads a pipe
            raise BrokenPipeError from None
        if not is_closed:  # after --help
            raise
        code = 0
    finally:
        sys.stdout.flush()  # a closed pipe must raise here, not when Python ends
    if is_closed:
        print(f"{name}: {_unwritten('stdout is closed')}", file=sys.stderr)
    return code or int(is_closed)


def show_error(error: Exception, name: str = "jaxremat") -> int:
    """Prints the message of an error, and returns its exit code.

    A fault of jaxremat is printed with its traceback.
    """
    if isinstance(error, BrokenPipeError):
        _drop(sys.stdout)
        _drop(sys.stderr)
        return 1
    found = error if isinstance(error, JaxrematError) else None
    if isinstance(error, OSError) and error.errno in _OF_STREAMS and error.filename is None:
        _drop(sys.stdout)
        found = _unwritten(error.strerror or str(error))
    elif found is None or not found.next_step:
        found = blamed(error, os.environ) or found
    if found is None:
        traceback.print_exception(error)
        found = REPORT
    print(f"{name}: {found}", file=sys.stderr)
    return found.exit_code


def _open_streams() -> bool:
    """Makes printing of any text work, and returns whether stdout was closed.

    A stream that can't show a character, as an ASCII one can't show ±, shows another one in its place.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # a file that is opened later must not get the number of a closed stream
    os.close(number)
    is_closed = sys.stdout is None
    if sys.stderr and sys.stderr is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Messages(sys.stderr.fileno(), "w", closefd=False)),
            encoding=sys.stderr.encoding,
            errors=sys.stderr.errors,
            line_buffering=True,
            write_through=True,
        )
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="jaxremat")
    return is_closed


class _Messages(io.FileIO):
    """The stream of messages and progress.

    Where its disk is full, they are lost, and nothing else is.
    """

    def write(self, data: Any, /) -> int:
        """Writes what can be written."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """What stands in place of characters that a stream can't show.

    Python calls it for the handler of errors `jaxremat`.
    """
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(character, "?") for character in characters), error.end


codecs.register_error("jaxremat", _replaced)


def _drop(stream: TextIO) -> None:
    """Leads a stream nowhere, or closing it fails again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # that of stdout isn't 1 with --json


def _unwritten(reason: str) -> JaxrematError:
    return JaxrematError(
        f"the answer can't be printed: {reason}", next_step="--out FILE has the records, whatever happens to stdout"
    )
