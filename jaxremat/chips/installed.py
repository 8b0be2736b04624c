"""Reports the versions of installed packages, from the packages' metadata alone.

The module imports none of these packages, so it can report a broken package too. For example, `version_of("jax")` gives
`"0.10.2"`.
"""

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from jaxremat.errors import MissingDependencyError

#: The packages that bring XLA's compiler of GPUs to JAX.
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
#: The wheels of the `aot` extra. Besides JAX, deviceless compilation needs only these.
AOT_WHEELS = ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cudnn-cu13")
#: The wheels among them whose files a CUDA toolkit has too, and these files, where XLA looks for them in the toolkit.
TOOLKIT_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm")
TOOLKIT_FILES = ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")
#: The package that is XLA's compiler of TPUs.
LIBTPU = "libtpu"
#: The packages whose versions change the compiled program.
COMPILERS = ("jax", "jaxlib", "flax", "optax", *PLUGINS, "nvidia-cudnn-cu13")
PACKAGES = ("jaxremat", *COMPILERS, "nvidia-cuda-nvcc", LIBTPU)
#: The programs that XLA may find on the PATH.
TOOLS = ("ptxas", "nvlink")
#: The beginnings of the variables of the environment that makers' libraries read.
VARIABLES = "CUDA|CUDNN|CUBLAS|NVIDIA|LIBTPU"
#: Those among them that decide what is compiled or computed.
DECIDING_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
#: Those among them that only say which devices a process sees.
DEVICE_VARIABLES = "CUDA_VISIBLE_DEVICES"


def check_aot_wheels() -> None:
    """Checks that the wheels of the `aot` extra are installed.

    A CUDA toolkit stands in for some of them.

    Raises:
        MissingDependencyError: wheels are missing. The message names them.
    """
    elsewhere = TOOLKIT_WHEELS if toolkit() else ()
    if missing := [wheel for wheel in AOT_WHEELS if version_of(wheel) is None and wheel not in elsewhere]:
        raise MissingDependencyError(
            f"compiling for a GPU that isn't in this machine needs {', '.join(missing)}",
            cause="the aot extra isn't installed",
            next_step='pip install "jaxremat[aot]", or --target cpu to run here (times real, memory not a GPU\'s)',
        )


def toolkit() -> str | None:
    """The folder of a CUDA toolkit where XLA looks for one.

    That is `CUDA_ROOT`, or else `/usr/local/cuda`. None if there is none.
    """
    root = Path(os.environ.get("CUDA_ROOT") or "/usr/local/cuda")
    return str(root) if all((root / file).exists() for file in TOOLKIT_FILES) else None


def versions() -> dict[str, str | None]:
    """The versions that a record has: Python's, the packages' and the NVIDIA driver's.

    A version is None if the package or the driver isn't installed.
    """
    try:
        driver = driver_number(Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        driver = None
    return {"python": platform.python_version(), **{package: version_of(package) for package in PACKAGES}, "driver": driver}


def driver_number(text: str) -> str:
    """The version's number in what the NVIDIA driver says of itself, such as `580.159.04`.

    The first line if it has none.
    """
    line = text.partition("\n")[0]
    return next((word for word in line.split() if re.fullmatch(r"\d+(\.\d+)+", word)), line)


def version_of(package: str) -> str | None:
    """The installed version of a package; None if the package isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
