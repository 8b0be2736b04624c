"""The only place that lowers and compiles: a function, its arguments' shapes and a target in, a `Compilation` out.

XLA:GPU has a rematerialization pass of its own. Near its idea of the device's limit it changes the program without a word,
and bytes stop being affine in the batch; it is off unless asked for (`xla_remat`), and `num_xla_remat` counts its traces in
the program as a guard. XLA never fails for memory: a program of a terabyte compiles.
"""

import contextlib
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxremat.errors import CompileError, JaxrematError, MissingDependencyError
from jaxremat.interrupt import raise_if_interrupted
from jaxremat.policy.names import WrittenName, written_names
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Category, MemoryMap
from jaxremat.xla.dump import OPTIONS, Dump, read_dump
from jaxremat.xla.memory import CompiledMemory, read_memory
from jaxremat.xla.memory_map import read_map
from jaxremat.xla.target import Target, load_target


@dataclass(frozen=True)
class Compilation:
    """A compiled program, what it needs, and what it took; lowering (with tracing) and compiling timed apart.

    `jaxpr` is the traced program. `dump` is what XLA wrote about the program's buffers, and `names` where checkpoint names
    were written in it; there only where it was compiled with `keep_dump`.
    """

    compiled: Any
    memory: CompiledMemory
    lower_s: float
    compile_s: float
    jaxpr: Any = None
    dump: Dump | None = None
    names: tuple[WrittenName, ...] = ()

    @functools.cached_property
    def hlo_text(self) -> str:
        """The scheduled, optimized HLO."""
        return self.compiled.as_text()

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The same, parsed."""
        return hlo.parse(self.hlo_text)

    @functools.cached_property
    def memory_map(self) -> MemoryMap:
        """Who holds the memory, where the dump was kept; arguments' categories go by their paths."""
        if self.dump is None:
            raise ValueError("compile with keep_dump=True")
        return read_map(self.dump, self.names)

    @property
    def num_xla_remat(self) -> int:
        """Instructions that XLA's own rematerialization pass duplicated."""
        return sum(i.is_xla_remat for c in self.module.computations.values() for i in c.instructions)


def lower_and_compile(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None = None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    xla_remat: bool = False,
    keep_dump: bool = False,
    options: dict[str, Any] | None = None,
) -> Compilation:
    """Compiles `function(*args)` for `target`.

    Args:
        function: a JAX-traceable function, or one already jitted (its own donation is kept then).
        args: its arguments, or `jax.ShapeDtypeStruct`s: only shapes and dtypes are read.
        target: a `Target`, its name, or None for the attached GPU or else the default deviceless one.
        donate_argnums: arguments whose buffers the outputs may take.
        xla_remat: lets XLA's own rematerialization pass run.
        keep_dump: keeps what XLA writes about the program's buffers, for `Compilation.memory_map`.
        options: further XLA compiler options, which win over ours.

    Raises:
        CompileError: XLA refused the program; the message holds its first line.
        MissingDependencyError: ptxas or cuDNN couldn't be loaded.
    """
    raise_if_interrupted()
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
    written: Dump | None = None
    try:
        traced = jitted.trace(*structs)
        lowered = traced.lower(lowering_platforms=(target.platform,))
        lowered_at = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="jaxremat-") if keep_dump else contextlib.nullcontext() as folder:
            dumping = OPTIONS | {"xla_dump_to": folder} if folder else {}
            compiled = lowered.compile(compiler_options=_options(target, xla_remat) | dumping | (options or {}))
            compiled_at = time.perf_counter()
            if folder:
                written = read_dump(Path(folder))
    except JaxrematError:
        raise
    except (RuntimeError, NotImplementedError) as error:  # XLA's own errors, and JAX's about cuDNN, are RuntimeErrors
        raise_if_interrupted()
        raise _explained(error, target) from error
    times = lowered_at - started, compiled_at - lowered_at
    names = written_names(traced.jaxpr) if keep_dump else ()
    return Compilation(compiled, read_memory(compiled), *times, traced.jaxpr, written, names)


def memory_map(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None = None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    roles: Mapping[str, Category] | None = None,
) -> MemoryMap:
    """Who holds the memory of `function(*args)`, compiled for `target`: every buffer with its place, its life, its purpose.

    `jaxremat.attribution(map)` gives the bytes of each category at the peak. Purposes come from the arguments' paths
    (`state.params['w']`), JAX's scopes, and where in the program a value is made and last read; they are a rule table
    (`jaxremat/xla/categories.py`), not something XLA knows.

    Args:
        function: a train step, or any function; already jitted, its own donation is kept.
        args: its arguments, or `jax.ShapeDtypeStruct`s.
        target: as for `lower_and_compile`.
        donate_argnums: arguments whose buffers the outputs may take.
        roles: categories of arguments whose path doesn't say it, by the path's beginning: `{"w": "parameters"}`.

    Raises:
        CompileError: XLA refused the program, or wrote nothing about its buffers.
        MissingDependencyError: ptxas or cuDNN couldn't be loaded.
    """
    done = lower_and_compile(function, args, target, donate_argnums=donate_argnums, keep_dump=True)
    return read_map(done.dump, done.names, roles) if done.dump and roles else done.memory_map


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
