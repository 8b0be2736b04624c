"""The lengths of the sequences of a data set, with their counts, from a text file.

A line has a length, or a length and how many sequences have it. This file has 101 sequences:

    512
    1024,100   # or with a space in between

The lengths count the positions that the model computes.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxremat.errors import UsageError

#: More tokens than any model reads at once, and few enough that sizes stay below 64 bits.
MAX_SEQ_LEN = 10**7
#: More sequences than any data set has, and few enough that products with FLOPs stay finite.
MAX_COUNT = 10**15
_ALLOWED = f"a length from 1 to {MAX_SEQ_LEN:,}, or a length and a count from 1 up, such as 512 or 512,1000"
_LINE = re.compile(r"(\d{1,20})(?:[\s,]+(\d{1,20}))?", re.ASCII)


@dataclass(frozen=True)
class Histogram:
    """Lengths of sequences with their counts, the shortest first. There is at least one."""

    counts: tuple[tuple[int, int], ...]

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return sum(count for _, count in self.counts)

    @property
    def num_tokens(self) -> int:
        """How many tokens all sequences have together."""
        return sum(length * count for length, count in self.counts)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return self.counts[-1][0]

    def longer_than(self, length: int) -> int:
        """How many sequences have more than `length` tokens."""
        return sum(count for longer, count in self.counts if longer > length)

    def cut_at(self, length: int) -> "Histogram":
        """The histogram with longer sequences cut to `length` tokens."""
        return histogram_of((min(longer, length), count) for longer, count in self.counts)


def histogram_of(pairs: Iterable[tuple[int, int]]) -> Histogram:
    """The histogram of pairs of a length and its count. A length may come several times."""
    counts = Counter[int]()
    for length, count in pairs:
        counts[length] += count
    return Histogram(tuple(sorted(counts.items())))


def read_histogram(path: Path) -> Histogram:
    """The histogram in the text file of --lengths.

    Raises:
        UsageError: the file can't be read or has no lengths, or a line is none. The message has the number of the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it isn't text"
        raise UsageError(
            f"--lengths {str(path)!r} cannot be read: {why}", next_step="give the path of a text file"
        ) from None
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    found = histogram_of(_pair(path, number, line) for number, line in lines if line)
    if not found.counts:
        raise UsageError(f"--lengths {str(path)!r} has no lengths", allowed=_ALLOWED, next_step="write a length a line")
    return found


def _pair(path: Path, number: int, line: str) -> tuple[int, int]:
    match = _LINE.fullmatch(line)
    length, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
    if not (1 <= length <= MAX_SEQ_LEN and 1 <= count <= MAX_COUNT):
        shown = line if len(line) <= 40 else f"{line[:37]}..."
        raise UsageError(
            f"--lengths {str(path)!r}, line {number}: {shown!r}",
            allowed=_ALLOWED,
            next_step="mend the line; what follows a # is a comment",
        )
    return length, count
