"""Made-up machines for the doctor: what it would find where something is missing, old, busy or in conflict."""

from dataclasses import replace
from typing import Any

from jaxremat.chips.nvidia.nvml import Gpu, GpuProcess, Reading
from jaxremat.cli.machine.facts import Facts, Probed

GIB = 2**30
VERSIONS: dict[str, str | None] = {
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "flax": "0.12.8",
    "jax-cuda13-plugin": "0.10.2",
    "jax-cuda13-pjrt": "0.10.2",
    "nvidia-cuda-nvcc": "13.5.37",
    "nvidia-nvvm": "13.5.37",
    "nvidia-cudnn-cu13": "9.28.0.42",
}
STEPS: tuple[dict[str, Any], ...] = (
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
    toolkit=None,
    has_driver=False,
    reading=None,
    nvml_error="no driver",
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


def versions(**changes: str | None) -> dict[str, str | None]:
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
#: By what is wrong.
MACHINES: dict[str, Facts] = {
    "windows": replace(GOOD, system="Windows AMD64"),
    "no jax": NOTHING,
    "jaxlib newer": replace(GOOD, versions=versions(jaxlib="0.11.0")),
    "jax broken": replace(GOOD, deviceless=Probed(end="it ended with SIGSEGV")),
    "no plugin": NOTHING,
    "no plugin, a GPU": replace(WITH_GPU, versions=versions(jax_cuda13_plugin=None)),
    "no plugin, an old driver": replace(
        WITH_GPU, versions=versions(jax_cuda13_plugin=None), reading=Reading("550.54", "12.4", (CARD,))
    ),
    "two plugins": replace(WITH_GPU, versions=versions(jax_cuda12_plugin="0.10.2")),
    "plugin of another version": replace(GOOD, versions=versions(jax_cuda13_plugin="0.9.1", jax_cuda13_pjrt="0.9.1")),
    "half a plugin": replace(GOOD, versions=versions(jax_cuda13_pjrt=None)),
    "no ptxas": replace(GOOD, tools={**GOOD.tools, "ptxas": None}),
    "no ptxas, a GPU that runs": replace(WITH_GPU, tools={**GOOD.tools, "ptxas": None, "libnvvm": None}),
    "no ptxas, a toolkit": replace(WITH_GPU, tools={}, toolkit="/usr/local/cuda"),
    "no cuDNN": NOTHING,
    "old cuDNN": replace(GOOD, deviceless=tried(loaded="90501")),
    "another cuDNN": replace(GOOD, deviceless=tried(loaded="91300")),
    "no attention": replace(GOOD, deviceless=tried(attention="No support. Next: try head_dim 64.")),
    "driver gone": replace(
        GOOD, has_driver=True, nvml_error="no NVIDIA GPU can be read: x. Next: restart the machine.", attached=Probed()
    ),
    "old driver": replace(WITH_GPU, reading=Reading("550.54", "12.4", (CARD,))),
    "full of what can't be seen": replace(
        WITH_GPU, reading=Reading("580.1", "13.0", (replace(BUSY, free_bytes=GIB, processes=()),))
    ),
    "another card is busy": replace(
        WITH_GPU, reading=Reading("580.1", "13.0", (CARD, replace(BUSY, index=1, processes=())))
    ),
    "a share that is free": replace(
        WITH_GPU, reading=Reading("1", "13.0", (BUSY,)), environment={"XLA_CLIENT_MEM_FRACTION": "0.25"}
    ),
    "the GPU doesn't run": replace(WITH_GPU, attached=Probed(STEPS[:1], "it didn't finish in 120 s")),
    "one target doesn't compile": replace(
        GOOD, deviceless=Probed((*STEPS[:4], {**STEPS[4], "error": "no ptxas for sm_90. Next: pip install x[aot]."}))
    ),
}


def with_variables(gpu: bool, variables: dict[str, str]) -> Facts:
    """A machine where all is well, with or without a GPU, and with these variables of the environment."""
    return replace(WITH_GPU if gpu else GOOD, environment=variables)


#: Whether there is a GPU, and variables that the doctor reports, each with its state.
VARIABLES: list[tuple[bool, dict[str, str], str]] = [
    (False, {"XLA_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".6"}, "problem"),
    (False, {"XLA_CLIENT_MEM_FRACTION": "80%"}, "problem"),
    (False, {"XLA_PYTHON_CLIENT_ALLOCATOR": "bad"}, "problem"),
    (True, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "note"),
    (True, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "note"),
    (True, {"JAX_PLATFORMS": "cpu"}, "problem"),
    (False, {"JAX_PLATFORMS": "cuda,cpu"}, "problem"),
    (False, {"JAX_PLATFORM_NAME": "gpu"}, "problem"),
    (True, {"CUDA_VISIBLE_DEVICES": ""}, "problem"),
    (True, {"CUDA_VISIBLE_DEVICES": "3"}, "problem"),
    (False, {"JAX_CUDA_VISIBLE_DEVICES": ""}, "problem"),
    (False, {"JAX_DISABLE_JIT": "1"}, "problem"),
    (False, {"JAX_NUMPY_DTYPE_PROMOTION": "strict"}, "problem"),
    (False, {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "note"),
    (True, {"CUDA_LAUNCH_BLOCKING": "1"}, "note"),
    (True, {"TF_FORCE_UNIFIED_MEMORY": "true"}, "problem"),
    (False, {"XLA_FLAGS": "--xla_dump_to=/tmp/x --xla_backend_optimization_level=0"}, "note"),
]
