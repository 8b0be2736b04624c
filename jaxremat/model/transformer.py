"""The decoder: embedding, a stack of layers under a policy, final norm, output head.

decoder = Decoder(preset("gpt2").config, policy="dots")
logits = decoder.apply({"params": params}, tokens)  # [batch, sequence] to [batch, sequence, vocabulary]
"""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxremat.config import ModelConfig
from jaxremat.mesh.sharding import on_mesh, parts_of
from jaxremat.model.gathers import GATHERED_NAMES, gathered_head, gathered_names
from jaxremat.model.layers import RESIDUAL, Block, Norm, layer_input, own_windows
from jaxremat.model.param_axes import LOGICAL_AXES
from jaxremat.policy.autoname import autoname
from jaxremat.policy.layers import Layers
from jaxremat.policy.names import NamedValue, named_values
from jaxremat.policy.spec import Policy, Rule


class Decoder(nn.Module):
    """A decoder-only language model whose layers run under `policy`.

    Parameters, initial values and dropout masks depend on `config` alone, never on the policy. The layers' parameters are
    under `layers`. With `config.scan_layers` they are stacked there on a leading axis, else they are under `layers/layer_0`,
    `layers/layer_1`, ...

    Attributes:
        config: the sizes and dtypes.
        policy: what the layers save for the backward pass.
        implementation: `xla`, or the name of the chip's fused attention. None takes `config.attention`, whose `auto` is as for
            the commands: the fused one where it compiles for the device that jaxremat compiles for, or else for JAX's default
            device.
        deterministic: True switches dropout off.
    """

    config: ModelConfig
    policy: Policy | str = Rule("none")
    implementation: str | None = None
    deterministic: bool = True

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(0.02)
        self.embedding = nn.Embed(c.vocab_size, c.embed_dim, embedding_init=init, dtype=c.dtype, param_dtype=c.param_dtype)
        if c.positions == "learned":
            self.position = self.param("position", init, (c.max_seq_len, c.embed_dim), jnp.dtype(c.param_dtype))
        self.drop = nn.Dropout(c.dropout, deterministic=self.deterministic)
        block = Block(c, self.implementation, self.deterministic, gathered_names(self.policy), parent=None)
        self.layers = Layers(block, c.num_layers, self.policy, c.scan_layers)
        self.final_norm = Norm(c, c.norm)
        if not c.tie_embeddings:
            self.output = self.param("output", init, (c.embed_dim, c.vocab_size), jnp.dtype(c.param_dtype))

    def hidden(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens `[B, T]` (int) to the final hidden states `[B, T, D]` in the compute dtype.

        With experts, their use `[2, E]`, summed over the layers, is sown as `use` in the collection `router`.
        """
        c = self.config
        chex.assert_rank(tokens_BT, 2)
        chex.assert_type(tokens_BT, int)
        x_BTD = on_mesh(self.embedding(tokens_BT), "replica", "sequence", "embed")
        if c.scale_embeddings:
            x_BTD = x_BTD * jnp.asarray(c.embed_dim**0.5, x_BTD.dtype)
        if c.positions == "learned":
            x_BTD = x_BTD + self.position[: tokens_BT.shape[1]].astype(x_BTD.dtype)
        windows = own_windows(c, tokens_BT.shape[1])
        x = layer_input(c, on_mesh(self.drop(x_BTD), *RESIDUAL))
        x = self.layers(x, own=() if windows is None else (windows,))
        if c.has_experts:
            x, use_2E = x
            self.sow("router", "use", use_2E)
        return on_mesh(self.final_norm(x), "batch", None, None)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Hidden states `[B, T, D]` to logits `[B, T, V]` in the compute dtype."""
        kernel = self.embedding.embedding if self.config.tie_embeddings else self.output
        return head_logits(self.config, kernel, x_BTD)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens `[B, T]` (int) to logits `[B, T, V]` in the compute dtype."""
        return self.logits(self.hidden(tokens_BT))


def head_kernel(config: ModelConfig, params: Any) -> jax.Array:
    """The output head's weights: the token embedding `[V, D]`, or a kernel `[D, V]`.

    It is the embedding with `tie_embeddings`.
    """
    return params["embedding"]["embedding"] if config.tie_embeddings else params["output"]


def head_logits(config: ModelConfig, kernel: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """The logits `[B, T, V]` for hidden states `[B, T, D]` and any T.

    The kernel is what `head_kernel` returns.
    """
    equation = "btd,vd->btv" if config.tie_embeddings else "btd,dv->btv"
    if parts_of("vocab", config.vocab_size) == 1:  # the positions are divided, after a chunk was cut out of whole ones
        x_BTD = on_mesh(on_mesh(x_BTD, "batch", None, None), "batch", "sequence", None)
    axes = LOGICAL_AXES["embedding", "embedding"] if config.tie_embeddings else LOGICAL_AXES["", "output"]
    logits_BTV = jnp.einsum(equation, x_BTD, gathered_head(kernel, config.dtype, axes))
    if cap := config.logit_softcap:
        logits_BTV = cap * jnp.tanh(logits_BTV / cap)
    return on_mesh(logits_BTV, "batch", "sequence", "vocab")


def param_shapes(config: ModelConfig) -> Any:
    """The shapes of the decoder's parameter tree. Nothing is allocated."""
    return jax.eval_shape(Decoder(config, implementation="xla").init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))[
        "params"
    ]


def count_params(config: ModelConfig) -> int:
    """The number of the decoder's parameters, counted on its parameter tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def layer_names(config: ModelConfig, batch: int, seq_len: int) -> list[NamedValue]:
    """The named values of one decoder layer in program order.

    They have their shapes and bytes at this batch.

    Where the call is traced on a mesh that divides the kernels over `fsdp`, the gathered kernels are among them.
    """
    return _named_values(Block(config, "xla", gathers=GATHERED_NAMES), batch, seq_len)


def every_layer_name(config: ModelConfig, batch: int, seq_len: int, implementation: str) -> list[NamedValue]:
    """The values of `layer_names`, and the values that `autoname` names, in program order.

    `autoname`'s values depend on the attention `implementation`.
    """
    return _named_values(autoname(Block)(config, implementation, config.dropout == 0, GATHERED_NAMES), batch, seq_len)


def _named_values(block: Block, batch: int, seq_len: int) -> list[NamedValue]:
    rngs = {name: jax.eval_shape(lambda: jax.random.key(0)) for name in ("params", "dropout")}
    args = layer_args(block.config, batch, seq_len)
    variables = jax.eval_shape(block.init, rngs, *args)
    return named_values(lambda v, rngs, *args: block.apply(v, *args, rngs=rngs), variables, rngs, *args)


def layer_args(config: ModelConfig, batch: int, seq_len: int) -> tuple[Any, ...]:
    """The shapes of what one layer is called with.

    They are what `layer_input` makes, and the layer's window where windows differ.
    """
    x_BTD = jax.ShapeDtypeStruct((batch, seq_len, config.embed_dim), config.dtype)
    x = jax.eval_shape(lambda x_BTD: layer_input(config, x_BTD), x_BTD)
    return (x,) if own_windows(config, seq_len) is None else (x, jax.ShapeDtypeStruct((), jnp.int32))
