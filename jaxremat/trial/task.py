"""What the process of a trial is given and what it leaves: JSON of a `Task` and a `Result`.

    {"flags": {"model": "gpt2", "policy": [["dots"]], "batch": [["8"]], ...}, "measure": null}
    {"schema": 2, "outcome": "ok", "records": [{"record": "trial", "batch": 8, ...}], "to_measure": [0], ...}

Here the process compiled batch 8, and record 0 is still to be measured. The next task is then that record under the same
flags:

    {"flags": {"model": "gpt2", "policy": [["dots"]], "batch": [["8"]], ...}, "measure": {"record": "trial", ...}}
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxremat.system.files import write_whole
from jaxremat.trial.lines import from_row
from jaxremat.trial.record import Outcome, Record, TrialRecord

if TYPE_CHECKING:
    _Records = tuple[Record, ...]
else:
    _Records = tuple[Any, ...]  # msgspec leaves them as they are: each is then read as its own kind says
#: The variable of the environment with the folder in which the processes of a command share what they counted.
SHARED_FOLDER = "JAXREMAT_SHARED_FOLDER"


@dataclass(frozen=True)
class Task:
    """What a process is to do.

    Attributes:
        flags: the flags of one policy, with one batch, or without a batch for the search for the largest. They are JSON
            here, because their type belongs to the commands; `worker.py` converts them.
        measure: the compiled step to run; None where the policy is to be answered.
    """

    flags: dict[str, Any]
    measure: TrialRecord | None = None

    def to_json(self) -> str:
        """The task as its file has it."""
        return json.dumps(asdict(self), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a task.

    Attributes:
        schema: of the file.
        outcome: `ok` where there are records; else how the process failed.
        error: what went wrong, in a line.
        tail: the last lines that a failed process printed.
        to_measure: the numbers, from 0, of the records whose steps are still to be run, each in a process of its own.
        confirm: whether the largest batch is to be confirmed by runs (`trial/confirm.py`).
        records: what came of the task.
    """

    schema: Literal[2] = 2
    outcome: Outcome
    error: str = ""
    tail: tuple[str, ...] = ()
    to_measure: tuple[int, ...] = ()
    confirm: bool = False
    records: _Records = ()


def read_task(path: Path) -> Task:
    """The task in a file.

    Raises:
        msgspec.DecodeError: it has no task.
    """
    return msgspec.json.decode(path.read_bytes(), type=Task)


def read_result(text: bytes) -> Result:
    """The result that a process left.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is cut short, or (msgspec.ValidationError) no result.
        JaxrematError: one of its records can't be read.
    """
    result = msgspec.json.decode(text, type=Result)
    return replace(result, records=tuple(map(from_row, result.records)))


def write_result(path: Path, result: Result) -> None:
    """Writes the result's file, whole or not at all, as a process does when it is done."""
    write_whole(path, json.dumps(asdict(result), allow_nan=False))
