"""How much do bytes and predicted times depend on the kernels of the matmuls? `python -m experiments.matmuls`.

A step for a GPU that isn't in this machine is compiled twice: with its matmuls as cuBLAS calls, and as Triton fusions with
default tiles. Without autotuning there is no third choice (`jaxremat/xla/options.py`). Each preset is compiled under two
policies. A cuBLAS call gets a workspace, which XLA counts as temporary memory. The fusions have no workspace.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from experiments.common import RESULTS, compile_step, run_experiment
from jaxremat.config import TrainConfig
from jaxremat.model.presets import PRESETS
from jaxremat.report.table import gib_number

if TYPE_CHECKING:
    from jaxremat.xla.compile import Compilation

Part = Literal["matmuls"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Flags:
    """Bytes and predicted times with matmuls by cuBLAS and by Triton."""

    models: tuple[str, ...] = tuple(PRESETS)
    policies: tuple[str, ...] = ("nothing", "dots+attention")
    batch: int = 8
    loss: str = "chunked"
    target: str = "h100-80gb"
    parts: Annotated[tuple[Part, ...], Parameter(parse=False)] = ("matmuls",)
    out: Path = RESULTS


def measure(flags: Flags) -> Iterator[Row]:
    """Each preset under each policy, compiled with both kinds of kernels. If XLA refuses a compile, it has no numbers."""
    from jaxremat.chips.target import load_target
    from jaxremat.errors import CompileError
    from jaxremat.xla.clock import predict_step_time
    from jaxremat.xla.options import TRITON

    target = load_target(flags.target)
    for name in flags.models:
        preset = PRESETS[name]
        train = TrainConfig(seq_len=preset.seq_len, loss=flags.loss)
        for policy in flags.policies:
            row: Row = {"model": name, "policy": policy, "batch": flags.batch}
            for kernels, triton in (("cublas", False), ("triton", True)):
                try:
                    done = compile_step(preset.config, train, policy, flags.batch, target, {TRITON: triton})
                except CompileError as error:
                    row |= {f"{kernels}_bytes": None, f"{kernels}_s": None, f"{kernels}_error": str(error)}
                    continue
                step_s = predict_step_time(done.module, target.speed).step_s if target.speed else None
                row |= {f"{kernels}_bytes": done.memory.total_bytes, f"{kernels}_s": step_s}
                if not triton:
                    row["workspace_bytes"] = largest_workspace(done)
            yield row | {
                "more_bytes_percent": more_percent(row["cublas_bytes"], row["triton_bytes"]),
                "more_time_percent": more_percent(row["cublas_s"], row["triton_s"]),
            }


def largest_workspace(done: "Compilation") -> int:
    """Bytes of the largest workspace of a cuBLAS call in the program."""
    return max(
        (
            shape.num_bytes
            for computation in done.module.computations.values()
            for instruction in computation.instructions
            if instruction.custom_call_target.startswith("__cublas") and len(instruction.shapes) > 1
            for shape in instruction.shapes[-1:]
            if shape.dtype in ("s8", "u8")
        ),
        default=0,
    )


def more_percent(value: float | None, than: float | None) -> float | None:
    """By how many percent `value` is above `than`."""
    return 100 * (value / than - 1) if value is not None and than is not None else None


#: By column, its title and the function that makes a cell's text.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", str),
    "policy": ("policy", str),
    "cublas_bytes": ("GiB", gib_number),
    "triton_bytes": ("Triton", gib_number),
    "more_bytes_percent": ("%", "{:+.2f}".format),
    "cublas_s": ("ms", lambda seconds: f"{1e3 * seconds:.1f}"),
    "triton_s": ("Triton", lambda seconds: f"{1e3 * seconds:.1f}"),
    "more_time_percent": ("%", "{:+.2f}".format),
}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and writes the rows, and returns the exit code."""
    return run_experiment("matmuls", Flags, argv, {"matmuls": (measure, 2, tuple(COLUMNS))}, COLUMNS.__getitem__)


if __name__ == "__main__":
    sys.exit(main())
