"""The names of NNX variables among the arguments of a train step."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxremat.policy.jax_private import argument_names
from jaxremat.xla.argument_names import is_of_nnx, name_variables


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


@nnx.jit
def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))


def args() -> tuple[Any, ...]:
    made = nnx.eval_shape(lambda: (model := Net(nnx.Rngs(0)), nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)))
    return *made, jax.ShapeDtypeStruct((3, 4), jnp.float32)


@pytest.mark.full
def test_variables_are_named_as_their_author_does():
    traced: Any = step.trace(*(given := args()))
    traced = traced.traced
    before = argument_names(traced.jaxpr)
    name_variables(traced.jaxpr, given)
    names = argument_names(traced.jaxpr)
    assert is_of_nnx(traced.jaxpr)
    assert re.search(r"model\.states\[0\]\[\d+\]", before[0])
    assert names[:3] == ("model.head.bias", "model.head.kernel", "model.layers[0].bias")
    assert "optimizer.opt_state[0].trace['layers'][1]['kernel']" in names
    assert names[-1] == "x"
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert all(f'loc("{name}")' in lowered for name in names if name.startswith("model"))


@pytest.mark.full
def test_names_of_an_object_that_has_a_variable_twice_stay():
    """Its list has the variable once, and the object's own paths have it twice."""

    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.second = self.first

    @nnx.jit
    def run(model: Tied, x: jax.Array) -> jax.Array:
        return model.second(model.first(x))

    given = Tied(nnx.Rngs(0)), jnp.ones((3, 4))
    traced: Any = run.trace(*given)
    before = argument_names(traced.traced.jaxpr)
    name_variables(traced.traced.jaxpr, given)
    assert argument_names(traced.traced.jaxpr) == before


def test_names_of_other_programs_stay():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    given = {"w": shape}, [shape, shape]
    traced = jax.jit(lambda params, batch: params["w"] + batch[0] + batch[1]).trace(*given)
    name_variables(traced.jaxpr, given)
    assert argument_names(traced.jaxpr) == ("params['w']", "batch[0]", "batch[1]")
    assert not is_of_nnx(traced.jaxpr)
