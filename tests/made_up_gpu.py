"""The process of one trial on a made-up GPU: `python -m tests.made_up_gpu TASK RESULT` in place of `jaxremat.cli.worker`.

With flags in place of TASK and RESULT, it is `jaxremat.run` on such GPUs, of which there are JAX_NUM_CPU_DEVICES.

The CPU is passed off as an attached GPU. The steps are really compiled and run. Three things that only a GPU has are made
up: an allocator's limit (MADE_UP_LIMIT, in bytes), its peak (MADE_UP_OVER times the compiled bytes), and running out of
memory, in JAX's own words, where that peak is over the limit.
"""

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from jaxremat.chips import target
from jaxremat.chips.nvidia.outside import Outside
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.chips.target import Target
from jaxremat.cli import processes, run
from jaxremat.cli.worker import main
from jaxremat.trial import trials
from tests.roofline import uniform

KIND = "NVIDIA Made Up"


@dataclass(frozen=True)
class MadeUp(Target):
    """An attached target whose programs are the CPU's."""

    @property
    def platform(self):
        return "cpu"


def made_up_target(name: str | None = None, mesh: Any = None) -> MadeUp:
    cpu = target_of("cpu", mesh)
    speed = DeviceSpeed(1e12, 5e11, 1e11, 1e10, 1e11, uniform(0.8, 2e-6))
    limit = int(os.environ["MADE_UP_LIMIT"])
    return MadeUp("nvidia-made-up", "attached", cpu.device, KIND, limit, None, speed, cpu.mesh, cpu.mesh_shape)


def measure(self: trials.Trials, batch: int, compilation: trials.Compilation) -> trials.StepTiming:
    peak = int(float(os.environ["MADE_UP_OVER"]) * compilation.memory.total_bytes)
    if peak > int(os.environ["MADE_UP_LIMIT"]):
        raise RuntimeError(f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {peak} bytes.")
    return replace(really_measure(self, batch, compilation), peak_bytes=peak, outside=Outside(5 * 2**28, "process"))


target_of, really_measure = target.load_target, trials.Trials.measure

if __name__ == "__main__":
    target.load_target = made_up_target
    if sys.argv[1].startswith("--"):
        processes.COMMAND = (sys.executable, "-m", "tests.made_up_gpu")
        sys.exit(run.main())
    trials.Trials.measure = measure
    sys.exit(main())
