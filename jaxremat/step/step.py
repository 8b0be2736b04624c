"""The training step: next-token loss, gradients, optimizer update, as one pure function of state and batch.

The state is meant to be donated (`donate_argnums=0`): its buffers are reused for the new state, so that parameters and
optimizer state are held once.
"""

from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxremat.config import ModelConfig, TrainConfig, check
from jaxremat.model.transformer import Decoder
from jaxremat.policy.spec import Policy
from jaxremat.step.loss import cross_entropy
from jaxremat.step.optimizer import make_optimizer


@flax.struct.dataclass
class TrainState:
    """What a step reads and replaces."""

    step: jax.Array
    params: Any
    opt_state: Any


Step = Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]


def init_state(model: ModelConfig, train: TrainConfig) -> TrainState:
    """The state before the first step; under `jax.eval_shape` its shapes alone. It doesn't depend on any policy."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = Decoder(model).init(jax.random.key(train.seed), tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(train).init(params))


def make_loss(model: ModelConfig, policy: Policy, implementation: str) -> Callable[..., jax.Array]:
    """`loss(params, tokens, key)`: mean next-token cross-entropy of `tokens`, `int32[batch, seq_len + 1]`.

    Args:
        model: the model.
        policy: what its layers keep for the backward pass.
        implementation: `xla` or `cudnn` attention.
    """
    decoder = Decoder(model, policy, implementation, deterministic=model.dropout == 0)

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        rngs = {"dropout": key} if model.dropout else {}
        logits: Any = decoder.apply({"params": params}, tokens[:, :-1], rngs=rngs)
        return cross_entropy(logits, tokens[:, 1:])

    return loss


def make_step(model: ModelConfig, train: TrainConfig, policy: Policy, implementation: str) -> Step:
    """`step(state, tokens) -> (state, loss)` for `tokens`, `int32[batch, seq_len + 1]`; jit it with `donate_argnums=0`."""
    check(model, train)
    loss, optimizer = make_loss(model, policy, implementation), make_optimizer(train)

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        chex.assert_shape(tokens, (None, train.seq_len + 1))
        chex.assert_type(tokens, jnp.int32)
        key = jax.random.fold_in(jax.random.key(train.seed + 1), state.step)
        value, grads = jax.value_and_grad(loss)(state.params, tokens, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), value

    return train_step


def abstract_args(model: ModelConfig, train: TrainConfig, batch: int) -> tuple[TrainState, jax.ShapeDtypeStruct]:
    """Shapes of the step's arguments at `batch`; nothing is allocated."""
    state = jax.eval_shape(lambda: init_state(model, train))
    return state, jax.ShapeDtypeStruct((batch, train.seq_len + 1), jnp.int32)
