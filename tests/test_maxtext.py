"""MaxText's config as text, and its own program as a workload.

What compiles MaxText needs it to be importable, and is skipped by name without it: `python -m pytest --all tests/test_maxtext.py`
with the folder `src` of a checkout on PYTHONPATH.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

import jaxremat
from jaxremat import maxtext
from jaxremat.cli.recommend import cells_of
from jaxremat.errors import MissingDependencyError, UnknownPolicyError, UsageError
from jaxremat.policy.grammar import parse
from jaxremat.policy.maxtext import MAXTEXT_ALIASES, config_batch, config_lines, config_words
from jaxremat.policy.spec import NONE, OWN, Names
from jaxremat.session.flags import RecommendFlags, RunFlags
from jaxremat.session.request import MAXTEXT, check_run

has_maxtext = pytest.mark.skipif(importlib.util.find_spec("maxtext") is None, reason="maxtext isn't importable")
#: A config's places, in MaxText's order.
PLACES = {
    "decoder_layer_input": "device",
    "context": "remat",
    "mlpwo": "offload",
    "query_proj": "remat",
    "out_proj": "remat",
}
#: A model of seconds.
TINY = (
    "model_name=qwen3-0.6b override_model_config=true base_num_decoder_layers=3 base_emb_dim=128 base_mlp_dim=256 vocab_size=512"
    " base_num_query_heads=4 base_num_kv_heads=2 head_dim=32 max_target_length=64 attention=dot_product"
)


# Text.


def test_words_begin_with_a_file():
    assert config_words("model_name=x") == ("configs/base.yml", "model_name=x")
    assert config_words("my/own.yml a=1 'b=[1, 2]'") == ("my/own.yml", "a=1", "b=[1, 2]")


@pytest.mark.parametrize("text", ["a=1 other.yml", "a", "=1", "a=1 --b=2", "'a=1"])
def test_other_words_are_one_error(text):
    with pytest.raises(UsageError):
        config_words(text)


@pytest.mark.parametrize("config", [{"enable_diloco": True}, {"compile_xla_flags": "--xla_tpu_x=1"}], ids=str)
def test_a_step_that_maxtext_makes_otherwise_is_rejected(monkeypatch, config):
    monkeypatch.setattr(maxtext, "_config", lambda *_: SimpleNamespace(**config))
    monkeypatch.setattr(maxtext, "_state", lambda *_: (None, SimpleNamespace(params={}), {}))
    with pytest.raises(UsageError) as caught:
        maxtext.workload("model_name=x")
    assert next(iter(config)) in caught.value.got


def test_the_batch_of_the_words():
    assert config_batch(("a.yml", "a=1")) is None
    assert config_batch(("per_device_batch_size=2", "per_device_batch_size=4.0")) == 4
    for batch in ("0", "0.5", "x", ""):
        with pytest.raises(UsageError):
            config_batch((f"per_device_batch_size={batch}",))


def test_a_text_is_a_model_of_a_function():
    request = check_run(RunFlags(maxtext="model_name=x per_device_batch_size=4", policy=("own",)))
    assert request.batches == (4,)
    assert (request.flags.model, request.flags.maxtext) == (MAXTEXT, None)
    assert request.flags.model_arg == ("text=configs/base.yml model_name=x",)
    assert [one.policy for one in request.policies] == [OWN]


@pytest.mark.parametrize(
    "more", [{"model": "gpt2"}, {"hf": "config.json"}, {"model_arg": ("a=1",)}, {"batch": (2,)}, {"data": "text"}]
)
def test_what_contradicts_a_text(more):
    with pytest.raises(UsageError) as raised:
        check_run(RunFlags(maxtext="per_device_batch_size=4", **more))
    assert "both given" in raised.value.got


def test_one_length():
    """Without MaxText, too: a text with a length of its own has no other one."""
    with pytest.raises(UsageError) as raised:
        maxtext.workload("model_name=x max_target_length=128", seq_len=64)
    assert "max_target_length=128" in raised.value.got


def test_the_batch_of_a_workload_is_no_word_of_its_text():
    """As a sweep has it: `--model jaxremat.maxtext:workload --model-arg text=... --batch 8` would take 8 in silence."""
    with pytest.raises(UsageError) as raised:
        maxtext.workload("model_name=x per_device_batch_size=4", 8)
    assert "per_device_batch_size=4" in raised.value.got
    assert "--batch 4" in raised.value.next_step


@pytest.mark.full
def test_a_text_has_its_own_mesh_where_gpus_are_compared():
    flags = RecommendFlags(maxtext="model_name=x", target=("h100-80gb",), devices=(1, 8), policy=("own",))
    one, eight = cells_of(flags)
    assert (one.flags.devices, eight.flags.devices) == (None, 8)
    for cell in (one, eight):
        assert (cell.flags.model, cell.flags.mesh, cell.flags.maxtext) == (MAXTEXT, None, None)
        assert cell.trials["own"].refused == ""
    with pytest.raises(UsageError):
        cells_of(replace(flags, model="gpt2"))


# A policy as lines of the config.


@pytest.mark.parametrize("preset", MAXTEXT_ALIASES)
def test_a_preset_is_its_own_line(preset):
    assert config_lines(parse(preset), PLACES) == (f"remat_policy: {preset}",)


def test_names_are_the_custom_policy():
    lines = config_lines(Names(("query_proj",), ("out_proj",)), PLACES)
    assert lines == ("remat_policy: custom", "mlpwo: remat", "query_proj: device", "out_proj: offload")
    assert config_lines(Names(), PLACES) == ("remat_policy: full",)


@pytest.mark.parametrize("saved", [*itertools.product(("remat", "device", "offload"), repeat=3)][1:])
def test_lines_say_the_whole_policy(saved):
    """The config's places with the lines of a policy are the places of the policy."""
    names = dict(zip(("context", "mlpwo", "query_proj"), saved, strict=True))
    save, offload = (tuple(name for name, place in names.items() if place == where) for where in ("device", "offload"))
    lines = config_lines(Names(save, offload), PLACES)
    assert lines is not None
    said = PLACES | dict(line.split(": ") for line in lines[1:])
    assert said == {"decoder_layer_input": "device", "out_proj": "remat"} | names


@pytest.mark.parametrize(
    "policy", ["none", "own", "dots", "every:4", "2*nothing|1*save:out_proj", "save:other", "save:out_proj+attention"]
)
def test_what_the_config_cannot_say(policy):
    assert config_lines(parse(policy), PLACES) is None


# The policy of the author.


def test_own_is_alone():
    assert parse("own") == OWN != NONE
    assert str(OWN) == "own"
    for text in ("own+attention", "every:4+own", "own+save:a", "2*own|1*nothing"):
        with pytest.raises(UnknownPolicyError):
            parse(text)


def test_under_own_the_loss_is_the_authors():
    def loss(params, batch):
        return (params * batch).sum()

    two = jax.ShapeDtypeStruct((2,), "float32")
    workload = jaxremat.Workload(loss=loss, params=two, batch=two, loss_under=lambda policy: max)
    assert workload.loss_with(OWN) is loss
    assert jaxremat.with_policy(loss, "own") is loss


# MaxText itself.


def test_without_maxtext_there_is_one_line_to_type(monkeypatch):
    maxtext._trainer.cache_clear()
    monkeypatch.setitem(sys.modules, "maxtext", None)
    with pytest.raises(MissingDependencyError) as raised:
        maxtext.workload(TINY)
    assert "pip install" in raised.value.next_step


@has_maxtext
@pytest.mark.parametrize(
    "text",
    [
        "model_nam=x",
        "model_name=qwen3-0.7b",
        "other.yml model_name=x",
        "max_target_length=abc",
        "model_name=qwen3-0.6b base_emb_dim=7",
    ],
)
@pytest.mark.full
def test_what_maxtext_rejects_is_one_error(text):
    with pytest.raises(UsageError):
        maxtext.workload(text)


def session(more="", **options):
    return jaxremat.Session(f"{TINY} {more}", target="h100-80gb", **options)


def bytes_of(answer):
    (trial,) = answer.trials
    assert trial.total_bytes is not None
    return trial.total_bytes


def bytes_of_train_step(more, batch, devices=1):
    """The bytes of MaxText's own train step, as its trainer jits it."""

    def workload(devices=None):
        config = maxtext._config(config_words(f"{TINY} {more}"), batch, tuple(devices or ()))
        mesh = maxtext._state(config_words(f"{TINY} {more}"), tuple(devices or ()))[0]
        step, args = maxtext.train_step(config, mesh)
        return jaxremat.Workload(step=step, args=args, donate_argnums=0, mesh=mesh)

    num_devices = devices if devices > 1 else None
    return bytes_of(jaxremat.Session(workload, target="h100-80gb", devices=num_devices).compile("own", 1))


@has_maxtext
@pytest.mark.full
@pytest.mark.parametrize("more", ["remat_policy=minimal", "scan_layers=false"])
def test_own_has_the_bytes_of_maxtexts_train_step(more):
    assert bytes_of(session(more).compile("own", 2)) == pytest.approx(bytes_of_train_step(more, 2), abs=4096)


@has_maxtext
@pytest.mark.full
def test_a_model_of_nnx_has_nearly_the_bytes_of_its_train_step():
    more = "pure_nnx=true remat_policy=save_qkv_proj"
    assert bytes_of(session(more).compile("own", 2)) == pytest.approx(bytes_of_train_step(more, 2), rel=0.05)


@has_maxtext
@pytest.mark.full
def test_several_devices_by_maxtexts_mesh():
    more = "ici_fsdp_parallelism=2 ici_tensor_parallelism=2"
    found = bytes_of(session(more, devices=4).compile("own", 2))
    assert found == pytest.approx(bytes_of_train_step(more, 2, 4), abs=4096)
    assert found < bytes_of(session().compile("own", 2))


@has_maxtext
@pytest.mark.full
def test_nodes_are_maxtexts_slices():
    """The parts of an axis over nodes are apart, and its parts in a node are neighbours."""
    more = "dcn_data_parallelism=2 ici_fsdp_parallelism=4"
    on_nodes = session(more, devices=8, nodes=2).trials.target
    assert str(on_nodes.mesh_shape) == "data=2,fsdp=4"
    assert on_nodes.mesh is not None
    nodes = {device.process_index for device in on_nodes.mesh.devices.flat}
    assert len(nodes) == 2
    for part in on_nodes.mesh.devices.reshape(2, 4):
        assert len({device.process_index for device in part}) == 1
    with pytest.raises(UsageError):
        session(more, devices=8, nodes=1)


@has_maxtext
@pytest.mark.full
def test_what_to_rent(tmp_path):
    argv = ["--maxtext", f"{TINY} remat_policy=minimal", "--target", "h100-80gb", "--devices", "1,2", "--policy", "own"]
    argv += ["--max-batch", "2", "--jobs", "1", "--json", "--out", str(tmp_path / "rent.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "jaxremat", "recommend", *argv], capture_output=True, text=True, check=True, timeout=600
    )
    rows = {row["num_devices"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {number: row["mesh"] for number, row in rows.items()} == {1: None, 2: "fsdp=2"}
    for row in rows.values():
        assert (row["policy"], row["batch"], row["fits"]) == ("own", 2, True)
        assert row["checkpointing"] in ("faster", "not needed")
        assert row["tokens_per_s"] > 0


@has_maxtext
@pytest.mark.full
def test_policies_are_maxtexts_by_its_names():
    one = session()
    of = {policy: bytes_of(one.compile(policy, 32)) for policy in ("own", "full", "minimal", "save:out_proj", "dots")}
    assert of["own"] == of["full"] < of["minimal"] < of["dots"]
    assert of["minimal"] == pytest.approx(bytes_of_train_step("remat_policy=minimal", 32), abs=4096)
    assert of["save:out_proj"] == pytest.approx(bytes_of_train_step("remat_policy=custom out_proj=device", 32), abs=4096)
    with pytest.raises(jaxremat.UnknownNameError):
        one.compile("save:mlpw", 8)


@has_maxtext
@pytest.mark.full
@pytest.mark.parametrize(("layers", "says"), [("true", "remat_policy: "), ("false", "remat_policy: custom")])
def test_the_lines_of_a_plan_have_its_bytes(layers, says):
    """Whatever the plan is. With unrolled layers it saves tensors by name."""
    one = session(f"scan_layers={layers}")
    budget = sum(bytes_of(one.compile(policy, 32)) for policy in ("full", "minimal")) // 2
    planned = session(f"scan_layers={layers}", budget=budget).plan(batch=32).plan
    assert planned is not None
    assert planned.as_config is not None
    assert planned.total_bytes <= budget
    batch, policy, *_ = planned.as_config
    assert (batch, policy[: len(says)]) == ("per_device_batch_size: 32", says)
    words = " ".join(line.replace(": ", "=") for line in planned.as_config[1:])
    assert planned.total_bytes == pytest.approx(bytes_of_train_step(f"scan_layers={layers} {words}", 32), abs=4096)


@has_maxtext
@pytest.mark.full
def test_what_is_more_than_a_loss_is_a_whole_step():
    more = "gradient_accumulation_steps=2"
    assert bytes_of(session(more).compile("own", 2)) == bytes_of_train_step(more, 2)
    with pytest.raises(UsageError):
        session(more).compile("full", 2)
