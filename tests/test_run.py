"""`jaxremat.run` as a person uses it, on models of a few thousand parameters: what it prints, writes and exits with.

Compiling takes the time, so a few real runs are made once and many tests look at them; the printer's exit codes are then
read off made-up records. What depends on the process (signals, pipes, the environment) runs in one of its own.
"""

import dataclasses
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from jaxremat import __version__
from jaxremat.chips.installed import version_of
from jaxremat.chips.nvidia.gpu import bundled_names
from jaxremat.cli.command import parse_flags
from jaxremat.cli.run import main
from jaxremat.config import Optimizer
from jaxremat.errors import CompileError, JaxrematError
from jaxremat.model.presets import PRESETS
from jaxremat.policy.grammar import grammar
from jaxremat.report.printer import Printer, Report
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import check_run
from jaxremat.trial.lines import from_row
from jaxremat.trial.store import Store
from tests.helpers import WORKSPACE
from tests.made_up_records import step, trial

COMMAND = [sys.executable, "-m", "jaxremat.run"]
SMALL = "--model tiny --num-layers 1 --dropout 0"
BUDGET = 3_600_000 + WORKSPACE
SEARCH = f"{SMALL} --target h100-80gb --policy nothing --policy dots --max-batch 9 --budget {BUDGET}B --json".split()
FIELDS = """schema model num_params requested_policy policy target batch seq_len loss optimizer attention argument_bytes
    output_bytes alias_bytes temp_bytes host_temp_bytes generated_code_bytes peak_bytes total_bytes budget_bytes fits lower_s
    compile_s step_s step_source tokens_per_s model_flops executed_flops mfu num_compiles versions""".split()  # noqa: SIM905


def bare_environment(**more: str) -> dict[str, str]:
    """Next to nothing: what a program started by cron has."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **more}


def rows(text: str) -> list[dict[str, Any]]:
    """Every line parsed: a line that isn't JSON fails the test."""
    return [json.loads(line) for line in text.splitlines()]


@dataclasses.dataclass
class Ran:
    code: int
    out: str
    err: str
    rows: list[dict[str, Any]]
    path: Path


@pytest.fixture(scope="module")
def searched(tmp_path_factory, h100) -> Ran:
    """Two searches in a process without any environment."""
    path = tmp_path_factory.mktemp("search") / "rows.jsonl"
    done = subprocess.run(
        [*COMMAND, *SEARCH, "--out", str(path)], env=bare_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr, rows(done.stdout), path)


@pytest.mark.full
class TestSearch:
    def test_rows_have_every_field(self, searched):
        trials = [row for row in searched.rows if row["record"] != "largest_batch"]
        assert trials
        for row in trials:
            assert set(FIELDS) <= set(row)
            assert [name for name in FIELDS if row[name] is None] == []
            assert row["total_bytes"] == (
                row["argument_bytes"] + row["output_bytes"] + row["temp_bytes"] - row["alias_bytes"]
            )
            assert row["fits"] == (row["total_bytes"] <= row["budget_bytes"] == BUDGET)
            assert (row["model"], row["target"], row["step_source"]) == ("tiny", "h100-80gb", "predicted")
            assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["seq_len"] / row["step_s"])
            assert row["versions"]["jaxremat"] == version_of("jaxremat")
            assert row["versions"]["jax"]

    def test_each_policy_ends_with_its_largest_batch(self, searched):
        assert [row["policy"] for row in searched.rows if row["record"] == "largest_batch"] == ["nothing", "dots"]
        assert searched.rows[-1]["record"] == "largest_batch"

    def test_the_claim_is_in_the_rows(self, searched):
        for found in (row for row in searched.rows if row["record"] == "largest_batch"):
            trials = {
                row["batch"]: row for row in searched.rows if row["record"] == "trial" and row["policy"] == found["policy"]
            }
            largest = found["largest_batch"]
            expected = {largest} if found["next_batch_total_bytes"] is None else {largest, largest + 1}
            assert set(trials) == expected
            assert trials[largest]["fits"]
            assert trials[largest]["total_bytes"] == found["largest_batch_total_bytes"]
            if largest + 1 in trials:
                assert not trials[largest + 1]["fits"]
                assert trials[largest + 1]["total_bytes"] == found["next_batch_total_bytes"] > found["budget_bytes"]
            else:
                assert largest == found["max_batch"] == 9
            compiled = {row["batch"] for row in searched.rows if row["policy"] == found["policy"] and "batch" in row}
            assert found["num_compiles"] == len(compiled) <= 5

    def test_the_file_has_the_same_lines(self, searched):
        assert searched.path.read_text() == searched.out

    def test_stderr_is_progress_and_nothing_else(self, searched):
        assert all(re.match(r"\[ *\d+\.\d s\] \S", line) for line in searched.err.splitlines()), searched.err
        assert "\x1b" not in searched.out + searched.err

    def test_estimates_of_all_policies_come_before_any_proof(self, searched):
        """One compile of each comes before the second ones. The search resumes where it stopped: no compile is numbered twice."""
        compiled = re.findall(r"\] (\w+): compile (\d+)", searched.err)
        estimates = re.findall(r"\] (\w+): compile 2 .* the largest that fits is about (\d+)", searched.err)
        assert compiled[:4] == [(policy, n) for n in "12" for policy in ("nothing", "dots")]
        assert [policy for policy, _ in estimates] == ["nothing", "dots"]
        for found in (row for row in searched.rows if row["record"] == "largest_batch"):
            assert abs(int(dict(estimates)[found["policy"]]) - found["largest_batch"]) <= 1
            numbers = [int(n) for policy, n in compiled if policy == found["policy"]]
            assert numbers == [*range(1, found["num_compiles"] + 1)]

    def test_the_same_rows_as_tables(self, searched, capsys):
        """Printed again from the records, as without --json: narrow enough, and a row of each policy side by side."""
        printer = Printer(Report(Console()))
        for policy in ("nothing", "dots"):
            for row in searched.rows:
                if row["policy"] == policy:
                    printer.row(from_row(row))
            printer.policy_done()
        printer.all_done("h100-80gb")
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        largest = {row["policy"]: row["largest_batch"] for row in searched.rows if row["record"] == "largest_batch"}
        cells = [line.split() for line in lines if line.strip()]
        assert {cell[0]: int(cell[1]) for cell in cells if cell[0] in largest} == largest
        assert printer.exit_code() == 0


@pytest.mark.full
@pytest.mark.usefixtures("h100")
def test_a_slow_search_says_once_what_takes_one_compile(monkeypatch, capsys):
    monkeypatch.setattr("jaxremat.session.answers.SLOW_S", 0.0)
    assert main(SEARCH) == 0
    [note] = [line for line in capsys.readouterr().err.splitlines() if "--batch" in line]
    assert note.startswith("nothing: compile 1 took")


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ({"fits": True}, {"fits": True}, 0),
        ({"fits": False}, {"fits": True}, 0),
        ({"fits": False}, {"fits": False}, 3),
        ({"fits": True}, {"fits": None, "total_bytes": None, "error": "rejected", "error_kind": "CompileError"}, 1),
    ],
)
def test_exit_codes(first, second, code, capsys):
    printer = Printer(Report(Console()))
    for policy, change in (("one", first), ("two", second)):
        printer.row(dataclasses.replace(trial(8), policy=policy, **change))
        printer.policy_done()
    printer.all_done("h100-80gb")
    assert printer.exit_code() == code
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_loses_nothing_of_stdout(capsys):
    with Store(Path("/dev/full")) as store:
        printer = Printer(Report(Console(), as_json=True, out=store))
        with pytest.raises(JaxrematError) as caught:
            printer.row(trial(8))
    assert "--out '/dev/full'" in caught.value.got
    assert [from_row(row) for row in rows(capsys.readouterr().out)] == [trial(8)]


@pytest.mark.full
def test_one_of_two_policies_fits(h100, tmp_path, capsys):
    """At 82 MiB the layers' residuals don't fit and their inputs do: exit code 0, and both are in the table."""
    path = tmp_path / "rows.jsonl"
    shape = "--model tiny --num-layers 8 --dropout 0 --seq-len 128 --batch 16 --budget 82MiB --target h100-80gb"
    assert main([*shape.split(), "--policy", "none", "nothing", "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(row["record"], row["policy"], row["batch"], row["fits"]) for row in rows(path.read_text())] == [
        ("trial", "none", 16, False),
        ("trial", "nothing", 16, True),
    ]
    assert max(map(len, lines[:-1])) <= 80  # the last one is a command to paste
    cells = [line.split() for line in lines]
    assert {"none", "nothing"} <= {cell[0] for cell in cells if len(cell) > 3 and cell[1] == "16"}


@pytest.mark.full
def test_measured_on_the_cpu_and_appended(searched, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    shutil.copy(searched.path, path)
    argv = f"{SMALL} --target cpu --policy nothing --batch 2,2 --steps 2 --out {path}"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    before = searched.path.read_text()
    assert path.read_text().startswith(before), "appended, nothing overwritten"
    (row,) = rows(path.read_text()[len(before) :])
    assert (row["record"], row["batch"], row["step_source"], row["fits"]) == ("trial", 2, "measured", True)
    assert 0 < row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
    assert max(map(len, out.splitlines()[:-1])) <= 80


@pytest.mark.full
def test_nothing_fits(h100, capsys):
    assert main(f"{SMALL} --target h100-80gb --policy nothing --batch 1 --budget 0.5MiB --json".split()) == 3
    (row,) = [row for row in rows(capsys.readouterr().out) if row["record"] == "trial"]
    assert (row["fits"], row["budget_bytes"]) == (False, 2**19)
    assert row["total_bytes"] > row["budget_bytes"]


@pytest.mark.full
def test_interrupted(h100, tmp_path):
    """Ctrl-C after the first row: 130, that row is in the file and on the screen, no traceback."""
    path = tmp_path / "rows.jsonl"
    argv = f"{SMALL} --target h100-80gb --policy nothing --batch 1,2,3,4,5,6,7,8 --out {path}"
    process = subprocess.Popen(
        [*COMMAND, *argv.split()], env=bare_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not (path.exists() and path.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "jaxremat: interrupted; what was compiled is stored for the same command again"
    assert "Traceback" not in err
    saved = rows(path.read_text())
    assert [row["batch"] for row in saved] == list(range(1, len(saved) + 1))
    assert 1 <= len(saved) < 8
    assert out


def test_an_interrupted_frontier_is_drawn(monkeypatch, h100, capsys):
    """Of the points so far. Without a point nothing is drawn."""
    points, drawn = [trial(8)], []

    def ends(session, policy, listener, first_batch) -> Iterator[None]:
        yield None
        for point in points:
            listener.record(point)
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxremat.session.answers.answers", ends)
    monkeypatch.setattr("jaxremat.report.plot.check_plot", lambda: None)
    monkeypatch.setattr("jaxremat.report.plot.plot_frontier", lambda rows, path: drawn.append((list(rows), path)))
    argv = f"{SMALL} --target h100-80gb --attention xla --frontier --batch 8 --json --plot frontier.png".split()
    assert main(argv) == 130
    assert drawn == [(points, Path("frontier.png"))]
    assert [row["policy"] for row in rows(capsys.readouterr().out)] == ["dots"]
    points.clear()
    assert main(argv) == 130
    assert len(drawn) == 1


def batches_by_policy(out: str) -> dict[str, list[str]]:
    """The batches in the table of each policy."""
    tables = re.findall(r"^policy (\w+): .*\n((?:.*\n)*?)(?=\w|\Z)", out, re.MULTILINE)
    return {policy: re.findall(r"^ +(\d+) ", table, re.MULTILINE) for policy, table in tables}


class TestEstimates:
    """Of two searches and the plan between them, which has none."""

    argv = f"{SMALL} --target h100-80gb --attention xla --policy none auto dots".split()

    @staticmethod
    def made_up(calls: list[Any]) -> Any:
        def answers(session, requested, listener, first_batch) -> Iterator[int | None]:
            policy = {"requested_policy": requested.text, "policy": requested.text}
            if requested.text != "auto":
                session.trials.of(requested.policy)
                listener.record(trial(4, record="probe", **policy))
            yield {"none": 58, "auto": None, "dots": 0}[requested.text]
            calls.append((requested.text, [steps.policy for steps in session.trials.steps.values()]))
            listener.record(trial(8, **policy))

        return answers

    def test_each_policy_waits_for_the_estimates_of_all(self, monkeypatch, h100, capsys):
        calls: list[Any] = []
        monkeypatch.setattr("jaxremat.session.answers.answers", self.made_up(calls))
        assert main([*self.argv, "--json"]) == 0
        printed = capsys.readouterr()
        found = [(row["policy"], row["batch"]) for row in rows(printed.out) if row["record"] != "ranks"]
        assert found == [("none", 4), ("dots", 4), ("none", 8), ("auto", 8), ("dots", 8)]
        first, second = [line for line in printed.err.splitlines() if "fits" in line]
        assert re.search(r"none: .* about 58;", first)
        assert re.search(r"dots: .* no batch fits;", second)
        of = {policy: [str(one) for one in compiled] for policy, compiled in calls}
        assert of == {"none": ["none"], "auto": ["none"], "dots": ["dots"]}, "a plan takes up what was compiled before it"

    def test_tables_have_the_rows_of_their_policy(self, monkeypatch, h100, capsys):
        monkeypatch.setattr("jaxremat.session.answers.answers", self.made_up([]))
        assert main(self.argv) == 0
        out = capsys.readouterr().out
        assert batches_by_policy(out) == {"none": ["4", "8"], "auto": ["8"], "dots": ["4", "8"]}
        side_by_side = [line.split()[:2] for line in out.partition("side by side")[2].splitlines() if " 8 " in line]
        assert side_by_side == [["none", "8"], ["auto", "8"], ["dots", "8"]], "in the order of the request"

    def test_an_interrupt_shows_what_was_compiled_of_each(self, monkeypatch, h100, capsys):
        def answers(session, requested, listener, first_batch) -> Iterator[int]:
            listener.record(trial(4, record="probe", requested_policy=requested.text, policy=requested.text))
            yield 58
            raise KeyboardInterrupt

        monkeypatch.setattr("jaxremat.session.answers.answers", answers)
        assert main(f"{SMALL} --target h100-80gb --attention xla --policy none dots".split()) == 130
        assert batches_by_policy(capsys.readouterr().out) == {"none": ["4"], "dots": ["4"]}

    def test_an_interrupt_shows_how_to_look_closer(self, monkeypatch, h100, capsys):
        """At the fastest step so far: a row of a policy that is done, or the best step of a plan's search."""

        def answers(session, requested, listener, first_batch) -> Iterator[None]:
            yield None
            if requested.text == "none":
                listener.record(step("none", 8))
            else:
                config = trial(16).config | {"model": {"num_layers": 12}}
                listener.so_far(lambda: step("save:q", 16, record="probe", requested_policy="auto", config=config))
                raise KeyboardInterrupt

        monkeypatch.setattr("jaxremat.session.answers.answers", answers)
        assert main(f"{SMALL} --target h100-80gb --attention xla --policy none auto --budget 11.02GiB".split()) == 130
        *_, last = capsys.readouterr().out.splitlines()
        words = "--attention xla --budget 11.02GiB --batch 16 --policy save:q --lint"
        assert last.startswith("To look for likely mistakes in the fastest step: jaxremat explain ")
        assert {*words.split()} <= {*last.split()}


@pytest.mark.parametrize(("error", "is_fault"), [(TypeError, True), (CompileError, False)])
def test_a_policy_that_fails_does_not_end_the_others(error, is_fault, monkeypatch, h100, capsys):
    """Its failure is a record, and the command's exit code 1. A failure of the only policy ends the command.

    The traceback of a fault is in the record and on stderr, as that of the only policy is.
    """

    def fails(session, requested, listener, first_batch) -> Iterator[None]:
        yield None
        if requested.text == "dots":
            raise error("reduce_precision does not accept complex64\nmore")
        listener.record(trial(8, requested_policy=requested.text, policy=requested.text))

    monkeypatch.setattr("jaxremat.session.answers.answers", fails)
    argv = f"{SMALL} --target h100-80gb --attention xla --batch 8 --json --policy".split()
    assert main([*argv, "none", "dots", "nothing"]) == 1
    printed = capsys.readouterr()
    first, failed, last = rows(printed.out)
    assert (first["policy"], last["policy"]) == ("none", "nothing")
    assert (failed["record"], failed["requested_policy"], failed["batch"]) == ("failure", "dots", 8)
    assert failed["error"].splitlines() == [f"{error.__name__}: reduce_precision does not accept complex64"]
    shown = [any(line.endswith("in fails") for line in lines) for lines in (failed["tail"], printed.err.splitlines())]
    assert shown == [is_fault, is_fault]
    assert main([*argv, "dots"]) != 0
    alone = capsys.readouterr()
    assert alone.out == ""
    assert "reduce_precision" in alone.err
    assert ("Traceback" in alone.err) == is_fault


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ["dots"]),
        ("--policy dots nothing", ["dots", "nothing"]),
        ("--policy dots --policy nothing none", ["dots", "nothing", "none"]),
        ("--policy dots dots_saveable checkpoint_dots", ["dots"]),
    ],
)
def test_policies_add_up(line, expected):
    request = check_run(parse_flags(RunFlags, ["--model", "tiny", *line.split()]))
    assert [str(asked.policy) for asked in request.policies] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [("", ()), ("--batch 8,16,32", (8, 16, 32)), ("--batch 8 16 --batch 4", (8, 16, 4)), ("--batch 8,8", (8,))],
)
def test_batches_add_up(line, expected):
    assert check_run(parse_flags(RunFlags, ["--model", "tiny", *line.split()])).batches == expected


LISTS = {
    "policies": [form.pattern for form in grammar()],
    "models": [*PRESETS],
    "targets": ["cpu", *bundled_names()],
    "optimizers": [*get_args(Optimizer)],
    "names --batch 4": ["mlpwi_0", "context"],
}


@pytest.mark.parametrize("line", LISTS)
def test_lists(line, capsys):
    """Each name is whole in the table, and has a record."""
    assert main(["--model", "tiny", "--list", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not any(text.endswith(" ") for text in out.splitlines())
    assert [name for name in LISTS[line] if not any(text.startswith(f" {name} ") for text in out.splitlines())] == []
    assert main(["--model", "tiny", "--json", "--list", *line.split()]) == 0
    found = rows(capsys.readouterr().out)
    assert {row[row["record"]] for row in found} >= {*LISTS[line]}


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (
            "models",
            {"record": "model", "model": "gpt2", "num_params": 124_439_808, "num_layers": 12, "embed_dim": 768}
            | {"vocab_size": 50257, "seq_len": 1024},
        ),
        ("optimizers", {"record": "optimizer", "optimizer": "sgd-momentum", "bytes_per_param": 4.0}),
        ("names --batch 4", {"record": "name", "name": "mlpwi_0", "dtype": "bfloat16"}),
    ],
)
def test_numbers_of_lists(line, row, capsys):
    assert main(["--model", "tiny", "--json", "--list", *line.split()]) == 0
    found = rows(capsys.readouterr().out)
    assert any(row.items() <= other.items() for other in found), found


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxremat {__version__}\n"


#: What needs no JAX, as statements.
LIGHT = [
    "import jaxremat; jaxremat.__version__; dir(jaxremat)",
    "from jaxremat.cli import run, sweep",
    "run.main(['--version'])",
    "try: run.main(['--help'])\nexcept SystemExit as end: assert end.code == 0",
    "try: sweep.main(['--help'])\nexcept SystemExit as end: assert end.code == 0",
    "assert run.main(['--policy', 'dotts']) == 2",
]


@pytest.mark.full
def test_what_needs_no_jax_imports_none():
    """One after the other in one process; the first one that imports it ends it."""
    program = ["import sys"]
    for light in LIGHT:
        program.append(light)
        program.append(
            f"heavy = {{'jax', 'flax', 'optax', 'numpy', 'submitit'}} & {{*sys.modules}}; assert not heavy, {light!r}"
        )
    done = subprocess.run([sys.executable, "-c", "\n".join(program)], env=bare_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("line", ["--help", "--list models", "--list models --json"])
def test_a_closed_pipe_is_no_traceback(line):
    """What `| head -1` does once head has its line."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, *line.split()], env=bare_environment(), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.full
@pytest.mark.parametrize("no_color", [False, True])
def test_colour_only_on_a_terminal_that_wants_it(no_color):
    main_end, terminal = pty.openpty()
    environment = bare_environment(TERM="xterm-256color", **({"NO_COLOR": "1"} if no_color else {}))
    listing = subprocess.Popen([*COMMAND, "--list", "models"], env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    said = b""
    try:
        while chunk := os.read(main_end, 65536):
            said += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(main_end)
    assert listing.wait() == 0
    assert b"124,439,808" in said
    assert b"\x1b[1m" in said  # bold, which NO_COLOR allows
    colours = re.findall(rb"\x1b\[(?:\d+;)*(?:3|4|9|10)\d(?:;[\d;]*)?m", said)
    assert not (no_color and colours)


@pytest.mark.full
def test_the_live_line_leaves_a_piped_stdout_alone():
    """With stderr on a terminal and stdout in a pipe or file, as in `--json > rows.jsonl`."""
    program = (
        "from rich.console import Console\nfrom jaxremat.report.progress import Progress\n"
        "with Progress(Console(stderr=True)) as progress:\n    progress.show('compile 1')\n    print('a row', flush=True)\n"
    )
    main_end, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=bare_environment(TERM="xterm-256color"),
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    shown = os.read(main_end, 65536)
    os.close(main_end)
    assert (done.returncode, done.stdout) == (0, "a row\n")
    assert b"compile 1" in shown
    assert b"a row" not in shown


@pytest.mark.full
def test_what_c_prints_stays_out_of_the_records():
    """HiGHS and XLA print to stdout from C: with --json that goes to stderr."""
    code = """
import ctypes, sys
from jaxremat.cli import run
def work(request, place):
    ctypes.CDLL(None).puts(b"noise from C")
    print('{"record": "trial"}')
    return 0
run.show_answers = work
sys.argv = ["jaxremat", "--json"]
sys.exit(run.main())
"""
    done = subprocess.run([sys.executable, "-c", code], env=bare_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, '{"record": "trial"}\n')
    assert "noise from C" in done.stderr


@pytest.mark.full
def test_messages_that_nobody_reads_end_a_command():
    """With exit code 1. Python's own is 120, where it can't flush them at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "jaxremat", "doctor"], stdout=subprocess.DEVNULL, stderr=writer)
    os.close(writer)
    assert done.returncode == 1
