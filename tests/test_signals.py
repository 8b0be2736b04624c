"""Ctrl-C and SIGTERM end a command within seconds, print what is known, and crash nothing."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from experiments.bad_inputs.signals import hears, is_command
from jaxremat.system import interrupt
from jaxremat.system.interrupt import EXIT_CODE
from jaxremat.xla.results import DEFAULT_SIZE, SIZE
from tests.helpers import QUICK_FLAGS

pytestmark = pytest.mark.full
#: Twice the time that a command has, as these machines are busy.
SECONDS = 10
SMALL = ["--model", "tiny", "--target", "h100-80gb", "--num-layers", "1", "--attention", "xla", "--loss", "chunked"]
LONG = ["--model", "tiny", "--num-steps", "100000", "--eval-every", "0", "--sample-tokens", "0"]


def ended_by(
    number: signal.Signals, argv: list[str], when: Callable[[str], bool], **variables: str
) -> tuple[int, float, str, str]:
    """A command that gets a signal as soon as `when(line)` holds for a line of its stderr.

    By default each step is compiled, and none is read from the store. `variables` of the environment change that.

    Returns:
        Its exit code, the seconds that it took to end, and what it printed to stdout and stderr.
    """
    environment = {**os.environ, "COLUMNS": "100", SIZE: "0", **variables}
    command = [sys.executable, "-m", *argv]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        read = []
        for line in process.stderr:
            read.append(line)
            if when(line):
                break
        time.sleep(0.5)
        started = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        return process.returncode, time.monotonic() - started, out, "".join(read) + err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_while_it_starts(number):
    """As soon as the first line of jaxremat has run: the imports after it take some tenths of a second."""
    with subprocess.Popen(
        [sys.executable, "-m", "jaxremat.run", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while not (is_command(process.pid) and hears(process.pid)):
            time.sleep(0.001)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count(b"\n")) == (EXIT_CODE, b"", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_while_xla_compiles(number, tmp_path):
    """What was found before is printed, and is in the file. The second of the two reads the first step from the store."""
    out = tmp_path / "rows.jsonl"
    argv = ["jaxremat.run", *SMALL, "--seq-len", "96", "--policy", "nothing", "--batch", *map(str, range(1, 9))]
    code, seconds, printed, err = ended_by(
        number, [*argv, "--out", str(out)], lambda line: "compile 2" in line, **{SIZE: DEFAULT_SIZE}
    )
    assert "Traceback" not in err
    assert code == EXIT_CODE
    assert seconds < SECONDS
    rows = out.read_text().count("\n")
    assert 1 <= rows < 8
    assert all(f"Batch {batch} " in printed for batch in range(1, rows + 1))


def test_the_best_step_so_far_is_printed_where_a_search_for_a_plan_ends(tmp_path):
    """It is a record, too, and no plan."""
    out = tmp_path / "rows.jsonl"
    argv = ["jaxremat.run", *SMALL, "--batch", "8", "--policy", "nothing", "auto", "--code"]
    code, seconds, printed, err = ended_by(signal.SIGINT, [*argv, "--out", str(out)], lambda line: "compile 2" in line)
    assert "Traceback" not in err
    assert (code, seconds < SECONDS) == (EXIT_CODE, True)
    nothing, row = map(json.loads, out.read_text().splitlines())
    assert (nothing["record"], nothing["policy"]) == ("trial", "nothing")
    assert (row["record"], row["requested_policy"], row["batch"], row["fits"]) == ("probe", "auto", 8, True)
    assert f"{row['policy']}, chunked loss" in printed
    assert f'policy="{row["policy"]}"' in row["code"][0]
    assert row["code"][0] in printed
    *lines, last = printed.partition("policies side by side")[2].splitlines()
    assert len([line for line in lines if " 8 " in line]) == 2
    assert " explain " in last


def test_the_meshes_so_far_are_printed(tmp_path):
    out = tmp_path / "rows.jsonl"
    argv = ["jaxremat.run", *SMALL, "--batch", "8", "--devices", "2", "--mesh", "auto", "--policy", "nothing"]
    code, seconds, printed, err = ended_by(signal.SIGTERM, [*argv, "--out", str(out)], lambda line: "compile 2" in line)
    assert "Traceback" not in err
    assert (code, seconds < SECONDS) == (EXIT_CODE, True)
    (choice,) = map(json.loads, out.read_text().splitlines())
    assert (choice["record"], choice["is_complete"], choice["num_compiles"]) == ("mesh_choice", False, 1)
    first, *others = sorted(choice["meshes"], key=lambda one: -one["num_compiles"])
    assert choice["mesh"] == first["mesh"]
    assert all(one["tokens_per_s"] is None and one["left_out"] for one in others)
    assert f"{first['tokens_per_s']:,.0f}" in printed


def test_a_training_says_what_it_finishes():
    argv = ["jaxremat", "train", *LONG]
    code, seconds, _, err = ended_by(signal.SIGTERM, argv, lambda line: "tokens/s" in line, XLA_FLAGS=QUICK_FLAGS)
    assert (code, seconds < SECONDS) == (EXIT_CODE, True)
    assert "finishing step" in err
    assert "Traceback" not in err


def test_a_training_ends_while_xla_compiles():
    code, seconds, _, err = ended_by(signal.SIGINT, ["jaxremat", "train", *LONG], lambda line: "compiling" in line)
    assert (code, seconds < SECONDS) == (EXIT_CODE, True)
    assert "Traceback" not in err


@pytest.mark.parametrize("loop", [False, True])
def test_a_signal_to_a_fork_is_not_this_process_s(loop, monkeypatch):
    """A user's loader of data forks, and ends its forks by SIGTERM."""
    left = threading.Event()
    monkeypatch.setattr(interrupt, "GRACE_S", 0.05)
    monkeypatch.setattr(interrupt, "_leave", left.set)
    deferred = interrupt.deferred(lambda: "finishing") if loop else contextlib.nullcontext()
    with interrupt.remembered(), deferred:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join()
        assert not left.wait(0.3)
    assert process.exitcode == -signal.SIGTERM
