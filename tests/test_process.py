"""A trial runs in a process of its own: however that ends, it gives one row of the right kind and leaves nothing behind."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxremat.trial.queue import Queue, SweepTrial, run_trial
from jaxremat.trial.record import is_out_of_memory
from jaxremat.trial.store import Store
from jaxremat.trial.task import Task
from jaxremat.trial.workers import Workers

#: Runs the Python text in its task, which finds the paths of task and result in `task` and `result`.
COMMAND = [
    sys.executable,
    "-c",
    "import json, os, signal, sys, time\ntask, result = sys.argv[1:]\nexec(json.load(open(task))['flags']['text'])",
]
GOOD = "open(result, 'w').write(json.dumps({'schema': 2, 'outcome': 'ok', 'records': []}))"
ENDINGS = {
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", "crashed", "killed by SIGKILL (by Linux, if the machine ran out"),
    "segfault": ("print('last words', flush=True); os.kill(os.getpid(), 11)", "crashed", "killed by SIGSEGV: last words"),
    "abort": ("os.abort()", "crashed", "killed by SIGABRT"),
    "real-segfault": ("import ctypes; ctypes.string_at(0)", "crashed", "killed by SIGSEGV"),
    "nothing": ("pass", "crashed", "ended as if all were well, and left no result"),
    "exit-code": ("sys.exit(7)", "crashed", "ended with exit code 7"),
    "hang": ("time.sleep(1000)", "timeout", "killed after 1 s (--timeout)"),
    "deaf-hang": ("[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(1000)", "timeout", "killed after 1 s"),
    "import": ("import no_such_module", "crashed", "ModuleNotFoundError: No module named 'no_such_module'"),
    "cut-short": ('open(result, \'w\').write(\'{"schema": 2, "outcome": "o\')', "crashed", "its result was cut short"),
    "no-text": ("open(result, 'wb').write(b'{\"error\": \"\\xff\"}')", "crashed", "its result was cut short"),
    "empty": ("open(result, 'w')", "crashed", "its result was cut short"),
    "no-object": ("open(result, 'w').write('[]')", "crashed", "its result can't be read (expected object, got array)"),
    "schema": (
        "open(result, 'w').write(json.dumps({'schema': 99, 'outcome': 'ok'}))",
        "crashed",
        "its result can't be read (schema: invalid enum value 99)",
    ),
    "outcome": (
        "open(result, 'w').write(json.dumps({'schema': 2, 'outcome': 'fine'}))",
        "crashed",
        "its result can't be read (outcome: invalid enum value 'fine')",
    ),
    "record": (
        "open(result, 'w').write(json.dumps({'schema': 2, 'outcome': 'ok', 'records': [{'record': 'trial', 'batch': '8'}]}))",
        "crashed",
        "its result can't be read: a record of kind 'trial' can't be read (",
    ),
    "bad-config": (
        "open(result, 'w').write(json.dumps({'schema': 2, 'outcome': 'bad-config', 'error': 'no such thing'}))",
        "bad-config",
        "no such thing",
    ),
    "disk-full": (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "from pathlib import Path; from jaxremat.trial.task import Result, write_result\n"
        "write_result(Path(result), Result(outcome='ok', error='x' * 9999))",
        "crashed",
        "File too large",
    ),
    "host-memory": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); bytearray(2**33)",
        "oom",
        "MemoryError",
    ),
}


def trial(text: str, key: str = "trial", **more: Any) -> SweepTrial:
    return SweepTrial(key, "tiny", "dots", "h100-80gb", 8, Task({"text": text}), {"name": key}, **more)


def ended_as(text: str, store: Path, *, timeout_s: float = 60, command: list[str] = COMMAND) -> dict:
    """The one row that a process running `text` leaves in a store."""
    with Store(store) as records, Workers(command) as workers:
        Queue([trial(text)], records, num_at_once=1, timeout_s=timeout_s).run(workers)
    (row,) = [json.loads(line) for line in store.read_text().splitlines()]
    return row


@pytest.mark.parametrize("name", ENDINGS)
def test_each_ending_is_one_row(name, tmp_path):
    text, outcome, said = ENDINGS[name]
    row = ended_as(text, tmp_path / "rows.jsonl", timeout_s=1 if outcome == "timeout" else 60)
    assert (row["record"], row["outcome"], row["batch"], row["model"]) == ("failure", outcome, 8, "tiny")
    assert said in row["error"]


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.",
        "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device 0",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "INTERNAL: CUBLAS_STATUS_ALLOC_FAILED",
        "cudaErrorMemoryAllocation: out of memory",
        "Unable to allocate 3.2 GiB for an array",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_out_of_memory_in_its_spellings(said, tmp_path):
    assert is_out_of_memory(said)
    row = ended_as(f"print({said!r}, file=sys.stderr); print('more'); os.abort()", tmp_path / "rows.jsonl")
    assert (row["outcome"], row["error"]) == ("oom", said)


@pytest.mark.parametrize("said", ["INVALID_ARGUMENT: shapes", "the memory is full of facts", "allocated 3 GiB"])
def test_other_errors_are_not_out_of_memory(said):
    assert not is_out_of_memory(said)


def test_a_flood_on_stderr_is_read_and_forgotten(tmp_path):
    """200 MB of it; the parent keeps the last lines and stays small."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = "[os.write(2, b'x' * 2**20) for _ in range(200)]; os.write(2, b'\\nthe end\\n'); sys.exit(1)"
    row = ended_as(text, tmp_path / "rows.jsonl")
    assert row["outcome"] == "crashed"
    assert row["tail"][-1] == "the end"
    assert sum(map(len, row["tail"])) < 16_384
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def test_a_good_result_counts_whatever_comes_after(tmp_path):
    """The process gives its result and then dies, or never ends: it is the result that is believed."""
    with Workers(COMMAND) as workers:
        assert run_trial(trial(f"{GOOD}; os.abort()"), workers, 60, lambda line: None) == ()
        assert run_trial(trial(f"{GOOD}; time.sleep(1000)"), workers, 1, lambda line: None) == ()


def test_a_timeout_takes_grandchildren_too(tmp_path):
    pid = "import subprocess; pid = subprocess.Popen(['sleep', '1000']).pid"
    text = f"{pid}; open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)); time.sleep(99)"
    assert ended_as(text, tmp_path / "rows.jsonl", timeout_s=1.5)["outcome"] == "timeout"
    assert gone(int((tmp_path / "pid").read_text()))


def gone(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody waits for, after at most ten seconds."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_nothing_behind(number, tmp_path):
    """Neither its process, nor what that has started, nor its folder."""
    child = (
        "import subprocess; p = subprocess.Popen(['sleep', '1000']); print(os.getpid(), p.pid, flush=True); time.sleep(1000)"
    )
    parent = f"""
import sys, time
from jaxremat.trial.workers import Workers
from jaxremat.trial.task import Task
with Workers({COMMAND!r}) as workers:
    child = workers.start(Task({{"text": {child!r}}}), timeout_s=1000)
    while not child.last_line:
        workers.wait(0.1)
    print(child.last_line, workers.folder, flush=True)
    time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    *pids, folder = process.stdout.readline().split()
    assert len(pids) == 2
    assert Path(folder).is_dir()
    process.send_signal(number)
    process.wait()
    assert all(gone(int(pid)) for pid in pids)
    for _ in range(500):
        if not Path(folder).exists():
            break
        time.sleep(0.02)
    assert not Path(folder).exists()


def test_a_process_whose_parent_is_gone_already_does_not_begin(tmp_path):
    from jaxremat.machine.process import _GUARD

    touched = tmp_path / "touched"
    guarded = [sys.executable, "-c", _GUARD, "1", sys.executable, "-c", f"open({str(touched)!r}, 'w')"]
    subprocess.run(guarded, check=True)
    assert not touched.exists()
    guarded[3] = str(os.getpid())
    subprocess.run(guarded, check=True)
    assert touched.exists()


def test_what_was_cached_is_taken_over_only_from_those_that_ended_well():
    """The cut-short entry of a process that was killed reaches nobody; a good one reaches the next."""
    put = "open(os.environ['JAX_COMPILATION_CACHE_DIR'] + '/{}', 'w').write('entry'); "
    look = "print(sorted(os.listdir(os.environ['JAX_COMPILATION_CACHE_DIR']))); "
    with Workers(COMMAND) as workers:
        for text in (put.format("half") + "os.abort()", put.format("whole") + GOOD, look + "sys.exit(1)"):
            workers.start(Task({"text": text}), timeout_s=60, cache=True)
            while not (ended := workers.wait(1)):
                pass
    assert ended[0][1].tail == ("['whole']",)


def test_trials_run_together_but_for_those_that_want_to_be_alone(tmp_path):
    """Each writes when it began and ended; two overlap in pairs, those alone with none."""
    log = tmp_path / "log"
    text = f"began = time.time(); time.sleep(0.4); open({str(log)!r}, 'a').write(json.dumps([NAME, began, time.time()]) + '\\n')"
    trials = [trial(text.replace("NAME", str(n)) + "; " + GOOD, str(n), alone=n >= 4) for n in range(6)]
    started: list[str] = []
    with Store(tmp_path / "rows.jsonl") as store, Workers(COMMAND) as workers:
        Queue(trials, store, num_at_once=2, timeout_s=60, on_start=lambda trial: started.append(trial.key)).run(workers)
    spans = [json.loads(line) for line in log.read_text().splitlines()]
    overlaps = {
        name: sum(other != name and began < end and start < ended for other, start, end in spans)
        for name, began, ended in spans
    }
    assert max(overlaps[n] for n in range(4)) >= 1
    assert [overlaps[4], overlaps[5]] == [0, 0]
    assert started == list("012345")
