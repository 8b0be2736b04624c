"""LoRA by hand on a decoder of plain functions: frozen kernels in bfloat16, and adapters that alone are trained.

`trainable="lora_*"` says which parameters have gradients and an optimizer's state. jaxremat finds the loop over the layers as in
any other model::

    python -m jaxremat.run --model examples/lora.py:workload --policy none nothing dots auto --batch 8
"""

import jax
import jax.numpy as jnp
import optax

import jaxremat


def normalize(x, scale):
    """RMSNorm."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)


def attend(q, k, v):
    """Causal attention on arrays [batch, length, heads, head_dim]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def dense(p, x):
    """A linear layer: the frozen kernel, and beside it the adapter."""
    y = x @ p["kernel"]
    return y + (x @ p["lora_a"].astype(x.dtype)) @ p["lora_b"].astype(x.dtype)


def layer(p, x, num_heads):
    """One layer: attention and a gated MLP. `p` is a dictionary of the layer's arrays."""
    y = normalize(x, p["norm1"])
    q, k, v = (dense(p[name], y).reshape(*y.shape[:2], num_heads, -1) for name in ("query", "key", "value"))
    x = x + dense(p["out"], attend(q, k, v).reshape(x.shape))
    y = normalize(x, p["norm2"])
    return x + dense(p["down"], jax.nn.silu(dense(p["gate"], y)) * dense(p["up"], y))


def workload(
    batch: int = 8,
    seq_len: int = 1024,
    vocab_size: int = 32000,
    num_layers: int = 24,
    width: int = 1024,
    num_heads: int = 16,
    rank: int = 16,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the adapters, on the next token's cross-entropy."""
    shapes = {name: (width, width) for name in ("query", "key", "value", "out")}
    shapes |= {"gate": (width, 4 * width), "up": (width, 4 * width), "down": (4 * width, width)}

    def linear(key, ins, outs):
        first, second = jax.random.split(key)
        base = {"kernel": 0.02 * jax.random.normal(first, (num_layers, ins, outs), dtype)}
        a = jax.random.uniform(second, (num_layers, ins, rank), jnp.float32, -(ins**-0.5), ins**-0.5)
        return {**base, "lora_a": a, "lora_b": jnp.zeros((num_layers, rank, outs))}

    def init(key):
        keys = jax.random.split(key, len(shapes))
        layers = {name: linear(one, *shapes[name]) for name, one in zip(shapes, keys, strict=True)}
        layers |= {name: jnp.ones((num_layers, width), dtype) for name in ("norm1", "norm2")}
        embed = 0.02 * jax.random.normal(jax.random.fold_in(key, 1), (vocab_size, width), dtype)
        return {"embed": embed, "layers": layers, "norm": jnp.ones(width, dtype)}

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x, num_heads), None), x, params["layers"])
        logits = (normalize(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32),
        init=init,
        trainable="lora_*",
        num_tokens=batch * seq_len,
    )
