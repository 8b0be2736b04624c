"""A physics-informed network: the loss has second derivatives of the network, those of the heat equation at random points.

The derivatives are taken inside the loss, by `jax.jvp` of `jax.grad`, and the layers are found in the program that they make::

    python -m jaxremat.run --model examples/pinn.py:workload --policy none nothing dots auto --batch 65536
"""

import jax
import jax.numpy as jnp

import jaxremat


def network(params, point):
    """The temperature at a point (x, y, z, t)."""
    x = jnp.tanh(point @ params["in"]["w"] + params["in"]["b"])
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"])[0]


def residual(params, point):
    """The heat equation: what du/dt and the sum of the second derivatives in space differ by."""
    gradient = jax.grad(network, argnums=1)

    def second(axis):
        direction = jnp.zeros_like(point).at[axis].set(1)
        return jax.jvp(lambda point: gradient(params, point), (point,), (direction,))[1][axis]

    return gradient(params, point)[3] - sum(second(axis) for axis in range(3))


def workload(batch: int = 65536, num_layers: int = 8, width: int = 256, dtype: str = "float32") -> jaxremat.Workload:
    """What is trained: the mean square of the equation's residual, and of the error where the temperature is known."""

    def init(key):
        keys = jax.random.split(key, num_layers + 2)

        def dense(key, num_in):
            return {"w": jax.random.normal(key, (num_in, width)) / num_in**0.5, "b": jnp.zeros(width)}

        layers = [dense(key, width) for key in keys[2:]]
        return {"in": dense(keys[0], 4), "layers": layers, "out": jax.random.normal(keys[1], (width, 1)) / width**0.5}

    def loss(params, batch):
        params, batch = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, batch))
        inside = jax.vmap(residual, (None, 0))(params, batch["points"])
        known = jax.vmap(network, (None, 0))(params, batch["boundary"])
        return (inside**2).mean() + ((known - batch["temperature"]) ** 2).mean()

    def struct(*shape):
        return jax.ShapeDtypeStruct((batch, *shape), jnp.float32)

    batches = {"points": struct(4), "boundary": struct(4), "temperature": struct()}
    return jaxremat.Workload(loss=loss, params=jax.eval_shape(init, jax.random.key(0)), batch=batches, init=init)
