"""`with_policy` changes memory and time, and nothing that a program computes.

First some programs that Hypothesis draws, the same ones in every run. `python -m experiments.equality` checks 500. Then the cases
that are hard, each on its own: one operation at a time under every policy, and compiled under one. `tests/program_checks.py` says
what "the same" means.
"""

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxremat
from experiments.children import Child
from experiments.equality import draw
from experiments.equality import main as equality
from tests.equality import assert_same_bits, relative_difference
from tests.hard_programs import CASES, KEY, LAYERS, X, dense, plain_loss, scanned_loss, stacked, weights
from tests.helpers import quick_jit
from tests.op_by_op import op_by_op
from tests.program_checks import TOLERANCE, assert_close, check_program, moved_by_bfloat16, trained
from tests.programs import DrawnProgram, Stack, build

#: How many drawn programs every run of the tests checks.
NUM_DRAWN = 8
#: A program in each layout with a policy. In a loop every:2 has a backward pass written by hand (`policy/stack.py`).
BOTH = (("unrolled", "nothing"), ("scan", "every:2"))
POLICIES = ("nothing", "dots", "every:2", "1*nothing|1*save:wide")
#: Programs with many kinds of operations, each of which compiles on its own.
MANY_OPERATIONS = (
    "keys in the carry",
    "raw keys in the carry",
    "integers",
    "bfloat16",
    "complex values",
    "steps in time",
    "blocks of steps",
)


@functools.cache
def drawn_programs() -> list[DrawnProgram]:
    return draw(seed=0, count=NUM_DRAWN)


@pytest.mark.full
@pytest.mark.parametrize("number", range(NUM_DRAWN))
def test_drawn_programs(number):
    check_program(drawn_programs()[number])


# Programs written out (`tests/hard_programs.py`).


def gradient_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the value and the gradients by float parameters."""

    def run(*args: Any) -> Any:
        value, grads = jax.value_and_grad(loss, allow_int=True)(*args)
        return value, [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    return run


def gradients(loss: Callable[..., Any], *args: Any) -> Any:
    """The value and the gradients by float parameters, compiled."""
    return quick_jit(gradient_of(loss))(*args)


@functools.cache
def one_by_one(case: str, policy: str) -> Any:
    """The value and the gradients of a program under a policy, one operation at a time."""
    loss, *args = CASES[case]
    return op_by_op(gradient_of(jaxremat.with_policy(loss, policy) if policy else loss), *args)


def check_hard_program(case: str, policy: str) -> None:
    """Values are equal to the bit. A policy may change the order in which the gradients of one value are added."""
    assert jaxremat.find_layers(*CASES[case]).num_layers == LAYERS
    (got, grads), (want, want_grads) = one_by_one(case, policy), one_by_one(case, "")
    assert_same_bits(got, want)
    assert_close(grads, want_grads)


#: Each case under one policy in the fast tier, and under the others in the full one.
PAIRS = [
    pytest.param(case, policy, marks=() if number % len(POLICIES) == other else pytest.mark.full)
    for number, case in enumerate(case for case in CASES if case not in MANY_OPERATIONS)
    for other, policy in enumerate(POLICIES)
]


@pytest.mark.parametrize(("case", "policy"), PAIRS)
def test_hard_programs(case, policy):
    check_hard_program(case, policy)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("case", MANY_OPERATIONS)
def test_hard_programs_of_many_operations(case):
    for policy in POLICIES:
        check_hard_program(case, policy)


@pytest.mark.full
@pytest.mark.parametrize(("case", "policy"), list(zip(CASES, itertools.cycle(POLICIES))))
def test_compiled_hard_programs(case, policy):
    loss, *args = CASES[case]
    assert_close(gradients(jaxremat.with_policy(loss, policy), *args), gradients(loss, *args))


# The transformations of JAX around a function under a policy.


@pytest.mark.full
def test_op_by_op_is_jax_without_jit():
    """What the drawn programs are compared with is what JAX computes under `disable_jit`."""
    stacks = (Stack(("dropout", "branch", "recurrence", "loop", "custom_vjp"), 3, "scan"),)
    loss, params, batch = build(DrawnProgram(stacks, inside=("jit",), aux=True))
    with jax.disable_jit():
        want = loss(params, batch)
    assert_same_bits(op_by_op(loss, params, batch), want)


@pytest.mark.full
@pytest.mark.parametrize("case", ["unrolled", "scan"])
def test_without_jit(case):
    loss, params, batch = CASES[case]
    under_policy = jaxremat.with_policy(loss, "dots")
    with jax.disable_jit():
        assert_same_bits(under_policy(params, batch), loss(params, batch))
    assert_close(jax.value_and_grad(under_policy)(params, batch), jax.value_and_grad(loss)(params, batch))


@pytest.mark.full
@pytest.mark.parametrize(("case", "policy"), BOTH)
def test_vmap_of_a_function_under_a_policy(case, policy):
    loss, params, x = CASES[case]
    under_policy = jaxremat.with_policy(loss, policy)
    for in_axes, args in (((None, 0), (params, jnp.stack([x, 2 * x]))), ((0, None), (stacked([params, params]), x))):
        got, want = (
            quick_jit(jax.vmap(jax.value_and_grad(function), in_axes=in_axes))(*args) for function in (under_policy, loss)
        )
        assert_close(got, want)


@pytest.mark.full
@pytest.mark.parametrize(("case", "policy"), BOTH)
def test_gradient_by_a_value_of_an_outer_function(case, policy):
    """The function under the policy reads a value that is differentiated outside of it."""
    loss, params, x = CASES[case]

    def outer(wrap: Callable[..., Any]) -> Any:
        def of_scale(scale: jax.Array) -> jax.Array:
            return wrap(lambda params, x: loss(jax.tree.map(lambda leaf: scale * leaf, params), x / scale))(params, x)

        return quick_jit(jax.value_and_grad(of_scale))(jnp.asarray(0.7))

    assert_close(outer(lambda function: jaxremat.with_policy(function, policy)), outer(lambda function: function))


@pytest.mark.full
@pytest.mark.parametrize(("case", "policy"), BOTH)
def test_microbatches_with_the_gradient_inside_the_loop(case, policy):
    loss, params, x = CASES[case]

    def accumulated(function: Callable[..., Any]) -> Any:
        def body(total: Any, x: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(function)(params, x)), None

        return quick_jit(lambda xs: jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)[0])(jnp.stack([x, 2 * x]))

    assert_close(accumulated(jaxremat.with_policy(loss, policy)), accumulated(loss))


@pytest.mark.full
def test_gradient_of_a_gradient():
    def squared_norm(function: Callable[..., Any]) -> Any:
        def of_params(params: Any) -> Any:
            return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(jax.grad(function)(params, X)))

        return quick_jit(jax.value_and_grad(of_params))

    for case in ("unrolled", "scan"):
        loss, params, _ = CASES[case]
        assert_close(squared_norm(jaxremat.with_policy(loss, "dots"))(params), squared_norm(loss)(params))


@pytest.mark.full
@pytest.mark.parametrize("case", ["unrolled", "scan"])
def test_donated_parameters(case):
    loss, params, x = CASES[case]

    def step(params: Any, x: jax.Array, function: Callable[..., Any]) -> Any:
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, jax.grad(function)(params, x))

    given_away = jax.tree.map(jnp.copy, params)
    got = quick_jit(lambda p, x: step(p, x, jaxremat.with_policy(loss, "every:2")), donate_argnums=0)(given_away, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given_away))
    assert_close(got, quick_jit(lambda p, x: step(p, x, loss))(params, x))


@pytest.mark.full
def test_gradients_by_all_arguments():
    for case in ("unrolled", "scan"):
        loss, params, x = CASES[case]
        got, want = (
            quick_jit(jax.grad(function, argnums=(0, 1)))(params, x)
            for function in (jaxremat.with_policy(loss, "nothing"), loss)
        )
        assert_close(got, want)


# What else a loss may take, return and do.


@pytest.mark.full
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(5)], ids=["typed", "raw"])
def test_dropout_masks_come_from_the_same_keys(key):
    """Layers in a loop whose keys are split from one, and unrolled ones that fold the key with their number."""
    for drawn in (
        DrawnProgram((Stack(("dense", "dropout"), 4, "unrolled"),), keys="folded"),
        DrawnProgram((Stack(("dense", "dropout"), 4, "scan"),), keys="split"),
    ):
        loss, params, batch = build(drawn)
        under_policy = quick_jit(jax.value_and_grad(jaxremat.with_policy(loss, "nothing")))
        value, grads = quick_jit(jax.value_and_grad(loss))(params, {**batch, "key": key})
        assert_close(under_policy(params, {**batch, "key": key}), (value, grads))
        assert abs(under_policy(params, {**batch, "key": jax.random.split(key)[0]})[0] - value) > 1e-4


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
def test_a_function_under_two_policies_has_the_outer_one():
    loss, params, x = CASES["unrolled"]
    twice = jaxremat.with_policy(jaxremat.with_policy(loss, "dots"), "nothing")
    assert jaxremat.find_layers(jaxremat.with_policy(loss, "dots"), params, x).num_layers == LAYERS
    assert_close(gradients(twice, params, x), gradients(loss, params, x))


# What the comparison catches, and the command.


@pytest.mark.full
def test_what_the_comparison_catches():
    """One bit of the loss, a gradient off by more than rounding, and a layer that isn't found."""
    value, (first, *others) = one_by_one("unrolled", "")
    with pytest.raises(AssertionError):
        assert_same_bits(jnp.nextafter(value, 1), value)
    with pytest.raises(AssertionError):
        assert_close([first + 3e-6 * max(jnp.abs(leaf).max() for leaf in (first, *others)), *others], [first, *others])
    with pytest.raises(AssertionError):
        check_program(DrawnProgram((Stack(("dense",), 3, "scopes"),), layers=("decoder_*",)))


def test_the_text_of_a_drawn_program_builds_it_again():
    drawn = draw(seed=3, count=20)
    assert len({*drawn}) == 20
    for program in drawn:
        assert eval(str(program)) == program
    assert draw(seed=3, count=20) == drawn


def test_the_command(tmp_path, monkeypatch):
    """With processes that check nothing. The second run checks what the first one didn't file as ok."""
    checked: list[list[str]] = []

    def run_child(module: str, argv: list[str], deadline: Any, environment: Any) -> Child:
        texts = argv[argv.index("--programs") + 1 :]
        checked.append(texts)
        return Child(tuple({"what": text, "outcome": "ok", "error": None, "seconds": 1.0} for text in texts), "")

    monkeypatch.setattr("experiments.equality.run_child", run_child)
    assert equality(["--count", "2", "--seed", "1", "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "equality").iterdir()
    assert path.name == f"jax-{jax.__version__}.json"
    filed = json.loads(path.read_text())
    assert sum(filed["policies"].values()) == len(filed["passed"]) == 2
    path.write_text(json.dumps({**filed, "passed": filed["passed"][1:]}))
    assert equality(["--count", "2", "--seed", "1", "--out", str(tmp_path), "--resume"]) == 0
    assert [len(texts) for texts in checked] == [2, 1], "the other one was ok before"


@pytest.mark.full
@pytest.mark.any_jax
def test_gradients_in_bfloat16_are_sums_in_another_order():
    """By more than a program's in float32 may differ. The check then holds the same program in float32 to that."""
    stack = Stack(("lookup", "positions", "memory", "shared"), num_layers=3, written="scopes", jitted=True)
    drawn = DrawnProgram((stack,), policy="every:sqrt+nothing", layers=("block_*",), dtype="bfloat16", aux=True, seed=27)
    loss, params, batch = build(drawn)
    under_policy = jaxremat.with_policy(loss, drawn.policy, drawn.layers)
    got, want = (trained(drawn, function, params, batch)[1] for function in (under_policy, loss))
    assert TOLERANCE < relative_difference(got, want) < moved_by_bfloat16(drawn, want) < 0.02
    check_program(drawn)


def test_a_program_that_fails_has_a_row_with_its_error(capsys):
    bad = str(DrawnProgram((Stack(("dense",)),), policy="every:9"))
    assert equality(["--programs", bad]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["what"], row["outcome"]) == (bad, "failed")
    assert row["error"].startswith("UnknownPolicyError: ")
