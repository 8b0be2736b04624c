"""Articles: samples grouped by their activation bytes are faster than samples padded to the longest."""

from collections.abc import Sequence
from pathlib import Path

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, one
from experiments.claims.steps import Step, step
from experiments.claims.words import gib
from jaxremat.model.flops import model_flops
from jaxremat.model.presets import preset
from jaxremat.search.buckets import Bucketed, granularity, make_buckets
from jaxremat.search.histogram import read_histogram

FILE = Path(__file__).parent.parent.parent / "examples/lengths/python_manual.txt"
LONGEST = 1024
GROUPS = 4
TOY_LENGTHS = (32, 64)


def grouped(num_groups: int) -> Bucketed:
    """The data set in groups of similar lengths, cut at `LONGEST`, by the fewest FLOPs of gpt2."""
    whole, config = read_histogram(FILE), preset("gpt2").config
    data = whole.cut_at(LONGEST)
    buckets = make_buckets(
        data, num_groups, lambda length: model_flops(config, 1, length), granularity(data.longest), LONGEST
    )
    return Bucketed(data, whole.longer_than(LONGEST), buckets)


def steps(size: Size) -> list[Step]:
    """The largest batch at the longest length of each group."""
    if size == "tiny":
        return [step("step", preset="tiny", seq_len=length, dropout=0.0) for length in TOY_LENGTHS]
    lengths = [bucket.seq_len for bucket in grouped(GROUPS).buckets]
    return [step("largest", policy="dots+attention", loss="chunked", seq_len=length) for length in lengths]


def judge(rows: Sequence[Row]) -> Judgement:
    """Real tokens a second in groups, and padded to the longest. A group has time in proportion to its sequences."""
    data = grouped(len(rows))
    spent_s = {row["seq_len"]: row["seq_len"] / row["tokens_per_s"] for row in rows}  # of one sequence
    lengths = sorted(spent_s)
    counts = dict(zip(lengths, (bucket.num_sequences for bucket in data.buckets), strict=True))
    tokens, sequences = data.histogram.num_tokens, data.histogram.num_sequences
    in_groups = tokens / sum(counts[length] * spent_s[length] for length in lengths)
    padded = tokens / (sequences * spent_s[lengths[-1]])
    packed = lengths[-1] * data.packed_share / spent_s[lengths[-1]]
    table = [("up to", "sequences", "largest batch", "total", "predicted tokens/s, padding too")]
    for length in lengths:
        row = one(rows, seq_len=length)
        batch = str(row.get("largest_batch", row.get("batch", 1)))
        table.append((f"{length:,}", f"{counts[length]:,}", batch, gib(row["total_bytes"]), f"{row['tokens_per_s']:,.0f}"))
    sentences = (
        f"{sequences:,} sequences of {tokens / sequences:.0f} tokens on average, in {len(lengths)} groups that each fill the "
        f"memory: {in_groups:,.0f} real tokens/s. All padded to {lengths[-1]:,}: {padded:,.0f}.",
        f"Packed into rows of {lengths[-1]:,}, {packed:,.0f}, which needs a mask in attention. Padding would lose nothing "
        "only if all sequences were as long as the longest.",
    )
    gain = in_groups / padded
    ours = f"{gain:.1f} times the real tokens/s of padding; packing has {packed / padded:.1f} times"
    return Judgement(ours, "holds" if gain > 1.05 else "refuted", sentences, tuple(table))


def picture(rows: Sequence[Row]) -> Picture:
    """Tokens a second by length, padding counted."""
    points = [(row["seq_len"], row["tokens_per_s"]) for row in sorted(rows, key=lambda row: row["seq_len"])]
    return Picture("longest sequence of the group", "predicted tokens/s, padding too", {"largest batch": points}, log="x")


CLAIM = Claim(
    name="grouped",
    title="Samples grouped by length",
    source="articles",
    says="samples grouped by their activation bytes, each group at the batch that fills the memory, are faster than padding",
    on="gpt2 under `dots+attention` with the chunked loss, the paragraphs of Python's manual, 0.75 of an H100",
    steps=steps,
    judge=judge,
    picture=picture,
)
