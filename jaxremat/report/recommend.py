"""What to rent: one table, sorted, with sentences on the fastest and the cheapest row.

The fastest: 64 x h100-80gb, data=8,fsdp=8: 812,000 tokens/s.
"""

from collections.abc import Sequence

from rich.table import Table

from jaxremat.chips.catalog import chip_of
from jaxremat.chips.speed import COMPARED_GPUS
from jaxremat.report import policy_text
from jaxremat.report.steps import TIED, short_number, steps_table
from jaxremat.report.table import interval_text
from jaxremat.trial.recommendation import NONE_TEXT, RecommendationRecord, share_between
from jaxremat.trial.ties import ties

#: On narrower lines, columns of costs have room only if one space is between them.
_ROOMY = 100


def ranked(rows: Sequence[RecommendationRecord], *, by_cost: bool) -> list[RecommendationRecord]:
    """The rows in order: by cost where prices are known, else by tokens per second.

    What doesn't fit comes last.
    """

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
    """The table of the rows, in their order, for lines of `width` characters.

    Rows without an answer are in the sentences.
    """
    titles = {"GPUs": f"{_device(rows)}s", "rate": f"{_unit(rows)}/s\nof all"}
    titles |= {} if by_cost else {"hours": "", "cost": ""}
    shown, tied = [row for row in rows if row.total_bytes is not None], _tied(rows, by_cost=by_cost)
    table = steps_table("offers", title, shown, titles=titles, tied=tied, marked="cost" if by_cost else "rate")
    if by_cost and width < _ROOMY:
        table.padding = 0
    return table


def _tied(rows: Sequence[RecommendationRecord], *, by_cost: bool) -> list[RecommendationRecord]:
    """The rows that are as fast as the fastest one, or as cheap as the cheapest one."""

    def rate(row: RecommendationRecord) -> float | None:
        if not by_cost:
            return row.tokens_per_s if row.fits else None
        return 1 / row.cost_per_billion if row.cost_per_billion else None

    return ties(rows, rate, _error)


def _error(best: RecommendationRecord, row: RecommendationRecord) -> float:
    """By which share a row may be faster beside the best one."""
    if best.target == row.target:
        return best.paired_error or 0.0
    return share_between(row.predicted_interval, best.predicted_interval)


def policies_in_full(rows: Sequence[RecommendationRecord]) -> list[str]:
    """A line for each policy whose whole text isn't in the table.

    The lines are to be printed without line breaks.
    """
    return policy_text.policies_in_full((row for row in rows if row.fits), _gpus_and_mesh)


def _unit(rows: Sequence[RecommendationRecord]) -> str:
    """What the rates count: tokens, or samples of a workload that doesn't say its tokens."""
    return "samples" if any(row.counted == "samples" for row in rows) else "tokens"


def _device(rows: Sequence[RecommendationRecord]) -> str:
    """What a row has a number of."""
    return "GPU" if all(chip_of(row.target).is_gpu for row in rows) else "device"


def best_sentences(rows: Sequence[RecommendationRecord], *, by_cost: bool, is_complete: bool = True) -> list[str]:
    """The fastest row, and the cheapest one where prices are known.

    They are those so far unless the rows are complete.

    That nothing fits is said only of complete rows without an error.
    """
    fitting = [row for row in rows if row.fits and row.tokens_per_s]
    if not fitting:
        return (
            [f"Nothing fits on any of these {_device(rows)}s."] if is_complete and not any(row.error for row in rows) else []
        )
    fastest, so_far = max(fitting, key=lambda row: row.tokens_per_s or 0.0), "" if is_complete else " so far"
    speed = f"{fastest.tokens_per_s:,.0f} {fastest.counted}/s, predicted"
    said = [f"{_place('fastest', rows, by_cost=False)}{so_far}: {_gpus_and_mesh(fastest)}: {speed}."]
    priced = [row for row in fitting if row.cost_per_billion is not None]
    if by_cost and priced:
        row = min(priced, key=lambda row: row.cost_per_billion or 0.0)
        cost, hours = short_number(row.cost_per_billion), short_number(row.hours_per_billion)
        cheapest = f"{_place('cheapest', rows, by_cost=True)}{so_far}: {_gpus_and_mesh(row)}"
        said.append(f"{cheapest}: {cost} for a billion {row.counted}, in {hours} hours.")
    return said


def _left_out(rows: Sequence[RecommendationRecord], *, by_cost: bool) -> list[str]:
    """By number of devices, how many kinds were left out.

    It says the most that one of them could reach, and why.
    """
    left_out = [row for row in rows if row.bound_tokens_per_s and not (by_cost and row.price_per_hour is None)]
    device, parts = _device(left_out), list[str]()
    for number in dict.fromkeys(row.num_devices for row in left_out):
        beside = [row for row in left_out if row.num_devices == number]
        best = max(beside, key=lambda row: row.bound_tokens_per_s or 0.0)
        kinds = f"{number} {device}{'s' if number > 1 else ''} of {len(beside)} other kind{'s' if len(beside) > 1 else ''}"
        parts.append(f"{kinds} (at most {best.bound_tokens_per_s:,.0f} {best.counted}/s, {best.target})")
    if not parts:
        return []
    why = f"By their interval they can't be the {'cheapest' if by_cost else 'fastest'} of as many {device}s"
    return [
        f"Left out: {'; '.join(parts)}.",
        f"{why}, even if all their kernels were as fast as their fastest matmul. --target NAME compiles for one of them.",
    ]


def _place(what: str, rows: Sequence[RecommendationRecord], *, by_cost: bool) -> str:
    """`The fastest`, or `One of the 3 fastest` where predicted times don't tell them apart."""
    tied = _tied(rows, by_cost=by_cost)
    return f"One of the {len(tied)} {what}" if tied else f"The {what}"


def _gpus_and_mesh(row: RecommendationRecord) -> str:
    return f"{row.num_devices} x {row.target}" + (f", {row.mesh}" if row.mesh else "")


def explanations(rows: Sequence[RecommendationRecord], *, by_cost: bool) -> list[str]:
    """What the columns mean, how sure the numbers are, and why some rows are missing."""
    rate, device = _unit(rows), _device(rows)
    said = [f"GiB and batch are those of one {device}; {rate}/s are those of all {device}s of a row, predicted."]
    if in_scans := {row.loss for row in rows if row.fits and row.layout == "loop"}:
        how = "in a scan, and the loss is chunked" if in_scans == {"chunked"} else "in a scan"
        said.append(f"Layers are {how}. Unrolled ones compile longer and may be faster: --scan-layers auto.")
    shown = {row.target: row.predicted_interval for row in rows if row.mesh and row.fits and row.predicted_interval}
    if took := " or ".join(sorted({interval_text(of) for target, of in shown.items() if chip_of(target).is_gpu})):
        said.append(
            f"Published steps on several {COMPARED_GPUS} took {took} longer than predicted. No others were compared."
        )
    if others := [f"{target} {interval_text(of)}" for target, of in shown.items() if not chip_of(target).is_gpu]:
        said.append(f"Steps may take longer than predicted: {', '.join(others)}.")
    if any(row.checkpointing for row in rows):
        share = f"Under {NONE_TEXT}: the share of the row's speed that is reached without checkpointing"
        said.append(f"{share}; or the GiB of the smallest such step where it doesn't fit, so that checkpointing is needed.")
    if tied := _tied(rows, by_cost=by_cost):
        apart = f"rows of one kind of {device} are told apart by {tied[0].paired_error or 0.0:.0%}, others by their interval"
        said.append(f"{TIED} As {'cheap as the cheapest' if by_cost else 'fast as the fastest'}: {apart}.")
    if by_cost:
        said.append(f"Hours and cost are those of a billion {rate}.")
    if by_cost and (unpriced := dict.fromkeys(row.target for row in rows if row.price_per_hour is None)):
        left_out = ", and so left out" if any(row.bound_tokens_per_s and row.price_per_hour is None for row in rows) else ""
        said.append(f"No price{left_out}: {', '.join(unpriced)}.")
    if num_states := sum(row.over_bytes is not None and row.batch is None for row in rows):
        state = "Their parameters and optimizer state alone are over the budget, and nothing was compiled."
        said.append(f"Rows without a batch: {num_states}. {state}")
    said += _left_out(rows, by_cost=by_cost)
    failed = [("Left out" if row.total_bytes is None else "Failed", row) for row in rows if row.error]
    return [*said, *(f"{how}, {row.num_devices} x {row.target}: {row.error}" for how, row in failed)]
