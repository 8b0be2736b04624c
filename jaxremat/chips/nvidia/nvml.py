"""The attached GPUs as the NVIDIA driver reports them, through NVML.

The memory is that of the whole card, with every process.

JAX's own statistics know only what the allocator of this process gave out. They don't know the CUDA context, the workspaces
of libraries, or other processes. NVML has no high-water mark, so that a peak can only be found by reading often.

    read_gpus().gpus[0]  # Gpu(index=0, name="NVIDIA H200", total_bytes=150_754_820_096, used_bytes=..., ...)

References:
    nvidia-ml-py (`pynvml`), NVIDIA's own binding of https://docs.nvidia.com/deploy/nvml-api.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxremat.chips.nvidia.gpu import nvidia_driver
from jaxremat.errors import DriverError, MissingDependencyError


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU; `used_bytes` is None where the driver doesn't say."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One card at one moment. `used_bytes` counts everything, with the driver's own share."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None
    busy_percent: int | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class Reading:
    """All cards at one moment.

    `cuda` is the newest CUDA that the driver can run, such as `13.0`.
    """

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


# What an error of NVML means, and what to do.
_MEANINGS = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": ("this machine has no NVIDIA driver", "on a machine with a GPU install NVIDIA's driver"),
    "NVML_ERROR_DRIVER_NOT_LOADED": ("the driver is installed but not loaded", "sudo modprobe nvidia, or restart"),
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": ("the driver was updated while the old one runs", "restart the machine"),
    "NVML_ERROR_NO_PERMISSION": ("this user may not open /dev/nvidia*", "join the group that owns them: ls -l /dev/nvidia*"),
    "NVML_ERROR_GPU_IS_LOST": ("the GPU fell off the bus", "restart the machine; see sudo dmesg | grep -i xid"),
}
_NOT_VISIBLE = ("the driver's libnvidia-ml.so.1 isn't visible in this container", "start it with --gpus all")


@contextlib.contextmanager
def nvml_session(nvml: Any = None) -> Iterator[Callable[[], Reading]]:
    """A context that yields a function, each call of which reads the GPUs once.

    Args:
        nvml: `pynvml`, or a module like it.

    Raises:
        DriverError: there is no driver, or it doesn't answer. The function raises it too.
        MissingDependencyError: nvidia-ml-py isn't installed.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        raise MissingDependencyError(
            "reading the GPUs' memory needs nvidia-ml-py", next_step="pip install nvidia-ml-py"
        ) from None
    with _explained(nvml):
        nvml.nvmlInit()
    try:
        yield lambda: _read(nvml)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def read_gpus(nvml: Any = None) -> Reading:
    """One reading of all GPUs.

    Raises:
        DriverError: there is no driver, or it doesn't answer.
        MissingDependencyError: nvidia-ml-py isn't installed.
    """
    with nvml_session(nvml) as read:
        return read()


def gpu_order(environment: Mapping[str, str], num_gpus: int) -> list[int]:
    """The numbers of the cards that CUDA shows, in its order.

    They are all cards where CUDA_VISIBLE_DEVICES has no numbers.
    """
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None or re.search(r"[a-zA-Z]", value):
        return list(range(num_gpus))
    order = []
    for part in value.split(","):
        if not part.strip().isdigit() or int(part) >= num_gpus:
            break  # CUDA leaves out this one, which doesn't exist, and all that follow
        order.append(int(part))
    return order


@contextlib.contextmanager
def _explained(nvml: Any) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        by_code = {getattr(nvml, name, None): meaning for name, meaning in _MEANINGS.items()}
        cause, cure = by_code.get(error.value, ("", "run nvidia-smi, which asks the same library"))
        if error.value == getattr(nvml, "NVML_ERROR_LIBRARY_NOT_FOUND", None) and nvidia_driver():
            cause, cure = _NOT_VISIBLE
        raise DriverError(f"no NVIDIA GPU can be read: {error}", cause=cause, next_step=cure) from None


def _read(nvml: Any) -> Reading:
    with _explained(nvml):
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion()
        gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return Reading(driver, f"{cuda // 1000}.{cuda % 1000 // 10}", gpus)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    utilization = _or_none(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)  # under MIG there is none
    running = _or_none(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total,
        used_bytes=memory.used,
        free_bytes=memory.free,
        compute_capability=_or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle),
        busy_percent=utilization.gpu if utilization else None,
        processes=tuple(GpuProcess(p.pid, _name(nvml, p.pid), p.usedGpuMemory) for p in running),
    )


def _or_none(nvml: Any, ask: Callable[..., Any], *args: Any) -> Any:
    try:
        return ask(*args)
    except nvml.NVMLError:
        return None


def _name(nvml: Any, pid: int) -> str:
    """The program's name without its folder; `?` where the process is beyond this container."""
    name = _or_none(nvml, nvml.nvmlSystemGetProcessName, pid)
    if not name:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return "?"
    return Path(name.split(" ")[0]).name
