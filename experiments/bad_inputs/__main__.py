"""Does every bad input end as it should? `python -m experiments.bad_inputs [--kinds AREA_OR_KIND ...] [--count N] [--seed S]`.

There are kinds of inputs (`KINDS`), each with a function that draws one: flags, files, models, stores and what surrounds a
command. The command runs on each, and its ending is compared with the expected exit code and with the `RULES` of every ending: no
traceback, no hang, one message with a next step, files as they were. Some kinds draw inputs that only look odd, and exit
code 0 is expected.

Without --seed a seed is drawn, and printed. Filed are, by kind, the number of draws, the exit codes and the failures.
"""

import random
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from experiments.bad_inputs import (  # noqa: F401  # they register their kinds
    contradictions,
    files,
    flags,
    models,
    signals,
    stores,
    surroundings,
    values,
)
from experiments.bad_inputs.case import AREAS, KINDS, Kind, problems_of
from experiments.common import RESULTS, Row, other_parts, set_up, write
from jaxremat.cli.command import parse_flags, run_command
from jaxremat.errors import UsageError, nearest, printable
from jaxremat.report.table import list_table

#: The checkout, whose place isn't filed.
_ROOT = Path(__file__).parents[2]
#: How much of a message is filed where a case fails.
_SAID = 600


@dataclass(frozen=True)
class Options:
    """Draws bad inputs, runs the command on each, and checks that each ends as it should."""

    kinds: Annotated[tuple[str, ...], Parameter(metavar="AREA_OR_KIND [AREA_OR_KIND ...]")] = ()
    """Only these. By default all."""
    count: int = 25
    """Draws of each kind."""
    seed: int | None = None
    """Of what is drawn. By default one is drawn."""
    out: Path = RESULTS


def chosen(names: tuple[str, ...]) -> list[Kind]:
    """The kinds of these names and areas. All if there is no name.

    Raises:
        UsageError: there is no such kind or area.
    """
    known = [*AREAS, *KINDS]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--kinds got {name!r}", allowed=", ".join(known), next_step=nearest(name, known) or f"--kinds {known[0]}"
            )
    return [one for one in KINDS.values() if not names or one.name in names or one.area in names]


def checked(one: Kind, seed: int, count: int) -> Row:
    """The row of a kind: how its cases ended, and those that ended otherwise than they should."""
    codes, failures, seconds = Counter[str](), list[Row](), 0.0
    for n in range(count):
        with tempfile.TemporaryDirectory(prefix="bad-") as made:
            folder = Path(made)
            case = one.nth(seed, n, folder)
            ended = case.run(case, folder)
            problems = problems_of(case, ended)
            codes[str(ended.exit_code)] += 1
            seconds = max(seconds, ended.seconds)
            if problems:
                said = printable(ended.stderr.replace(made, ".").replace(f"{_ROOT}/", ""))
                said = said if len(said) < _SAID else f"{said[: _SAID // 2]} [...] {said[-_SAID // 2 :]}"
                failures.append({"n": n, "command": _typed(case.command, made), "problems": problems, "stderr": said})
    found = {"kind": one.name, "area": one.area, "draws": count, "exit_codes": dict(sorted(codes.items()))}
    return found | {"failures": failures, "longest_s": round(seconds, 1)}


def _typed(command: tuple[str, ...], folder: str) -> str:
    """The command as one types it, with long values cut."""
    words = [word if len(word) < 200 else f"{word[:100]}[{len(word)} characters]" for word in command]
    return printable(shlex.join(words).replace(folder, "."))


def rows_of(kinds: list[Kind], seed: int, count: int) -> Iterator[Row]:
    """Yields the row of each kind, and prints each failure at once."""
    for n, one in enumerate(kinds, 1):
        row = checked(one, seed, count)
        print(f"{n} of {len(kinds)}: {one.name}: {len(row['failures'])} failures", file=sys.stderr, flush=True)
        for failure in row["failures"]:
            print(f"{one.name} {failure['n']}: {failure['command']}\n    {'; '.join(failure['problems'])}")
            print("    " + ascii(failure["stderr"]), flush=True)
        yield row


def work(options: Options) -> int:
    """Checks the kinds, files each row, prints the table, and returns 1 if a case ended otherwise than it should."""
    set_up()
    import importlib.metadata

    kinds = chosen(options.kinds)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}")
    path = options.out / "bad_inputs" / f"jax-{importlib.metadata.version('jax')}.json"
    filed = other_parts(path, ("seed", "kinds"))
    before = {row["kind"]: row for row in filed.get("kinds", [])} if filed.get("seed") == seed else {}
    rows: dict[str, Row] = {}
    for row in rows_of(kinds, seed, options.count):
        rows[row["kind"]] = row
        found = {**before, **rows}
        write(path, {"seed": seed, "kinds": [found[name] for name in KINDS if name in found]})
    cells = [
        [
            row["area"],
            row["kind"].replace("_", " "),
            str(row["draws"]),
            ", ".join(f"{code}: {times}" for code, times in row["exit_codes"].items()),
            str(len(row["failures"])),
            str(row["longest_s"]),
        ]
        for row in rows.values()
    ]
    titles = ("area", "kind", "draws", "exit codes", "failures", "longest s")
    Console().print(list_table("bad inputs", titles, cells, left=2))
    num_draws, num_failures = sum(row["draws"] for row in rows.values()), sum(len(row["failures"]) for row in rows.values())
    print(f"{num_draws - num_failures} of {num_draws} inputs of seed {seed} end as they should; written to {path}")
    return int(num_failures > 0)


def main(argv: list[str] | None = None) -> int:
    """Checks what is drawn, and returns the exit code: 1 if a case ended otherwise than it should."""
    options = parse_flags(Options, sys.argv[1:] if argv is None else argv, "experiments.bad_inputs")
    return run_command(lambda: work(options), name="experiments.bad_inputs")


if __name__ == "__main__":
    sys.exit(main())
