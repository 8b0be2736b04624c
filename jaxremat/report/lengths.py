"""Tables and sentences of several lengths of sequences, side by side."""

from collections.abc import Sequence

from rich.table import Table

from jaxremat.report.table import answer_cells, differing_text, in_a_cell, rate_column, step_column, table_of
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
        policy = in_a_cell(row) + differing_text(row, rows)
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
                f"At {length:,} tokens nothing fits: {in_a_cell(least)} at batch {least.batch} needs "
                f"{gib(least.total_bytes or 0)} of {gib(least.budget_bytes)}."
            )
    return said
