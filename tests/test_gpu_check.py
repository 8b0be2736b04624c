"""Every part of `experiments.gpu_check` writes its rows and its summary.

MFU, the profile and PyTorch's side run at tiny size on this CPU. The children of the other parts are made up.
"""

import importlib.util
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import gpu_check, gpu_parts, gpu_summary, kernel_tables
from experiments.children import Child, run_child
from experiments.common import RESULTS
from experiments.gpu_parts import PAIRS, Check
from jaxremat.chips.nvidia.gpu import nvidia_driver
from jaxremat.cli.command import parse_flags
from jaxremat.report.table import list_table
from jaxremat.session.flags import RunFlags
from jaxremat.system.process import Deadline
from tests.helpers import QUICK_FLAGS

NO_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason='PyTorch is missing: pip install "jaxremat[peer]"'
)


def run(part: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a part. Its section of the summary is there, and nothing is missing in it."""
    argv = ["--tiny", "--parts", part, "--policies", "nothing", "--workers", "2", "--minutes", "60", "--out", str(folder)]
    assert gpu_check.main(argv) == 0
    result = json.loads((folder / "cpu" / f"gpu_check-{part}.json").read_text())
    assert result["versions"]["jax"]
    summary = (folder / "cpu" / "gpu_check.md").read_text()
    assert summary == gpu_summary.render(folder / "cpu")
    assert gpu_summary.NOT_THERE not in summary
    return result[part]


#: Children are started in threads, and Python 3.11 can't compile annotations in two threads at once.
ONE_AT_A_TIME = threading.Lock()


def made_up(argv: tuple[str, ...], seconds: float) -> Child:
    """What `jaxremat.run` answers to these flags, without running it: each trial with its batch, or the largest batch as 4."""
    with ONE_AT_A_TIME:
        flags = parse_flags(RunFlags, argv)
    if flags.save_plan:
        flags.save_plan.write_text("{}")
    rows: list[dict[str, Any]] = []
    for policy in flags.policy:
        batches = list(flags.batch)
        if not batches:
            batches = [3 if policy == "auto" else 4]
            rows.append(
                {"record": "plan", "batch": 3} if policy == "auto" else {"record": "largest_batch", "largest_batch": 4}
            )
        for batch in batches:
            trial = {
                "record": "trial",
                "requested_policy": policy,
                "policy": policy,
                "model": "tiny",
                "batch": batch,
                "loss": "full",
            }
            sizes = {"total_bytes": 10 * batch, "budget_bytes": 10**9, "error": None, "step_source": "measured"}
            rows.append({**trial, **sizes, "step_s": seconds, "tokens_per_s": 64 * batch / seconds})
    return Child(tuple(rows), "")


@pytest.fixture
def made_up_children(monkeypatch):
    """No process is started: the device's steps take 2 s, and 1 s was predicted."""
    monkeypatch.setattr(
        Check, "compiled", lambda self, deadline, size, *argv: made_up((*size.argv(), *self.more, *argv), 1.0)
    )
    attached = lambda self, deadline, size, *argv, share=False: made_up((*size.argv(), *self.more, *argv), 2.0)  # noqa: E731
    monkeypatch.setattr(Check, "attached", attached)


@pytest.mark.usefixtures("made_up_children")
def test_bytes(tmp_path):
    rows = run("bytes", tmp_path)
    assert sorted((row["model"], row["policy"], row["batch"]) for row in rows) == [
        (size.name, "nothing", batch) for size in gpu_check.TINY for batch in size.batches
    ]
    assert all(row["deviceless_bytes"] == row["total_bytes"] == 10 * row["batch"] for row in rows)
    assert {row["measured_bytes"] for row in rows} == {None}, "these children have no allocator"


@pytest.mark.usefixtures("made_up_children")
def test_speed(tmp_path):
    """At one batch, and at each policy's own batch."""
    rows = run("speed", tmp_path)
    assert sorted((row["at"], row["policy"], row["batch"]) for row in rows) == [
        ("own batch", "auto", 3), ("own batch", "nothing", 4), ("same batch", "auto", 2), ("same batch", "nothing", 2)
    ]  # fmt: skip
    assert {(row["predicted_s"], row["step_s"]) for row in rows} == {(1.0, 2.0)}


@pytest.mark.usefixtures("made_up_children")
@pytest.mark.parametrize(("limit_s", "num_steps"), [(1000, 2), (gpu_parts.UNROLLED_S - 1, 1)])
def test_unrolled_layers_are_measured_if_there_is_time(limit_s, num_steps, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_parts, "run_child", lambda *_: Child(({"median_s": 1.0, "flops_per_s": 1.0},), ""))
    found = Check("gpu", "gpu", "h200", gpu_check.SIZES, ("nothing",), limit_s, 2, tmp_path)
    matmul, *steps = gpu_parts.measure_mfu(found)
    assert matmul["error"] is None
    assert [row["step_s"] for row in steps] == [2.0] * num_steps
    assert len({row["what"] for row in steps}) == num_steps


@pytest.mark.full
def test_mfu(tmp_path, h100, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", QUICK_FLAGS)
    matmul, step = run("mfu", tmp_path)
    assert matmul["flops_per_s"] == pytest.approx(2 * 256**3 / matmul["step_s"])
    assert step["flops_per_s"] > 0
    assert step["mfu"] is None  # a CPU's peak isn't known


@pytest.mark.full
def test_profile(tmp_path):
    whole, *classes = run("profile", tmp_path)
    assert whole["measured_s"] == pytest.approx(sum(row["measured_s"] for row in classes))
    assert {"small matmul", "elementwise"} <= {row["kernel_class"] for row in classes}
    assert whole["num_launches"] > whole["num_kernels"] > 100  # the layers are a loop
    folder = tmp_path / "profiles" / "cpu-tiny"
    assert {path.name for path in folder.iterdir()} == {"optimized.hlo.txt.gz", "profile.toml", "thunks.csv"}


@pytest.mark.full
@NO_TORCH
def test_peer(tmp_path, h100, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", QUICK_FLAGS)
    rows = run("peer", tmp_path)
    assert [(row["framework"], row["arm"]) for row in rows] == [
        (framework, arm) for pair in PAIRS[:1] for framework, arm in zip(("jax", "torch"), pair, strict=True)
    ]
    assert all(row["step_s"] > 0 and row["batch"] == 2 for row in rows)
    assert {row["num_params"] for row in rows if row["framework"] == "torch"} == {124_672}


@pytest.mark.parametrize("part", kernel_tables.COLUMNS)
def test_the_tables_of_kernels_fit_in_80_columns(part):
    """A table that is too wide has a line for each of its columns."""
    num_words, columns = kernel_tables.COLUMNS[part]
    titles, writers = zip(*map(kernel_tables.show, columns), strict=True)
    rows = json.loads((RESULTS / "nvidia-h100-80gb-hbm3/kernel_tables.json").read_text())[part]
    cells = [
        ["-" if row[key] is None else write(row[key]) for key, write in zip(columns, writers, strict=True)] for row in rows
    ]
    out = io.StringIO()
    Console(width=80, file=out).print(list_table(part, titles, cells, left=num_words))
    assert sum(all(title in line for title in titles) for line in out.getvalue().splitlines()) == 1


def test_what_is_not_reached_is_said(tmp_path):
    argv = ["--tiny", "--parts", "mfu", "bytes", "--policies", "nothing", "--minutes", "0.01", "--out", str(tmp_path)]
    assert gpu_check.main(argv) == 1
    assert (tmp_path / "cpu" / "gpu_check.md").read_text().count(gpu_summary.NOT_THERE) == 2
    for part in ("mfu", "bytes"):
        rows = json.loads((tmp_path / "cpu" / f"gpu_check-{part}.json").read_text())[part]
        assert all(row["error"] for row in rows if row.get("what") != "matmul")


@pytest.mark.skipif(nvidia_driver(), reason="this machine has a GPU")
def test_without_a_gpu(capsys):
    assert gpu_check.main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "--tiny" in err


@pytest.mark.full
def test_a_child_cut_off_keeps_its_rows(tmp_path):
    (tmp_path / "slow_child.py").write_text(
        'import time\nprint(\'{"n": 1}\', flush=True)\nprint("noise")\nprint(\'{"n"\', flush=True)\ntime.sleep(600)\n'
    )
    child = run_child("slow_child", (), Deadline(3), {"PYTHONPATH": str(tmp_path)})
    assert child.rows == ({"n": 1},)
    assert child.error
    (tmp_path / "bad_child.py").write_text("raise SystemExit('it is broken')")
    assert run_child("bad_child", (), Deadline(30), {"PYTHONPATH": str(tmp_path)}).error == "it is broken"


#: Rows as a GPU would give them, made up, to see the summary that only a GPU's rows have.
SPEED = [
    {
        "policy": policy,
        "at": "same batch",
        "model": "gpt2",
        "batch": 16,
        "predicted_s": predicted,
        "step_s": measured,
        "tokens_per_s": 16 * 1024 / measured,
        "predicted_tokens_per_s": 16 * 1024 / predicted,
        "mfu": 0.4,
    }
    for policy, predicted, measured in (("none", 0.03, 0.05), ("dots", 0.04, 0.07), ("nothing", 0.05, 0.06))
]


def test_the_summary_of_made_up_rows(tmp_path):
    (tmp_path / "gpu_check-speed.json").write_text(json.dumps({"speed": SPEED, "versions": {"jax": "0.10.2"}}))
    summary = gpu_summary.render(tmp_path)
    (correlation,) = [line for line in summary.splitlines() if "0.50" in line]
    assert re.search(r"\b3\b", correlation), "the rank correlation of three policies"
    cells = [line.split(" | ")[1:] for line in summary.splitlines() if line.startswith("| `dots` | same batch")]
    assert cells == [["same batch", "16", "40.0", "70.0", "1.75", "234,057", "40.0% |"]]
