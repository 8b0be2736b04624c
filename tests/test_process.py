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

from jaxremat.system.process import Ended
from jaxremat.trial.queue import Queue, SweepTrial, run_trial
from jaxremat.trial.record import is_out_of_memory
from jaxremat.trial.store import Store
from jaxremat.trial.task import SHARED_FOLDER, Task
from jaxremat.trial.workers import Workers, judge

#: Runs the Python text in its task, which finds the paths of task and result in `task` and `result`.
COMMAND = [
    sys.executable,
    "-c",
    "import json, os, signal, sys, time\ntask, result = sys.argv[1:]\nexec(json.load(open(task))['flags']['text'])",
]
GOOD = "open(result, 'w').write(json.dumps({'schema': 2, 'outcome': 'ok', 'records': []}))"
OK = {"schema": 2, "outcome": "ok", "records": []}
#: By the result file and the exit code of a process that is gone: the outcome, and what its error names.
JUDGED: list[tuple[bytes | dict[str, Any] | None, int | None, str, tuple[str, ...]]] = [
    (OK, 0, "ok", ()),
    (OK, -signal.SIGABRT, "ok", ()),
    (OK, None, "ok", ()),
    ({"schema": 2, "outcome": "bad-config", "error": "no such thing"}, 0, "bad-config", ("no such thing",)),
    (None, -signal.SIGKILL, "crashed", ("SIGKILL", "dmesg", "last words")),
    (None, -signal.SIGSEGV, "crashed", ("SIGSEGV", "last words")),
    (None, 7, "crashed", ("7", "last words")),
    (None, 0, "crashed", ("last words",)),
    (None, None, "timeout", ("1.5 s", "--timeout")),
    (b'{"schema": 2, "outcome": "o', 0, "crashed", ()),
    (b'{"error": "\xff"}', 0, "crashed", ()),
    (b"", 7, "crashed", ("7",)),
    (b"[]", 0, "crashed", ("object", "array")),
    ({"schema": 99, "outcome": "ok"}, 0, "crashed", ("schema", "99")),
    ({"schema": 2, "outcome": "fine"}, 0, "crashed", ("outcome", "'fine'")),
    ({"schema": 2, "outcome": "ok", "records": [{"record": "trial", "batch": "8"}]}, 0, "crashed", ("'trial'",)),
]  # fmt: skip


@pytest.mark.parametrize(("left", "code", "outcome", "named"), JUDGED)
def test_each_ending_is_judged(left, code, outcome, named, tmp_path):
    path = tmp_path / "result"
    if left is not None:
        path.write_bytes(left if isinstance(left, bytes) else json.dumps(left).encode())
    found = judge(path, Ended(code, "first\n\nlast words\n"), 1.5)
    assert found.outcome == outcome
    assert [word for word in named if word not in found.error] == []
    assert bool(found.error) == (outcome != "ok")
    assert found.tail == (() if outcome in ("ok", "bad-config") else ("first", "last words"))


OUT_OF_MEMORY = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.",
    "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB (2147483648B) on device 0",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "INTERNAL: CUBLAS_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation: out of memory",
    "Unable to allocate 3.2 GiB for an array",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "MemoryError",
]


@pytest.mark.parametrize("said", OUT_OF_MEMORY)
def test_out_of_memory_in_its_spellings(said, tmp_path):
    found = judge(tmp_path / "result", Ended(-signal.SIGABRT, f"{said}\nmore\n"), 60)
    assert (found.outcome, found.error) == ("oom", said)


@pytest.mark.parametrize("said", ["INVALID_ARGUMENT: shapes", "the memory is full of facts", "allocated 3 GiB"])
def test_other_errors_are_not_out_of_memory(said):
    assert not is_out_of_memory(said)


def trial(text: str, key: str = "trial", **more: Any) -> SweepTrial:
    return SweepTrial(key, "tiny", "dots", "h100-80gb", 8, Task({"text": text}), {"name": key}, **more)


def ended_as(texts: dict[str, str], store: Path, timeout_s: float = 60) -> dict[str, dict[str, Any]]:
    """By key, the one row that a process leaves in a store which runs that text."""
    trials = [trial(text, key) for key, text in texts.items()]
    with Store(store) as records, Workers(COMMAND) as workers:
        Queue(trials, records, num_at_once=4, timeout_s=timeout_s).run(workers)
    rows = [json.loads(line) for line in store.read_text().splitlines()]
    assert len(rows) == len(texts)
    return {row["config"]["name"]: row for row in rows}


@pytest.mark.full
def test_real_endings_are_a_row_each(tmp_path):
    """How processes really end: each is known from its exit code, and one row in the store."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_{}, ({}, {}))\n"
    rows = ended_as(
        {
            "killed": "print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
            "segfault": "import ctypes; ctypes.string_at(0)",
            "import": "import no_such_module",
            "disk-full": limited.format("FSIZE", 20, 20)
            + "from pathlib import Path; from jaxremat.trial.task import Result, write_result\n"
            "write_result(Path(result), Result(outcome='ok', error='x' * 9999))",
            "host-memory": limited.format("AS", 2**31, 2**31) + "bytearray(2**33)",
        },
        tmp_path / "rows.jsonl",
    )
    named = {
        "killed": ("crashed", "SIGKILL"),
        "segfault": ("crashed", "SIGSEGV"),
        "import": ("crashed", "no_such_module"),
        "disk-full": ("crashed", "File too large"),
        "host-memory": ("oom", "MemoryError"),
    }
    for key, (outcome, name) in named.items():
        row = rows[key]
        assert (row["record"], row["outcome"], row["batch"], row["model"]) == ("failure", outcome, 8, "tiny")
        assert name in row["error"]
    assert rows["killed"]["tail"] == ["last words"]


@pytest.mark.full
def test_a_flood_on_stderr_is_read_and_forgotten(tmp_path):
    """200 MB of it; the parent keeps the last lines and stays small."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = "[os.write(2, b'x' * 2**20) for _ in range(200)]; os.write(2, b'\\nthe end\\n'); sys.exit(1)"
    row = ended_as({"flood": text}, tmp_path / "rows.jsonl")["flood"]
    assert row["outcome"] == "crashed"
    assert row["tail"][-1] == "the end"
    assert sum(map(len, row["tail"])) < 16_384
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


@pytest.mark.full
def test_a_timeout_takes_grandchildren_too(tmp_path):
    """Also of a process that hears no signal. A good result counts, whatever comes after."""
    pid = "import subprocess; pid = subprocess.Popen(['sleep', '1000']).pid"
    texts = {
        "grandchild": f"{pid}; open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)); time.sleep(99)",
        "deaf": "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(1000)",
    }
    rows = ended_as(texts, tmp_path / "rows.jsonl", timeout_s=1.5)
    assert [row["outcome"] for row in rows.values()] == ["timeout"] * 2
    assert gone(int((tmp_path / "pid").read_text()))
    with Workers(COMMAND) as workers:
        assert run_trial(trial(f"{GOOD}; time.sleep(1000)"), workers, 1, lambda line: None) == ()


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


@pytest.mark.full
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


@pytest.mark.full
def test_a_process_whose_parent_is_gone_already_does_not_begin(tmp_path):
    from jaxremat.system.process import _GUARD

    touched = tmp_path / "touched"
    guarded = [sys.executable, "-c", _GUARD, "1", sys.executable, "-c", f"open({str(touched)!r}, 'w')"]
    subprocess.run(guarded, check=True)
    assert not touched.exists()
    guarded[3] = str(os.getpid())
    subprocess.run(guarded, check=True)
    assert touched.exists()


@pytest.mark.full
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


@pytest.mark.full
def test_commands_share_what_was_cached_in_a_folder_that_is_named(tmp_path):
    put = "open(os.environ['JAX_COMPILATION_CACHE_DIR'] + '/entry', 'w').write('entry'); " + GOOD
    look = "print(os.listdir(os.environ['JAX_COMPILATION_CACHE_DIR']), os.environ['JAXREMAT_SHARED_FOLDER']); sys.exit(1)"
    for text in (put, look):
        with Workers(COMMAND, {**os.environ, SHARED_FOLDER: str(tmp_path / "shared")}) as workers:
            workers.start(Task({"text": text}), timeout_s=60, cache=True)
            while not (ended := workers.wait(1)):
                pass
    assert ended[0][1].tail == (f"['entry'] {tmp_path / 'shared'}",)


@pytest.mark.full
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
