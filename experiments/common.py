"""What the experiments share: setting up the process to compile without a GPU, one compile, and writing the results.

A file of results holds the versions and the machine that the results were made with. It has a row a line.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from jaxremat.cli.command import parse_flags, run_command
from jaxremat.errors import UsageError, nearest
from jaxremat.report.table import list_table
from jaxremat.system.files import write_whole

if TYPE_CHECKING:
    from jaxremat.chips.target import Target
    from jaxremat.config import ModelConfig, TrainConfig
    from jaxremat.xla.compile import Compilation

FlagsT = TypeVar("FlagsT")
#: A function from a column's name to the column's title and the function that makes a cell's text.
Show = Callable[[str], tuple[str, Callable[[Any], str]]]
#: By part, the function that measures it, how many of its first columns are words, and its columns.
Measures = Mapping[Any, tuple[Callable[[Any], Iterable[Any]], int, tuple[str, ...]]]
#: A row of results: by column, what was found.
Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
#: Significant digits of the floats in a file of results: those of float32. Predicted and measured times have fewer.
DIGITS = 7
PROFILES = Path(__file__).parent / "profiles"


def set_up() -> None:
    """Sets the environment, before JAX is imported, to compile without a GPU and to print no XLA log."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def machine() -> dict[str, Any]:
    """The machine that the compile times were measured on: `{"cpu": "Intel(R) Xeon(R) ...", "cores": 2}`."""
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
    """Compiles the training step, with its state donated.

    Args:
        model: the model.
        train: the training step's settings.
        policy: the policy's text.
        batch: sequences in the step.
        target: the GPU to compile for.
        options: XLA's compile options. They override jaxremat's own.
    """
    from jaxremat.model.attention import choose_attention
    from jaxremat.model.decoder_workload import decoder_workload
    from jaxremat.policy.grammar import parse
    from jaxremat.step.step import abstract_args, make_step
    from jaxremat.xla.compile import lower_and_compile

    attention = choose_attention(model, train.seq_len, target).implementation
    workload = decoder_workload(model, train, batch, attention)
    step = make_step(workload, train, parse(policy))
    return lower_and_compile(step, abstract_args(workload, train), target, donate_argnums=0, options=options)


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """The median, minimum and maximum of some timings in seconds, and their number."""
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds), "runs": len(seconds)}


def flags_of(kind: type[FlagsT], argv: Sequence[str] | None, prog: str) -> FlagsT:
    """The flags of an experiment. A wrong one ends the process with a message and exit code 2.

    Args:
        kind: the dataclass of its flags.
        argv: the arguments, or None for those of this process.
        prog: the experiment's name.
    """
    try:
        return parse_flags(kind, sys.argv[1:] if argv is None else argv, prog)
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def run_experiment(
    name: str, kind: type[Any], argv: Sequence[str] | None, measures: Measures, show: Show, unfiled: Sequence[str] = ()
) -> int:
    """Reads the flags of an experiment, does its parts as `run_parts` does, and returns the exit code.

    Args:
        name: the experiment's name.
        kind: the dataclass of its flags, with the fields `parts`, `target` and `out`.
        argv: the arguments, or None for those of this process.
        measures: as in `run_parts`.
        show: as in `run_parts`.
        unfiled: as in `run_parts`.
    """
    prog = f"experiments.{name}"
    flags = flags_of(kind, argv, prog)

    def work() -> int:
        set_up()
        from jaxremat.chips.target import load_target

        load_target(flags.target)  # a target that isn't there is said before anything is written
        return run_parts(name, flags, measures, show, unfiled)

    return run_command(work, name=prog, saved=f"the rows so far are in {flags.out}")


def run_parts(name: str, flags: Any, measures: Measures, show: Show, unfiled: Sequence[str] = ()) -> int:
    """Measures the parts that `flags` ask for, prints each part as a table, and returns the exit code.

    Each row is written to disk before the next one is measured.

    Args:
        name: the name of the results' file.
        flags: an object with the fields `parts`, `target` and `out`.
        measures: by part, the function that measures it, how many of its first columns are words, and its columns.
        show: gives a column's title and the function that makes a cell's text.
        unfiled: columns that are printed and not filed.

    Raises:
        UsageError: there is no such part.
    """
    set_up()
    for part in flags.parts:
        if part not in measures:
            next_step = nearest(part, measures) or "choose some of them"
            raise UsageError(f"--parts got {part!r}", allowed=", ".join(measures), next_step=next_step)
    path, console = flags.out / flags.target / f"{name}.json", Console()
    result = other_parts(path, measures)
    for part in flags.parts:
        measure, num_words, columns = measures[part]
        print(f"{part} ...", file=sys.stderr)
        rows, result[part] = [], []
        for row in measure(flags):
            rows.append(row)
            result[part].append({key: value for key, value in row.items() if key not in unfiled})
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
    """The parts that the file `path` already has, if they were made with the same versions on the same machine."""
    found = json.loads(path.read_text()) if path.exists() else {}
    same = {key: found.get(key) for key in ("machine", "versions")} == _made_with()
    return {part: found[part] for part in parts if part in found and same}


def where(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """The rows with these fields: `where(rows, policy="dots", batch=8)`."""
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


def only(rows: Iterable[Row], **fields: Any) -> Row:
    """The one row with these fields."""
    (row,) = where(rows, **fields)
    return row


def markdown_table(titles: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table for a page, a line for each row, with `-` for what is None."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        "| " + " | ".join("-" if cell is None else str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines
    )


def count(number: float, digits: int = 0) -> str:
    """A number with commas: `12,764`."""
    return f"{number:,.{digits}f}"


def ms(seconds: float, digits: int = 0) -> str:
    """Seconds in milliseconds: `7,470`."""
    return count(1e3 * seconds, digits)


def percent(share: float) -> str:
    """A share in percent: `percent(0.413)` is `41 %`. Below 10 it has one digit more."""
    value = 100 * share if abs(share) >= 5e-4 else 0.0
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def signed(share: float) -> str:
    """A share in percent with its sign: `+41 %`."""
    return ("" if percent(share).startswith("-") else "+") + percent(share)


def span(values: Iterable[float], show: Callable[[float], str] = count) -> str:
    """The least and the greatest value: `6 to 10`, `40 to 60 %`, or `4` where they are alike."""
    in_order = sorted(values)
    low, high = show(in_order[0]), show(in_order[-1])
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes `result` with the versions and the machine to `path`. It is called after each row, so that no row is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, results_text({**result, **_made_with()}))


def results_text(result: Mapping[str, Any]) -> str:
    """`result` as JSON: a field a line, and an object a line where a field is a list of objects. Floats have `DIGITS` digits."""
    fields = []
    for name, value in result.items():
        is_rows = isinstance(value, Sequence) and value and all(isinstance(row, Mapping) for row in value)
        text = "[\n" + ",\n".join(map(_compact, value)) + "\n]" if is_rows else _compact(value)
        fields.append(f"{_compact(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def _made_with() -> dict[str, Any]:
    from jaxremat.chips.installed import versions

    return {"machine": machine(), "versions": versions()}
