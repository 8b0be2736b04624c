"""A GPT in Equinox, written for one sequence and mapped over the batch with `jax.vmap`, with dropout.

Equinox writes no scopes into the program. jaxremat finds the layers as a sequence of equations that is repeated. The sizes are
those of a model of TinyStories, of 28 million parameters and its vocabulary::

    python -m jaxremat.run --model examples/equinox_transformer.py:workload --policy none nothing dots auto --batch 8
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Block(eqx.Module):
    """A layer: causal attention and an MLP with dropout, for one sequence [length, width]."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, num_heads, dropout, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(num_heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x, key):
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask)
        y = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x))))
        return x + self.dropout(y, key=key)


class GPT(eqx.Module):
    """Tokens to logits, for one sequence."""

    embed: eqx.nn.Embedding
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocab_size, seq_len, num_layers, width, num_heads, dropout, key):
        keys = jax.random.split(key, num_layers + 3)
        self.embed = eqx.nn.Embedding(vocab_size, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (seq_len, width))
        self.blocks = [Block(width, num_heads, dropout, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocab_size, use_bias=False, key=keys[2])

    def __call__(self, tokens, key):
        x = jax.vmap(self.embed)(tokens) + self.positions
        for block, block_key in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, block_key)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def workload(
    batch: int = 8,
    seq_len: int = 512,
    vocab_size: int = 50257,
    num_layers: int = 8,
    width: int = 512,
    num_heads: int = 16,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy, computed on parameters cast to `dtype`."""

    def init(key):
        return eqx.filter(GPT(vocab_size, seq_len, num_layers, width, num_heads, dropout, key), eqx.is_array)

    model = eqx.filter_eval_shape(GPT, vocab_size, seq_len, num_layers, width, num_heads, dropout, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params, tokens, key):
        model = eqx.combine(jax.tree.map(lambda param: param.astype(dtype), params), static)
        logits = jax.vmap(model)(tokens[:, :-1], jax.random.split(key, tokens.shape[0]))
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    batch_struct = jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32)
    return jaxremat.Workload(loss=loss, params=params, batch=batch_struct, init=init, num_tokens=batch * seq_len)
