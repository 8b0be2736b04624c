"""Every part of `experiments.gpu_check` runs at tiny size on this CPU, and writes its files and its summary."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import gpu_check, gpu_summary
from experiments.children import Child, run_child
from experiments.gpu_parts import PAIRS, Check
from jaxremat.machine.process import Deadline
from jaxremat.xla.gpu import nvidia_driver

NO_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason='PyTorch is missing: pip install "jaxremat[peer]"'
)


@pytest.fixture(scope="module", autouse=True)
def shared_plans(tmp_path_factory):
    """What is compiled without the device is compiled once for equal flags, whichever part asks: a plan takes most of a part."""
    done: dict[tuple, tuple[Child, Path | None]] = {}

    def shared(self, deadline, size, *argv):
        flags, saved = list(argv), None
        if "--save-plan" in flags:
            at = flags.index("--save-plan")
            saved = Path(flags[at + 1])
            del flags[at : at + 2]
        key = (size, *sorted(flags))
        if key not in done:
            child = compiled(self, deadline, size, *argv)
            kept = tmp_path_factory.mktemp("plan") / "plan.json" if saved and saved.exists() else None
            done[key] = child, shutil.copy(saved, kept) if kept else None
        child, kept = done[key]
        if saved and kept:
            shutil.copy(kept, saved)
        return child

    compiled = Check.compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Check, "compiled", shared)
        yield


def run(part: str, folder) -> tuple[list[dict], str]:
    """The rows of a part, and the summary."""
    argv = ["--tiny", "--parts", part, "--policies", "nothing", "--workers", "2", "--minutes", "60", "--out", str(folder)]
    assert gpu_check.main(argv) == 0
    result = json.loads((folder / "cpu" / f"gpu_check-{part}.json").read_text())
    assert result["versions"]["jax"]
    summary = (folder / "cpu" / "gpu_check.md").read_text()
    assert summary == gpu_summary.render(folder / "cpu")
    assert summary.count("Not run.") == 4
    assert gpu_summary.NOT_THERE not in summary
    return result[part], summary


def test_bytes(tmp_path, h100):
    rows, summary = run("bytes", tmp_path)
    assert sorted((row["model"], row["policy"], row["batch"]) for row in rows) == [
        ("tiny", "nothing", 2),
        ("tiny llama", "nothing", 2),
    ]
    for row in rows:
        assert row["deviceless_bytes"] > 0
        assert row["total_bytes"] > 0
        assert row["measured_bytes"] is None  # a CPU's allocator keeps no mark
        assert row["error"] is None
    assert "Compiled on the device against without it: from " in summary


@pytest.mark.slow  # two and a half minutes; the other parts run the same children
def test_speed(tmp_path, h100):
    rows, summary = run("speed", tmp_path)
    assert [(row["policy"], row["at"]) for row in rows[:2]] == [("nothing", "same batch"), ("auto", "same batch")]
    assert {(row["policy"], row["at"]) for row in rows[2:]} == {("nothing", "own batch"), ("auto", "own batch")}
    for row in rows:
        assert row["predicted_s"] > 0
        assert row["step_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 64 / row["step_s"])
    assert all(row["batch"] == 2 for row in rows[:2])
    own = {row["policy"]: row["batch"] for row in rows[2:]}
    assert own["nothing"] == 4  # --max-batch
    assert 1 <= own["auto"] <= 4
    assert "| `auto` | own batch | " in summary


def test_mfu(tmp_path, h100):
    rows, summary = run("mfu", tmp_path)
    matmul, step = rows
    assert matmul["flops_per_s"] == pytest.approx(2 * 256**3 / matmul["step_s"])
    assert step["what"] == "training step of tiny llama"
    assert step["flops_per_s"] > 0
    assert step["mfu"] is None  # a CPU's peak isn't known
    assert "of the matmul's rate" in summary


def test_profile(tmp_path):
    rows, summary = run("profile", tmp_path)
    whole, *classes = rows
    assert whole["measured_s"] == pytest.approx(sum(row["measured_s"] for row in classes))
    assert {"small matmul", "elementwise"} <= {row["kernel_class"] for row in classes}
    assert whole["num_launches"] > whole["num_kernels"] > 100  # the layers are a loop
    folder = tmp_path / "profiles" / "cpu-tiny"
    assert {path.name for path in folder.iterdir()} == {"optimized.hlo.txt.gz", "profile.toml", "thunks.csv"}
    assert "| all | " in summary


@NO_TORCH
def test_peer(tmp_path, h100):
    rows, summary = run("peer", tmp_path)
    assert [(row["framework"], row["arm"]) for row in rows] == [
        (framework, arm) for pair in PAIRS[-2:] for framework, arm in zip(("jax", "torch"), pair, strict=True)
    ]
    assert all(row["step_s"] > 0 and row["batch"] == 2 for row in rows)
    assert {row["num_params"] for row in rows if row["framework"] == "torch"} == {124_672}
    assert ", torch 2." in summary


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
def test_without_torch_the_rows_say_so(tmp_path, h100):
    rows = list(gpu_check.measure_peer(gpu_check.find_check(gpu_check.Flags(tiny=True), 3600)))
    assert {row["error"] for row in rows if row["framework"] == "torch"} == {
        'PyTorch is missing: pip install "jaxremat[peer]"'
    }
    assert {row["error"] for row in rows if row["framework"] == "jax"} == {None}


def test_what_is_not_reached_is_said(tmp_path, capfd):
    argv = ["--tiny", "--parts", "mfu", "bytes", "--policies", "nothing", "--minutes", "0.01", "--out", str(tmp_path)]
    assert gpu_check.main(argv) == 1
    summary = (tmp_path / "cpu" / "gpu_check.md").read_text()
    assert summary.count("Not there:") == 2
    assert "2 x not reached within 0 s" in summary
    assert capfd.readouterr().err.endswith("not everything was measured: 2 sections say what is missing\n")


@pytest.mark.skipif(nvidia_driver(), reason="this machine has a GPU")
def test_without_a_gpu():
    done = subprocess.run([sys.executable, "-m", "experiments.gpu_check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "gpu_check: no GPU to check: no NVIDIA GPU can be read: NVML Shared Library Not Found. Likely cause: this machine has "
        "no NVIDIA driver. Next: --tiny runs every part on the CPU.\n"
    )


def test_a_child_cut_off_keeps_its_rows(tmp_path):
    (tmp_path / "slow_child.py").write_text(
        'import time\nprint(\'{"n": 1}\', flush=True)\nprint("noise")\nprint(\'{"n"\', flush=True)\ntime.sleep(600)\n'
    )
    child = run_child("slow_child", (), Deadline(3), {"PYTHONPATH": str(tmp_path)})
    assert child.rows == ({"n": 1},)
    assert child.error == "cut off after 3 s of the part's 3 s"
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
    assert "At the same batch: Spearman's rank correlation of predicted and measured step times 0.50, 3 policies." in summary
    assert "| `dots` | same batch | 16 | 40.0 | 70.0 | 1.75 | 234,057 | 40.0% |" in summary
