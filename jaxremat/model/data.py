"""Real text as batches of tokens. Each byte is a token, so that any file can be used and nothing is downloaded.

text = load_text()  # uint8[num_bytes]
next(batches(text, batch=8, seq_len=1024, seed=0))  # int32[8, 1025]
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxremat.errors import UsageError

NUM_BYTES = 256


def load_text(path: str | Path | None = None) -> np.ndarray:
    """The bytes of the file at `path` as `uint8[num_bytes]`.

    The default is the manual that every Python installation has (pydoc's topics).

    Raises:
        UsageError: the file is missing, unreadable or empty.
    """
    if path is None:
        from pydoc_data import topics

        text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    else:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"--data {str(path)!r} cannot be read: {error.strerror}", next_step="give the path of a text file"
            ) from None
    if not text:
        raise UsageError(f"--data {str(path)!r} is empty", next_step="give a file of at least one sequence of text")
    return np.frombuffer(text, np.uint8)


def check_text(text: np.ndarray, seq_len: int, vocab_size: int) -> None:
    """Raises UsageError if `text` is too short for one sequence and its last target, or the vocabulary for all bytes."""
    if vocab_size < NUM_BYTES:
        raise UsageError(
            f"--vocab-size got {vocab_size}",
            allowed=f"{NUM_BYTES} or more, as bytes are the tokens",
            next_step=f"--vocab-size {NUM_BYTES}",
        )
    if len(text) <= seq_len:
        raise UsageError(
            f"the text has {len(text)} bytes, and one sequence with its last target takes {seq_len + 1}",
            next_step=f"give a longer file, or --seq-len {max(1, len(text) - 1)}",
        )


def batches(text: np.ndarray, batch: int, seq_len: int, seed: int) -> Iterator[np.ndarray]:
    """Random windows of `text` without end, as `int32[batch, seq_len + 1]`.

    The first `seq_len` tokens of a window are the inputs. Its last `seq_len` tokens are the targets.
    """
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - seq_len, size=batch)
        yield np.stack([text[start : start + seq_len + 1] for start in starts]).astype(np.int32)
