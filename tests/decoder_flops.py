"""FLOPs that the decoder's step executes, in closed form: a count by hand, for tests of what compiled steps execute."""

from jaxremat.config import ModelConfig
from jaxremat.model.flops import forward_matmul_flops


def forward_attention_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs of attention's two matmuls in one forward pass: the scores, and their product with the values.

    They are counted over the whole score matrix.
    """
    return 4 * batch * config.num_layers * config.num_heads * config.head_dim * seq_len**2


def experts_that_run(config: ModelConfig) -> int:
    """How many experts compute each token in a program of XLA. 1 without experts.

    With `dense` dispatch all do. XLA expands `ragged_dot` to a masked product over all experts, and each token has a row for
    each of its experts there.
    """
    if not config.has_experts:
        return 1
    return config.num_experts * (config.experts_per_token if config.dispatch == "ragged" else 1)


def flops_without_recompute(config: ModelConfig, batch: int, seq_len: int, implementation: str) -> int:
    """FLOPs that a step executes under the policy `none`.

    They are more than `model_flops`. XLA's own attention computes the whole score matrix and masks half of it. cuDNN's fused
    attention computes the causal half, but its backward kernel computes the scores again: it has five matmuls where the
    forward kernel has two. Neither count is reduced for a sliding window. More experts compute each token than it is sent to.

    Args:
        config: the model.
        batch: sequences.
        seq_len: tokens in each sequence.
        implementation: `xla` or `cudnn` attention.
    """
    attention = forward_attention_flops(config, batch, seq_len)
    executed = attention // 2 + 5 * attention // 4 if implementation == "cudnn" else 3 * attention
    further = experts_that_run(config) - config.experts_per_token if config.has_experts else 0
    of_an_expert = 2 * batch * seq_len * config.num_layers * config.embed_dim * config.mlp_dim
    matrices = 2 if config.mlp == "gelu" else 3
    return 3 * (forward_matmul_flops(config, batch, seq_len) + further * matrices * of_an_expert) + executed
