"""A policy changes nothing that anybody else's layer or function computes, whichever way the policy is applied.

A block with BatchNorm, dropout and submodules that Flax names goes through each way of applying a policy: `Layers` scanned
and unrolled, `remat` of a class, and that in the user's own `nn.scan`. Then a plain function, and a block that has integer
variables and reads inputs that all layers share. Each is compared with the policy `none`: variables, outputs and batch
statistics to the bit, gradients but for rounding. Names that nobody gave are refused.
"""

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxremat.errors import UnknownNameError, UnknownPolicyError
from jaxremat.model.transformer import Block
from jaxremat.policy.apply import remat
from jaxremat.policy.stack import Layers
from tests.equality import ROUNDING, assert_same_bits, relative_difference, stacked
from tests.helpers import quick_jit
from tests.small_models import DROPOUT_KEY, GPT, KEYS, LAYERS, Scanned, X


class NormBlock(nn.Module):
    """BatchNorm, dropout, submodules that Flax names, and one value that its author named: hidden."""

    width: int = 8
    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        h = jax.ad_checkpoint.checkpoint_name(nn.Dense(16)(x), "hidden")
        h = nn.Dropout(0.3, deterministic=self.deterministic)(nn.gelu(h))
        h = nn.BatchNorm(use_running_average=False)(h)
        return x + nn.Dense(self.width, name="out")(h)


class Sequence(nn.Module):
    """A user's own model: a class of layers, twice."""

    block: Any

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = self.block()(x)
        return x


ONE_LAYER = ("none", "everything", "nothing", "dots", "nothing+attention", "save:hidden", "offload:hidden")
SEVERAL = ("every:1", "every:2", "every:3", "every:4", "every:2+dots", "every:3+save:hidden", "one-in:2", "one-in:3")
#: Behind --slow in one of the layouts of Layers, where the other has it.
SLOW_LAYERS = {
    "Layers": ("everything", "nothing+attention", "every:1", "every:4", "one-in:2"),
    "Layers unrolled": ("dots", "every:2", "every:2+dots", "one-in:3"),
}
ROUTES = {
    "Layers": lambda policy: Layers(NormBlock(), LAYERS, policy),
    "Layers unrolled": lambda policy: Layers(NormBlock(), LAYERS, policy, scan=False),
    "remat": lambda policy: Sequence(remat(NormBlock, policy)),
    "remat in nn.scan": lambda policy: Scanned(remat(NormBlock, policy, in_scan=True)),
}


@functools.cache
def train_norm_block(route: str, policy: str) -> Any:
    """(initial variables, loss, batch statistics after the step, gradients by parameters and input)."""
    model = ROUTES[route](policy)
    variables = quick_jit(model.init)(KEYS, X)

    def loss(params, x):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, rngs={"dropout": DROPOUT_KEY}, mutable=["batch_stats"])
        return (y**2).mean(), updates

    (value, updates), grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], X)
    return variables, value, updates, grads


FOREIGN = [
    pytest.param(route, policy, id=f"{route}-{policy}", marks=[pytest.mark.slow] * (policy in SLOW_LAYERS.get(route, ())))
    for route in ROUTES
    for policy in ONE_LAYER + SEVERAL
]


@pytest.mark.parametrize(("route", "policy"), FOREIGN)
def test_a_foreign_block_through_every_route(route, policy):
    if policy in SEVERAL and not route.startswith("Layers"):
        with pytest.raises(UnknownPolicyError, match="several layers"):
            ROUTES[route](policy)
        return
    variables, value, updates, grads = train_norm_block(route, policy)
    want_variables, want_value, want_updates, want_grads = train_norm_block(route, "none")
    assert_same_bits(variables, want_variables)
    assert_same_bits(value, want_value)
    assert_same_bits(updates, want_updates)
    assert relative_difference(grads, want_grads) <= ROUNDING


def test_foreign_blocks_keep_the_names_flax_gives_them():
    params = train_norm_block("remat", "save:hidden")[0]["params"]
    assert sorted(params) == ["NormBlock_0", "NormBlock_1"]
    assert sorted(params["NormBlock_0"]) == ["BatchNorm_0", "Dense_0", "out"]
    scanned, unrolled = (train_norm_block(route, "none")[0] for route in ("Layers", "Layers unrolled"))
    assert relative_difference(stacked(unrolled, LAYERS), scanned) <= ROUNDING


@pytest.mark.parametrize("policy", ["none", "nothing", "save:hidden"])
def test_layers_has_the_layout_of_nn_scan(policy):
    layers = Layers(NormBlock(deterministic=True), LAYERS, policy)
    variables = quick_jit(layers.init)(jax.random.key(1), X)
    want, want_updates = quick_jit(lambda v: layers.apply(v, X, mutable=["batch_stats"]))(variables)
    nested = {collection: {"block": tree} for collection, tree in variables.items()}
    scanned = Scanned(functools.partial(remat(NormBlock, policy, in_scan=True), deterministic=True))
    got, updates = quick_jit(lambda v: scanned.apply(v, X, mutable=["batch_stats"]))(nested)
    assert_same_bits(got, want)
    assert_same_bits(updates["batch_stats"]["block"], want_updates["batch_stats"])


@pytest.mark.parametrize("policy", ["save:hiden", "offload:hiden", "save:hidden+offload:hiden"])
@pytest.mark.parametrize("route", ROUTES)
def test_unknown_names_are_refused_on_every_route(route, policy):
    with pytest.raises(UnknownNameError, match=r"'hiden'.*Allowed: hidden.*did you mean 'hidden'"):
        ROUTES[route](policy).init(KEYS, X)


@pytest.mark.parametrize("scan", [True, False])
def test_unknown_names_inside_groups_are_refused(scan):
    with pytest.raises(UnknownNameError, match="'hiden'"):
        Layers(NormBlock(), LAYERS, "every:3+save:hiden", scan=scan).init(KEYS, X)


# A plain function.


def scaled_mlp(w, x, times, *, shift=0.0):
    h = jax.ad_checkpoint.checkpoint_name(x @ w, "hidden")
    assert isinstance(times, int)
    return sum(jnp.tanh(h * (n + 1)) for n in range(times)) + shift


@pytest.mark.parametrize("policy", ONE_LAYER)
def test_remat_of_a_function(policy):
    w = jax.random.normal(jax.random.key(5), (8, 8))
    wrapped = remat(scaled_mlp, policy, static_argnums=2)

    def grads(function):
        return quick_jit(jax.value_and_grad(lambda w, x: (function(w, x, 3, shift=x) ** 2).sum(), argnums=(0, 1)))(w, X)

    (value, got), (want_value, want) = grads(wrapped), grads(scaled_mlp)
    assert_same_bits(value, want_value)
    assert relative_difference(got, want) <= ROUNDING
    assert wrapped.__name__ == "scaled_mlp"


def test_remat_of_a_function_recomputes_what_the_policy_says():
    """Matmuls in the jaxpr: x @ w forward, dw and dx, and x @ w again unless its result is saved."""
    w = jnp.eye(8)
    counts = {}
    for policy in ("none", "everything", "nothing", "dots", "save:hidden"):
        wrapped = remat(scaled_mlp, policy, static_argnums=(2,))
        jaxpr = jax.make_jaxpr(jax.grad(lambda w, x, f=wrapped: (f(w, x, 3) ** 2).sum(), argnums=(0, 1)))(w, X)
        counts[policy] = str(jaxpr).count("dot_general[")
    assert counts == {"none": 3, "everything": 3, "nothing": 4, "dots": 3, "save:hidden": 3}


def test_remat_of_a_function_refuses_unknown_names():
    with pytest.raises(UnknownNameError, match=r"'hiden'.*did you mean 'hidden'"):
        remat(scaled_mlp, "save:hiden", static_argnums=2)(jnp.eye(8), X, 3)


# Variables that aren't differentiated, and inputs that every layer reads.


class TableBlock(nn.Module):
    """Reads an integer table of its own and counts its calls; scaled and shifted by what all layers share."""

    @nn.compact
    def __call__(self, x, positions, scale):
        table = self.variable("tables", "order", lambda: jnp.arange(8)[::-1])
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        h = nn.Dense(8)(x)[:, table.value] * scale["factor"]
        return x + jnp.sin(h + positions)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("policy", ["nothing", "dots", *SEVERAL[:5], "one-in:2", "one-in:3"])
def test_integer_variables_and_broadcast_inputs(policy, scan):
    """Gradients by parameters, by x and by the shared scale, which sums over layers and groups."""
    positions, scale = jnp.arange(8) % 3, {"factor": jnp.linspace(0.5, 1.5, 8)}

    def run(policy):
        model = Layers(TableBlock(), LAYERS, policy, scan)
        variables = quick_jit(model.init)(KEYS, X, positions, scale)

        def loss(params, x, scale):
            now = {**variables, "params": params}
            y, updates = model.apply(now, x, positions, scale, mutable=["counts"])
            return (y**2).mean(), updates

        grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return variables, *quick_jit(grads)(variables["params"], X, scale)

    variables, (value, updates), grads = run(policy)
    want_variables, (want_value, _), want_grads = run("none")
    assert_same_bits(variables, want_variables)
    assert_same_bits(value, want_value)
    assert relative_difference(grads, want_grads) <= ROUNDING
    calls = updates["counts"] if scan else stacked(updates["counts"], LAYERS)
    np.testing.assert_array_equal(calls["calls"], np.ones(LAYERS))


def test_the_decoder_s_block_in_a_plain_nn_scan():
    """What its documentation promises: `nn.scan(remat(Block, ...))` computes what `Layers(Block(...))` computes."""
    model = replace(GPT, dropout=0.0)
    x = jax.random.normal(jax.random.key(0), (2, 8, model.embed_dim))
    layers = Layers(Block(model, parent=None), LAYERS)
    params = quick_jit(layers.init)(jax.random.key(1), x)["params"]
    scanned = Scanned(functools.partial(remat(Block, "save:mlpwi_0", in_scan=True), model))
    got = quick_jit(scanned.apply)({"params": {"block": params}}, x)
    assert_same_bits(got, quick_jit(layers.apply)({"params": params}, x))
