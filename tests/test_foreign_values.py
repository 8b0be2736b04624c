"""Values that others' programs have: complex parameters, literals as results, stacks of several lengths, unpassed keys."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxremat
from jaxremat.config import TrainConfig
from jaxremat.errors import UnknownNameError, UnknownPolicyError, UsageError
from jaxremat.policy.grammar import parse
from jaxremat.policy.layout import unstack_layers
from jaxremat.policy.spec import Every, OneIn, Rule
from jaxremat.step.step import init_state, make_step
from jaxremat.workload.workload import Workload
from jaxremat.xla.compile import lower_and_compile

pytestmark = pytest.mark.any_jax
X = jnp.ones((2, 4))


def trained(optimizer: Any, num_steps: int = 60) -> jax.Array:
    """The loss |z - (1 + 2j)|^2 after some steps from 0."""
    params = {"z": jnp.zeros((8, 8), jnp.complex64)}
    workload = Workload(loss=lambda params, x: jnp.mean(jnp.abs(params["z"] - (1 + 2j)) ** 2), params=params, batch=X)
    train = TrainConfig(optimizer=optimizer, learning_rate=0.05, weight_decay=0.0)
    state, step = init_state(workload, train, params), jax.jit(make_step(workload, train, parse("none")))
    loss = jnp.zeros(())
    for _ in range(num_steps):
        state, loss = step(state, X)
    return loss


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "lion"])
def test_complex_parameters_descend(optimizer: str):
    assert trained(optimizer) < 1.0  # of 5 at the start


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adamw-bf16"])
def test_real_moments_take_no_complex_parameters(optimizer: str):
    with pytest.raises(UsageError) as caught:
        trained(optimizer)
    assert "complex" in caught.value.got


@pytest.mark.parametrize("lengths", [(4, 6), (4, 2), (4,), ()])
def test_a_stack_has_one_length(lengths: tuple[int, ...]):
    params = {str(n): jnp.ones((length, 4)) for n, length in enumerate(lengths)}
    run = lambda: jaxremat.scan_layers(lambda p, x: x + sum(p.values()), params, X, policy="every:2")  # noqa: E731
    if len(lengths) == 1:
        assert float(run()[0, 0]) == 5.0
    else:
        with pytest.raises(UsageError):
            run()


@pytest.mark.parametrize("policy", ["nothing", "every:2", "one-in:2"])
def test_a_carry_may_begin_with_a_literal(policy: str):
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(carry: Any, w: jax.Array) -> tuple[Any, None]:
            x, seen = carry
            return (jnp.tanh(x @ w), seen | jnp.isnan(x).any()), None

        (x, _), _ = jax.lax.scan(body, (x, False), w)
        return jnp.mean(x**2), jnp.array(True)

    w = jnp.full((4, 4, 4), 0.1)
    wanted, found = (jax.value_and_grad(of, has_aux=True)(w, X) for of in (loss, jaxremat.with_policy(loss, policy)))
    assert isinstance(found[0][1], jax.Array)
    jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-6) or pytest.fail(f"{a} is not {b}"), found, wanted)


@pytest.mark.parametrize("policy", ["one-in:2", "every:2", "dots"])
def test_complex_values_in_a_scan(policy: str):
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.real(jnp.tanh(x @ w) * jnp.exp(1j * x)), None

        return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)

    w = jnp.full((4, 4, 4), 0.1)
    wanted, found = jax.grad(loss)(w, X), jax.grad(jaxremat.with_policy(loss, policy))(w, X)
    assert jnp.allclose(wanted, found, rtol=1e-5)


@pytest.mark.full
def test_checkpoints_around_layers_in_a_scan_stay():
    """One for each example bounds what is in memory at once. One around everything doesn't, and is taken away."""

    def one(w: jax.Array, x: jax.Array) -> jax.Array:
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x**2)

    def of_examples(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.map(lambda x: jax.checkpoint(one)(w, x), xs))

    def of_all(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.checkpoint(one)(w, xs.reshape(-1, 64))

    args = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((16, 512, 64), "float32")

    def temp(loss: Any, policy: str) -> int:
        step = jax.grad(jaxremat.with_policy(loss, policy) if policy != "own" else loss)
        return lower_and_compile(step, args, "h100-80gb").memory.temp_bytes

    own, nothing, none = (temp(of_examples, policy) for policy in ("own", "nothing", "none"))
    assert nothing < 1.2 * own < none / 1.5
    assert temp(of_all, "everything") > 1.2 * temp(of_all, "own")


def test_layers_that_are_unrolled_are_not_stacked():
    stacked = {"layers": {"kernel": jnp.ones((4, 8, 8))}}
    unrolled = unstack_layers(stacked)
    for tree in (unrolled, {"layers": [{"w": jnp.ones((8, 8))}] * 3}, {"layers": {"w": 3}}):
        with pytest.raises(UsageError):
            unstack_layers(tree)


@pytest.mark.parametrize(
    ("policy", "given"), [(OneIn, 0), (OneIn, -3), (Every, 0), (Every, "sqr"), (Every, 2.0), (Rule, "dot")]
)
def test_a_policy_of_a_wrong_value_is_an_error(policy: Any, given: Any):
    with pytest.raises(UnknownPolicyError):
        policy(given)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"trainable": ["lora_*"]}, "trainable"),
        ({"trainable": 3}, "trainable"),
        ({"frozen_dtype": "bf16"}, "frozen_dtype"),
        ({"loss": lambda params, batch, *, key=None: 0.0}, "key"),
        ({"loss": lambda params, batch, dropout_key=None: 0.0}, "dropout_key"),
    ],
)
def test_a_workload_of_wrong_fields_names_them(fields: dict[str, Any], named: str):
    given = {"loss": lambda params, batch: jnp.mean(batch * params["w"]), "params": {"w": jnp.ones(4)}, "batch": X}
    with pytest.raises(UsageError) as caught:
        Workload(**given | fields)
    assert named in caught.value.got


def test_a_name_that_the_forward_rule_does_not_write_is_unknown():
    """The function itself isn't what runs where it is differentiated."""

    @jax.custom_vjp
    def half(x: jax.Array) -> jax.Array:
        return checkpoint_name(x / 2, "primal")

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return checkpoint_name(x / 2, "forward"), None

    half.defvjp(forward, lambda _, cotangent: (cotangent / 2,))
    layer = lambda x: jnp.tanh(half(x))  # noqa: E731
    assert jaxremat.remat(layer, "save:forward")(X).shape == X.shape
    with pytest.raises(UnknownNameError):
        jaxremat.remat(layer, "save:primal")(X)


def test_static_arguments_may_be_counted_from_the_end():
    def layer(x: jax.Array, is_on: bool) -> jax.Array:
        return jnp.tanh(x) if is_on else x

    for policy in ("nothing", "save:tanh"):
        assert jaxremat.remat(layer, policy, static_argnums=-1)(X, True)[0, 0] == jnp.tanh(1.0)
