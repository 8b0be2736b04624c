"""A mix of policies over a pattern of layers computes what `none` computes, and costs the mean of what its parts cost."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxremat.errors import UnknownNameError, UnknownPolicyError
from jaxremat.policy.apply import remat
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Mix, Names, Rule, describe
from jaxremat.policy.stack import Layers
from jaxremat.xla.flops import count_step_flops, executed_flops
from tests import helpers
from tests.equality import ROUNDING, assert_same_bits, relative_difference
from tests.helpers import beyond_nothing, layer_params, quick_jit
from tests.small_models import GPT, KEYS, LAYERS, LLAMA, Scanned, X, check_decoder, init_params

MIXES = (
    "1*nothing|1*save:mlpwi_0",
    "3*save:query_proj,context|1*save:mlpwi_0+offload:query_proj",
    "1*save:context+attention|1*nothing+attention|2*minimal+attention",
)


# The same computation.


#: Each mix, each kind and each layout in CI, the rest behind --slow.
DECODERS = [
    pytest.param(
        *(policy, kind, scan),
        id=f"{policy}-{kind.positions}-{'scan' if scan else 'unrolled'}",
        marks=(() if n == 2 else pytest.mark.any_jax) if (kind is GPT) == (scan == (n != 1)) else pytest.mark.slow,
    )
    for n, policy in enumerate(MIXES)
    for kind in (GPT, LLAMA)
    for scan in (True, False)
]


@pytest.mark.parametrize(("policy", "kind", "scan"), DECODERS)
def test_decoder(policy, kind, scan):
    model = replace(kind, scan_layers=scan)
    check_decoder(model, policy)


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


NEW_NAMES = ("save:wide/dot_general", "1*save:wide/dot_general,tanh|1*save:exp", "3*save:BatchNorm_0/sub|1*offload:exp")


def train(model):
    """(initial variables, loss, updated statistics, gradients by parameters and input)."""
    variables = quick_jit(model.init)(KEYS, X)

    def loss(params, x):
        now = {**variables, "params": params}
        y, updates = model.apply(now, x, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])
        return (y**2).mean(), updates

    (value, updates), grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], X)
    return variables, value, updates, grads


@pytest.mark.any_jax
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_a_block_nobody_named(scan):
    want = train(Layers(Unnamed(), LAYERS, "none", scan=scan))
    for policy in NEW_NAMES:
        got = train(Layers(Unnamed(), LAYERS, policy, scan=scan))
        assert_same_bits(got[:3], want[:3])
        assert relative_difference(got[3], want[3]) <= ROUNDING


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
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ w, "hidden"))

    wrapped = remat(layer, "save:hidden")
    assert str(jax.make_jaxpr(wrapped)(jnp.eye(8), X)).count("name[") == 1


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

MODEL = replace(helpers.GPT, vocab_size=16384, num_layers=12)  # the logits make the peak, as they do in real models
FEW = "save:query_proj,key_proj"
MANY = "save:query_proj,key_proj,value_proj,context,mlpwi_0,out_proj"


@pytest.mark.parametrize("attention", ["", pytest.param("+attention", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("few", "many"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_bytes_and_flops_are_the_mean_of_the_parts(few, many, attention, h100):
    a, b, mix = (
        helpers.compiled(h100, policy, MODEL)
        for policy in (FEW + attention, MANY + attention, f"{few}*{FEW}{attention}|{many}*{MANY}{attention}")
    )
    share = many / (few + many)

    def mean(of_a, of_b):
        return of_a + share * (of_b - of_a)

    totals = [c.memory.total_bytes for c in (a, b, mix)]
    assert totals[1] > 1.1 * totals[0]
    assert totals[2] == pytest.approx(mean(*totals[:2]), rel=0.005)
    flops = [executed_flops(c.module).total for c in (a, b, mix)]
    assert flops[2] == mean(*flops[:2])


@pytest.mark.any_jax
def test_where_layers_make_the_peak_the_next_layer_is_run_again_too_early(h100):
    """XLA schedules a group's layers freely, so that at worst one more layer's values are there at once."""
    a, b, mix = (helpers.compiled(h100, policy).memory.total_bytes for policy in (FEW, MANY, f"1*{FEW}|1*{MANY}"))
    everything, nothing = (helpers.compiled(h100, policy).memory.total_bytes for policy in ("everything", "nothing"))
    one_layer = (everything - nothing) / helpers.GPT.num_layers
    assert (a + b) / 2 <= mix < (a + b) / 2 + 2 * one_layer


def test_holds_no_second_copy_of_the_parameters(h100):
    """24 layers in groups of 3: one group's parameters and gradients more; a copy of the stack would be 8 of those.

    cuBLAS's workspace is at the peak of the one step, and perhaps not of the other.
    """
    one_group = 3 * 4 * layer_params(helpers.GPT)
    assert beyond_nothing(h100, f"2*{FEW}|1*{MANY}") < 2 * one_group + helpers.WORKSPACE < 8 * one_group


# Its text, and what it refuses.


def test_size_and_description():
    mix = parse("2*save:a,b|1*save:c+offload:d")
    assert str(mix) == "2*save:a,b|1*save:c+offload:d"
    assert mix.size(12) == 3
    assert describe(mix, 12) == "groups of 3 layers: 2 save a, b; 1 saves c and offloads d"
    assert describe(parse("1*nothing|2*save:a"), 3) == "groups of 3 layers: 1 recomputes everything; 2 save a"


PARTS = "Allowed: a number of layers and their policy in each part: N*POLICY|N*POLICY. Next: write it like "
EXAMPLE = "2*nothing|1*save:NAME."
NAMED = "Allowed: nothing, save:NAME,... and offload:NAME,... as parts. Next: name what"
TEXTS = {
    "2*save:a": "policy '2*save:a' has 1 part. Allowed: two parts or more: N*POLICY|N*POLICY. "
    "Next: one policy for all layers is written without a number.",
    "2*save:a|": f"policy '2*save:a|' has the part ''. {PARTS}{EXAMPLE}",
    "save:a|1*nothing": f"policy 'save:a|1*nothing' has the part 'save:a'. {PARTS}{EXAMPLE}",
    "1*|1*nothing": f"policy '1*|1*nothing' has the part '1*'. {PARTS}{EXAMPLE}",
    "0*save:a|1*nothing": "policy '0*save:a|1*nothing' needs a number of layers and got '0'. "
    f"Allowed: a whole number from 1 up. Next: write it like {EXAMPLE}",
    "every:2+1*save:a|1*nothing": "policy 'every:2+1*save:a|1*nothing' needs a number of layers and got 'every:2+1'. "
    f"Allowed: a whole number from 1 up. Next: write it like {EXAMPLE}",
    "2*dots|1*save:a": f"policy '2*dots|1*save:a' has a part with 'dots'. {NAMED} dots keeps: save:NAME,...",
    "1*nothing|1*none": f"policy '1*nothing|1*none' has a part with 'none'. {NAMED} none keeps: save:NAME,...",
    "2*save:a|1*nothing+attention": "policy '2*save:a|1*nothing+attention' says attention in some parts only. "
    "Allowed: +attention in all parts or in none. Likely cause: the parts of a mix differ in names, and fused attention's "
    "outputs have none. Next: add +attention to each part, or leave it out.",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_refused(text):
    with pytest.raises(UnknownPolicyError) as raised:
        parse(text)
    assert str(raised.value) == TEXTS[text]


def test_a_part_without_layers_is_refused():
    with pytest.raises(UnknownPolicyError, match="has a part of 0 layers"):
        Mix(((0, Names()), (1, Rule("nothing"))))


@pytest.mark.parametrize(
    ("num_layers", "rest"),
    [
        (8, "groups of 2, 4, 8. Likely cause: a remainder would have its parameters copied out of the stack. "
            "Next: choose numbers that add up to one of those."),
        (1, "one policy for the one layer. Likely cause: a remainder would have its parameters copied out of the stack. "
            "Next: write nothing."),
    ],
)  # fmt: skip
def test_groups_divide_the_layers(num_layers, rest):
    for what in (lambda mix: mix.size(num_layers), lambda mix: describe(mix, num_layers)):
        with pytest.raises(UnknownPolicyError) as raised:
            what(parse("2*nothing|1*save:a"))
        got = f"policy '2*nothing|1*save:a' makes groups of 3 layers, and the model has {num_layers}. Allowed: "
        assert str(raised.value) == got + rest


@pytest.mark.parametrize("scan", [True, False])
def test_layers_refuses_a_remainder(scan):
    with pytest.raises(UnknownPolicyError, match="groups of 3 layers, and the model has 4"):
        Layers(Unnamed(), LAYERS, "2*nothing|1*save:exp", scan=scan).init(KEYS, X)


def test_remat_refuses_a_mix():
    with pytest.raises(UnknownPolicyError, match="speaks of several layers"):
        remat(Unnamed, "1*nothing|1*save:exp")


def test_an_unknown_name_lists_the_nearest_of_many():
    with pytest.raises(UnknownNameError) as raised:
        Layers(Unnamed(), LAYERS, "1*nothing|1*save:wide/dot_genral").init(KEYS, X)
    allowed = str(raised.value).partition("Allowed: ")[2].partition(". Likely cause")[0]
    assert allowed.startswith("wide/dot_general, out/dot_general, ")
    assert len(allowed.partition(" and ")[0].split(", ")) == 20
    assert str(raised.value).startswith(
        "policy 'save:wide/dot_genral' names 'wide/dot_genral', and no tensor carries that name"
    )
    assert str(raised.value).endswith("Next: did you mean 'wide/dot_general' or 'out/dot_general' or 'wide/add'?")


def test_an_unknown_name_lists_the_author_s_first():
    def layer(w, x):
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ w, "hidden"))

    with pytest.raises(UnknownNameError, match=r"Allowed: hidden, or any other .*such as sin\. .*did you mean 'hidden'"):
        remat(layer, "save:hiden")(jnp.eye(8), X)
