"""`python -m jaxremat.watch` prints the exact text for made-up GPUs: a stand-in for NVML, in processes of their own."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxremat.errors import DriverError, MissingDependencyError
from jaxremat.machine import nvml
from jaxremat.machine.nvml import GpuProcess, read_gpus
from tests.fake_nvml import NO_DRIVER, ROOT, environment
from tests.fake_nvml import pynvml as fake


def watch(*argv: str, **more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxremat.watch", *argv]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=60)


def test_a_busy_card_once():
    done = watch("--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "driver 580.159.03, CUDA up to 13.0; GiB",
        "",
        " GPU               used     free     peak    total   busy",
        " ────────────────────────────────────────────────────────",
        " 0 NVIDIA H200   100.00    40.00   100.00   140.00    97%",
        " 1 NVIDIA H200    0.500   139.50    0.500   140.00      -",
        "",
        "processes",
        "",
        " GPU   pid    process     GiB",
        " ────────────────────────────",
        " 0     4244   server    95.00",
        " 0     4242   python3    4.00",
        " 0     4243   ?             -",
        "",
    ]


def test_lines_in_a_pipe_until_ctrl_c():
    """A reading at once, then one each interval; the peak stays when the use falls; Ctrl-C is its end and no failure."""
    command = [sys.executable, "-m", "jaxremat.watch", "--interval", "0.05"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(8)]
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    timeless = [re.sub(r"^\d\d:\d\d:\d\d ", "", line.rstrip()) for line in lines]
    assert timeless[1] == "GPU 1: used 0.500 GiB, free 139.50 GiB, peak 0.500 GiB of 140.00 GiB"
    assert timeless[::2] == [
        "GPU 0: used 100.00 GiB, free 40.00 GiB, peak 100.00 GiB of 140.00 GiB, 97% busy",
        "GPU 0: used 120.00 GiB, free 20.00 GiB, peak 120.00 GiB of 140.00 GiB, 97% busy",
        "GPU 0: used 90.00 GiB, free 50.00 GiB, peak 120.00 GiB of 140.00 GiB, 97% busy",
        "GPU 0: used 80.00 GiB, free 60.00 GiB, peak 120.00 GiB of 140.00 GiB, 97% busy",
    ]
    assert re.fullmatch(
        r"peak seen: GPU 0 120\.00 GiB, GPU 1 0\.500 GiB \(\d+ readings in \d+ s; "
        r"between two readings it may have been higher\)",
        rest.splitlines()[-1],
    )


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m jaxremat.watch --interval 0.05 | head -n 1"
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_live_on_a_terminal():
    """The table is drawn again in place; after Ctrl-C the cursor is back and the peak is said."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jaxremat.watch", "--interval", "0.05"]
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
    assert "peak seen: GPU 0 120.00 GiB" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("12", NO_DRIVER),
        (
            "9",
            "no NVIDIA GPU can be read: NVML error 9. Likely cause: the driver is installed but not loaded. "
            "Next: sudo modprobe nvidia, or restart.",
        ),
        (
            "18",
            "no NVIDIA GPU can be read: NVML error 18. Likely cause: the driver was updated while the old one runs. "
            "Next: restart the machine.",
        ),
        ("999", "no NVIDIA GPU can be read: NVML error 999. Next: run nvidia-smi, which asks the same library."),
    ],
)
def test_no_driver_is_one_message(error, said, monkeypatch):
    if not nvml.nvidia_driver():
        done = watch("--once", FAKE_NVML_ERROR=error)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"jaxremat: {said}\n")
    monkeypatch.setenv("FAKE_NVML_ERROR", error)
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: False)
    with pytest.raises(DriverError) as raised:
        read_gpus(fake)
    assert str(raised.value) == said


def test_a_driver_outside_the_container(monkeypatch):
    monkeypatch.setenv("FAKE_NVML_ERROR", "12")
    monkeypatch.setattr(nvml, "nvidia_driver", lambda: True)
    with pytest.raises(DriverError, match=r"isn't visible in this container\. Next: start it with --gpus all\."):
        read_gpus(fake)


@pytest.mark.skipif(nvml.nvidia_driver(), reason="this machine has a driver")
def test_the_real_library_without_a_gpu():
    done = watch(path=str(ROOT))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "jaxremat: no NVIDIA GPU can be read: NVML Shared Library Not Found. Likely cause: this machine has no NVIDIA driver. "
        "Next: on a machine with a GPU install NVIDIA's driver.\n"
    )


def test_without_the_wheel(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingDependencyError) as raised:
        read_gpus()
    assert str(raised.value) == "reading the GPUs' memory needs nvidia-ml-py. Next: pip install nvidia-ml-py."


def test_a_reading():
    busy, idle = read_gpus(fake).gpus
    assert busy.processes[1] == GpuProcess(4243, "?", None)
    assert (idle.busy_percent, idle.compute_capability, idle.processes) == (None, (9, 0), ())


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e9"])
def test_an_interval_that_cannot_be_meant(value):
    done = watch(f"--interval={value}")
    assert (done.returncode, done.stdout) == (2, "")
    got = f"{float(value):g}"
    assert done.stderr == (f"jaxremat: --interval got {got}. Allowed: seconds from 0.05 to 3600. Next: 1 is the default.\n")


@pytest.mark.parametrize("command", ["watch", "doctor"])
def test_help(command):
    done = subprocess.run(
        [sys.executable, "-m", f"jaxremat.{command}", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: jaxremat.{command} ")
