"""`python -m jaxremat.doctor` says what is wrong with a set-up that is sound, in conflict, broken or busy."""

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from jaxremat.machine.facts import last_words, try_out
from jaxremat.xla.gpu import bundled_names, nvidia_driver
from tests.fake_nvml import FAKE, ROOT, environment


def doctor(*argv: str, path: str = str(ROOT), python: str = sys.executable, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-m", "jaxremat.doctor", *argv], env=environment(path, **more), capture_output=True, text=True, timeout=200
    )


@pytest.mark.skipif(nvidia_driver(), reason="this machine has a GPU")
class TestWithoutAGpu:
    def test_all_is_well(self, h100):
        done = doctor("--json")
        told = json.loads(done.stdout)
        assert (done.returncode, told["usable"]) == (0, True), told
        assert told["rows"][-1] == {
            "name": "targets",
            "state": "ok",
            "found": f"usable: cpu, {', '.join(bundled_names())}",
            "remedy": "",
        }
        assert told["facts"]["nvml_error"].startswith("no NVIDIA GPU can be read: ")
        assert [line.split("] ")[1] for line in done.stderr.splitlines()] == [
            "packages, files and the driver",
            "compiling for GPUs that aren't here, in a child process",
        ]

    def test_conflicting_variables(self, h100):
        """What makes JAX's plugin fail, found beside what it says itself."""
        done = doctor(XLA_CLIENT_MEM_FRACTION=".5", XLA_PYTHON_CLIENT_MEM_FRACTION=".5")
        assert done.returncode == 1
        assert done.stdout.split("2 problems")[1] == (
            " stand in the way: environment, targets.\n"
            "What to type:\n"
            "  environment  unset XLA_PYTHON_CLIENT_MEM_FRACTION\n"
            "  targets      python -m jaxremat.run --model tiny --batch 1 -v  # with JAX's own log\n"
        )
        assert "Traceback" not in done.stdout + done.stderr

    def test_an_unknown_flag_of_xla(self):
        """It ends every process that uses JAX without a Python error; the remedy keeps the flags that are known."""
        done = doctor(XLA_FLAGS="--xla_gpu_nonsense=1 --xla_gpu_autotune_level=0")
        assert done.returncode == 1
        assert "XLA refuses to start" in done.stdout
        assert "  environment  export XLA_FLAGS='--xla_gpu_autotune_level=0'\n" in done.stdout

    def test_a_busy_card(self, h100):
        """NVML faked: the card is seen, and JAX, which finds no driver, can't use it."""
        done = doctor("--json", path=FAKE)
        told = json.loads(done.stdout)
        rows = {row["name"]: row for row in told["rows"]}
        assert (done.returncode, rows["GPU 0"]["state"], rows["GPU 1"]["state"]) == (1, "problem", "ok")
        assert rows["GPU 0"]["found"] == (
            "NVIDIA H200, compute capability 9.0: 40.00 GiB of 140.00 GiB free, and JAX counts on 105.00 GiB"
        )
        assert rows["GPU 0 is used by"]["found"] == "server (4244) 95.00 GiB, python3 (4242) 4.00 GiB, ? (4243)"
        assert rows["JAX on the GPU"]["state"] == "problem"


def environment_without(folder: Path, *prefixes: str) -> str:
    """The Python of a new virtual environment that has everything this one has but packages that begin so."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if not entry.name.startswith(prefixes) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


@pytest.mark.skipif(nvidia_driver(), reason="this machine has a GPU")
def test_a_missing_wheel(tmp_path, h100):
    python = environment_without(tmp_path, "jax_plugins", "jax_cuda13", "nvidia_nvvm")
    done = doctor(python=python)
    assert done.returncode == 1
    assert done.stdout.split("What to type:\n")[1] == (
        '  CUDA plugin  pip install "jaxremat[aot]"\n'
        '  targets      pip install "jaxremat[aot]", or --target cpu to run here (times real, memory not a GPU\'s)\n'
    )
    assert "none: no GPU can be compiled for, only --target cpu works" in " ".join(done.stdout.split())


def test_a_plugin_that_crashes(tmp_path):
    """Its end is told, and what was found before it is kept."""
    plugin = tmp_path / "jax_plugins" / "crash"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("import os\ndef initialize():\n    os.abort()\n")
    done = doctor("--json", path=f"{tmp_path}{os.pathsep}{ROOT}")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert told["facts"]["deviceless"]["end"] == "it ended with SIGABRT"
    assert told["rows"][-1]["found"] == "usable: none; no GPU can be compiled for: it ended with SIGABRT"


def test_a_plugin_that_hangs(tmp_path, monkeypatch):
    """The child is ended with all that it started."""
    plugin = tmp_path / "jax_plugins" / "hang"
    plugin.mkdir(parents=True)
    pid = tmp_path / "pid"
    (plugin / "__init__.py").write_text(
        f"import subprocess\ndef initialize():\n    p = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    started = time.monotonic()
    found = try_out("deviceless", 8)
    assert time.monotonic() - started < 30
    assert found.end == "it didn't finish in 8 s"
    assert found.step("jax")
    status = Path(f"/proc/{pid.read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_last_words():
    log = (
        "Traceback (most recent call last):\n  File x\nValueError: bad\n\nE1121 14:58:33.446492   15857 x.cc:9] worse\nbye\n"
    )
    assert last_words(log) == "worse"
    assert last_words("Jax plugin configuration error: no\njaxlib.xla.XlaRuntimeError: INTERNAL: x") == (
        "jaxlib.xla.XlaRuntimeError: INTERNAL: x"
    )
    assert last_words("all is well") == ""


def test_a_limit_that_cannot_be_meant():
    done = doctor("--limit", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "jaxremat: --limit got 0. Allowed: a number above 0. Next: leave it out for the default.\n"
