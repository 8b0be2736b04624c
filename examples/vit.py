"""A vision transformer in Flax Linen, its layers named by hand: `encoderblock_0`, `encoderblock_1` and so on.

The sizes are ViT-S/16's, on images of 224 x 224 pixels. `--layers` says by name which modules are layers; without it they are
found by the same names::

    python -m jaxremat.run --model examples/vit.py:workload --layers 'encoderblock_*' --policy none nothing dots auto --batch 64
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class EncoderBlock(nn.Module):
    """A layer: attention over all patches, then an MLP."""

    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        width, heads = x.shape[-1], (self.num_heads, x.shape[-1] // self.num_heads)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = (nn.DenseGeneral(heads, dtype=self.dtype, name=name)(y) for name in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(q, k, v)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="out")(y)
        y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))


class ViT(nn.Module):
    """Images [batch, height, width, 3] to logits [batch, classes]."""

    num_classes: int
    patch: int
    num_layers: int
    width: int
    num_heads: int
    dtype: str

    @nn.compact
    def __call__(self, images):
        patches = nn.Conv(self.width, (self.patch, self.patch), self.patch, padding="VALID", dtype=self.dtype)(images)
        x = patches.reshape(images.shape[0], -1, self.width)
        start = self.param("cls", nn.initializers.zeros, (1, 1, self.width)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(start, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(x.dtype)
        for i in range(self.num_layers):
            x = EncoderBlock(self.num_heads, self.dtype, name=f"encoderblock_{i}")(x)
        return nn.Dense(self.num_classes, name="head")(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


def workload(
    batch: int = 64,
    image_size: int = 224,
    num_classes: int = 1000,
    patch: int = 16,
    num_layers: int = 12,
    width: int = 384,
    num_heads: int = 6,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the cross-entropy of the class, with the accuracy as an auxiliary value."""
    model = ViT(num_classes, patch, num_layers, width, num_heads, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, image_size, image_size, 3)))["params"]

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["image"]).astype(jnp.float32)
        value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return value, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}

    image = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32)
    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch={"image": image, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)},
        init=init,
    )
