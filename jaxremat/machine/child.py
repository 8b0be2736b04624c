"""A program run in a process group of its own until it ends or its time is over: what it printed, and how it ended."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOOK_S = 0.5  # so often it is looked whether the deadline was moved


class Deadline:
    """When something must be over."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._end = limit_s, time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return max(0.0, self._end - time.monotonic())

    def end(self) -> None:
        """Makes it be over now: children that run are ended, others aren't started."""
        self._end = time.monotonic()


@dataclass(frozen=True)
class Ended:
    """The exit code of a child, None where it was ended at its deadline, and all it printed."""

    code: int | None
    out: str
    err: str


def run_until(deadline: Deadline, command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Runs `command`; at the deadline, or when this process is interrupted, it is ended with all it started.

    Args:
        deadline: another thread may make it come sooner.
        command: the program and its arguments.
        environment: all of its variables.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = None
            while code is None and deadline.left_s():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(min(_LOOK_S, deadline.left_s()))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())
