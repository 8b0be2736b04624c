"""A policy that saves values by `autoname`'s names keeps those values alone, and computes none of them again."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from jaxremat.policy.autoname import autoname
from tests.small_models import KEYS, NormBlock, Scanned, rematted, save_only

W, X = jnp.ones((4, 4)), jnp.ones((3, 4))


def residuals(function: Any, *args: Any) -> list[str]:
    """The names of the values that differentiation keeps, arguments left out, and operations for those without a name."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(function, *args)[1]))(*args).jaxpr
    producers = {}
    for eqn in jaxpr.eqns:
        label = eqn.params["name"] if eqn.primitive.name == "name" else eqn.primitive.name
        label = producers[eqn.invars[0]] if eqn.primitive.name == "reduce_precision" else label
        producers.update(dict.fromkeys(eqn.outvars, label))
    return sorted(producers[var] for var in jaxpr.outvars if var in producers)


def scores(w, x):
    return jnp.sin(jax.nn.softmax(jnp.tanh(x @ w) @ w) @ x.T)


@pytest.mark.parametrize("kept", [["dot_general"], ["dot_general", "dot_general.1"], ["exp"], ["tanh", "exp", "div"]])
def test_saving_by_an_automatic_name_keeps_that_value(kept):
    assert residuals(jax.checkpoint(autoname(scores), policy=save_only(*kept)), W, X) == sorted(kept)


def equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize(
    ("kept", "matmuls", "exps", "tanhs"),
    [
        ((), 2, 1, 1),
        (("dot_general",), 1, 1, 1),
        (("dot_general", "exp"), 0, 0, 1),
        (("tanh", "exp"), 0, 0, 0),
        (("tanh", "sub"), 0, 1, 0),
    ],
)
def test_what_is_kept_is_not_computed_again(kept, matmuls, exps, tanhs):
    """The derivatives of exp and tanh read exp's and tanh's result: it must be the saved one that they read."""
    saved = jax.checkpoint(autoname(scores), policy=save_only(*kept, "dot_general.2"))
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: saved(w, x).sum(), argnums=(0, 1)))(W, X)
    (backward,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name in ("checkpoint", "remat2")]
    counts = Counter(eqn.primitive.name for inner in core.jaxprs_in_params(backward.params) for eqn in equations(inner))
    assert (counts["dot_general"] - 6, counts["exp"], counts["tanh"]) == (matmuls, exps, tanhs)


def test_a_name_in_a_loop_saves_in_the_loop():
    model = Scanned(rematted(autoname(NormBlock), "Dense_0/dot_general"), 3)
    x = jnp.ones((2, 8))
    variables = jax.eval_shape(model.init, KEYS, x)

    def run(variables, x):
        return model.apply(variables, x, rngs={"dropout": KEYS["dropout"]}, mutable=["batch_stats"])[0]

    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(run, *args)[1]))(variables, x)
    assert [var.aval.shape for var in jaxpr.jaxpr.outvars].count((3, 2, 16)) == 1
