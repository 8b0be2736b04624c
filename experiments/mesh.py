"""What a step takes on several GPUs, in bytes and predicted time of one device: `python -m experiments.mesh`.

All steps are compiled for GPUs that aren't in the machine. Nothing is run. There is one part:

* steps: a model of 8 billion parameters on 8, 16 and 32 GPUs, and one of 70 billion on 128, under five policies, each with each
  preset of XLA's options (`jaxremat/xla/options.py`).

`collective_exposed_s` is how long a device waits for collectives, and `collective_s` how long they keep its links busy.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, run_experiment, show_by
from jaxremat.chips.nvidia.chip import NVIDIA
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.model.presets import preset

if TYPE_CHECKING:
    from jaxremat.mesh.axes import MeshShape
    from jaxremat.trial.record import TrialRecord
    from jaxremat.trial.trials import Trials

Part = Literal["steps"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """What a step takes on several GPUs, in bytes and predicted time of one device."""

    cases: tuple[tuple[str, str], ...] = (
        ("llama3-8b", "fsdp=8"),
        ("llama3-8b", "fsdp=16"),
        ("llama3-8b", "data=2,fsdp=16"),
        ("llama3-70b", "data=2,fsdp=64"),
    )
    """Models and meshes."""
    policies: tuple[str, ...] = ("nothing", "nothing+attention", "dots", "dots+attention", "none")
    presets: tuple[str, ...] = tuple(NVIDIA.options.presets)
    """Presets of XLA's options."""
    batch: int = 2
    """Sequences of one device."""
    seq_len: int = 4096
    target: str = "h100-80gb"
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def measure_steps(flags: Flags) -> Iterator[Row]:
    """Every model and mesh, under each policy, with each preset of XLA's options."""
    for (model, mesh), policy, name in itertools.product(flags.cases, flags.policies, flags.presets):
        yield {"model": model, "mesh": mesh, "policy": policy, "flags": name, **compiled(model, mesh, policy, flags, name)}


def compiled(model: str, mesh: str, policy: str, flags: Flags, xla_preset: str) -> Row:
    """The bytes, the predicted time and the compile time of one step."""
    train = TrainConfig(seq_len=flags.seq_len, loss="chunked")
    record = trial_on(preset(model).config, train, mesh, policy, flags.batch, flags.target, xla_preset)
    if record.error or not record.predicted:
        return {"num_devices": record.num_devices, "error": record.error}
    return {
        "num_devices": record.num_devices,
        "global_batch": record.global_batch,
        "total_bytes": record.total_bytes,
        "state_bytes": record.argument_bytes,
        "step_s": record.step_s,
        "collective_s": record.predicted.collective_s,
        "collective_exposed_s": record.predicted.collective_exposed_s,
        "tokens_per_s": record.tokens_per_s,
        "compile_s": record.compile_s,
    }


def trial_on(
    config: ModelConfig, train: TrainConfig, mesh: str, policy: str, batch: int, target: str, xla_preset: str
) -> "TrialRecord":
    """The record of a decoder's step, compiled for a mesh of GPUs.

    Args:
        config: the model.
        train: the training step's settings.
        mesh: the mesh, such as `fsdp=8`.
        policy: the policy's text.
        batch: sequences of one device.
        target: the name of the GPU.
        xla_preset: the preset of XLA's options.
    """
    from jaxremat.mesh.axes import parse_mesh
    from jaxremat.policy.grammar import parse

    run = trials_on(config, train, parse_mesh(mesh), target)
    return replace(run, xla_preset=xla_preset).record(parse(policy), batch, "trial")


def trials_on(config: ModelConfig, train: TrainConfig, mesh: "MeshShape | None", target: str) -> "Trials":
    """The trials of a decoder on a mesh of GPUs, within their memory. The other arguments are those of `trial_on`."""
    from jaxremat.chips.target import load_target
    from jaxremat.model.attention import choose_attention
    from jaxremat.model.decoder_workload import decoder_factory
    from jaxremat.trial.trials import Trials

    gpus = load_target(target, mesh)
    attention = choose_attention(config, train.seq_len, load_target(target)).implementation
    return Trials(decoder_factory(config, attention), train, gpus, gpus.memory_bytes or 0)


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table. Each mesh is of
#: one model, so that the table leaves the model out.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "steps": (measure_steps, 3, ("mesh", "policy", "flags", "total_bytes", "step_s", "collective_exposed_s", "compile_s"))
}
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step_s": ("ms", lambda value: f"{1e3 * value:,.0f}"),
    "collective_exposed_s": ("waits", lambda value: f"{1e3 * value:,.0f}"),
}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes, and returns the exit code."""
    return run_experiment("mesh", Flags, argv, MEASURES, show_by(SHOWN))


if __name__ == "__main__":
    sys.exit(main())
