"""Where nothing fits, the flags that are suggested were compiled, and they do fit when they are pasted."""

import json
import shlex
from dataclasses import replace

import pytest

from jaxremat.answer import suggestions
from jaxremat.config import TrainConfig
from jaxremat.explain import main as explain
from jaxremat.model.decoder_workload import DecoderFactory
from jaxremat.model.presets import preset
from jaxremat.policy.grammar import parse
from jaxremat.run import main as run
from jaxremat.trial.lines import from_row
from jaxremat.trial.record import TrialRecord
from jaxremat.trial.settings import Run
from jaxremat.trial.trial import PolicyTrials

#: Long sequences, as batches of few are tried: a budget between that of two sequences and that of three.
SHAPE = shlex.split("--model tiny --num-layers 4 --dropout 0 --seq-len 2048 --max-seq-len 2048 --target h100-80gb --json")
BATCH, BUDGET = 4, "142MiB"


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def misfit(h100, tmp_path_factory):
    """A batch that doesn't fit: its records by kind."""
    out = tmp_path_factory.mktemp("misfit") / "rows.jsonl"
    argv = [*SHAPE, "--policy", "none", "--batch", str(BATCH), "--budget", BUDGET, "--out", str(out)]
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
    found = misfit["suggestion"]
    assert len(found) == 3
    assert all(row["total_bytes"] <= row["budget_bytes"] < misfit["trial"][0]["total_bytes"] for row in found)
    speeds = [suggestion["tokens_per_s"] for suggestion in found]
    assert speeds == sorted(speeds, reverse=True)
    assert {suggestion["flags"].split()[0] for suggestion in found} == {"--policy", "--batch"}
    assert {suggestion["accumulate"] for suggestion in found} > {1}


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_fix_pasted_fits_with_the_same_bytes(misfit, number, capsys):
    suggestion = misfit["suggestion"][number]
    given = {"--policy": "none", "--batch": str(BATCH), "--budget": BUDGET}
    words = suggestion["flags"].split()
    argv = [word for pair in (given | dict(zip(words[::2], words[1::2], strict=True))).items() for word in pair]
    assert run([*SHAPE, *argv]) == 0
    (trial,) = rows(capsys.readouterr().out)
    assert (trial["fits"], trial["total_bytes"]) == (True, suggestion["total_bytes"])


def test_a_global_batch_stays_as_it_is(h100, monkeypatch, capsys):
    monkeypatch.setattr(suggestions, "_OPTIMIZERS", ())  # of smaller microbatches alone
    monkeypatch.setattr(suggestions, "_THRIFTIER", (parse("none"),))
    argv = [*SHAPE, "--policy", "none", "--loss", "chunked", "--global-batch", str(2 * BATCH), "--budget", BUDGET]
    assert run([*argv, "--batch", str(BATCH)]) == 3
    (suggestion,) = [row for row in rows(capsys.readouterr().out) if row["record"] == "suggestion"]
    assert suggestion["flags"].startswith("--batch")
    assert suggestion["batch"] * suggestion["accumulate"] == 2 * BATCH
    assert run([*argv, *suggestion["flags"].split()]) == 0
    (trial,) = rows(capsys.readouterr().out)
    assert (trial["total_bytes"], trial["global_batch"]) == (suggestion["total_bytes"], 2 * BATCH)


def test_where_the_state_is_too_much_only_an_optimizer_helps(h100, capsys):
    argv = [word for word in SHAPE if word != "--json"]
    assert explain([*argv, "--policy", "nothing", "--batch", "1", "--budget", "1MiB"]) == 3
    out = capsys.readouterr().out
    assert "--optimizer adafactor" in out or "No change" in out
    assert "--policy" not in out.split("largest buffers")[1]
    assert max(map(len, out.splitlines())) <= 80


def test_a_batch_that_cannot_be_compiled_leaves_the_other_fixes(h100, misfit, monkeypatch):
    """Nothing is compiled here: the rows are that of the step that doesn't fit, with what each change makes of it."""
    (row,) = misfit["trial"]
    trial = from_row(row)
    assert isinstance(trial, TrialRecord)

    def record(self, batch, kind):
        asked = replace(trial, policy=str(self.policy), loss=self.run.train.loss, batch=batch)
        if batch < BATCH:
            return replace(asked, total_bytes=None, fits=False, error="XLA refused")
        fits = str(self.policy) == "nothing"
        return replace(asked, fits=fits, total_bytes=trial.budget_bytes if fits else trial.total_bytes)

    monkeypatch.setattr(PolicyTrials, "record", record)
    asked = Run(DecoderFactory(preset("tiny").config, "cudnn"), TrainConfig(seq_len=64), h100, trial.budget_bytes)
    found, _ = suggestions.cheapest_suggestions(asked, parse("none"), BATCH)
    assert [suggestion.flags for suggestion in found] == ["--policy nothing"]
