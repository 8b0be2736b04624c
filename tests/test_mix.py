"""A mix of policies over a pattern of layers computes what `none` computes, and costs the mean of what its parts cost."""

import re
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxremat.errors import UnknownNameError, UnknownPolicyError
from jaxremat.policy.apply import remat
from jaxremat.policy.grammar import parse
from jaxremat.policy.layers import Layers
from jaxremat.policy.spec import Mix, Names, Rule
from jaxremat.xla.flops import count_step_flops, executed_flops
from tests import helpers
from tests.equality import ROUNDING, assert_same_bits, relative_difference
from tests.helpers import quick_jit
from tests.mlp_stack import stack_memory
from tests.small_models import GPT, KEYS, LAYERS, LLAMA, Scanned, X, check_decoder, init_params

MIXES = (
    "1*nothing|1*save:mlpwi_0",
    "3*save:query_proj,context|1*save:mlpwi_0+offload:query_proj",
    "1*save:context+attention|1*nothing+attention|2*minimal+attention",
)


# The same computation.


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "model"),
    [
        pytest.param(MIXES[0], GPT, id="gpt, scan"),
        pytest.param(MIXES[1], GPT, id="gpt, scan, offloading"),
        pytest.param(MIXES[2], replace(LLAMA, scan_layers=False), id="llama, unrolled"),
    ],
)
def test_decoder(policy, model):
    check_decoder(model, policy)


@pytest.mark.full
def test_decoder_initial_values():
    assert_same_bits(init_params(GPT, MIXES[0]), init_params(GPT, "none"))


class Unnamed(nn.Module):
    """Nobody's names, running statistics, dropout, and operations whose derivative reads their result."""

    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(16, name="wide")(x))
        h = nn.Dropout(0.3, deterministic=False)(h)
        h = nn.BatchNorm(use_running_average=False)(h)
        return x + nn.Dense(8, name="out")(jnp.exp(-h))


def train(model, variables=None):
    """(initial variables, loss, updated statistics, gradients by parameters and input)."""
    variables = variables or quick_jit(model.init)(KEYS, X)

    def loss(params, x):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])
        return (y**2).mean(), updates

    (value, updates), grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], X)
    return variables, value, updates, grads


@pytest.mark.full
@pytest.mark.parametrize(
    ("scan", "policies"),
    [
        pytest.param(True, ("1*save:wide/dot_general,tanh|1*save:exp", "3*save:BatchNorm_0/sub|1*offload:exp"), id="scan"),
        pytest.param(False, ("save:wide/dot_general", "3*save:BatchNorm_0/sub|1*offload:exp"), id="unrolled"),
    ],
)
def test_a_block_nobody_named(scan, policies):
    want = train(Layers(Unnamed(), LAYERS, "none", scan=scan))
    assert_same_bits(quick_jit(Layers(Unnamed(), LAYERS, policies[0], scan=scan).init)(KEYS, X), want[0])
    for policy in policies:
        got = train(Layers(Unnamed(), LAYERS, policy, scan=scan), want[0])
        assert_same_bits(got[1:3], want[1:3])
        assert relative_difference(got[3], want[3]) <= ROUNDING


@pytest.mark.full
def test_remat_of_a_class_nobody_named():
    want = train(Scanned(Unnamed))
    got = train(Scanned(remat(Unnamed, "save:wide/dot_general,exp", in_scan=True)))
    assert_same_bits(got[:3], want[:3])
    assert relative_difference(got[3], want[3]) <= ROUNDING


def count_saved(layer, policy):
    """Matmuls in the jaxpr of one layer's gradient: 1 forward, 2 backward, and 1 again unless its result is saved."""
    wrapped = remat(layer, policy)
    grad = jax.grad(lambda w, x: wrapped(w, x).sum(), argnums=(0, 1))
    return str(jax.make_jaxpr(grad)(jnp.eye(8), X)).count("dot_general[")


def test_remat_of_a_function_nobody_named():
    def layer(w, x):
        return jnp.sin(x @ w)

    assert [count_saved(layer, policy) for policy in ("nothing", "save:dot_general")] == [4, 3]


def test_a_layer_with_its_author_s_names_gets_no_others():
    def layer(w, x):
        return jnp.sin(checkpoint_name(x @ w, "hidden"))

    wrapped = remat(layer, "save:hidden")
    assert str(jax.make_jaxpr(wrapped)(jnp.eye(8), X)).count("name[") == 1


@pytest.mark.full
def test_each_layer_follows_its_own_part():
    """Matmuls in the unrolled jaxpr: 2 forward and 4 backward a layer, and the first again unless its result is saved."""

    def count(policy):
        model = Layers(Unnamed(), LAYERS, policy, scan=False)
        variables = jax.eval_shape(model.init, KEYS, X)

        def loss(params, x):
            now = {**variables, "params": params}
            return model.apply(now, x, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])[0].sum()

        return count_step_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(variables["params"], X)).num_matmuls

    saved = "save:wide/dot_general"
    want = count(saved)
    assert [count(policy) - want for policy in ("nothing", f"1*nothing|1*{saved}", f"1*nothing|3*{saved}")] == [4, 2, 1]


# What it costs, compiled for an H100.

MODEL = replace(
    helpers.GPT, vocab_size=16384, num_layers=12, dropout=0.0
)  # the logits make the peak, as they do in real models
FEW = "save:query_proj,key_proj"
MANY = "save:query_proj,key_proj,value_proj,context,mlpwi_0,out_proj"


@pytest.mark.full
def test_bytes_and_flops_are_the_mean_of_the_parts(h100):
    few, many, mix = (helpers.compiled(h100, policy, MODEL) for policy in (FEW, MANY, f"1*{FEW}|1*{MANY}"))
    totals = [compiled.memory.total_bytes for compiled in (few, many, mix)]
    assert totals[1] > 1.1 * totals[0]
    assert totals[2] == pytest.approx((totals[0] + totals[1]) / 2, rel=0.005)
    flops = [executed_flops(compiled.module).total for compiled in (few, many, mix)]
    assert flops[2] == (flops[0] + flops[1]) / 2


@pytest.mark.full
def test_where_layers_make_the_peak_the_next_layer_is_recomputed_too_early(h100):
    """XLA schedules a group's layers freely, so that at worst one more layer's values are there at once."""

    def total(policy: str, num_layers: int = 12) -> int:
        return stack_memory(h100, policy, rows=4096, num_layers=num_layers).total_bytes

    few, many, mix = map(total, ("nothing", "save:hidden", "1*nothing|1*save:hidden"))
    one_layer = (total("everything") - few) / 12
    assert (few + many) / 2 <= mix < (few + many) / 2 + 2 * one_layer


# Its text, and what it rejects.


def test_size_and_description():
    mix = parse("2*save:a,b|1*save:c+offload:d")
    assert isinstance(mix, Mix)
    assert str(mix) == "2*save:a,b|1*save:c+offload:d"
    assert mix.size(12) == 3
    assert re.findall(r"\d+|\b[a-d]\b", mix.describe(12)) == ["3", "2", "a", "b", "1", "c", "d"]


#: What is wrong in each of these texts.
TEXTS = {
    "2*save:a": "1",
    "2*save:a|": "''",
    "save:a|1*nothing": "'save:a'",
    "1*|1*nothing": "'1*'",
    "0*save:a|1*nothing": "'0'",
    "every:2+1*save:a|1*nothing": "'every:2+1'",
    "2*dots|1*save:a": "'dots'",
    "1*nothing|1*none": "'none'",
    "2*save:a|1*nothing+attention": "attention",
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_rejected(text):
    with pytest.raises(UnknownPolicyError) as caught:
        parse(text)
    got = caught.value.got.replace(repr(text), "", 1)
    assert got != caught.value.got
    assert TEXTS[text] in got
    assert caught.value.allowed
    assert caught.value.next_step
    example = caught.value.next_step.rpartition(" ")[2]
    if "*" in example:
        parse(example)


def test_a_part_without_layers_is_rejected():
    with pytest.raises(UnknownPolicyError) as caught:
        Mix(((0, Names()), (1, Rule("nothing"))))
    assert "0" in caught.value.got


@pytest.mark.parametrize(
    ("num_layers", "allowed", "next_step"), [(8, ("2", "4", "8"), ""), (1, (), "nothing"), (7, ("7",), "")]
)
def test_groups_divide_the_layers(num_layers, allowed, next_step):
    mix = parse("2*nothing|1*save:a")
    assert isinstance(mix, Mix)
    for what in (mix.size, mix.describe):
        with pytest.raises(UnknownPolicyError) as caught:
            what(num_layers)
        assert re.findall(r"\d+", caught.value.got.replace(str(mix), "")) == ["3", str(num_layers)]
        assert tuple(re.findall(r"\d+", caught.value.allowed)) == allowed
        assert caught.value.next_step.endswith(next_step)
        assert not next_step or parse(next_step)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_reject_a_remainder(scan):
    with pytest.raises(UnknownPolicyError) as caught:
        jax.eval_shape(Layers(Unnamed(), LAYERS, "2*nothing|1*save:exp", scan=scan).init, KEYS, X)
    assert re.findall(r"\d+", caught.value.got.partition("exp")[2]) == ["3", str(LAYERS)]


@pytest.mark.parametrize(("text", "stacked"), [("1*nothing|1*save:exp", True), ("own", False)])
def test_remat_rejects_what_is_not_of_one_layer(text, stacked):
    with pytest.raises(UnknownPolicyError) as caught:
        remat(Unnamed, text)
    assert repr(text) in caught.value.got
    assert ("jaxremat.Layers" in caught.value.next_step) is stacked


def test_an_unknown_name_lists_the_nearest_of_many():
    with pytest.raises(UnknownNameError) as caught:
        jax.eval_shape(Layers(Unnamed(), LAYERS, "1*nothing|1*save:wide/dot_genral").init, KEYS, X)
    allowed = caught.value.allowed.partition(" and ")[0].split(", ")
    assert allowed[:2] == ["wide/dot_general", "out/dot_general"]
    assert len(allowed) == 20
    assert "'wide/dot_genral'" in caught.value.got
    assert re.findall("'(.*?)'", caught.value.next_step) == ["wide/dot_general", "out/dot_general", "wide/add"]


def test_an_unknown_name_lists_the_author_s_first():
    def layer(w, x):
        return jnp.sin(checkpoint_name(x @ w, "hidden"))

    with pytest.raises(UnknownNameError) as caught:
        remat(layer, "save:hiden")(jnp.eye(8), X)
    assert caught.value.allowed.startswith("hidden, ")
    assert "sin" in caught.value.allowed
    assert re.findall("'(.*?)'", caught.value.next_step)[0] == "hidden"
