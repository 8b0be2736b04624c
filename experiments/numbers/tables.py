"""What the pages take from `experiments.tables`: tables whose rows are commands, and sentences beside them."""

from collections.abc import Iterator
from typing import Any

from experiments.common import Row, only, where
from experiments.numbers.held import Part, Table, Words
from experiments.numbers.rows import gib, ms, rate, span
from jaxremat.report.table import gib_number

EXPERTS, HF, LENGTHS, SEVERAL_GPUS = "docs/experts.md", "docs/hf.md", "docs/lengths.md", "docs/several_gpus.md"
#: The meshes of the table of lengths, and who shares a sequence there.
LENGTHS_ON = {"fsdp=8": "a GPU", "fsdp=2,tensor=4": "for 4 GPUs"}


def tables(result: Any) -> Iterator[Part]:
    """All of them."""
    yield from _published(result)
    yield from _experts(result)
    yield from _lengths(result)
    yield from _gathers(result["gathers"])


def _published(result: Any) -> Iterator[Part]:
    """Of models of a config.json."""
    titles = ["model", "10⁹ parameters", "attention", "policy", "largest batch", "GiB", "predicted ms", "tokens/s", "MFU"]
    of_a_device = {title: f"{title} of a device" for title in ("largest batch", "GiB", "tokens/s")}
    for name, naming in (("published", of_a_device), ("one-gpu-bfloat16", {})):
        lines = [[*_model(row), row["attention"], _policy(row), row["batch"], *_cost(row)] for row in result[name]]
        yield Table(HF, name, [[naming.get(title, title) for title in titles], *lines])
    lines = [[*_model(row), f"`{row['mesh']}`", _policy(row), *_cost(row)] for row in result["mixtral"]]
    shown = [*titles[:2], "mesh", titles[3], *(of_a_device.get(title, title) for title in titles[5:])]
    yield Table(HF, "mixtral", [shown, *lines])
    sizes = {row["model"]: gib_number(row["total_bytes"]) for row in result["one-gpu"]}
    yield Words(
        HF,
        f"batch 1 takes {sizes['Phi-3-mini-4k-instruct']} GiB for Phi-3-mini, {sizes['Qwen3-8B']} GiB for Qwen3-8B and "
        f"{sizes['gemma-2-9b']} GiB for gemma-2-9b, of {gib_number(result['published'][0]['budget_bytes'])} GiB",
    )
    qwen, mixtral = (only(result[name], requested_policy="auto")["num_compiles"] for name in ("published", "mixtral"))
    yield Words(HF, f"Planning took {qwen} compiles for Qwen3-8B and {mixtral} for Mixtral")


def _experts(result: Any) -> Iterator[Part]:
    """Of both ways to compute experts."""
    lines = [["mesh, 64 x h100-80gb, `nothing`, 1 sequence of 4096 a GPU", "`--dispatch`", "GiB a GPU", "predicted step ms"]]
    for row in result["dispatch"]:
        dispatch = "`ragged`" if "ragged" in row["command"] else "`dense`"
        lines.append([f"`{row['mesh']}`", dispatch, gib_number(row["total_bytes"]), ms(row["step_s"], 1)])
    yield Table(EXPERTS, "dispatch", lines)
    dense, ragged = result["experts-layer"]
    executed = [f"{row['executed_flops'] / 1e12:.1f}" for row in (dense, ragged)]
    of_the_model = f"{dense['model_flops'] / 1e12:.1f}"
    yield Words(
        EXPERTS, f"executes {executed[0]} TFLOP with `dense` and {executed[1]} with `ragged`, of which {of_the_model}"
    )


def _lengths(result: Any) -> Iterator[Part]:
    """Of lengths on two meshes."""
    titles, lines = ["seq len", "policy"], []
    for mesh in LENGTHS_ON:
        titles += [f"`{mesh}`: sequences, GiB a GPU", "tokens/s a GPU"]
    for row in where(result["lengths"], mesh=min(LENGTHS_ON, key=len)):
        asked = {key: row[key] for key in ("seq_len", "requested_policy")}
        cells = [f"{row['seq_len']:,}", f"`{row['requested_policy']}`"]
        for mesh in LENGTHS_ON:
            cells += _largest(only(result["lengths"], mesh=mesh, **asked))
        lines.append(cells)
    yield Table(LENGTHS, "lengths", [titles, *lines])
    [scores] = result["scores"]
    yield Words(LENGTHS, f"needs {float(gib(scores['total_bytes'], 0)):,.0f} GiB under `nothing`")


def _largest(row: Row) -> list[str]:
    """The largest batch with its bytes, and its speed; or what one sequence needs."""
    if row["fits"]:
        return [f"{row['global_batch']}, {gib_number(row['total_bytes'])}", rate(row)]
    return [f"one {LENGTHS_ON[row['mesh']]} needs {gib_number(row['total_bytes'])}", "-"]


def _gathers(rows: list[Row]) -> Iterator[Part]:
    """Of gathered kernels that a policy keeps, or doesn't."""
    lines = [["layers", "gathered kernels", "GiB a GPU", "step ms", "links are busy, ms", "waiting for collectives, ms"]]
    for row in rows:
        kept = "kept" if "_gathered" in row["requested_policy"] else "gathered again"
        times = [ms(row[key]) for key in ("step_s", "collective_s", "collective_exposed_s")]
        lines.append([_layers(row), kept, gib_number(row["total_bytes"]), *times])
    yield Table(SEVERAL_GPUS, "gathers", lines)
    again, kept, loop, kept_in_loop = rows
    more = [(one["total_bytes"] - other["total_bytes"]) / 2**30 for one, other in ((kept, again), (kept_in_loop, loop))]
    yield Words(SEVERAL_GPUS, f"keeping all gathered kernels takes {span(more)} GiB more")
    yield Words(SEVERAL_GPUS, f"keeping them gains {ms(again['step_s'] - kept['step_s'])} ms")


def _model(row: Row) -> list[str]:
    return [row["model"], f"{row['num_params'] / 1e9:.2f}"]


def _policy(row: Row) -> str:
    """The policy as it was asked for, and of a plan the layout that it chose."""
    return f"`{row['requested_policy']}`" + (f", layers {_layers(row)}" if row["requested_policy"] == "auto" else "")


def _layers(row: Row) -> str:
    return "in a loop" if row["layout"] == "loop" else row["layout"]


def _cost(row: Row) -> list[str]:
    """The bytes and the time of a step, its speed and its MFU."""
    return [gib_number(row["total_bytes"]), ms(row["step_s"], 1), rate(row), f"{100 * row['mfu']:.1f} %"]
