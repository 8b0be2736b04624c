"""Workloads of Flax NNX models: each step carries the state on, and trains nothing but the parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.policy.grammar import parse
from jaxremat.step.step import init_state, make_step
from tests.equality import assert_same_bits
from tests.helpers import quick_jit
from tests.nnx_models import Net, X, called, loss, with_shared_variables
from tests.program_checks import assert_close


def workload(form: str = "model", **fields: Any) -> jaxremat.Workload:
    params, of_params = Net(), loss
    if form == "state":
        graph, params = nnx.split(params)
        of_params = lambda state, x: loss(nnx.merge(graph, state), x)  # noqa: E731
    defaults = dict(loss=of_params, params=params, batch=X, optimizer=optax.sgd(0.1))
    return jaxremat.Workload(**{**defaults, **fields})


@functools.cache
def by_hand(num_steps: int, accumulate: int = 1) -> Any:
    """The losses and the state of a training as it is written without jaxremat."""

    def step(model: Any) -> Any:
        found = [nnx.value_and_grad(loss)(model, X) for _ in range(accumulate)]
        value, grads = jax.tree.map(lambda *leaves: sum(leaves) / accumulate, *found)
        nnx.update(model, jax.tree.map(lambda param, grad: param - 0.1 * grad, nnx.state(model, nnx.Param), grads))
        return value

    model = Net()
    return called(step, model, num_steps), nnx.state(model)


@pytest.mark.full
@pytest.mark.parametrize(("form", "accumulate"), [("model", 1), ("state", 1), ("model", 2)])
def test_steps_carry_the_state(form, accumulate):
    made, train = workload(form), TrainConfig(accumulate=accumulate)
    state, values = init_state(made, train, made.params), []
    step = quick_jit(make_step(made, train, parse("nothing")))
    batch = X if accumulate == 1 else jnp.stack([X] * accumulate)
    for _ in range(2):
        state, value = step(state, batch)
        values.append(value)
    want, of_model = by_hand(2, accumulate)
    assert_close(values, want)
    got = nnx.state(state.params) if form == "model" else state.params
    for kind in (nnx.Param, nnx.BatchStat):
        assert_close(nnx.filter_state(got, kind), nnx.filter_state(of_model, kind))
    assert_same_bits(nnx.filter_state(got, nnx.RngCount), nnx.filter_state(of_model, nnx.RngCount))


def test_only_params_are_trained():
    made = workload()
    assert made.num_params == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(Net(), nnx.Param)))
    state = jax.eval_shape(lambda: init_state(made, TrainConfig(grad_dtype="bfloat16"), made.params))
    new, _ = jax.eval_shape(make_step(made, TrainConfig(grad_dtype="bfloat16"), parse("nothing")), state, X)
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


def test_a_whole_step_returns_its_objects():
    """JAX removes what isn't returned, and the update of the weights would be gone."""
    made = jaxremat.Workload(step=update, args=(*model_and_optimizer(), X))
    _, (after, _) = jax.eval_shape(make_step(made, TrainConfig(), parse("none")), *made.abstract_args)
    assert nnx.state(after) == nnx.state(nnx.eval_shape(Net))


def model_and_optimizer() -> tuple[Any, Any]:
    """As shapes."""
    return nnx.eval_shape(lambda: (model := Net(), nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)))


def update(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


@pytest.mark.full
def test_a_step_under_nnx_jit_that_donates_nothing_has_a_remedy_of_nnx(h100):
    """`jax.jit` would update no object."""

    def wide() -> tuple[Any, Any]:
        model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    args = (*nnx.eval_shape(wide), jax.ShapeDtypeStruct((256, 1024), jnp.float32))
    made = jaxremat.Workload(step=nnx.jit(update), args=args)
    (found,) = (one for one in jaxremat.lint(made, target=h100) if one.rule == "not-donated")
    assert found.remedy == "nnx.jit(step, donate_argnames=('model', 'optimizer'))"


@pytest.mark.full
@pytest.mark.any_jax
def test_a_step_under_nnx_jit_is_compiled_as_it_is():
    """With its own donation, and with the objects that it updates. `nnx.jit` traces to an object around JAX's own."""
    made = jaxremat.Workload(step=nnx.jit(update, donate_argnums=(0, 1)), args=(*model_and_optimizer(), X))
    step: Any = make_step(made, TrainConfig(), parse("none"))
    given = jax.tree.leaves(step.trace(*made.abstract_args).traced.args_info)
    assert [leaf.donated for leaf in given] == [True] * (len(given) - 1) + [False]
    memory = jaxremat.lower_and_compile(step, made.abstract_args, "cpu").memory
    assert memory.output_bytes > sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(Net(), nnx.Param)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: workload(params=with_shared_variables()),
        lambda: step_of(lambda model, x: (setattr(model, "added", nnx.Variable(x.mean())), loss(model, x))[1]),
        lambda: step_of(lambda model, x: (model.eval(), loss(model, x))[1]),
    ],
    ids=["shared variables", "an added variable", "a changed attribute"],
)
def test_workloads_whose_next_step_would_differ_are_refused(make):
    with pytest.raises(UsageError):
        make()


def step_of(function: Any) -> Any:
    made = workload(loss=function)
    state = jax.eval_shape(lambda: init_state(made, TrainConfig(), made.params))
    return jax.eval_shape(make_step(made, TrainConfig(), parse("nothing")), state, X)
