"""A speech encoder with BatchNorm, like a Conformer: frames of sound in, a label for every fourth frame out.

The batch statistics are a part of `params`: their gradient is zero, and `optimizer` leaves them alone. The loss returns the
new statistics as its auxiliary value::

    python -m jaxremat.run --model examples/encoder_batchnorm.py:workload --policy none nothing dots auto --batch 32
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Layer(nn.Module):
    """A layer: attention, a convolution over time with BatchNorm, and an MLP, each with dropout."""

    num_heads: int
    kernel: int
    dropout: float
    dtype: str

    @nn.compact
    def __call__(self, x):
        width, drop = x.shape[-1], nn.Dropout(self.dropout, deterministic=False)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        heads = (self.num_heads, width // self.num_heads)
        q, k, v = (nn.DenseGeneral(heads, dtype=self.dtype, name=name)(y) for name in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(q, k, v)
        x = x + drop(nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="out")(y))
        y = nn.glu(nn.Dense(2 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        y = nn.Conv(width, (self.kernel,), feature_group_count=width, dtype=self.dtype)(y)
        y = nn.silu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y))
        x = x + drop(nn.Dense(width, dtype=self.dtype)(y))
        y = nn.silu(nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + drop(nn.Dense(width, dtype=self.dtype)(y))


class Encoder(nn.Module):
    """Frames [batch, time, features] to logits [batch, time / 4, labels]."""

    num_labels: int
    num_layers: int
    width: int
    layer: dict

    @nn.compact
    def __call__(self, frames):
        dtype = self.layer["dtype"]
        for _ in range(2):
            frames = nn.relu(nn.Conv(self.width, (3,), strides=2, dtype=dtype)(frames))
        x = nn.Dense(self.width, dtype=dtype)(frames)
        for _ in range(self.num_layers):
            x = Layer(**self.layer)(x)
        return nn.Dense(self.num_labels)(nn.LayerNorm(dtype=dtype)(x))


def workload(
    batch: int = 32,
    num_frames: int = 1600,
    num_features: int = 80,
    num_labels: int = 1024,
    num_layers: int = 8,
    width: int = 256,
    num_heads: int = 4,
    kernel: int = 31,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the cross-entropy of the labels."""
    layer = {"num_heads": num_heads, "kernel": kernel, "dropout": dropout, "dtype": dtype}
    model = Encoder(num_labels, num_layers, width, layer)

    def init(key):
        return model.init({"params": key, "dropout": key}, jnp.zeros((1, num_frames, num_features)))

    def loss(variables, batch, key):
        logits, new = model.apply(variables, batch["frames"], rngs={"dropout": key}, mutable=["batch_stats"])
        value = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"])
        return value.mean(), new["batch_stats"]

    frames = jax.ShapeDtypeStruct((batch, num_frames, num_features), jnp.float32)
    optimizers = {"train": optax.adamw(1e-3), "keep": optax.set_to_zero()}
    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch={"frames": frames, "labels": jax.ShapeDtypeStruct((batch, num_frames // 4), jnp.int32)},
        init=init,
        optimizer=optax.multi_transform(optimizers, {"params": "train", "batch_stats": "keep"}),
    )
