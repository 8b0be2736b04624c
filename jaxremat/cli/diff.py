"""The command `jaxremat diff`: what a change did to bytes, FLOPs and predicted times.

    jaxremat diff before.jsonl after.jsonl                             two stores (--out of run, explain and sweep)
    jaxremat diff main -- --model model.py:workload --policy dots      a git revision, and the working tree
    jaxremat diff v1 v2 -- --model model.py:workload --policy dots     two git revisions
    jaxremat diff --python new/bin/python -- --policy dots --batch 8   this environment, and another one

After `--` come the flags of `jaxremat run`. With `--batch`, `jaxremat explain` runs too, and bytes are compared by category and
name.

Exit codes: 0 nothing differs, 1 something does or failed, 2 usage, 130 interrupted.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from jaxremat.cli.command import flags_command
from jaxremat.cli.machine.facts import PROBE_LIMIT_S
from jaxremat.errors import JaxrematError, UsageError, bad_value
from jaxremat.system.files import parse_json
from jaxremat.system.process import Deadline, run_until

if TYPE_CHECKING:
    from jaxremat.trial.record import Record

#: Seconds that one command of one side may take.
_LIMIT_S = 24 * 3600.0
#: The flags of a run that name a file which it reads.
_READING = ("--model", "--hf", "--target", "--data", "--lengths")
_EXAMPLE = "jaxremat diff main -- --model model.py:workload --policy dots --batch 8"
#: Prints a word where jaxremat is installed.
_IS_INSTALLED = "import jaxremat; print(jaxremat.__name__)"


@dataclass(frozen=True)
class DiffFlags:
    """What a change did to bytes, FLOPs and predicted times, by step, category and name.

    jaxremat diff A B [-- FLAGS]. A and B are two stores of records, or two git revisions, where a B that is left out is the
    working tree. With --python there is neither: this environment is compared with another one. FLAGS are those of jaxremat
    run. With --batch among them, bytes are compared by category and name, too.
    """

    python: Annotated[Path | None, Parameter(metavar="other/bin/python")] = None
    """The Python of the other environment, in which jaxremat is installed too."""
    top: int = 8
    """How many rows say who holds the memory, of each step."""
    json: bool = False
    """Print one JSON object a line: a row for each step, and one for each category and name that differs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, of_run = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    num_places = next((n for n, word in enumerate(own) if word.startswith("-")), len(own))
    return flags_command(DiffFlags, own[num_places:], "diff", lambda flags: compare(flags, own[:num_places], of_run))


def compare(flags: DiffFlags, places: Sequence[str], of_run: Sequence[str]) -> int:
    """Prints what differs between the two sides, and returns the exit code.

    Args:
        flags: the flags of the command itself.
        places: the two stores or revisions.
        of_run: the flags of `jaxremat run`.

    Raises:
        UsageError: the places aren't two stores, or revisions with the flags of a run.
        JaxrematError: the run of a side failed.
    """
    if flags.top < 1:
        raise bad_value("--top", str(flags.top), "1 or more", "8 is the default")
    names = _names(flags, places)
    before, after = _both_sides(flags, places, of_run, names)
    from jaxremat.report.diff import changes_report
    from jaxremat.report.screen import shared_screen
    from jaxremat.trial.difference import compared

    changes = compared(before, after)
    if flags.json:
        for row in (*changes.steps, *changes.at_peak):
            print(json.dumps(asdict(row)))
        for side, steps in zip(("before", "after"), changes.only, strict=True):
            for step in steps:
                print(json.dumps({"record": "only", "side": side, "step": step}))
    for part in () if flags.json else changes_report(changes, flags.top, names):
        shared_screen().results.print(part)
    return int(changes.differs)


def _names(flags: DiffFlags, places: Sequence[str]) -> tuple[str, str]:
    """What the two sides are called."""
    first, second = ("this environment", str(flags.python)) if flags.python else (*places, "the working tree", "")[:2]
    return first, second


def _both_sides(
    flags: DiffFlags, places: Sequence[str], of_run: Sequence[str], names: tuple[str, str]
) -> "tuple[list[Record], list[Record]]":
    """The records of both sides."""
    if flags.python and not places and of_run:
        _check_python(str(flags.python))
        pythons = (sys.executable, str(flags.python))
        before, after = (_side(python, Path(), of_run, name) for python, name in zip(pythons, names, strict=True))
        return before, after
    if not flags.python and not of_run and len(places) == 2:
        return _stored(places[0]), _stored(places[1])
    if not flags.python and of_run and 1 <= len(places) <= 2:
        with ExitStack() as trees:
            folders = [trees.enter_context(folder_at(place)) for place in places]
            for place, folder in zip(places, folders, strict=True):
                _check_files(place, folder, of_run)
            both = (*folders, Path())[:2]
            before, after = (_side(sys.executable, folder, of_run, name) for folder, name in zip(both, names, strict=True))
            return before, after
    got = " ".join([*places, *(["--python"] if flags.python else []), *(["-- ..."] if of_run else [])])
    raise UsageError(
        f"jaxremat diff got {got or 'nothing to compare'}",
        allowed="two stores; one or two git revisions, -- and the flags of a run; or --python, -- and the flags of a run",
        next_step=_EXAMPLE,
    )


def _stored(place: str) -> "list[Record]":
    """The records of a store."""
    try:
        text = Path(place).read_text()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{place!r} can't be read as a store: {getattr(error, 'strerror', None) or error}",
            cause="another path, or a git revision, which needs -- and the flags of a run",
            next_step=_EXAMPLE,
        ) from None
    try:
        found = _records_of(text)
    except (ValueError, JaxrematError) as error:
        got = error.got if isinstance(error, JaxrematError) else str(error)
        raise UsageError(
            f"{place} has a line that is no record: {got}",
            allowed="two stores of records",
            next_step="give the file that --out of run, explain or sweep wrote",
        ) from None
    from jaxremat.trial.difference import is_compared

    if not any(map(is_compared, found)):
        raise UsageError(
            f"{place} has {'no step to compare' if found else 'no record'}",
            allowed="a store with the records of a step or of a search",
            cause="a plan and its probes aren't compared"
            if found
            else "the command that wrote it was interrupted, or failed",
            next_step="give the file that --out of run, explain or sweep wrote",
        )
    return found


def _records_of(text: str) -> "list[Record]":
    """The records of lines of JSON."""
    from jaxremat.trial.lines import from_row

    return [from_row(parse_json(line)) for line in text.splitlines() if line.strip()]


def _check_python(python: str) -> None:
    """Raises UsageError where `python` can't be run, or has no jaxremat. This takes no compile."""
    got = ""
    if shutil.which(python) is None:
        got = "is a folder" if Path(python).is_dir() else "isn't there, or can't be run"
    else:
        ended = run_until(Deadline(PROBE_LIMIT_S), [*_started(python, Path()), "-c", _IS_INSTALLED], os.environ)
        if ended.code is None:
            got = f"didn't answer within {PROBE_LIMIT_S:g} seconds"
        elif not ended.out.split():
            got = f"has no jaxremat: {(ended.tail.strip().splitlines() or ['it printed nothing'])[-1]}"
    if got:
        raise UsageError(
            f"--python got {python!r}, which {got}",
            allowed="the Python of another environment, with jaxremat installed in it",
            next_step="jaxremat diff --python other/bin/python -- --policy dots --batch 8",
        )


def _check_files(revision: str, folder: Path, of_run: Sequence[str]) -> None:
    """Raises UsageError where a file that the flags name is here, and not in the revision.

    This takes no compile.
    """
    words = [part for word in of_run for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, value in itertools.pairwise(words):
        path, is_attribute, _ = value.partition(":")
        if flag == "--model" and is_attribute and not path.endswith(".py"):
            path = f"{path.replace('.', '/')}.py"
        if flag not in _READING or not Path(path).is_file() or (folder / path).exists():
            continue
        inside = Path(path).resolve().is_relative_to(git("rev-parse", "--show-toplevel"))
        first = git("log", "--reverse", "--format=%h", "--", path).partition("\n")[0] if inside else ""
        cause, next_step = "it isn't committed", "commit it, and compare later revisions with that commit"
        if first:
            cause, next_step = (
                f"it is newer than {revision}",
                f"jaxremat diff {first} -- ..., the first revision that has it",
            )
        elif not inside:
            cause, next_step = "it is outside of the repository", f"its absolute path, {Path(path).resolve()}"
        raise UsageError(
            f"{flag} {value}: the file {path!r} is here, and isn't in {revision}",
            allowed="a file that both sides have",
            cause=cause,
            next_step=next_step,
        )


def _started(python: str, folder: Path) -> list[str]:
    """The command that starts a Python in a folder, before its arguments."""
    return ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), python]


@contextmanager
def folder_at(revision: str) -> Iterator[Path]:
    """A context with the folder that is this one at a revision of its git repository.

    The repository's folder has its own name there, too, as source lines show it.
    """
    prefix, top = git("rev-parse", "--show-prefix"), git("rev-parse", "--show-toplevel")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, Path(top).name)
        git("worktree", "add", "--detach", str(tree), f"{revision}^{{commit}}", revision=revision)
        try:
            yield tree / prefix
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*words: str, revision: str = "") -> str:
    """What git prints.

    Raises:
        UsageError: git can't be run, or fails.
    """
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"git can't be run: {error.strerror}", next_step="two stores instead of revisions") from None
    if done.returncode:
        if not revision:
            raise UsageError(f"this folder is in no git repository: {done.stderr.strip()}", next_step=_EXAMPLE)
        cause, next_step = (
            ("this clone is shallow, as those of CI are", "git fetch --unshallow, or fetch-depth: 0 of actions/checkout")
            if git("rev-parse", "--is-shallow-repository") == "true"
            else (
                "a typing error, or a branch that was not fetched",
                "git branch --all and git log --oneline list those that are here",
            )
        )
        got = f"there is no revision {revision!r}: {done.stderr.strip()}"
        raise UsageError(got, cause=cause, next_step=next_step)
    return done.stdout.strip()


def _side(python: str, folder: Path, of_run: Sequence[str], side: str) -> "list[Record]":
    """The records of one side, of `jaxremat run` and, with a batch, of `jaxremat explain`.

    Raises:
        UsageError: a flag of the run isn't allowed.
        JaxrematError: a command failed, or printed no record.
    """
    root = str(Path.cwd().resolve())
    if any(root in word for word in of_run) and folder != Path():
        raise UsageError(
            f"{root} is in the flags of the run, and the same files would run twice", next_step="a relative path"
        )
    has_batch = any(word.partition("=")[0] == "--batch" for word in of_run)
    found: list[Record] = []
    for command in ("run", "explain") if has_batch else ("run",):
        print(f"jaxremat: {side}: jaxremat {command}", file=sys.stderr)
        words = [*_started(python, folder), "-m", "jaxremat", command, *of_run, "--json"]
        ended = run_until(Deadline(_LIMIT_S), words, os.environ)
        last = (ended.tail.strip().splitlines() or ["it printed nothing"])[-1].removeprefix("jaxremat: ")
        if command == "explain" and ended.code == 2:  # flags that only run has, such as --policy auto
            print(f"jaxremat: {side}: bytes aren't compared by name: {last}", file=sys.stderr)
            continue
        if ended.code == 2:
            got, _, next_step = last.partition(" Next: ")
            raise UsageError(f"{side}: {got}", next_step=next_step or "the same flags without diff")
        if ended.code not in (0, 3):  # 3: nothing fits, and the records say so
            raise JaxrematError(f"{side}: jaxremat {command} failed: {last}", next_step="the same flags without diff")
        try:
            found += _records_of(ended.out)
        except (ValueError, JaxrematError) as error:
            raise JaxrematError(
                f"{side}: jaxremat {command} printed a line that is no record: {error}",
                cause="the other side has another version of jaxremat",
                next_step="install one version in both",
            ) from None
    if not found:
        raise JaxrematError(f"{side}: jaxremat run printed no record", next_step="the same flags without diff")
    return found
