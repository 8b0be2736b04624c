"""Kills trainings at random moments and lets them go on: are the losses the same bit for bit, and is a checkpoint always whole?

`python -m experiments.kill_train --kills 20`: the real command trains a small decoder with dropout. Each kill is a SIGKILL, and
a checkpoint is written every few steps, so that some kills come while one is written. A training that reached its last step is
compared with one that nobody killed, and the next one begins.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from experiments.common import RESULTS, flags_of, write

STEPS = 300
COMMAND = (
    *(
        "-m",
        "jaxremat",
        "train",
        "--model",
        "tiny",
        "--num-layers",
        "1",
        "--seq-len",
        "32",
        "--batch",
        "4",
        "--target",
        "cpu",
    ),
    *("--num-steps", str(STEPS), "--checkpoint-every", "5", "--eval-every", "50", "--eval-batches", "2"),
    *("--sample-tokens", "0", "--policy", "dots"),
)


@dataclass(frozen=True)
class Flags:
    """Kills trainings at random moments and lets them go on."""

    kills: int = 20
    """How many."""
    seed: int = 0
    """Of the moments."""
    model_flags: Annotated[tuple[str, ...], Parameter(metavar="FLAG [FLAG ...]")] = ()
    """Further flags of the training."""
    out: Path = RESULTS


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        after_s: seconds from the start of the process.
        steps_done: the last step in the metrics when the process was dead.
        checkpoint: the newest finished checkpoint then. None if there was none.
        unfinished: whether this kill left the folder of a checkpoint that was being written.
    """

    after_s: float
    steps_done: int
    checkpoint: int | None
    unfinished: bool


@dataclass
class Found:
    """The results.

    Attributes:
        kills: the kills.
        runs: the trainings that were brought to their end.
        compared: the losses that were compared, training and evaluation.
        faults: what a kill broke. It should stay empty.
    """

    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    compared: int = 0
    faults: list[str] = field(default_factory=list)


def kill_trainings(flags: Flags) -> Found:
    """Kills trainings until there were enough kills, and brings the last one to its end.

    Of a training that isn't killed the time until its first step is known, and the time of its steps. Two of three kills come
    after the first new step of a process, within the time of half the steps. The others come before it.
    """
    chance, found = random.Random(flags.seed), Found()
    with tempfile.TemporaryDirectory() as temporary:
        started = time.monotonic()
        reference = Path(temporary, "reference")
        process = _start(flags, reference)
        while not _rows(reference) and process.poll() is None:
            time.sleep(0.05)
        first_step_s = time.monotonic() - started
        process.communicate()
        steps_s = time.monotonic() - started - first_step_s
        expected = _losses(_rows(reference))
        if len(expected) != STEPS:
            raise RuntimeError(f"the training that nobody killed has {len(expected)} steps")
        while len(found.kills) < flags.kills:
            folder = Path(temporary, "run")
            ended = False
            while len(found.kills) < flags.kills and not ended:
                among_steps = chance.random() < 2 / 3
                after_s = chance.uniform(0, steps_s / 2 if among_steps else first_step_s)
                ended = _run(flags, folder, after_s, among_steps, found, expected)
            if not ended:
                _start(flags, folder).communicate()
            _compare(folder, expected, found, whole=True)
            found.runs += 1
            shutil.rmtree(folder)
    return found


def _run(flags: Flags, folder: Path, after_s: float, among_steps: bool, found: Found, expected: list[Any]) -> bool:
    """Starts the training, and kills it some seconds later, or later than its first step. Returns whether it ended before."""
    fewest, unfinished_before = len(_rows(folder)), _unfinished(folder)
    process = _start(flags, folder)
    while among_steps and process.poll() is None and (seen := len(_rows(folder))) <= fewest:
        fewest = seen  # the lines after the last checkpoint are dropped before the first step
        time.sleep(0.01)
    try:
        out, _ = process.communicate(timeout=after_s)
        if process.returncode:
            found.faults.append(f"exit code {process.returncode}: {out[-500:]}")
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    rows, unfinished = _rows(folder), bool(_unfinished(folder) - unfinished_before)
    steps = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    kill = Kill(after_s, rows[-1]["step"] if rows else 0, max(steps, default=None), unfinished)
    found.kills.append(kill)
    print(f"kill {len(found.kills)}: {asdict(kill)}", file=sys.stderr)
    _compare(folder, expected, found, whole=False)
    return False


def _compare(folder: Path, expected: list[Any], found: Found, *, whole: bool) -> None:
    """Notes losses that aren't those of the training that nobody killed, and steps that stand twice or not at all."""
    got = _losses(_rows(folder))
    found.compared += sum(len([loss for loss in row[1:] if loss is not None]) for row in got)
    if got != expected[: len(got)]:
        found.faults.append(f"other losses: {[pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]][:2]}")
    if whole and len(got) != len(expected):
        found.faults.append(f"{len(got)} steps at the end")
    if damaged := list(folder.glob("damaged-*")):
        found.faults.append(f"a checkpoint that wasn't whole: {damaged}")


def _losses(rows: list[dict[str, Any]]) -> list[Any]:
    return [(row["step"], row["loss"], row["eval_loss"]) for row in rows]


def _unfinished(folder: Path) -> set[tuple[str, int]]:
    """The folders of unfinished checkpoints, each with the time of its last change."""
    return {(path.name, path.stat().st_mtime_ns) for path in (folder / "checkpoints").glob("*") if not path.name.isdigit()}


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The finished lines of the metrics."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _start(flags: Flags, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, *COMMAND, *flags.model_flags, "--run-dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(argv: list[str] | None = None) -> int:
    """Kills trainings, files the results and prints them. Returns 1 if there is a fault, 0 otherwise."""
    flags = flags_of(Flags, argv, "experiments.kill_train")
    started = time.monotonic()
    found = kill_trainings(flags)
    path = flags.out / "cpu" / "kill_train.json"
    write(path, {"command": ["python", *COMMAND], "seconds": time.monotonic() - started, **asdict(found)})
    print(
        f"{len(found.kills)} kills in {found.runs} trainings of {STEPS} steps, {found.compared} losses compared, "
        f"{sum(kill.unfinished for kill in found.kills)} kills left a checkpoint unfinished; {len(found.faults)} faults; "
        f"written to {path}"
    )
    for fault in found.faults:
        print(fault)
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
