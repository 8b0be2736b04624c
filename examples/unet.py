"""A U-Net in Equinox that predicts an image's noise: stages of fewer pixels each, and their images again on the way up.

It is written for one image and mapped over the batch. The values on the way down wait for the way up, whatever a layer saves::

    python -m jaxremat.run --model examples/unet.py:workload --policy none nothing dots auto --batch 64
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxremat


class Block(eqx.Module):
    """A layer: two convolutions, with the time between them, added to the input."""

    norm1: eqx.nn.GroupNorm
    conv1: eqx.nn.Conv2d
    time: eqx.nn.Linear
    norm2: eqx.nn.GroupNorm
    conv2: eqx.nn.Conv2d
    project: eqx.nn.Conv2d

    def __init__(self, num_in, num_out, time, key):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.GroupNorm(8, num_in), eqx.nn.GroupNorm(8, num_out)
        self.conv1, self.conv2 = (
            eqx.nn.Conv2d(n, num_out, 3, padding=1, key=key) for n, key in zip((num_in, num_out), keys[:2], strict=True)
        )
        self.time, self.project = eqx.nn.Linear(time, num_out, key=keys[2]), eqx.nn.Conv2d(num_in, num_out, 1, key=keys[3])

    def __call__(self, x, time):
        y = self.conv1(jax.nn.silu(self.norm1(x))) + self.time(time)[:, None, None].astype(x.dtype)
        return self.project(x) + self.conv2(jax.nn.silu(self.norm2(y)))


class UNet(eqx.Module):
    """An image [channels, height, width] and its time to its noise."""

    first: eqx.nn.Conv2d
    down: list[list[Block]]
    up: list[list[Block]]
    last: eqx.nn.Conv2d

    def __init__(self, channels, num_blocks, key):
        keys, time = iter(jax.random.split(key, 2 * len(channels) * (num_blocks + 1) + 2)), 4 * channels[0]
        self.first = eqx.nn.Conv2d(3, channels[0], 3, padding=1, key=next(keys))
        self.down, self.up, width, skips = [], [], channels[0], []
        for stage in channels:
            self.down.append([Block(width if n == 0 else stage, stage, time, next(keys)) for n in range(num_blocks)])
            skips, width = [*skips, *num_blocks * [stage]], stage
        for stage in channels[::-1]:
            self.up.append([])
            for _ in range(num_blocks):
                self.up[-1].append(Block(width + skips.pop(), stage, time, next(keys)))
                width = stage
        self.last = eqx.nn.Conv2d(width, 3, 3, padding=1, key=next(keys))

    def __call__(self, x, time):
        x, skips = self.first(x), []
        angles = time * jnp.exp(-jnp.linspace(0, 9, 2 * self.first.out_channels))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        for n, blocks in enumerate(self.down):
            x = x if n == 0 else x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2).mean((2, 4))
            for block in blocks:
                x = block(x, time)
                skips.append(x)
        for n, blocks in enumerate(self.up):
            x = x if n == 0 else jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            for block in blocks:
                x = block(jnp.concatenate([x, skips.pop()]), time)
        return self.last(x)


def workload(
    batch: int = 64, size: int = 64, channels: tuple = (128, 256, 384), num_layers: int = 2, dtype: str = "bfloat16"
) -> jaxremat.Workload:
    """What is trained: the square error of the noise."""

    def init(key):
        return eqx.filter(UNet(channels, num_layers, key), eqx.is_array)

    model = eqx.filter_eval_shape(UNet, channels, num_layers, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params, images, key):
        model = eqx.combine(jax.tree.map(lambda param: param.astype(dtype), params), static)
        time, noise = jax.random.uniform(key, images.shape[:1]), jax.random.normal(key, images.shape)
        share = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
        noised = (share * images + (1 - share**2) ** 0.5 * noise).astype(dtype)
        return jnp.mean((jax.vmap(model)(noised, time) - noise) ** 2)

    images = jax.ShapeDtypeStruct((batch, 3, size, size), jnp.float32)
    return jaxremat.Workload(loss=loss, params=params, batch=images, init=init)
