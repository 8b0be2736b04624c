"""A decoder as a plain function: dictionaries of arrays, `lax.scan` over the stacked layers, and a loss in chunks.

jaxremat finds the loop over the layers and applies the policy inside its body. The second loop, which computes the loss of a
few positions at a time, isn't over layers: it is left as it is, and listed::

    python -m jaxremat.run --model examples/plain_scan.py:workload --policy none nothing dots auto --batch 8
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


def layer(p, x):
    """One layer: attention and a gated MLP. `p` is a dictionary of the layer's arrays."""
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    y = normalize(x, p["norm1"])
    q, k, v = (jnp.einsum("btw,whd->bthd", y, p[name]) for name in ("query", "key", "value"))
    x = x + jnp.einsum("bthd,hdw->btw", attend(q, k, v), p["out"])
    y = normalize(x, p["norm2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def chunked_loss(embed, x, targets, chunk):
    """The mean cross-entropy, of `chunk` positions at a time, so that the logits are never in memory as a whole."""

    @jax.checkpoint
    def add(total, part):
        logits = (part[0] @ embed.T.astype(x.dtype)).astype(jnp.float32)
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, part[1]).sum(), None

    parts = x.reshape(-1, chunk, x.shape[-1]), targets.reshape(-1, chunk)
    return jax.lax.scan(add, jnp.zeros(()), parts)[0] / targets.size


def workload(
    batch: int = 8,
    seq_len: int = 1024,
    vocab_size: int = 32000,
    num_layers: int = 24,
    width: int = 1024,
    num_heads: int = 16,
    chunk: int = 1024,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy. `chunk` must divide batch x seq_len."""
    head_dim, mlp_dim = width // num_heads, 4 * width
    shapes = {"query": (width, num_heads, head_dim), "key": (width, num_heads, head_dim)}
    shapes |= {"value": (width, num_heads, head_dim), "out": (num_heads, head_dim, width)}
    shapes |= {"gate": (width, mlp_dim), "up": (width, mlp_dim), "down": (mlp_dim, width)}

    def init(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        layers = {name: 0.02 * jax.random.normal(keys[name], (num_layers, *shapes[name])) for name in shapes}
        layers |= {name: jnp.ones((num_layers, width)) for name in ("norm1", "norm2")}
        embed = 0.02 * jax.random.normal(jax.random.fold_in(key, 1), (vocab_size, width))
        return {"embed": embed, "layers": layers, "norm": jnp.ones(width)}

    def loss(params, tokens):
        x = params["embed"].astype(dtype)[tokens[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
        return chunked_loss(params["embed"], normalize(x, params["norm"]), tokens[:, 1:], chunk)

    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32),
        init=init,
        num_tokens=batch * seq_len,
    )
