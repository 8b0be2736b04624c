"""What a compiled step saves and recomputes: read from its program, put into its record, and said in a sentence.

`test_recompute.py` counts the same for the decoder under every policy.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from jaxremat.policy.with_policy import with_policy
from jaxremat.trial.lines import from_row, to_json
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.flops import executed_flops
from jaxremat.xla.lint_input import lint_input, residuals
from jaxremat.xla.recomputed import saved_and_recomputed
from jaxremat.xla.saved import saved_values
from jaxremat.xla.step_facts import Recomputed, SavedValues
from jaxremat.xla.traced import read_traced
from tests.helpers import BATCH, GPT, SEQ, TRAIN, decoder_args, decoder_step, mapped
from tests.made_up_records import trial

NUM, ROWS, WIDTH, HIDDEN = 3, 32, 64, 128
STACKED = {"up": jax.ShapeDtypeStruct((NUM, WIDTH, HIDDEN), jnp.float32)}
STACKED["down"] = jax.ShapeDtypeStruct((NUM, HIDDEN, WIDTH), jnp.float32)
LAYERS = NUM * [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), STACKED)]
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
MATMUL_FLOPS = 2 * ROWS * WIDTH * HIDDEN
INPUT_BYTES, HIDDEN_BYTES = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN
INPUTS = SavedValues("input", "", 3, 3 * INPUT_BYTES)
POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["hidden"], offload_src="device", offload_dst="pinned_host"
)


def layer(p, x):
    hidden = checkpoint_name(x @ p["up"], "hidden")
    return x + 1.01 * checkpoint_name(jnp.tanh(hidden) @ p["down"], "out")


def mean_square(x):
    return (x**2).mean()


def looped(layer, reduce=mean_square, unroll=1):
    return lambda params, x: reduce(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params, unroll=unroll)[0])


def unrolled(layer, reduce=mean_square):
    def loss(params, x):
        for p in params:
            x = layer(p, x)
        return reduce(x)

    return loss


def under(policy, prevent_cse=False):
    return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)


def compiled_for(target, function, *args):
    return saved_and_recomputed(lower_and_compile(function, args, target))


def saved_by(function, *args):
    return saved_values(jax.make_jaxpr(jax.grad(function))(*args)).values


# What is saved.


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICIES.nothing_saveable, [INPUTS]),
        (POLICIES.save_only_these_names("hidden", "out"), [SavedValues("name", "hidden", 3, 3 * HIDDEN_BYTES), INPUTS]),
        (OFFLOAD, [SavedValues("name", "hidden", 3, 3 * HIDDEN_BYTES, True), INPUTS]),
        (POLICIES.dots_saveable, [SavedValues("matmul", "", 3, 3 * HIDDEN_BYTES), INPUTS]),
        (
            POLICIES.save_from_both_policies(POLICIES.dots_saveable, POLICIES.save_only_these_names("hidden")),
            [SavedValues("name", "hidden", 3, 3 * HIDDEN_BYTES), INPUTS],
        ),
    ],
    ids=["nothing", "names", "offload", "dots", "dots and names"],
)
def test_saved_values(policy, expected):
    """Of the matmuls only the first one's result is needed: the last one's is added to the input."""
    assert list(saved_by(looped(under(policy)), STACKED, X)) == expected
    of_unrolled = {(some.kind, some.name): some for some in saved_by(unrolled(under(policy)), LAYERS, X)}
    inputs = of_unrolled.pop(("input", ""))
    assert (inputs.num_values, inputs.num_bytes) == (2, 2 * INPUT_BYTES)  # the first layer's input is an argument
    assert list(of_unrolled.values()) == [some for some in expected if some.kind != "input"]


def test_elementwise_values_are_saved_under_everything():
    kinds = {some.kind for some in saved_by(looped(under(POLICIES.everything_saveable)), STACKED, X)}
    assert "elementwise" in kinds
    assert "name" not in kinds  # the policy doesn't look at names
    assert saved_by(looped(layer), STACKED, X) == ()


def test_arguments_their_slices_and_keys_do_not_count():
    def dropout(p, key, x):
        return x + jax.random.bernoulli(key, 0.5, x.shape) * jnp.tanh(x @ p.astype(jnp.float32))

    def loss(params, key, x):
        checkpointed = jax.checkpoint(dropout, policy=POLICIES.nothing_saveable)
        for i, one in enumerate(jax.random.split(key, NUM)):
            x = checkpointed(params[i], one, x)
        return x.sum()

    params = jax.ShapeDtypeStruct((NUM, WIDTH, WIDTH), jnp.bfloat16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert saved_by(loss, params, key, X) == (SavedValues("input", "", 2, 2 * INPUT_BYTES),)


@pytest.mark.parametrize("stack", [looped, unrolled])
def test_a_named_cast_of_a_weight_is_saved(stack):
    """An unnamed cast isn't: the checkpoint makes it again."""

    def cast_layer(p, x):
        up = checkpoint_name(p["up"].astype(jnp.bfloat16), "cast")
        return x + jnp.tanh(x.astype(jnp.bfloat16) @ up).astype(jnp.float32) @ p["down"]

    for policy in (POLICIES.save_only_these_names("cast"), POLICIES.nothing_saveable):
        checkpointed = jax.checkpoint(cast_layer, policy=policy, prevent_cse=False)
        kept = {
            some.name: (some.num_values, some.num_bytes)
            for some in saved_by(stack(checkpointed), STACKED if stack is looped else LAYERS, X)
        }
        named = (NUM, NUM * 2 * WIDTH * HIDDEN)
        assert kept.get("cast") == (None if policy is POLICIES.nothing_saveable else named)


def masked(params, lengths, x):
    """Layers that read a mask, made of comparisons, and a table of positions: unrolled."""
    mask = jnp.where(jnp.arange(WIDTH) < lengths[:, None], 0.0, -1e9)
    positions = jnp.sin(jnp.arange(WIDTH) / 100)
    for p in params:
        x = jax.checkpoint(lambda p, x, mask: layer(p, jax.nn.softmax(x + mask) * positions))(p, x, mask)
    return mean_square(x)


def counted(params, lengths, x):
    """A loop that carries a raw key and a counter, and reads a rate by layer."""

    def turn(state, slices):
        (x, key, count), (p, rate) = state, slices
        key, own = jax.random.split(key)
        x = layer(p, x) * jax.random.bernoulli(own, 0.9, x.shape) * (1 - rate) / (1 + count)
        return (x, key, count + 1.0), None

    state, slices = (x, jax.random.PRNGKey(0), jnp.cos(lengths[0])), (params, jnp.arange(NUM) / 10)
    return mean_square(jax.lax.scan(jax.checkpoint(turn), state, slices)[0][0])


def with_checkpointed_loss(params, lengths, x):
    """A loss of four chunks, each in a checkpoint."""
    x = unrolled(under(None), lambda x: x)(params, x)
    of_chunk = jax.checkpoint(lambda x: jax.nn.logsumexp(x, -1).sum())
    return jax.lax.scan(lambda total, x: (total + of_chunk(x), None), 0.0, x.reshape(4, -1, WIDTH))[0]


def groups(params, lengths, x):
    """Checkpoints of layers in checkpoints of groups: the inner ones save nothing until a group is recomputed."""
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, *leaf.shape)), params)
    turn = jax.checkpoint(lambda x, p: (layer(p, x), None))
    return mean_square(jax.lax.scan(jax.checkpoint(lambda x, p: (jax.lax.scan(turn, x, p)[0], None)), x, params)[0])


def branches(params, lengths, x):
    """Each layer is left out at random."""
    some = jax.checkpoint(
        lambda *args: jax.lax.cond(lengths[0] > 1, layer, lambda p, x: x, *args), policy=POLICIES.dots_saveable
    )
    return unrolled(some)(params, x)


@pytest.mark.parametrize(
    ("loss", "params", "expected", "num_checkpoints"),
    [
        (masked, LAYERS, {"input": (2, 2 * INPUT_BYTES), "other": (2, INPUT_BYTES + 4 * WIDTH)}, NUM),
        (counted, STACKED, {"input": (3, 3 * INPUT_BYTES), "other": (4, 4 * NUM + 4 * NUM)}, NUM),
        (with_checkpointed_loss, LAYERS, {"input": (2, 2 * INPUT_BYTES), "loss": (1, INPUT_BYTES)}, NUM + 4),
        (groups, STACKED, {"input": (2, 2 * INPUT_BYTES)}, 2 + 2 * NUM),
        (branches, LAYERS, {"input": (2, 2 * INPUT_BYTES), "matmul": (3, 3 * HIDDEN_BYTES)}, NUM),
    ],
)
def test_inputs_of_layers_are_told_from_other_values(loss, params, expected, num_checkpoints):
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, jax.ShapeDtypeStruct((ROWS,), jnp.int32), X)
    assert {some.kind: (some.num_values, some.num_bytes) for some in saved_values(jaxpr).values} == expected
    assert read_traced(jaxpr).num_checkpoints == num_checkpoints


def test_microbatches_save_one_after_the_other():
    def loss(params, xs):
        of_one = jax.value_and_grad(looped(under(POLICIES.nothing_saveable)))
        return jax.lax.scan(lambda total, x: (total + of_one(params, x)[0], of_one(params, x)[1]), 0.0, xs)

    xs = jax.ShapeDtypeStruct((5, *X.shape), X.dtype)
    saved = saved_values(jax.make_jaxpr(loss)(STACKED, xs)).values
    assert [(some.kind, some.num_values % NUM) for some in saved] == [("input", 0)]
    assert saved[0].num_bytes == saved[0].num_values * INPUT_BYTES


def test_a_loop_of_train_steps_saves_no_parameters():
    """Its state is the parameters, which are arguments."""

    def train(params, xs):
        def step(params, x):
            grads = jax.grad(looped(under(POLICIES.nothing_saveable)))(params, x)
            return jax.tree.map(lambda p, g: p - g, params, grads), None

        return jax.lax.scan(step, params, xs)

    xs = jax.ShapeDtypeStruct((5, *X.shape), X.dtype)
    assert saved_values(jax.make_jaxpr(train)(STACKED, xs)).values == (INPUTS,)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", []),
        pytest.param(
            "dots+attention", [("matmul", "", 40), ("attention", "", 16), ("input", "", 8)], marks=pytest.mark.full
        ),
        ("save:mlpwi_0,mlpwo", [("name", "mlpwi_0", 8), ("input", "", 8)]),
        pytest.param("every:2+save:mlpwi_0", [("input", "", 4)], marks=pytest.mark.full),
        pytest.param(
            "one-in:2", [("elementwise", "", None), ("attention", "", 8), ("input", "", 4)], marks=pytest.mark.full
        ),
        pytest.param("1*nothing|1*save:query_proj", [("input", "", 8), ("name", "query_proj", 4)], marks=pytest.mark.full),
    ],
)
def test_the_decoder_saves_what_its_policy_says(policy, expected):
    jaxpr = jax.make_jaxpr(decoder_step(GPT, TRAIN, policy, "cudnn"))(*decoder_args(GPT, TRAIN, BATCH))
    found = saved_values(jaxpr)
    counts = [(some.kind, some.name, None if some.kind == "elementwise" else some.num_values) for some in found.values]
    assert counts == expected
    # Under every:2 the name is saved only while a group is run again.
    assert ("mlpwi_0" in found.read_names) == ("mlpwi_0" in policy)


def test_values_of_a_user_s_layers_have_the_names_that_autoname_gives():
    assert [(some.kind, some.name) for some in saved_by(with_policy(looped(layer), "save:tanh"), STACKED, X)] == [
        ("name", "tanh"),
        ("input", ""),
    ]


@pytest.mark.full
def test_saved_bytes_are_those_of_xla_s_buffers(h100):
    """Each name's bytes, to the byte; and the name that no gradient needs has no buffer."""
    done = mapped(h100, GPT, "save:mlpwi_0,context,mlpwo")
    kept = saved_and_recomputed(done)
    buffers = {label: sum(size for _, size in some) for label, some in residuals(lint_input(done)).items()}
    for some in kept.saved:
        assert some.num_bytes == buffers[some.name or "decoder_layer_input"]
        assert some.num_values == GPT.num_layers
    assert kept.unread_names == ("mlpwo",)
    assert "mlpwo" not in buffers
    assert kept.saved[0] == SavedValues("name", "mlpwi_0", GPT.num_layers, GPT.num_layers * BATCH * SEQ * GPT.mlp_dim * 2)


# What is recomputed.


@pytest.mark.full
def test_a_loop_runs_its_matmuls_again():
    kept = compiled_for("cpu", jax.grad(looped(under(POLICIES.nothing_saveable))), STACKED, X)
    assert kept.again == (Recomputed("matmul", 6, 3, 3, 3 * MATMUL_FLOPS),)
    assert kept.num_checkpoints == NUM


@pytest.mark.full
@pytest.mark.parametrize("gradient_first", [False, True])
def test_a_merged_recompute_does_not_run_again(gradient_first):
    """Whichever of the two names XLA gives to the merged matmul: that depends on the order of the results."""
    value_and_grad = jax.value_and_grad(unrolled(under(POLICIES.nothing_saveable)))
    step = (lambda *args: value_and_grad(*args)[::-1]) if gradient_first else value_and_grad
    kept = compiled_for("cpu", step, LAYERS, X)
    assert kept.again == (Recomputed("matmul", 6, 3, 0, 0),)


@pytest.mark.full
def test_matmuls_that_nothing_needs_do_not_count(h100):
    """A linear loss doesn't need the last layer's forward pass, and its gradient alone doesn't compute it."""
    loss = unrolled(under(POLICIES.nothing_saveable, prevent_cse=True), jnp.sum)
    kept = compiled_for(h100, jax.grad(loss), LAYERS, X)
    assert kept.again == (Recomputed("matmul", 4, 3, 3, 3 * MATMUL_FLOPS),)


def beyond(target, loss, plain, *args):
    """What is recomputed, and the FLOPs that the compiled program executes beyond those of the plain one."""
    done, base = (lower_and_compile(jax.grad(f), args, target) for f in (loss, plain))
    return saved_and_recomputed(done).again, executed_flops(done.module).total - executed_flops(base.module).total


@pytest.mark.full
def test_small_matmuls_that_xla_computes_without_a_matmul_are_not_merged(h100):
    """Two loops in which only the product with a vector is recomputed. Nothing of a loop can be merged."""

    def gated(p, x):
        gate, p = p
        out = checkpoint_name(jnp.tanh(checkpoint_name(x @ p["up"], "hidden")) @ p["down"], "out")
        return x + jax.nn.sigmoid(x @ gate)[:, None] * out

    def loss(layer):
        return lambda params, x: looped(layer, lambda x: looped(layer)(params[1], x))(params[0], x)

    saving = jax.checkpoint(gated, policy=POLICIES.save_only_these_names("hidden", "out"), prevent_cse=False)
    params = 2 * [(jax.ShapeDtypeStruct((NUM, WIDTH), jnp.float32), STACKED)]
    (again,), flops = beyond(h100, loss(saving), loss(gated), params, X)
    assert again == Recomputed("matmul", 6 * NUM, 2 * NUM, 2 * NUM, 0)
    assert flops == 0


@pytest.mark.full
def test_matmuls_that_xla_pads_count_once(h100):
    """The FLOPs are those of the padded matmuls."""

    def halved(p, x):
        return layer(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16)).astype(jnp.float32)

    (again,), flops = beyond(h100, looped(jax.checkpoint(halved)), looped(halved), STACKED, X.update(shape=(17, WIDTH)))
    assert (again.num_forward, again.num_asked, again.num_again) == (2 * NUM, NUM, NUM)
    assert again.flops_again == flops >= 2 * 17 * WIDTH * HIDDEN * NUM


@pytest.mark.full
def test_matmuls_that_lose_their_scope_count_too():
    """For a CPU, XLA rewrites products of batches."""

    def attention(p, x):
        x = x.reshape(4, -1, WIDTH)
        query, key, value = (jnp.tanh((scale * x) @ p["up"]) for scale in (1, 2, 3))
        return (x + jax.nn.softmax(query @ key.swapaxes(1, 2)) @ value @ p["down"]).reshape(-1, WIDTH)

    (again,), flops = beyond("cpu", looped(jax.checkpoint(attention)), looped(attention), STACKED, X)
    assert (again.num_forward, again.num_asked, again.num_again, again.flops_again) == (6 * NUM, 5 * NUM, 5 * NUM, flops)


@pytest.mark.full
def test_a_loop_that_jax_unrolls(h100):
    """A checkpoint without barriers is merged there. A policy has them, which count for a GPU."""
    (merged,) = compiled_for("cpu", jax.value_and_grad(looped(under(None), unroll=NUM)), STACKED, X).again
    assert merged == Recomputed("matmul", 2 * NUM, NUM, 0, 0)
    loss = with_policy(looped(layer, unroll=NUM), "nothing")
    (again,) = compiled_for(h100, jax.value_and_grad(loss), STACKED, X).again
    assert again == Recomputed("matmul", 2 * NUM, NUM, NUM, NUM * MATMUL_FLOPS)


@pytest.mark.full
def test_names_that_are_not_needed_or_not_there():
    kept = compiled_for("cpu", jax.grad(looped(under(POLICIES.save_only_these_names("hidden", "out", "hiden")))), STACKED, X)
    assert (kept.unread_names, kept.unmatched_names) == (("out",), ("hiden",))
    assert kept.again[0].num_again == 0


@pytest.mark.full
def test_convolutions_that_run_again():
    def convolve(w, x):
        y = jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return x + jnp.tanh(y)

    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(convolve)(w, x), None), x, ws)[0].sum()

    ws, x = jax.ShapeDtypeStruct((NUM, 3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((2, 16, 8), jnp.float32)
    (again,) = compiled_for("cpu", jax.grad(loss), ws, x).again
    assert (again.operation, again.num_forward, again.num_asked, again.num_again) == ("convolution", NUM, NUM, NUM)
    assert again.flops_again == NUM * 2 * 2 * 8 * 8 * (3 * 16 - 2)  # one tap of the first and the last position is padding


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="Pallas of this JAX lowers only for a GPU that is there")
def test_kernels_of_the_program_that_run_again(h100):
    def kernel(x_ref, y_ref):
        y_ref[...] = jnp.tanh(x_ref[...])

    @jax.custom_vjp
    def tanh(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    tanh.defvjp(lambda x: (tanh(x), tanh(x)), lambda y, bar: ((1 - y * y) * bar,))

    def loss(ws, x):
        checkpointed = jax.checkpoint(lambda w, x: x + tanh(x @ w))
        return jax.lax.scan(lambda x, w: (checkpointed(w, x), None), x, ws)[0].sum()

    ws = jax.ShapeDtypeStruct((NUM, WIDTH, WIDTH), jnp.float32)
    again = {some.operation: some for some in compiled_for(h100, jax.grad(loss), ws, X).again}
    assert again["kernel"] == Recomputed("kernel", NUM, NUM, NUM, 0)
    assert again["matmul"].num_again == NUM


@pytest.mark.full
def test_a_record_says_what_was_kept():
    done = lower_and_compile(jax.grad(looped(under(POLICIES.dots_saveable))), (STACKED, X), "cpu")
    record = replace(trial(8), kept=saved_and_recomputed(done))
    assert from_row(json.loads(to_json(record))) == record
    assert record.kept is not None
    assert record.kept.saved[0] == SavedValues("matmul", "", 3, 3 * HIDDEN_BYTES, False)
