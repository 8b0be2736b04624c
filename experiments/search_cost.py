"""What an answer costs, in compiles and seconds: `python -m experiments.search_cost`.

All steps are compiled for a GPU that isn't in the machine. So the seconds are those of this machine's CPU. There are four
parts, all timed in one run:

* help: the time of `--help`.
* first-row: the time until the command's first row.
* depth: the compile time of a deep model against that of a shallow one.
* search: the compiles and seconds to find the largest batch of several policies. jaxremat's search is compared with plain
  bisection (Python's `bisect` over 1..4096). Both get the bytes from the same function, and take turns.
"""

import bisect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from experiments.common import RESULTS, compile_step, flags_of, set_up, spread, write
from jaxremat.config import TrainConfig
from jaxremat.model.presets import preset
from jaxremat.xla.results import SIZE

Part = Literal["help", "first-row", "depth", "search"]


@dataclass(frozen=True)
class Flags:
    """What an answer costs, in compiles and seconds."""

    model: str = "gpt2"
    policies: tuple[str, ...] = (
        "none",
        "everything",
        "dots",
        "dots+attention",
        "dots-no-batch",
        "nothing",
        "every:4+nothing",
        "one-in:2",
    )
    target: str = "h100-80gb"
    mem_fraction: float = 0.75
    max_batch: int = 4096
    layers: tuple[int, int] = (12, 96)
    repeats: int = 3
    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    out: Path = RESULTS


def time_command(*argv: str, until_first_line: bool = False) -> float:
    """Seconds until the command `jaxremat.run` ends, or until its first line is on stdout."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "jaxremat.run", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        process.communicate()
        if process.returncode or not line:
            raise SystemExit(f"{' '.join(argv)} ended with exit code {process.returncode}")
        return seconds if until_first_line else time.perf_counter() - started


def measure_help(flags: Flags) -> dict[str, Any]:
    """The seconds of whole processes that print `--help`."""
    return spread([time_command("--help") for _ in range(flags.repeats)])


def measure_first_row(flags: Flags) -> dict[str, Any]:
    """The seconds from the start of the process to the first record of `--policy dots --batch 8`."""
    argv = ["--model", flags.model, "--policy", "dots", "--batch", "8", "--target", flags.target, "--json"]
    return spread([time_command(*argv, until_first_line=True) for _ in range(flags.repeats)])


def measure_depth(flags: Flags) -> dict[str, Any]:
    """The seconds of lowering and compiling under `dots` at both depths, which take turns. One compile before warms up."""
    from jaxremat.chips.target import load_target

    target, chosen = load_target(flags.target), preset(flags.model)
    train = TrainConfig(seq_len=chosen.seq_len)

    def seconds(layers: int) -> float:
        done = compile_step(replace(chosen.config, num_layers=layers), train, "dots", 8, target)
        return done.lower_s + done.compile_s

    shallow, deep = flags.layers
    seconds(shallow)
    pairs = [(seconds(shallow), seconds(deep)) for _ in range(flags.repeats)]
    timed = {"shallow": spread([a for a, _ in pairs]), "deep": spread([b for _, b in pairs])}
    return {"layers": flags.layers, **timed, "ratio": timed["deep"]["median_s"] / timed["shallow"]["median_s"]}


def measure_search(flags: Flags) -> dict[str, Any]:
    """For each policy, both searches without a cache of compiles. The two searches alternate in going first."""
    from jaxremat.chips.target import load_target
    from jaxremat.search.batch import largest_batch
    from jaxremat.search.budget import make_budget

    target, chosen = load_target(flags.target), preset(flags.model)
    train = TrainConfig(seq_len=chosen.seq_len)
    budget = make_budget(requested_bytes=None, mem_fraction=flags.mem_fraction, memory_bytes=target.memory_bytes).num_bytes
    batches = range(1, flags.max_batch + 1)

    def timed(search: Callable[[Callable[[int], int]], int], policy: str) -> dict[str, Any]:
        compiled: list[int] = []

        def total_bytes(batch: int) -> int:
            compiled.append(batch)
            return compile_step(chosen.config, train, policy, batch, target).memory.total_bytes

        started = time.perf_counter()
        answer = search(total_bytes)
        seconds = time.perf_counter() - started
        return {"largest_batch": answer, "num_compiles": len(compiled), "seconds": seconds, "batches": compiled}

    searches: dict[str, Callable[[Callable[[int], int]], int]] = {
        "ours": lambda total_bytes: largest_batch(total_bytes, budget, batches=batches).largest,
        "bisection": lambda total_bytes: bisect.bisect_right(batches, budget, key=total_bytes),
    }
    rows = []
    for number, policy in enumerate(flags.policies):
        order = list(searches)[:: 1 if number % 2 else -1]
        row = {"policy": policy, **{name: timed(searches[name], policy) for name in order}}
        rows.append(row)
        print(f"{policy}: {row['ours']['seconds']:.1f} s against {row['bisection']['seconds']:.1f} s", file=sys.stderr)
    sums = {name: sum(row[name]["seconds"] for row in rows) for name in searches}
    return {"budget_bytes": budget, "policies": rows, "seconds": sums, "times_faster": sums["bisection"] / sums["ours"]}


MEASURES: dict[Part, Callable[[Flags], dict[str, Any]]] = {
    "help": measure_help,
    "first-row": measure_first_row,
    "depth": measure_depth,
    "search": measure_search,
}


def report(result: dict[str, Any], flags: Flags, console: Console) -> None:
    """Prints the goals, each beside its measured value, and then both searches for each policy."""
    goals = Table("what", "goal", "measured", title="what an answer costs", title_justify="left")
    if "help" in result:
        goals.add_row("--help", "", f"{result['help']['median_s']:.2f} s")
    if "first-row" in result:
        goals.add_row("first row", "< 12 s", f"{result['first-row']['median_s']:.1f} s")
    if "depth" in result:
        shallow, deep = flags.layers
        goals.add_row(f"compile at {deep} layers against {shallow}", "<= 1.2 x", f"{result['depth']['ratio']:.2f} x")
    if "search" in result:
        search = result["search"]
        most = max(row["ours"]["num_compiles"] for row in search["policies"])
        goals.add_row("compiles a policy, at most", "<= 4", str(most))
        goals.add_row("faster than bisection", ">= 3 x", f"{search['times_faster']:.1f} x")
    console.print(goals)
    if "search" in result:
        table = Table("policy", "largest", "compiles", "seconds", "bisection", "compiles", "seconds")
        for row in result["search"]["policies"]:
            sides = [row[side] for side in ("ours", "bisection")]
            cells = [(str(s["largest_batch"]), str(s["num_compiles"]), f"{s['seconds']:.1f}") for s in sides]
            table.add_row(row["policy"], *(cell for side in cells for cell in side))
        console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the flags ask for, and returns the exit code. Each part is on disk before the next begins."""
    flags = flags_of(Flags, argv, "experiments.search_cost")
    set_up()
    os.environ[SIZE] = "0"  # each step is compiled
    result: dict[str, Any] = {"model": flags.model, "target": flags.target}
    path = flags.out / flags.target / "search_cost.json"
    for part in flags.parts:
        print(f"{part} ...", file=sys.stderr)
        result[part] = MEASURES[part](flags)
        write(path, result)
    report(result, flags, Console())
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
