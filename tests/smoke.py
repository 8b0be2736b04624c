"""The installed package, away from its checkout: `python -m pytest -c /dev/null smoke.py`, with a copy of this file elsewhere.

CI installs the wheel and runs these tests there. The usual run of pytest doesn't collect them, as it tests the checkout. This
file imports nothing else of the tests. It needs the extra `aot`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement

import jaxremat
from jaxremat.chips.nvidia.gpu import bundled_names
from jaxremat.policy.names import written_names

PACKAGE = Path(jaxremat.__file__).parent
TINY = ("--model", "tiny", "--num-layers", "2", "--vocab-size", "500", "--seq-len", "128", "--batch", "4")
MINE = """
import flax.linen as nn, jax, jax.numpy as jnp, jaxremat

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = x + jnp.tanh(nn.Dense(64)(x))
        return x

def loss(params, x):
    return jnp.mean(Net().apply(params, x) ** 2)

def init(key):
    return Net().init(key, jnp.zeros((1, 64)))

def workload(batch: int = 8):
    params, x = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    return jaxremat.Workload(loss=loss, params=params, batch=x, init=init)

def broken(batch: int = 8):
    return jaxremat.Workload(loss=lambda params, x: (x @ x).sum(), params=jnp.ones(3), batch=jnp.ones((batch, 3)))
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test in a folder of its own, with a model of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine", None)


def rows(capsys, command, *argv):
    """The records that a command prints."""
    assert command([*argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_it_is_the_installed_package():
    """It lies where pip installs packages, beside JAX, and not in a checkout of its own."""
    assert PACKAGE.parent == Path(sysconfig.get_path("purelib")) == Path(jax.__file__).parents[1]
    assert not (PACKAGE.parent / "pyproject.toml").exists()
    assert importlib.metadata.version("jaxremat") == jaxremat.__version__
    assert not any(name.partition(".")[0] in ("tests", "experiments") for name in sys.modules)


def test_the_wheel_has_every_file_that_is_no_module():
    files = {str(file) for file in importlib.metadata.files("jaxremat") or () if file.suffix not in (".py", ".pyc")}
    nvidia = "jaxremat/chips/nvidia"
    assert {"jaxremat/py.typed", f"{nvidia}/calibration.toml", "jaxremat/report/web/page.html"} <= files
    assert {f"{nvidia}/measured/{name}.csv" for name in ("matmul", "attention", "collective")} <= files
    assert len([file for file in files if re.match(r"jaxremat/chips/nvidia/targets/.*\.toml", file)]) >= 9
    assert len(bundled_names()) >= 9
    assert not [file for file in files if file.startswith(("tests/", "experiments/", "docs/"))]


ONLY_DECLARED = """
import importlib, json, pkgutil, sys
refused = set(json.loads(sys.argv[1]))
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import jaxremat
for module in pkgutil.walk_packages(jaxremat.__path__, "jaxremat."):
    if module.name != "jaxremat.pytest_plugin":  # which pytest alone imports
        importlib.import_module(module.name)
from jaxremat.cli.run import main
sys.exit(main(sys.argv[2:]))
"""


def declared(name, found):
    """The distribution and all that it requires without extras."""
    if name not in found:
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                declared(re.sub("[-_.]+", "-", requirement.name).lower(), found)
    return found


def test_the_declared_dependencies_are_enough():
    """Every module imports, and a step is compiled and run on the CPU, where no other installed package can be imported."""
    wanted = declared("jaxremat", set())
    by_module = importlib.metadata.packages_distributions()
    others = [name for name, of in by_module.items() if not wanted & {re.sub("[-_.]+", "-", one).lower() for one in of}]
    assert "pytest" in others
    refused = json.dumps(others)
    argv = [*TINY, "--policy", "dots", "--target", "cpu", "--steps", "1", "--json"]
    done = subprocess.run([sys.executable, "-c", ONLY_DECLARED, refused, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ran"] == "ok"


def test_the_script_lists_the_targets():
    script = Path(sysconfig.get_path("scripts"), "jaxremat")
    done = subprocess.run([script, "--list", "targets", "--json"], capture_output=True, text=True, check=True)
    assert {"h100-80gb", "a100-40gb"} <= {json.loads(line)["target"] for line in done.stdout.splitlines()}


def test_a_preset_is_compiled_for_a_gpu_that_is_not_here(capsys):
    from jaxremat.cli.run import main

    none, nothing = rows(capsys, main, *TINY, "--policy", "none", "nothing", "--target", "h100-80gb")
    assert none["total_bytes"] > nothing["total_bytes"] > 0
    assert nothing["recompute_overhead_percent"] > none["recompute_overhead_percent"] + 10


def test_the_map_has_the_decoder_s_lines_and_checkpoint_names():
    """Its frames lie beside JAX's. Values with a checkpoint name are found by the line that made them."""
    model = jaxremat.preset("tiny").config
    layer = jaxremat.Decoder(model, jaxremat.parse("save:mlpwi_0,query_proj"), "xla")
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    params = jax.eval_shape(layer.init, jax.random.key(0), tokens)

    def step(params, tokens):
        def loss(params: Any) -> Any:
            made: Any = layer.apply(params, tokens)
            return jnp.mean(made.astype(jnp.float32) ** 2)

        return jax.grad(loss)(params)

    found = jaxremat.memory_map(step, (params, tokens), "h100-80gb")
    residuals = [buffer for buffer in found.buffers if buffer.category == "residuals"]
    assert {Path(buffer.source.rpartition(":")[0]).parent for buffer in residuals if buffer.source} == {PACKAGE / "model"}
    assert {"mlpwi_0", "query_proj"} <= {buffer.label for buffer in residuals}
    places = [written.made_at for written in written_names(jax.make_jaxpr(step)(params, tokens))]
    assert any(place.startswith(f"{PACKAGE / 'model'}{os.sep}") for place in places)


def test_a_model_of_the_user_s_is_found_with_its_lines(capsys, elsewhere):
    """The lines of its residuals are the user's, not Flax's."""
    from jaxremat.cli.explain import main as explain
    from jaxremat.cli.run import main

    argv = ("--model", "mine.py:workload", "--target", "h100-80gb", "--batch", "512")
    assert main([*argv, "--policy", "nothing"]) == 0
    assert {"Dense_0", "Dense_3"} <= {*re.findall(r"Dense_\d", capsys.readouterr().out)}
    (row,) = rows(capsys, explain, *argv, "--policy", "none")
    lines = {buffer["source"] for buffer in row["largest"] if buffer["category"] == "residuals"}
    assert lines
    assert lines <= {f"{elsewhere / 'mine.py'}:{line}" for line in (8, 12)}


def test_an_error_of_the_user_s_code_has_the_user_s_line_alone(capsys):
    from jaxremat.cli.run import main

    assert main(["--model", "mine.py:broken", "--target", "cpu", "--batch", "8"]) == 1
    said = capsys.readouterr().err
    assert "mine.py" in said
    assert f"{PACKAGE}" not in said
    assert "/jax/" not in said


def test_the_page_has_its_script_and_style(elsewhere):
    from jaxremat.cli.explain import main

    assert main([*TINY, "--policy", "dots", "--target", "h100-80gb", "--page", "report.html"]) == 0
    page = (elsewhere / "report.html").read_text()
    assert (PACKAGE / "report/web/page.css").read_text()[:200] in page
    assert page.count("<script") >= 1


def test_a_training_is_resumed(elsewhere):
    from jaxremat.cli.train import main

    argv = ["--model", "mine.py:workload", "--target", "cpu", "--policy", "nothing", "--run-dir", "runs/a"]
    for num_steps in ("2", "3"):
        assert main([*argv, "--num-steps", num_steps, "--sample-tokens", "0"]) == 0
    lines = [json.loads(line) for line in (elsewhere / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_sweep_starts_its_processes(elsewhere):
    from jaxremat.cli.sweep import main

    argv = ["--model", "mine.py:workload", "--target", "h100-80gb", "--policy", "none", "nothing", "--batch", "8"]
    assert main([*argv, "--out", "rows.jsonl"]) == 0
    stored = [json.loads(line) for line in (elsewhere / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["policy"] for row in stored if row["record"] == "trial") == ["none", "nothing"]


def test_the_doctor_finds_the_installed_package(capsys):
    from jaxremat.cli.doctor import main

    assert main(["--json"]) in (0, 1)
    assert capsys.readouterr().out.count("\n") >= 1
