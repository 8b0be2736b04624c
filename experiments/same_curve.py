"""Does a training learn the same under every policy? `python -m experiments.same_curve` trains under five policies and a plan.

Each training is the real command, on the CPU and in float32, with dropout. Losses are compared bit for
bit, as `tests/equality.py` compares them. The layers run in a loop, and the plan is made for half of the bytes between `nothing`
and `none`. Beside the curves stand the bytes and the step time of the same step, compiled for a GPU that isn't here. A further
training is the command of docs/train.md, in bfloat16: it shows how well so small a model learns.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.common import RESULTS, flags_of, set_up, write
from jaxremat.report.table import list_table
from jaxremat.units import gib

POLICIES = ("none", "dots", "nothing", "every:2+nothing", "save:context,mlpwi_0")
STEP = ("--model", "tiny", "--dtype", "float32", "--attention", "xla", "--batch", "16", "--scan-layers", "True")
PLAIN = ("--model", "tiny", "--policy", "dots")
PLOT = Path(__file__).parent.parent / "docs" / "curves.png"
#: What the plain command's training loss is to fall below, in nats a byte: the mean of its last steps.
LEARNT, LAST = 2.2, 20


@dataclass(frozen=True)
class Flags:
    """Trains under several policies and compares the losses."""

    num_steps: int = 100
    """Steps of each training that is compared. The plain command has its own 400."""
    target: str = "h100-80gb"
    """The GPU that bytes and step times are of."""
    out: Path = RESULTS
    plain_dir: Path | None = None
    """The folder of the plain command's run, which then goes on where it is. Default: a new one."""
    plot: Path = PLOT
    """The picture of the curves."""


def trained(argv: Sequence[str], folder: Path) -> dict[str, Any]:
    """The training losses of a training in `folder`, and its evaluation losses.

    Raises:
        RuntimeError: the training failed.
    """
    from jaxremat.cli import train

    with contextlib.redirect_stdout(sys.stderr):
        code = train.main(["--target", "cpu", *argv, "--run-dir", str(folder)])
    if code:
        raise RuntimeError(f"the training {argv} ended with {code}")
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [row["loss"] for row in rows],
        "eval_losses": [row["eval_loss"] for row in rows if row["eval_loss"] is not None],
    }


def compiled(argv: Sequence[str], target: str) -> dict[str, Any]:
    """The record of the step compiled for `target`."""
    from jaxremat.cli import run

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        out = Path(folder, "records.jsonl")
        run.main([*STEP, *argv, "--target", target, "--out", str(out)])
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    return next(row for row in rows if row["record"] == "trial")


def first_difference(losses: Sequence[float], others: Sequence[float]) -> int | None:
    """The first step whose losses differ in any bit. None if there is none."""
    return next((n + 1 for n, (a, b) in enumerate(zip(losses, others, strict=True)) if a != b), None)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the losses over each other, and the bytes and the predicted step time of each policy, to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for n, row in enumerate(rows):
        left.plot(row["losses"], label=row["policy"][:28], linewidth=6 - n, alpha=0.7)
        right.scatter(row["gpu_bytes"] / 2**20, 1e3 * row["gpu_step_s"], zorder=3)
        right.annotate(row["policy"][:16], (row["gpu_bytes"] / 2**20, 1e3 * row["gpu_step_s"]), fontsize=8)
    left.set(xlabel="step", ylabel="training loss, nats a byte", title="equal losses, one line over the other")
    right.set(xlabel="MiB on the device", ylabel="step, ms (predicted)", title="other bytes, other times")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.margins(0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def main(argv: list[str] | None = None) -> int:
    """Trains, compares, files and draws. Returns 1 if losses differ, or if the model doesn't learn enough."""
    flags = flags_of(Flags, argv, "experiments.same_curve")
    set_up()
    started = time.monotonic()
    path = flags.out / "cpu" / "same_curve.json"
    result: dict[str, Any] = {"step": STEP, "plain": PLAIN, "target": flags.target}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        of_policies = {policy: compiled(("--policy", policy), flags.target) for policy in POLICIES}
        totals = [of_policies[policy]["total_bytes"] for policy in ("nothing", "none")]
        plan = (
            "--policy",
            "auto",
            "--loss",
            "full",
            "--budget",
            str(sum(totals) // 2),
            "--save-plan",
            f"{folder}/plan.json",
        )
        of_policies["plan"] = compiled(plan, flags.target)
        for number, (policy, gpu) in enumerate(of_policies.items()):
            asked = f"plan:{folder}/plan.json" if policy == "plan" else policy
            argv_of_policy = (
                "--policy",
                asked,
                "--sample-tokens",
                "0",
                "--eval-every",
                "0",
                "--num-steps",
                str(flags.num_steps),
            )
            found = trained((*STEP, *argv_of_policy), Path(folder, str(number)))
            row = {"policy": policy, "gpu_bytes": gpu["total_bytes"], "gpu_step_s": gpu["step_s"], **found}
            rows.append({**row, "first_difference": first_difference(row["losses"], (rows or [row])[0]["losses"])})
            result["losses"], result["rows"] = rows[0]["losses"], [_filed(row) for row in rows]
            write(path, {**result, "seconds": time.monotonic() - started})
        draw(rows, flags.plot)
        plain = trained(PLAIN, flags.plain_dir or Path(folder, "plain"))
    learnt = sum(plain["losses"][-LAST:]) / len(plain["losses"][-LAST:])
    of_plain = {"num_steps": len(plain["losses"]), "last_loss": learnt, "eval_loss": plain["eval_losses"][-1]}
    write(path, {**result, "seconds": time.monotonic() - started, "plain_training": of_plain})
    Console().print(table_of(rows))
    print(
        f"The plain command's loss over its last {LAST} steps is {learnt:.3f} nats a byte. Written to {path} and {flags.plot}."
    )
    differing = any(row["first_difference"] for row in rows)
    return 1 if differing or learnt >= LEARNT else 0


def _filed(row: dict[str, Any]) -> dict[str, Any]:
    """What is filed of a training. Its losses are those of the first one up to the first difference."""
    filed = {key: row[key] for key in ("policy", "gpu_bytes", "gpu_step_s", "first_difference")}
    return {**filed, "last_loss": row["losses"][-1]}


def table_of(rows: Sequence[dict[str, Any]]) -> Any:
    """The policies side by side."""
    columns = ("policy", "losses", "last loss", "GPU bytes", "predicted ms")
    cells = [
        (
            row["policy"],
            f"differ from step {row['first_difference']}" if row["first_difference"] else "equal bit for bit",
            f"{row['losses'][-1]:.6f}",
            gib(row["gpu_bytes"]),
            f"{1e3 * row['gpu_step_s']:.3f}",
        )
        for row in rows
    ]
    return list_table("the same curve", columns, cells, left=2)


if __name__ == "__main__":
    sys.exit(main())
