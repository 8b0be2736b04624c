"""A decoder in the form of Haiku's: one dictionary of parameters by module, and modules numbered in the order of their calls.

Plain functions write what Haiku's do: the scopes `linear`, `linear_1` and so on, and none around a layer. jaxremat finds the
layers all the same::

    python -m jaxremat.run --model examples/haiku_transformer.py:workload --policy none nothing dots auto --batch 16
"""

from collections import Counter

import jax
import jax.numpy as jnp
import optax

import jaxremat


def linear(params, x):
    """The module `linear`."""
    return x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)


def layer_norm(params, x):
    """The module `layer_norm`."""
    return jax.nn.standardize(x, epsilon=1e-5) * params["scale"].astype(x.dtype) + params["offset"].astype(x.dtype)


def attention(params, x, num_heads):
    """Causal attention on x [batch, length, width]."""
    q, k, v = (linear(params[name], x).reshape(*x.shape[:2], num_heads, -1) for name in ("query", "key", "value"))
    return linear(params["linear"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Modules:
    """Calls the modules of a dictionary of parameters. The second call of `linear` is that of `linear_1`."""

    def __init__(self, params):
        self.params, self.calls = params, Counter()

    def __call__(self, function, *args):
        name, number = function.__name__, self.calls[function.__name__]
        self.calls[name] += 1
        name += f"_{number}" * (number > 0)
        with jax.named_scope(name):
            return function(self.params[f"transformer/{name}"], *args)


def transformer(params, tokens, num_layers, num_heads, dtype):
    """Tokens to logits."""
    modules, table = Modules(params), params["embed"]["embeddings"].astype(dtype)
    x = table[tokens] + params["positions"]["embeddings"].astype(dtype)
    for _ in range(num_layers):
        x = x + modules(attention, modules(layer_norm, x), num_heads)
        x = x + modules(linear, jax.nn.gelu(modules(linear, modules(layer_norm, x))))
    return modules(layer_norm, x) @ table.T


def workload(
    batch: int = 16,
    seq_len: int = 512,
    vocab_size: int = 32000,
    num_layers: int = 12,
    width: int = 512,
    num_heads: int = 8,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy."""

    def dense(num_in, num_out):
        return {"w": (num_in, num_out), "b": (num_out,)}

    def number(name, n):
        return f"transformer/{name}" + f"_{n}" * (n > 0)

    shapes = {"embed": {"embeddings": (vocab_size, width)}, "positions": {"embeddings": (seq_len, width)}}
    for n in range(num_layers):
        shapes[number("attention", n)] = dict.fromkeys(("query", "key", "value", "linear"), dense(width, width))
        shapes[number("linear", 2 * n)], shapes[number("linear", 2 * n + 1)] = (
            dense(width, 4 * width),
            dense(4 * width, width),
        )
    for n in range(2 * num_layers + 1):
        shapes[number("layer_norm", n)] = {"scale": (width,), "offset": (width,)}

    def init(key):
        def make(shape):
            return 0.02 * jax.random.normal(key, shape) if len(shape) > 1 else jnp.zeros(shape)

        params = jax.tree.map(make, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        return {name: {**leaf, "scale": leaf["scale"] + 1} if "scale" in leaf else leaf for name, leaf in params.items()}

    def loss(params, tokens):
        logits = transformer(params, tokens[:, :-1], num_layers, num_heads, dtype).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32)
    return jaxremat.Workload(
        loss=loss, params=jax.eval_shape(init, jax.random.key(0)), batch=tokens, init=init, num_tokens=batch * seq_len
    )
