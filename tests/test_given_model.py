"""`--model FILE.py:ATTR` in the commands: what is refused by name, what the records say, and what a sweep counts as the same."""

import json

import pytest

from jaxremat.explain import main as explain
from jaxremat.flags import RunFlags, SweepFlags
from jaxremat.grid import trials_of
from jaxremat.request import check_run
from jaxremat.run import main
from jaxremat.trial.lines import from_row
from jaxremat.trial.plan_file import load_plan
from jaxremat.trial.record import TrialRecord

TRAIN = """
import dataclasses
import jax
import jax.numpy as jnp
import jaxremat
import optax

print("made by the user")


def init(key, width):
    return [jax.random.normal(k, (width, width)) / 4 for k in jax.random.split(key, 4)]


def loss(params, batch):
    x = batch
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def workload(batch: int = 8, width: int = 16):
    params = jax.eval_shape(lambda key: init(key, width), jax.random.key(0))
    return jaxremat.Workload(
        loss=loss, params=params, batch=jax.ShapeDtypeStruct((batch, width), jnp.float32), init=lambda key: init(key, width)
    )


def own_optimizer():
    return dataclasses.replace(workload(6), optimizer=optax.sgd(0.1))


def step():
    return jaxremat.Workload(step=lambda w, x: w - 0.1 * x.sum(), args=(jnp.ones((4, 4)), jnp.ones(3)))
"""


@pytest.fixture
def train(tmp_path):
    (tmp_path / "given_train.py").write_text(TRAIN)
    return str(tmp_path / "given_train.py")


def records(capsys, argv, command=main):
    assert command([*argv, "--target", "cpu", "--json"]) == 0
    return [from_row(json.loads(line)) for line in capsys.readouterr().out.splitlines()]


def test_the_decoder_s_flags_are_refused_by_name_before_anything_is_imported(refusal, train):
    said = refusal(["--model", f"{train}:no_such", "--num-layers", "3", "--loss", "full", "--data", "x.txt"])
    assert "about presets alone: --num-layers, --loss, --data." in said


@pytest.mark.parametrize("flag", ["--model-arg", "--layers"])
def test_flags_of_own_models_are_refused_beside_a_preset(refusal, flag):
    assert refusal([flag, "width=3"]).startswith(f"{flag} goes with a --model of your own, and --model gpt2 is a preset.")


def test_a_workload_runs_and_its_records_have_no_sequence(capsys, train):
    argv = [
        "--model",
        f"{train}:workload",
        "--model-arg",
        "width=8",
        "--steps",
        "1",
        "--batch",
        "4",
        "--policy",
        "none",
        "dots",
    ]
    none, dots = records(capsys, argv)
    assert isinstance(none, TrialRecord)
    assert (none.model, none.num_params, none.loss, none.optimizer) == ("given_train.py:workload", 4 * 8 * 8, "own", "adamw")
    assert (none.seq_len, none.attention, none.tokens_per_s, none.ran) == (None, None, None, "ok")
    assert none.samples_per_s == pytest.approx(4 / none.step_s)
    assert none.config["model"]["arguments"] == {"width": "8"}
    assert (dots.policy, dots.fits) == ("dots", True)


def test_a_workload_of_one_batch_has_no_other(capsys, refusal, train):
    argv = ["--model", f"{train}:own_optimizer", "--steps", "1", "--policy", "every:2"]
    (row,) = records(capsys, argv)
    assert (row.batch, row.optimizer, row.policy) == (6, "own", "every:2")


@pytest.mark.parametrize(
    ("attribute", "argv", "said"),
    [
        (
            "own_optimizer",
            ["--batch", "8"],
            "--batch 8 was asked for, and given_train.py:own_optimizer has the one batch 6.",
        ),
        ("own_optimizer", ["--global-batch", "8"], "--global-batch 8 was asked for, and given_train.py:own_optimizer has"),
        (
            "own_optimizer",
            ["--learning-rate", "1"],
            "--learning-rate was given, and given_train.py:own_optimizer brings its own",
        ),
        ("step", ["--policy", "dots"], "--policy dots was asked for, and given_train.py:step is a whole step."),
        ("step", ["--optimizer", "lion"], "--optimizer was given, and given_train.py:step is a whole step."),
        ("step", ["--accumulate", "2"], "--accumulate was given, and given_train.py:step is a whole step."),
        ("step", ["--list", "names"], "given_train.py:step is a whole step, and layers are found in a loss."),
        ("workload", ["--policy", "every:9"], "policy 'every:9' asks for 9 layers, and the model has 4."),
        (
            "workload",
            ["--policy", "save:nonsense"],
            "policy 'save:nonsense' names 'nonsense', and no tensor carries that name.",
        ),
        ("workload", ["--layers", "blocks_*"], "no layers match 'blocks_*'."),
    ],
)
def test_what_a_workload_cannot_do_is_one_error(capsys, train, attribute, argv, said):
    assert main(["--model", f"{train}:{attribute}", "--target", "cpu", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"jaxremat: {said}" in err


def test_a_whole_step_is_run_under_none_without_a_policy_asked_for(capsys, train):
    (row,) = records(capsys, ["--model", f"{train}:step", "--steps", "1"])
    assert (row.policy, row.requested_policy, row.ran, row.samples_per_s) == ("none", "none", "ok", None)


def test_explain_takes_the_batch_that_a_workload_is_written_for(capsys, train):
    (row,) = records(capsys, ["--model", f"{train}:workload", "--policy", "nothing"], explain)
    assert (row.batch, row.record) == (8, "explain")
    assert sum(row.attribution.values()) == row.total_bytes


def test_lists_of_a_workload(capsys, train):
    assert main(["--model", f"{train}:workload", "--list", "names", "--json", "--batch", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tanh = {row["name"]: row for row in rows}["tanh"]
    assert (tanh["shape"], tanh["total_bytes"]) == ([2, 16], tanh["num_values"] * tanh["layer_bytes"])
    assert main(["--model", f"{train}:workload", "--list", "optimizers", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["optimizer"]: row["bytes_per_param"] for row in rows}["lion"] == pytest.approx(4, rel=1e-2)


def test_a_plan_of_a_workload_is_saved_and_taken_up(tmp_path, capsys, train, h100):
    argv = ["--model", f"{train}:workload", "--target", "h100-80gb", "--batch", "64"]
    assert main([*argv, "--policy", "auto", "--save-plan", str(tmp_path / "plan.json"), "--explain-plan"]) == 0
    out = capsys.readouterr().out
    assert "Planned: batch 64, 0.0" in out
    assert 'loss = jaxremat.with_policy(loss, "' in out
    plan = load_plan(str(tmp_path / "plan.json"))
    assert (plan.loss, plan.batch, plan.proven.seq_len) == ("own", 64, None)
    assert main([*argv, "--policy", f"plan:{tmp_path / 'plan.json'}", "--json"]) == 0
    row = from_row(json.loads(capsys.readouterr().out))
    assert (row.policy, row.total_bytes) == (str(plan.policy), plan.proven.total_bytes)


def test_a_sweep_s_trial_is_another_one_when_the_source_changes(tmp_path, train):
    def keys():
        flags = SweepFlags(
            out=tmp_path / "sweep.jsonl",
            model=((f"{train}:workload", "tiny"),),
            policy=(("dots",),),
            target=(("h100-80gb",),),
        )
        return [trial.key for trial in trials_of(flags)]

    before = keys()
    assert keys() == before
    (tmp_path / "given_train.py").write_text(TRAIN + "\n# another line\n")
    after = keys()
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_request_imports_no_code_of_the_user_s(tmp_path):
    file = tmp_path / "explodes.py"
    file.write_text("raise RuntimeError('imported')\n")
    request = check_run(RunFlags(model=f"{file}:workload", layers=(("blocks_*",),)))
    assert (request.model.spec, request.model.layers) == (f"{file}:workload", ("blocks_*",))
