"""The parts of a decoder layer in Flax Linen: norm, attention, MLP. The tensors that MaxText names have the same names here.

The end of a variable's name gives its shape. For example, `q_BTNH` has the shape [batch, sequence, query heads, head_dim].
The letters are: B batch, T sequence, D embed_dim, N query heads, K key/value heads, H head_dim, F mlp_dim, V vocab_size.
"""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxremat.config import ModelConfig
from jaxremat.mesh.sharding import on_mesh
from jaxremat.model.experts import Experts
from jaxremat.policy import maxtext

#: The logical axes of the residual stream `[B, T, D]` on a mesh.
RESIDUAL = ("batch", "sequence", None)
_INIT = nn.initializers.normal(0.02)


class Norm(nn.Module):
    """A norm: LayerNorm (`layernorm`), RMSNorm (`rmsnorm`), or RMSNorm that multiplies by 1 + scale (`rmsnorm-1p`).

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


def rope(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021) in the half-split layout of Llama. The position of row t is t.

    Input and output are `[B, T, heads, H]` with an even H.
    """
    half = x_BTNH.shape[-1] // 2
    angles_TH = jnp.arange(x_BTNH.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles_TH)[None, :, None, :], jnp.cos(angles_TH)[None, :, None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


class SelfAttention(nn.Module):
    """Causal self-attention with grouped key/value heads.

    Attributes:
        config: the sizes.
        implementation: `xla` or `cudnn`, never `auto`.
    """

    config: ModelConfig
    implementation: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        c = self.config

        def project(name: str, num_heads: int, heads: str) -> jax.Array:
            projected = nn.DenseGeneral(
                (num_heads, c.head_dim),
                use_bias=c.use_bias,
                name=name,
                kernel_init=_INIT,
                dtype=c.dtype,
                param_dtype=c.param_dtype,
            )(x_BTD)
            return on_mesh(projected, "batch", "sequence", heads, None)

        q_BTNH, k_BTKH, v_BTKH = (
            project("query", c.num_heads, "heads"),
            project("key", c.num_kv_heads, "kv_heads"),
            project("value", c.num_kv_heads, "kv_heads"),
        )
        if c.qk_norm:
            q_BTNH = Norm(c, "rmsnorm", name="query_norm")(q_BTNH)
            k_BTKH = Norm(c, "rmsnorm", name="key_norm")(k_BTKH)
        if c.positions == "rope":
            q_BTNH, k_BTKH = rope(q_BTNH, c.rope_theta), rope(k_BTKH, c.rope_theta)
        q_BTNH = checkpoint_name(q_BTNH, maxtext.QUERY_PROJ)
        k_BTKH = checkpoint_name(k_BTKH, maxtext.KEY_PROJ)
        v_BTKH = checkpoint_name(v_BTKH, maxtext.VALUE_PROJ)
        context_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn" if self.implementation == "cudnn" else "xla"
        )
        context_BTNH = on_mesh(context_BTNH, "batch", "sequence", "heads", None)
        context_BTNH = checkpoint_name(context_BTNH, maxtext.CONTEXT)
        out_BTD = nn.DenseGeneral(
            c.embed_dim,
            axis=(-2, -1),
            use_bias=c.use_bias,
            name="out",
            kernel_init=_INIT,
            dtype=c.dtype,
            param_dtype=c.param_dtype,
        )(context_BTNH)
        return checkpoint_name(on_mesh(out_BTD, *RESIDUAL), maxtext.OUT_PROJ)


class Mlp(nn.Module):
    """The MLP: with GELU, or gated (SwiGLU, GeGLU)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        c = self.config

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(
                features, use_bias=c.use_bias, name=name, kernel_init=_INIT, dtype=c.dtype, param_dtype=c.param_dtype
            )

        def wide(name: str) -> jax.Array:
            return on_mesh(dense(c.mlp_dim, name)(x_BTD), "batch", "sequence", "mlp")

        activation = nn.silu if c.mlp == "swiglu" else nn.gelu
        h_BTF = activation(checkpoint_name(wide("wi_0"), maxtext.MLPWI_0))
        if c.mlp != "gelu":
            h_BTF = h_BTF * checkpoint_name(wide("wi_1"), maxtext.MLPWI_1)
        return checkpoint_name(on_mesh(dense(c.embed_dim, "wo")(h_BTF), *RESIDUAL), maxtext.MLPWO)


def layer_input(config: ModelConfig, x_BTD: jax.Array) -> Any:
    """What the first layer gets: the residual stream `x_BTD`, and in a model with experts their use so far, zeros `[2, E]`."""
    return (x_BTD, jnp.zeros((2, config.num_experts), jnp.float32)) if config.has_experts else x_BTD


class Block(nn.Module):
    """One decoder layer: pre-norm attention and MLP on a residual stream.

    It can be used in any model: `nn.scan(jaxremat.remat(Block, "dots", in_scan=True), ...)`, or
    `jaxremat.Layers(Block(config), ...)`.

    Attributes:
        config: the sizes.
        implementation: `xla` or `cudnn` attention.
        deterministic: True switches dropout off. Otherwise a `dropout` key is needed where `config.dropout` > 0.
    """

    config: ModelConfig
    implementation: str = "xla"
    deterministic: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """`[B, T, D]` to `[B, T, D]`, in the compute dtype.

        With experts, `x` is a pair as `layer_input` makes it, and so is the result: each layer adds the use of its experts.
        """
        c = self.config
        x_BTD, use_2E = x if c.has_experts else (x, 0)
        chex.assert_rank(x_BTD, 3)
        chex.assert_axis_dimension(x_BTD, -1, c.embed_dim)
        drop = nn.Dropout(c.dropout, deterministic=self.deterministic)
        x_BTD = checkpoint_name(on_mesh(x_BTD, *RESIDUAL), maxtext.DECODER_LAYER_INPUT)
        h_BTD = SelfAttention(c, self.implementation, name="attention")(Norm(c, c.norm, name="attention_norm")(x_BTD))
        x_BTD = x_BTD + drop(h_BTD)
        h_BTD = Norm(c, c.norm, name="mlp_norm")(x_BTD)
        if not c.has_experts:
            return on_mesh(x_BTD + drop(Mlp(c, name="mlp")(h_BTD)), *RESIDUAL)
        h_BTD, own_2E = Experts(c, name="mlp")(h_BTD)
        return on_mesh(x_BTD + drop(h_BTD), *RESIDUAL), use_2E + own_2E
