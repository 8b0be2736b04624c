"""What the experiments share: the process set up for deviceless compiling, one compile, and results filed with their versions."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxremat.config import ModelConfig, TrainConfig
    from jaxremat.xla.compile import Compilation
    from jaxremat.xla.target import Target

RESULTS = Path(__file__).parent / "results"


def set_up() -> None:
    """Before JAX is imported: compile without a GPU, and without XLA's log."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def machine() -> dict[str, Any]:
    """What the compile times were measured on."""
    names = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"cpu": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0))}


def compile_step(model: "ModelConfig", train: "TrainConfig", policy: str, batch: int, target: "Target") -> "Compilation":
    """The donated training step, compiled afresh."""
    from jaxremat.model.transformer import choose_attention
    from jaxremat.policy.spec import parse
    from jaxremat.step.step import abstract_args, make_step
    from jaxremat.xla.compile import lower_and_compile

    attention = choose_attention(model, target.compute_capability, target.kind == "deviceless").implementation
    step = make_step(model, train, parse(policy), attention)
    return lower_and_compile(step, abstract_args(model, train, batch), target, donate_argnums=0)


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, least and most of some timings."""
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds), "runs": len(seconds)}


def write(folder: Path, device: str, name: str, result: dict[str, Any]) -> Path:
    """Files `result` with versions and machine as `folder/device/name.json`; called after each part, so that none is lost."""
    from jaxremat.xla.target import versions

    path = folder / device / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**result, "machine": machine(), "versions": versions()}, indent=1) + "\n")
    return path
