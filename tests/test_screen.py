"""Tables and text at any width, on any stream: no digit is cut, and names break at separators only."""

import io
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

import jaxremat
from jaxremat.cli.command import run_command
from jaxremat.planner.compiles import Compile
from jaxremat.report.progress import Progress, compile_text, rest_text
from jaxremat.report.screen import CARDS_BELOW, LEAST_WIDTH, FittingTable, broken, print_text, print_whole, shared_screen
from jaxremat.report.table import table_of
from jaxremat.system.interrupt import in_xla
from tests.made_up_tables import TABLES

PACKAGE = Path(jaxremat.__file__).parent

COLUMNS = ("policy", "batch", "GiB", "state", "temp", "recompute", "predicted\nms ±12%", "MFU", "tokens/s")
DROPPED = ("MFU", "recompute", "temp", "state")
POLICY = "save:attention_out,mlp_wi_0,mlp_wi_1+attention"
ROWS = (
    (POLICY, "188943", "59.33", "0.047", "59.28", "2.2%", "1,274.3", "3.3%", "44,078,237"),
    ("minimal", "8", "0.036", "0.001", "0.034", "0.0%", "0.5", "12.1%", "131,722"),
)


def made_table() -> Table:
    table = table_of("policy dots: GiB on the device", *COLUMNS, dropped=DROPPED)
    for row in ROWS:
        table.add_row(*row)
    return table


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=(out := io.StringIO()), width=width, markup=False)
    console.print(table)
    return out.getvalue().splitlines()


#: The number of a person, whole: a shape's are apart.
NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?")


#: From the narrowest to a wide terminal, with those next to where rows become cards.
WIDTHS = (*range(LEAST_WIDTH, 201, 7), CARDS_BELOW - 1, CARDS_BELOW, 80, 120)


def numbers(text: str) -> Counter[str]:
    return Counter(NUMBER.findall(re.sub(r"\[[\d,]+\]", lambda shape: shape[0].replace(",", " "), text)))


def without(dropped: Sequence[str], table: Table) -> str:
    """What a table says, but for some columns."""
    cells = [str(cell) for column in table.columns if column.header not in dropped for cell in column.cells]
    return "\n".join([*cells, str(table.title or "")])


@pytest.mark.parametrize("name", TABLES)
def test_no_digit_is_cut_at_any_width(name):
    """Each number is whole on a line. No line is too wide or ends with a blank, and nothing is left out but whole columns."""
    table = TABLES[name]
    assert isinstance(table, FittingTable)
    said = [numbers(without(table.dropped[:count], table)) for count in range(len(table.dropped) + 1)]
    for width in WIDTHS:
        lines = printed(table, width)
        assert max(map(cell_len, lines)) <= width
        assert not any(line.endswith(" ") for line in lines)
        shown = numbers("\n".join(lines))
        assert any(shown >= some for some in (said if width >= CARDS_BELOW else said[:1])), (width, said[-1] - shown)


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("1", LEAST_WIDTH)])
@pytest.mark.parametrize("name", TABLES)
def test_terminals_without_a_width(name, columns, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    shared_screen().results.print(TABLES[name])
    assert max(map(cell_len, capsys.readouterr().out.splitlines())) <= width


def test_every_table_is_one_that_fits():
    """`table_of` makes each of them."""
    makers = [path.name for path in PACKAGE.glob("**/*.py") if re.search(r"(?<!Fitting)\bTable\(", path.read_text())]
    assert makers == ["screen.py"], "the class of them all, and the table that it prints in its place"
    assert [path.name for path in PACKAGE.glob("**/*.py") if "= FittingTable(" in path.read_text()] == ["table.py"]


@pytest.mark.parametrize("width", [20, CARDS_BELOW - 1])
def test_a_narrow_terminal_gets_every_number_of_a_row_below_its_name(width):
    text = " ".join(printed(made_table(), width)).split()
    assert {number for _, *numbers in ROWS for number in numbers} <= set(text)


def test_the_columns_of_steps_say_in_which_order_they_drop_out():
    tables = {name: table.dropped for name, table in TABLES.items() if isinstance(table, FittingTable) and table.dropped}
    side_by_side, of_frontier = ("MFU", "recompute"), ("recompute",)
    assert tables == {
        **{"batches": ("MFU", "temp", "state"), "attached": ("MFU",), "meshes": ("state",), "frontier": of_frontier},
        **dict.fromkeys(("policies", "ties", "lengths", "sweep"), side_by_side),
    }


def test_columns_drop_out_in_the_stated_order():
    dropped = []
    for width in range(200, CARDS_BELOW, -2):
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
        ("noseparatoratall", 6, ["noseparatoratall"]),
        ("h100-80gb/convert_element_type.1", 9, ["h100-", "80gb/", "convert_", "element_", "type.1"]),
        ("bf16[12,8,1024,768]", 9, ["bf16[12,", "8,1024,", "768]"]),
        ("state.opt_state[0].nu['w']", 12, ["state.opt_", "state[0].", "nu['w']"]),
        ("a/path/to/a/file.py 12", 8, ["a/path/", "to/a/", "file.py 12"]),
    ],
)
def test_words_break_behind_separators(text, width, lines):
    assert broken(text, width).splitlines() == lines


def test_a_list_in_a_pipe_has_whole_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    print_whole(shared_screen().results, made_table())
    assert POLICY in capsys.readouterr().out


@pytest.mark.parametrize("name", TABLES)
def test_what_is_printed_for_copying_is_whole_in_a_pipe(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    print_whole(shared_screen().results, TABLES[name])
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.endswith(" ") for line in lines)
    texts = [str(cell).splitlines()[0] for column in TABLES[name].columns for cell in column.cells if str(cell)]
    assert all(any(text in line for line in lines) for text in texts)


def test_sentences_in_a_pipe_end_with_no_blank(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "24")
    sentence = "  12 x attention_norm/add,query_proj, at [/INST] of 188,943"
    print_text(shared_screen().results, sentence, "a short one")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["  12 x", "attention_norm/add,", "query_proj, at [/INST]", "of 188,943", "a short one"]


class Full(io.TextIOWrapper):
    """A stream on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_an_answer_that_cannot_be_printed_is_one_message(monkeypatch, capsys):
    monkeypatch.setattr("jaxremat.cli.command._drop", lambda stream: None)
    monkeypatch.setattr(sys, "stdout", Full(io.BytesIO()))
    assert run_command(lambda: 0) == 1
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--out" in err


def test_a_full_stderr_ends_no_command(monkeypatch, capsys):
    """Messages are lost, and the answer is printed."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(sys, "__stderr__", full)
        assert run_command(lambda: print("a message", file=sys.stderr) or print("an answer") or 0) == 0
        sys.stderr.close()
        monkeypatch.undo()
    assert capsys.readouterr().out == "an answer\n"


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
    assert "jaxremat doctor --json" in err.splitlines()[-1]


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
