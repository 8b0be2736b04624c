"""Each check of the doctor gives the right row and remedy for facts that are made up. Its sentences are in `test_errors.py`."""

import re
from dataclasses import replace

import pytest

from jaxremat.chips.nvidia.nvml import Reading
from jaxremat.cli import doctor
from jaxremat.cli.machine.checks import run_checks
from jaxremat.cli.machine.facts import cuda_libraries
from jaxremat.report.doctor import Row, remedies, verdict
from tests.made_up_machines import BUSY, GOOD, MACHINES, VARIABLES, WITH_GPU, with_variables


def rows_of(facts, name: str) -> list[Row]:
    return [row for row in run_checks(facts) if row.name == name]


def test_all_is_well_without_a_gpu():
    rows = run_checks(GOOD)
    assert [row.state for row in rows if row.state != "ok"] == ["note"]
    assert {"cpu", "a100-40gb", "h200"} <= {*re.findall(r"[\w-]+", rows[-1].found)}
    assert not remedies(rows)


def test_all_is_well_with_a_gpu():
    rows = run_checks(WITH_GPU)
    assert {row.state for row in rows} == {"ok"}
    (gpu,), (ran,) = rows_of(WITH_GPU, "GPU 0"), rows_of(WITH_GPU, "JAX on the GPU")
    assert all(text in gpu.found for text in ("NVIDIA H200", "9.0", "139.50 GiB", "140.00 GiB"))
    assert "105.00 GiB" in ran.found
    assert {"gpu", "cpu", "a100-40gb", "h200"} <= {*re.findall(r"[\w-]+", rows[-1].found)}


def test_a_busy_card_as_text(capsys):
    """A table of at most 80 columns, with the processes from the largest; the remedies are lines to copy, not wrapped."""
    facts = replace(WITH_GPU, reading=Reading("580.159.03", "13.0", (BUSY,)))
    rows = run_checks(facts)
    doctor.show(facts, rows)
    table, typed = capsys.readouterr().out.split(verdict(rows))
    assert max(map(len, table.splitlines())) <= 80
    found = " ".join(table.split())
    processes = ("server (4244) 95.00 GiB", "python3 (4242) 4.00 GiB", "? (4243)")
    assert [found.index(text) for text in processes] == sorted(found.index(text) for text in processes)
    assert "39.00 GiB" in found
    (line,) = remedies(rows)
    assert line in typed.splitlines()
    assert all(text in line for text in ("GPU 0", "kill 4242 4244 4243", "export XLA_CLIENT_MEM_FRACTION=0.27"))


#: By the machine, the row that reports it: name, state, what is typed, and what else it names.
REPORTED: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "windows": ("python", "problem", "wsl --install", ("Windows",)),
    "no jax": ("jax", "problem", "pip install jaxremat", ()),
    "jaxlib newer": ("jax", "problem", "pip install jax==0.11.0", ("0.10.2", "0.11.0")),
    "jax broken": ("jax", "problem", "pip install --force-reinstall jax==0.10.2 jaxlib==0.10.2", ("SIGSEGV",)),
    "no plugin": ("CUDA plugin", "problem", 'pip install "jaxremat[aot]"', ()),
    "no plugin, a GPU": ("CUDA plugin", "problem", 'pip install "jaxremat[cuda13]"', ()),
    "no plugin, an old driver": ("CUDA plugin", "problem", 'pip install "jaxremat[cuda12]"', ()),
    "two plugins": ("CUDA plugin", "problem", "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt", ("12", "13")),
    "plugin of another version": (
        "CUDA plugin", "problem", "pip install jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2", ("0.9.1", "0.10.2"),
    ),
    "half a plugin": (
        "CUDA plugin", "problem", "pip install jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2", ("jax-cuda13-pjrt",),
    ),
    "no ptxas": ("ptxas, libnvvm", "problem", 'pip install "jaxremat[aot]"', ("ptxas",)),
    "no ptxas, a GPU that runs": ("ptxas, libnvvm", "note", 'pip install "jaxremat[aot]"', ("ptxas", "libnvvm")),
    "no ptxas, a toolkit": ("ptxas, libnvvm", "ok", "", ("/usr/local/cuda",)),
    "no cuDNN": ("cuDNN", "problem", 'pip install "jaxremat[aot]"', ()),
    "old cuDNN": ("cuDNN", "problem", 'pip install -U "nvidia-cudnn-cu13<10"', ("9.5.1", "9.12.0")),
    "another cuDNN": ("cuDNN", "problem", "unset LD_LIBRARY_PATH LD_PRELOAD", ("9.13.0", "9.28.0.42")),
    "no attention": ("cuDNN", "note", "try head_dim 64", ("9.28.0", "No support")),
    "driver gone": ("driver", "problem", "restart the machine", ("no NVIDIA GPU can be read: x",)),
    "old driver": (
        "driver", "problem", 'pip uninstall jax-cuda13-plugin jax-cuda13-pjrt && pip install "jaxremat[cuda12]"',
        ("550.54", "12.4", "580"),
    ),
    "full of what can't be seen": ("GPU 0", "problem", "nvidia-smi", ("1.00 GiB", "140.00 GiB", "105.00 GiB")),
    "another card is busy": ("GPU 1", "note", "export XLA_CLIENT_MEM_FRACTION=0.27", ("39.00 GiB", "140.00 GiB", "105.00 GiB")),
    "a share that is free": ("GPU 0", "ok", "", ("39.00 GiB", "140.00 GiB")),
    "the GPU doesn't run": ("JAX on the GPU", "problem", "python -m jaxremat.run --model tiny --batch 1 -v", ("120 s",)),
    "one target doesn't compile": ("targets", "problem", "pip install x[aot]", ("cpu", "a100-40gb", "h200", "sm_90")),
}  # fmt: skip


def test_every_machine_has_its_row():
    assert REPORTED.keys() == MACHINES.keys()


@pytest.mark.parametrize("case", REPORTED)
def test_a_check(case):
    name, state, typed, named = REPORTED[case]
    (row,) = rows_of(MACHINES[case], name)
    assert row.state == state
    assert typed in row.remedy
    assert bool(typed) == bool(row.remedy)
    assert [text for text in named if text not in row.found] == []
    if state == "problem":
        assert name in verdict(run_checks(MACHINES[case]))


@pytest.mark.parametrize(("gpu", "variables", "state"), VARIABLES)
def test_a_variable(gpu, variables, state):
    """The last variable is named with its value, and is to be unset; of XLA's flags only those that change numbers."""
    name, value = [*variables.items()][-1]
    (row,) = rows_of(with_variables(gpu, variables), "environment")
    assert (row.state, row.remedy.split()[0]) == (state, "unset")
    assert f"{row.remedy.split()[1]}=" in row.found
    assert row.remedy.split()[1:] == [name]
    assert f"{name}={value.split()[-1] if value else ''}" in row.found


HARMLESS = [
    (False, {"JAX_PLATFORMS": "cpu"}),
    (False, {"CUDA_VISIBLE_DEVICES": ""}),
    (True, {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}),
    (True, {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "0"}),
    (True, {"XLA_CLIENT_MEM_FRACTION": "0.9", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DISABLE_JIT": "0"}),
    (False, {"XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=2"}),
]


@pytest.mark.parametrize(("gpu", "variables"), HARMLESS)
def test_a_harmless_variable(gpu, variables):
    (row,) = rows_of(with_variables(gpu, variables), "environment")
    assert (row.state, row.remedy) == ("ok", "")


def test_cuda_libraries_in_the_library_path(tmp_path):
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9.5.1", "libfoo.so"):
        (tmp_path / name).touch()
    found = cuda_libraries(f"/nope:{tmp_path}:")
    assert found == (f"{tmp_path}/libcudnn.so.9", f"{tmp_path}/libcudnn_graph.so.9.5.1")
    facts = replace(GOOD, library_path=found, environment={"LD_LIBRARY_PATH": str(tmp_path)})
    (row,) = rows_of(facts, "environment")
    assert (row.state, row.remedy) == ("note", "unset LD_LIBRARY_PATH")
    assert f"{tmp_path}/libcudnn.so.9" in row.found
