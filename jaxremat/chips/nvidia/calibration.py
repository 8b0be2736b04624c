"""Reads how near real kernels come to a device's peak rates, from `calibration.toml`.

The file is written by `python -m experiments.kernel_times --fit`. It has a table for each generation of GPUs with a profile,
such as `sm_90` for the H100's, and `default`, which is the mean of them, for all others.
"""

import tomllib
from pathlib import Path

from jaxremat.chips.speed import Calibration

FILE = Path(__file__).parent / "calibration.toml"


def load_calibration(compute_capability: tuple[int, int] | None = None) -> Calibration:
    """The calibration for GPUs of a compute capability, such as (9, 0) for an H100.

    A GPU of a generation without a profile gets the mean of the others.
    """
    tables = tomllib.loads(FILE.read_text())
    name = "sm_{}{}".format(*compute_capability) if compute_capability else "default"
    table = tables.get(name, tables["default"])
    shares = {kind: tuple(table[kind].items()) for kind in ("flops_share", "bandwidth_share")}
    return Calibration(**table | shares)
