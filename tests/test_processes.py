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
from pathlib import Path

import pytest

from jaxremat.run import main

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
    environment |= {"JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_PLATFORMS": "cpu", **variables}
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


def trials(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_processes_compute_what_one_does(tmp_path):
    """The loss is that of one process with all devices. The first process alone prints and writes."""
    one = start((*TINY, "--out", str(tmp_path / "one.jsonl")), num_devices=8)
    (code, out, err), (other_code, other_out, other_err) = both(TINY, tmp_path)
    one_code, _, one_err = ended(one)
    assert (code, other_code, one_code) == (0, 0, 0), err + other_err + one_err
    (expected,) = losses(one_err)
    assert losses(err) == losses(other_err) == pytest.approx([expected], rel=1e-5)
    assert "mesh data=2,fsdp=4 in 2 processes;" in " ".join(out.split())
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


@pytest.mark.any_jax
def test_slurm_says_which_process_is_which(tmp_path):
    """With the variables of srun and --distributed. Without the flag, a process doesn't wait: it has too few devices."""
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    flags = ("--model", f"{path}:workload", "--policy", "none", *MESH, "--json")
    job = {
        "SLURM_JOB_ID": str(free_port(range(LEAST + os.getpid() % 4000, 2**16)) - LEAST),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    one = start(flags, num_devices=8)
    tasks = [
        start((*flags, "--distributed"), num_devices=4, **job, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in (0, 1)
    ]
    (_, _, one_err), (code, out, err), (other_code, other_out, other_err) = map(ended, (one, *tasks))
    assert (code, other_code, other_out) == (0, 0, ""), err + other_err
    assert losses(err) == losses(other_err) == pytest.approx(losses(one_err), rel=1e-5)
    (row,) = map(json.loads, out.splitlines())
    assert row["ran"] == "ok"
    code, _, err = ended(start(flags, num_devices=4, **job, SLURM_PROCID="1", SLURM_LOCALID="1"))
    assert code == 2
    assert "Allowed: up to 4" in err
    assert "--distributed" in err


@pytest.mark.any_jax
def test_a_process_that_fails_ends_the_others(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    started = time.monotonic()
    (code, _, err), (other_code, _, other_err) = both(
        ("--model", f"{path}:workload", "--policy", "none", *MESH, "--batch", "2,4"), tmp_path, FAILS="1"
    )
    assert time.monotonic() - started < 90
    assert (code, other_code) == (1, 1)
    assert "a step failed in process 1 of 2" in other_err
    assert "the batches of mine.py:workload raised ValueError" in other_err
    assert "a step failed in process 0 of 2" in err
    assert "Traceback" not in err
    (row,) = trials(tmp_path / "0.jsonl")
    assert row["ran"] == "crashed"


@pytest.mark.any_jax
def test_a_mesh_that_isn_t_all_devices_of_the_processes(tmp_path):
    for code, _, err in both((*TINY, "--mesh", "fsdp=4"), tmp_path):
        assert code == 2
        assert "Allowed: 8, which is what the 2 processes have together" in err


@pytest.mark.any_jax
def test_processes_with_different_flags(tmp_path):
    flags = (*TINY, "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2", "--process-id")
    started = [start((*flags, str(i), "--steps", str(2 + i)), num_devices=4) for i in (0, 1)]
    for code, out, err in map(ended, started):
        assert (code, out) == (2, "")
        assert "the 2 processes were started with different flags" in err


@pytest.mark.any_jax
def test_a_process_that_fails_before_the_first_step(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    argv = ("--model", f"{path}:workload", "--policy", "none", *MESH)
    (code, _, err), (other_code, _, other_err) = both(argv, tmp_path, FAILS_EARLY="1")
    assert (code, other_code) == (1, 1)
    assert "can't even begin" in other_err
    assert "this process can't hear the others any more" in err
    assert "Traceback" not in err


ALONE = ("--coordinator", "127.0.0.1:{port}", "--num-processes", "2", "--initialization-timeout", "2")


@pytest.mark.any_jax
@pytest.mark.parametrize("number", ["0", "1"])
def test_the_others_never_come(number):
    """The first process without the second one, and the second one without a coordinator: each ends with one error."""
    flags = [flag.format(port=free_port()) for flag in ALONE]
    code, out, err = ended(start((*TINY, *flags, "--process-id", number), num_devices=4))
    assert (code, out) == (2, "")
    assert re.search(r"^jaxremat: the processes of --coordinator \S+ weren't all there within 2 s\.", err, re.MULTILINE)
    assert "Traceback" not in err


@pytest.mark.any_jax
def test_no_launcher():
    code, _, err = ended(start((*TINY, "--distributed"), num_devices=4))
    assert code == 2
    assert "JAX finds no launcher" in err
    assert "Traceback" not in err


THIRD = ("--coordinator", "127.0.0.1:5000", "--num-processes", "3", "--process-id", "3")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--coordinator", "127.0.0.1:5000"), "--coordinator without --num-processes, --process-id"),
        (("--process-id", "0"), "--process-id without --coordinator, --num-processes"),
        (THIRD, "Allowed: 0 to 2"),
        ((*THIRD, "--num-processes", "0"), "--num-processes got 0"),
        ((*THIRD, "--coordinator", "somewhere"), "HOST:PORT"),
        (("--distributed", "--initialization-timeout", "0"), "seconds from 1 up"),
        (("--distributed", "--target", "h100-80gb"), "Allowed: cpu, gpu"),
        (("--distributed", "--policy", "auto"), "--save-plan plan.json"),
        (("--distributed", "--frontier"), "don't plan"),
        (("--distributed", "--list", "names"), "--list is for one process"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, said, capsys):
    own_policy = "--policy" in flags or "--frontier" in flags
    argv = [flag for flag in TINY if not (own_policy and flag in ("--policy", "nothing"))]
    assert main([*argv, *flags]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "Next: " in error


def test_several_processes_need_a_mesh(capsys):
    assert main(["--model", "tiny", "--target", "cpu", "--distributed"]) == 2
    assert "--mesh fsdp=8" in capsys.readouterr().err


def test_a_sweep_has_no_such_flags(capsys, tmp_path):
    from jaxremat.sweep import main as sweep

    with pytest.raises(SystemExit) as ending:
        sweep(["--out", str(tmp_path / "rows.jsonl"), "--distributed"])
    assert ending.value.code == 2
