"""A GPT in Flax NNX: `nnx.split` takes the parameters out of the model, and `nnx.merge` puts them back inside the loss.

NNX writes no scopes into the program. jaxremat finds the layers as a sequence of equations that is repeated::

    python -m jaxremat.run --model examples/nnx_transformer.py:workload --policy none nothing dots auto --batch 8
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxremat


class Block(nnx.Module):
    """A layer: causal attention and an MLP."""

    def __init__(self, width, num_heads, dtype, rngs):
        self.num_heads = num_heads
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        heads = (*x.shape[:2], self.num_heads, -1)
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        y = jax.nn.dot_product_attention(q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Tokens to logits."""

    def __init__(self, vocab_size, seq_len, num_layers, width, num_heads, dtype, rngs):
        self.embed = nnx.Embed(vocab_size, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(seq_len, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, num_heads, dtype, rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def workload(
    batch: int = 8,
    seq_len: int = 1024,
    vocab_size: int = 50257,
    num_layers: int = 12,
    width: int = 768,
    num_heads: int = 12,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy, with the share of tokens guessed right as an auxiliary value."""

    def make(key):
        return GPT(vocab_size, seq_len, num_layers, width, num_heads, jnp.dtype(dtype), nnx.Rngs(key))

    def init(key):
        return nnx.state(make(key), nnx.Param)

    graph, params = nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Param)

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
        accuracy = (logits.argmax(-1) == tokens[:, 1:]).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), {"accuracy": accuracy}

    return jaxremat.Workload(
        loss=loss,
        params=params,
        batch=jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32),
        init=init,
        num_tokens=batch * seq_len,
    )
