"""Whether predicted step times put policies into the same order as measured step times do.

Predicted 10, 20, 30 ms and measured 11, 25, 28 ms are the same order: Spearman's rank correlation is 1.
"""

import statistics
from collections.abc import Sequence

from jaxremat.trial.comparisons import RankRecord
from jaxremat.trial.record import TrialRecord, picked


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation of the pairs.

    None for fewer than three, or where all values of one side are equal.
    """
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None
    # Twice the ranks, less one; equal values have the mean of their ranks.
    ranks = [[sum((b < a) + (b <= a) for b in side) for a in side] for side in zip(*pairs, strict=True)]
    return statistics.correlation(*ranks)


def rank_records(rows: Sequence[TrialRecord]) -> list[RankRecord]:
    """The rank correlation over the policies, by their seconds per sequence.

    All rows are of one model and target.

    Args:
        rows: trials. Those that failed, or were only predicted, don't count.

    Returns:
        For each length of sequences, one record for each batch where some policy has several batches; else one record, with
        each policy at its own batch. Fewer than three policies make no record.
    """
    found = list[RankRecord | None]()
    rows = [row for row in rows if row.measured_step_s and row.predicted_step_s and row.outcome == "ok"]
    for length in dict.fromkeys(row.seq_len for row in rows):
        of_length = [row for row in rows if row.seq_len == length]
        is_several = len({row.policy for row in of_length}) < len(of_length)
        batches = sorted({row.batch for row in of_length}) if is_several else [None]
        found += [_record([row for row in of_length if batch in (None, row.batch)]) for batch in batches]
    return [record for record in found if record]


def _record(rows: Sequence[TrialRecord]) -> RankRecord | None:
    times = [(row.predicted_step_s or 0.0, row.measured_step_s or 0.0) for row in rows]
    spearman = rank_correlation(
        [(p / row.global_batch, m / row.global_batch) for (p, m), row in zip(times, rows, strict=True)]
    )
    if spearman is None:
        return None
    return RankRecord(
        batch=rows[0].batch if len({row.batch for row in rows}) == 1 else None,
        policies=tuple(row.policy for row in rows),
        predicted_step_s=tuple(predicted for predicted, _ in times),
        measured_step_s=tuple(measured for _, measured in times),
        spearman=spearman,
        **picked(rows[0], "model target versions"),
    )
