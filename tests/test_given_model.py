"""`--model FILE.py:ATTR` in the commands: what is rejected by name, what the records say, and what a sweep counts as the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jaxremat.chips.target import Target
from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import main as explain
from jaxremat.cli.grid import sweep_trials
from jaxremat.cli.run import check_flags, main, show_list_or_answers
from jaxremat.errors import UsageError
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.request import Auto, check_run
from jaxremat.session.session import Session
from jaxremat.trial.lines import from_row
from jaxremat.trial.plan_file import load_plan
from jaxremat.trial.record import ExplainRecord, FailureRecord, PlanRecord, TrialRecord
from jaxremat.workload.given import GivenModel
from jaxremat.workload.model import given_model

RecordT = TypeVar("RecordT")
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


def flat():
    x = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    return jaxremat.Workload(loss=lambda w, x: (x * w).sum(), params=jnp.ones(4), batch=x, notes=("a note",))


def step():
    return jaxremat.Workload(step=lambda w, x: w - 0.1 * x.sum(), args=(jnp.ones((4, 4)), jnp.ones(3)))
"""


#: A workload with the keywords of flags that presets have.
CHOICES = """
import jax
import jax.numpy as jnp
import jaxremat


def workload(batch: int = 8, loss: str = "chunked", scan_layers: bool = False):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    def mean(params, x):
        if scan_layers:
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for w in params:
                x, _ = layer(x, w)
        return jnp.mean(x**2)

    one = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    params = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32) if scan_layers else [one] * 3
    x = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
    tokens = 1 if loss == "full" else 2
    return jaxremat.Workload(loss=mean, params=params, batch=x, num_tokens=tokens, write_text=lambda params, num: "x" * num)
"""


@pytest.fixture
def train(tmp_path):
    (tmp_path / "given_train.py").write_text(TRAIN)
    return str(tmp_path / "given_train.py")


@pytest.fixture
def choices(tmp_path):
    (tmp_path / "given_choices.py").write_text(CHOICES)
    return f"{tmp_path}/given_choices.py:workload"


def records(
    kind: type[RecordT], capsys: pytest.CaptureFixture[str], argv: list[str], command: Callable[[list[str]], int] = main
) -> list[RecordT]:
    """What a command answers. Each record is of this kind."""
    assert command([*argv, "--json"]) == 0
    rows = [from_row(json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    found = [row for row in rows if isinstance(row, kind)]
    assert len(found) == len(rows)
    return found


def opened(target: Target, *argv: str) -> Session:
    """The session that the flags open, without an answer."""
    return Session.of(check_run(parse_flags(RunFlags, argv)), target)


def error_of(*argv: str) -> UsageError:
    """The error with which the command ends."""
    with pytest.raises(UsageError) as caught:
        show_list_or_answers(check_flags(parse_flags(RunFlags, argv)))
    return caught.value


def test_the_decoder_s_flags_are_rejected_by_name_before_anything_is_imported(train):
    error = error_of("--model", f"{train}:no_such", "--num-layers", "3", "--data", "x.txt")
    assert all(flag in error.got for flag in ("--num-layers", "--data"))


@pytest.mark.parametrize("flag", ["--loss full", "--scan-layers True"])
def test_a_keyword_that_the_function_lacks_is_rejected_by_its_flag(train, h100, flag):
    for spec in (f"{train}:workload", f"{train}:step"):
        with pytest.raises(UsageError) as caught:
            opened(h100, "--model", spec, *flag.split())
        assert all(word in caught.value.got for word in flag.split())
        assert spec.rpartition("/")[2] in caught.value.got


def test_losses_and_layouts_of_ones_own(choices, h100):
    """A plan chooses among them, and flags fix them, as for a preset."""
    own = opened(h100, "--model", choices, "--policy", "auto")
    assert own.request.policies[0].policy == Auto(("full", "chunked"), ("loop", "unrolled"))
    assert (own.trials.factory.facts(own.trials.train).loss, own.trials.factory.layout()) == ("chunked", "unrolled")
    assert own.trials.with_loss("full").workload_at().num_tokens == 1
    scanned = own.trials.with_layout("loop").factory
    assert own.trials.with_layout("unrolled").factory is own.trials.factory
    assert [one.found and one.found.kinds[0].in_scan for one in (scanned, own.trials.factory)] == [True, False]
    assert (scanned.config()["scan_layers"], scanned.num_layers()) == (True, 3)
    fixed = opened(h100, "--model", choices, "--loss", "chunked:4", "--scan-layers", "True", "--policy", "auto")
    assert fixed.request.policies[0].policy == Auto(("chunked:4",))
    assert (fixed.trials.factory.facts(fixed.trials.train).loss, fixed.trials.factory.layout()) == ("chunked:4", "loop")
    with pytest.raises(UsageError) as caught:
        opened(h100, "--model", choices, "--loss", "full", "--model-arg", "loss=full")
    assert "--loss" in caught.value.got
    assert "--model-arg" in caught.value.got


def test_the_default_loss_is_the_first_one(tmp_path, h100, capsys):
    """The function's workload is never made with the preset's default, full."""
    spec = tmp_path / "given_chunked.py"
    spec.write_text(CHOICES.replace("    one = jax", '    assert loss != "full"\n    one = jax'))
    assert opened(h100, "--model", f"{spec}:workload").trials.train.loss == "chunked"
    assert main(["--model", f"{spec}:workload", "--list", "optimizers", "--json"]) == 0
    assert capsys.readouterr().out


def test_a_whole_step_has_the_presets(train, h100):
    argv = ["--model", f"{train}:step", "--xla-preset", "default", "latency-hiding"]
    for more, text in (([], "none"), (["--policy", "own"], "own")):
        policies = opened(h100, *argv, *more).request.policies
        assert [(one.text, str(one.policy), one.xla_preset) for one in policies] == [
            (text, text, preset) for preset in ("default", "latency-hiding")
        ]


def test_sample_tokens_has_an_effect_where_the_workload_writes_text(choices, train, h100):
    assert "sample_tokens" not in opened(h100, "--model", choices).request.model.no_effect
    assert "sample_tokens" in opened(h100, "--model", f"{train}:workload").request.model.no_effect


def test_a_keyword_of_another_meaning_is_the_function_s_own(tmp_path, h100):
    spec = tmp_path / "given_mae.py"
    spec.write_text(CHOICES.replace('loss: str = "chunked"', 'loss: str = "mae"'))
    found = opened(h100, "--model", f"{spec}:workload", "--model-arg", "loss=mse")
    assert (found.trials.factory.losses(), found.trials.factory.config()["arguments"]) == (("own",), {"loss": "'mse'"})


@pytest.mark.full
def test_a_plan_for_ones_own_has_a_loss_and_a_layout(capsys, choices):
    argv = ["--model", choices, "--policy", "auto", "--target", "h100-80gb", "--batch", "8", "--json"]
    assert main(argv) == 0
    plan, *_ = [
        row for line in capsys.readouterr().out.splitlines() if isinstance(row := from_row(json.loads(line)), PlanRecord)
    ]
    assert plan.loss in ("full", "chunked")
    assert plan.layout in ("loop", "unrolled")
    assert {one.layout for one in plan.layouts} == {"loop", "unrolled"}


@pytest.mark.parametrize("flag", ["--model-arg", "--layers"])
def test_flags_of_own_models_are_rejected_beside_a_preset(flag):
    error = error_of(flag, "width=3")
    assert flag in error.got
    assert "gpt2" in error.got


@pytest.mark.full
def test_a_workload_runs_and_its_records_have_no_sequence(capsys, train):
    argv = ["--model", f"{train}:workload", "--model-arg", "width=8", "--steps", "1", "--batch", "4", "--target", "cpu"]
    none, dots = records(TrialRecord, capsys, [*argv, "--policy", "none", "dots"])
    assert (none.model, none.num_params, none.loss, none.optimizer) == ("given_train.py:workload", 4 * 8 * 8, "own", "adamw")
    assert (none.seq_len, none.attention, none.tokens_per_s, none.ran) == (None, None, None, "ok")
    assert none.step_s
    assert none.samples_per_s == pytest.approx(4 / none.step_s)
    assert none.config["model"]["arguments"] == {"width": "8"}
    assert (dots.policy, dots.fits) == ("dots", True)


@pytest.mark.full
def test_a_workload_of_one_batch_has_no_other(capsys, train):
    argv = ["--model", f"{train}:own_optimizer", "--steps", "1", "--policy", "every:2", "--target", "cpu"]
    (row,) = records(TrialRecord, capsys, argv)
    assert (row.batch, row.optimizer, row.policy) == (6, "own", "every:2")


@pytest.mark.parametrize(
    ("attribute", "argv", "got"),
    [
        ("own_optimizer", ["--batch", "8"], ["--batch 8", "6"]),
        ("own_optimizer", ["--global-batch", "8"], ["--global-batch 8", "6"]),
        ("own_optimizer", ["--learning-rate", "1"], ["--learning-rate"]),
        ("step", ["--policy", "dots"], ["--policy dots"]),
        ("step", ["--optimizer", "lion"], ["--optimizer"]),
        ("step", ["--accumulate", "2"], ["--accumulate"]),
        ("step", ["--list", "names"], []),
        ("flat", ["--list", "names"], []),
        ("workload", ["--policy", "every:9"], ["'every:9'", "9", "4"]),
        ("workload", ["--policy", "save:nonsense"], ["'save:nonsense'", "'nonsense'"]),
        ("workload", ["--layers", "blocks_*"], ["'blocks_*'"]),
    ],
)
def test_what_a_workload_cannot_do_is_one_error(train, attribute, argv, got):
    error = error_of("--model", f"{train}:{attribute}", "--target", "cpu", *argv)
    assert [text for text in got if text not in error.got] == []
    assert attribute == "workload" or f"given_train.py:{attribute}" in error.got
    assert error.next_step or error.allowed
    assert "a note" not in error.cause


@pytest.mark.full
def test_a_whole_step_is_run_under_none_without_a_policy_requested(capsys, train):
    (row,) = records(TrialRecord, capsys, ["--model", f"{train}:step", "--steps", "1", "--target", "cpu"])
    assert (row.policy, row.requested_policy, row.ran, row.samples_per_s) == ("none", "none", "ok", None)


@pytest.mark.parametrize(("signature", "of_flag"), [("batch", 6), ("batch=None", 6), ("batch: int = 8", 8)])
def test_a_function_without_a_default_batch_takes_that_of_the_flag(tmp_path, signature, of_flag):
    (tmp_path / "given_bare.py").write_text(TRAIN.replace("batch: int = 8", signature))
    request = check_run(parse_flags(RunFlags, ["--model", f"{tmp_path}/given_bare.py:workload", "--batch", "6,12"]))
    factory = request.model.factory(request, None, None)
    assert factory.at(None, request.train).num_samples == of_flag
    assert factory.at(12, request.train).num_samples == 12


@pytest.mark.full
def test_explain_takes_the_batch_that_a_workload_is_written_for(capsys, train):
    argv = ["--model", f"{train}:workload", "--policy", "nothing", "--target", "cpu"]
    (row,) = records(ExplainRecord, capsys, argv, explain)
    assert row.batch == 8
    assert row.attribution
    assert sum(row.attribution.values()) == row.total_bytes


@pytest.mark.full
def test_without_layers_none_has_its_row_beside_policies_that_need_some(capsys, train):
    """These say why they have none. Where all need some, nothing is compiled."""
    argv = ["--model", f"{train}:flat", "--target", "h100-80gb", "--policy", "nothing"]
    assert main([*argv, "none", "dots", "auto", "--json"]) == 1
    nothing, none, *others = (from_row(json.loads(line)) for line in capsys.readouterr().out.splitlines())
    assert isinstance(none, TrialRecord)
    assert (none.policy, none.batch, none.error) == ("none", 6, None)
    for policy, failure in zip(("nothing", "dots", "auto"), (nothing, *others), strict=True):
        assert isinstance(failure, FailureRecord)
        assert (failure.requested_policy, failure.batch, failure.outcome, failure.tail) == (policy, 6, "bad-config", ())
        assert "no repeated layers" in failure.error
    assert "scopes with numbers" in error_of(*argv, "dots").cause


@pytest.mark.full
def test_without_layers_explain_and_compare_have_the_rows_of_the_others(capsys, train, tmp_path):
    """They say why the policies that need layers have none. One of them alone, or on a page, is an error."""
    model, page = f"{train}:flat", tmp_path / "page.html"
    argv = ["--model", model, "--target", "h100-80gb", "--policy"]
    assert explain([*argv, "nothing", "none", "dots", "--page", str(page)]) == 1
    out = capsys.readouterr().out
    assert "dots, batch 6: bad-config, for the same reason as nothing" in out
    assert out.index("nothing, batch 6: bad-config, NoLayersError: no repeated layers") < out.index("who holds the peak")
    assert page.exists()
    assert explain([*argv, "nothing", "none", "--json"]) == 1
    failure, row = (from_row(json.loads(line)) for line in capsys.readouterr().out.splitlines())
    assert isinstance(failure, FailureRecord)
    assert isinstance(row, ExplainRecord)
    assert (failure.requested_policy, row.policy, row.error) == ("nothing", "none", None)
    session = Session(model, target="h100-80gb")
    answer = session.compare(["nothing", "none", "auto"], 6)
    (nothing,), (none,), (auto,) = answer.by_policy
    assert isinstance(nothing, FailureRecord)
    assert isinstance(auto, FailureRecord)
    assert [trial.policy for trial in answer.trials] == ["none"]
    assert answer.trials == (none,)
    assert repr(answer).count("no repeated layers") == 1
    assert "auto, batch 6: bad-config, for the same reason as nothing" in repr(answer)
    for call in (lambda: session.compare(["nothing"], 6), lambda: session.page(["none", "nothing"], 6)):
        with pytest.raises(UsageError, match="no repeated layers"):
            call()


def test_lists_of_a_workload(capsys, train):
    def rows_of(*argv: str) -> list[dict[str, Any]]:
        assert main(["--model", f"{train}:workload", "--json", "--list", *argv]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    rows = rows_of("names", "--batch", "2")
    tanh = {row["name"]: row for row in rows}["tanh"]
    assert (tanh["shape"], tanh["total_bytes"]) == ([2, 16], tanh["num_values"] * tanh["layer_bytes"])
    file, _, line = tanh["made_at"].rpartition(":")
    assert "tanh" in Path(file).read_text().splitlines()[int(line) - 1]
    assert {row["optimizer"]: row["bytes_per_param"] for row in rows_of("optimizers")}["lion"] == pytest.approx(4, rel=1e-2)


@pytest.mark.full
def test_a_plan_of_a_workload_is_saved_and_taken_up(tmp_path, capsys, train, h100):
    argv = ["--model", f"{train}:workload", "--target", "h100-80gb", "--batch", "64", "--policy"]
    assert main([*argv, "auto", "--save-plan", str(tmp_path / "plan.json"), "--explain-plan"]) == 0
    plan = load_plan(str(tmp_path / "plan.json"))
    assert f'jaxremat.with_policy(loss, "{plan.policy}")' in capsys.readouterr().out
    assert (plan.loss, plan.batch, plan.proven.seq_len) == ("own", 64, None)
    (row,) = records(TrialRecord, capsys, [*argv, f"plan:{tmp_path / 'plan.json'}"])
    assert (row.policy, row.total_bytes) == (str(plan.policy), plan.proven.total_bytes)


def test_a_sweep_s_trial_is_another_one_when_the_source_changes(tmp_path, train):
    def keys():
        flags = SweepFlags(
            out=tmp_path / "sweep.jsonl", model=(f"{train}:workload", "tiny"), policy=("dots",), target=("h100-80gb",)
        )
        return [trial.key for trial in sweep_trials(flags)]

    before = keys()
    assert keys() == before
    (tmp_path / "given_train.py").write_text(TRAIN + "\n# another line\n")
    after = keys()
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_request_imports_no_code_of_the_user_s(tmp_path):
    file = tmp_path / "explodes.py"
    file.write_text("raise RuntimeError('imported')\n")
    request = check_run(RunFlags(model=f"{file}:workload", layers=("blocks_*",)))
    assert request.model == given_model(GivenModel(f"{file}:workload", layers=("blocks_*",)))
