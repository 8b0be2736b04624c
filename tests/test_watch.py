"""`python -m jaxremat watch` shows the memory of made-up GPUs: a stand-in for NVML, mostly in this process."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from types import ModuleType

import pytest

from jaxremat.chips.nvidia import nvml
from jaxremat.chips.nvidia.nvml import GpuProcess, read_gpus
from jaxremat.cli import watch
from jaxremat.errors import DriverError, MissingDependencyError
from tests.fake_nvml import environment, fresh_fake
from tests.rejections import rejected


@pytest.fixture
def fake(monkeypatch) -> ModuleType:
    """The stand-in, in place of `pynvml`."""
    module = fresh_fake()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("COLUMNS", "80")
    return module


def test_a_busy_card_once(fake, capsys):
    """A row for each GPU and each process, from the largest."""
    assert watch.main(["--once"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][1].startswith("580.159.03")
    assert [row for row in rows if len(row) > 1 and row[0] in ("0", "1")] == [
        ["0", "NVIDIA", "H200", "100.00", "40.00", "100.00", "140.00", "97%"],
        ["1", "NVIDIA", "H200", "0.500", "139.50", "0.500", "140.00", "-"],
        ["0", "4244", "server", "95.00"],
        ["0", "4242", "python3", "4.00"],
        ["0", "4243", "?", "-"],
    ]
    assert err == ""


def test_lines_in_a_pipe_until_ctrl_c(fake, capsys, monkeypatch):
    """A reading at once, then one each interval; the peak stays when the use falls; Ctrl-C is its end and no failure."""
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert watch.main(["--interval", "0.05"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert slept == [0.05] * 4
    assert all(re.match(r"\d\d:\d\d:\d\d GPU [01]: ", line) for line in lines)
    gib = [[float(number) for number in re.findall(r"([\d.]+) GiB", line)] for line in lines]
    assert gib[::2] == [[100, 40, 100, 140], [120, 20, 120, 140], [90, 50, 120, 140], [80, 60, 120, 140]]
    assert gib[1::2] == [[0.5, 139.5, 0.5, 140]] * 4
    assert all("97%" in line for line in lines[::2])
    assert re.findall(r"([\d.]+) GiB", last) == ["120.00", "0.500"]
    assert re.search(r"\b4 readings\b", last)


def test_the_peak_is_said_where_the_driver_stops_answering(fake, capsys, monkeypatch):
    def stop(*_: object) -> None:
        raise DriverError("the driver doesn't answer")

    monkeypatch.setattr(watch, "lines", stop)
    assert watch.main([]) == 1
    assert re.findall(r"([\d.]+) GiB", capsys.readouterr().out) == ["100.00", "0.500"]


@pytest.mark.full
def test_live_on_a_terminal():
    """The table is drawn again in place; after Ctrl-C the cursor is back and the peak is said."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jaxremat", "watch", "--interval", "0.05"]
    process = subprocess.Popen(
        command, env=environment(TERM="xterm"), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    while b"80.00" not in shown and time.monotonic() < deadline:
        shown += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait(30) == 0
    text = shown.decode()
    assert "NVIDIA H200" in text
    assert "\x1b[?25h" in text[text.rindex("\x1b[?25l") :]
    assert "120.00 GiB" in text[text.rindex("\x1b[?25h") :]
    assert "Traceback" not in text


#: Errors of NVML that have a cause and a next step of their own, and one that has none.
KNOWN, UNKNOWN = ("9", "12", "18", "4"), "999"


def test_no_driver(fake, monkeypatch):
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: False)
    next_steps = {}
    for number in (*KNOWN, UNKNOWN):
        monkeypatch.setenv("FAKE_NVML_ERROR", number)
        error = rejected(["--once"], "watch")
        assert (type(error), error.exit_code) == (DriverError, 1)
        assert number in error.got
        assert bool(error.cause) == (number in KNOWN)
        next_steps[number] = error.next_step
    assert len({*next_steps.values()}) == len(KNOWN) + 1
    assert "nvidia-smi" in next_steps[UNKNOWN]


def test_a_driver_outside_the_container(fake, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_ERROR", "12")
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: True)
    with pytest.raises(DriverError) as caught:
        read_gpus(fake)
    assert "--gpus all" in caught.value.next_step


@pytest.mark.skipif(nvml.nvidia_driver(), reason="this machine has a driver")
def test_the_real_library_without_a_gpu():
    error = rejected([], "watch")
    assert isinstance(error, DriverError)
    assert error.cause
    assert error.next_step


def test_without_the_wheel(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingDependencyError) as caught:
        read_gpus()
    assert "pip install nvidia-ml-py" in caught.value.next_step


def test_a_reading(fake):
    busy, idle = read_gpus().gpus
    assert busy.processes[1] == GpuProcess(4243, "?", None)
    assert (idle.busy_percent, idle.compute_capability, idle.processes) == (None, (9, 0), ())


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e9"])
def test_an_interval_that_cannot_be_meant(value):
    error = rejected([f"--interval={value}"], "watch")
    assert "--interval" in error.got
    assert f"{float(value):g}" in error.got
    assert {"0.05", "3600"} <= {*error.allowed.split()}


@pytest.mark.parametrize("name", ["watch", "doctor"])
def test_help(name, capsys):
    from jaxremat.cli import doctor

    with pytest.raises(SystemExit) as ended:
        {"watch": watch.main, "doctor": doctor.main}[name](["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxremat {name} ")
