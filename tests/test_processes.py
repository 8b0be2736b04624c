"""Several real processes, each with devices of its own, run the step of one mesh, by flags and by SLURM's variables."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from jaxremat.chips.target import load_target
from jaxremat.errors import JaxrematError, TargetError, UsageError
from jaxremat.mesh.axes import parse_mesh
from jaxremat.session.distributed import (
    Place,
    any_of_all,
    check_alike,
    check_processes,
    joined,
    least_of_all,
    until_one_fails,
)
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.request import check_run
from tests.helpers import QUICK_FLAGS
from tests.made_up_records import trial
from tests.rejections import flags_of

#: A loss on a mesh. Its parameters are values, so that each process places its own part of them.
OWN = """
import os, jax, jax.numpy as jnp, numpy as np, jaxremat

if os.environ.get("FAILS_EARLY") == str(jax.process_index()):
    raise ValueError("this process can't even begin")
W = np.linspace(-1, 1, 256 * 64, dtype=np.float32).reshape(256, 64)

def loss(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"])))

def batches(size):
    random = np.random.default_rng(0)
    while True:
        if os.environ.get("FAILS") == str(jax.process_index()):
            raise ValueError("this process has bad luck")
        yield random.standard_normal((size, 256), np.float32)

def workload(batch: int = 8):
    shape = jax.ShapeDtypeStruct((batch, 256), jnp.float32)
    return jaxremat.Workload(loss=loss, params={"w": W}, batch=shape, batches=lambda: batches(batch))
"""
MESH = ("--mesh", "data=2,fsdp=4", "--target", "cpu", "--batch", "2", "--steps", "2")
TINY = (
    "--model",
    "tiny",
    "--num-layers",
    "1",
    "--seq-len",
    "32",
    "--optimizer",
    "sgd-momentum",
    "--policy",
    "nothing",
    *MESH,
)


def free_port(wanted: Iterable[int] = (0,)) -> int:
    """The first of the wanted ports that is free; by default any free port."""
    for port in wanted:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return found.getsockname()[1]
    raise AssertionError("no port is free")


def start(argv: tuple[str, ...], num_devices: int, **variables: str) -> subprocess.Popen[str]:
    """The command in a process of its own, which also prints its losses to stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_", "XLA_"))}
    environment |= {"JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS, **variables}
    command = [sys.executable, "-m", "tests.losses", *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code of a process, and what it printed to stdout and to stderr."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def both(argv: tuple[str, ...], out: Path, **variables: str) -> list[tuple[int, str, str]]:
    """Two processes of four devices each, by flags; each would write its records to a file of its own."""
    flags = (*argv, "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2")
    started = [
        start((*flags, "--process-id", str(i), "--out", str(out / f"{i}.jsonl")), num_devices=4, **variables) for i in (0, 1)
    ]
    return [ended(process) for process in started]


#: JAX's port is this one and the number of SLURM's job.
LEAST = 2**16 - 2**12


def losses(err: str) -> list[float]:
    return [json.loads(line)["loss"] for line in err.splitlines() if line.startswith("{")]


def trials(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_two_processes_compute_what_one_does(tmp_path):
    """The loss is that of one process with all devices. The first process alone prints and writes."""
    one = start((*TINY, "--out", str(tmp_path / "one.jsonl")), num_devices=8)
    (code, out, err), (other_code, other_out, other_err) = both(TINY, tmp_path)
    one_code, _, one_err = ended(one)
    assert (code, other_code, one_code) == (0, 0, 0), err + other_err + one_err
    (expected,) = losses(one_err)
    assert losses(err) == losses(other_err) == pytest.approx([expected], rel=1e-5)
    assert "data=2,fsdp=4" in out
    assert "Gloo" not in out
    assert other_out == ""
    assert all(line.startswith("{") for line in other_err.splitlines())
    (alone,), (found,) = trials(tmp_path / "one.jsonl"), trials(tmp_path / "0.jsonl")
    assert not (tmp_path / "1.jsonl").exists()
    assert found["step_source"] == "measured"
    assert (found["mesh"], found["num_devices"], found["global_batch"]) == ("data=2,fsdp=4", 8, 16)
    assert found["config"]["num_processes"] == 2
    assert "num_processes" not in alone["config"]
    assert found["total_bytes"] == alone["total_bytes"]


@pytest.mark.full
def test_slurm_says_which_process_is_which(tmp_path):
    """With the variables of srun and --distributed."""
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    flags = ("--model", f"{path}:workload", "--policy", "none", *MESH, "--json")
    job = {
        "SLURM_JOB_ID": str(free_port(range(LEAST + os.getpid() % 4000, 2**16)) - LEAST),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    tasks = [
        start((*flags, "--distributed"), num_devices=4, **job, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in (0, 1)
    ]
    (code, out, err), (other_code, other_out, other_err) = map(ended, tasks)
    assert (code, other_code, other_out) == (0, 0, ""), err + other_err
    assert len(losses(err)) == 1
    assert losses(err) == losses(other_err)
    (row,) = map(json.loads, out.splitlines())
    assert (row["ran"], row["num_devices"]) == ("ok", 8)


@pytest.mark.full
def test_a_process_that_fails_ends_the_others(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    started = time.monotonic()
    (code, _, err), (other_code, _, other_err) = both(
        ("--model", f"{path}:workload", "--policy", "none", *MESH, "--batch", "2,4"), tmp_path, FAILS="1"
    )
    assert time.monotonic() - started < 90
    assert (code, other_code) == (1, 1)
    assert "process 1 of 2" in other_err
    assert "ValueError" in other_err
    assert "process 0 of 2" in err
    assert "Traceback" not in err
    (row,) = trials(tmp_path / "0.jsonl")
    assert row["ran"] == "crashed"


@pytest.mark.full
def test_a_process_that_fails_before_the_first_step(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    argv = ("--model", f"{path}:workload", "--policy", "none", *MESH)
    (code, _, err), (other_code, _, other_err) = both(argv, tmp_path, FAILS_EARLY="1")
    assert (code, other_code) == (1, 1)
    assert "can't even begin" in other_err
    assert sum(line.startswith("jaxremat: ") for line in err.splitlines()) == 1
    assert "Traceback" not in err


ALONE = ("--coordinator", "127.0.0.1:{port}", "--num-processes", "2", "--initialization-timeout", "2")


@pytest.mark.full
def test_the_others_never_come():
    """The second process without a coordinator ends with one error."""
    flags = [flag.format(port=free_port()) for flag in ALONE]
    code, out, err = ended(start((*TINY, *flags, "--process-id", "1"), num_devices=4))
    assert (code, out) == (2, "")
    (said,) = [line for line in err.splitlines() if line.startswith("jaxremat: ")]
    assert flags[1] in said
    assert "2 s" in said
    assert "Traceback" not in err


# In this process, which is alone.


def test_jax_that_cannot_connect(monkeypatch):
    """JAX finds no launcher, says something else, or doesn't return."""
    errors: list[Exception | None] = [ValueError("no launcher"), RuntimeError("no port\nTRACE"), None]

    def initialize(**_: Any) -> None:
        if (error := errors.pop(0)) is None:
            time.sleep(0.2)
        else:
            raise error

    monkeypatch.setattr(jax.distributed, "initialize", initialize)

    quick: dict[str, Any] = {"initialization_timeout": 0.1}

    def error_of_connecting() -> TargetError:
        with pytest.raises(TargetError) as caught, joined(replace(RunFlags(distributed=True), **quick)):
            pass
        return caught.value

    alone, other, late = (error_of_connecting() for _ in range(3))
    assert "--distributed" in alone.got
    assert alone.cause == "no launcher"
    assert "no port" in other.got
    assert "TRACE" not in str(other)
    assert "0.1 s" in late.got
    assert "--initialization-timeout" in late.next_step


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_devices(count, monkeypatch):
    """Of one process, which says what several would do, or of all: a mesh takes all devices of several processes."""
    monkeypatch.setattr(jax, "process_count", lambda *_: count)
    with pytest.raises(TargetError) as caught:
        load_target("cpu", parse_mesh("data=2,fsdp=4", None, None))
    assert "8" in caught.value.got
    assert ("--distributed" in caught.value.next_step) == (count == 1)
    assert {str(len(jax.devices())), *(["2"] if count > 1 else [])} <= {*re.findall(r"\d+", caught.value.allowed)}


def test_processes_with_different_flags(monkeypatch):
    """Each tells the others a checksum of its flags, but for those of one process alone."""
    sent: list[Any] = []

    def of_all(pair: Any) -> Any:
        sent.append(pair.tolist())
        return np.asarray([pair, sent[0]])

    monkeypatch.setattr(multihost_utils, "process_allgather", of_all)
    flags = RunFlags(distributed=True)
    check_alike(flags, Place(0, 2))
    for same in ({"process_id": 1}, {"json": True}, {"out": Path("x")}, {"verbose": True}):
        check_alike(replace(flags, **same), Place(1, 2))
    for other in ({"steps": 3}, {"policy": (("none",),)}):
        with pytest.raises(UsageError) as caught:
            check_alike(replace(flags, **other), Place(1, 2))
        assert "--process-id" in caught.value.allowed
    check_alike(replace(flags, steps=4), Place(0, 1))


def test_what_all_processes_say(monkeypatch):
    others = [(0, 5), (3, 7)]
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda pair: np.asarray([pair, *others]))
    assert least_of_all(2**40) == 5
    assert any_of_all(False)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda pair: np.asarray([pair, (0, 0)]))
    assert not any_of_all(False)

    def gone(pair: Any) -> Any:
        raise JaxRuntimeError("connection closed\nTRACE")

    monkeypatch.setattr(multihost_utils, "process_allgather", gone)
    with pytest.raises(JaxrematError) as caught:
        any_of_all(True)
    assert "connection closed" in caught.value.got
    assert "TRACE" not in str(caught.value)


@pytest.mark.parametrize(
    ("ran", "count", "ends"), [("ok", 2, False), ("oom", 2, True), ("crashed", 2, True), ("oom", 1, False)]
)
def test_a_failed_step_ends_several_processes(ran, count, ends):
    taken: list[Any] = []
    row = replace(trial(8), ran=ran, error="BAD LUCK")
    with pytest.raises(JaxrematError) if ends else contextlib.nullcontext() as caught:
        until_one_fails(taken.append, Place(1, count))(row)
    assert taken == [row]
    if caught:
        assert f"1 of {count}" in caught.value.got
        assert "BAD LUCK" in caught.value.got


def test_one_process_is_the_default():
    flags = RunFlags(target="cpu")
    assert check_processes(check_run(flags)).flags == flags


def test_a_sweep_has_no_such_flags():
    assert flags_of(RunFlags) - flags_of(SweepFlags) >= {"--distributed", "--coordinator", "--num-processes", "--process-id"}
