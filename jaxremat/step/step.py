"""The training step as one pure function of state and batch: next-token loss, gradients, optimizer update.

    step = jax.jit(make_step(model, train, policy, "xla"), donate_argnums=0)
    state, loss = step(state, tokens)

The caller donates the state (`donate_argnums=0`). Its buffers are reused for the new state, so that parameters and optimizer
state are in memory once.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxremat.config import ChunkedLoss, FullLoss, ModelConfig, TrainConfig, check, parse_loss
from jaxremat.model.transformer import Decoder, head_kernel, head_logits
from jaxremat.policy.spec import Policy
from jaxremat.step.loss import chunked_cross_entropy, cross_entropy, default_positions
from jaxremat.step.optimizer import make_optimizer


@flax.struct.dataclass
class TrainState:
    """The state of a training: the number of steps done, the parameters and the optimizer's state."""

    step: jax.Array
    params: Any
    opt_state: Any


Step = Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]


def init_state(model: ModelConfig, train: TrainConfig) -> TrainState:
    """The state before the first step, the same under every policy. `jax.eval_shape` of this function gives its shapes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = Decoder(model).init(jax.random.key(train.seed), tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(train).init(params))


def make_loss(model: ModelConfig, policy: Policy, implementation: str, loss: str = "full") -> Callable[..., jax.Array]:
    """The function `loss(params, tokens, key)`: mean next-token cross-entropy of `tokens`, `int32[batch, seq_len + 1]`.

    Args:
        model: the model.
        policy: what its layers keep for the backward pass.
        implementation: `xla` or `cudnn` attention.
        loss: `full`, `chunked` or `chunked:N`. All have the same value and gradients.
    """
    decoder = Decoder(model, policy, implementation, deterministic=model.dropout == 0)
    kind = parse_loss(loss)

    def mean_loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        rngs = {"dropout": key} if model.dropout else {}
        hidden_BTD: Any = decoder.apply({"params": params}, tokens[:, :-1], rngs=rngs, method="hidden")
        kernel, targets_BT = head_kernel(model, params), tokens[:, 1:]
        logits = functools.partial(head_logits, model)
        match kind:
            case FullLoss():
                return cross_entropy(logits(kernel, hidden_BTD), targets_BT)
            case ChunkedLoss(positions):
                if positions is None:
                    positions = default_positions(
                        batch=targets_BT.shape[0],
                        seq_len=targets_BT.shape[1],
                        vocab_size=model.vocab_size,
                        logit_bytes=hidden_BTD.dtype.itemsize,
                        free_bytes=_num_bytes(params["layers"]),
                    )
                return chunked_cross_entropy(logits, kernel, hidden_BTD, targets_BT, positions)

    return mean_loss


def make_step(model: ModelConfig, train: TrainConfig, policy: Policy, implementation: str) -> Step:
    """The function `step(state, tokens) -> (state, loss)`. Compile it with `jax.jit(..., donate_argnums=0)`.

    `tokens` are `int32[accumulate x batch, seq_len + 1]`. With `train.accumulate` above 1, the microbatches run one after
    the other in a loop. Their gradients are summed in one further buffer. The update is that of the whole batch at once,
    except for the order of the sums, and for dropout, whose masks differ by microbatch.

    Raises:
        UsageError: the model and the training don't go together (`config.check`).
    """
    check(model, train)
    loss, optimizer = make_loss(model, policy, implementation, train.loss), make_optimizer(train)

    def loss_and_grads(params: Any, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        value_and_grad = jax.value_and_grad(loss)
        if train.accumulate == 1:
            return value_and_grad(params, tokens, key)

        def add(carry: Any, microbatch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            part = value_and_grad(params, *microbatch)
            return jax.tree.map(lambda whole, part: whole + part / train.accumulate, carry, part), None

        microbatches = tokens.reshape(train.accumulate, -1, tokens.shape[1]), jax.random.split(key, train.accumulate)
        zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, microbatches)[0]

    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        chex.assert_shape(tokens, (None, train.seq_len + 1))
        chex.assert_type(tokens, jnp.int32)
        chex.assert_is_divisible(tokens.shape[0], train.accumulate)
        key = jax.random.fold_in(jax.random.key(train.seed + 1), state.step)
        value, grads = loss_and_grads(_cast(state.params, train.grad_dtype), tokens, key)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), value

    return train_step


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _cast(params: Any, dtype: str | None) -> Any:
    return params if dtype is None else jax.tree.map(lambda param: param.astype(dtype), params)


def abstract_args(model: ModelConfig, train: TrainConfig, batch: int) -> tuple[TrainState, jax.ShapeDtypeStruct]:
    """The shapes of the step's arguments at `batch` sequences per microbatch. Nothing is allocated."""
    state = jax.eval_shape(lambda: init_state(model, train))
    return state, jax.ShapeDtypeStruct((train.accumulate * batch, train.seq_len + 1), jnp.int32)
