"""Finds the largest batch that fits a budget, with few compiles.

The answer is always a batch that was compiled.

Above a handful of sequences, the total bytes of a step grow along a straight line with the batch. Two compiles are therefore
enough to predict the answer B, and two more prove it: B fits, and B+1 doesn't. Where the line bends, the two compiled batches
whose bytes are nearest to the budget predict again.

A larger batch sometimes takes fewer bytes than a smaller one. The claim is only about the pair of B and B+1.

Example: with a budget of 100 bytes and steps that take 10 + 7 * batch bytes, `largest_batch(total_bytes, 100)` compiles batch 8
(66 bytes), and returns `largest=12` (94 bytes) and `next=13` (101 bytes).
"""

import bisect
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

#: The batch that a search tries first, unless something is known that is nearer to the answer.
FIRST_BATCH = 8
#: At most so many tokens are in that batch. XLA rejects steps of far more tokens than any memory holds.
FIRST_TOKENS = 2**17
MAX_BATCH = 2**31 - 1  #: XLA takes no larger dimension of an array.
#: The batch that is tried next is at most so many times the largest one that fits. The bytes of a few small samples are mostly
#: alignment and workspaces, and a line through them leads anywhere.
GROWTH = 512
#: Where a search from above begins, and what it tries second: batches whose guessed bytes are these per cent of the budget.
_FROM_ABOVE, _SECOND = 150, 125
_ALL = 4096  # up to so many batches, none is left out where all are looked at
_SECANT_STEPS = 8  # compiles after which a search in which everything fits doesn't follow the line any more
_SLACK = 4  # compiles that predictions may take beyond those of halving the bracket: along a line they take no more in all


@dataclass(frozen=True)
class BatchSearch:
    """What a search found.

    Attributes:
        largest: the largest batch that fits. 0 if not even the smallest does.
        largest_bytes: the total bytes of `largest`. None if `largest` is 0.
        next: the batch after `largest`, which doesn't fit. None if `largest` is the last of the batches.
        next_bytes: the total bytes of `next`, which are above the budget. None if `next` is.
        tried: the batches that were compiled with their total bytes, in the order in which they were compiled.
    """

    largest: int
    largest_bytes: int | None
    next: int | None
    next_bytes: int | None
    tried: tuple[tuple[int, int], ...]


#: A search that stops before each compile, and yields the answer that a line through the compiled steps predicts. That is 0 where
#: no batch is expected to fit, and None before the first compile.
Searching = Generator[int | None, None, BatchSearch]


def spaced(batches: Sequence[int]) -> Sequence[int]:
    """Few enough of `batches` to look at each.

    They are the first 4096, and of the others those that are half a thousandth apart.

    The last one is among them. Of `range(1, 10**6 + 1)` they are 1, 2, ..., 4096, 4097, 4099, ..., 8193, 8197, ..., 1000000.
    """
    if len(batches) <= _ALL:
        return batches
    octaves = (range(_ALL << n, _ALL << (n + 1), 2 << n) for n in itertools.count())
    places = itertools.takewhile(lambda place: place < len(batches) - 1, itertools.chain.from_iterable(octaves))
    return [*batches[:_ALL], *(batches[place] for place in places), batches[-1]]


def at_most(batches: Sequence[int], limit: float) -> int:
    """The largest batch up to the limit, or the smallest batch if all are above the limit."""
    return batches[_place(batches, limit)]


def _place(batches: Sequence[int], limit: float) -> int:
    """The place of `at_most` among the batches."""
    return max(0, bisect.bisect_right(batches, limit) - 1)


def usual_first_batch(seq_len: int | None) -> int:
    """The batch that a search tries first at a length of sequences, in tokens.

    It is 8, and fewer where the sequences are long.
    """
    return max(1, min(FIRST_BATCH, FIRST_TOKENS // seq_len)) if seq_len else FIRST_BATCH


def most_tried(batches: Sequence[int]) -> int | None:
    """How many compiles `largest_batch` takes at most.

    None where that isn't known before a batch doesn't fit.
    """
    return min(len(batches), len(batches).bit_length() + _SLACK) if GROWTH * batches[0] >= batches[-1] else None


def largest_batch(
    total_bytes: Callable[[int], int],
    budget_bytes: int,
    *,
    fixed_bytes: int = 0,
    start: int = FIRST_BATCH,
    batches: Sequence[int] = range(1, MAX_BATCH + 1),
    expect: Callable[[int], None] = lambda further: None,
) -> BatchSearch:
    """The largest of `batches` whose `total_bytes(batch)` is within `budget_bytes`.

    Args:
        total_bytes: compiles at a batch and returns the total bytes. It is called at most once per batch.
        budget_bytes: total bytes that a step may take.
        fixed_bytes: a guess at the total bytes of batch 0, which are the step's arguments. Only the first prediction uses it.
        start: the first batch to try. If it isn't one of `batches`, the next smaller one is tried.
        batches: the batches to choose among, in rising order.
        expect: called before each compile with how many further compiles the search takes at most. It isn't called before that
            is known: not before a batch doesn't fit, unless all batches are at most `GROWTH` times the smallest one.

    Raises:
        ValueError: there are no batches, or one is below 1.
    """
    return ended(
        search_upwards(total_bytes, budget_bytes, fixed_bytes=fixed_bytes, start=start, batches=batches, expect=expect)
    )


def ended(search: Searching) -> BatchSearch:
    """What a search has found, at its end."""
    while True:
        try:
            next(search)
        except StopIteration as end:
            return end.value


def search_upwards(
    total_bytes: Callable[[int], int],
    budget_bytes: int,
    *,
    fixed_bytes: int = 0,
    start: int = FIRST_BATCH,
    batches: Sequence[int] = range(1, MAX_BATCH + 1),
    expect: Callable[[int], None] = lambda further: None,
    begin: Callable[[int], None] = lambda batch: None,
) -> Searching:
    """The search of `largest_batch`, which says what the arguments are.

    Before it stops, it calls `begin` with the batch that it compiles next. Where that is the predicted answer, it calls `begin`
    with the batch after it, too.
    """
    if not batches or batches[0] < 1 or start < 1:
        raise ValueError(f"start and batches count sequences from 1 up, got {start} and {batches!r}")
    tried: dict[int, int] = {}
    fits, fails = -1, len(batches)
    guess, left, estimate = start, len(batches) + 1, None
    while unknown := fails - fits - 1:
        low, high = fits + 1, fails - 1
        if is_bounded := fails < len(batches) or GROWTH * batches[max(fits, 0)] >= batches[-1]:
            # Whether the batch fits or not, halving what is left of the bracket takes no more compiles than are left then.
            left = min(left - 1, unknown, unknown.bit_length() + _SLACK)
            expect(left)
            low, high = max(low, fails - 2 ** (left - 1)), min(high, fits + 2 ** (left - 1))
        elif fits >= 0:
            high = max(low, bisect.bisect_right(batches, GROWTH * batches[fits]) - 1)
        at = min(max(_place(batches, guess), low), high)
        batch = batches[at]
        begin(batch)
        if len(tried) > 1 and at + 1 < fails and _place(batches, guess) == at:
            begin(batches[at + 1])
        yield estimate
        tried[batch] = total_bytes(batch)
        if tried[batch] <= budget_bytes:
            fits = at
        else:
            fails = at
        follows_line = is_bounded or len(tried) < _SECANT_STEPS
        guess = _predict(tried, budget_bytes, fixed_bytes) if follows_line else batches[-1]
        estimate = _estimated(batches, guess, fits, fails) if follows_line else estimate
    largest = batches[fits] if fits >= 0 else 0
    after = batches[fails] if fails < len(batches) else None
    return BatchSearch(largest, tried.get(largest), after, tried[after] if after else None, tuple(tried.items()))


def search_from_above(
    total_bytes: Callable[[int], int],
    budget_bytes: int,
    *,
    early_bytes: Callable[[int], int],
    fixed_bytes: int = 0,
    start: int = FIRST_BATCH,
    batches: Sequence[int] = range(1, MAX_BATCH + 1),
) -> Searching:
    """The search of `largest_batch`, where a compile ends early for a batch that doesn't fit.

    So the batches are tried from above, and few that fit are compiled: of bytes along a straight line the answer alone. Where the
    bytes follow no line, the bracket is halved after a few batches.

    Args:
        total_bytes: compiles at a batch and returns the total bytes. It takes much longer for a batch that fits.
        budget_bytes: total bytes that a step may take.
        early_bytes: a guess at them that takes no longer for a batch that fits. The search begins with one.
        fixed_bytes: a guess at the total bytes of batch 0.
        start: the batch of the guess. If it isn't one of `batches`, the next smaller one is.
        batches: the batches to choose among, in rising order.
    """
    first = at_most(batches, start)
    yield None
    known = {first: early_bytes(first)}
    guess = min(_predict(known, _FROM_ABOVE * budget_bytes // 100, fixed_bytes), GROWTH * first)
    tried: dict[int, int] = {}
    fits, fails = -1, len(batches)
    estimate = _estimated(batches, _predict(known, budget_bytes, fixed_bytes), fits, fails)
    while fails - fits > 1:
        yield estimate
        follows_line = len(tried) < _SECANT_STEPS
        at = min(max(_place(batches, guess), fits + 1), fails - 1) if follows_line else (fits + fails) // 2
        tried[batches[at]] = total_bytes(batches[at])
        if tried[batches[at]] <= budget_bytes:
            fits = at
        else:
            fails = at
        estimate = _estimated(batches, _predict(tried, budget_bytes, fixed_bytes), fits, fails)
        aim_bytes = budget_bytes if len(tried) > 1 else _SECOND * budget_bytes // 100
        at = _place(batches, _predict(tried, aim_bytes, fixed_bytes)) + 1  # the first that doesn't fit, by the line
        guess = batches[min(at, fails - 1)]
    largest, after = batches[fits] if fits >= 0 else 0, batches[fails] if fails < len(batches) else None
    return BatchSearch(largest, tried.get(largest), after, tried[after] if after else None, tuple(tried.items()))


def _estimated(batches: Sequence[int], guess: int, fits: int, fails: int) -> int:
    """The largest of `batches` up to `guess`, within what is proven. 0 where there is none."""
    at = min(max(bisect.bisect_right(batches, guess) - 1, fits), fails - 1)
    return batches[at] if at >= 0 else 0


def _predict(tried: dict[int, int], budget_bytes: int, fixed_bytes: int) -> int:
    """The batch at which a line of bytes by batch meets the budget.

    The line goes through the largest compiled batch that fits and the smallest one above it. Where there are no such two, it goes
    through the two whose bytes are nearest to the budget.
    """
    known = tried if len(tried) > 1 else {0: fixed_bytes, **tried}
    fitting = [batch for batch in known if known[batch] <= budget_bytes]
    if above := [batch for batch in known if fitting and batch > max(fitting)]:
        low, high = max(fitting), min(above)
    else:
        low, high = sorted(sorted(known, key=lambda batch: abs(known[batch] - budget_bytes))[:2])
    slope = (known[high] - known[low]) / (high - low)
    return int(low + (budget_bytes - known[low]) // slope) if slope > 0 else 2 * high
