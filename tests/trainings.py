"""What the tests of trainings share: a workload that compiles in no time, and a run of it."""

from pathlib import Path
from typing import Any

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.train import TrainRunFlags, check_train, main, train
from jaxremat.errors import JaxrematError
from jaxremat.training.metrics import read_metrics
from tests.arguments import once

#: A workload that compiles in no time, with random keys, and with batches that end after 40. It sends itself a signal, or
#: takes its time for a batch, if it is told to.
OWN = """
import os, signal, time, jax, jax.numpy as jnp, numpy as np, jaxremat

def loss(params, batch, key):
    hidden = jnp.tanh(batch @ params["in"]) * jax.random.uniform(key, (32,))
    return jnp.mean(jnp.square(hidden @ params["out"] - batch))

def batches(batch):
    for number in range(40):
        if number == int(os.environ.get("STOPS_AT", -1)):
            signal.raise_signal(getattr(signal, os.environ["STOPS_BY"]))
        time.sleep(float(os.environ.get("BATCH_S", 0)))
        yield np.random.default_rng(number).standard_normal((batch, 32), np.float32)

def workload(batch: int = 4):
    params = {name: np.random.default_rng(n).standard_normal((32, 32), np.float32) for n, name in enumerate(("in", "out"))}
    return jaxremat.Workload(loss=loss, params=params, batch=next(batches(batch)), batches=lambda: batches(batch))
"""


def own_flags(folder: Path) -> tuple[str, ...]:
    """The flags that train the workload, which is written to a file in `folder`."""
    path = folder / "mine.py"
    path.write_text(OWN)
    return ("--model", f"{path}:workload", "--policy", "none", "--target", "cpu", "--checkpoint-every", "4")


def trained(folder: Path, *argv: str, code: int = 0) -> list[dict[str, Any]]:
    """The metrics of a run in `folder`."""
    assert main(once(*argv, "--run-dir", str(folder))) == code
    return read_metrics(folder / "metrics.jsonl")


def error_of(*argv: str) -> JaxrematError:
    """The error with which a training ends."""
    with pytest.raises(JaxrematError) as caught:
        train(check_train(parse_flags(TrainRunFlags, once(*argv))))
    return caught.value


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]
