"""The optimizer of a run, from optax."""

import optax

from jaxremat.config import TrainConfig


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """AdamW with two moments in the parameters' dtype (8 bytes of state per float32 parameter)."""
    return optax.adamw(train.learning_rate, b1=0.9, b2=0.95, weight_decay=train.weight_decay)
