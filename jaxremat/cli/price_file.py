"""Reads the file of `--price`: what one GPU costs an hour, by the name of its target.

This module imports no JAX.

    h100-80gb = 2.50
    "a100-80gb" = 1.80

The unit of money is whatever the file's author has in mind: costs come out in the same one.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from jaxremat.errors import UsageError, nearest
from jaxremat.system.files import parse_toml

_EXAMPLE = "a line such as h100-80gb = 2.50 for each GPU"


def read_prices(path: Path, known: Iterable[str]) -> dict[str, float]:
    """The prices of a file, by GPU.

    Args:
        path: a TOML file of names and numbers.
        known: the names that the file may have.

    Raises:
        UsageError: the file can't be read, isn't TOML, names an unknown GPU, or has a price that isn't a positive number.
    """
    named = f"--price {str(path)!r}"
    try:
        found = parse_toml(path.read_bytes().decode())
    except OSError as error:
        why = f"{named} cannot be read: {error.strerror}"
        raise UsageError(why, next_step=f"give a TOML file with {_EXAMPLE}") from None
    except ValueError as error:
        raise UsageError(f"{named} isn't TOML: {error}", allowed=_EXAMPLE, next_step="write the prices like that") from None
    known = list(known)
    if not found:
        raise UsageError(f"{named} has no price", allowed=_EXAMPLE, next_step=f"add one of {', '.join(known)}")
    for name, price in found.items():
        if name not in known:
            raise UsageError(
                f"{named} has a price of {name!r}, which is no target here",
                allowed=", ".join(known),
                next_step=nearest(name, known) or "use the names of --list targets",
            )
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
            raise UsageError(
                f"{named}: {name} costs {price!r}",
                allowed="a positive number: the price of one GPU for an hour",
                next_step=f"write it like {name} = 2.50, without a currency",
            )
    return {name: float(price) for name, price in found.items()}
