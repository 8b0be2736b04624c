"""`autoname` names a layer's values and changes nothing: parameters, outputs and gradients stay equal to the bit."""

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.errors import UnknownNameError, UsageError
from jaxremat.model.transformer import Block
from jaxremat.policy.autoname import autoname
from jaxremat.policy.grammar import parse
from jaxremat.policy.names import named_values
from jaxremat.policy.spec import Names
from tests.equality import ROUNDING, assert_same_bits, relative_difference
from tests.helpers import quick_jit
from tests.op_by_op import op_by_op
from tests.small_models import GPT, KEYS, NormBlock, Scanned, block_names, rematted
from tests.small_models import LLAMA_NO_DROPOUT as LLAMA


def words(text: str) -> list[str]:
    return text.split()


LAYERNORM = words("""
    reduce_sum broadcast_in_dim div sub square reduce_sum.1 broadcast_in_dim.1 div.1 add rsqrt mul add.1
    broadcast_in_dim.2 mul.1 broadcast_in_dim.3 add.2
""")
RMSNORM = words("square reduce_sum broadcast_in_dim div add rsqrt mul add.1 broadcast_in_dim.1 mul.1")
GPT_NAMES = [
    *(f"attention_norm/{name}" for name in LAYERNORM),
    *words("attention/query/dot_general attention/query/reshape query_proj"),
    *words("attention/key/dot_general attention/key/reshape key_proj"),
    *words("attention/value/dot_general attention/value/reshape value_proj"),
    *words("attention/reshape attention/BTNH_BSNH_BNTS/dot_general attention/mul"),
    *words("attention/broadcast_in_dim attention/broadcast_in_dim.1 attention/transpose attention/select_n"),
    *words("attention/reduce_max attention/max attention/broadcast_in_dim.2 attention/stop_gradient attention/sub"),
    *words("attention/exp attention/reduce_sum attention/broadcast_in_dim.3 attention/div"),
    *words("attention/BNTS_BSNH_BTNH/dot_general attention/BNTS_BSNH_BTNH/transpose attention/transpose.1 context"),
    *words("attention/out/dot_general attention/out/reshape out_proj add"),
    *(f"mlp_norm/{name}" for name in LAYERNORM),
    *words("mlp/wi_0/dot_general mlp/wi_0/reshape mlpwi_0"),
    *words("mlp/integer_pow mlp/mul mlp/add mlp/mul.1 mlp/tanh mlp/add.1 mlp/mul.2 mlp/mul.3"),
    *words("mlp/wo/dot_general mlp/wo/reshape mlpwo add.1"),
]
LLAMA_ENDS = [
    *(f"attention_norm/{name}" for name in RMSNORM),
    *words("attention/query/dot_general attention/key/dot_general value_proj"),
    *(f"attention/query_norm/{name}" for name in RMSNORM),
    *(f"attention/key_norm/{name}" for name in RMSNORM),
    *(f"mlp_norm/{name}" for name in RMSNORM),
    *words("mlpwi_0 mlp/logistic mlp/mul mlpwi_1 mlp/mul.1 mlpwo add.1"),
]


def test_names_of_the_gpt_block():
    assert block_names(GPT) == ["decoder_layer_input", *GPT_NAMES]


@pytest.mark.full
def test_names_of_the_llama_block():
    names = block_names(LLAMA)
    rope = names[names.index("attention/key_norm/mul.1") + 1 : names.index("mlp_norm/square")]
    assert {"query_proj", "key_proj", "context", "out_proj", "attention/exp", "attention/sin", "attention/cos", "add"} <= {
        *rope
    }
    assert [name for name in names if name not in rope] == ["decoder_layer_input", *LLAMA_ENDS]


def test_dropout_s_noise_and_scaling_are_named_and_its_mask_is_not():
    extra = set(block_names(GPT, deterministic=False)) - set(GPT_NAMES)
    assert {"Dropout_0/div", "Dropout_0/select_n", "Dropout_0/select_n.1"} <= extra
    assert all(name.startswith("Dropout_0/") for name in extra - {"decoder_layer_input"})


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_names_are_distinct_and_speak_the_policy_grammar(config):
    names = block_names(config)
    assert len(set(names)) == len(names)
    policy = parse(f"save:{','.join(names)}")
    assert policy == Names(save=tuple(names))
    assert parse(str(policy)) == policy


def test_names_depend_neither_on_sizes_nor_on_the_layer_s_place():
    want = ["decoder_layer_input", *GPT_NAMES]
    assert block_names(replace(GPT, num_layers=7), batch=5, seq_len=3, name="layer_11") == want
    block = Block(GPT, parent=None)
    x = jax.ShapeDtypeStruct((2, 8, 16), "float32")
    variables = jax.eval_shape(block.init, KEYS, x)
    assert [v.name for v in named_values(autoname(lambda v, x: block.apply(v, x)), variables, x)] == want


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.full
def test_names_of_stacked_layers(scan):
    layers = jaxremat.Layers(autoname(NormBlock)(parent=None), 2, scan=scan)
    x = jax.ShapeDtypeStruct((2, 8), "float32")
    variables = jax.eval_shape(layers.init, KEYS, x)
    block = autoname(NormBlock)(parent=None)
    (of_one, of_all) = (
        [v.name for v in named_values(lambda v, x, m=m: m.apply(v, x, rngs=KEYS, mutable=["batch_stats"])[0], variables, x)]
        for m, variables in ((block, jax.eval_shape(block.init, KEYS, x)), (layers, variables))
    )
    assert Counter(of_all) == Counter(of_one * (1 if scan else 2))


# The same layer: parameters, outputs, gradients.


class Vmapped(nn.Module):
    """A user's own `nn.vmap`: an expert per row."""

    block: Any

    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(
            self.block, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True, "dropout": True}
        )
        return experts(name="experts")(x)


MODELS = {
    "block": lambda wrap: wrap(Block)(GPT, deterministic=False),
    "sequence": lambda wrap: nn.Sequential([wrap(NormBlock)(), wrap(NormBlock)()]),
    "scan": lambda wrap: Scanned(wrap(NormBlock), 3),
    "vmap": lambda wrap: Vmapped(wrap(NormBlock)),
    "Layers": lambda wrap: jaxremat.Layers(wrap(NormBlock)(parent=None), 3),
}


def train(model: Any) -> Any:
    """(initial variables, (outputs, batch statistics), gradients by parameters and input)."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 16 if isinstance(model, Block) else 8))
    variables = quick_jit(model.init)(KEYS, x)

    def loss(params, x):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, rngs={"dropout": KEYS["dropout"]}, mutable=["batch_stats"])
        return (y**2).mean(), (y, updates)

    (_, outputs), grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], x)
    return variables, outputs, grads


@functools.cache
def as_it_was(model: str) -> Any:
    return train(MODELS[model](lambda block: block))


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_parameters_outputs_and_gradients_stay(model):
    assert_same_bits(train(MODELS[model](autoname)), as_it_was(model))


@pytest.mark.full
@pytest.mark.parametrize("model", ["sequence", "scan"])
def test_a_layer_without_names_under_remat(model):
    """Saved by names that nobody wrote: the same values; recomputed gradients differ by rounding at most."""
    variables, outputs, grads = train(
        MODELS[model](lambda block: rematted(autoname(block), "Dense_0/dot_general", "BatchNorm_0/rsqrt"))
    )
    want_variables, want_outputs, want_grads = as_it_was(model)
    renamed = [k for k in variables["params"] if k.startswith("Checkpoint")]
    assert not renamed or model == "sequence"
    assert_same_bits(jax.tree.leaves(variables), jax.tree.leaves(want_variables))
    assert_same_bits(outputs[0], want_outputs[0])
    assert relative_difference(jax.tree.leaves(grads), jax.tree.leaves(want_grads)) <= ROUNDING


@pytest.mark.full
@pytest.mark.parametrize("policy", ["every:2+save:out/add+offload:Dense_0/dot_general"])
def test_layers_under_a_policy_of_its_names(policy):
    variables, outputs, grads = train(jaxremat.Layers(autoname(NormBlock)(parent=None), 3, policy))
    want_variables, want_outputs, want_grads = as_it_was("Layers")
    assert_same_bits(variables, want_variables)
    assert_same_bits(outputs, want_outputs)
    assert relative_difference(grads, want_grads) <= ROUNDING


def test_remat_takes_its_names_and_rejects_others():
    x = jax.ShapeDtypeStruct((2, 8), "float32")
    block = jaxremat.remat(jaxremat.autoname(NormBlock), "save:Dense_0/dot_general")()
    assert block.__class__.__name__ == "NormBlock"
    jax.eval_shape(block.init, KEYS, x)
    with pytest.raises(UnknownNameError) as caught:
        jax.eval_shape(jaxremat.remat(autoname(NormBlock), "save:Dense_O/dot_general")().init, KEYS, x)
    assert "'Dense_O/dot_general'" in caught.value.got
    assert "'Dense_0/dot_general'" in caught.value.next_step
    with pytest.raises(UnknownNameError) as caught:
        jax.eval_shape(jaxremat.remat(autoname(NormBlock), "save:Dense_0/dot_general.1")().init, KEYS, x)
    assert "planned for another program" in caught.value.cause
    assert "plan this program" in caught.value.next_step


def test_the_class_keeps_its_name_and_submodules_theirs():
    named = autoname(NormBlock)
    assert (named.__name__, named.__qualname__) == ("NormBlock", "NormBlock")
    params = jax.eval_shape(MODELS["sequence"](autoname).init, KEYS, jnp.zeros((2, 8)))["params"]
    assert {key for layer in params.values() for key in layer} == {"BatchNorm_0", "Dense_0", "out"}


class TwoWays(nn.Module):
    """A method that calls another, flags that are Python values, and results that aren't arrays."""

    @nn.compact
    def __call__(self, x, train: bool, *, scale=1.0):
        return {"y": self.halve(nn.Dense(4)(x)) if train else x, "scale": scale, "kind": "half", "none": None}

    def halve(self, x):
        return jnp.exp(x) / 2


@pytest.mark.full
def test_flags_methods_and_results_that_are_not_arrays():
    x = jnp.ones((2, 4))
    block: Any = autoname(TwoWays)(name="layer_3", parent=None)
    variables = {"params": {"Dense_0": {"kernel": np.eye(4, dtype=np.float32), "bias": np.ones(4, np.float32)}}}
    plain: Any = TwoWays(parent=None)
    want = plain.apply(variables, x, True, scale=3)
    got = block.apply(variables, x, True, scale=3)
    assert {k: v for k, v in got.items() if k != "y"} == {"scale": 3, "kind": "half", "none": None}
    assert_same_bits(got["y"], want["y"])
    names = [v.name for v in named_values(lambda v, x: block.apply(v, x, True)["y"], variables, x)]
    assert names == ["Dense_0/dot_general", "Dense_0/reshape", "Dense_0/add", "halve/exp", "halve/div"]


# Functions, and what they may contain.


@jax.custom_jvp
def soft_sign(x):
    return x / (1 + jnp.abs(x))


@soft_sign.defjvp
def _(primals, tangents):
    y = soft_sign(*primals)
    return y, tangents[0] * (1 - jnp.abs(y)) ** 2 * 3  # deliberately not the derivative: the rule must survive


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (twice(x), jnp.cos(x)), lambda res, g: (g * res,))


def with_scan(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h.sum()), x, None, length=3)[0]


def with_while(w, x):
    n = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, jnp.float32(8)))[1]
    return jnp.sin(x @ w) * n


@jax.jit
def inner_jit(w, x):
    return jnp.exp(jax.jit(jnp.dot)(x, w)) + jnp.exp(jax.jit(jnp.dot)(2 * x, w))


FUNCTIONS = {
    "own result read": lambda w, x: jnp.max(jax.nn.softmax(jnp.tanh(x @ w) / jnp.sqrt(1 + x**2)), axis=-1),
    "several operands": lambda w, x: jnp.maximum(x @ w, jnp.abs(x) + 0.5) ** jax.nn.sigmoid(x) + jnp.maximum(x, 0.5),
    "custom_jvp": lambda w, x: soft_sign(x @ w) * jax.nn.relu(x),
    "custom_vjp": lambda w, x: jnp.sin(twice(x @ w)),
    "nested jit": inner_jit,
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x @ w), lambda: x),
    "while": with_while,
    "scan": with_scan,
    "inner checkpoint": lambda w, x: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x @ w)))(x) * 2,
    "integers and keys": lambda w, x: (x @ w)[jnp.argsort(x[:, 0])] * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
    "closed over": lambda w, x: jax.vmap(lambda row: jnp.exp(row @ w))(x),
}
W, X = jax.random.normal(jax.random.key(5), (4, 4)), jax.random.normal(jax.random.key(6), (3, 4))
OPAQUE_NAMES = {
    "custom_jvp": ["soft_sign", "relu"],
    "custom_vjp": ["twice"],
    "cond": ["cond"],
    "while": ["while"],
    "scan": ["scan"],
    "inner checkpoint": ["checkpoint"],
}


def value_and_grads(function: Any) -> Any:
    return op_by_op(jax.value_and_grad(lambda w, x: (function(w, x) ** 2).sum(), argnums=(0, 1)), W, X)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_compute_what_they_did(kind):
    """One operation at a time, whichever values are saved; also where the names are given twice."""
    want, named = value_and_grads(FUNCTIONS[kind]), autoname(FUNCTIONS[kind])
    saved = jax.checkpoint(named, policy=jax.checkpoint_policies.everything_saveable)
    for function in (named, autoname(named), saved, jax.checkpoint(named)):
        assert_same_bits(value_and_grads(function), want)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("kind", sorted(FUNCTIONS.keys() - {"while", "custom_vjp"}))
def test_forward_mode_and_second_derivatives(kind):
    def second(function):
        along = lambda x: jax.jvp(lambda x: function(W, x), (x,), (jnp.ones_like(x),))[1].sum()  # noqa: E731
        return op_by_op(jax.grad(along), X)

    assert_same_bits(second(autoname(FUNCTIONS[kind])), second(FUNCTIONS[kind]))


def test_what_is_known_of_operations_changes_no_program(monkeypatch):
    """Each program is traced where nothing is known, and where all programs were traced before."""

    def traced() -> list[str]:
        return [str(jax.make_jaxpr(autoname(function))(W, X)) for function in FUNCTIONS.values()]

    class Forgetful(dict):
        def __setitem__(self, key: Any, value: bool) -> None:
            self.clear()
            super().__setitem__(key, value)

    traced()
    known = traced()
    monkeypatch.setattr("jaxremat.policy.autoname._READS_OWN_RESULT", Forgetful())
    assert traced() == known
    rules = []
    monkeypatch.setattr("jaxremat.policy.autoname._derivative_reads_result", lambda *_: rules.append(1))
    monkeypatch.setattr("jaxremat.policy.autoname._READS_OWN_RESULT", {})
    for x in (X, 2 * X, X[:2], X[:2].astype(jnp.bfloat16)):
        jax.make_jaxpr(autoname(lambda x: jnp.tanh(jnp.sin(x))))(x)
    assert len(rules) == 2 * 3, "a shape and a dtype are other operations, values are not"


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_stays_closed_is_said(kind):
    values = named_values(autoname(FUNCTIONS[kind]), W, X)
    assert len({v.name for v in values}) == len(values)
    assert [v.name for v in values if v.opaque] == OPAQUE_NAMES.get(kind, [])
    assert all(jnp.issubdtype(v.dtype, jnp.inexact) for v in values)


def test_functions_keep_their_name_and_anything_else_is_refused():
    assert autoname(with_scan).__name__ == "with_scan"
    wrong: list[Any] = [NormBlock(), "Block"]
    for target in wrong:
        with pytest.raises(UsageError) as caught:
            autoname(target)
        assert type(target).__name__ in caught.value.got


# Names that are there already.


def test_an_author_s_names_win():
    name = checkpoint_name

    def function(x):
        x = name(x, "input")
        h = jax.jit(lambda x: jnp.sin(x))(x)
        tagged = name(name(h, "first"), "second")
        return tagged + h + name(jnp.cos(x), "add") + name(jnp.exp(h), "twice") * name(jnp.sqrt(x), "twice")

    values = [v.name for v in named_values(autoname(function), jnp.ones(3))]
    assert values == words("input first second add.1 add add.2 twice exp twice sqrt mul add.3")
