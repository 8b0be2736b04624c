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


class MLP(nn.Module):
    """Two matmuls."""

    dtype: str

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.Dense(4 * x.shape[-1], use_bias=False, dtype=self.dtype, name="up")(x))
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(y)


class EncoderLayer(nn.Module):
    """A layer of the encoder. `mask` says which source tokens aren't padding."""

    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(self.num_heads, use_bias=False, dtype=self.dtype)
        x = x + attention(nn.RMSNorm(dtype=self.dtype)(x), mask=mask)
        return x + MLP(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


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
        return x + MLP(self.dtype)(nn.RMSNorm(dtype=self.dtype)(x))


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


def workload(batch=16, seq_len=512, vocab_size=32128, num_layers=6, width=512, num_heads=8, dtype="bfloat16"):
    """What is trained: the next target token's cross-entropy, given the source. Token 0 is padding."""
    model = Translator(vocab_size, num_layers, width, num_heads, dtype)

    def init(key):
        tokens = jnp.zeros((1, seq_len), jnp.int32)
        return model.init(key, tokens, tokens)["params"]

    def loss(params, batch):
        source, target, labels = batch["source"], batch["target"][:, :-1], batch["target"][:, 1:]
        logits = model.apply({"params": params}, source, target).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(where=labels != 0)

    source, target = (jax.ShapeDtypeStruct((batch, length), jnp.int32) for length in (seq_len, seq_len + 1))
    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch={"source": source, "target": target},
        init=init,
        num_tokens=2 * batch * seq_len,
    )
