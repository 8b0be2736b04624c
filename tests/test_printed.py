"""What README and docs print is what is filed of their commands, made with the versions that the pages name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments.printed import (
    NOT_RUN,
    PAGES,
    PRINTED,
    ROOT,
    VARIES,
    Command,
    filed_outputs,
    first_missing,
    main,
    shown_outputs,
    what_differs,
)

pytestmark = pytest.mark.any_jax
BLOCKS = [block for page in PAGES for block in shown_outputs(page)]
FILES = sorted(PRINTED.glob("*.json"))
VERSIONS = json.loads((PRINTED / "README.json").read_text())["versions"]
FILED = filed_outputs(PRINTED, VERSIONS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.line}")
def test_a_page_prints_what_is_filed(block):
    assert what_differs(block, FILED) is None


def test_every_block_that_is_no_output_is_in_the_table():
    """And every row of the table is a block of a page."""
    assert {block.not_run for block in BLOCKS if block.not_run} == set(NOT_RUN.values())


def test_what_varies_is_printed_somewhere():
    for pattern in VARIES:
        assert any(re.search(pattern, block.text, re.MULTILINE) for block in BLOCKS), pattern


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_of_the_versions_that_the_pages_name(file):
    """And holds no command that its page no longer has, and no path of the machine."""
    text = (ROOT / "constraints/py3.11-jax0.10.2.txt").read_text()
    named = dict(line.split("==") for line in text.splitlines() if "==" in line)
    result = json.loads(file.read_text())
    python = result["versions"].pop("python")
    assert python.startswith("3.11.")
    installed = {package: version for package, version in result["versions"].items() if package in named}
    assert len(installed) > 4
    assert installed == {package: named[package] for package in installed}
    shown = {block.command.text for block in BLOCKS if block.page == file.stem and block.command and not block.not_run}
    assert {row["command"] for row in result["commands"]} == shown
    assert not re.search(r"/(?:home|tmp|root|usr|opt)/", json.dumps([row["lines"] for row in result["commands"]]))


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("one\ntwo", "one\ntwo  \n"),
        ("one\n[...]", "one\ntwo\nthree"),
        ("[... two lines ...]\nthree", "one\ntwo\nthree"),
        ("one\n[...]\nthree\n[...]\nfive", "one\n2\nthree\n4\nfive"),
        ("on[...] 'e'\ntwo", "one 'e'\ntwo"),
        ("[   1.0 s] one", "[ 123.4 s] one"),
        (" unrolled   8   29.25   254.3   64,416    4.1", " unrolled   8   29.25   254.3   64,416   10.1"),
        (" 2   0.076    yes     64.5   63,539   -", " 2   0.076    yes      7.5    3,539   -"),
    ],
)
def test_a_block_is_the_output_but_for_what_it_leaves_out(shown, printed):
    assert first_missing(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("one", "one\ntwo", "one"),
        ("two\n[...]", "one\ntwo\nthree", "two\n"),
        ("[...]\nthree\n[...]", "one\ntwo\nthree", "\nthree\n"),
        ("[...]\ntwo", "one\ntwo\nthree", "\ntwo"),
        ("one\n[...]\nthree\n[...]\ntwo\n[...]", "one\n2\ntwo\nthree\n4\nfive", "\ntwo\n"),
        ("one\n[...]\none", "one", "one\n"),
        ("one 1.5 GiB", "one 1.6 GiB", "one 1.5 GiB"),
        ("[   1.0 s] one", "[ 123.4 s] two", "[# s] one"),
        (
            " unrolled   8   29.25   254.3   64,416   4.1",
            " unrolled   8   29.25   254.4   64,416   4.1",
            " unrolled   8   29.25",
        ),
        (" 2   0.076    yes    64.5   63,539   -", " 2   0.077    yes    64.5   63,539   -", " 2   0.076    yes#"),
    ],
)
def test_a_block_that_is_not_the_output(shown, printed, missing):
    assert (first_missing(shown, printed) or "").startswith(missing)


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
print("[   1.2 s] going on", file=sys.stderr)
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


@pytest.fixture
def page(tmp_path) -> Path:
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "page.json").read_text())["commands"]


def test_the_commands_of_a_page_are_run_and_filed(page, tmp_path, capsys):
    assert main(["--pages", str(page), "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = rows_of(tmp_path)
    assert [row["exit_code"] for row in rows] == [0, 0, 0, 3]
    assert "vit.py" in rows[0]["lines"]
    assert [row["lines"] for row in rows[1:]] == [["two"], ["[   0.1 s] four", "three"], ["three", "--out runs"]]
    assert not (ROOT / "runs").exists()


def test_what_is_filed_is_not_run_again(page, tmp_path, capsys):
    """The last command runs again, with the one before it, whose file it reads."""
    argv, path = ["--pages", str(page), "--out", str(tmp_path)], tmp_path / "page.json"
    assert main(argv) == 0
    result = json.loads(path.read_text())
    result["commands"][1]["lines"] = ["filed before"]
    path.write_text(json.dumps({**result, "commands": result["commands"][:3]}))
    capsys.readouterr()
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "page.md:17: what is filed doesn't have: two\n1 blocks differ from what is filed\n"
    assert len(err.splitlines()) == 2
    assert [row["lines"] for row in rows_of(tmp_path)][1:] == [
        ["filed before"],
        ["[   0.1 s] four", "three"],
        ["three", "--out runs"],
    ]
    assert main([*argv, "--fresh"]) == 0
    path.write_text(path.read_text().replace('"jax":"', '"jax":"1'))
    capsys.readouterr()
    assert main(argv) == 0
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_what_a_page_must_have(tmp_path):
    """A block without a command, and one whose command isn't filed."""
    path = tmp_path / "page.md"
    path.write_text("```text\none\n```\n\n```bash\necho one\n```\n\n```text\none\n```\n")
    without, unfiled = shown_outputs(path)
    assert (without.line, unfiled.line, unfiled.command) == (1, 9, Command("bash", "echo one", False))
    assert "no command is before it" in (what_differs(without, {}) or "")
    assert "isn't filed" in (what_differs(unfiled, {}) or "")


@pytest.mark.parametrize("argv", [["--pages", "none.md"], ["--pages", "README.md", "--out", "/proc/none"]])
def test_what_cannot_be_meant_is_one_message(argv, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("experiments.printed: --")
    assert err.count("\n") == 1
    assert "Next: " in err
