"""The trials of a sweep, each in processes of its own: several at a time, or alone on a device; a store keeps their records.

A process that takes up a trial claims it in the store, so that any number of sweeps over one store divide the work. A trial
may take several processes. The first one compiles. What is to be measured on a device is then run in a process that did
nothing before, because the peak of an allocator never falls.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from jaxremat.errors import JaxrematError
from jaxremat.trial.confirm import next_to_run, settle, smaller_batches, uncompiled_trial, with_times
from jaxremat.trial.record import FailureRecord, LargestBatchRecord, Outcome, Record, TrialRecord
from jaxremat.trial.store import Store
from jaxremat.trial.task import Result, Task
from jaxremat.trial.workers import Child, Workers
from jaxremat.xla.installed import versions
from jaxremat.xla.options import with_preset

_TICK_S = 0.25


@dataclass(frozen=True)
class SweepTrial:
    """One trial of a sweep: a policy at a batch, or the search for the policy's largest batch.

    Attributes:
        key: of its records in the store.
        model: as asked for, and so the policy and the target.
        batch: None for a search.
        task: what its first process gets; None where it is refused.
        config: what the record of a failure says was asked for.
        alone: whether it is timed on a device, so that nothing else may run meanwhile.
        refused: why it can't be meant; then no process is started.
        xla_preset: the preset of XLA's options that it is compiled with.
        seq_len: tokens per sequence, if the sweep has several lengths. Otherwise None.
        num_devices: how many devices have the step. 1 where the mesh, and not their number, was asked for.
    """

    key: str
    model: str
    policy: str
    target: str
    batch: int | None
    task: Task | None
    config: dict[str, Any]
    alone: bool = False
    refused: str = ""
    xla_preset: str = "default"
    seq_len: int | None = None
    num_devices: int = 1

    def __str__(self) -> str:
        sequence = f", sequence {self.seq_len}" if self.seq_len else ""
        policy = with_preset(self.policy, self.xla_preset)
        target = f"{self.num_devices} x {self.target}" if self.num_devices > 1 else self.target
        batch = f"batch {self.batch}" if self.batch else "largest batch"
        return f"{self.model}{sequence}, {policy}, {batch}, {target}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The fields of a `TrialRecord` that running its step fills in."""

    step_s: float | None = None
    step_source: Literal["measured", "predicted"] | None = None
    step_min_s: float | None = None
    step_max_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    ran: Outcome | None = None
    measured_peak_bytes: int | None = None
    measured_over_total_percent: float | None = None
    outside_bytes: int | None = None
    outside_source: Literal["process", "card"] | None = None
    error: str | None = None
    error_kind: str | None = None


def measured(compiled: TrialRecord, result: Result) -> TrialRecord:
    """The trial with what came of running its step; a failure leaves the compiled bytes as they are."""
    if result.outcome != "ok":
        failure = Measurement(ran=result.outcome, error=result.error, error_kind=result.outcome)
        return replace(compiled, **asdict(failure))
    (run,) = result.records
    assert isinstance(run, TrialRecord)
    if compiled.total_bytes is None:
        return run  # the search didn't compile this batch
    return replace(compiled, **{field.name: getattr(run, field.name) for field in fields(Measurement)})


class Attempt:
    """A trial under way: its processes, one after the other, and the records that they come to."""

    def __init__(self, trial: SweepTrial) -> None:
        self.trial, self.records = trial, tuple[Record, ...]()
        self._tasks: list[tuple[int | None, Task]] = []  # each with the number of the record that it measures
        self._run: list[int] | None = None  # the batches that were run to confirm a search; None where none is confirmed
        self._started = time.monotonic()
        if trial.task is None:
            self._fail(Result(outcome="bad-config", error=trial.refused))
        else:
            self._tasks.append((None, trial.task))

    def start(self, workers: Workers, timeout_s: float) -> Child | None:
        """Starts the next process; None where there is nothing left to do."""
        if not self._tasks:
            return None
        return workers.start(self._tasks[0][1], timeout_s=timeout_s, cache=self.trial.alone)

    def take(self, result: Result) -> None:
        """Takes the result of the process that was started last."""
        number, task = self._tasks.pop(0)
        if number is not None:
            self._measured(number, result)
        elif result.outcome == "ok":
            self.records = result.records
            self._run = [] if result.confirm else None
            self._tasks = [self._measurement(number, task.flags) for number in result.to_measure]
        else:
            self._fail(result)
        if self._run is not None and not self._tasks:
            self._confirm(self._run, task.flags)

    def _measurement(self, number: int, flags: dict[str, Any]) -> tuple[int, Task]:
        """The task that measures record `number`."""
        return number, Task(flags, self._trial(number))

    def _measured(self, number: int, result: Result) -> None:
        """Takes what came of measuring record `number`."""
        trial = measured(self._trial(number), result)
        for at, search in self._searches():
            if search.largest_batch == trial.batch:
                self._put(at, with_times(search, trial))
            if self._run is not None and trial.error and (trial.ran == "oom" or trial.batch == search.next_batch):
                trial = replace(trial, ran_error=trial.error, error=None, error_kind=None)  # it was meant to fail
        self._put(number, trial)

    def _confirm(self, run: list[int], flags: dict[str, Any]) -> None:
        """Takes up the next batch that is to be run to confirm the search, or writes down what came of the runs."""
        ((at, search),) = self._searches()
        numbers = {r.batch: n for n, r in enumerate(self.records) if isinstance(r, TrialRecord) and r.record == "trial"}
        trials = {batch: self._trial(numbers[batch]) for batch in run}
        ran: dict[int, Outcome] = {batch: trial.ran for batch, trial in trials.items() if trial.ran}
        smaller = smaller_batches(search.largest_batch, search.global_batch)
        batch = next_to_run(ran, search.largest_batch, search.next_batch, smaller)
        if batch is None:
            self._put(at, settle(search, trials))
            self._run = None
            return
        run.append(batch)
        number = numbers.get(batch, at)
        if batch not in numbers:
            new = uncompiled_trial(self._trial(numbers[search.largest_batch]), batch, search.global_batch)
            self.records = (*self.records[:at], new, *self.records[at:])
        self._tasks = [self._measurement(number, flags)]

    def _put(self, number: int, record: Record) -> None:
        self.records = (*self.records[:number], record, *self.records[number + 1 :])

    def _trial(self, number: int) -> TrialRecord:
        record = self.records[number]
        assert isinstance(record, TrialRecord)
        return record

    def _searches(self) -> list[tuple[int, LargestBatchRecord]]:
        return [(at, record) for at, record in enumerate(self.records) if isinstance(record, LargestBatchRecord)]

    def _fail(self, result: Result) -> None:
        trial = self.trial
        failure = FailureRecord(
            model=trial.model,
            requested_policy=trial.policy,
            target=trial.target,
            batch=trial.batch,
            outcome=result.outcome,
            error=result.error,
            tail=result.tail,
            duration_s=time.monotonic() - self._started,
            config=trial.config,
            xla_flags=os.environ.get("XLA_FLAGS"),
            versions=versions(),
        )
        self.records = (failure,)


def run_trial(trial: SweepTrial, workers: Workers, timeout_s: float, show: Callable[[str], None]) -> tuple[Record, ...]:
    """Runs one trial to its end and returns its records.

    Args:
        trial: the trial.
        workers: where its processes run.
        timeout_s: of each process.
        show: called several times a second with the last line that the process printed.
    """
    attempt = Attempt(trial)
    while child := attempt.start(workers, timeout_s):
        while not (ended := workers.wait(_TICK_S)):
            show(child.last_line)
        attempt.take(ended[0][1])
    return attempt.records


class Queue:
    """The trials of a sweep on their way into a store.

    Args:
        trials: no two of one key.
        store: a trial that is in it already isn't run.
        num_at_once: how many processes run at a time; a trial that must be alone runs by itself.
        timeout_s: of each process.
        on_start: called with each trial that starts.
        on_end: called with each trial that ends, its outcome, and how many seconds it took; also with each that another
            process finished, in 0 seconds.
        on_tick: called several times a second with the trials that run, each with the last line that its process printed.
    """

    def __init__(
        self,
        trials: Sequence[SweepTrial],
        store: Store,
        *,
        num_at_once: int,
        timeout_s: float,
        on_start: Callable[[SweepTrial], None] = lambda trial: None,
        on_end: Callable[[SweepTrial, Outcome, float], None] = lambda trial, outcome, duration_s: None,
        on_tick: Callable[[list[tuple[SweepTrial, str]]], None] = lambda running: None,
    ) -> None:
        self._store, self._num_at_once, self._timeout_s = store, num_at_once, timeout_s
        self._on_start, self._on_end, self._on_tick = on_start, on_end, on_tick
        self._waiting = [trial for trial in trials if store.trial(trial.key) is None]
        self._running: dict[Child, tuple[Attempt, float]] = {}
        self.unwritten = tuple[Record, ...]()

    def run(self, workers: Workers) -> None:
        """Runs the trials that aren't in the store, and waits for those that another process runs, until all are there.

        Raises:
            JaxrematError: the records of a trial couldn't be stored; they are in `unwritten`.
        """
        for alone, limit in ((False, self._num_at_once), (True, 1)):
            while self._running or any(trial.alone == alone for trial in self._waiting):
                while len(self._running) < limit and (trial := self._next(alone)):
                    self._on_start(trial)
                    self._go_on(Attempt(trial), workers, time.monotonic())
                if not self._running and self._waiting:
                    time.sleep(_TICK_S)  # other processes work on what is left
                for child, result in workers.wait(_TICK_S):
                    attempt, started = self._running.pop(child)
                    attempt.take(result)
                    self._go_on(attempt, workers, started)
                if self._running or self._waiting:
                    self._on_tick([(attempt.trial, child.last_line) for child, (attempt, _) in self._running.items()])

    def _next(self, alone: bool) -> SweepTrial | None:
        """A trial that nobody has done and nobody works on, claimed."""
        for trial in [trial for trial in self._waiting if trial.alone == alone]:
            if not self._store.claim(trial.key):
                continue
            self._store.refresh()
            self._waiting.remove(trial)
            if (records := self._store.trial(trial.key)) is None:
                return trial
            self._store.release(trial.key)
            self._on_end(trial, outcome_of(records), 0.0)
        return None

    def _go_on(self, attempt: Attempt, workers: Workers, started: float) -> None:
        """Starts the trial's next process, or stores its records where that was the last one."""
        if child := attempt.start(workers, self._timeout_s):
            self._running[child] = attempt, started
            return
        try:
            self._store.append(attempt.records, attempt.trial.key)
        except JaxrematError:
            self.unwritten = attempt.records
            raise
        self._store.release(attempt.trial.key)
        self._on_end(attempt.trial, outcome_of(attempt.records), time.monotonic() - started)


def outcome_of(records: Iterable[Record]) -> Outcome:
    """How a trial ended, by its records."""
    records = tuple(records)
    for record in records:
        if isinstance(record, FailureRecord) or (isinstance(record, TrialRecord) and record.error):
            return record.outcome
    outcomes = {record.outcome for record in records if isinstance(record, TrialRecord) and record.record == "trial"}
    return "ok" if "ok" in outcomes else "oom" if "oom" in outcomes else "infeasible"


def answer_of(records: Iterable[Record]) -> TrialRecord | None:
    """The record at the batch that was asked for, or at the largest batch that fits. None if nothing was compiled.

    If no batch fits, it is the record at the smallest batch tried.
    """
    records = tuple(records)
    trials = [record for record in records if isinstance(record, TrialRecord) and record.record == "trial"]
    searches = [record for record in records if isinstance(record, LargestBatchRecord)]
    if searches:
        batch = searches[0].largest_batch or searches[0].next_batch
        trials = [row for row in trials if row.batch == batch]
    return trials[-1] if trials else None


def error_of(records: Iterable[Record]) -> str:
    """The error of a trial, by its records. Empty if there was none."""
    return next((r.error for r in records if isinstance(r, FailureRecord | TrialRecord) and r.error), "")
