"""A policy changes a model's memory and time, and nothing else: parameters, initial values, loss and gradients stay.

First every form of the grammar on a stack of small layers, scanned and unrolled, one operation at a time: loss and gradients are
equal to the bit. Then decoders of several kinds with dropout, compiled for the CPU, each against the policy `none`. Their loss
must be equal to the bit, and their gradients may differ by rounding (`tests/equality.py` says how far). What the same policies do
to other people's layers is in `tests/test_foreign_blocks.py`.
"""

import functools
from dataclasses import replace
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxremat.config import ModelConfig
from jaxremat.policy.grammar import grammar, parse
from jaxremat.policy.layers import Layers
from tests.equality import ROUNDING, assert_same_bits, relative_difference, stacked
from tests.helpers import decoder_state, decoder_step, quick_jit
from tests.op_by_op import op_by_op
from tests.small_models import GPT, LAYERS, LLAMA, TOKENS, TRAIN, check_decoder, gradient, init_params, loss_and_grads

#: Every form of the grammar, each rule with +attention, K that divides 4 layers and K that doesn't (3 + 1).
POLICIES = """
    none own everything everything+attention nothing nothing+attention
    dots dots+attention dots-no-batch dots-no-batch+attention
    save:mlpwi_0 save:query_proj,context+attention offload:mlpwi_0 offload:context,mlpwi_0+attention
    save:query_proj+offload:mlpwi_0 minimal_with_context
    every:1 every:2 every:3 every:4 every:sqrt every:2+dots every:3+save:mlpwi_0 every:3+offload:mlpwi_0+attention
    one-in:1 one-in:2 one-in:3 one-in:4
    1*nothing|1*save:mlpwi_0 3*save:query_proj|1*offload:mlpwi_0
""".split()  # noqa: SIM905
LAYOUTS = {"scan": True, "unrolled": False}


class Small(nn.Module):
    """A layer with the names of a decoder's values. All arrays have one shape, so that each operation compiles once."""

    @nn.compact
    def __call__(self, x, shared):
        h = shared * jnp.tanh(checkpoint_name(nn.Dense(4, use_bias=False, name="up")(x), "query_proj"))
        return x + checkpoint_name(nn.Dense(4, use_bias=False, name="down")(checkpoint_name(h, "context")), "mlpwi_0")


@functools.cache
def small(policy: str, scan: bool) -> Any:
    """(loss, gradients by parameters and input) of a stack of small layers, and the gradient by what all layers read."""
    random = np.random.default_rng(0)
    tree = {name: {"kernel": random.normal(0, 0.5, (LAYERS, 4, 4)).astype(np.float32)} for name in ("up", "down")}
    x, shared = random.normal(0, 1, (2, 4, 4)).astype(np.float32)
    params = tree if scan else {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(LAYERS)}
    model: Any = Layers(Small(), LAYERS, policy, scan)
    loss = lambda params, x, shared: jnp.vdot(model.apply({"params": params}, x, shared), x)  # noqa: E731
    value, (*grads, of_shared) = op_by_op(jax.value_and_grad(loss, argnums=(0, 1, 2)), params, x, shared)
    return (value, grads), of_shared


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_one_operation_at_a_time(policy, layout):
    """What all layers read has a sum of gradients. Groups of layers change the order of the sum."""
    (got, of_shared), (want, want_of_shared) = (small(some, LAYOUTS[layout]) for some in (policy, "none"))
    assert_same_bits(got, want)
    assert relative_difference(of_shared, want_of_shared) <= ROUNDING


def test_every_form_of_the_grammar_is_compared():
    compared = [parse(policy) for policy in POLICIES]
    assert {type(policy) for policy in compared} == {type(parse(form.example)) for form in grammar()}
    assert {getattr(policy, "kind", "") for policy in compared} >= {
        getattr(parse(form.example), "kind", "") for form in grammar()
    }


# Decoders.

BF16 = replace(LLAMA, num_experts=4, router_loss=0.1, dtype="bfloat16")
GEMMA2 = replace(
    LLAMA, norm_placement="both", sliding_window=3, window_pattern="sf", attention_softcap=1.0, logit_softcap=1.0
)
RAGGED = replace(LLAMA, num_experts=4, router_loss=0.1, dispatch="ragged")
#: Policies by kind of decoder and layout. Each kind of rule is in both layouts.
DECODERS: dict[str, tuple[ModelConfig, str, str]] = {
    "gpt": (
        GPT,
        "nothing everything+attention save:mlpwi_0 offload:context,mlpwi_0+attention every:2+dots",
        "nothing dots save:query_proj+offload:mlpwi_0 every:3+offload:mlpwi_0+attention one-in:3",
    ),
    "gemma2": (GEMMA2, "every:3 one-in:2", "every:3"),
    "experts in bfloat16": (BF16, "", "dots-no-batch+attention"),
    "ragged experts": (RAGGED, "dots every:sqrt+nothing", ""),
}
#: What both lines of JAX run: one policy of each kind. A version of JAX changes a kind of rule, if any.
BOTH_LINES = ("nothing", "save:mlpwi_0", "offload:context,mlpwi_0+attention", "every:2+dots", "one-in:3")


def cases() -> list[Any]:
    return [
        pytest.param(
            *(replace(model, scan_layers=layout == "scan"), policy),
            id=f"{kind}-{layout}-{policy}",
            marks=() if model is GPT and policy in BOTH_LINES else pytest.mark.any_jax,
        )
        for kind, (model, *of_layouts) in DECODERS.items()
        for layout, policies in zip(LAYOUTS, of_layouts, strict=True)
        for policy in policies.split()
    ]


@pytest.mark.full
@pytest.mark.parametrize(("model", "policy"), cases())
def test_decoder_loss_and_gradients(model, policy):
    check_decoder(model, policy)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        *(("scan", policy) for policy in ("nothing", "save:mlpwi_0", "every:3+offload:mlpwi_0", "one-in:3")),
        *(("unrolled", policy) for policy in ("nothing", "every:3+save:mlpwi_0")),
    ],
)
def test_decoder_initial_values(layout, policy):
    model = replace(GPT, scan_layers=LAYOUTS[layout])
    assert_same_bits(init_params(model, policy), init_params(model, "none"))


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_of_two_kinds(layout):
    """Each layer gets its own window, whatever the policy."""
    model = replace(GEMMA2, scan_layers=LAYOUTS[layout])
    other = loss_and_grads(replace(model, window_pattern="fs"), "every:3")[0]
    assert other != loss_and_grads(model, "every:3")[0]


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("kind", [GPT, GEMMA2], ids=["gpt", "gemma2"])
def test_scanned_and_unrolled_are_one_model(kind):
    unrolled = replace(kind, scan_layers=False)
    # The same draws, but for rounding: compiled, the slices are fused into what makes them normal.
    assert relative_difference(stacked(init_params(unrolled, "none"), LAYERS), init_params(kind, "none")) <= ROUNDING
    loss, grads = loss_and_grads(kind, "none")
    other_loss, other_grads = loss_and_grads(unrolled, "none")
    np.testing.assert_allclose(loss, other_loss, rtol=2e-7)  # two programs, fused differently: one unit in the last place
    assert relative_difference(stacked(other_grads, LAYERS), grads) <= ROUNDING


@pytest.mark.full
def test_dropout_is_on_and_every_layer_counts():
    """What the tolerance must catch: other masks, and a gradient that one layer doesn't get."""
    loss, grads = loss_and_grads(GPT, "none")
    other_loss, other_grads = gradient(GPT, "none")(init_params(GPT, "none"), TOKENS, jax.random.key(4))
    assert abs(loss - other_loss) > 1e-3
    assert relative_difference(other_grads, grads) > 0.01
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    for i in range(LAYERS):
        of_layer = max(np.abs(np.asarray(leaf)[i]).max() for leaf in jax.tree.leaves(grads["layers"]))
        assert of_layer > 0.01 * largest


@pytest.mark.full
@pytest.mark.parametrize("policy", ["nothing", "every:3"])
def test_three_donated_steps_trace_once_and_learn(policy):
    train = replace(TRAIN, learning_rate=1e-2)
    chex.clear_trace_counter()
    traced_once = chex.assert_max_traces(decoder_step(GPT, train, policy), n=1)
    step = quick_jit(traced_once, donate_argnums=0)
    state = quick_jit(lambda: decoder_state(GPT, train))()
    losses = []
    for _ in range(8):
        before, (state, loss) = state, step(state, TOKENS)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))  # donation was usable
        losses.append(float(loss))
    assert int(state.step) == 8
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.1
