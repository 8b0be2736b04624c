"""`with_policy` changes memory and time, and nothing that a program computes.

First some programs that Hypothesis draws, the same ones in every run. `python -m experiments.equality` checks 500. Then the cases
that are hard, each on its own. `tests/program_checks.py` says what "the same" means.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import jaxremat
from experiments.equality import draw
from experiments.equality import main as equality
from tests.equality import assert_same_bits
from tests.helpers import quick_jit
from tests.op_by_op import op_by_op
from tests.program_checks import assert_close, check_program
from tests.programs import DrawnProgram, Stack, build, drawn_programs

WIDTH, LAYERS = 8, 4
#: A program in each layout with a policy. In a loop every:2 has a backward pass written by hand (`policy/stack.py`).
BOTH = (("unrolled", "nothing"), ("scan", "every:2"))
POLICIES = ("nothing", "dots", "every:2", "1*nothing|1*save:wide")


@settings(
    max_examples=20, derandomize=True, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
@given(drawn_programs())
def test_drawn_programs(drawn):
    check_program(drawn)


# Programs written out. Each is a loss of (params, batch), and has layers under every policy of `POLICIES`.


def weights(seed: int = 0, num_layers: int = LAYERS) -> list[dict[str, jax.Array]]:
    random = np.random.default_rng(seed)
    shapes = {"in": (WIDTH, 2 * WIDTH), "out": (2 * WIDTH, WIDTH)}
    return [
        {name: jnp.asarray(random.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(num_layers)
    ]


def stacked(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


X = jnp.asarray(np.random.default_rng(9).normal(0, 1, (4, WIDTH)), jnp.float32)


def dense(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w["in"], "wide")) @ w["out"]


def plain_loss(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = dense(w, x)
    return jnp.square(x).mean()


def scanned_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.square(jax.lax.scan(lambda x, w: (dense(w, x), None), x, params)[0]).mean()


def keys_in_the_carry(params: Any, batch: Any) -> jax.Array:
    """The scan carries a random key and a counter beside x."""

    def layer(carry: Any, w: Any) -> Any:
        x, key, count = carry
        key, own = jax.random.split(key)
        x = dense(w, x)
        return (jnp.where(jax.random.bernoulli(own, 0.8, x.shape), x, 0), key, count + 1), count

    (x, _, count), places = jax.lax.scan(layer, (batch["x"], batch["key"], 0), params)
    return jnp.square(x).mean() * count + places.sum()


def loss_in_the_carry(params: Any, x: jax.Array) -> jax.Array:
    """The scan carries a router's loss, and runs from the last layer to the first."""

    def layer(carry: Any, w: Any) -> Any:
        x, total = carry
        x = dense(w, x)
        return (x, total + jnp.square(x).mean()), None

    (x, total), _ = jax.lax.scan(layer, (x, jnp.zeros(())), params, reverse=True)
    return jnp.square(x).mean() + 0.1 * total


def integers_among_the_parameters(params: Any, x: jax.Array) -> jax.Array:
    for w in params["layers"]:
        x = dense(w, x)[:, params["order"]]
    return jnp.square(x).mean()


def mapped_layers(params: Any, x: jax.Array) -> jax.Array:
    """Each layer is vmapped over the rows of x."""
    for w in params:
        x = jax.vmap(dense, in_axes=(None, 0))(w, x)
    return jnp.square(x).mean()


def outputs_of_all_layers(params: Any, x: jax.Array) -> jax.Array:
    """The loss reads each layer's output, as deep supervision does."""
    outputs = []
    for w in params:
        x = dense(w, x)
        outputs.append(x)
    return jnp.square(jnp.stack(outputs)).mean()


def skips(params: Any, x: jax.Array) -> jax.Array:
    """Each layer in the second half reads the output of one in the first half, as in a U-Net."""
    outputs: list[jax.Array] = []
    for i, w in enumerate(params):
        x = dense(w, x + outputs[LAYERS - 1 - i] if i >= LAYERS // 2 else x + 0 * x)
        outputs.append(x)
    return jnp.square(x).mean()


def one_encoder_for_two_inputs(params: Any, x: jax.Array) -> jax.Array:
    def encoded(x: jax.Array) -> jax.Array:
        for w in params:
            x = dense(w, x)
        return x

    return jnp.square(encoded(x) - 2 * encoded(-x)).mean()


def a_constant_array(params: Any, x: jax.Array) -> jax.Array:
    """The layers read an array that is no argument."""
    mask = jnp.asarray(np.arange(WIDTH) % 2, jnp.float32)
    for w in params:
        x = dense(w, x * mask)
    return jnp.square(x).mean()


def bfloat16_parameters(params: Any, x: jax.Array) -> jax.Array:
    return plain_loss(params, x.astype(jnp.bfloat16)).astype(jnp.float32)


def two_inputs_with_checkpoints(params: Any, x: jax.Array) -> jax.Array:
    def encoded(x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.checkpoint(dense)(w, x)
        return x

    return jnp.square(encoded(x) - 2 * encoded(-x)).mean()


KEY = jax.random.key(5)
CASES: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "unrolled": (plain_loss, weights(), X),
    "scan": (scanned_loss, stacked(weights()), X),
    "keys in the carry": (keys_in_the_carry, stacked(weights()), {"x": X, "key": KEY}),
    "raw keys in the carry": (keys_in_the_carry, stacked(weights()), {"x": X, "key": jax.random.PRNGKey(5)}),
    "loss in the carry": (loss_in_the_carry, stacked(weights()), X),
    "integers": (integers_among_the_parameters, {"layers": weights(), "order": jnp.arange(WIDTH)[::-1]}, X),
    "vmapped layers": (mapped_layers, weights(), X),
    "outputs of all layers": (outputs_of_all_layers, weights(), X),
    "skips": (skips, weights(), X),
    "two inputs": (one_encoder_for_two_inputs, weights(num_layers=LAYERS // 2), X),
    "two inputs, checkpoints": (two_inputs_with_checkpoints, weights(num_layers=LAYERS // 2), X),
    "a constant array": (a_constant_array, weights(), X),
    "bfloat16": (bfloat16_parameters, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights()), X),
}


def gradients(loss: Callable[..., Any], *args: Any) -> Any:
    """The value and the gradients by float parameters, compiled."""
    value, grads = quick_jit(jax.value_and_grad(loss, allow_int=True))(*args)
    return value, [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


@functools.cache
def unchanged(case: str) -> Any:
    """What the program computes without a policy: op by op, and compiled with its gradients."""
    loss, params, batch = CASES[case]
    return op_by_op(loss, params, batch), gradients(loss, params, batch)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_hard_programs(case, policy):
    loss, params, batch = CASES[case]
    under_policy = jaxremat.with_policy(loss, policy)
    assert jaxremat.find_layers(loss, params, batch).num_layers == LAYERS
    value, trained = unchanged(case)
    assert_same_bits(op_by_op(under_policy, params, batch), value)
    assert_close(gradients(under_policy, params, batch), trained)


# The transformations of JAX around a function under a policy.


def test_op_by_op_is_jax_without_jit():
    """What the drawn programs are compared with is what JAX computes under `disable_jit`."""
    stacks = (Stack(("attention", "dropout", "branch"), 3), Stack(("recurrence", "loop", "custom_vjp"), 3, "scan"))
    loss, params, batch = build(DrawnProgram(stacks, inside=("jit", "accumulation"), aux=True))
    with jax.disable_jit():
        want = loss(params, batch)
    assert_same_bits(op_by_op(loss, params, batch), want)


@pytest.mark.parametrize("case", ["unrolled", "scan", "keys in the carry"])
def test_without_jit(case):
    loss, params, batch = CASES[case]
    under_policy = jaxremat.with_policy(loss, "dots")
    with jax.disable_jit():
        assert_same_bits(under_policy(params, batch), loss(params, batch))
    assert_close(jax.value_and_grad(under_policy)(params, batch), jax.value_and_grad(loss)(params, batch))


@pytest.mark.parametrize(("case", "policy"), BOTH)
def test_vmap_of_a_function_under_a_policy(case, policy):
    loss, params, x = CASES[case]
    under_policy = jaxremat.with_policy(loss, policy)
    for in_axes, args in (((None, 0), (params, jnp.stack([x, 2 * x]))), ((0, None), (stacked([params, params]), x))):
        got, want = (
            quick_jit(jax.vmap(jax.value_and_grad(function), in_axes=in_axes))(*args) for function in (under_policy, loss)
        )
        assert_close(got, want)


@pytest.mark.parametrize(("case", "policy"), BOTH)
def test_gradient_by_a_value_of_an_outer_function(case, policy):
    """The function under the policy reads a value that is differentiated outside of it."""
    loss, params, x = CASES[case]

    def outer(wrap: Callable[..., Any]) -> Any:
        def of_scale(scale: jax.Array) -> jax.Array:
            return wrap(lambda params, x: loss(jax.tree.map(lambda leaf: scale * leaf, params), x / scale))(params, x)

        return quick_jit(jax.value_and_grad(of_scale))(jnp.asarray(0.7))

    assert_close(outer(lambda function: jaxremat.with_policy(function, policy)), outer(lambda function: function))


@pytest.mark.parametrize(("case", "policy"), BOTH)
def test_microbatches_with_the_gradient_inside_the_loop(case, policy):
    loss, params, x = CASES[case]

    def accumulated(function: Callable[..., Any]) -> Any:
        def body(total: Any, x: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(function)(params, x)), None

        return quick_jit(lambda xs: jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)[0])(jnp.stack([x, 2 * x]))

    assert_close(accumulated(jaxremat.with_policy(loss, policy)), accumulated(loss))


def test_gradient_of_a_gradient():
    def squared_norm(function: Callable[..., Any]) -> Any:
        def of_params(params: Any) -> Any:
            return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(jax.grad(function)(params, X)))

        return quick_jit(jax.value_and_grad(of_params))

    for case in ("unrolled", "scan"):
        loss, params, _ = CASES[case]
        assert_close(squared_norm(jaxremat.with_policy(loss, "dots"))(params), squared_norm(loss)(params))


@pytest.mark.parametrize("case", ["unrolled", "scan"])
def test_donated_parameters(case):
    loss, params, x = CASES[case]

    def step(params: Any, x: jax.Array, function: Callable[..., Any]) -> Any:
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, jax.grad(function)(params, x))

    given_away = jax.tree.map(jnp.copy, params)
    got = quick_jit(lambda p, x: step(p, x, jaxremat.with_policy(loss, "every:2")), donate_argnums=0)(given_away, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given_away))
    assert_close(got, quick_jit(lambda p, x: step(p, x, loss))(params, x))


def test_gradients_by_all_arguments():
    for case in ("unrolled", "scan"):
        loss, params, x = CASES[case]
        got, want = (
            quick_jit(jax.grad(function, argnums=(0, 1)))(params, x)
            for function in (jaxremat.with_policy(loss, "nothing"), loss)
        )
        assert_close(got, want)


# What else a loss may take, return and do.


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(5)], ids=["typed", "raw"])
def test_dropout_masks_come_from_the_same_keys(key):
    """Layers in a loop whose keys are split from one, and unrolled ones that fold the key with their number."""
    for written, keys in (("unrolled", "folded"), ("scan", "split")):
        loss, params, batch = build(DrawnProgram((Stack(("dense", "dropout"), 4, written),), keys=keys))
        under_policy = quick_jit(jax.value_and_grad(jaxremat.with_policy(loss, "nothing")))
        value, grads = quick_jit(jax.value_and_grad(loss))(params, {**batch, "key": key})
        assert_close(under_policy(params, {**batch, "key": key}), (value, grads))
        assert abs(under_policy(params, {**batch, "key": jax.random.split(key)[0]})[0] - value) > 1e-4


def test_a_custom_derivative_stays_the_author_s():
    """A layer whose gradient is written by hand, and isn't that of its values."""

    @jax.custom_vjp
    def doubled(x: jax.Array) -> jax.Array:
        return x

    doubled.defvjp(lambda x: (x, ()), lambda _, gradient: (2 * gradient,))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = doubled(dense(w, x))
        return jnp.square(x).mean()

    got = gradients(jaxremat.with_policy(loss, "nothing"), weights(), X)
    assert_close(got, gradients(loss, weights(), X))
    assert not np.allclose(got[1][0], gradients(plain_loss, weights(), X)[1][0], rtol=0.5)


def test_results_and_arguments_that_are_no_arrays():
    def loss(params: Any, x: jax.Array, train: bool, *, scale: float = 1.0, what: str) -> Any:
        value = (plain_loss if train else scanned_loss)(params, x * scale)
        return value, {"what": what, "value": value, "none": None, "count": 3}

    args, named = (weights(), X, True), {"scale": 2.0, "what": "text"}
    value, aux = jaxremat.with_policy(loss, "dots")(*args, **named)
    want, want_aux = loss(*args, **named)
    assert (aux["what"], aux["none"], aux["count"]) == ("text", None, 3)
    np.testing.assert_allclose([value, aux["value"]], [want, want_aux["value"]], rtol=1e-6)


@pytest.mark.parametrize("case", ["unrolled", "scan"])
def test_what_layers_print_is_printed(case, capfd):
    def printing(w: Any, x: jax.Array) -> jax.Array:
        x = dense(w, x)
        jax.debug.print("a layer: {}", x.shape[0])
        return x

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if case == "scan":
            return jnp.square(jax.lax.scan(lambda x, w: (printing(w, x), None), x, params)[0]).mean()
        for w in params:
            x = printing(w, x)
        return jnp.square(x).mean()

    _, params, x = CASES[case]
    under_policy = jaxremat.with_policy(loss, "nothing")
    assert_same_bits(quick_jit(under_policy)(params, x), quick_jit(loss)(params, x))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["a layer: 4"] * 2 * LAYERS
    assert_close(gradients(under_policy, params, x), gradients(loss, params, x))


def test_a_function_under_two_policies_has_the_outer_one():
    loss, params, x = CASES["unrolled"]
    twice = jaxremat.with_policy(jaxremat.with_policy(loss, "dots"), "nothing")
    assert jaxremat.find_layers(jaxremat.with_policy(loss, "dots"), params, x).num_layers == LAYERS
    assert_close(gradients(twice, params, x), gradients(loss, params, x))


# The command.


def test_the_text_of_a_drawn_program_builds_it_again():
    drawn = draw(seed=3, count=20)
    assert len({*drawn}) == 20
    for program in drawn:
        assert eval(str(program)) == program
    assert draw(seed=3, count=20) == drawn


def test_the_command(tmp_path, capsys):
    assert equality(["--count", "2", "--seed", "1", "--out", str(tmp_path)]) == 0
    assert "2 of 2 programs" in capsys.readouterr().out
    (path,) = (tmp_path / "equality").iterdir()
    assert path.name == f"jax-{jax.__version__}.json"


def test_the_command_files_a_failure(tmp_path, capsys):
    bad = str(DrawnProgram((Stack(("dense",)),), policy="every:9"))
    assert equality(["--programs", bad]) == 0
    assert "UnknownPolicyError" in capsys.readouterr().out
