"""What the pages take from `experiments.tables`: tables whose rows are commands, and sentences beside them."""

from collections.abc import Iterator
from typing import Any

from experiments.numbers.held import Part, Table, Words
from experiments.numbers.rows import Row, ms, only, rate
from jaxremat.report.table import gib_number

EXPERTS, HF, LENGTHS = "docs/experts.md", "docs/hf.md", "docs/lengths.md"


def tables(result: Any) -> Iterator[Part]:
    """All of them."""
    yield from _published(result)
    yield from _experts(result)
    [scores] = result["scores"]
    yield Words(LENGTHS, f"needs {scores['total_bytes'] / 2**30:,.0f} GiB under `nothing`")


def _published(result: Any) -> Iterator[Part]:
    """Of models of a config.json."""
    lines = [["model", "10⁹ parameters", "attention", "policy", "largest batch of a device", "GiB of a device"]]
    lines[0] += ["predicted ms", "tokens/s of a device", "MFU"]
    for row in result["published"]:
        asked = [row["model"], f"{row['num_params'] / 1e9:.2f}", row["attention"], _policy(row), row["batch"]]
        speed = [ms(row["step_s"], 1), rate(row), f"{100 * row['mfu']:.1f} %"]
        lines.append([*asked, gib_number(row["total_bytes"]), *speed])
    yield Table(HF, "published", lines)
    sizes = {row["model"]: gib_number(row["total_bytes"]) for row in result["one-gpu"]}
    yield Words(
        HF,
        f"batch 1 takes {sizes['Phi-3-mini-4k-instruct']} GiB for Phi-3-mini, {sizes['Qwen3-8B']} GiB for Qwen3-8B and "
        f"{sizes['gemma-2-9b']} GiB for gemma-2-9b, of {gib_number(result['published'][0]['budget_bytes'])} GiB",
    )
    planned = only(result["published"], requested_policy="auto")
    yield Words(HF, f"Planning took {planned['num_compiles']} compiles for Qwen3-8B")


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


def _policy(row: Row) -> str:
    """The policy as it was asked for, and of a plan the layout that it chose."""
    if row["requested_policy"] != "auto":
        return f"`{row['requested_policy']}`"
    return f"`auto`, layers {'in a loop' if row['layout'] == 'loop' else row['layout']}"
