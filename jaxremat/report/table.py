"""Tables and sentences of `jaxremat.run` for a person. They fit in 80 columns.

Sizes are in GiB. Every step time comes with its source, measured or predicted. The sentence of a search:

    The largest batch that fits under dots is 128: 58.99 GiB of 59.33 GiB; batch 129 needs 59.44 GiB.
"""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from jaxremat.policy.offload import REMAT, flag_line
from jaxremat.report.interval import predicted_column
from jaxremat.report.policy_text import policy_text
from jaxremat.report.screen import FittingTable
from jaxremat.trial.comparisons import RankRecord
from jaxremat.trial.record import FailureRecord, LargestBatchRecord, StepRecord, SuggestionRecord, TrialRecord
from jaxremat.units import gib
from jaxremat.workload.given import OWN_LOSS

#: The width that a terminal shows without breaking lines, in characters.
MAX_WIDTH = 80


def table_of(title: str, *columns: str, left: int = 1) -> Table:
    """A table without rows, at least as wide as its title. The first `left` columns are text, the others numbers."""
    width = min(len(title), MAX_WIDTH)
    style = {"title_justify": "left", "title_style": "bold", "min_width": width}
    table = FittingTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False, **style)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold")
    return table


def gib_number(num_bytes: int | None) -> str:
    """Bytes in GiB without the unit, for a column whose title has the unit: `12.34`, or `-` for None."""
    return "-" if num_bytes is None else gib(num_bytes).removesuffix(" GiB")


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{round(value, digits) or 0.0:.{digits}f}%"  # never -0.0%


#: A record with a rate: of tokens where the workload says how many a batch has, of samples otherwise.
Rated = TrialRecord | SuggestionRecord


def rate_column(rows: Sequence[Rated]) -> str:
    """The title of the column of rates: `tokens/s`, or `samples/s` if no row has tokens."""
    has_samples = any(row.samples_per_s for row in rows) or any(row.loss == OWN_LOSS for row in rows)
    return "samples/s" if has_samples and not any(row.tokens_per_s for row in rows) else "tokens/s"


def _rate_text(row: Rated) -> str:
    """Tokens per second, or samples per second where the tokens aren't known: one decimal below 100."""
    if row.tokens_per_s is not None:
        return f"{row.tokens_per_s:,.0f}"
    value = row.samples_per_s
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def batch_text(row: StepRecord) -> str:
    """The batch: `8`. If there are several microbatches, their number comes first: `4 x 8`."""
    return str(row.batch) if row.accumulate == 1 else f"{row.accumulate} x {row.batch}"


def step_column(rows: Sequence[TrialRecord]) -> str:
    """The title of the column of step times: `measured ms`, `predicted ms ±12%`, or `step ms` if the sources differ."""
    titles = {"predicted": predicted_column(row.predicted_interval for row in rows), "measured": "measured ms"}
    sources = {row.step_source for row in rows if row.step_source}
    return titles[sources.pop()] if len(sources) == 1 else "step ms"


def _step_text(row: TrialRecord, mixed: bool) -> str:
    return _milliseconds(row.step_s) + (f" {row.step_source[0]}" if mixed and row.step_source else "")


def batch_table(rows: Sequence[TrialRecord]) -> Table:
    """A table with one row per batch that was compiled for one policy."""
    rows = sorted(rows, key=lambda row: row.batch)
    if any(row.limit_bytes for row in rows):
        return _attached_table(rows)
    mixed = len({row.step_source for row in rows if row.step_source}) > 1
    host = any(row.host_temp_bytes for row in rows)
    columns = ["batch", "total", "state", "temp", *(["host"] if host else []), "fits", step_column(rows)]
    columns += [rate_column(rows), "MFU"]
    table = table_of(f"policy {policy_text(rows[0])}: GiB on the device", *columns, left=0)
    for row in rows:
        if row.error and row.total_bytes is None:
            table.add_row(batch_text(row), *["-"] * (3 + host), "failed", *["-"] * 3)
            continue
        table.add_row(
            batch_text(row),
            gib_number(row.total_bytes),
            gib_number(row.argument_bytes),
            gib_number(row.temp_bytes),
            *([gib_number(row.host_temp_bytes)] if host else []),
            "failed" if row.error else "yes" if row.fits else "no",
            _step_text(row, mixed),
            _rate_text(row),
            _percent(row.mfu and 100 * row.mfu),
            style=_style(row),
        )
    return table


def _style(row: TrialRecord, best: TrialRecord | None = None) -> str:
    """The colour of a row on a terminal: red for a step that doesn't fit or failed, green for the fastest that fits."""
    return "red" if row.error or not row.fits else "green" if row is best else ""


def _fastest_row(rows: Sequence[TrialRecord]) -> TrialRecord | None:
    """The row of most tokens or samples a second, of those that fit. None where no row has a rate, or only one fits."""
    rated = [row for row in rows if row.fits and not row.error and (row.tokens_per_s or row.samples_per_s)]
    return max(rated, key=lambda row: row.tokens_per_s or row.samples_per_s or 0) if len(rated) > 1 else None


def _attached_table(rows: Sequence[TrialRecord]) -> Table:
    """The table of an attached GPU: the compiled bytes and predicted time beside those that the device showed."""
    host = any(row.host_temp_bytes for row in rows)
    columns = ["batch", "total", "peak", "differs", *(["host"] if host else []), "fits", "measured\nms"]
    columns += [predicted_column(row.predicted_interval for row in rows)]
    columns += [rate_column(rows), *([] if host else ["MFU"])]  # with both columns the table is wider than 80
    table = table_of(f"policy {policy_text(rows[0])}: GiB on the device", *columns, left=0)
    table.collapse_padding = True
    for row in rows:
        over = row.measured_over_total_percent
        table.add_row(
            batch_text(row),
            gib_number(row.total_bytes),
            gib_number(row.measured_peak_bytes),
            "-" if over is None else f"{over:+.1f}%",
            *([gib_number(row.host_temp_bytes)] if host else []),
            _fits(row),
            _milliseconds(row.measured_step_s),
            _milliseconds(row.predicted_step_s),
            _rate_text(row) if row.measured_step_s else "-",
            *([] if host else [_percent(row.mfu and 100 * row.mfu if row.measured_step_s else None)]),
            style=_style(row),
        )
    return table


def _fits(row: TrialRecord) -> str:
    """Whether the step fits by its compiled bytes. If a run of the step showed otherwise, what the run showed."""
    if row.error:
        return "failed"
    if row.ran == "ok" and not row.fits:
        return "no, ran"
    return "oom" if row.ran == "oom" else "yes" if row.fits else "no"


def attached_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What the columns of an attached GPU's table mean, and how large the memory outside the allocator was."""
    run = [row for row in rows if row.ran]
    said = []
    if any(row.measured_peak_bytes for row in run):
        said.append(
            "Total is compiled; peak is the high-water mark of the device's allocator, each batch in a fresh process."
        )
    if outside := [row for row in run if row.outside_bytes is not None]:
        sizes = sorted(row.outside_bytes or 0 for row in outside)
        between = gib(sizes[0]) if sizes[0] == sizes[-1] else f"{gib(sizes[0])} to {gib(sizes[-1])}"
        how = (
            "NVML's count of the process"
            if all(row.outside_source == "process" for row in outside)
            else ("the rise of the whole card's use, as NVML doesn't tell the process's own")
        )
        said.append(f"Outside the allocator's pool (CUDA context, libraries' workspaces): {between}, by {how}.")
    return said


def rank_sentence(found: RankRecord) -> str:
    """How well the predicted step times rank the policies, compared with the measured ones."""
    at = f"at batch {found.batch}" if found.batch is not None else "each at its own batch, per sequence"
    return (
        f"Predicted against measured step times of {len(found.policies)} policies, {at}: "
        f"Spearman's rank correlation {found.spearman:+.2f}."
    )


def differing_text(row: TrialRecord, rows: Sequence[TrialRecord]) -> str:
    """What differs between the rows beside the policy, to put after it: ` (chunked, unrolled)`, or ` (fsdp=8)`."""
    differing = [name for name in ("loss", "layout", "mesh") if len({getattr(row, name) for row in rows}) > 1]
    return f" ({', '.join(str(getattr(row, name)) for name in differing)})" if differing else ""


def policy_table(rows: Sequence[TrialRecord], title: str) -> Table:
    """A table of policies side by side, each at the batch of its row.

    If losses, layouts or meshes differ, they follow the policy's name: `dots (chunked, unrolled)`.
    """
    mixed = len({row.step_source for row in rows if row.step_source}) > 1
    table = table_of(title, "policy", "batch", "GiB", "recompute", step_column(rows), "MFU", rate_column(rows))
    best = _fastest_row(rows)
    for row in rows:
        failed = "failed" if row.error else ("" if row.fits else "does not fit")
        cells = answer_cells(row, failed, mixed=mixed)
        table.add_row(policy_text(row) + differing_text(row, rows), *cells, style=_style(row, best))
    return table


def answer_cells(row: TrialRecord, failed: str, *, mixed: bool = False) -> list[str]:
    """The cells of one row of `policy_table` after the policy: batch, GiB, recompute, step time, MFU and rate.

    Args:
        row: the trial.
        failed: how the trial failed, written in place of the recompute. Empty if the trial didn't fail.
        mixed: whether the rows' step times have different sources. If so, the source's first letter follows the time.
    """
    return [
        batch_text(row),
        gib_number(row.total_bytes),
        failed or _percent(row.recompute_overhead_percent),
        _step_text(row, mixed),
        _percent(row.mfu and 100 * row.mfu),
        _rate_text(row),
    ]


def frontier_table(rows: Sequence[TrialRecord]) -> Table:
    """A table of policies at one batch, the fewest bytes first.

    A policy is `best` if no other policy takes both fewer bytes and less time.
    """
    rows = sorted((row for row in rows if row.total_bytes and row.step_s), key=lambda row: row.total_bytes or 0)
    title = f"frontier at batch {rows[0].batch}{loss_text(rows[0])}" if rows else "frontier"
    table = table_of(title, "policy", "GiB", "recompute", step_column(rows), rate_column(rows), "best")
    fastest = float("inf")
    for row in rows:
        is_best = (row.step_s or 0) < fastest
        fastest = min(fastest, row.step_s or fastest)
        table.add_row(
            policy_text(row),
            gib_number(row.total_bytes),
            _percent(row.recompute_overhead_percent),
            _milliseconds(row.step_s),
            _rate_text(row),
            "yes" if is_best else "",
        )
    return table


def loss_text(row: StepRecord) -> str:
    """The decoder's loss, to put at the end of a title: `, full loss`. Empty for a workload that has only its own."""
    return "" if row.loss == OWN_LOSS else f", {row.loss} loss"


def list_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A table of `rows`. The first `left` columns are text, the others numbers."""
    table = table_of(title, *columns, left=left)
    for row in rows:
        table.add_row(*row)
    return table


def largest_sentence(found: LargestBatchRecord) -> str:
    """The largest batch that a search found. If its step was run, how the run ended."""
    if found.compiled_largest_batch is not None:
        return _went_down_sentence(found)
    said = [_compiled_sentence(found)]
    if found.ran == "oom":
        said.append(f"Batch {found.largest_batch} ran out of memory when run, and a smaller one failed for another reason.")
    elif found.ran == "ok" and found.next_ran == "oom":
        said.append(
            f"Both were run, each in a fresh process: {found.largest_batch} ran, {found.next_batch} ran out of memory."
        )
    elif found.ran == "ok" and found.next_ran == "ok":
        over = gib((found.next_batch_total_bytes or 0) - found.budget_bytes)
        said.append(
            f"Both were run, each in a fresh process, and {found.next_batch} ran too: for it the compiled bytes were "
            f"pessimistic, by at least {over}."
        )
    elif found.ran == "ok" and found.next_ran is not None:
        said.append(
            f"{found.largest_batch} ran in a fresh process; {found.next_batch} ended otherwise there: {found.next_ran}."
        )
    elif found.ran == "ok":
        said.append("It ran in a fresh process.")
    return " ".join(said)


def _went_down_sentence(found: LargestBatchRecord) -> str:
    promised, budget, policy = found.compiled_largest_batch, gib(found.budget_bytes), policy_text(found)
    if not found.largest_batch:
        return f"By compiled bytes batch {promised} fits under {policy} in {budget}, but none ran: each ran out of memory."
    return (
        f"The largest batch that ran under {policy} is {found.largest_batch}: "
        f"{gib(found.largest_batch_total_bytes or 0)} of {budget}; batch {found.next_batch} ran out of memory. By compiled "
        f"bytes {promised} fits: they were optimistic."
    )


def _compiled_sentence(found: LargestBatchRecord) -> str:
    budget, what = gib(found.budget_bytes), "batch" if found.global_batch is None else "microbatch"
    policy = policy_text(found)

    def size(batch: int) -> str:
        return f"{batch}" if found.global_batch is None else f"{batch} ({found.global_batch // batch} x {batch})"

    if found.largest_batch == 0:
        needs = gib(found.next_batch_total_bytes or 0)
        return f"Not even {what} {size(found.next_batch or 1)} fits under {policy}: it needs {needs} of {budget}."
    total = gib(found.largest_batch_total_bytes or 0)
    fits = f"The largest {what} that fits under {policy} is {size(found.largest_batch)}: {total} of {budget}"
    if found.next_batch is not None:
        return f"{fits}; {what} {size(found.next_batch)} needs {gib(found.next_batch_total_bytes or 0)}."
    if found.largest_batch == found.global_batch:
        return f"{fits}; that is the whole global batch."
    if found.max_batch is None:
        return f"{fits}; XLA takes no larger one."
    return f"{fits}; larger ones weren't tried (--max-batch {found.max_batch})."


def batch_sentence(row: StepRecord) -> str:
    """Whether one batch that was asked for fits."""
    if row.total_bytes is None:
        return f"Batch {batch_text(row)} under {policy_text(row)} failed: {row.error}"
    verb = "fits" if row.fits else "does not fit"
    sentence = f"Batch {batch_text(row)} {verb} under {policy_text(row)}: {gib(row.total_bytes)} of {gib(row.budget_bytes)}."
    return f"{sentence} It failed when run: {row.error}" if row.error else sentence


def failure_sentence(failure: FailureRecord) -> str:
    """How a trial failed for which no bytes are known."""
    what = f"batch {failure.batch}" if failure.batch else "the search for the largest batch"
    return f"{failure.requested_policy}, {what}: {failure.outcome}, {failure.error}"


def why_not(row: TrialRecord) -> str:
    """The terms that add up to the total bytes of a step that doesn't fit.

    For example `1.39 GiB parameters, optimizer state and batch + 79.00 GiB temporaries = 80.39 GiB.`
    """
    state, temp, budget = row.argument_bytes or 0, row.temp_bytes or 0, row.budget_bytes
    outputs = (row.output_bytes or 0) - (row.alias_bytes or 0)
    terms = f"{gib(state)} parameters, optimizer state and batch + {gib(temp)} temporaries" + (
        f" + {gib(outputs)} outputs" if outputs >= 2**20 else ""
    )
    alone = " The state alone is over the budget, whatever the policy." if state > budget else ""
    return f"{terms} = {gib(row.total_bytes or 0)}.{alone}"


def suggestions_table(suggestions: Sequence[SuggestionRecord]) -> Table:
    """A table of the suggestions: flags under which the step fits, with their bytes, step time and rate."""
    source = suggestions[0].step_source or "step"
    rows = [(s.flags, gib_number(s.total_bytes), _milliseconds(s.step_s), _rate_text(s)) for s in suggestions]
    return list_table("what fits instead, compiled", ("flags", "GiB", f"{source} ms", rate_column(suggestions)), rows)


def no_suggestion_sentence(least: SuggestionRecord | None) -> str:
    """The sentence for a step without a suggestion.

    Args:
        least: of all changes that were compiled, the one of the fewest bytes. None if there was none to try.
    """
    if least is None:
        return "No change that is known here would help: a larger --target or --budget."
    short = gib(least.total_bytes - least.budget_bytes)
    return (
        f"No change that was tried is enough: {least.flags} takes the least, {gib(least.total_bytes)}, {short} too much. "
        f"A larger --target or --budget{'.' if least.loss == OWN_LOSS else ', a shorter --seq-len, or --param-dtype bfloat16.'}"
    )


def lint_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """The lint's findings in a policy's steps, a sentence each. Of a rule those of the last step that it finds fault with."""
    last = {finding.rule: row for row in rows for finding in row.findings or []}
    found = [finding for rule, row in last.items() for finding in row.findings or [] if finding.rule == rule]
    return [f"Lint, {finding.rule}: {finding.evidence}. Remedy: {finding.remedy}" for finding in found]


def job_sentences(rows: Sequence[TrialRecord]) -> list[str]:
    """What to set for the bytes of a step, where XLA's own rematerialization would change it in a job. Empty for no such step."""
    changed = [row for row in rows if row.xla_remat_above_bytes and (row.total_bytes or 0) > row.xla_remat_above_bytes]
    if not changed:
        return []
    least = min(changed, key=lambda row: row.batch)
    line = flag_line(*filter(None, (least.disabled_pass, REMAT)))
    return [
        f"In a job XLA's own rematerialization changes a step above {gib(least.xla_remat_above_bytes or 0)}, such as batch "
        f"{least.batch} under {policy_text(least)}. {line} gives a job the bytes shown; --xla-remat shows those without it."
    ]


def source_sentence(rows: Sequence[TrialRecord], target: str) -> str:
    """Where the step times of a table come from: measured on this machine, predicted for the target, or both."""
    sources = {row.step_source for row in rows if row.step_source}
    if any(row.limit_bytes and row.predicted for row in rows):
        sources.add("predicted")  # an attached GPU's table has both times
    if not sources and not any(row.total_bytes for row in rows):
        return "Nothing was compiled, so there is no time."
    if not sources and any(row.mesh for row in rows):
        return "No time: this target's peak, or a link between its devices, isn't known."
    if not sources:
        return "No time: this target's peak isn't known, and it isn't in this machine."
    said = ["measured: median over real steps on this machine"] if "measured" in sources else []
    if "predicted" in sources:
        said.append(
            f"predicted: from the compiled kernels, by what such kernels reach of the peaks of {target}"
            + (". Nothing was run" if sources == {"predicted"} else "")
        )
    return "Step times are " + "; ".join(said) + "."
