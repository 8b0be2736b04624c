"""The trials of a sweep, each in processes of its own, on their way into a store.

Several run at a time, or one alone on a device.

A process that takes up a trial claims it in the store, so that any number of sweeps over one store divide the work. A trial
may take several processes. The first one compiles. What is to be measured on a device is then run in a process that did
nothing before, because the peak of an allocator never falls.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxremat.chips.installed import versions
from jaxremat.errors import JaxrematError
from jaxremat.trial.confirm import Processes, confirmed, measured_all
from jaxremat.trial.record import FailureRecord, LargestBatchRecord, Outcome, Record, TrialRecord, picked
from jaxremat.trial.store import Store
from jaxremat.trial.task import Result, Task
from jaxremat.trial.workers import Child, Workers
from jaxremat.xla.options import with_preset

_TICK_S = 0.25


@dataclass(frozen=True)
class SweepTrial:
    """One trial of a sweep: a policy at a batch, or the search for the policy's largest batch.

    Attributes:
        key: of its records in the store.
        model: as requested, and so the policy and the target.
        batch: None for a search.
        task: what its first process gets; None where it is rejected.
        config: what the record of a failure says was requested.
        alone: whether it is timed on a device, so that nothing else may run meanwhile.
        refused: why it can't be meant; then no process is started.
        xla_preset: the preset of XLA's options that it is compiled with.
        seq_len: tokens per sequence, if the sweep has several lengths. Otherwise None.
        num_devices: how many devices have the step. 1 where the mesh, and not their number, was requested.
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


def processes_of(trial: SweepTrial) -> Processes:
    """The processes of a trial, one after the other, and the records that they come to."""
    started_s = time.monotonic()
    result = (yield trial.task) if trial.task else Result(outcome="bad-config", error=trial.refused)
    if trial.task is None or result.outcome != "ok":
        failure = FailureRecord(
            requested_policy=trial.policy,
            duration_s=time.monotonic() - started_s,
            xla_flags=os.environ.get("XLA_FLAGS"),
            versions=versions(),
            **picked(trial, "model target batch config"),
            **picked(result, "outcome error tail"),
        )
        return (failure,)
    if result.confirm:
        return (yield from confirmed(result.records, trial.task.flags))
    return (yield from measured_all(result.records, result.to_measure, trial.task.flags))


class Attempt:
    """A trial under way.

    Attributes:
        trial: the trial.
        started_s: when it started, by `time.monotonic`.
        records: what the trial came to, once nothing is left to do.
    """

    def __init__(self, trial: SweepTrial) -> None:
        self.trial, self.started_s = trial, time.monotonic()
        self.records = tuple[Record, ...]()
        self._processes = processes_of(trial)

    def proceed(self, workers: Workers, timeout_s: float, result: Result | None = None) -> Child | None:
        """Takes the result of its process, and starts the next one; None after the last one."""
        try:
            task = self._processes.send(result)
        except StopIteration as end:
            self.records = end.value
            return None
        return workers.start(task, timeout_s=timeout_s, cache=self.trial.alone)


def run_trial(trial: SweepTrial, workers: Workers, timeout_s: float, show: Callable[[str], None]) -> tuple[Record, ...]:
    """Runs one trial to its end and returns its records.

    Args:
        trial: the trial.
        workers: where its processes run.
        timeout_s: of each process.
        show: called several times a second with the last line that the process printed.
    """
    attempt, result = Attempt(trial), None
    while child := attempt.proceed(workers, timeout_s, result):
        while not (ended := workers.wait(_TICK_S)):
            show(child.last_line)
        ((_, result),) = ended
    return attempt.records


@dataclass
class Queue:
    """The trials of a sweep on their way into a store.

    Attributes:
        trials: no two of one key.
        store: a trial that is in it already isn't run.
        num_at_once: how many processes run at a time; a trial that must be alone runs by itself.
        timeout_s: of each process.
        on_start: called with each trial that starts.
        on_end: called with each trial that ends, its outcome, and how many seconds it took; also with each that another
            process finished, in 0 seconds.
        on_tick: called several times a second with the trials that run, each with the last line that its process printed.
        unwritten: the records of a trial that couldn't be stored.
    """

    trials: Sequence[SweepTrial]
    store: Store
    num_at_once: int
    timeout_s: float
    on_start: Callable[[SweepTrial], None] = lambda trial: None
    on_end: Callable[[SweepTrial, Outcome, float], None] = lambda trial, outcome, duration_s: None
    on_tick: Callable[[list[tuple[SweepTrial, str]]], None] = lambda running: None
    unwritten: tuple[Record, ...] = ()

    def __post_init__(self) -> None:
        self._waiting = [trial for trial in self.trials if self.store.trial(trial.key) is None]
        self._running: dict[Child, Attempt] = {}

    def run(self, workers: Workers) -> None:
        """Runs the trials until the records of all are in the store.

        It waits for those that another process runs.

        Raises:
            JaxrematError: the records of a trial couldn't be stored; they are in `unwritten`.
        """
        for alone, limit in ((False, self.num_at_once), (True, 1)):
            while self._running or any(trial.alone == alone for trial in self._waiting):
                while len(self._running) < limit and (trial := self._next(alone)):
                    self.on_start(trial)
                    self._proceed(Attempt(trial), workers)
                if not self._running and self._waiting:
                    time.sleep(_TICK_S)  # other processes work on what is left
                for child, result in workers.wait(_TICK_S):
                    self._proceed(self._running.pop(child), workers, result)
                if self._running or self._waiting:
                    self.on_tick([(attempt.trial, child.last_line) for child, attempt in self._running.items()])

    def _next(self, alone: bool) -> SweepTrial | None:
        """A trial that nobody has done and nobody works on, claimed."""
        for trial in [trial for trial in self._waiting if trial.alone == alone]:
            if not self.store.claim(trial.key):
                continue
            self.store.refresh()
            self._waiting.remove(trial)
            if (records := self.store.trial(trial.key)) is None:
                return trial
            self._end(trial, records, 0.0)
        return None

    def _proceed(self, attempt: Attempt, workers: Workers, result: Result | None = None) -> None:
        """Starts the trial's next process, or stores its records where that was the last one."""
        if child := attempt.proceed(workers, self.timeout_s, result):
            self._running[child] = attempt
            return
        try:
            self.store.append(attempt.records, attempt.trial.key)
        except JaxrematError:
            self.unwritten = attempt.records
            raise
        self._end(attempt.trial, attempt.records, time.monotonic() - attempt.started_s)

    def _end(self, trial: SweepTrial, records: tuple[Record, ...], duration_s: float) -> None:
        self.store.release(trial.key)
        self.on_end(trial, outcome_of(records), duration_s)


def outcome_of(records: Iterable[Record]) -> Outcome:
    """How a trial ended, by its records."""
    records = tuple(records)
    if failed := _failed(records):
        return failed.outcome
    outcomes = {record.outcome for record in _trials(records)}
    return "ok" if "ok" in outcomes else "oom" if "oom" in outcomes else "infeasible"


def error_of(records: Iterable[Record]) -> str:
    """The error of a trial, by its records. Empty if there was none."""
    failed = _failed(records)
    return failed.error or "" if failed else ""


def answer_of(records: Iterable[Record]) -> TrialRecord | None:
    """The record at the requested batch, or at the largest batch that fits.

    None if nothing was compiled.

    If no batch fits, it is the record at the smallest batch tried.
    """
    records = tuple(records)
    batches = [record.largest_batch or record.next_batch for record in records if isinstance(record, LargestBatchRecord)]
    trials = [record for record in _trials(records) if not batches or record.batch == batches[0]]
    return trials[-1] if trials else None


def _failed(records: Iterable[Record]) -> FailureRecord | TrialRecord | None:
    """The first record of a failure."""
    of_kinds = (record for record in records if isinstance(record, FailureRecord | TrialRecord))
    return next((record for record in of_kinds if isinstance(record, FailureRecord) or record.error), None)


def _trials(records: Iterable[Record]) -> list[TrialRecord]:
    return [record for record in records if isinstance(record, TrialRecord) and record.record == "trial"]
