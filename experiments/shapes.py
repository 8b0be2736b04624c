"""Does every configuration compile for a GPU that isn't here? `python -m experiments.shapes [--count N] [--seed S]`.

It draws configurations that the flags accept: presets with changed fields, odd sizes, dtypes, dropout, losses, optimizers,
policies, targets, and layers in a loop or unrolled. One in twenty is an encoder block that `jaxremat.plan` plans. Each
configuration is compiled for its GPU. If XLA refuses it, it is compiled for the CPU too. If XLA refuses that as well, the
configuration is at fault, and another one is drawn in its place. Otherwise the configuration is a failure.

A configuration is drawn from its number, so that `--numbers 17` compiles the same one again. Each process compiles ten
configurations. If a process dies, that is one failure, and a new process compiles the rest. Filed are the numbers of those that
compiled, and the rows of the others.
"""

import contextlib
import io
import itertools
import json
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from experiments.children import Child, in_processes, run_child
from experiments.common import RESULTS, flags_of, set_up, write
from jaxremat.chips.nvidia.gpu import bundled_names
from jaxremat.cli.command import parse_flags
from jaxremat.errors import UsageError
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import Request, check_run
from jaxremat.system.process import Deadline

Row = dict[str, Any]
#: The number of configurations per process. Starting a process takes as long as compiling one configuration.
A_PROCESS = 10
#: The time limit, in seconds per configuration: several times what one configuration takes.
SECONDS_EACH = 60
#: One in this many configurations is an encoder block.
BLOCKS = 20

TARGETS = bundled_names()
LENGTHS = (1, 2, 7, 31, 64, 77, 100, 128, 196, 197, 255, 500, 512, 1000, 1023, 1024, 1536, 2048)
POLICIES = (
    *("none", "everything", "nothing", "dots", "dots-no-batch", "dots+attention", "nothing+attention"),
    *("save:mlpwi_0", "save:query_proj,context", "offload:mlpwi_0", "save:out_proj+offload:mlpwi_0"),
    *(
        "every:2",
        "every:2+nothing",
        "every:sqrt+dots",
        "one-in:2",
        "1*nothing|1*save:mlpwi_0,out_proj",
        "1*save:mlpwi_0|1*nothing",
    ),
)
#: The values of the flags that are always given. There are few layers: unrolled layers take compile time and add no shapes.
ALWAYS: dict[str, tuple[Any, ...]] = {
    "model": ("tiny", "gpt2", "gpt2-large", "llama3.2-1b", "qwen3-0.6b", "mistral-7b", "gemma-2b"),
    "policy": POLICIES,
    "target": TARGETS,
    "batch": (1, 2, 3, 5, 8, 13, 16, 31, 32, 33, 50, 64),
    "seq-len": LENGTHS,
    "num-layers": (1, 2, 2, 3),
}
#: The values of the flags that are given half of the time. Otherwise the preset's value or the default is used.
HALF: dict[str, tuple[Any, ...]] = {
    "embed-dim": (24, 64, 72, 100, 197, 300, 384, 768, 1000, 1025, 2048),
    "mlp-dim": (20, 77, 256, 300, 1000, 1365, 3072, 4097),
    "vocab-size": (256, 257, 1000, 5003, 32000, 50257, 65537),
    "positions": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm", "rmsnorm-1p"),
    "mlp": ("gelu", "swiglu", "geglu"),
    "use-bias": (True, False),
    "qk-norm": (True, False),
    "tie-embeddings": (True, False),
    "dropout": (0, 0.1, 0.5),
    "dtype": ("bfloat16", "float16", "float32"),
    "param-dtype": ("bfloat16", "float32"),
    "scan-layers": (True, False),
    "attention": ("xla",),
    "loss": ("full", "chunked", "chunked:1", "chunked:100"),
    "optimizer": ("adamw", "adamw-bf16", "adamw-8bit", "lion", "sgd-momentum", "adafactor", "muon"),
    "accumulate": (1, 2, 3),
    "grad-dtype": ("bfloat16", "float16", "float32"),
    "clip-norm": (1.0,),
    "schedule": ("cosine", "linear"),
}


@dataclass(frozen=True)
class Flags:
    """Draws configurations and compiles each for a GPU that isn't here."""

    count: int = 200
    """How many that compile anywhere."""
    seed: int = 0
    """Of what is drawn."""
    jobs: int = 2
    """Processes at a time."""
    out: Path = RESULTS
    numbers: Annotated[tuple[int, ...], Parameter(metavar="N [N ...]")] = ()
    """Only these, in this process, a line of JSON each; nothing is filed."""


@dataclass(frozen=True)
class EncoderBlock:
    """A pre-norm block of attention and MLP, as in a ViT, and how it is planned.

    Attributes:
        batch: the first axis of its input `[batch, length, width]`.
        length: the second axis.
        width: the third axis.
        dtype: the dtype of the input and of the compute.
        target: the GPU that it is planned for.
        scan: whether the layers are in a loop.
    """

    batch: int
    length: int
    width: int
    dtype: str
    target: str
    scan: bool

    def __str__(self) -> str:
        layers = "in a loop" if self.scan else "unrolled"
        return f"encoder block [{self.batch}, {self.length}, {self.width}] {self.dtype}, {layers}, {self.target}"


def draw(seed: int, number: int) -> list[str] | EncoderBlock:
    """Configuration `number`: arguments for `jaxremat.run`, which may refuse them, or a block to plan."""
    chance = random.Random(f"{seed}/{number}")
    if number % BLOCKS == BLOCKS - 1:
        return EncoderBlock(
            batch=chance.choice((2, 31, 128)),
            length=chance.choice((50, 77, 196, 197, 256)),
            width=64 * chance.choice((1, 3, 5, 12)),
            dtype=chance.choice(("bfloat16", "float32")),
            target=chance.choice(TARGETS),
            scan=chance.random() < 0.7,
        )
    values = {name: chance.choice(some) for name, some in ALWAYS.items()}
    values |= {name: chance.choice(some) for name, some in HALF.items() if chance.random() < 0.5}
    values["max-seq-len"] = values["seq-len"] + chance.choice((0, 1, 100))
    if chance.random() < 0.5:
        values["num-kv-heads"] = chance.choice((1, 2, 3, 5))
        values["num-heads"] = values["num-kv-heads"] * chance.choice((1, 2, 4))
        values["head-dim"] = chance.choice((8, 16, 20, 40, 64, 72, 80, 96, 128, 256))
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def is_accepted(drawn: list[str] | EncoderBlock) -> bool:
    """Whether `jaxremat.run` accepts the arguments. A block has no arguments and is always accepted."""
    with contextlib.suppress(UsageError):
        return isinstance(drawn, EncoderBlock) or bool(check_run(parse_flags(RunFlags, drawn)))
    return False


def said(drawn: list[str] | EncoderBlock) -> str:
    """The text of a configuration, such as `--model tiny --policy dots --batch 8`."""
    return str(drawn) if isinstance(drawn, EncoderBlock) else shlex.join(drawn)


def compile_drawn(seed: int, number: int) -> Row:
    """The row of configuration `number`. Its `outcome` is ok, failed, or undrawn if the CPU's compile fails too."""
    drawn = draw(seed, number)
    came_to = _planned(drawn) if isinstance(drawn, EncoderBlock) else _compiled(check_run(parse_flags(RunFlags, drawn)))
    return {"number": number, "what": said(drawn), **came_to}


def _compiled(request: Request[RunFlags]) -> Row:
    from jaxremat.chips.target import load_target
    from jaxremat.session.answers import policy_of
    from jaxremat.session.session import Session

    def compiled(target: str) -> Row:
        session = Session.of(request, load_target(target)).with_trials(measures=False)
        (asked,) = session.request.policies
        row = session.trials.record(policy_of(asked), request.batches[0], requested=asked.text)
        keys = ("attention", "matmuls", "total_bytes", "lower_s", "compile_s", "error")
        return {"outcome": "ok" if row.error is None else "failed", **{key: getattr(row, key) for key in keys}}

    row = _tried(compiled, request.flags.target)
    on_cpu = _tried(compiled, "cpu") if row["outcome"] == "failed" else row
    return row if on_cpu["outcome"] == "ok" else {**row, "outcome": "undrawn", "on_cpu": on_cpu["error"]}


def _tried(compiled: Any, target: str | None) -> Row:
    try:
        return compiled(target)
    except Exception as error:
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}


def _planned(block: EncoderBlock) -> Row:
    import flax.linen as nn
    import jax

    import jaxremat

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = nn.LayerNorm(dtype=block.dtype)(x)
            q, k, v = (nn.DenseGeneral((block.width // 64, 64), dtype=block.dtype, name=name)(h) for name in "qkv")
            h = jax.nn.dot_product_attention(q, k, v)
            x = x + nn.DenseGeneral(block.width, axis=(-2, -1), dtype=block.dtype, name="out")(h)
            h = nn.Dense(4 * block.width, dtype=block.dtype)(nn.LayerNorm(dtype=block.dtype)(x))
            return x + nn.Dense(block.width, dtype=block.dtype)(nn.gelu(h))

    x = jax.ShapeDtypeStruct((block.batch, block.length, block.width), block.dtype)
    try:
        plan = jaxremat.plan(Encoder(), x, num_layers=2, budget="1TiB", target=block.target, scan=block.scan)
    except Exception as error:
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}
    return {"outcome": "ok", "error": None, "policy": str(plan.policy), "total_bytes": plan.cost.total_bytes}


def work(flags: Flags) -> int:
    """Compiles the configurations of --numbers in this process. It prints a JSON row for each as soon as it is finished."""
    set_up()
    for number in flags.numbers:
        with contextlib.redirect_stdout(io.StringIO()):
            row = compile_drawn(flags.seed, number)
        print(json.dumps(row), flush=True)
    return 0


def rows_of(flags: Flags, numbers: list[int]) -> Iterator[Row]:
    """The row of each of these configurations, compiled in processes of `A_PROCESS` configurations each."""
    deadline = Deadline(SECONDS_EACH * max(A_PROCESS, len(numbers)))

    def run(some: Sequence[int]) -> Child:
        argv = ["--seed", str(flags.seed), "--numbers", *map(str, some)]
        return run_child("experiments.shapes", argv, deadline, {})

    def died(number: int, error: str) -> Row:
        return {"number": number, "what": said(draw(flags.seed, number)), "outcome": "failed", "error": error}

    return in_processes(numbers, A_PROCESS, flags.jobs, deadline, run, died)


def main(argv: list[str] | None = None) -> int:
    """Compiles what is drawn, writes each row when it is finished, and prints the failures. Returns 1 if there is one."""
    flags = flags_of(Flags, argv, "experiments.shapes")
    if flags.numbers:
        return work(flags)
    import importlib.metadata

    path = flags.out / "shapes" / f"jax-{importlib.metadata.version('jax')}.json"
    rows: list[Row] = []
    unused = (number for number in itertools.count() if is_accepted(draw(flags.seed, number)))
    while missing := flags.count - sum(row["outcome"] != "undrawn" for row in rows):
        for row in rows_of(flags, list(itertools.islice(unused, missing))):
            rows.append(row)
            write(path, {"seed": flags.seed, **_filed(sorted(rows, key=lambda row: row["number"]))})
            print(f"{len(rows)}: {row['outcome']} {row['what']}", file=sys.stderr)
    drawn = [row for row in rows if row["outcome"] != "undrawn"]
    failed = [row for row in drawn if row["outcome"] == "failed"]
    for row in failed:
        print(f"{row['number']}: {row['what']}\n    {row['error']}")
    print(f"{len(drawn) - len(failed)} of {len(drawn)} compiled; written to {path}")
    return 1 if failed else 0


def _filed(rows: list[Row]) -> dict[str, Any]:
    """The numbers of the configurations that compiled, and the rows of those that failed or weren't drawn."""
    others = [
        {key: row[key] for key in ("number", "what", "outcome", "error", "on_cpu") if key in row}
        for row in rows
        if row["outcome"] != "ok"
    ]
    return {"compiled": [row["number"] for row in rows if row["outcome"] == "ok"], "others": others}


if __name__ == "__main__":
    sys.exit(main())
