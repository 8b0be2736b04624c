"""The numbers that the pages give as results are those of the files of results."""

import json
import re
import shutil

import pytest

from experiments.common import RESULTS
from experiments.numbers.__main__ import ROOT, SOURCES, main, parts_of
from experiments.numbers.held import NUMBER, NotFoundError, Table, Words, differing, written
from experiments.numbers.rows import EXPERIMENTS

pytestmark = pytest.mark.any_jax
PARTS = [part for names in SOURCES for part in parts_of(*names)]
PAGES = {name: (ROOT / name).read_text() for name in sorted({part.page for part in PARTS})}


@pytest.mark.parametrize("names", SOURCES, ids=" ".join)
def test_pages_give_the_numbers_of_the_results(names):
    parts = parts_of(*names)
    assert parts
    assert [line for part in parts for line in differing(PAGES[part.page], part)] == []


def test_every_file_of_results_is_used():
    """Claims and printed outputs are held against their pages by tests of their own."""
    files = {str(path.relative_to(RESULTS).with_suffix("")) for path in RESULTS.rglob("*.json")}
    held_elsewhere = {name for name in files if name.startswith(("claims/", "printed/"))}
    assert files - held_elsewhere == {name for names in SOURCES for name in names}


def test_every_mark_has_its_table():
    marks = {(str(page.relative_to(ROOT)), name) for page in _pages() for name in _marks(page.read_text())}
    assert marks == {(part.page, part.name) for part in PARTS if isinstance(part, Table)}


def _pages():
    return [ROOT / "README.md", ROOT / EXPERIMENTS, *(ROOT / "docs").glob("*.md")]


def _marks(text):
    return re.findall(r"^<!-- results: (.*) -->$", text, re.MULTILINE)


def test_every_number_of_the_experiments_is_held():
    """Each number in the results of the table of experiments is one that a file of results decides."""
    text = PAGES[EXPERIMENTS]
    held = {place[0] for part in PARTS if part.page == EXPERIMENTS for place in part.places(text)}
    loose = []
    for line in re.finditer(r"^\| (?!claim|---)[^|]*\|(.*)\| [^|]*\|$", text.partition("## ")[0], re.MULTILINE):
        numbers = [found for found in NUMBER.finditer(text, line.start(1), line.end(1))]
        loose += [
            f"{found[0]}: {text[found.start() - 30 : found.end() + 30]}" for found in numbers if found.start() not in held
        ]
    assert loose == []


def test_names_have_no_numbers():
    text = (
        "llama3.2-1b on `fsdp=8` and data=2,fsdp=64 of an H100 waits 22 ms of 7,470, from -8.7 to +1.5 % within 1e-6 (12)."
    )
    assert NUMBER.findall(text) == ["22", "7,470", "-8.7", "+1.5", "12"]


def test_words_are_found_over_line_breaks_and_written_again():
    words = Words("page.md", "waits 22 ms of 806")
    page = "A GPU waits 21 ms\nof 1,806 for them.\n"
    assert written(page, words) == "A GPU waits 22 ms\nof 806 for them.\n"
    assert differing(page, words) == [f"'21' should be '22': {words}", f"'1,806' should be '806': {words}"]
    assert differing(written(page, words), words) == []


def test_words_between_numbers_may_be_left_out():
    words = Words("page.md", "waits 22 ms ... on 8 GPUs")
    assert written("waits 1 ms of 3\nhere on 4 GPUs", words) == "waits 22 ms of 3\nhere on 8 GPUs"
    for other in ("waits 1 ms |\n| on 4 GPUs", "waits 1 ms\n\non 4 GPUs"):
        with pytest.raises(NotFoundError):
            written(other, words)


@pytest.mark.parametrize("page", ["It takes 22 ms.", "waits 1 ms, and waits 2 ms", "waits none ms"])
def test_words_that_are_not_there_once_are_named(page):
    with pytest.raises(NotFoundError, match=r"page\.md should have once.*waits 22 ms"):
        written(page, Words("page.md", "waits 22 ms"))


def test_a_table_is_written_between_its_marks():
    table = Table("page.md", "sizes", [["model", "GiB"], ["gpt2", 1.25]])
    page = "before\n\n<!-- results: sizes -->\n| old |\n<!-- end -->\n\nafter\n"
    lines = "| model | GiB |\n| --- | --- |\n| gpt2 | 1.25 |\n"
    assert written(page, table) == page.replace("| old |\n", lines)
    with pytest.raises(NotFoundError, match="results: sizes"):
        written(page.replace("sizes", "others"), table)


def test_the_command_writes_the_pages(tmp_path, capsys):
    for name in PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    levers = tmp_path / "docs/levers.md"
    largest = json.loads((RESULTS / "h100-80gb/levers.json").read_text())["loss"][-1]["largest_batch"]
    levers.write_text(levers.read_text().replace(f"| {largest} |\n", "| 7 |\n"))
    assert main([], tmp_path) == 0
    assert "docs/levers.md: " in capsys.readouterr().out
    assert {name: (tmp_path / name).read_text() for name in PAGES} == PAGES
    levers.write_text("")
    assert main([], tmp_path) == 1
    assert "docs/levers.md should have once" in capsys.readouterr().err
