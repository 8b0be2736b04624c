"""The update of PPO with a recurrent policy, as PureJaxRL writes it: a GRU over the steps of rollouts, reset between episodes.

A workload is the loss of one minibatch. `update` has it in a scan over minibatches, in a scan over epochs; there it is
`jaxremat.with_policy(loss, ...)` that is differentiated::

    python -m jaxremat.run --model examples/ppo.py:workload --policy none nothing every:16 dots auto --batch 2048
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Recurrence(nn.Module):
    """A GRU over time. Its state is zeros again where an episode begins."""

    dtype: str

    @nn.compact
    def __call__(self, state, inputs):
        x, is_first = inputs
        state = jnp.where(is_first[:, None] > 0, jnp.zeros_like(state), state)
        return nn.GRUCell(x.shape[-1], dtype=self.dtype)(state, x)


class ActorCritic(nn.Module):
    """Observations [time, batch, features] to logits of actions [time, batch, actions] and values [time, batch]."""

    num_actions: int
    width: int
    dtype: str

    @nn.compact
    def __call__(self, observations, is_first):
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(observations))
        over_time = nn.scan(Recurrence, variable_broadcast="params", split_rngs={"params": False})
        _, x = over_time(self.dtype)(jnp.zeros(x.shape[1:], x.dtype), (x, is_first))
        actor, critic = (nn.relu(nn.Dense(self.width, dtype=self.dtype)(x)) for _ in range(2))
        logits, value = nn.Dense(self.num_actions)(actor), nn.Dense(1)(critic)
        return logits.astype(jnp.float32), value[..., 0].astype(jnp.float32)


def update(loss, optimizer, params, state, minibatches, num_epochs=4):
    """All minibatches [minibatches, ...], in each epoch. The parameters, the optimizer's state, and the mean loss."""

    def of_minibatch(carry, minibatch):
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(carry[0], minibatch)
        changes, state = optimizer.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], changes), state), value

    def of_epoch(carry, _):
        return jax.lax.scan(of_minibatch, carry, minibatches)

    (params, state), values = jax.lax.scan(of_epoch, (params, state), None, num_epochs)
    return params, state, values.mean()


def workload(
    batch: int = 2048,
    num_steps: int = 128,
    num_features: int = 64,
    num_actions: int = 16,
    width: int = 256,
    clip: float = 0.2,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: PPO's clipped objective, the value's error, and the entropy."""
    model = ActorCritic(num_actions, width, dtype)

    def init(key):
        return model.init(key, jnp.zeros((1, 1, num_features)), jnp.zeros((1, 1)))

    def loss(params, rollout):
        logits, value = model.apply(params, rollout["observations"], rollout["is_first"])
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), rollout["actions"][..., None], axis=-1)[..., 0]
        ratio, advantage = jnp.exp(log_prob - rollout["log_prob"]), rollout["advantage"]
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
        error = jnp.mean((value - rollout["returns"]) ** 2)
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
        return policy + 0.5 * error - 0.01 * entropy, {"entropy": entropy}

    def struct(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((num_steps, batch, *shape), dtype)

    rollout = dict.fromkeys(("is_first", "log_prob", "advantage", "returns"), struct())
    rollout |= {"observations": struct(num_features), "actions": struct(dtype=jnp.int32)}
    return jaxremat.Workload(loss=loss, params=jax.eval_shape(init, jax.random.key(0)), batch=rollout, init=init)
