"""A sweep as a person uses it: real compiles of a small model, interrupted, resumed, shared out and submitted.

Kills at random moments are in `tests/test_kill_sweep.py`.

One sweep is run once and many tests look at it; what needs no compile uses the light child of `experiments.kill_sweep`.
"""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.grid import ENVIRONMENT, PACKAGE, check_sweep, source_hash, sweep_trials
from jaxremat.cli.sweep import main, without_submission
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.session.flags import SweepFlags
from jaxremat.trial.lines import from_row
from jaxremat.trial.queue import SweepTrial
from jaxremat.trial.record import TrialRecord

LIGHT = [sys.executable, "-m", "experiments.kill_sweep", "light-sweep"]
GRID = shlex.split("--model tiny --policy dots nothing --batch 1,2,3 --target h100-80gb")
REAL = shlex.split("--model tiny --num-layers 1 --dropout 0 --target h100-80gb --policy dots save:nix --max-batch 3")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def once_each(path: Path, num_trials: int) -> None:
    places = Counter((row["key"], row["part"]) for row in rows(path))
    assert set(places.values()) == {1}
    assert len({key for key, _ in places}) == num_trials


def light(*argv: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LIGHT, *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done


def trials(line: str) -> list[SweepTrial]:
    flags = parse_flags(SweepFlags, ["--out", "rows.jsonl", *line.split()])
    check_sweep(flags)
    return sweep_trials(flags)


@pytest.fixture(scope="module")
def swept(tmp_path_factory, h100) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A search that finds its batch, and a policy that names no tensor of the model; the environment is a bare one."""
    path = tmp_path_factory.mktemp("sweep") / "rows.jsonl"
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-m", "jaxremat", "sweep", *REAL, "--out", str(path), "--csv", str(path.with_suffix(".csv"))]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment), path


@pytest.mark.full
class TestReal:
    def test_one_trial_and_one_failure(self, swept):
        done, path = swept
        assert done.returncode == 1, done.stderr
        once_each(path, 2)
        search = [row for row in rows(path) if row["requested_policy"] == "dots"]
        assert [row["record"] for row in search] == ["probe", "trial", "largest_batch"]
        assert (search[1]["batch"], search[1]["fits"], search[1]["step_source"]) == (3, True, "predicted")
        (failure,) = [row for row in rows(path) if row["record"] == "failure"]
        assert failure["outcome"] == "bad-config"
        assert "'nix'" in failure["error"]

    def test_it_says_what_a_run_says(self, swept, tmp_path, capsys):
        from jaxremat.cli import run

        _, path = swept
        own = [*(word for word in REAL if word != "save:nix"), "--json"]
        assert run.main(own) == 0
        timed = ("lower_s", "compile_s", "key", "part", "parts")
        ran, stored = (
            [{name: value for name, value in row.items() if name not in timed} for row in found]
            for found in (map(json.loads, capsys.readouterr().out.splitlines()), rows(path))
        )
        assert ran == [row for row in stored if row["requested_policy"] == "dots"]

    def test_the_table_is_narrow_and_complete(self, swept):
        done, _ = swept
        assert max(map(len, done.stdout.splitlines())) <= 80
        cells = [line.split() for line in done.stdout.splitlines()]
        assert ["dots", "3"] in [cell[:2] for cell in cells]
        assert ["save:nix", "-", "-", "bad-config"] in [cell[:4] for cell in cells]

    def test_progress_says_what_runs_and_what_is_left(self, swept):
        """Each line has its seconds. The searches are named by `str(trial)`, with how many of the two are done."""
        done, _ = swept
        assert all(re.match(r"\[ *\d+\.\d s\] \S", line) for line in done.stderr.splitlines()), done.stderr
        search = str(trials(" ".join(REAL))[0])
        counts = [re.search(r"\b([012]) of 2\b", line) for line in done.stderr.splitlines() if search in line]
        found = [int(count[1]) for count in counts if count]
        assert found[0] == 0
        assert found == sorted(found)
        assert found[-1] > 0

    def test_again_it_is_there_at_once(self, swept, capsys):
        done, path = swept
        before, started = path.read_bytes(), time.monotonic()
        assert main([*REAL, "--out", str(path)]) == 1
        assert time.monotonic() - started < 5, "nothing was compiled"
        assert capsys.readouterr().out == done.stdout
        assert path.read_bytes() == before

    def test_csv(self, swept):
        _, path = swept
        with path.with_suffix(".csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        assert [(row["outcome"], row["record"]) for row in table] == [
            *[("ok", row["record"]) for row in rows(path) if row["requested_policy"] == "dots"],
            ("bad-config", "failure"),
        ]
        trial = next(row for row in table if row["record"] == "trial")
        (stored,) = [row for row in rows(path) if row["record"] == "trial"]
        assert int(trial["total_bytes"]) == stored["total_bytes"]
        assert trial["config.model.num_layers"] == "1"
        assert json.loads(trial["predicted_interval"]) == stored["predicted_interval"]


@pytest.mark.full
def test_measured_in_a_process_of_its_own(tmp_path):
    """On the CPU, the path of an attached GPU: compiled in one process, compiled from its cache and run in another."""
    path = tmp_path / "rows.jsonl"
    argv = shlex.split("--model tiny --num-layers 1 --dropout 0 --target cpu --policy nothing --batch 2 --steps 2")
    assert main([*argv, "--out", str(path)]) == 0
    (row,) = rows(path)
    assert (row["record"], row["batch"], row["step_source"], row["error"]) == ("trial", 2, "measured", None)
    assert 0 < row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
    assert row["tokens_per_s"] == pytest.approx(2 * row["seq_len"] / row["step_s"])
    assert isinstance(from_row(row), TrialRecord)


@pytest.mark.full
def test_interrupted(tmp_path):
    """Ctrl-C: 130, what is finished is shown and saved; the same command finishes it."""
    path = tmp_path / "rows.jsonl"
    grid = shlex.split("--model tiny --policy dots nothing none --batch 1,2,3 --target h100-80gb --jobs 1")
    process = subprocess.Popen(
        [*LIGHT, *grid, "--out", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1].startswith("jaxremat: ")
    assert "Traceback" not in err
    saved = path.read_bytes()
    assert 1 <= len(saved.splitlines()) < 9
    assert re.search(r"^ dots +1 ", out, re.MULTILINE)
    light(*grid, "--out", str(path))
    assert path.read_bytes().startswith(saved)
    once_each(path, 9)


def test_an_error_after_a_signal_does_not_hide_it(monkeypatch, tmp_path, capsys):
    """Such as that of the file of --csv, which is written at the end."""

    def unwritable(*_: Any) -> None:
        raise JaxrematError("--csv cannot be written")

    monkeypatch.setattr("jaxremat.cli.sweep.run_trials", lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr("jaxremat.cli.sweep.lines_of", unwritable)
    argv = ["--model", "tiny", "--target", "h100-80gb", "--batch", "1", "--out", str(tmp_path / "rows.jsonl")]
    assert main(argv) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("sharded", [True, False])
def test_two_at_once_over_one_store(sharded, tmp_path):
    """Two shards; or two sweeps of the same, of which each takes what the other hasn't. No row lost, none twice."""
    path = tmp_path / "rows.jsonl"
    both = [
        subprocess.Popen(
            [*LIGHT, *GRID, "--out", str(path), "--jobs", "2", *(["--shard", f"{n}/2"] if sharded else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    once_each(path, 6)
    shown = [len(re.findall(r"^ (?:dots|nothing) +\d", out, re.MULTILINE)) for out, _ in told]
    assert shown == ([3, 3] if sharded else [6, 6])


@pytest.mark.full
def test_whoever_takes_part_finishes_what_a_killed_one_had_claimed(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = subprocess.Popen(
        [*LIGHT, *GRID, "--out", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert first.stderr
    while "started" not in first.stderr.readline():
        pass
    second = subprocess.Popen([*LIGHT, *GRID, "--out", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first.kill()
    first.communicate()
    assert second.communicate(timeout=120)[0].count(" dots ") == 3
    assert second.returncode == 0
    once_each(path, 6)


@pytest.mark.full
def test_fresh_and_retry_failed(tmp_path):
    path = tmp_path / "rows.jsonl"
    grid = shlex.split("--model tiny --policy dots --batch 1,4,5 --target h100-80gb")  # of the light child: ok, crashed, oom
    light(*grid, "--out", str(path), code=1)
    assert [row["batch"] for row in rows(path)].count(1) == 1
    assert len(rows(path)) == 3
    light(*grid, "--out", str(path), "--retry-failed", code=1)
    assert [row["batch"] for row in rows(path)].count(1) == 1
    assert len(rows(path)) == 5
    light(*grid, "--out", str(path), "--fresh", code=1)
    assert [row["batch"] for row in rows(path)].count(1) == 2


@pytest.mark.full
def test_nothing_fits(tmp_path):
    """In the light child a batch needs 1 GiB for each letter of its policy, of 20 GiB."""
    path = tmp_path / "rows.jsonl"
    light(*shlex.split("--model tiny --policy nothing --batch 3 --target h100-80gb --out"), str(path), code=3)
    assert [row["fits"] for row in rows(path)] == [False]


@pytest.mark.full
def test_a_full_disk_loses_no_row(tmp_path):
    """What can't be written any more is printed; with room again, the same command does only the rest."""
    path = tmp_path / "rows.jsonl"
    command = " ".join([*LIGHT, *GRID, "--jobs", "1", "--out", str(path)])
    done = subprocess.run(["bash", "-c", f"ulimit -f 3; {command}"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"--out {str(path)!r}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    num_saved = len(rows(path))
    assert 1 <= num_saved < 6
    (unwritten,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert unwritten["batch"] not in [row["batch"] for row in rows(path) if row["policy"] == unwritten["policy"]]
    started = light(*GRID, "--out", str(path)).stderr.splitlines()[0]
    assert {"6", str(num_saved)} <= {*re.findall(r"\d+", started)}
    once_each(path, 6)


class TestGrid:
    def test_the_product_in_the_order_asked_for(self):
        found = trials("--model tiny gpt2 --policy dots auto --batch 8,16 --target h100-80gb h200")
        assert len({trial.key for trial in found}) == len(found) == 16
        assert [str(trial) for trial in found[:5]] == [
            "tiny, dots, batch 8, h100-80gb",
            "tiny, dots, batch 16, h100-80gb",
            "tiny, auto, batch 8, h100-80gb",
            "tiny, auto, batch 16, h100-80gb",
            "tiny, dots, batch 8, h200",
        ]

    def test_without_batches_each_ones_largest(self):
        assert [trial.batch for trial in trials("--policy dots nothing --target h100-80gb")] == [None, None]

    def test_the_same_twice_is_one_trial(self):
        assert len(trials("--policy dots dots_saveable --batch 8,8 --target h100-80gb h100-80gb")) == 1

    def test_shards_divide_the_work(self):
        line = "--policy dots nothing none --batch 1,2,3 --target h100-80gb"
        shards = [trials(f"{line} --shard {i}/4") for i in (1, 2, 3, 4)]
        assert sorted(trial.key for shard in shards for trial in shard) == sorted(trial.key for trial in trials(line))
        assert {len(shard) for shard in shards} == {2, 3}

    @pytest.mark.parametrize(
        "change",
        [
            *("--seq-len 32", "--loss chunked", "--budget 3GiB", "--mem-fraction 0.5", "--num-layers 3", "--target h200"),
            *("--headroom 0.1", "--global-batch 8", "--xla-remat"),
        ],
    )
    def test_another_question_has_another_key(self, change):
        line = "--model tiny --target h100-80gb --policy none"
        assert trials(line)[0].key != trials(f"{line} {change}")[-1].key

    @pytest.mark.parametrize("same", ["--jobs 7", "--timeout 9", "--steps 3", "--budget 1GiB --mem-fraction 0.3"])
    def test_what_changes_no_record_changes_no_key(self, same):
        basis = "--budget 1GiB" if "budget" in same else ""
        assert trials(f"--target h100-80gb {basis}")[0].key == trials(f"--target h100-80gb {same}")[0].key

    @pytest.mark.parametrize("name", ENVIRONMENT)
    def test_another_environment_has_another_key(self, monkeypatch, name):
        monkeypatch.delenv(name, raising=False)
        before = trials("--target h100-80gb")[0].key
        monkeypatch.setenv(name, "1")
        assert trials("--target h100-80gb")[0].key != before

    def test_another_source_has_another_key(self, monkeypatch):
        before = trials("--target h100-80gb")[0].key
        monkeypatch.setattr("jaxremat.cli.grid.source_hash", lambda: "edited")
        assert trials("--target h100-80gb")[0].key != before

    def test_the_source_is_that_of_the_package_without_its_reports(self, monkeypatch, tmp_path):
        for path in ("xla/clock.py", "chips/nvidia/measured/matmul.csv", "session/session.py", "report/table.py"):
            assert (PACKAGE / path).is_file()
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text("0")
        monkeypatch.setattr("jaxremat.cli.grid.PACKAGE", tmp_path)
        found = [source_hash()]
        for path in ("report/table.py", "xla/clock.py", "chips/nvidia/measured/matmul.csv", "session/session.py"):
            (tmp_path / path).write_text("1")
            found.append(source_hash())
        assert found[0] == found[1]
        assert len({*found}) == 4

    def test_what_only_some_combination_rules_out_is_a_row(self, tmp_path, capsys):
        found = trials("--model tiny gpt2 --policy every:12 --batch 8 --target h100-80gb")
        assert [bool(trial.refused) for trial in found] == [True, False]
        assert "every:12" in found[0].refused

    @pytest.mark.parametrize(
        ("line", "named"),
        [
            ("--policy dots dotts", "'dotts'"),
            ("--model tiny gtp2", "'gtp2'"),
            ("--batch 8,x", "'8,x'"),
            ("--target h100-80gb h300", "'h300'"),
            ("--policy every:48 dots", "'every:48'"),
            ("--fresh --retry-failed", "--fresh"),
            ("--policy", "--policy"),
            ("--target cpu --data nowhere.txt", "--data 'nowhere.txt'"),
        ],
    )
    def test_what_cannot_be_meant_is_rejected_before_anything_starts(self, line, named):
        """Also where other values of the same flag are fine."""
        with pytest.raises(UsageError) as caught:
            trials(line)
        assert named in caught.value.got


def test_a_shards_command_line():
    line = "--model a b --submit logs --batch 8 --num_shards 3 --slurm x=1 y=2 --csv=t.csv --cluster local --out r.jsonl -v"
    assert without_submission(line.split()) == shlex.split("--model a b --batch 8 --out r.jsonl -v")


def submitted(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: submitit sets up logging anew, and pytest's handlers don't survive that."""
    command = [sys.executable, "-m", "jaxremat", "sweep", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.full
def test_submitted(tmp_path, h100):
    """An array of two, by submitit's local executor; the same command then has it all. Each trial names no tensor."""
    path, logs = tmp_path / "rows.jsonl", tmp_path / "logs"
    grid = shlex.split("--model tiny --num-layers 1 --dropout 0 --policy save:a save:b --batch 1 --target h100-80gb --out")
    argv = [*grid, str(path)]
    done = submitted([*argv, "--submit", str(logs), "--cluster", "local", "--num-shards", "2", "--slurm", "timeout_min=5"])
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\b\d+\b", done.stdout.splitlines()[0].partition(str(logs))[0])) == 2, "the jobs' numbers"
    deadline = time.monotonic() + 240
    while (not path.exists() or len(path.read_text().splitlines()) < 2) and time.monotonic() < deadline:
        time.sleep(0.2)
    once_each(path, 2)
    assert {(row["requested_policy"], row["outcome"]) for row in rows(path)} == {(f"save:{x}", "bad-config") for x in "ab"}
    before = path.read_bytes()
    assert main(argv) == 1
    assert path.read_bytes() == before


@pytest.mark.full
def test_submission_without_a_cluster_is_one_error(tmp_path):
    done = submitted(
        ["--target", "h100-80gb", "--out", str(tmp_path / "r.jsonl"), "--submit", str(tmp_path / "logs")], PATH=""
    )
    assert done.returncode == 1
    assert done.stderr.startswith("jaxremat: "), done.stderr
    assert "--cluster" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("word", ["timeout_min=abc", "no_such_name=1"])
def test_a_value_that_submitit_does_not_take_is_one_error(tmp_path, word):
    where = ["--target", "cpu", "--out", str(tmp_path / "r.jsonl"), "--submit", str(tmp_path / "logs")]
    done = submitted([*where, "--cluster", "local", "--slurm", word])
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert word in line
