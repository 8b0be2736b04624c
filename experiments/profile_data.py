"""Reads the stored profiles of real GPUs: `experiments/profiles/`, a folder each.

A folder has `profile.toml` (which GPU, which step, where it comes from), `optimized.hlo.txt.gz` (the compiled module of one
device) and `thunks.csv` (nanoseconds of each HLO instruction in a step, all its launches together).
"""

import csv
import gzip
import re
import statistics
import tomllib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common import PROFILES
from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.chips.target import speed_of
from jaxremat.mesh.axes import MeshShape
from jaxremat.xla.collectives import is_collective
from jaxremat.xla.hlo import Instruction, Module, parse
from jaxremat.xla.kernels import Kernel, kernels_of

#: A kernel that ran beside a collective is left out if it took this many times what its twins took alone.
SLOWED = 1.15
#: The attributes in which twins are equal.
_COMPARED = re.compile(r"_(contracting|batch)_dimensions\"?:\[[^\]]*\]|(?<!_)dimensions=\{[^}]*\}|epilogue\"?:\"\w+\"")


@dataclass(frozen=True)
class Timed:
    """A kernel of a profile: `measured_s` is for one launch, of `num_launches` in a step.

    `left_out` says why the kernel isn't compared; it is empty for a kernel that is.
    """

    kernel: Kernel
    num_launches: int
    measured_s: float
    left_out: str = ""


@dataclass(frozen=True)
class Profile:
    """A stored profile.

    Attributes:
        name: the folder's name.
        speed: the rates of its GPU, with the calibration that a prediction for it would use.
        kernels: its kernels.
        num_untimed: kernels of the module that the profile has no time for.
        num_matmuls: the module's matmuls by what computes them: calls of cuBLAS, and fusions of Triton.
        about: what `profile.toml` says.
    """

    name: str
    speed: DeviceSpeed
    kernels: tuple[Timed, ...]
    num_untimed: int
    num_matmuls: dict[str, int]
    about: dict[str, object]

    @property
    def kept(self) -> list[Timed]:
        """The kernels that are compared."""
        return [timed for timed in self.kernels if not timed.left_out]


def names() -> tuple[str, ...]:
    """The names of the stored profiles."""
    return tuple(sorted(path.parent.name for path in PROFILES.glob("*/profile.toml")))


def load_profile(name: str, profiles: Path = PROFILES) -> Profile:
    """Reads one profile, and leaves out what is distorted.

    What is left out: collectives, what `profile.toml` names, and a kernel that ran beside a collective and took over
    `SLOWED` times as long as its twins did alone. Twins are kernels of the same operation on the same shapes.
    """
    folder = profiles / name
    about = tomllib.loads((folder / "profile.toml").read_text())
    with gzip.open(folder / "optimized.hlo.txt.gz", "rt") as file:
        module = parse(file.read())
    with (folder / "thunks.csv").open() as file:
        rows = {row["hlo_op"]: row for row in csv.DictReader(file)}
    instructions = {i.name: i for computation in module.computations.values() for i in computation.instructions}
    all_kernels = list({kernel.name: kernel for kernel in kernels_of(module)}.values())
    timed = [_timed(kernel, rows[kernel.name]) for kernel in all_kernels if kernel.name in rows]
    twins = {one.kernel.name: _twins(module, instructions[one.kernel.name]) for one in timed}
    beside = _beside_collectives(module)
    alone: dict[str, list[float]] = defaultdict(list)
    for one in timed:
        if one.kernel.name not in beside:
            alone[twins[one.kernel.name]].append(one.measured_s)

    def why_left_out(one: Timed) -> str:
        name = one.kernel.name
        if is_collective(instructions[name]):
            return "a collective"
        if name in about["left_out"]:
            return about["left_out"][name]
        of_twins = alone[twins[name]]
        if name in beside and of_twins and one.measured_s > SLOWED * statistics.median(of_twins):
            return "slowed by a collective beside it"
        return ""

    _, gpu = load_gpu(about["target"])
    speed = speed_of(gpu, MeshShape(fsdp=about.get("num_devices", 1)))
    assert speed is not None, "a profile names a bundled GPU"
    of_its_time = replace(speed.calibration, elements_per_thread=about["elements_per_thread"])
    return Profile(
        name,
        replace(speed, calibration=of_its_time),
        tuple(replace(one, left_out=why_left_out(one)) for one in timed),
        len(all_kernels) - len(timed),
        {
            "cublas": sum(i.custom_call_target.startswith("__cublas") for i in instructions.values()),
            "triton": sum("__triton_gemm" in i.attrs for i in instructions.values()),
        },
        about,
    )


def _timed(kernel: Kernel, row: dict[str, str]) -> Timed:
    """A kernel with its row of `thunks.csv`."""
    num_launches = int(row["launches_per_step"])
    return Timed(kernel, num_launches, int(row["median_ns_per_step"]) * 1e-9 / num_launches)


def _beside_collectives(module: Module) -> set[str]:
    """The instructions that are scheduled between the start and the end of an asynchronous collective."""
    beside = set()
    for computation in module.computations.values():
        running: set[str] = set()
        for instruction in computation.instructions:
            if instruction.opcode == "async-start" or (instruction.opcode.endswith("-start") and is_collective(instruction)):
                running.add(instruction.name)
            elif instruction.opcode.endswith("-done"):
                running -= {*instruction.operands}
            elif running:
                beside.add(instruction.name)
    return beside


def _twins(module: Module, instruction: Instruction) -> str:
    """A text that is equal for kernels of the same operations on the same shapes."""
    inside = [i for name in instruction.called for i in module.computations[name].instructions] or [instruction]
    return repr([(i.opcode, i.shapes, _COMPARED.findall(i.attrs)) for i in inside])
