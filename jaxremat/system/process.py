"""Runs programs: starts and watches them, and ends each with all that it started.

What they print is recorded.

    ended = run_until(Deadline(10), [sys.executable, "-c", "print('hello', end='')"], os.environ)
    ended.code, ended.out    # 0, "hello"

No program outlives the process that started it, however that one dies. Linux kills the program when its parent is gone
(`prctl(PR_SET_PDEATHSIG)`, man 2 prctl). A reaper, one small process for all programs, then kills what they had started in
turn, such as ptxas. Each program has a session of its own: a Ctrl-C reaches only the parent, and the program can be killed
as a group.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

_TAIL_BYTES = 65_536
_LOOK_S = 0.5  # how often `run_until` looks whether its deadline was moved

# Between fork and exec no code of ours runs. So the new process arms the parent-death signal itself, and then looks whether
# its parent had gone before that.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# Reads process groups as `+N` and `-N` until its parent closes the pipe, or dies.
_REAPER = """
import os, shutil, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
_BARE = (sys.executable, "-I", "-S", "-c")


class Deadline:
    """When something must be over; `limit_s` is how many seconds it had at first."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._end = limit_s, time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return max(0.0, self._end - time.monotonic())

    def end(self) -> None:
        """Makes it be over now: programs that run are killed, and others aren't started."""
        self._end = time.monotonic()


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed.

    Attributes:
        code: its exit code, negative for the signal that killed it; None where it was killed at its deadline.
        tail: the last 64 KiB that it printed; of standard error alone where it was started with `apart`.
        out: all of standard output where it was started with `apart`, else empty.
    """

    code: int | None
    tail: str
    out: str = ""


@dataclass(eq=False)
class Child:
    """A program that runs."""

    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    handle: int
    deadline: Deadline
    out: Path | None
    tail: bytes = b""

    @property
    def last_line(self) -> str:
        """The last whole line that it printed."""
        lines = self.tail.rpartition(b"\n")[0].splitlines()
        return lines[-1].decode(errors="replace").strip() if lines else ""

    def read(self) -> bool:
        """Takes what it printed, of which the end is saved; False where nothing more can come."""
        try:
            chunk = os.read(self.pipe.fileno(), 2**16)
        except BlockingIOError:
            return True
        self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
        return bool(chunk)


class Processes:
    """The programs that run, as a context: leaving it kills those that still do.

    All calls come from one thread, which must live as long as the programs: Linux ties the parent-death signal to the thread
    that started them. `folder` is a temporary folder for their files; it goes when the context is left, or its process dies.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jaxremat-"))
        self.running: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._count = 0
        self._reaper = subprocess.Popen(
            [*_BARE, _REAPER, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True, text=True, bufsize=1
        )

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in tuple(self.running):
            self._end(child)
        self._selector.close()
        self._reaper.communicate()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], deadline: Deadline, *, apart: bool = False
    ) -> Child:
        """Starts a program.

        Args:
            command: the program's path and its arguments.
            environment: all of its variables.
            deadline: when it is killed; another thread may make it come sooner.
            apart: saves all of standard output, apart from standard error.
        """
        self._count += 1
        out = self.folder / f"out-{self._count}" if apart else None
        with out.open("wb") if out else contextlib.nullcontext() as file:
            process = subprocess.Popen(
                [*_BARE, _GUARD, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=file or subprocess.PIPE,
                stderr=subprocess.PIPE if apart else subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        self._tell_reaper(f"+{process.pid}")
        pipe = process.stderr or process.stdout
        assert pipe
        child = Child(process, pipe, os.pidfd_open(process.pid), deadline, out)
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, child)
        self._selector.register(child.handle, selectors.EVENT_READ, child)
        self.running.append(child)
        return child

    def wait(self, at_most_s: float) -> list[tuple[Child, Ended]]:
        """The programs that ended within `at_most_s` seconds, each with how.

        A program at its deadline is killed.

        It returns as soon as a program ends or prints something.
        """
        left = [child.deadline.left_s() for child in self.running]
        ended = []
        for key, _ in self._selector.select(min([at_most_s, *left])):
            child: Child = key.data
            if key.fileobj == child.handle:
                ended.append((child, self._end(child)))
            elif child in self.running and not child.read():
                self._selector.unregister(key.fileobj)
        late = [child for child in self.running if not child.deadline.left_s()]
        return ended + [(child, self._end(child, is_late=True)) for child in late]

    def _end(self, child: Child, *, is_late: bool = False) -> Ended:
        """Kills the program with all that it started, unless they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)  # what it started may live on when it is dead
        child.process.wait()
        self._tell_reaper(f"-{child.process.pid}")
        self.running.remove(child)
        for _ in range(64):  # what is left in the pipe; bounded, as somebody else may hold it open and write on
            before = child.tail
            if not child.read() or child.tail == before:
                break
        for source in (child.pipe, child.handle):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        child.pipe.close()
        os.close(child.handle)
        out = child.out.read_text(errors="replace") if child.out else ""
        return Ended(None if is_late else child.process.returncode, child.tail.decode(errors="replace"), out)

    def _tell_reaper(self, line: str) -> None:
        assert self._reaper.stdin
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; the parent-death signal is still there
            self._reaper.stdin.write(line + "\n")


def signal_name(number: int) -> str:
    """The name of a signal, such as `SIGSEGV` for 11."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def run_until(deadline: Deadline, command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Runs one program to its end, or until the deadline, with standard output apart.

    Args:
        deadline: when it is killed with all that it started; another thread may make it come sooner.
        command: the program's path and its arguments.
        environment: all of its variables.
    """
    with Processes() as processes:
        processes.start(command, environment, deadline, apart=True)
        while not (ended := processes.wait(_LOOK_S)):
            pass
    return ended[0][1]
