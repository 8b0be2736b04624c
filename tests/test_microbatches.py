"""Plans for a global batch: the microbatches divide it, and the seconds are those of whole steps."""

import json
from dataclasses import replace

import pytest

from jaxremat.answer.planned import _of_whole_steps
from jaxremat.chips.target import load_target
from jaxremat.cli.run import main
from jaxremat.planner.plan import NoPlan, Plan
from jaxremat.planner.steps import Steps
from jaxremat.trial.lines import from_row
from tests.mesh_runs import make_run
from tests.planner_formula import LAYERS, Xla, find_plan, layer_at

#: Layers of few values, so that a plan is among few steps, and each compiles in no time.
MLP = """
import jax, jax.numpy as jnp, jaxremat

def layer(x, params):
    return x + jnp.tanh(x @ params["up"]) @ params["down"], None

def loss(params, batch):
    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

def workload(batch: int = 1) -> jaxremat.Workload:
    params = {name: jax.ShapeDtypeStruct((8, 512, 512), jnp.float32) for name in ("up", "down")}
    return jaxremat.Workload(loss=loss, params=params, batch=jax.ShapeDtypeStruct((batch, 512, 512), jnp.float32))
"""


def records(text: str) -> list:
    return [from_row(json.loads(line)) for line in text.splitlines()]


@pytest.mark.full
@pytest.mark.any_jax
def test_a_plan_for_a_global_batch(write, capsys):
    """Its microbatches divide the global batch, and the plan counts whole steps."""
    argv = ["--model", f"{write('mlp.py', MLP)}:workload", "--target", "h100-80gb", "--budget", "250MiB", "--json"]
    assert main([*argv, "--policy", "auto", "--global-batch", "24"]) == 0
    plan, trial = records(capsys.readouterr().out)
    batch, accumulate = trial.batch, trial.accumulate
    assert accumulate > 1
    assert batch * accumulate == trial.global_batch == 24
    assert trial.total_bytes <= 250 * 2**20
    assert plan.step_s == pytest.approx(trial.step_s)
    assert plan.batch == batch
    assert 0 < (plan.recompute_s or 0.0) < plan.step_s
    same = ["--batch", str(batch), "--accumulate", str(accumulate), "--policy", trial.policy]
    assert main([*argv, *same]) == 0
    (alone,) = records(capsys.readouterr().out)
    assert (alone.total_bytes, alone.step_s) == (trial.total_bytes, pytest.approx(trial.step_s))
    assert 0 < plan.bound_s <= trial.step_s


@pytest.mark.any_jax
def test_all_seconds_of_a_plan_are_those_of_whole_steps():
    """The planner counts those of a microbatch. Three of 4 make up the global batch, and six of 2."""
    run = replace(make_run(load_target("cpu")), global_batch=12)
    steps = Steps(layer_at, Xla(), LAYERS, 8000)
    found = find_plan(steps, losses=("full",), batch=4, fixed_bytes=1000)
    assert isinstance(found, Plan)
    other = replace(found.tried[0], batch=2)
    whole = _of_whole_steps(replace(found, tried=(*found.tried, other)), run)
    assert isinstance(whole, Plan)
    assert found.recompute_s
    assert whole.recompute_s == 3 * found.recompute_s
    assert found.bound_s is not None
    assert whole.bound_s == 3 * found.bound_s > 0
    assert whole.cost == replace(found.cost, step_s=3 * found.cost.step_s)
    assert len(found.prices) > 2
    assert [price.saved_s for price in whole.prices] == [3 * price.saved_s for price in found.prices]
    assert any(price.saved_s > 0 for price in found.prices)
    assert found.more
    assert whole.more == tuple(replace(more, saved_s=3 * more.saved_s) for more in found.more)
    times = [*(3 for _ in found.tried), 6]
    assert [one.cost.step_s for one in whole.tried] == [
        n * one.cost.step_s for n, one in zip(times, (*found.tried, other), strict=True)
    ]
    least = _of_whole_steps(NoPlan(other, found.tried), run)
    assert isinstance(least, NoPlan)
    assert least.least.cost.step_s == 6 * other.cost.step_s
    assert _of_whole_steps(found, replace(run, global_batch=None)) is found
