"""Nine blocks that aren't the decoder's, as other people write them, for `experiments.foreign_blocks`.

Each is a layer of a Flax model of its own: `block(x)`, or `block(x, memory)` for the one that reads an encoder's output.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

HEADS = 16


def attend(x: Any, memory: Any, *, causal: bool, plain: bool) -> Any:
    """Attention of `x` to `memory`, without the projection of its output: fused, or as the softmax of a product."""
    width = x.shape[-1]
    heads = (HEADS, width // HEADS)
    q, k, v = (nn.DenseGeneral(heads, dtype=x.dtype)(source) for source in (x, memory, memory))
    if not plain:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
    else:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / heads[1] ** 0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else True
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(v.dtype), v)
    return out.reshape(x.shape)


class Attention(nn.Module):
    """Self-attention, or attention to `memory`."""

    plain: bool = False
    causal: bool = True

    @nn.compact
    def __call__(self, x: Any, memory: Any = None) -> Any:
        y = attend(x, x if memory is None else memory, causal=self.causal and memory is None, plain=self.plain)
        return nn.Dense(x.shape[-1], dtype=x.dtype, name="out")(y)


class Mlp(nn.Module):
    """Two matmuls with a GELU between them."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=x.dtype, name="up")(x))
        return nn.Dense(x.shape[-1], dtype=x.dtype, name="down")(h)


class PostNorm(nn.Module):
    """The norms come after the residual additions, as in the first Transformer and in BERT."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(dtype=x.dtype)(x + Attention()(x))
        return nn.LayerNorm(dtype=x.dtype)(x + Mlp()(x))


class Parallel(nn.Module):
    """Attention and MLP read the same norm, as in GPT-J and PaLM."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.LayerNorm(dtype=x.dtype)(x)
        return x + Attention()(y) + Mlp()(y)


class Float32Stream(nn.Module):
    """The residual stream stays in float32, and the matmuls run in bfloat16."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + Attention()(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)
        return x + Mlp()(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


class PlainSoftmax(nn.Module):
    """Attention without a fused kernel, as in NanoDO. Every probability is a value of its own."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + Attention(plain=True)(nn.LayerNorm(dtype=x.dtype)(x))
        return x + Mlp()(nn.LayerNorm(dtype=x.dtype)(x))


class Convolution(nn.Module):
    """ConvNeXt's block: a depthwise convolution, then an MLP over the channels."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        channels = x.shape[-1]
        y = nn.Conv(channels, (7, 7), feature_group_count=channels, dtype=x.dtype)(x)
        return x + Mlp()(nn.LayerNorm(dtype=x.dtype)(y))


class Bottleneck(nn.Module):
    """ResNet's block with BatchNorm, whose statistics are of the batch."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        channels, y = x.shape[-1], x
        for features, size in ((channels // 4, 1), (channels // 4, 3), (channels, 1)):
            y = nn.Conv(features, (size, size), use_bias=False, dtype=x.dtype)(y)
            y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=x.dtype)(y))
        return x + y


class Experts(nn.Module):
    """Four experts of which each token takes the best two, computed densely."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + Attention()(nn.LayerNorm(dtype=x.dtype)(x))
        y, width = nn.LayerNorm(dtype=x.dtype)(x), x.shape[-1]
        up = self.param("up", nn.initializers.lecun_normal(), (4, width, 2 * width)).astype(x.dtype)
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * width, width)).astype(x.dtype)
        best, chosen = jax.lax.top_k(nn.Dense(4, dtype=jnp.float32, name="router")(y), 2)
        gates = jnp.einsum("btk,btke->bte", jax.nn.softmax(best), jax.nn.one_hot(chosen, 4)).astype(x.dtype)
        h = nn.silu(jnp.einsum("btd,edf->btef", y, up)) * gates[..., None]
        return x + jnp.einsum("btef,efd->btd", h, down)


class Recurrence(nn.Module):
    """A gated linear recurrence along the sequence, as in Griffin and minGRU."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y, width = nn.RMSNorm(dtype=x.dtype)(x), x.shape[-1]
        gate = nn.sigmoid(nn.Dense(width, dtype=x.dtype, name="gate")(y).astype(jnp.float32))
        value = (1 - gate) * nn.Dense(width, dtype=x.dtype, name="value")(y)

        def join(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        state = jax.lax.associative_scan(join, (gate, value), axis=1)[1].astype(x.dtype)
        x = x + nn.Dense(width, dtype=x.dtype, name="out")(state)
        return x + Mlp()(nn.RMSNorm(dtype=x.dtype)(x))


class CrossAttention(nn.Module):
    """A decoder's layer of an encoder-decoder: it attends to itself and to the encoder's output."""

    @nn.compact
    def __call__(self, x: Any, memory: Any) -> Any:
        x = x + Attention()(nn.LayerNorm(dtype=x.dtype)(x))
        x = x + Attention()(nn.LayerNorm(dtype=x.dtype)(x), memory)
        return x + Mlp()(nn.LayerNorm(dtype=x.dtype)(x))


_TOKENS = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
_PIXELS = jax.ShapeDtypeStruct((64, 28, 28, 512), jnp.bfloat16)
#: By name, the block and the shapes of its arguments.
BLOCKS: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "post-norm": (PostNorm(), (_TOKENS,)),
    "parallel": (Parallel(), (_TOKENS,)),
    "float32 stream": (Float32Stream(), (jax.ShapeDtypeStruct(_TOKENS.shape, jnp.float32),)),
    "plain softmax": (PlainSoftmax(), (_TOKENS,)),
    "convolution": (Convolution(), (_PIXELS,)),
    "BatchNorm": (Bottleneck(), (_PIXELS,)),
    "experts": (Experts(), (_TOKENS,)),
    "gated recurrence": (Recurrence(), (_TOKENS,)),
    "cross-attention": (CrossAttention(), (_TOKENS, _TOKENS)),
}
