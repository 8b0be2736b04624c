"""Flags that change nothing beside others are named, and the others aren't."""

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags, check_explain
from jaxremat.cli.grid import check_sweep
from jaxremat.cli.train import TrainRunFlags, check_train
from jaxremat.errors import UsageError
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.no_effect import without_effect
from jaxremat.session.request import check_run
from tests.user_files import in_folder

CHECKS = {"run": (RunFlags, check_run), "explain": (ExplainFlags, check_explain), "train": (TrainRunFlags, check_train)}
LLAMA = "--model llama3.2-1b"


@pytest.mark.parametrize(
    ("line", "kind", "named"),
    [
        ("run --steps 3 --data pyproject.toml --mem-fraction 0.5", "deviceless", ["--steps", "--data"]),
        ("run --steps 3 --mem-fraction 0.5 --headroom 0.1", "attached", ["--mem-fraction"]),
        ("run --steps 3 --mem-fraction 0.5 --headroom 0.1", "cpu", ["--mem-fraction", "--headroom"]),
        ("explain --steps 3", "cpu", ["--steps"]),
        ("run --mem-fraction 0.5 --budget 1GiB", "deviceless", ["--mem-fraction"]),
        ("run --xla-remat", "deviceless", []),
        ("run --xla-remat --target v6e", "deviceless", ["--xla-remat"]),
        ("run --network-gbps 200", "deviceless", ["--network-gbps"]),
        ("run --network-gbps 200 --devices 8", "deviceless", ["--network-gbps"]),
        ("run --network-gbps 200 --devices 16", "deviceless", []),
        ("run --network-gbps 200 --devices 8 --nodes 2 --mesh auto", "deviceless", []),
        ("run --network-gbps 200 --devices 16", "cpu", ["--network-gbps"]),
        ("explain --network-gbps 200 --devices 16", "attached", []),
        ("run --max-batch 8", "deviceless", []),
        ("run --max-batch 8 --batch 4", "deviceless", ["--max-batch"]),
        ("run --initialization-timeout 9", "deviceless", ["--initialization-timeout"]),
        ("run --rope-theta 1e6 --max-seq-len 2048", "deviceless", ["--rope-theta"]),
        (f"run {LLAMA} --rope-theta 1e6 --window-pattern sf", "deviceless", ["--window-pattern"]),
        (f"run {LLAMA} --sliding-window 64 --window-pattern sf --qkv-bias True", "deviceless", []),
        ("run --qkv-bias True --qk-norm-over projection", "deviceless", ["--qk-norm-over", "--qkv-bias"]),
        ("run --router-loss 0.1 --dispatch ragged", "deviceless", ["--router-loss", "--dispatch"]),
        ("run --router-loss 0.1 --num-experts 4 --exact-gelu True", "deviceless", []),
        ("run --mlp swiglu --exact-gelu True", "deviceless", ["--exact-gelu"]),
        ("run --decay-steps 9", "deviceless", ["--decay-steps"]),
        ("run --decay-steps 9 --schedule linear", "deviceless", []),
        ("train --checkpoint-every 9 --eval-batches 3", "cpu", ["--checkpoint-every"]),
        ("train --checkpoint-every 9 --run-dir run --eval-every 0 --eval-batches 3", "cpu", ["--eval-batches"]),
        ("train --model train.py:workload --sample-tokens 9", "cpu", ["--sample-tokens"]),
    ],
)
def test_each_is_named_and_no_other(line, kind, named, tmp_path, monkeypatch):
    with in_folder(tmp_path) as write:
        write("train.py")
        monkeypatch.chdir(tmp_path)
        command, *argv = line.split()
        flags, check = CHECKS[command]
        found = without_effect(check(parse_flags(flags, argv)), kind)
    assert sorted(text.split()[0] for text in found) == sorted(named)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--slurm", "timeout_min=5"], "--slurm"),
        (["--num-shards", "8"], "--num-shards"),
        (["--cluster", "local"], "--cluster"),
        (["--shard", "1/2", "--submit", "logs"], "--shard"),
        (["--csv", "t.csv", "--submit", "logs"], "--csv"),
    ],
)
def test_flags_of_an_array_job_that_cannot_be_meant(argv, named):
    with pytest.raises(UsageError) as caught:
        check_sweep(parse_flags(SweepFlags, ["--out", "r.jsonl", *argv]))
    assert caught.value.got.startswith(named)
    assert caught.value.next_step
