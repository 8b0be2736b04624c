"""Each check of the doctor gives the right row and the right remedy for facts that are made up for it."""

from dataclasses import replace

import pytest
from rich.console import Console

from jaxremat.machine.checks import Row, run_checks
from jaxremat.machine.facts import Facts, Probed, cuda_libraries
from jaxremat.machine.nvml import Gpu, GpuProcess, Reading
from jaxremat.report.doctor import doctor_table, remedies, verdict
from tests.fake_nvml import NO_DRIVER

GIB = 2**30
VERSIONS = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "flax": "0.12.8",
    "jax-cuda13-plugin": "0.10.2",
    "jax-cuda13-pjrt": "0.10.2",
    "nvidia-cuda-nvcc": "13.5.37",
    "nvidia-nvvm": "13.5.37",
    "nvidia-cudnn-cu13": "9.28.0.42",
}
STEPS = (
    {"step": "jax", "version": "0.10.2"},
    {"step": "cpu", "error": ""},
    {"step": "cudnn", "loaded": 92800, "needed": 91200},
    {"step": "target", "name": "a100-40gb", "error": ""},
    {"step": "target", "name": "h200", "error": ""},
    {"step": "attention", "error": ""},
)
#: A machine without a GPU where all is well.
GOOD = Facts(
    python="3.11.7",
    system="Linux x86_64",
    versions=VERSIONS,
    environment={},
    library_path=(),
    tools={
        "ptxas": "/x/ptxas",
        "libnvvm": "/x/libnvvm.so.4",
        "libdevice": "/x/libdevice.10.bc",
        "libcudnn": "/x/libcudnn.so.9",
    },
    has_driver=False,
    reading=None,
    nvml_error=NO_DRIVER,
    deviceless=Probed(STEPS),
    attached=None,
)
CARD = Gpu(0, "NVIDIA H200", 140 * GIB, GIB // 2, 140 * GIB - GIB // 2, (9, 0), 0, ())
BUSY = replace(
    CARD,
    used_bytes=101 * GIB,
    free_bytes=39 * GIB,
    processes=(GpuProcess(4242, "python3", 4 * GIB), GpuProcess(4244, "server", 95 * GIB), GpuProcess(4243, "?", None)),
)
RAN = Probed(
    (
        {"step": "jax", "version": "0.10.2"},
        {"step": "device", "description": "NVIDIA H200", "limit_bytes": 105 * GIB},
        {"step": "gpu", "error": ""},
        {"step": "run", "error": ""},
        {"step": "attention", "error": ""},
    )
)
#: The same with an idle H200.
WITH_GPU = replace(GOOD, has_driver=True, nvml_error="", reading=Reading("580.159.03", "13.0", (CARD,)), attached=RAN)


def rows_of(facts: Facts, name: str) -> list[Row]:
    return [row for row in run_checks(facts) if row.name == name]


def test_all_is_well_without_a_gpu():
    rows = run_checks(GOOD)
    assert [row.state for row in rows if row.state != "ok"] == ["note"]
    assert verdict(rows) == "Nothing stands in the way."
    assert rows[-1].found == "usable: cpu, a100-40gb, h200"


def test_all_is_well_with_a_gpu():
    rows = run_checks(WITH_GPU)
    assert {row.state for row in rows} == {"ok"}
    assert rows_of(WITH_GPU, "GPU 0")[0].found == "NVIDIA H200, compute capability 9.0: 139.50 GiB of 140.00 GiB free"
    assert rows_of(WITH_GPU, "JAX on the GPU")[0].found == "a matmul ran on NVIDIA H200; JAX's limit is 105.00 GiB"
    assert rows[-1].found == "usable: gpu, cpu, a100-40gb, h200"


def test_a_busy_card_as_text(capsys):
    rows = run_checks(replace(WITH_GPU, reading=Reading("580.159.03", "13.0", (BUSY,))))
    Console(width=80).print(doctor_table(rows))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(" GPU 0 "))
    assert lines[start : start + 4] == [
        " GPU 0              problem   NVIDIA H200, compute capability 9.0: 39.00 GiB of",
        "                              140.00 GiB free, and JAX counts on 105.00 GiB",
        " GPU 0 is used by   note      server (4244) 95.00 GiB, python3 (4242) 4.00 GiB,",
        "                              ? (4243)",
    ]
    assert verdict(rows) == "1 problem stands in the way: GPU 0."
    assert remedies(rows) == ["  GPU 0  kill 4242 4244 4243 (if they are yours), or export XLA_CLIENT_MEM_FRACTION=0.27"]


def versions(**changes: str | None) -> dict:
    return {**VERSIONS, **{name.replace("_", "-"): value for name, value in changes.items()}}


def tried(**errors: str) -> Probed:
    """The deviceless child with these steps failing; `loaded` and `needed` are cuDNN's."""
    changes = {key: int(value) for key, value in errors.items() if key in ("loaded", "needed")}
    return Probed(
        tuple(
            {**step, **changes}
            if step["step"] == "cudnn"
            else {**step, "error": errors.get(step["step"], step.get("error", ""))}
            for step in STEPS
        )
    )


NOTHING = replace(GOOD, versions={}, tools={}, deviceless=Probed(end="it ended with exit code 1"))
CASES = {
    "windows": (
        replace(GOOD, system="Windows AMD64"),
        Row(
            "python", "problem", "3.11.7 on Windows AMD64: GPU wheels exist for Linux alone",
            "use Linux (on Windows: wsl --install)",
        ),
    ),
    "no jax": (NOTHING, Row("jax", "problem", "jax isn't installed", "pip install jaxremat")),
    "jaxlib newer": (
        replace(GOOD, versions=versions(jaxlib="0.11.0")),
        Row("jax", "problem", "jax 0.10.2 with jaxlib 0.11.0, which is newer: JAX refuses that", "pip install jax==0.11.0"),
    ),
    "jax broken": (
        replace(GOOD, deviceless=Probed(end="it ended with SIGSEGV")),
        Row(
            "jax", "problem", "jax 0.10.2 can't be imported: it ended with SIGSEGV",
            "pip install --force-reinstall jax==0.10.2 jaxlib==0.10.2",
        ),
    ),
    "no plugin": (
        NOTHING,
        Row(
            "CUDA plugin", "problem", "none: no GPU can be compiled for, only --target cpu works", 'pip install "jaxremat[aot]"'
        ),
    ),
    "no plugin, a GPU": (
        replace(WITH_GPU, versions=versions(jax_cuda13_plugin=None)),
        Row("CUDA plugin", "problem", "none: JAX can't use the GPU", 'pip install "jaxremat[cuda13]"'),
    ),
    "no plugin, an old driver": (
        replace(WITH_GPU, versions=versions(jax_cuda13_plugin=None), reading=Reading("550.54", "12.4", (CARD,))),
        Row("CUDA plugin", "problem", "none: JAX can't use the GPU", 'pip install "jaxremat[cuda12]"'),
    ),
    "two plugins": (
        replace(WITH_GPU, versions=versions(jax_cuda12_plugin="0.10.2")),
        Row(
            "CUDA plugin", "problem", "for CUDA 12 and for CUDA 13: only one of them can be JAX's",
            "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt",
        ),
    ),
    "plugin of another version": (
        replace(GOOD, versions=versions(jax_cuda13_plugin="0.9.1")),
        Row(
            "CUDA plugin", "problem", "jax-cuda13-plugin 0.9.1 with jaxlib 0.10.2: JAX won't use it",
            "pip install jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2",
        ),
    ),
    "half a plugin": (
        replace(GOOD, versions=versions(jax_cuda13_pjrt=None)),
        Row(
            "CUDA plugin", "problem", "jax-cuda13-plugin 0.10.2 with jax-cuda13-pjrt missing",
            "pip install jax-cuda13-plugin==0.10.2 jax-cuda13-pjrt==0.10.2",
        ),
    ),
    "no ptxas": (
        replace(GOOD, tools={**GOOD.tools, "ptxas": None}),
        Row(
            "ptxas, libnvvm", "problem", "ptxas missing from the wheels: no compiling for a GPU that isn't here",
            'pip install "jaxremat[aot]"',
        ),
    ),
    "no ptxas, a GPU that runs": (
        replace(WITH_GPU, tools={**GOOD.tools, "ptxas": None, "libnvvm": None}),
        Row(
            "ptxas, libnvvm", "note", "ptxas and libnvvm missing from the wheels: no compiling for a GPU that isn't here",
            'pip install "jaxremat[aot]"',
        ),
    ),
    "no cuDNN": (
        NOTHING,
        Row(
            "cuDNN", "problem", "none: attention falls back to XLA's own, which takes far more memory",
            'pip install "jaxremat[aot]"',
        ),
    ),
    "old cuDNN": (
        replace(GOOD, deviceless=tried(loaded="90501")),
        Row("cuDNN", "problem", "9.5.1, and the plugin needs 9.12.0 or newer", 'pip install -U "nvidia-cudnn-cu13<10"'),
    ),
    "another cuDNN": (
        replace(GOOD, deviceless=tried(loaded="91300")),
        Row("cuDNN", "problem", "9.13.0 is loaded instead of the wheel's 9.28.0.42", "unset LD_LIBRARY_PATH LD_PRELOAD"),
    ),
    "no attention": (
        replace(GOOD, deviceless=tried(attention="No support. Next: try head_dim 64.")),
        Row("cuDNN", "note", "9.28.0; its attention can't be compiled here: No support", "try head_dim 64"),
    ),
    "driver gone": (
        replace(GOOD, has_driver=True, nvml_error="no NVIDIA GPU can be read: x. Next: restart the machine.", attached=Probed()),
        Row("driver", "problem", "no NVIDIA GPU can be read: x", "restart the machine"),
    ),
    "old driver": (
        replace(WITH_GPU, reading=Reading("550.54", "12.4", (CARD,))),
        Row(
            "driver", "problem", "550.54, for CUDA up to 12.4; the plugin needs CUDA 13, driver 580 or newer",
            'pip uninstall jax-cuda13-plugin jax-cuda13-pjrt && pip install "jaxremat[cuda12]"',
        ),
    ),
    "full of what can't be seen": (
        replace(WITH_GPU, reading=Reading("580.1", "13.0", (replace(BUSY, free_bytes=GIB, processes=()),))),
        Row(
            "GPU 0", "problem",
            "NVIDIA H200, compute capability 9.0: 1.00 GiB of 140.00 GiB free, and JAX counts on 105.00 GiB",
            "end what holds it (nvidia-smi; it may be outside this container)",
        ),
    ),
    "another card is busy": (
        replace(WITH_GPU, reading=Reading("580.1", "13.0", (CARD, replace(BUSY, index=1, processes=())))),
        Row(
            "GPU 1", "note",
            "NVIDIA H200, compute capability 9.0: 39.00 GiB of 140.00 GiB free, and JAX counts on 105.00 GiB",
            "end what holds it (nvidia-smi; it may be outside this container), or export XLA_CLIENT_MEM_FRACTION=0.27",
        ),
    ),
    "a share that is free": (
        replace(WITH_GPU, reading=Reading("1", "13.0", (BUSY,)), environment={"XLA_CLIENT_MEM_FRACTION": "0.25"}),
        Row("GPU 0", "ok", "NVIDIA H200, compute capability 9.0: 39.00 GiB of 140.00 GiB free"),
    ),
    "the GPU doesn't run": (
        replace(WITH_GPU, attached=Probed(STEPS[:1], "it didn't finish in 120 s")),
        Row(
            "JAX on the GPU", "problem", "nothing ran: it didn't finish in 120 s",
            "python -m jaxremat.run --model tiny --batch 1 -v  # with JAX's own log",
        ),
    ),
    "one target doesn't compile": (
        replace(GOOD, deviceless=Probed((*STEPS[:4], {**STEPS[4], "error": "no ptxas for sm_90. Next: pip install x[aot]."}))),
        Row(
            "targets", "problem", "usable: cpu, a100-40gb; h200 can't be compiled for: no ptxas for sm_90", "pip install x[aot]"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_check(case):
    facts, row = CASES[case]
    assert row in rows_of(facts, row.name)
    assert verdict(run_checks(facts)) != "Nothing stands in the way." or row.state != "problem"


#: Whether there is a GPU, the variables, and the row's state, text and remedy.
VARIABLES = [
    (False, {"XLA_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".6"}, "problem",
     "XLA_PYTHON_CLIENT_MEM_FRACTION=.6: set together with XLA_CLIENT_MEM_FRACTION, its new name: JAX's plugin refuses to start",
     "unset XLA_PYTHON_CLIENT_MEM_FRACTION"),
    (False, {"XLA_CLIENT_MEM_FRACTION": "80%"}, "problem",
     "XLA_CLIENT_MEM_FRACTION=80%: not a share from 0 to 1: JAX's plugin can't use it", "unset XLA_CLIENT_MEM_FRACTION"),
    (False, {"XLA_PYTHON_CLIENT_ALLOCATOR": "bad"}, "problem",
     "XLA_PYTHON_CLIENT_ALLOCATOR=bad: no allocator that JAX knows: its plugin refuses to start",
     "unset XLA_PYTHON_CLIENT_ALLOCATOR"),
    (True, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "note",
     "XLA_PYTHON_CLIENT_ALLOCATOR=platform: no limit is kept and no peak reported: the budget isn't the allocator's",
     "unset XLA_PYTHON_CLIENT_ALLOCATOR"),
    (True, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "note",
     "XLA_PYTHON_CLIENT_PREALLOCATE=false: memory is taken piece by piece, so that fragments may fail a batch near the limit",
     "unset XLA_PYTHON_CLIENT_PREALLOCATE"),
    (True, {"JAX_PLATFORMS": "cpu"}, "problem", "JAX_PLATFORMS=cpu: hides this machine's GPU from JAX", "unset JAX_PLATFORMS"),
    (False, {"JAX_PLATFORMS": "cuda,cpu"}, "problem",
     "JAX_PLATFORMS=cuda,cpu: lets JAX look for a GPU that isn't here, and then none can be compiled for", "unset JAX_PLATFORMS"),
    (False, {"JAX_PLATFORM_NAME": "gpu"}, "problem",
     "JAX_PLATFORM_NAME=gpu: asks for a GPU, and none is here: every command fails", "unset JAX_PLATFORM_NAME"),
    (True, {"CUDA_VISIBLE_DEVICES": ""}, "problem",
     "CUDA_VISIBLE_DEVICES=: shows CUDA no GPU of this machine", "unset CUDA_VISIBLE_DEVICES"),
    (True, {"CUDA_VISIBLE_DEVICES": "3"}, "problem",
     "CUDA_VISIBLE_DEVICES=3: shows CUDA no GPU of this machine", "unset CUDA_VISIBLE_DEVICES"),
    (False, {"JAX_CUDA_VISIBLE_DEVICES": ""}, "problem",
     "JAX_CUDA_VISIBLE_DEVICES=: not a list of numbers: JAX fails on it where there is a GPU", "unset JAX_CUDA_VISIBLE_DEVICES"),
    (False, {"JAX_DISABLE_JIT": "1"}, "problem",
     "JAX_DISABLE_JIT=1: nothing is compiled as a whole, and steps fail to run", "unset JAX_DISABLE_JIT"),
    (False, {"JAX_NUMPY_DTYPE_PROMOTION": "strict"}, "problem",
     "JAX_NUMPY_DTYPE_PROMOTION=strict: libraries that mix dtypes, Flax and Optax among them, fail",
     "unset JAX_NUMPY_DTYPE_PROMOTION"),
    (False, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "note",
     "JAX_DEFAULT_MATMUL_PRECISION=highest: matmuls run in another precision: bytes and times are of that program",
     "unset JAX_DEFAULT_MATMUL_PRECISION"),
    (True, {"CUDA_LAUNCH_BLOCKING": "1"}, "note",
     "CUDA_LAUNCH_BLOCKING=1: kernels wait for one another: measured times are longer", "unset CUDA_LAUNCH_BLOCKING"),
    (True, {"TF_FORCE_UNIFIED_MEMORY": "true"}, "problem",
     "TF_FORCE_UNIFIED_MEMORY=true: memory may spill to the host: batches seem to fit that don't",
     "unset TF_FORCE_UNIFIED_MEMORY"),
    (False, {"XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_backend_optimization_level=0"}, "note",
     "XLA_FLAGS=--xla_backend_optimization_level=0: bytes and times are of the program that these make (records hold them)",
     "unset XLA_FLAGS"),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "variables", "state", "found", "remedy"), VARIABLES)
def test_a_variable(gpu, variables, state, found, remedy):
    facts = replace(WITH_GPU if gpu else GOOD, environment=variables)
    assert rows_of(facts, "environment") == [Row("environment", state, found, remedy)]


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
    facts = replace(WITH_GPU if gpu else GOOD, environment=variables)
    assert rows_of(facts, "environment") == [Row("environment", "ok", "no variable is in the way or changes numbers")]


def test_cuda_libraries_in_the_library_path(tmp_path):
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9.5.1", "libfoo.so"):
        (tmp_path / name).touch()
    found = cuda_libraries(f"/nope:{tmp_path}:")
    assert found == (f"{tmp_path}/libcudnn.so.9", f"{tmp_path}/libcudnn_graph.so.9.5.1")
    facts = replace(GOOD, library_path=found, environment={"LD_LIBRARY_PATH": str(tmp_path)})
    (row,) = rows_of(facts, "environment")
    assert (row.state, row.remedy) == ("note", "unset LD_LIBRARY_PATH")
    assert row.found.startswith(f"{tmp_path}/libcudnn.so.9: holds CUDA libraries")
