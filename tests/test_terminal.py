"""A command on a terminal: nothing is glued to the line of progress, and nothing of it stays."""

import functools

import pytest

from experiments.bad_inputs.case import Case, in_process
from experiments.bad_inputs.surroundings import SPINNER, on_terminal, shown


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("abc\r\ndef", ["abc", "def"]),
        ("⠋ working\r\x1b[2Kdone\r\n", ["done", ""]),
        ("one\r\ntwo\x1b[1A\r\x1b[2Kthree", ["three", "two"]),
        ("abcdefgh", ["abcde", "fgh"]),
        ("\x1b[?25l\x1b[32mab\x1b[0m\rx", ["xb"]),
    ],
)
def test_what_a_terminal_shows(text, lines):
    assert shown(text, 5 if len(text) == 8 else 40) == lines


@pytest.mark.full
@pytest.mark.parametrize("width", [40, 120])
def test_nothing_of_the_progress_stays(width, tmp_path):
    case = Case(("run", "--dump-target", "target.txt"), before=functools.partial(on_terminal, width))
    ended = in_process(case, tmp_path)
    assert (ended.exit_code, (tmp_path / "target.txt").is_file()) == (0, True)
    assert SPINNER.search(ended.stdout)  # there was a line of progress
    lines = [line for line in shown(ended.stdout, width) if line]
    assert lines
    assert not any(SPINNER.search(line) for line in lines)
    assert "target.txt" in "".join(lines)
    assert max(map(len, lines)) <= width
