"""Measures everything that needs a GPU: `python -m experiments.gpu_check`. It takes at most nine minutes.

There are five parts. Each has a share of the time, and its own file of results. The file is rewritten after every row, so
that no row is lost if the part is cut off. Each part has a section of the summary, which is rendered from the files alone.

* bytes: a step's bytes compiled without the device, compiled on it, and the allocator's peak, each trial in its own process.
* speed: the measured and the predicted step times of the named policies and of the plan at one batch, then of `nothing` at the
  largest batch that fits, and of the plan at the one that it chooses.
* mfu: the FLOP/s of a large matmul, and the model FLOPs utilization of the plan on the same device: in a scan, and unrolled if
  there is time.
* profile: the times of the kernels of one step, beside their predictions. They become a folder of `experiments/profiles`, to
  which `experiments.kernel_times --fit` fits the shares of this device.
* peer: the same step in PyTorch, with PyTorch's kinds of checkpointing. JAX and PyTorch take turns.

On one H200 with 16 cores and jax 0.11.2 a trial of gpt2 took 25 s and one of llama3.2-1b 26 s: 7 s until JAX has started, in two
processes, and 9 to 13 s of 16 cores for the compile, most of it autotuning. A second compile, of `none`, to count recomputation
took as long. The profile took 31 s, PyTorch's first batch about 25 s, and a plan in both layouts 49 s. So the commands share one
cache of compiled steps and the count of `none`, and plans are in a scan. On one H100 the whole then took 8 min 29 s with the
installation of the wheels. All parts had results; the largest batches, PyTorch's `budget` and unrolled layers weren't reached.

The processes of `bytes` share the device, so their pools grow (`XLA_PYTHON_CLIENT_PREALLOCATE=false`). A pool that grows counts
blocks that are up to 128 MiB larger than requested. The peaks of the other parts are those of preallocated pools.

`--tiny` runs all parts on a CPU with a model of two layers. Its numbers mean nothing, but it shows that every part works
before a GPU is there.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, flags_of, run_parts
from experiments.gpu_parts import (
    PAIRS,
    Check,
    Size,
    measure_bytes,
    measure_mfu,
    measure_peer,
    measure_profile,
    measure_speed,
)
from experiments.gpu_summary import NOT_THERE, write_summary
from jaxremat.chips.nvidia.gpu import gpu_of_kind
from jaxremat.chips.nvidia.nvml import read_gpus
from jaxremat.cli.command import run_command
from jaxremat.cli.machine.variables import split_advice
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.report.table import gib_number

Part = Literal["bytes", "speed", "mfu", "profile", "peer"]
#: By part, its share of the time.
SHARES: dict[Part, float] = {"bytes": 0.2, "speed": 0.31, "mfu": 0.13, "profile": 0.07, "peer": 0.29}
POLICIES = ("none", "nothing", "dots+attention")
SIZES = (Size("gpt2", (4, 16), "full"), Size("llama3.2-1b", (2,), "chunked"))
_LLAMA = ("--positions", "rope", "--norm", "rmsnorm", "--mlp", "swiglu", "--use-bias", "False")
_SMALL = ("--model", "tiny", "--dropout", "0", "--scan-layers", "True")
TINY = (Size("tiny", (2,), "full", _SMALL), Size("tiny llama", (2,), "chunked", (*_SMALL, *_LLAMA)))


@dataclass(frozen=True)
class Flags:
    """What only a GPU can tell: bytes, speed, MFU, and PyTorch beside it."""

    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    """Which parts. The summary is of all that is filed."""
    minutes: float = 8.8
    """For all the parts together; what isn't reached is said."""
    policies: tuple[str, ...] = POLICIES
    workers: int = 6
    """Commands at a time where no time is measured."""
    tiny: bool = False
    """On this machine's CPU, with a model of two layers: whether everything runs."""
    out: Path = RESULTS
    target: Annotated[str, Parameter(parse=False)] = ""  # the folder's name, found out


def find_check(flags: Flags, limit_s: float, shared: Path) -> Check:
    """The device, the models and the flags that the parts run with. What their commands share is in the folder `shared`.

    Raises:
        JaxrematError: there is no GPU to check.
    """
    common = {"policies": flags.policies, "limit_s": limit_s, "num_workers": flags.workers, "shared": shared}
    if flags.tiny:
        more = ("--max-batch", "4", "--budget", "64MiB", "--steps", "2")
        tiny = {"matmul_size": 256, "more": more, "pairs": PAIRS[:1], "profiles": flags.out / "profiles"}
        return Check("cpu", "cpu", "h100-80gb", TINY, **tiny, **common)
    try:
        name = read_gpus().gpus[0].name
    except (JaxrematError, IndexError) as error:
        why, _ = split_advice(str(error))
        raise JaxrematError(f"no GPU to check: {why}", next_step="--tiny runs every part on the CPU") from None
    return Check(name.replace(" ", "-").lower(), "gpu", gpu_of_kind(name), SIZES, **common)


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Check], Iterable[dict[str, Any]]], int, tuple[str, ...]]] = {
    "bytes": (
        measure_bytes,
        2,
        ("model", "policy", "batch", "deviceless_bytes", "total_bytes", "measured_bytes", "over_percent"),
    ),
    "speed": (measure_speed, 2, ("policy", "at", "batch", "predicted_s", "step_s", "tokens_per_s", "mfu")),
    "mfu": (measure_mfu, 1, ("what", "batch", "step_s", "flops_per_s", "mfu")),
    "profile": (measure_profile, 1, ("kernel_class", "num_kernels", "measured_s", "predicted_s")),
    "peer": (measure_peer, 2, ("framework", "arm", "batch", "step_s", "tokens_per_s", "measured_bytes")),
}


def show(column: str) -> tuple[str, Callable[[Any], str]]:
    """A column's title, and the function that makes a cell's text."""
    if column.endswith("_bytes"):
        return column.removesuffix("_bytes"), gib_number
    if column in ("step_s", "measured_s", "predicted_s"):
        return {"step_s": "ms", "measured_s": "ms", "predicted_s": "predicted"}[column], lambda value: f"{1e3 * value:,.1f}"
    if column == "flops_per_s":
        return "TFLOP/s", lambda value: f"{value / 1e12:,.1f}"
    if column in ("mfu", "over_percent"):
        times = 100 if column == "mfu" else 1
        return {"mfu": "MFU", "over_percent": "differs"}[column], lambda value: f"{times * value:+.1f}%".lstrip("+")
    if column == "tokens_per_s":
        return "tokens/s", lambda value: f"{value:,.0f}"
    return column, lambda value: str(value) if len(str(value)) < 60 else f"{str(value)[:57]}..."


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and renders the summary after each. Returns the exit code."""
    flags = flags_of(Flags, argv, "experiments.gpu_check")
    return run_command(lambda: check(flags), name="gpu_check", saved=f"the rows so far are in {flags.out}")


def check(flags: Flags) -> int:
    """Runs the parts of `flags`, and returns the exit code: 0, or 1 if a section of the summary lacks a measurement."""
    if not flags.minutes > 0:
        raise UsageError(f"--minutes got {flags.minutes:g}", allowed="a number above 0", next_step="8.8 is the default")
    shares = sum(SHARES[part] for part in flags.parts)
    with tempfile.TemporaryDirectory(prefix="jaxremat-") as folder:
        device = find_check(flags, 0.0, Path(folder)).device
        for part in flags.parts:
            limit_s = 60 * flags.minutes * SHARES[part] / shares
            measure, num_words, columns = MEASURES[part]
            found = find_check(flags, limit_s, Path(folder))
            run_parts(
                f"gpu_check-{part}",
                replace(flags, parts=(part,), target=device),
                {part: (lambda _, measure=measure, found=found: measure(found), num_words, columns)},
                show,
            )
            write_summary(flags.out / device)
    path = write_summary(flags.out / device)
    print(f"summary in {path}")
    missing = path.read_text().count(NOT_THERE)
    if missing:
        print(f"not everything was measured: {missing} sections say what is missing", file=sys.stderr)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
