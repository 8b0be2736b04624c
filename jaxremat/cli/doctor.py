"""The command `jaxremat doctor`: what is installed and usable, and which problems there are.

It changes nothing. For each problem it prints a remedy to type.

Exit codes: 0 no problem (there may be notes), 1 a problem, 2 usage, 130 interrupted.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxremat.cli.command import flags_command
from jaxremat.cli.machine.facts import PROBE_LIMIT_S, Facts, collect
from jaxremat.errors import bad_value

if TYPE_CHECKING:
    from jaxremat.report.doctor import Row


@dataclass(frozen=True)
class DoctorFlags:
    """What is installed and usable, what is in the way, and what to type to mend it.

    Changes nothing. JAX is tried out in child processes, so that a broken installation is reported and does not crash this.
    """

    json: bool = False
    """Print one JSON object instead: rows, facts, usable."""
    limit: float = PROBE_LIMIT_S
    """Seconds after which a child process that doesn't answer is ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return flags_command(DoctorFlags, argv, "doctor", _doctor)


def _doctor(flags: DoctorFlags) -> int:
    if not flags.limit > 0:
        raise bad_value("--limit", f"{flags.limit:g}", "a number above 0")
    from jaxremat.cli.machine.checks import run_checks
    from jaxremat.report.progress import Progress
    from jaxremat.report.screen import shared_screen

    with Progress(shared_screen().progress) as progress:
        facts = collect(progress.show, flags.limit)
    rows = run_checks(facts)
    (show_json if flags.json else show)(facts, rows)
    return int(any(row.state == "problem" for row in rows))


def show(facts: Facts, rows: "list[Row]") -> None:
    """Prints the table of checks, whether there is a problem, and the remedies to type."""
    from jaxremat.report.doctor import doctor_table, remedies, verdict
    from jaxremat.report.screen import print_text, shared_screen

    console = shared_screen().results
    console.print(doctor_table(rows))
    print_text(console, verdict(rows))
    if lines := remedies(rows):
        console.print("What to type:")
        for line in lines:
            console.print(line, soft_wrap=True)


def show_json(facts: Facts, rows: "list[Row]") -> None:
    """Prints the checks and the facts that they are based on, as one JSON object for a program."""
    usable = not any(row.state == "problem" for row in rows)
    found = {"usable": usable, "rows": [dataclasses.asdict(row) for row in rows], "facts": dataclasses.asdict(facts)}
    print(json.dumps(found))
