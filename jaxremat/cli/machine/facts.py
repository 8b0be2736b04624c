"""The facts that decide whether jaxremat works on this machine; `checks.py` judges them.

A broken installation can't crash this module, or make it hang. It reads the metadata of packages, looks for files, and asks
the driver through NVML. Child processes with a time limit try out JAX (`probe.py`).
"""

import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxremat.chips.installed import PACKAGES, toolkit, version_of
from jaxremat.chips.nvidia.gpu import nvidia_driver
from jaxremat.chips.nvidia.nvml import Reading, read_gpus
from jaxremat.errors import DriverError, MissingDependencyError
from jaxremat.system.process import Deadline, run_until, signal_name

MORE_PACKAGES = ("jax-cuda13-pjrt", "jax-cuda12-pjrt", "nvidia-cudnn-cu12", "nvidia-nvvm", "nvidia-ml-py", "scipy")
#: The files that XLA looks for in the wheels, by what they are: globs below the folder `nvidia`.
TOOLS = {
    "ptxas": ("*/bin/ptxas",),
    "libnvvm": ("*/nvvm/lib64/libnvvm.so*", "*/lib/libnvvm.so*"),
    "libdevice": ("*/nvvm/libdevice/libdevice.10.bc",),
    "libcudnn": ("cudnn/lib/libcudnn.so.9",),
}
CUDA_LIBRARIES = re.compile(r"lib(cudnn|cublas|cudart|cufft|cusolver|cusparse|cupti|nvrtc|nccl|nvvm)[\w-]*\.so[.\d]*")
_VARIABLES = re.compile(r"(JAX|JAXREMAT|XLA|TF|CUDA|NVIDIA)_\w+|LD_LIBRARY_PATH|LD_PRELOAD")
PROBE_LIMIT_S = 120.0
#: Variables of a child where the user hasn't set them. The first is set by `jaxremat.run` too; by the second, a child takes
#: only the memory that it needs.
_CHILD_ENVIRONMENT = {"deviceless": {"JAX_PLATFORMS": "cpu"}, "attached": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}


@dataclass(frozen=True)
class Probed:
    """What a child process tried.

    Attributes:
        steps: what came of each step that it got to, as `probe.py` prints it.
        end: how the process failed; empty where it didn't.
        words: the last error in its log; empty where there is none.
    """

    steps: tuple[Mapping[str, Any], ...] = ()
    end: str = ""
    words: str = ""

    def step(self, name: str) -> Mapping[str, Any]:
        """The last step of that name; empty where the child didn't get to it."""
        return next((step for step in reversed(self.steps) if step["step"] == name), {})


@dataclass(frozen=True)
class Facts:
    """The machine at one moment.

    Attributes:
        python: its version.
        system: such as `Linux x86_64`.
        versions: of every package that matters; None for one that isn't installed.
        environment: the variables that JAX, XLA, CUDA and the loader read.
        library_path: the CUDA libraries in folders of LD_LIBRARY_PATH.
        tools: the paths in the wheels of the files that XLA needs; None for one that isn't there.
        toolkit: the folder of a CUDA toolkit that stands in for the wheels; None if there is none.
        has_driver: whether there is an NVIDIA driver.
        reading: what the driver says of the GPUs; None where it doesn't answer.
        nvml_error: why it doesn't.
        deviceless: what a child found that compiled for GPUs that aren't here.
        attached: what a child found that used the attached GPU; None where there is no driver.
    """

    python: str
    system: str
    versions: Mapping[str, str | None]
    environment: Mapping[str, str]
    library_path: tuple[str, ...]
    tools: Mapping[str, str | None]
    toolkit: str | None
    has_driver: bool
    reading: Reading | None
    nvml_error: str
    deviceless: Probed
    attached: Probed | None


def collect(on_stage: Callable[[str], None] = lambda stage: None, limit_s: float = PROBE_LIMIT_S) -> Facts:
    """Looks at this machine.

    That takes some seconds, and at most `limit_s` for each of the two children.

    Args:
        on_stage: called before each part with what is looked at, in words.
        limit_s: seconds after which a child is killed.
    """
    on_stage("packages, files and the driver")
    reading, nvml_error = None, ""
    try:
        reading = read_gpus()
    except (DriverError, MissingDependencyError) as error:
        nvml_error = str(error)
    has_driver = nvidia_driver() or reading is not None
    environment = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
    on_stage("compiling for GPUs that aren't here, in a child process")
    deviceless = try_out("deviceless", limit_s)
    attached = None
    if has_driver:
        on_stage("the attached GPU, in a child process")
        attached = try_out("attached", limit_s)
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        versions={package: version_of(package) for package in (*PACKAGES, *MORE_PACKAGES)},
        environment=environment,
        library_path=cuda_libraries(environment.get("LD_LIBRARY_PATH", "")),
        tools=_tools(),
        toolkit=toolkit(),
        has_driver=has_driver,
        reading=reading,
        nvml_error=nvml_error,
        deviceless=deviceless,
        attached=attached,
    )


def try_out(kind: str, limit_s: float) -> Probed:
    """Runs the probe of that kind in a child process, which is killed after `limit_s` seconds."""
    command = [sys.executable, "-m", "jaxremat.cli.machine.probe", kind]
    child = run_until(Deadline(limit_s), command, {**_CHILD_ENVIRONMENT[kind], **os.environ})
    if child.code is None:
        end = f"it didn't finish in {limit_s:g} s"
    elif child.code < 0:
        end = f"it ended with {signal_name(-child.code)}"
    else:
        end = f"it ended with exit code {child.code}" if child.code else ""
    return Probed(_json_lines(child.out), end, last_words(child.tail))


def _json_lines(text: str) -> tuple[Mapping[str, Any], ...]:
    steps = []
    for line in text.splitlines():
        try:
            steps.append(json.loads(line))
        except ValueError:
            continue  # a library printed it, or it was cut short
    return tuple(step for step in steps if isinstance(step, dict) and "step" in step)


def last_words(text: str) -> str:
    """The last line of a log that reports an error.

    That is an exception, or what XLA or absl marks as fatal or as an error.
    """
    errors = [line.strip() for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b.*:|[FE]\d{4} ", line)]
    return re.sub(r"^[FE]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ", "", errors[-1])[:400] if errors else ""


def cuda_libraries(library_path: str) -> tuple[str, ...]:
    """The paths of CUDA's libraries in the folders of a LD_LIBRARY_PATH."""
    found = []
    for folder in filter(None, library_path.split(":")):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        found += [f"{folder}/{name}" for name in names if CUDA_LIBRARIES.fullmatch(name)]
    return tuple(found)


def _tools() -> dict[str, str | None]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return {
        tool: next((str(path) for glob in globs for folder in folders for path in sorted(folder.glob(glob))), None)
        for tool, globs in TOOLS.items()
    }
