"""Models of a few numbers, run on the CPU: two decoders, what they compute under a policy, and layers of a user's own.

`check_decoder(GPT, "every:2+dots")` asserts that the policy changes neither loss nor gradients.
"""

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.model.decoder_workload import make_loss
from jaxremat.model.transformer import Block, Decoder
from jaxremat.policy.autoname import autoname
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.names import named_values
from tests.equality import ROUNDING, assert_same_bits, relative_difference
from tests.helpers import quick_jit

LAYERS = 4
GPT = ModelConfig("gpt", 32, LAYERS, 16, 2, 2, 8, 32, max_seq_len=8, dropout=0.2, dtype="float32")
LLAMA = replace(
    GPT, num_kv_heads=1, positions="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, qk_norm=True, tie_embeddings=False
)
LLAMA_NO_DROPOUT = replace(LLAMA, dropout=0.0)
TRAIN = TrainConfig(seq_len=8)
TOKENS = jax.random.randint(jax.random.key(9), (2, TRAIN.seq_len + 1), 0, GPT.vocab_size)
#: The input of the layers below: 64 rows of width 8.
X = jax.random.normal(jax.random.key(0), (64, 8))
KEYS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
DROPOUT_KEY = jax.random.key(3)
save_only = jax.checkpoint_policies.save_only_these_names


@functools.cache
def init_params(model: ModelConfig, policy: str) -> Any:
    tokens = jnp.zeros((1, 1), jnp.int32)
    decoder = Decoder(model, policy)
    return quick_jit(decoder.init)(jax.random.key(0), tokens)["params"]


@functools.cache
def gradient(model: ModelConfig, policy: str) -> Any:
    """The compiled function of loss and gradients: `gradient(model, policy)(params, tokens, dropout_key)`."""
    return quick_jit(jax.value_and_grad(make_loss(model, as_policy(policy), "xla")))


@functools.cache
def loss_and_grads(model: ModelConfig, policy: str) -> tuple[jax.Array, Any]:
    return gradient(model, policy)(init_params(model, "none"), TOKENS, DROPOUT_KEY)


def check_decoder(model: ModelConfig, policy: str) -> None:
    """Under `policy` the loss of `none` to the bit, and its gradients but for rounding."""
    loss, grads = loss_and_grads(model, policy)
    want_loss, want_grads = loss_and_grads(model, "none")
    assert loss.dtype == jnp.float32
    assert np.isfinite(loss)
    assert_same_bits(loss, want_loss)
    assert relative_difference(grads, want_grads) <= ROUNDING


@functools.cache
def block_names(
    config: ModelConfig, batch: int = 2, seq_len: int = 8, deterministic: bool = True, **kwargs: Any
) -> list[str]:
    """The names that `autoname` gives to the values of one decoder layer, in the order of its program."""
    block = autoname(Block)(config, deterministic=deterministic, **kwargs)
    x = jax.ShapeDtypeStruct((batch, seq_len, config.embed_dim), config.dtype)
    variables = jax.eval_shape(block.init, KEYS, x)
    return [v.name for v in named_values(lambda v, x: block.apply(v, x, rngs={"dropout": KEYS["dropout"]}), variables, x)]


class NormBlock(nn.Module):
    """A layer of width 8 with BatchNorm, dropout, submodules that Flax names, and no named value."""

    width: int = 8
    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.3, deterministic=self.deterministic)(nn.gelu(nn.Dense(16)(x)))
        h = nn.BatchNorm(use_running_average=False)(h)
        return x + nn.Dense(self.width, name="out")(h)


class Scanned(nn.Module):
    """A user's own `nn.scan` over a class of layers."""

    block: Any
    length: int = LAYERS

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.length,
        )
        return loop(self.block(name="block"), x, None)[0]


def rematted(block: Any, *names: str) -> Any:
    return nn.remat(block, policy=save_only(*names), prevent_cse=False)
