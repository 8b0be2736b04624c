"""FLOPs of a step are counted twice, from the compiled HLO and from the jaxpr, and both are what a hand count says."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxremat.xla import hlo
from jaxremat.xla.flops import ExecutedFlops, count_step_flops, executed_flops
from jaxremat.xla.kernels import kernels_of
from tests.gpu_programs import F32, B, D, F, H, L, M, N, T, array, compile_for, compiled_attention

NOTHING = jax.checkpoint_policies.nothing_saveable
SCORES = 2 * B * N * T * T * H  # FLOPs of one matmul over the scores, no mask
PROJECTION = 2 * (B * T) * (N * H) ** 2


def both_counts(compiled):
    """The HLO's count, after checking that the jaxpr's has the same FLOPs and attention calls."""
    module, jaxpr = compiled
    executed, asked = executed_flops(module), count_step_flops(jaxpr)
    for key in ("matmul_flops", "attention_flops", "convolution_flops", "num_attention_forward", "num_unknown_loops"):
        assert getattr(executed, key) == getattr(asked, key), key
    assert executed.num_attention_backward == asked.num_attention_backward
    assert sum(k.flops * k.count for k in kernels_of(module)) == executed.total
    return executed


@functools.cache
def compiled_mlp(target, policy):
    """Forward and backward of L residual MLPs in a scan."""

    def layer(w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    def loss(w, x):
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return (jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0].astype(F32) ** 2).sum()

    return compile_for(target, jax.grad(loss), {"up": array(L, D, F), "down": array(L, F, D)}, array(M, D))


def save_attention(prim, *_, **__):
    return prim.name == "dot_product_attention_fwd_wrapper"


@pytest.mark.full
def test_a_matmul(h100):
    compiled = module, _ = compile_for(h100, lambda x, w: x @ w, array(4096, D), array(D, F))
    assert both_counts(compiled) == ExecutedFlops(matmul_flops=2 * 4096 * D * F, num_matmuls=1)
    (kernel,) = [k for k in kernels_of(module) if k.flops]
    assert (kernel.dtype, kernel.count) == ("bf16", 1)
    assert kernel.bytes_read == 2 * (4096 * D + D * F)
    assert kernel.bytes_written == 2 * 4096 * F
    assert kernel.host_bytes == 0


@pytest.mark.full
def test_a_batched_float32_einsum(h100):
    f = functools.partial(jnp.einsum, "bmk,bnk->bmn")
    compiled = module, _ = compile_for(h100, f, array(8, M, D, dtype=F32), array(8, F, D, dtype=F32))
    assert both_counts(compiled).matmul_flops == 2 * 8 * M * F * D
    assert {k.dtype for k in kernels_of(module) if k.flops} == {"f32"}


@pytest.mark.full
@pytest.mark.parametrize(("policy", "num_matmuls"), [(NOTHING, 2 + 4 + 1), (jax.checkpoint_policies.dots_saveable, 2 + 4)])
def test_layers_in_a_scan_recompute_what_the_policy_drops(policy, num_matmuls, h100):
    """Forward 2, backward 4; the second matmul of a layer is never needed again, so at most 1 recomputed."""
    executed = both_counts(compiled_mlp(h100, policy))
    assert executed.matmul_flops == L * num_matmuls * 2 * M * D * F
    assert executed.num_matmuls == L * num_matmuls
    assert executed.num_unknown_loops == 0


@pytest.mark.full
@pytest.mark.parametrize(("policy", "num_forward"), [(NOTHING, 2), (save_attention, 1)])
def test_cudnn_attention_saved_or_recomputed(policy, num_forward, h100):
    executed = both_counts(compiled_attention(h100, policy))
    assert (executed.num_attention_forward, executed.num_attention_backward) == (L * num_forward, L)
    assert executed.attention_flops == L * (2 * num_forward + 5) * SCORES // 2
    # 4 projections forward, 8 backward, and q, k, v again; the tanh after `o` needs its own matmul again too.
    assert executed.matmul_flops == L * (4 + 8 + 4) * PROJECTION


@pytest.mark.full
def test_cudnn_attention_with_grouped_kv_heads_and_no_mask(h100):
    executed = both_counts(compiled_attention(h100, NOTHING, causal=False, kv_heads=2))
    assert executed.attention_flops == L * (2 * 2 + 5) * SCORES
    assert executed.matmul_flops == L * (4 + 8 + 4) * PROJECTION * 3 // 4  # k and v project to half the heads


@pytest.mark.full
def test_xla_attention_is_counted_as_its_matmuls_mask_or_not(h100):
    executed = both_counts(compiled_attention(h100, NOTHING, implementation="xla", kv_heads=2))
    assert executed.attention_flops == 0
    # Forward 2, recomputed 2, backward 4 over the scores; nothing is halved: XLA multiplies the masked scores too.
    assert executed.matmul_flops == L * ((4 + 8 + 4) * PROJECTION * 3 // 4 + 8 * SCORES)


@pytest.mark.full
def test_a_convolution_and_its_gradients(h100):
    """No padding and windows that use the whole input: the three have the same multiply-adds."""

    def loss(w, x):
        y = jax.lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y.astype(F32)).sum()

    executed = both_counts(compile_for(h100, jax.grad(loss, argnums=(0, 1)), array(3, 3, 64, 128), array(8, 33, 33, 64)))
    assert executed.convolution_flops == 3 * 2 * (8 * 16 * 16) * (3 * 3) * 64 * 128
    assert executed.num_matmuls == 0


def test_a_padded_convolution_does_not_count_the_padding():
    f = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    jaxpr = jax.make_jaxpr(f)(jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 4, 16)))
    pairs = 3 * 8 - 2  # along one dimension: 3 taps at 8 positions, one outside at either end
    assert count_step_flops(jaxpr).convolution_flops == 2 * pairs * pairs * 4 * 16


@pytest.mark.full
def test_a_loop_of_unknown_length_counts_once_and_is_reported(h100):
    def f(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: jnp.tanh(x @ w), x)

    executed = both_counts(compile_for(h100, f, array(M, D), array(D, D)))
    assert executed.num_unknown_loops == 1
    assert executed.matmul_flops == 2 * M * D * D


@pytest.mark.full
def test_a_conditional_counts_its_largest_branch(h100):
    def f(flag, x, w):
        return jax.lax.cond(flag, lambda x: x @ w @ w.T @ w, lambda x: jnp.sin(x @ w), x)

    executed = both_counts(compile_for(h100, f, array(dtype=jnp.bool_), array(M, D), array(D, D)))
    assert executed.matmul_flops == 3 * 2 * M * D * D


def test_the_jaxpr_count_opens_custom_derivatives_and_nested_jit():
    @jax.custom_vjp
    def twice(x, w):
        return x @ w @ w

    twice.defvjp(lambda x, w: (twice(x, w), None), lambda *_: (None, None))
    once = jax.custom_jvp(lambda x, w: jax.jit(jnp.matmul)(x, w))
    once.defjvps(None, None)
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    jaxpr = jax.make_jaxpr(lambda x, w: once(twice(x, w), w))(x, w)
    assert count_step_flops(jaxpr) == ExecutedFlops(matmul_flops=3 * 2 * 8 * 16 * 16, num_matmuls=3)


@pytest.mark.full
def test_a_cpu_program_is_counted_too():
    f = lambda x, w: jnp.tanh(x @ w) @ w.T  # noqa: E731
    text = jax.jit(f).lower(jnp.ones((256, D)), jnp.ones((D, F))).compile().as_text()
    assert text
    assert executed_flops(hlo.parse(text)).matmul_flops == 2 * 2 * 256 * D * F
