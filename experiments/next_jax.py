"""What changes and what fails with the newest jax: `python -m experiments.next_jax [--python python3.13] [--tests ...]`.

It installs the newest jax that the package index has for a Python, and the newest of the other dependencies, into a virtual
environment of its own. The upper bounds that pyproject.toml sets for jax don't count there. Small steps are compiled and the
chosen tests are run three times: with this environment's jax, with the newest one, and with that under its option `jax_remat3`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from experiments.common import RESULTS, Row, compile_step, flags_of, set_up, write
from jaxremat.chips.installed import versions
from jaxremat.cli.command import run_command
from jaxremat.errors import MissingDependencyError, UsageError
from jaxremat.report.table import list_table
from jaxremat.system.process import Deadline, run_until

ROOT = Path(__file__).parent.parent
POLICIES = ("none", "dots", "dots+attention", "nothing", "save:query_proj,mlpwi_0", "offload:mlpwi_0", "every:2")
#: What a newer jax breaks first: programs read as jaxprs and as XLA's text, and files of XLA's dump.
TESTS = (
    "tests/test_jax_private.py",
    "tests/test_xla_texts.py",
    "tests/test_autoname.py",
    "tests/test_with_policy.py",
    "tests/test_saved_and_recomputed.py",
    "tests/test_dump.py",
)


@dataclass(frozen=True)
class Flags:
    """Compiles small steps and runs tests with this environment's jax and with the newest one."""

    python: str = sys.executable
    """The Python of the newest jax's environment. An old Python has an old jax as its newest."""
    tests: tuple[str, ...] = TESTS
    """Files of tests."""
    venv: Path = ROOT / ".venv-next"
    """The newest jax's environment, made or brought up to date."""
    out: Path = RESULTS
    steps: bool = False
    """Only compiles the steps in this process, a line of JSON each; nothing is filed."""


def step_rows() -> Iterator[Row]:
    """Bytes of a step of the model `tiny` with four layers, for an H100 that isn't here, or the error of its compile."""
    from jaxremat.chips.target import load_target
    from jaxremat.config import TrainConfig
    from jaxremat.model.presets import PRESETS

    target, train = load_target("h100-80gb"), TrainConfig(seq_len=64)
    for scan in (True, False):
        model = replace(PRESETS["tiny"].config, num_layers=4, scan_layers=scan)
        for policy in POLICIES:
            what = f"{policy}, {'scan' if scan else 'unrolled'}"
            try:
                yield {"what": what, "total_bytes": compile_step(model, train, policy, 8, target).memory.total_bytes}
            except Exception as error:  # whatever a newer jax raises
                yield {"what": what, "error": f"{type(error).__name__}: {error}"}


def install_newest(flags: Flags) -> str:
    """Installs the newest versions of what the project and its tests need, and returns the path of their Python."""
    if not shutil.which(flags.python):
        raise UsageError(f"--python got {flags.python!r}", cause="there is no such program", next_step="--python python3.13")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = project["dependencies"], *(project["optional-dependencies"][extra] for extra in ("aot", "dev"))
    wanted = [re.sub(r"^(jax.*),<.*", r"\1", text) for texts in lists for text in texts]
    python = str(flags.venv / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [flags.python, "-m", "venv", str(flags.venv)],
        [*pip, "--upgrade", "--upgrade-strategy", "eager", *wanted],
        [*pip, "--no-deps", "--editable", str(ROOT)],
    ):
        if subprocess.run(command).returncode:
            raise MissingDependencyError(f"{command[0]} {command[1]} {command[2]} failed", cause="what it says above")
    return python


def rows_of(python: str, tests: tuple[str, ...], environment: dict[str, str]) -> Iterator[Row]:
    """The rows of the steps and of the tests, with this Python and these further variables."""
    deadline, environment = Deadline(1800), {**os.environ, **environment}
    ended = run_until(deadline, [python, "-m", "experiments.next_jax", "--steps"], environment)
    yield from map(json.loads, ended.out.splitlines())
    if ended.code != 0:
        yield {"what": "further steps", "error": ended.tail.strip().rpartition("\n")[2]}
    yield from (tested(python, file, environment, deadline) for file in tests)


def tested(python: str, file: str, environment: dict[str, str], deadline: Deadline) -> Row:
    """The row of a file of tests: how many passed and were skipped, and the message of each that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        every = ["--all"] if file.startswith("tests/") else []  # also those that compile
        ended = run_until(deadline, [python, "-m", "pytest", "-n0", *every, f"--junitxml={report}", file], environment)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    faults = [(case.get("name"), fault) for case in cases for fault in case]
    failed = {name: fault.get("message", "").partition("\n")[0] for name, fault in faults if fault.tag != "skipped"}
    skipped = sum(fault.tag == "skipped" for _, fault in faults)
    row: Row = {"what": file, "passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}
    return row if cases else row | {"error": f"no test ran: {ended.tail.strip()[-400:]}"}


def found(row: Row) -> str:
    """A cell's text: bytes, the class of an error, or how many of the tests passed."""
    if "error" in row:
        return row["error"].partition(":")[0]
    if "failed" in row:
        return f"{row['passed']} of {row['passed'] + len(row['failed'])}"
    return f"{row['total_bytes']:,}"


def compare(flags: Flags) -> int:
    """Runs the three variants, prints their table, files their rows, and returns 1 if something fails with the newest jax."""
    if missing := [test for test in flags.tests if not Path(test).is_file()]:
        raise UsageError(f"--tests got {missing[0]!r}", cause="there is no such file", next_step=f"--tests {TESTS[0]}")
    python = install_newest(flags)
    code = "import json; from jaxremat.chips.installed import versions; print(json.dumps(versions()))"
    newest = json.loads(run_until(Deadline(60), [python, "-c", code], os.environ).out)
    path = flags.out / "next_jax" / f"jax-{newest['jax']}.json"
    variants = {
        f"jax {versions()['jax']}": (sys.executable, {}),
        f"jax {newest['jax']}": (python, {}),
        "jax_remat3": (python, {"JAX_REMAT3": "1"}),
    }
    result: dict[str, list[Row]] = {name: [] for name in variants}
    filed: list[Row] = []
    cells: dict[str, dict[str, str]] = {}
    for name, (interpreter, environment) in variants.items():
        for row in rows_of(interpreter, flags.tests, environment):
            result[name].append(row)
            filed.append({"jax": name, **row})
            cells.setdefault(row["what"], {})[name] = found(row)
            write(path, {"newest": newest, "rows": filed})
            print(f"{name}: {row['what']}: {found(row)}", file=sys.stderr)
    table = [[what, *(texts.get(name, "-") for name in variants)] for what, texts in cells.items()]
    Console().print(list_table("bytes of steps, and tests that passed", ("", *variants), table))
    print(f"written to {path}")
    return int(any("error" in row or row.get("failed") for row in result[f"jax {newest['jax']}"]))


def main(argv: list[str] | None = None) -> int:
    """Compares the two versions, or compiles the steps of this process, and returns the exit code."""
    flags = flags_of(Flags, argv, "experiments.next_jax")
    set_up()
    if flags.steps:
        for row in step_rows():
            print(json.dumps(row), flush=True)
        return 0
    return run_command(lambda: compare(flags), name="experiments.next_jax", saved=f"the rows so far are in {flags.out}")


if __name__ == "__main__":
    sys.exit(main())
