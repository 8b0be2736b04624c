"""An encoder and a decoder in Flax Linen, as for translation: two kinds of layers, which share one budget.

Each decoder layer also reads the encoder's output. jaxremat finds both kinds by their scopes, `EncoderLayer_0`,
`DecoderLayer_0` and so on. The sizes are T5-small's::

    python -m jaxremat.run --model examples/encoder_decoder.py:workload --policy none nothing dots auto --batch 16
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


def make_mlp(width, dtype):
    """Two matmuls."""
    return nn.Sequential([nn.Dense(4 * width, dtype=dtype), nn.relu, nn.Dense(width, dtype=dtype)])


class EncoderLayer(nn.Module):
    """A layer of the encoder. `mask` says which source tokens aren't padding."""

    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(self.num_heads, use_bias=False, dtype=self.dtype)
        x = x + attention(nn.RMSNorm(dtype=self.dtype)(x), mask=mask)
        return x + make_mlp(x.shape[-1], self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


class DecoderLayer(nn.Module):
    """A layer of the decoder, which also reads the encoder's output `encoded`."""

    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, x, encoded, causal, mask):
        own = nn.MultiHeadDotProductAttention(self.num_heads, use_bias=False, dtype=self.dtype)
        cross = nn.MultiHeadDotProductAttention(self.num_heads, use_bias=False, dtype=self.dtype)
        x = x + own(nn.RMSNorm(dtype=self.dtype)(x), mask=causal)
        x = x + cross(nn.RMSNorm(dtype=self.dtype)(x), encoded, mask=mask)
        return x + make_mlp(x.shape[-1], self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


class Translator(nn.Module):
    """Source and target tokens to the logits of the target."""

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(self.vocab_size, self.width, dtype=self.dtype)
        mask, causal = (source != 0)[:, None, None, :], nn.make_causal_mask(target)
        positions = self.param("positions", nn.initializers.normal(0.02), (source.shape[1], self.width))
        x, y = embed(source) + positions.astype(self.dtype), embed(target) + positions.astype(self.dtype)
        for _ in range(self.num_layers):
            x = EncoderLayer(self.num_heads, self.dtype)(x, mask)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        for _ in range(self.num_layers):
            y = DecoderLayer(self.num_heads, self.dtype)(y, x, causal, mask)
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(y))


def workload(
    batch: int = 16,
    seq_len: int = 512,
    vocab_size: int = 32128,
    num_layers: int = 6,
    width: int = 512,
    num_heads: int = 8,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next target token's cross-entropy, given the source. Token 0 is padding."""
    model = Translator(vocab_size, num_layers, width, num_heads, dtype)

    def init(key):
        tokens = jnp.zeros((1, seq_len), jnp.int32)
        return model.init(key, tokens, tokens)["params"]

    def loss(params, batch):
        source, target, labels = batch["source"], batch["target"][:, :-1], batch["target"][:, 1:]
        logits = model.apply({"params": params}, source, target).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(where=labels != 0)

    shapes = {"source": (batch, seq_len), "target": (batch, seq_len + 1)}
    tokens = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    params = jax.eval_shape(init, jax.random.key(0))
    return jaxremat.Workload(loss=loss, params=params, batch=tokens, init=init, num_tokens=2 * batch * seq_len)
