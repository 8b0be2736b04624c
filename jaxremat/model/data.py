"""Real text as batches of tokens, and tokens that are as frequent as those of real text.

Each byte of a text is a token, so that any file can be used and nothing is downloaded.

text = load_text()  # uint8[num_bytes]
next(batches(text, batch=8, seq_len=1024, seed=0))  # int32[8, 1025]
next(spread_tokens(50257, batch=8, seq_len=1024, seed=0))  # int32[8, 1025]

A batch is a function of the seed and its number alone, and a training resumes with nothing but the number of its next step.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxremat.errors import UsageError

NUM_BYTES = 256
#: The share of a text, at its end, that isn't trained on. The evaluation loss is that of this part.
EVALUATION_SHARE = 0.1
_HASHED_AT_ONCE = 2**24
#: The frequency of the word of rank r is proportional to 1 / (r + this) (Piantadosi 2014, doi:10.3758/s13423-014-0585-6).
ZIPF_OFFSET = 2.7


def load_text(path: str | Path | None = None) -> np.ndarray:
    """The bytes of the file at `path` as `uint8[num_bytes]`.

    The file is mapped into memory, and only what is used is read.

    The default is the manual that every Python installation has (pydoc's topics).

    Raises:
        UsageError: the file is missing, unreadable or empty.
    """
    if path is None:
        return _manual()
    try:
        if not Path(path).stat().st_size:
            raise UsageError(f"--data {str(path)!r} is empty", next_step="give a file of at least one sequence of text")
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise UsageError(
            f"--data {str(path)!r} cannot be read: {error.strerror}", next_step="give the path of a text file"
        ) from None


@functools.cache
def _manual() -> np.ndarray:
    from pydoc_data import topics

    return np.frombuffer("\n".join(topics.topics[name] for name in sorted(topics.topics)).encode(), np.uint8)


def split_text(text: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The part of `text` to train on, and the part to evaluate on.

    The latter is None where the text is so short that one of the two parts would hold no sequence.
    """
    num_train = len(text) - int(EVALUATION_SHARE * len(text))
    if min(num_train, len(text) - num_train) <= seq_len:
        return text, None
    return text[:num_train], text[num_train:]


def text_hash(text: np.ndarray) -> str:
    """A hash of the whole text: the first 16 hexadecimal digits of its SHA-256."""
    found = hashlib.sha256()
    for start in range(0, len(text), _HASHED_AT_ONCE):
        found.update(text[start : start + _HASHED_AT_ONCE].tobytes())
    return found.hexdigest()[:16]


def check_text(text: np.ndarray, seq_len: int, vocab_size: int) -> None:
    """Raises UsageError if `text` is too short for one sequence and its last target.

    It is raised also where the vocabulary is too small for all bytes.
    """
    if vocab_size < NUM_BYTES:
        raise UsageError(
            f"--vocab-size got {vocab_size}",
            allowed=f"{NUM_BYTES} or more, as bytes are the tokens",
            next_step=f"--vocab-size {NUM_BYTES}",
        )
    if len(text) <= seq_len:
        raise UsageError(
            f"--seq-len {seq_len} takes {seq_len + 1} bytes with the last target, and the text has {len(text)} bytes",
            next_step=f"give a longer file, or --seq-len {max(1, len(text) - 1)}",
        )


def batches(text: np.ndarray, batch: int, seq_len: int, seed: int, first: int = 0) -> Iterator[np.ndarray]:
    """Windows of `text` without end, from batch number `first` on.

    Each batch is `int32[batch, seq_len + 1]`.

    The first `seq_len` tokens of a window are the inputs. Its last `seq_len` tokens are the targets. The windows of an epoch
    share no target, and are in an order that the seed and the epoch decide.
    """
    num_windows = (len(text) - 1) // seq_len
    for number in itertools.count(first * batch, batch):
        rows = []
        for sequence in range(number, number + batch):
            epoch, place = divmod(sequence, num_windows)
            shift, order = _order(len(text), seq_len, seed, epoch)
            start = shift + seq_len * int(order[place])
            rows.append(text[start : start + seq_len + 1])
        yield np.stack(rows).astype(np.int32)


def spread_tokens(vocab_size: int, batch: int, seq_len: int, seed: int, first: int = 0) -> Iterator[np.ndarray]:
    """Random tokens without end, as frequent as those of real text.

    Each batch is `int32[batch, seq_len + 1]`, from batch number `first` on. The tokens are drawn by Zipf's law from the whole
    vocabulary, the most frequent of which has number 0. How many tokens are alike decides how long the gradient of the embedding
    takes: all of them add to one row. The bytes of a text are about a hundred tokens, and would make it several times longer.

    Args:
        vocab_size: the number of tokens in the vocabulary.
        batch: sequences in a batch.
        seq_len: the inputs of a sequence. A batch has one more token, the last target.
        seed: of the draws. A batch is a function of the seed and its number.
        first: the number of the first batch.
    """
    up_to = _cumulative_frequencies(vocab_size)
    for number in itertools.count(first):
        drawn = np.random.default_rng((seed, number)).random((batch, seq_len + 1))
        yield np.searchsorted(up_to, drawn, side="right").astype(np.int32)


@functools.lru_cache(maxsize=4)
def _cumulative_frequencies(vocab_size: int) -> np.ndarray:
    """By token, the frequency of all tokens up to it, `float64[vocab_size]`. The last one is 1."""
    frequencies = np.cumsum(1 / (np.arange(1, vocab_size + 1) + ZIPF_OFFSET))
    return frequencies / frequencies[-1]


@functools.lru_cache(maxsize=4)
def _order(num_bytes: int, seq_len: int, seed: int, epoch: int) -> tuple[int, np.ndarray]:
    """Where the first window of an epoch begins, and the order of its windows."""
    random = np.random.default_rng((seed, epoch))
    num_windows, left = divmod(num_bytes - 1, seq_len)
    return int(random.integers(0, left + 1)), random.permutation(num_windows)
