"""Tables and sentences of several lengths of sequences, and of a data set in buckets."""

from collections.abc import Sequence

from rich.table import Table

from jaxremat.report.policy_text import policy_text
from jaxremat.report.steps import policy_with_differences, predicted_title, steps_table
from jaxremat.report.table import counted, list_table, number
from jaxremat.trial.comparisons import LengthsRecord
from jaxremat.trial.details import LengthBucket
from jaxremat.trial.record import TrialRecord
from jaxremat.trial.ties import trial_ties
from jaxremat.units import gib


def lengths_table(rows: Sequence[TrialRecord]) -> Table:
    """A table of lengths and policies, each at the batch of its row.

    A row without a fit has the bytes that it needs.
    """
    table = steps_table("lengths", "lengths side by side", rows, tied=trial_ties(rows))
    table.collapse_padding = True
    return table


def no_fit_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """A sentence for each length at which nothing fits, with the step of the fewest bytes.

    For example `At 131,072 tokens nothing fits: dots at batch 1 needs 81.20 GiB of 59.33 GiB.`
    """
    said = []
    for length in dict.fromkeys(row.seq_len for row in rows):
        own = [row for row in rows if row.seq_len == length and row.total_bytes is not None]
        if own and not any(row.fits for row in own):
            least = min(own, key=lambda row: row.total_bytes or 0)
            said.append(_no_fit(f"At {length:,}", least, least.budget_bytes))
    return said


def _no_fit(where: str, row: TrialRecord | LengthBucket, budget_bytes: int) -> str:
    needs = f"{policy_text(row)} at batch {row.batch} needs {gib(row.total_bytes or 0)} of {gib(budget_bytes)}"
    return f"{where} tokens nothing fits: {needs}."


def buckets_table(found: LengthsRecord) -> Table:
    """A table of the buckets of a data set. The rates count real tokens and no padding.

    Where all buckets have the same policy, the title names it in place of a column.
    """
    texts = {policy_with_differences(bucket, found.buckets) for bucket in found.buckets}
    named, titles = ("", {}) if len(texts) > 1 else (f", policy {texts.pop()}", {"policy": ""})
    titles["seq len"] = "up to"
    steps = {"measured": "measured\nms", "predicted": predicted_title([found])}
    titles["step"] = steps.get(found.step_source or "", "step ms")
    table = steps_table("buckets", f"buckets within {gib(found.budget_bytes)}{named}", found.buckets, titles=titles)
    table.collapse_padding = True
    return table


def rates_table(found: LengthsRecord) -> Table:
    """A table of the rates of buckets, of padding to the longest, and of packing.

    The rates count real tokens. The table says how full a batch is, too.
    """
    longest, padded = found.buckets[-1].seq_len, found.padded_tokens_per_s
    computed = sum(bucket.num_sequences * bucket.seq_len for bucket in found.buckets)
    rows = [
        (counted(len(found.buckets), "bucket"), found.tokens_per_s, found.num_tokens / computed),
        (f"all padded to {longest:,}", padded, found.num_tokens / (found.num_sequences * longest)),
        (f"packed into {longest:,}", found.packed_tokens_per_s, found.packed_share),
    ]
    shown = [
        (how, number(rate), f"{full:.1%}", f"{rate / padded:.2f} x" if rate and padded else "-") for how, rate, full in rows
    ]
    return list_table("the whole data set", ("how", "real tokens/s", "filled", "gain"), shown)


def lengths_sentences(found: LengthsRecord) -> list[str]:
    """What the tables of a data set count, and what they leave out."""
    mean, longest = found.num_tokens / found.num_sequences, found.buckets[-1].seq_len
    cut = f", {found.num_cut:,} of them cut to {longest:,}" if found.num_cut else ""
    short = [_no_fit(f"Up to {one.seq_len:,}", one, found.budget_bytes) for one in found.buckets if not one.fits]
    return [
        f"{found.num_sequences:,} sequences of {mean:,.0f} tokens on average{cut}; {found.num_compiles} compiles.",
        *(f"{sentence} So there are no rates of the whole data set." for sentence in short[:1]),
        "Buckets are weighted by their sequences. Padding and packing take the last bucket's step.",
        "A packed step computes attention over whole rows: scores between its sequences are computed too, and must be masked.",
    ]
