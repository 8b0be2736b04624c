"""Ctrl-C and SIGTERM end a command within seconds, print what is known, and crash nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from jaxremat.interrupt import EXIT_CODE
from jaxremat.xla.results import SIZE

pytestmark = pytest.mark.full
#: Twice the time that a command has, as these machines are busy.
SECONDS = 10
COMPILED = ["--model", "tiny", "--target", "h100-80gb"]
LONG = ["--model", "tiny", "--num-steps", "100000", "--eval-every", "0", "--sample-tokens", "0"]


def ended_by(
    number: signal.Signals, argv: list[str], when: Callable[[str], bool], again: bool = False
) -> tuple[int, float, str, str]:
    """A command that gets a signal as soon as `when(line)` holds for a line of its stderr.

    Returns:
        Its exit code, the seconds that it took to end, and what it printed to stdout and stderr.
    """
    environment = {**os.environ, "COLUMNS": "100", SIZE: "0"}  # each step is compiled, and none is read from the store
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
        if again:
            time.sleep(0.2)
            process.send_signal(number)
        out, err = process.communicate(timeout=120)
        return process.returncode, time.monotonic() - started, out, "".join(read) + err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_while_xla_compiles(number, tmp_path):
    """What was found before is printed, and is in the file."""
    out = tmp_path / "rows.jsonl"
    argv = ["jaxremat.run", *COMPILED, "--policy", "nothing", "--batch", *map(str, range(1, 9)), "--out", str(out)]
    code, seconds, printed, err = ended_by(number, argv, lambda line: "compile 2" in line)
    assert "Traceback" not in err
    assert code == EXIT_CODE
    assert seconds < SECONDS
    rows = out.read_text().count("\n")
    assert 1 <= rows < 8
    assert all(f"Batch {batch} " in printed for batch in range(1, rows + 1))


def test_a_training_says_what_it_finishes():
    argv = ["jaxremat.train", *LONG]
    code, seconds, _, err = ended_by(signal.SIGTERM, argv, lambda line: "tokens/s" in line)
    assert (code, seconds < SECONDS) == (EXIT_CODE, True)
    assert "finishing step" in err
    assert "Traceback" not in err


def test_a_training_ends_while_xla_compiles():
    code, seconds, _, err = ended_by(signal.SIGINT, ["jaxremat.train", *LONG], lambda line: "compiling" in line)
    assert (code, seconds < SECONDS) == (EXIT_CODE, True)
    assert "Traceback" not in err
