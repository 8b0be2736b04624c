"""Checks what articles and papers say about rematerialization: `python -m experiments.claims [--claims NAME ...]`.

All steps are compiled for GPUs that aren't in the machine. Nothing is run, and no GPU is needed. A step that is filed with the
same versions isn't measured again, so that an interrupted run resumes. A change of the code isn't noticed: it needs --fresh. The
bytes that a search may take are part of its step. Two claims that ask for the same step share its row.

A person writes the page, `docs/claims.md`, but for its plots and the numbers in its table, which are written at the end.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from experiments.claims import choices, memory, recompute
from experiments.claims.claim import Claim
from experiments.claims.draw import draw
from experiments.claims.steps import DEFAULTS, TARGETS, measured
from experiments.common import RESULTS, Row, flags_of, where, write
from jaxremat.chips.installed import versions
from jaxremat.cli.command import run_command
from jaxremat.errors import UsageError, nearest
from jaxremat.system.files import write_whole

PAGE, FILED = Path(__file__).parent.parent.parent / "docs/claims.md", RESULTS / "claims"
#: By step, what was found of it.
Known = dict[frozenset[Any], Row]
#: By name, in the page's order.
CLAIMS = {name: of for theme in (memory, recompute, choices) for name, of in vars(theme).items() if isinstance(of, Claim)}


@dataclass(frozen=True)
class Flags:
    """What articles and papers say about rematerialization, each claim checked."""

    claims: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = tuple(CLAIMS)
    """Which claims. Steps that are filed are taken from there."""
    fresh: bool = False
    """Measure again what was measured before."""


def main(argv: list[str] | None = None) -> int:
    """Measures and files the claims, writes the page, and returns the exit code."""
    flags = flags_of(Flags, argv, "experiments.claims")
    return run_command(lambda: _do(flags), name="experiments.claims", saved="the rows so far are filed")


def _do(flags: Flags) -> int:
    for name in flags.claims:
        if name not in CLAIMS:
            next_step = nearest(name, CLAIMS) or "choose one of them"
            raise UsageError(f"unknown claim {name!r}", allowed=", ".join(CLAIMS), next_step=next_step)
    known = {} if flags.fresh else known_rows()
    for name in flags.claims:
        measure(CLAIMS[name], known)
    text = PAGE.read_text()
    for claim in CLAIMS.values():
        if rows := filed_rows(claim):
            before, text = text, written(text, claim, rows)
            if text != before:
                print(f"{claim.name}: other numbers than on the page: judge it again, with a new date")
            draw(claim.found(where(rows, target=TARGETS[0]))[1], claim.title, PAGE.with_suffix("") / f"{claim.name}.png")
    write_whole(PAGE, text)
    print(f"written to {PAGE}")
    return 0


def known_rows(results: Path = FILED) -> Known:
    """By step, what the files with today's versions have found of it."""
    known: Known = {}
    for claim in CLAIMS.values():
        filed = _read(claim, results)
        for step, found in map(claim.split, filed["rows"] if filed.get("versions") == versions() else ()):
            known.setdefault(frozenset(step.items()), {}).update(found)
    return known


def measure(claim: Claim, known: Known, results: Path = FILED) -> None:
    """Measures the steps that aren't known yet. The file is written after each of them, so that no row is lost."""
    fields = (*claim.reads, "took_s")
    steps = [(step, known.setdefault(frozenset(step.items()), {})) for step in claim.all_steps()]
    missing = [(step, found) for step, found in steps if not found.keys() >= {*fields}]
    for n, (step, found) in enumerate([*missing, ({}, {})], 1):
        if step:
            print(f"{claim.name}: {n} of {len(missing)}: {step}", file=sys.stderr)
            found.update(dict.fromkeys(fields) | measured(step))
        rows = [{**one, **{name: row[name] for name in fields}} for one, row in steps if row.keys() >= {*fields}]
        write(results / f"{claim.name}.json", {"rows": rows})


def filed_rows(claim: Claim, results: Path = FILED) -> list[Row]:
    """The filed rows of a claim, with all fields. None if they aren't those of its steps."""
    rows = _read(claim, results)["rows"]
    is_whole = [claim.split(row)[0] for row in rows] == claim.all_steps()
    return [{**DEFAULTS, **row} for row in rows] if is_whole else []


def written(page: str, claim: Claim, rows: list[Row]) -> str:
    """The page with the numbers of a claim, one for each target, in the row of its table that begins with the claim's title."""
    first, *others = (claim.found(where(rows, target=target))[0] for target in TARGETS)
    cells = [first, *("the same" if number == first else number for number in others)]
    lines = page.splitlines(keepends=True)
    [at] = [n for n, line in enumerate(lines) if line.startswith(f"| [{claim.title}](#")]
    title, says, *_, verdict = lines[at].split(" | ")
    lines[at] = " | ".join([title, says, *cells, verdict])
    return "".join(lines)


def _read(claim: Claim, results: Path) -> Row:
    path = results / f"{claim.name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


if __name__ == "__main__":
    sys.exit(main())
