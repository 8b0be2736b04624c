"""A Flax NNX model with dropout and BatchNorm, unrolled and scanned, and its loss."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.helpers import quick_jit

WIDTH, LAYERS = 4, 3
X = jax.random.normal(jax.random.key(0), (8, WIDTH)) + 1


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.Linear(8, WIDTH, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(self.down(jnp.tanh(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, block: Any = Block, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


class Scanned(nnx.Module):
    def __init__(self) -> None:
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))
        self.blocks = make(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def with_shared_variables() -> Net:
    model = Net()
    for block in model.blocks:
        block.up.kernel, block.norm.mean = model.blocks[0].up.kernel, model.blocks[0].norm.mean
    return model


def called(function: Any, model: Any, times: int) -> list[Any]:
    """The results of so many calls `function(model)`, compiled. The model then has the state after them."""
    graph, state = nnx.split(model)

    @quick_jit
    def call(state: Any) -> Any:
        model = nnx.merge(graph, state)
        return function(model), nnx.state(model)

    results = []
    for _ in range(times):
        result, state = call(state)
        results.append(result)
    nnx.update(model, state)
    return results
