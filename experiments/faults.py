"""Do the tests catch faults? `python -m experiments.faults [--faults NAME ...] [--jobs N]`.

`faults.toml` has faults of the kinds that a person commits: a swapped column, a forgotten term, a wrong unit. Each one is made
alone in a copy of the checkout, and the tests that should catch it are run there. It is `caught` if one of them fails. If all
pass it is `missed`: a test is lacking. It is `stale` if the text that it replaces isn't in its file exactly once.

The same tests are run without a fault first, and must pass. A collection error, a wrong node id or a run without an end is an
`error`, never `caught`.

A row is filed for each fault. Another run takes the rows of faults that were caught before, unless the fault, its file or its
tests changed since.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Annotated
from xml.etree import ElementTree

from cyclopts import Parameter
from rich.console import Console

from experiments.children import Child, in_parallel
from experiments.common import RESULTS, Row, flags_of, other_parts, write
from jaxremat.cli.command import run_command
from jaxremat.errors import UsageError, nearest
from jaxremat.report.table import list_table
from jaxremat.system.process import Deadline, run_until

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")
#: The time limit of one run of tests, in seconds, and the exit code of `timeout` for a run without an end.
LIMIT_S, NO_END = 900, 124
#: What isn't copied of a checkout without git.
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "node_modules", "_build")


@dataclass(frozen=True)
class Flags:
    """Makes faults one by one in a copy of the checkout, and says which of them the tests catch."""

    faults: Annotated[tuple[str, ...], Parameter(metavar="NAME [NAME ...]")] = ()
    """Only these faults. By default all."""
    jobs: int = 1
    """Runs of tests at a time."""
    fresh: bool = False
    """Run all of them again, those too whose rows are filed."""
    table: Path = TABLE
    """The file of the faults."""
    root: Path = ROOT
    """The checkout."""
    out: Path = RESULTS


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: its name.
        kind: the kind of mistake.
        file: the file that it is in.
        text: what it replaces, which is in the file exactly once.
        becomes: what is there instead.
        tests: files and node ids of the tests that should catch it.
        full: whether the tests that compile or start a process are run, too (`--all`).
    """

    name: str
    kind: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    full: bool = False

    def is_stale(self, root: Path) -> bool:
        """Whether its text isn't in its file exactly once."""
        path = root / self.file
        return not path.is_file() or path.read_text().count(self.text) != 1

    def digest(self, root: Path) -> str:
        """A hash of the fault, its file and its tests."""
        files = {self.file: None, **{test.partition("::")[0]: None for test in self.tests}}
        parts = [repr(self).encode(), *((root / name).read_bytes() for name in files if (root / name).is_file())]
        return sha256(b"\0".join(parts)).hexdigest()[:16]


#: Tests that are run together: their files and node ids, and whether with `--all`.
Tests = tuple[tuple[str, ...], bool]


@dataclass(frozen=True)
class Ran:
    """How a run of tests ended.

    Attributes:
        code: the exit code. None if there is none.
        failed: the test that failed first, such as `test_units::test_bytes[4]`. Empty if none did, or no test could be run.
        seconds: of the run.
        said: the last line that it printed.
    """

    code: int | None
    failed: str
    seconds: float
    said: str


def read_faults(table: Path) -> list[Fault]:
    """The faults of a file, in its order."""
    return [Fault(**{**block, "tests": tuple(block["tests"])}) for block in tomllib.loads(table.read_text())["fault"]]


def copy_checkout(root: Path, folder: Path) -> None:
    """Copies the files that git tracks below `root`, as they are now. Without git, all files."""
    if not (root / ".git").exists():
        shutil.copytree(root, folder, ignore=NOT_COPIED, dirs_exist_ok=True)
        return
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def run_tests(root: Path, tests: Tests, deadline: Deadline, fault: Fault | None = None) -> Ran:
    """Runs tests in a copy of the checkout at `root`, with a fault or without, until the first one fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy, report = Path(folder, "checkout"), Path(folder, "report.xml")
        copy.mkdir()
        copy_checkout(root, copy)
        if fault:
            path = copy / fault.file
            path.write_text(path.read_text().replace(fault.text, fault.becomes))
        names, full = tests
        pytest = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "--snapshot-warn-unused", f"--junitxml={report}"]
        in_copy = ["/bin/sh", "-c", f'cd "$0" && exec timeout {LIMIT_S} "$@"', str(copy), *pytest, *["--all"] * full, *names]
        started = time.monotonic()
        ended = run_until(deadline, in_copy, {**os.environ, "PYTHONPATH": str(copy)})
        seconds = time.monotonic() - started
        failed = _first_failure(report) if ended.code == 1 else ""
    said = "no end within the time" if ended.code == NO_END else (ended.out + ended.tail).strip().rpartition("\n")[2]
    return Ran(ended.code, failed, seconds, said[:200])


def _first_failure(report: Path) -> str:
    """The test that failed first. Empty if tests couldn't be collected."""
    for case in ElementTree.parse(report).iter("testcase"):
        for fault in case:
            if fault.tag in ("failure", "error"):
                is_test = fault.get("message") != "collection failure"
                return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" if is_test else ""
    return ""


def try_faults(root: Path, tests: Tests, faults: Sequence[Fault], deadline: Deadline) -> Iterator[Row]:
    """The rows of faults that the same tests should catch. The tests are run without a fault first."""
    clean = run_tests(root, tests, deadline)
    for fault in faults:
        ran = clean if clean.code != 0 else run_tests(root, tests, deadline, fault)
        row = {"name": fault.name, "kind": fault.kind, "file": fault.file, "outcome": "error", "test": None}
        if clean.code != 0:
            row["error"] = f"without the fault: {clean.failed or clean.said}"
        elif ran.failed:
            row |= {"outcome": "caught", "test": ran.failed}
        elif ran.code == 0:
            row["outcome"] = "missed"
        else:
            row["error"] = ran.said
        yield row | {"seconds": round(ran.seconds, 1), "digest": fault.digest(root)}


def chosen(flags: Flags) -> list[Fault]:
    """The faults that the flags ask for.

    Raises:
        UsageError: there is no such fault.
    """
    faults = read_faults(flags.table)
    names = [fault.name for fault in faults]
    for name in flags.faults:
        if name not in names:
            next_step = nearest(name, names) or f"--faults {names[0]}"
            raise UsageError(f"--faults got {name!r}", allowed=", ".join(names), next_step=next_step)
    return [fault for fault in faults if not flags.faults or fault.name in flags.faults]


def work(flags: Flags) -> int:
    """Tries the faults that have no row yet, files each row, prints the table, and returns 1 if one isn't caught."""
    faults, path = chosen(flags), flags.out / "faults" / "faults.json"
    names = [fault.name for fault in read_faults(flags.table)]
    filed = {row["name"]: row for row in other_parts(path, ("faults",)).get("faults", [])}
    rows: dict[str, Row] = {}
    by_tests: dict[Tests, list[Fault]] = {}
    for fault in faults:
        before = filed.get(fault.name, {})
        if fault.is_stale(flags.root):
            rows[fault.name] = {"name": fault.name, "kind": fault.kind, "file": fault.file, "outcome": "stale"}
        elif before.get("outcome") == "caught" and before["digest"] == fault.digest(flags.root) and not flags.fresh:
            rows[fault.name] = before
        else:
            by_tests.setdefault((fault.tests, fault.full), []).append(fault)
    deadline = Deadline(LIMIT_S * (len(by_tests) + len(faults)))

    lock = Lock()

    def file() -> None:
        found = {**filed, **rows}
        write(path, {"faults": [found[name] for name in names if name in found]})

    def tried(tests: Tests) -> Child:
        for row in try_faults(flags.root, tests, by_tests[tests], deadline):
            with lock:
                rows[row["name"]] = row
                print(f"{len(rows)} of {len(faults)}: {row['outcome']} {row['name']}", file=sys.stderr, flush=True)
                file()
        return Child((), "")

    for _ in in_parallel(flags.jobs, deadline, tried, list(by_tests)):
        pass
    file()
    shown = [rows[fault.name] for fault in faults]
    found = [row.get("test") or row.get("error") or "-" for row in shown]
    cells = [[row["name"], row["outcome"], by, str(row.get("seconds", "-"))] for row, by in zip(shown, found, strict=True)]
    Console().print(list_table("faults", ("fault", "outcome", "failed first", "s"), cells, left=3))
    num_caught = sum(row["outcome"] == "caught" for row in shown)
    print(f"{num_caught} of {len(shown)} faults are caught; written to {path}")
    return int(num_caught < len(shown))


def main(argv: list[str] | None = None) -> int:
    """Tries the faults, and returns the exit code: 1 if one is missed, stale or an error."""
    flags = flags_of(Flags, argv, "experiments.faults")
    return run_command(lambda: work(flags), name="experiments.faults")


if __name__ == "__main__":
    sys.exit(main())
