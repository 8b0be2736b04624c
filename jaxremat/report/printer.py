"""Prints a run's records as they come: as JSON lines, or as tables and sentences; and appends them to a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from jaxremat.report.explain import (
    allocator_sentence,
    findings_table,
    holders_table,
    largest_table,
    peak_sentence,
    rows_table,
    sources_table,
)
from jaxremat.report.plan import code_to_paste, more_table, plan_sentences, price_table
from jaxremat.report.table import (
    attached_sentences,
    batch_sentence,
    batch_table,
    failure_sentence,
    frontier_table,
    largest_sentence,
    lint_sentences,
    no_suggestion_sentence,
    policy_table,
    rank_sentence,
    source_sentence,
    suggestions_table,
    why_not,
)
from jaxremat.trial.lines import to_json
from jaxremat.trial.ranks import rank_records
from jaxremat.trial.record import (
    ExplainRecord,
    FailureRecord,
    LargestBatchRecord,
    PlanRecord,
    Record,
    SuggestionRecord,
    TrialRecord,
)
from jaxremat.trial.store import Store


@dataclass(frozen=True)
class Report:
    """Where a command's results go.

    Attributes:
        console: stdout, for a person.
        as_json: stdout gets the records instead, a line of JSON each.
        out: a file that gets the records too.
    """

    console: Console
    as_json: bool = False
    out: Store | None = None

    def record(self, record: Record) -> None:
        """A finished record: to the file at once, and to stdout with `as_json`."""
        try:
            if self.out:
                self.out.append([record])
        finally:
            if self.as_json:
                print(to_json(record), flush=True)

    def say(self, *sentences: str, wrap: bool = True) -> None:
        """Prints sentences for a person, a line each."""
        for sentence in () if self.as_json else sentences:
            self.console.print(sentence, markup=False, highlight=False, soft_wrap=not wrap)

    def show(self, *tables: Table) -> None:
        """Prints tables for a person, with an empty line before each."""
        for table in () if self.as_json else tables:
            self.console.print()
            self.console.print(table)


class Printer:
    """Takes records in the order they are finished; remembers them for the tables and the exit code.

    Args:
        report: where the results go.
        explain: whether plans are shown with their prices, and with code to paste.
        on_plan: gets each plan.
    """

    def __init__(
        self, report: Report, *, explain: bool = False, on_plan: Callable[[PlanRecord], None] = lambda plan: None
    ) -> None:
        self._report, self._explain, self._on_plan = report, explain, on_plan
        self._rows: list[TrialRecord] = []
        self._found: LargestBatchRecord | None = None
        self._plans: list[PlanRecord] = []
        self._failures: list[FailureRecord] = []
        self._all: list[TrialRecord] = []
        self._num_policies = self._num_failures = 0
        self.answers: list[TrialRecord] = []

    def heading(self, lines: Sequence[str]) -> None:
        """What the run is, a line each."""
        self._report.say(*lines)

    def row(self, record: Record) -> None:
        """A finished record: to the file at once, to stdout with `--json`, and kept for the table."""
        match record:
            case LargestBatchRecord():
                self._found = record
            case PlanRecord():
                self._plans.append(record)
                self._on_plan(record)
            case FailureRecord():
                self._failures.append(record)
                self._num_failures += 1
            case TrialRecord():
                self._rows.append(record)
        self._report.record(record)

    def policy_done(self, *, as_frontier: bool = False) -> None:
        """Prints one policy's table and its answer in a sentence, or the table of a frontier."""
        if as_frontier:
            self._show_frontier()
        else:
            self._show_policy()
        self._report.say(*map(failure_sentence, self._failures))
        self._rows, self._found, self._plans, self._failures = [], None, [], []

    def _show_policy(self) -> None:
        self._num_policies += 1
        by_batch = {row.batch: row for row in self._rows}
        rows = [row for row in by_batch.values() if row.record == "trial"]
        self._all += rows
        best = self._found and (self._found.largest_batch or self._found.next_batch)
        answers = [row for row in rows if not self._found or row.batch == best]
        self.answers += answers
        if not by_batch:
            return
        for policy in dict.fromkeys(row.policy for row in by_batch.values()):  # planned, each batch may have its own
            self._report.show(batch_table([row for row in by_batch.values() if row.policy == policy]))
        self._report.say(*self._sentences(rows), *lint_sentences(answers))
        for plan in self._plans:
            self._show_plan(plan)

    def _show_frontier(self) -> None:
        """Named policies and plans at one batch, from the fewest bytes."""
        self._all += self._rows
        self.answers += self._rows
        if self._rows:
            self._report.show(frontier_table(self._rows))
            if remat := max(row.num_xla_remat or 0 for row in self._rows):
                self._report.say(f"XLA's own rematerialization changed the program: {remat} instructions duplicated.")

    def _show_plan(self, plan: PlanRecord) -> None:
        self._report.say(*plan_sentences(plan))
        if not self._explain:
            return
        if plan.prices:
            self._report.show(price_table(plan))
        else:
            self._report.say("\nNo tensor's saving would take time off, by the model.")
        self._report.show(more_table(plan))
        self._report.say(*code_to_paste(plan), wrap=False)

    def _sentences(self, rows: list[TrialRecord]) -> list[str]:
        if self._found:
            sentences = [largest_sentence(self._found)]
            return sentences + [why_not(row) for row in rows if not row.fits and self._found.largest_batch == 0]
        too_big = [row for row in rows if row.fits is False]
        return [batch_sentence(row) for row in rows] + [why_not(row) for row in too_big[:1]]

    def all_done(self, target: str) -> None:
        """Policies side by side where there are several, how well predictions order them, and where the times come from."""
        ranks = rank_records(self.answers)
        for found in ranks:
            self._report.record(found)
        if not self._all:
            return
        if self._num_policies > 1:
            self._report.show(policy_table(self.answers, "policies side by side"))
        self._report.say(*map(rank_sentence, ranks), *attached_sentences(self._all), source_sentence(self._all, target))

    def misfit(self) -> TrialRecord | None:
        """Of the answers the one of the fewest bytes, where none fits and none failed."""
        rows = [row for row in self.answers if row.total_bytes is not None]
        if not rows or any(row.fits or row.error for row in self._all):
            return None
        return min(rows, key=lambda row: row.total_bytes or 0)

    def exit_code(self) -> int:
        """0; 1 if a trial failed; 3 if nothing that was asked for fits."""
        if self._num_failures or any(row.error for row in self._all):
            return 1
        return 0 if any(row.outcome == "ok" for row in self.answers) else 3


class ExplainPrinter:
    """Takes the records of `jaxremat.explain`: one in full, several with the table of all at the end."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.rows: list[ExplainRecord] = []

    def heading(self, lines: Sequence[str]) -> None:
        """What is compiled, a line each."""
        self._report.say(*lines)

    def row(self, row: ExplainRecord) -> None:
        """A finished record: to the file at once, and to stdout."""
        self.rows.append(row)
        self._report.record(row)
        if row.total_bytes is not None:
            self._report.show(holders_table(row), sources_table(row), *([largest_table(row)] if row.largest else []))
            self._report.say(peak_sentence(row))
        self._report.say(batch_sentence(row))
        if row.total_bytes is not None and (allocator := allocator_sentence(row)):
            self._report.say(allocator)
        if row.findings:
            self._report.show(findings_table(row))
        elif row.findings is not None:
            self._report.say("Lint: nothing found.")

    def all_done(self) -> None:
        """Prints the rows side by side where there are several."""
        if len(self.rows) > 1:
            self._report.show(rows_table(self.rows))

    def misfit(self) -> ExplainRecord | None:
        """Of the steps the one of the fewest bytes, where none fits and none failed."""
        if not self.rows or any(row.fits or row.error for row in self.rows):
            return None
        return min(self.rows, key=lambda row: row.total_bytes or 0)

    def exit_code(self) -> int:
        """0; 1 if a step failed; 3 if nothing that was asked for fits."""
        if any(row.error for row in self.rows):
            return 1
        return 0 if any(row.fits for row in self.rows) else 3


def print_misfit(
    report: Report,
    explained: ExplainRecord | None,
    suggestions: Sequence[SuggestionRecord],
    least: SuggestionRecord | None,
) -> None:
    """Where nothing fits: the largest buffers, and what fits instead."""
    for record in (*([explained] if explained else []), *suggestions):
        report.record(record)
    if explained and explained.largest:
        report.show(largest_table(explained))
    if suggestions:
        report.show(suggestions_table(suggestions))
    else:
        report.say(no_suggestion_sentence(least))
