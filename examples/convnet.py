"""A ResNet in Flax Linen. The layers of a stage are alike, but for the first one, which changes the shape.

jaxremat finds eight kinds of layers among the scopes `Bottleneck_0` to `Bottleneck_15`: the first layer of each stage, and the
others. The sizes are those of ResNet-50, with GroupNorm::

    python -m jaxremat.run --model examples/convnet.py:workload --policy none nothing dots auto --batch 64
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Bottleneck(nn.Module):
    """A layer: three convolutions, added to the input. The first layer of a stage projects its input to the new shape."""

    channels: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.GroupNorm, num_groups=None, group_size=8, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.channels, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.channels, (3, 3), self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.channels, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_projection")(conv(4 * self.channels, (1, 1), self.stride, name="projection")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [batch, height, width, 3] to logits [batch, classes]."""

    num_classes: int
    stages: tuple
    width: int
    dtype: str

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (7, 7), 2, use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.GroupNorm(num_groups=None, group_size=8, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, num_layers in enumerate(self.stages):
            for i in range(num_layers):
                x = Bottleneck(self.width * 2**stage, 2 if stage and i == 0 else 1, self.dtype)(x)
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


def workload(
    batch: int = 64,
    image_size: int = 224,
    num_classes: int = 1000,
    stages: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the cross-entropy of the class, on images that are flipped at random."""
    model = ResNet(num_classes, stages, width, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, image_size, image_size, 3)))["params"]

    def loss(params, batch, key):
        flip = jax.random.bernoulli(key, shape=(batch["image"].shape[0], 1, 1, 1))
        images = jnp.where(flip, batch["image"][:, :, ::-1], batch["image"])
        logits = model.apply({"params": params}, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    image = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32)
    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch={"image": image, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)},
        init=init,
    )
