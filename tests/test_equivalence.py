"""A policy changes memory and time, and nothing else: parameters, initial values, dropout masks, loss and gradients stay.

One table of policies runs a decoder with dropout, scanned and unrolled, against the policy `none`; then a block of somebody
else's (BatchNorm, dropout, submodules that Flax names) through each way of applying a policy. Everything is compiled, for
the CPU. The loss must be equal to the bit. Gradients may differ by rounding, since a recomputed value is compiled into other
fusions: 4e-7 of the largest gradient is between three and four units in the last place of a float32 (2**-23 = 1.2e-7),
while one dropout mask drawn anew, or one layer's gradient forgotten, moves gradients by more than a hundredth of it.
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

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import UnknownNameError, UnknownPolicyError
from jaxremat.model.transformer import Block, Decoder
from jaxremat.policy.apply import remat
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.stack import Layers
from jaxremat.step.step import init_state, make_loss, make_step
from tests.helpers import quick_jit

LAYERS = 4
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
ROUNDING = 4e-7

GPT = ModelConfig("gpt", 32, LAYERS, 16, 2, 2, 8, 32, max_seq_len=8, dropout=0.2, dtype="float32")
LLAMA = replace(
    GPT, num_kv_heads=1, positions="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, qk_norm=True, tie_embeddings=False
)
BF16 = replace(GPT, dtype="bfloat16")
TRAIN = TrainConfig(seq_len=8)
TOKENS = jax.random.randint(jax.random.key(9), (2, TRAIN.seq_len + 1), 0, GPT.vocab_size)
DROPOUT_KEY = jax.random.key(3)


def stacked(tree: Any, num_layers: int = LAYERS) -> Any:
    """Subtrees `layer_0`, `layer_1`, ... as one subtree stacked on a leading axis, wherever they lie in `tree`."""
    if not isinstance(tree, dict):
        return tree
    if "layer_0" in tree:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[f"layer_{i}"] for i in range(num_layers)))
    return {name: stacked(value, num_layers) for name, value in tree.items()}


def assert_same_bits(got: Any, want: Any) -> None:
    """Equal trees: paths, shapes, dtypes, and every bit."""
    chex.assert_trees_all_equal_structs(got, want)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def relative_difference(got: Any, want: Any) -> float:
    """The largest difference of two trees, as a share of the largest value of `want`."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    assert scale > 0
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), got, want))) / scale


# The decoder, every policy, scanned and unrolled.


@functools.cache
def init_params(model: ModelConfig, policy: str) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    decoder = Decoder(model, policy)
    return quick_jit(decoder.init)(jax.random.key(0), tokens)["params"]


@functools.cache
def loss_and_grads(model: ModelConfig, policy: str) -> tuple[jax.Array, Any]:
    loss = make_loss(model, as_policy(policy), "xla")
    return quick_jit(jax.value_and_grad(loss))(init_params(model, "none"), TOKENS, DROPOUT_KEY)


def check_decoder(model: ModelConfig, policy: str) -> None:
    loss, grads = loss_and_grads(model, policy)
    want_loss, want_grads = loss_and_grads(model, "none")
    assert loss.dtype == jnp.float32
    assert np.isfinite(loss)
    assert_same_bits(loss, want_loss)
    assert relative_difference(grads, want_grads) <= ROUNDING


def case(policy: str, scan: bool) -> Any:
    """What a version of JAX changes, it changes for a kind of rule: on its second line these are run."""
    second_line = (*FEW, "everything", "offload:mlpwi_0", "offload:context,mlpwi_0+attention", "every:2+dots")
    marks = [pytest.mark.slow] * (policy in SLOW[scan]) + [pytest.mark.one_line] * (policy not in second_line)
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
@pytest.mark.parametrize("kind", [LLAMA, BF16], ids=["llama", "bfloat16"])
def test_other_decoders(kind, policy, scan):
    model = replace(kind, scan_layers=scan)
    assert_same_bits(init_params(model, policy), init_params(model, "none"))
    check_decoder(model, policy)


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
def test_scanned_and_unrolled_are_one_model(kind):
    unrolled = replace(kind, scan_layers=False)
    # The same draws, but for rounding: compiled, the slices are fused into what makes them normal.
    assert relative_difference(stacked(init_params(unrolled, "none")), init_params(kind, "none")) <= ROUNDING
    loss, grads = loss_and_grads(kind, "none")
    other_loss, other_grads = loss_and_grads(unrolled, "none")
    np.testing.assert_allclose(loss, other_loss, rtol=2e-7)  # two programs, fused differently: one unit in the last place
    assert relative_difference(stacked(other_grads), grads) <= ROUNDING


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
    traced_once = chex.assert_max_traces(make_step(GPT, train, as_policy(policy), "xla"), n=1)
    step = quick_jit(traced_once, donate_argnums=0)
    state = quick_jit(lambda: init_state(GPT, train))()
    losses = []
    for _ in range(8):
        before, (state, loss) = state, step(state, TOKENS)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))  # donation was usable
        losses.append(float(loss))
    assert int(state.step) == 8
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.1


# Somebody else's block: BatchNorm, dropout, submodules without names.


class NormBlock(nn.Module):
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


class Scanned(nn.Module):
    """A user's own `nn.scan` over a class of layers."""

    block: Any
    length: int = LAYERS

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.length,
        )
        return loop(self.block(name="block"), x, None)[0]


X = jax.random.normal(jax.random.key(0), (64, 8))
INIT_KEYS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
ONE_LAYER = ("none", "everything", "nothing", "dots", "nothing+attention", "save:hidden", "offload:hidden")
SEVERAL = ("every:1", "every:2", "every:3", "every:4", "every:2+dots", "every:3+save:hidden", "one-in:2", "one-in:3")
#: Behind --slow in one of the layouts of Layers, as above.
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
    variables = quick_jit(model.init)(INIT_KEYS, X)

    def loss(params, x):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])
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
    assert relative_difference(stacked(unrolled), scanned) <= ROUNDING


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
        ROUTES[route](policy).init(INIT_KEYS, X)


@pytest.mark.parametrize("scan", [True, False])
def test_unknown_names_inside_groups_are_refused(scan):
    with pytest.raises(UnknownNameError, match="'hiden'"):
        Layers(NormBlock(), LAYERS, "every:3+save:hiden", scan=scan).init(INIT_KEYS, X)


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
        variables = quick_jit(model.init)(INIT_KEYS, X, positions, scale)

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
    calls = updates["counts"] if scan else stacked(updates["counts"])
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
