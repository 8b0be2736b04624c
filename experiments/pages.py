"""Compares the pages with the results: `python -m experiments.pages`. With `--write` the pages are brought up to date.

What a page takes from `experiments/results/` says there where it is from, in comments that no reader of the page sees:

* a number, or a span of two, has an expression of Python right behind it: `12,345<!-- count(one("h100-80gb/mesh", "steps",
  mesh="fsdp=8").tokens_per_s) -->`. The names in it are those of `VOCABULARY`. Behind words stands one that is true or false;
* a table stands between `<!-- table: EXPRESSION` and `<!-- end -->`. The expression gives its rows, and each further line of the
  mark a column: `title = EXPRESSION`, whose names are also a row's fields. Without columns the expression gives the whole table.

A number of README, or of an answer in the table of experiments, has such a source, or its sentence has a date: `(2026-11)`.

A block fenced as `text` shows what the last block before it printed that is fenced as `bash` or `python`, but for
`[... what ...]`, which stands for any text, and for lines of progress, unless it shows some. `--run` runs the commands whose
output isn't filed in `results/printed/` with the installed versions, those of a page in one new folder, 80 columns wide, and
without what installs something. The blocks are then rewritten, and each shows the part of the output that it showed before.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from experiments.common import RESULTS, count, flags_of, markdown_table, ms, only, percent, signed, span, where, write
from experiments.reference_tables import alias_table_markdown, policy_table_markdown, target_table_markdown
from jaxremat.chips.installed import versions
from jaxremat.chips.nvidia.calibration import load_calibration
from jaxremat.chips.speed import PAIRED_ERROR
from jaxremat.cli.command import run_command
from jaxremat.errors import UsageError
from jaxremat.report.table import gib_number
from jaxremat.system.files import named_by, write_whole

ROOT = Path(__file__).parent.parent
README, EXPERIMENTS = ROOT / "README.md", ROOT / "experiments/README.md"
PAGES = (README, EXPERIMENTS, *sorted((ROOT / "docs").glob("*.md")))
PRINTED = RESULTS / "printed"
#: By page and by a text of the block or its command, why the block isn't the output of a command that is run here.
NOT_RUN = {
    ("built", "flags -> request -> session"): "a drawing, and no output",
    ("processes", "--process-id 1"): "two processes, started at once in two terminals",
    ("recommend", "jaxremat recommend"): "hundreds of compiles",
    ("finetune", "jaxremat recommend"): "minutes of compiles",
    ("ci", "test_memory.py::test_step"): "a test of one's own; tests/test_pytest_plugin.py has one like it",
    ("maxtext", "--maxtext"): "MaxText isn't in the environment of the pages",
    ("beside", "--maxtext"): "MaxText isn't in the environment of the pages",
}
#: What isn't the same when a command runs another time: the group of each pattern, with the reason. It isn't compared.
VARIES = {
    r"^\[( *[\d.]+) s\]": "seconds since the start of the command",
    r"( [\d,]+ tokens/s, [\d:]+) left": "speed and remaining time of a training",
    r" yes( +[\d.,]+ +[\d.,]+) +-$": "a step that was measured on a CPU",
    r"^budget( +[\d.]+) GiB = this machine's available": "free memory",
    r"^Unrolled, the step was compiled in( \d+ s here, and in a scan in \d+ s)\.$": "seconds that XLA compiled",
}
_FENCE = r"^```(?P<language>\S[^\n]*)\n(?P<body>.*?)^```$"
_ELISION = r"\[\.\.\.(?:[^\]]*\.\.\.)?\]"
_PROGRESS = re.compile(r"^\[ *[\d.]+ s\] ", re.MULTILINE)
_INSTALLS = re.compile(r"-m venv|pip install")
_PYTHON = re.compile(r"(?<![\w./-])(?:\.venv/bin/)?python(?= )")
_NAMED_FILE = re.compile(r"--(?:run-dir|out|save-plan) (\S+)")

#: A command or a Python program as a page gives it: `("bash", "echo one")`.
Command = tuple[str, str]
#: By command, its row in a file: the lines that it printed, and its exit code.
Filed = dict[Command, dict[str, Any]]
#: A number in text, with its sign. Digits of a name aren't one: those of `llama3.2-1b`, `fsdp=8`, `H100` and `Python 3.11`.
NUMBER = r"(?<![\w.,=/+-])(?<!Python )(?<!Qwen )(?<!Gemma )[+-]?\d+(?:[.,]\d+)*(?![\w/])"
_TABLE = r"^<!-- table: (?P<table>.*?)\s*-->\n(?P<lines>.*?)^<!-- end -->$"
_SOURCED = rf"(?P<shown>(?:{NUMBER} to )?{NUMBER}(?: %)?)?(?<=\S)<!-- (?P<source>.*?) -->"
_PARTS = re.compile("|".join((_FENCE, _TABLE, _SOURCED)), re.MULTILINE | re.DOTALL)


class Fields(dict[str, Any]):
    """A row of results, or a part of one: `row.total_bytes` is `row["total_bytes"]`."""

    __getattr__ = dict.__getitem__


@cache
def result(name: str) -> Any:
    """What a file of results holds: `result("cpu/kill_train").runs`."""
    return json.loads((RESULTS / f"{name}.json").read_text(), object_hook=Fields)


def rows(name: str, part: str, **fields: Any) -> list[Any]:
    """The rows of a part of a file with these fields: `rows("h100-80gb/layouts", "steps", model="gpt2")`."""
    return where(result(name)[part], **fields)


def one(name: str, part: str, **fields: Any) -> Any:
    """The only row with these fields."""
    return only(result(name)[part], **fields)


def by(some: Iterable[Any], *keys: str) -> list[Any]:
    """The rows in groups, by the value of some fields. A group has these fields, and its rows as `of`."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in some:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [Fields(zip((*keys, "of"), (*values, group), strict=True)) for values, group in groups.items()]


VOCABULARY = {
    **{of.__name__: of for of in (result, rows, one, only, by, count, ms, percent, signed, span)},
    **{of.__name__: of for of in (policy_table_markdown, alias_table_markdown, target_table_markdown, load_calibration)},
    "gib": gib_number,
    "paired_error": lambda: PAIRED_ERROR,
}


class Wrong(NamedTuple):
    """What is wrong in a line of a page. `place`: start and end of the part, and its right text; None where a person mends it."""

    line: int
    what: str
    place: tuple[int, int, str] | None = None


def check(page: Path, text: str, filed: Filed) -> list[Wrong]:
    """What is wrong with the text of a page, line by line. `filed` has the outputs of commands."""
    blocks = [(shown.line, what_differs(shown, filed)) for shown in shown_outputs(page.stem, text)]
    wrong = [Wrong(line, what) for line, what in blocks if what]
    wrong += [found for part in _PARTS.finditer(text) if not part["language"] and (found := _wrong(part))]
    wrong += unsourced(text, page == EXPERIMENTS) if page in (README, EXPERIMENTS) else ()
    return sorted(wrong, key=lambda part: part.line)


def _wrong(part: re.Match[str]) -> Wrong | None:
    """What is wrong with a table or with what stands before an expression."""
    group, source = ("lines", part["table"]) if part["table"] else ("shown", part["source"])
    line = part.string.count("\n", 0, max(part.start(group), part.start())) + 1
    try:
        says = _table(source) if part["table"] else _value(source, VOCABULARY)
    except Exception as error:
        return Wrong(line, f"{source}: {type(error).__name__}: {error}")
    shown = part[group]
    if says is True or says == shown:
        return None
    if says is False or shown is None:
        return Wrong(line, f"results say {says}: {source}")
    pairs = list(zip_longest(shown.splitlines(), says.splitlines(), fillvalue=""))
    at = next(n for n, pair in enumerate(pairs) if pair[0] != pair[1])
    return Wrong(line + at, f"shown {pairs[at][0]}, results say {pairs[at][1]}", (*part.span(group), says))


def _value(source: str, names: dict[str, Any]) -> Any:
    """The text of an expression's value; True or False if it is one of them."""
    value = eval(source, dict(names))
    return value if isinstance(value, bool) else str(value)


def _table(source: str) -> str:
    lines = source.splitlines()
    columns = [line.partition(" = ")[::2] for line in lines if " = " in line]
    made = eval(" ".join(line for line in lines if " = " not in line), dict(VOCABULARY))
    cells = [[_value(cell, {**VOCABULARY, **row}) for _, cell in columns] for row in made if columns]
    return markdown_table([title for title, _ in columns], cells) + "\n" if columns else made


def unsourced(text: str, in_cells: bool) -> Iterator[Wrong]:
    """The numbers in prose with neither an expression nor a date. `in_cells`: only those in the first table's second cells."""
    prose = text
    for code in (_PARTS, re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)):
        prose = code.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), prose)
    if in_cells:
        sentences = re.finditer(r"(?<=\|)[^|\n]*(?=\|[^|\n]*\|$)", prose.partition("\n## ")[0], re.MULTILINE)
    else:
        sentences = re.finditer(r"(?:(?![.!?]\s|\n\n|\|).)+", prose, re.DOTALL)
    for sentence in sentences:
        if not re.search(r"\(20\d\d-\d\d\b", sentence[0]):
            for number in re.finditer(NUMBER, sentence[0]):
                line = text.count("\n", 0, sentence.start() + number.start()) + 1
                yield Wrong(line, f"{number[0]} has no source and no date")


def written(text: str, wrong: Iterable[Wrong]) -> str:
    """The text of a page with what belongs into its parts."""
    for start, end, right in sorted((part.place for part in wrong if part.place), reverse=True):
        text = text[:start] + right + text[end:]
    return text


class Shown(NamedTuple):
    """A block of a page that shows what the command before it printed. `not_run` says why that command isn't run here."""

    line: int
    command: Command | None
    text: str
    not_run: str | None


def shown_outputs(page: str, text: str) -> Iterator[Shown]:
    """The blocks of a page that are fenced as `text`, in order."""
    before = None
    for fence in re.finditer(_FENCE, text, re.MULTILINE | re.DOTALL):
        language, body = fence["language"], fence["body"].rstrip("\n")
        if language in ("bash", "python"):
            before = language, body
        elif language == "text":
            whole = f"{before[1] if before else ''}\n{body}"
            not_run = next((why for (where, part), why in NOT_RUN.items() if where == page and part in whole), None)
            yield Shown(text.count("\n", 0, fence.start()) + 1, before, body, not_run)


def what_differs(shown: Shown, filed: Filed) -> str | None:
    """How a block differs from what is filed; None if it doesn't, or if its command isn't run."""
    if shown.not_run:
        return None
    if shown.command is None or shown.command not in filed:
        return "what this block shows isn't filed: --run" if shown.command else "no command is before this block"
    printed = filed[shown.command]["lines"]
    if _matched(shown.text, printed):
        return None
    filed_lines = {*_masked(printed)}
    others = [line for line in _masked(shown.text.splitlines()) if not re.search(_ELISION, line) and line not in filed_lines]
    return f"shown {others[0] if others else 'a part, or another order'}, the filed output hasn't"


def _matched(shown: str, printed: Sequence[str]) -> re.Match[str] | None:
    """A block in an output, with a group for each `[...]`; None if it shows something else."""
    parts = re.split(_ELISION, "\n".join(_masked(shown.splitlines())))
    return re.fullmatch("(.*?)".join(map(re.escape, parts)), "\n".join(_masked(printed)), re.DOTALL)


def _masked(lines: Sequence[str]) -> list[str]:
    """The lines with `#` for what varies, and without blanks at their ends."""
    text = "\n".join(line.rstrip() for line in lines)
    for pattern in VARIES:
        text = re.sub(pattern, lambda found: found[0].replace(found[1], "#"), text, flags=re.MULTILINE)
    return text.splitlines()


def rewritten(shown: str, before: Sequence[str], after: Sequence[str]) -> str:
    """A block that shows the lines `before`, for the lines `after`: each `[... what ...]` stands for what it stood for."""
    left_out: list[str | None] = [None] * len(before)
    if found := _matched(shown, before):
        for group, elision in enumerate(re.findall(_ELISION, shown), 1):
            if elision in shown.splitlines():  # and not within a line
                first, last = (found.string.count("\n", 0, at) for at in found.span(group))
                left_out[first : last + 1] = [elision] * (last + 1 - first)
    new: list[str] = []
    for _, start, stop, new_start, new_stop in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        old = left_out[start:stop] or left_out[max(start - 1, 0) :][:1] or [None]
        if len(old) != new_stop - new_start:  # lines that differ, and aren't as many: all are shown if some were
            old = [None if None in old else old[0]] * (new_stop - new_start)
        for elision, line in zip(old, after[new_start:new_stop], strict=True):
            if elision is None or new[-1:] != [elision]:
                new.append(elision or line)
    return "\n".join(new)


def filed_outputs(folder: Path, made_with: Mapping[str, Any] | None = None) -> Filed:
    """By command, what the files of a folder hold: those made with some versions, or all."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    some = [row for result in read if made_with in (None, result["versions"]) for row in result["commands"]]
    rules = [[re.sub(r"─(\d+)", lambda rule: "─" * int(rule[1]), line) for line in row["lines"]] for row in some]
    return {(row["language"], row["command"]): {**row, "lines": lines} for row, lines in zip(some, rules, strict=True)}


def _file(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a file of outputs. A rule of a table is as short as `─64`, since each character of it is three bytes."""
    shorter = [[re.sub("─+", lambda rule: f"─{len(rule[0])}", line) for line in row["lines"]] for row in rows]
    write(path, {"commands": [{**row, "lines": lines} for row, lines in zip(rows, shorter, strict=True)]})


def run_page(page: Path, out: Path, fresh: bool) -> None:
    """Runs the commands of a page, files each one's output in the folder `out`, and rewrites the blocks that differ.

    Without `fresh`, what is filed with the installed versions isn't run, unless another command reads a file that it makes.
    """
    before, known = filed_outputs(out), {} if fresh else filed_outputs(out, versions())
    shown = [block for block in shown_outputs(page.stem, page.read_text()) if not block.not_run]
    commands = {block.command: bool(_PROGRESS.search(block.text)) for block in shown if block.command}
    new = commands.keys() - known.keys()
    files = {name for _, text in new for name in _NAMED_FILE.findall(text)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for command, progress in commands.items():
            if command in new or files.intersection(_NAMED_FILE.findall(command[1])):
                print(f"{page.name}: {command[1].splitlines()[-1]}", file=sys.stderr, flush=True)
                known[command] = _run(command, folder, progress)
            _file(out / f"{page.stem}.json", [known[each] for each in commands if each in known])
    for block in shown:
        if block.command and not what_differs(block, before) and what_differs(block, known):
            text = rewritten(block.text, before[block.command]["lines"], known[block.command]["lines"])
            write_whole(page, page.read_text().replace(f"```text\n{block.text}\n```", f"```text\n{text}\n```", 1))


def _run(command: Command, folder: Path, progress: bool) -> dict[str, Any]:
    """Runs a command in a folder: the row of it that is filed. Paths of this machine are left out of the output."""
    language, text = command
    steps = [step for step in text.split(" && ") if not _INSTALLS.search(step)]
    argv = ["bash", "-c", _PYTHON.sub(lambda _: sys.executable, " && ".join(steps))]
    if language == "python":
        (folder / "example.py").write_text(text)
        argv = [sys.executable, "example.py"]
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment |= {"COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(argv, cwd=folder, env=environment, text=True, **pipes)
    printed = done.stdout
    for path in (sysconfig.get_path("purelib"), str(folder), str(ROOT)):
        printed = printed.replace(path, "[...]")
    lines = [line.rstrip() for line in printed.splitlines() if progress or not _PROGRESS.match(line)]
    lines = "\n".join(lines).strip("\n").splitlines()
    return {"language": language, "command": text, "exit_code": done.returncode, "lines": lines}


@dataclass(frozen=True)
class Flags:
    """Compares README, docs and the page of experiments with the results."""

    pages: Annotated[tuple[Path, ...], Parameter(metavar="PAGE")] = PAGES
    write: bool = False
    """Write what the results say into the pages."""
    run: bool = False
    """First run the commands whose output isn't filed, and rewrite the blocks that show it."""
    fresh: bool = False
    """With --run, also run what was filed with the same versions."""
    out: Path = PRINTED


def main(argv: list[str] | None = None) -> int:
    """Compares the pages, prints what is wrong as `page:line: ...`, and returns 1 if something is."""
    flags = flags_of(Flags, argv, "experiments.pages")
    return run_command(lambda: _do(flags), name="experiments.pages")


def _do(flags: Flags) -> int:
    if missing := [str(page) for page in flags.pages if not page.is_file()]:
        raise UsageError(f"--pages got {missing[0]!r}, which isn't a file", next_step="give README.md or docs/PAGE.md")
    with named_by("--out", flags.out, "give a folder that is yours", UsageError):
        flags.out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for page in (page.resolve() for page in flags.pages):
        if flags.run:
            run_page(page, flags.out, flags.fresh)
        text, filed = page.read_text(), filed_outputs(flags.out)
        wrong = check(page, text, filed)
        if flags.write and any(part.place for part in wrong):
            write_whole(page, written(text, wrong))
            wrong = check(page, page.read_text(), filed)
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
        lines += [f"{name}:{part.line}: {part.what}" for part in wrong]
    print("\n".join(lines) or f"{len(flags.pages)} pages show what the results say")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
