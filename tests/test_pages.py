"""The pages show what the results say: the mechanism on small pages that are made up, and each real page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import pages
from experiments.common import RESULTS
from experiments.pages import (
    NOT_RUN,
    NUMBER,
    PAGES,
    PRINTED,
    README,
    ROOT,
    VARIES,
    Shown,
    check,
    filed_outputs,
    main,
    written,
)

FILED = filed_outputs(PRINTED)
FILES = sorted(PRINTED.glob("*.json"))
TEXTS = {page: page.read_text() for page in PAGES}
MADE_UP = Path("made-up.md")


@pytest.fixture
def made_up(tmp_path, monkeypatch) -> Iterator[Path]:
    """Results of two rows, and the only ones there are."""
    rows = [{"model": "gpt2", "total_bytes": 2**30, "s": 0.5}, {"model": "tiny", "total_bytes": 2**31, "s": 1234.5}]
    (tmp_path / "made.json").write_text(json.dumps({"rows": rows, "runs": {"all": 3}}))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    pages.result.cache_clear()
    yield tmp_path
    pages.result.cache_clear()


def found(text: str, filed: Any = None) -> list[tuple[int, str]]:
    return [(part.line, part.what) for part in check(MADE_UP, text, filed or {})]


def mended(text: str) -> str:
    return written(text, check(MADE_UP, text, {}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_what_the_results_say(page):
    assert check(page, TEXTS[page], FILED) == []


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ('count(one("made", "rows", model="tiny").s)', "1,234"),
        ('ms(rows("made", "rows")[0].s, 1)', "500.0"),
        ('result("made").runs.all', "3"),
        ('gib(only(rows("made", "rows"), model="gpt2").total_bytes)', "1.00"),
        ('span(row.s / 1e3 for row in rows("made", "rows"))', "0 to 1"),
        ("span((0.401, 0.6), percent)", "40 to 60 %"),
        ("span((-0.087, 0.015), signed)", "-8.7 to +1.5 %"),
        ("span((4, 4))", "4"),
        ('len(by(rows("made", "rows"), "model")[1].of)', "1"),
    ],
)
def test_a_number_is_written_before_its_source(made_up, expression, text):
    right = f"From **{text}<!-- {expression} --> of** it."
    assert found(right) == []
    for other in ("7", "12,345.6", "+1 to 2 %", "0.3 %"):
        wrong = right.replace(text, other, 1)
        assert found(f"\n\n{wrong}") == [(3, f"shown {other}, results say {text}")]
        assert mended(wrong) == right


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("It is faster<!-- 1 > 2 -->.", "False"),
        ("a word<!-- 7 -->", "7"),
        ('7<!-- one("made", "rows").s -->', "ValueError"),
        ('7<!-- one("none", "rows").s -->', "FileNotFoundError"),
        ("7<!-- 7 +  -->", "SyntaxError"),
        ('<!-- table: rows("made", "none") -->\n<!-- end -->', "KeyError"),
    ],
)
def test_what_only_a_person_can_mend_is_reported_and_left(made_up, text, says):
    [part] = check(MADE_UP, text, {})
    assert says in part.what
    assert mended(text) == text


def test_what_is_true_is_shown_as_it_is(made_up):
    assert found(
        "It is faster<!-- 2 > 1 -->, 7 times. <!-- no source: a blank before it -->\n```text\n7<!-- 8 -->\n```"
    ) == [(2, "no command is before this block")]


TABLE = """
<!-- table: [row for row in
rows("made", "rows") if row.s]
model = f"`{model}`"
GiB = gib(total_bytes)
-->
| model | GiB |
| --- | --- |
| `gpt2` | 1.00 |
| `tiny` | 2.00 |
<!-- end -->
"""


def test_a_table_is_written_by_its_mark(made_up):
    assert found(TABLE) == []
    wrong = TABLE.replace("2.00", "2.50")
    assert found(wrong) == [(10, "shown | `tiny` | 2.50 |, results say | `tiny` | 2.00 |")]
    assert mended(wrong) == TABLE
    empty = TABLE[: TABLE.index("| model")] + TABLE[TABLE.index("<!-- end") :]
    assert mended(empty) == TABLE
    whole = '<!-- table: "| one |\\n" -->\n<!-- end -->\n'
    assert mended(whole) == whole.replace("<!-- end", "| one |\n<!-- end")


def test_a_stale_number_in_readme_is_caught():
    """Each number that has a source, and any number that has none."""
    text = TEXTS[README]
    places = [match for match in re.finditer(rf"({NUMBER})(?: %)?<!-- ", text)]
    assert len(places) > 6
    for place in places:
        other = "7" if place[1] != "7" else "8"
        stale = text[: place.start(1)] + other + text[place.end(1) :]
        [part] = check(README, stale, FILED)
        assert part.line == text.count("\n", 0, place.start()) + 1
        assert written(stale, [part]) == text
    total = re.search(r"^ +\d+ +(\d+\.\d\d) ", text, re.MULTILINE)
    assert total, "a table of batches"
    other = total[1][:-1] + ("7" if total[1][-1] != "7" else "8")
    for before, after in (("A loss and shapes are", "A loss and 5 shapes are"), ("(2026-11)", ""), (total[1], other)):
        assert check(README, text.replace(before, after, 1), FILED), before


def test_an_answer_of_the_experiments_has_sources_for_its_numbers():
    text = TEXTS[pages.EXPERIMENTS]
    assert check(pages.EXPERIMENTS, text.replace("| yes: ", "| yes, 7 times: ", 1), FILED)
    assert check(pages.EXPERIMENTS, text.replace("| yes: ", "| yes, 7 times (2026-11): ", 1), FILED) == []


def test_names_have_no_numbers():
    text = "llama3.2-1b on `fsdp=8` of an H100 with Python 3.11, 0/1, waits 22 ms of 7,470, -8.7 to +1.5 % within 1e-6 (12)."
    assert re.findall(NUMBER, text) == ["22", "7,470", "-8.7", "+1.5", "12"]


def test_every_file_of_results_is_on_a_page():
    """Claims and outputs of commands are compared with their pages in another way."""
    names = {str(path.relative_to(RESULTS).with_suffix("")) for path in RESULTS.rglob("*.json")}
    others = {name for name in names if not name.startswith(("claims/", "printed/"))}
    sources = "".join(re.findall("<!-- .*?-->", "".join(TEXTS.values()), re.DOTALL))
    assert [name for name in sorted(others) if f'"{name}"' not in sources and not name.startswith("shapes/")] == []
    used = {name: f"{name}(" if callable(value) else name for name, value in pages.VOCABULARY.items() if name != "gib"}
    assert [name for name, text in used.items() if text not in sources] == []


def test_expressions_stay_invisible():
    """A comment within a line has no `--`, which some renderers end it with, and no bar, which ends a table's cell."""
    for text in TEXTS.values():
        assert {*re.findall(r"(?<!\S)<!-- (?!table: )(.*?) -->", text)} <= {"end", "the site ends here"}
        for source in re.findall(r"(?<=\S)<!-- (.*?) -->", text):
            assert "--" not in source
            assert "|" not in source
            assert "\n" not in source


def outputs(page: Path) -> list[Shown]:
    return list(pages.shown_outputs(page.stem, TEXTS[page]))


def test_every_block_that_is_no_output_is_in_the_table():
    """And every row of the table is a block of a page, and what varies is shown somewhere."""
    blocks = [block for page in PAGES for block in outputs(page)]
    assert {block.not_run for block in blocks if block.not_run} == set(NOT_RUN.values())
    for pattern in VARIES:
        assert any(re.search(pattern, block.text, re.MULTILINE) for block in blocks), pattern


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_of_the_versions_that_the_pages_name(file):
    """And holds no command that its page no longer has, and no path of the machine."""
    text = (ROOT / "constraints/py3.11-jax0.10.2.txt").read_text()
    named = dict(line.split("==") for line in text.splitlines() if "==" in line)
    result = json.loads(file.read_text())
    assert result["versions"].pop("python").startswith("3.11.")
    installed = {package: version for package, version in result["versions"].items() if package in named}
    assert len(installed) > 4
    assert installed == {package: named[package] for package in installed}
    [page] = [page for page in PAGES if page.stem == file.stem and page != pages.EXPERIMENTS]
    shown = {block.command for block in outputs(page) if block.command and not block.not_run}
    assert {(row["language"], row["command"]) for row in result["commands"]} == shown
    assert not re.search(r"/(?:home|tmp|root|usr|opt)/", json.dumps([row["lines"] for row in result["commands"]]))


@pytest.mark.parametrize(
    ("shown", "printed", "is_shown"),
    [
        ("one\ntwo", "one\ntwo  ", True),
        ("one\n[...]", "one\ntwo\nthree", True),
        ("[... two lines ...]\nthree", "one\ntwo\nthree", True),
        ("one\n[...]\nthree\n[...]\nfive", "one\n2\nthree\n4\nfive", True),
        ("on[...] 'e'\ntwo", "one 'e'\ntwo", True),
        ("[   1.0 s] one", "[ 123.4 s] one", True),
        (
            "Unrolled, the step was compiled in 12 s here, and in a scan in 4 s.",
            "Unrolled, the step was compiled in 9 s here, and in a scan in 4 s.",
            True,
        ),
        (" 2   0.076    yes     64.5   63,539   -", " 2   0.076    yes      7.5    3,539   -", True),
        ("one", "one\ntwo", False),
        ("two\n[...]", "one\ntwo\nthree", False),
        ("[...]\nthree\n[...]", "one\ntwo\nthree", False),
        ("[...]\ntwo", "one\ntwo\nthree", False),
        ("one\n[...]\nthree\n[...]\ntwo\n[...]", "one\n2\ntwo\nthree\n4\nfive", False),
        ("one 1.5 GiB", "one 1.6 GiB", False),
        ("[   1.0 s] one", "[ 123.4 s] two", False),
        (
            "Unrolled, the step was compiled in 12 s here, and in a scan in 4 s.",
            "Unrolled, the steps were compiled in 12 s here, and in a scan in 4 s.",
            False,
        ),
        (" 2   0.076    yes    64.5   63,539   -", " 2   0.077    yes    64.5   63,539   -", False),
    ],
)
def test_a_block_is_the_output_but_for_what_it_leaves_out(shown, printed, is_shown):
    command = ("bash", "echo")
    differs = pages.what_differs(Shown(1, command, shown, None), {command: {"lines": printed.splitlines()}})
    assert (differs is None) == is_shown


@pytest.mark.parametrize(
    ("shown", "before", "after", "new"),
    [
        ("a\nb", "a\nb", "a\nc\nb", "a\nc\nb"),
        ("[...]\nc 1\n[... more ...]\nf", "a\nb\nc 1\nd\ne\nf", "a\nb 2\nc 2\nd\nf 2", "[...]\nc 2\n[... more ...]\nf 2"),
        ("a 1\n[...]", "a 1\nb\nc", "a 2\nb\nc\nd", "a 2\n[...]"),
        ("x[... within ...]\ny", "x1\ny", "x2\ny", "x2\ny"),
    ],
)
def test_a_block_leaves_out_what_it_left_out_before(shown, before, after, new):
    assert pages.rewritten(shown, before.splitlines(), after.splitlines()) == new


PAGE = """
```bash
python3 -m venv .venv && pip install nothing && python -c "import os; print('one', os.environ['COLUMNS'])" && ls examples
```

```text
one 80
[... files ...]
```

```python
import sys
print("[   1.2 s] compiling", file=sys.stderr)
print("two")
```

```text
two
```

```bash
python -c "print('three', file=open('runs', 'a')); print('[   0.1 s] four'); print(open('runs').read())" --out runs
```

```text
[   3.0 s] four
three
```

```bash
cat runs && echo --out runs && exit 3
```

```text
three
--out runs
```
"""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "page.json").read_text())["commands"]


@pytest.mark.full
def test_the_commands_of_a_page_are_run_filed_and_shown(tmp_path, capsys):
    """What is filed with today's versions isn't run, but for a command whose file another one reads."""
    page, path = tmp_path / "page.md", tmp_path / "page.json"
    page.write_text(PAGE)
    argv = ["--pages", str(page), "--out", str(tmp_path)]
    assert main(argv) == 1
    assert main([*argv, "--run"]) == 0
    rows = rows_of(tmp_path)
    assert [row["exit_code"] for row in rows] == [0, 0, 0, 3]
    assert "vit.py" in rows[0]["lines"]
    after = [["two"], ["[   0.1 s] four", "three"], ["three", "--out runs"]]
    assert [row["lines"] for row in rows[1:]] == after
    assert not (ROOT / "runs").exists()

    result = json.loads(path.read_text())
    result["commands"][1]["lines"] = ["filed before"]
    path.write_text(json.dumps({**result, "commands": result["commands"][:3]}))
    capsys.readouterr()
    assert main([*argv, "--run"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("page.md:17: ")
    assert len(err.splitlines()) == 2
    assert [row["lines"] for row in rows_of(tmp_path)] == [rows[0]["lines"], ["filed before"], *after[1:]]

    page.write_text(PAGE.replace("```text\ntwo", "```text\nfiled before"))
    assert main([*argv, "--run", "--fresh"]) == 0
    assert page.read_text() == PAGE
    path.write_text(path.read_text().replace('"jax":"', '"jax":"1'))
    capsys.readouterr()
    assert main([*argv, "--run"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_the_command_checks_and_writes_pages(tmp_path, capsys):
    for page in (README, ROOT / "docs/levers.md"):
        (tmp_path / page.name).write_text(TEXTS[page])
    copy = tmp_path / "levers.md"
    argv = ["--pages", str(tmp_path / "README.md"), str(copy)]
    assert main(argv) == 0
    largest = pages.one("h100-80gb/levers", "loss", model="llama3.2-1b", loss="full", policy="nothing").largest_batch
    copy.write_text(copy.read_text().replace(f" | {largest} | ", " | 7 | "))
    capsys.readouterr()
    assert main(argv) == 1
    assert re.match(r"levers.md:\d+: shown .* 7 .*, results say .* 27 ", capsys.readouterr().out)
    assert main([*argv, "--write"]) == 0
    assert copy.read_text() == TEXTS[ROOT / "docs/levers.md"]


@pytest.mark.parametrize("argv", [["--pages", "none.md"], ["--pages", "README.md", "--out", "/proc/none"]])
def test_what_cannot_be_meant_is_one_message(argv, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
