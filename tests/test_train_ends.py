"""Trainings that end before their last step, and go on: killed, interrupted, on a full disk, in two processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxremat.training.metrics import read_metrics
from tests.arguments import once
from tests.trainings import losses, own_flags, trained

pytestmark = pytest.mark.full
STEPS = ("--num-steps", "36", "--checkpoint-every", "2")


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> tuple[str, ...]:
    return (*own_flags(tmp_path_factory.mktemp("own")), *STEPS)


@pytest.fixture(scope="module")
def expected(own, tmp_path_factory) -> list[float]:
    """The losses of a training that nothing ended."""
    return losses(trained(tmp_path_factory.mktemp("whole"), *own))


#: Runs the command in a process whose files may not grow beyond some bytes.
LIMITED = """
import resource
from jaxremat.cli.train import main
from jaxremat.system.interrupt import leave
resource.setrlimit(resource.RLIMIT_FSIZE, (4500, 4500))
leave(main())
"""


def start(
    argv: tuple[str, ...], num_devices: int = 1, run: tuple[str, ...] = ("-m", "jaxremat", "train"), batch_s: float = 0
) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices), "BATCH_S": str(batch_s)}
    command = [sys.executable, *run, *once(*argv)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def num_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_kill_loses_nothing(own, expected, tmp_path):
    """SIGKILL among the steps. What was finished is whole, and the losses are the same bit for bit."""
    process = start((*own, "--run-dir", str(tmp_path)), batch_s=0.05)  # so that the kill comes before the last step
    while num_lines(tmp_path) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()
    found = losses(read_metrics(tmp_path / "metrics.jsonl"))
    assert 5 <= len(found) < len(expected)
    assert found == expected[: len(found)]
    rows = trained(tmp_path, *own)
    assert [row["step"] for row in rows] == list(range(1, 37))
    assert losses(rows) == expected
    assert not list(tmp_path.glob("damaged-*"))


@pytest.mark.any_jax
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_ends_with_a_checkpoint(own, expected, tmp_path, capsys, monkeypatch, name):
    """The step in which it comes is finished. The handlers of before are back afterwards."""
    before = signal.getsignal(getattr(signal, name))
    monkeypatch.setenv("STOPS_AT", "7")
    monkeypatch.setenv("STOPS_BY", name)
    assert len(trained(tmp_path, *own, "--checkpoint-every", "100", code=130)) == 7
    monkeypatch.delenv("STOPS_AT")
    assert signal.getsignal(getattr(signal, name)) is before
    (*_, last) = capsys.readouterr().err.splitlines()
    assert re.findall(r"\d+", last) == ["7"], "the step of the checkpoint"
    assert losses(trained(tmp_path, *own)) == expected


@pytest.mark.any_jax
def test_a_full_disk(own, expected, tmp_path):
    """No file may grow beyond 4,500 bytes, as on a full disk: the run ends with an error, and what was finished is kept."""
    trained(tmp_path, *own, "--num-steps", "3")
    process = start((*own, "--run-dir", str(tmp_path)), run=("-c", LIMITED))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    (*others, last) = err.splitlines()
    assert last.startswith("jaxremat: ")
    assert [line for line in others if not line.startswith("[")] == [], "nothing of orbax"
    assert str(tmp_path / "checkpoints") in last
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))
    assert re.search(r"\b3\b", last.rpartition("Next: ")[2]), "the step of the whole checkpoint"
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")][:3] == [1, 2, 3]
    assert losses(trained(tmp_path, *own)) == expected


@pytest.mark.any_jax
def test_two_processes(own, tmp_path):
    """On a mesh, with checkpoints in one folder. They resume where they were, and their losses are those of one device."""
    mesh = (*own, "--mesh", "data=2,fsdp=2", "--batch", "2", "--run-dir", str(tmp_path / "two"), "--num-steps")
    first = []
    for steps in ("5", "9"):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        address = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id")
        both = [start((*mesh, steps, *address, str(i)), num_devices=2) for i in (0, 1)]
        try:
            (_, err), (other_out, other_err) = (process.communicate(timeout=300) for process in both)
        finally:
            for process in both:
                process.kill()
        assert [process.returncode for process in both] == [0, 0], err + other_err
        assert other_out == ""
        first = first or read_metrics(tmp_path / "two/metrics.jsonl")
    rows = read_metrics(tmp_path / "two/metrics.jsonl")
    assert rows[:5] == first, "with their times"
    assert [row["step"] for row in rows] == list(range(1, 10))
    alone = trained(tmp_path / "one", *own, "--batch", "8", "--num-steps", "9")
    assert losses(rows) == pytest.approx(losses(alone), rel=1e-5)
