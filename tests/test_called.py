"""Layers that are one call of a class or function are told by their lines, and the pasted line saves what the policy saves."""

import functools
import re
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
W = [(jnp.ones((WIDTH, 16)), jnp.ones((16, WIDTH)))] * NUM
WIDE = jnp.ones((WIDTH, 32)), jnp.ones((32, WIDTH))
SQUARE = jnp.ones((WIDTH, WIDTH))
LINEARS = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(NUM)]
STACKED = jax.tree.map(lambda *one: jnp.stack(one), *W)
X = jnp.ones((4, WIDTH))
Loss = Callable[..., jax.Array]


class Block(nnx.Module):
    """It has a jitted function of JAX's and a random stream."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm, self.drop = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(self.drop(self.up(self.norm(x))))
        return x + self.down(hidden)


class OfOneLine(Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.silu(self.drop(self.up(self.norm(x)))))


def layer(w: Any, x: jax.Array) -> jax.Array:
    for _ in range(2):  # a loop of some lines, and not around them all
        x = jnp.tanh(x)
    hidden = jnp.tanh(x @ w[0])
    return x + jnp.sin(hidden @ w[1])


# What follows has layers that are one call each.


def name_of(kind: Any) -> str:
    """What the layers of a kind are calls of. Empty where that isn't known."""
    function = kind.called()
    return function.name if function else ""


def nnx_loss(block: Any, state: Any, x: jax.Array) -> jax.Array:
    for one in nnx.merge(definition(block), state):
        x = one(x)
    return jnp.mean(x**2)


def definition(block: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: nnx.List([block() for _ in range(NUM)])))[0]


def function_loss(layer: Any, params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(w, x)
    return jnp.mean(x**2)


def equinox_case() -> tuple[Loss, Any, Any]:
    eqx = pytest.importorskip("equinox")

    class Gated(eqx.Module):
        up: Any
        down: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = jax.nn.silu(x @ self.up)
            return x + jnp.sin(hidden) @ self.down

    def loss(block: Any, params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = block(*w)(x)
        return jnp.mean(x**2)

    return loss, Gated, W


def with_a_map(w: Any, x: jax.Array) -> jax.Array:
    """A layer that maps a part of itself, as attention does."""
    hidden = jax.vmap(jnp.tanh)(x @ w[0])
    return x + jnp.sin(hidden @ w[1])


def with_scopes(w: Any, x: jax.Array) -> jax.Array:
    """All matmuls are in a scope that other operations aren't in."""
    with jax.named_scope("norm"):
        normed = x / jnp.max(jnp.abs(x))
    with jax.named_scope("mlp"):
        return x + jnp.sin(jnp.tanh(normed @ w[0]) @ w[1])


@jax.named_scope("own")
def with_own_scope(w: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("norm"):
        normed = x / jnp.max(jnp.abs(x))
    with jax.named_scope("mlp"):
        return x + jnp.sin(jnp.tanh(normed @ w[0]) @ w[1])


def in_scopes_loss(layer: Any, params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("outer"), jax.named_scope("net"):
        return function_loss(layer, params, x)


class Linens(linen.Module):
    """All matmuls are in one submodule that isn't all of it."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x)
        return jnp.sin(hidden + linen.Dense(WIDTH)(x))


def linen_loss(block: Any, params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(linen_net(block).apply(params, x) ** 2)


def scanned_linen_loss(block: Any, params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(scanned_linen_net(block).apply(params, x) ** 2)


def linen_net(block: Any) -> Any:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(NUM):
                x = block()(x)
            return x

    return Net()


def scanned_linen_net(block: Any) -> Any:
    class Step(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            return block()(x), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM)()(x)[0]

    return Net()


def shapes(net: Any) -> Any:
    return jax.eval_shape(net.init, jax.random.key(0), X)


def jitted_loss(layer: Any, params: Any, x: jax.Array) -> jax.Array:
    """Users' frames above a jit are those of the call."""
    return jax.jit(functools.partial(function_loss, layer))(params, x)


def scan_loss(layer: Any, params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0] ** 2)


STATE = nnx.split(nnx.eval_shape(lambda: nnx.List([Block() for _ in range(NUM)])))[1]
CALLS: dict[str, Any] = {
    "nnx": (nnx_loss, Block, STATE),
    "one line": (nnx_loss, OfOneLine, STATE),
    "function": (function_loss, layer, W),
    "jit": (jitted_loss, layer, W),
}
CALLS["scan"] = (scan_loss, layer, STACKED)
CALLS["map"] = (function_loss, with_a_map, W)
CALLS["scopes around"] = (in_scopes_loss, with_scopes, W)
CALLS["own scope"] = (function_loss, with_own_scope, W)
CALLS["scopes in scan"] = (scan_loss, with_own_scope, STACKED)
CALLS["linen"] = (linen_loss, Linens, shapes(linen_net(Linens)))
CALLS["scanned linen"] = (scanned_linen_loss, Linens, shapes(scanned_linen_net(Linens)))


@pytest.mark.parametrize("case", [*CALLS, "equinox"])
def test_the_line_of_a_class_or_function_saves_what_the_policy_saves(case):
    loss_with, of_layer, params = CALLS[case] if case in CALLS else equinox_case()
    line_saves(functools.partial(loss_with, of_layer), params, loss_with, of_layer, params)


def line_saves(loss: Loss, params: Any, loss_with: Any, of_layer: Any, params_pasted: Any) -> list[str]:
    """Asserts that the line of a loss, pasted into `loss_with`, saves what the policy saves. Returns the comments before it."""
    found = jaxremat.find_layers(loss, params, X)
    (kind,) = found.kinds
    name = of_layer.__name__
    assert (kind.num_layers, name_of(kind)) == (NUM, name)
    values = [value.name for value in found.values()]
    chosen = [values[0], values[len(values) // 2], values[-2]]
    policy, alone = f"save:{','.join(chosen)}", ",".join(map(kind.names_alone().__getitem__, chosen))
    *comments, line = code_for(parse(policy), found.kinds, loss, params, X)
    assert all(comment.startswith("# ") for comment in comments)
    assert line == f'{name} = jaxremat.remat({name}, "save:{alone}"{", in_scan=True" * kind.in_scan})'
    scope = {name: of_layer, "jaxremat": jaxremat}
    exec(line, scope)  # the code is ours
    want, got = (
        sorted(
            (value.kind, value.num_bytes)
            for value in saved_values(jax.make_jaxpr(jax.grad(one, allow_int=True))(of_one, X)).values
        )
        for one, of_one in (
            (jaxremat.with_policy(loss, policy), params),
            (functools.partial(loss_with, scope[name]), params_pasted),
        )
    )
    assert got == want
    return comments


def nnx_checkpoints_loss(block: Any, state: Any, x: jax.Array) -> jax.Array:
    call = nnx.remat(lambda one, x: one(x))
    for one in nnx.merge(definition(block), state):
        x = call(one, x)
    return jnp.mean(x**2)


def linen_in_checkpoints(loss: Any, net: Any) -> tuple[Loss, Any]:
    """Flax names the class, and so the parameters, after the checkpoint."""
    return functools.partial(loss, linen.remat(Linens)), shapes(net(linen.remat(Linens)))


#: The losses of `CALLS`, with their author's checkpoints around the layers.
IN_CHECKPOINTS: dict[str, Any] = {
    "nnx": (functools.partial(nnx_checkpoints_loss, Block), STATE),
    "one line": (functools.partial(nnx_checkpoints_loss, OfOneLine), STATE),
    "linen": linen_in_checkpoints(linen_loss, linen_net),
    "scanned linen": linen_in_checkpoints(scanned_linen_loss, scanned_linen_net),
}
for name in CALLS.keys() - IN_CHECKPOINTS.keys():
    IN_CHECKPOINTS[name] = functools.partial(CALLS[name][0], jax.checkpoint(CALLS[name][1])), CALLS[name][2]


@pytest.mark.parametrize("case", [*CALLS, "equinox"])
def test_the_line_replaces_the_author_s_checkpoint_which_a_comment_names(case):
    loss_with, of_layer, params = CALLS[case] if case in CALLS else equinox_case()
    if case == "equinox":
        filter_checkpoint = pytest.importorskip("equinox").filter_checkpoint
        loss, own = functools.partial(loss_with, lambda *w: filter_checkpoint(of_layer(*w))), params
    else:
        loss, own = IN_CHECKPOINTS[case]
    *others, comment = line_saves(loss, own, loss_with, of_layer, params)
    assert re.match(rf"# In place of the author's checkpoint, which is called at {re.escape(__file__)}:\d+:$", comment)
    renamed = "# (It names parameters: those of CheckpointLinens_0 are then those of Linens_0.)"
    assert (renamed in others) == ("linen" in case)


@pytest.mark.full
@pytest.mark.parametrize("case", ["nnx", "function", "scan"])
def test_the_line_in_place_of_a_checkpoint_takes_the_bytes_of_the_policy(case, h100):
    (loss, params), (loss_with, of_layer, _) = IN_CHECKPOINTS[case], CALLS[case]
    x, wrapped = (
        jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32),
        jaxremat.remat(of_layer, "save:dot_general", in_scan=case == "scan"),
    )
    own, want, got = (
        lower_and_compile(jax.grad(one, allow_int=True), (params, x), h100).memory.total_bytes
        for one in (loss, jaxremat.with_policy(loss, "save:dot_general"), functools.partial(loss_with, wrapped))
    )
    assert got == pytest.approx(want, rel=0.01)
    assert own < want


def in_two_scopes(w: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("outer"), jax.named_scope("inner"):
        hidden = jnp.tanh(x @ w[0])
        return x + jnp.sin(hidden @ w[1])


def test_names_in_scopes_inside_a_checkpoint_may_be_unknown():
    """The function opens both scopes, or one of them or both are opened around its call."""
    (kind,) = jaxremat.find_layers(functools.partial(function_loss, jax.checkpoint(in_two_scopes)), W, X).kinds
    assert (name_of(kind), {*kind.names_alone().values()}) == ("in_two_scopes", {""})


@pytest.mark.full
def test_the_pasted_line_of_an_nnx_class_takes_the_bytes_of_the_policy(h100):
    loss, x = functools.partial(nnx_loss, Block), jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32)
    totals = set[int]()
    for policy in ("save:dot_general", "save:dot_general,add.1,mul.2", "nothing"):
        wrapped = jaxremat.remat(Block, policy)
        want, got = (
            lower_and_compile(jax.grad(one, allow_int=True), (STATE, x), h100).memory.total_bytes
            for one in (jaxremat.with_policy(loss, policy), functools.partial(nnx_loss, wrapped))
        )
        assert got == pytest.approx(want, rel=0.01)
        totals.add(want)
    assert len(totals) == 3


def in_a_scope_of_its_own(w: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("own"):
        hidden = jnp.tanh(x)
        with jax.named_scope("mlp"):
            return x + jnp.sin(jnp.sin(hidden @ w[0]) @ w[1])


def test_names_that_depend_on_who_opened_a_scope_are_unknown():
    """Alone, the layer leaves out `own` where it opens that itself, and `mlp` where it doesn't."""
    loss = functools.partial(function_loss, in_a_scope_of_its_own)
    found = jaxremat.find_layers(loss, W, X)
    (kind,) = found.kinds
    assert name_of(kind) == "in_a_scope_of_its_own"
    assert "" in kind.names_alone().values()
    unknown = next(name for name, alone in kind.names_alone().items() if not alone)
    assert all(line.startswith("#") for line in code_for(parse(f"save:{unknown}"), found.kinds, loss, W, X))


def test_names_of_linen_s_modules_that_are_no_call():
    """`Sequential` calls the first of its layers at another line. Alone, a layer leaves out its own scope and no other."""
    model: Any = linen.Sequential([Linens() for _ in range(NUM)])
    (kind,) = jaxremat.find_layers(lambda params, x: jnp.mean(model.apply(params, x)), shapes(model), X).kinds
    assert (kind.module, name_of(kind)) == ("layers", "")
    assert (kind.names_alone()["dot_general"], kind.names_alone()["sin"]) == ("Dense_0/dot_general", "sin")


def linens(x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x)
    return jnp.sin(hidden + linen.Dense(WIDTH)(x))


def test_a_function_that_calls_modules_of_linen_has_no_line():
    """JAX's checkpoint fails around a module's call."""
    net = linen_net(lambda: linens)
    (kind,) = jaxremat.find_layers(lambda params, x: jnp.mean(net.apply(params, x)), shapes(net), X).kinds
    assert (kind.num_layers, name_of(kind)) == (NUM, "")


# What follows has layers that aren't, or that can't be told from others.


def loop(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        hidden = jnp.tanh(x @ w[0])
        x = x + jnp.sin(hidden @ w[1])
    return x


def inside_it(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(loop(params, x) ** 2)


def two_lines(params: Any, x: jax.Array) -> jax.Array:
    x = layer(params[0], x)
    x = layer(params[1], x)
    return x


def at_two_lines(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(two_lines(params, x) ** 2)


def elsewhere_too(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(w, x)
    return jnp.mean(layer((jnp.ones((WIDTH, 2)), jnp.ones((2, WIDTH))), jnp.sin(x)) ** 2)


def mapped(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(lambda x: function_loss(layer, params, x[None]))(x))


def mapped_around_a_loop(params: Any, x: jax.Array) -> jax.Array:
    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (all_layers(params, x), None), x[None], None, length=2)[0]

    return jnp.mean(jax.vmap(twice)(x) ** 2)


def all_layers(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(w, x)
    return x


def two_calls_a_layer(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(WIDE, layer(w, x))
    return jnp.mean(x**2)


def a_line_more(params: Any, x: jax.Array) -> jax.Array:
    """What lies between two calls belongs to the layers."""
    for w in params:
        x = layer(w, jnp.sin(x))
    return jnp.mean(x**2)


def of_a_lambda(params: Any, x: jax.Array) -> jax.Array:
    return function_loss(lambda w, x: x + jnp.sin(jnp.tanh(x @ w[0]) @ w[1]), params, x)


def two_on_a_line(x: jax.Array) -> jax.Array:
    return bent(turned(bent(turned(x))))


def turned(x: jax.Array) -> jax.Array:
    return x @ SQUARE


def bent(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def twice_on_a_line(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((two_on_a_line(x) @ params[0][0]) ** 2)


def of_a_library(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((linears(x) @ params[0][0]) ** 2)


def linears(x: jax.Array) -> jax.Array:
    for linear in LINEARS:
        x = linear(x)
    return x


NO_CALLS = (
    inside_it,
    at_two_lines,
    elsewhere_too,
    mapped,
    mapped_around_a_loop,
    two_calls_a_layer,
    a_line_more,
    of_a_lambda,
    twice_on_a_line,
    of_a_library,
)


@pytest.mark.parametrize("loss", NO_CALLS, ids=lambda loss: loss.__name__)
def test_layers_that_are_no_call_have_no_line(loss):
    found = jaxremat.find_layers(loss, W, X)
    assert found.kinds, found.looked_at
    assert [name_of(kind) for kind in found.kinds] == [""] * len(found.kinds)
    name = [value.name for value in found.values()][-2]
    assert all(line.startswith("#") for line in code_for(parse(f"save:{name}"), found.kinds, loss, W, X))
