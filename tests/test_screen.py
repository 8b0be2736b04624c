"""Tables and text at any width, on any stream: no digit is cut, and names break at separators only."""

import io
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from jaxremat.command import run_command
from jaxremat.interrupt import in_xla
from jaxremat.report.progress import Progress, compile_text, rest_text
from jaxremat.report.screen import CARDS_BELOW, DROPPED, LEAST_WIDTH, broken, print_whole, shared_screen
from jaxremat.report.table import table_of
from jaxremat.search.compiles import Compile

COLUMNS = ("policy", "batch", "GiB", "state", "temp", "recompute", "predicted\nms ±12%", "MFU", "tokens/s")
POLICY = "save:attention_out,mlp_wi_0,mlp_wi_1+attention"
ROWS = (
    (POLICY, "188943", "59.33", "0.047", "59.28", "2.2%", "1,274.3", "3.3%", "44,078,237"),
    ("minimal", "8", "0.036", "0.001", "0.034", "0.0%", "0.5", "12.1%", "131,722"),
)


def made_table() -> Table:
    table = table_of("policy dots: GiB on the device", *COLUMNS)
    for row in ROWS:
        table.add_row(*row)
    return table


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=(out := io.StringIO()), width=width, markup=False)
    console.print(table)
    return out.getvalue().splitlines()


@given(st.integers(LEAST_WIDTH, 200))
def test_no_digit_is_cut_at_any_width(width):
    lines = printed(made_table(), width)
    words = set(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)
    for name, *numbers in ROWS:
        shown = [number for title, number in zip(COLUMNS[1:], numbers, strict=True) if title not in DROPPED]
        assert words >= set(shown)
        assert "".join(word for word in " ".join(lines).split() if word in name and len(word) > 3) == name


@pytest.mark.parametrize("width", [20, CARDS_BELOW - 1])
def test_a_narrow_terminal_gets_every_number_of_a_row_below_its_name(width):
    text = " ".join(printed(made_table(), width)).split()
    assert {number for _, *numbers in ROWS for number in numbers} <= set(text)


def test_columns_drop_out_in_the_stated_order():
    dropped = []
    for width in range(200, CARDS_BELOW, -1):
        text = "\n".join(printed(made_table(), width))
        gone = [name for name in DROPPED if name not in text]
        if gone and gone != [*DROPPED]:
            dropped.append(gone)
    assert dropped
    assert all(gone == [*DROPPED[: len(gone)]] for gone in dropped)


def test_a_wide_terminal_shows_a_table_as_it_is():
    assert POLICY in "\n".join(printed(made_table(), 200))


def test_text_from_outside_is_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    table = table_of("a/[/x].py", "name", "h[i]")
    table.add_row("[/INST] h[i]", ":smile:")
    shared_screen().results.print(table)
    out = capsys.readouterr().out
    assert all(text in out for text in ("a/[/x].py", "[/INST] h[i]", "h[i]", ":smile:"))


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("1", LEAST_WIDTH), ("120", 120), ("abc", 80), ("9" * 30, 80)])
def test_the_width_is_one_that_can_be_printed_on(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert shared_screen().results.width == width


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("short", 10, ["short"]),
        ("save:wi_0,wi_1", 10, ["save:wi_0,", "wi_1"]),
        ("131,722,000", 6, ["131,722,000"]),
        ("no_separator_at_all", 6, ["no_separator_at_all"]),
        ("a/path/to/a/file.py 12", 8, ["a/path/", "to/a/", "file.py 12"]),
    ],
)
def test_words_break_behind_separators(text, width, lines):
    assert broken(text, width).splitlines() == lines


def test_a_list_in_a_pipe_has_whole_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    print_whole(shared_screen().results, made_table())
    assert POLICY in capsys.readouterr().out


class Full(io.TextIOWrapper):
    """A stream on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_an_answer_that_cannot_be_printed_is_one_message(monkeypatch, capsys):
    monkeypatch.setattr("jaxremat.command._drop_stdout", lambda: None)
    monkeypatch.setattr(sys, "stdout", Full(io.BytesIO()))
    assert run_command(lambda: 0) == 1
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--out" in err


def test_a_closed_stdout_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command(lambda: print("an answer") or 0) == 1
    monkeypatch.undo()
    assert "--out" in capsys.readouterr().err


def test_a_stream_of_ascii_shows_other_characters(monkeypatch):
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert run_command(lambda: print("ms ±12%, 層") or 0) == 0
    assert raw.getvalue() == f"ms +-12%, ?{os.linesep}".encode()


def test_a_fault_of_ours_is_said_to_be_one(capsys):
    def fails() -> int:
        raise AssertionError("no user could have caused this")

    assert run_command(fails) == 1
    err = capsys.readouterr().err
    assert "AssertionError" in err
    assert "jaxremat.doctor --json" in err.splitlines()[-1]


def test_a_machine_without_memory_is_no_fault_of_ours(capsys):
    def fails() -> int:
        raise MemoryError

    assert run_command(fails) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_pipe_hears_of_a_long_compile(monkeypatch):
    monkeypatch.setattr("jaxremat.report.progress.HEARTBEAT_S", 0.03)
    console = Console(file=(out := io.StringIO()), width=80, markup=False)
    with Progress(console) as progress:
        progress.show(compile_text("dots", Compile(2, 4, rest := 60.0), "batch 8"))
        with in_xla():
            time.sleep(0.1)
    time.sleep(0.05)
    text = out.getvalue()
    assert 2 <= text.count("compile 2 of at most 4, batch 8") <= 7
    assert text.count(rest_text(rest)) == 1, "an estimate of a minute ago isn't repeated"
    time.sleep(0.05)
    assert out.getvalue() == text
