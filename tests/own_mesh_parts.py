"""The example of a mesh of its own, at a tiny size."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_mesh.py"
SMALL: dict[str, Any] = {"width": 256, "num_layers": 3, "seq_len": 128}


def example() -> Any:
    """The module of `examples/own_mesh.py`."""
    spec = importlib.util.spec_from_file_location("own_mesh", EXAMPLE)
    assert spec
    assert spec.loader
    module = sys.modules["own_mesh"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
