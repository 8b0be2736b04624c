"""Measures matmuls, fused attention and host transfers on this machine's GPU: `python -m experiments.kernel_tables`.

Each operation is a program of its own. JAX's profiler gives the time of its kernels, without the time of the launch. The
result is a table of the device, from which `jaxremat/chips` interpolates the times of kernels of other shapes.

* matmul: the product of random matrices of types that training has, chosen by cuBLAS's heuristics and XLA's autotuner.
* attention: `jax.nn.dot_product_attention` with cuDNN, forward and backward.
* scatter: the gradient of an embedding, for tokens that are as frequent as those of text, for equally frequent ones, and for one.
* host: copies of 256 MiB between the device and pinned host memory, timed as a whole.

Nothing else runs on the device. So its clock may be higher than in a training step. On an H200 with 16 cores it took 1.7 minutes,
most of them to compile.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from experiments.common import RESULTS, Row, flags_of, run_parts
from jaxremat.cli.command import run_command
from jaxremat.system.process import Deadline

Part = Literal["matmul", "attention", "scatter", "host"]
SHARES: dict[Part, float] = {"matmul": 0.5, "attention": 0.35, "scatter": 0.1, "host": 0.05}
#: Tokens, inputs and outputs of the matrices of a forward pass. Each has two more products in the backward pass.
WEIGHTS = (
    *((tokens, width, out) for tokens in (4096, 16384) for width, out in ((768, 768), (768, 3072), (3072, 768))),
    *((tokens, width, out) for tokens in (2048, 8192) for width, out in ((2048, 2048), (2048, 8192), (8192, 2048))),
    *(
        (tokens, width, out)
        for tokens in (8192,)
        for width, out in ((4096, 4096), (4096, 14336), (8192, 28672), (8192, 1024))
    ),
    (4096, 768, 50304),
    (2048, 2048, 128256),
)
SQUARES = (256, 512, 1024, 2048, 4096, 8192, 16384)
#: Length, query heads, key heads, head size and window of attention. The batch makes 16,384 tokens.
ATTENTIONS = (
    *((length, 32, 8, 128, 0) for length in (1024, 2048, 4096, 8192, 16384)),
    *((length, 12, 12, 64, 0) for length in (512, 1024, 2048, 4096)),
    (2048, 32, 8, 64, 0),
    (4096, 32, 32, 128, 0),
    (8192, 32, 8, 128, 1024),
)
#: Tokens, width and vocabulary of embeddings.
EMBEDDINGS = (
    *((tokens, 768, 50257) for tokens in (4096, 16384, 65536)),
    *((tokens, 2048, 128256) for tokens in (8192, 32768)),
    (8192, 4096, 128256),
)
RUNS = 6


@dataclass(frozen=True)
class Flags:
    """Times of single kernels on an attached GPU, as tables."""

    parts: Annotated[tuple[Part, ...], Parameter(metavar="PART")] = get_args(Part)
    minutes: float = 2.0
    """For all the parts together; what isn't reached is said."""
    tiny: bool = False
    """A few small operations on this machine's CPU: whether everything runs."""
    out: Path = RESULTS
    target: Annotated[str, Parameter(parse=False)] = ""  # the folder's name, found out


@dataclass(frozen=True)
class Operation:
    """One program to time.

    Attributes:
        row: what it is, as columns.
        function: the computation.
        shapes: the shapes of its arguments. They are filled with random numbers.
        dtype: the type of its arguments.
        flops: the FLOPs that count.
    """

    row: Row
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flops: int


def matmuls(tiny: bool) -> Iterator[Operation]:
    """The products of `WEIGHTS`, forward and backward, and of square matrices."""
    import jax.numpy as jnp

    shapes = [(size, size, size, "square") for size in SQUARES]
    for tokens, width, out in WEIGHTS:
        shapes += [(tokens, width, out, "forward"), (tokens, out, width, "input"), (width, tokens, out, "weight")]
    for dtype in ("bfloat16", "float32"):
        for m, k, n, kind in shapes[: 2 if tiny else None]:
            if dtype == "float32" and k * m * n > 8192**3:
                continue
            # The layouts of a layer's products: x @ w, dy @ w.T and x.T @ dy.
            equation = {"input": "mk,nk->mn", "weight": "km,kn->mn"}.get(kind, "mk,kn->mn")
            left, right = ((k, m) if kind == "weight" else (m, k)), ((n, k) if kind == "input" else (k, n))
            row = {"kind": kind, "dtype": dtype, "m": m, "k": k, "n": n}
            yield Operation(
                row, lambda a, b, equation=equation: jnp.einsum(equation, a, b), (left, right), dtype, 2 * m * k * n
            )


def attentions(tiny: bool) -> Iterator[Operation]:
    """Causal attention of `ATTENTIONS`, forward, and forward with backward."""
    import jax

    for length, heads, kv_heads, head_size, window in ((64, 2, 1, 16, 0),) if tiny else ATTENTIONS:
        batch = max(1, 16384 // length)

        def forward(q: Any, k: Any, v: Any, window: int = window) -> Any:
            more: Any = {"local_window_size": (window - 1, 0)} if window else {}
            implementation: Any = None if tiny else "cudnn"
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation, **more)

        def both(q: Any, k: Any, v: Any, forward: Any = forward) -> Any:
            out, pull = jax.vjp(forward, q, k, v)
            return pull(out)

        shapes = ((batch, length, heads, head_size), *[(batch, length, kv_heads, head_size)] * 2)
        flops = 2 * batch * heads * length * length * head_size  # half of the square
        row = {"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "head_size": head_size}
        row |= {"window": window or None}
        yield Operation({"direction": "forward", **row}, forward, shapes, "bfloat16", flops)
        yield Operation({"direction": "both", **row}, both, shapes, "bfloat16", flops * 7 // 2)


def scatters(tiny: bool) -> Iterator[Operation]:
    """The gradients of the embeddings of `EMBEDDINGS`. `most` is how many tokens are the most frequent one."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxremat.model.data import spread_tokens

    for dtype in ("bfloat16", "float32"):
        for num_tokens, width, vocabulary in ((64, 16, 100),) if tiny else EMBEDDINGS:
            of_kind = {
                "as in text": next(spread_tokens(vocabulary, 1, num_tokens - 1, seed=0))[0],
                "equally frequent": np.random.default_rng(0).integers(0, vocabulary, num_tokens),
                "one": np.zeros(num_tokens, int),
            }
            for kind, tokens in of_kind.items():

                def gradient(rows: Any, tokens: Any = tokens, shape: Any = (vocabulary, width)) -> Any:
                    table = jnp.zeros(shape, rows.dtype)
                    return jax.vjp(lambda table: jnp.take(table, tokens, axis=0), table)[1](rows)[0]

                row = {"tokens": kind, "dtype": dtype, "num_tokens": num_tokens, "width": width, "vocabulary": vocabulary}
                row |= {"most": int(np.bincount(tokens).max())}
                yield Operation(row, gradient, ((num_tokens, width),), dtype, 0)


OPERATIONS = {"matmul": matmuls, "attention": attentions, "scatter": scatters}


def measure(operations: list[Operation], deadline: Deadline, tiny: bool) -> Iterator[Row]:
    """A row for each operation: the median, least and most seconds of its kernels over `RUNS` runs.

    The programs are compiled at the same time, and then run one after the other.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    options = {} if tiny else {"xla_gpu_enable_command_buffer": "", "xla_gpu_enable_triton_gemm": False}

    def compiled(number: int) -> Any:
        operation = operations[number]
        if deadline.left_s() < 0.4 * deadline.limit_s:
            return None
        named = operation.function
        named.__name__ = f"op{number}"
        args = [jax.ShapeDtypeStruct(shape, operation.dtype) for shape in operation.shapes]
        try:
            return jax.jit(named).lower(*args).compile(compiler_options=options)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"

    @cache
    def filled(shape: tuple[int, ...], dtype: str) -> Any:
        return jnp.asarray(np.resize(block, shape), dtype)

    errors: dict[int, str] = {}
    call_s: dict[int, float] = {}
    profiling = jax.profiler.ProfileOptions()
    profiling.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxremat-") as folder, ThreadPoolExecutor(1 if tiny else 8) as pool:
        programs = list(pool.map(compiled, range(len(operations))))
        jax.profiler.start_trace(folder, profiler_options=profiling)
        for number, (operation, program) in enumerate(zip(operations, programs, strict=True)):
            if program is None or isinstance(program, str) or deadline.left_s() < 3:
                errors[number] = program if isinstance(program, str) else "not reached in time"
                continue
            args = [filled(shape, operation.dtype) for shape in operation.shapes]
            calls = []
            for _ in range(RUNS):
                started = time.perf_counter()
                jax.block_until_ready(program(*args))
                calls.append(time.perf_counter() - started)
            call_s[number] = statistics.median(calls[1:])
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        seconds = kernel_seconds(jax.profiler.ProfileData.from_file(str(path)))
    for number, operation in enumerate(operations):
        runs = seconds.get(f"op{number}", [])[1:]
        median_s = statistics.median(runs) if runs else None
        yield {
            **operation.row,
            "kernel_s": median_s,
            "min_s": min(runs, default=None),
            "max_s": max(runs, default=None),
            "call_s": call_s.get(number),
            "flops_per_s": operation.flops / median_s if median_s and operation.flops else None,
            "error": None if runs else errors.get(number, "the profiler showed no kernel"),
        }


def kernel_seconds(trace: Any) -> dict[str, list[float]]:
    """By program, the seconds of the kernels of each of its `RUNS` runs, from a `jax.profiler.ProfileData`."""
    events: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                module = str(stats.get("hlo_module", ""))
                if "hlo_op" in stats and module.startswith("jit_op"):
                    events[module.removeprefix("jit_")][str(stats["hlo_op"])].append((event.start_ns, event.duration_ns))
    found = {}
    for module, by_op in events.items():
        runs = [0.0] * RUNS
        for of_op in by_op.values():
            per_run = len(of_op) // RUNS
            for n, (_, duration) in enumerate(sorted(of_op)[: per_run * RUNS]):
                runs[n // per_run] += duration * 1e-9
        found[module] = runs
    return found


def measure_host(deadline: Deadline, tiny: bool) -> Iterator[Row]:
    """Copies between the device and pinned host memory, each timed as a whole."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    num_bytes = 2**20 if tiny else 2**28
    on_device = jax.device_put(jnp.ones(num_bytes // 4, jnp.float32), here)
    on_host = jax.block_until_ready(jax.device_put(on_device, there))
    for direction, source, target in (("to host", on_device, there), ("to device", on_host, here)):
        seconds = []
        for _ in range(RUNS):
            started = time.perf_counter()
            jax.block_until_ready(jax.device_put(source, target))
            seconds.append(time.perf_counter() - started)
        median_s = statistics.median(seconds[1:])
        yield {"direction": direction, "bytes": num_bytes, "copy_s": median_s, "bytes_per_s": num_bytes / median_s}


def show(column: str) -> tuple[str, Callable[[Any], str]]:
    """A column's title, and the function that makes a cell's text."""
    if column in ("kernel_s", "copy_s"):
        return "ms", lambda value: f"{1e3 * value:,.3f}"
    if column == "flops_per_s":
        return "TFLOP/s", lambda value: f"{value / 1e12:,.0f}"
    if column == "bytes_per_s":
        return "GB/s", lambda value: f"{value / 1e9:,.1f}"
    return {"kv_heads": "kv", "head_size": "size"}.get(column, column), str


_ATTENTION = ("direction", "batch", "length", "heads", "kv_heads", "head_size", "window", "kernel_s", "flops_per_s")
#: By part, how many of its first columns are words, and its columns.
COLUMNS: dict[Part, tuple[int, tuple[str, ...]]] = {
    "matmul": (2, ("kind", "dtype", "m", "k", "n", "kernel_s", "flops_per_s")),
    "attention": (1, _ATTENTION),
    "scatter": (2, ("tokens", "dtype", "num_tokens", "width", "vocabulary", "most", "kernel_s")),
    "host": (1, ("direction", "bytes", "copy_s", "bytes_per_s")),
}


def main(argv: list[str] | None = None) -> int:
    """Measures the parts that the flags ask for, and files each. Returns the exit code."""
    flags = flags_of(Flags, argv, "experiments.kernel_tables")
    return run_command(lambda: tables(flags), name="kernel_tables", saved=f"the parts so far are in {flags.out}")


def tables(flags: Flags) -> int:
    """Measures and files the parts of `flags`."""
    import jax

    device = jax.devices()[0].device_kind.replace(" ", "-").lower()
    shares = sum(SHARES[part] for part in flags.parts)

    def rows_of(part: Any) -> Iterator[Row]:
        deadline = Deadline(60 * flags.minutes * SHARES[part] / shares)
        if part == "host":
            return measure_host(deadline, flags.tiny)
        return measure(list(OPERATIONS[part](flags.tiny)), deadline, flags.tiny)

    measures = {part: ((lambda _, part=part: rows_of(part)), *COLUMNS[part]) for part in flags.parts}
    one = Flags(parts=flags.parts, minutes=flags.minutes, tiny=flags.tiny, out=flags.out, target=device)
    return run_parts("kernel_tables", one, measures, show)


if __name__ == "__main__":
    sys.exit(main())
