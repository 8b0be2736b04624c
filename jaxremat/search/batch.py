"""The largest batch that fits a budget, with few compiles and never a size that wasn't compiled.

Total bytes are affine in the batch above a handful of sequences, so two compiles predict the answer, and two more prove it:
B fits, B+1 doesn't. Where the line bends, the last two points around the boundary predict again. Fit isn't perfectly
monotone in the batch, and the claim is exactly this pair.
"""

from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_MAX_BATCH = 4096
_SECANT_STEPS = 8  # compiles after which halving the bracket takes over, should bytes not be affine at all


@dataclass(frozen=True)
class BatchSearch:
    """What a search found.

    Attributes:
        largest: the largest batch that fits; 0 if not even one sequence does.
        largest_bytes: its total bytes; None when `largest` is 0.
        next_bytes: total bytes of `largest + 1`, above the budget; None at the cap, where it wasn't compiled.
        tried: every (batch, total bytes) in the order compiled.
    """

    largest: int
    largest_bytes: int | None
    next_bytes: int | None
    tried: tuple[tuple[int, int], ...]


def largest_batch(
    total_bytes: Callable[[int], int],
    budget_bytes: int,
    *,
    fixed_bytes: int = 0,
    start: int = 8,
    max_batch: int = DEFAULT_MAX_BATCH,
) -> BatchSearch:
    """The largest batch whose `total_bytes(batch)` is within `budget_bytes`.

    Args:
        total_bytes: compiles at a batch and returns the total; called at most once per batch.
        budget_bytes: what may be used.
        fixed_bytes: a guess at the total of batch 0 (arguments), for the first prediction only.
        start: the first batch tried.
        max_batch: no larger batch is tried.
    """
    if max_batch < 1 or start < 1:
        raise ValueError(f"start and max_batch count sequences from 1 up, got {start} and {max_batch}")
    tried: dict[int, int] = {}
    fits, fails = 0, max_batch + 1
    guess = start
    while fails - fits > 1:
        batch = min(max(guess, fits + 1), fails - 1)
        tried[batch] = total_bytes(batch)
        if tried[batch] <= budget_bytes:
            fits = batch
        else:
            fails = batch
        guess = _predict(tried, budget_bytes, fixed_bytes) if len(tried) < _SECANT_STEPS else (fits + fails) // 2
    return BatchSearch(fits, tried.get(fits), tried.get(fits + 1), tuple(tried.items()))


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
