"""`jaxremat.plan` rejects arguments that make no sense, before anything is compiled. Its defaults are the commands'."""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxremat
from jaxremat.answer.planned import plan_run
from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.planner.plan import find_plans
from jaxremat.session.flags import RunFlags


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(128)(x)


X = jax.ShapeDtypeStruct((4, 128), jnp.float32)
#: By what the error quotes, arguments that are rejected.
BAD_PLANS = {
    "Block": dict(layer=Block, args=(X,)),
    "str": dict(layer="block", args=(X,)),
    "num_layers=0": dict(layer=Block(), args=(X,), num_layers=0),
    "num_layers='2'": dict(layer=Block(), args=(X,), num_layers="2"),
    "0 arguments": dict(layer=Block(), args=()),
    "1 arguments": dict(layer=lambda p, x: x, args=(X,)),
    "scan=False": dict(layer=lambda p, x: x, args=(X, X), scan=False),
    "'-5'": dict(layer=Block(), args=(X,), budget=-5),
    "float32[4, 64]": dict(layer=nn.Dense(64), args=(X,)),
    "float32[]": dict(layer=lambda p, x: (p * x).sum(), args=(X, X)),
}


@pytest.mark.parametrize("quoted", BAD_PLANS)
def test_arguments_that_cannot_be_meant(h100, quoted):
    given: dict[str, Any] = {"num_layers": 2, "budget": "1GiB", "target": h100, **BAD_PLANS[quoted]}
    with pytest.raises(UsageError) as caught:
        jaxremat.plan(given.pop("layer"), *given.pop("args"), **given)
    assert quoted in caught.value.got


class _Found(Exception):
    """What `plan` would look for a plan with."""


def test_without_a_budget_it_is_the_commands(h100, monkeypatch):
    def find(layouts: Any, **_: Any) -> None:
        raise _Found(layouts[0].budget_bytes)

    monkeypatch.setattr("jaxremat.answer.any_layer.find_plans", find)
    with pytest.raises(_Found) as found:
        jaxremat.plan(Block(), X, num_layers=2, target=h100)
    flags = RunFlags()
    assert found.value.args == (int(h100.chip.mem_fraction * h100.memory_bytes),)
    assert flags.budget is None


def test_the_defaults_are_those_of_the_commands():
    """Of a decoder and of a plan. `ModelConfig` is the one place of a model's defaults: its flags change nothing by default."""
    flags, config = RunFlags(), ModelConfig()
    assert {value for value in vars(flags.fields).values()} == {None}
    assert config.attention == "auto"
    assert jaxremat.Decoder(config).implementation is jaxremat.Block(config).implementation is None
    of_plan = {name: parameter.default for name, parameter in inspect.signature(jaxremat.plan).parameters.items()}
    assert {name: of_plan[name] for name in ("budget", "target")} == {"budget": flags.budget, "target": flags.target}
    assert of_plan["scan"] == config.scan_layers
    assert {inspect.signature(plan).parameters["objective"].default for plan in (find_plans, plan_run)} == {flags.objective}
