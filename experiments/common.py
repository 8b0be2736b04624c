"""What the experiments share: the process set up for deviceless compiling, one compile, and results filed with their versions."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxremat.files import write_whole
from jaxremat.report.table import list_table

if TYPE_CHECKING:
    from jaxremat.config import ModelConfig, TrainConfig
    from jaxremat.xla.compile import Compilation
    from jaxremat.xla.target import Target

#: From a column's name, its title and how a value is written.
Show = Callable[[str], tuple[str, Callable[[Any], str]]]
RESULTS = Path(__file__).parent / "results"


def set_up() -> None:
    """Before JAX is imported: compile without a GPU, and without XLA's log."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def machine() -> dict[str, Any]:
    """What the compile times were measured on."""
    names = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"cpu": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0))}


def compile_step(
    model: "ModelConfig",
    train: "TrainConfig",
    policy: str,
    batch: int,
    target: "Target",
    options: dict[str, Any] | None = None,
) -> "Compilation":
    """The donated training step, compiled afresh; `options` are XLA's, and win over ours."""
    from jaxremat.policy.grammar import parse
    from jaxremat.step.step import abstract_args, make_step
    from jaxremat.trial.attention import choose_attention
    from jaxremat.xla.compile import lower_and_compile

    attention = choose_attention(model, train.seq_len, target).implementation
    step = make_step(model, train, parse(policy), attention)
    return lower_and_compile(step, abstract_args(model, train, batch), target, donate_argnums=0, options=options)


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, least and most of some timings."""
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds), "runs": len(seconds)}


def run_parts(
    name: str, flags: Any, measures: Mapping[Any, tuple[Callable[[Any], Iterable[Any]], int, tuple[str, ...]]], show: Show
) -> int:
    """Measures and shows the parts that `flags` ask for; a row is on disk before the next begins, a part then on the screen.

    Args:
        name: of the results' file.
        flags: with `parts`, `target` and `out`.
        measures: by part, its function, how many of its columns are words, and its columns.
        show: a column's title and how its values are written.
    """
    set_up()
    path, console = flags.out / flags.target / f"{name}.json", Console()
    result = other_parts(path, measures)
    for part in flags.parts:
        measure, num_words, columns = measures[part]
        print(f"{part} ...", file=sys.stderr)
        rows = result[part] = []
        for row in measure(flags):
            rows.append(row)
            write(path, result)
        titles, writers = zip(*(show(column) for column in columns), strict=True)
        shown = [
            [
                "-" if row.get(column) is None else written(row[column])
                for column, written in zip(columns, writers, strict=True)
            ]
            for row in rows
        ]
        console.print(list_table(part, titles, shown, left=num_words))
    print(f"written to {path}")
    return 0


def other_parts(path: Path, parts: Iterable[str]) -> dict[str, Any]:
    """The parts that `path` holds already, if they were made with the same versions on the same machine."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = {key: found.get(key) for key in ("machine", "versions")} == _made_with()
    return {part: found[part] for part in parts if part in found and same}


def write(path: Path, result: dict[str, Any]) -> None:
    """Files `result` with versions and machine; called after each row, so that none is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**result, **_made_with()}, indent=1) + "\n")


def _made_with() -> dict[str, Any]:
    from jaxremat.xla.installed import versions

    return {"machine": machine(), "versions": versions()}
