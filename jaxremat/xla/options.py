"""The compiler options of every compile, their presets, and the kernels that run matmuls.

XLA can't autotune for a GPU that isn't in the machine. It could then run each matmul as a Triton fusion with tiles of its
default size, or as a cuBLAS call. This package chooses cuBLAS, for two reasons. The first reason is that XLA's autotuner had
chosen cuBLAS for most matmuls in two profiles of real GPUs: 147 of 147 on an H100, and 175 of 223 on an A100 (test data of
NVIDIA's JAX-Toolbox, 2024). The second reason is that default tiles don't fit every shape. XLA rejects rows that no power of
two divides, such as those of 1000 tokens.

A flag that the user has set in XLA_FLAGS wins over the option of the same name in this module.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxremat.chips.installed import version_of
from jaxremat.policy.offload import DISABLED, PASS, REMAT
from jaxremat.system.files import named_by
from jaxremat.xla.memory import CompiledMemory

if TYPE_CHECKING:
    from jaxremat.chips.target import Target

#: The kernels that run a step's matmuls: those that the autotuner chose on the device, cuBLAS, or Triton fusions with
#: default tiles.
Matmuls = Literal["autotuned", "cublas", "triton"]

TRITON = "xla_gpu_enable_triton_gemm"
_AUTOTUNE = "xla_gpu_autotune_level"
_REPEATABLE = "xla_gpu_exclude_nondeterministic_ops"
_TUNED = "xla_gpu_per_fusion_autotune_cache_dir"
_LIMIT_PERCENT = "xla_gpu_memory_limit_slop_factor"
_KERNEL_CACHE = "xla_gpu_kernel_cache_file"
#: Without a device, XLA has nothing to tune on, and the attempt to autotune takes a third of the compile time.
_DEVICELESS: dict[str, Any] = {_AUTOTUNE: 0, TRITON: False}

#: The options of each preset by the preset's name.
#:
#: * `default` sets nothing.
#: * `latency-hiding` starts a collective before its result is needed, so that kernels run meanwhile.
#: * `jax-toolbox` adds the flags that MaxText and NVIDIA's JAX-Toolbox set for training. Small collectives are combined up to
#:   these bytes, collectives of a loop are pipelined over its iterations, and two iterations share no buffers.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "latency-hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "jax-toolbox": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**30,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**30,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
    },
}


#: Options that the XLA of jaxlib 0.12 no longer has. It rejects a compile with an option that it doesn't know.
_GONE = (
    "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_all_reduce",
    "xla_gpu_enable_pipelined_reduce_scatter",
)


def preset_options(name: str) -> dict[str, Any]:
    """The options of the preset `name` that the installed XLA has and XLA_FLAGS doesn't set."""
    major, minor, *_ = (version_of("jaxlib") or "0.0").split(".")
    left_out = {*_users_flags(), *(_GONE if (int(major), int(minor)) >= (0, 12) else ())}
    return {option: value for option, value in PRESETS[name].items() if option not in left_out}


def with_preset(policy: str, name: str) -> str:
    """The text of a policy and its preset, such as `dots with latency-hiding`, or `dots`."""
    return policy if name == "default" else f"{policy} with {name}"


def compiler_options(target: "Target", *, xla_remat: bool = False, misreads: bool = False) -> dict[str, Any]:
    """The options that this package sets for a compile for `target`.

    A compiler option hides the same flag in XLA_FLAGS. So the option for disabled passes includes the passes that the user
    disabled in XLA_FLAGS. All other options are left out if the user has set the flag of the same name. For a deviceless
    target the result is, for example::

        {"xla_disable_hlo_passes": "rematerialization", "xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

    Args:
        target: the target of the compile.
        xla_remat: whether XLA's own rematerialization pass may run.
        misreads: whether XLA would read the wrong layer in a scan of the program (`policy/offload.py`), if its pass ran.
    """
    flags = _users_flags()
    options: dict[str, Any] = {}
    if ours := [REMAT] * (not xla_remat) + [PASS] * misreads:
        options[DISABLED] = ",".join(filter(None, (flags.get(DISABLED, ""), *ours)))
    if target.kind == "deviceless":
        options |= {name: value for name, value in _DEVICELESS.items() if name not in flags}
    return options


def remat_limit(memory: CompiledMemory, pool_bytes: int | None) -> int | None:
    """The total above which XLA's own rematerialization changes a step on a GPU.

    Of what the allocator's pool has beyond arguments and results, the pass leaves 5 % free. None if XLA_FLAGS disables the pass,
    or without a pool.

    Args:
        memory: the step's memory, compiled without the pass.
        pool_bytes: the size of the allocator's pool. None for a CPU.

    References:
        XLA, `GetSchedulerMemoryLimit` in `xla/service/gpu/gpu_hlo_schedule.cc`.
    """
    flags = _users_flags()
    if pool_bytes is None or REMAT in flags.get(DISABLED, "").split(","):
        return None
    io_bytes = memory.total_bytes - memory.temp_bytes
    return io_bytes + (pool_bytes - io_bytes) * int(flags.get(_LIMIT_PERCENT, 95)) // 100


def kernel_options(target: "Target", kernels: Path) -> dict[str, Any]:
    """The option with which XLA saves compiled kernels in the file `kernels`.

    The compiled program doesn't depend on them. Empty for a device that is here. Compiles for a GPU that isn't run one after
    the other, and no measured time depends on the kernels.
    """
    is_set = _KERNEL_CACHE in _users_flags()
    return {} if is_set or target.kind != "deviceless" else {_KERNEL_CACHE: str(kernels)}


def repeatable_options(target: "Target", tuned: Path | None) -> dict[str, Any]:
    """The options with which an attached GPU computes the same bits in each process.

    Empty for a CPU, which does so anyway. Kernels whose sums depend on the order of threads are left out. What XLA's
    autotuner chose is stored in a folder, because another process might choose other kernels.

    Args:
        target: the target of the compile.
        tuned: the folder, which is made if it isn't there. None leaves the choice to each process, and the result is empty.
    """
    if target.kind != "attached" or target.platform == "cpu" or tuned is None:
        return {}
    with named_by("--run-dir", tuned, "give a folder that is yours, on a disk with room"):
        tuned.mkdir(parents=True, exist_ok=True)  # XLA doesn't make it
    ours: dict[str, Any] = {_REPEATABLE: True, _TUNED: str(tuned.absolute())}
    return {name: value for name, value in ours.items() if name not in _users_flags()}


def matmuls_of(target: "Target") -> Matmuls | None:
    """The kernels of the matmuls of a step for `target`, by `compiler_options` and XLA_FLAGS.

    The result is None for a CPU.
    """
    if target.platform == "cpu":
        return None
    attached, flags = target.kind == "attached", _users_flags()
    if not (_is_true(flags[TRITON]) if TRITON in flags else attached):
        return "cublas"
    return "autotuned" if attached and flags.get(_AUTOTUNE) != "0" else "triton"


def other_matmuls(target: "Target") -> dict[str, Any]:
    """The option for the other kind of matmul kernels; empty for attached targets.

    For example, if the matmuls would be cuBLAS calls, the result is `{"xla_gpu_enable_triton_gemm": True}`.
    """
    if target.kind != "deviceless":
        return {}
    return {TRITON: matmuls_of(target) == "cublas"}


def as_flags(options: dict[str, Any]) -> str:
    """Options in the form of XLA_FLAGS.

    For example, `{"xla_gpu_enable_triton_gemm": False}` gives `--xla_gpu_enable_triton_gemm=false`.
    """
    return " ".join(
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


def _users_flags() -> dict[str, str]:
    parts = (flag.removeprefix("--").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value if equals else "true" for name, equals, value in parts}


def _is_true(value: str) -> bool:
    return value.lower() in ("true", "1")
