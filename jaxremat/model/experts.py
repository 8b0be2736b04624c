"""The MLP of a layer with experts, of which a router sends each token to a few.

What the experts return for a token is added up.

The letters of shapes are those of `layers.py`, and: E experts, K experts of a token, S tokens times their experts (B x T x K).

There are two ways to bring tokens to their experts. Both compute the same values, but for rounding.

* `dense`: each expert computes every token, and the results of a token's own experts are added up. The matmuls have E / K times
  the FLOPs that the tokens need.
* `ragged`: tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each expert's rows by the expert's kernel. JAX asks
  for the FLOPs that the tokens need. What XLA computes is another matter: it expands a ragged product to a masked product over
  all experts, unless a fused kernel computes it (docs/experts.md).

References:
    Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers", equations 4 to 6, for
    the load-balancing loss; Jiang et al. 2024, "Mixtral of Experts"; xla/hlo/transforms/expanders/ragged_dot_rewriter.cc.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxremat.config import ModelConfig
from jaxremat.mesh.own_experts import with_own_experts
from jaxremat.mesh.sharding import on_mesh
from jaxremat.policy import maxtext

#: The checkpoint name of the router's logits `[B, T, E]`.
ROUTER_LOGITS = "router_logits"
_INIT = nn.initializers.normal(0.02)


class Experts(nn.Module):
    """Several MLPs, and the router that chooses among them for each token.

    The parameters are `router/kernel` `[D, E]`, `wi_0` and, of a gated MLP, `wi_1` `[E, D, F]`, and `wo` `[E, F, D]`. There are
    no biases.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`[B, T, D]` to `[B, T, D]` in the compute dtype, and to the use of the experts.

        `router_loss` takes that use.
        """
        c = self.config
        logits_BTE = nn.Dense(
            c.num_experts, use_bias=False, name="router", kernel_init=_INIT, dtype=c.dtype, param_dtype=c.param_dtype
        )(x_BTD)
        logits_BTE = checkpoint_name(on_mesh(logits_BTE, "batch", "sequence", None), ROUTER_LOGITS)
        weights_BTK, experts_BTK, use_2E = route(c, logits_BTE)

        def kernel(name: str, *shape: int) -> jax.Array:
            return self.param(name, _INIT, (c.num_experts, *shape), jnp.dtype(c.param_dtype)).astype(c.dtype)

        names = ("wi_0",) if c.mlp == "gelu" else ("wi_0", "wi_1")
        wi_EDF = [kernel(name, c.embed_dim, c.mlp_dim) for name in names]
        wo_EFD = kernel("wo", c.mlp_dim, c.embed_dim)
        compute = functools.partial(_dense if c.dispatch == "dense" else _ragged, c)
        axes = [("expert", None, "mlp")] * len(wi_EDF) + [("expert", "mlp", None)]
        tokens, kernels = (x_BTD, weights_BTK, experts_BTK), (*wi_EDF, wo_EFD)
        y_BTD = with_own_experts(compute, tokens, kernels, axes, always=c.dispatch == "ragged")
        return checkpoint_name(on_mesh(y_BTD, "batch", "sequence", None), maxtext.MLPWO), use_2E


def route(config: ModelConfig, logits_BTE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts of each token, by the router's logits.

    The probabilities of all experts are a softmax in float32, and the K largest are a token's weights. With
    `normalize_routing` they are divided by their sum.

    Returns:
        The weights `[B, T, K]` in float32, the numbers of the experts `[B, T, K]`, and the use of the experts `[2, E]` in
        float32: how many of all tokens each expert gets, as a share, and the mean of its probability.
    """
    probabilities_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32))
    weights_BTK, experts_BTK = jax.lax.top_k(probabilities_BTE, config.experts_per_token)
    if config.normalize_routing:
        weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdims=True)
    chosen_BTE = jax.nn.one_hot(experts_BTK, config.num_experts, dtype=jnp.float32).sum(-2)
    return weights_BTK, experts_BTK, jnp.stack([chosen_BTE.mean((0, 1)), probabilities_BTE.mean((0, 1))])


def router_loss(config: ModelConfig, use_2E: jax.Array) -> jax.Array:
    """The load-balancing loss of all layers, a float32 scalar, without its coefficient.

    It is K where all experts get equally many tokens, and at most E.

    It is E times the sum over experts of f x P: f is the share of tokens that an expert gets, and P is its mean probability,
    both over all layers, as in `load_balancing_loss_func` of Hugging Face's transformers.

    Args:
        config: the model.
        use_2E: the use of the experts, summed over the layers.
    """
    share_E, probability_E = use_2E / config.num_layers
    return config.num_experts * jnp.sum(share_E * probability_E)


def activation(config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    """The activation inside an MLP."""
    if config.mlp == "swiglu":
        return nn.silu
    return functools.partial(nn.gelu, approximate=False) if config.exact_gelu else nn.gelu


def _hidden(config: ModelConfig, product: Callable[[jax.Array], jax.Array], wi_EDF: Sequence[jax.Array]) -> jax.Array:
    """The values inside the experts' MLPs.

    `product` multiplies the tokens by one of the kernels.
    """
    h = activation(config)(checkpoint_name(product(wi_EDF[0]), maxtext.MLPWI_0))
    return h * checkpoint_name(product(wi_EDF[1]), maxtext.MLPWI_1) if len(wi_EDF) > 1 else h


def _dense(config: ModelConfig, first: Any, tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]) -> jax.Array:
    """What the experts whose `kernels` these are add to each token `[B, T, D]`.

    The number of the first one is `first`.

    Each of them computes every token, and the weight of another token's expert is zero. The weights multiply what is inside the
    MLPs. One matmul then sums over the width and over the experts.
    """
    (x_BTD, weights_BTK, experts_BTK), (*wi_EDF, wo_EFD) = tokens, kernels
    one_hot_BTKE = jax.nn.one_hot(experts_BTK - first, wo_EFD.shape[0], dtype=jnp.float32)
    weights_EBT = jnp.moveaxis((weights_BTK[..., None] * one_hot_BTKE).sum(-2), -1, 0)

    def product(kernel_EDF: jax.Array) -> jax.Array:
        return on_mesh(jnp.einsum("btd,edf->ebtf", x_BTD, kernel_EDF), "expert", "batch", "sequence", "mlp")

    h_EBTF = _hidden(config, product, wi_EDF) * weights_EBT[..., None].astype(config.dtype)
    return jnp.einsum("ebtf,efd->btd", h_EBTF, wo_EFD)


def _ragged(config: ModelConfig, first: Any, tokens: Sequence[jax.Array], kernels: Sequence[jax.Array]) -> jax.Array:
    """The same as `_dense`: the tokens are sorted by expert, and each expert computes its own.

    Sorting only permutes rows, so that its gradient permutes them too and adds nothing up. Rows of other experts come last.
    They belong to no group of the ragged products, and are zero.
    """
    (x_BTD, weights_BTK, experts_BTK), (*wi_EDF, wo_EFD) = tokens, kernels
    num_experts, shape = wo_EFD.shape[0], (*experts_BTK.shape, x_BTD.shape[-1])
    experts_S = experts_BTK.reshape(-1) - first
    is_own_S = (experts_S >= 0) & (experts_S < num_experts)
    experts_S = jnp.where(is_own_S, experts_S, num_experts)
    order_S = jnp.argsort(experts_S, stable=True)
    sizes_E = (experts_S[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)

    def own(rows_SD: jax.Array) -> jax.Array:
        return rows_SD if num_experts == config.num_experts else jnp.where(is_own_S[:, None], rows_SD, 0)

    x_SD = _permuted(own(jnp.broadcast_to(x_BTD[:, :, None], shape).reshape(-1, shape[-1])), order_S)
    h_SF = _hidden(config, lambda kernel_EDF: jax.lax.ragged_dot(x_SD, kernel_EDF, sizes_E), wi_EDF)
    y_SD = own(_permuted(jax.lax.ragged_dot(h_SF, wo_EFD, sizes_E), jnp.argsort(order_S)))
    return (y_SD.reshape(shape) * weights_BTK[..., None].astype(config.dtype)).sum(-2)


def _permuted(rows_SD: jax.Array, order_S: jax.Array) -> jax.Array:
    return rows_SD.at[order_S].get(unique_indices=True, mode="promise_in_bounds")
