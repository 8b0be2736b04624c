"""A Llama-like decoder in Flax Linen, its layers in one loop: `nn.scan` over parameters that are stacked layer by layer.

jaxremat finds the loop and applies the policy inside its body. The positions are an input that all layers read. The sizes are
SmolLM-135M's::

    python -m jaxremat.run --model examples/linen_scan.py:workload --policy none nothing dots auto --batch 8
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


def rotate(x, positions):
    """Rotary position embeddings of `x`, an array [batch, length, heads, head_dim]."""
    angles = positions[:, :, None, None] / 10_000 ** jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Block(nn.Module):
    """A layer: attention with rotary positions and grouped heads, then a gated MLP."""

    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    dtype: str

    @nn.compact
    def __call__(self, x, positions):
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        width, head_dim = x.shape[-1], x.shape[-1] // self.num_heads
        y = nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x)
        q = rotate(dense((self.num_heads, head_dim), name="query")(y), positions)
        k = rotate(dense((self.num_kv_heads, head_dim), name="key")(y), positions)
        v = dense((self.num_kv_heads, head_dim), name="value")(y)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(width, axis=(-2, -1), name="out")(y)
        y = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x)
        y = nn.silu(dense(self.mlp_dim, name="gate")(y)) * dense(self.mlp_dim, name="up")(y)
        return x + dense(width, name="down")(y), None


class Llama(nn.Module):
    """Tokens to logits, through layers in one loop."""

    vocab_size: int
    num_layers: int
    width: int
    block: dict

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab_size, self.width, dtype=self.block["dtype"])
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        loop = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
        layers = nn.scan(Block, length=self.num_layers, **loop)(**self.block, name="layers")
        x, _ = layers(embed(tokens), positions)
        return embed.attend(nn.RMSNorm(dtype=self.block["dtype"])(x))


def workload(
    batch: int = 8,
    seq_len: int = 1024,
    vocab_size: int = 49152,
    num_layers: int = 30,
    width: int = 576,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    mlp_dim: int = 1536,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy."""
    block = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "mlp_dim": mlp_dim, "dtype": dtype}
    model = Llama(vocab_size, num_layers, width, block)

    def init(key):
        return model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]

    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    params, tokens = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32)
    return jaxremat.Workload(loss=loss, params=params, batch=tokens, init=init, num_tokens=batch * seq_len)
