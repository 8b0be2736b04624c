"""Tables and sentences of several lengths of sequences, side by side."""

from collections.abc import Sequence

from rich.table import Table

from jaxremat.report.interval import predicted_column
from jaxremat.report.policy_text import policy_text
from jaxremat.report.table import (
    answer_cells,
    differing_text,
    gib_number,
    list_table,
    rate_column,
    step_column,
    table_of,
)
from jaxremat.trial.comparisons import LengthsRecord
from jaxremat.trial.details import LengthBucket
from jaxremat.trial.record import TrialRecord
from jaxremat.units import gib


def lengths_table(rows: Sequence[TrialRecord]) -> Table:
    """A table of lengths and policies, each at the batch of its row. A row without a fit has the bytes that it needs."""
    mixed = len({row.step_source for row in rows if row.step_source}) > 1
    columns = ("seq len", "policy", "batch", "GiB", "recompute", step_column(rows), "MFU", rate_column(rows))
    table = table_of("lengths side by side", *columns, left=2)
    table.columns[0].no_wrap = True
    table.collapse_padding = True
    for row in rows:
        failed = "failed" if row.error else "" if row.fits else "no fit"
        policy = policy_text(row) + differing_text(row, rows)
        table.add_row(f"{row.seq_len:,}", policy, *answer_cells(row, failed, mixed=mixed))
    return table


def misfit_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """A sentence for each length at which nothing fits, with the step of the fewest bytes.

    For example `At 131,072 tokens nothing fits: dots at batch 1 needs 81.20 GiB of 59.33 GiB.`
    """
    said = []
    for length in dict.fromkeys(row.seq_len for row in rows):
        own = [row for row in rows if row.seq_len == length and row.total_bytes is not None]
        if own and not any(row.fits for row in own):
            least = min(own, key=lambda row: row.total_bytes or 0)
            said.append(
                f"At {length:,} tokens nothing fits: {policy_text(least)} at batch {least.batch} needs "
                f"{gib(least.total_bytes or 0)} of {gib(least.budget_bytes)}."
            )
    return said


def buckets_table(found: LengthsRecord) -> Table:
    """A table of the buckets of a data set. The rates count real tokens and no padding.

    Where all buckets have the same policy, the title names it in place of a column.
    """
    texts = [_differing(bucket, found.buckets) for bucket in found.buckets]
    is_one = len(set(texts)) == 1
    title = f"buckets within {gib(found.budget_bytes)}" + (f", policy {texts[0]}" if is_one else "")
    titles: dict[str | None, str] = {
        None: "step ms",
        "measured": "measured\nms",
        "predicted": predicted_column([found.predicted_interval]),
    }
    named = [] if is_one else ["policy"]
    columns = ("up to", *named, "sequences", "share", "padding", "batch", "GiB", titles[found.step_source], "real\ntokens/s")
    table = table_of(title, *columns, left=1 + len(named))
    table.columns[0].no_wrap = True
    table.collapse_padding = True
    for bucket, text in zip(found.buckets, texts, strict=True):
        table.add_row(
            f"{bucket.seq_len:,}",
            *([] if is_one else [text]),
            f"{bucket.num_sequences:,}",
            f"{bucket.num_sequences / found.num_sequences:.1%}",
            f"{1 - bucket.num_tokens / (bucket.num_sequences * bucket.seq_len):.1%}",
            str(bucket.batch),
            gib_number(bucket.total_bytes),
            "-" if bucket.step_s is None else f"{1e3 * bucket.step_s:,.1f}",
            _rounded(bucket.tokens_per_s) if bucket.fits else "no fit",
        )
    return table


def _differing(bucket: LengthBucket, buckets: Sequence[LengthBucket]) -> str:
    """The policy of a bucket, with the loss and the layout where they differ."""
    differing = [name for name in ("loss", "layout") if len({getattr(one, name) for one in buckets}) > 1]
    more = f" ({', '.join(str(getattr(bucket, name)) for name in differing)})" if differing else ""
    return policy_text(bucket) + more


def rates_table(found: LengthsRecord) -> Table:
    """A table of the rates of buckets, of padding to the longest, and of packing, in real tokens, and how full a batch is."""
    longest = found.buckets[-1].seq_len
    computed = sum(bucket.num_sequences * bucket.seq_len for bucket in found.buckets)
    padded = found.num_tokens / (found.num_sequences * longest)
    rows = [
        (
            f"{len(found.buckets)} bucket{'s' if len(found.buckets) > 1 else ''}",
            found.tokens_per_s,
            found.num_tokens / computed,
        ),
        (f"all padded to {longest:,}", found.padded_tokens_per_s, padded),
        (f"packed into {longest:,}", found.packed_tokens_per_s, found.packed_share),
    ]
    shown = [(name, _rounded(rate), f"{full:.1%}", _as_factor(rate, found.padded_tokens_per_s)) for name, rate, full in rows]
    return list_table("the whole data set", ("how", "real tokens/s", "filled", "gain"), shown)


def _rounded(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _as_factor(rate: float | None, other: float | None) -> str:
    return "-" if not rate or not other else f"{rate / other:.2f} x"


def lengths_sentences(found: LengthsRecord) -> list[str]:
    """What the tables of a data set count, and what they leave out."""
    mean = found.num_tokens / found.num_sequences
    cut = f", {found.num_cut:,} of them cut to {found.buckets[-1].seq_len:,}" if found.num_cut else ""
    short = [bucket for bucket in found.buckets if not bucket.fits]
    return [
        f"{found.num_sequences:,} sequences of {mean:,.0f} tokens on average{cut}; {found.num_compiles} compiles.",
        *(
            f"Up to {bucket.seq_len:,} tokens nothing fits: {policy_text(bucket)} at batch {bucket.batch} needs "
            f"{gib(bucket.total_bytes or 0)} of {gib(found.budget_bytes)}. So there are no rates of the whole data set."
            for bucket in short[:1]
        ),
        "Buckets are weighted by their sequences. Padding and packing take the last bucket's step.",
        "A packed step computes attention over whole rows: scores between its sequences are computed too, and must be masked.",
    ]
