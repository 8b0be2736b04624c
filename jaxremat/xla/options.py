"""The compiler options of every compile, their presets, and the kernels that run matmuls.

What the options are is in `chips/`, with the reasons.

A flag that the user has set in XLA_FLAGS wins over the option of the same name in this module.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxremat.chips.catalog import PRESETS
from jaxremat.chips.chip import Matmuls
from jaxremat.chips.installed import version_of
from jaxremat.policy.offload import DISABLED, PASS, REMAT
from jaxremat.system.files import named_by
from jaxremat.xla.memory import CompiledMemory

if TYPE_CHECKING:
    from jaxremat.chips.target import Target

_LIMIT_PERCENT = "xla_gpu_memory_limit_slop_factor"
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

        {"xla_disable_hlo_passes": "rematerialization", "xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False, ...}

    The disabled passes also include those of `Chip.passes_to_skip`.

    Args:
        target: the target of the compile.
        xla_remat: whether XLA's own rematerialization pass may run.
        misreads: whether XLA would read the wrong layer in a scan of the program (`policy/offload.py`), if its pass ran.
    """
    flags = _users_flags()
    options: dict[str, Any] = {}
    ours = [REMAT] * (not xla_remat) + [PASS] * misreads
    switch = target.chip.options.matmuls
    if target.kind == "deviceless" and (switch is None or _is_true(flags.get(switch.option, "true"))):
        ours += target.chip.passes_to_skip(target.compute_capability)
    if ours:
        options[DISABLED] = ",".join(filter(None, (flags.get(DISABLED, ""), *ours)))
    if target.kind == "deviceless":
        options |= {name: value for name, value in target.chip.options.deviceless.items() if name not in flags}
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

    The context of `xla/saved_kernels.py` says what they are saved for. Empty for a device that is here.
    """
    option = target.chip.options.kernel_cache
    if target.kind != "deviceless" or option is None or option in _users_flags():
        return {}
    return {option: str(kernels)}


def repeatable_options(target: "Target", tuned: Path | None) -> dict[str, Any]:
    """The options with which an attached GPU computes the same bits in each process.

    Empty for a CPU, which does so anyway. Kernels whose sums depend on the order of threads are left out. What XLA's
    autotuner chose is stored in a folder, because another process might choose other kernels.

    Args:
        target: the target of the compile.
        tuned: the folder, which is made if it isn't there. None leaves the choice to each process, and the result is empty.
    """
    options = target.chip.options
    if target.kind != "attached" or options.tuned_folder is None or tuned is None:
        return {}
    with named_by("--run-dir", tuned, "give a folder that is yours, on a disk with room"):
        tuned.mkdir(parents=True, exist_ok=True)  # XLA doesn't make it
    ours = {**options.repeatable, options.tuned_folder: str(tuned.absolute())}
    return {name: value for name, value in ours.items() if name not in _users_flags()}


def matmuls_of(target: "Target") -> Matmuls | None:
    """The kernels of the matmuls of a step for `target`, by `compiler_options` and XLA_FLAGS.

    None where no option chooses them, as for a CPU.
    """
    switch = target.chip.options.matmuls
    if switch is None:
        return None
    attached, flags = target.kind == "attached", _users_flags()
    if not (_is_true(flags[switch.option]) if switch.option in flags else attached):
        return switch.off
    return "autotuned" if attached and flags.get(switch.autotune) != "0" else switch.on


def other_matmuls(target: "Target") -> dict[str, Any]:
    """The option for the other kind of matmul kernels; empty for attached targets.

    For example, if the matmuls would be calls of a library, the result is `{"xla_gpu_enable_triton_gemm": True}`.
    """
    switch = target.chip.options.matmuls
    if target.kind != "deviceless" or switch is None:
        return {}
    return {switch.option: matmuls_of(target) == switch.off}


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
