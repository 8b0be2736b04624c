"""Small programs in which layers are hard to find or to run again: what they read, pass on and return besides `x`.

Each is a loss of `(params, batch)` with `LAYERS` layers, which name one value: `wide`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

WIDTH, LAYERS = 8, 4


def weights(seed: int = 0, num_layers: int = LAYERS) -> list[dict[str, jax.Array]]:
    random = np.random.default_rng(seed)
    shapes = {"in": (WIDTH, 2 * WIDTH), "out": (2 * WIDTH, WIDTH)}
    return [
        {name: jnp.asarray(random.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(num_layers)
    ]


def stacked(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


X = jnp.asarray(np.random.default_rng(9).normal(0, 1, (4, WIDTH)), jnp.float32)


def dense(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(checkpoint_name(x @ w["in"], "wide")) @ w["out"]


def plain_loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = dense(w, x)
    return jnp.square(x).mean()


def scanned_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.square(jax.lax.scan(lambda x, w: (dense(w, x), None), x, params)[0]).mean()


def keys_in_the_carry(params: Any, batch: Any) -> jax.Array:
    """The scan carries a random key and a counter beside x."""

    def layer(carry: Any, w: Any) -> Any:
        x, key, count = carry
        key, own = jax.random.split(key)
        x = dense(w, x)
        return (jnp.where(jax.random.bernoulli(own, 0.8, x.shape), x, 0), key, count + 1), count

    (x, _, count), places = jax.lax.scan(layer, (batch["x"], batch["key"], 0), params)
    return jnp.square(x).mean() * count + places.sum()


def loss_in_the_carry(params: Any, x: jax.Array) -> jax.Array:
    """The scan carries a router's loss, and runs from the last layer to the first."""

    def layer(carry: Any, w: Any) -> Any:
        x, total = carry
        x = dense(w, x)
        return (x, total + jnp.square(x).mean()), None

    (x, total), _ = jax.lax.scan(layer, (x, jnp.zeros(())), params, reverse=True)
    return jnp.square(x).mean() + 0.1 * total


def integers_among_the_parameters(params: Any, x: jax.Array) -> jax.Array:
    for w in params["layers"]:
        x = dense(w, x)[:, params["order"]]
    return jnp.square(x).mean()


def mapped_layers(params: Any, x: jax.Array) -> jax.Array:
    """Each layer is vmapped over the rows of x."""
    for w in params:
        x = jax.vmap(dense, in_axes=(None, 0))(w, x)
    return jnp.square(x).mean()


def outputs_of_all_layers(params: Any, x: jax.Array) -> jax.Array:
    """The loss reads each layer's output, as deep supervision does."""
    outputs = []
    for w in params:
        x = dense(w, x)
        outputs.append(x)
    return jnp.square(jnp.stack(outputs)).mean()


def skips(params: Any, x: jax.Array) -> jax.Array:
    """Each layer in the second half reads the output of one in the first half, as in a U-Net."""
    outputs: list[jax.Array] = []
    for i, w in enumerate(params):
        x = dense(w, x + outputs[LAYERS - 1 - i] if i >= LAYERS // 2 else x + 0 * x)
        outputs.append(x)
    return jnp.square(x).mean()


def one_encoder_for_two_inputs(params: Any, x: jax.Array) -> jax.Array:
    def encoded(x: jax.Array) -> jax.Array:
        for w in params:
            x = dense(w, x)
        return x

    return jnp.square(encoded(x) - 2 * encoded(-x)).mean()


def a_constant_array(params: Any, x: jax.Array) -> jax.Array:
    """The layers read an array that is no argument."""
    mask = jnp.asarray(np.arange(WIDTH) % 2, jnp.float32)
    for w in params:
        x = dense(w, x * mask)
    return jnp.square(x).mean()


def bfloat16_parameters(params: Any, x: jax.Array) -> jax.Array:
    return plain_loss(params, x.astype(jnp.bfloat16)).astype(jnp.float32)


def two_inputs_with_checkpoints(params: Any, x: jax.Array) -> jax.Array:
    def encoded(x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.checkpoint(dense)(w, x)
        return x

    return jnp.square(encoded(x) - 2 * encoded(-x)).mean()


def a_counter(params: Any, x: jax.Array) -> jax.Array:
    """The scan's counter picks each layer's parameters, under a checkpoint of the author's."""

    @jax.checkpoint
    def layer(x: jax.Array, i: jax.Array) -> jax.Array:
        return dense({name: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for name, leaf in params.items()}, x)

    return jnp.square(jax.lax.scan(lambda x, i: (layer(x, i), None), x, jnp.arange(LAYERS))[0]).mean()


def a_fori_loop(params: Any, x: jax.Array) -> jax.Array:
    """A loop without slices or outputs, which carries its counter."""
    return jnp.square(
        jax.lax.fori_loop(0, LAYERS, lambda i, x: dense({n: leaf[i] for n, leaf in params.items()}, x), x)
    ).mean()


def complex_values(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = dense(w, x + jnp.fft.irfft(jnp.exp(1j * jnp.fft.rfft(x).real) * 2j, WIDTH))
    return jnp.square(x).mean()


def steps_in_time(params: Any, x: jax.Array) -> jax.Array:
    """A recurrence over slices of the data from the last to the first, with a carry of several values and outputs."""

    def step(carry: Any, now: jax.Array) -> Any:
        state, total = carry["state"], carry["total"]
        state = dense(params, jnp.tanh(state + now))
        return {"state": state, "total": total + state.sum()}, (state[0], now)

    start = {"state": jnp.zeros_like(x[0]), "total": jnp.zeros(())}
    end, (states, _) = jax.lax.scan(step, start, x, reverse=True)
    return jnp.square(end["state"]).mean() + jnp.square(states).mean() + 0.1 * end["total"]


def a_gradient_inside(params: Any, x: jax.Array) -> jax.Array:
    """The loss reads a gradient by its input, as one of an energy and its forces does."""

    def energy(x: jax.Array) -> jax.Array:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = dense(w, x)
        return jnp.square(x).sum()

    return jnp.square(jax.grad(energy)(x)).mean()


def branches(params: Any, x: jax.Array) -> jax.Array:
    """A part of each layer runs or not, as in stochastic depth."""
    for i, w in enumerate(params):
        x = jax.lax.cond(x.sum() > i - 2, lambda w, x: jnp.tanh(x @ w["in"]) @ w["out"] + x, lambda _, x: x, w, dense(w, x))
    return jnp.square(x).mean()


def a_first_layer_without_a_number(params: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"block.{i}" if i else "block"):
            x = dense(w, x)
    return jnp.square(x).mean()


def blocks_of_steps(rate: jax.Array, x: jax.Array) -> jax.Array:
    """Checkpoints around scans, with the arithmetic of times between them and no matmul at all."""

    def step(x: jax.Array, time: jax.Array) -> Any:
        return x + checkpoint_name(jnp.sin(rate * x + time), "wide"), None

    for block in range(LAYERS):
        times = 0.1 * jnp.arange(3 * block, 3 * block + 3)
        x = jax.checkpoint(lambda x, times: jax.lax.scan(step, x, times)[0])(x, times)
    return jnp.square(x).mean()


KEY = jax.random.key(5)
CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "unrolled": (plain_loss, weights(), X),
    "scan": (scanned_loss, stacked(weights()), X),
    "keys in the carry": (keys_in_the_carry, stacked(weights()), {"x": X, "key": KEY}),
    "raw keys in the carry": (keys_in_the_carry, stacked(weights()), {"x": X, "key": jax.random.PRNGKey(5)}),
    "loss in the carry": (loss_in_the_carry, stacked(weights()), X),
    "integers": (integers_among_the_parameters, {"layers": weights(), "order": jnp.arange(WIDTH)[::-1]}, X),
    "vmapped layers": (mapped_layers, weights(), X),
    "outputs of all layers": (outputs_of_all_layers, weights(), X),
    "skips": (skips, weights(), X),
    "two inputs": (one_encoder_for_two_inputs, weights(num_layers=LAYERS // 2), X),
    "two inputs, checkpoints": (two_inputs_with_checkpoints, weights(num_layers=LAYERS // 2), X),
    "a constant array": (a_constant_array, weights(), X),
    "a counter": (a_counter, stacked(weights()), X),
    "a fori_loop": (a_fori_loop, stacked(weights()), X),
    "complex values": (complex_values, weights(), X),
    "steps in time": (steps_in_time, weights()[0], X[:, None]),
    "a gradient inside": (a_gradient_inside, weights(num_layers=LAYERS // 2), X),
    "branches": (branches, weights(), X),
    "a first layer without a number": (a_first_layer_without_a_number, weights(), X),
    "blocks of steps": (blocks_of_steps, jnp.asarray(0.7), X),
    "bfloat16": (bfloat16_parameters, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights()), X),
}
