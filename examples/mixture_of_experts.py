"""A decoder whose every other layer has experts, each token going to one of them, as in a Switch Transformer.

A router's loss, which keeps the experts equally busy, is added to the loss and is its auxiliary value. jaxremat finds two
kinds of layers among `layer_0`, `layer_1` and so on::

    python -m jaxremat.run --model examples/mixture_of_experts.py:workload --policy none nothing dots auto --batch 8
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxremat


class Experts(nn.Module):
    """MLPs of which a router chooses one for each token. Returns the output and the router's loss."""

    num_experts: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        width, capacity = x.shape[-1], x.shape[1] * 5 // (4 * self.num_experts)
        probabilities = nn.softmax(nn.Dense(self.num_experts, name="router")(x.astype(jnp.float32)))
        chosen = jax.nn.one_hot(probabilities.argmax(-1), self.num_experts)
        loss = self.num_experts * (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum()
        # A token's place at its expert, counted from 1. A token that finds no place passes by all experts.
        place = jax.nn.one_hot((jnp.cumsum(chosen, axis=1) * chosen).sum(-1) - 1, capacity)
        send = jnp.einsum("bte,btc->btec", chosen, place).astype(self.dtype)
        initial = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", initial, (self.num_experts, width, 4 * width)).astype(self.dtype)
        down = self.param("down", initial, (self.num_experts, 4 * width, width)).astype(self.dtype)
        y = jnp.einsum("btec,btw->becw", send, x)
        y = jnp.einsum("becm,emw->becw", nn.gelu(jnp.einsum("becw,ewm->becm", y, up)), down)
        weight = (chosen * probabilities).sum(-1, keepdims=True).astype(self.dtype)
        return jnp.einsum("btec,becw->btw", send, y) * weight, loss


class Layer(nn.Module):
    """A layer: causal attention, then experts, or an MLP where `num_experts` is 0."""

    num_heads: int
    num_experts: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        width, heads = x.shape[-1], (*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads)
        y = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(nn.LayerNorm(dtype=self.dtype)(x))
        q, k, v = (part.reshape(heads) for part in jnp.split(y, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(width, dtype=self.dtype, name="out")(y)
        y, loss = nn.LayerNorm(dtype=self.dtype)(x), 0.0
        if self.num_experts:
            y, loss = Experts(self.num_experts, self.dtype, name="experts")(y)
        else:
            y = nn.Dense(width, dtype=self.dtype)(nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y)))
        return x + y, loss


def workload(
    batch: int = 8,
    seq_len: int = 512,
    vocab_size: int = 32128,
    num_layers: int = 12,
    num_experts: int = 8,
    width: int = 768,
    num_heads: int = 12,
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the next token's cross-entropy and a hundredth of the router's loss."""

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed, router_loss = nn.Embed(vocab_size, width, dtype=dtype), 0.0
            positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], width))
            x = embed(tokens) + positions.astype(dtype)
            for i in range(num_layers):
                x, loss = Layer(num_heads, num_experts * (i % 2), dtype, name=f"layer_{i}")(x)
                router_loss += loss
            return embed.attend(nn.LayerNorm(dtype=dtype)(x)), router_loss

    model = Decoder()

    def init(key):
        return model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]

    def loss(params, tokens):
        logits, router_loss = model.apply({"params": params}, tokens[:, :-1])
        value = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()
        return value + 0.01 * router_loss, {"router_loss": router_loss}

    params, tokens = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32)
    return jaxremat.Workload(loss=loss, params=params, batch=tokens, init=init, num_tokens=batch * seq_len)
