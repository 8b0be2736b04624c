"""The largest batch that a search found is run, and the next one is seen to fail: by numbers, and on a made-up GPU."""

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat.chips import target
from jaxremat.cli import processes
from jaxremat.cli.run import main
from jaxremat.cli.worker import work
from jaxremat.config import divisors
from jaxremat.system.process import Ended
from jaxremat.trial.confirm import next_to_run, smaller_batches
from jaxremat.trial.queue import SweepTrial, outcome_of, run_trial
from jaxremat.trial.record import LargestBatchRecord, Outcome, Record, TrialRecord
from jaxremat.trial.task import Result, Task
from jaxremat.trial.trials import Trials
from jaxremat.trial.workers import Workers, judge
from tests.made_up_gpu import made_up_target
from tests.made_up_gpu import measure as made_up_measure
from tests.made_up_records import trial

GIB = 2**30
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"


def runs(largest: int, after: int | None, smaller, capacity: int, crash: int = 0) -> dict[int, Outcome]:
    """All that is run, in order, on a device that takes batches up to `capacity`."""
    ran: dict[int, Outcome] = {}
    while (batch := next_to_run(ran, largest, after, smaller)) is not None:
        assert batch not in ran, "run twice"
        ran[batch] = "crashed" if batch == crash else "ok" if batch <= capacity else "oom"
    return ran


@given(st.integers(1, 4096), st.integers(0, 5000))
def test_the_pair_is_run(largest, capacity):
    ran = runs(largest, largest + 1, range(1, largest), capacity)
    if capacity >= largest:
        assert list(ran) == [largest, largest + 1]
        return
    assert ran[capacity + 1] == "oom"
    assert ran.get(capacity, "ok") == "ok"
    assert capacity == 0 or capacity in ran, "the largest that runs was run"
    assert largest + 1 not in ran
    assert len(ran) <= 2 * math.log2(largest - capacity) + 3


@given(st.integers(1, 5000), st.integers(0, 5000), st.data())
def test_microbatches_are_divisors(whole, capacity, data):
    batches = divisors(whole)
    largest = data.draw(st.sampled_from(batches))
    smaller = smaller_batches(largest, whole)
    ran = runs(largest, None, smaller, capacity)
    assert set(ran) <= set(batches)
    fitting = [batch for batch in batches if batch <= min(capacity, largest)]
    assert not fitting or ran[fitting[-1]] == "ok"


def test_a_small_miss_takes_one_more_run():
    assert runs(128, 129, range(1, 128), 127) == {128: "oom", 127: "ok"}
    assert list(runs(128, 129, range(1, 128), 124)) == [128, 127, 125, 121, 123, 124]


@pytest.mark.parametrize(("crash", "expected"), [(8, [8]), (7, [8, 7]), (9, [8, 9])])
def test_a_crash_says_nothing_of_memory(crash, expected):
    assert list(runs(8, 9, range(1, 8), 8 if crash == 9 else 6, crash)) == expected


class InThisProcess(Workers):
    """Stands in for the processes of trials: a task is done by a function as soon as it is waited for."""

    last_line = ""

    def __init__(self, do: Callable[[Task], Result]) -> None:
        self.do = do

    def __exit__(self, *_: Any) -> None: ...

    def start(self, task: Task, *, timeout_s: float, cache: bool = False) -> Any:
        self.task = task
        return self

    def wait(self, at_most_s: float) -> Any:
        return [(self, self.do(self.task))]


def confirmed(capacity: int, *, crash: int = 0, dies: bool = False, largest: int = 8) -> tuple[Record, ...]:
    """The records of a search whose compiled bytes say `largest`, run on a device that takes batches up to `capacity`.

    The process of batch `crash` crashes. With `dies` a process whose device runs out of memory ends without a result.
    """
    search = LargestBatchRecord(
        model="m",
        requested_policy="dots",
        policy="dots",
        target="gpu",
        seq_len=4,
        largest_batch=largest,
        largest_batch_total_bytes=10 * largest,
        next_batch=largest + 1,
        next_batch_total_bytes=10 * largest + 10,
        max_batch=99,
        budget_bytes=80,
        num_compiles=3,
        versions={},
    )
    records = (trial(4, "probe"), trial(largest), trial(largest + 1, fits=False), search)

    def do(task: Task) -> Result:
        row = task.measure
        if row is None:
            return Result(outcome="ok", records=records, confirm=True)
        row = replace(row, total_bytes=10 * row.batch)
        if row.batch == crash:
            return judge(Path("none"), Ended(-signal.SIGABRT, ""), 60)
        if row.batch <= capacity:
            row = replace(row, ran="ok", step_s=row.batch / 8, step_source="measured", fits=True)
        elif dies:
            return judge(Path("none"), Ended(1, OUT_OF_MEMORY), 60)
        else:
            row = replace(row, ran="oom", error=OUT_OF_MEMORY, error_kind="oom")
        return Result(outcome="ok", records=(row,))

    attempt = SweepTrial("key", "m", "dots", "gpu", None, Task({}), {})
    return run_trial(attempt, InThisProcess(do), 60, lambda line: None)


def search_of(records: tuple[Record, ...]) -> LargestBatchRecord:
    assert isinstance(records[-1], LargestBatchRecord)
    return records[-1]


def by_batch(records: tuple[Record, ...]) -> dict[int, TrialRecord]:
    return {record.batch: record for record in records if isinstance(record, TrialRecord) and record.record == "trial"}


@pytest.mark.parametrize("dies", [False, True])
def test_the_next_one_is_watched_failing(dies):
    rows = confirmed(8, dies=dies)
    ran, found = by_batch(rows), search_of(rows)
    assert (ran[8].ran, ran[8].step_s, ran[8].error) == ("ok", 1, None)
    assert (ran[9].ran, ran[9].error, ran[9].ran_error, ran[9].fits) == ("oom", None, OUT_OF_MEMORY, False)
    assert (found.largest_batch, found.next_batch, found.compiled_largest_batch) == (8, 9, None)
    assert (found.ran, found.next_ran, found.step_s) == ("ok", "oom", 1)
    assert outcome_of(rows) == "ok"


def test_the_next_one_runs_too():
    found = search_of(confirmed(9))
    assert found.next_ran == "ok"
    assert found.largest_batch == 8, "what fits the budget stays what fits"


def test_the_search_goes_down():
    rows = confirmed(5, dies=True)
    ran = {batch: row.ran for batch, row in by_batch(rows).items()}
    assert ran == {8: "oom", 9: None, 7: "oom", 5: "ok", 6: "oom"}
    found = search_of(rows)
    assert (found.largest_batch, found.next_batch, found.compiled_largest_batch) == (5, 6, 8)
    assert (found.largest_batch_total_bytes, found.step_s) == (50, 5 / 8)
    assert by_batch(rows)[5].total_bytes == 50
    assert by_batch(rows)[5].config == by_batch(rows)[8].config
    assert outcome_of(rows) == "ok"
    assert [row.record for row in rows].index("largest_batch") == len(rows) - 1


def test_nothing_runs():
    rows = confirmed(0, largest=2)
    found = search_of(rows)
    assert (found.largest_batch, found.next_batch, found.compiled_largest_batch) == (0, 1, 2)
    assert outcome_of(rows) == "oom"


def test_a_crash_of_the_largest_is_its_row():
    rows = confirmed(8, crash=8)
    assert by_batch(rows)[8].error_kind == "crashed"
    assert (search_of(rows).largest_batch, search_of(rows).ran, search_of(rows).next_ran) == (8, "crashed", None)
    assert outcome_of(rows) == "crashed"


def test_a_crash_of_the_next_one_is_told():
    rows = confirmed(8, crash=9)
    assert by_batch(rows)[9].error is None
    assert "SIGABRT" in (by_batch(rows)[9].ran_error or "")
    assert (search_of(rows).ran, search_of(rows).next_ran) == ("ok", "crashed")
    assert outcome_of(rows) == "ok"


def test_a_crash_on_the_way_down_stops_it():
    rows = confirmed(3, crash=7)
    assert (search_of(rows).largest_batch, search_of(rows).ran) == (8, "oom")
    assert outcome_of(rows) == "crashed"


#: A user's workload of four layers, whose steps compile in a fraction of a second.
TRAIN = """
import jax, jax.numpy as jnp, jaxremat

def init(key):
    return [jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(key, 4)]

def loss(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)

def workload(batch: int = 8):
    x = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    return jaxremat.Workload(loss=loss, params=jax.eval_shape(init, jax.random.key(0)), batch=x, init=init)
"""


@pytest.mark.full
def test_a_made_up_gpu(monkeypatch, tmp_path, write):
    """Promised beside shown, the proof by runs, and what they show: from the command line to the file of headrooms.

    The programs are compiled and run for real, all in this process.
    """
    for name, value in {"MADE_UP_LIMIT": "100000", "MADE_UP_OVER": "1.001", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(processes, "Workers", lambda *_: InThisProcess(work))
    monkeypatch.setattr(target, "load_target", made_up_target)
    monkeypatch.setattr(Trials, "measure", made_up_measure)
    out = tmp_path / "rows.jsonl"
    argv = [
        "--model",
        f"{write('train_confirmed.py', TRAIN)}:workload",
        "--policy",
        "dots",
        "--steps",
        "2",
        "--out",
        str(out),
    ]
    assert main(argv) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    (search,) = [row for row in rows if row["record"] == "largest_batch"]
    trials = {row["batch"]: row for row in rows if row["record"] == "trial"}
    largest, after = trials[search["largest_batch"]], trials[search["next_batch"]]
    assert (search["ran"], search["next_ran"], after["ran"]) == ("ok", "oom", "oom")
    assert search["step_s"] == largest["step_s"] > 0
    assert largest["measured_over_total_percent"] == pytest.approx(0.1, abs=0.02)
    assert largest["limit_bytes"] == 100000
    assert (largest["outside_bytes"], largest["outside_source"]) == (5 * 2**28, "process")
    assert largest["predicted"]["step_s"] > 0
    (learned,) = map(json.loads, (tmp_path / "jaxremat" / "headroom.jsonl").read_text().splitlines())
    assert (learned["total_bytes"], learned["peak_bytes"]) == (largest["total_bytes"], largest["measured_peak_bytes"])
    assert learned["setup"]["device_kind"] == "NVIDIA Made Up"


@pytest.mark.gpu
def test_a_real_gpu(tmp_path, monkeypatch):
    """On an attached GPU: the largest batch runs, or the one that does is found; what XLA leaves out is below 4 GiB."""
    if not target.attached_gpus():
        pytest.skip("no NVIDIA GPU that JAX sees")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    assert main(["--target", "gpu", "--model", "gpt2", "--policy", "dots", "--steps", "2", "--out", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (search,) = [row for row in rows if row["record"] == "largest_batch"]
    assert (search["ran"], search["next_ran"]) in (("ok", "oom"), ("ok", "ok"))
    largest = next(row for row in rows if row["record"] == "trial" and row["batch"] == search["largest_batch"])
    assert 0 < (largest["outside_bytes"] or 1) < 4 * GIB
    assert largest["step_source"] == "measured"
