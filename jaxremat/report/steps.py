"""The tables of steps, meshes and offers: a column is one line of `COLUMNS`.

The lines are in the order of every table, and each says which tables have the column. So one more column of the table that
`jaxremat run` prints for each policy is one more line:

    Column("peak", "batches", _gib("peak_bytes")),

Sizes are in GiB. Every step time comes with its source, measured or predicted. A rate with `=` before it is that of a step which
isn't told apart from the fastest one (`trial/ties.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any, Literal

from rich.table import Table

from jaxremat.report.policy_text import policy_text
from jaxremat.report.table import gib_number, interval_text, number, table_of
from jaxremat.trial.recommendation import NONE_TEXT
from jaxremat.trial.record import PlanRecord, StepRecord, SuggestionRecord, TrialRecord
from jaxremat.trial.ties import trial_ties
from jaxremat.workload.given import OWN_LOSS
from jaxremat.xla.buffers import SOURCES

#: The rows of one table: records, or what records have, such as the buckets of a data set. All are of one class.
Rows = Sequence[Any]
#: The mark of rows that are as fast as the fastest one.
TIED = "="
#: Makes the text of a cell from its row and all rows.
Cell = Callable[[Any, Rows], str]


@dataclass(frozen=True)
class Column:
    """One column of the tables of steps.

    Attributes:
        name: what the column is called here. It is the title if there is no other.
        tables: the names of the tables that have it, with blanks between them.
        cell: makes the text of a cell from its row and all rows.
        title: the title, or what makes it from the rows. A table leaves a column with an empty title out.
        align: `right` for numbers, `left`, or `broken` for text that is aligned left and may take several lines.
        drops: when it drops out where the table is too wide: 1 is the first one. A column with 0 stays.
    """

    name: str
    tables: str
    cell: Cell
    title: str | Callable[[Rows], str] | None = None
    align: Literal["right", "left", "broken"] = "right"
    drops: int = 0

    def title_of(self, rows: Rows) -> str:
        """The title above these rows. Empty where they have no such column."""
        return self.name if self.title is None else self.title if isinstance(self.title, str) else self.title(rows)


def predicted_title(rows: Rows) -> str:
    """The title of a column of predicted times.

    It is `predicted ms ±16%`, or `predicted ms -10..+14%` for several GPUs.

    The widest of the rows' intervals counts. Without one the title is `predicted ms`.
    """
    known = [row.predicted_interval for row in rows if row.predicted_interval]
    if not known:
        return "predicted\nms"
    text = interval_text((min(low for low, _ in known), max(high for _, high in known)))
    return f"predicted\nms{' ' if len(text) < len('predicted') - 2 else chr(10)}{text}"


def step_title(rows: Rows) -> str:
    """The title of a column of step times.

    It is `measured ms`, `predicted ms ±16%`, or `step ms` if the sources differ.
    """
    sources = _step_sources(rows)
    if sources == {"predicted"}:
        return predicted_title(rows)
    return "measured ms" if sources == {"measured"} else "step ms"


def rate_title(rows: Rows) -> str:
    """The title of a column of rates: `tokens/s`, or `samples/s` if no row has tokens."""
    has_samples = any(row.samples_per_s or row.loss == OWN_LOSS for row in rows)
    return "samples/s" if has_samples and not any(row.tokens_per_s for row in rows) else "tokens/s"


def batch_text(row: Any) -> str:
    """The batch: `8`. If there are several microbatches, their number comes first: `4 x 8`."""
    several = getattr(row, "accumulate", None) not in (None, 1)
    return "-" if row.batch is None else f"{row.accumulate} x {row.batch}" if several else str(row.batch)


def loss_text(row: StepRecord | PlanRecord) -> str:
    """The loss, to put at the end of a title: `, full loss`.

    Empty for a workload that has only its own.
    """
    return "" if row.loss == OWN_LOSS else f", {row.loss} loss"


def policy_with_differences(row: Any, rows: Rows) -> str:
    """The policy of a row, with what differs between the rows beside it.

    For example `dots (chunked, unrolled)` or `dots (fsdp=8)`. The best step of a plan so far says that its search ended early.
    """
    differing = [name for name in ("loss", "layout", "mesh") if len({getattr(one, name, None) for one in rows}) > 1]
    ended = ", search ended early" if getattr(row, "record", None) == "probe" else ""
    return policy_text(row) + (f" ({', '.join(str(getattr(row, name)) for name in differing)})" if differing else "") + ended


def short_number(value: float | None) -> str:
    """A cost or hours: `12.3`, with two digits below 10."""
    return number(value, 1 if value and value >= 10 else 2)


def _step_sources(rows: Rows) -> set[str]:
    return {row.step_source for row in rows if getattr(row, "step_source", None)}


def _field(name: str, show: Callable[[Any], str]) -> Cell:
    """Makes cells of one field."""
    return lambda row, rows: show(getattr(row, name))


def _gib(name: str) -> Cell:
    return _field(name, gib_number)


def _number(name: str, digits: int = 0, unit: float = 1) -> Cell:
    return lambda row, rows: number(getattr(row, name), digits, unit)


def _where_any(title: str, name: str) -> Callable[[Rows], str]:
    """Makes the title of a column that a table has where a row has this field."""
    return lambda rows: title * any(getattr(row, name) for row in rows)


def _step(row: Any, rows: Rows) -> str:
    """The step time in ms. Where the rows' sources differ, its own one follows: `1,274.3 m`."""
    return number(row.step_s, 1, 1e-3) + (
        f" {row.step_source[0]}" if len(_step_sources(rows)) > 1 and row.step_source else ""
    )


def _rate(row: Any, rows: Rows) -> str:
    """Tokens per second, or samples per second where the tokens aren't known.

    Samples have one decimal below 100.
    """
    samples = getattr(row, "samples_per_s", None)
    return number(samples, int(samples < 100)) if row.tokens_per_s is None and samples else number(row.tokens_per_s)


def _source(name: str) -> Cell:
    """Makes cells of one source of memory."""
    return lambda row, rows: gib_number((row.sources or {}).get(name))


def _allocator_peak(row: Any, rows: Rows) -> str:
    return gib_number(row.allocator and row.allocator.peak_bytes)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{round(value, 1) or 0.0:{sign}.1f}%"  # never -0.0%


def _mfu(row: TrialRecord, rows: Rows) -> str:
    return _percent(row.mfu and 100 * row.mfu)


def _if_measured(cell: Cell) -> Cell:
    return lambda row, rows: cell(row, rows) if row.measured_step_s else "-"


def _recompute(no_fit: str) -> Cell:
    """Makes cells of the recompute in %, or of how the step failed."""
    return lambda row, rows: "failed" if row.error else _percent(row.recompute_overhead_percent) if row.fits else no_fit


def _fits(row: TrialRecord, rows: Rows) -> str:
    """Whether the step fits by its compiled bytes, or what a run of the step showed otherwise."""
    if row.error or row.ran == "oom":
        return "failed" if row.error else "oom"
    return "yes" if row.fits else "no, ran" if row.ran == "ok" else "no"


def _best(row: TrialRecord, rows: Rows) -> str:
    """Whether a row of a frontier takes less time than all rows before it.

    Those have fewer bytes.
    """
    return "yes" * all((row.step_s or 0) < other.step_s for other in takewhile(lambda other: other is not row, rows))


def _offered_rate(row: Any, rows: Rows) -> str:
    """The rate of all GPUs of a row, or by how much the least step is over the budget."""
    if not row.fits:
        return f"{gib_number(row.over_bytes)} over"
    error = f" {interval_text(row.predicted_interval)}" if row.predicted_interval and not row.mesh else ""
    return f"{number(row.tokens_per_s)}{error if row.tokens_per_s else ''}"


def _under_none(row: Any, rows: Rows) -> str:
    """What the step takes or reaches without checkpointing.

    That is `140.20 GiB` if it doesn't fit, or else a share of the row's speed.
    """
    if row.checkpointing == "needed":
        return f"{gib_number(row.none_total_bytes)} GiB"
    return f"{row.none_tokens_per_s / row.tokens_per_s:.0%}" if row.none_tokens_per_s and row.tokens_per_s else "-"


#: The titles of the sources of memory that are too long for a column each.
_SHORT = {"optimizer state": "optim", "parameters": "params", "gradients": "grads", "activations": "activ"}
_SHORT |= {"workspace": "work", "fragmentation": "frag"}
#: How the layers run, in words.
LAYOUT_WORDS = {"loop": "in a loop", "unrolled": "unrolled"}
_SIDE_BY_SIDE = "policies lengths frontier"

COLUMNS = (
    Column("GPUs", "offers", lambda row, _: f"{row.num_devices} {row.target}", align="broken"),
    Column("seq len", "lengths buckets", _number("seq_len"), align="left"),
    Column("mesh", "offers meshes", _field("mesh", lambda mesh: mesh or "-"), align="broken"),
    Column("layers", "layouts", _field("layout", LAYOUT_WORDS.__getitem__), align="broken"),
    Column("flags", "suggestions", _field("flags", str), align="broken"),
    Column("policy", f"{_SIDE_BY_SIDE} buckets", policy_with_differences, align="broken"),
    Column("policy", "memory", lambda row, _: policy_text(row), align="broken"),
    Column("policy", "offers", lambda row, _: policy_text(row) if row.fits else "does not fit", align="broken"),
    Column("sequences", "buckets", _number("num_sequences")),
    Column("share", "buckets", lambda row, rows: f"{row.num_sequences / sum(one.num_sequences for one in rows):.1%}"),
    Column("padding", "buckets", lambda row, _: f"{1 - row.num_tokens / (row.num_sequences * row.seq_len):.1%}"),
    Column("state", "meshes", _gib("state_bytes"), drops=4),
    Column(
        "batch", "batches attached policies lengths buckets meshes offers layouts memory", lambda row, _: batch_text(row)
    ),
    *(Column(name, "memory", _source(name), _SHORT.get(name)) for name in SOURCES),
    Column("total", "batches attached memory", _gib("total_bytes")),
    Column("peak", "memory", _allocator_peak, _where_any("peak", "allocator")),
    Column("GiB", f"{_SIDE_BY_SIDE} buckets meshes offers layouts suggestions", _gib("total_bytes")),
    Column("recompute", "policies frontier", _recompute("does not fit"), drops=2),
    Column("recompute", "lengths", _recompute("no fit"), drops=2),
    Column("state", "batches", _gib("argument_bytes"), drops=4),
    Column("temp", "batches", _gib("temp_bytes"), drops=3),
    Column("peak", "attached", _gib("measured_peak_bytes")),
    Column("differs", "attached", _field("measured_over_total_percent", lambda over: _percent(over, "+"))),
    Column("host", "batches attached", _gib("host_temp_bytes"), _where_any("host", "host_temp_bytes")),
    Column("fits", "batches attached", _fits),
    Column("measured", "attached", _number("measured_step_s", 1, 1e-3), "measured\nms"),
    Column("predicted", "attached", _number("predicted_step_s", 1, 1e-3), predicted_title),
    Column("step", f"batches {_SIDE_BY_SIDE} buckets layouts suggestions", _step, step_title),
    Column("MFU", "policies lengths", _mfu, drops=1),
    Column("at most", "meshes", _number("bound_tokens_per_s")),
    Column("rate", f"batches {_SIDE_BY_SIDE} meshes layouts suggestions", _rate, rate_title),
    Column("rate", "attached", _if_measured(_rate), rate_title),
    Column("rate", "buckets", lambda row, rows: _rate(row, rows) if row.fits else "no fit", "real\ntokens/s"),
    Column("rate", "offers", _offered_rate),
    Column("under none", "offers", _under_none, f"under\n{NONE_TEXT}"),
    Column("hours", "offers", _field("hours_per_billion", short_number)),
    Column("cost", "offers", _field("cost_per_billion", short_number)),
    Column("MFU", "batches", _mfu, drops=1),
    Column("MFU", "attached", _if_measured(_mfu), drops=1),
    Column("best", "frontier", _best),
    Column("compile s", "layouts", _number("compile_s", 1)),
    Column("left out", "meshes", _field("left_out", str), align="broken"),
)


def steps_table(
    kind: str,
    title: str,
    rows: Rows,
    *,
    titles: Mapping[str, str] = {},
    cells: Sequence[Mapping[str, str]] = (),
    best: Any = None,
    tied: Sequence[Any] = (),
    marked: str = "rate",
) -> Table:
    """The table of some rows.

    A step that doesn't fit or failed is red, and the `best` one green.

    Args:
        kind: the name of the table in `COLUMNS`.
        title: what is above the table.
        rows: one for each row of the table. None is a trial without a step, all of whose other cells are `-`.
        titles: by a column's name, the title that the rows don't say. Empty leaves the column out.
        cells: for each row by a column's name, what the row doesn't say.
        best: the row to show in green.
        tied: the rows with the mark of equally fast steps.
        marked: the name of the column that has the mark.
    """
    steps = [row for row in rows if row is not None]
    of_table = [column for column in COLUMNS if kind in column.tables.split()]
    titled = [(column, titles[column.name] if column.name in titles else column.title_of(steps)) for column in of_table]
    shown = [(column, text) for column, text in titled if text]
    dropped = sorted((column.drops, text) for column, text in shown if column.drops)
    table = table_of(title, dropped=[text for _, text in dropped])
    for column, text in shown:
        justify = "right" if column.align == "right" else "left"
        table.add_column(text, justify=justify, no_wrap=column.align != "broken", overflow="fold")
    for row, given in zip_longest(rows, cells, fillvalue={}):
        texts = [given.get(column.name) or (column.cell(row, steps) if row else "-") for column, _ in shown]
        if any(row is one for one in tied):
            texts = [
                f"{TIED} {text}" if column.name == marked else text for (column, _), text in zip(shown, texts, strict=True)
            ]
        is_bad = getattr(row, "outcome", "ok") != "ok" or not getattr(row, "fits", True)
        table.add_row(*texts, style="red" if is_bad else "green" if best and row is best else "")
    return table


def batch_table(rows: Sequence[TrialRecord]) -> Table:
    """A table with one row per batch that was compiled for one policy.

    On an attached GPU it has the compiled bytes and the predicted time beside those that the device showed.
    """
    rows, is_attached = sorted(rows, key=lambda row: row.batch), any(row.limit_bytes for row in rows)
    title = f"policy {policy_text(rows[0])}: GiB on the device"
    table = steps_table("attached" if is_attached else "batches", title, rows)
    table.collapse_padding = is_attached
    return table


def policy_table(rows: Sequence[TrialRecord], title: str) -> Table:
    """A table of policies side by side, each at the batch of its row.

    If losses, layouts or meshes differ, they follow the policy's name: `dots (chunked, unrolled)`.
    """
    rated = [row for row in rows if row.fits and not row.error and row.rate]
    fastest = max(rated, key=lambda row: row.rate) if len(rated) > 1 else None
    return steps_table("policies", title, rows, best=fastest, tied=trial_ties(rows))


def frontier_rows(rows: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The rows of a frontier whose bytes and time are known, the fewest bytes first."""
    return sorted((row for row in rows if row.total_bytes and row.step_s), key=lambda row: row.total_bytes or 0)


def frontier_table(rows: Sequence[TrialRecord]) -> Table:
    """A table of policies at one batch, the fewest bytes first.

    A policy is `best` if no other policy takes both fewer bytes and less time.
    """
    rows = frontier_rows(rows)
    title = f"frontier at batch {rows[0].batch}{loss_text(rows[0])}" if rows else "frontier"
    return steps_table("frontier", title, rows, tied=trial_ties(rows))


def suggestions_table(rows: Sequence[SuggestionRecord]) -> Table:
    """A table of flags under which the step fits, with their bytes, step time and rate."""
    titles = {"step": f"{rows[0].step_source or 'step'} ms"}
    return steps_table("suggestions", "what fits instead, compiled", rows, titles=titles)
