"""A process for each trial, judged by the file that it leaves, never by its exit code.

A process gets the path of a task and the path of a result (`trial/task.py`), and writes the result in one piece. What
becomes of it is always a `Result`:

    it wrote {"outcome": "ok", ...}             that result, even if it crashed afterwards
    it was killed by SIGSEGV                    Result(outcome="crashed", error="its process was killed by SIGSEGV")
    it printed "RESOURCE_EXHAUSTED: ..."        Result(outcome="oom", error="RESOURCE_EXHAUSTED: ...")
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxremat.errors import JaxrematError
from jaxremat.system.ahead import JOBS
from jaxremat.system.files import OTHER_TMPDIR, named_by
from jaxremat.system.process import Child, Deadline, Ended, Processes, signal_name
from jaxremat.trial.lines import in_words
from jaxremat.trial.record import is_out_of_memory
from jaxremat.trial.task import SHARED_FOLDER, Result, Task, read_result

_TAIL_LINES = 12


class Workers(contextlib.AbstractContextManager["Workers"]):
    """The processes of one command's trials, as a context that kills what still runs.

    What they share is in the folder of `JAXREMAT_SHARED_FOLDER`, if the environment has it, so that several commands share it.

    All calls come from one thread, which must live as long as the processes (`system/process.py`).

    Args:
        command: the program, which gets the paths of its task and its result.
        environment: what it finds in its environment; by default what this process has.

    Attributes:
        folder: where the files of the processes are.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = tuple(command), dict(os.environ if environment is None else environment)
        self._processes = Processes()
        self._folders: dict[Child, Path] = {}
        self._count = 0
        self.folder = self._processes.folder
        self._shared = Path(self._environment.get(SHARED_FOLDER) or self.folder / "shared")
        self._cache = self._shared / "cache"
        self._cache.mkdir(parents=True, exist_ok=True)

    def __exit__(self, *error: Any) -> None:
        self._processes.__exit__(*error)

    def start(self, task: Task, *, timeout_s: float, cache: bool = False) -> Child:
        """Starts a process on `task`.

        With `cache`, JAX's compilation cache is on, and shared by the command's processes.

        JAX writes a cache entry in place, so that a process that is killed may leave half an entry, which is never mended
        (`LRUCache.put` in jax/_src/lru_cache.py). So each process has a cache folder of its own, with links to what is
        there, and what it adds is taken over when it ended well. Executables of a GPU that isn't here are written and can't
        be read back (XLA: "PjRtCompiler must be constructed with a Client"): for those the cache is off.

        Raises:
            JaxrematError: the disk of the temporary folder is full.
        """
        self._count += 1
        folder = self.folder / str(self._count)
        with named_by("the temporary folder", folder, OTHER_TMPDIR):
            (folder / "cache").mkdir(parents=True)
            (folder / "task").write_text(task.to_json())
        environment = self._environment | {
            "TMPDIR": str(folder),
            SHARED_FOLDER: str(self._shared),
            JOBS: "1",  # the processes run beside each other
            "JAX_ENABLE_COMPILATION_CACHE": "true" if cache else "false",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # its path would be part of every key
        }
        for entry in _entries(self._cache):
            os.link(entry, folder / "cache" / entry.name)
        command = [*self._command, str(folder / "task"), str(folder / "result")]
        child = self._processes.start(command, environment, Deadline(timeout_s))
        self._folders[child] = folder
        return child

    def wait(self, at_most_s: float) -> list[tuple[Child, Result]]:
        """The processes that ended within `at_most_s` seconds, each with its result.

        One over its time is killed.
        """
        return [(child, self._result(child, ended)) for child, ended in self._processes.wait(at_most_s)]

    def _result(self, child: Child, ended: Ended) -> Result:
        folder = self._folders.pop(child)
        result = judge(folder / "result", ended, child.deadline.limit_s)
        if result.outcome == "ok":
            for entry in _entries(folder / "cache"):
                entry.replace(self._cache / entry.name)
        shutil.rmtree(folder, ignore_errors=True)
        return result


def judge(result: Path, ended: Ended, timeout_s: float) -> Result:
    """What became of a task whose process is gone: the result that it left, else how it failed.

    Args:
        result: where its result file should be.
        ended: how the process ended.
        timeout_s: the time that it had.
    """
    lines = tuple(line[:300] for line in ended.tail.splitlines() if line.strip())[-_TAIL_LINES:]
    try:
        return read_result(result.read_bytes())
    except FileNotFoundError:
        fault = "left no result"
    except (msgspec.ValidationError, JaxrematError) as error:
        fault = f"its result can't be read ({error.got if isinstance(error, JaxrematError) else in_words(error)})"
    except (msgspec.DecodeError, UnicodeDecodeError):
        fault = "its result was cut short"
    if ended.code is None:
        return Result(outcome="timeout", error=f"killed after {timeout_s:g} s (--timeout)", tail=lines)
    if is_out_of_memory("\n".join(lines)):
        return Result(outcome="oom", error=next(line for line in lines if is_out_of_memory(line)), tail=lines)
    if ended.code < 0:
        fault = f"its process was killed by {signal_name(-ended.code)}"
        if ended.code == -signal.SIGKILL:
            fault += " (by Linux, if the machine ran out of memory; dmesg says so)"
    elif ended.code:
        fault = f"its process ended with exit code {ended.code}" + (f", and {fault}" if result.exists() else "")
    else:
        fault = f"its process ended as if all were well, and {fault}"
    return Result(outcome="crashed", error=fault + (f": {lines[-1]}" if lines else ""), tail=lines)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]
