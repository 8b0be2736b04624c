"""Small programs compiled for a GPU that isn't here, of sizes that the tests of FLOPs, bytes and seconds count by hand."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxremat.chips.target import Target
from jaxremat.xla import hlo
from jaxremat.xla.compile import lower_and_compile

BF16, F32 = jnp.bfloat16, jnp.float32
L, M, D, F = 5, 512, 256, 1024  # layers, tokens, model and hidden widths
B, T, N, H = 2, 256, 4, 64  # batch, length, heads, head dim


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_for(target: Target, f: Any, *args: Any) -> tuple[hlo.Module, Any]:
    """(parsed HLO, jaxpr) of `f` compiled for a GPU that is not here."""
    return lower_and_compile(f, args, target).module, jax.make_jaxpr(f)(*args)


def compiled_attention(
    target: Target, policy: Any, implementation: Literal["xla", "cudnn"] = "cudnn", causal: bool = True, kv_heads: int = N
) -> tuple[hlo.Module, Any]:
    """Forward and backward of L residual attention layers in a scan."""

    def layer(w, x):
        heads = lambda name, n: (x @ w[name]).reshape(B, T, n, H)  # noqa: E731
        q = checkpoint_name(heads("q", N), "q")
        k, v = heads("k", kv_heads), heads("v", kv_heads)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
        return x + jnp.tanh(y.reshape(B, T, N * H) @ w["o"])

    def loss(w, x):
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return (jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0].astype(F32) ** 2).sum()

    width = N * H
    weights = {"q": width, "k": kv_heads * H, "v": kv_heads * H, "o": width}
    return compile_for(target, jax.grad(loss), {k: array(L, width, n) for k, n in weights.items()}, array(B, T, width))
