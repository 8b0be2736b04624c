"""The only place that lowers and compiles: a function, its arguments' shapes and a target in, a `Compilation` out.

XLA:GPU has a rematerialization pass of its own. Near its idea of the device's limit it changes the program without a word,
and bytes stop being affine in the batch; it is off unless asked for (`xla_remat`), and `num_xla_remat` counts its traces in
the program as a guard. XLA never fails for memory: a program of a terabyte compiles.
"""

import functools
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxremat.errors import CompileError, JaxrematError, MissingDependencyError
from jaxremat.xla import hlo
from jaxremat.xla.memory import CompiledMemory, read_memory
from jaxremat.xla.target import Target, load_target


@dataclass(frozen=True)
class Compilation:
    """A compiled program, what it needs, and what it took; lowering (with tracing) and compiling timed apart."""

    compiled: Any
    memory: CompiledMemory
    lower_s: float
    compile_s: float

    @functools.cached_property
    def hlo_text(self) -> str:
        """The scheduled, optimized HLO."""
        return self.compiled.as_text()

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The same, parsed."""
        return hlo.parse(self.hlo_text)

    @property
    def num_xla_remat(self) -> int:
        """Instructions that XLA's own rematerialization pass duplicated (it names them `.remat`)."""
        return len(re.findall(r"^\s*(?:ROOT )?%?[\w.-]+\.remat\d*[\w.]* = ", self.hlo_text, re.MULTILINE))


def lower_and_compile(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None = None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    xla_remat: bool = False,
    options: dict[str, Any] | None = None,
) -> Compilation:
    """Compiles `function(*args)` for `target`.

    Args:
        function: a JAX-traceable function, or one already jitted (its own donation is kept then).
        args: its arguments, or `jax.ShapeDtypeStruct`s: only shapes and dtypes are read.
        target: a `Target`, its name, or None for the attached GPU or else the default deviceless one.
        donate_argnums: arguments whose buffers the outputs may take.
        xla_remat: lets XLA's own rematerialization pass run.
        options: further XLA compiler options, which win over ours.

    Raises:
        CompileError: XLA refused the program; the message holds its first line.
        MissingDependencyError: ptxas or cuDNN couldn't be loaded.
    """
    target = target if isinstance(target, Target) else load_target(target)
    started = time.perf_counter()
    placed = functools.partial(jax.ShapeDtypeStruct, sharding=target.sharding)
    shapes = jax.eval_shape(lambda *args: args, *args)
    structs = jax.tree.map(lambda x: placed(x.shape, x.dtype, weak_type=x.weak_type), shapes)
    jitted: Any = (
        function
        if hasattr(function, "trace")
        else jax.jit(function, donate_argnums=donate_argnums, out_shardings=target.sharding)
    )
    try:
        lowered = jitted.trace(*structs).lower(lowering_platforms=(target.platform,))
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=_options(target, xla_remat) | (options or {}))
    except JaxrematError:
        raise
    except (RuntimeError, NotImplementedError) as error:  # XLA's own errors, and JAX's about cuDNN, are RuntimeErrors
        raise _explained(error, target) from error
    return Compilation(compiled, read_memory(compiled), lowered_at - started, time.perf_counter() - lowered_at)


def _options(target: Target, xla_remat: bool) -> dict[str, Any]:
    """Our compiler options. A compiler option hides the same flag in XLA_FLAGS, so that the user's own is taken in here."""
    parts = (flag.removeprefix("--").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    flags = {name: value for name, _, value in parts}
    options: dict[str, Any] = {}
    if not xla_remat:
        passes = flags.get("xla_disable_hlo_passes", "")
        options["xla_disable_hlo_passes"] = ",".join(filter(None, (passes, "rematerialization")))
    if target.kind == "deviceless" and "xla_gpu_autotune_level" not in flags:
        options["xla_gpu_autotune_level"] = 0  # there is no device to tune on, and trying costs a third of the compile
    return options


def _explained(error: Exception, target: Target) -> JaxrematError:
    text = str(error)
    first = text.strip().splitlines()[0][:300] if text.strip() else type(error).__name__
    extra = "aot" if target.kind == "deviceless" else "cuda13"
    for missing, wheel in (
        ("ptxas", "nvidia-cuda-nvcc"),
        ("libnvvm", "nvidia-nvvm"),
        ("nvvm", "nvidia-nvvm"),
        ("libdevice", "nvidia-nvvm"),
    ):
        if re.search(
            rf"(find|locate|load|open|not found)[^\n]*{missing}|{missing}[^\n]*(not found|missing)", text, re.IGNORECASE
        ):
            return MissingDependencyError(
                f"XLA couldn't find {missing}",
                cause=f"the wheel {wheel} is missing",
                next_step=f'pip install "jaxremat[{extra}]"',
            )
    if re.search(r"cudnn|dnn_version|fmha", text, re.IGNORECASE):
        return MissingDependencyError(
            f"XLA couldn't compile cuDNN attention: {first}",
            cause="the wheel nvidia-cudnn-cu13 is missing or too old, or the shapes are beyond cuDNN",
            next_step=f'pip install "jaxremat[{extra}]", or --attention xla',
        )
    return CompileError(
        f"XLA couldn't compile the step for {target.name}: {first}",
        next_step="-v shows XLA's own log; another --policy may compile",
    )


def dump_target(target: Target, path: Path) -> None:
    """Writes XLA's text description of `target`'s GPU to `path`, as XLA itself dumps it beside a compiled module."""
    with tempfile.TemporaryDirectory() as folder:
        lower_and_compile(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), "float32"),), target, options={"xla_dump_to": folder})
        found = list(Path(folder).glob("*gpu_target_config.pbtxt"))
        if not found:
            raise CompileError("XLA dumped no target description", cause="this version of XLA doesn't write one")
        text = found[0].read_text()
    path.write_text(text)
