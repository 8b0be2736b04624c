"""What to rent, for a person: one table, sorted, with sentences on the fastest and the cheapest row.

The fastest: 64 x h100-80gb, data=8,fsdp=8: 812,000 tokens/s.
"""

from collections.abc import Sequence

from rich.table import Table

from jaxremat.report.interval import interval_text
from jaxremat.report.policy_text import as_typed, in_full
from jaxremat.report.table import gib_number, table_of
from jaxremat.trial.recommendation import NONE_TEXT, RecommendationRecord

#: On narrower lines, columns of costs have room only if one space is between them.
_ROOMY = 100


def ranked(rows: Sequence[RecommendationRecord], *, by_cost: bool) -> list[RecommendationRecord]:
    """The rows in order: by cost where prices are known, else by tokens per second. What doesn't fit comes last."""

    def rank(row: RecommendationRecord) -> tuple[bool, bool, float, float]:
        cost = row.cost_per_billion if by_cost else None
        return (
            not row.fits,
            row.fits and by_cost and cost is None,
            (cost if cost is not None else -(row.tokens_per_s or 0.0)) if row.fits else float(row.total_bytes is None),
            float(row.over_bytes or 0),
        )

    return sorted(rows, key=rank)


def recommend_table(rows: Sequence[RecommendationRecord], title: str, *, by_cost: bool, width: int) -> Table:
    """The table of the rows, in their order, for lines of `width` characters. Rows without an answer are in the sentences."""
    rate = f"{_counted(rows)}/s"
    money = ["hours", "cost"] if by_cost else []
    columns = ("GPUs", "mesh", "policy", "batch", "GiB", f"{rate}\nof all", f"under\n{NONE_TEXT}", *money)
    table = table_of(title, *columns, left=3)
    if by_cost and width < _ROOMY:
        table.padding = 0
    for row in rows:
        if row.total_bytes is None:
            continue
        table.add_row(
            f"{row.num_devices} {row.target}",
            row.mesh or "-",
            _policy(row),
            _batch(row),
            gib_number(row.total_bytes),
            _tokens_per_s(row) if row.fits else f"{gib_number(row.over_bytes)} over",
            _none(row),
            *([_short_number(row.hours_per_billion), _short_number(row.cost_per_billion)] if by_cost else []),
        )
    return table


def _counted(rows: Sequence[RecommendationRecord]) -> str:
    """What the rates count: tokens, or samples of a workload that doesn't say how many tokens a batch has."""
    return "samples" if any(row.counted == "samples" for row in rows) else "tokens"


def _policy(row: RecommendationRecord) -> str:
    """The policy of an answer as it was typed."""
    return as_typed(row.requested_policy or "", row.policy or "") if row.fits else "does not fit"


def policies_in_full(rows: Sequence[RecommendationRecord]) -> list[str]:
    """A line for each policy whose whole text isn't in the table, to be printed without line breaks."""
    return in_full((_policy(row), row.policy or "", _place(row)) for row in rows if row.fits)


def _batch(row: RecommendationRecord) -> str:
    if row.batch is None:
        return "-"
    return str(row.batch) if row.accumulate in (None, 1) else f"{row.accumulate} x {row.batch}"


def _tokens_per_s(row: RecommendationRecord) -> str:
    error = f" {interval_text(row.predicted_interval)}" if row.predicted_interval and not row.mesh else ""
    return "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}{error}"


def _none(row: RecommendationRecord) -> str:
    """What the step takes or reaches without checkpointing: `140.20 GiB` if it doesn't fit, or a share of the row's speed."""
    if row.checkpointing == "needed":
        return f"{gib_number(row.none_total_bytes)} GiB"
    if row.checkpointing is None or not row.none_tokens_per_s or not row.tokens_per_s:
        return "-"
    return f"{100 * row.none_tokens_per_s / row.tokens_per_s:.0f}%"


def _short_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"


def best_sentences(rows: Sequence[RecommendationRecord], *, by_cost: bool, is_complete: bool = True) -> list[str]:
    """The fastest row, and the cheapest one where prices are known. They are those so far unless the rows are complete.

    That nothing fits is said only of complete rows without an error.
    """
    fitting = [row for row in rows if row.fits and row.tokens_per_s]
    if not fitting:
        return ["Nothing fits on any of these GPUs."] if is_complete and not any(row.error for row in rows) else []
    fastest, so_far = max(fitting, key=lambda row: row.tokens_per_s or 0.0), "" if is_complete else " so far"
    said = [f"The fastest{so_far}: {_place(fastest)}: {fastest.tokens_per_s:,.0f} {fastest.counted}/s, predicted."]
    priced = [row for row in fitting if row.cost_per_billion is not None]
    if by_cost and priced:
        row = min(priced, key=lambda row: row.cost_per_billion or 0.0)
        said.append(
            f"The cheapest{so_far}: {_place(row)}: {_short_number(row.cost_per_billion)} for a billion {row.counted}, in "
            f"{_short_number(row.hours_per_billion)} hours."
        )
    return said


def _place(row: RecommendationRecord) -> str:
    mesh = f", {row.mesh}" if row.mesh else ""
    return f"{row.num_devices} x {row.target}{mesh}"


def explanations(rows: Sequence[RecommendationRecord], *, by_cost: bool) -> list[str]:
    """What the columns mean, how sure the numbers are, and why some rows are missing."""
    counted = _counted(rows)
    said = [f"GiB and batch are those of one GPU; {counted}/s are those of all GPUs of a row, predicted."]
    if intervals := {row.predicted_interval for row in rows if row.mesh and row.fits and row.predicted_interval}:
        text = " or ".join(sorted(map(interval_text, intervals)))
        said.append(f"Published steps on several GPUs took {text} longer than predicted.")
    if any(row.checkpointing for row in rows):
        said.append(
            f"Under {NONE_TEXT}: the share of the row's speed that is reached without checkpointing; or the GiB of the smallest "
            "such step where it doesn't fit, so that checkpointing is needed."
        )
    if by_cost:
        said.append(f"Hours and cost are those of a billion {counted}.")
        if unpriced := dict.fromkeys(row.target for row in rows if row.price_per_hour is None):
            said.append(f"No price: {', '.join(unpriced)}.")
    if states := [row for row in rows if row.over_bytes is not None and row.batch is None]:
        said.append(
            f"Rows without a batch: {len(states)}. Their parameters and optimizer state alone are over the budget, and nothing "
            "was compiled."
        )
    for row in rows:
        if row.error:
            what = "Left out" if row.total_bytes is None else "Failed"
            said.append(f"{what}, {row.num_devices} x {row.target}: {row.error}")
    return said
