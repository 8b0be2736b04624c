"""The check of the field's words: what it finds in a line, and that a file's count may fall and not grow."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_jax
spec = importlib.util.spec_from_file_location("words", Path(__file__).parent.parent / ".ci/words.py")
assert spec
assert spec.loader
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)


@pytest.mark.parametrize(
    "line",
    [
        "attention runs again",
        "def runs_again(path): ...",
        '"Kept: 12 layer inputs"',
        "class AskedModel:",
        "as XLA refused it",
        "the step under `nothing`",
        "bytes outside it",
    ],
)
def test_a_word_has_a_plainer_one(line):
    ((word, say),) = (text.split(": ") for text in words.found(line))
    assert word.strip("'") in line
    assert say in words.WORDS


@pytest.mark.parametrize(
    "line",
    [
        "the upkeep of a list",
        "Keep a Changelog",
        "the flag is refused with a UsageError",
        "bytes outside the allocator's pool",
        "for each loop of the program",
    ],
)
def test_other_lines_say_nothing_wrong(line):
    assert words.found(line) == []


def test_a_count_may_fall_and_not_grow(tmp_path, capsys):
    (tmp_path / ".ci").mkdir()
    page = tmp_path / "README.md"
    page.write_text("It is kept.\n")
    assert words.main(["--update"], tmp_path) == 0
    assert words.main([], tmp_path) == 0
    page.write_text("It is kept.\nIt runs again.\n")
    assert words.main([], tmp_path) == 1
    assert "README.md:2: 'runs again'" in capsys.readouterr().out
    page.write_text("It is saved.\n")
    assert words.main([], tmp_path) == 0
    (tmp_path / "new.md").write_text("It goes on.\n")
    assert words.main([], tmp_path) == 1


@pytest.mark.full
def test_since_a_revision_only_new_lines_count(tmp_path, capsys):
    def git(*argv):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *argv], cwd=tmp_path, check=True, capture_output=True)

    page = tmp_path / "README.md"
    page.write_text("It is kept.\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert words.main(["--base", "HEAD"], tmp_path) == 0
    page.write_text("A line before.\nIt is kept.\nIt is held.\n")
    assert words.main(["--base", "HEAD"], tmp_path) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("README.md:3: 'held'")
