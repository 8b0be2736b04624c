"""Bytes as a person reads and types them, and shares that are bounds.

    parse_bytes("40GiB")  # 42949672960
    gib(42949672960)      # "40.00 GiB"

Bytes are `int` everywhere else in the code, and in records. Sizes are printed in GiB (2**30 bytes), never in GB.
"""

import math
import re

from jaxremat.errors import UsageError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def gib(num_bytes: int) -> str:
    """`num_bytes` as text in GiB: `12.34 GiB`. Below 1 GiB it has three decimals: `0.123 GiB`."""
    return f"{num_bytes / 2**30:,.{2 if abs(num_bytes) >= 2**30 else 3}f} GiB"


def signed_gib(num_bytes: int) -> str:
    """A difference of bytes as text in GiB, with its sign: `+0.123 GiB`."""
    return f"{'+' if num_bytes >= 0 else '-'}{gib(abs(num_bytes))}"


def percent_up(share: float) -> str:
    """A share that something is at most, rounded up to a tenth of a percent: `0.5%` for 0.0043."""
    return f"{math.ceil(1e3 * share) / 10:.1f}%"


def parse_bytes(text: str, *, needs_unit: bool = True) -> int:
    """The bytes of a size that a person typed, such as `40GiB`, `512MiB`, `24 GB` or `1000B`.

    Args:
        text: the size.
        needs_unit: whether a number without a unit is an error. Else it is bytes.

    Raises:
        UsageError: `text` isn't a positive number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", text)
    meant = ""
    if match and match[2].lower() in _UNITS and 1 <= (size := float(match[1]) * _UNITS[match[2].lower()]) < 2**63:
        if match[2] or not needs_unit:
            return int(size)
        meant = f"{match[1]}{'GiB' if size < 2**20 else 'B'}"
    raise UsageError(
        f"cannot read {text!r} as a size in bytes",
        allowed="a positive number and a unit: B, KiB, MiB, GiB, TiB (or KB, MB, GB)",
        next_step=f"did you mean {meant}?" if meant else "write it like 40GiB",
    )


def shortest_size(num_bytes: int) -> str:
    """The shortest text that `parse_bytes` reads as `num_bytes`: `11.02GiB` for 11832634900.

    Of texts of one length it is that of the largest unit.
    """
    units = {"TiB": 2**40, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10}
    texts = [(f"{num_bytes / size:.{digits}f}", unit) for unit, size in units.items() for digits in range(16)]
    same = (f"{number}{unit}" for number, unit in texts if int(float(number) * units[unit]) == num_bytes)
    return min([*same, f"{num_bytes}B"], key=len)


def as_bytes(size: int | str) -> int:
    """The bytes of a size, a number of bytes or a text with a unit.

    Raises:
        UsageError: it isn't positive, or a text without a unit.
    """
    return parse_bytes(str(size), needs_unit=isinstance(size, str))
