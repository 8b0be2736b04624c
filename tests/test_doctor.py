"""`python -m jaxremat doctor` tries JAX out in child processes, and survives one that crashes, hangs or is in conflict.

The command runs in this process. What it makes of the facts is in `tests/test_doctor_checks.py`.
"""

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from jaxremat.chips.nvidia.gpu import bundled_names, nvidia_driver
from jaxremat.cli import doctor
from jaxremat.cli.machine import facts
from jaxremat.cli.machine.facts import last_words, try_out
from jaxremat.system.process import Deadline
from tests.fake_nvml import ROOT, environment, fresh_fake
from tests.made_up_machines import GOOD

without_a_gpu = pytest.mark.skipif(nvidia_driver(), reason="this machine has a GPU")


@pytest.fixture
def told(monkeypatch, capsys):
    """The command's exit code, and its JSON by row, with these variables and no others."""

    def run(**variables: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
        bare = environment(str(ROOT), **variables)
        for name in {*os.environ} - {*bare}:
            monkeypatch.delenv(name)
        for name, value in bare.items():
            monkeypatch.setenv(name, value)
        code = doctor.main(["--json"])
        found = json.loads(capsys.readouterr().out)
        return code, found, {row["name"]: row for row in found["rows"]}

    return run


@pytest.mark.full
@without_a_gpu
def test_all_is_well(told, h100):
    code, found, rows = told()
    assert (code, found["usable"]) == (0, True), found
    (*_, last) = found["rows"]
    assert (last["name"], last["state"], last["remedy"]) == ("targets", "ok", "")
    assert last["found"].endswith(", ".join(("cpu", *bundled_names())))
    assert found["facts"]["nvml_error"]
    assert rows["driver"]["state"] == "note"


@pytest.mark.full
@without_a_gpu
def test_conflicting_variables(told, h100):
    """What makes JAX's plugin fail, found beside what it says itself."""
    code, found, rows = told(XLA_CLIENT_MEM_FRACTION=".5", XLA_PYTHON_CLIENT_MEM_FRACTION=".5")
    assert code == 1
    assert {name for name, row in rows.items() if row["state"] == "problem"} == {"environment", "targets"}
    assert rows["environment"]["remedy"] == "unset XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in found["facts"]["deviceless"]["words"]


@pytest.mark.full
@without_a_gpu
def test_an_unknown_flag_of_xla(told):
    """It ends every process that uses JAX without a Python error; the remedy leaves the flags that are known."""
    code, _, rows = told(XLA_FLAGS="--xla_gpu_nonsense=1 --xla_gpu_autotune_level=0")
    assert (code, rows["environment"]["state"]) == (1, "problem")
    assert rows["environment"]["remedy"] == "export XLA_FLAGS='--xla_gpu_autotune_level=0'"


@pytest.mark.full
@without_a_gpu
def test_a_busy_card(told, monkeypatch):
    """NVML faked: the card is seen, and JAX, which finds no driver, can't use it."""
    monkeypatch.setitem(sys.modules, "pynvml", fresh_fake())
    monkeypatch.setattr(
        facts, "try_out", lambda kind, limit_s: try_out(kind, limit_s) if kind == "attached" else GOOD.deviceless
    )
    code, _, rows = told()
    assert (code, rows["GPU 0"]["state"], rows["GPU 1"]["state"]) == (1, "problem", "ok")
    assert all(text in rows["GPU 0"]["found"] for text in ("NVIDIA H200", "40.00 GiB", "140.00 GiB", "105.00 GiB"))
    assert "server (4244) 95.00 GiB" in rows["GPU 0 is used by"]["found"]
    assert rows["JAX on the GPU"]["state"] == "problem"


def environment_without(folder: Path, *prefixes: str) -> str:
    """The Python of a new virtual environment that has everything this one has but packages that begin so."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if not entry.name.startswith(prefixes) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


@pytest.mark.full
@without_a_gpu
def test_a_missing_wheel(tmp_path, h100):
    """In a process of its own, as text: the lines to type are whole."""
    python = environment_without(tmp_path, "jax_plugins", "jax_cuda13", "nvidia_nvvm")
    done = subprocess.run(
        [python, "-m", "jaxremat", "doctor"], env=environment(str(ROOT)), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    typed = [line.split(maxsplit=1) for line in done.stdout.splitlines() if 'pip install "jaxremat[aot]"' in line]
    assert [name for name, _ in typed] == ["CUDA", "targets"]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
def test_a_plugin_that_crashes(tmp_path, monkeypatch):
    """Its end is told, and what was found before it is in the facts."""
    plugin = tmp_path / "jax_plugins" / "crash"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("import os\ndef initialize():\n    os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    found = try_out("deviceless", 60)
    assert "SIGABRT" in found.end
    assert found.step("jax")


@pytest.mark.full
def test_a_plugin_that_hangs(tmp_path, monkeypatch):
    """The child is ended with all that it started. Its time ends here as soon as it hangs."""
    plugin = tmp_path / "jax_plugins" / "hang"
    plugin.mkdir(parents=True)
    pid = tmp_path / "pid"
    (plugin / "__init__.py").write_text(
        f"import os, subprocess\ndef initialize():\n    p = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(pid)!r} + '-', 'w').write(str(p.pid)); os.rename({str(pid)!r} + '-', {str(pid)!r}); p.wait()\n"
    )

    class UntilItHangs(Deadline):
        def left_s(self) -> float:
            return 0.0 if pid.exists() else super().left_s()

    monkeypatch.setattr(facts, "Deadline", UntilItHangs)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    found = try_out("deviceless", 77)
    assert "77 s" in found.end
    assert found.step("jax")
    deadline = time.monotonic() + 30  # a process that was killed ends when the kernel next runs it
    while not _has_ended(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def test_last_words():
    log = (
        "Traceback (most recent call last):\n  File x\nValueError: bad\n\nE1121 14:58:33.446492   15857 x.cc:9] worse\nbye\n"
    )
    assert last_words(log) == "worse"
    assert last_words("Jax plugin configuration error: no\njaxlib.xla.XlaRuntimeError: INTERNAL: x") == (
        "jaxlib.xla.XlaRuntimeError: INTERNAL: x"
    )
    assert last_words("all is well") == ""
