"""`jaxremat.Session`: the commands' answers in a notebook, with their checks and their defaults."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from jaxremat.cli.run import main
from jaxremat.errors import TargetError, UsageError
from jaxremat.session.printed import Answer
from jaxremat.session.session import Session
from jaxremat.workload.workload import Workload
from tests.made_up_records import explained, step

SMALL: dict[str, Any] = {"attention": "xla", "num_layers": 1, "embed_dim": 32, "head_dim": 8, "mlp_dim": 64, "seq_len": 16}


def flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def squares(batch: int = 8) -> Workload:
    """A workload of two matrices."""
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    loss = lambda params, x: ((x @ params[0] @ params[1]) ** 2).mean()  # noqa: E731
    return Workload(loss=loss, params=params, batch=jax.ShapeDtypeStruct((batch, 64), jnp.float32))


@pytest.mark.full
def test_a_session_answers_as_the_command_does(tmp_path):
    session = Session("tiny", target="h100-80gb", **SMALL)
    answer = session.compile("none", 4)
    out = tmp_path / "rows.jsonl"
    argv = ["--model", "tiny", *flags(SMALL), "--target", "h100-80gb", "--policy", "none", "--batch", "4"]
    assert main([*argv, "--out", str(out)]) == 0
    rows = [row for row in map(json.loads, out.read_text().splitlines()) if row["record"] == "trial"]
    assert len(answer.trials) == len(rows) == 1
    for trial, row in zip(answer.trials, rows, strict=True):
        for name in ("policy", "total_bytes", "temp_bytes", "step_s", "executed_flops", "config", "budget_bytes", "fits"):
            assert json.loads(json.dumps(getattr(trial, name))) == row[name], name
    assert answer.plan is answer.largest_batch is None


def test_a_printed_explanation_has_the_whole_policy():
    policy = "save:" + ",".join(f"a_long_name_of_a_value_{n}" for n in range(12))
    answer = Answer(((explained(policy=policy, requested_policy="auto"),),), "h100-80gb")
    assert policy.rpartition(",")[2] in repr(answer)


@pytest.mark.full
def test_what_a_session_answers_of_a_workload_of_ones_own():
    session = Session(squares, target="h100-80gb", budget="10KiB")
    assert all(word in repr(session) for word in ("squares", "h100-80gb", "budget"))
    (trial,) = session.compile("none", 32).trials
    assert (trial.batch, trial.policy, trial.fits) == (32, "none", False)
    found = session.explain("none", 32, top=1)
    assert found.memory
    assert found.memory.largest
    assert (found.memory.total_bytes, len(found.memory.largest)) == (trial.total_bytes, 1)
    assert "who holds the peak" in repr(found)
    fixed = Session(squares(), target="h100-80gb")
    assert fixed.largest_batch("none", max_batch=8).trials[0].batch == 8
    with pytest.raises(UsageError) as caught:
        fixed.compile("none", 16)
    assert "16" in caught.value.got


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        ("tiny", {"num_layrs": 3}, "num_layrs"), ("tiny", {"num_layers": "3"}, "num_layers"), (3, {}, "int"),
        ("tiny", {"budget": "lots"}, "lots"), ("tiny", {"budjet": "1GiB"}, "budjet"),
        ("tinny", {}, "tinny"), ("tiny", {"policy": "dots"}, "policy"),
        ("tiny", {"optimizer": "adm"}, "optimizer"), ("nowhere.json", {}, "nowhere.json"),
        (squares, {"seq_len": 64}, "seq_len"), (squares, {"num_layers": 3}, "num_layers"), ("tiny", {"fresh": True}, "fresh"),
        ("tiny", {"buckets": 3}, "buckets"), ("tiny", {"frontier": True}, "frontier"), (lambda: None, {}, "None"),
        (nn.Dense(4), {}, "Linen"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_valid(model, options, named):
    with pytest.raises(UsageError) as caught:
        Session(model, **{"target": "h100-80gb"} | options)
    assert named in caught.value.got
    assert caught.value.next_step


@pytest.mark.full
@pytest.mark.parametrize("batch", [8, 16])
def test_a_global_batch_is_whole_microbatches_in_each_group(batch):
    """96 are 8 x 12, but each of 8 groups has 12, of which 8 is no part and 16 is more."""
    session = Session("tiny", target="h100-80gb", mesh="fsdp=8", global_batch=96)
    with pytest.raises(UsageError) as caught:
        session.compile("dots", batch)
    assert "12" in caught.value.got


@pytest.mark.parametrize(("policies", "batch"), [(["dots"], 0), (["dots"], -1), (["dots"], True), (["dots"], "8"), ([], 2)])
def test_a_request_that_is_not_valid(policies: list[str], batch: Any):
    session = Session(squares, target="h100-80gb")
    with pytest.raises(UsageError) as caught:
        session.compare(policies, batch)
    assert caught.value.allowed


def test_an_option_without_effect_is_noted(capsys: pytest.CaptureFixture[str]):
    Session(squares, target="h100-80gb", steps=3)
    assert "--steps has no effect" in capsys.readouterr().err


def test_a_target_that_is_not_known():
    with pytest.raises(TargetError) as caught:
        Session("tiny", target="h10")
    assert "h10" in caught.value.got


def test_an_answer_is_the_tables_that_the_command_prints():
    rows = step("none", 8, 0.01), step("dots", 16, 0.02)
    answer = Answer(tuple((row,) for row in rows), "h100-80gb")
    text = repr(answer)
    assert answer.records == answer.trials == rows
    assert [name for name in ("policy none", "policy dots", "side by side", "819,200") if name not in text] == []
    html = answer._repr_html_()
    assert html.startswith("<pre>")
    assert "819,200" in html


def test_a_policy_is_not_a_list_of_letters():
    session = object.__new__(Session)
    with pytest.raises(UsageError) as caught:
        session.compare("dots")
    assert "'dots'" in caught.value.got


def test_axes_of_a_mesh_in_a_function():
    """It is traced on the mesh, as that of --model, also where no step is compiled."""

    def on_axes(batch: int = 8) -> Workload:
        loss = lambda w, x: jnp.mean(jax.lax.with_sharding_constraint(x, PartitionSpec("fsdp")) @ w[0] @ w[1])  # noqa: E731
        return replace(squares(batch), loss=loss)

    session = Session(on_axes, target="h100-80gb", mesh="fsdp=2")
    assert (session.trials.factory.num_layers(), str(session.trials.target.mesh_shape)) == (2, "fsdp=2")


@pytest.mark.parametrize(
    ("model", "field"),
    [("lr=3/train.py:workload", "model"), ("a.yml steps=3", "maxtext"), ("a=1:2", "maxtext"), ("a=1/config.json", "hf")],
)
def test_what_a_text_names(monkeypatch, model, field):
    def check_run(flags: Any, model: Any) -> Any:
        raise UsageError(next(name for name in ("model", "maxtext", "hf") if getattr(flags, name)))

    monkeypatch.setattr("jaxremat.session.session.check_run", check_run)
    with pytest.raises(UsageError) as caught:
        Session(model)
    assert caught.value.got == field


def test_a_config_json_is_a_model(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(
        "jaxremat.session.session.check_run",
        lambda flags, model: seen.append(flags) or SimpleNamespace(meshes=(), mesh=None),
    )
    monkeypatch.setattr(Session, "of", lambda request, target, **_: SimpleNamespace(warnings=()))
    Session(Path("some/config.json"), target="h100-80gb", seq_len=8, layers="a_*")
    assert (seen[0].hf, seen[0].model, seen[0].training.seq_len, seen[0].layers) == (
        "some/config.json",
        None,
        (8,),
        ("a_*",),
    )
