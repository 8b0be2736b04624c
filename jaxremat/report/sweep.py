"""The results of a sweep: tables for a person, and values for other programs.

There is a table for each model and target. The values are separated by commas.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxremat.report.policy_text import shortened
from jaxremat.report.steps import steps_table
from jaxremat.system.files import named_by, write_whole
from jaxremat.trial.queue import SweepTrial, answer_of, error_of
from jaxremat.trial.record import Outcome, Record, TrialRecord
from jaxremat.trial.store import placed
from jaxremat.trial.ties import trial_ties
from jaxremat.xla.options import with_preset


@dataclass(frozen=True)
class Line:
    """One finished trial of a sweep.

    Attributes:
        trial: the trial.
        outcome: how the trial ended.
        records: the trial's records.
    """

    trial: SweepTrial
    outcome: Outcome
    records: tuple[Record, ...]

    @property
    def answer(self) -> TrialRecord | None:
        """The record at the batch that was requested, or at the largest batch that fits.

        None if nothing was compiled.

        If no batch fits, it is the record at the smallest batch tried.
        """
        return answer_of(self.records)

    @property
    def error(self) -> str:
        """The error of the trial. Empty if there was none."""
        return error_of(self.records)


def sweep_table(lines: Sequence[Line]) -> Table:
    """A table of the trials of one model on one target.

    Lengths, policies and batches are side by side.
    """
    has_lengths = any(line.trial.seq_len for line in lines)
    title = f"{lines[0].trial.model} on {lines[0].trial.target}"
    rows, cells = [line.answer for line in lines], map(_cells, lines)
    tied = trial_ties([row for row in rows if row])
    return steps_table("lengths" if has_lengths else "policies", title, rows, cells=[*cells], tied=tied)


def _cells(line: Line) -> dict[str, str]:
    """What the table has of a trial and not of its step.

    That is the length, how the trial ended, and what a trial without a step has.
    """
    trial, ended = line.trial, {"ok": "", "infeasible": "does not fit"}.get(line.outcome, line.outcome)
    cells = {"seq len": f"{trial.seq_len or 0:,}", "recompute": ended}
    if line.answer is None:
        cells |= {"policy": with_preset(shortened(trial.policy), trial.xla_preset), "batch": str(trial.batch or "-")}
    return cells


def failure_sentences(lines: Sequence[Line]) -> list[str]:
    """One sentence for each trial that has an error.

    For example `oom: gpt2, dots, batch 512, gpu: RESOURCE_EXHAUSTED`.
    """
    return [f"{line.outcome}: {line.trial}: {line.error}" for line in lines if line.error]


def write_csv(lines: Sequence[Line], path: Path) -> None:
    """Writes all records of the sweep to `path`, one row per record and one column per field.

    A field inside another one has a column such as `config.model.num_layers`. The file is written whole or not at all.

    Raises:
        JaxrematError: the file can't be written.
    """
    rows = [
        {"outcome": line.outcome, **_flat(vars(place) | asdict(record))}
        for line in lines
        for place, record in placed(line.trial.key, line.records)
    ]
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
            text = json.dumps(value) if isinstance(value, list | tuple) else value
            is_formula = isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r"))
            flat[prefix + name] = f"'{text}" if is_formula else text  # or a spreadsheet would compute it
    return flat
