"""Whether predicted step times put policies into the same order as measured step times do.

Predicted 10, 20, 30 ms and measured 11, 25, 28 ms are the same order: Spearman's rank correlation is 1.
"""

import statistics
from collections.abc import Sequence

from jaxremat.trial.comparisons import RankRecord
from jaxremat.trial.record import TrialRecord


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation of the pairs; None for fewer than three, or where all values of one side are equal."""
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None
    # Twice the ranks, less one; equal values have the mean of their ranks.
    ranks = [[sum((b < a) + (b <= a) for b in side) for a in side] for side in zip(*pairs, strict=True)]
    return statistics.correlation(*ranks)


def rank_records(rows: Sequence[TrialRecord]) -> list[RankRecord]:
    """The rank correlation over the policies of one model and target, by their seconds per sequence.

    Args:
        rows: trials. Those that failed, or were only predicted, don't count.

    Returns:
        For each length of sequences, one record for each batch where some policy has several batches; else one record, with
        each policy at its own batch. Fewer than three policies make no record.
    """
    rows = [row for row in rows if row.measured_step_s and row.predicted_step_s and row.outcome == "ok"]
    lengths = dict.fromkeys(row.seq_len for row in rows)
    return [record for length in lengths for record in _at_length([row for row in rows if row.seq_len == length])]


def _at_length(rows: Sequence[TrialRecord]) -> list[RankRecord]:
    several = len({row.policy for row in rows}) < len(rows)
    groups = (
        [[row for row in rows if row.batch == batch] for batch in sorted({row.batch for row in rows})] if several else [rows]
    )
    return [record for group in groups if (record := _record(group))]


def _record(rows: Sequence[TrialRecord]) -> RankRecord | None:
    predicted, measured = [row.predicted_step_s or 0 for row in rows], [row.measured_step_s or 0 for row in rows]
    sequences = [row.global_batch for row in rows]
    pairs = [(p / n, m / n) for p, m, n in zip(predicted, measured, sequences, strict=True)]
    spearman = rank_correlation(pairs)
    if spearman is None:
        return None
    return RankRecord(
        model=rows[0].model,
        target=rows[0].target,
        batch=rows[0].batch if len({row.batch for row in rows}) == 1 else None,
        policies=tuple(row.policy for row in rows),
        predicted_step_s=tuple(predicted),
        measured_step_s=tuple(measured),
        spearman=spearman,
        versions=rows[0].versions,
    )
