"""The parts of a decoder layer in Flax Linen: norm, attention, MLP.

The tensors that MaxText names have the same names here.

The end of a variable's name gives its shape. For example, `q_BTNH` has the shape [batch, sequence, query heads, head_dim].
The letters are: B batch, T sequence, D embed_dim, N query heads, K key/value heads, H head_dim, F mlp_dim, V vocab_size.
"""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxremat.chips.catalog import fused_attention
from jaxremat.config import ModelConfig
from jaxremat.config.rope import parse_rope_scaling
from jaxremat.mesh.sharding import on_mesh
from jaxremat.model.attention import attend_fused, traced_attention, xla_attention
from jaxremat.model.experts import Experts, activation
from jaxremat.model.linear import linear
from jaxremat.policy import maxtext

#: The logical axes of the residual stream `[B, T, D]` on a mesh.
RESIDUAL = ("batch", "sequence", None)


class Norm(nn.Module):
    """A norm: `layernorm`, `rmsnorm`, or `rmsnorm-1p`, which multiplies by 1 + scale.

    Statistics are computed in float32. The output is in the compute dtype.
    """

    config: ModelConfig
    kind: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """`x_BTD` normalized over its last axis; same shape."""
        c = self.config
        shape, param_dtype = (x_BTD.shape[-1],), jnp.dtype(c.param_dtype)
        x = x_BTD.astype(jnp.float32)
        if self.kind == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + c.norm_eps)
        one_plus = self.kind == "rmsnorm-1p"
        scale = self.param("scale", nn.initializers.zeros if one_plus else nn.initializers.ones, shape, param_dtype)
        x = x * (scale.astype(jnp.float32) + one_plus)
        if self.kind == "layernorm" and c.use_bias:
            x = x + self.param("bias", nn.initializers.zeros, shape, param_dtype).astype(jnp.float32)
        return x.astype(c.dtype)


def rope(x_BTNH: jax.Array, theta: float, rotary_dim: int | None = None, scaling: str = "") -> jax.Array:
    """Rotary position embedding (Su et al.

    2021) in the half-split layout of Llama. The position of row t is t.

    Args:
        x_BTNH: `[B, T, heads, H]`. The result has the same shape.
        theta: the base wavelength.
        rotary_dim: how many features of a head are turned, an even number. They are the first ones. None turns all.
        scaling: how the frequencies are stretched, as `parse_rope_scaling` reads it.
    """
    if rotary_dim not in (None, x_BTNH.shape[-1]):
        turned, passed = jnp.split(x_BTNH, [rotary_dim], axis=-1)
        return jnp.concatenate([rope(turned, theta, scaling=scaling), passed], axis=-1)
    half = x_BTNH.shape[-1] // 2
    angles_TH, factor = jnp.arange(x_BTNH.shape[1])[:, None] * theta ** (-jnp.arange(half) / half), 1.0
    if stretching := parse_rope_scaling(scaling):
        stretched = stretching.at(theta=theta, dim=2 * half, seq_len=x_BTNH.shape[1])
        angles_TH, factor = angles_TH / jnp.asarray(stretched.divisors), stretched.attention_factor
    sin, cos = jnp.sin(angles_TH)[None, :, None, :], jnp.cos(angles_TH)[None, :, None, :]
    if factor != 1:
        sin, cos = sin * factor, cos * factor
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def own_windows(config: ModelConfig, seq_len: int) -> jax.Array | None:
    """For each layer, the tokens that a token sees, `int32[num_layers]`.

    None where that number is the same in all layers.
    """
    windows = config.windows(seq_len)
    return None if len(set(windows)) == 1 else jnp.asarray(windows, jnp.int32)


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    config: ModelConfig,
    implementation: str,
    window: jax.Array | None,
) -> jax.Array:
    """Causal attention `[B, T, N, H]`, with the window, the scale and the soft-cap of `config`.

    Args:
        q_BTNH: the queries.
        k_BTKH: the keys.
        v_BTKH: the values.
        config: the model.
        implementation: `xla`, or the chip's fused attention, which has no soft-cap and whose window is a constant.
        window: the tokens that a token of this layer sees, a scalar. None where `config` has one window for all layers.
    """
    length = q_BTNH.shape[1]
    fused = fused_attention(implementation)
    if fused and window is None and (fused.has_softcap or not config.attention_softcap):
        return attend_fused(fused, q_BTNH, k_BTKH, v_BTKH, config)
    scale = config.query_pre_attn_scalar**-0.5 if config.query_pre_attn_scalar else None
    if window is None and not config.attention_softcap:
        static = config.windows(length)[0]
        local = (static - 1, 0) if static < length else None
        return xla_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, scale=scale, local_window_size=local)
    distance_TS = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    sees_TS = (distance_TS >= 0) & (distance_TS < (config.windows(length)[0] if window is None else window))
    if not config.attention_softcap:
        return xla_attention(q_BTNH, k_BTKH, v_BTKH, mask=sees_TS[None, None], scale=scale)
    return _capped_attention(q_BTNH, k_BTKH, v_BTKH, sees_TS, scale or config.head_dim**-0.5, config.attention_softcap)


def _capped_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, sees_TS: jax.Array, scale: float, cap: float
) -> jax.Array:
    """Attention whose scores are `cap * tanh(score / cap)`.

    Scores and softmax are in float32, as in jax.nn's attention.
    """
    q_BTKGH = q_BTNH.reshape(*k_BTKH.shape[:3], -1, k_BTKH.shape[3])  # G query heads read one key head
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32) * scale
    scores_BKGTS = jnp.where(sees_TS, cap * jnp.tanh(scores_BKGTS / cap), jnp.finfo(jnp.float32).min)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BTKH).reshape(q_BTNH.shape)


class SelfAttention(nn.Module):
    """Causal self-attention with grouped key/value heads.

    Attributes:
        config: the sizes.
        implementation: `xla`, or the chip's fused attention. None takes `config.attention` (`attention.py`).
        gathers: the checkpoint names of the kernels whose gather a policy decides about (`gathers.py`).
    """

    config: ModelConfig
    implementation: str | None
    gathers: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x_BTD: jax.Array, window: jax.Array | None = None) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`. `window` is as for `attend`."""
        c = self.config

        def project(name: str, num_heads: int, heads: str) -> jax.Array:
            layer = linear(c, (num_heads, c.head_dim), name, self.gathers, bias=c.use_bias or c.qkv_bias)
            return on_mesh(layer(x_BTD), "batch", "sequence", heads, None)

        def normalized(x_BTNH: jax.Array, name: str) -> jax.Array:
            norm, num_axes = Norm(c, "rmsnorm", name=name), 3 if c.qk_norm_over == "head" else 2
            return norm(x_BTNH.reshape(*x_BTNH.shape[:num_axes], -1)).reshape(x_BTNH.shape)

        implementation = self.implementation or traced_attention(c, x_BTD.shape[1])
        q_BTNH, k_BTKH, v_BTKH = (
            project("query", c.num_heads, "heads"),
            project("key", c.num_kv_heads, "kv_heads"),
            project("value", c.num_kv_heads, "kv_heads"),
        )
        if c.qk_norm:
            q_BTNH, k_BTKH = normalized(q_BTNH, "query_norm"), normalized(k_BTKH, "key_norm")
        if c.positions == "rope":
            q_BTNH, k_BTKH = (rope(x, c.rope_theta, c.rotary_dim, c.rope_scaling) for x in (q_BTNH, k_BTKH))
        q_BTNH = checkpoint_name(q_BTNH, maxtext.QUERY_PROJ)
        k_BTKH = checkpoint_name(k_BTKH, maxtext.KEY_PROJ)
        v_BTKH = checkpoint_name(v_BTKH, maxtext.VALUE_PROJ)
        context_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, c, implementation, window)
        context_BTNH = on_mesh(context_BTNH, "batch", "sequence", "heads", None)
        if not ((fused := fused_attention(implementation)) and fused.names_residuals):
            context_BTNH = checkpoint_name(context_BTNH, maxtext.CONTEXT)
        out_BTD = linear(c, c.embed_dim, "out", self.gathers, bias=c.use_bias or c.out_bias, axes=2)(context_BTNH)
        return checkpoint_name(on_mesh(out_BTD, *RESIDUAL), maxtext.OUT_PROJ)


class Mlp(nn.Module):
    """The MLP: with GELU, or gated (SwiGLU, GeGLU). `gathers` is that of `SelfAttention`."""

    config: ModelConfig
    gathers: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        c = self.config

        def dense(features: int, name: str) -> Any:
            return linear(c, features, name, self.gathers, bias=c.use_bias or c.mlp_bias)

        def wide(name: str) -> jax.Array:
            return on_mesh(dense(c.mlp_dim, name)(x_BTD), "batch", "sequence", "mlp")

        h_BTF = activation(c)(checkpoint_name(wide("wi_0"), maxtext.MLPWI_0))
        if c.mlp != "gelu":
            h_BTF = h_BTF * checkpoint_name(wide("wi_1"), maxtext.MLPWI_1)
        return checkpoint_name(on_mesh(dense(c.embed_dim, "wo")(h_BTF), *RESIDUAL), maxtext.MLPWO)


def layer_input(config: ModelConfig, x_BTD: jax.Array) -> Any:
    """What the first layer gets: the residual stream `x_BTD`.

    In a model with experts it also gets their use so far, zeros `[2, E]`.
    """
    return (x_BTD, jnp.zeros((2, config.num_experts), jnp.float32)) if config.has_experts else x_BTD


class Block(nn.Module):
    """One decoder layer: attention and MLP on a residual stream.

    Norms are before them, after them, or both.

    It can be used in any model: `nn.scan(jaxremat.remat(Block, "dots", in_scan=True), ...)`, or
    `jaxremat.Layers(Block(config), ...)`.

    Attributes:
        config: the sizes.
        implementation: `xla`, the chip's fused attention, or None, as for `jaxremat.Decoder`.
        deterministic: True switches dropout off. Otherwise a `dropout` key is needed where `config.dropout` > 0.
        gathers: the checkpoint names of the kernels whose gather a policy decides about, such as `wi_0_gathered` (`gathers.py`).
    """

    config: ModelConfig
    implementation: str | None = None
    deterministic: bool = True
    gathers: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, x: Any, window: jax.Array | None = None) -> Any:
        """`[B, T, D]` to `[B, T, D]`, in the compute dtype.

        `window` is one of `own_windows`, or None if that is None.

        With experts, `x` is a pair as `layer_input` makes it, and so is the result: each layer adds the use of its experts.
        """
        c = self.config
        x_BTD, use_2E = x if c.has_experts else (x, 0)
        chex.assert_rank(x_BTD, 3)
        chex.assert_axis_dimension(x_BTD, -1, c.embed_dim)
        drop = nn.Dropout(c.dropout, deterministic=self.deterministic)
        x_BTD = checkpoint_name(on_mesh(x_BTD, *RESIDUAL), maxtext.DECODER_LAYER_INPUT)

        def before(x_BTD: jax.Array, branch: str) -> jax.Array:
            return x_BTD if c.norm_placement == "post" else Norm(c, c.norm, name=f"{branch}_norm")(x_BTD)

        def after(h_BTD: jax.Array, branch: str) -> jax.Array:
            return h_BTD if c.norm_placement == "pre" else Norm(c, c.norm, name=f"{branch}_post_norm")(h_BTD)

        h_BTD = SelfAttention(c, self.implementation, self.gathers, name="attention")(before(x_BTD, "attention"), window)
        x_BTD = x_BTD + drop(after(h_BTD, "attention"))
        h_BTD = before(x_BTD, "mlp")
        if not c.has_experts:
            return on_mesh(x_BTD + drop(after(Mlp(c, self.gathers, name="mlp")(h_BTD), "mlp")), *RESIDUAL)
        h_BTD, own_2E = Experts(c, name="mlp")(h_BTD)
        return on_mesh(x_BTD + drop(after(h_BTD, "mlp")), *RESIDUAL), use_2E + own_2E
