"""A state-space model in the form of S5: in each layer a linear recurrence of complex states, computed by an associative scan.

JAX can't save complex values in a checkpoint. Under a policy they are recomputed, and a line says so. The sizes are those of the
classification of raw speech commands::

    python -m jaxremat.run --model examples/s5.py:workload --policy none nothing dots auto --batch 16
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


def both(first, second):
    """Two steps of x = a x + b as one."""
    return second[0] * first[0], second[0] * first[1] + second[1]


class Layer(nn.Module):
    """A layer: the recurrence of `num_states` states, then a gate."""

    num_states: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        width, normal = x.shape[-1], nn.initializers.lecun_normal()

        def complex_param(name, *shape):
            real, imag = self.param(name, normal, (2, *shape))
            return real + 1j * imag

        u = nn.LayerNorm()(x).astype(jnp.float32)
        rate = -jnp.exp(self.param("log_rate", nn.initializers.zeros, (self.num_states,)))
        pole = rate + 1j * self.param("frequency", nn.initializers.normal(10), (self.num_states,))
        step = jnp.exp(self.param("log_step", nn.initializers.constant(-5), (self.num_states,)))
        decay = jnp.exp(pole * step)
        driven = (u @ complex_param("b", width, self.num_states)) * ((decay - 1) / pole)
        _, states = jax.lax.associative_scan(both, (jnp.broadcast_to(decay, driven.shape), driven), axis=1)
        y = (states @ complex_param("c", self.num_states, width)).real + self.param(
            "d", nn.initializers.normal(1), (width,)
        ) * u
        y = nn.gelu(y).astype(self.dtype)
        return x + y * nn.sigmoid(nn.Dense(width, dtype=self.dtype)(y))


class S5(nn.Module):
    """Sequences [batch, time, features] to logits [batch, classes]."""

    num_classes: int
    num_layers: int
    width: int
    num_states: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        for n in range(self.num_layers):
            x = Layer(self.num_states, self.dtype, name=f"layers_{n}")(x)
        return nn.Dense(self.num_classes)(x.mean(1))


def workload(
    batch: int = 16,
    seq_len: int = 16000,
    num_classes: int = 35,
    num_layers: int = 6,
    width: int = 96,
    num_states: int = 64,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the cross-entropy of the class."""
    model = S5(num_classes, num_layers, width, num_states, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, 16, 1)))

    def loss(params, batch):
        logits = model.apply(params, batch["audio"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    audio, label = jax.ShapeDtypeStruct((batch, seq_len, 1), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    params = jax.eval_shape(init, jax.random.key(0))
    return jaxremat.Workload(loss=loss, params=params, batch={"audio": audio, "label": label}, init=init)
