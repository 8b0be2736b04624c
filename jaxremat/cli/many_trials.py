"""What commands of many trials share: their store, their processes and their progress.

`sweep` and `recommend` are such commands.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxremat.chips.catalog import chip_of
from jaxremat.cli.machine.variables import check_xla_flags
from jaxremat.cli.output import say_notes
from jaxremat.errors import bad_value, both, reject
from jaxremat.session.flags import RecommendFlags, SweepFlags
from jaxremat.session.session import note
from jaxremat.system.ahead import num_at_once
from jaxremat.xla.results import ignore_older_results

if TYPE_CHECKING:
    from jaxremat.report.progress import Progress
    from jaxremat.trial.queue import SweepTrial
    from jaxremat.trial.record import Outcome, Record
    from jaxremat.trial.store import Store

FAILED = ("oom", "timeout", "crashed", "bad-config")
#: What the message of an interrupt says about the results so far.
SAVED = "finished trials are saved, and the same command resumes"
#: What begins the estimate of the rest, which isn't an upper bound: trials take longer or shorter than others of their kind.
_REST = "; the rest takes about "


def check_how_trials_run(flags: SweepFlags | RecommendFlags) -> None:
    """Checks the flags that say how the trials run.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    numbers = {name: getattr(flags, name, None) for name in ("jobs", "timeout", "num_shards")}
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise bad_value(name, f"{value:g}", "a number above 0")
    again = "--fresh does the failed ones again too"
    reject((flags.fresh and flags.retry_failed, both("--fresh", "--retry-failed"), "leave one of them out", again))


@contextlib.contextmanager
def store_of(flags: SweepFlags | RecommendFlags) -> "Iterator[Store]":
    """The store of --out, as a context that prints which lines of the file are damaged.

    Raises:
        UsageError: XLA can't read the variable XLA_FLAGS, so that each trial would crash.
    """
    from jaxremat.trial.store import Store

    assert flags.out
    check_xla_flags()
    if flags.fresh:
        ignore_older_results()
    with Store(flags.out, fresh=flags.fresh) as store:
        say_notes(store)
        try:
            yield store
        finally:
            say_notes(store)


def run_trials(
    flags: SweepFlags | RecommendFlags,
    store: "Store",
    turns: "Iterable[Sequence[SweepTrial]]",
    unwritten: Callable[[str], None],
) -> None:
    """Runs the trials that aren't in the store.

    The device's headroom is fitted to those that ran here after all of them, so that they have one budget.

    Args:
        flags: how the trials run.
        store: where their records go.
        turns: the trials, no two of one key. A turn is requested after the trials of the one before have ended.
        unwritten: called with each record that couldn't be stored, as a line, so that it isn't lost.

    Raises:
        JaxrematError: the records of a trial couldn't be stored.
    """
    from jaxremat.cli.processes import COMMAND
    from jaxremat.report.progress import Progress
    from jaxremat.report.screen import shared_screen
    from jaxremat.trial.headroom import learn
    from jaxremat.trial.lines import to_json
    from jaxremat.trial.queue import Queue, SweepTrial, outcome_of
    from jaxremat.trial.workers import Workers

    queues, ended_here = list[Queue](), list[SweepTrial]()
    try:
        with Progress(shared_screen().progress) as progress, Workers(COMMAND) as workers:
            shown = TrialsProgress(progress, store, getattr(flags, "shard", None))
            ended_here = shown.ended_here
            hear = {"on_start": shown.on_start, "on_end": shown.on_end, "on_tick": shown.on_tick}
            for trials in turns:
                if flags.retry_failed:
                    for trial in trials:
                        if (records := store.trial(trial.key)) and outcome_of(records) in FAILED:
                            store.forget(trial.key)
                shown.expect(trials)
                num_jobs = flags.jobs or num_at_once()
                queues.append(Queue(trials, store, num_at_once=num_jobs, timeout_s=flags.timeout, **hear))
                queues[-1].run(workers)
    finally:
        store.refresh()  # an interrupt may come after a row is written and before the store has noted it
        if said := learn(record for trial in ended_here for record in store.trial(trial.key) or ()):
            note(f"jaxremat: {said}")
        for queue in queues:
            for record in queue.unwritten:
                unwritten(to_json(record))


class TrialsProgress:
    """Prints a line for each trial that starts or ends, and a live line of those that run.

    How long the rest takes is said once a trial of each kind that is left has ended here: as if each took as long as those of its
    kind on average. Trials are of one kind if they are for one kind of chip, and for one device or for several.

    Attributes:
        ended_here: the trials that this process ran, in their order.
    """

    def __init__(self, progress: "Progress", store: "Store", shard: str | None = None) -> None:
        self.ended_here: list[SweepTrial] = []
        self._progress, self._store, self._shard = progress, store, shard
        self._num_trials = 0
        self._left_by_key: dict[str, SweepTrial] = {}
        self._running: set[str] = set()
        self._most_running = 1
        self._seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)

    def expect(self, trials: "Sequence[SweepTrial]") -> None:
        """Prints how many trials come now.

        Where they are the first, it prints where their records go.
        """
        left = {trial.key: trial for trial in trials if self._store.trial(trial.key) is None}
        further = " more" if self._num_trials else f" (shard {self._shard})" if self._shard else ""
        where = "" if self._num_trials else f"; records go to {self._store.path}"
        number = f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}{further}"
        if trials or where:
            self._progress.line(f"{number}, {len(trials) - len(left)} of them done before{where}")
        self._num_trials += len(trials)
        self._left_by_key |= left

    def on_start(self, trial: "SweepTrial") -> None:
        """Prints that a trial starts in this command."""
        self._running.add(trial.key)
        self._most_running = max(self._most_running, len(self._running))
        self._progress.line(f"started: {trial}; {self._left()}")

    def on_end(self, trial: "SweepTrial", outcome: "Outcome", duration_s: float) -> None:
        """Prints that a trial ended, in this command or in another one over the same file."""
        self._left_by_key.pop(trial.key, None)
        how = "by another process"
        if trial.key in self._running:
            how = f"{duration_s:.1f} s"
            self.ended_here.append(trial)
            if trial.task:
                self._seconds[_kind(trial)].append(duration_s)
        self._running.discard(trial.key)
        self._progress.line(f"{outcome}, {how}: {trial}{_result(self._store.trial(trial.key) or ())}; {self._left()}")

    def on_tick(self, now: "Sequence[tuple[SweepTrial, str]]") -> None:
        """Shows the running trials on the live line, each with the last line of its process."""
        doing = "; ".join(f"{trial.model}, {trial.target}, {line or trial.policy}" for trial, line in now)
        self._progress.status(f"{self._left()}: {doing or 'waiting for another process'}")

    def _left(self) -> str:
        from jaxremat.report.progress import rest_text

        left, running = len(self._left_by_key), len(self._running)
        done = f"{self._num_trials - left} of {self._num_trials} done"
        rest = rest_text(self._rest_s(), _REST)
        return f"{done}, {running} running, {left - running} waiting{rest}"

    def _rest_s(self) -> float | None:
        """The seconds that the trials left take.

        None before a trial of each of their kinds has ended here.
        """
        kinds = [_kind(trial) for trial in self._left_by_key.values() if trial.task]
        if not kinds or not all(self._seconds.get(kind) for kind in kinds):
            return None
        means = [sum(self._seconds[kind]) / len(self._seconds[kind]) for kind in kinds]
        return max(*means, sum(means) / self._most_running)


def _result(records: "Iterable[Record]") -> str:
    """What a trial has found: `: batch 3, fsdp=8, 9,917 tokens/s a device`.

    Empty for one that doesn't fit.
    """
    from jaxremat.report.steps import batch_text, rate_title
    from jaxremat.trial.queue import answer_of

    row = answer_of(records)
    if row is None or row.outcome != "ok" or not row.rate:
        return ""
    on_mesh = f", {row.mesh}" if row.mesh else ""
    return f": batch {batch_text(row)}{on_mesh}, {row.rate:,.0f} {rate_title([row])}" + " a device" * bool(row.mesh)


def _kind(trial: "SweepTrial") -> tuple[str, bool]:
    """The kind of a trial: the platform of its chip, and whether several devices have its step."""
    return chip_of(trial.target).platform, trial.num_devices > 1
