"""The optimizers of a run, from optax, with schedule and clipping.

Muon and Adafactor treat each parameter as a matrix. A decoder's kernels have more axes: layers are stacked on a leading axis,
and attention's kernels have one axis for the heads and one for head_dim. `Workload.matrix_axes` says which axes of a kernel
make up the matrix's rows and columns. Without it, optax would orthogonalize the decoder's embedding and update every stacked
kernel with Adam.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.step.adam8 import scale_by_adam8
from jaxremat.workload.workload import Workload

#: By a parameter's path and shape, the axes of its matrix (`optax.contrib.MuonDimensionNumbers`), or None if it is no matrix.
MatrixAxes = Callable[[Any, tuple[int, ...]], Any]


def optimizer_of(workload: Workload, train: TrainConfig) -> optax.GradientTransformation:
    """The workload's own optimizer, or the optimizer of `train` if it has none.

    Raises:
        UsageError: complex parameters are to be trained by an optimizer that stores moments as real numbers.
    """
    if workload.optimizer:
        return workload.optimizer
    is_complex = any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves(workload.trained_params))
    if is_complex and train.optimizer in ("adamw-8bit", "adamw-bf16"):
        raise UsageError(
            f"--optimizer {train.optimizer} got complex parameters",
            allowed="real ones: its moments have no imaginary part",
            next_step="--optimizer adamw",
        )
    return make_optimizer(train, workload.matrix_axes)


def make_optimizer(train: TrainConfig, matrix_axes: MatrixAxes | None = None) -> optax.GradientTransformation:
    """The optimizer of `train`.

    Gradients are clipped by their global norm first where `train.clip_norm` is given.

    In all optimizers, weight decay is multiplied by the learning rate and applies to every parameter.

    Args:
        train: the training step.
        matrix_axes: which axes of a parameter make up a matrix, for Muon and Adafactor. By default optax's rules decide.
    """
    rate, decay = make_schedule(train), train.weight_decay
    match train.optimizer:
        case "adamw":
            optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay)
        case "adamw-bf16":
            optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay, mu_dtype=jnp.bfloat16)
        case "adamw-8bit":
            optimizer = optax.chain(
                scale_by_adam8(b1=0.9, b2=0.95), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
            )
        case "lion":
            optimizer = optax.lion(rate, b1=0.9, b2=0.99, weight_decay=decay)
        case "sgd-momentum":
            optimizer = optax.chain(
                optax.trace(decay=0.9), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
            )
        case "adafactor":
            optimizer = optax.adafactor(rate, weight_decay_rate=lambda step: decay * _at(rate, step))
            optimizer = as_matrices(optimizer, matrix_axes) if matrix_axes else optimizer
        case "muon":
            optimizer = optax.contrib.muon(
                rate,
                weight_decay=decay,
                adam_weight_decay=decay,
                adam_b1=0.9,
                adam_b2=0.95,
                consistent_rms=0.2,  # Muon's updates are then as large as Adam's, and one learning rate works for both
                muon_weight_dimension_numbers=muon_dimensions(matrix_axes) if matrix_axes else None,
            )
    return optax.chain(optax.clip_by_global_norm(train.clip_norm), optimizer) if train.clip_norm else optimizer


def state_bytes(workload: Workload, train: TrainConfig) -> int:
    """Bytes of the optimizer's state for the parameters of `workload`, counted on its shapes."""
    state = jax.eval_shape(optimizer_of(workload, train).init, workload.trained_params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def make_schedule(train: TrainConfig) -> optax.ScalarOrSchedule:
    """The learning rate by step: a constant number, or an optax schedule.

    A warm-up rises linearly from 0.
    """
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


def muon_dimensions(matrix_axes: MatrixAxes) -> Callable[[Any], Any]:
    """`matrix_axes` of every parameter of a tree, in the form that `optax.contrib.muon` takes."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, leaf: matrix_axes(path, leaf.shape), params)


def as_matrices(optimizer: optax.GradientTransformation, matrix_axes: MatrixAxes) -> optax.GradientTransformation:
    """`optimizer`, which is given each layer's kernel as a matrix `[in, out]`.

    A stack of kernels is `[layers, in, out]`.

    The kernels of attention have one axis for the heads and one for head_dim otherwise.
    """

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
