"""Finds which of several steps are as fast as the fastest one.

The predicted times of two steps of one model share most of their kernels, and so most of their errors. What is left is
`paired_error`, a share such as 0.05. Of three predicted steps of 1,000, 960 and 900 tokens/s, the first two count as equally
fast.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxremat.trial.record import StepRecord, TrialRecord

_Row = TypeVar("_Row")


def ties(rows: Iterable[_Row], rate: Callable[[_Row], float | None], error: Callable[[_Row, _Row], float]) -> list[_Row]:
    """The row of the highest rate, and those whose rates can't be told apart from it.

    Empty if it is alone.

    Args:
        rows: the rows. Those without a rate don't count.
        rate: a row's rate.
        error: for the row of the highest rate and another one, by which share of the latter's rate it may be higher.
    """
    rated = [(known, row) for row in rows if (known := rate(row))]
    highest, best = max(rated, key=lambda pair: pair[0], default=(0.0, None))
    near = [row for known, row in rated if row is best or (best and known * (1 + error(best, row)) > highest)]
    return near if len(near) > 1 else []


def trial_ties(rows: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The fastest trial of each length of sequences, and those that are as fast as it."""
    fitting = [row for row in rows if row.outcome == "ok"]
    lengths = dict.fromkeys(row.seq_len for row in fitting)
    return [row for n in lengths for row in ties([one for one in fitting if one.seq_len == n], lambda one: one.rate, _error)]


@dataclass(frozen=True)
class BesideOwn:
    """The author's checkpoints (policy `own`), and the best other policy that fits.

    Attributes:
        own: the step under `own`.
        best: the fastest of the others. Where the times don't tell it from `own`, it is that of the fewest bytes among those at
            its batch that are as fast. Where times aren't known, too, it is that of the fewest bytes.
        faster: the share by which `best` has the higher rate, negative if it is the slower one. None where a rate isn't known or
            `own` doesn't fit.
        is_tied: whether the times don't tell the two apart.
    """

    own: StepRecord
    best: StepRecord
    faster: float | None = None
    is_tied: bool = False


def beside_own(rows: Sequence[StepRecord]) -> BesideOwn | None:
    """`own` and the best of the other policies.

    None where `own` wasn't requested or has no bytes, or no other policy fits.
    """
    own = next((row for row in reversed(rows) if row.requested_policy == "own" and row.total_bytes is not None), None)
    others = [row for row in rows if row.requested_policy != "own" and row.fits and not row.error]
    if own is None or not others:
        return None
    trials = [row for row in (own, *others) if isinstance(row, TrialRecord) and row.outcome == "ok"]
    best = max(others, key=lambda row: (row.rate if isinstance(row, TrialRecord) else 0.0, -(row.total_bytes or 0)))
    rates = {id(row): row.rate for row in trials if row.rate}
    if id(own) not in rates or id(best) not in rates:
        return BesideOwn(own, best)
    is_tied = len(trial_ties([row for row in trials if row is own or row is best])) == 2
    if is_tied:
        near = trial_ties([row for row in trials if row is not own and row.batch == best.batch])
        best = min(near, key=lambda row: row.total_bytes or 0, default=best)
    return BesideOwn(own, best, rates[id(best)] / rates[id(own)] - 1, is_tied)


def _error(best: TrialRecord, row: TrialRecord) -> float:
    """How much faster a step may be than its row says, beside the fastest one.

    Measured times are told apart unless some step of one took as long as some step of the other. A measured and a predicted
    time are told apart.
    """
    if (best.step_source, row.step_source) == ("predicted", "predicted"):
        return min(best.paired_error or 0.0, row.paired_error or 0.0)
    if best.step_source != row.step_source or not (row.step_s and row.step_min_s and best.step_s and best.step_max_s):
        return 0.0
    return row.step_s / row.step_min_s * (best.step_max_s / best.step_s) - 1
