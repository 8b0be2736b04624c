"""How fast a mesh is beside what the steps of other meshes say of it: `python -m experiments.mesh_bounds`.

`--mesh auto` compiles nothing of a mesh that can't win by the steps of another one (`jaxremat/answer/mesh_bounds.py`). Here all
meshes are compiled. A mesh and the other one are compared by their upper bounds after one compile of full remat each. All steps
are compiled for GPUs that aren't in the machine. Nothing is run.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, run_experiment, show_by
from experiments.mesh import trials_on
from jaxremat.config import TrainConfig
from jaxremat.model.presets import preset

if TYPE_CHECKING:
    from jaxremat.answer.mesh_race import Entrant

Part = Literal["bounds"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """How fast a mesh is beside what the steps of other meshes say of it."""

    races: tuple[tuple[str, str, int, int], ...] = (
        ("gpt2", "h100-80gb", 8, 1024),
        ("llama3.2-1b", "a100-80gb", 16, 2048),
        ("llama3-8b", "h100-80gb", 8, 4096),
        ("llama3-8b", "b200", 16, 4096),
        ("llama3-70b", "h100-80gb", 64, 1024),
        ("llama3-70b", "h100-80gb", 64, 4096),
    )
    """Models, GPUs, their numbers and tokens of a sequence. All meshes of each are compared."""
    target: str = "h100-80gb"
    """The folder of the results."""
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def measure_bounds(flags: Flags) -> Iterator[Row]:
    """For two meshes each, by how many percent the one is slower than the other one says."""
    from jaxremat.answer.mesh_race import most_beside, tells_of

    for model, target, num_devices, seq_len in flags.races:
        bounds = dict(first_bounds(model, target, num_devices, seq_len))
        for other, one in itertools.permutations(bounds, 2):
            entrant, mesh = bounds[other][0], bounds[one][0]
            most = most_beside(entrant, bounds[other][1], mesh.mesh.tensor) if tells_of(entrant, mesh) else math.inf
            if most < math.inf:
                about = {"model": model, "target": target, "num_devices": num_devices, "seq_len": seq_len}
                yield {**about, "mesh": one, "by": other, "percent": 100 * (most / bounds[one][1] - 1)}


def first_bounds(model: str, target: str, num_devices: int, seq_len: int) -> Iterator[tuple[str, tuple["Entrant", float]]]:
    """The meshes on which the state fits, and the most sequences per second of a plan on each after one compile."""
    from jaxremat.answer.mesh_race import Entrant
    from jaxremat.answer.planned import plan_bounds
    from jaxremat.mesh.axes import parse_mesh
    from jaxremat.mesh.sensible import sensible_meshes

    config = replace(preset(model).config, scan_layers=True)
    train, shape = TrainConfig(seq_len=seq_len, loss="chunked"), parse_mesh(None, num_devices)
    for mesh in sensible_meshes(num_devices, shape.nodes if shape else 1):
        trials = trials_on(config, train, mesh, target)
        trials = replace(trials, budget_bytes=3 * trials.budget_bytes // 4)
        if trials.state_bytes() < trials.budget_bytes:
            bounds = plan_bounds(trials, loss="chunked", batches=trials.batches(None), on_compile=lambda *_: None)
            speed = trials.global_batch_at(1) * cast(float, next(bounds))
            if 0 < speed < math.inf:  # XLA has accepted the step
                yield str(mesh), (Entrant(mesh, trials), speed)


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "bounds": (measure_bounds, 6, ("model", "target", "num_devices", "seq_len", "mesh", "by", "percent"))
}
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {"percent": ("slower", "{:.1f} %".format)}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes, and returns the exit code."""
    return run_experiment("mesh_bounds", Flags, argv, MEASURES, show_by(SHOWN))


if __name__ == "__main__":
    sys.exit(main())
