"""Tables and sentences of `jaxremat explain`: which buffers take the memory at the peak.

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
from jaxremat.report.steps import batch_text, steps_table
from jaxremat.report.table import gib_number, list_table
from jaxremat.trial.record import ExplainRecord
from jaxremat.units import gib
from jaxremat.xla.buffers import SOURCES
from jaxremat.xla.dump import short_source

#: Residuals that take less than this share of the peak are added up in one line.
SMALL = 0.005


def holders_table(row: ExplainRecord) -> Table:
    """A table of the bytes at the peak by category, ending with XLA's total.

    The residuals are listed by checkpoint name and number of layers. The gaps are a category of their own.
    """
    lines: list[tuple[str, int]] = []
    for category, num_bytes in (row.attribution or {}).items():
        lines += [(category, num_bytes)] + (_residuals(row) if category == "residuals" else [])
    lines = [line for line in lines if line[1]] + [("total, XLA's own", row.total_bytes or 0)]
    rows = [(name, gib_number(size), f"{size / row.total_bytes:.1%}" if row.total_bytes else "-") for name, size in lines]
    if row.host_bytes:
        rows.append(("host memory, apart", gib_number(row.host_bytes), ""))
    return list_table(f"who holds the peak: {_step_name(row)}", ("device memory", "GiB", "share"), rows)


def _residuals(row: ExplainRecord) -> list[tuple[str, int]]:
    """The lines of the residuals, with their bytes. The small ones are one line."""
    least, parts = SMALL * (row.total_bytes or 0), [part for part in row.held or [] if part.category == "residuals"]
    small = [part.num_bytes for part in parts if part.num_bytes < least]
    large = [part for part in parts if part.num_bytes >= least]
    lines = [(f"  {short_label(part.label)} x {part.num_layers}", part.num_bytes) for part in large]
    return [*lines, (f"  {len(small)} smaller", sum(small))]


def sources_table(row: ExplainRecord) -> Table:
    """A table of the seven sources of memory, and the categories that make up each.

    A source is what a person knows, such as parameters and gradients.
    """
    absent = {"frozen parameters"} - {*(row.attribution or ())}  # all other categories are in every step
    parts = {source: ", ".join(part for part in made_of if part not in absent) for source, made_of in SOURCES.items()}
    rows = [(source, gib_number(size), parts[source]) for source, size in (row.sources or {}).items()]
    return list_table("the same by source", ("source", "GiB", "made of"), rows, last=1)


def state_table(row: ExplainRecord) -> Table:
    """A table of how parameters and optimizer state are sharded on a mesh.

    It has the bytes in all, and on each device.
    """
    parts = [part for part in row.state if part.category != "inputs"]
    rows = [(one.category, *map(gib_number, (one.num_bytes, one.divided_bytes, one.whole_bytes))) for one in parts]
    title = f"the state on {row.num_devices} devices, {row.mesh}"
    return list_table(title, ("GiB", "in all", "on each: parts", "on each: whole"), rows)


def largest_table(row: ExplainRecord) -> Table:
    """A table of the largest live buffers at the peak.

    Each has its shape and the source line that made it.
    """
    rows = [
        (
            short_label(part.label) + f" x {part.num_buffers}" * (part.num_buffers > 1),
            gib_number(part.num_bytes),
            part.shape,
            Path(part.source).name,
        )
        for part in row.largest or []
    ]
    table = list_table("the largest buffers at the peak", ("buffer", "GiB", "shape", "made at"), rows, last=2)
    table.padding = (0, 0, 0, 1)
    return table


def findings_table(row: ExplainRecord) -> Table:
    """A table of the lint's findings: the rule, its bytes, the evidence and the remedy."""
    found = row.findings or ()
    rows = [(one.rule, gib_number(one.num_bytes or None), f"{one.evidence}.\n-> {one.remedy}") for one in found]
    return list_table(f"lint: {_step_name(row)}", ("rule", "GiB", "evidence -> remedy"), rows, last=1)


def rows_table(rows: Sequence[ExplainRecord]) -> Table:
    """A table with one row per policy and batch, and one column per source of memory.

    If a step was run, a last column has the allocator's peak.
    """
    table = steps_table("memory", "side by side: GiB on the device at the peak", rows)
    table.padding = (0, 0, 0, 1)
    return table


def peak_place_sentence(row: ExplainRecord) -> str:
    """Where in the program the peak is, counted from 0 as on the page.

    Empty if the step wasn't compiled.
    """
    peak = row.peak
    if not peak:
        return ""
    scope = f", {peak.op_name}" if peak.op_name else ""
    source = f", at {short_source(peak.source)}" if peak.source else ""
    place = f"position {peak.position:,} of {peak.num_positions - 1:,}"
    return f"The peak is in the {peak.phase} pass, {place}: {peak.name}{scope}{source}."


def allocator_sentence(row: ExplainRecord) -> str:
    """The allocator's figures after the step: in use, peak, pool, largest free block.

    Empty if the step wasn't run.
    """
    found = row.allocator
    sizes = (found.in_use_bytes, found.peak_bytes, found.pool_bytes, found.largest_free_bytes) if found else ()
    words = ("in use", "peak", "pool", "largest free block")
    said = [f"{gib(size)} {word}" for size, word in zip(sizes, words, strict=False) if size is not None]
    return f"Measured by the allocator after the step: {', '.join(said)}." if said else ""


def _step_name(row: ExplainRecord) -> str:
    return f"{policy_text(row)}, batch {batch_text(row)}"


def short_label(label: str) -> str:
    """A short form of a label.

    `state.params['mlp']['kernel']` becomes `state.params.mlp.kernel`.
    """
    return re.sub(r"\['([^']*)'\]", r".\1", label)
