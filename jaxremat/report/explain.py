"""Tables and sentences of `jaxremat explain`: which live buffers hold the device memory at the peak.

They fit in 80 columns. The beginning of such a table:

    who holds the peak: dots, batch 32
    device memory                          GiB    share
    logits and loss                       9.20    58.1%
    residuals                             5.25    33.1%
      mlp/wi_0/dot_general x 12           2.25    14.2%
"""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from jaxremat.report.policy_text import policy_text
from jaxremat.report.table import batch_text, gib_number, list_table
from jaxremat.trial.record import ExplainRecord
from jaxremat.units import gib
from jaxremat.xla.buffers import SOURCES
from jaxremat.xla.dump import short_source

#: Residuals that hold less than this share of the peak are added up in one line.
SMALL = 0.005


def holders_table(row: ExplainRecord) -> Table:
    """A table of the bytes at the peak by category, ending with XLA's total.

    The residuals are listed by checkpoint name and number of layers. The gaps are a category of their own.
    """
    total, lines = row.total_bytes or 0, []
    for category, num_bytes in ((category, size) for category, size in (row.attribution or {}).items() if size):
        lines.append((category, gib_number(num_bytes), _share(num_bytes, total)))
        if category == "residuals":
            lines += _residual_lines(row, total)
    lines.append(("total, XLA's own", gib_number(total), _share(total, total)))
    if row.host_bytes:
        lines.append(("host memory, apart", gib_number(row.host_bytes), ""))
    title = f"who holds the peak: {policy_text(row)}, batch {batch_text(row)}"
    return list_table(title, ("device memory", "GiB", "share"), lines)


def _residual_lines(row: ExplainRecord, total: int) -> list[tuple[str, str, str]]:
    residuals = [part for part in row.held or [] if part.category == "residuals"]
    large = [part for part in residuals if part.num_bytes >= SMALL * total]
    lines = [
        (
            f"  {_short(part.label)} x {part.num_layers}",
            gib_number(part.num_bytes),
            _share(part.num_bytes, total),
        )
        for part in large
    ]
    rest = sum(part.num_bytes for part in residuals) - sum(part.num_bytes for part in large)
    return [*lines, (f"  {len(residuals) - len(large)} smaller", gib_number(rest), _share(rest, total))] if rest else lines


def sources_table(row: ExplainRecord) -> Table:
    """A table of the seven sources of memory, such as parameters and gradients, and the categories that make up each."""
    lines = [
        (source, gib_number(num_bytes), ", ".join(SOURCES[source])) for source, num_bytes in (row.sources or {}).items()
    ]
    table = list_table("the same by source", ("source", "GiB", "made of"), lines)
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    return table


def state_table(row: ExplainRecord) -> Table:
    """A table of how the parameters and the optimizer's state lie on a mesh: in all, and on each device."""
    lines = [
        (part.category, gib_number(part.num_bytes), gib_number(part.divided_bytes), gib_number(part.whole_bytes))
        for part in row.state
        if part.category != "inputs"
    ]
    title = f"the state on {row.num_devices} devices, {row.mesh}"
    return list_table(title, ("GiB", "in all", "on each: parts", "on each: whole"), lines)


def largest_table(row: ExplainRecord) -> Table:
    """A table of the largest live buffers at the peak, each with its shape and the source line that made it."""
    lines = [
        (
            _short(part.label) + f" x {part.num_buffers}" * (part.num_buffers > 1),
            gib_number(part.num_bytes),
            part.shape,
            Path(part.source).name,
        )
        for part in row.largest or []
    ]
    table = list_table("the largest buffers at the peak", ("buffer", "GiB", "shape", "made at"), lines)
    table.padding = (0, 0, 0, 1)
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "left", False
    return table


def findings_table(row: ExplainRecord) -> Table:
    """A table of the lint's findings: the rule, its bytes, the evidence, and below the evidence the remedy."""
    lines = [
        (found.rule, gib_number(found.num_bytes or None), f"{found.evidence}.\n-> {found.remedy}")
        for found in row.findings or []
    ]
    table = list_table(f"lint: {policy_text(row)}, batch {batch_text(row)}", ("rule", "GiB", "evidence -> remedy"), lines)
    table.columns[2].justify, table.columns[2].no_wrap = "left", False
    return table


def rows_table(rows: Sequence[ExplainRecord]) -> Table:
    """A table with one row per policy and batch, and one column per source of memory.

    If a step was run, a last column has the allocator's peak.
    """
    heads = {"optimizer state": "optim", "parameters": "params", "gradients": "grads", "activations": "activ"}
    heads |= {"workspace": "work", "fragmentation": "frag"}
    measured = any(row.allocator for row in rows)
    columns = [
        "policy",
        "batch",
        *(heads.get(source, source) for source in SOURCES),
        "total",
        *(["peak"] if measured else []),
    ]
    lines = []
    for row in rows:
        sizes = [gib_number((row.sources or {}).get(source)) for source in SOURCES]
        peak = row.allocator.peak_bytes if row.allocator else None
        lines.append(
            (
                policy_text(row),
                batch_text(row),
                *sizes,
                gib_number(row.total_bytes),
                *([gib_number(peak)] if measured else []),
            )
        )
    table = list_table("side by side: GiB on the device at the peak", columns, lines)
    table.padding = (0, 0, 0, 1)
    return table


def peak_sentence(row: ExplainRecord) -> str:
    """Where in the program the peak is, counted from 0 as on the page. Empty if the step wasn't compiled."""
    peak = row.peak
    if not peak:
        return ""
    scope = f", {peak.op_name}" if peak.op_name else ""
    source = f", at {short_source(peak.source)}" if peak.source else ""
    place = f"position {peak.position:,} of {peak.num_positions - 1:,}"
    return f"The peak is in the {peak.phase} pass, {place}: {peak.name}{scope}{source}."


def allocator_sentence(row: ExplainRecord) -> str:
    """The allocator's figures after the step: in use, peak, pool, largest free block. Empty if the step wasn't run."""
    if not row.allocator:
        return ""
    figures = (
        (row.allocator.in_use_bytes, "in use"),
        (row.allocator.peak_bytes, "peak"),
        (row.allocator.pool_bytes, "pool"),
        (row.allocator.largest_free_bytes, "largest free block"),
    )
    said = [f"{gib(size)} {words}" for size, words in figures if size is not None]
    return f"Measured by the allocator after the step: {', '.join(said)}." if said else ""


def _short(label: str) -> str:
    """A short form of a label: `state.params['mlp']['kernel']` becomes `state.params.mlp.kernel`."""
    return re.sub(r"\['([^']*)'\]", r".\1", label)


def _share(num_bytes: int, total: int) -> str:
    return f"{100 * num_bytes / total:.1f}%" if total else "-"
