"""Articles: activations are over 90 % of the memory; the seven sources of a 200M-parameter model."""

from collections.abc import Sequence
from typing import Any

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import TOY_MEMORY, Step, step
from experiments.claims.words import gib, percent
from jaxremat.xla.buffers import SOURCES

#: 200M parameters in float32, with XLA's attention, since cuDNN's has no float32.
BASE: dict[str, Any] = {
    **{"num_layers": 12, "embed_dim": 1024, "num_heads": 16, "num_kv_heads": 16, "mlp_dim": 4096},
    **{"dtype": "float32", "attention": "xla", "seq_len": 1024, "max_seq_len": 4096, "batch": 8},
}
#: What is changed, one at a time, and to what.
CHANGES: tuple[dict[str, Any], ...] = (
    {"batch": 1},
    {"batch": 32},
    {"num_layers": 3},
    {"num_layers": 24},
    {"embed_dim": 512, "num_heads": 8, "num_kv_heads": 8, "mlp_dim": 2048},
    {"embed_dim": 2048, "num_heads": 32, "num_kv_heads": 32, "mlp_dim": 8192},
    {"seq_len": 256},
    {"seq_len": 4096},
)


def steps(size: Size) -> list[Step]:
    """The model unrolled at two batches; and in a loop, as it is and with one size changed at a time."""
    if size == "tiny":
        return [step("memory", num_layers=n, **TOY_MEMORY) for n in (4, 9)]
    unrolled, looped = ({**BASE, "scan_layers": scan} for scan in (False, True))
    unrolled_steps = [step("memory", **(unrolled | change)) for change in ({}, {"batch": 1})]
    return [*unrolled_steps, *(step("memory", **(looped | change)) for change in ({}, *CHANGES))]


def share(row: Row) -> float:
    """The share of the total that activations have at the peak."""
    return row["sources"]["activations"] / row["total_bytes"]


def named(row: Row) -> str:
    """The layout, and what is special about a row's sizes: `loop, width 512`."""
    keys = {"batch": "batch", "num_layers": "depth", "embed_dim": "width", "seq_len": "sequence"}
    changes = [f"{name} {row[key]}" for key, name in keys.items() if key in row and row[key] != BASE[key]]
    return ", ".join(["loop" if row.get("scan_layers", True) else "unrolled", *changes])


def judge(rows: Sequence[Row]) -> Judgement:
    """The share of the activations, and the seven sources."""
    table = [("sizes", "total", *SOURCES, "share of activations")]
    table += [(named(r), gib(r["total_bytes"]), *(gib(r["sources"][s]) for s in SOURCES), percent(share(r))) for r in rows]
    base, shares = rows[0], sorted(rows, key=share)
    sources = ", ".join(f"{source} {gib(base['sources'][source])}" for source in SOURCES)
    over = [row for row in rows if share(row) > 0.9]
    sentences = (
        f"With {base['num_params'] / 1e6:.0f}M parameters, batch {base['batch']}: {sources}.",
        f"Activations are {percent(share(base))} of it. Their share is the least with {named(shares[0])}, "
        f"{percent(share(shares[0]))}, and the greatest with {named(shares[-1])}, {percent(share(shares[-1]))}.",
        "They grow with depth, batch and sequence, and with plain attention faster than the sequence; the layers' "
        "parameters and their state grow with the depth and with the square of the width, and not with the batch.",
        "All numbers are those at the peak. So gradients may be 0: there they are not yet, or no longer, held. A buffer without "
        "a name of the program, such as plain attention's scores, may count as workspace.",
    )
    ours = f"{percent(share(base))} unrolled; over 90 % in {len(over)} of {len(rows)} cases"
    verdict = "holds" if len(over) == len(rows) else "holds under conditions" if over else "refuted"
    return Judgement(ours, verdict, sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """The seven sources, in percent of the total."""
    series = {
        source: [(named(row).replace(" ", "\n"), 100 * row["sources"][source] / row["total_bytes"]) for row in rows]
        for source in SOURCES
    }
    return Picture("", "% of the total", series, kind="stack")


CLAIM = Claim(
    name="components",
    title="Who holds the memory",
    source="articles",
    says="activations are over 90 % of the memory; a model of 200M parameters in float32 with Adam has seven sources of memory",
    on="that model, batch 8 of 1024 tokens under `none`, H100, and the same with one size changed at a time",
    steps=steps,
    judge=judge,
    picture=picture,
)
