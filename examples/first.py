"""A loss and the shapes of what it takes: all that jaxremat needs of a model.

python -m jaxremat run --model examples/first.py:workload --policy none nothing auto --batch 65536 --budget 12GiB
"""

import jax
import jax.numpy as jnp

import jaxremat


def loss(params, x):
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x @ params["head"]) ** 2)


def workload(batch: int = 4096):
    layer = {"up": jax.ShapeDtypeStruct((1024, 4096), "float32"), "down": jax.ShapeDtypeStruct((4096, 1024), "float32")}
    params = {"layers": 12 * [layer], "head": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    return jaxremat.Workload(loss=loss, params=params, batch=jax.ShapeDtypeStruct((batch, 1024), "float32"))
