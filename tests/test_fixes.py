"""Where nothing fits: the fixes were compiled, and pasted as flags they do fit."""

import json
from dataclasses import replace

import pytest

from jaxremat.explain import main as explain
from jaxremat.run import main as run
from jaxremat.trial.trial import PolicyTrials

SHAPE = ["--model", "tiny", "--num-layers", "4", "--seq-len", "128", "--target", "h100-80gb", "--json"]


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def misfit(h100, tmp_path_factory):
    """A batch that doesn't fit: its records by kind."""
    out = tmp_path_factory.mktemp("misfit") / "rows.jsonl"
    argv = [*SHAPE, "--policy", "none", "--batch", "64", "--budget", "60MiB", "--out", str(out)]
    assert run(argv) == 3
    found: dict[str, list[dict]] = {}
    for row in rows(out.read_text()):
        found.setdefault(row["record"], []).append(row)
    return found


def test_the_largest_buffers_are_named_with_their_lines(misfit):
    (trial,), (explained,) = misfit["trial"], misfit["explain"]
    assert explained["total_bytes"] == trial["total_bytes"]
    assert len(explained["largest"]) == 3
    assert "layers.py:" in explained["largest"][0]["source"]


def test_each_fix_fits_and_is_of_another_kind(misfit):
    fixes = misfit["fix"]
    assert len(fixes) == 3
    assert all(fix["total_bytes"] <= fix["budget_bytes"] < misfit["trial"][0]["total_bytes"] for fix in fixes)
    speeds = [fix["tokens_per_s"] for fix in fixes]
    assert speeds == sorted(speeds, reverse=True)
    assert {fix["flags"].split()[0] for fix in fixes} == {"--policy", "--batch"}
    assert {fix["accumulate"] for fix in fixes} > {1}


@pytest.mark.parametrize("number", range(3))
def test_a_fix_pasted_fits_with_the_same_bytes(misfit, number, capsys):
    fix = misfit["fix"][number]
    given = {"--policy": "none", "--batch": "64", "--budget": "60MiB"}
    words = fix["flags"].split()
    argv = [word for pair in (given | dict(zip(words[::2], words[1::2], strict=True))).items() for word in pair]
    assert run([*SHAPE, *argv]) == 0
    (trial,) = rows(capsys.readouterr().out)
    assert (trial["fits"], trial["total_bytes"]) == (True, fix["total_bytes"])


def test_a_global_batch_stays_as_it_is(h100, capsys):
    argv = [*SHAPE, "--policy", "none", "--global-batch", "128", "--budget", "60MiB"]
    assert run([*argv, "--batch", "64"]) == 3
    fixes = [row for row in rows(capsys.readouterr().out) if row["record"] == "fix"]
    (fix,) = [fix for fix in fixes if fix["flags"].startswith("--batch")]
    assert fix["batch"] * fix["accumulate"] == 128
    assert run([*argv, *fix["flags"].split()]) == 0
    (trial,) = rows(capsys.readouterr().out)
    assert (trial["total_bytes"], trial["global_batch"]) == (fix["total_bytes"], 128)


def test_where_the_state_is_too_much_only_an_optimizer_helps(h100, capsys):
    argv = [word for word in SHAPE if word != "--json"]
    assert explain([*argv, "--embed-dim", "1024", "--policy", "nothing", "--batch", "1", "--budget", "20MiB"]) == 3
    out = capsys.readouterr().out
    assert "--optimizer adafactor" in out or "No change" in out
    assert "--policy" not in out.split("largest buffers")[1]
    assert max(map(len, out.splitlines())) <= 80


def test_a_batch_that_cannot_be_compiled_leaves_the_other_fixes(h100, monkeypatch, capsys):
    real = PolicyTrials.record

    def record(self, batch, kind):
        row = real(self, batch, kind)
        return replace(row, total_bytes=None, fits=False, error="XLA refused") if batch < 64 else row

    monkeypatch.setattr(PolicyTrials, "record", record)
    assert run([*SHAPE, "--policy", "none", "--batch", "64", "--budget", "60MiB"]) == 3
    fixes = [row for row in rows(capsys.readouterr().out) if row["record"] == "fix"]
    assert {fix["flags"].split()[0] for fix in fixes} == {"--policy"}
