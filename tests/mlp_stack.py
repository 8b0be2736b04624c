"""A stack of layers of two matmuls, whose gradient compiles in half a second: for what needs no decoder.

stack_memory(h100, "every:2", num_layers=8).total_bytes
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.chips.target import Target
from jaxremat.testing import memory_of
from jaxremat.xla.memory import CompiledMemory


def mlp(w: Any, x: jax.Array) -> jax.Array:
    """One layer."""
    h = checkpoint_name(x @ w["up"], "hidden")
    return x + jnp.tanh(h) @ w["down"]


def gradient(policy: str) -> Any:
    """The loss of the stack under a policy, and its gradient by the layers' parameters."""
    return jax.value_and_grad(lambda w, x: (jaxremat.scan_layers(mlp, w, x, policy=policy).astype("float32") ** 2).sum())


def shapes(rows: int, num_layers: int = 6, width: int = 128, hidden: int = 512) -> tuple[Any, Any]:
    """The shapes of the parameters and of the input of `rows` rows, in bfloat16."""
    up, down = (num_layers, width, hidden), (num_layers, hidden, width)
    w = {"up": jax.ShapeDtypeStruct(up, "bfloat16"), "down": jax.ShapeDtypeStruct(down, "bfloat16")}
    return w, jax.ShapeDtypeStruct((rows, width), "bfloat16")


@functools.cache
def stack_memory(target: Target, policy: str, rows: int = 4096, **changes: int) -> CompiledMemory:
    """The memory of the gradient of the stack, compiled once for equal arguments; `changes` as for `shapes`."""
    return memory_of(gradient(policy), shapes(rows, **changes), target)


class Mlp(nn.Module):
    """The same layer as a module."""

    hidden: int = 512

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = checkpoint_name(nn.Dense(self.hidden, use_bias=False, dtype=x.dtype)(x), "hidden")
        return x + nn.Dense(x.shape[-1], use_bias=False, dtype=x.dtype)(jnp.tanh(h))


def unrolled(policy: str, rows: int = 4096, num_layers: int = 6, width: int = 128) -> tuple[Any, tuple[Any, Any]]:
    """The loss and its gradient of a stack of unrolled layers, and the shapes of the arguments."""
    layers = jaxremat.Layers(Mlp(), num_layers, policy, scan=False)
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    variables = jax.eval_shape(layers.init, jax.random.key(0), x)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        y: Any = layers.apply(variables, x)
        return (y.astype("float32") ** 2).sum()

    return jax.value_and_grad(loss), (variables, x)
