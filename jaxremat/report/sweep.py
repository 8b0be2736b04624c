"""A sweep's rows for a person, a table for each model and target, and for other programs, as comma-separated values."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxremat.files import named_by, write_whole
from jaxremat.report import table
from jaxremat.trial.record import FailureRecord, LargestBatchRecord, Outcome, Record, TrialRecord
from jaxremat.trial.store import stored


@dataclass(frozen=True)
class Line:
    """One trial of a sweep: its key in the store, what was asked for, how it ended, and its records."""

    key: str
    model: str
    policy: str
    target: str
    batch: int | None
    outcome: Outcome
    records: tuple[Record, ...]

    @property
    def answer(self) -> TrialRecord | None:
        """The row that answers what was asked: the one of that batch, or of the largest; None where nothing was compiled."""
        trials = [record for record in self.records if isinstance(record, TrialRecord) and record.record == "trial"]
        searches = [record for record in self.records if isinstance(record, LargestBatchRecord)]
        if searches:
            batch = searches[0].largest_batch or searches[0].next_batch
            trials = [row for row in trials if row.batch == batch]
        return trials[-1] if trials else None

    @property
    def error(self) -> str:
        """What went wrong, empty where nothing did."""
        return next((r.error for r in self.records if isinstance(r, FailureRecord | TrialRecord) and r.error), "")


def sweep_table(lines: Sequence[Line]) -> Table:
    """Trials of one model on one target: policies and batches side by side."""
    answers = [line.answer for line in lines]
    step = table.step_column([row for row in answers if row])
    title = f"{lines[0].model} on {lines[0].target}"
    shown = table.table_of(title, "policy", "batch", "GiB", "recompute", step, "MFU", "tokens/s")
    for line, row in zip(lines, answers, strict=True):
        policy = line.policy if row is None or row.policy == line.policy else f"{line.policy}: {row.policy}"
        if row is None:
            shown.add_row(policy, str(line.batch or "-"), "-", line.outcome, "-", "-", "-")
            continue
        ended = {"ok": "", "infeasible": "does not fit"}.get(line.outcome, line.outcome)
        shown.add_row(policy, *table.answer_cells(row, ended))
    return shown


def failure_sentences(lines: Sequence[Line]) -> list[str]:
    """What went wrong, a sentence for each trial that failed."""
    return [
        f"{line.outcome}: {line.model}, {line.policy}, {f'batch {line.batch}' if line.batch else 'largest batch'}, "
        f"{line.target}: {line.error}"
        for line in lines
        if line.error
    ]


def write_csv(lines: Sequence[Line], path: Path) -> None:
    """All rows of the sweep, a column for each field (`config.model.num_layers` for one inside another), whole or not at all.

    Raises:
        JaxrematError: the file can't be written.
    """
    rows = [{"outcome": line.outcome, **_flat(one.row())} for line in lines for one in stored(line.key, line.records)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    with named_by("--csv", path, "give another file; --out has all rows, and the same command writes the table at once"):
        write_whole(path, text.getvalue())


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat
