"""What XLA's compiler of TPUs says of a program that is too large.

It compares twice. The first time is after the scheduling, with the bytes of the program's buffers on the device:

    RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (33.12G) exceeds available HBM
    (31.25G).

In spite of the words, arguments and results are among them. The second time is at the end, when the size of the code is known:

    RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used
    534.00M of 530.00M hbm. Exceeded hbm capacity by 4.00M.

A table of the largest buffers follows there. libtpu 0.0.50 begins both with `E1000: CompileTimeHbmOom:`, and ends the first with
the module's name. What is offloaded to the host is in neither number. A number has two decimals.
"""

import re

_SIZE = r"(\d+(?:\.\d+)?[KMGT]?)"
_FORMS = (
    rf"Ran out of memory on HBM, the total memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)\."
    r"(?: HLO module: \S+\.\nSee https://openxla\.org/xla/errors/\S+ for more details\.)?",
    rf"XLA:TPU compile permanent error\. Ran out of memory in memory space hbm\. Used {_SIZE} of {_SIZE} hbm\. "
    rf"Exceeded hbm capacity by {_SIZE}\.(?:\n.*)?",
)
_TOO_LARGE = [re.compile(rf"RESOURCE_EXHAUSTED: (?:E\d+: \w+: )?{form}\s*", re.DOTALL) for form in _FORMS]
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def needed_bytes(text: str) -> int | None:
    """The bytes that a program needs by XLA's words, to a hundredth of their unit.

    None for other words.
    `needed_bytes("... HLO temporaries (33.12G) exceeds available HBM (31.25G).")` is 35562329211.
    """
    said = next(filter(None, (form.fullmatch(text) for form in _TOO_LARGE)), None)
    return round(float(said[1].rstrip("KMGT")) * _UNITS.get(said[1][-1], 1)) if said else None
