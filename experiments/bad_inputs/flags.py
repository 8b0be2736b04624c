"""Flags that can't be meant: misspelt, without a value, of a wrong type, out of bounds."""

import random
from pathlib import Path

from experiments.bad_inputs.case import Case, kind


@kind("flags")
def wrong_choice(draw: random.Random, folder: Path) -> Case:
    """A value that isn't among those of its flag."""
    return Case(("run", "--objective", draw.choice(["speed", "TIME", "tim", ""])), says=("--objective",))
