"""The levers of the step change memory and time, not the result: loss, optimizer, microbatches, dtypes, on the CPU."""

import functools
import math
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from jaxremat.config import ModelConfig, Optimizer, TrainConfig
from jaxremat.mesh.axes import MeshShape
from jaxremat.mesh.sharding import abstract_mesh, tracing_on
from jaxremat.model.decoder_workload import make_loss, matrix_axes
from jaxremat.model.loss import chunked_cross_entropy, cross_entropy, default_positions
from jaxremat.model.transformer import count_params, param_shapes
from jaxremat.policy.grammar import parse
from jaxremat.step.adam8 import decoded, encoded
from jaxremat.step.optimizer import make_optimizer, make_schedule, muon_dimensions
from jaxremat.step.step import TrainState
from tests.helpers import decoder_args, decoder_state, decoder_step, optimizer_bytes, quick_jit

BATCH, SEQ = 4, 30
TIED = ModelConfig("tied", 61, 2, 16, 2, 2, 8, 32, max_seq_len=SEQ, dtype="float32")
HEAD = replace(TIED, name="head", tie_embeddings=False, use_bias=False, mlp="swiglu", positions="rope", num_kv_heads=1)
TRAIN = TrainConfig(seq_len=SEQ)
#: Chunks that leave a remainder, that divide the length, of a default length, and of more positions than there are.
LOSSES = [(TIED, "chunked:7"), (TIED, "chunked:10"), (HEAD, "chunked"), (HEAD, "chunked:1000")]


def tokens(rows: int = BATCH, vocab_size: int = TIED.vocab_size) -> jax.Array:
    return jax.random.randint(jax.random.key(3), (rows, SEQ + 1), 0, vocab_size)


def difference(got, want) -> float:
    """The largest difference between two trees over the largest value of `want`."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    return max(float(jnp.abs(a - b).max()) for a, b in pairs) / max(float(jnp.abs(b).max()) for _, b in pairs)


@functools.cache
def first_params(model: ModelConfig):
    return quick_jit(lambda: decoder_state(model, TRAIN).params)()


@functools.cache
def value_and_grads(model: ModelConfig, loss: str):
    params = first_params(model)
    return quick_jit(jax.value_and_grad(make_loss(model, parse("nothing"), "xla", loss)))(
        params, tokens(), jax.random.key(5)
    )


# The chunked loss.


@pytest.mark.full
@pytest.mark.parametrize(("model", "loss"), LOSSES, ids=lambda value: getattr(value, "name", value))
def test_chunked_is_full(model, loss):
    (value, grads), (full, full_grads) = value_and_grads(model, loss), value_and_grads(model, "full")
    assert float(value) == pytest.approx(float(full), rel=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(full_grads)
    assert difference(grads, full_grads) < 2e-6


@pytest.mark.full
def test_chunked_is_full_in_bfloat16():
    """Up to the rounding of one bfloat16 matmul: the head's gradient is summed in float32 over the chunks."""
    model = replace(HEAD, dtype="bfloat16")
    (value, grads), (full, full_grads) = value_and_grads(model, "chunked:7"), value_and_grads(model, "full")
    assert float(value) == pytest.approx(float(full), rel=1e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert difference(grads, full_grads) < 3e-2


def largest_array(jaxpr) -> int:
    """Elements of the largest array anywhere in a jaxpr."""
    found = [0]
    for equation in jaxpr.eqns:
        found += [math.prod(var.aval.shape) for var in equation.outvars]
        found += [largest_array(inner) for inner in jaxprs_in_params(equation.params)]
    return max(found)


@pytest.mark.full
def test_chunked_never_holds_all_logits():
    model = replace(TIED, vocab_size=2000)
    params = param_shapes(model)
    args = params, jax.ShapeDtypeStruct((64, SEQ + 1), "int32"), jax.eval_shape(lambda: jax.random.key(0))

    def largest(loss: str) -> int:
        return largest_array(
            jax.make_jaxpr(jax.value_and_grad(make_loss(model, parse("nothing"), "xla", loss)))(*args).jaxpr
        )

    assert largest("full") == 64 * SEQ * model.vocab_size
    assert largest("chunked:3") == 64 * 3 * model.vocab_size


@pytest.mark.full
def test_the_loss_alone():
    """In chunks as at once, with a gradient and without. Gradients scale with the cotangent. Two logits of 0 make log 2."""
    generator = np.random.default_rng(0)
    kernel, x = (generator.standard_normal(shape, np.float32) for shape in ((4, 2), (1, 3, 4)))
    targets = jnp.array([[0, 1, 1]])

    def logits(kernel, x):
        return x @ kernel

    def full(kernel, x):
        return cross_entropy(logits(kernel, x), targets)

    def chunked(kernel, x, factor=1):
        return factor * chunked_cross_entropy(logits, kernel, x, targets, 2)

    @quick_jit
    def everything(kernel, x):
        both = [jax.value_and_grad(loss, argnums=(0, 1))(kernel, x) for loss in (full, chunked)]
        return both, chunked(kernel, x), chunked(0 * kernel, x), jax.grad(chunked, argnums=(0, 1))(kernel, x, 3)

    ((value, grads), (in_chunks, grads_in_chunks)), without, of_zeros, thrice = everything(kernel, x)
    assert float(in_chunks) == pytest.approx(float(value), rel=1e-6) == pytest.approx(float(without), rel=1e-6)
    assert difference(grads_in_chunks, grads) < 1e-6
    assert difference(thrice, jax.tree.map(lambda leaf: 3 * leaf, grads)) < 1e-6
    assert float(of_zeros) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("batch", "seq_len", "free_tokens", "positions"),
    [
        (8, 1024, 0, 512),  # 4096 tokens at least
        (32, 1024, 0, 128),
        (3, 1024, 0, 1024),
        (3, 2048, 0, 1024),  # 1365 would do; two equal chunks
        (5000, 1024, 0, 1),
        (32, 1024, 8192, 256),
        (32, 1024, 10**9, 1024),
        (8, 1021, 0, 511),
    ],
)
def test_default_positions(batch, seq_len, free_tokens, positions):
    got = default_positions(batch, seq_len, vocab_size=100, logit_bytes=2, free_bytes=free_tokens * 100 * 6)
    assert got == positions


@pytest.mark.parametrize(
    ("mesh", "positions"),
    [
        (MeshShape(fsdp=8), 512),  # 4096 tokens of each device
        (MeshShape(fsdp=2, data=2), 256),
        (MeshShape(fsdp=2, tensor=4), 128),  # four devices have the same sequences
        (MeshShape(fsdp=3), 64),  # 64 sequences aren't divided by 3
    ],
)
def test_default_positions_on_a_mesh(mesh, positions):
    with tracing_on(abstract_mesh(mesh)):
        assert default_positions(64, 1024, vocab_size=100, logit_bytes=2, free_bytes=0) == positions


# Optimizers.


def train_for(
    train: TrainConfig, model: ModelConfig = TIED, steps: int = 3, batch: int = BATCH
) -> tuple[TrainState, list[float]]:
    """The state after some steps on one batch, and their losses. `batch` is that of a microbatch."""
    step = quick_jit(decoder_step(model, train, "nothing"))
    state, losses = quick_jit(lambda: decoder_state(model, train))(), []
    for _ in range(steps):
        state, loss = step(state, tokens(batch * train.accumulate))
        losses.append(float(loss))
    return state, losses


@pytest.mark.full
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_every_optimizer_learns(optimizer):
    rate = {"sgd-momentum": 0.1, "adafactor": 3e-2, "lion": 1e-3}.get(optimizer, 1e-2)
    _, losses = train_for(TrainConfig(seq_len=SEQ, optimizer=optimizer, learning_rate=rate, clip_norm=1.0), steps=6)
    assert losses[-1] < losses[0] - 0.05
    assert all(math.isfinite(loss) for loss in losses)


def test_state_bytes():
    """By hand, counters (an int32 each) apart: bytes times parameters."""
    num_params, shapes = count_params(HEAD), param_shapes(HEAD)
    kernels = sum(leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(shapes) if path[-1].key == "kernel")
    by_hand = {
        "adamw": 8 * num_params,
        "adamw-bf16": 6 * num_params,
        "lion": 4 * num_params,
        "sgd-momentum": 4 * num_params,
        "muon": 4 * kernels + 8 * (num_params - kernels),
    }
    for optimizer, expected in by_hand.items():
        assert 0 <= optimizer_bytes(HEAD, replace(TRAIN, optimizer=optimizer)) - expected <= 24, optimizer


def test_adam_in_8_bits_has_a_quarter_of_the_state():
    """Two codes of a byte, and a float32 number for each block of 256 values. Small parameters have float32 moments."""
    model = replace(HEAD, embed_dim=256, num_heads=4, head_dim=64, mlp_dim=512, vocab_size=512)
    num_params = count_params(model)
    small = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model)) if leaf.size < 4096)
    got = optimizer_bytes(model, replace(TRAIN, optimizer="adamw-8bit"))
    assert got == pytest.approx(8 * small + 2 * (num_params - small) * (1 + 4 / 256), abs=300)
    assert got < 0.27 * 8 * num_params


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
@pytest.mark.parametrize("shape", [(64, 1000), (2, 40, 4, 16), (3, 5000)], ids=str)
def test_codes_of_8_bits_are_near_their_values(shape, dtype):
    """No error is above 1 % of the largest value, half of them are below 4 % of their own, and every code is its own."""
    signed = jnp.issubdtype(dtype, jnp.signedinteger)
    random = np.random.default_rng(0)
    values = (random.standard_normal(shape) * np.exp(random.standard_normal(shape))).astype(np.float32)
    values[0, :3] = 0
    values = values if signed else values**2
    codes, largest = encoded(jnp.asarray(values), dtype)
    found = np.asarray(decoded(codes, largest))
    assert codes.shape == shape
    assert largest.size == pytest.approx(values.size / 256, rel=0.03)
    error = np.abs(found - values)
    assert error.max() < 0.01 * np.abs(values).max()
    assert np.median(error[values != 0] / np.abs(values[values != 0])) < 0.04
    assert np.array_equal(found == 0, values == 0)
    np.testing.assert_array_equal(encoded(jnp.asarray(found), dtype)[0], codes)


def test_the_values_of_codes_are_those_of_the_dynamic_map():
    """Those of bitsandbytes' `create_dynamic_map`, which is written here as its authors do, but for its largest value, 1."""
    for dtype, more in ((jnp.int8, 0), (jnp.uint8, 1)):
        codes = np.arange(2**more, 2 ** (7 + more))
        means = [
            10.0 ** (n - 6)
            * (np.linspace(0.1, 1, 2 ** (n + more) + 1)[1:] + np.linspace(0.1, 1, 2 ** (n + more) + 1)[:-1])
            / 2
            for n in range(7)
        ]
        got = decoded(jnp.asarray(np.resize(codes, 4096), dtype), jnp.ones(16, jnp.float32))[: len(codes)]
        np.testing.assert_allclose(got, np.concatenate(means), rtol=1e-5)


def test_adafactor_factors_every_matrix():
    """Wide enough to factor (optax asks for 128): row and column sums of each layer's [in, out], heads joined."""
    model = replace(HEAD, num_layers=3, embed_dim=256, num_heads=4, num_kv_heads=4, head_dim=64, mlp_dim=512, vocab_size=512)
    matrices = 3 * (4 * (256 + 256) + 3 * (256 + 512)) + 2 * (512 + 256)
    vectors = (3 * 2 + 1) * 256
    got = optimizer_bytes(model, replace(TRAIN, optimizer="adafactor"))
    assert 4 * (matrices + vectors) <= got < 4 * (matrices + vectors) + 300  # counters, and a placeholder for each array


def test_muon_takes_the_layers_kernels_and_nothing_else():
    for model in (TIED, HEAD, replace(TIED, scan_layers=False)):
        dimensions = jax.tree_util.tree_leaves_with_path(
            muon_dimensions(matrix_axes)(param_shapes(model)), is_leaf=lambda x: x is None
        )
        chosen = ["/".join(key.key for key in path if hasattr(key, "key")) for path, axes in dimensions if axes is not None]
        kernels = {"/".join(name.split("/")[-2:]) for name in chosen}
        mlp = {"wi_0/kernel", "wi_1/kernel", "wo/kernel"} if model is HEAD else {"wi_0/kernel", "wo/kernel"}
        assert {name for name in kernels if "/" in name} >= {
            "query/kernel",
            "key/kernel",
            "value/kernel",
            "out/kernel",
        } | mlp
        assert all(name.startswith("layers/") for name in chosen)


@pytest.mark.full
def test_muon_orthogonalizes_each_layer_of_a_stack():
    """The update of a stack is that of its layers one by one, and a projection's singular values come out equal."""
    train = replace(TRAIN, optimizer="muon", weight_decay=0.0, learning_rate=1.0)
    shapes, generator = param_shapes(TIED), np.random.default_rng(0)
    attention = {name: shapes["layers"]["attention"][name] for name in ("query", "out")}
    stacked = {"embedding": shapes["embedding"], "layers": {"attention": attention}}
    params, grads = (jax.tree.map(lambda leaf: generator.standard_normal(leaf.shape, np.float32), stacked) for _ in range(2))

    def unrolled(tree):
        layers = {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]) for i in range(TIED.num_layers)}
        return {**tree, "layers": layers}

    @quick_jit
    def update(params, grads):
        optimizer = make_optimizer(train, matrix_axes)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    def spread(kernel) -> float:
        """The largest singular value over the second smallest one."""
        singular = np.linalg.svd(np.reshape(kernel, (16, 16)), compute_uv=False)
        return singular[0] / singular[-2]

    got = update(params, grads)
    assert difference(unrolled(got), update(unrolled(params), unrolled(grads))) < 1e-5
    for name in ("query", "out"):
        for layer in got["layers"]["attention"][name]["kernel"]:
            assert spread(layer) < 2  # about one after five steps of Newton-Schulz, but for the very smallest
    assert spread(grads["layers"]["attention"]["query"]["kernel"][0]) > 4


def test_schedules():
    def at(step, **changes):
        rate = make_schedule(replace(TRAIN, learning_rate=1.0, decay_steps=110, **changes))
        return float(np.asarray(rate(step) if callable(rate) else rate))

    assert at(0) == at(10**6) == 1.0
    assert [at(step, warmup_steps=10) for step in (0, 5, 10, 10**6)] == [0.0, 0.5, 1.0, 1.0]
    linear = [at(step, schedule="linear", warmup_steps=10) for step in (0, 5, 10, 60, 110, 500)]
    assert linear == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])
    cosine = [at(step, schedule="cosine", warmup_steps=10) for step in (0, 10, 60, 110, 500)]
    assert cosine == pytest.approx([0.0, 1.0, 0.5, 0.0, 0.0], abs=1e-7)


def test_clipping_scales_the_gradient():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    optimizer = make_optimizer(replace(TRAIN, optimizer="sgd-momentum", weight_decay=0.0, learning_rate=1.0, clip_norm=0.5))
    norm = quick_jit(lambda tree: optax.tree.norm(optimizer.update(tree, optimizer.init(tree), tree)[0]))
    assert float(norm(params)) == pytest.approx(0.5, rel=1e-5)


# Microbatches and dtypes.


@pytest.mark.full
def test_microbatches_are_one_batch():
    """Sums in another order: the loss within 1e-6, the gradients (read off SGD's momentum) within 2e-6 of the largest."""
    train = replace(TRAIN, optimizer="sgd-momentum", loss="chunked:7")
    (whole, (whole_loss,)), (parts, (parts_loss,)) = (
        train_for(replace(train, accumulate=accumulate), steps=1, batch=12 // accumulate) for accumulate in (1, 3)
    )
    assert parts_loss == pytest.approx(whole_loss, rel=1e-6)
    assert difference(parts.opt_state, whole.opt_state) < 2e-6
    assert difference(parts.params, whole.params) < 2e-6


def test_a_batch_that_microbatches_do_not_divide_is_rejected():
    state, _ = decoder_args(TIED, TRAIN, 4)
    step = decoder_step(TIED, replace(TRAIN, accumulate=3), "none")
    with pytest.raises(AssertionError):
        jax.eval_shape(step, state, jax.ShapeDtypeStruct((4, SEQ + 1), "int32"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype", "accumulate"),
    [("float32", "bfloat16", 1), ("bfloat16", "float32", 2), ("bfloat16", None, 1)],
)
def test_dtypes_train_and_stay(param_dtype, grad_dtype, accumulate):
    model = replace(TIED, dtype="bfloat16", param_dtype=param_dtype)
    train = TrainConfig(seq_len=SEQ, grad_dtype=grad_dtype, accumulate=accumulate, learning_rate=1e-2)
    state, losses = train_for(train, model, steps=4)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(param_dtype)}
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.full
def test_gradients_in_bfloat16_are_near_those_in_float32():
    got, want = (
        train_for(replace(TRAIN, optimizer="sgd-momentum", grad_dtype=dtype), replace(TIED, dtype="bfloat16"), steps=1)[0]
        for dtype in ("bfloat16", None)
    )
    assert difference(got.opt_state, want.opt_state) < 2e-2
