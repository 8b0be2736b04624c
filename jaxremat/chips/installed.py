"""Reports the versions of installed packages, from the packages' metadata alone.

The module imports none of these packages, so it can report a broken package too. For example, `version_of("jax")` gives
`"0.10.2"`.
"""

import importlib.metadata
import platform
from pathlib import Path

from jaxremat.errors import MissingDependencyError

#: The wheels of the `aot` extra. Besides JAX, deviceless compilation needs only these.
AOT_WHEELS = ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cudnn-cu13")

PACKAGES = (
    "jaxremat",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvcc",
)


def check_aot_wheels() -> None:
    """Checks that the wheels of the `aot` extra are installed.

    Raises:
        MissingDependencyError: wheels are missing. The message names them.
    """
    if missing := [wheel for wheel in AOT_WHEELS if version_of(wheel) is None]:
        raise MissingDependencyError(
            f"compiling for a GPU that isn't in this machine needs {', '.join(missing)}",
            cause="the aot extra isn't installed",
            next_step='pip install "jaxremat[aot]", or --target cpu to run here (times real, memory not a GPU\'s)',
        )


def versions() -> dict[str, str | None]:
    """The versions that a record has: Python's, the packages' and the NVIDIA driver's.

    A version is None if the package or the driver isn't installed.
    """
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        driver = None
    return {
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
        "driver": driver,
    }


def version_of(package: str) -> str | None:
    """The installed version of a package; None if the package isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
