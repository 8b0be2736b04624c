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
from typing import Any, get_args, get_type_hints

import msgspec

from jaxremat.errors import JaxrematError
from jaxremat.trial.details import SCHEMA, AnyRecord
from jaxremat.trial.record import Record

#: The class of each value of the key "record".
KINDS: dict[str, type[Record]] = {
    kind: each for each in get_args(Record) for kind in get_args(get_type_hints(each)["record"])
}
#: How the fields end, or are called, whose numbers are never negative. A difference of two measurements may be.
_COUNTS = re.compile(r"num_.*|.*_bytes|.*_flops|largest_batch|(step|.*_step|compile|lower)_s|.*_per_s")
_DIFFERENCES = ("outside_bytes",)
#: The fields of records whose numbers are 1 or more.
_FROM_ONE = ("batch", "accumulate", "global_batch", "seq_len", "num_devices", "next_batch")


def to_json(record: AnyRecord, **place: Any) -> str:
    """The record as one line of JSON, after the keys of its place in a store.

    Raises:
        ValueError: a number is NaN or infinite, which JSON doesn't have.
    """
    return json.dumps(place | dataclasses.asdict(record), allow_nan=False)


def from_row(row: Any) -> Record:
    """The record that `row`, parsed JSON, is.

    Raises:
        JaxrematError: it is no record, or one of another schema. Or a field is missing, of another type, or a number that can't
            be; the message names the field.
    """
    name = row.get("record") if isinstance(row, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise JaxrematError(f"no kind of record is called {name!r}", allowed=", ".join(KINDS))
    if (schema := row.get("schema", SCHEMA)) != SCHEMA:
        raise JaxrematError(
            f"a record of kind {name!r} is of schema {schema!r}, and this jaxremat knows {SCHEMA}",
            cause=f"{writer_of(schema)} wrote it" if isinstance(schema, int) else "",
        )
    try:
        record = msgspec.convert(row, KINDS[name])
    except msgspec.ValidationError as error:
        raise JaxrematError(f"a record of kind {name!r} can't be read ({in_words(error)})") from None
    for field, value in vars(record).items():
        least = 1 if field in _FROM_ONE else 0 if field not in _DIFFERENCES and _COUNTS.fullmatch(field) else -math.inf
        if (isinstance(value, int | float) and value < least) or not _is_finite(value):
            raise JaxrematError(f"a record of kind {name!r} can't be right ({field} is {value})")
    return record


def writer_of(schema: int) -> str:
    """What wrote files of another schema."""
    return "a newer jaxremat" if schema > SCHEMA else "a jaxremat before 0.2"


def _is_finite(value: Any) -> bool:
    """Whether each number in a value is finite, at any depth. JSON's 1e999 is none."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    if dataclasses.is_dataclass(value):
        return _is_finite(vars(value))
    return not isinstance(value, float) or math.isfinite(value)


def in_words(error: msgspec.ValidationError) -> str:
    """What doesn't have its type, such as `config.train: expected object, got null`.

    For a missing key it is `config: no train`.
    """
    what, _, place = str(error).replace("`", "").partition(" - at $")
    what = what.replace("Object missing required field ", "no ")
    return f"{place.lstrip('.')}: {what[0].lower()}{what[1:]}" if place else f"{what[0].lower()}{what[1:]}"
