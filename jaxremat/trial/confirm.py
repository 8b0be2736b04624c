"""Runs compiled steps in processes of their own, and confirms the largest batch that way.

The largest batch is run in a fresh process, and so is the next one, which should run out of memory. Where the largest batch
itself runs out of memory, the search goes down by runs: in doubling steps until a batch runs, then by halves until the next
one doesn't. Where bytes say 128 and the device takes 124, these are run: 128, 127, 125, 121 (which runs), 123, 124.
"""

import bisect
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from jaxremat.config import divisors
from jaxremat.trial.record import LargestBatchRecord, Outcome, Record, TrialRecord, picked
from jaxremat.trial.task import Result, Task

#: Yields the task of one process after the other, is sent the result of each, and returns records.
Processes = Generator[Task, Any, tuple[Record, ...]]
#: The fields of a step's time, which a search has of its largest batch.
_TIMES = "step_s step_source tokens_per_s samples_per_s"
#: The fields of a trial that running its step fills in.
_MEASURED = f"""{_TIMES} step_min_s step_max_s mfu ran error error_kind
    measured_over_total_percent measured_peak_bytes outside_source outside_bytes"""
#: Fields with the default None that the trials of one search have in common.
_COMMON = ("grad_dtype", "limit_bytes")


def measured(compiled: TrialRecord, result: Result) -> TrialRecord:
    """The trial with what came of running its step.

    A failure leaves the compiled bytes as they are.
    """
    if result.outcome != "ok":
        unknown: dict[str, Any] = dict.fromkeys(_MEASURED.split())
        return replace(compiled, **unknown | {"ran": result.outcome, "error": result.error, "error_kind": result.outcome})
    (run,) = result.records
    assert isinstance(run, TrialRecord)
    if compiled.total_bytes is None:
        return run  # the search didn't compile this batch
    return replace(compiled, **picked(run, _MEASURED))


def measured_all(records: Iterable[Record], to_measure: Iterable[int], flags: dict[str, Any]) -> Processes:
    """Runs the steps of the records of these numbers, each in a process of its own."""
    found = list(records)
    for number in to_measure:
        compiled = found[number]
        assert isinstance(compiled, TrialRecord)
        found[number] = trial = measured(compiled, (yield Task(flags, compiled)))
        for at, search in enumerate(found):
            if isinstance(search, LargestBatchRecord) and search.largest_batch == trial.batch:
                found[at] = replace(search, **picked(trial, _TIMES))
    return tuple(found)


def confirmed(records: Sequence[Record], flags: dict[str, Any]) -> Processes:
    """Runs the batches that confirm the search among the records.

    The search is the last of the records that it returns.
    """
    others = [record for record in records if not isinstance(record, LargestBatchRecord)]
    (search,) = (record for record in records if isinstance(record, LargestBatchRecord))
    trials = {row.batch: row for row in others if isinstance(row, TrialRecord) and row.record == "trial"}
    smaller = smaller_batches(search.largest_batch, search.global_batch)
    run: dict[int, TrialRecord] = {}
    while (batch := next_to_run(_outcomes(run), search.largest_batch, search.next_batch, smaller)) is not None:
        compiled = trials.get(batch) or uncompiled_trial(trials[search.largest_batch], batch, search.global_batch)
        row = measured(compiled, (yield Task(flags, compiled)))
        if row.error and (row.ran == "oom" or batch == search.next_batch):
            row = replace(row, ran_error=row.error, error=None, error_kind=None)  # it was meant to fail
        run[batch] = row
    probes = [record for record in others if record not in trials.values()]
    return (*probes, *(trials | run).values(), settle(search, run))


def _outcomes(trials: Mapping[int, TrialRecord]) -> dict[int, Outcome]:
    return {batch: trial.ran or "crashed" for batch, trial in trials.items()}


def next_to_run(ran: Mapping[int, Outcome], largest: int, after: int | None, smaller: Sequence[int]) -> int | None:
    """The batch to run next; None where no run would say more.

    A crash or a timeout says nothing of memory, and ends the runs.

    Args:
        ran: what came of the batches run so far.
        largest: the largest batch by compiled bytes.
        after: the batch after it, which is over the budget.
        smaller: the batches below `largest`, ascending.
    """
    if not set(ran.values()) <= {"ok", "oom"}:
        return None
    if largest not in ran:
        return largest
    if ran[largest] == "ok":
        return after if after not in ran else None
    worked, failed = _around(ran)
    between = smaller[bisect.bisect_right(smaller, worked) : bisect.bisect_left(smaller, failed)]
    if not between:
        return None
    return between[len(between) // 2] if worked else between[max(0, len(between) - 2 ** (len(ran) - 1))]


def _around(ran: Mapping[int, Outcome]) -> tuple[int, int]:
    """The largest batch that ran, or 0, and the smallest that ran out of memory."""
    return max((batch for batch in ran if ran[batch] == "ok"), default=0), min(batch for batch in ran if ran[batch] == "oom")


def smaller_batches(largest: int, global_batch: int | None) -> Sequence[int]:
    """The batches below `largest`, ascending; with a global batch only its divisors are batches."""
    return [batch for batch in divisors(global_batch) if batch < largest] if global_batch else range(1, largest)


def settle(found: LargestBatchRecord, trials: Mapping[int, TrialRecord]) -> LargestBatchRecord:
    """The search as the runs leave it.

    Args:
        found: the search by compiled bytes.
        trials: those that were run, by batch.
    """
    ran, largest, after = _outcomes(trials), found.largest_batch, found.next_batch
    if ran[largest] != "oom" or not set(ran.values()) <= {"ok", "oom"}:
        next_ran = None if after is None else ran.get(after)
        return replace(found, ran=ran[largest], next_ran=next_ran, **picked(trials[largest], _TIMES))
    worked, failed = _around(ran)
    return replace(
        found,
        compiled_largest_batch=largest,
        largest_batch=worked,
        largest_batch_total_bytes=trials[worked].total_bytes if worked else None,
        next_batch=failed,
        next_batch_total_bytes=trials[failed].total_bytes,
        ran="ok" if worked else None,
        next_ran="oom",
        **picked(trials[worked or failed], _TIMES),
    )


def uncompiled_trial(alike: TrialRecord, batch: int, global_batch: int | None) -> TrialRecord:
    """The trial of a batch that the search didn't compile, without bytes, times and errors.

    The rest is as in `alike`, another trial of the search.
    """
    unknown = {field.name: None for field in fields(TrialRecord) if field.default is None and field.name not in _COMMON}
    trial = replace(alike, **unknown, batch=batch)
    if global_batch is None:
        return replace(trial, global_batch=alike.global_batch // alike.batch * batch)
    accumulate = global_batch // batch
    config = alike.config | {"train": alike.config["train"] | {"accumulate": accumulate}}
    return replace(trial, accumulate=accumulate, config=config)
