"""A process per trial: started fresh, watched, and judged by the result file that it leaves, never by its exit code.

A process gets a task file and writes its result file in one piece: both JSON, as `{"schema": 1, ...}`. It dies with its
parent: Linux sends it SIGKILL when the parent goes (`prctl(PR_SET_PDEATHSIG)`, man 2 prctl), and a keeper, one small process
for all of them, then kills what they had started themselves, such as ptxas. Each has a session of its own, so that a Ctrl-C
reaches only the parent, and is killed as a group.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from jaxremat.errors import JaxrematError
from jaxremat.trial.record import is_out_of_memory
from jaxremat.trial.task import Result, Task, read_result

_TAIL_BYTES = 16_384
_TAIL_LINES = 12

# Between fork and exec nothing of ours runs; the new process arms the parent-death signal itself, and looks whether its
# parent was gone before that.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# Reads process groups as `+N` and `-N` until its parent closes the pipe, or dies.
_KEEPER = """
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


@dataclass(eq=False)
class Child:
    """A process under way."""

    process: subprocess.Popen[bytes]
    handle: int
    folder: Path
    deadline: float
    timeout_s: float
    tail: bytes = b""

    @property
    def last_line(self) -> str:
        """The last whole line that it wrote."""
        lines = self.tail.rpartition(b"\n")[0].splitlines()
        return lines[-1].decode(errors="replace").strip() if lines else ""


class Workers:
    """The processes of one command, as a context: leaving it kills what still runs.

    Everything happens in the caller's thread, which must be the one that goes on living: Linux ties the parent-death signal
    to the thread.

    Args:
        command: the program, which gets the paths of its task and its result.
        environment: what it finds in its environment; by default what this process has.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = tuple(command), dict(os.environ if environment is None else environment)
        self._folder = Path(tempfile.mkdtemp(prefix="jaxremat-trials-"))
        (self._folder / "cache").mkdir()
        self._selector = selectors.DefaultSelector()
        self._count = 0
        self.running: list[Child] = []
        self._keeper = subprocess.Popen(
            [*_BARE, _KEEPER, str(self._folder)], stdin=subprocess.PIPE, start_new_session=True, text=True, bufsize=1
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in tuple(self.running):
            self._end(child)
        self._selector.close()
        self._keeper.communicate()

    def start(self, task: Task, *, timeout_s: float, cache: bool = False) -> Child:
        """Starts a process on `task`; with `cache`, JAX's compilation cache is on, and shared by the command's processes.

        JAX writes a cache entry in place, so that one who is killed leaves half of it, which is never mended (`LRUCache.put`
        in jax/_src/lru_cache.py). So each process has a folder of its own, with links to what there is, and what it adds
        is taken over when it ended well. Executables of a GPU that isn't here are written and can't be read back (XLA:
        "PjRtCompiler must be constructed with a Client"): for those it is off.
        """
        self._count += 1
        folder = self._folder / str(self._count)
        (folder / "cache").mkdir(parents=True)
        (folder / "task").write_text(task.to_json())
        environment = self._environment | {
            "TMPDIR": str(folder),
            "JAX_ENABLE_COMPILATION_CACHE": "true" if cache else "false",
        }
        if cache:
            for entry in _entries(self._folder / "cache"):
                os.link(entry, folder / "cache" / entry.name)
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # its path would be part of every key
            }
        process = subprocess.Popen(
            [*_BARE, _GUARD, str(os.getpid()), *self._command, str(folder / "task"), str(folder / "result")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        self._tell_keeper(f"+{process.pid}")
        handle = os.pidfd_open(process.pid)
        child = Child(process, handle, folder, time.monotonic() + timeout_s, timeout_s)
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)
        self._selector.register(handle, selectors.EVENT_READ, child)
        self.running.append(child)
        return child

    def wait(self, at_most_s: float) -> list[tuple[Child, Result]]:
        """Those that have ended after `at_most_s` or earlier, each with how; a process over its time is killed."""
        left = [child.deadline - time.monotonic() for child in self.running]
        ended = []
        for key, _ in self._selector.select(max(0.0, min([at_most_s, *left]))):
            child: Child = key.data
            if key.fileobj == child.handle:
                ended.append((child, self._end(child)))
            elif child in self.running and not self._read(child):
                self._selector.unregister(key.fileobj)
        late = [child for child in self.running if child.deadline <= time.monotonic()]
        return ended + [(child, self._end(child, is_late=True)) for child in late]

    def _read(self, child: Child) -> bool:
        """Takes what the process wrote, keeping the end of it; False where nothing more can come."""
        assert child.process.stdout
        try:
            chunk = os.read(child.process.stdout.fileno(), 2**16)
        except BlockingIOError:
            return True
        child.tail = (child.tail + chunk)[-_TAIL_BYTES:]
        return bool(chunk)

    def _end(self, child: Child, *, is_late: bool = False) -> Result:
        """Kills the process with all that it started, unless it is gone, and judges it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)  # its own death is not that of what it started
        child.process.wait()
        self._tell_keeper(f"-{child.process.pid}")
        self.running.remove(child)
        assert child.process.stdout
        for _ in range(64):  # what is left in the pipe; bounded, should somebody else hold it open and write on
            before = child.tail
            if not self._read(child) or child.tail == before:
                break
        for source in (child.process.stdout, child.handle):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        child.process.stdout.close()
        os.close(child.handle)
        late = child.timeout_s if is_late else None
        result = judge(child.folder / "result", child.process.returncode, child.tail, late)
        if result.outcome == "ok":
            for entry in _entries(child.folder / "cache"):
                entry.replace(self._folder / "cache" / entry.name)
        shutil.rmtree(child.folder, ignore_errors=True)
        return result

    def _tell_keeper(self, line: str) -> None:
        assert self._keeper.stdin
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; the parent-death signal is still there
            self._keeper.stdin.write(line + "\n")


def judge(result: Path, return_code: int, tail: bytes, timeout_s: float | None) -> Result:
    """What became of a task whose process is gone: the result that it left, else how it failed.

    Args:
        result: where its result file should be.
        return_code: negative for a signal.
        tail: the last bytes that it wrote to stdout and stderr.
        timeout_s: the time that it had, where it was killed for that.
    """
    lines = tuple(line[:300] for line in tail.decode(errors="replace").splitlines() if line.strip())[-_TAIL_LINES:]
    try:
        return read_result(result.read_bytes())
    except FileNotFoundError:
        fault = "left no result"
    except (msgspec.ValidationError, JaxrematError) as error:
        fault = f"its result can't be read: {error}"
    except msgspec.DecodeError:
        fault = "its result was cut short"
    if timeout_s is not None:
        return Result(outcome="timeout", error=f"killed after {timeout_s:g} s (--timeout)", tail=lines)
    if is_out_of_memory("\n".join(lines)):
        return Result(outcome="oom", error=next(line for line in lines if is_out_of_memory(line)), tail=lines)
    if return_code < 0:
        fault = f"its process was killed by {signal.Signals(-return_code).name}"
        if return_code == -signal.SIGKILL:
            fault += " (by Linux, if the machine ran out of memory; dmesg says so)"
    elif return_code:
        fault = f"its process ended with exit code {return_code}" + (f", and {fault}" if result.exists() else "")
    else:
        fault = f"its process ended as if all were well, and {fault}"
    return Result(outcome="crashed", error=fault + (f": {lines[-1]}" if lines else ""), tail=lines)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]
