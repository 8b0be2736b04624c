"""The largest batch that fits a budget, with few compiles and never a size that wasn't compiled.

Total bytes are affine in the batch above a handful of sequences, so two compiles predict the answer, and two more prove it:
B fits, B+1 doesn't. Where the line bends, the last two points around the boundary predict again. Fit isn't perfectly
monotone in the batch, and the claim is exactly this pair.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DEFAULT_MAX_BATCH = 4096
MAX_BATCH = 10**6  # far beyond any memory; sizes beyond 64 bits would crash JAX
_SECANT_STEPS = 8  # compiles after which halving the bracket takes over, should bytes not be affine at all


@dataclass(frozen=True)
class BatchSearch:
    """What a search found.

    Attributes:
        largest: the largest batch that fits; 0 if not even the smallest does.
        largest_bytes: its total bytes; None when `largest` is 0.
        next: the batch after `largest`, which doesn't fit; None at the end of the batches, where there is none.
        next_bytes: its total bytes, above the budget.
        tried: every (batch, total bytes) in the order compiled.
    """

    largest: int
    largest_bytes: int | None
    next: int | None
    next_bytes: int | None
    tried: tuple[tuple[int, int], ...]


def largest_batch(
    total_bytes: Callable[[int], int],
    budget_bytes: int,
    *,
    fixed_bytes: int = 0,
    start: int = 8,
    batches: Sequence[int] = range(1, DEFAULT_MAX_BATCH + 1),
) -> BatchSearch:
    """The largest of `batches` whose `total_bytes(batch)` is within `budget_bytes`.

    Args:
        total_bytes: compiles at a batch and returns the total; called at most once per batch.
        budget_bytes: what may be used.
        fixed_bytes: a guess at the total of batch 0 (arguments), for the first prediction only.
        start: the first batch tried, or the one below it.
        batches: the batches there are, ascending.

    Raises:
        ValueError: no batches, or one below 1.
    """
    if not batches or batches[0] < 1 or start < 1:
        raise ValueError(f"start and batches count sequences from 1 up, got {start} and {batches!r}")
    tried: dict[int, int] = {}
    fits, fails = -1, len(batches)
    guess = start
    while fails - fits > 1:
        at = min(max(bisect.bisect_right(batches, guess) - 1, fits + 1), fails - 1)
        batch = batches[at]
        tried[batch] = total_bytes(batch)
        if tried[batch] <= budget_bytes:
            fits = at
        else:
            fails = at
        halfway = batches[(fits + fails) // 2] if fails - fits > 1 else batch
        guess = _predict(tried, budget_bytes, fixed_bytes) if len(tried) < _SECANT_STEPS else halfway
    largest = batches[fits] if fits >= 0 else 0
    after = batches[fails] if fails < len(batches) else None
    return BatchSearch(largest, tried.get(largest), after, tried[after] if after else None, tuple(tried.items()))


def _predict(tried: dict[int, int], budget_bytes: int, fixed_bytes: int) -> int:
    """The batch at which the line through the two points nearest the budget meets it."""
    nearest = sorted(tried, key=lambda batch: abs(tried[batch] - budget_bytes))[:2]
    (low, low_bytes), (high, high_bytes) = (
        sorted((b, tried[b]) for b in nearest)
        if len(tried) > 1
        else (
            (0, fixed_bytes),
            next(iter(tried.items())),
        )
    )
    slope = (high_bytes - low_bytes) / (high - low)
    return int(low + (budget_bytes - low_bytes) // slope) if slope > 0 else 2 * high
