"""Runs work in child processes, each with a time limit.

A child prints lines of JSON, its rows. A child that fails gives its last line of stderr as the error.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxremat.system.process import Deadline, run_until

Row = dict[str, Any]
Job = TypeVar("Job")


@dataclass(frozen=True)
class Child:
    """What a child process gave.

    Attributes:
        rows: the rows that it printed before it ended.
        error: why it failed. Empty if it didn't fail.
    """

    rows: tuple[Row, ...]
    error: str

    def find(self, record: str, **fields: Any) -> Row | None:
        """The last row of this kind with these fields, None if there is none: `find("trial", batch=8)`."""
        wanted = {"record": record, **fields}
        found = [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]
        return found[-1] if found else None


def run_child(
    module: str, argv: Sequence[str], deadline: Deadline, environment: Mapping[str, str], folder: Path = Path()
) -> Child:
    """Runs `python -m module argv` until it ends or the deadline comes. The rows printed until then are kept.

    Args:
        module: the module to run. It prints one JSON object per line.
        argv: its arguments.
        deadline: when it is ended, with all processes that it started.
        environment: variables that are added to this process's environment.
        folder: where it is run.
    """
    limit_s = deadline.left_s()
    if limit_s < 1:
        return Child((), f"not reached within {deadline.limit_s:.0f} s")
    in_folder = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), sys.executable, "-m", module, *argv]
    ended = run_until(deadline, in_folder, {**os.environ, **environment})
    error = ""
    if ended.code is None:
        error = f"cut off after {limit_s:.0f} s of the part's {deadline.limit_s:.0f} s"
    elif ended.code not in (0, 3):  # 3: nothing fits, which is a result
        error = _last_line(ended.tail) or f"exit code {ended.code}"
    return Child(tuple(_rows(ended.out)), error)


def _rows(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue  # the process was ended within this line


def _last_line(text: str) -> str:
    """The last line that a program printed, without jaxremat's lines of progress."""
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[")]
    return said[-1][:400] if said else ""


def in_parallel(
    num_workers: int, deadline: Deadline, work: Callable[[Job], Child], jobs: Sequence[Job]
) -> Iterator[tuple[Job, Child]]:
    """Yields each job with its result, in the order in which the jobs finish.

    An interrupt ends `deadline`, so that the children that still run are ended too.
    """
    with ThreadPoolExecutor(num_workers) as pool:
        futures: dict[Future[Child], Job] = {pool.submit(work, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            deadline.end()
            raise


def in_processes(
    things: Sequence[Job],
    a_process: int,
    num_workers: int,
    deadline: Deadline,
    run: Callable[[Sequence[Job]], Child],
    died: Callable[[Job, str], Row],
) -> Iterator[Row]:
    """Yields the row of each thing, made in processes of `a_process` things each.

    Where a process dies, `died` makes the row of the thing that it died at, and a new process makes the rows after it.
    """
    left = [things[n : n + a_process] for n in range(0, len(things), a_process)]
    while left:
        jobs, left = left, []
        for some, child in in_parallel(num_workers, deadline, run, jobs):
            yield from child.rows
            missing = some[len(child.rows) :]
            if missing:
                yield died(missing[0], f"its process died: {child.error}")
                left += [missing[1:]] if missing[1:] else []
