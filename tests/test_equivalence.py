"""A policy changes the decoder's memory and time, and nothing else: parameters, initial values, loss and gradients stay.

One table of policies runs a decoder with dropout, scanned and unrolled, against the policy `none`. Everything is compiled,
for the CPU. The loss must be equal to the bit. Gradients may differ by rounding (`tests/equality.py` says how far). What the
same policies do to other people's layers is in `tests/test_foreign_blocks.py`.
"""

from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxremat.model.decoder_workload import make_loss
from jaxremat.policy.grammar import as_policy
from tests.equality import ROUNDING, assert_same_bits, relative_difference, stacked
from tests.helpers import decoder_state, decoder_step, quick_jit
from tests.small_models import GPT, LAYERS, LLAMA, TOKENS, TRAIN, check_decoder, init_params, loss_and_grads

#: Every form of the grammar, each rule with +attention, K that divides 4 layers and K that doesn't (3 + 1).
POLICIES = """
    none everything everything+attention nothing nothing+attention
    dots dots+attention dots-no-batch dots-no-batch+attention
    save:mlpwi_0 save:query_proj,context+attention offload:mlpwi_0 offload:context,mlpwi_0+attention
    save:query_proj+offload:mlpwi_0 minimal_with_context
    every:1 every:2 every:3 every:4 every:sqrt every:2+dots every:3+save:mlpwi_0 every:3+offload:mlpwi_0+attention
    one-in:1 one-in:2 one-in:3 one-in:4
""".split()  # noqa: SIM905
FEW = ("nothing", "dots", "save:mlpwi_0", "every:3", "one-in:3")
#: Behind --slow in one layout (is it scanned?), where the other has them: each kind of rule stays in both.
SLOW = {
    True: """
    everything nothing+attention dots-no-batch+attention save:query_proj,context+attention offload:mlpwi_0
    every:1 every:4 one-in:1 one-in:4 every:2+dots
    """.split(),  # noqa: SIM905
    False: """
    everything+attention dots+attention dots-no-batch offload:context,mlpwi_0+attention save:query_proj+offload:mlpwi_0
    minimal_with_context every:sqrt every:2 one-in:2 every:3+save:mlpwi_0
    """.split(),  # noqa: SIM905
}
BF16 = replace(GPT, dtype="bfloat16")
GEMMA2 = replace(
    LLAMA, norm_placement="both", sliding_window=3, window_pattern="sf", attention_softcap=1.0, logit_softcap=1.0
)
EXPERTS = replace(LLAMA, num_experts=4, router_loss=0.1)
RAGGED = replace(EXPERTS, dispatch="ragged")


def case(policy: str, scan: bool) -> Any:
    """One policy in one layout. A version of JAX changes a kind of rule, if any: one policy of each kind runs on both lines."""
    both_lines = (*FEW, "everything", "offload:mlpwi_0", "offload:context,mlpwi_0+attention", "every:2+dots")
    marks = [pytest.mark.slow] * (policy in SLOW[scan]) + [pytest.mark.any_jax] * (policy not in both_lines)
    return pytest.param(policy, scan, id=f"{policy}-{'scan' if scan else 'unrolled'}", marks=marks)


DECODERS = [case(policy, scan) for policy in POLICIES for scan in (True, False)]


@pytest.mark.parametrize(("policy", "scan"), DECODERS)
def test_decoder_loss_and_gradients(policy, scan):
    check_decoder(replace(GPT, scan_layers=scan), policy)


@pytest.mark.parametrize(("policy", "scan"), [(p, True) for p in POLICIES] + [(p, False) for p in FEW])
def test_decoder_initial_values(policy, scan):
    model = replace(GPT, scan_layers=scan)
    assert_same_bits(init_params(model, policy), init_params(model, "none"))


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scan", "unrolled"])
@pytest.mark.parametrize("policy", FEW)
@pytest.mark.parametrize("kind", [LLAMA, BF16, EXPERTS, RAGGED], ids=["llama", "bfloat16", "experts", "ragged"])
def test_other_decoders(kind, policy, scan):
    model = replace(kind, scan_layers=scan)
    assert_same_bits(init_params(model, policy), init_params(model, "none"))
    check_decoder(model, policy)


@pytest.mark.any_jax
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scan", "unrolled"])
@pytest.mark.parametrize("policy", FEW)
def test_layers_of_two_kinds(policy, scan):
    """Each layer gets its own window, whatever the policy."""
    model = replace(GEMMA2, scan_layers=scan)
    check_decoder(model, policy)
    other = loss_and_grads(replace(model, window_pattern="fs"), policy)[0]
    assert other != loss_and_grads(model, policy)[0]


@pytest.mark.parametrize("kind", [GPT, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
def test_scanned_and_unrolled_are_one_model(kind):
    unrolled = replace(kind, scan_layers=False)
    # The same draws, but for rounding: compiled, the slices are fused into what makes them normal.
    assert relative_difference(stacked(init_params(unrolled, "none"), LAYERS), init_params(kind, "none")) <= ROUNDING
    loss, grads = loss_and_grads(kind, "none")
    other_loss, other_grads = loss_and_grads(unrolled, "none")
    np.testing.assert_allclose(loss, other_loss, rtol=2e-7)  # two programs, fused differently: one unit in the last place
    assert relative_difference(stacked(other_grads, LAYERS), grads) <= ROUNDING


def test_dropout_is_on_and_every_layer_counts():
    """What the tolerance must catch: other masks, and a gradient that one layer doesn't get."""
    loss, grads = loss_and_grads(GPT, "none")
    again = quick_jit(jax.value_and_grad(make_loss(GPT, as_policy("none"), "xla")))
    other_loss, other_grads = again(init_params(GPT, "none"), TOKENS, jax.random.key(4))
    assert abs(loss - other_loss) > 1e-3
    assert relative_difference(other_grads, grads) > 0.01
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    for i in range(LAYERS):
        of_layer = max(float(jnp.abs(leaf[i]).max()) for leaf in jax.tree.leaves(grads["layers"]))
        assert of_layer > 0.01 * largest


@pytest.mark.parametrize("policy", ["none", "nothing", "every:3", "one-in:3"])
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
