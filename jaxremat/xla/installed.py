"""What is installed, read from the packages' metadata alone: nothing is imported, so that a broken package can be told of."""

import importlib.metadata
import platform
from pathlib import Path

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
