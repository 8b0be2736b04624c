"""What a step is run with: the state before the first step, and batches without end.

    next(inputs(workload, train))       # a batch of the workload's own batches, or random values of its shapes

Random values are normally distributed for floats, and zeros and ones for integers and booleans, because every table and every
number of classes has these two. Measured steps may have batches of their own (`Workload.measured`).
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxremat.config import TrainConfig
from jaxremat.policy.tree import is_float
from jaxremat.step.microbatches import joined
from jaxremat.step.step import TrainState, init_state
from jaxremat.workload.workload import Workload, is_concrete


def first_state(
    workload: Workload, train: TrainConfig, device: Any, shardings: Any = None, params: Any = None
) -> TrainState | None:
    """The state before the first step.

    None for a workload that is a step, whose arguments are its inputs.

    Args:
        workload: the workload.
        train: the training step.
        device: where the state is put, if it isn't on a mesh.
        shardings: how the state lies on a mesh. Each device then makes only its part.
        params: the parameters in place of the workload's first ones.
    """
    if workload.step is not None:
        return None
    if params is not None:
        params = workload.stored(params)  # before they are on the device, so that it holds frozen ones in their dtype alone
    elif workload.init is not None:
        return jax.jit(lambda: init_state(workload, train), out_shardings=shardings)()
    else:
        params = _own_buffers(workload.params)
    params = jax.device_put(params, device) if shardings is None else placed(params, shardings.params)
    return jax.jit(lambda params: init_state(workload, train, params), donate_argnums=0, out_shardings=shardings)(params)


def placed(tree: Any, shardings: Any) -> Any:
    """A tree of arrays that this process has whole, on a mesh.

    Each process supplies only what its own devices hold.
    """

    def one(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        whole = leaf if is_key else np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, tree, shardings)


def inputs(workload: Workload, train: TrainConfig, first: int = 0, *, measured: bool = False) -> Iterator[Any]:
    """The batches of the steps from number `first` on, without end.

    Each has the step's microbatches. With `measured` they are those of measured steps.

    Where a workload's own batches end, too few microbatches for a step are dropped. For a whole step, copies of its arguments.
    """
    if workload.step is not None:
        while True:
            yield _own_buffers(workload.args)
    first *= train.accumulate
    own = workload.measured if measured else None
    microbatches = own.batches(first) if own else microbatches_of(workload, train.seed, first)
    if train.accumulate == 1:
        yield from microbatches
    while len(some := list(itertools.islice(microbatches, train.accumulate))) == train.accumulate:
        yield joined(workload, some)


def microbatches_of(workload: Workload, seed: int, first: int = 0) -> Iterator[Any]:
    """The workload's own batches, from number `first` on.

    Without them its batch again and again, or random values where the batch is shapes.
    """
    if workload.batches is not None:
        return workload.batches_from(first)
    if is_concrete(workload.batch):
        return itertools.repeat(workload.batch)
    return _random_batches(workload, seed, first)


def said_inputs(workload: Workload, *, measured: bool = True) -> Iterator[str]:
    """Lines that say where the batches of steps come from.

    The steps are those that are `measured`, or else those of a training.

    There are none for a workload's own batches, or a whole step.
    """
    if measured and workload.measured is not None:
        yield workload.measured.said
    elif workload.step is None and workload.batches is None:
        if is_concrete(workload.batch):
            yield "the workload's own batch, in every step"
            return
        yield "random values of the batch's shapes"
        if any(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(workload.abstract_batch)):
            yield "integers are zeros and ones: the gradient of an embedding may take longer than"
            yield "with real tokens; a workload with arrays as its batch, or batches=, has these"


def _own_buffers(tree: Any) -> Any:
    """A tree of arrays with buffers of its own, which a step may reuse for its results."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.array(jax.random.key_data(leaf), copy=True), impl=jax.random.key_impl(leaf))
        return np.array(leaf)

    return jax.tree.map(copied, tree)


def _random_batches(workload: Workload, seed: int, first: int) -> Iterator[Any]:
    """Random batches from number `first` on.

    What all microbatches share is that of batch 0 in all of them.
    """
    tree, leaves = jax.tree.structure(workload.batch), jax.tree.leaves(workload.abstract_batch)
    is_shared = [leaf.is_shared for leaf in workload.counted.leaves]

    def batch(number: int) -> list[Any]:
        random = np.random.default_rng((seed, number))
        return [_random(leaf, random) for leaf in leaves]

    shared = batch(0) if any(is_shared) else leaves
    for number in itertools.count(first):
        own = batch(number)
        yield tree.unflatten([a if both else b for a, b, both in zip(shared, own, is_shared, strict=True)])


def _random(leaf: jax.ShapeDtypeStruct, random: np.random.Generator) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(int(random.integers(2**31))), leaf.shape)
    if is_float(leaf):
        return np.asarray(random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
    return np.asarray(random.integers(0, 2, leaf.shape)).astype(leaf.dtype)
