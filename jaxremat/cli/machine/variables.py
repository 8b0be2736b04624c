"""Environment variables that stop JAX, or that silently change bytes or times.

Each was tried with jax 0.10.2. Those that need a GPU weren't: they name the source that says what they do.

    JAX_DEBUG_NANS=1    a note: "every step is checked for NaN: measured times are longer", and "unset JAX_DEBUG_NANS"

References:
    jaxlib/xla_client.py, `generate_pjrt_gpu_plugin_options`; jax/_src/xla_bridge.py; https://docs.jax.dev/en/latest/gpu_memory_allocation.html
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jaxremat.chips.nvidia.nvml import gpu_order
from jaxremat.cli.machine.facts import PROBE_LIMIT_S, Facts, last_words
from jaxremat.errors import UsageError
from jaxremat.system.ahead import JOBS, is_number_of_jobs
from jaxremat.system.process import Deadline, run_until
from jaxremat.xla.results import SIZE, is_size

MEM_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
#: Flags of XLA that change neither the program nor its speed.
HARMLESS = re.compile(r"--(xla_dump_\w+|xla_gpu_cuda_data_dir|xla_force_host_platform_device_count)(=.*)?")
_ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")

State = Literal["note", "problem"]
Found = tuple[State, str, str]


def _on(value: str, facts: Facts) -> bool:
    return value.lower() not in ("", "0", "false", "no", "off")


def _on_with_gpu(value: str, facts: Facts) -> bool:
    return facts.has_driver and _on(value, facts)


def _platforms(value: str) -> set[str]:
    return {part.strip().lower() for part in value.split(",")} - {""}


def _names_gpu(value: str) -> bool:
    return bool(_platforms(value) & {"cuda", "gpu"})


def _hides_gpu(value: str, facts: Facts) -> bool:
    return not gpu_order(facts.environment, len(facts.reading.gpus) if facts.reading else 1)


def _not_a_share(value: str, facts: Facts) -> bool:
    try:
        return value != "" and not 0 < float(value) <= 1
    except ValueError:
        return True


#: The name of a variable, whether its value is worth a row, given the facts of the machine, the row's state, and what it does.
VARIABLES: tuple[tuple[str, Callable[[str, Facts], Any], State, str], ...] = (
    ("XLA_PYTHON_CLIENT_MEM_FRACTION", lambda value, facts: value and facts.environment.get("XLA_CLIENT_MEM_FRACTION"),
     "problem", "set together with XLA_CLIENT_MEM_FRACTION, its new name: JAX's plugin doesn't start"),
    *((name, _not_a_share, "problem", "not a share from 0 to 1: JAX's plugin can't use it") for name in MEM_FRACTION),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", lambda value, facts: value.lower() not in _ALLOCATORS,
     "problem", "no allocator that JAX knows: its plugin doesn't start"),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", lambda value, facts: facts.has_driver and value.lower() == "platform",
     "note", "no limit is enforced and no peak reported: the budget isn't the allocator's"),
    ("XLA_PYTHON_CLIENT_PREALLOCATE", lambda value, facts: facts.has_driver and not _on(value, facts),
     "note", "memory is taken piece by piece, so that fragments may fail a batch near the limit"),
    ("JAX_PLATFORMS", lambda value, facts: facts.has_driver and _platforms(value) and not _names_gpu(value),
     "problem", "hides this machine's GPU from JAX"),
    ("JAX_PLATFORMS", lambda value, facts: not facts.has_driver and _platforms(value) != {"cpu"},
     "problem", "lets JAX look for a GPU that isn't here, and then none can be compiled for"),
    ("JAX_PLATFORM_NAME", lambda value, facts: _names_gpu(value) and not facts.has_driver,
     "problem", "names a GPU, and none is here: every command fails"),
    ("CUDA_VISIBLE_DEVICES", lambda value, facts: facts.has_driver and _hides_gpu(value, facts),
     "problem", "shows CUDA no GPU of this machine"),
    ("JAX_CUDA_VISIBLE_DEVICES", lambda value, facts: value != "all" and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", value),
     "problem", "not a list of numbers: JAX fails on it where there is a GPU"),
    ("JAX_DISABLE_JIT", _on, "problem", "nothing is compiled as a whole, and steps fail to run"),
    ("JAX_NUMPY_DTYPE_PROMOTION", lambda value, facts: value == "strict",
     "problem", "libraries that mix dtypes, Flax and Optax among them, fail"),
    ("JAX_DEFAULT_MATMUL_PRECISION", lambda value, facts: value.lower() not in ("", "default"),
     "note", "matmuls run in another precision: bytes and times are of that program"),
    ("JAX_ENABLE_X64", _on, "note", "numbers without a dtype have 64 bits: bytes and losses are of that program"),
    ("JAX_DEFAULT_PRNG_IMPL", lambda value, facts: value.lower() not in ("", "threefry2x32"),
     "note", "random numbers, and the bytes of dropout, are of another generator"),
    ("JAX_THREEFRY_PARTITIONABLE", lambda value, facts: value != "" and not _on(value, facts),
     "note", "random numbers are others, and on a mesh they are made on each device"),
    ("JAX_DEBUG_NANS", _on, "note", "every step is checked for NaN: measured times are longer"),
    # CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"
    ("CUDA_LAUNCH_BLOCKING", _on_with_gpu, "note", "kernels wait for one another: measured times are longer"),
    # cuBLAS documentation, "Tensor Core Usage"
    ("NVIDIA_TF32_OVERRIDE", lambda value, facts: facts.has_driver and value == "0",
     "note", "float32 matmuls of NVIDIA's libraries run without tensor cores"),
    # xla/stream_executor/cuda: allocations may then spill to the host
    ("TF_FORCE_UNIFIED_MEMORY", _on_with_gpu, "problem", "memory may spill to the host: batches seem to fit that don't"),
    (SIZE, lambda value, facts: not is_size(value),
     "problem", "not a size such as 2GiB, or 0: no step is compiled for a GPU that isn't here"),
    (JOBS, lambda value, facts: not is_number_of_jobs(value),
     "problem", "not a number above 0: no step is compiled for a GPU that isn't here"),
    ("LD_LIBRARY_PATH", lambda value, facts: facts.library_path,
     "note", "holds CUDA libraries; the wheels' own are found first (RPATH), so these count only where a wheel is missing"),
)  # fmt: skip


def check_variables(facts: Facts) -> Iterator[Found]:
    """For each variable that matters the state, what was found, and the remedy."""
    for name, matters, state, does in VARIABLES:
        value = facts.environment.get(name)
        if value is not None and matters(value, facts):
            shown = facts.library_path[0] if name == "LD_LIBRARY_PATH" else f"{name}={value}"
            yield state, f"{shown}: {does}", f"unset {name}"
    yield from _xla_flags(facts)


def _xla_flags(facts: Facts) -> Iterator[Found]:
    value = facts.environment.get("XLA_FLAGS", "")
    if problem := _rejected_flags(value, facts.deviceless.words):
        yield "problem", *problem
    elif changing := [flag for flag in value.split() if not HARMLESS.fullmatch(flag)]:
        found = f"{' '.join(changing)}: bytes and times are of the program that these make (records hold them)"
        yield "note", f"XLA_FLAGS={found}", "unset XLA_FLAGS"


def _rejected_flags(value: str, words: str) -> tuple[str, str] | None:
    """What is wrong with XLA_FLAGS, and the remedy, by what XLA said last.

    None where that is about something else.
    """
    if "XLA_FLAGS" not in words and "Flag parsing failed" not in words:
        return None
    rest = " ".join(flag for flag in value.split() if flag not in words.split())
    remedy = f"export XLA_FLAGS='{rest}'" if rest and rest != " ".join(value.split()) else "unset XLA_FLAGS"
    return f"XLA_FLAGS={value}: XLA can't start: {words}", remedy


def check_xla_flags() -> None:
    """Rejects a variable XLA_FLAGS that XLA can't read.

    XLA would end this process by a fatal message of its own.

    A child process tries the variable with jaxlib alone, in about half a second. There is none if the variable is empty, or if
    this process has imported jaxlib before: XLA reads the variable once.

    Raises:
        UsageError: XLA ended the child process.
    """
    value = os.environ.get("XLA_FLAGS", "").strip()
    if not value or "jaxlib" in sys.modules:
        return
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    words = last_words(run_until(Deadline(PROBE_LIMIT_S), command, os.environ).tail)
    if problem := _rejected_flags(value, words):
        raise UsageError(problem[0], next_step=problem[1])


def split_advice(message: str) -> tuple[str, str]:
    """An error's message (`errors.py`) as what was found and what to do."""
    found, _, advice = message.partition(" Next: ")
    return found.rstrip("."), advice.rstrip(".")
