"""Articles: samples grouped by their activation bytes are faster than samples padded to the longest."""

import functools
from collections.abc import Sequence
from pathlib import Path

from experiments.claims.claim import Claim, Judgement, Picture, Row, Size, Verdict
from experiments.claims.steps import Step, step
from experiments.claims.words import gib, percent
from experiments.common import only
from jaxremat.model.flops import model_flops
from jaxremat.model.presets import preset
from jaxremat.search.buckets import Bucketed, granularity, make_buckets
from jaxremat.search.histogram import read_histogram

FILE = Path(__file__).parent.parent.parent / "examples/lengths/python_manual.txt"
LONGEST = 1024
GROUPS = 4
TOY_LENGTHS = (32, 64)
#: Groups are faster than padding if they have at least this many times its tokens a second.
LEAST = 1.05
#: Groups that differ by less in tokens a second are equally fast.
SAME = 0.05


@functools.cache
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
    """Real tokens a second in groups, and padded to the longest."""
    data = grouped(len(rows))
    lengths = sorted(row["seq_len"] for row in rows)
    counts = dict(zip(lengths, (bucket.num_sequences for bucket in data.buckets), strict=True))
    tokens, sequences = data.histogram.num_tokens, data.histogram.num_sequences
    padded, in_groups, packed = rates(rows).values()
    table = [("up to", "sequences", "largest batch", "total", "predicted tokens/s, padding too")]
    for length in lengths:
        row = only(rows, seq_len=length)
        batch = str(row.get("largest_batch", row.get("batch", 1)))
        table.append((f"{length:,}", f"{counts[length]:,}", batch, gib(row["total_bytes"]), f"{row['tokens_per_s']:,.0f}"))
    of_groups = [row["tokens_per_s"] for row in rows]
    gain, spread = in_groups / padded, max(of_groups) / min(of_groups) - 1
    fewer = all(counts[length] < only(rows, seq_len=length).get("largest_batch", 1) for length in lengths)
    sentences = (
        f"{sequences:,} sequences of {tokens / sequences:.0f} tokens on average, in {len(lengths)} groups: {in_groups:,.0f} real "
        f"tokens/s. All padded to {lengths[-1]:,}: {padded:,.0f}.",
        "The groups are those with the fewest FLOPs, not groups by activation bytes."
        + (
            " The data set has fewer sequences than one such batch in each group: the rates are those of a larger set with the "
            "same shares."
            if fewer
            else ""
        ),
        f"The tokens/s of the groups, padding too, are within {percent(spread)} of each other. "
        + (
            "So the gain is the padding that is avoided, and not the memory that is filled."
            if spread < SAME
            else "So a part of the gain is the memory that is filled."
        ),
        f"Packed into rows of {lengths[-1]:,}: {packed:,.0f}. The mask that attention needs for that isn't compiled in. Padding "
        "to the longest of each batch, rather than of all sequences, would lose less than padding does here.",
    )
    ours = f"{gain:.1f} times the real tokens/s of padding; packing has {packed / padded:.1f} times"
    if gain < LEAST:
        verdict: Verdict = "refuted"
    else:
        verdict = "holds under conditions" if spread < SAME else "holds"
    return Judgement(ours, verdict, sentences, tuple(table))


def rates(rows: Sequence[Row]) -> dict[str, float]:
    """Real tokens a second: padded to the longest, in groups, and packed. A group has time in proportion to its sequences."""
    data = grouped(len(rows))
    spent_s = {row["seq_len"]: row["seq_len"] / row["tokens_per_s"] for row in rows}  # of one sequence
    lengths = sorted(spent_s)
    tokens, sequences = data.histogram.num_tokens, data.histogram.num_sequences
    in_groups_s = sum(bucket.num_sequences * spent_s[length] for length, bucket in zip(lengths, data.buckets, strict=True))
    return {
        "padded": tokens / (sequences * spent_s[lengths[-1]]),
        "in groups": tokens / in_groups_s,
        "packed": lengths[-1] * data.packed_share / spent_s[lengths[-1]],
    }


def picture(rows: Sequence[Row]) -> Picture:
    """Real tokens a second: padded to the longest, in groups, and packed."""
    return Picture("", "predicted real tokens/s", {"gpt2": list(rates(rows).items())}, kind="bars")


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
