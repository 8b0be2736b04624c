"""A policy for several layers that is added in one file: its class here, and its name among `grammar.POLICIES`."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reference_tables import policy_table_markdown
from jaxremat.errors import UnknownPolicyError
from jaxremat.policy import grammar
from jaxremat.policy.grammar import parse
from jaxremat.policy.layers import Layers
from jaxremat.policy.spec import NONE, NOTHING, Form, LayerPolicy, Policy, read_count, read_word
from jaxremat.policy.stack import scan_layers
from jaxremat.policy.with_policy import with_policy
from jaxremat.report.lists import policies
from jaxremat.xla.flops import count_step_flops
from tests.equality import assert_same_bits
from tests.op_by_op import op_by_op


@dataclasses.dataclass(frozen=True)
class First(Policy):
    """The first `k` layers are recomputed. The others save what differentiation needs."""

    k: int

    forms = (Form("first:K", "the first K layers recomputed, the others left as they are", "first:2"),)

    @classmethod
    def read(cls, text: str, layer: Callable[[str], LayerPolicy]) -> Self | None:
        found = read_word("first", text)
        return cls(read_count(found[0], text, "first:2")) if found else None

    def __str__(self) -> str:
        return f"first:{self.k}"

    @property
    def layer_policies(self) -> tuple[LayerPolicy, ...]:
        return (NOTHING, NONE)

    def layers(self, num_layers: int) -> tuple[LayerPolicy, ...]:
        if self.k > num_layers:
            raise UnknownPolicyError(f"{self} has more than the model's {num_layers} layers")
        return (NOTHING,) * self.k + (NONE,) * (num_layers - self.k)


@pytest.fixture(autouse=True)
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "POLICIES", (*grammar.POLICIES, First))


NUM = 4
DRAW = np.random.default_rng(0)
PARAMS = {name: DRAW.normal(0, 0.5, (NUM, 4, 4)).astype(np.float32) for name in ("up", "down")}
LAYERS = [jax.tree.map(lambda leaf, i=i: leaf[i], PARAMS) for i in range(NUM)]
X, WEIGHTS = DRAW.normal(size=(2, 2, 4)).astype(np.float32)


def mlp(params: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return mlp({name: self.param(name, nn.initializers.normal(), (4, 4)) for name in ("up", "down")}, x)


def total(x: Any) -> Any:
    return jnp.vdot(x, WEIGHTS)


def found_unrolled(policy: str) -> Any:
    return with_policy(lambda layers, x: total(functools.reduce(lambda x, own: mlp(own, x), layers, x)), policy)


def found_in_scan(policy: str) -> Any:
    return with_policy(lambda params, x: total(jax.lax.scan(lambda x, own: (mlp(own, x), None), x, params)[0]), policy)


def native(policy: str) -> Any:
    return lambda params, x: total(scan_layers(mlp, params, x, policy=policy))


def linen(policy: str, scan: bool) -> Any:
    return lambda params, x: total(Layers(Mlp(), NUM, policy, scan).apply({"params": params}, x))


#: By the way of running layers, the loss under a policy, and its parameters.
WAYS: dict[str, tuple[Callable[[str], Any], Any]] = {
    "with_policy unrolled": (found_unrolled, LAYERS),
    "with_policy scanned": (found_in_scan, PARAMS),
    "scan_layers": (native, PARAMS),
    "Layers scanned": (functools.partial(linen, scan=True), PARAMS),
    "Layers unrolled": (functools.partial(linen, scan=False), {f"layer_{i}": own for i, own in enumerate(LAYERS)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_loss_and_gradients(way):
    loss_under, params = WAYS[way]
    got, want = (
        op_by_op(jax.value_and_grad(loss_under(policy), argnums=(0, 1)), params, X) for policy in ("first:2", "none")
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("way", WAYS)
def test_only_the_first_layers_are_recomputed(way):
    loss_under, params = WAYS[way]

    def num_matmuls(policy: str) -> int:
        return count_step_flops(jax.make_jaxpr(jax.grad(loss_under(policy)))(params, X)).num_matmuls

    per_layer, rest = divmod(num_matmuls("nothing") - num_matmuls("none"), NUM)
    assert (per_layer > 0, rest) == (True, 0)
    assert [num_matmuls(f"first:{k}") - num_matmuls("none") for k in (1, 2, 4)] == [per_layer, 2 * per_layer, 4 * per_layer]


def test_its_text_and_its_row():
    assert (parse("first:2"), str(parse(" first:02 "))) == (First(2), "first:2")
    with pytest.raises(UnknownPolicyError):
        parse("first:0")
    with pytest.raises(UnknownPolicyError) as caught:
        parse("save:a+first")
    assert "first:2" in caught.value.next_step
    rows = [json.loads(line) for line in policies().lines()]
    assert [row["policy"] for row in rows].count("first:K") == 1
    assert "| `first:K` |" in policy_table_markdown()
