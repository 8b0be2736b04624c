"""Puts sequences of many lengths into a few buckets, each padded to one length.

The buckets are those whose padding costs the least.

A bucket's sequences are padded to its boundary. With the boundaries 512 and 2048, a sequence of 300 tokens costs as much as
one of 512, and one of 600 as much as one of 2048. A dynamic program over all candidate boundaries finds those of the least
total cost, so that no other choice of as many boundaries is better.

    make_buckets(Histogram(((100, 90), (1000, 10))), 2, cost=float, multiple=64)
    # (Bucket(seq_len=128, num_sequences=90, num_tokens=9000), Bucket(seq_len=1024, num_sequences=10, num_tokens=10000))

References:
    Bellman 1961, On the approximation of curves by line segments using dynamic programming: the same recurrence.
    Johnson 1974, Fast algorithms for bin packing: best-fit decreasing, and how far it is from the best packing.
    Krell et al. 2021, Efficient sequence packing without cross-contamination: packing by a histogram.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxremat.search.histogram import Histogram

#: Boundaries are multiples of it for long sequences: fused attention and matmul tiles like no others.
COARSEST = 128
FINEST = 8


@dataclass(frozen=True)
class Bucket:
    """Sequences that are padded to one length.

    Attributes:
        seq_len: the tokens that each is padded to.
        num_sequences: how many there are.
        num_tokens: how many tokens they have together, padding not counted.
    """

    seq_len: int
    num_sequences: int
    num_tokens: int

    @property
    def padding(self) -> float:
        """The share of padding in what the model computes."""
        return 1 - self.num_tokens / (self.num_sequences * self.seq_len)


@dataclass(frozen=True)
class Bucketed:
    """A data set in buckets.

    Attributes:
        histogram: the lengths of its sequences, after longer ones were cut.
        num_cut: how many sequences were cut.
        buckets: the buckets, the shortest first. None is empty.
    """

    histogram: Histogram
    num_cut: int
    buckets: tuple[Bucket, ...]

    @property
    def packed_share(self) -> float:
        """The share of real tokens with packing into rows of the last bucket's length."""
        return packed_share(self.histogram, self.buckets[-1].seq_len)


def granularity(longest: int) -> int:
    """What the boundaries of buckets are multiples of: 128, or a smaller power of two.

    It is smaller where the longest sequence has below 1024 tokens.

    It is an eighth of the longest sequence at most, and at least 8.
    """
    return max(FINEST, min(COARSEST, 1 << max(longest // 8, 1).bit_length() - 1))


def make_buckets(
    histogram: Histogram, most: int, cost: Callable[[int], float], multiple: int, upto: int | None = None
) -> tuple[Bucket, ...]:
    """The buckets of the least total cost, the shortest first. None is empty.

    Args:
        histogram: the lengths of the sequences.
        most: how many buckets there may be.
        cost: what a sequence costs that is padded to a length. It doesn't fall as the length grows.
        multiple: what the boundaries are multiples of.
        upto: the longest boundary, if a model has one. No sequence is longer.
    """
    boundaries, counts, tokens = [0], [0], [0]  # counts and tokens of all sequences up to each boundary
    for length, count in histogram.counts:
        boundary = min(-(-length // multiple) * multiple, upto or length + multiple)
        if boundary != boundaries[-1]:
            boundaries.append(boundary)
            counts.append(counts[-1])
            tokens.append(tokens[-1])
        counts[-1] += count
        tokens[-1] += length * count
    ends = _cheapest_ends(counts, [0.0, *map(cost, boundaries[1:])], most)
    return tuple(
        Bucket(boundaries[end], counts[end] - counts[start], tokens[end] - tokens[start])
        for start, end in zip([0, *ends], ends, strict=False)
    )


def _cheapest_ends(counts: Sequence[int], costs: Sequence[float], most: int) -> list[int]:
    """The indices of the boundaries that end the cheapest buckets, in rising order.

    The last boundary is one of them.

    Args:
        counts: how many sequences are up to each boundary. The first is 0.
        costs: what one sequence costs at each boundary.
        most: how many buckets there may be.
    """
    import numpy as np  # only here, so that --help starts fast

    upto, last = np.array(counts, float), len(counts) - 1
    best = np.where(np.arange(last + 1) == 0, 0.0, np.inf)  # the least cost of the sequences up to each boundary
    starts: list[np.ndarray] = []  # for each number of buckets: where the last one starts, if it ends at a boundary
    for _ in range(min(most, last)):
        total, start = np.full(last + 1, np.inf), np.zeros(last + 1, int)
        for end in range(1, last + 1):
            each = best[:end] + (upto[end] - upto[:end]) * costs[end]
            start[end] = np.argmin(each)
            total[end] = each[start[end]]
        best = total
        starts.append(start)
    ends, end = list[int](), last
    for start in reversed(starts):
        ends.append(end)
        end = int(start[end])
    return ends[::-1]


def packed_share(histogram: Histogram, capacity: int) -> float:
    """The share of real tokens where sequences are packed into rows of `capacity` tokens.

    A row has several sequences after each other.

    They are packed by best-fit decreasing: the longest first, each into the fullest row that has room for it. No sequence is
    divided.

    Raises:
        ValueError: a sequence is longer than a row.
    """
    if histogram.longest > capacity:
        raise ValueError(f"a sequence of {histogram.longest} tokens doesn't fit into a row of {capacity}")
    free: list[int] = []  # the free tokens that rows have, rising
    rows = Counter[int]()  # how many rows have so many free tokens
    num_rows = 0
    for length, count in reversed(histogram.counts):
        while count:
            at = bisect.bisect_left(free, length)
            if at == len(free):
                room = capacity
                taken = -(-count // (capacity // length))
                num_rows += taken
            else:
                room = free[at]
                taken = min(rows[room], -(-count // (room // length)))
                rows[room] -= taken
                if not rows[room]:
                    free.pop(at)
            each = room // length  # the fullest row stays the fullest until nothing of this length has room
            full, rest = divmod(min(count, taken * each), each)
            for left, number in ((room - each * length, full), (room - rest * length, int(rest > 0))):
                if number:
                    if not rows[left]:
                        bisect.insort(free, left)
                    rows[left] += number
            count -= full * each + rest
    return histogram.num_tokens / (num_rows * capacity)
