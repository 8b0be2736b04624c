"""Plans for a global batch: the microbatches divide it, and the seconds are those of whole steps."""

import json

import pytest

from jaxremat.run import main
from jaxremat.trial.lines import from_row
from jaxremat.trial.record import TrialRecord

SHAPE = ["--model", "tiny", "--num-layers", "4", "--dropout", "0", "--seq-len", "128", "--target", "h100-80gb"]


def records(text: str) -> list:
    return [from_row(json.loads(line)) for line in text.splitlines()]


@pytest.mark.any_jax
def test_a_plan_for_a_global_batch(capsys):
    """Its microbatches divide the global batch. Two named policies at two divisors aren't faster. The plan counts whole steps.

    The bound of its seconds is that of the plan that is asked for with the same microbatches.
    """
    argv = [*SHAPE, "--loss", "full", "--budget", "64MiB", "--scan-layers", "True", "--json"]
    assert main([*argv, "--policy", "auto", "--global-batch", "240"]) == 0
    plan, trial = records(capsys.readouterr().out)
    batch, accumulate = trial.batch, trial.accumulate
    assert accumulate > 1
    assert batch * accumulate == trial.global_batch == 240
    assert trial.total_bytes <= 64 * 2**20
    assert plan.step_s == pytest.approx(trial.step_s)
    assert plan.batch == batch
    assert (plan.recompute_s or 0.0) < plan.step_s
    same = ["--batch", str(batch), "--accumulate", str(accumulate)]
    assert main([*argv, *same, "--policy", trial.policy]) == 0
    (alone,) = records(capsys.readouterr().out)
    assert (alone.total_bytes, alone.step_s) == (trial.total_bytes, pytest.approx(trial.step_s))
    assert main([*argv, *same, "--policy", "auto"]) == 0
    fixed, _ = records(capsys.readouterr().out)
    assert plan.bound_s == pytest.approx(fixed.bound_s, rel=0.02)
    assert plan.bound_s > 0
    named = ["--policy", "dots", "nothing", "--batch", "48,60", "--global-batch", "240"]
    assert main([*argv, *named]) == 0
    others = [row for row in records(capsys.readouterr().out) if isinstance(row, TrialRecord) and row.fits]
    assert trial.tokens_per_s >= 0.995 * max(row.tokens_per_s or 0.0 for row in others)
