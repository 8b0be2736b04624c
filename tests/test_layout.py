"""The two layouts of repeated layers hold the same values, and each model takes the other's parameters converted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.model.decoder_workload import DecoderFactory
from jaxremat.model.presets import preset
from jaxremat.policy.layout import stack_layers, unstack_layers
from jaxremat.policy.spec import NONE
from jaxremat.trial.settings import Run
from jaxremat.trial.trial import PolicyTrials
from jaxremat.xla.kernels import kernels_of
from tests.equality import assert_same_bits, relative_difference
from tests.helpers import quick_jit
from tests.small_models import GPT, LLAMA_NO_DROPOUT

MODELS = [replace(GPT, dropout=0.0), LLAMA_NO_DROPOUT]
TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, min(model.vocab_size for model in MODELS))


def decoder(model, scan):
    return jaxremat.Decoder(replace(model, scan_layers=scan), "none")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_layout_computes_the_same_with_the_other_s_parameters(model):
    looped, unrolled = decoder(model, True), decoder(model, False)
    params = looped.init(jax.random.key(1), TOKENS)
    converted = unstack_layers(params)
    expected = jax.eval_shape(unrolled.init, jax.random.key(1), TOKENS)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), converted) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    got, want = quick_jit(unrolled.apply)(converted, TOKENS), quick_jit(looped.apply)(params, TOKENS)
    assert relative_difference(got, want) < 1e-6
    assert_same_bits(stack_layers(converted), params)


def test_a_train_state_converts_with_its_optimizer():
    params = decoder(GPT, True).init(jax.random.key(1), TOKENS)["params"]
    state = (params, optax.adamw(1e-3).init(params), jnp.zeros((), jnp.int32))
    converted = unstack_layers(state)
    own = optax.adamw(1e-3).init(converted[0])
    assert jax.tree.structure(converted[1]) == jax.tree.structure(own)
    assert_same_bits(stack_layers(converted), state)


def test_shapes_alone_convert():
    tree = {"layers": {"w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)}, "head": jax.ShapeDtypeStruct((2,), jnp.float32)}
    unrolled = unstack_layers(tree)
    assert unrolled["layers"] == {f"layer_{i}": {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16)} for i in range(3)}
    assert stack_layers(unrolled) == tree


@pytest.mark.parametrize(
    ("convert", "tree", "message"),
    [
        (
            unstack_layers,
            {"layers": {"a": jnp.ones((3, 2)), "b": jnp.ones((4, 2))}},
            "the subtree 'layers' isn't one of stacked layers: the first axes of its leaves have [3, 4] elements. "
            "Likely cause: its layers are unrolled already, or it holds something beside them.",
        ),
        (unstack_layers, {"w": jnp.ones(3)}, "the tree has no subtree 'layers'."),
        (
            stack_layers,
            {"layer_0": jnp.ones(3), "layer_1": jnp.ones(2)},
            "2 layers can't be stacked: they differ in their paths, shapes or dtypes. "
            "Allowed: layers that are alike, as a loop runs one of them many times.",
        ),
        (
            stack_layers,
            {"layer_1": jnp.ones(3)},
            "the tree has no subtree with the keys layer_0, layer_1 and so on.",
        ),
    ],
)
def test_a_tree_that_cannot_be_converted(convert, tree, message):
    with pytest.raises(UsageError) as refused:
        convert(tree)
    assert str(refused.value) == message


@pytest.mark.any_jax
def test_unrolled_layers_pass_on_rows(h100):
    """XLA transposes nothing. Left alone, it would choose a layout of the residual stream in which the batch is innermost."""
    model = replace(preset("gpt2").config, num_layers=2, dropout=0.0, scan_layers=False)
    run = Run(DecoderFactory(model, "cudnn"), TrainConfig(), h100, 2**60)
    module = PolicyTrials(run, "none", NONE).compile(32).module
    assert [kernel.name for kernel in kernels_of(module) if kernel.kernel_class == "transpose"] == []
