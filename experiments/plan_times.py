"""How long a whole command takes that plans, with nothing compiled before: `python -m experiments.plan_times`.

All steps are compiled for GPUs that aren't in the machine. So the seconds are those of this machine's CPU. Each command runs in a
process of its own, whose store of XLA's results is empty at first. There are two parts:

* plans: `jaxremat run --policy auto` for one GPU, for a node and for a cluster. Beside the seconds of the command are those in
  which the step of the answer alone is traced and compiled. No answer can come sooner, because each answer is compiled.
* recommend: `jaxremat recommend` over all GPUs, and over five of them in four numbers.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, run_experiment, show_by, spread

Part = Literal["plans", "recommend"]
Row = dict[str, Any]

#: The commands of each part.
PLANS = (
    "run --model gpt2 --policy auto --target h100-80gb",
    "run --model llama3-8b --policy auto --target h100-80gb --devices 8 --mesh auto",
    "run --model llama3-70b --policy auto --target h100-80gb --devices 256 --mesh auto",
)
RECOMMEND = (
    "recommend --model llama3.2-1b --seq-len 4096 --devices 1,8",
    "recommend --model llama3-8b --devices 1,8,16,64 --target a100-80gb h100-80gb h200 b200 gb200",
)


@dataclass(frozen=True)
class Flags:
    """How long a whole command takes that plans, with nothing compiled before."""

    repeats: int = 3
    target: str = "h100-80gb"
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def timed(command: str) -> tuple[float, list[Row]]:
    """The seconds of a command, and the records that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "jaxremat", *shlex.split(command), "--json"],
            env=os.environ | {"XDG_CACHE_HOME": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"jaxremat {command} ended with exit code {done.returncode}")
        return time.perf_counter() - started, [json.loads(line) for line in done.stdout.splitlines()]


def measured(command: str, repeats: int) -> tuple[Row, list[Row]]:
    """The seconds of some runs of a command, and the records of the last one."""
    runs = [timed(command) for _ in range(repeats)]
    return {"command": command, **spread([seconds for seconds, _ in runs])}, runs[-1][1]


def measure_plans(flags: Flags) -> Iterator[Row]:
    """The seconds of each command, its compiles, and its answer with the seconds of that step alone."""
    for command in PLANS:
        row, records = measured(command, flags.repeats)
        *_, trial = (one for one in records if one["record"] == "trial")
        num_compiles = sum(one["num_compiles"] for one in records if one["record"] in ("mesh_choice", "plan"))
        answer = {key: trial[key] for key in ("batch", "mesh", "layout", "total_bytes", "tokens_per_s")}
        yield {**row, "num_compiles": num_compiles, **answer, "answer_s": trial["lower_s"] + trial["compile_s"]}


def measure_recommend(flags: Flags) -> Iterator[Row]:
    """The seconds of each command, and how many of its rows were compiled."""
    for command in RECOMMEND:
        row, records = measured(command, flags.repeats)
        left_out = sum(one["bound_tokens_per_s"] is not None for one in records)
        yield {**row, "num_rows": len(records) - left_out, "num_left_out": left_out}


#: By part, the function that measures it, how many of its first columns are words, and the columns of its table.
MEASURES: dict[Part, tuple[Callable[[Flags], Iterator[Row]], int, tuple[str, ...]]] = {
    "plans": (
        measure_plans,
        1,
        ("command", "median_s", "min_s", "max_s", "answer_s", "num_compiles", "batch", "tokens_per_s"),
    ),
    "recommend": (measure_recommend, 1, ("command", "median_s", "min_s", "max_s", "num_rows", "num_left_out")),
}
SHOWN = {
    name: (title, lambda value: f"{value:.0f}")
    for name, title in (("median_s", "median s"), ("min_s", "min s"), ("max_s", "max s"), ("answer_s", "its step s"))
}


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code."""
    return run_experiment("plan_times", Flags, argv, MEASURES, show_by(SHOWN))


if __name__ == "__main__":
    sys.exit(main())
