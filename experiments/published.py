"""Steps that others published, compiled here without their devices: `python -m experiments.published`.

* `steps`: how much longer published training steps on several GPUs took than predicted. The models, meshes, batches and saved
  values are the published ones, and the flags of XLA are those that MaxText and JAX-Toolbox set. The programs are this package's,
  and not those that ran. `jaxremat.chips.speed.SEVERAL_GPUS`, which tables show, is the span of `longer` over all steps.
* `bytes`: the memory that MaxText printed on real chips, beside that of its own step, compiled here, and of our decoder's:
  `python -m experiments.published --bytes --target t4 --maxtext CHECKOUT/src`. XLA's own rematerialization runs, as it did there.

Nothing is run. `published.toml` has what was published, with its sources.
"""

import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from experiments.common import RESULTS, Row, run_experiment
from experiments.mesh import trial_on
from jaxremat.config import TrainConfig
from jaxremat.model.presets import preset

Part = Literal["steps", "bytes"]
FILE = Path(__file__).with_suffix(".toml")
PLOT = Path(__file__).parent.parent / "docs" / "published_bytes.png"
#: The config of our decoder beside MaxText's.
DECODER = Path(__file__).parent.parent / "examples" / "configs" / "Qwen3-0.6B.json"


@dataclass(frozen=True)
class Flags:
    """Published steps, compiled here: their bytes, and how much longer they took than predicted."""

    file: Path = FILE
    """What was published."""
    xla_preset: str = "jax-toolbox"
    """The preset of XLA's options for steps on several GPUs."""
    target: str = "h100-80gb"
    """The folder of the results, and of bytes the chip. Steps on several GPUs name their own."""
    maxtext: Path | None = None
    """The folder src of a checkout of MaxText, for its own step. Without it our decoder's is compiled alone."""
    plot: Path = PLOT
    """The plot of published and compiled bytes."""
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = ("steps",)
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


def measure_bytes(flags: Flags) -> Iterator[Row]:
    """Every published step with bytes. Those of the target are compiled, and the others are to come."""
    from jaxremat.session.session import Session

    if flags.maxtext is not None:
        sys.path.insert(0, str(flags.maxtext))
    rows = list[Row]()
    for step in tomllib.loads(flags.file.read_text())["bytes"]:
        row = {
            key: step.get(key) for key in ("name", "target", "policy", "total_gib", "temp_gib", "step_s", "jax", "source")
        }
        if step["target"] == flags.target:
            own: dict[str, Any] = {"target": flags.target, "xla_remat": True}
            if flags.maxtext is not None:
                row |= _compiled(Session(maxtext_words(step), **own), "own", step["batch"], "maxtext")
                row["longer"] = step["step_s"] / row["maxtext_predicted_s"] - 1 if row["maxtext_predicted_s"] else None
            sizes = {
                "scan_layers": step["scan_layers"],
                "seq_len": step["seq_len"],
                "param_dtype": "bfloat16",
                "loss": "full",
            }
            decoder = Session(DECODER, **own, **sizes, **step.get("sizes", {}))
            row |= _compiled(decoder, step["policy"], step["batch"], "decoder")
        else:
            row["to_come"] = f"its chip isn't {flags.target}"
        rows.append(row)
        yield row
    draw(rows, flags.plot)


def maxtext_words(step: Row) -> str:
    """What a row of bytes has on the command line of MaxText."""
    layers = f"scan_layers={str(step['scan_layers']).lower()} remat_policy={step['policy']} attention={step['attention']}"
    return f"configs/base.yml {step['program']} max_target_length={step['seq_len']} {layers}"


def _compiled(session: Any, policy: str, batch: int, whose: str) -> Row:
    (record,) = session.compile(policy, batch).trials
    return {f"{whose}_{name}_bytes": getattr(record, f"{name}_bytes") for name in ("total", "temp")} | {
        f"{whose}_predicted_s": record.predicted_step_s
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the published bytes and the compiled ones to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    for whose, title, marker in (("maxtext", "MaxText's own step", "o"), ("decoder", "our decoder", "x")):
        for kind, color in (("total", "C0"), ("temp", "C1")):
            points = [
                (row[f"{kind}_gib"], row[f"{whose}_{kind}_bytes"] / 2**30) for row in rows if f"{whose}_{kind}_bytes" in row
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), marker=marker, color=color, label=f"{title}, {kind}", zorder=3)
    axes.axline((0, 0), slope=1, color="0.6", linewidth=1)
    axes.set(xlabel="GiB printed on the chip, to 0.1", ylabel="GiB compiled here", title="published steps on a T4")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "steps": (measure_steps, 3, ("name", "target", "mesh", "total_bytes", "measured_s", "predicted_s", "longer")),
    "bytes": (
        measure_bytes,
        2,
        (
            *("name", "target", "total_gib", "maxtext_total_bytes", "decoder_total_bytes", "temp_gib", "maxtext_temp_bytes"),
            *("step_s", "maxtext_predicted_s", "longer"),
        ),
    ),
}


def _gib(value: int) -> str:
    return f"{value / 2**30:.2f}"


SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "total_bytes": ("GiB", _gib),
    "measured_s": ("measured s", "{:.3f}".format),
    "predicted_s": ("predicted s", "{:.3f}".format),
    "longer": ("longer", "{:+.0%}".format),
    "total_gib": ("published GiB", str),
    "maxtext_total_bytes": ("MaxText's step", _gib),
    "decoder_total_bytes": ("our decoder", _gib),
    "temp_gib": ("published temp", str),
    "maxtext_temp_bytes": ("MaxText's temp", _gib),
    "step_s": ("published s", "{:.3f}".format),
    "maxtext_predicted_s": ("predicted s", "{:.3f}".format),
}


def main(argv: list[str] | None = None) -> int:
    """Compiles, prints and writes, and returns the exit code. `--bytes` is short for `--parts bytes`."""
    argv = [
        part
        for word in (sys.argv[1:] if argv is None else argv)
        for part in (("--parts", "bytes") if word == "--bytes" else (word,))
    ]
    return run_experiment("published", Flags, argv, MEASURES, lambda column: SHOWN.get(column, (column, str)))


if __name__ == "__main__":
    sys.exit(main())
