"""Samples are what grows with the factory's batch, on any axis of any array; and microbatches of such arrays are one batch."""

import itertools
import re
from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxremat
from jaxremat.chips.target import load_target
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import MeshShape
from jaxremat.policy.spec import OWN
from jaxremat.report.sentences import microbatches_sentences
from jaxremat.step.inputs import inputs
from jaxremat.step.step import abstract_args, init_state, make_step, step_shardings
from jaxremat.trial.trials import Trials
from jaxremat.workload.factory import WorkloadFactory, factory_of
from jaxremat.workload.samples import LeafSamples
from tests.equality import relative_difference
from tests.helpers import quick_jit

T, D, PART = 3, 8, 4
TRAIN = TrainConfig(optimizer="sgd-momentum", learning_rate=0.1, clip_norm=None)
#: By array: its shape at a batch, and the axis that counts samples.
ARRAYS = {
    "a_mask": (lambda batch: (1, T, 1), None),
    "by_chance": (lambda batch: (PART, D), None),
    "frozen": (lambda batch: (D, D), None),
    "pairs": (lambda batch: (2 * batch, D), 0),
    "pixels": (lambda batch: (2, D, 1, batch), 3),
    "time_major": (lambda batch: (T, batch, D), 1),
    "tokens": (lambda batch: (batch * T,), 0),
    "weight": (lambda batch: (), None),
}
SHARED = {"a_mask", "by_chance", "frozen"}


def shapes(batch):
    return {name: jax.ShapeDtypeStruct(shape(batch), jnp.float32) for name, (shape, _) in ARRAYS.items()}


def loss(params, batch):
    x = jnp.tanh((batch["time_major"] * jnp.swapaxes(batch["a_mask"], 0, 1)) @ batch["frozen"] @ params)
    pixels = jnp.einsum("hdcb,de->bhce", batch["pixels"], params)
    pairs = batch["pairs"] @ params @ batch["by_chance"].T
    tokens = batch["tokens"][:, None] * params[0]
    return batch["weight"] * sum(jnp.mean(part**2) for part in (x, pixels, pairs, tokens))


def made(num_samples, **changes):
    params = jax.ShapeDtypeStruct((D, D), jnp.float32)
    init = lambda key: jax.random.normal(key, (D, D)) / 4  # noqa: E731
    return jaxremat.Workload(**{"loss": loss, "params": params, "batch": shapes(num_samples), "init": init, **changes})


def factory(make=made, **fields):
    return WorkloadFactory("mine", lambda batch: make(batch or PART), True, **{"default_batch": PART, **fields})


def whole_batch(num_samples):
    values = np.random.default_rng(0)
    random = {name: values.standard_normal(shape(num_samples), np.float32) for name, (shape, _) in ARRAYS.items()}
    return {**random, "weight": np.float32(0.5)}


def parts_of(batch, count):
    """The batch cut into microbatches along each array's axis of samples."""
    cut = {
        name: [batch[name]] * count if axis is None else np.split(batch[name], count, axis)
        for name, (_, axis) in ARRAYS.items()
    }
    return [{name: some[n] for name, some in cut.items()} for n in range(count)]


# What grows.


@pytest.mark.parametrize("batch", [1, PART, 7])
def test_samples_are_counted_on_the_axis_that_grows(batch):
    """At the default batch, too, which equals a size by chance, and at batch 1, which equals others."""
    workload = factory().at(batch, TRAIN)
    assert workload.num_samples == batch
    assert workload.counted.leaves == tuple(LeafSamples(axis, name in SHARED) for name, (_, axis) in sorted(ARRAYS.items()))
    assert factory(default_batch=None).at(batch, TRAIN).counted == workload.counted


def test_the_default_batch_is_known_without_a_comparison():
    calls = []
    counting = factory(lambda batch: (calls.append(batch), made(batch))[1])
    assert counting.at(None, TRAIN).num_samples == PART
    assert calls == [PART]
    assert Trials(counting, TRAIN, load_target("cpu"), 2**40).samples_at(12) == 12
    assert calls == [PART, 12, PART]


def test_a_count_of_samples_makes_no_other_workload():
    """On eight devices the step at batch 2 is the workload at 16, which is there already."""
    calls = []
    counting = factory(lambda batch: (calls.append(batch), made(batch))[1])
    trials = Trials(counting, TRAIN, load_target("h100-80gb", MeshShape(fsdp=8)), 2**40)
    assert trials.workload_of(2).num_samples == 16
    before = [*calls]
    assert (trials.samples_at(2), trials.global_batch_at(2)) == (16, 16)
    assert calls == before


def test_random_keys_belong_to_a_microbatch_and_offsets_grow_from_one():
    def keyed(batch):
        keys = {"key": jax.eval_shape(lambda: jax.random.key(0)), "old": jax.ShapeDtypeStruct((2,), jnp.uint32)}
        own = {"keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))}
        offsets = {"offsets": jax.ShapeDtypeStruct((batch + 1,), jnp.int32)}
        return made(batch, batch={**keys, **own, **offsets, **shapes(batch)}, loss=lambda params, batch: loss(params, batch))

    workload = factory(keyed).at(2, TRAIN)
    found = dict(zip(sorted(workload.batch), workload.counted.leaves, strict=True))
    assert [found[name] for name in ("key", "old")] == [LeafSamples()] * 2
    assert [found[name] for name in ("keys", "offsets")] == [LeafSamples(0)] * 2


def test_a_state_may_be_made_anew_for_each_batch():
    """A `TrainState` has its optimizer's functions in it, which differ where they are made anew."""

    def make(batch):
        params, x = {"w": jax.ShapeDtypeStruct((D, D), jnp.float32)}, jax.ShapeDtypeStruct((batch, D), jnp.float32)
        state = TrainState.create(apply_fn=lambda *args: None, params={}, tx=optax.sgd(0.1)).replace(params=params)
        return jaxremat.Workload(step=lambda state, x: (state, jnp.sum(x @ state.params["w"])), args=(state, x))

    assert WorkloadFactory("mine", make, has_free_batch=True).at(3, TRAIN).args[1].shape == (3, D)


def one_array(shape):
    def make(batch):
        return made(batch, batch=jax.ShapeDtypeStruct(shape(batch), jnp.float32), loss=lambda params, batch: params[0, 0])

    return make


@pytest.mark.parametrize(
    "make",
    [
        one_array(lambda batch: (8, D)),
        one_array(lambda batch: (batch**2, D)),
        one_array(lambda batch: (-(-batch // 8) * 8, D)),
        one_array(lambda batch: (64 - batch, D)),
        one_array(lambda batch: (batch, D)[: 1 + batch % 2]),
        lambda batch: made(batch, batch=[jax.ShapeDtypeStruct((D,), jnp.float32)] * batch, loss=lambda p, x: p[0, 0]),
    ],
    ids=["nothing", "squared", "padded", "shrinks", "rank", "a list of samples"],
)
def test_growth_that_is_not_even_is_rejected(make):
    factory_of_it = factory(make)
    with pytest.raises(UsageError) as caught:
        deque((factory_of_it.at(batch, TRAIN) for batch in (8, 9, 15, 17)), maxlen=0)
    assert "mine" in caught.value.got


def test_a_workload_that_cannot_be_made_at_a_second_batch_is_rejected():
    def picky(batch):
        if batch != PART:
            raise UsageError("only one batch")
        return made(batch)

    with pytest.raises(UsageError) as caught:
        factory(picky).at(PART, TRAIN)
    assert re.findall(r"\d+", caught.value.got) == [str(PART), str(2 * PART)]
    assert "only one batch" in caught.value.cause


def test_a_whole_step_whose_arguments_ignore_the_batch_is_rejected():
    def make(batch):
        return jaxremat.Workload(step=lambda state, x: (state, x), args=(jnp.ones(3), jnp.ones((3, 2))))

    with pytest.raises(UsageError) as caught:
        factory(make).at(6, TRAIN)
    assert "mine" in caught.value.got


@pytest.mark.parametrize(("number", "is_even"), [(lambda batch: 32, True), (lambda batch: 96 // batch, False)])
def test_a_step_over_microbatches_has_a_number_of_them_that_no_batch_changes(number, is_even):
    def make(batch):
        x = jax.ShapeDtypeStruct((number(batch), batch, D), jnp.float32)
        return jaxremat.Workload(step=lambda state, x: (state, x.sum()), args=(jnp.ones(3), x))

    if is_even:
        assert factory(make).at(6, TRAIN).args[1].shape == (32, 6, D)
        return
    with pytest.raises(UsageError) as caught:
        factory(make).at(6, TRAIN)
    assert "number of microbatches a keyword of its own" in caught.value.next_step


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 4])
def test_the_samples_of_a_whole_step_are_those_of_the_microbatches_that_its_author_says(number):
    def make(batch):
        x = jnp.ones((number, batch, D))
        return jaxremat.Workload(step=lambda state, x: (state, x.sum()), args=(jnp.ones(3), x), microbatches=number)

    row = Trials(factory(make), TrainConfig(), load_target("cpu"), 2**40, num_steps=2).record(OWN, 6)
    assert (row.batch, row.accumulate, row.global_batch) == (6, number, 6 * number)
    assert row.samples_per_s == pytest.approx(6 * number / row.step_s)
    assert [bool(sentence) for sentence in microbatches_sentences([row])] == [True] * (number == 1)
    assert microbatches_sentences([replace(row, optimizer="adamw")]) == []


@pytest.mark.parametrize(
    ("batch", "number"),
    [({"mask": (1, D, 1), "x": (32, D), "y": (32,)}, 32), ({"frozen": (D, D), "x": (32, D)}, None), ({"x": (1, D)}, 1)],
)
def test_one_batch_is_counted_where_its_arrays_agree(batch, number):
    """Microbatches of such a workload are stacked, as nobody knows what they share."""
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in batch.items()}
    workload = made(1, batch=structs, loss=lambda params, batch: params[0, 0])
    run = Trials(factory_of(workload), TRAIN, load_target("cpu"), 2**40)
    assert run.samples_at(number or 1) == workload.num_samples == number
    several = abstract_args(workload, replace(TRAIN, accumulate=2))[1]
    assert {name: leaf.shape for name, leaf in several.items()} == {name: (2, *shape) for name, shape in batch.items()}


# Microbatches.


@pytest.mark.full
@pytest.mark.parametrize("joined", [False, True])
def test_microbatches_are_one_batch_in_loss_and_update(joined):
    """What doesn't grow is there once, so that the arguments have the bytes of the whole batch, and two more scalars."""
    make = factory(lambda batch: made(batch, joined_microbatches=joined))
    whole, part = make.at(3 * PART, TRAIN), make.at(PART, TRAIN)
    train, batch = replace(TRAIN, accumulate=3), whole_batch(3 * PART)
    real = replace(part, batches=lambda: iter(parts_of(batch, 3)))
    (several,) = inputs(real, train)
    expected = abstract_args(part, train)[1]
    assert jax.tree.map(jnp.shape, several) == jax.tree.map(jnp.shape, expected)
    num_bytes = [sum(leaf.size * 4 for leaf in jax.tree.leaves(tree)) for tree in (expected, shapes(3 * PART))]
    assert num_bytes[0] == num_bytes[1] + 2 * 4
    if joined:
        assert expected["pixels"].shape == shapes(3 * PART)["pixels"].shape
    state = init_state(whole, TRAIN)
    one, one_loss = quick_jit(make_step(whole, TRAIN, jaxremat.parse("none")))(state, batch)
    got, got_loss = quick_jit(make_step(part, train, jaxremat.parse("none")))(state, several)
    assert float(got_loss) == pytest.approx(float(one_loss), rel=1e-6)
    assert relative_difference(got.params, one.params) < 1e-6
    assert relative_difference(got.params, state.params) > 1e-3


def test_microbatches_that_differ_in_what_they_share_are_rejected():
    def batches():
        for n in itertools.count():
            yield {**parts_of(whole_batch(PART), 1)[0], "frozen": np.full((D, D), n, np.float32)}

    workload = replace(factory().at(PART, TRAIN), batches=batches)
    assert float(next(inputs(workload, TRAIN, 1))["frozen"][0, 0]) == 1
    with pytest.raises(UsageError) as caught:
        next(inputs(workload, replace(TRAIN, accumulate=2)))
    assert "batch['frozen']" in caught.value.got


def test_random_microbatches_share_what_does_not_grow():
    first, second = itertools.islice(inputs(factory().at(PART, TRAIN), replace(TRAIN, accumulate=2)), 2)
    assert {name for name in ARRAYS if np.array_equal(first[name], second[name])} == SHARED
    assert first["frozen"].shape == (D, D)
    assert (first["time_major"][0] != first["time_major"][1]).any()


# A mesh.


def test_a_mesh_divides_the_axis_of_samples():
    """With microbatches it is one further. An array that doesn't grow is replicated, and one with a sharding keeps it."""
    mesh = load_target("h100-80gb", MeshShape(fsdp=8)).mesh
    assert mesh

    def given(batch):
        lies = NamedSharding(mesh.abstract_mesh, PartitionSpec(None, "fsdp"))
        return made(batch, batch={**shapes(batch), "own": jax.ShapeDtypeStruct((batch, 16), jnp.float32, sharding=lies)})

    workload, specs = factory(given).at(16, TRAIN), {}
    for accumulate in (1, 2):
        of_batch = step_shardings(mesh, workload, replace(TRAIN, accumulate=accumulate))[0][1]
        specs[accumulate] = {name: sharding.spec for name, sharding in of_batch.items()}
    assert specs[1]["time_major"] == PartitionSpec(None, "fsdp")
    assert specs[2]["time_major"] == PartitionSpec(None, None, "fsdp")
    assert specs[1]["pixels"] == PartitionSpec(None, None, None, "fsdp")
    assert specs[1]["pairs"] == specs[1]["tokens"] == PartitionSpec("fsdp")
    assert (specs[1]["own"], specs[2]["own"]) == (PartitionSpec(None, "fsdp"), PartitionSpec(None, None, "fsdp"))
    assert {specs[n][name] for n in (1, 2) for name in (*SHARED, "weight")} == {PartitionSpec()}
