"""A workload of anybody's in place of the decoder: its step, its checks, its trials on a CPU and for a GPU that isn't here."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxremat
from jaxremat.chips.target import load_target
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.policy.grammar import parse
from jaxremat.step.inputs import first_state, inputs, said_inputs
from jaxremat.step.step import abstract_args, evaluation_key, init_state, make_step, step_key
from jaxremat.trial.trials import Trials
from jaxremat.workload import workload as workload_module
from jaxremat.workload.factory import WorkloadFactory, factory_of
from jaxremat.workload.workload import Measured
from tests.equality import relative_difference
from tests.helpers import quick_jit

WIDTH, DEPTH = 16, 4
TRAIN = TrainConfig(optimizer="sgd-momentum", learning_rate=0.1)


def init(key):
    layers = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in jax.random.split(key, DEPTH)]
    return {"layers": layers, "count": jnp.int32(7), "key": jax.random.key(3)}


def hidden(params, batch):
    x = batch["x"]
    for i, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(x @ w)
    return x


def loss(params, batch):
    return jnp.mean((hidden(params, batch) - batch["y"]) ** 2)


def loss_with_key(params, batch, key):
    x = hidden(params, batch) * jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean((x - batch["y"]) ** 2), {"first": x[0, 0], "count": params["count"]}


def test_a_loss_without_layers_has_flags_as_its_next_step():
    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    made = jaxremat.Workload(loss=lambda params, x: jnp.sum(x @ params["w"]), params=params, batch=shapes(2)["x"])
    factory = factory_of(made)
    assert factory.checked(parse("none"), TRAIN) == parse("none")
    with pytest.raises(UsageError, match="no repeated layers") as caught:
        factory.checked(parse("dots"), TRAIN)
    assert "--layers 'layer_*'" in caught.value.next_step
    assert "--policy none" in caught.value.next_step


def shapes(batch):
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    return {"x": x, "y": x}


def mlp(num_samples=8, **changes):
    params = jax.eval_shape(init, jax.random.key(0))
    return jaxremat.Workload(**{"loss": loss, "params": params, "batch": shapes(num_samples), "init": init, **changes})


def rows(count, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal((count, WIDTH), np.float32) for name in ("x", "y")}


def free_mlp(**changes):
    return WorkloadFactory("mlp", lambda batch: mlp(batch or 8, **changes), has_free_batch=True)


# What a workload may be.


GOOD = {"params": jnp.ones(2), "batch": shapes(2)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, ["loss", "step"]),
        ({"loss": loss, "step": loss}, ["loss", "step"]),
        ({"loss": loss, "batch": shapes(2)}, ["params"]),
        ({"loss": loss, "params": {}, "batch": shapes(2)}, ["params"]),
        ({"loss": loss, "params": jnp.ones(2), "batch": ()}, ["batch"]),
        ({"loss": loss, "params": jnp.ones(2), "batch": jnp.ones(())}, ["batch"]),
        ({"loss": loss, "params": jnp.arange(2), "batch": shapes(2)}, ["params", "float"]),
        ({"loss": lambda p: 0.0, **GOOD}, ["loss", "1"]),
        ({"loss": lambda p, b, k, more: 0.0, **GOOD}, ["loss", "4"]),
        ({"loss": lambda p, b, *, key: 0.0, **GOOD}, ["loss", "'key'"]),
        ({"loss": loss, "params": {"f": jnp.tanh, "w": jnp.ones(2)}, "batch": shapes(2)}, ["params['f']"]),
        ({"loss": loss, **GOOD, "args": (1,)}, ["loss", "args"]),
        ({"loss": 3, **GOOD}, ["loss=3"]),
        ({"step": loss}, ["step", "args"]),
        ({"step": loss, "args": (jnp.ones(2),), "params": jnp.ones(2)}, ["step", "params"]),
        ({"step": loss, "args": (jnp.ones(2),), "layers": "blocks_*"}, ["step", "layers"]),
    ],
)
def test_fields_that_make_no_sense_are_one_error(fields, named):
    with pytest.raises(UsageError) as caught:
        jaxremat.Workload(**fields)
    assert [name for name in named if name not in caught.value.got] == []


def test_gigabytes_of_arrays_are_rejected(monkeypatch):
    """Of 1 KiB here, so that the test allocates nothing large."""
    monkeypatch.setattr(workload_module, "MAX_CONCRETE_BYTES", 1024)
    with pytest.raises(UsageError) as caught:
        mlp(params={"layers": [jnp.ones((WIDTH, WIDTH))] * 2})
    assert "jax.eval_shape" in caught.value.next_step


@pytest.mark.parametrize("value", [jnp.ones(3), jnp.int32(1), (jnp.ones(3), 1), "text"])
def test_a_loss_that_is_no_float_scalar_is_rejected_when_traced(value):
    with pytest.raises(UsageError) as caught:
        mlp(loss=lambda params, batch: value).abstract_result  # noqa: B018
    assert "loss" in caught.value.got


@pytest.mark.parametrize(
    "without",
    [
        lambda params, batch: (jnp.float32(loss(params, batch) < 1.0), loss(params, batch)),  # swapped
        lambda params, batch: jnp.mean(batch["x"]),
        lambda params, batch: jnp.float32(1.0),
    ],
)
def test_a_loss_without_a_gradient_is_rejected(without):
    with pytest.raises(UsageError, match="without a gradient"):
        mlp(loss=without).abstract_result  # noqa: B018


def test_arguments_with_a_default_are_not_the_key():
    assert not mlp(loss=lambda params, batch, scale=1.0: loss(params, batch)).takes_key
    assert mlp(loss=lambda params, batch, key=None: loss(params, batch)).takes_key
    assert mlp(loss=functools.partial(loss_with_key)).takes_key


def test_only_float_leaves_count_as_parameters():
    workload = mlp(16)
    assert (workload.num_params, workload.num_samples, workload.param_dtypes) == (DEPTH * WIDTH**2, 16, ("float32",))


def test_a_random_key_of_the_old_style_is_no_sample():
    batch = {"a_key": jax.ShapeDtypeStruct((2,), jnp.uint32), **shapes(16)}
    assert mlp(batch=batch).num_samples == 16
    assert mlp(batch={"ids": jax.ShapeDtypeStruct((2,), jnp.uint32)}).num_samples == 2


def test_shapes_keep_their_sharding():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=sharding)
    workload = mlp(params={"layers": [w]})
    assert workload.abstract_params["layers"][0].sharding == sharding
    state, _ = abstract_args(workload, TRAIN)
    assert state.params["layers"][0].sharding == sharding


# The step around a loss.


@pytest.mark.full
def test_a_step_is_value_and_gradient_and_update():
    workload, batch = mlp(), rows(8)
    state = init_state(workload, TRAIN)
    new, value = quick_jit(make_step(workload, TRAIN, parse("none")))(state, batch)
    want, grads = jax.value_and_grad(lambda layers: loss({"layers": layers}, batch))(state.params["layers"])
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert relative_difference(new.opt_state[0].trace["layers"], grads) < 1e-6
    want_layers = [w - 0.1 * (g + 0.1 * w) for w, g in zip(state.params["layers"], grads, strict=True)]
    assert relative_difference(new.params["layers"], want_layers) < 1e-6


@pytest.mark.full
def test_integers_and_keys_among_the_parameters_stay_as_they_are():
    workload = mlp()
    state = init_state(workload, TRAIN)
    new, _ = quick_jit(make_step(workload, replace(TRAIN, grad_dtype="bfloat16"), parse("none")))(state, rows(8))
    assert (new.params["count"].dtype, int(new.params["count"])) == (jnp.int32, 7)
    assert (jax.random.key_data(new.params["key"]) == jax.random.key_data(state.params["key"])).all()
    assert len(jax.tree.leaves(state.opt_state)) == DEPTH


@pytest.mark.full
def test_auxiliary_values_are_those_of_the_last_microbatch():
    workload, train = mlp(4, loss=loss_with_key), replace(TRAIN, accumulate=2)
    state, batch = init_state(workload, TRAIN), rows(8)
    several = jax.tree.map(lambda leaf: leaf.reshape(2, 4, WIDTH), batch)
    _, (value, aux) = quick_jit(make_step(workload, train, parse("none")))(state, several)
    keys = jax.random.split(step_key(train.seed, 0), 2)
    parts = [loss_with_key(state.params, jax.tree.map(lambda leaf, i=i: leaf[i], several), keys[i]) for i in range(2)]
    assert float(value) == pytest.approx(sum(float(part) for part, _ in parts) / 2, rel=1e-6)
    assert float(aux["first"]) == pytest.approx(float(parts[1][1]["first"]), rel=1e-6)
    assert int(aux["count"]) == 7


@pytest.mark.full
def test_no_two_uses_of_neighbouring_seeds_share_a_random_key():
    """The keys that `init` and the loss really get, of several seeds and steps, and those of evaluations."""

    def keyed_loss(params, batch, key):
        return loss(params, batch), jax.random.key_data(key)

    workload = mlp(
        loss=keyed_loss, init=lambda key: {**init(key), "key": key}, params=jax.eval_shape(init, jax.random.key(0))
    )
    found = []
    for seed in range(3):
        train = replace(TRAIN, seed=seed)
        state = init_state(workload, train)
        found.append(jax.random.key_data(state.params["key"]))
        found.append(jax.random.key_data(evaluation_key(seed)))
        step = quick_jit(make_step(workload, train, parse("none")))
        for _ in range(3):
            state, (_, used) = step(state, rows(8))
            found.append(used)
    found += [jax.random.key_data(jax.random.fold_in(jax.random.key(seed), n)) for seed in range(3) for n in range(3, 9)]
    assert len({tuple(np.asarray(key).tolist()) for key in found}) == len(found)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "lion"])
def test_optax_s_own_rules_hold_for_a_workload(optimizer):
    """Muon's state is one moment for each matrix: nobody said which axes are rows."""
    workload, train = mlp(), replace(TRAIN, optimizer=optimizer, clip_norm=1.0, schedule="cosine")
    step, state, values = quick_jit(make_step(workload, train, parse("none"))), init_state(workload, train), []
    for _ in range(4):
        state, value = step(state, rows(8))
        values.append(float(value))
    assert values[-1] < values[0]


def test_a_workload_s_own_optimizer_is_used_unless_another_is_asked_for():
    factory = factory_of(mlp(optimizer=optax.adam(1e-3)))
    run = Trials(factory, TRAIN, load_target("cpu"), 2**40)
    assert (run.optimizer, replace(run, own_optimizer=False).optimizer) == ("own", "sgd-momentum")
    state, _ = abstract_args(run.workload_at(), TRAIN)
    assert len(jax.tree.leaves(state.opt_state)) == 2 * DEPTH + 1


# A whole step.


def whole_step(state, x):
    value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - 0.1 * grad, value


def test_a_whole_step_is_compiled_as_it_is_and_takes_no_policy():
    workload = jaxremat.Workload(step=whole_step, args=(jnp.ones((4, 4)), jnp.ones((2, 4))), name="mine")
    assert make_step(workload, TRAIN, parse("none")) is whole_step
    for train, policy, given in ((TRAIN, "dots", "dots"), (replace(TRAIN, accumulate=2), "none", "2")):
        with pytest.raises(UsageError) as caught:
            make_step(workload, train, parse(policy))
        assert given in caught.value.got
        assert "mine" in caught.value.got


@pytest.mark.full
def test_a_whole_step_with_arrays_runs_and_one_with_shapes_does_not():
    args = (jnp.ones((4, 4)), jnp.ones((2, 4)))
    for given, ran in ((args, "ok"), (jax.eval_shape(lambda *args: args, *args), None)):
        workload = jaxremat.Workload(step=whole_step, args=given, donate_argnums=0)
        run = Trials(factory_of(workload), TrainConfig(), load_target("cpu"), 2**40, num_steps=2)
        row = run.record(parse("none"), 1, "trial")
        assert (row.ran, row.fits, row.error) == (ran, True, None)
        assert (row.samples_per_s, row.tokens_per_s, row.mfu, row.optimizer, row.loss) == (None, None, None, None, "own")
        assert row.alias_bytes == 64


# Trials.


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_workload_is_measured_on_the_cpu(accumulate):
    run = Trials(free_mlp(loss=loss_with_key), replace(TRAIN, accumulate=accumulate), load_target("cpu"), 2**40, num_steps=2)
    row = run.record(parse("nothing"), 4, "trial")
    assert (row.ran, row.step_source, row.batch, row.global_batch) == ("ok", "measured", 4, 4 * accumulate)
    assert row.samples_per_s == pytest.approx(4 * accumulate / row.step_s)
    assert (row.tokens_per_s, row.seq_len, row.attention, row.loss, row.mfu) == (None, None, None, "own", None)
    assert row.num_params == DEPTH * WIDTH**2
    assert row.recompute_overhead_percent is not None
    assert row.recompute_overhead_percent >= 0


@pytest.mark.full
def test_a_workload_is_compiled_for_a_gpu_that_is_not_here(h100):
    run = Trials(free_mlp(num_tokens=80, model_flops=10**6), TRAIN, h100, 2**40)
    row = run.record(parse("none"), 8, "trial")
    assert (row.ran, row.step_source, row.error) == (None, "predicted", None)
    assert row.tokens_per_s == pytest.approx(10 * (row.samples_per_s or 0))
    assert row.mfu == pytest.approx(10**6 / (row.step_s * h100.speed.f32_flops))  # it computes in float32
    assert row.executed_flops == row.base_flops == 2 * 8 * WIDTH**2 * (3 * DEPTH - 1)  # no gradient of the input
    assert row.recompute_overhead_percent == 0


def test_layers_of_the_command_line_win_over_the_workload_s():
    factory = WorkloadFactory("mlp", lambda batch: mlp(layers="blocks_*"), layers=("layer_*",))
    assert factory.num_layers() == DEPTH
    assert factory.at(None, TRAIN).layers == ("layer_*",)


# What a step is run with.


def test_real_batches_are_joined_into_microbatches():
    real = [rows(4, seed) for seed in range(4)]
    workload = mlp(4, batches=lambda: iter(real))
    found = list(inputs(workload, replace(TRAIN, accumulate=2)))
    assert len(found) == 2
    np.testing.assert_array_equal(found[1]["x"], np.stack([real[2]["x"], real[3]["x"]]))
    random, repeated = mlp(4), mlp(batch=rows(8))
    of_tokens = mlp(batch={**random.batch, "tokens": jax.ShapeDtypeStruct((4,), jnp.int32)})
    assert [len([*said_inputs(one)]) for one in (workload, random, repeated, of_tokens)] == [0, 1, 1, 3]
    assert [*said_inputs(random)] != [*said_inputs(repeated)]


def test_measured_steps_have_batches_of_their_own():
    """In microbatches too, and from a number on. A training has the others."""
    measured = Measured(lambda first: (rows(4, 100 + number) for number in itertools.count(first)), "measured ones")
    workload = mlp(4, batches=lambda: iter([rows(4, 1)]), measured=measured)
    train = replace(TRAIN, accumulate=2)
    found = next(inputs(workload, train, 1, measured=True))
    np.testing.assert_array_equal(found["x"], np.stack([rows(4, 102)["x"], rows(4, 103)["x"]]))
    np.testing.assert_array_equal(next(inputs(workload, TRAIN))["x"], rows(4, 1)["x"])
    assert [*said_inputs(workload)] == ["measured ones"]
    assert [*said_inputs(workload, measured=False)] == []


def test_random_batches_are_those_of_the_seed_and_have_the_batch_s_shapes():
    batch = {
        "x": jax.ShapeDtypeStruct((4, WIDTH), jnp.bfloat16),
        "y": jax.ShapeDtypeStruct((4,), jnp.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }
    workload = mlp(batch=batch)
    first, second = itertools.islice(inputs(workload, TRAIN), 2)
    again = next(inputs(workload, TRAIN))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), first) == jax.tree.map(lambda s: (s.shape, s.dtype), batch)
    np.testing.assert_array_equal(first["x"], again["x"])
    assert (first["x"] != second["x"]).any()
    assert set(np.asarray(first["y"]).tolist()) <= {0, 1}


@pytest.mark.full
def test_concrete_parameters_are_the_first_state_and_stay_whole():
    params = init(jax.random.key(5))
    workload = mlp(params=params, init=None, batch=rows(8))
    state = first_state(workload, TRAIN, jax.devices("cpu")[0])
    step = quick_jit(make_step(workload, TRAIN, parse("none")), donate_argnums=0)
    step(state, next(inputs(workload, TRAIN)))
    np.testing.assert_array_equal(np.asarray(params["layers"][0]), np.asarray(init(jax.random.key(5))["layers"][0]))


def test_a_workload_of_shapes_says_why_it_is_not_run():
    assert "init=" in mlp(init=None).obstacle_to_running
    run = Trials(factory_of(mlp(init=None)), TRAIN, load_target("cpu"), 2**40)
    assert not run.can_run
