"""Articles: long contexts, with plain and with fused attention."""

import math
from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import LLAMA, Step, budget_bytes, step
from experiments.claims.words import ATTENTION, gib
from experiments.common import where

LENGTHS = (2048, 8192, 32768, 131072)
POLICIES = ("none", "nothing")


def steps(size: Size) -> list[Step]:
    """One sequence of each length, with each attention."""
    if size == "tiny":
        return [step(preset="tiny", policy="nothing", attention="xla", seq_len=n) for n in (64, 128)]
    return [step(policy=p, attention=kind, seq_len=n, **LLAMA) for kind in ATTENTION for p in POLICIES for n in LENGTHS]


def judge(rows: Sequence[Row]) -> Judgement:
    """How the temporaries grow with the length, and what fits."""
    lengths, budget = sorted({row["seq_len"] for row in rows}), budget_bytes(rows[0]["target"])
    table = [("attention", "policy", *(f"{length:,} tokens" for length in lengths), "grows at the end as")]
    power, longest = {}, {}
    for kind, policy in dict.fromkeys((row["attention"], row["policy"]) for row in rows):
        found = {row["seq_len"]: row for row in where(rows, attention=kind, policy=policy)}
        less, more = lengths[-2:]
        growth = found[more]["temp_bytes"] / found[less]["temp_bytes"]
        power[kind, policy] = math.log(growth) / math.log(more / less)
        longest[kind, policy] = max((n for n, row in found.items() if row["total_bytes"] <= budget), default=0)
        cells = (gib(found[length]["total_bytes"]) for length in lengths)
        table.append((ATTENTION[kind], f"`{policy}`", *cells, f"T^{power[kind, policy]:.2f}"))
    sentences = [
        f"{ATTENTION[kind].capitalize()} attention under `{policy}`: the longest of these lengths that fits is "
        f"{longest[kind, policy]:,} tokens; the temporaries grow as T^{power[kind, policy]:.2f} at the end."
        for kind, policy in power
    ]
    if ("cudnn", "nothing") in power and power["cudnn", "nothing"] < 0.9:
        sentences.append("A power below 1 says that a part of the temporaries doesn't depend on the length.")
    plain, fused = power["xla", "nothing"], power.get(("cudnn", "nothing"))
    ours = f"under `nothing` plain attention grows as T^{plain:.2f}"
    if fused is not None:
        fitting = f"{longest['xla', 'nothing']:,} plain and {longest['cudnn', 'nothing']:,} fused"
        ours += f", fused as T^{fused:.2f}; the longest of these lengths that fits is {fitting}"
    verdict = "holds" if plain > 1.7 and fused is not None and fused < 1.2 else "refuted"
    return Judgement(ours, verdict, tuple(sentences), tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Bytes over the length."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        label = f"{ATTENTION[row['attention']]}, {row['policy']}"
        series.setdefault(label, []).append((row["seq_len"], row["total_bytes"] / 2**30))
    budget = budget_bytes(rows[0]["target"]) / 2**30
    series["what fits"] = [(length, budget) for length in sorted({row["seq_len"] for row in rows})]
    return Picture("tokens in the sequence", "GiB", series, log="xy")


CLAIM = Claim(
    name="long_context",
    title="Long contexts",
    source="articles",
    says="from 2k to 128k tokens plain attention grows with the square of the length whatever is recomputed, and fused "
    "attention with the length",
    on="llama3.2-1b, one sequence, chunked loss, in a loop, 0.75 of the memory of an H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
