"""A training step of attention and MLPs that compiles sooner than a whole model, for `experiments.tpu`.

It has no embedding, no vocabulary and no norms. `layers` is a `--model`:

    python -m jaxremat run --model experiments.tpu_step:layers --model-arg attention=xla --target v6e
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxremat import Workload
from jaxremat.chips.tpu.attention import splash_attention
from jaxremat.policy.jax_private import ResidualName


def layers(
    batch: int = 8,
    num_layers: int = 4,
    length: int = 1024,
    width: int = 1024,
    attention: str = "splash",
    is_unrolled: bool = False,
) -> Workload:
    """Layers of causal attention with heads of 128, and an MLP, in bfloat16.

    Args:
        batch: sequences.
        num_layers: how many layers.
        length: tokens of a sequence.
        width: features of a token. The MLP has four times as many.
        attention: `splash`, `xla`, or `none` for an MLP alone.
        is_unrolled: whether the layers are written out, in place of a scan.
    """

    def attend(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> jax.Array:
        if attention == "splash":
            return splash_attention(q_BTNH, k_BTNH, v_BTNH, name=ResidualName("context"))
        return jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True)

    def layer(x_BTD: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        w = jax.tree.map(lambda w: w.astype(x_BTD.dtype), w)
        if attention != "none":
            q, k, v = (checkpoint_name(jnp.einsum("btd,dnh->btnh", x_BTD, w[name]), f"{name}_proj") for name in "qkv")
            x_BTD += jnp.einsum("btnh,nhd->btd", attend(q, k, v), w["out"])
        h_BTF = checkpoint_name(x_BTD @ w["wi"], "mlpwi")
        return x_BTD + jnp.maximum(h_BTF, 0) @ w["wo"]

    def loss(params: Any, x_BTD: jax.Array) -> jax.Array:
        if is_unrolled:
            for n, w in enumerate(params):
                with jax.named_scope(f"layers_{n}"):
                    x_BTD = layer(x_BTD, w)
        else:
            x_BTD, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x_BTD, params)
        return (x_BTD.astype(jnp.float32) ** 2).mean()

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    heads = {"q": (width, width // 128, 128), "out": (width // 128, 128, width)}
    shapes = {"wi": (width, 4 * width), "wo": (4 * width, width)}
    if attention != "none":
        shapes |= heads | {"k": heads["q"], "v": heads["q"]}
    if is_unrolled:
        params: Any = [{name: shape(of) for name, of in shapes.items()} for _ in range(num_layers)]
    else:
        params = {name: shape((num_layers, *of)) for name, of in shapes.items()}
    return Workload(loss=loss, params=params, batch=jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16))
