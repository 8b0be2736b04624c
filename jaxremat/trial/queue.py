"""The trials of a sweep, each in processes of its own: several at a time, or alone on a device; all of them kept in a store.

Whoever takes up a trial claims it in the store, so that any number of sweeps over one store divide the work. A trial may need
further processes: what it measures on a device is run in one that did nothing before, since an allocator's peak never falls.
"""

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxremat.errors import JaxrematError
from jaxremat.trial.confirm import next_to_run, settle, smaller_batches
from jaxremat.trial.lines import from_row, to_row
from jaxremat.trial.process import Child, Ended, Workers
from jaxremat.trial.record import SCHEMA, FailureRecord, Outcome, TrialRecord
from jaxremat.trial.store import Row, Store
from jaxremat.xla.installed import versions

#: What running a compiled step adds to its row.
MEASURED = (
    "step_s",
    "step_source",
    "step_min_s",
    "step_max_s",
    "tokens_per_s",
    "mfu",
    "ran",
    "measured_peak_bytes",
    "measured_over_total_percent",
    "outside_bytes",
    "outside_source",
    "error",
    "error_kind",
)
#: What a trial of another batch of the same search has in common with this one, besides what has no default.
_SHARED = ("grad_dtype", "limit_bytes")
_TIMES = ("step_s", "step_source", "tokens_per_s")
_TICK_S = 0.25


@dataclass(frozen=True)
class Job:
    """One trial, or search, of a sweep.

    `task` is what its process gets, `config` what a row of its failure says was asked for. `alone`: it is timed on a device,
    so that nothing else runs meanwhile. `refused` says why it can't be meant; then no process is started.
    """

    key: str
    model: str
    policy: str
    target: str
    batch: int | None
    task: dict[str, Any]
    config: dict[str, Any]
    alone: bool = False
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.model}, {self.policy}, {f'batch {self.batch}' if self.batch else 'largest batch'}, {self.target}"


class Attempt:
    """A job under way: its processes one after the other, and the rows that they come to."""

    def __init__(self, job: Job) -> None:
        self.job, self.rows = job, list[Row]()
        self._tasks: list[tuple[Row | None, dict[str, Any]]] = [(None, job.task)]  # the first makes the rows
        self._confirm: Row | None = None
        self._run: dict[int, Row] = {}
        self._started = time.monotonic()
        if job.refused:
            self._tasks.clear()
            self._fail("bad-config", job.refused, [])

    def start(self, workers: Workers, timeout_s: float) -> Child | None:
        """Starts the next process; None where there is nothing left to do."""
        if not self._tasks:
            return None
        return workers.start(self._tasks[0][1], timeout_s=timeout_s, cache=self.job.alone)

    def take(self, ended: Ended) -> None:
        """Takes what the process came to."""
        row, _ = self._tasks.pop(0)
        if row is not None:
            self._measured(row, ended)
        elif ended.outcome == "ok":
            self.rows = ended.result["records"]
            self._confirm = ended.result.get("confirm")
            self._tasks = [(self.rows[then["row"]], then["task"]) for then in ended.result["then"]]
        else:
            self._fail(ended.outcome, ended.error, ended.tail)
        if self._confirm and not self._tasks:
            self._prove(self._confirm)

    def _measured(self, row: Row, ended: Ended) -> None:
        if ended.outcome == "ok":
            (measured,) = ended.result["records"]
        else:
            failed = {"error": ended.error, "error_kind": ended.outcome, "ran": ended.outcome}
            measured = dict.fromkeys(MEASURED) | failed
        row.update(measured if row["total_bytes"] is None else {name: measured[name] for name in MEASURED})
        for found in self._searches():
            if found["largest_batch"] == row["batch"]:
                found.update({name: row[name] for name in _TIMES})
            if self._confirm and (row["ran"] == "oom" or row["batch"] == found["next_batch"]) and row["error"]:
                row.update(ran_error=row["error"], error=None, error_kind=None)  # seen to fail, as it was meant to be

    def _searches(self) -> list[Row]:
        return [row for row in self.rows if row["record"] == "largest_batch"]

    def _prove(self, confirm: Row) -> None:
        """Runs the next batch that the proof of the largest one wants, or writes down what came of it."""
        (found,) = self._searches()
        ran = {batch: row["ran"] for batch, row in self._run.items()}
        batch = next_to_run(ran, found["largest_batch"], found["next_batch"], smaller_batches(found))
        if batch is None:
            found.update(settle(found, self._run))
            best = self._run[found["largest_batch"] or found["next_batch"]]
            found.update({name: best[name] for name in _TIMES})
            self._confirm = None
            return
        self._run[batch] = row = self._row_of(batch, found)
        self._tasks = [(row, {"flags": confirm["flags"], "row": row})]

    def _row_of(self, batch: int, found: Row) -> Row:
        """The trial of `batch`, made from that of the largest where the search didn't compile it."""
        trials = {row["batch"]: row for row in self.rows if row["record"] == "trial"}
        if batch in trials:
            return trials[batch]
        alike = trials[found["largest_batch"]]
        unknown = {f.name: None for f in dataclasses.fields(TrialRecord) if f.default is None and f.name not in _SHARED}
        row: Row = {**copy.deepcopy(alike), **unknown, "batch": batch}
        if found["global_batch"] is not None:
            row["accumulate"] = row["config"]["train"]["accumulate"] = found["global_batch"] // batch
        else:
            row["global_batch"] = batch * row["accumulate"]
        self.rows.insert(self.rows.index(found), row)
        return row

    def _fail(self, outcome: Outcome, error: str, tail: list[str]) -> None:
        job = self.job
        failure = FailureRecord(
            schema=SCHEMA,
            model=job.model,
            requested_policy=job.policy,
            target=job.target,
            batch=job.batch,
            outcome=outcome,
            error=error,
            tail=tuple(tail),
            duration_s=time.monotonic() - self._started,
            config=job.config,
            xla_flags=os.environ.get("XLA_FLAGS"),
            versions=versions(),
        )
        self.rows = [to_row(failure)]


def run_job(job: Job, workers: Workers, timeout_s: float, show: Callable[[str], None]) -> list[Row]:
    """Runs one job to its end and returns its rows; `show` is told its processes' last line."""
    attempt = Attempt(job)
    while child := attempt.start(workers, timeout_s):
        while not (ended := workers.wait(_TICK_S)):
            show(child.last_line)
        attempt.take(ended[0][1])
    return attempt.rows


class Queue:
    """The jobs of a sweep on their way into a store.

    Args:
        jobs: no two of one key.
        store: what is there already isn't run.
        num_jobs: processes at a time, but for jobs that want to be alone.
        timeout_s: of each process.
        on_start: told of each job that starts.
        on_end: told of each job that ends, how, and after how many seconds; also of one that another process finished.
        on_tick: told several times a second what is running, with the last line of each.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        store: Store,
        *,
        num_jobs: int,
        timeout_s: float,
        on_start: Callable[[Job], None] = lambda job: None,
        on_end: Callable[[Job, Outcome, float], None] = lambda job, outcome, duration_s: None,
        on_tick: Callable[[list[tuple[Job, str]]], None] = lambda running: None,
    ) -> None:
        self._store, self._num_jobs, self._timeout_s = store, num_jobs, timeout_s
        self._on_start, self._on_end, self._on_tick = on_start, on_end, on_tick
        self._waiting = [job for job in jobs if store.trial(job.key) is None]
        self._running: dict[Child, tuple[Attempt, float]] = {}
        self.unwritten = list[Row]()

    def run(self, workers: Workers) -> None:
        """Runs what isn't in the store, or waits for whoever runs it; returns when all is there.

        Raises:
            JaxrematError: a job's rows couldn't be stored; they are in `unwritten`.
        """
        for alone, limit in ((False, self._num_jobs), (True, 1)):
            while self._running or any(job.alone == alone for job in self._waiting):
                while len(self._running) < limit and (job := self._next(alone)):
                    self._on_start(job)
                    self._go_on(Attempt(job), workers, time.monotonic())
                if not self._running and self._waiting:
                    time.sleep(_TICK_S)  # another process is at what is left
                for child, ended in workers.wait(_TICK_S):
                    attempt, started = self._running.pop(child)
                    attempt.take(ended)
                    self._go_on(attempt, workers, started)
                if self._running or self._waiting:
                    self._on_tick([(attempt.job, child.last_line) for child, (attempt, _) in self._running.items()])

    def _next(self, alone: bool) -> Job | None:
        """A job that nobody has done or is at, claimed."""
        for job in [job for job in self._waiting if job.alone == alone]:
            if not self._store.claim(job.key):
                continue
            self._store.refresh()
            self._waiting.remove(job)
            if (rows := self._store.trial(job.key)) is None:
                return job
            self._store.release(job.key)
            self._on_end(job, outcome_of(rows), 0.0)
        return None

    def _go_on(self, attempt: Attempt, workers: Workers, started: float) -> None:
        if child := attempt.start(workers, self._timeout_s):
            self._running[child] = attempt, started
            return
        try:
            self._store.append(attempt.rows, attempt.job.key)
        except JaxrematError:
            self.unwritten = attempt.rows
            raise
        self._store.release(attempt.job.key)
        self._on_end(attempt.job, outcome_of(attempt.rows), time.monotonic() - started)


def outcome_of(rows: Sequence[Row]) -> Outcome:
    """How a job ended, by its rows."""
    records = [from_row(row) for row in rows]
    for record in records:
        if isinstance(record, FailureRecord) or (isinstance(record, TrialRecord) and record.error):
            return record.outcome
    outcomes = {record.outcome for record in records if isinstance(record, TrialRecord) and record.record == "trial"}
    return "ok" if "ok" in outcomes else "oom" if "oom" in outcomes else "infeasible"
