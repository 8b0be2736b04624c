"""A GPT in Flax Linen, its layers called one after the other in a Python loop: `Block_0`, `Block_1` and so on.

Linen writes these names into the traced program as scopes, and jaxremat finds the layers by them. The sizes are GPT-2's::

    python -m jaxremat.run --model examples/linen_unrolled.py:workload --policy none nothing dots auto --batch 8
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Block(nn.Module):
    """A layer: causal attention and an MLP, each with dropout."""

    num_heads: int
    dropout: float
    dtype: str

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        heads = (*x.shape[:2], self.num_heads, width // self.num_heads)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = jnp.split(nn.Dense(3 * width, dtype=self.dtype, name="qkv")(y), 3, axis=-1)
        y = jax.nn.dot_product_attention(q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True)
        y = nn.Dense(width, dtype=self.dtype, name="out")(y.reshape(x.shape))
        x = x + nn.Dropout(self.dropout, deterministic=False)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(y))
        y = nn.Dense(width, dtype=self.dtype, name="down")(y)
        return x + nn.Dropout(self.dropout, deterministic=False)(y)


class GPT(nn.Module):
    """Tokens to logits, through layers in a Python loop."""

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    dropout: float
    dtype: str

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab_size, self.width, dtype=self.dtype)
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = embed(tokens) + positions.astype(self.dtype)
        for _ in range(self.num_layers):
            x = Block(self.num_heads, self.dropout, self.dtype)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def workload(
    batch: int = 8,
    seq_len: int = 1024,
    vocab_size: int = 50257,
    num_layers: int = 12,
    width: int = 768,
    num_heads: int = 12,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy, with a key for dropout."""
    model = GPT(vocab_size, num_layers, width, num_heads, dropout, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]

    def loss(params, tokens, key):
        logits = model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32),
        init=init,
        num_tokens=batch * seq_len,
    )
