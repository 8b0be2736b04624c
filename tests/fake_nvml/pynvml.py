"""Stands in for `pynvml` where its folder is on PYTHONPATH: two cards, the first busy, its use different at every reading.

FAKE_NVML_ERROR=N makes nvmlInit fail with NVML's error N, as a machine without a driver does.
"""

import itertools
import os
from types import SimpleNamespace

GIB = 2**30
NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_SUPPORTED = 4, 3
NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 9, 12, 18
_used = itertools.chain([100 * GIB, 120 * GIB, 90 * GIB], itertools.repeat(80 * GIB))


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


def nvmlInit():
    if error := os.environ.get("FAKE_NVML_ERROR"):
        raise NVMLError(int(error))


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "580.159.03"


def nvmlSystemGetCudaDriverVersion():
    return 13000


def nvmlDeviceGetCount():
    return 2


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetName(handle):
    return "NVIDIA H200"


def nvmlDeviceGetMemoryInfo(handle):
    used = next(_used) if handle == 0 else GIB // 2
    return SimpleNamespace(total=140 * GIB, used=used, free=140 * GIB - used)


def nvmlDeviceGetUtilizationRates(handle):
    if handle == 1:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return SimpleNamespace(gpu=97)


def nvmlDeviceGetComputeRunningProcesses(handle):
    if handle == 1:
        return []
    used = {4242: 4 * GIB, 4243: None, 4244: 95 * GIB}
    return [SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in used.items()]


def nvmlSystemGetProcessName(pid):
    if pid == 4243:
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    return {4242: "/usr/bin/python3 train.py", 4244: "/opt/llama/server"}[pid]


def nvmlDeviceGetCudaComputeCapability(handle):
    return (9, 0)
