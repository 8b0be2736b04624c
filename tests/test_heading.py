"""The heading of a command has the shapes and the bytes of the batch that was requested."""

import re

import pytest

from jaxremat.command import parse_flags
from jaxremat.flags import RunFlags
from jaxremat.flow import start
from jaxremat.request import check_run
from jaxremat.units import gib
from tests.user_files import in_folder

WIDTH, WRITTEN = 256, 64
OWN = f"""
import jax, jax.numpy as jnp, jaxremat

def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)

def layers(batch: int = {WRITTEN}):
    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x ** 2)

    return jaxremat.Workload(loss=loss, params=[shape({WIDTH}, {WIDTH})] * 3, batch=shape(batch, {WIDTH}))

def whole(batch: int = {WRITTEN}):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    return jaxremat.Workload(step=step, args=(shape({WIDTH}, {WIDTH}), shape(batch, {WIDTH})))
"""


@pytest.mark.parametrize(("batches", "shown"), [((), WRITTEN), (("8192",), 8192), (("16384", "8192"), 16384)])
def test_a_heading_is_about_the_batch_that_was_requested(batches, shown, tmp_path, h100):
    with in_folder(tmp_path) as write:
        path = write("own.py", OWN)

        def lines(name):
            asked = ["--model", f"{path}:{name}", *(["--batch", *batches] if batches else [])]
            heading = start(check_run(parse_flags(RunFlags, asked)), h100).heading
            return {line[:10].strip(): line[10:] for line in heading}

        of_layers, of_step = lines("layers"), lines("whole")
    assert re.search(r"(\S+ GiB) between", of_layers["layers"])[1] == gib(shown * WIDTH * 4)
    assert of_step["model"].endswith(gib((WIDTH + shown) * WIDTH * 4))
    assert all(f"float32[{shown},{WIDTH}]" in found["step"] for found in (of_layers, of_step))
