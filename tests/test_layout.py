"""The two layouts of repeated layers hold the same values, and each model takes the other's parameters converted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.model.presets import preset
from jaxremat.policy.layout import stack_layers, unstack_layers
from jaxremat.policy.spec import NONE
from jaxremat.trial.trials import Trials
from jaxremat.xla.kernels import kernels_of
from tests.equality import assert_same_bits, relative_difference
from tests.helpers import quick_jit
from tests.small_models import GPT, LLAMA_NO_DROPOUT

MODELS = [replace(GPT, dropout=0.0), LLAMA_NO_DROPOUT]
TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, min(model.vocab_size for model in MODELS))


def decoder(model, scan):
    return jaxremat.Decoder(replace(model, scan_layers=scan), "none")


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS, ids=["gpt", "llama"])
def test_each_layout_computes_the_same_with_the_other_s_parameters(model):
    looped, unrolled = decoder(model, True), decoder(model, False)
    params = quick_jit(looped.init)(jax.random.key(1), TOKENS)
    converted = unstack_layers(params)
    expected = jax.eval_shape(unrolled.init, jax.random.key(1), TOKENS)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), converted) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    got, want = quick_jit(unrolled.apply)(converted, TOKENS), quick_jit(looped.apply)(params, TOKENS)
    assert relative_difference(got, want) < 1e-6
    assert_same_bits(stack_layers(converted), params)


def test_a_train_state_converts_with_its_optimizer():
    params = {"layers": {"w": np.arange(6.0, dtype=np.float32).reshape(3, 2)}, "head": np.ones(2, np.float32)}
    state = (params, jax.eval_shape(optax.adamw(1e-3).init, params), np.zeros((), np.int32))
    converted = unstack_layers(state)
    own = jax.eval_shape(optax.adamw(1e-3).init, converted[0])
    assert jax.tree.structure(converted[1]) == jax.tree.structure(own)
    restored = stack_layers(converted)
    assert restored[1:] == state[1:]
    assert_same_bits(restored[0], params)


def test_shapes_alone_convert():
    tree = {"layers": {"w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)}, "head": jax.ShapeDtypeStruct((2,), jnp.float32)}
    unrolled = unstack_layers(tree)
    assert unrolled["layers"] == {f"layer_{i}": {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16)} for i in range(3)}
    assert stack_layers(unrolled) == tree


@pytest.mark.parametrize(
    ("convert", "tree", "got"),
    [
        (unstack_layers, {"layers": {"a": np.ones((3, 2)), "b": np.ones((4, 2))}}, ["'layers'", "[3, 4]"]),
        (unstack_layers, {"w": np.ones(3)}, ["'layers'"]),
        (stack_layers, {"layer_0": np.ones(3), "layer_1": np.ones(2)}, ["2"]),
        (stack_layers, {"layer_1": np.ones(3)}, ["layer_0", "layer_1"]),
    ],
)
def test_a_tree_that_cannot_be_converted(convert, tree, got):
    with pytest.raises(UsageError) as caught:
        convert(tree)
    assert [part for part in got if part not in caught.value.got] == []


@pytest.mark.full
@pytest.mark.any_jax
def test_unrolled_layers_pass_on_rows(h100):
    """XLA transposes nothing. Left alone, it would choose a layout of the residual stream in which the batch is innermost."""
    model = replace(preset("gpt2").config, num_layers=2, dropout=0.0, scan_layers=False)
    run = Trials(decoder_factory(model, "cudnn"), TrainConfig(), h100, 2**60)
    module = run.compile(NONE, 32).module
    assert [kernel.name for kernel in kernels_of(module) if kernel.kernel_class == "transpose"] == []
