"""Does a policy change nothing that a program computes? `python -m experiments.equality [--count N] [--seed S]`.

It draws programs of many kinds (`tests/programs.py`), with a policy for each and a way in which its layers are found. Each
program is checked as `tests/program_checks.py` says: the drawn layers are found. The loss, the auxiliary values and the state of
NNX layers are equal to the bit where one operation runs at a time. Compiled for the CPU they and the gradients are equal but for
rounding.

The text of a drawn program builds the program again, so that `--programs "DrawnProgram(...)"` checks the same one. Each process
checks `A_PROCESS` programs. If a process dies, that is one failure, and a new process checks the rest. Filed are how often each
kind of part, way and policy was drawn, the digests of the texts that passed, and the texts and errors of those that failed.
"""

import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from experiments.children import Child, in_processes, run_child
from experiments.common import RESULTS, flags_of, other_parts, set_up, write
from jaxremat.system.process import Deadline

if TYPE_CHECKING:
    from tests.programs import DrawnProgram

Row = dict[str, Any]
#: The number of programs per process. A process has compiled each operation once after the first few programs.
A_PROCESS = 50
#: The time limit, in seconds per program: several times what one program takes.
SECONDS_EACH = 60
#: How many programs Hypothesis draws for one that is taken.
DRAWN_FOR_ONE = 4


@dataclass(frozen=True)
class Flags:
    """Draws programs and checks that a policy changes nothing that they compute."""

    count: int = 500
    """How many."""
    seed: int = 0
    """Of what is drawn."""
    jobs: int = 1
    """Processes at a time."""
    resume: bool = False
    """Keep the programs that an earlier run of this seed filed as ok, and check the others."""
    out: Path = RESULTS
    programs: Annotated[tuple[str, ...], Parameter(metavar="PROGRAM [PROGRAM ...]")] = ()
    """Only these, in this process, a line of JSON each; nothing is filed."""


def draw(seed: int, count: int) -> "list[DrawnProgram]":
    """So many programs, none twice.

    Hypothesis draws some programs that differ in little from the one before. Therefore more are drawn, and some are taken.
    """
    import hypothesis

    from tests.programs import drawn_programs

    drawn: dict[DrawnProgram, None] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=DRAWN_FOR_ONE * count + 10,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
    @hypothesis.given(drawn_programs())
    def collect(program: "DrawnProgram") -> None:
        drawn[program] = None

    collect()
    return random.Random(seed).sample(list(drawn), count)


def check(text: str) -> Row:
    """The row of a program: its outcome, ok or failed, the error, and the seconds that it took."""
    from tests import programs
    from tests.program_checks import check_program

    started, error = time.monotonic(), None
    try:
        check_program(eval(text, {"DrawnProgram": programs.DrawnProgram, "Stack": programs.Stack}))
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        error = f"{type(failure).__name__}: {failure} ({Path(where.filename).name}:{where.lineno})"
    return {"what": text, "outcome": "failed" if error else "ok", "error": error, "seconds": time.monotonic() - started}


def work(flags: Flags) -> int:
    """Checks the programs of --programs in this process. It prints a JSON row for each as soon as it is finished."""
    set_up()
    for text in flags.programs:
        print(json.dumps(check(text)), flush=True)
    return 0


def rows_of(flags: Flags, texts: list[str]) -> Iterator[Row]:
    """The row of each of these programs, checked in processes of `A_PROCESS` programs each."""
    deadline = Deadline(SECONDS_EACH * len(texts))
    quick = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"}

    def run(some: Sequence[str]) -> Child:
        return run_child("experiments.equality", ["--programs", *some], deadline, quick)

    def died(text: str, error: str) -> Row:
        return {"what": text, "outcome": "failed", "error": error, "seconds": None}

    return in_processes(texts, A_PROCESS, flags.jobs, deadline, run, died)


def main(argv: list[str] | None = None) -> int:
    """Checks what is drawn, writes each row when it is finished, and prints the failures. Returns 1 if there is one."""
    flags = flags_of(Flags, argv, "experiments.equality")
    if flags.programs:
        return work(flags)
    import importlib.metadata

    set_up()
    path = flags.out / "equality" / f"jax-{importlib.metadata.version('jax')}.json"
    programs = {str(program): program for program in draw(flags.seed, flags.count)}
    passed = _passed_before(path, flags.seed) if flags.resume else set()
    rows: list[Row] = [{"what": text, "outcome": "ok"} for text in programs if _digest(text) in passed]
    for row in rows_of(flags, [text for text in programs if _digest(text) not in passed]):
        rows.append(row)
        write(path, {"seed": flags.seed, **_filed(rows, [programs[row["what"]] for row in rows])})
        print(f"{len(rows)}: {row['outcome']} {row['what']}", file=sys.stderr)
    failed = [row for row in rows if row["outcome"] == "failed"]
    for row in failed:
        print(f"{row['what']}\n    {row['error']}")
    print(f"{len(rows) - len(failed)} of {len(rows)} programs compute the same under their policy; written to {path}")
    return 1 if failed else 0


def _filed(rows: Sequence[Row], programs: "Sequence[DrawnProgram]") -> dict[str, Any]:
    """How often each kind was drawn, which programs passed, and how the others failed."""
    stacks = [stack for program in programs for stack in program.stacks]
    return {
        "parts": Counter(part for stack in stacks for part in stack.parts),
        "written": Counter(stack.written for stack in stacks),
        "policies": Counter(program.policy for program in programs),
        "passed": sorted(_digest(row["what"]) for row in rows if row["outcome"] == "ok"),
        "failed": [{"what": row["what"], "error": row["error"]} for row in rows if row["outcome"] != "ok"],
    }


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def _passed_before(path: Path, seed: int) -> set[str]:
    """The digests of the programs that passed in an earlier run of this seed, if it had the same versions."""
    filed = other_parts(path, ("seed", "passed"))
    return set(filed["passed"]) if filed.get("seed") == seed else set()


if __name__ == "__main__":
    sys.exit(main())
