"""Prints a run's records as they come: as JSON lines, or as tables and sentences; and appends them to a file."""

from collections.abc import Callable

from rich.console import Console

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


class Printer:
    """Takes records in the order they are finished; remembers them for the tables and the exit code."""

    def __init__(
        self,
        console: Console,
        *,
        as_json: bool,
        out: Store | None,
        explain: bool = False,
        on_plan: Callable[[PlanRecord], None] = lambda plan: None,
    ) -> None:
        self._console, self._json, self._out, self._explain, self._on_plan = console, as_json, out, explain, on_plan
        self._rows: list[TrialRecord] = []
        self._found: LargestBatchRecord | None = None
        self._plans: list[PlanRecord] = []
        self._failures: list[FailureRecord] = []
        self._answers: list[TrialRecord] = []
        self._all: list[TrialRecord] = []
        self._num_policies = self._num_failures = 0

    def heading(self, notes: list[str]) -> None:
        """What the run is, a line each."""
        if not self._json:
            for note in notes:
                self._console.print(note, markup=False, highlight=False)

    def row(self, record: Record) -> None:
        """A finished record: to the file at once, to stdout with `--json`, and kept for the table."""
        if isinstance(record, LargestBatchRecord):
            self._found = record
        elif isinstance(record, PlanRecord):
            self._plans.append(record)
            self._on_plan(record)
        elif isinstance(record, FailureRecord):
            self._failures.append(record)
            self._num_failures += 1
        elif isinstance(record, TrialRecord):
            self._rows.append(record)
        _emit(record, self._json, self._out)

    def policy_done(self) -> None:
        """Prints one policy's table and its answer in a sentence."""
        self._num_policies += 1
        by_batch = {row.batch: row for row in self._rows}
        rows = [row for row in by_batch.values() if row.record == "trial"]
        self._all += rows
        best = self._found and (self._found.largest_batch or self._found.next_batch)
        answers = [row for row in rows if not self._found or row.batch == best]
        self._answers += answers
        if not self._json and by_batch:
            for policy in dict.fromkeys(row.policy for row in by_batch.values()):  # planned, each batch may have its own
                self._console.print()
                self._console.print(batch_table([row for row in by_batch.values() if row.policy == policy]))
            for sentence in [*self._sentences(rows), *lint_sentences(answers)]:
                self._console.print(sentence, markup=False, highlight=False)
            for plan in self._plans:
                self._explain_plan(plan)
        for failure in self._failures:
            if not self._json:
                self._console.print(failure_sentence(failure), markup=False, highlight=False)
        self._rows, self._found, self._plans, self._failures = [], None, [], []

    def frontier(self, rows: list[TrialRecord]) -> None:
        """Named policies and plans at one batch, from the fewest bytes."""
        self._all += rows
        self._answers += rows
        if not self._json and rows:
            self._console.print()
            self._console.print(frontier_table(rows))
            if remat := max(row.num_xla_remat or 0 for row in rows):
                self._console.print(f"XLA's own rematerialization changed the program: {remat} instructions duplicated.")

    def _explain_plan(self, plan: PlanRecord) -> None:
        for sentence in plan_sentences(plan):
            self._console.print(sentence, markup=False, highlight=False)
        if self._explain:
            if not plan.prices:
                self._console.print("\nNo tensor's saving would spare time, by the model.", markup=False, highlight=False)
            for table in (*([price_table(plan)] if plan.prices else []), more_table(plan)):
                self._console.print()
                self._console.print(table)
            for line in code_to_paste(plan):
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _sentences(self, rows: list[TrialRecord]) -> list[str]:
        if self._found:
            sentences = [largest_sentence(self._found)]
            return sentences + [why_not(row) for row in rows if not row.fits and self._found.largest_batch == 0]
        too_big = [row for row in rows if row.fits is False]
        return [batch_sentence(row) for row in rows] + [why_not(row) for row in too_big[:1]]

    def all_done(self, target: str) -> None:
        """Policies side by side where there are several, how well predictions order them, and where the times come from."""
        ranks = rank_records(self._answers)
        for found in ranks:
            _emit(found, self._json, self._out)
        if self._json or not self._all:
            return
        if self._num_policies > 1:
            self._console.print()
            self._console.print(policy_table(self._answers, "policies side by side"))
        for sentence in (*map(rank_sentence, ranks), *attached_sentences(self._all)):
            self._console.print(sentence, markup=False, highlight=False)
        self._console.print(source_sentence(self._all, target), markup=False, highlight=False)

    def misfit(self) -> TrialRecord | None:
        """Of the answers the one of the fewest bytes, where none fits and none failed."""
        rows = [row for row in self._answers if row.total_bytes is not None]
        if not rows or any(row.fits or row.error for row in self._all):
            return None
        return min(rows, key=lambda row: row.total_bytes or 0)

    def exit_code(self) -> int:
        """0; 1 if a trial failed; 3 if nothing that was asked for fits."""
        if self._num_failures or any(row.error for row in self._all):
            return 1
        return 0 if any(row.outcome == "ok" for row in self._answers) else 3


class ExplainPrinter:
    """Takes the records of `jaxremat.explain`: one in full, several with the table of all at the end."""

    def __init__(self, console: Console, *, as_json: bool, out: Store | None) -> None:
        self._console, self._json, self._out = console, as_json, out
        self.rows: list[ExplainRecord] = []

    def heading(self, notes: list[str]) -> None:
        """What is compiled, a line each."""
        for note in [] if self._json else notes:
            self._console.print(note, markup=False, highlight=False)

    def row(self, row: ExplainRecord) -> None:
        """A finished record: to the file at once, and to stdout."""
        self.rows.append(row)
        _emit(row, self._json, self._out)
        if self._json:
            return
        sentences = [batch_sentence(row)]
        if row.total_bytes is not None:
            sentences = [peak_sentence(row), *sentences, *filter(None, [allocator_sentence(row)])]
            for table in (holders_table(row), sources_table(row), *([largest_table(row)] if row.largest else [])):
                self._console.print()
                self._console.print(table)
        for sentence in sentences:
            self._console.print(sentence, markup=False, highlight=False)
        if row.findings:
            self._console.print()
            self._console.print(findings_table(row))
        elif row.findings is not None:
            self._console.print("Lint: nothing found.")

    def all_done(self) -> None:
        """Prints the rows side by side where there are several."""
        if not self._json and len(self.rows) > 1:
            self._console.print()
            self._console.print(rows_table(self.rows))

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
    console: Console,
    explained: ExplainRecord | None,
    suggestions: list[SuggestionRecord],
    least: SuggestionRecord | None,
    *,
    as_json: bool,
    out: Store | None,
) -> None:
    """Where nothing fits: the largest buffers, and what fits instead."""
    for record in (*([explained] if explained else []), *suggestions):
        _emit(record, as_json, out)
    if as_json:
        return
    for table in (
        *([largest_table(explained)] if explained and explained.largest else []),
        *([suggestions_table(suggestions)] if suggestions else []),
    ):
        console.print()
        console.print(table)
    if not suggestions:
        console.print(no_suggestion_sentence(least), markup=False, highlight=False)


def _emit(record: Record, as_json: bool, out: Store | None) -> None:
    """A finished record: to the file at once, and to stdout with `--json`."""
    try:
        if out:
            out.append([record])
    finally:
        if as_json:
            print(to_json(record), flush=True)
