"""The training step of a workload as one pure function of state and batch.

It computes the loss and its gradients, and updates the parameters.

    step = jax.jit(make_step(workload, train, policy), donate_argnums=0)
    state, loss = step(state, batch)

The caller donates the state (`donate_argnums=0`). Its buffers are reused for the new state, so that parameters and optimizer
state are in memory once. A workload that is a step itself is compiled as it is.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.mesh.sharding import (
    LeafOnMesh,
    array_bytes,
    batch_shardings,
    leaves_on_mesh,
    replicated,
    state_shardings,
    tracing_on,
)
from jaxremat.policy.spec import WITHOUT_LAYERS, Policy
from jaxremat.policy.state import has_objects, with_objects
from jaxremat.policy.tree import combine
from jaxremat.step.microbatches import sample_axes, split, step_batch
from jaxremat.step.optimizer import optimizer_of
from jaxremat.workload.workload import Workload, loss_and_aux


@flax.struct.dataclass
class TrainState:
    """The state of a training: steps done, the parameters, and the optimizer's state."""

    step: jax.Array
    params: Any
    opt_state: Any


Step = Callable[..., Any]
#: What a random key of a training is for, as a number that its seed's key is folded with.
_PARAMS, _STEPS, _EVALUATION = range(3)


def params_key(seed: int) -> jax.Array:
    """The random key that `Workload.init` gets in a training with this seed."""
    return jax.random.fold_in(jax.random.key(seed), _PARAMS)


def step_key(seed: int, step: Any) -> jax.Array:
    """The random key of the step after `step` steps.

    No two seeds share one, nor a step and the parameters.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), step)


def evaluation_key(seed: int) -> jax.Array:
    """The random key of every evaluation."""
    return jax.random.fold_in(jax.random.key(seed), _EVALUATION)


def init_state(workload: Workload, train: TrainConfig, params: Any = None) -> TrainState:
    """The state before the first step, the same under every policy.

    `jax.eval_shape` of this function gives its shapes.

    Args:
        workload: the workload.
        train: the training step; its seed makes the parameters.
        params: the parameters in place of those that `workload.init` makes.
    """
    if params is None:
        assert workload.init is not None
        params = workload.init(params_key(train.seed))
    params = workload.stored(params)
    floats, _ = workload.split(params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer_of(workload, train).init(floats))


def make_step(workload: Workload, train: TrainConfig, policy: Policy) -> Step:
    """The function `step(state, batch) -> (state, loss)`.

    Compile it with `jax.jit(..., donate_argnums=0)`.

    With `train.accumulate` above 1, the microbatches of `batch` run one by one in a scan. Their gradients are summed
    in one further buffer, in the gradients' dtype. The update is that of the whole batch at once, except for the order and the
    rounding of the sums, and for dropout, whose masks differ by microbatch. In bfloat16, with its 8 bits, a sum of more than
    about 128 equal terms stops growing. `step/microbatches.py` says how the microbatches lie in `batch`.

    If the loss has auxiliary values, the result is `(state, (loss, aux))` with those of the last microbatch. Only float leaves
    of the parameters are differentiated and updated, and in an NNX model only its parameters (`nnx.Param`). What the loss
    changes of the model's other variables is in the new state, and each microbatch begins with those of the one before. Frozen
    parameters (`Workload.trainable`) have no gradients and stay as they are.

    A workload that is a step is returned as it is. NNX objects among its arguments are results too, as `nnx.jit` makes them.

    Raises:
        UsageError: the workload is a step, and a policy or microbatches are requested.
    """
    if workload.step is not None:
        _check_whole_step(workload, train, policy)
        step = workload.step
        if _is_jitted(step) and workload.donate_argnums != ():  # which the workload says of it, and not jax.jit
            step = _plain(step)
        return with_objects(step) if has_objects(workload.args) and not _is_jitted(step) else step
    loss, optimizer = workload.loss_with(policy), optimizer_of(workload, train)

    def value_and_grad(params: Any, batch: Any, *key: jax.Array) -> tuple[tuple[jax.Array, Any, Any], Any]:
        floats, others = workload.split(params)

        def of_floats(floats: Any) -> tuple[jax.Array, Any]:
            whole = combine(floats, others)
            value, aux = loss_and_aux(loss(whole, batch, *key))
            return value, (aux, _state_after(others, workload.split(whole)[1]) if has_objects(whole) else None)

        (value, (aux, state)), grads = jax.value_and_grad(of_floats, has_aux=True)(floats)
        return (value, aux, state), grads

    def loss_and_grads(params: Any, batch: Any, *key: jax.Array) -> tuple[tuple[jax.Array, Any, Any], Any]:
        if train.accumulate == 1:
            return value_and_grad(params, batch, *key)
        floats, others = workload.split(params)
        parts, microbatch = split(workload, train.accumulate, batch)

        def add(carry: Any, part: tuple[Any, ...]) -> tuple[Any, None]:
            sums, _, state = carry
            whole = combine(floats, others if state is None else state)
            (value, aux, state), grads = value_and_grad(whole, microbatch(part[0]), *part[1:])
            return (jax.tree.map(lambda a, b: a + b / train.accumulate, sums, (value, grads)), aux, state), None

        keys = [jax.random.split(k, train.accumulate) for k in key]
        of_loss, of_aux = workload.abstract_result
        dtype = jnp.promote_types(of_loss.dtype, jnp.float32)
        zeros = jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, floats)
        no_aux = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), of_aux)
        first = zeros, no_aux, others if has_objects(params) else None
        ((value, grads), aux, state), _ = jax.lax.scan(add, first, (parts, *keys))
        return (value, aux, state), grads

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        key = [step_key(train.seed, state.step)] if workload.takes_key else []
        (value, aux, new), grads = loss_and_grads(_cast(workload, state.params, train.grad_dtype), batch, *key)
        floats, others = workload.split(state.params)
        # The gradient of a complex number is the conjugate of the direction of descent (JAX, `jax.grad`).
        grads = jax.tree.map(lambda grad, param: jnp.conj(grad).astype(param.dtype), grads, floats)
        updates, opt_state = optimizer.update(grads, state.opt_state, floats)
        params = combine(optax.apply_updates(floats, updates), others if new is None else new)
        return TrainState(state.step + 1, params, opt_state), (value, *aux) if aux else value

    return train_step


def abstract_args(workload: Workload, train: TrainConfig) -> tuple[Any, ...]:
    """The shapes of the step's arguments. Nothing is allocated."""
    if workload.step is not None:
        return _as_jitted(workload) if workload.mesh is not None and _is_jitted(workload.step) else workload.abstract_args
    with tracing_on(workload.mesh, is_own=True):
        state = jax.eval_shape(lambda params: init_state(workload, train, params), workload.abstract_params)
    state = state.replace(params=workload.abstract_params)
    return state, step_batch(workload, train.accumulate)


def _is_jitted(step: Step) -> bool:
    return hasattr(step, "trace")


def _plain(jitted: Step) -> Step:
    """A jitted function as one that JAX may jit once more."""

    @functools.wraps(jitted, updated=())
    def step(*args: Any) -> Any:
        return jitted(*args)

    return step


@functools.lru_cache(maxsize=4)
def _as_jitted(workload: Workload) -> tuple[Any, ...]:
    """The shapes of a jitted step's arguments on the workload's own mesh.

    Those that have no sharding of their own have that of the step's `in_shardings`.
    """
    assert workload.step is not None
    own, tree = jax.tree.flatten(workload.abstract_args)
    given = [isinstance(getattr(leaf, "sharding", None), NamedSharding) for leaf in jax.tree.leaves(workload.args)]
    if all(given):
        return workload.abstract_args
    with tracing_on(workload.mesh, is_own=True):
        without = tree.unflatten([leaf if has else leaf.update(sharding=None) for leaf, has in zip(own, given, strict=True)])
        jaxpr = jax.make_jaxpr(_plain(workload.step))(*without).jaxpr
    inside = next(eqn for eqn in jaxpr.eqns if "in_shardings" in eqn.params)
    by_var = dict(zip(inside.invars, inside.params["in_shardings"], strict=True))
    found = [by_var.get(var) for var in jaxpr.invars]
    return tree.unflatten(
        [
            leaf if has or not isinstance(of, NamedSharding) else leaf.update(sharding=of)
            for leaf, has, of in zip(own, given, found, strict=True)
        ]
    )


def step_shardings(mesh: jax.sharding.Mesh, workload: Workload, train: TrainConfig) -> tuple[tuple[Any, ...], Any]:
    """The shardings of the step's state and batch, and of its results, on a mesh.

    The arguments of a whole step bring their own shardings, or its `in_shardings` do. XLA chooses those of its results (None).
    """
    if workload.step is not None:
        return batch_shardings(mesh, abstract_args(workload, train), [None] * len(jax.tree.leaves(workload.args))), None
    state, batch = abstract_args(workload, train)
    others = PartitionSpec() if workload.mesh is not None else None
    of_state = state_shardings(mesh, state, state.params, workload.logical_axes, others=others)
    return (of_state, batch_shardings(mesh, batch, sample_axes(workload, train.accumulate))), (of_state, replicated(mesh))


def arguments_on_mesh(mesh: jax.sharding.Mesh, workload: Workload, train: TrainConfig) -> tuple[LeafOnMesh, ...]:
    """How the arguments of the step lie on a mesh.

    Those of a workload that is a step have the names of its own arguments.
    """
    args, shardings = abstract_args(workload, train), step_shardings(mesh, workload, train)[0]
    if workload.step is not None:
        named = inspect.signature(workload.step).bind
        return leaves_on_mesh(named(*args).arguments, named(*shardings).arguments)
    return (*leaves_on_mesh(args[0], shardings[0]), *leaves_on_mesh(args[1], shardings[1], is_batch=True))


def donated(workload: Workload) -> int | tuple[int, ...]:
    """The numbers of the arguments of the workload's step whose buffers its results may reuse."""
    return 0 if workload.step is None else workload.donate_argnums


def state_and_argument_bytes(workload: Workload, train: TrainConfig) -> int:
    """Bytes of a step's state: its parameters and optimizer state.

    For a workload that is a step, of all its arguments.
    """
    args = abstract_args(workload, train)
    state = args if workload.step is not None else args[0]
    return sum(map(array_bytes, jax.tree.leaves(state)))


def _check_whole_step(workload: Workload, train: TrainConfig, policy: Policy) -> None:
    """Raises UsageError for a policy or microbatches around a workload that is a step."""
    what = workload.name or "the workload"
    if policy not in WITHOUT_LAYERS:
        raise UsageError(
            f"policy {policy} was requested, and {what} is a whole step",
            allowed="none or own, which compile the step as it is",
            cause="a policy goes around layers, before the gradient is taken",
            next_step="give the workload's loss: Workload(loss=f, params=..., batch=...)",
        )
    if train.accumulate != 1:
        raise UsageError(
            f"{train.accumulate} microbatches were requested, and {what} is a whole step",
            cause="microbatches are made around a loss",
            next_step="leave --accumulate and --global-batch out, or give the workload's loss",
        )


def _cast(workload: Workload, params: Any, dtype: str | None) -> Any:
    """The parameters with their trained leaves in `dtype`."""
    if dtype is None:
        return params
    floats, others = workload.split(params)
    return combine(jax.tree.map(lambda leaf: leaf.astype(dtype), floats), others)


def _state_after(before: Any, after: Any) -> Any:
    """What the loss made of the leaves of an NNX model that aren't trained.

    Raises:
        UsageError: it added or removed some, or one has another shape or dtype. The next step couldn't begin with them.
    """
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (before, after)]
    if jax.tree.structure(before) != jax.tree.structure(after) or shapes[0] != shapes[1]:
        raise UsageError(
            "a loss that adds or removes state of its NNX model, or gives it another shape, dtype or attribute",
            allowed="new values of the variables that the model has",
            cause="a sow outside of nnx.capture, a variable made in the call, or model.train() and model.eval() in the loss",
            next_step="return intermediates as auxiliary values, nnx.pop(model, nnx.Intermediate); call model.train() where the "
            "model is made",
        )
    return after
