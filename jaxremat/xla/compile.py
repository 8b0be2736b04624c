"""The only place that lowers and compiles: a function, its arguments' shapes and a target in, a `Compilation` out.

XLA:GPU has a rematerialization pass of its own. Near its idea of the device's limit it changes the program without a word,
and bytes stop being affine in the batch; it is off unless asked for (`xla_remat`), and `num_xla_remat` counts its traces in
the program as a guard. XLA never fails for memory: a program of a terabyte compiles.
"""

import atexit
import contextlib
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxremat.errors import CompileError, JaxrematError
from jaxremat.interrupt import raise_if_interrupted
from jaxremat.policy.names import WrittenName, written_names
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Category, MemoryMap
from jaxremat.xla.dump import OPTIONS, Dump, read_dump
from jaxremat.xla.memory import CompiledMemory, read_memory
from jaxremat.xla.memory_map import read_map
from jaxremat.xla.options import as_flags, compiler_options, other_matmuls
from jaxremat.xla.refusal import explained
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
    suggest: bool = True,
) -> Compilation:
    """Compiles `function(*args)` for `target`.

    Args:
        function: a JAX-traceable function, or one already jitted (its own donation is kept then).
        args: its arguments, or a `jax.ShapeDtypeStruct` for each array: only shapes and dtypes are read.
        target: a `Target`, its name, or None for the attached GPU or else the default deviceless one.
        donate_argnums: arguments whose buffers the outputs may take.
        xla_remat: lets XLA's own rematerialization pass run.
        keep_dump: keeps what XLA writes about the program's buffers, for `Compilation.memory_map`.
        options: further XLA compiler options, which win over ours.
        suggest: of a program that XLA refuses, tries once whether it compiles with its matmuls run the other way
            (`xla/options.py`), so that the error may say so.

    Raises:
        CompileError: XLA or cuDNN refused the program; the message says which instruction, and why.
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
    our_options = compiler_options(target, xla_remat=xla_remat, kernel_cache=_kernel_folder() / "kernels")
    all_options = our_options | (options or {})
    written: Dump | None = None
    lowered: Any = None
    try:
        traced = jitted.trace(*structs)
        lowered = traced.lower(lowering_platforms=(target.platform,))
        lowered_at = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="jaxremat-") if keep_dump else contextlib.nullcontext() as folder:
            dumping = OPTIONS | {"xla_dump_to": folder} if folder else {}
            compiled = lowered.compile(compiler_options=dumping | all_options)
            compiled_at = time.perf_counter()
            if folder:
                written = read_dump(Path(folder))
    except JaxrematError:
        raise
    except (RuntimeError, NotImplementedError) as error:  # XLA's own errors, and JAX's about cuDNN, are RuntimeErrors
        raise_if_interrupted()
        refused = explained(error, target)
        if suggest and lowered is not None and isinstance(refused, CompileError):
            refused = refused.with_next_step(_tried_otherwise(lowered, target, all_options))
        raise refused from error
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
        args: its arguments, or a `jax.ShapeDtypeStruct` for each array.
        target: as for `lower_and_compile`.
        donate_argnums: arguments whose buffers the outputs may take.
        roles: categories of arguments whose path doesn't say it, by the path's beginning: `{"w": "parameters"}`.

    Raises:
        CompileError: XLA refused the program, or wrote nothing about its buffers.
        MissingDependencyError: ptxas or cuDNN couldn't be loaded.
    """
    done = lower_and_compile(function, args, target, donate_argnums=donate_argnums, keep_dump=True)
    return read_map(done.dump, done.names, roles) if done.dump and roles else done.memory_map


@functools.cache
def _kernel_folder() -> Path:
    """The folder in which XLA keeps the kernels that it compiled in this process; it goes with the process.

    A kernel that another program has too isn't compiled again: most of them, under another policy at the same batch.
    """
    folder = tempfile.mkdtemp(prefix="jaxremat-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _tried_otherwise(lowered: Any, target: Target, options: dict[str, Any]) -> str:
    """A next step that was tried: the flag with which XLA compiles the refused program; empty where there is none."""
    if not (other := other_matmuls(target)):
        return ""
    try:
        lowered.compile(compiler_options=options | other)
    except RuntimeError:
        return ""
    return f"add {as_flags(other)} to XLA_FLAGS, with which it was tried and compiles"


def dump_target(target: Target, path: Path) -> None:
    """Writes XLA's text description of `target`'s GPU to `path`, as XLA itself dumps it beside a compiled module."""
    with tempfile.TemporaryDirectory() as folder:
        lower_and_compile(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), "float32"),), target, options={"xla_dump_to": folder})
        found = list(Path(folder).glob("*gpu_target_config.pbtxt"))
        if not found:
            raise CompileError("XLA dumped no target description", cause="this version of XLA doesn't write one")
        text = found[0].read_text()
    path.write_text(text)
