"""Which compile of how many at most, and how long the rest of a search may take.

compiles = Compiles()
compiles.expect(9)       # before the search, which takes at most 9 compiles
compiles.next()          # Compile(number=1, at_most=9, rest_s=None)
compiles.next()          # 2 seconds later: Compile(number=2, at_most=9, rest_s=16.0)
compiles.expect(3)       # a bound is known that is nearer: at most 3 further compiles
compiles.next()          # 2 seconds later: Compile(number=3, at_most=5, rest_s=6.0)
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compile:
    """A compile of a search, before it starts.

    Attributes:
        number: its number, from 1.
        at_most: how many compiles the search takes at most. None where that isn't known.
        rest_s: seconds that this compile and all that may follow take, if each takes what those before took on average. None
            before the second compile, and where `at_most` isn't known.
        estimate: the largest batch that fits, as the compiles before predict it. None before the second compile, and where the
            batch is given.
        taken_s: seconds since the first compile started.
    """

    number: int
    at_most: int | None = None
    rest_s: float | None = None
    estimate: int | None = None
    taken_s: float = field(default=0.0, compare=False)


@dataclass
class Compiles:
    """Counts the compiles of one search.

    Attributes:
        clock: returns the seconds of a clock.
        number: how many compiles have started.
        at_most: how many there are at most in the whole search, by all that was said to `expect`. None where that isn't known.
        started_s: when the first one started.
        estimate: the batch that was last said to `estimated`.
    """

    clock: Callable[[], float] = time.monotonic
    number: int = 0
    at_most: int | None = None
    started_s: float = 0.0
    estimate: int | None = None

    def expect(self, further: int) -> None:
        """Takes notice that at most `further` compiles are to come until the search ends."""
        at_most = self.number + further
        self.at_most = at_most if self.at_most is None else min(at_most, self.at_most)

    def add(self, further: int) -> None:
        """Takes notice of further compiles that `expect` wasn't told of."""
        self.at_most = None if self.at_most is None else self.at_most + further

    def estimated(self, batch: int | None) -> None:
        """Takes notice that the largest batch that fits is predicted to be `batch`, if anything is."""
        self.estimate = batch

    @property
    def taken_s(self) -> float:
        """Seconds since the first compile started. 0 before it."""
        return self.clock() - self.started_s if self.number else 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose seconds aren't those of the search: other searches compile then."""
        began_s = self.clock()
        yield
        self.started_s += self.clock() - began_s

    def next(self) -> Compile:
        """The compile that starts now."""
        done, taken_s = self.number, self.taken_s
        if not done:
            self.started_s = self.clock()
        self.number += 1
        rest_s = None if self.at_most is None or not done else (self.at_most - done) * taken_s / done
        return Compile(self.number, self.at_most, rest_s, self.estimate, taken_s)
