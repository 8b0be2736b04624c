"""What the pages take from the experiments on single steps and searches."""

import math
from collections.abc import Iterator
from typing import Any

from experiments.common import Row, only, where
from experiments.mesh import Flags as MeshFlags
from experiments.numbers.held import Part, Table, Words
from experiments.numbers.rows import EXPERIMENTS, both, by, either, gib, ms, rate, span
from jaxremat.report.table import gib_number

LEVERS = "docs/levers.md"
SEVERAL_GPUS = "docs/several_gpus.md"


def search_cost(result: Any) -> Iterator[Part]:
    """Of `experiments.search_cost`."""
    ours, bisection = ([row[side]["num_compiles"] for row in result["search"]["policies"]] for side in ("ours", "bisection"))
    shallow, deep = result["depth"]["layers"]
    first_s, help_s = (result[part]["median_s"] for part in ("first-row", "help"))
    yield Words(EXPERIMENTS, f"{max(ours)}, for each of {len(ours)} policies (gpt2)")
    yield Words(EXPERIMENTS, f"{result['search']['times_faster']:.1f} x faster; {span(bisection)} compiles there")
    yield Words(EXPERIMENTS, f"{deep} layers {result['depth']['ratio']:.2f} x the time of {shallow}")
    yield Words(EXPERIMENTS, f"{first_s:.1f} s on {result['machine']['cores']} cores; `--help` {help_s:.2f} s")


def levers(result: Any) -> Iterator[Part]:
    """Of `experiments.levers`."""
    yield _largest_batches(result["loss"])
    yield _optimizers(result["optimizers"])
    yield _formats(result["dtypes"])
    rows = where(result["loss"], model="llama3.2-1b")
    full, chunked = (only(rows, loss=loss, policy="nothing")["largest_batch"] for loss in ("full", "chunked"))
    best = max(row["largest_batch"] for row in where(rows, loss="full"))
    yield Words(EXPERIMENTS, f"from {full} to {chunked} under `nothing`; the best policy with the full loss has {best}")
    sizes, numbers = [], set()
    for model, (one, *others) in by(result["microbatches"], "model").items():
        buffers = dict.fromkeys(gib_number(row["total_bytes"] - one["total_bytes"]) for row in others)
        sizes.append(f"{' or '.join(buffers)} GiB for {model}")
        numbers |= {str(row["accumulate"]) for row in others}
    yield Words(EXPERIMENTS, f"{', '.join(sizes)}, whether {' or '.join(sorted(numbers))}")
    (gpt2, llama), two = (_by_gradients(result["dtypes"], accumulate) for accumulate in (1, 2))
    yield Words(LEVERS, f"in that table {gpt2} for gpt2, and {llama} for llama3.2-1b")
    yield Words(LEVERS, f"it is {both(two)}")


def _largest_batches(rows: list[Row]) -> Table:
    """The largest batch of each policy, with both losses."""
    lines = [["largest batch", *(f"`{policy}`" for policy in by(rows, "policy"))]]
    for (model, loss), some in by(rows, "model", "loss").items():
        params = some[0]["param_dtype"]
        what = f"{model}{'' if params == 'float32' else f' in {params}'}"
        gpu = some[0]["target"].partition("-")[0].upper()
        lines.append([f"{what} on an {gpu}, `--loss {loss}`", *(row["largest_batch"] for row in some)])
    return Table(LEVERS, "largest batches", lines)


def _optimizers(rows: list[Row]) -> Table:
    """The bytes of the state of each optimizer, and of the step."""
    titles = ["optimizer"]
    for model in by(rows, "model"):
        titles += [f"bytes a parameter, {model}", "total"]
    lines = [titles]
    for optimizer, some in by(rows, "optimizer").items():
        cells = [(f"{row['state_bytes_per_param']:.3f}", gib_number(row["total_bytes"])) for row in some]
        lines.append([optimizer, *(cell for pair in cells for cell in pair)])
    return Table(EXPERIMENTS, "optimizers", lines)


def _formats(rows: list[Row]) -> Table:
    """The bytes of the state and of the temporaries with each combination of number formats."""
    lines = [["parameters", "compute", "gradients", "microbatches", *by(rows, "model")]]
    for case, some in by(rows, "params", "compute", "gradients", "accumulate").items():
        lines.append([*case, *(f"{gib_number(row['state_bytes'])} + {gib_number(row['temp_bytes'])}" for row in some)])
    return Table(EXPERIMENTS, "number formats", lines)


def _by_gradients(rows: list[Row], accumulate: int) -> list[str]:
    """How many more bytes a step takes for gradients in bfloat16, model by model."""
    some = by(where(rows, params="float32", compute="bfloat16", accumulate=accumulate), "model").values()
    more = [half["total_bytes"] - whole["total_bytes"] for whole, half in some]
    return [f"{gib(abs(size))} GiB {'more' if size > 0 else 'less'}" for size in more]


def matmuls(result: Any) -> Iterator[Part]:
    """Of `experiments.matmuls`."""
    tiny, others = ([row for row in result["matmuls"] if (row["model"] == "tiny") == is_tiny] for is_tiny in (True, False))
    more, slower = ([row[f"more_{what}_percent"] for row in others] for what in ("bytes", "time"))
    workspace = max(row["workspace_bytes"] for row in others) >> 20
    yield Words(
        EXPERIMENTS,
        f"batch {others[0]['batch']}, chunked loss ... the {len(by(others, 'model'))} published presets: cuBLAS takes "
        f"{-min(more):.2f} % fewer to {max(more):.1f} % more bytes, its workspace of {workspace} MiB included ... predicted "
        f"{-min(slower):.1f} % faster to {max(slower):.1f} % slower (jax {result['versions']['jax']})",
    )
    times = sorted(row["cublas_bytes"] / row["triton_bytes"] for row in tiny)
    small = span(row["triton_bytes"] / 2**20 for row in tiny)
    yield Words(EXPERIMENTS, f"take {small} MiB, the workspace is most of it: {both([f'{one:.1f}' for one in times])} times")


def mesh(result: Any) -> Iterator[Part]:
    """Of `experiments.mesh`."""
    rows = result["steps"]
    default, hiding, toolbox = (
        {(row["mesh"], row["policy"]): row for row in where(rows, flags=flags)}
        for flags in ("default", "latency-hiding", "jax-toolbox")
    )
    yield _meshes(default)
    flags, meshes = MeshFlags(), ("fsdp=8", "fsdp=16", "data=2,fsdp=64")
    sizes = {where: gib_number(row["total_bytes"]) for where, row in default.items()}
    eight, sixteen, _ = ([sizes[mesh, policy] for policy in ("nothing", "dots+attention", "none")] for mesh in meshes)
    yield Words(
        EXPERIMENTS,
        f"{flags.batch} sequences of {flags.seq_len} a GPU ... `fsdp=8`: {eight[0]} GiB under `nothing`, {eight[1]} under "
        f"`dots+attention`, {eight[2]} under `none` ... {sixteen[0]}, {both(sixteen[1:])} on `fsdp=16`. 70 billion parameters on "
        f"`data=2,fsdp=64`: {sizes['data=2,fsdp=64', 'nothing']} GiB under `nothing`",
    )
    seconds = [row["compile_s"] for row in rows]
    yield Words(
        EXPERIMENTS,
        f"{len(by(rows, 'policy'))} policies, each with {len(by(rows, 'flags'))} presets of XLA's flags, on "
        f"{len(by(rows, 'mesh'))} meshes: {len(rows)} steps compile in {sum(seconds):.0f} s ... over {math.ceil(max(seconds))} s",
    )
    waits, fewer = ([_waits(some[mesh, "nothing"]) for mesh in meshes] for some in (default, toolbox))
    more = [gib(toolbox[mesh, "nothing"]["total_bytes"] - default[mesh, "nothing"]["total_bytes"]) for mesh in meshes]
    kept = ("total_bytes", "step_s", "collective_exposed_s")
    alike = all(hiding[where][key] == row[key] for where, row in default.items() for key in kept)
    yield Words(
        EXPERIMENTS,
        f"waits {waits[0].replace(' of', ' ms of')} for collectives on 8 GPUs, {waits[1]} on 16, {waits[2]} on the 128 ... flags "
        f"{fewer[0]} ms on 8, for {more[0]} GiB more, and {fewer[2]} on the 128, for {more[2]} more ... scheduler alone changes "
        f"{either(alike, 'nothing', 'something')}",
    )
    yield Words(
        SEVERAL_GPUS,
        f"waits {waits[0].replace(' of', ' ms of')} for collectives by default, and {fewer[0]} with `jax-toolbox`, which takes "
        f"{more[0]} GiB more. `latency-hiding` gives {either(alike, 'the numbers', 'other numbers than those')} of `default`",
    )


def _meshes(default: dict[tuple[str, str], Row]) -> Table:
    """What a GPU holds and how long it waits, mesh by mesh."""
    lines = [["model", "mesh", "GiB a GPU", "step ms", "of these, waiting for collectives", "tokens/s a GPU"]]
    policies = {"fsdp=8": "dots+attention", "fsdp=16": "dots+attention", "data=2,fsdp=16": "dots+attention"}
    for mesh, policy in (policies | {"data=2,fsdp=64": "nothing"}).items():
        row = default[mesh, policy]
        under = "" if policy == "dots+attention" else f", under `{policy}`"
        times = [ms(row["step_s"]), ms(row["collective_exposed_s"])]
        lines.append([f"{row['model']}{under}", f"`{mesh}`", gib_number(row["total_bytes"]), *times, rate(row)])
    return Table(SEVERAL_GPUS, "meshes", lines)


def _waits(row: Row) -> str:
    """The milliseconds of a step that a device waits, and all of them: `22 of 806`."""
    return f"{ms(row['collective_exposed_s'])} of {ms(row['step_s'])}"
