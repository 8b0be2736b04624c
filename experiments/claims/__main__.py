"""Checks what articles and papers say about rematerialization: `python -m experiments.claims [--claims NAME ...]`.

All steps are compiled for GPUs that aren't in the machine. Nothing is run, and no GPU is needed. A step that was measured
before, with the same versions and by the same function of `steps.py`, isn't measured again, so that an interrupted run goes on
where it stopped. A change inside jaxremat isn't noticed: it needs --fresh. Two claims that ask for the same step share its row.
At the end the page and its plots are written again.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.claims.claim import Claim, Size, steps_of
from experiments.claims.draw import check_drawing
from experiments.claims.every import CLAIMS
from experiments.claims.page import rows_of, write_page
from experiments.claims.steps import TARGETS, key_of, measured
from experiments.common import RESULTS, set_up, write
from jaxremat.command import parse_flags, run_command
from jaxremat.errors import UsageError, nearest
from jaxremat.files import named_by

PAGE = Path(__file__).parent.parent.parent / "docs/claims.md"


@dataclass(frozen=True)
class Flags:
    """What articles and papers say about rematerialization, each claim reproduced or refuted."""

    claims: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = tuple(CLAIMS)
    """Which claims; without a name after it, only the page is written again, from the filed results."""
    size: Size = "full"
    """tiny: each claim in seconds, on toy models, to see that everything works; needs --out."""
    fresh: bool = False
    """Measure again what was measured before."""
    out: Path | None = None
    """Folder for the results, the page and the plots, instead of the repository's own places."""


def main(argv: list[str] | None = None) -> int:
    """Measures, judges and files the claims, and returns the exit code."""
    flags = parse_flags(Flags, sys.argv[1:] if argv is None else argv, "experiments.claims")
    return run_command(lambda: _do(flags), name="experiments.claims", kept="the rows so far are filed")


def _do(flags: Flags) -> int:
    """Measures, judges and files the claims, and writes the page."""
    _check(flags)
    set_up()
    results, page = (flags.out, flags.out / "claims.md") if flags.out else (RESULTS / "claims", PAGE)
    known = {} if flags.fresh else known_rows(results)
    for claim in (CLAIMS[name] for name in flags.claims):
        began = time.monotonic()
        result = _measure(claim, flags.size, known, results / f"{claim.name}.json")
        found = claim.judge(rows_of(result, TARGETS[0]))
        print(f"{claim.name:18} {time.monotonic() - began:6.1f} s  {found.verdict}: {found.ours}", flush=True)
    write_page(page, PAGE.read_text(), filed_claims(results, flags.size))
    print(f"written to {page}")
    return 0


def filed_claims(results: Path, size: Size = "full") -> list[tuple[Claim, dict[str, Any]]]:
    """The claims whose results are whole, with their files' contents, in the page's order."""
    read = [(claim, _read(results / f"{claim.name}.json")) for claim in CLAIMS.values()]
    return [
        (claim, found)
        for claim, found in read
        if [row["asked"] for row in found["rows"]] == [asked.asked() for asked in steps_of(claim, size)]
    ]


def _measure(claim: Claim, size: Size, known: dict[str, Any], path: Path) -> dict[str, Any]:
    """Measures the steps that aren't known yet. The file is written after each of them, so that no row is lost."""
    result: dict[str, Any] = {"size": size, "rows": []}
    steps = steps_of(claim, size)
    for n, asked in enumerate(steps):
        key = key_of(asked)
        if (name := json.dumps(key, sort_keys=True)) not in known:
            print(f"{claim.name}: {n + 1} of {len(steps)}: {asked.asked()}", file=sys.stderr)
            known[name] = measured(asked)
        result["rows"].append({"asked": key["asked"], "source": key["source"], "found": known[name]})
        write(path, result)
    return result


def known_rows(results: Path) -> dict[str, Any]:
    """By key, the rows of all filed claims."""
    found = {}
    for result in map(_read, sorted(results.glob("*.json"))):
        for row in result["rows"]:
            key = {"asked": row["asked"], "source": row["source"], "versions": result["versions"]}
            found[json.dumps(key, sort_keys=True)] = row["found"]
    return found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def _check(flags: Flags) -> None:
    """Checks the flags before anything is measured.

    Raises:
        UsageError: there is no such claim, toy results would replace the repository's, or the folder can't be written.
        MissingDependencyError: matplotlib isn't installed.
    """
    check_drawing()
    for name in flags.claims:
        if name not in CLAIMS:
            raise UsageError(
                f"unknown claim {name!r}", allowed=", ".join(CLAIMS), next_step=nearest(name, CLAIMS) or "choose one of them"
            )
    if flags.size == "tiny" and flags.out is None:
        raise UsageError(
            "--size tiny would replace the filed results by those of toy models",
            allowed="--size tiny with a folder of its own",
            next_step="add --out FOLDER",
        )
    if flags.out:
        with named_by("--out", flags.out, "give a folder that is yours", UsageError):
            flags.out.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
