"""What XLA's compiler of TPUs says of a program that is too large.

    RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (33.12G) exceeds available HBM
    (31.25G).

The first number is what the compiler compares with the second, with arguments and results and whatever else the program has on
the device. It has two decimals.
"""

import re

_TOO_LARGE = re.compile(
    r"RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    r"\((?P<number>\d+\.\d\d)(?P<unit>[KMGT]?)\) exceeds available HBM \(\d+\.\d\d[KMGT]?\)\.\s*"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def needed_bytes(text: str) -> int | None:
    """The bytes that a program needs by XLA's words, to a hundredth of their unit. None for other words.

    `needed_bytes("... HLO temporaries (33.12G) exceeds available HBM (31.25G).")` is 35562329211.
    """
    said = _TOO_LARGE.fullmatch(text)
    return round(float(said["number"]) * _UNITS[said["unit"]]) if said else None
