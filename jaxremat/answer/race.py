"""Finds the best of several contestants by upper bounds (branch and bound).

Their values are expensive to know, and the bounds are cheaper.

Each contestant is an iterator. It yields upper bounds of its value, each by one more piece of work, and at last its value:

    a: 120, 100, Reached(97)     b: 110, 98, Reached(95)     c: 90, 80, Reached(70)

That of the highest bound runs next. Here all three yield their first bounds, and `a` runs to 100. Then `b` runs to 98, `a`
reaches 97, and `b` reaches 95. `c` stays at its bound of 90: it can't be better than 97, and its further work isn't done.

References:
    Land and Doig 1960, "An Automatic Method of Solving Discrete Programming Problems", Econometrica 28.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reached:
    """The value of a contestant, which ends its work."""

    value: float


@dataclass(frozen=True)
class Standing:
    """What a race came to for one contestant.

    Attributes:
        bound: its value is at most this. Once the value is known, the value itself.
        reached: its value. None if it was left out of the race, because its bound isn't above the best value.
    """

    bound: float = math.inf
    reached: float | None = None


def race(
    contestants: Sequence[Iterator[float | Reached]],
    same: float = 0.0,
    on_change: Callable[[list[Standing]], None] = lambda standings: None,
) -> list[Standing]:
    """The standings of the contestants, in their order.

    The one of the largest `reached` is the best.

    Args:
        contestants: each yields upper bounds and then its value, all from 0 up. Of equal bounds, the first contestant runs.
        same: the share by which a bound may be above the best value and still be left out.
        on_change: called with the standings after each piece of work.
    """
    standings = [Standing() for _ in contestants]
    while running := still_running(standings, same):
        n = max(running, key=lambda n: standings[n].bound)
        match next(contestants[n]):
            case Reached(value):
                standings[n] = Standing(value, value)
            case bound:
                standings[n] = replace(standings[n], bound=min(bound, standings[n].bound))
        on_change(standings)
    return standings


def still_running(standings: Sequence[Standing], same: float = 0.0) -> list[int]:
    """The places of those in the race that could still be the best."""
    best = max((one.reached for one in standings if one.reached is not None), default=-math.inf)
    return [n for n, one in enumerate(standings) if one.reached is None and one.bound > best * (1 + same)]
