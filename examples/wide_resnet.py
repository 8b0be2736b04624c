"""A wide ResNet in Flax NNX, with BatchNorm: the model is called in the loss, and its moving means change there.

The model is `params`, its state with it. The layers of a stage are alike, but for the first one, which changes the shape. The
sizes are those of WRN-28-10 on CIFAR::

    python -m jaxremat.run --model examples/wide_resnet.py:workload --policy none nothing dots auto --batch 128
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxremat


class Block(nnx.Module):
    """A layer: two convolutions, each after BatchNorm and ReLU, added to the input."""

    def __init__(self, num_in, num_out, stride, dtype, rngs):
        conv = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        self.norm1, self.norm2 = (nnx.BatchNorm(n, dtype=dtype, rngs=rngs) for n in (num_in, num_out))
        self.conv1 = nnx.Conv(num_in, num_out, (3, 3), strides=stride, **conv)
        self.conv2 = nnx.Conv(num_out, num_out, (3, 3), **conv)
        self.project = nnx.Conv(num_in, num_out, (1, 1), strides=stride, **conv) if num_in != num_out else None

    def __call__(self, x):
        y = nnx.relu(self.norm1(x))
        x = self.project(y) if self.project else x
        return x + self.conv2(nnx.relu(self.norm2(self.conv1(y))))


class WideResNet(nnx.Module):
    """Images [batch, height, width, 3] to logits [batch, classes]."""

    def __init__(self, num_classes, num_layers, width, dtype, rngs):
        self.first = nnx.Conv(3, 16, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.blocks, last = nnx.List(), 16
        for stage in range(3):
            for n in range(num_layers):
                self.blocks.append(Block(last, width * 2**stage, 2 if stage and n == 0 else 1, dtype, rngs))
                last = width * 2**stage
        self.norm = nnx.BatchNorm(last, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(last, num_classes, rngs=rngs)

    def __call__(self, images):
        x = self.first(images)
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.relu(self.norm(x)).mean((1, 2)))


def workload(
    batch: int = 128,
    image_size: int = 32,
    num_classes: int = 100,
    num_layers: int = 4,
    width: int = 160,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the cross-entropy of the class. There are three stages of `num_layers` layers."""

    def init(key):
        return WideResNet(num_classes, num_layers, width, jnp.dtype(dtype), nnx.Rngs(key))

    def loss(model, batch):
        logits = model(batch["image"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    image = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)
    model = nnx.eval_shape(init, jax.random.key(0))
    return jaxremat.Workload(loss=loss, params=model, batch={"image": image, "label": label}, init=init)
