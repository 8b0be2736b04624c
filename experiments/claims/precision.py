"""Articles: mixed precision saves 30-50 % of the memory."""

from collections.abc import Sequence

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size
from experiments.claims.steps import Step, step
from experiments.claims.words import gib, percent, saved, slower, spans

#: The dtypes of the parameters and of the compute.
FULL, MIXED, HALF = ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")
NAMES = {FULL: "float32", MIXED: "mixed", HALF: "all bfloat16"}
BATCHES = (1, 8, 32)


def steps(size: Size) -> list[Step]:
    """Each pair of dtypes at each batch, with XLA's attention, since cuDNN's has no float32."""
    preset, batches = ("gpt2", BATCHES) if size == "full" else ("tiny", (1,))
    return [
        step(batch=batch, param_dtype=params, dtype=compute, attention="xla", preset=preset)
        for params, compute in NAMES
        for batch in batches
    ]


def judge(rows: Sequence[Row]) -> Judgement:
    """What is saved against float32 at each batch."""
    by = {((row["param_dtype"], row["dtype"]), row["batch"]): row for row in rows}
    batches = sorted({row["batch"] for row in rows})
    table = [("dtypes", "batch", "total", "state", "temporaries", "saved", "predicted time")]
    for (dtypes, batch), row in by.items():
        base = by[FULL, batch]
        sizes = (gib(row["total_bytes"]), gib(row["argument_bytes"]), gib(row["temp_bytes"]))
        table.append((NAMES[dtypes], str(batch), *sizes, percent(saved(row, base)), f"{slower(row, base) + 1:.2f} x"))
    mixed = [saved(by[MIXED, batch], by[FULL, batch]) for batch in batches]
    half = [saved(by[HALF, batch], by[FULL, batch]) for batch in batches]
    temps = [1 - by[MIXED, batch]["temp_bytes"] / by[FULL, batch]["temp_bytes"] for batch in batches]
    within = [batch for batch, share in zip(batches, mixed, strict=True) if 0.3 <= share <= 0.5]
    sentences = (
        f"Mixed precision saves {percent(mixed[0])} at batch {batches[0]} and {percent(mixed[-1])} at batch {batches[-1]}. "
        f"The state stays in float32, and of the temporaries {spans(temps)} go: not all of them are in the compute's dtype.",
        f"With the parameters in bfloat16 too it is {spans(half)}.",
    )
    outside = [batch for batch in batches if batch not in within]
    at = f"; 30 to 50 % at batch {', '.join(map(str, within))}" if within else ""
    at += f", and not at {', '.join(map(str, outside))}" if within and outside else ""
    verdict = "holds" if len(within) == len(batches) else "holds under conditions" if within else "refuted"
    return Judgement(f"{spans(mixed)}{at}", verdict, sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Bytes over the batch."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(NAMES[row["param_dtype"], row["dtype"]], []).append((row["batch"], row["total_bytes"] / 2**30))
    return Picture("batch", "GiB", series)


CLAIM = Claim(
    name="precision",
    title="Mixed precision",
    source="articles",
    says="mixed precision saves 30 to 50 % of the memory",
    on="gpt2 at 1024 tokens under `none`, XLA's attention, adamw, in a loop, H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
