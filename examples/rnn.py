"""An LSTM over time in Flax Linen, `nn.RNN` in two layers: each step's values wait for the backward pass.

jaxremat takes the steps in time for layers. `nothing` saves the state of each step, and `every:K` that of each K-th::

    python -m jaxremat.run --model examples/rnn.py:workload --policy none nothing every:32 dots auto --batch 128
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Characters(nn.Module):
    """Characters [batch, time] to logits [batch, time, characters]."""

    num_characters: int
    num_layers: int
    width: int
    dtype: str

    @nn.compact
    def __call__(self, characters):
        x = nn.Embed(self.num_characters, self.width, dtype=self.dtype)(characters)
        for _ in range(self.num_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.num_characters, dtype=self.dtype)(x)


def workload(
    batch: int = 128,
    seq_len: int = 1024,
    num_characters: int = 256,
    num_layers: int = 2,
    width: int = 1024,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next character's cross-entropy."""
    model = Characters(num_characters, num_layers, width, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, 2), jnp.int32))

    def loss(params, characters):
        logits = model.apply(params, characters[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, characters[:, 1:]).mean()

    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32),
        init=init,
        num_tokens=batch * seq_len,
    )
