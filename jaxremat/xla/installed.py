"""What is installed, read from the metadata of packages alone. Nothing is imported, so that a broken package can be reported."""

import importlib.metadata
import platform
from pathlib import Path

from jaxremat.errors import MissingDependencyError

#: The wheels of the `aot` extra: all that deviceless compilation needs.
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
    """Raises MissingDependencyError, naming them, if wheels of the `aot` extra are missing."""
    if missing := [wheel for wheel in AOT_WHEELS if version_of(wheel) is None]:
        raise MissingDependencyError(
            f"compiling for a GPU that isn't in this machine needs {', '.join(missing)}",
            cause="the aot extra isn't installed",
            next_step='pip install "jaxremat[aot]", or --target cpu to run here (times real, memory not a GPU\'s)',
        )


def versions() -> dict[str, str | None]:
    """The versions a record carries: None where a package, or the NVIDIA driver, isn't installed."""
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
    """The installed version of a package, None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
