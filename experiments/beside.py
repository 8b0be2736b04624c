"""Can jaxremat be installed beside packages that people train with? `python -m experiments.beside`.

uv resolves jaxremat with each group of packages, for each version of Python, and installs nothing. Filed are the versions that
it chose, or the last lines of why there are none.
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.common import RESULTS, Row, flags_of, write
from jaxremat.cli.command import run_command
from jaxremat.errors import MissingDependencyError
from jaxremat.report.table import list_table

ROOT = Path(__file__).parent.parent
#: The packages whose chosen versions are filed beside those of the group.
SHOWN = ("jax", "flax")


@dataclass(frozen=True)
class Flags:
    """Resolves jaxremat beside packages that pin much."""

    groups: tuple[str, ...] = ("tokamax,qwix", "maxtext", "google-tunix", "kauldron", "easydel", "equinox", "dm-haiku")
    """Groups of packages, with commas between those of a group."""
    pythons: tuple[str, ...] = ("3.11", "3.12")
    out: Path = RESULTS


def resolved(group: str, python: str) -> Row:
    """The versions that uv chooses for jaxremat with a group of packages. `failure` says why there are none.

    Raises:
        MissingDependencyError: uv isn't installed.
    """
    names = group.split(",")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--extra", "aot", "--python-version", python, "pyproject.toml", "-"]
    done = subprocess.run(command, cwd=ROOT, input="\n".join(names), capture_output=True, text=True)
    if "No module named uv" in done.stderr:
        raise MissingDependencyError("uv isn't installed", next_step='pip install "jaxremat[dev]"')
    versions = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)", done.stdout, re.MULTILINE))
    chosen = {name: versions[name] for name in (*names, *SHOWN) if name in versions}
    failure = " ".join(done.stderr.split())[:300] if done.returncode else None
    return {"group": group, "python": python, "resolved": not done.returncode, "versions": chosen, "failure": failure}


def rows_of(flags: Flags) -> Iterator[Row]:
    """Yields the row of each group and version of Python."""
    for group, python in itertools.product(flags.groups, flags.pythons):
        yield resolved(group, python)


def work(flags: Flags) -> int:
    """Files each row, prints the table, and returns 1 if there is no solution beside a group."""
    rows: list[Row] = []
    for row in rows_of(flags):
        rows.append(row)
        write(flags.out / "beside" / "beside.json", {"rows": rows})
    cells = [
        (row["group"], row["python"], ", ".join(f"{name} {version}" for name, version in row["versions"].items()) or "none")
        for row in rows
    ]
    Console().print(list_table("jaxremat beside other packages", ("packages", "Python", "versions"), cells, left=3))
    return 0 if all(row["resolved"] for row in rows) else 1


def main(argv: list[str] | None = None) -> int:
    """Runs the experiment and returns its exit code."""
    flags = flags_of(Flags, argv, "experiments.beside")
    return run_command(lambda: work(flags), name="experiments.beside", saved="the rows so far are filed")


if __name__ == "__main__":
    sys.exit(main())
