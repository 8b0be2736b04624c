"""Files what the commands of README and docs print: `python -m experiments.printed [--pages README.md docs/train.md ...]`.

A block fenced as `text` shows the output of the last block before it that is fenced as `bash` or `python`. The commands of a
page run one after the other in one new folder, as README gives them, with this Python in place of `.venv/bin/python`.
Commands that install something are left out. The output is 80 columns wide. It goes to `results/printed/PAGE.json`, command
by command, and a test compares the pages with these files. A block shows the whole output, except for `[... what ...]`, which
stands for any text. Lines of progress are left out, unless the block shows some.

A command whose output was filed with the same versions isn't run again. After a change of what commands print, run them with
`--fresh --write`: the pages' blocks are then rewritten, and each shows the part of the output that it showed before. Without
`--write` the exit code is 1 if a page shows something else than what is filed.
"""

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.common import RESULTS, write
from jaxremat.command import parse_flags, run_command
from jaxremat.errors import UsageError
from jaxremat.files import named_by
from jaxremat.xla.installed import versions

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PRINTED = RESULTS / "printed"

#: By page and by a text of the block or its command, why the block isn't the output of a command that is run here.
NOT_RUN = {
    ("built", "flags -> request -> workload"): "a drawing, and no output",
    ("several_gpus", "--process-id 1"): "two processes, started at once in two terminals",
    ("recommend", "jaxremat.recommend"): "hundreds of compiles",
}
#: What isn't the same when a command runs again: the group of each pattern, with the reason. It isn't compared.
VARIES = {
    r"^\[( *[\d.]+) s\]": "seconds since the start of the command",
    r"( [\d,]+ tokens/s, [\d:]+) left": "speed and remaining time of a training",
    r" yes( +[\d.,]+ +[\d.,]+) +-$": "a step that was measured on a CPU",
    r"^budget( +[\d.]+) GiB = this machine's available": "free memory",
    r"^ (?:unrolled|in a loop) .*?( +[\d.]+)$": "seconds that XLA compiled",
    r"compiles\s+([\d.]+)\s+times": "the same, compared",
}
_FENCE = re.compile(r"^```(\S[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ELISION = re.compile(r"\[\.\.\.(?:[^\]]*\.\.\.)?\]")
_PROGRESS = re.compile(r"^\[ *[\d.]+ s\] ")
_INSTALLS = re.compile(r"-m venv|pip install")
_PYTHON = re.compile(r"(?<![\w./-])(?:\.venv/bin/)?python(?= )")
_NAMED_FILE = re.compile(r"--(?:run-dir|out|save-plan) (\S+)")


@dataclass(frozen=True)
class Flags:
    """What the commands of README and docs print, filed."""

    pages: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PAGE")] = PAGES
    fresh: bool = False
    """Also run what was filed with the same versions."""
    write: bool = False
    """Rewrite the blocks of the pages that differ from what is filed."""
    out: Path = PRINTED


@dataclass(frozen=True)
class Command:
    """A command or a Python program of a page.

    Attributes:
        language: `bash` or `python`.
        text: as the page gives it.
        progress: whether the page shows lines of its progress.
    """

    language: str
    text: str
    progress: bool


@dataclass(frozen=True)
class Shown:
    """A block of a page that shows an output.

    Attributes:
        page: the page's name, such as `train`.
        line: where it begins in the page.
        command: what printed it; None if no command is before it.
        text: what it shows.
    """

    page: str
    line: int
    command: Command | None
    text: str

    @property
    def not_run(self) -> str | None:
        """Why its command isn't run here; None if it is."""
        whole = f"{self.command.text if self.command else ''}\n{self.text}"
        return next((why for (page, part), why in NOT_RUN.items() if page == self.page and part in whole), None)


def shown_outputs(page: Path) -> Iterator[Shown]:
    """The blocks of a page that are fenced as `text`, in order."""
    text, before = page.read_text(), None
    for fence in _FENCE.finditer(text):
        language, body = fence[1], fence[2].rstrip("\n")
        if language in ("bash", "python"):
            before = language, body
        elif language == "text":
            command = Command(*before, any(map(_PROGRESS.match, body.splitlines()))) if before else None
            yield Shown(page.stem, text.count("\n", 0, fence.start()) + 1, command, body)


def first_missing(shown: str, printed: str) -> str | None:
    """The first part of a block that isn't in an output; None if the block is the output, but for what it leaves out.

    Args:
        shown: the block. `[... what ...]` stands for any text.
        printed: the output.
    """
    first, *others = _ELISION.split(_masked(shown))
    printed = _masked(printed)
    if not others:
        return None if printed == first else first
    if not printed.startswith(first):
        return first
    *middle, last = others
    at = len(first)
    for part in middle:
        found = printed.find(part, at)
        if found < 0:
            return part
        at = found + len(part)
    return None if printed.endswith(last) and len(printed) - len(last) >= at else last


def rewritten(shown: str, before: Sequence[str], after: Sequence[str]) -> str:
    """A block for a new output. It leaves out what the block left out before.

    Args:
        shown: the block. A line `[... what ...]` stands for any lines.
        before: the lines of the output that it shows.
        after: the lines of the new output.
    """
    parts: list[list[str]] = [[]]
    left_out = []
    for line in shown.splitlines():
        if _ELISION.fullmatch(line):
            left_out.append(line)
            parts.append([])
        else:
            parts[-1].append(line)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    new, at = list[str](), 0
    for n, part in enumerate(parts):
        if n:
            new.append(left_out[n - 1])
        if not part:
            continue
        last = n == len(parts) - 1
        start = len(before) - len(part) if last and n else _place(part, before, at)
        at = start + len(part)
        new += after[_moved(matcher, start, False) if n else 0 : len(after) if last else _moved(matcher, at, True)]
    return "\n".join(new)


def _place(part: Sequence[str], lines: Sequence[str], at: int) -> int:
    """Where the lines of a part begin in an output, from line `at` on. `at` itself where they aren't there."""
    found = (
        n
        for n in range(at, len(lines) - len(part) + 1)
        if all(first_missing(*pair) is None for pair in zip(part, lines[n:], strict=False))
    )
    return next(found, at)


def _moved(matcher: "difflib.SequenceMatcher[str]", at: int, is_end: bool) -> int:
    """Where line `at` of the first sequence is in the second. In lines that differ, the beginning or the end of these."""
    for _, start, stop, new_start, new_stop in matcher.get_opcodes():
        if start <= at < stop or (is_end and at == stop):
            if stop - start == new_stop - new_start:
                return new_start + at - start
            return new_stop if is_end and at > start else new_start
    return matcher.get_opcodes()[-1][4]


def _masked(text: str) -> str:
    """The text with `#` for what varies, and without blanks at the end of lines."""
    text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    for pattern in VARIES:
        text = re.sub(pattern, lambda found: found[0].replace(found[1], "#"), text, flags=re.MULTILINE)
    return text


def what_differs(shown: Shown, known: Mapping[Command, Any]) -> str | None:
    """How a block differs from what is filed, in a sentence; None if it doesn't, or if its command isn't run."""
    if shown.not_run:
        return None
    if not shown.command:
        return "no command is before it, and NOT_RUN doesn't say why"
    if shown.command not in known:
        return "the output of its command isn't filed"
    missing = first_missing(shown.text, "\n".join(known[shown.command]["lines"]))
    return None if missing is None else f"what is filed doesn't have: {missing.strip()}"


def filed_outputs(folder: Path, made_with: Mapping[str, Any]) -> dict[Command, dict[str, Any]]:
    """By command, what the files of a folder hold that were made with these versions."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for result in read if result["versions"] == made_with for row in result["commands"]]
    return {Command(row["language"], row["command"], row["progress"]): row for row in rows}


def main(argv: list[str] | None = None) -> int:
    """Runs the commands of the pages, files what they print, and returns the exit code."""
    flags = parse_flags(Flags, sys.argv[1:] if argv is None else argv, "experiments.printed")
    return run_command(lambda: _do(flags), name="experiments.printed", kept=f"the outputs so far are in {flags.out}")


def _do(flags: Flags) -> int:
    _check(flags)
    filed = filed_outputs(flags.out, versions())
    known = {} if flags.fresh else dict(filed)
    differ = 0
    for page in flags.pages:
        blocks = list(shown_outputs(page))
        _run_page([shown.command for shown in blocks if shown.command and not shown.not_run], page, flags.out, known)
        if flags.write:
            _write_page(page, blocks, filed, known)
            blocks = list(shown_outputs(page))
        for shown in blocks:
            if found := what_differs(shown, known):
                print(f"{page.name}:{shown.line}: {found}")
                differ += 1
    print(f"{differ} blocks differ from what is filed")
    return 1 if differ else 0


def _write_page(page: Path, blocks: Sequence[Shown], before: Mapping[Command, Any], after: Mapping[Command, Any]) -> None:
    """Rewrites the blocks of a page that differ from what is filed."""
    for shown in blocks:
        command = shown.command
        if command and command in before and command in after and what_differs(shown, after):
            new = rewritten(shown.text, before[command]["lines"], after[command]["lines"])
            page.write_text(page.read_text().replace(f"```text\n{shown.text}\n```", f"```text\n{new}\n```", 1))


def _check(flags: Flags) -> None:
    """Checks the flags before anything runs.

    Raises:
        UsageError: a page isn't there, or the folder can't be written.
    """
    for page in flags.pages:
        if not page.is_file():
            raise UsageError(f"--pages got {str(page)!r}, which isn't a file", next_step="give README.md or docs/PAGE.md")
    with named_by("--out", flags.out, "give a folder that is yours", UsageError):
        flags.out.mkdir(parents=True, exist_ok=True)


def _run_page(commands: Sequence[Command], page: Path, out: Path, known: dict[Command, Any]) -> None:
    """Runs the commands of a page that aren't known, and files them. The file is written after each of them."""
    new = [command for command in commands if command not in known]
    files = {name for command in new for name in _NAMED_FILE.findall(command.text)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for command in dict.fromkeys(commands):
            if command in new or files.intersection(_NAMED_FILE.findall(command.text)):
                print(f"{page.name}: {command.text.splitlines()[-1]}", file=sys.stderr, flush=True)
                known[command] = _run(command, folder)
            rows = [known[each] for each in dict.fromkeys(commands) if each in known]
            write(out / f"{page.stem}.json", {"commands": rows})


def _run(command: Command, folder: Path) -> dict[str, Any]:
    """Runs a command in a folder: the row of it that is filed. Paths of this machine are left out of the output."""
    argv = ["bash", "-c", _script(command.text)]
    if command.language == "python":
        (folder / "example.py").write_text(command.text)
        argv = [sys.executable, "example.py"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment = {**kept, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = done.stdout
    for path in (sysconfig.get_path("purelib"), str(folder), str(ROOT)):
        printed = printed.replace(path, "[...]")
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    if not command.progress:
        lines = [line for line in lines if not _PROGRESS.match(line)]
    filed = {"language": command.language, "command": command.text, "progress": command.progress}
    return {**filed, "exit_code": done.returncode, "lines": lines}


def _script(text: str) -> str:
    """A command of a page as it is run here: with this Python, and without what installs something."""
    steps = [step for step in text.split(" && ") if not _INSTALLS.search(step)]
    return _PYTHON.sub(lambda _: sys.executable, " && ".join(steps))


if __name__ == "__main__":
    sys.exit(main())
