"""Records as JSON: the one reader and the one writer.

    to_json(record)                  '{"record": "suggestion", "schema": 2, "model": "tiny", "flags": "--loss chunked", ...}'
    from_row(json.loads(line))       SuggestionRecord(model="tiny", flags="--loss chunked", ...)

The reader checks the type of every field, so that a line that was edited is an error here and not a crash later. It leaves
out keys that it doesn't know: a store adds some, and a newer version of the same schema may.
"""

import dataclasses
import json
import math
import re
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
#: What a record is called: now, and in schema 1.
KINDS = {*_KINDS, "fix"}
#: How the fields end, or are called, whose numbers are never negative. A difference of two measurements may be.
_COUNTS = re.compile(r"num_.*|.*_bytes|.*_flops|largest_batch|(step|.*_step|compile|lower)_s|.*_per_s")
_DIFFERENCES = ("outside_bytes",)
#: The fields of records whose numbers are 1 or more.
_FROM_ONE = ("batch", "accumulate", "global_batch", "seq_len", "num_devices", "next_batch")
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
        least = 1 if field in _FROM_ONE else 0
        if (isinstance(value, int | float) and value < least and _is_count(field)) or not _is_finite(value):
            raise JaxrematError(f"a record of kind {name!r} can't be right ({field} is {value})")
    return record


def _is_count(field: str) -> bool:
    return field in _FROM_ONE or (field not in _DIFFERENCES and _COUNTS.fullmatch(field) is not None)


def _is_finite(value: Any) -> bool:
    """Whether each number in a value is finite, at any depth. JSON's 1e999 is none."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    if dataclasses.is_dataclass(value):
        return _is_finite(vars(value))
    return not isinstance(value, float) or math.isfinite(value)


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
