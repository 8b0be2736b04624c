"""Ctrl-C ends a command even where Python swallows the exception that Ctrl-C raises."""

import contextlib
import gc
import importlib
import io
import signal
import sys
import threading
import time

import jax
import pytest
from rich.console import Console

from jaxremat.cli.command import run_command
from jaxremat.errors import JaxrematError
from jaxremat.report.printer import Printer, Report
from jaxremat.report.progress import Progress
from jaxremat.system import interrupt
from jaxremat.system.interrupt import raise_if_interrupted
from jaxremat.trial.record import TrialRecord
from jaxremat.workload.user_code import user_code
from jaxremat.xla.compile import lower_and_compile
from tests.made_up_records import step


def interrupt_in_a_collection() -> None:
    """As while JAX traces: Ctrl-C within a callback on garbage collections, where Python ignores every exception."""

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def compiles() -> int:
    lower_and_compile(lambda x: x, (jax.ShapeDtypeStruct((1,), "float32"),), "cpu")
    return 0


def fails() -> int:
    raise AssertionError("HALF-WAY")


@pytest.mark.parametrize("then", [pytest.param(compiles, marks=pytest.mark.full), fails])
def test_a_swallowed_interrupt(then, capsys):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    reached = []

    def work() -> int:
        interrupt_in_a_collection()
        reached.append("SWALLOWED")
        return then()

    assert run_command(work, saved="NOTE") == 130
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("jaxremat: ")
    assert "NOTE" in said
    assert reached
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    raise_if_interrupted()


def test_a_failure_of_its_own_is_not_an_interrupt(capsys):
    assert run_command(fails) == 1
    assert "HALF-WAY" in capsys.readouterr().err


def test_a_module_is_imported_whole(tmp_path, monkeypatch, capsys):
    """An exception within the import of NumPy or JAX can crash the process."""
    (tmp_path / "imported_whole.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nREACHED = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def work() -> int:
        assert importlib.import_module("imported_whole").REACHED
        raise_if_interrupted()
        return 0

    assert run_command(work) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_a_search_has_found_is_printed_while_xla_compiles(number, is_terminal, monkeypatch):
    """By the thread that watches for signals, beside a live line of progress. The main thread holds no lock of the console."""
    left = threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "leave", lambda code: left.set())
    monkeypatch.delenv("CI", raising=False)
    console = Console(file=(out := io.StringIO()), width=100, force_terminal=is_terminal, markup=False)
    printer, printed = Printer(Report(console)), ""
    with contextlib.suppress(KeyboardInterrupt), interrupt.remembered(), Progress(console) as progress:
        progress.show("auto: compile 2")
        printer.so_far(lambda: step("save:a,b", 24, record="probe"))
        with interrupt.says_at_the_end(printer.policy_done), interrupt.in_xla():
            signal.raise_signal(number)
            assert left.wait(2)
            printed = out.getvalue()
    assert {"24", "save:a,b:", "10.00"} <= {*printed.split()}


def test_what_a_search_has_found_is_printed_by_the_main_thread(monkeypatch, capsys):
    """Its record takes longer than the main thread has otherwise, and enters `in_xla` again after the signal."""
    left = threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "_leave", left.set)

    def found() -> TrialRecord:
        with interrupt.in_xla():
            time.sleep(0.3)
        assert not left.is_set()
        return step("save:a,b", 24, record="probe")

    printer = Printer(Report(Console(file=(out := io.StringIO()), width=100)))
    printer.so_far(found)

    def work() -> int:
        with interrupt.says_at_the_end(printer.policy_done):
            signal.raise_signal(signal.SIGINT)
        return 0

    assert run_command(work) == 130
    assert {"24", "save:a,b:", "10.00"} <= {*out.getvalue().split()}
    assert "AssertionError" not in capsys.readouterr().err


def test_a_second_signal_waits_for_no_words(monkeypatch):
    left = threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "_leave", left.set)

    def words() -> None:
        assert not left.wait(0.3)
        signal.raise_signal(signal.SIGINT)
        assert left.wait(3)

    with contextlib.suppress(KeyboardInterrupt), interrupt.remembered(), interrupt.says_at_the_end(words):
        signal.raise_signal(signal.SIGINT)
    assert left.is_set()


def test_the_main_thread_waits_for_the_thread_that_prints(monkeypatch):
    """XLA's compile may end while that thread makes the record."""
    said, left = [], threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "leave", lambda code: left.set())

    def words() -> None:
        said.append("begun")
        raise_if_interrupted()
        time.sleep(0.3)
        said.append("ended")

    with (
        contextlib.suppress(KeyboardInterrupt),
        interrupt.remembered(),
        interrupt.says_at_the_end(words),
        interrupt.in_xla(),
    ):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
    assert said[:2] == ["begun", "ended"]


@pytest.mark.parametrize(("num_signals", "ends"), [(1, False), (2, True)])
def test_what_a_loop_has_noted_does_not_end_a_later_compile(num_signals, ends, monkeypatch, capsys):
    """The first signal within `deferred` is the loop's own, also where XLA compiles after the loop. A second one isn't."""
    left = threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "_leave", left.set)
    with contextlib.suppress(KeyboardInterrupt), interrupt.remembered():
        with contextlib.suppress(KeyboardInterrupt), interrupt.deferred(lambda: "finishing step 12"):
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.05)
        with interrupt.in_xla():
            assert left.wait(0.5) == ends
    assert capsys.readouterr().err.splitlines() == ["finishing step 12"]


def test_a_second_signal_does_not_break_what_the_first_one_ends(capsys):
    """Both signals again and again: while the results are printed, and while the message is."""
    printed = []

    def work() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            printed.append("RESULTS")
        return 0

    before = signal.getsignal(signal.SIGINT)
    assert run_command(work) == 130
    assert printed == ["RESULTS"]
    assert signal.getsignal(signal.SIGINT) == before
    assert "Traceback" not in capsys.readouterr().err


def test_last_words_that_fail_do_not_hide_the_signal(capsys):
    """The plot of a frontier, say, whose folder is gone. Without a signal it is the command's own error."""

    def plot() -> None:
        raise JaxrematError("--plot cannot be written")

    def work(ends: bool) -> int:
        with interrupt.says_at_the_end(plot):
            if ends:
                signal.raise_signal(signal.SIGINT)
        return 0

    assert [run_command(lambda ends=ends: work(ends), saved="NOTE") for ends in (True, False)] == [130, 1]
    lines = capsys.readouterr().err.splitlines()
    assert ["--plot" in line for line in lines] == [True, False, True]
    assert ["NOTE" in line for line in lines] == [False, True, False]


def test_the_process_ends_where_the_main_thread_does_not(monkeypatch):
    """Also outside of XLA, such as where a library swallows the exception."""
    left = threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "_leave", left.set)
    with interrupt.remembered():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert left.wait(2)


def test_the_process_ends_while_user_code_runs(monkeypatch):
    """There `os._exit` raises SystemExit."""
    codes = []
    monkeypatch.setattr(interrupt, "exit_now", codes.append)
    monkeypatch.setattr(interrupt._interrupts, "cleanups", [])
    with user_code("the user's code"):
        thread = threading.Thread(target=interrupt.leave, args=(interrupt.EXIT_CODE,))
        thread.start()
        thread.join()
    assert codes == [interrupt.EXIT_CODE]
