"""`jaxremat.plan` refuses arguments that make no sense, before anything is compiled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxremat
from jaxremat.errors import UsageError


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(128)(x)


X = jax.ShapeDtypeStruct((4, 128), jnp.float32)
BAD_PLANS = {
    "plan got the class Block": dict(layer=Block, args=(X,)),
    "plan got a str": dict(layer="block", args=(X,)),
    "plan got num_layers=0": dict(layer=Block(), args=(X,), num_layers=0),
    "plan got num_layers='2'": dict(layer=Block(), args=(X,), num_layers="2"),
    "plan got 0 arguments": dict(layer=Block(), args=()),
    "plan got 1 arguments": dict(layer=lambda p, x: x, args=(X,)),
    "plan got scan=False": dict(layer=lambda p, x: x, args=(X, X), scan=False),
    "cannot read '-5'": dict(layer=Block(), args=(X,), budget=-5),
    "cannot read 'None'": dict(layer=Block(), args=(X,), budget=None),
    r"the layer makes float32\[4, 64\] of float32\[4, 128\]": dict(layer=nn.Dense(64), args=(X,)),
    r"the layer makes float32\[\] of": dict(layer=lambda p, x: (p * x).sum(), args=(X, X)),
}


@pytest.mark.parametrize("said", BAD_PLANS)
def test_plan_refuses_what_cannot_be_meant(h100, said):
    given = {"num_layers": 2, "budget": "1GiB", "target": h100, **BAD_PLANS[said]}
    with pytest.raises(UsageError, match=f"^{said}"):
        jaxremat.plan(given.pop("layer"), *given.pop("args"), **given)
