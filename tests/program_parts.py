"""The parts that the layers of drawn programs are made of: a dense layer, attention, a convolution, a branch, a loop, and so on.

A layer is a few parts, one after the other. Each part computes an update that is added to the layer's value `x` of shape
`[batch, length, width]`:

    x = x + PARTS["dense"].update(weights, x, side, aux)

`weights` are the part's own parameters. `side` holds what all layers read: a mask, positions, a random key, a shared matrix,
and the input of the first layer, as a memory. A part may also write into `aux`, which the layer returns beside `x`: a router's
loss, or the statistics of BatchNorm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

WIDTH = 8
LENGTH = 4
HIDDEN = 16
EXPERTS = 2
#: The checkpoint name that the part `named` writes.
AUTHORS_NAME = "hidden"


@dataclass(frozen=True)
class Part:
    """One part of a layer.

    Attributes:
        update: `update(weights, x, side, aux)`, which gives the update of `x`.
        weights: the shapes of its float parameters, by name.
        reads: what it reads of `side`.
        matmuls: the number of its matmuls and convolutions, counted as often as they run.
        order: whether it has an integer parameter too, the permutation `order`.
    """

    update: Callable[[dict[str, Any], jax.Array, dict[str, Any], dict[str, Any]], jax.Array]
    weights: dict[str, tuple[int, ...]]
    matmuls: int = 0
    reads: tuple[str, ...] = ()
    order: bool = False

    def init(self, random: np.random.Generator) -> dict[str, Any]:
        """The parameters, of the scale at which an update is smaller than `x`."""
        made = {name: random.normal(0, 0.4 / shape[-2] ** 0.5, shape) for name, shape in self.weights.items()}
        return {
            **{name: jnp.asarray(value, jnp.float32) for name, value in made.items()},
            **({"order": jnp.asarray(random.permutation(WIDTH), jnp.int32)} if self.order else {}),
        }


def dense(w, x, side, aux):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def named(w, x, side, aux):
    return jax.nn.gelu(checkpoint_name(x @ w["in"], AUTHORS_NAME)) @ w["out"]


def attention(w, x, side, aux):
    q, k, v = (jnp.einsum("blw,whd->blhd", x, w[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(q, k, v, mask=side["mask"][None, None])
    return jnp.einsum("blhd,hdw->blw", mixed, w["out"])


def scores(w, x, side, aux):
    """Attention of one head, written with its softmax."""
    weights = jnp.einsum("blw,wv,bmv->blm", x, w["qk"], x)
    weights = jax.nn.softmax(jnp.where(side["mask"], weights, jnp.finfo(weights.dtype).min), axis=-1)
    return weights @ (x @ w["v"])


def convolution(w, x, side, aux):
    y = jax.lax.conv_general_dilated(x, w["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jax.nn.relu(y)


def batch_norm(w, x, side, aux):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    aux["batch_norm"] = {"mean": jax.lax.stop_gradient(mean), "var": jax.lax.stop_gradient(variance)}
    return w["scale"][0] * (x - mean) * jax.lax.rsqrt(variance + 1e-2)


def layer_norm(w, x, side, aux):
    centred = x - x.mean(-1, keepdims=True)
    return w["scale"][0] * centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-2)


def dropout(w, x, side, aux):
    return jnp.where(jax.random.bernoulli(side["key"], 0.7, x.shape), x / 0.7, 0)


def recurrence(w, x, side, aux):
    """A scan over the length, inside the layer."""

    def step(state, x_now):
        state = jnp.tanh(state @ w["state"] + x_now)
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def branch(w, x, side, aux):
    return jax.lax.cond(x.mean() > 0, lambda x: jnp.sin(x @ w["out"]), lambda x: x * w["scale"][0], x)


def loop(w, x, side, aux):
    """A while loop that isn't differentiated: it finds the power of two by which `x` is divided."""
    largest = jax.lax.stop_gradient(jnp.abs(x).max())
    divisor = jax.lax.while_loop(lambda d: largest > d, lambda d: 2 * d, jnp.ones_like(largest))
    return (x / divisor) @ w["out"]


@jax.custom_vjp
def clipped(x, matrix):
    return jnp.sin(x) @ matrix


def clipped_forward(x, matrix):
    return clipped(x, matrix), (x, matrix)


def clipped_backward(saved, gradient):
    x, matrix = saved
    gradient = jnp.clip(gradient, -0.01, 0.01)
    return jnp.cos(x) * (gradient @ matrix.T), jnp.einsum("blw,blv->wv", jnp.sin(x), gradient)


clipped.defvjp(clipped_forward, clipped_backward)


def custom_vjp(w, x, side, aux):
    return clipped(x, w["out"])


def inner_checkpoint(w, x, side, aux):
    return jax.checkpoint(lambda x: jnp.tanh(x @ w["in"]) @ w["out"])(x)


def experts(w, x, side, aux):
    chances = jax.nn.softmax((x @ w["router"]).astype(jnp.float32))
    chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS)
    aux["router"] = EXPERTS * (chosen.mean((0, 1)) * chances.mean((0, 1))).sum()
    gates = (chances * chosen).astype(x.dtype)
    return jnp.einsum("ble,blw,ewv->blv", gates, x, w["expert"])


def positions(w, x, side, aux):
    return w["scale"][0] * jnp.sin(side["positions"].astype(x.dtype)[:, None] / 4)


def memory(w, x, side, aux):
    """Reads what the stack of layers began with, as a decoder reads the encoder's output. Gradients go there too."""
    return jnp.sin(x @ w["out"]) * side["memory"].astype(x.dtype)


def shared(w, x, side, aux):
    return jax.nn.silu(x @ side["shared"].astype(x.dtype))


def lookup(w, x, side, aux):
    return w["scale"][0] * jnp.take(x, w["order"], axis=-1)


def frozen(w, x, side, aux):
    """A dense layer of which only the second matrix is trained."""
    return jnp.tanh(x @ jax.lax.stop_gradient(w["in"])) @ w["out"]


def fourier(w, x, side, aux):
    return 0.1 * jnp.fft.fft(x.astype(jnp.float32)).real.astype(x.dtype)


def complex_values(w, x, side, aux):
    """As a state space with complex eigenvalues has them."""
    z = jax.lax.complex(x.astype(jnp.float32), jnp.sin(x.astype(jnp.float32))) @ (w["out"].astype(jnp.float32) * (1 + 1j))
    return jnp.tanh((z * jnp.exp(1j * z.real)).imag).astype(x.dtype)


MLP = {"in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH)}
SQUARE = {"out": (WIDTH, WIDTH)}
SCALE = {"scale": (1, WIDTH)}
#: The parts, simple ones first: Hypothesis shrinks an example towards the first.
PARTS = {
    "dense": Part(dense, MLP, matmuls=2),
    "layer_norm": Part(layer_norm, SCALE),
    "named": Part(named, MLP, matmuls=2),
    "attention": Part(attention, {**dict.fromkeys("qkv", (WIDTH, 2, 4)), "out": (2, 4, WIDTH)}, matmuls=6, reads=("mask",)),
    "scores": Part(scores, {"qk": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}, matmuls=4, reads=("mask",)),
    "convolution": Part(convolution, {"kernel": (3, WIDTH, WIDTH)}, matmuls=1),
    "batch_norm": Part(batch_norm, SCALE),
    "dropout": Part(dropout, {}, reads=("key",)),
    "recurrence": Part(recurrence, {"state": (WIDTH, WIDTH)}, matmuls=LENGTH),
    "branch": Part(branch, SQUARE | SCALE, matmuls=1),
    "loop": Part(loop, SQUARE, matmuls=1),
    "custom_vjp": Part(custom_vjp, SQUARE, matmuls=1),
    "inner_checkpoint": Part(inner_checkpoint, MLP, matmuls=2),
    "experts": Part(experts, {"router": (WIDTH, EXPERTS), "expert": (EXPERTS, WIDTH, WIDTH)}, matmuls=3),
    "positions": Part(positions, SCALE, reads=("positions",)),
    "memory": Part(memory, SQUARE, matmuls=1, reads=("memory",)),
    "shared": Part(shared, {}, matmuls=1, reads=("shared",)),
    "lookup": Part(lookup, SCALE, order=True),
    "fourier": Part(fourier, {}),
    "frozen": Part(frozen, MLP, matmuls=2),
    "complex_values": Part(complex_values, SQUARE, matmuls=1),
}


class LayerState(nnx.Module):
    """What a layer of Flax NNX changes in each call: the counter of its dropout's keys, and a running mean."""

    def __init__(self, seed: int) -> None:
        self.rngs = nnx.Rngs(dropout=seed)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean((0, 1)).astype(jnp.float32)
        return jnp.where(jax.random.bernoulli(self.rngs.dropout(), 0.9, x.shape), x, 0)


def layer_states(num_layers: int) -> list[LayerState]:
    """The states of a stack's layers."""
    return [LayerState(i) for i in range(num_layers)]
