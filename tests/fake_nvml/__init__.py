"""A folder to put on PYTHONPATH: its `pynvml.py` then stands in for NVIDIA's NVML. Here is what its tests share."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: A PYTHONPATH with which a process finds the stand-in in place of `pynvml`.
FAKE = f"{ROOT / 'tests' / 'fake_nvml'}{os.pathsep}{ROOT}"
#: What the commands say on a machine without a driver.
NO_DRIVER = (
    "no NVIDIA GPU can be read: NVML error 12. Likely cause: this machine has no NVIDIA driver. "
    "Next: on a machine with a GPU install NVIDIA's driver."
)


def environment(path: str = FAKE, **more: str) -> dict[str, str]:
    """The whole environment of a process that looks for `pynvml` in `path`, and `more` variables."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "TZ": "UTC", "COLUMNS": "80", "PYTHONUNBUFFERED": "1", **more}
