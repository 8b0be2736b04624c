"""Lowers and compiles a function of known shapes for a target, into a `Compilation`.

No other module lowers or compiles. An example::

    done = lower_and_compile(step, (params, batch), "h100-80gb")
    done.memory.total_bytes  # 42949672960

XLA:GPU has a rematerialization pass of its own. The pass changes the program, without any message, if the program comes near
the size of the allocator's pool. The bytes are then no longer affine in the batch. So the pass is off unless `xla_remat` is set.
As a guard, `Compilation.num_xla_remat` counts the instructions that the pass duplicated.

XLA:GPU never fails for lack of memory. It compiles a program that needs a terabyte. XLA's compiler of TPUs rejects a program that
is too large for the device, and says what it needs. That is an answer: a `Compilation` that `is_too_large`, with these bytes and
without a program. With a lower limit of `limit_bytes` the answer comes after the scheduling, in a fraction of the time.
"""

import contextlib
import functools
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxremat.chips.chip import MOST_MEMORY
from jaxremat.chips.target import Target, in_pool, load_target
from jaxremat.errors import CompileError, JaxrematError
from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes
from jaxremat.mesh.sharding import batch_shardings, given_sharding, tracing_for, tracing_on
from jaxremat.policy.jax_private import core
from jaxremat.policy.names import WrittenName, written_names
from jaxremat.policy.offload import PASS, compiled_without_pass, flag_line, has_fault
from jaxremat.system.files import named_by, write_whole
from jaxremat.system.interrupt import at_end, in_xla, raise_if_interrupted
from jaxremat.units import gib
from jaxremat.xla import hlo
from jaxremat.xla.argument_names import name_variables
from jaxremat.xla.buffers import Category, MemoryMap
from jaxremat.xla.dump import OPTIONS, Dump, parse_assignment, read_dump
from jaxremat.xla.elsewhere import constraints_elsewhere, of_shardings, without_constraints
from jaxremat.xla.exchanges import Exchange, exchanges
from jaxremat.xla.host_slices import misread
from jaxremat.xla.memory import CompiledMemory, memory_of_rejected, read_memory
from jaxremat.xla.memory_map import read_map
from jaxremat.xla.options import as_flags, compiler_options, other_matmuls
from jaxremat.xla.refusal import explained, is_lasting, of_while_loop
from jaxremat.xla.results import XlaResult, kernels_path, result_key, store_result, stored_result, without_addresses
from jaxremat.xla.saved_kernels import saved_kernels
from jaxremat.xla.traced import Traced, offloads_in_loop, read_traced

#: A limit of `limit_bytes` that hardly any program is within.
LEAST_LIMIT = 2**20
#: XLA's result, the `jax.stages.Compiled`, None where the store had it, and the key of the result in the store, if it is there.
Result = tuple[XlaResult, Any, str | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Compilation:
    """A compiled program, the memory that it needs, and the time that compiling took.

    Attributes:
        memory: XLA's memory analysis.
        hlo_text: the scheduled, optimized HLO.
        lower_s: seconds for tracing and lowering.
        compile_s: seconds for compiling. If the result comes from the store, they are those of the compile that made it.
        compiled: the `jax.stages.Compiled` of a device that is here. None for a GPU that isn't, on which nothing can run.
        jaxpr: the traced program.
        dump: the files that XLA wrote about the program's buffers; None where they weren't read.
        mesh: the devices that the program runs on. The memory is that of one of them.
        disabled_pass: the pass of XLA that was disabled because the program offloads in a scan (`policy/offload.py`);
            None if it didn't.
        num_elsewhere: the number of sharding constraints on a device of this machine, which were dropped (`xla/elsewhere.py`).
        device_spaces: XLA's memory spaces that are the device's memory (`Chip.device_spaces`).
        is_too_large: whether XLA rejected the program as too large. There is no program then, and `memory` has the bytes that it
            needs and nothing else.
        roles: as of `read_map`, the categories of arguments whose path doesn't show them. None for none.
        key: the key of XLA's result in the store. None where it isn't stored.
    """

    memory: CompiledMemory
    hlo_text: str
    lower_s: float
    compile_s: float
    compiled: Any = None
    jaxpr: Any = None
    dump: Dump | None = None
    mesh: MeshAxes = ONE_DEVICE
    disabled_pass: str | None = None
    num_elsewhere: int = 0
    device_spaces: Collection[int] | None = None
    is_too_large: bool = False
    roles: Mapping[str, Category] | None = None
    key: str | None = None

    def with_stored_dump(self) -> "Compilation | None":
        """The same with XLA's dump from the store. None where that hasn't it."""
        stored = stored_result(self.key) if self.key else None
        return replace(self, dump=stored.dump) if stored and stored.dump else None

    @functools.cached_property
    def module(self) -> hlo.Module:
        """The scheduled, optimized HLO, parsed.

        Raises:
            CompileError: XLA rejected the program as too large.
        """
        self._check_program()
        return hlo.parse(self.hlo_text)

    @functools.cached_property
    def names(self) -> tuple[WrittenName, ...]:
        """The places where the program writes checkpoint names."""
        return written_names(self.jaxpr)

    @functools.cached_property
    def traced(self) -> Traced:
        """The rematerialization of the traced program."""
        return read_traced(self.jaxpr)

    @functools.cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """What the collectives of the program exchange. Empty for one device."""
        return exchanges(self.module, self.mesh, self.roles)

    @functools.cached_property
    def memory_map(self) -> MemoryMap:
        """The memory map: every buffer with its place, its live range and its category.

        The categories of arguments follow from their paths and `roles`.

        Raises:
            ValueError: the program was compiled without `keep_dump`.
            CompileError: XLA rejected the program as too large.
        """
        self._check_program()
        if self.dump is None:
            raise ValueError("compile with keep_dump=True")
        return self.map_with(self.dump, self.roles)

    def map_with(self, dump: Dump, roles: Mapping[str, Category] | None) -> MemoryMap:
        """The memory map by a dump of the program, with the `roles` of `read_map`."""
        return read_map(dump, self.names, roles, self.mesh, self.device_spaces, self.memory.generated_code_bytes)

    def _check_program(self) -> None:
        if self.is_too_large:
            raise CompileError(
                f"the step needs {gib(self.memory.total_bytes)} of device memory, and XLA made no program that is too large",
                next_step="a smaller batch, or a policy that saves less",
            )

    @property
    def num_xla_remat(self) -> int:
        """Number of instructions that XLA's own rematerialization pass duplicated."""
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
    shardings: tuple[tuple[Any, ...], Any] | None = None,
    limit_bytes: int | None = None,
) -> Compilation:
    """Compiles `function(*args)` for `target`.

    Args:
        function: a function that JAX can trace, or an already jitted function. A jitted function has its own donation.
        args: the arguments, or a `jax.ShapeDtypeStruct` for each array. Shapes and dtypes are read, and on a mesh each array's
            own `NamedSharding`.
        target: a `Target` or its name. None takes the attached GPU, or the default deviceless target if there is no GPU.
        donate_argnums: indices of the arguments whose memory the outputs may reuse.
        xla_remat: whether XLA's own rematerialization pass may run. It acts as in a job whose allocator has 0.75 of the GPU's
            memory, or the pool of `in_pool`.
        keep_dump: whether to read XLA's files about the program's buffers, for `Compilation.memory_map`.
        options: further XLA compiler options. They win over the options that this package sets.
        suggest: whether to try a rejected program once more with the other kind of matmul kernels (`xla/options.py`). If that
            compiles, the error names the flag.
        shardings: on a target of several devices, the shardings of the arguments and of the results. By default an argument
            with a `NamedSharding` of its own is sharded so, and any other is replicated. XLA then chooses the results' if an
            argument is sharded.
        limit_bytes: whole MiB that a program may take where XLA rejects larger ones (`CompilerOptions.memory_limit`). None takes
            what the device has.

    Raises:
        UsageError: the program says that arrays lie on devices that aren't the target's.
        CompileError: XLA or a library rejected the program. The message names the instruction and the reason. Or XLA compiled the
            program wrongly: a copy of an offloaded value in a scan takes another layer's (`xla/host_slices.py`).
        MissingDependencyError: a library of the chip's maker couldn't be loaded.
    """
    return begin_compile(
        when_requested,
        function,
        args,
        target,
        donate_argnums=donate_argnums,
        xla_remat=xla_remat,
        with_dump=keep_dump,
        options=options,
        suggest=suggest,
        shardings=shardings,
        limit_bytes=limit_bytes,
    )()


def when_requested(work: Callable[[], T]) -> Callable[[], T]:
    """A function that does the work where its result is requested, in the main thread."""

    def done() -> T:
        with in_xla():
            return work()

    return done


def begin_compile(
    begin: Callable[[Callable[[], Result]], Callable[[], Result]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    xla_remat: bool = False,
    with_dump: bool = False,
    options: dict[str, Any] | None = None,
    suggest: bool = True,
    shardings: tuple[tuple[Any, ...], Any] | None = None,
    limit_bytes: int | None = None,
) -> Callable[[], Compilation]:
    """Traces and lowers `function(*args)`, and begins to compile it.

    The returned function gives the `Compilation`.
    `begin` takes XLA's work, and returns a function that gives its result, as `Ahead.begin` does (`system/ahead.py`). The other
    arguments, and the errors of both functions, are those of `lower_and_compile`.
    """
    target = target if isinstance(target, Target) else load_target(target)
    target = in_pool(target) if xla_remat else target
    started = time.perf_counter()
    shapes = jax.eval_shape(lambda *args: args, *args)
    of_args, of_results = shardings or _own_shardings(target, args)
    structs = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type), shapes, of_args
    )
    jitted: Any = (
        function
        if hasattr(function, "trace")
        else jax.jit(function, donate_argnums=donate_argnums, out_shardings=of_results)
    )
    with _errors_in_words(target):
        with (
            in_xla(),
            tracing_for(target),
            tracing_on(target.mesh, is_own=target.mesh_shape.is_own),
            compiled_without_pass(),
        ):
            traced = jitted.trace(*structs)
            traced = getattr(traced, "traced", traced)  # that of nnx.jit has JAX's own
            name_variables(traced.jaxpr, args)
            stores = target.kind == "deviceless" and not (jitted is function and _has_own_options(jitted, structs))
            as_written, elsewhere = traced.jaxpr, constraints_elsewhere(traced.jaxpr, target)
            if elsewhere:
                traced = without_constraints(function, traced, elsewhere).trace(*structs)
        _check_sizes(traced.jaxpr, target)
        offloads = target.chip.is_gpu and offloads_in_loop(traced.jaxpr)
        misreads = offloads and has_fault()
        all_options = compiler_options(target, xla_remat=xla_remat, misreads=misreads) | (options or {})
        limit = target.chip.options.memory_limit
        if limit and limit_bytes is not None:
            all_options[limit] = limit_bytes // 2**20
        with in_xla():
            lowered = traced.lower(lowering_platforms=(target.chip.platform,))
    lower_s = time.perf_counter() - started
    compile_with = functools.partial(_from_xla, lowered, target, stores=stores, with_dump=with_dump)
    result_of = begin(functools.partial(compile_with, all_options))

    def tried_otherwise() -> str:
        return _tried_otherwise(lambda other: when_requested(lambda: compile_with(other))(), target, all_options)

    def done() -> Compilation:
        with _errors_in_words(target, tried_otherwise if suggest else None):
            result, compiled, key = result_of()
        compilation = Compilation(
            memory=result.memory,
            hlo_text=result.hlo_text,
            lower_s=lower_s,
            compile_s=result.compile_s,
            compiled=None if target.kind == "deviceless" else compiled,
            jaxpr=as_written,
            dump=result.dump if with_dump else None,
            mesh=target.mesh_shape,
            disabled_pass=PASS if misreads else None,
            num_elsewhere=len(elsewhere),
            device_spaces=target.chip.device_spaces,
            is_too_large=result.is_too_large,
            key=key,
        )
        if offloads and (wrong := misread(compilation.module)):
            raise CompileError(
                f"XLA compiled {len(wrong)} of the step's copies of offloaded values to the wrong layer, such as {wrong[0]}",
                allowed="offload: in unrolled layers, or in a scan that XLA compiles right",
                cause=f"XLA's pass {PASS}, which jax 0.11.1 mends (openxla/xla#46231)",
                next_step=f"{flag_line()}, or another policy",
            )
        return compilation

    return done


@contextlib.contextmanager
def _errors_in_words(target: Target, tried_otherwise: Callable[[], str] | None = None) -> Iterator[None]:
    """A context in which the errors of JAX and XLA become errors that say what to change.

    Args:
        target: what is compiled for.
        tried_otherwise: the next step for a rejected program, or empty. None where none is tried.
    """
    try:
        yield
    except JaxrematError:
        raise
    except ValueError as error:
        if refused := of_shardings(error, target) or of_while_loop(error):
            raise refused from error
        raise
    except (RuntimeError, NotImplementedError) as error:  # XLA's own errors, and JAX's about attention, are these
        raise_if_interrupted()
        refused = explained(error, target)
        if tried_otherwise and isinstance(refused, CompileError) and not refused.next_step:
            refused = refused.with_next_step(tried_otherwise())
        raise refused from error


def _has_own_options(jitted: Any, structs: tuple[Any, ...]) -> bool:
    """Whether a jitted function has compiler options of its own.

    Nothing public shows them, and JAX takes no inner function's.
    """
    try:
        jax.make_jaxpr(lambda *args: jitted(*args))(*structs)
    except Exception:  # a ValueError for such options; whatever else it is, the result is then not stored
        return True
    return False


def _from_xla(lowered: Any, target: Target, options: dict[str, Any], *, stores: bool, with_dump: bool) -> Result:
    """XLA's result for a program, from the store or compiled. It may run in any thread.

    Raises:
        RuntimeError: XLA rejected the program, and not as too large.
    """
    key = result_key(without_addresses(lowered.as_text(debug_info=True)), target, options) if stores else None
    if key and (stored := stored_result(key)):
        return stored, None, key
    started, written = time.perf_counter(), None
    limit_bytes = _limit_bytes(target, options)
    dumps = bool(key or with_dump or limit_bytes)
    with tempfile.TemporaryDirectory(dir=_own_folder()) if dumps else contextlib.nullcontext() as folder:
        dump = OPTIONS | {"xla_dump_to": folder} if folder else {}
        try:
            with _uncached(target), saved_kernels(target, _own_folder(), kernels_path(target) if key else None) as kernels:
                compiled = lowered.compile(compiler_options={**kernels, **dump, **options})
        except RuntimeError as error:
            raise_if_interrupted()
            if (needed_bytes := target.chip.needed_bytes(str(error))) is not None:
                # XLA rounds it, and it is above the limit.
                memory = memory_of_rejected(max(needed_bytes, 1 + (limit_bytes or 0)))
                result = XlaResult(time.perf_counter() - started, memory, "", None, is_too_large=True)
                if key:
                    store_result(key, result)
                return result, None, key
            if key and is_lasting(error, target):
                store_result(key, str(error))
            raise
        compile_s = time.perf_counter() - started
        if folder:
            written = read_dump(Path(folder))
    result = XlaResult(compile_s, read_memory(compiled), compiled.as_text(), written)
    if limit_bytes is not None:
        needed_bytes = _needed(result, limit_bytes, target.chip.device_spaces or ())
        result = replace(result, memory=replace(result.memory, needed_bytes=needed_bytes))
    if not key:
        return result, compiled, None
    store_result(key, result)
    return result, None, key


def _limit_bytes(target: Target, options: Mapping[str, Any]) -> int | None:
    """The bytes that XLA lets a program take on `target`.

    None where it compiles programs of any size.
    """
    name = target.chip.options.memory_limit
    if name is None:
        return None
    return options[name] * 2**20 if name in options else target.memory_bytes


def _needed(result: XlaResult, limit_bytes: int, device_spaces: Collection[int]) -> int:
    """The bytes that XLA compares with its limit for a program that it has compiled.

    They are its buffers on the device, and its code.

    XLA says them of a program that it rejects, and then they are the same. The program is within the limit, whatever is rounded.
    """
    assert result.dump is not None
    buffers = (one for one in parse_assignment(result.dump.assignment) if one.color in device_spaces)
    num_bytes = sum(one.num_bytes for one in buffers if not one.is_thread_local)
    return min(num_bytes + result.memory.generated_code_bytes, limit_bytes)


@dataclass
class _CacheTime:
    """JAX's setting of the least seconds of a compile whose executable its cache takes.

    Attributes:
        num_compiles: how many compiles leave the cache out now, in all threads.
        former_s: the seconds before the first of them.
        lock: held while one begins or ends.
    """

    num_compiles: int = 0
    former_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, further: int) -> None:
        """Begins or ends so many compiles."""
        name = "jax_persistent_cache_min_compile_time_secs"
        with self.lock:
            if not self.num_compiles:
                self.former_s = jax.config.values[name]
            self.num_compiles += further
            jax.config.update(name, math.inf if self.num_compiles else self.former_s)


_cache_time = _CacheTime()


@contextlib.contextmanager
def _uncached(target: Target) -> Iterator[None]:
    """A context in which JAX's cache takes no executable for a GPU that isn't here.

    JAX couldn't read it back. The cache isn't turned off: JAX looks once in a process whether it is on.
    """
    if target.kind != "deviceless":
        yield
        return
    _cache_time.count(1)
    try:
        yield
    finally:
        _cache_time.count(-1)


def _check_sizes(jaxpr: Any, target: Target) -> None:
    """Checks that a traced program has no value that is too large for every device.

    XLA ends the process where its sizes overflow.

    Raises:
        CompileError: it has one.
    """
    largest = max(_values(getattr(jaxpr, "jaxpr", jaxpr)), key=_num_bytes, default=None)
    if largest is not None and (num_bytes := _num_bytes(largest)) > MOST_MEMORY * target.mesh_shape.num_devices:
        raise CompileError(
            f"the step for {target.name} has a value of {gib(num_bytes)}: {largest.dtype}{list(largest.shape)}",
            cause="no device holds so much",
            next_step="a smaller batch, or shorter sequences",
        )


def _values(jaxpr: Any) -> Iterator[Any]:
    """The shapes of the arguments and of all results in a jaxpr, also in those inside it."""
    yield from (var.aval for var in jaxpr.invars)
    for eqn in jaxpr.eqns:
        yield from (var.aval for var in eqn.outvars)
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _values(inner)


def _num_bytes(aval: Any) -> int:
    """Bytes of a value. 0 for what isn't an array."""
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") and hasattr(aval, "dtype") else 0


def memory_map(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str | None = None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    roles: Mapping[str, Category] | None = None,
) -> MemoryMap:
    """The memory map of `function(*args)` for `target`: buffers, places, ranges, categories.

    `jaxremat.attribution(map)` gives the bytes of each category at the peak. XLA doesn't know the categories. A table of
    rules (`jaxremat/xla/categories.py`) derives them from the arguments' paths (`state.params['w']`), from JAX's scopes, and
    from where in the program a value is made and last read.

    Args:
        function: a train step, or any other function. An already jitted function has its own donation.
        args: the arguments, or a `jax.ShapeDtypeStruct` for each array.
        target: as for `lower_and_compile`.
        donate_argnums: indices of the arguments whose memory the outputs may reuse.
        roles: categories of arguments whose path doesn't show the category. A key is the beginning of a path:
            `{"w": "parameters"}`.

    Raises:
        CompileError: XLA rejected the program, or wrote no files about its buffers.
        MissingDependencyError: a library of the chip's maker couldn't be loaded.
    """
    done = lower_and_compile(function, args, target, donate_argnums=donate_argnums, keep_dump=True)
    return done.map_with(done.dump, roles) if done.dump and roles else done.memory_map


def _own_shardings(target: Target, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The arguments' own shardings on the target's mesh, and that of the results.

    None lets XLA choose.
    """
    mesh = target.mesh
    if mesh is None or all(given_sharding(mesh, leaf) is None for leaf in jax.tree.leaves(args)):
        return jax.tree.map(lambda _: target.sharding, args), target.sharding
    return batch_shardings(mesh, args, [None] * len(jax.tree.leaves(args))), None


@functools.cache
def _own_folder() -> Path:
    """The folder of what XLA writes for this process: dumps and kernels. Deleted when it ends."""
    folder = tempfile.mkdtemp(prefix="jaxremat-")
    at_end(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    return Path(folder)


def _tried_otherwise(compile_with: Callable[[dict[str, Any]], Any], target: Target, options: dict[str, Any]) -> str:
    """The next step for the user: the flag with which the rejected program compiles, or empty.

    The program is compiled with the flag first, so the returned text names only a flag that works.
    """
    if not (other := other_matmuls(target)):
        return ""
    try:
        compile_with(options | other)
    except RuntimeError:
        return ""
    return f"add {as_flags(other)} to XLA_FLAGS, with which it was tried and compiles"


def dump_target(target: Target, path: Path) -> None:
    """Writes XLA's text description of `target`'s GPU to `path`.

    XLA dumps this text beside every compiled module.

    Raises:
        CompileError: XLA dumped no target description.
        JaxrematError: the file can't be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        lower_and_compile(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), "float32"),), target, options={"xla_dump_to": folder})
        found = list(Path(folder).glob("*gpu_target_config.pbtxt"))
        if not found:
            raise CompileError("XLA dumped no target description", cause="this version of XLA doesn't write one")
        text = found[0].read_text()
    with named_by("--dump-target", path, "give another file"):
        write_whole(path, text)
