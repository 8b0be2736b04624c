"""One bad input, how the command ends on it, and the rules of every ending.

    @kind("flags")
    def wrong_choice(draw: random.Random, folder: Path) -> Case:
        return Case(("run", "--objective", "speed"), says=("--objective",))

A case runs in a folder of its own, which is also its home, its cache and its place for temporary files. `in_fork` runs the
command in a fork of this process, which has imported JAX and the commands, so that a case takes a fraction of a second.
"""

import contextlib
import gc
import importlib
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from jaxremat.cli import command as commands

COMMANDS = tuple(commands.COMMANDS)
#: The areas that inputs are drawn from.
AREAS = (
    "flags",
    "contradictions",
    "values",
    "files",
    "models",
    "stores",
    "environments",
    "permissions",
    "disks",
    "terminals",
    "signals",
)
#: The exit code of what can't be meant, and the one of what was meant.
USAGE, OK = frozenset({2}), frozenset({0})
#: The seconds after which a command counts as hanging.
LIMIT_S = 30.0
#: What the first line of a message begins with.
_MESSAGE = re.compile(r"^jaxremat[\w. ]*: ")
#: What a message of an error has, and what a note lacks.
_NEXT = "Next: "


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        exit_code: its exit code. For a death by the signal N it is -N.
        stdout: what it printed.
        stderr: its messages.
        seconds: how long it took.
        timed_out: whether it was killed because it didn't end.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False


def module_of(command: str) -> Any:
    """The module of a command, which has its flags and its `main`."""
    return importlib.import_module(f"jaxremat.cli.{command}")


def in_fork(case: "Case", folder: Path) -> Ended:
    """Runs the command of the case in a fork of this process, in `folder`."""
    for command in COMMANDS:
        module_of(command)
    import jax  # noqa: F401  # what a fork needn't import again

    gc.freeze()
    return forked(case, folder, _call_main)


def in_fork_of(work: Callable[[], int]) -> "Callable[[Case, Path], Ended]":
    """What runs a function in place of a command. Its errors are printed as a command prints them.

    Args:
        work: returns an exit code.
    """

    def go(case: "Case") -> None:
        from jaxremat.cli.command import run_command

        _take_streams()
        sys.exit(run_command(work))

    return lambda case, folder: forked(case, folder, go)


def in_process(case: "Case", folder: Path, meanwhile: Callable[[int], None] = lambda child: None) -> Ended:
    """Runs the command of the case as a process of its own, in `folder`, as a user does.

    Args:
        case: the case.
        folder: the folder.
        meanwhile: called with the process's number again and again until it ends.
    """
    return forked(case, folder, _exec, meanwhile)


def forked(
    case: "Case", folder: Path, go: Callable[["Case"], None], meanwhile: Callable[[int], None] = lambda child: None
) -> Ended:
    """Runs `go` in a fork of this process, whose surroundings are those of the case, and waits for its end."""
    started = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="surrogateescape", newline="") as out,
        tempfile.TemporaryFile("w+", errors="surrogateescape", newline="") as err,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks, because of threads that this process doesn't have
            child = os.fork()
        if child == 0:
            _be_the_command(case, folder, out, err, go)
        code, timed_out = _waited_for(child, started + case.limit_s, meanwhile)
        seconds = time.monotonic() - started
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return Ended(code, texts[0], texts[1], seconds, timed_out)


def surroundings_of(folder: Path) -> dict[str, str]:
    """The variables of the environment that make `folder` the home, the cache and the place for temporary files."""
    return {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "TMPDIR": str(folder),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "COLUMNS": "120",
    }


def _be_the_command(case: "Case", folder: Path, out: TextIO, err: TextIO, go: Callable[["Case"], None]) -> NoReturn:
    """Runs the command in this process, which is a fork, and ends it as the command ends."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(surroundings_of(folder))
        tempfile.tempdir = None
        null = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((null, out.fileno(), err.fileno())):
            os.dup2(file, number)
        case.before()
        go(case)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _call_main(case: "Case") -> None:
    """Calls the command's function, with the standard streams that this process has now."""
    from jaxremat.system.interrupt import leave

    _take_streams()
    sys.path.insert(0, "")
    command, *arguments = case.command
    sys.argv = [f"jaxremat.{command}", *arguments]
    leave(module_of(command).main())


def _take_streams() -> None:
    """Makes Python's standard streams those that this process has now."""
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115


def _exec(case: "Case") -> None:
    """Becomes `python -m jaxremat.NAME`."""
    command, *arguments = case.command
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    os.execv(sys.executable, [sys.executable, "-m", "jaxremat", command, *arguments])


def _waited_for(child: int, deadline: float, meanwhile: Callable[[int], None]) -> tuple[int, bool]:
    """The exit code of a child, and whether it was killed at the deadline. Whatever it left behind is killed too."""
    timed_out = False
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline and not timed_out:
                timed_out = True
                os.kill(child, signal.SIGKILL)
            meanwhile(child)
            time.sleep(0.005)
    finally:  # an interrupt ends the child, too
        with contextlib.suppress(ProcessLookupError):  # it left nothing behind
            os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1]), timed_out


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        command: what follows `python -m jaxremat.`: `("run", "--batch", "x")`.
        exit_codes: how the command may end.
        says: data that stderr must contain: a flag, a path, a value. Never sentences.
        unchanged: by path, the bytes of a file that must be as before.
        check: a further check, which returns what is wrong, or the empty text.
        run: what runs the command in a folder.
        before: called in the process of the command just before it, such as to take away a permission or to close a stream.
        without: the names of the `RULES` that don't hold for this case.
        limit_s: the seconds after which it counts as hanging.
    """

    command: tuple[str, ...]
    exit_codes: frozenset[int] = USAGE
    says: tuple[str, ...] = ()
    unchanged: Mapping[Path, bytes] = field(default_factory=dict)
    check: Callable[[Ended], str] | None = None
    run: "Callable[[Case, Path], Ended]" = in_fork
    before: Callable[[], None] = lambda: None
    without: tuple[str, ...] = ()
    limit_s: float = LIMIT_S


def _exit_code(case: Case, ended: Ended) -> str:
    expected = " or ".join(map(str, sorted(case.exit_codes)))
    return "" if ended.exit_code in case.exit_codes else f"exit code {ended.exit_code} in place of {expected}"


def _hang(case: Case, ended: Ended) -> str:
    return f"no end within {case.limit_s:g} s" if ended.timed_out else ""


def _traceback(case: Case, ended: Ended) -> str:
    return "a traceback" if "Traceback (most recent call last)" in ended.stderr else ""


def _one_message(case: Case, ended: Ended) -> str:
    errors = [line for line in ended.stderr.splitlines() if _MESSAGE.match(line) and _NEXT in line]
    return f"{len(errors)} messages" if len(errors) > 1 else ""


def _message(case: Case, ended: Ended) -> str:
    return "" if ended.exit_code <= 0 or ended.stderr.strip() else "no message"


def _next_step(case: Case, ended: Ended) -> str:
    is_said = _NEXT in ended.stderr or "--help" in ended.stderr
    return "" if ended.exit_code not in (1, 2) or is_said else "a message without a next step"


def _control(case: Case, ended: Ended) -> str:
    found = {character for character in ended.stderr if not character.isprintable() and character not in "\n\r\t\u00a0"}
    return f"characters that a terminal obeys: {', '.join(map(ascii, sorted(found)))}" if found else ""


def _says(case: Case, ended: Ended) -> str:
    missing = [data for data in case.says if data not in ended.stderr]
    return f"not in the message: {', '.join(map(ascii, missing))}" if missing else ""


def _unchanged(case: Case, ended: Ended) -> str:
    changed = [path.name for path, data in case.unchanged.items() if not path.is_file() or path.read_bytes() != data]
    return f"changed: {', '.join(changed)}" if changed else ""


def _own_check(case: Case, ended: Ended) -> str:
    return case.check(ended) if case.check else ""


#: By name, the rules of every ending: what is wrong, or the empty text.
RULES: dict[str, Callable[[Case, Ended], str]] = {
    "exit code": _exit_code,
    "hang": _hang,
    "traceback": _traceback,
    "message": _message,
    "one message": _one_message,
    "next step": _next_step,
    "control": _control,
    "says": _says,
    "unchanged": _unchanged,
    "check": _own_check,
}


def problems_of(case: Case, ended: Ended) -> list[str]:
    """What is wrong with an ending. Empty where all is well."""
    found = [rule(case, ended) for name, rule in RULES.items() if name not in case.without]
    return [problem for problem in found if problem]


@dataclass(frozen=True)
class Kind:
    """A kind of inputs.

    Attributes:
        name: its name.
        area: one of `AREAS`.
        draw: makes a case, with its files in a folder.
    """

    name: str
    area: str
    draw: Callable[[random.Random, Path], Case]

    def nth(self, seed: int, n: int, folder: Path) -> Case:
        """The nth case of a seed, with its files in `folder`."""
        return self.draw(random.Random(f"{seed} {self.name} {n}"), folder)


#: By name, the kinds that the modules of this package register.
KINDS: dict[str, Kind] = {}


Draw = Callable[[random.Random, Path], Case]


def kind(area: str, name: str = "") -> Callable[[Draw], Draw]:
    """A decorator that registers a function which draws the cases of a kind.

    Args:
        area: one of `AREAS`.
        name: the name of the kind. By default it is the function's.
    """
    assert area in AREAS, area

    def register(draw: Draw) -> Draw:
        known = name or draw.__name__
        assert known not in KINDS, known
        KINDS[known] = Kind(known, area, draw)
        return draw

    return register
