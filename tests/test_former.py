"""Files that version 0.2 wrote are read and say what they said: results, a sweep's store, a plan. Schema 1 is refused.

Its commands wrote the files in `former/` for the preset `tiny`, with one record of each kind at least.
"""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.policy.spec import Rule
from jaxremat.session.flags import RunFlags
from jaxremat.trial.details import SCHEMA
from jaxremat.trial.lines import KINDS, from_row, to_json
from jaxremat.trial.plan_file import load_plan, plan_text
from jaxremat.trial.record import Record
from jaxremat.trial.store import Store

FORMER = Path(__file__).parent / "former"
LINES = [line for name in ("results", "sweep") for line in (FORMER / f"{name}.jsonl").read_text().splitlines()]
ROWS = [json.loads(line) for line in LINES]


def test_every_kind_of_record_is_among_them():
    assert {type(from_row(row)) for row in ROWS} == {*get_args(Record)}
    assert {row["record"] for row in ROWS} == {*KINDS}


def without_newer(written: Any, former: Any) -> Any:
    """What is written, without the keys that the former one lacks and that have no value: of a row, and of the rows in it."""
    if isinstance(written, list) and isinstance(former, list):
        return [without_newer(*pair) for pair in zip(written, former, strict=True)]
    if not isinstance(written, dict) or not isinstance(former, dict):
        return written
    valued = {key: value for key, value in written.items() if key in former or value is not None}
    return {key: without_newer(value, former.get(key)) for key, value in valued.items()}


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["record"])
def test_each_line_is_written_as_it_was_read(line):
    """With the keys that a store adds, and without values for keys that are newer."""
    row = json.loads(line)
    written = json.loads(to_json(from_row(row), **{key: row[key] for key in ("key", "part", "parts") if key in row}))
    assert [*(key for key in written if key in row)] == [*row]
    assert without_newer(written, row) == row
    assert from_row(row | {"a_key_of_tomorrow": 1}) == from_row(row)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": "8"}, ("'trial'", "batch", "int", "str")),
        ({"batch": True}, ("'trial'", "batch", "int", "bool")),
        ({"ran": "fine"}, ("'trial'", "ran", "'fine'")),
        ({"predicted": {}}, ("'trial'", "predicted", "step_s")),
        ({"record": "trail"}, ("'trail'",)),
        ({"record": []}, ("[]",)),
        ({"schema": 1}, ("'trial'", "schema 1", "2")),
        ({"schema": SCHEMA + 1}, ("'trial'", "schema 3", "2")),
        ({"schema": "2"}, ("'trial'", "'2'")),
    ],
)
def test_a_row_of_wrong_types_is_a_clear_error(change, named):
    row = next(row for row in ROWS if row["record"] == "trial")
    with pytest.raises(JaxrematError) as caught:
        from_row(row | change)
    assert [word for word in named if word not in caught.value.got] == []
    if "record" in change:
        assert {"trial", "probe"} <= {*caught.value.allowed.replace(",", "").split()}


def test_a_plan():
    path = FORMER / "plan.json"
    plan = load_plan(str(path))
    assert (plan.policy, plan.loss, plan.batch, plan.layout) == (Rule("none"), "full", 8, "unrolled")
    former, written = json.loads(path.read_text()), json.loads(plan_text(plan.proven))
    assert without_newer(written, former) == former


def test_a_sweep_resumes_in_its_store(tmp_path):
    path = Path(shutil.copy(FORMER / "sweep.jsonl", tmp_path))
    keys = [row["key"] for row in map(json.loads, path.read_text().splitlines())]
    with Store(path) as store:
        assert all(store.trial(key) for key in keys)
        store.append([from_row(ROWS[-1])], "new")
        assert store.trial("new")
        assert store.notes == []


@pytest.mark.parametrize("schema", [1, SCHEMA + 1])
def test_another_schema_is_one_error_that_names_both(schema, tmp_path):
    """Of a store and of a plan; neither file is touched."""
    for name, read in (("sweep.jsonl", Store), ("plan.json", lambda path: load_plan(str(path)))):
        path = tmp_path / name
        path.write_text((FORMER / name).read_text().replace('"schema": 2', f'"schema": {schema}'))
        before = path.read_bytes()
        with pytest.raises(UsageError) as caught:
            read(path)
        assert [word for word in (str(path), f"schema {schema}", str(SCHEMA)) if word not in caught.value.got] == []
        assert caught.value.cause
        assert path.read_bytes() == before


def test_a_flag_by_its_former_name(capsys):
    assert (
        parse_flags(RunFlags, ["--margin", "0.02"]).headroom == parse_flags(RunFlags, ["--headroom=0.02"]).headroom == 0.02
    )
    (note,) = capsys.readouterr().err.splitlines()
    assert all(name in note for name in ("jaxremat: ", "--margin", "--headroom"))
