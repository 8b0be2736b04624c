"""The code of policies of several layers, for several kinds of layers and for scans, saves what the policy saves."""

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxremat
from jaxremat.policy.code import as_code, code_for
from jaxremat.policy.grammar import parse
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.saved import saved_values

WIDTH, NUM = 8, 4
X = jnp.ones((4, WIDTH))
TALL = jax.ShapeDtypeStruct((2**18, WIDTH), jnp.float32)
Loss = Callable[..., jax.Array]
#: From the code of a kind, its layers, its input and what all its layers read to its output.
Run = Callable[[str, Any, jax.Array, jax.Array], jax.Array]


def code_of(policy: str, loss: Loss, params: Any) -> list[str]:
    return [*code_for(parse(policy), jaxremat.find_layers(loss, params, X).kinds, loss, params, X)]


def of_kinds(lines: list[str]) -> tuple[str, str]:
    """The code of each of two kinds, which follows a comment with the layers' place."""
    first, second = (n for n, line in enumerate(lines) if re.match("# .*:$", line) and "saves by" not in line)
    return "\n".join(lines[first:second]), "\n".join(lines[second:])


def pasted(code: str, **names: Any) -> dict[str, Any]:
    """The names after the code ran."""
    names |= {"jax": jax, "jaxremat": jaxremat, "functools": functools, "nnx": nnx}
    exec(code, names)  # the code is ours
    return names


def reading(code: str) -> str:
    """The code, whose layers read one value more, as their author writes it."""
    return code.replace("layer, x)", "layer, x, read)").replace("params, x,", "params, x, read,")


def in_two_kinds(run: Run, codes: tuple[str, str], params: Any, x: jax.Array) -> jax.Array:
    read, y = x, jnp.concatenate([jnp.cos(x), jnp.tan(x)], -1)
    x = run(codes[0], params["encoder"], x, read)
    return jnp.mean(run(codes[1], params["decoder"], y, x) ** 2)


# What follows is a run of each framework, as it is without code.


def layer(w: Any, x: jax.Array, read: jax.Array) -> jax.Array:
    hidden = jnp.sin(x @ w[0])
    return x + jnp.tanh(hidden @ w[1]) * jnp.max(read)


def run_functions(code: str, ws: Any, x: jax.Array, read: jax.Array) -> jax.Array:
    names = pasted(reading(code), layer=layer, layers=ws, params=ws, x=x, read=read)
    if "scan_layers" in code or "for start" in code:
        return names["x"]
    if isinstance(ws, tuple):
        return jax.lax.scan(lambda x, w: (layer(w, x, read), None), x, ws)[0]
    for one, w in zip(listed(code, names) or [layer] * NUM, ws, strict=True):
        x = one(w, x, read)
    return x


def listed(code: str, names: dict[str, Any]) -> Any:
    """The list that the last line of the code makes."""
    return names.get(code.rpartition("\n")[2].partition(" = ")[0])


class NnxBlock(nnx.Module):
    def __init__(self, width: int) -> None:
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=nnx.Rngs(0)), nnx.Linear(2 * width, width, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        hidden = jnp.sin(self.up(x))
        return x + self.down(hidden) * jnp.max(read)


def run_nnx(code: str, state: Any, x: jax.Array, read: jax.Array) -> jax.Array:
    is_list = "policies = " in code
    classes = listed(code, pasted(code, NnxBlock=NnxBlock)) if is_list else [NnxBlock] * NUM
    blocks = nnx.merge(nnx_definition(classes, x.shape[-1]), state)
    if code and not is_list:
        return pasted(reading(code), layers=[*blocks], x=x, read=read)["x"]
    for block in blocks:
        x = block(x, read)
    return x


def nnx_definition(classes: Any, width: int) -> Any:
    return nnx.split(nnx.eval_shape(lambda: nnx.List([one(width) for one in classes])))[0]


def nnx_state(width: int) -> Any:
    return nnx.split(nnx.eval_shape(lambda: nnx.List([NnxBlock(width) for _ in range(NUM)])))[1]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        hidden = jnp.sin(nn.Dense(2 * x.shape[-1])(x))
        return x + nn.Dense(x.shape[-1])(hidden) * jnp.max(read)


class LinenStack(nn.Module):
    code: str
    in_scan: bool

    @nn.compact
    def __call__(self, x: jax.Array, read: jax.Array) -> jax.Array:
        code = self.code.replace("(...)", '(parent=None), name="layers"').replace("Layers(Layers", "Layers(Linen")
        made: Any = listed(code, pasted(code, Linen=Linen)) or [Linen] * NUM
        if "Layers" in code:
            return made(x, read)
        if self.in_scan:
            of_params = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
            return nn.scan(lambda one, x, read: (one(x, read), None), length=NUM, **of_params)(
                Linen(name="layers"), x, read
            )[0]
        for i, one in enumerate(made):
            x = one(name=f"layer_{i}")(x, read)
        return x


def run_linen(code: str, params: Any, x: jax.Array, read: jax.Array) -> jax.Array:
    return jnp.asarray(LinenStack(code, in_scan=params["params"].keys() == {"layers"}).apply(params, x, read))


def linen_params(width: int, in_scan: bool) -> Any:
    x = jnp.ones((1, width))
    return jax.eval_shape(LinenStack("", in_scan).init, jax.random.key(0), x, x)


def own_params(params: Any, codes: tuple[str, str]) -> Any:
    """The parameters, where `jaxremat.Layers` runs Linen's unrolled layers: it has a scope of its own."""
    is_moved = ["scan=False" in code for code in codes]
    return {
        name: {"params": {"layers": of_kind["params"]}} if moved else of_kind
        for (name, of_kind), moved in zip(params.items(), is_moved, strict=True)
    }


def both(of_width: Callable[[int], Any]) -> Any:
    return {"encoder": of_width(WIDTH), "decoder": of_width(2 * WIDTH)}


def stacked(width: int) -> Any:
    return jnp.ones((NUM, width, 2 * width)), jnp.ones((NUM, 2 * width, width))


CASES: dict[str, Any] = {
    "functions": (run_functions, both(lambda width: NUM * [(jnp.ones((width, 2 * width)), jnp.ones((2 * width, width)))])),
    "scans": (run_functions, both(stacked)),
    "nnx": (run_nnx, both(nnx_state)),
    "linen": (run_linen, both(lambda width: linen_params(width, False))),
    "linen scans": (run_linen, both(lambda width: linen_params(width, True))),
}


#: Where layers are functions or modules of one class, `save:` has a matmul of the encoder and one of the decoder.
POLICIES = ("every:2", "one-in:3", "every:2+save:", "1*nothing|1*save:", "2*nothing|2*save:")
PAIRS = [
    (case, policy) for case in CASES for policy in POLICIES if policy != "every:2+save:" or case not in ("functions", "nnx")
]


def with_code(case: str, policy: str) -> tuple[tuple[Loss, Any], tuple[Loss, Any]]:
    """The loss under a policy, and the loss with its code pasted, each with its parameters."""
    run, params = CASES[case]
    loss = functools.partial(in_two_kinds, run, ("", ""))
    if policy.endswith("save:"):
        first, second = ([*kind.names_alone()] for kind in jaxremat.find_layers(loss, params, X).kinds)
        policy += f"{next(name for name in first if 'dot_general' in name)},{second[-2]}"
    codes = of_kinds(code_of(policy, loss, params))
    return (jaxremat.with_policy(loss, policy), params), (
        functools.partial(in_two_kinds, run, codes),
        own_params(params, codes),
    )


@pytest.mark.parametrize(("case", "policy"), PAIRS)
def test_the_code_of_each_kind_saves_what_the_policy_saves(case, policy):
    want, got = (saved_bytes(*one) for one in with_code(case, policy))
    assert got == want


def saved_bytes(loss: Loss, params: Any) -> int:
    return sum(value.num_bytes for value in saved_values(jax.make_jaxpr(jax.grad(loss, allow_int=True))(params, X)).values)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_code_of_each_kind_takes_the_bytes_of_the_policy(case, h100):
    totals = set[int]()
    for policy in ("every:2", "1*nothing|1*save:"):
        want, got = (
            lower_and_compile(jax.grad(loss, allow_int=True), (params, TALL), h100).memory.total_bytes
            for loss, params in with_code(case, policy)
        )
        assert got == pytest.approx(want, rel=0.01)
        totals.add(want)
    assert len(totals) == 2


def test_each_kind_has_a_name_of_its_own():
    loss, params = functools.partial(in_two_kinds, run_linen, ("", "")), CASES["linen"][1]
    for policy, names in (("one-in:2", ["Linens", "Linens_2"]), ("every:2", ["linens", "linens_2"])):
        made = [line.partition(" = ")[0] for line in code_of(policy, loss, params)]
        assert [name for name in made if name.lower().startswith("linens")] == names


def test_a_group_at_the_end_has_fewer_layers():
    made, _ = as_code("one-in:3", "jax", 4).splitlines()
    assert len(pasted(made, NOTHING=None)["policies"]) == 4


class Scanned(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.vmap(lambda _: NnxBlock(WIDTH))(jnp.arange(NUM))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda x, block: block(x, X), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean(run(x, self.blocks) ** 2)


def in_turns(params: Any, x: jax.Array) -> jax.Array:
    for w, narrow in params:
        x = layer(w, x, X)
        x = jnp.sin(x @ narrow) @ narrow.T
    return jnp.mean(x**2)


def with_outputs(params: Any, x: jax.Array) -> jax.Array:
    x, means = jax.lax.scan(lambda x, w: (layer(w, x, X), jnp.mean(x)), x, params)
    return jnp.mean(x**2) + jnp.sum(means)


def test_where_there_is_no_code_a_sentence_says_so():
    definition, state = nnx.split(nnx.eval_shape(Scanned))

    def of_nnx(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(definition, state)(x)

    functions, groups = functools.partial(in_two_kinds, run_functions, ("", "")), "every:2+save:layers/sin"
    cases = (
        ("every:2", of_nnx, state, "a scan has one body"),
        ("1*nothing|1*save:sin", of_nnx, state, "a scan has one body"),
        ("every:2", with_outputs, stacked(WIDTH), "does more"),
        (groups, functions, CASES["functions"][1], "nobody named layers/sin"),
    )
    for policy, loss, params, why in cases:
        (line,) = code_of(policy, loss, params)
        assert line.startswith("# ")
        assert why in line
        assert "with_policy" in line
