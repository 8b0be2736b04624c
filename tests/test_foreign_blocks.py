"""A policy changes nothing that anybody else's layer or function computes, whichever way the policy is applied.

A block with BatchNorm, dropout and submodules that Flax names goes through each way of applying a policy: `Layers` scanned
and unrolled, `remat` of a class, and that in the user's own `nn.scan`. Then a plain function, and a block that has integer
variables and reads inputs that all layers share. Each is compared with the policy `none`: variables, outputs and batch
statistics to the bit. Gradients are equal to the bit where one operation runs at a time, and but for rounding if compiled. Names
that nobody gave are rejected.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxremat.errors import UnknownNameError, UnknownPolicyError, UsageError
from jaxremat.model.transformer import Block
from jaxremat.policy.apply import remat
from jaxremat.policy.layers import Layers
from tests.equality import ROUNDING, assert_same_bits, relative_difference, stacked
from tests.helpers import quick_jit
from tests.op_by_op import op_by_op
from tests.small_models import DROPOUT_KEY, GPT, KEYS, LAYERS, Scanned, X


class NormBlock(nn.Module):
    """BatchNorm, dropout, submodules that Flax names, and one value that its author named: hidden."""

    width: int = 8
    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        h = checkpoint_name(nn.Dense(16)(x), "hidden")
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
ROUTES: dict[str, Callable[[str], nn.Module]] = {
    "Layers": lambda policy: Layers(NormBlock(), LAYERS, policy),
    "Layers unrolled": lambda policy: Layers(NormBlock(), LAYERS, policy, scan=False),
    "remat": lambda policy: Sequence(remat(NormBlock, policy)),
    "remat in nn.scan": lambda policy: Scanned(remat(NormBlock, policy, in_scan=True)),
}
#: What is compiled too: each kind of policy, and several on each route.
COMPILED = {
    "Layers": ("none", "save:hidden", "every:2+dots", "one-in:2"),
    "Layers unrolled": ("none", "offload:hidden", "every:3", "one-in:3"),
    "remat": ("none", "nothing"),
    "remat in nn.scan": ("none", "dots"),
}


@functools.cache
def initial(route: str, policy: str) -> Any:
    return quick_jit(ROUTES[route](policy).init)(KEYS, X)


def train_norm_block(run: Callable[..., Any], route: str, policy: str) -> Any:
    """(loss, batch statistics after the step, gradients by parameters and input), run by `run`."""
    model, variables = ROUTES[route](policy), initial(route, "none")

    def loss(params, x):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, rngs={"dropout": DROPOUT_KEY}, mutable=["batch_stats"])
        return (y**2).mean(), updates

    (value, updates), grads = run(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), variables["params"], X)
    return value, updates, grads


@functools.cache
def one_by_one(route: str, policy: str) -> Any:
    return train_norm_block(op_by_op, route, policy)


@functools.cache
def compiled(route: str, policy: str) -> Any:
    return train_norm_block(lambda function, *args: quick_jit(function)(*args), route, policy)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("route", ROUTES)
def test_a_foreign_block_through_every_route(route):
    """One operation at a time. `test_equivalence.py` has other groups of layers."""
    for policy in ONE_LAYER + (("every:2", "every:3+save:hidden", "one-in:3") if route.startswith("Layers") else ()):
        assert_same_bits(one_by_one(route, policy), one_by_one(route, "none"))


@pytest.mark.full
@pytest.mark.parametrize(("route", "policy"), [(route, some) for route in COMPILED for some in COMPILED[route][1:]])
def test_a_compiled_foreign_block(route, policy):
    *got, grads = compiled(route, policy)
    *want, want_grads = compiled(route, "none")
    assert_same_bits((initial(route, policy), *got), (initial(route, "none"), *want))
    assert relative_difference(grads, want_grads) <= ROUNDING


@pytest.mark.parametrize("route", ["remat", "remat in nn.scan"])
@pytest.mark.parametrize("policy", SEVERAL)
def test_a_policy_for_several_layers_is_rejected_for_one(route, policy):
    with pytest.raises(UnknownPolicyError) as caught:
        ROUTES[route](policy)
    assert policy in caught.value.got


def test_foreign_blocks_keep_the_names_flax_gives_them():
    params = jax.eval_shape(ROUTES["remat"]("save:hidden").init, KEYS, X)["params"]
    assert sorted(params) == ["NormBlock_0", "NormBlock_1"]
    assert sorted(params["NormBlock_0"]) == ["BatchNorm_0", "Dense_0", "out"]


@pytest.mark.full
@pytest.mark.any_jax
def test_scanned_and_unrolled_layers_begin_alike():
    scanned, unrolled = (initial(route, "none") for route in ("Layers", "Layers unrolled"))
    assert relative_difference(stacked(unrolled, LAYERS), scanned) <= ROUNDING


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("policy", ["none", "save:hidden"])
def test_layers_has_the_layout_of_nn_scan(policy):
    layers = Layers(NormBlock(deterministic=True), LAYERS, policy)
    variables = initial("Layers", "none")
    want, want_updates = op_by_op(lambda v: layers.apply(v, X, mutable=["batch_stats"]), variables)
    nested = {collection: {"block": tree} for collection, tree in variables.items()}
    scanned = Scanned(functools.partial(remat(NormBlock, policy, in_scan=True), deterministic=True))
    got, updates = op_by_op(lambda v: scanned.apply(v, X, mutable=["batch_stats"]), nested)
    assert_same_bits(got, want)
    assert_same_bits(updates["batch_stats"]["block"], want_updates["batch_stats"])


def assert_hiden_is_unknown(call: Callable[[], Any]) -> None:
    """Rejected, with the name as it was given and the one that there is."""
    with pytest.raises(UnknownNameError) as caught:
        call()
    assert "'hiden'" in caught.value.got
    assert "hidden" in re.split("[ ,]", caught.value.allowed)
    assert "'hidden'" in caught.value.next_step


@pytest.mark.parametrize("policy", ["save:hiden", "offload:hiden", "save:hidden+offload:hiden"])
@pytest.mark.parametrize("route", ROUTES)
def test_unknown_names_are_rejected_on_every_route(route, policy):
    assert_hiden_is_unknown(lambda: jax.eval_shape(ROUTES[route](policy).init, KEYS, X))


@pytest.mark.parametrize("scan", [True, False])
def test_unknown_names_inside_groups_are_rejected(scan):
    layers = Layers(NormBlock(), LAYERS, "every:3+save:hiden", scan=scan)
    assert_hiden_is_unknown(lambda: jax.eval_shape(layers.init, KEYS, X))


@pytest.mark.parametrize(
    "layer", [NormBlock, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.tanh], ids=["class", "NNX", "function"]
)
def test_layers_takes_a_module_of_linen(layer):
    with pytest.raises(UsageError) as caught:
        Layers(layer, LAYERS)
    assert "scan_layers" in caught.value.next_step


# A plain function.


def scaled_mlp(w, x, times, *, shift=0.0):
    h = checkpoint_name(x @ w, "hidden")
    assert isinstance(times, int)
    return sum((jnp.tanh(h * (n + 1)) for n in range(times)), jnp.zeros(())) + shift


@functools.cache
def gradients_of(policy: str | None) -> Any:
    """The value and the gradients of the function under a policy, one operation at a time."""
    function = remat(scaled_mlp, policy, static_argnums=2) if policy else scaled_mlp
    assert function.__name__ == "scaled_mlp"
    w = np.random.default_rng(5).normal(0, 1, (8, 8)).astype(np.float32)
    return op_by_op(jax.value_and_grad(lambda w, x: (function(w, x, 3, shift=x) ** 2).sum(), argnums=(0, 1)), w, X)


@pytest.mark.parametrize("policy", ONE_LAYER)
def test_remat_of_a_function(policy):
    assert_same_bits(gradients_of(policy), gradients_of(None))


def test_remat_of_a_function_recomputes_what_the_policy_says():
    """Matmuls in the jaxpr: x @ w forward, dw and dx, and x @ w again unless its result is saved."""
    w = jnp.eye(8)
    counts = {}
    for policy in ("none", "everything", "nothing", "dots", "save:hidden"):
        wrapped = remat(scaled_mlp, policy, static_argnums=(2,))
        jaxpr = jax.make_jaxpr(jax.grad(lambda w, x, f=wrapped: (f(w, x, 3) ** 2).sum(), argnums=(0, 1)))(w, X)
        counts[policy] = str(jaxpr).count("dot_general[")
    assert counts == {"none": 3, "everything": 3, "nothing": 4, "dots": 3, "save:hidden": 3}


def test_remat_of_a_function_rejects_unknown_names():
    assert_hiden_is_unknown(lambda: remat(scaled_mlp, "save:hiden", static_argnums=2)(jnp.eye(8), X, 3))


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


@functools.cache
def with_tables(policy: str, scan: bool) -> Any:
    """(initial variables, loss, counts, gradients by parameters, by x and by the shared scale), one operation at a time."""
    positions, scale = jnp.arange(8) % 3, {"factor": jnp.linspace(0.5, 1.5, 8)}
    model = Layers(TableBlock(), LAYERS, policy, scan)
    variables: Any = op_by_op(model.init, KEYS, X, positions, scale)

    def loss(params, x, scale):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, positions, scale, mutable=["counts"])
        return (y**2).mean(), updates

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (value, updates), grads = op_by_op(gradient, variables["params"], X, scale)
    return variables, value, updates["counts"], grads


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_integer_variables_and_broadcast_inputs(scan):
    """The gradient by the shared scale is a sum over layers and groups, whose order a policy may change."""
    *want, want_grads = with_tables("none", scan)
    for policy in ("nothing", "every:2", "every:3", "one-in:3"):
        *got, grads = with_tables(policy, scan)
        assert_same_bits(got, want)
        assert relative_difference(grads, want_grads) <= ROUNDING, policy
    calls = want[2] if scan else stacked(want[2], LAYERS)
    np.testing.assert_array_equal(calls["calls"], np.ones(LAYERS))


@pytest.mark.full
@pytest.mark.any_jax
def test_the_decoder_s_block_in_a_plain_nn_scan():
    """What its documentation promises: `nn.scan(remat(Block, ...))` computes what `Layers(Block(...))` computes."""
    model = replace(GPT, dropout=0.0)
    x = jax.random.normal(jax.random.key(0), (2, 8, model.embed_dim))
    layers = Layers(Block(model, parent=None), LAYERS)
    params = quick_jit(layers.init)(jax.random.key(1), x)["params"]
    scanned = Scanned(functools.partial(remat(Block, "save:mlpwi_0", in_scan=True), model))
    got, want = quick_jit(lambda p: (scanned.apply({"params": {"block": p}}, x), layers.apply({"params": p}, x)))(params)
    assert_same_bits(got, want)
