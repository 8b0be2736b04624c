"""Work that other threads do ahead, before its result is requested.

XLA compiles a step in one thread, and holds no lock of Python's meanwhile. So several cores compile several steps at a time::

    wait = begin(compile_step)  # a thread compiles
    trace_the_next_step()       # this thread continues
    wait()                      # the step, or the error that compiling it raised

A result that may not be requested is a guess. A guess is begun only while a core is idle.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TypeVar

from jaxremat.errors import UsageError

#: The variable that says how many compiles run at a time.
JOBS = "JAXREMAT_JOBS"
_COMPILE_BYTES = 3 * 2**30  # a little more host memory than compiling a step of 1.5 billion parameters takes
T = TypeVar("T")


def num_at_once() -> int:
    """How many compiles run at a time.

    As many as `JAXREMAT_JOBS` says, or as the cores and the available memory allow.

    Raises:
        UsageError: the variable isn't a number above 0.
    """
    if (given := os.environ.get(JOBS)) is not None:
        if not is_number_of_jobs(given):
            raise UsageError(f"{JOBS}={given}", allowed="a number above 0", next_step=f"unset {JOBS}, and the cores decide")
        return int(given)
    import psutil

    available = psutil.virtual_memory().available
    return max(1, min(len(os.sched_getaffinity(0)), available // _COMPILE_BYTES))


def is_number_of_jobs(text: str) -> bool:
    """Whether `text` says how many compiles run at a time."""
    return text.isdecimal() and int(text) > 0


def with_next_begun(items: Sequence[T], begin: Callable[[T], object]) -> Iterator[T]:
    """The items, one after the other.

    Before each, `begin` is called for the next one.
    """
    for item, following in zip_longest(items, items[1:]):
        if following is not None:
            begin(following)
        yield item


class Ahead:
    """The threads of a process, and how much work they have left.

    Args:
        num_threads: how many there are.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_left = 0
        self._num_threads, self._lock = num_threads, threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ahead")

    def begin(self, work: Callable[[], T]) -> Callable[[], T]:
        """Gives the work to a thread. The returned function waits for its result or its error."""
        with self._lock:
            self.num_left += 1
        future = self._pool.submit(work)
        future.add_done_callback(self._is_done)
        return future.result

    @property
    def works(self) -> bool:
        """Whether work is begun before it is requested. With one core it isn't."""
        return self._num_threads > 1

    @property
    def has_idle_core(self) -> bool:
        """Whether a guess may be begun. What is going to be requested should be begun before."""
        return self.works and self.num_left < self._num_threads

    def _is_done(self, future: object) -> None:
        with self._lock:
            self.num_left -= 1


@functools.cache
def ahead() -> Ahead:
    """The threads of this process."""
    return Ahead(num_at_once())


def is_busy() -> bool:
    """Whether a thread of this process still works ahead."""
    return ahead.cache_info().currsize > 0 and ahead().num_left > 0
