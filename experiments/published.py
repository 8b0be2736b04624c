"""How much longer published training steps on several GPUs took than predicted: `python -m experiments.published`.

Each step of `published.toml` is compiled for its GPUs, with the flags of XLA that MaxText and JAX-Toolbox set. Nothing is run.
The models, meshes, batches and saved values are the published ones. The programs are this package's, and not those that ran.

`jaxremat.chips.speed.SEVERAL_GPUS`, which tables show, is the span of `longer` over all steps.
"""

import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, Row, run_experiment
from experiments.mesh import trial_on
from jaxremat.config import TrainConfig
from jaxremat.model.presets import preset

Part = Literal["steps"]
FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Flags:
    """How much longer published training steps on several GPUs took than predicted."""

    file: Path = FILE
    """The published steps."""
    xla_preset: str = "jax-toolbox"
    """The preset of XLA's options."""
    target: str = "h100-80gb"
    """The folder of the results. The steps name their own GPUs."""
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def measure_steps(flags: Flags) -> Iterator[Row]:
    """Every published step, with the predicted time and the share by which the measured one is longer."""
    for step in tomllib.loads(flags.file.read_text())["step"]:
        config = replace(preset(step["model"]).config, **step["sizes"])
        train = TrainConfig(seq_len=step["seq_len"])
        record = trial_on(config, train, step["mesh"], step["policy"], step["batch"], step["target"], flags.xla_preset)
        row = {key: step[key] for key in ("name", "target", "mesh", "policy", "measured_s", "source")}
        row |= {"num_devices": record.num_devices, "total_bytes": record.total_bytes, "predicted_s": record.step_s}
        yield row | {"longer": step["measured_s"] / record.step_s - 1 if record.step_s else None, "error": record.error}


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "steps": (measure_steps, 3, ("name", "target", "mesh", "total_bytes", "measured_s", "predicted_s", "longer")),
}
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "total_bytes": ("GiB", lambda value: f"{value / 2**30:.2f}"),
    "measured_s": ("measured s", "{:.3f}".format),
    "predicted_s": ("predicted s", "{:.3f}".format),
    "longer": ("longer", "{:+.0%}".format),
}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes, and returns the exit code."""
    return run_experiment("published", Flags, argv, MEASURES, lambda column: SHOWN.get(column, (column, str)))


if __name__ == "__main__":
    sys.exit(main())
