"""What commands of many trials share: progress, failed trials done again, and signals that end them cleanly.

`sweep` and `recommend` are such commands.
"""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxremat.report.progress import Progress
    from jaxremat.trial.queue import Queue, SweepTrial
    from jaxremat.trial.record import Outcome
    from jaxremat.trial.store import Store

FAILED = ("oom", "timeout", "crashed", "bad-config")


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt as Ctrl-C does, and further signals are ignored.

    An array job gets SIGTERM before it is killed. A second signal must not interrupt the cleanup.
    """
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]  # a background job

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def forget_failed(store: "Store", trials: "Sequence[SweepTrial]") -> None:
    """Makes the store forget the trials that failed, so that they run again."""
    from jaxremat.trial.queue import outcome_of

    for trial in trials:
        if (records := store.trial(trial.key)) and outcome_of(records) in FAILED:
            store.forget(trial.key)


class TrialsProgress:
    """Prints to stderr a line for each trial that starts or ends, and a live line of the trials that run.

    How long the rest may take is said as if each trial took what those that ended here took on average.

    Attributes:
        ended_here: the trials that this process ran, in the order in which they ended.
    """

    def __init__(
        self, progress: "Progress", trials: "Sequence[SweepTrial]", store: "Store", shard: str | None = None
    ) -> None:
        self.ended_here: list[SweepTrial] = []
        self._progress, self._num_trials = progress, len(trials)
        self._running: set[str] = set()
        self._started_s = time.monotonic()
        self._done = sum(store.trial(trial.key) is not None for trial in trials)
        of_shard = f" (shard {shard})" if shard else ""
        progress.line(f"{len(trials)} trials{of_shard}, {self._done} of them done before; records go to {store.path}")

    def queue(self, trials: "Sequence[SweepTrial]", store: "Store", *, num_at_once: int, timeout_s: float) -> "Queue":
        """The queue of the trials whose progress is printed here."""
        from jaxremat.trial.queue import Queue

        return Queue(
            trials,
            store,
            num_at_once=num_at_once,
            timeout_s=timeout_s,
            on_start=self.on_start,
            on_end=self.on_end,
            on_tick=self.on_tick,
        )

    def on_start(self, trial: "SweepTrial") -> None:
        """Prints that a trial starts in this command."""
        self._running.add(trial.key)
        self._progress.line(f"started: {trial}; {self._left()}")

    def on_end(self, trial: "SweepTrial", outcome: "Outcome", duration_s: float) -> None:
        """Prints that a trial ended, in this command or in another one over the same file."""
        self._done += 1
        if trial.key in self._running:
            self.ended_here.append(trial)
            how = f"{outcome}, {duration_s:.1f} s"
        else:
            how = f"{outcome}, by another process"
        self._running.discard(trial.key)
        self._progress.line(f"{how}: {trial}; {self._left()}")

    def on_tick(self, now: "Sequence[tuple[SweepTrial, str]]") -> None:
        """Shows the running trials on the live line, each with the last line of its process."""
        doing = "; ".join(f"{trial.model}, {trial.target}, {line or trial.policy}" for trial, line in now)
        self._progress.status(f"{self._left()}: {doing or 'waiting for another process'}")

    def _left(self) -> str:
        from jaxremat.report.progress import rest_text

        left, ended = self._num_trials - self._done, len(self.ended_here)
        rest_s = left * (time.monotonic() - self._started_s) / ended if left and ended else None
        running = len(self._running)
        return f"{self._done} of {self._num_trials} done, {running} running, {left - running} waiting{rest_text(rest_s)}"
