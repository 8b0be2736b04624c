"""A folder to put on PYTHONPATH: its `pynvml.py` then stands in for NVIDIA's NVML. Here is what its tests share."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
#: A PYTHONPATH with which a process finds the stand-in in place of `pynvml`.
FAKE = f"{ROOT / 'tests' / 'fake_nvml'}{os.pathsep}{ROOT}"


def environment(path: str = FAKE, **more: str) -> dict[str, str]:
    """The whole environment of a process that looks for `pynvml` in `path`, and `more` variables."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "TZ": "UTC", "COLUMNS": "80", "PYTHONUNBUFFERED": "1", **more}


def fresh_fake() -> ModuleType:
    """The stand-in for this process, with its readings from the first."""
    spec = importlib.util.spec_from_file_location("pynvml", Path(__file__).parent / "pynvml.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
