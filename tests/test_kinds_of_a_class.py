"""Several kinds of layers that are calls of one class or function have one line, where one policy serves them all."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import jaxremat
from jaxremat.policy.code import code_for
from jaxremat.policy.grammar import parse
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.saved import saved_values

WIDTH, NUM = 8, 3
X = jnp.ones((4, WIDTH))
TALL = jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32)
Loss = Callable[..., jax.Array]


def wide(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.cos(x), jnp.tan(x)], -1)


class Block(nnx.Module):
    def __init__(self, width: int) -> None:
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=nnx.Rngs(0)), nnx.Linear(2 * width, width, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        hidden = jnp.sin(self.up(x))
        return x + self.down(hidden) * jnp.max(read)


class Net(nnx.Module):
    def __init__(self, block: Any) -> None:
        self.encoder, self.decoder = (nnx.List([block(width) for _ in range(NUM)]) for width in (WIDTH, 2 * WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        read, y = x, wide(x)
        for block in self.encoder:
            x = block(x, read)
        for block in self.decoder:
            y = block(y, x)
        return jnp.mean(y**2)


def nnx_state(block: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Net(block)))


def nnx_loss(block: Any, state: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(nnx_state(block)[0], state)(x)


def layer(w: Any, x: jax.Array, read: jax.Array) -> jax.Array:
    hidden = jnp.sin(x @ w[0])
    return x + jnp.tanh(hidden @ w[1]) * jnp.max(read)


def weights(width: int) -> Any:
    return [(jnp.ones((width, 2 * width)), jnp.ones((2 * width, width)))] * NUM


PARAMS = {"encoder": weights(WIDTH), "decoder": weights(2 * WIDTH)}
STACKED = {name: jax.tree.map(lambda *one: jnp.stack(one), *PARAMS[name]) for name in PARAMS}


def function_loss(layer: Any, params: Any, x: jax.Array) -> jax.Array:
    read, y = x, wide(x)
    for w in params["encoder"]:
        x = layer(w, x, read)
    for w in params["decoder"]:
        y = layer(w, y, x)
    return jnp.mean(y**2)


def scans_loss(layer: Any, params: Any, x: jax.Array) -> jax.Array:
    read, y = x, wide(x)
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x, read), None), x, params["encoder"])
    y, _ = jax.lax.scan(lambda y, w: (layer(w, y, x), None), y, params["decoder"])
    return jnp.mean(y**2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        hidden = jnp.sin(linen.Dense(2 * x.shape[-1])(x))
        return x + linen.Dense(x.shape[-1])(hidden) * jnp.max(read)


def linen_net(block: Any) -> Any:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            read, y = x, wide(x)
            for i in range(NUM):
                x = block(name=f"encoder_{i}")(x, read)
            for i in range(NUM):
                y = block(name=f"decoder_{i}")(y, x)
            return jnp.mean(y**2)

    return Net()


def linen_loss(block: Any, params: Any, x: jax.Array) -> jax.Array:
    return linen_net(block).apply(params, x)


#: Losses of one class or function with their parameters, and two names of each of the two kinds.
TWO_MATMULS = ["layers/dot_general", "layers/dot_general.1"], ["layers.1/dot_general", "layers.1/dot_general.1"]
DENSES = ["encoder/Dense_0/dot_general", "encoder/sin"], ["decoder/Dense_0/dot_general", "decoder/sin"]
CASES: dict[str, Any] = {
    "nnx": (nnx_loss, Block, nnx_state(Block)[1], TWO_MATMULS),
    "functions": (function_loss, layer, PARAMS, TWO_MATMULS),
    "scans": (scans_loss, layer, STACKED, TWO_MATMULS),
    "linen": (linen_loss, Linen, jax.eval_shape(linen_net(Linen).init, jax.random.key(0), X), DENSES),
}


def code_of(policy: str, loss: Loss, params: Any) -> tuple[str, ...]:
    return code_for(parse(policy), jaxremat.find_layers(loss, params, X).kinds, loss, params, X)


def pasted(line: str, of_layer: Any) -> Any:
    scope = {of_layer.__name__: of_layer, "jaxremat": jaxremat}
    exec(line, scope)  # the code is ours
    return scope[of_layer.__name__]


def saved_bytes(loss: Loss, params: Any) -> Counter[str]:
    """The saved bytes, without the values' names."""
    num_bytes = Counter[str]()
    for value in saved_values(jax.make_jaxpr(jax.grad(loss))(params, X)).values:
        num_bytes[value.kind] += value.num_bytes
    return num_bytes


@pytest.mark.parametrize("case", CASES)
def test_one_line_serves_all_kinds_of_one_class(case):
    loss_with, of_layer, params, (first, second) = CASES[case]
    loss, name = functools.partial(loss_with, of_layer), of_layer.__name__
    kinds = jaxremat.find_layers(loss, params, X).kinds
    assert [(kind.num_layers, function and function.name) for kind in kinds for function in [kind.called()]] == [
        (NUM, name)
    ] * 2
    for num in (1, 2):
        policy = f"save:{','.join([*first[:num], *second[:num]])}"
        alone = ",".join(kinds[0].names_alone()[one] for one in first[:num])
        comment, line = code_of(policy, loss, params)
        assert comment.startswith("# ")
        assert line == f'{name} = jaxremat.remat({name}, "save:{alone}"{", in_scan=True" * (case == "scans")})'
        want, got = (
            saved_bytes(one, params)
            for one in (jaxremat.with_policy(loss, policy), functools.partial(loss_with, pasted(line, of_layer)))
        )
        assert got == want


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_pasted_line_takes_the_bytes_of_the_policy(case, h100):
    loss_with, of_layer, params, (first, second) = CASES[case]
    loss, totals = functools.partial(loss_with, of_layer), set[int]()
    for num in (1, 2):
        policy = f"save:{','.join([*first[:num], *second[:num]])}"
        wrapped = pasted(code_of(policy, loss, params)[-1], of_layer)
        want, got = (
            lower_and_compile(jax.grad(one), (params, TALL), h100).memory.total_bytes
            for one in (jaxremat.with_policy(loss, policy), functools.partial(loss_with, wrapped))
        )
        assert got == want
        totals.add(want)
    assert len(totals) == 2


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_one_class_with_two_policies_have_no_line_of_it(case):
    """Modules that have names of their own have a line each, as their author may wrap each."""
    loss_with, of_layer, params, (first, second) = CASES[case]
    lines = code_of(f"save:{','.join([*first, second[0]])}", functools.partial(loss_with, of_layer), params)
    targets = [line.partition(" = ")[0] for line in lines if not line.startswith("#")]
    assert targets == (["Encoder", "Decoder"] if case == "linen" else [])


# What follows has other calls of the function.


def unrolled_and_scanned(params: Any, x: jax.Array) -> jax.Array:
    read, y = x, wide(x)
    for w in params["encoder"]:
        x = layer(w, x, read)
    y, _ = jax.lax.scan(lambda y, w: (layer(w, y, x), None), y, params["decoder"])
    return jnp.mean(y**2)


def elsewhere_too(params: Any, x: jax.Array) -> jax.Array:
    return function_loss(layer, params, x) + jnp.mean(layer(params["encoder"][0], jnp.sin(x)[:2], x))


def elsewhere_in_a_scan(params: Any, x: jax.Array) -> jax.Array:
    once = jax.checkpoint(functools.partial(layer, params["encoder"][0]))
    scanned, _ = jax.lax.scan(lambda x, _: (once(x, x), None), x[:1], None, length=2)
    return function_loss(layer, params, x) + jnp.mean(scanned)


def in_a_part_of_it(params: Any, x: jax.Array) -> jax.Array:
    read, y = x, wide(x)
    for w in params["encoder"]:
        x = layer(w, x, read)
    for w in params["decoder"]:
        y = layer(w, jnp.sin(layer(w, y, x)), x)
    return jnp.mean(y**2)


def in_a_scan_of_more(params: Any, x: jax.Array) -> jax.Array:
    read, y = x, wide(x)
    for w in params["encoder"]:
        x = layer(w, x, read)
    y, _ = jax.lax.scan(lambda y, w: (jnp.sin(layer(w, y, x)), None), y, params["decoder"])
    return jnp.mean(y**2)


@pytest.mark.parametrize(
    ("loss", "num_called"),
    [(unrolled_and_scanned, 2), (elsewhere_too, 0), (elsewhere_in_a_scan, 0), (in_a_part_of_it, 0), (in_a_scan_of_more, 0)],
)
def test_no_line_wraps_other_calls_too(loss, num_called):
    params = PARAMS | ({"decoder": STACKED["decoder"]} if "scan" in loss.__name__ and loss != elsewhere_in_a_scan else {})
    kinds = jaxremat.find_layers(loss, params, X).kinds
    functions = [kind.called() for kind in kinds]
    assert [function.name for function in functions if function].count("layer") == num_called
    names = [f"{kind.prefix}dot_general" for kind in kinds]
    assert all(line.startswith("#") for line in code_of(f"save:{','.join(names)}", loss, params))
