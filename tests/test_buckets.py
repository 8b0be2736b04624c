"""Buckets of lengths and packing: against brute force, and against packing one sequence after the other."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat.errors import UsageError
from jaxremat.search.buckets import granularity, make_buckets, packed_share
from jaxremat.search.histogram import MAX_SEQ_LEN, Histogram, histogram_of, read_histogram

PAIRS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), min_size=1, max_size=9)
HISTOGRAMS = PAIRS.map(histogram_of)


def cost(length: int) -> float:
    """Linear and quadratic, as the FLOPs of a decoder are."""
    return 50 * length + length**2


def cost_of(histogram: Histogram, boundaries: tuple[int, ...]) -> float:
    return sum(count * cost(min(b for b in boundaries if b >= length)) for length, count in histogram.counts)


@given(HISTOGRAMS, st.integers(1, 3), st.sampled_from([5, 8, 16]), st.sampled_from([None, 60, 61]))
def test_no_other_boundaries_cost_less(histogram, most, multiple, upto):
    found = make_buckets(histogram, most, cost, multiple, upto)
    candidates = range(multiple, 60 + 2 * multiple, multiple)
    allowed = sorted({min(boundary, upto or boundary) for boundary in candidates})
    fitting = [c for n in range(1, most + 1) for c in itertools.combinations(allowed, n) if c[-1] >= histogram.longest]
    least = min(cost_of(histogram, boundaries) for boundaries in fitting)
    assert cost_of(histogram, tuple(bucket.seq_len for bucket in found)) == least


@given(HISTOGRAMS, st.integers(1, 6))
def test_each_sequence_is_in_the_first_bucket_with_room(histogram, most):
    found = make_buckets(histogram, most, cost, 8)
    assert 1 <= len(found) <= most
    start = 0
    for bucket in found:
        own = [(length, count) for length, count in histogram.counts if start < length <= bucket.seq_len]
        assert bucket.num_sequences == sum(count for _, count in own) > 0
        assert bucket.num_tokens == sum(length * count for length, count in own)
        assert bucket.padding == pytest.approx(1 - bucket.num_tokens / (bucket.num_sequences * bucket.seq_len))
        assert bucket.seq_len % 8 == 0
        start = bucket.seq_len
    assert sum(bucket.num_sequences for bucket in found) == histogram.num_sequences
    assert found[-1].seq_len - histogram.longest < 8


@given(HISTOGRAMS, st.integers(60, 90))
def test_packing_is_best_fit_decreasing(histogram, capacity):
    rows = []
    for length in sorted((length for length, count in histogram.counts for _ in range(count)), reverse=True):
        fullest = min((i for i, free in enumerate(rows) if free >= length), key=lambda i: rows[i], default=None)
        if fullest is None:
            rows.append(capacity - length)
        else:
            rows[fullest] -= length
    assert packed_share(histogram, capacity) == histogram.num_tokens / (len(rows) * capacity)


def test_packing_of_what_has_no_room():
    with pytest.raises(ValueError, match="5"):
        packed_share(Histogram(((5, 1),)), 4)


def test_many_distinct_lengths_make_eight_buckets():
    histogram = histogram_of((length, 10**9 // length) for length in range(1, 131_073, 7))
    found = make_buckets(histogram, 8, cost, granularity(histogram.longest))
    assert len(found) == 8
    assert found[-1].seq_len == 131_072
    assert 0.99 < packed_share(histogram, 131_072) <= 1


@pytest.mark.parametrize(
    ("longest", "multiple"), [(1, 8), (64, 8), (127, 8), (128, 16), (512, 64), (1023, 64), (1024, 128), (131_072, 128)]
)
def test_granularity(longest, multiple):
    assert granularity(longest) == multiple


@given(HISTOGRAMS, st.integers(1, 70))
def test_cutting(histogram, length):
    cut = histogram.cut_at(length)
    assert cut.num_sequences == histogram.num_sequences
    assert cut.longest == min(length, histogram.longest)
    assert histogram.num_tokens - cut.num_tokens == sum((n - length) * c for n, c in histogram.counts if n > length)
    assert histogram.longer_than(length) == sum(c for n, c in histogram.counts if n > length)


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("# tokens, sequences\n512\n64,3\n\n  512 2  # again\n7\t1\n8 , 2\n")
    assert read_histogram(path) == Histogram(((7, 1), (8, 2), (64, 3), (512, 3)))


@pytest.mark.parametrize("line", ["0", "-3", "1.5", "many", "5,0", "5,", "1,2,3", "5;6", "10000001", "\N{SUPERSCRIPT TWO}"])
def test_a_line_that_is_no_length(tmp_path, line):
    path = tmp_path / "lengths.txt"
    path.write_text(f"# of my data\n12\n{line}\n", encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        read_histogram(path)
    assert str(path) in raised.value.got
    assert raised.value.got.endswith(f"line 3: {line!r}")
    assert f"{MAX_SEQ_LEN:,}" in raised.value.allowed


@pytest.mark.parametrize("content", [b"# nothing\n", b"\xff\xfe\x00", None])
def test_a_file_without_lengths(tmp_path, content):
    path = tmp_path / "lengths.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_histogram(path)
    assert f"--lengths {str(path)!r}" in caught.value.got
    assert caught.value.next_step
