"""Prints a run's records as they come: as JSON lines, or as tables and sentences; and appends them to a file."""

import dataclasses
from collections.abc import Callable

from rich.console import Console

from jaxremat.report.plan import code_to_paste, more_table, plan_sentences, price_table
from jaxremat.report.table import (
    batch_sentence,
    batch_table,
    failure_sentence,
    frontier_table,
    largest_sentence,
    policy_table,
    source_sentence,
    why_not,
)
from jaxremat.trial.record import FailureRecord, LargestBatchRecord, PlanRecord, Record, TrialRecord, to_json
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
        else:
            self._rows.append(record)
        try:
            if self._out:
                self._out.append([dataclasses.asdict(record)])
        finally:
            if self._json:
                print(to_json(record), flush=True)

    def policy_done(self) -> None:
        """Prints one policy's table and its answer in a sentence."""
        self._num_policies += 1
        by_batch = {row.batch: row for row in self._rows}
        rows = [row for row in by_batch.values() if row.record == "trial"]
        self._all += rows
        self._answers += [
            row for row in rows if not self._found or row.batch == (self._found.largest_batch or self._found.next_batch)
        ]
        if not self._json and by_batch:
            self._console.print()
            self._console.print(batch_table(list(by_batch.values())))
            for sentence in self._sentences(rows):
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

    def _explain_plan(self, plan: PlanRecord) -> None:
        for sentence in plan_sentences(plan):
            self._console.print(sentence, markup=False, highlight=False)
        if self._explain:
            for table in (price_table(plan), more_table(plan)):
                self._console.print()
                self._console.print(table)
            for line in code_to_paste(plan):
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _sentences(self, rows: list[TrialRecord]) -> list[str]:
        if self._found:
            sentences = [largest_sentence(self._found)]
            return sentences + [why_not(row) for row in rows if self._found.largest_batch == 0]
        too_big = [row for row in rows if row.fits is False]
        return [batch_sentence(row) for row in rows] + [why_not(row) for row in too_big[:1]]

    def all_done(self, target: str) -> None:
        """Prints policies side by side where there are several, and where the times come from."""
        if self._json or not self._all:
            return
        if self._num_policies > 1:
            self._console.print()
            self._console.print(policy_table(self._answers, "policies side by side"))
        self._console.print(source_sentence(self._all, target), markup=False, highlight=False)
        if remat := max((row.num_xla_remat or 0 for row in self._all), default=0):
            self._console.print(f"XLA's own rematerialization changed the program: {remat} instructions duplicated.")

    def exit_code(self) -> int:
        """0; 1 if a trial failed; 3 if nothing that was asked for fits."""
        if self._num_failures or any(row.error for row in self._all):
            return 1
        return 0 if any(row.fits for row in self._answers) else 3
