"""The metrics of a training run: one line of JSON for each step.

    {"step": 100, "loss": 2.61, "tokens_per_s": 61200.0, "time_s": 6.8, "samples_per_s": 956.0, "eval_loss": 2.65}

A loss that isn't a finite number is null.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxremat.system.files import named_by, parse_json, write_whole

_FREE_ROOM = "free some room and give the same command again; what was finished is stored"


@dataclass(frozen=True)
class StepMetrics:
    """What is known of one step.

    Attributes:
        step: the number of the step, from 1.
        loss: the training loss before the step's update. None if it is no finite number.
        tokens_per_s: tokens of the step by its seconds. None where nobody counted the tokens of a batch.
        time_s: seconds that the steps took until then, without those of compiling, evaluating and writing.
        samples_per_s: samples of the step by its seconds.
        eval_loss: the evaluation loss after the step's update. None where it wasn't computed.
    """

    step: int
    loss: float | None
    tokens_per_s: float | None
    time_s: float
    samples_per_s: float | None = None
    eval_loss: float | None = None


class MetricsFile:
    """The file of the metrics of a run.

    Args:
        path: the file. None writes nothing.
        upto: the number of the step after which the run resumes. Lines of later steps are dropped, as are lines that a crash
            cut short.

    Attributes:
        time_s: seconds that the steps took so far.
        num_dropped: how many lines of later steps were dropped.

    Raises:
        JaxrematError: the file can't be written.
    """

    def __init__(self, path: Path | None, upto: int) -> None:
        self._path = path
        self.time_s, self.num_dropped = 0.0, 0
        if path is None:
            return
        with named_by("--run-dir", path, _FREE_ROOM):
            rows = read_metrics(path) if path.exists() else []
            before = [row for row in rows if row["step"] <= upto]
            self.time_s, self.num_dropped = before[-1]["time_s"] if before else 0.0, len(rows) - len(before)
            write_whole(path, "".join(json.dumps(row) + "\n" for row in before))

    def append(self, metrics: StepMetrics) -> None:
        """Adds the line of a step.

        Raises:
            JaxrematError: the file can't be written.
        """
        if self._path is None:
            return
        with named_by("--run-dir", self._path, _FREE_ROOM), self._path.open("a") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics, without those that a crash cut short or that are no steps."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int and type(row.get("time_s")) in (int, float):
            numbers = [value for value in row.values() if isinstance(value, int | float)]
            rows += [row] if row["step"] > 0 and all(map(math.isfinite, numbers)) else []
    return rows


def finite(value: float) -> float | None:
    """The value, or None if it is no finite number, which JSON doesn't have."""
    return value if math.isfinite(value) else None
