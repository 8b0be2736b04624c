"""Text that a decoder writes: one token after the other, each drawn at random.

It is drawn from the decoder's distribution of the next token.

sample_text(preset("tiny").config, params, seq_len=64, num_tokens=100)   # "The ...", 100 bytes after the prompt
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxremat.config import ModelConfig
from jaxremat.model.data import NUM_BYTES
from jaxremat.model.transformer import Decoder

PROMPT = "The "
#: What the logits are divided by. Below 1, likely tokens are drawn more often than their probability says.
TEMPERATURE = 0.8


def sample_text(model: ModelConfig, params: Any, seq_len: int, num_tokens: int) -> str:
    """`PROMPT` and the `num_tokens` bytes that the decoder writes after it, always the same.

    The decoder reads the last `seq_len` tokens before each token, and computes all of them again.
    """
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int32)
    tokens_N = np.zeros(max(len(prompt) + num_tokens, seq_len), np.int32)
    tokens_N[: len(prompt)] = prompt
    sharding: Any = jax.tree.leaves(params)[0].sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    write = jax.jit(_with_drawn, static_argnums=(0, 5), out_shardings=whole)
    written_N = np.asarray(write(model, params, tokens_N, len(prompt), len(prompt) + num_tokens, seq_len))
    return written_N[: len(prompt) + num_tokens].astype(np.uint8).tobytes().decode(errors="replace")


def _with_drawn(model: ModelConfig, params: Any, tokens_N: jax.Array, start: int, end: int, seq_len: int) -> jax.Array:
    """`tokens_N` with the tokens from number `start` to before `end` drawn."""

    def write(n: jax.Array, tokens_N: jax.Array) -> jax.Array:
        first = jnp.maximum(n - seq_len, 0)
        seen_BT = jax.lax.dynamic_slice(tokens_N, (first,), (seq_len,))[None]
        logits_BTV: Any = Decoder(model, implementation="xla").apply({"params": params}, seen_BT)
        logits_V = logits_BTV[0, n - first - 1, :NUM_BYTES].astype(jnp.float32)
        token = jax.random.categorical(jax.random.fold_in(jax.random.key(0), n), logits_V / TEMPERATURE)
        return tokens_N.at[n].set(token.astype(tokens_N.dtype))

    return jax.lax.fori_loop(start, end, write, tokens_N)
