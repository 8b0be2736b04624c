"""Prints the records of `run` and `explain` as soon as they are finished.

With `--json` each record is a line of JSON on stdout. Otherwise the records become tables and sentences. With `--out` the
records are appended to a file too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxremat.report.explain import (
    allocator_sentence,
    findings_table,
    holders_table,
    largest_table,
    peak_sentence,
    rows_table,
    sources_table,
    state_table,
)
from jaxremat.report.kept import kept_sentences
from jaxremat.report.lengths import buckets_table, lengths_sentences, lengths_table, misfit_sentences, rates_table
from jaxremat.report.meshes import mesh_sentence, meshes_table
from jaxremat.report.plan import code_to_paste, layouts_sentences, layouts_table, more_table, plan_sentences, price_table
from jaxremat.report.policy_text import policies_in_full
from jaxremat.report.screen import print_text, print_whole
from jaxremat.report.so_far import batch_so_far_sentence, plan_so_far_sentence
from jaxremat.report.table import (
    attached_sentences,
    batch_sentence,
    batch_table,
    failure_sentence,
    frontier_table,
    job_sentences,
    largest_sentence,
    lint_sentences,
    no_suggestion_sentence,
    policy_table,
    rank_sentence,
    source_sentence,
    suggestions_table,
    why_not,
)
from jaxremat.trial.comparisons import LengthsRecord, MeshChoiceRecord, RankRecord
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
        console: prints to stdout, for a person.
        as_json: whether stdout gets the records instead of tables and sentences, one line of JSON per record.
        out: a store that the records are appended to. None if no file was asked for.
    """

    console: Console
    as_json: bool = False
    out: Store | None = None

    def record(self, record: Record) -> None:
        """Appends a finished record to the file at once. With `as_json` it is printed to stdout too."""
        try:
            if self.out:
                self.out.append([record])
        finally:
            if self.as_json:
                print(to_json(record), flush=True)

    def say(self, *sentences: str, wrap: bool = True) -> None:
        """Prints sentences for a person, one per line. With `wrap` a long sentence is broken at the terminal's width."""
        for sentence in () if self.as_json else sentences:
            print_text(self.console, sentence) if wrap else self.console.print(Text(sentence), soft_wrap=True)

    def show(self, *tables: Table, whole: bool = False) -> None:
        """Prints tables for a person, with an empty line before each table. A `whole` one is meant for copying."""
        for table in () if self.as_json else tables:
            self.console.print()
            print_whole(self.console, table) if whole else self.console.print(table)


class Printer:
    """Takes the records of `jaxremat.run` in the order in which they are finished, and keeps them for the tables.

    Args:
        report: where the results go.
        explain: whether each plan is shown with what its tensors are worth, and with code to paste.
        on_plan: called with each plan after it was printed.

    Attributes:
        answers: the trials that answer what was asked: those at the batches asked for, or at the largest batch that fits.
        num_compiles: how many compiles the answers took.
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
        self._lengths: LengthsRecord | None = None
        self._so_far: TrialRecord | MeshChoiceRecord | None = None
        self._in_full: set[str] = set()
        self.answers: list[TrialRecord] = []
        self.num_compiles = 0

    def row(self, record: Record) -> None:
        """Takes a finished record: it goes to the file at once, to stdout with `--json`, and is kept for the table."""
        self._so_far = None
        match record:
            case LargestBatchRecord():
                self._found = record
            case PlanRecord():
                self._plans.append(record)
            case FailureRecord():
                self._failures.append(record)
                self._num_failures += 1
            case TrialRecord():
                self._rows.append(record)
        self._report.record(record)

    def so_far(self, record: TrialRecord | MeshChoiceRecord) -> None:
        """Takes what a search has found so far. `policy_done` prints it if no answer replaced it."""
        self._so_far = record

    def mesh_chosen(self, record: MeshChoiceRecord) -> None:
        """Takes the meshes that were compared for the next policy, and prints them side by side at once."""
        self._so_far = None
        try:
            self._report.record(record)
        finally:  # where the file can't be written, this is printed all the same
            self._report.show(meshes_table(record))
            self._report.say(mesh_sentence(record))

    def policy_done(self, *, as_frontier: bool = False) -> None:
        """Prints the table of one policy and the answer in a sentence, or the table of a frontier. Then its plans are saved.

        Where a signal or an error ended a search, it prints what was found, and says that it isn't the answer.
        """
        if as_frontier:
            self._show_frontier()
        else:
            self._show_policy()
        ended = (*self._rows, *self._plans, *([self._found] if self._found else []))
        self.num_compiles += max((record.num_compiles for record in ended), default=0)
        self._report.say(*map(failure_sentence, self._failures))
        match self._so_far:
            case MeshChoiceRecord() as meshes:
                self.mesh_chosen(meshes)
            case TrialRecord() as best:
                self._report.record(best)
                self._report.show(batch_table([best]))
                self._report.say(plan_so_far_sentence(best))
        self._so_far, plans = None, self._plans
        self._rows, self._found, self._plans, self._failures = [], None, [], []
        for plan in plans:
            self._on_plan(plan)

    def _show_policy(self) -> None:
        self._num_policies += bool(self._rows or self._failures)
        by_batch = {row.batch: row for row in self._rows}
        rows = [row for row in by_batch.values() if row.record == "trial"]
        self._all += rows
        best = self._found and (self._found.largest_batch or self._found.next_batch)
        answers = [row for row in rows if not self._found or row.batch == best]
        self.answers += answers
        for policy in dict.fromkeys(row.policy for row in by_batch.values()):  # planned batches may have different policies
            self._report.show(batch_table([row for row in by_batch.values() if row.policy == policy]))
        said = (*self._sentences(rows), *kept_sentences(answers), *lint_sentences(answers), *job_sentences(answers))
        self._report.say(*said)
        for plan in self._plans:
            self._show_plan(plan)
        self._say_in_full(by_batch.values())

    def _say_in_full(self, rows: Iterable[TrialRecord]) -> None:
        """Prints the policies whose text isn't whole in the tables, each once."""
        lines = [line for line in policies_in_full(rows) if line not in self._in_full]
        self._in_full |= {*lines}
        self._report.say(*lines, wrap=False)

    def _show_frontier(self) -> None:
        """Prints the named policies and the plans at one batch, the fewest bytes first."""
        self._all += self._rows
        self.answers += self._rows
        if self._rows:
            self._report.show(frontier_table(self._rows))
            self._say_in_full(self._rows)
            self._report.say(*job_sentences(self._rows))
            if remat := max(row.num_xla_remat or 0 for row in self._rows):
                self._report.say(f"XLA's own rematerialization changed the program: {remat} instructions duplicated.")

    def _show_plan(self, plan: PlanRecord) -> None:
        self._report.say(*plan_sentences(plan))
        if plan.unrolled_error:
            self._report.say(f"Unrolled layers couldn't be compared: {plan.unrolled_error}")
        if plan.layouts:
            self._report.show(layouts_table(plan))
            self._report.say(*layouts_sentences(plan))
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
        if self._rows and not rows:
            return [batch_so_far_sentence(self._rows)]
        too_big = [row for row in rows if row.fits is False]
        return [batch_sentence(row) for row in rows] + [why_not(row) for row in too_big[:1]]

    def all_done(self, target: str, lengths: LengthsRecord | None = None) -> None:
        """Prints what concerns all policies together.

        This is a table of the lengths or of the policies if there are several, how well the predicted times rank the policies,
        and the times' source.

        Args:
            target: the name of the target.
            lengths: the data set in buckets, if one was asked for.
        """
        self._lengths = lengths
        ranks = rank_records(self.answers)
        try:
            for record in (*ranks, *([lengths] if lengths else [])):
                self._report.record(record)
        finally:
            if self._all:
                self._show_all(target, lengths, ranks)

    def _show_all(self, target: str, lengths: LengthsRecord | None, ranks: Sequence[RankRecord]) -> None:
        if lengths:
            self._report.show(buckets_table(lengths), rates_table(lengths))
            self._report.say(*lengths_sentences(lengths))
        elif len({row.seq_len for row in self.answers}) > 1:
            self._report.show(lengths_table(self.answers))
            self._report.say(*misfit_sentences(self.answers))
        elif self._num_policies > 1:
            self._report.show(policy_table(self.answers, "policies side by side"))
        self._report.say(*map(rank_sentence, ranks), *attached_sentences(self._all), source_sentence(self._all, target))

    def misfit(self) -> TrialRecord | None:
        """The answer of the fewest bytes, if nothing fits and nothing failed. None otherwise."""
        rows = [row for row in self.answers if row.total_bytes is not None]
        if not rows or any(row.fits or row.error for row in self._all):
            return None
        return min(rows, key=lambda row: row.total_bytes or 0)

    def exit_code(self) -> int:
        """The exit code: 0, or 1 if a trial failed, or 3 if nothing that was asked for fits, or not every bucket."""
        if self._num_failures or any(row.error for row in self._all):
            return 1
        if self._lengths and not all(bucket.fits for bucket in self._lengths.buckets):
            return 3
        return 0 if any(row.outcome == "ok" for row in self.answers) else 3


class ExplainPrinter:
    """Takes the records of `jaxremat explain`: prints each in full, and several side by side at the end.

    Attributes:
        rows: the records so far.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.rows: list[ExplainRecord] = []

    def row(self, row: ExplainRecord) -> None:
        """Takes a finished record: it goes to the file at once, and to stdout."""
        self.rows.append(row)
        try:
            self._report.record(row)
        finally:
            self._show(row)

    def _show(self, row: ExplainRecord) -> None:
        if row.total_bytes is not None:
            tables = [holders_table(row), sources_table(row), *([table] if (table := state_table(row)).row_count else [])]
            self._report.show(*tables, *([largest_table(row)] if row.largest else []))
            self._report.say(peak_sentence(row))
        self._report.say(batch_sentence(row))
        if row.total_bytes is not None and (allocator := allocator_sentence(row)):
            self._report.say(allocator)
        if row.findings:
            self._report.show(findings_table(row))
        elif row.findings is not None:
            self._report.say("Lint: nothing found.")

    def all_done(self) -> None:
        """Prints the rows side by side if there are several, and the policies whose text isn't whole in the tables."""
        if len(self.rows) > 1:
            self._report.show(rows_table(self.rows))
        self._report.say(*policies_in_full(self.rows), wrap=False)

    def misfit(self) -> ExplainRecord | None:
        """The step of the fewest bytes, if no step fits and no step failed. None otherwise."""
        if not self.rows or any(row.fits or row.error for row in self.rows):
            return None
        return min(self.rows, key=lambda row: row.total_bytes or 0)

    def exit_code(self) -> int:
        """The exit code: 0, or 1 if a step failed, or 3 if nothing that was asked for fits."""
        if any(row.error for row in self.rows):
            return 1
        return 0 if any(row.fits for row in self.rows) else 3


def print_misfit(
    report: Report,
    explained: ExplainRecord | None,
    suggestions: Sequence[SuggestionRecord],
    least: SuggestionRecord | None,
) -> None:
    """Prints, if nothing fits, the largest live buffers and the suggestions.

    Args:
        report: where the results go.
        explained: the step that doesn't fit, with its largest buffers. None if they were printed before.
        suggestions: the changes of the flags under which the step fits.
        least: of all changes that were compiled, the one of the fewest bytes, printed if there is no suggestion.
    """
    for record in (*([explained] if explained else []), *suggestions):
        report.record(record)
    if explained and explained.largest:
        report.show(largest_table(explained))
    if suggestions:
        report.show(suggestions_table(suggestions), whole=True)
    else:
        report.say(no_suggestion_sentence(least))
