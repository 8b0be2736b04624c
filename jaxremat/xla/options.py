"""The compiler options of every compile, and what they mean for its matmuls.

A GPU that isn't in the machine has nothing to autotune on. XLA could then run each matmul as a Triton fusion with tiles of
its default size, or as a cuBLAS call. Here it takes cuBLAS, for two reasons. In two profiles of real GPUs XLA's autotuner
had chosen cuBLAS for most matmuls: 147 of 147 on an H100, 175 of 223 on an A100 (test data of NVIDIA's JAX-Toolbox, 2024). And
default tiles don't fit every shape: XLA refuses rows that no power of two divides, such as those of 1000 tokens.

A flag that the user has set in XLA_FLAGS wins over the option of the same name here.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxremat.xla.target import Target

#: What runs a step's matmuls: the kernels that the device's autotuner chose, cuBLAS, or Triton fusions with default tiles.
Matmuls = Literal["autotuned", "cublas", "triton"]

TRITON = "xla_gpu_enable_triton_gemm"
_AUTOTUNE = "xla_gpu_autotune_level"
_DISABLED = "xla_disable_hlo_passes"
_KERNEL_CACHE = "xla_gpu_kernel_cache_file"
#: Without a device to tune on, trying to autotune costs a third of the compile.
_DEVICELESS: dict[str, Any] = {_AUTOTUNE: 0, TRITON: False}


def compiler_options(target: "Target", *, xla_remat: bool = False, kernel_cache: Path | None = None) -> dict[str, Any]:
    """Our options for a compile for `target`.

    A compiler option hides the same flag in XLA_FLAGS. So the passes that the user disabled there are taken in here, and of
    the others only those that the user hasn't set are given.

    Args:
        target: what is compiled for.
        xla_remat: lets XLA's own rematerialization pass run.
        kernel_cache: file in which XLA keeps compiled kernels, for a GPU that isn't here: there compiles follow each other, and
            nothing that is timed depends on the kernels.
    """
    flags = _users_flags()
    options: dict[str, Any] = {}
    if not xla_remat:
        options[_DISABLED] = ",".join(filter(None, (flags.get(_DISABLED, ""), "rematerialization")))
    if target.kind == "deviceless":
        ours = _DEVICELESS | ({_KERNEL_CACHE: str(kernel_cache)} if kernel_cache else {})
        options |= {name: value for name, value in ours.items() if name not in flags}
    return options


def matmuls_of(target: "Target") -> Matmuls | None:
    """What runs the matmuls of a step compiled for `target` with `compiler_options` and the user's flags; None on a CPU."""
    if target.platform == "cpu":
        return None
    attached, flags = target.kind == "attached", _users_flags()
    if not (_is_true(flags[TRITON]) if TRITON in flags else attached):
        return "cublas"
    return "autotuned" if attached and flags.get(_AUTOTUNE) != "0" else "triton"


def other_matmuls(target: "Target") -> dict[str, Any]:
    """The option under which a GPU that isn't here would run the matmuls the other way; empty for other targets."""
    if target.kind != "deviceless":
        return {}
    return {TRITON: matmuls_of(target) == "cublas"}


def as_flags(options: dict[str, Any]) -> str:
    """Options as they are written in XLA_FLAGS: `--xla_gpu_enable_triton_gemm=false`."""
    return " ".join(
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


def _users_flags() -> dict[str, str]:
    parts = (flag.removeprefix("--").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value if equals else "true" for name, equals, value in parts}


def _is_true(value: str) -> bool:
    return value.lower() in ("true", "1")
