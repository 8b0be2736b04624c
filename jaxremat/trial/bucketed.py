"""A data set of many lengths as a record: the rates of buckets, of padding and of packing."""

from collections.abc import Sequence
from pathlib import Path

from jaxremat.search.buckets import Bucket, Bucketed
from jaxremat.trial.comparisons import LengthsRecord
from jaxremat.trial.details import LengthBucket
from jaxremat.trial.record import TrialRecord, picked


def lengths_record(bucketed: Bucketed, file: Path, rows: Sequence[TrialRecord], num_compiles: int) -> LengthsRecord | None:
    """The record of a data set.

    A bucket takes part of all time in proportion to its sequences over the sequences per second of its step, as if the data
    set were long: the last, smaller batch of a bucket isn't counted apart.

    Args:
        bucketed: the data set in buckets.
        file: the file of --lengths.
        rows: the answers at the lengths of the buckets, one for each policy.
        num_compiles: how many compiles all answers took.

    Returns:
        The record, or None if a bucket has no compiled step.
    """
    steps = [_best_step([row for row in rows if row.seq_len == bucket.seq_len]) for bucket in bucketed.buckets]
    chosen = [(bucket, step) for bucket, step in zip(bucketed.buckets, steps, strict=True) if step]
    if len(chosen) < len(steps):
        return None
    (longest, last), data = chosen[-1], bucketed.histogram
    rates = [(bucket, step.samples_per_s) for bucket, step in chosen if step.outcome == "ok" and step.samples_per_s]
    known: dict[str, float | None] = {}
    if len(rates) == len(chosen):
        known["tokens_per_s"] = data.num_tokens / sum(bucket.num_sequences / rate for bucket, rate in rates)
        known["padded_tokens_per_s"] = rates[-1][1] * data.num_tokens / data.num_sequences
        known["packed_tokens_per_s"] = rates[-1][1] * longest.seq_len * bucketed.packed_share
    return LengthsRecord(
        file=str(file),
        num_sequences=data.num_sequences,
        num_tokens=data.num_tokens,
        num_cut=bucketed.num_cut,
        buckets=tuple(_bucket(bucket, step) for bucket, step in chosen),
        predicted_interval=last.predicted_interval if last.step_source == "predicted" else None,
        packed_share=bucketed.packed_share,
        num_compiles=num_compiles,
        **known,
        **picked(last, "model target mesh budget_bytes step_source versions"),
    )


def _best_step(rows: Sequence[TrialRecord]) -> TrialRecord | None:
    """The fastest step that fits, or else the compiled one of the fewest bytes.

    None if none was compiled.
    """
    if fitting := [row for row in rows if row.outcome == "ok"]:
        return max(fitting, key=lambda row: row.samples_per_s or 0)
    return min((row for row in rows if row.total_bytes), key=lambda row: row.total_bytes or 0, default=None)


def _bucket(bucket: Bucket, step: TrialRecord) -> LengthBucket:
    fits = step.outcome == "ok"
    rate = step.samples_per_s if fits else None
    return LengthBucket(
        seq_len=bucket.seq_len,
        num_sequences=bucket.num_sequences,
        num_tokens=bucket.num_tokens,
        fits=fits,
        tokens_per_s=rate * bucket.num_tokens / bucket.num_sequences if rate else None,
        **picked(step, "requested_policy policy xla_preset loss layout batch total_bytes step_s"),
    )
