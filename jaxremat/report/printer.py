"""Prints the records of `run` and `explain` as soon as they are finished.

With `--json` each record is a line of JSON on stdout. Otherwise the records become tables and sentences. With `--out` the
records are appended to a file too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxremat.report import explain as memory
from jaxremat.report import sentences, steps
from jaxremat.report.lengths import buckets_table, lengths_sentences, lengths_table, no_fit_sentences, rates_table
from jaxremat.report.meshes import mesh_sentences, meshes_table
from jaxremat.report.plan import code_to_paste, is_of_own_model, plan_parts
from jaxremat.report.policy_text import policies_in_full
from jaxremat.report.saved import saved_sentences
from jaxremat.report.screen import print_text, print_whole
from jaxremat.trial.comparisons import LengthsRecord, MeshChoiceRecord
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
        out: a store that the records are appended to. None if no file was requested.
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
        """Prints sentences for a person, one per line.

        With `wrap` a long sentence is broken at the terminal's width.
        """
        for sentence in () if self.as_json else sentences:
            print_text(self.console, sentence) if wrap else self.console.print(Text(sentence), soft_wrap=True)

    def show(self, *parts: Table | str, whole: bool = False) -> None:
        """Prints tables and sentences for a person.

        A table has an empty line before it. A `whole` one is meant for copying.
        """
        for part in () if self.as_json else parts:
            if isinstance(part, str):
                print_text(self.console, part)
            else:
                self.console.print()
                print_whole(self.console, part) if whole else self.console.print(part)


class Printer:
    """Takes the finished records of `jaxremat run`, and prints tables and sentences.

    Args:
        report: where the results go.
        explain: whether each plan is shown with what its tensors are worth, and with code to paste.
        on_plan: called with each plan after it was printed.

    Attributes:
        answers: the trials that answer the request: those at the requested batches, or at the largest batch that fits.
        num_compiles: how many compiles the answers took.
    """

    def __init__(
        self, report: Report, *, explain: bool = False, on_plan: Callable[[PlanRecord], None] = lambda plan: None
    ) -> None:
        self._report, self._explain, self._on_plan = report, explain, on_plan
        self._by_policy: dict[int, list[Record]] = {}
        self._records = list[Record]()
        self._all: list[TrialRecord] = []
        self._num_policies, self._has_failed, self._reasons = 0, False, dict[str, str]()
        self._lengths: LengthsRecord | None = None
        self._so_far: Callable[[], TrialRecord | MeshChoiceRecord] | None = None
        self._in_full: set[str] = set()
        self.answers: list[TrialRecord] = []
        self.num_compiles = 0

    def turn_to(self, policy: int) -> None:
        """The records that follow are of the policy of this number."""
        self._records = self._by_policy.setdefault(policy, [])

    def row(self, record: Record) -> None:
        """Takes a finished record: it goes to the file at once, and later into a table.

        With `--json` it goes to stdout at once.
        """
        self._so_far = None
        self._records.append(record)
        self._report.record(record)

    def so_far(self, record: Callable[[], TrialRecord | MeshChoiceRecord]) -> None:
        """Takes what a search has found so far.

        `policy_done` makes and prints the record if no answer replaced it.
        """
        self._so_far = record

    def mesh_chosen(self, record: MeshChoiceRecord) -> None:
        """Takes the meshes that were compared for the next policy, and prints them at once."""
        self._so_far = None
        try:
            self._report.record(record)
        finally:  # where the file can't be written, this is printed all the same
            self._report.show(meshes_table(record), *mesh_sentences(record))

    def policy_done(self, *, as_frontier: bool = False) -> None:
        """Prints the table of one policy and the answer in a sentence, or the table of a frontier.

        Then its plans are saved.

        Where a signal or an error ended a search, it prints what was found, and says that it isn't the answer.
        """
        records, so_far, self._so_far = [*self._records], self._so_far, None
        best = so_far() if so_far else None
        self._records.clear()
        trials = [one for one in records if isinstance(one, TrialRecord)]
        searches = [one for one in records if isinstance(one, LargestBatchRecord)]
        planned = [one for one in records if isinstance(one, PlanRecord)]
        failures = [one for one in records if isinstance(one, FailureRecord)]
        if as_frontier:
            self._show_frontier(trials)
        else:
            self._num_policies += bool(trials or failures)
            self._show_policy([*{row.batch: row for row in trials}.values()], next(reversed(searches), None), planned)
        self.num_compiles += max((one.num_compiles for one in (*trials, *searches, *planned)), default=0)
        self._has_failed |= bool(failures)
        self._report.show(*(sentences.failure_sentence(failure, self._reasons) for failure in failures))
        if isinstance(best, MeshChoiceRecord):
            self.mesh_chosen(best)
        elif best:
            self._show_so_far(best)
        for plan in planned:
            self._on_plan(plan)

    def _show_so_far(self, best: TrialRecord) -> None:
        """Prints the best step of a plan whose search was ended, as an answer."""
        self._num_policies += 1
        self._all.append(best)
        self.answers.append(best)
        self._report.record(best)
        said = [*saved_sentences([best]), *sentences.lint_sentences([best]), *sentences.job_sentences([best])]
        self._report.show(steps.batch_table([best]), sentences.plan_so_far_sentence(best), *said)
        self._report.say(*(best.code or ()), wrap=False)
        self._say_in_full([best])

    def policies_done(self) -> None:
        """Prints what was found of the policies that were turned to, as `policy_done`.

        It is nothing where that was called for each.
        """
        for policy, records in self._by_policy.items():
            if records:
                self.turn_to(policy)
                self.policy_done()

    def _show_policy(
        self, by_batch: list[TrialRecord], search: LargestBatchRecord | None, planned: list[PlanRecord]
    ) -> None:
        rows = [row for row in by_batch if row.record == "trial"]
        answers = [row for row in rows if not search or row.batch == (search.largest_batch or search.next_batch)]
        self._all += rows
        self.answers += answers
        policies = dict.fromkeys(row.policy for row in by_batch)  # planned batches may have different policies
        tables = [steps.batch_table([row for row in by_batch if row.policy == policy]) for policy in policies]
        reasons = [row for row in rows if row.fits is False]
        if search:
            said, reasons = [sentences.largest_sentence(search)], [] if search.largest_batch else reasons
        elif by_batch and not rows:
            said = [sentences.batch_so_far_sentence(by_batch)]
        else:
            # A plan's own sentences have the batch and the bytes of its step.
            unsaid = [row for row in rows if not (planned and row.outcome == "ok")]
            said, reasons = [*map(sentences.batch_sentence, unsaid)], reasons[:1]
        said += [*map(sentences.why_not, reasons), *saved_sentences(answers), *sentences.lint_sentences(answers)]
        said += sentences.job_sentences(answers)
        self._report.show(*tables, *said)
        code = {row.policy: row.code for row in answers if row.code}
        for plan in planned:
            self._report.show(*plan_parts(plan, explain=self._explain))
            if self._explain or is_of_own_model(plan):
                code[plan.policy] = (*code_to_paste(plan, plan.as_code or (), plan.as_config or ()),)
            self._report.say(*code.pop(plan.policy, ()), wrap=False)
        self._report.say(*(line for lines in code.values() for line in lines), wrap=False)
        self._say_in_full(by_batch)

    def _say_in_full(self, rows: Iterable[TrialRecord]) -> None:
        """Prints the policies whose text isn't whole in the tables, each once."""
        lines = [line for line in policies_in_full(rows) if line not in self._in_full]
        self._in_full |= {*lines}
        self._report.say(*lines, wrap=False)

    def _show_frontier(self, rows: list[TrialRecord]) -> None:
        """Prints the named policies and the plans at one batch, the fewest bytes first."""
        self._all += rows
        self.answers += rows
        if rows:
            self._report.show(steps.frontier_table(rows), *sentences.tied_sentences(rows))
            self._say_in_full(rows)
            self._report.show(*sentences.job_sentences(rows))
            if remat := max(row.num_xla_remat or 0 for row in rows):
                self._report.show(f"XLA's own rematerialization changed the program: {remat} instructions duplicated.")

    def all_done(self, target: str, lengths: LengthsRecord | None = None) -> None:
        """Prints what concerns all policies together.

        This is a table of the lengths or of the policies if there are several, how well the predicted times rank the policies,
        and the times' source.

        Args:
            target: the name of the target.
            lengths: the data set in buckets, if one was requested.
        """
        self._lengths = lengths
        ranks = rank_records(self.answers)
        try:
            for record in (*ranks, *([lengths] if lengths else [])):
                self._report.record(record)
        finally:
            if self._all:
                self._report.show(*self._side_by_side(), *map(sentences.rank_sentence, ranks))
                self._report.show(*sentences.attached_sentences(self._all), sentences.source_sentence(self._all, target))
                self._report.show(*sentences.microbatches_sentences(self._all))
                self._report.show(*sentences.no_mfu_sentences(self._all), *sentences.unpriced_sentences(self._all))

    def _side_by_side(self) -> Sequence[Table | str]:
        if self._lengths:
            return buckets_table(self._lengths), rates_table(self._lengths), *lengths_sentences(self._lengths)
        if len({row.seq_len for row in self.answers}) > 1:
            return lengths_table(self.answers), *sentences.tied_sentences(self.answers), *no_fit_sentences(self.answers)
        if self._num_policies < 2:
            return []
        table = steps.policy_table(self.answers, "policies side by side")
        return table, *sentences.tied_sentences(self.answers), *sentences.own_sentences(self.answers)

    def fastest(self) -> TrialRecord | None:
        """The answer of the highest rate, if one fits. None otherwise."""
        fitting = (row for row in self.answers if row.outcome == "ok")
        return max(fitting, key=lambda row: row.rate or 0.0, default=None)

    def no_fit(self) -> TrialRecord | None:
        """The answer of the fewest bytes, if nothing fits and nothing failed. None otherwise."""
        rows = [row for row in self.answers if row.total_bytes is not None]
        return None if any(row.fits or row.error for row in self._all) else _least(rows)

    def exit_code(self) -> int:
        """The exit code: 0, 1 if a trial failed, or 3 if nothing that was requested fits.

        It is 3, too, if a bucket doesn't fit.
        """
        if self._has_failed or any(row.error for row in self._all):
            return 1
        if self._lengths and not all(bucket.fits for bucket in self._lengths.buckets):
            return 3
        return 0 if any(row.outcome == "ok" for row in self.answers) else 3


class ExplainPrinter:
    """Takes the records of `jaxremat explain`, and prints each in full.

    At the end it prints several side by side.

    Attributes:
        rows: the records so far.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._has_failed, self._reasons = False, dict[str, str]()
        self.rows: list[ExplainRecord] = []

    def failed(self, failure: FailureRecord) -> None:
        """Takes the record of a policy without a step, and prints why it has none."""
        self._has_failed = True
        try:
            self._report.record(failure)
        finally:
            self._report.show(sentences.failure_sentence(failure, self._reasons))

    def row(self, row: ExplainRecord) -> None:
        """Takes a finished record: it goes to the file at once, and to stdout."""
        self.rows.append(row)
        try:
            self._report.record(row)
        finally:
            self._show_step(row)

    def _show_step(self, row: ExplainRecord) -> None:
        if row.total_bytes is None:
            return self._report.show(sentences.batch_sentence(row))
        tables = [memory.holders_table(row), memory.sources_table(row), memory.state_table(row), memory.largest_table(row)]
        said = memory.peak_place_sentence(row), sentences.batch_sentence(row), memory.allocator_sentence(row)
        self._report.show(*(table for table in tables if table.row_count), *filter(None, said))
        if row.findings is not None:
            self._report.show(memory.findings_table(row) if row.findings else "Lint: nothing found.")

    def all_done(self) -> None:
        """Prints several rows side by side, and the policies whose text isn't whole in the tables."""
        if len(self.rows) > 1:
            self._report.show(memory.rows_table(self.rows), *sentences.own_sentences(self.rows))
        self._report.say(*policies_in_full(self.rows), wrap=False)

    def no_fit(self) -> ExplainRecord | None:
        """The step of the fewest bytes, if no step fits and no step failed. None otherwise."""
        return None if any(row.fits or row.error for row in self.rows) else _least(self.rows)

    def exit_code(self) -> int:
        """The exit code: 0, or 1 if a step failed, or 3 if nothing that was requested fits."""
        if self._has_failed or any(row.error for row in self.rows):
            return 1
        return 0 if any(row.fits for row in self.rows) else 3


def _least(rows: Sequence[Any]) -> Any:
    """The row of the fewest bytes. None if there is no row."""
    return min(rows, key=lambda row: row.total_bytes or 0, default=None)


def print_no_fit(
    report: Report,
    explained: ExplainRecord | None,
    suggestions: Sequence[SuggestionRecord],
    least: SuggestionRecord | None,
    of_state: Sequence[str] = (),
) -> None:
    """Prints, if nothing fits, the largest live buffers and the suggestions.

    Args:
        report: where the results go.
        explained: the step that doesn't fit, with its largest buffers. None if they were printed before.
        suggestions: the changes of the flags under which the step fits.
        least: of all changes that were compiled, the one of the fewest bytes, printed if there is no suggestion.
        of_state: what to do about a state that alone is over the budget.
    """
    for record in (*([explained] if explained else []), *suggestions):
        report.record(record)
    if explained and explained.largest:
        report.show(memory.largest_table(explained))
    fitting = [steps.suggestions_table(suggestions)] if suggestions else []
    if not fitting and not of_state:
        fitting = [sentences.no_suggestion_sentence(least)]
    report.show(*fitting, *of_state, whole=True)
