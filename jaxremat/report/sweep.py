"""The results of a sweep: tables for a person, one per model and target, and comma-separated values for other programs."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxremat.files import named_by, write_whole
from jaxremat.report import table
from jaxremat.report.policy_text import policy_text, shortened
from jaxremat.trial.queue import SweepTrial, answer_of, error_of
from jaxremat.trial.record import Outcome, Record, TrialRecord
from jaxremat.trial.store import placed
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
        """The record at the batch that was asked for, or at the largest batch that fits. None if nothing was compiled.

        If no batch fits, it is the record at the smallest batch tried.
        """
        return answer_of(self.records)

    @property
    def error(self) -> str:
        """The error of the trial. Empty if there was none."""
        return error_of(self.records)


def sweep_table(lines: Sequence[Line]) -> Table:
    """A table of the trials of one model on one target: lengths, policies and batches side by side.

    If the layouts of the layers differ, the layout follows the policy: `dots (unrolled)`.
    """
    answers = [line.answer for line in lines]
    step = table.step_column([row for row in answers if row])
    rate = table.rate_column([row for row in answers if row])
    layouts = {row.layout for row in answers if row}
    title = f"{lines[0].trial.model} on {lines[0].trial.target}"
    columns = ("policy", "batch", "GiB", "recompute", step, "MFU", rate)
    has_lengths = any(line.trial.seq_len for line in lines)
    shown = table.table_of(title, *(["seq len"] if has_lengths else []), *columns, left=1 + has_lengths)
    for line, row in zip(lines, answers, strict=True):
        policy = policy_text(row) if row else with_preset(shortened(line.trial.policy), line.trial.xla_preset)
        length = [f"{line.trial.seq_len:,}"] if has_lengths else []
        if row is None:
            shown.add_row(*length, policy, str(line.trial.batch or "-"), "-", line.outcome, "-", "-", "-")
            continue
        ended = {"ok": "", "infeasible": "does not fit"}.get(line.outcome, line.outcome)
        layout = f" ({row.layout})" if len(layouts) > 1 else ""
        shown.add_row(*length, policy + layout, *table.answer_cells(row, ended))
    return shown


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
            text = json.dumps(value) if isinstance(value, list) else value
            is_formula = isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r"))
            flat[prefix + name] = f"'{text}" if is_formula else text  # or a spreadsheet would compute it
    return flat
