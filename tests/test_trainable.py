"""Frozen parameters: no gradients, no optimizer state, no copy in float32, and the numbers that follow from them."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxremat
from jaxremat.answer.layer_problem import layer_problem, trace_layer
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import UsageError
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.policy.grammar import parse
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import RequestedModel, check_run
from jaxremat.session.workloads import fitted
from jaxremat.step.optimizer import state_bytes
from jaxremat.step.step import abstract_args, init_state, make_step
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import factory_of
from jaxremat.workload.model import Model
from jaxremat.workload.trainable import Narrowed
from tests.helpers import quick_jit

TINY = ModelConfig("frozen", 61, 2, 16, 2, 2, 8, 32, max_seq_len=30, dtype="bfloat16", mlp="swiglu", tie_embeddings=False)
TRAIN = TrainConfig(seq_len=30)


def parameters():
    random = np.random.default_rng(0)
    return {name: {"kernel": random.standard_normal((8, 8), np.float32)} for name in ("embed", "body", "head")}


def loss(params, batch):
    h = jnp.tanh(batch["x"] @ params["embed"]["kernel"])
    h = jnp.tanh(h @ params["body"]["kernel"].astype(h.dtype))
    return jnp.mean((h @ params["head"]["kernel"] - batch["y"]) ** 2)


def batch():
    random = np.random.default_rng(1)
    return {name: random.standard_normal((4, 8), np.float32) for name in "xy"}


def workload(**changes):
    return jaxremat.Workload(**{"loss": loss, "params": parameters(), "batch": batch(), **changes})


def frozen_decoder(*patterns: str) -> Any:
    return replace(decoder_factory(TINY, "xla"), narrowed=Narrowed(freeze=patterns))


@pytest.mark.parametrize(
    ("trainable", "trained"),
    [
        ("head", {"head/kernel"}),
        (("head", "b*/kernel"), {"head/kernel", "body/kernel"}),
        (Narrowed(freeze=("embed*",)), {"head/kernel", "body/kernel"}),
        (Narrowed(("b*", "head"), ("head",)), {"body/kernel"}),
        (Narrowed(freeze=("head",), own=("head", "body")), {"body/kernel"}),
        (lambda path, leaf: path.startswith("embed") and leaf.shape == (8, 8), {"embed/kernel"}),
    ],
)
def test_patterns_choose_the_trained_parameters(trainable, trained):
    made = workload(trainable=trainable)
    found = jax.tree.leaves_with_path(made.trained_params)
    assert {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found} == trained
    assert (made.num_params, made.num_trained) == (3 * 64, 64 * len(trained))
    assert len(made.frozen) == 3 - len(trained)


def test_without_patterns_all_are_trained():
    assert (workload().num_trained, workload().frozen) == (None, [])


@pytest.mark.parametrize(
    "trainable", ["heads", ("head", "lora_*"), Narrowed(("lora_*",)), Narrowed(freeze=("kernel/head",))]
)
def test_a_pattern_that_matches_nothing_is_rejected(trainable):
    with pytest.raises(UsageError) as caught:
        workload(trainable=trainable)
    assert "embed/kernel" in caught.value.allowed


@pytest.mark.parametrize("trainable", [Narrowed(freeze=("kernel",)), lambda path, leaf: False, ()])
def test_a_training_of_nothing_is_rejected(trainable):
    with pytest.raises(UsageError) as caught:
        workload(trainable=trainable)
    assert "at least one" in caught.value.allowed


def test_a_whole_step_freezes_nothing_by_flags():
    step = jaxremat.Workload(step=lambda x: (x, x), args=(jnp.ones(2),))
    model = RequestedModel(Model("m", {}, lambda *args: factory_of(step)), TRAIN)
    request = check_run(RunFlags(model="m.py:step", freeze=("embed*",), target="h100-80gb"), model)
    factory: Any = SimpleNamespace(name="m", has_free_batch=False)
    with pytest.raises(UsageError) as caught:
        fitted(request, factory, step)
    assert "--freeze" in caught.value.got
    with pytest.raises(UsageError):
        replace(step, trainable="x")


def test_the_flags_reach_the_workload_and_the_records():
    request = check_run(RunFlags(model="tiny", freeze=("embedding",), train_only=("layers",), target="h100-80gb"))
    factory = request.model.factory(request, None, None)
    assert factory.config()["freeze"] == ["embedding"] == request.model.config["freeze"]
    assert {path[0].key for path, _ in factory.at(None, TRAIN).frozen} >= {"embedding", "final_norm"}
    assert factory != replace(factory, narrowed=Narrowed())


def test_frozen_parameters_have_no_optimizer_state_and_the_compute_dtype():
    made = frozen_decoder("embedding", "output").at(None, TRAIN)
    state, _ = abstract_args(made, TRAIN)
    assert {leaf.dtype for _, leaf in made.frozen} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params["layers"])} == {jnp.dtype("float32")}
    assert state_bytes(made, TRAIN) == 8 * made.num_trained + 4
    assert made.num_params - made.num_trained == 2 * 61 * 16


@functools.cache
def after_two_steps(trainable=None, optimizer=None, accumulate=1):
    train = TrainConfig(learning_rate=0.1, accumulate=accumulate)
    made = workload(trainable=trainable, optimizer=optimizer)
    step, state = quick_jit(make_step(made, train, parse("none"))), init_state(made, train, parameters())
    batches = batch() if accumulate == 1 else jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), batch())
    for _ in range(2):
        state, _ = step(state, batches)
    return state.params


def labels(params):
    return {name: "frozen" if name == "embed" else "trained" for name in params}


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}], ids=str)
def test_frozen_parameters_stay_and_the_others_are_as_with_multi_transform(changes):
    sgd = optax.sgd(0.1)
    by_hand = optax.multi_transform({"trained": sgd, "frozen": optax.set_to_zero()}, labels)
    got = after_two_steps(Narrowed(freeze=("embed",)), sgd, **changes)
    np.testing.assert_array_equal(got["embed"]["kernel"], parameters()["embed"]["kernel"])
    want = after_two_steps(None, by_hand, **changes)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)
    assert not np.array_equal(got["body"]["kernel"], parameters()["body"]["kernel"])


def test_int8_leaves_may_be_frozen():
    params = parameters() | {"body": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.int8)}}
    made = workload(params=params, trainable="head")
    assert (made.num_trained, made.num_params) == (64, 3 * 64)
    assert {str(leaf.dtype) for _, leaf in made.frozen} == {"int8", "float32"}


def trials_of(factory, h100):
    return Trials(factory, TRAIN, h100, 2**30)


@pytest.mark.full
def test_a_frozen_embedding_takes_the_bytes_that_multi_transform_takes(h100):
    """XLA drops the work that nobody reads: the FLOPs are equal, and the state has bfloat16 in place of float32."""
    adamw = optax.adamw(3e-4)
    by_hand = optax.multi_transform(
        {"trained": adamw, "frozen": optax.set_to_zero()},
        lambda params: {name: "frozen" if name == "embedding" else "trained" for name in params},
    )
    plain = decoder_factory(TINY, "xla")
    transformed = replace(plain, make=lambda *args, **options: replace(plain.make(*args, **options), optimizer=by_hand))
    of_hand: Any = trials_of(transformed, h100).record(parse("none"), 4)
    frozen: Any = trials_of(frozen_decoder("embedding"), h100).record(parse("none"), 4)
    full: Any = trials_of(plain, h100).record(parse("none"), 4)
    size = 61 * 16
    assert full.argument_bytes - of_hand.argument_bytes == pytest.approx(8 * size, abs=600)
    assert of_hand.argument_bytes - frozen.argument_bytes == pytest.approx(2 * size, abs=600)
    assert frozen.executed_flops == of_hand.executed_flops == frozen.base_flops
    assert (frozen.num_trained, full.num_trained, full.full_training_mfu) == (frozen.num_params - size, None, None)
    assert frozen.mfu == pytest.approx(frozen.full_training_mfu * frozen.base_flops / frozen.model_flops)


@pytest.mark.full
def test_frozen_layers_save_flops_and_have_rows_of_their_own():
    """Only the last norm is trained: the backward pass of the layers is gone."""
    session = jaxremat.Session("tiny", target="h100-80gb", train_only="final_norm", dropout=0.0, seq_len=64)
    (row,) = session.compile("none", 4).trials
    assert row.base_flops
    assert row.model_flops
    assert row.num_trained
    assert row.base_flops < 0.7 * row.model_flops
    memory = session.explain("none", 4, lint=False).memory
    assert memory
    assert memory.attribution
    assert memory.attribution["parameters"] == 4 * row.num_trained
    assert memory.attribution["frozen parameters"] == 2 * (row.num_params - row.num_trained)
    assert row.config["model"]["train_only"] == ["final_norm"]


@pytest.mark.full
def test_a_plan_knows_the_residuals_of_frozen_kernels(h100):
    """A frozen kernel needs no input of its matmul: fewer values are residuals."""

    def needed(*patterns):
        (kind,) = frozen_decoder(*patterns).layers_at(4, TRAIN).kinds
        problem, *_ = layer_problem(trace_layer(kind.function, kind.args, kind.frozen), h100.speed)
        return sum(value.num_bytes for value in problem.values if value.needed and not value.name.startswith("args"))

    assert needed("layers/mlp") < needed() == needed("embedding")


@pytest.mark.parametrize(
    "factory",
    [frozen_decoder("layers/mlp"), decoder_factory(replace(TINY, lora="2"), "xla")],
    ids=["frozen MLP", "LoRA"],
)
def test_a_plan_has_the_names_of_a_step_with_frozen_kernels(factory):
    """The planner's layer has its frozen kernels in the compute dtype, as a step has: no conversion of them takes a name."""
    made, (kind,) = factory.at(2, TRAIN), factory.layers_at(2, TRAIN).kinds
    names = ",".join(value.name for value in kind.values())
    jax.eval_shape(made.loss_with(parse(f"save:{names}")), *made.loss_args)
    assert {str(kind.args[0]["params"]["mlp"]["wi_0"]["kernel"].dtype)} == {"bfloat16"}


LAYERS = {"up": (8, 32), "gate": (8, 32), "down": (32, 8)}


def stack_loss(params, batch, *, in_scan: bool):
    """Three layers, in a scan over stacked parameters, or in scopes of their own."""

    def layer(x, p):
        up, gate, down = (p[name].astype(jnp.bfloat16) for name in LAYERS)
        return x + (jnp.tanh(x @ up) * jax.nn.sigmoid(x @ gate)) @ down, None

    x = batch.astype(jnp.bfloat16)
    if in_scan:
        x, _ = jax.lax.scan(layer, x, params)
    else:
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x, _ = layer(x, params[f"layer_{i}"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def only_kind(trainable, *, in_scan: bool):
    stacked = (3,) if in_scan else ()
    one = {name: jax.ShapeDtypeStruct((*stacked, *sizes), jnp.float32) for name, sizes in LAYERS.items()}
    params = one if in_scan else {f"layer_{i}": one for i in range(3)}
    made = jaxremat.Workload(
        loss=functools.partial(stack_loss, in_scan=in_scan),
        params=params,
        batch=jax.ShapeDtypeStruct((4, 8), jnp.float32),
        trainable=trainable,
    )
    found = factory_of(made).layers_at(4, TRAIN)
    assert found
    (kind,) = found.kinds
    return kind


@pytest.mark.parametrize("in_scan", [True, False])
@pytest.mark.parametrize(
    ("trainable", "frozen"),
    [
        (None, set()),
        ("down", {"up", "gate"}),
        (lambda path, leaf: "up" not in path, {"up"}),
        (("up", "gate", "down"), set()),
    ],
    ids=["all", "one", "by a function", "all by name"],
)
def test_the_frozen_parameters_of_found_layers_are_known(trainable, frozen, in_scan):
    kind = only_kind(trainable, in_scan=in_scan)
    shapes = sorted(kind.args[number].shape for number in kind.frozen)
    assert shapes == sorted(LAYERS[name] for name in frozen)


def test_a_parameter_is_frozen_only_where_it_is_in_all_layers():
    kind = only_kind("layer_0", in_scan=False)
    assert kind.frozen == frozenset()


def test_a_plan_knows_the_residuals_of_frozen_found_layers(h100):
    """Without gradients of the first two kernels, no matmul of a weight's gradient reads the layer's input."""

    def needed(trainable):
        kind = only_kind(trainable, in_scan=False)
        problem, *_ = layer_problem(trace_layer(kind.function, kind.args, kind.frozen), h100.speed)
        return {value.name for value in problem.values if value.needed}

    assert needed("down") < needed(None)
