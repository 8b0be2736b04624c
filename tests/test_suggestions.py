"""Where nothing fits, the flags that are suggested were compiled, and they do fit when they are pasted."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from jaxremat.answer.suggestions import cheapest_suggestions
from jaxremat.cli.run import main as run
from jaxremat.config import TrainConfig
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Policy
from jaxremat.trial.record import SuggestionRecord, TrialRecord
from jaxremat.trial.trials import Trials
from tests import made_up_records

#: Long sequences, as batches of few are tried: a budget between that of two sequences and that of three.
SHAPE = shlex.split("--model tiny --num-layers 4 --dropout 0 --seq-len 2048 --max-seq-len 2048 --target h100-80gb --json")
BATCH, BUDGET = 4, "142MiB"


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def too_large(h100, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """A batch that doesn't fit: its records by kind."""
    out = tmp_path_factory.mktemp("too_large") / "rows.jsonl"
    argv = [*SHAPE, "--policy", "none", "--batch", str(BATCH), "--budget", BUDGET, "--out", str(out)]
    assert run(argv) == 3
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows(out.read_text()):
        found.setdefault(row["record"], []).append(row)
    return found


@pytest.mark.full
def test_the_largest_buffers_are_named_with_their_lines(too_large):
    (trial,), (explained,) = too_large["trial"], too_large["explain"]
    assert explained["total_bytes"] == trial["total_bytes"]
    assert len(explained["largest"]) == 3
    assert "layers.py:" in explained["largest"][0]["source"]


@pytest.mark.full
def test_each_fix_fits_and_is_of_another_kind(too_large):
    found = too_large["suggestion"]
    assert len(found) == 3
    assert all(row["total_bytes"] <= row["budget_bytes"] < too_large["trial"][0]["total_bytes"] for row in found)
    speeds = [suggestion["tokens_per_s"] for suggestion in found]
    assert speeds == sorted(speeds, reverse=True)
    assert {suggestion["flags"].split()[0] for suggestion in found} == {"--policy", "--batch"}
    assert {suggestion["accumulate"] for suggestion in found} > {1}


@pytest.mark.full
def test_a_fix_pasted_fits_with_the_same_bytes(too_large, capsys):
    """The one that changes the most: in microbatches."""
    (suggestion,) = [one for one in too_large["suggestion"] if one["accumulate"] > 1]
    given = {"--policy": "none", "--batch": str(BATCH), "--budget": BUDGET}
    words = suggestion["flags"].split()
    argv = [word for pair in (given | dict(zip(words[::2], words[1::2], strict=True))).items() for word in pair]
    assert run([*SHAPE, *argv]) == 0
    (trial,) = rows(capsys.readouterr().out)
    assert (trial["fits"], trial["total_bytes"]) == (True, suggestion["total_bytes"])


# Nothing is compiled below: the bytes of each step are made up.


def run_for(target: Any, budget_bytes: int = 2**30, **more: Any) -> Trials:
    return Trials(decoder_factory(preset("tiny").config, "cudnn"), TrainConfig(seq_len=64), target, budget_bytes, **more)


def suggested(monkeypatch, run: Trials, total_bytes: Any, batch: int = BATCH) -> list[SuggestionRecord]:
    """What is suggested in place of `none` at `batch`, where `total_bytes(trials, policy, batch)` are the bytes of a step."""

    def record(self: Trials, policy: Policy, batch: int, kind: str) -> TrialRecord:
        found = total_bytes(self, policy, batch)
        row = replace(made_up_records.trial(batch), policy=str(policy), budget_bytes=run.budget_bytes)
        row = replace(row, loss=self.train.loss, accumulate=self.train.accumulate, total_bytes=found)
        return replace(row, fits=found is not None and found <= run.budget_bytes, error=None if found else "rejected")

    monkeypatch.setattr(Trials, "record", record)
    found, _ = cheapest_suggestions(run, parse("none"), batch)
    return found


def test_a_batch_that_cannot_be_compiled_leaves_the_other_fixes(h100, monkeypatch):
    def total_bytes(trials: Trials, policy: Policy, batch: int) -> int | None:
        return None if batch < BATCH else 2**30 if str(policy) == "nothing" else 2**31

    assert [one.flags for one in suggested(monkeypatch, run_for(h100), total_bytes)] == ["--policy nothing"]


def test_where_batches_that_fit_compile_for_minutes_the_suggested_ones_alone_are(h100, monkeypatch):
    """Batches are tried from above, from what XLA says early."""
    fitting: list[int] = []

    def total_bytes(trials: Trials, policy: Policy, batch: int) -> int:
        fitting.extend([batch] * (batch <= 16))
        return batch * 2**26

    monkeypatch.setattr(Trials, "speaks_early", True)
    monkeypatch.setattr(Trials, "early_bytes", lambda trials, policy, batch: batch * 2**25)
    found = suggested(monkeypatch, run_for(h100), total_bytes, batch=100)
    assert {one.flags for one in found} == {"--batch 10 --accumulate 10", "--batch 16"}
    assert fitting == [10, 16]


def test_a_global_batch_stays_as_it_is(h100, monkeypatch):
    """Smaller microbatches are the step that --batch makes of the same global batch."""
    whole = run_for(h100, global_batch=2 * BATCH)
    found = suggested(monkeypatch, whole, lambda trials, policy, batch: batch * 2**29)
    (suggestion,) = [one for one in found if one.flags.startswith("--batch")]
    assert (suggestion.flags, suggestion.batch, suggestion.accumulate) == ("--batch 2", 2, BATCH)
    assert whole.train_at(2).accumulate == suggestion.accumulate


def test_where_the_state_is_too_much_only_an_optimizer_helps(h100, monkeypatch):
    state = run_for(h100).state_bytes()
    found = suggested(monkeypatch, run_for(h100, state - 1), lambda trials, policy, batch: trials.state_bytes())
    assert found
    assert {one.flags.split()[0] for one in found} == {"--optimizer"}
    assert suggested(monkeypatch, run_for(h100, 1), lambda trials, policy, batch: 2) == []
