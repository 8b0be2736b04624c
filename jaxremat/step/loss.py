"""Cross-entropy of the next token."""

import chex
import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats, float32 scalar; all logits are held at once, in float32 while they are reduced."""
    chex.assert_shape(logits_BTV, (*targets_BT.shape, None))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV.astype(jnp.float32), targets_BT).mean()
