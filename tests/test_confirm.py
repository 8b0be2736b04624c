"""The largest batch that a search found is run, and the next one is seen to fail: by numbers, and on a made-up GPU."""

import dataclasses
import json
import math
import os
import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat import processes
from jaxremat.config import divisors
from jaxremat.report.table import largest_sentence
from jaxremat.run import main
from jaxremat.trial.confirm import next_to_run, smaller_batches
from jaxremat.trial.queue import Attempt, SweepTrial, outcome_of
from jaxremat.trial.record import LargestBatchRecord, Record, TrialRecord
from jaxremat.trial.task import Result, Task
from jaxremat.trial.workers import Workers
from jaxremat.xla import target
from tests.made_up_gpu import made_up_target
from tests.made_up_records import trial

GIB = 2**30


def runs(largest: int, after: int | None, smaller, capacity: int, crash: int = 0) -> dict[int, str]:
    """All that is run, in order, on a device that takes batches up to `capacity`."""
    ran: dict[int, str] = {}
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


#: A process that leaves the result in its flags, or runs a step: as the flags say, up to a batch, and with a crash at another.
PROGRAM = """
import json, os, sys
task, result = (sys.argv[1], sys.argv[2])
task = json.load(open(task))
row, flags = task["measure"], task["flags"]
if row:
    if row["batch"] == flags["crash"]:
        os.abort()
    if row["batch"] > flags["capacity"]:
        if flags["dies"]:
            sys.exit("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")
        row |= {"ran": "oom", "error": "RESOURCE_EXHAUSTED: said", "error_kind": "oom", "total_bytes": 10 * row["batch"]}
    else:
        row |= {"ran": "ok", "step_s": row["batch"] / 8, "step_source": "measured"}
        row |= {"total_bytes": 10 * row["batch"], "fits": True}
    found = {"outcome": "ok", "records": [row]}
else:
    found = flags["found"]
json.dump(found, open(result, "w"))
"""


def confirmed(capacity: int, *, crash: int = 0, dies: bool = False, largest: int = 8) -> tuple[Record, ...]:
    """The records of a search whose compiled bytes say `largest`, run on a device that takes batches up to `capacity`."""
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
    found = dataclasses.asdict(Result(outcome="ok", records=records, confirm=True))
    flags = {"capacity": capacity, "crash": crash, "dies": dies, "found": found}
    attempt = Attempt(SweepTrial("key", "m", "dots", "gpu", None, Task(flags), {}))
    with Workers([sys.executable, "-c", PROGRAM]) as workers:
        while attempt.start(workers, 60):
            while not (now := workers.wait(1)):
                pass
            attempt.take(now[0][1])
    return attempt.records


def search_of(records: tuple[Record, ...]) -> LargestBatchRecord:
    assert isinstance(records[-1], LargestBatchRecord)
    return records[-1]


def sentence(records: tuple[Record, ...]) -> str:
    return largest_sentence(search_of(records)).replace("0.000 GiB", "x")


def by_batch(records: tuple[Record, ...]) -> dict[int, TrialRecord]:
    return {record.batch: record for record in records if isinstance(record, TrialRecord) and record.record == "trial"}


@pytest.mark.parametrize("dies", [False, True])
def test_the_next_one_is_watched_failing(dies):
    rows = confirmed(8, dies=dies)
    ran = by_batch(rows)
    assert (ran[8].ran, ran[8].step_s, ran[8].error) == ("ok", 1, None)
    assert (ran[9].ran, ran[9].error, ran[9].fits) == ("oom", None, False)
    assert ran[9].ran_error.startswith("RESOURCE_EXHAUSTED")
    assert (search_of(rows).ran, search_of(rows).next_ran, search_of(rows).step_s) == ("ok", "oom", 1)
    assert sentence(rows) == (
        "The largest batch that fits under dots is 8: x of x; batch 9 needs x. "
        "Both were run, each in a fresh process: 8 ran, 9 ran out of memory."
    )
    assert outcome_of(rows) == "ok"


def test_the_next_one_runs_too():
    rows = confirmed(9)
    assert search_of(rows).next_ran == "ok"
    assert search_of(rows).largest_batch == 8, "what fits the budget stays what fits"
    assert sentence(rows).endswith("and 9 ran too: for it the compiled bytes were pessimistic, by at least x.")


def test_the_search_goes_down():
    rows = confirmed(5, dies=True)
    ran = {batch: row.ran for batch, row in by_batch(rows).items()}
    assert ran == {8: "oom", 9: None, 7: "oom", 5: "ok", 6: "oom"}
    found = search_of(rows)
    assert (found.largest_batch, found.next_batch, found.compiled_largest_batch) == (5, 6, 8)
    assert (found.largest_batch_total_bytes, found.step_s) == (50, 5 / 8)
    assert by_batch(rows)[5].total_bytes == 50
    assert sentence(rows) == (
        "The largest batch that ran under dots is 5: x of x; batch 6 ran out of memory. By compiled bytes 8 fits: they were "
        "optimistic."
    )
    assert outcome_of(rows) == "ok"
    assert [row.record for row in rows].index("largest_batch") == len(rows) - 1


def test_nothing_runs():
    rows = confirmed(0, largest=2)
    assert (search_of(rows).largest_batch, search_of(rows).next_batch) == (0, 1)
    assert sentence(rows) == "By compiled bytes batch 2 fits under dots in x, but none ran: each ran out of memory."
    assert outcome_of(rows) == "oom"


def test_a_crash_of_the_largest_is_its_row():
    rows = confirmed(8, crash=8)
    assert by_batch(rows)[8].error_kind == "crashed"
    assert (search_of(rows).largest_batch, search_of(rows).ran, search_of(rows).next_ran) == (8, "crashed", None)
    assert outcome_of(rows) == "crashed"


def test_a_crash_of_the_next_one_is_told():
    rows = confirmed(8, crash=9)
    assert by_batch(rows)[9].error is None
    assert "SIGABRT" in by_batch(rows)[9].ran_error
    assert sentence(rows).endswith("8 ran in a fresh process; 9 ended otherwise there: crashed.")
    assert outcome_of(rows) == "ok"


def test_a_crash_on_the_way_down_stops_it():
    rows = confirmed(3, crash=7)
    assert (search_of(rows).largest_batch, search_of(rows).ran) == (8, "oom")
    assert sentence(rows).endswith("Batch 8 ran out of memory when run, and a smaller one failed for another reason.")
    assert outcome_of(rows) == "crashed"


SMALL = shlex.split(
    "--model tiny --num-layers 1 --dropout 0 --embed-dim 16 --num-heads 1 --num-kv-heads 1 --head-dim 16 --mlp-dim 16 "
    "--vocab-size 256 --seq-len 64 --steps 2 --policy dots"
)


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """`jaxremat.run` on the made-up GPU, whose programs are compiled and run for real; returns the records by kind."""

    def on_it(**device: str) -> dict[str, list[dict]]:
        environment = {f"MADE_UP_{name.upper()}": value for name, value in device.items()}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-m", "tests.made_up_gpu"))
        monkeypatch.setattr(target, "load_target", made_up_target)
        assert main([*SMALL, "--out", str(tmp_path / "rows.jsonl")]) == 0
        found: dict[str, list[dict]] = {}
        for line in (tmp_path / "rows.jsonl").read_text().splitlines():
            found.setdefault(json.loads(line)["record"], []).append(json.loads(line))
        return found

    return on_it


def test_a_made_up_gpu(made_up, capsys, tmp_path):
    """Promised beside shown, the proof by runs, and what they teach: from the command line to the file of headrooms."""
    found = made_up(limit="2700000", over="1.001")
    out = capsys.readouterr().out
    (search,) = found["largest_batch"]
    largest, after = (next(r for r in found["trial"] if r["batch"] == search[f"{b}_batch"]) for b in ("largest", "next"))
    assert (search["ran"], search["next_ran"], after["ran"]) == ("ok", "oom", "oom")
    assert search["step_s"] == largest["step_s"] > 0
    assert largest["measured_over_total_percent"] == pytest.approx(0.1, abs=0.01)
    assert (largest["limit_bytes"], largest["budget_terms"]) == (2700000, "0.003 GiB allocator limit")
    assert (largest["outside_bytes"], largest["outside_source"]) == (5 * 2**28, "process")
    assert largest["predicted"]["step_s"] > 0
    assert f"{after['batch']} ran out of memory." in " ".join(out.split())
    assert "Outside the allocator's pool (CUDA context, libraries' workspaces): 1.25 GiB, by" in out
    assert max(map(len, out.splitlines())) <= 80
    (taught,) = map(json.loads, (tmp_path / "cache" / "jaxremat" / "headroom.jsonl").read_text().splitlines())
    assert (taught["total_bytes"], taught["peak_bytes"]) == (largest["total_bytes"], largest["measured_peak_bytes"])
    assert taught["setup"]["device_kind"] == "NVIDIA Made Up"


@pytest.mark.slow
def test_a_made_up_gpu_with_less_than_it_says(made_up, capsys):
    """The largest batch runs out of memory; the one below wasn't a trial yet, and is compiled, run, and the answer."""
    found = made_up(limit="2700000", over="1.11")
    (search,) = found["largest_batch"]
    largest, trials = search["largest_batch"], {row["batch"]: row for row in found["trial"]}
    assert search["compiled_largest_batch"] >= search["next_batch"] == largest + 1
    assert trials[largest]["measured_peak_bytes"] <= 2700000 < 1.11 * trials[largest + 1]["total_bytes"]
    assert (trials[largest]["ran"], trials[largest]["global_batch"], trials[largest + 1]["ran"]) == ("ok", largest, "oom")
    assert trials[largest]["config"]["model"] == trials[largest + 1]["config"]["model"]
    assert f"The largest batch that ran under dots is {largest}" in capsys.readouterr().out


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
