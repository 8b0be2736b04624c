"""Records as JSON: the one reader and the one writer.

    to_json(record)                  '{"record": "suggestion", "schema": 2, "model": "tiny", "flags": "--loss chunked", ...}'
    from_row(json.loads(line))       SuggestionRecord(model="tiny", flags="--loss chunked", ...)

The reader checks the type of every field, so that a line that was edited is an error here and not a crash later. It leaves
out keys that it doesn't know: a store adds some, and a newer version of the same schema may.
"""

import dataclasses
import json
import math
from typing import Any

import msgspec

from jaxremat.errors import JaxrematError
from jaxremat.trial.comparisons import LengthsRecord, MeshChoiceRecord, RankRecord
from jaxremat.trial.details import SCHEMA
from jaxremat.trial.record import (
    ExplainRecord,
    FailureRecord,
    LargestBatchRecord,
    PlanRecord,
    Record,
    SuggestionRecord,
    TrialRecord,
)

#: The dataclass of each value of the key "record".
_KINDS: dict[str, type[Record]] = {
    "trial": TrialRecord,
    "probe": TrialRecord,
    "largest_batch": LargestBatchRecord,
    "plan": PlanRecord,
    "mesh_choice": MeshChoiceRecord,
    "failure": FailureRecord,
    "suggestion": SuggestionRecord,
    "explain": ExplainRecord,
    "rank_correlation": RankRecord,
    "lengths": LengthsRecord,
}
#: The fields of records, beside those that begin with `num_`, whose numbers are never negative.
_COUNTS = {
    *(f"{part}_bytes" for part in ("total", "peak", "argument", "output", "alias", "temp", "host_temp", "budget")),
    *("batch", "accumulate", "global_batch", "seq_len", "largest_batch", "step_s", "tokens_per_s", "samples_per_s"),
}
#: Names of schema 1, and what they are called in schema 2. In schema 1 they stood only where they have new names.
_RENAMED = {"holes": "gaps", "spared_s": "saved_s"}


def to_row(record: Record) -> dict[str, Any]:
    """The record as the dict that its JSON is made from."""
    return dataclasses.asdict(record)


def to_json(record: Record) -> str:
    """The record as one line of JSON."""
    return json.dumps(to_row(record), allow_nan=False)


def from_row(row: Any) -> Record:
    """The record that `row`, parsed JSON, is; a row of schema 1 becomes a record of the schema of now.

    Raises:
        JaxrematError: it is no record, or a field is missing, of another type, or a number that can't be; the message names
            the field.
    """
    row = _upgraded(row) if isinstance(row, dict) and row.get("schema") == 1 else row
    name = row.get("record") if isinstance(row, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise JaxrematError(f"no kind of record is called {name!r}", allowed=", ".join(_KINDS))
    try:
        record = msgspec.convert(row, _KINDS[name])
    except msgspec.ValidationError as error:
        raise JaxrematError(f"a record of kind {name!r} can't be read ({in_words(error)})") from None
    for field, value in vars(record).items():
        is_count = field in _COUNTS or field.startswith("num_")
        if (isinstance(value, float) and not math.isfinite(value)) or (is_count and value is not None and value < 0):
            raise JaxrematError(f"a record of kind {name!r} can't be right ({field} is {value})")
    return record


def in_words(error: msgspec.ValidationError) -> str:
    """What doesn't have its type: `config.train: expected object, got null`, or for a missing key `config: no train`."""
    what, _, place = str(error).replace("`", "").partition(" - at $")
    what = what.replace("Object missing required field ", "no ")
    return f"{place.lstrip('.')}: {what[0].lower()}{what[1:]}" if place else f"{what[0].lower()}{what[1:]}"


def _upgraded(row: dict[str, Any]) -> dict[str, Any]:
    """A row of schema 1 as schema 2 has it; the row itself stays as it is."""
    kind = "suggestion" if row.get("record") == "fix" else row.get("record")
    return _renamed(row) | {"record": kind, "schema": SCHEMA}


def _renamed(found: Any) -> Any:
    """JSON with the names of schema 2, at every depth."""
    if isinstance(found, list):
        return [_renamed(item) for item in found]
    if isinstance(found, dict):
        return {_RENAMED.get(name, name): _renamed(value) for name, value in found.items()}
    return found
