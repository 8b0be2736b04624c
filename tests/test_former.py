"""Files that version 0.1 wrote are still read: a plan, results, a sweep's store, and the headroom that runs showed.

Its commands wrote the files in `former/` for the preset `tiny`. Its `learn` wrote `margins.jsonl`, from a made-up GPU.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.flags import RunFlags
from jaxremat.errors import JaxrematError
from jaxremat.policy.spec import Rule
from jaxremat.trial.headroom import choose_headroom, headroom_file
from jaxremat.trial.lines import from_row, to_json
from jaxremat.trial.plan_file import load_plan
from jaxremat.trial.record import ExplainRecord, PlanRecord, SuggestionRecord
from jaxremat.trial.store import Store

FORMER = Path(__file__).parent / "former"
ROWS = [json.loads(line) for name in ("results", "sweep") for line in (FORMER / f"{name}.jsonl").read_text().splitlines()]


#: What schema 2 calls a key of schema 1.
RENAMED = {"holes": "gaps", "spared_s": "saved_s"}


def renamed(found: Any) -> Any:
    """The JSON with the keys of schema 2."""
    if isinstance(found, list):
        return [renamed(item) for item in found]
    return {RENAMED.get(k, k): renamed(v) for k, v in found.items()} if isinstance(found, dict) else found


#: What fields that came later say of the steps of before.
NEW = {"num_devices": 1, "xla_preset": "default", "num_buffers": 1}


def without_new_keys(found: Any, former: Any) -> Any:
    """The JSON without the keys that `former` doesn't have. Nothing may be under such a key."""
    if isinstance(found, list) and isinstance(former, list) and len(found) == len(former):
        return [without_new_keys(*items) for items in zip(found, former, strict=True)]
    if not (isinstance(found, dict) and isinstance(former, dict)):
        return found
    assert not any(value for key, value in found.items() if key not in former and value != NEW.get(key))
    return {key: without_new_keys(value, former[key]) for key, value in found.items() if key in former}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["record"])
def test_each_row_is_read_and_says_what_it_said(row):
    """Read and written it is equal JSON, in the same order, but for renamed keys, the schema, and what a store adds."""
    kind = "suggestion" if row["record"] == "fix" else row["record"]
    expected = renamed({key: value for key, value in row.items() if key not in ("key", "part", "parts")})
    expected |= {"schema": 2, "record": kind}
    assert row["schema"] == 1
    read = json.loads(to_json(from_row(row)))
    assert json.dumps(without_new_keys(read, expected)) == json.dumps(expected)


def test_a_row_of_now_stays_as_it_is():
    for row in ROWS:
        text = to_json(from_row(row))
        assert to_json(from_row(json.loads(text))) == text
        assert from_row(json.loads(text) | {"a_key_of_tomorrow": 1}) == from_row(row)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": "8"}, ("'trial'", "batch", "int", "str")),
        ({"batch": True}, ("'trial'", "batch", "int", "bool")),
        ({"ran": "fine"}, ("'trial'", "ran", "'fine'")),
        ({"predicted": {}}, ("'trial'", "predicted", "step_s")),
        ({"record": "trail"}, ("'trail'",)),
        ({"record": []}, ("[]",)),
    ],
)
def test_a_row_of_wrong_types_is_a_clear_error(change, named):
    row = next(row for row in ROWS if row["record"] == "trial")
    with pytest.raises(JaxrematError) as caught:
        from_row(row | change)
    assert [word for word in named if word not in caught.value.got] == []
    if "record" in change:
        assert {"trial", "probe"} <= {*caught.value.allowed.replace(",", "").split()}


def test_fields_under_their_new_names():
    records = [from_row(row) for row in ROWS]
    explained = [record for record in records if isinstance(record, ExplainRecord)]
    assert explained
    for record in explained:
        assert record.attribution
        assert sum(record.attribution.values()) == record.total_bytes
        assert "gaps" in record.attribution
    assert [record.flags for record in records if isinstance(record, SuggestionRecord)] == [
        row["flags"] for row in ROWS if row["record"] == "fix"
    ]
    (plan,) = (record for record in records if isinstance(record, PlanRecord))
    assert all(more.saved_s >= 0 for more in plan.more)


def test_a_plan():
    plan = load_plan(str(FORMER / "plan.json"))
    assert (plan.policy, plan.loss, plan.batch) == (Rule("dots"), "full", 8)


def test_a_sweep_goes_on_in_its_store(tmp_path):
    path = Path(shutil.copy(FORMER / "sweep.jsonl", tmp_path))
    keys = [row["key"] for row in map(json.loads, path.read_text().splitlines())]
    with Store(path) as store:
        assert all(store.trial(key) for key in keys)
        store.append([from_row(ROWS[-1])], "new")
        assert store.trial("new")
        assert store.notes == []


def test_what_runs_taught(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    headroom_file().parent.mkdir()
    shutil.copy(FORMER / "margins.jsonl", headroom_file().parent)
    versions = {"driver": "570.86.15", "jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}
    chosen, note = choose_headroom(None, "attached", "NVIDIA H100 80GB HBM3", versions)
    assert note == ""
    assert "2" in chosen.source
    assert chosen.share == pytest.approx(1 - 62_999_999_999 / 63_707_283_456)


def test_a_flag_by_its_former_name(capsys):
    assert (
        parse_flags(RunFlags, ["--margin", "0.02"]).headroom == parse_flags(RunFlags, ["--headroom=0.02"]).headroom == 0.02
    )
    (note,) = capsys.readouterr().err.splitlines()
    assert all(name in note for name in ("jaxremat: ", "--margin", "--headroom"))
