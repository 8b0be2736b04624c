"""Articles: activations are linear in the batch."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import Step, step
from experiments.claims.words import gib, percent


def steps(size: Size) -> list[Step]:
    """One model at some batches."""
    batches = (1, 4, 8, 16) if size == "full" else (4, 16)
    preset = "gpt2" if size == "full" else "tiny"
    return [step(preset=preset, batch=batch) for batch in batches]


def judge(rows: Sequence[Row]) -> Judgement:
    """How far the temporaries are from a line through the first and the last batch, and how the total grows from 4 to 16."""
    by_batch = {row["batch"]: row for row in rows}
    first, last = min(by_batch), max(by_batch)
    slope = (by_batch[last]["temp_bytes"] - by_batch[first]["temp_bytes"]) / (last - first)
    offset = by_batch[first]["temp_bytes"] - slope * first
    off = {batch: row["temp_bytes"] / (offset + slope * batch) - 1 for batch, row in by_batch.items()}
    totals = by_batch[16]["total_bytes"] / by_batch[4]["total_bytes"]
    temps = by_batch[16]["temp_bytes"] / by_batch[4]["temp_bytes"]
    fixed = by_batch[16]["total_bytes"] - 16 * slope
    table = [("batch", "total", "state", "temporaries", "off the line")]
    table += [
        (str(batch), gib(row["total_bytes"]), gib(row["argument_bytes"]), gib(row["temp_bytes"]), percent(off[batch]))
        for batch, row in by_batch.items()
    ]
    worst = max(map(abs, off.values()))
    sentences = (
        f"A sequence takes {gib(slope)} of temporaries, and no batch is off the line through the first and the last by more than "
        f"{percent(worst)}.",
        f"From batch 4 to batch 16 the temporaries grow {temps:.2f} times, and the total {totals:.2f} times.",
        "A total of F + B a grows by a factor of 3 from B = 4 to 16 if F is 2 a, by one of 4 if there is nothing fixed. "
        f"Here what is fixed is {gib(fixed)}, {fixed / slope:.1f} sequences.",
    )
    ours = f"linear within {percent(worst)}; from 4 to 16 the total grows {totals:.2f} times"
    return Judgement(ours, "holds" if worst < 0.05 else "refuted", sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Bytes over the batch."""
    kinds = {"total": "total_bytes", "temporaries": "temp_bytes"}
    series = {label: [(row["batch"], row[name] / 2**30) for row in rows] for label, name in kinds.items()}
    return Picture("batch", "GiB", series)


CLAIM = Claim(
    name="batch_linear",
    title="Activations and the batch",
    source="articles",
    says="activations grow linearly with the batch, as at 1, 8 and 16; some show a factor of 3 from batch 4 to 16",
    on="gpt2 at 1024 tokens under `none`, in a loop, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
