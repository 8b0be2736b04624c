"""A diffusion transformer in Flax NNX, its layers stacked by `nnx.vmap` and run by `nnx.scan`.

Time and class of an image scale and shift each layer's values (adaLN-Zero). The sizes are those of DiT-L/2, on 256 patches::

    python -m jaxremat.run --model examples/diffusion_transformer.py:workload --policy none nothing dots auto --batch 64
"""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxremat


class Block(nnx.Module):
    """A layer: attention and an MLP, each scaled and shifted by the condition."""

    def __init__(self, width, num_heads, dtype, rngs):
        self.num_heads = num_heads
        self.norm = nnx.LayerNorm(width, use_bias=False, use_scale=False, dtype=dtype, rngs=rngs)
        self.qkv, self.out = (nnx.Linear(width, n * width, dtype=dtype, rngs=rngs) for n in (3, 1))
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)
        self.modulate = nnx.Linear(width, 6 * width, dtype=dtype, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(self.modulate(nnx.silu(condition))[:, None], 6, axis=-1)
        y = self.norm(x) * (1 + scale1) + shift1
        q, k, v = (part.reshape(*x.shape[:2], self.num_heads, -1) for part in jnp.split(self.qkv(y), 3, axis=-1))
        x = x + gate1 * self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        return x + gate2 * self.down(nnx.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))


class DiT(nnx.Module):
    """Patches [batch, patches, channels], their times and classes to their noise."""

    def __init__(self, channels, num_patches, num_classes, num_layers, width, num_heads, dtype, rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(width, num_heads, dtype, rngs)

        self.first, self.last = (nnx.Linear(*n, dtype=dtype, rngs=rngs) for n in ((channels, width), (width, channels)))
        self.positions = nnx.Embed(num_patches, width, dtype=dtype, rngs=rngs)
        self.classes = nnx.Embed(num_classes, width, dtype=dtype, rngs=rngs)
        self.time = nnx.Linear(256, width, dtype=dtype, rngs=rngs)
        self.blocks = make(rngs)

    def __call__(self, x, time, label):
        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
        def run(block, x, condition):
            return block(x, condition)

        angles = time[:, None] * jnp.exp(-jnp.linspace(0, 9, 128))
        condition = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)) + self.classes(label)
        return self.last(run(self.blocks, self.first(x) + self.positions(jnp.arange(x.shape[1])), condition))


def workload(
    batch: int = 64,
    channels: int = 16,
    num_patches: int = 256,
    num_classes: int = 1000,
    num_layers: int = 24,
    width: int = 1024,
    num_heads: int = 16,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the square error of the noise."""

    def init(key):
        return DiT(channels, num_patches, num_classes, num_layers, width, num_heads, jnp.dtype(dtype), nnx.Rngs(key))

    def loss(model, batch, key):
        time, noise = jax.random.uniform(key, batch["label"].shape), jax.random.normal(key, batch["latents"].shape)
        share = jnp.cos(time * jnp.pi / 2)[:, None, None]
        noised = share * batch["latents"] + (1 - share**2) ** 0.5 * noise
        return jnp.mean((model(noised, time, batch["label"]).astype(jnp.float32) - noise) ** 2)

    latents = jax.ShapeDtypeStruct((batch, num_patches, channels), jnp.float32)
    label = jax.ShapeDtypeStruct((batch,), jnp.int32)
    model = nnx.eval_shape(init, jax.random.key(0))
    return jaxremat.Workload(loss=loss, params=model, batch={"latents": latents, "label": label}, init=init)
