"""`jaxremat.plan` rejects arguments that make no sense, before anything is compiled."""

from typing import Any

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
    "'None'": dict(layer=Block(), args=(X,), budget=None),
    "float32[4, 64]": dict(layer=nn.Dense(64), args=(X,)),
    "float32[]": dict(layer=lambda p, x: (p * x).sum(), args=(X, X)),
}


@pytest.mark.parametrize("quoted", BAD_PLANS)
def test_arguments_that_cannot_be_meant(h100, quoted):
    given: dict[str, Any] = {"num_layers": 2, "budget": "1GiB", "target": h100, **BAD_PLANS[quoted]}
    with pytest.raises(UsageError) as caught:
        jaxremat.plan(given.pop("layer"), *given.pop("args"), **given)
    assert quoted in caught.value.got
