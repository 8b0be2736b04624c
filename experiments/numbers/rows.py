"""Picks rows of a file of results, and writes their numbers as the pages do."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.common import Row

#: The page that says what each experiment found.
EXPERIMENTS = "experiments/README.md"


def by(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """The rows in groups, by the value of one field or by those of several."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        value = tuple(row[key] for key in keys)
        groups.setdefault(value if len(keys) > 1 else value[0], []).append(row)
    return groups


def gib(num_bytes: float, digits: int = 2) -> str:
    """Bytes in GiB, without the unit and with this many digits behind the point: `0.08`."""
    return f"{num_bytes / 2**30:.{digits}f}"


def ms(seconds: float, digits: int = 0) -> str:
    """Seconds in milliseconds, without the unit: `7,470`."""
    return f"{1e3 * seconds:,.{digits}f}"


def rate(row: Row) -> str:
    """Tokens per second: `12,764`."""
    return f"{row['tokens_per_s']:,.0f}"


def percent(share: float) -> str:
    """A share in percent: `percent(0.413)` is `41 %`. Below 10 it has one digit more."""
    value = 100 * share if abs(share) >= 5e-4 else 0.0
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def signed(share: float) -> str:
    """A share in percent with its sign: `+41 %`."""
    return ("" if percent(share).startswith("-") else "+") + percent(share)


def spans(shares: Iterable[float]) -> str:
    """The least and the greatest of some shares, rounded as `percent` does: `40 to 60 %`."""
    in_order = sorted(shares)
    low, high = (percent(share).removesuffix(" %") for share in (in_order[0], in_order[-1]))
    return f"{low} %" if low == high else f"{low} to {high} %"


def span(numbers: Iterable[float], form: str = ".0f") -> str:
    """The least and the greatest number: `6 to 10`, or `4` where they are alike."""
    in_order = sorted(numbers)
    low, high = (format(number, form) for number in (in_order[0], in_order[-1]))
    return low if low == high else f"{low} to {high}"


def signed_span(shares: Iterable[float]) -> str:
    """The least and the greatest share, with their signs: `-8.7 to +1.5 %`."""
    in_order = sorted(shares)
    return f"{signed(in_order[0]).removesuffix(' %')} to {signed(in_order[-1])}"


def at_most(shares: Iterable[float], digits: int = 0) -> str:
    """The greatest of some shares without their signs, rounded up: `12 %`."""
    unit = 10**digits
    return f"{math.ceil(100 * unit * max(map(abs, shares))) / unit:.{digits}f} %"


def off(share: float) -> str:
    """A share without its sign: `4.9 %`."""
    return percent(abs(share))


def either(so: bool, words: str, otherwise: str) -> str:
    """Words for what is so, and words for what would be so otherwise: the page then lacks the words, and is to be mended."""
    return words if so else otherwise


def both(texts: Sequence[str]) -> str:
    """Two texts with `and` between them."""
    return " and ".join(texts)
