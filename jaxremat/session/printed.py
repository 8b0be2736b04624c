"""`Answer`: the records of an answer, which print as the table of the command."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxremat.trial.record import ExplainRecord, LargestBatchRecord, PlanRecord, Record, TrialRecord

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a printed answer.
_WIDTH = 100


@dataclass(frozen=True, repr=False)
class Answer:
    """The records of an answer. Its `repr` is the table that the command prints.

    Attributes:
        by_policy: for each policy its records, in the order in which they were finished.
        target: the name of the target.
    """

    by_policy: tuple[tuple[Record, ...], ...]
    target: str

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, as `--out` and `--json` have them."""
        return tuple(record for records in self.by_policy for record in records)

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """The compiled steps that answer what was requested.

        Each has the bytes, the seconds of a step and the tokens per second.
        """
        return tuple(one for one in self.records if isinstance(one, TrialRecord) and one.record == "trial")

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits, of the first policy whose batch was searched.

        None where none was searched.
        """
        return next((one.largest_batch for one in self.records if isinstance(one, LargestBatchRecord)), None)

    @property
    def plan(self) -> PlanRecord | None:
        """The plan. None where nothing was planned, or nothing fits."""
        return next((one for one in self.records if isinstance(one, PlanRecord)), None)

    @property
    def memory(self) -> ExplainRecord | None:
        """What takes the bytes at the peak. None unless it is an answer of `Session.explain`."""
        return next((one for one in self.records if isinstance(one, ExplainRecord)), None)

    def __repr__(self) -> str:
        return _printed(self).export_text().strip("\n")

    def _repr_html_(self) -> str:
        return _printed(self).export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _printed(found: Answer) -> "Console":
    """A console that has recorded what the command prints of these records."""
    from rich.console import Console

    from jaxremat.report.printer import ExplainPrinter, Printer, Report

    console = Console(file=io.StringIO(), record=True, width=_WIDTH, markup=False, highlight=False, emoji=False)
    report = Report(console)
    if found.memory:
        printer = ExplainPrinter(report)
        for record in found.records:
            if isinstance(record, ExplainRecord):
                printer.row(record)
        printer.all_done()
        return console
    printer = Printer(report)
    for records in found.by_policy:
        for record in records:
            printer.row(record)
        printer.policy_done()
    printer.all_done(found.target)
    return console
