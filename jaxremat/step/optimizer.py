"""The optimizers of a run, from optax, with schedule and clipping.

Muon and Adafactor think in matrices, and the kernels here are not: layers are stacked on a leading axis, and attention's
kernels have heads and head_dim apart. `matrix_axes` says which axes of a kernel are which; left alone, optax would
orthogonalize the embedding and give every stacked kernel to Adam.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.model.transformer import param_shapes


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """The optimizer that `train` names, behind clipping by the global norm where that is asked for.

    Weight decay is multiplied by the learning rate in all of them, and applies to every parameter.
    """
    rate, decay = make_schedule(train), train.weight_decay
    match train.optimizer:
        case "adamw":
            optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay)
        case "adamw-bf16":
            optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay, mu_dtype=jnp.bfloat16)
        case "lion":
            optimizer = optax.lion(rate, b1=0.9, b2=0.99, weight_decay=decay)
        case "sgd-momentum":
            optimizer = optax.chain(
                optax.trace(decay=0.9), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
            )
        case "adafactor":
            optimizer = as_matrices(optax.adafactor(rate, weight_decay_rate=lambda step: decay * _at(rate, step)))
        case "muon":
            optimizer = optax.contrib.muon(
                rate,
                weight_decay=decay,
                adam_weight_decay=decay,
                adam_b1=0.9,
                adam_b2=0.95,
                consistent_rms=0.2,  # its updates are then as large as Adam's, so that one learning rate serves both
                muon_weight_dimension_numbers=muon_dimensions,
            )
    return optax.chain(optax.clip_by_global_norm(train.clip_norm), optimizer) if train.clip_norm else optimizer


def state_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """Bytes of the optimizer's state for the parameters of `model`, counted on the real state's shapes."""
    state = jax.eval_shape(make_optimizer(train).init, param_shapes(model))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def make_schedule(train: TrainConfig) -> optax.ScalarOrSchedule:
    """The learning rate by step: a number, or an optax schedule after a linear warm-up from 0."""
    peak, warmup = train.learning_rate, train.warmup_steps
    left = max(train.decay_steps - warmup, 1)
    match train.schedule:
        case "constant":
            after: Any = optax.constant_schedule(peak) if warmup else peak
        case "cosine":
            after = optax.cosine_decay_schedule(peak, left)
        case "linear":
            after = optax.linear_schedule(peak, 0.0, left)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


def _at(rate: optax.ScalarOrSchedule, step: Any) -> Any:
    return rate(step) if callable(rate) else rate


def matrix_axes(path: tuple[Any, ...], shape: tuple[int, ...]) -> MuonDimensionNumbers | None:
    """The axes of a decoder layer's kernel that its matmul sums over, and those it makes; None for anything else.

    Embeddings, the output head, norms and biases are anything else. A stack's leading axis is neither, so that each layer
    is a matrix of its own.

    Args:
        path: of the parameter, as `jax.tree_util.tree_map_with_path` gives it.
        shape: of the parameter, stacked or not.
    """
    keys = [getattr(key, "key", str(key)) for key in path]
    if keys[0] != "layers" or keys[-1] != "kernel":
        return None
    projection = keys[-2]
    num_in = 2 if projection == "out" else 1  # attention's output sums over heads and head_dim
    num_out = 2 if projection in ("query", "key", "value") else 1
    first = len(shape) - num_in - num_out
    return MuonDimensionNumbers(tuple(range(first, first + num_in)), tuple(range(first + num_in, len(shape))))


def muon_dimensions(params: Any) -> Any:
    """`matrix_axes` of every parameter, as `optax.contrib.muon` takes it."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: matrix_axes(path, leaf.shape), params)


def as_matrices(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` seeing each layer's kernel as `[in, out]` (stacked: `[layers, in, out]`) instead of heads apart."""

    def reshaped(tree: Any, shapes: Any) -> Any:
        return jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), tree, shapes)

    def flat(tree: Any) -> Any:
        def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            axes = matrix_axes(path, leaf.shape)
            if axes is None:
                return leaf
            ins: Any = axes.reduction_axis
            return leaf.reshape(*leaf.shape[: ins[0]], -1, math.prod(leaf.shape[ins[-1] + 1 :]))

        return jax.tree_util.tree_map_with_path(one, tree)

    def init(params: Any) -> Any:
        return optimizer.init(flat(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new_updates, state = optimizer.update(flat(updates), state, None if params is None else flat(params))
        return reshaped(new_updates, updates), state

    return optax.GradientTransformation(init, update)
