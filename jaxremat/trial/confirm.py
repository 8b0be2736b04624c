"""Confirms the largest batch by runs: compiled bytes say that it should fit, a process on the device shows whether it does.

The largest batch is run in a fresh process, and so is the next one, which should run out of memory. Where the largest batch
itself runs out of memory, the search goes down by runs: in doubling steps until a batch runs, then by halves until the next
one doesn't. Where bytes say 128 and the device takes 124, these are run: 128, 127, 125, 121 (which runs), 123, 124.
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from jaxremat.config import divisors
from jaxremat.trial.record import LargestBatchRecord, Outcome, TrialRecord

#: Fields with the default None that the trials of one search have in common.
_COMMON = ("grad_dtype", "limit_bytes")


def next_to_run(ran: Mapping[int, Outcome], largest: int, after: int | None, smaller: Sequence[int]) -> int | None:
    """The batch to run next; None where nothing is left to learn, or where a crash or a timeout says nothing of memory.

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
    worked = max((batch for batch in ran if ran[batch] == "ok"), default=0)
    failed = min(batch for batch in ran if ran[batch] == "oom")
    between = smaller[bisect.bisect_right(smaller, worked) : bisect.bisect_left(smaller, failed)]
    if not between:
        return None
    return between[len(between) // 2] if worked else between[max(0, len(between) - 2 ** (len(ran) - 1))]


def smaller_batches(largest: int, global_batch: int | None) -> Sequence[int]:
    """The batches below `largest`, ascending; with a global batch only its divisors are batches."""
    if global_batch is None:
        return range(1, largest)
    return [batch for batch in divisors(global_batch) if batch < largest]


def with_times(found: LargestBatchRecord, trial: TrialRecord) -> LargestBatchRecord:
    """The search with the step time of `trial`."""
    return replace(
        found,
        step_s=trial.step_s,
        step_source=trial.step_source,
        tokens_per_s=trial.tokens_per_s,
        samples_per_s=trial.samples_per_s,
    )


def settle(found: LargestBatchRecord, trials: Mapping[int, TrialRecord]) -> LargestBatchRecord:
    """The search as the runs leave it.

    Args:
        found: the search by compiled bytes.
        trials: those that were run, by batch.
    """
    ran = {batch: trial.ran for batch, trial in trials.items()}
    largest, after = found.largest_batch, found.next_batch
    if ran[largest] != "oom" or not set(ran.values()) <= {"ok", "oom"}:
        settled = replace(found, ran=ran[largest], next_ran=ran.get(after) if after is not None else None)
        return with_times(settled, trials[largest])
    worked = max((batch for batch in ran if ran[batch] == "ok"), default=0)
    failed = min(batch for batch in ran if ran[batch] == "oom")
    settled = replace(
        found,
        compiled_largest_batch=largest,
        largest_batch=worked,
        largest_batch_total_bytes=trials[worked].total_bytes if worked else None,
        next_batch=failed,
        next_batch_total_bytes=trials[failed].total_bytes,
        ran="ok" if worked else None,
        next_ran="oom",
    )
    return with_times(settled, trials[worked or failed])


def uncompiled_trial(alike: TrialRecord, batch: int, global_batch: int | None) -> TrialRecord:
    """The trial of a batch that the search didn't compile: like another of the search, without bytes, times and errors."""
    unknown = {field.name: None for field in fields(TrialRecord) if field.default is None and field.name not in _COMMON}
    trial = replace(alike, **unknown, batch=batch)
    if global_batch is None:
        return replace(trial, global_batch=alike.global_batch // alike.batch * batch)
    accumulate = global_batch // batch
    config = alike.config | {"train": alike.config["train"] | {"accumulate": accumulate}}
    return replace(trial, accumulate=accumulate, config=config)
