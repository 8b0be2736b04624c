"""Articles: the optimizer's state, and what lighter optimizers save."""

from collections.abc import Sequence
from typing import get_args

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import Step, step
from experiments.claims.words import gib, ms, percent, saved
from experiments.common import only
from jaxremat.config import Optimizer

#: Bytes of a parameter itself in float32.
PARAMETER = 4


def steps(size: Size) -> list[Step]:
    """The same step with each optimizer."""
    preset, every = ("gpt2", get_args(Optimizer)) if size == "full" else ("tiny", ("adamw",))
    return [step(policy="nothing", batch=8, loss="chunked", optimizer=name, preset=preset) for name in every]


def state(row: Row) -> float:
    """Bytes of the optimizer's state for each parameter. The batch's tokens are among them, and are negligible."""
    return row["argument_bytes"] / row["num_params"] - PARAMETER


def judge(rows: Sequence[Row]) -> Judgement:
    """The bytes of the state a parameter, and of the whole step."""
    adam = only(rows, optimizer="adamw")
    table = [("optimizer", "state, bytes a parameter", "total", "saved", "predicted")]
    table += [
        (row["optimizer"], f"{state(row):.2f}", gib(row["total_bytes"]), percent(saved(row, adam)), ms(row["step_s"]))
        for row in rows
    ]
    least = min(rows, key=lambda row: row["total_bytes"])
    sentences = (
        f"adamw keeps {state(adam):.1f} bytes a parameter beside the parameter's own {PARAMETER}.",
        f"{least['optimizer']} takes the fewest bytes, {percent(saved(least, adam))} fewer than adamw. As it is set here, it "
        "keeps no momentum.",
        "An Adam with a state of 8 bits isn't among them. optax 0.2.8 has none, and of packages for JAX one was found, "
        "flashoptim-jax, with a single release.",
    )
    lighter = all(state(row) < state(adam) for row in rows if row is not adam)
    verdict = "holds" if abs(state(adam) - 8) < 0.2 and lighter else "refuted"
    ours = f"adamw {state(adam):.1f} bytes a parameter; {least['optimizer']} {state(least):.2f}"
    return Judgement(ours, verdict, sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """State and temporaries by optimizer."""
    kinds = {"parameters and state": "argument_bytes", "temporaries": "temp_bytes"}
    series = {label: [(row["optimizer"], row[name] / 2**30) for row in rows] for label, name in kinds.items()}
    return Picture("", "GiB", series, kind="stack")


CLAIM = Claim(
    name="optimizers",
    title="The optimizer's state",
    source="articles",
    says="Adam keeps two numbers for each parameter, 8 bytes in float32, and lighter optimizers save a part of them",
    on="gpt2 at batch 8 of 1024 tokens under `nothing`, chunked loss, in a loop, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
