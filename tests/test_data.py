"""Batches of a text: every row is a window of it, targets are the inputs shifted by one, the seed chooses the windows."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat.errors import UsageError
from jaxremat.model.data import ZIPF_OFFSET, batches, check_text, load_text, spread_tokens


def first(text, batch, seq_len, seed, count=1):
    return list(itertools.islice(batches(text, batch, seq_len, seed), count))


@given(st.integers(2, 300), st.integers(1, 9), st.integers(0, 2**32 - 1), st.data())
def test_every_row_is_a_window_of_the_text(num_bytes, batch, seed, data):
    seq_len = data.draw(st.integers(1, num_bytes - 1))
    text = np.random.default_rng(num_bytes).integers(0, 256, num_bytes).astype(np.uint8)
    (tokens,) = first(text, batch, seq_len, seed)
    assert tokens.shape == (batch, seq_len + 1)
    assert tokens.dtype == np.int32
    windows = {bytes(text[i : i + seq_len + 1]) for i in range(num_bytes - seq_len)}
    assert {bytes(row.astype(np.uint8)) for row in tokens} <= windows


def test_targets_are_the_inputs_shifted_by_one():
    """On a text that counts, each target is its input plus one."""
    (tokens,) = first(np.arange(200, dtype=np.uint8), 16, 20, seed=0)
    np.testing.assert_array_equal(tokens[:, :-1] + 1, tokens[:, 1:])


def test_windows_reach_both_ends_of_the_text():
    (tokens,) = first(np.arange(12, dtype=np.uint8), 500, 9, seed=0)
    assert set(tokens[:, 0]) == {0, 1, 2}
    assert tokens.max() == 11


def test_a_text_of_one_window():
    (tokens,) = first(np.arange(5, dtype=np.uint8), 3, 4, seed=0)
    np.testing.assert_array_equal(tokens, [[0, 1, 2, 3, 4]] * 3)


def test_the_seed_decides():
    text = load_text()
    same, again = first(text, 4, 32, seed=1, count=3), first(text, 4, 32, seed=1, count=3)
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same[0], same[1]), "batches follow one another"
    assert not np.array_equal(same[0], first(text, 4, 32, seed=2)[0])


def test_spread_tokens_are_as_frequent_as_those_of_real_text():
    """By Zipf's law over the whole vocabulary. A batch is a function of the seed and its number."""
    vocab_size, batch, seq_len = 1000, 64, 2000
    first, second, third = itertools.islice(spread_tokens(vocab_size, batch, seq_len, seed=0), 3)
    assert (first.shape, first.dtype) == ((batch, seq_len + 1), np.int32)
    assert len(np.unique(first)) == vocab_size
    assert (first.min(), first.max()) == (0, vocab_size - 1)
    share = np.bincount(first.ravel()) / first.size
    expected = 1 / (np.arange(1, vocab_size + 1) + ZIPF_OFFSET)
    np.testing.assert_allclose(share[:20], (expected / expected.sum())[:20], rtol=0.05)
    np.testing.assert_array_equal(next(spread_tokens(vocab_size, batch, seq_len, seed=0, first=2)), third)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, next(spread_tokens(vocab_size, batch, seq_len, seed=1)))


def test_the_default_text_is_prose_for_every_preset():
    text = load_text()
    assert text.dtype == np.uint8
    assert len(text) > 400_000
    assert b"The Python" in text.tobytes()
    assert len(np.unique(text)) > 60  # letters, not padding
    np.testing.assert_array_equal(text, load_text(None))
    check_text(text, seq_len=128_000, vocab_size=256)


def test_any_file_is_a_text(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)))
    np.testing.assert_array_equal(load_text(path), np.arange(256))
    np.testing.assert_array_equal(load_text(str(path)), np.arange(256))


def test_a_text_of_one_sequence_is_enough():
    check_text(np.zeros(11, np.uint8), seq_len=10, vocab_size=256)


@pytest.mark.parametrize(
    ("num_bytes", "seq_len", "vocab_size", "got", "next_step"),
    [(10, 10, 256, ["10", "11"], "--seq-len 9"), (1, 1, 256, ["1", "2"], ""), (11, 10, 255, ["255"], "--vocab-size 256")],
)
def test_a_text_that_is_too_short_or_has_too_many_tokens(num_bytes, seq_len, vocab_size, got, next_step):
    with pytest.raises(UsageError) as caught:
        check_text(np.zeros(num_bytes, np.uint8), seq_len, vocab_size)
    assert {*re.findall(r"\d+", caught.value.got)} == {*got}
    assert next_step in caught.value.next_step
