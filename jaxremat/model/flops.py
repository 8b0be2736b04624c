"""Model FLOPs: the multiplications and additions that a training step needs, in closed form. MFU is computed from them.

Only matmuls count, with two FLOPs per multiply-add. Attention is causal and counts half of the score matrix, and in layers with
a sliding window only the part of it that the window lets through. The backward pass of a matmul is two matmuls, so a step has
three times the FLOPs of its forward pass. Recomputation doesn't count. Of a model with experts, only those count that the router
sends a token to.

References:
    Chowdhery et al. 2022 (PaLM), appendix B: model FLOPs utilization.
"""

from jaxremat.config import ModelConfig


def forward_matmul_flops(config: ModelConfig, batch: int, seq_len: int, experts: int | None = None) -> int:
    """FLOPs of the projections, MLPs and output head in one forward pass. Attention's own two matmuls aren't among them.

    Args:
        config: the model.
        batch: sequences.
        seq_len: tokens in each sequence.
        experts: of a model with experts, how many compute each token. None takes those that the router sends it to.
    """
    c = config
    attention = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = c.embed_dim * c.mlp_dim * (2 if c.mlp == "gelu" else 3)
    if c.has_experts:
        mlp = mlp * (experts or c.experts_per_token) + c.embed_dim * c.num_experts
    return 2 * batch * seq_len * (c.num_layers * (attention + mlp) + c.embed_dim * c.vocab_size)


def forward_attention_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs of attention's two matmuls in one forward pass: the scores, and their product with the values.

    They are counted over the whole score matrix.
    """
    return 4 * batch * config.num_layers * config.num_heads * config.head_dim * seq_len**2


def model_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs of one training step with causal attention and without recomputation.

    In a layer with a window of W tokens, attention needs `W * (2 * seq_len - W) / 2` scores of a head and sequence. With W equal
    to `seq_len` that is half of the score matrix.
    """
    twice_the_scores = sum(window * (2 * seq_len - window) for window in config.windows(seq_len))
    twice_the_flops = 4 * batch * config.num_heads * config.head_dim * twice_the_scores
    return 3 * forward_matmul_flops(config, batch, seq_len) + 3 * twice_the_flops // 2


def experts_that_run(config: ModelConfig) -> int:
    """How many experts compute each token in a program of XLA. 1 without experts.

    With `dense` dispatch all do. XLA expands `ragged_dot` to a masked product over all experts, and each token has a row for
    each of its experts there.
    """
    if not config.has_experts:
        return 1
    return config.num_experts * (config.experts_per_token if config.dispatch == "ragged" else 1)


def flops_without_recompute(config: ModelConfig, batch: int, seq_len: int, implementation: str) -> int:
    """FLOPs that a step executes under the policy `none`. The recompute overhead is counted from there.

    They are more than `model_flops`. XLA's own attention computes the whole score matrix and masks half of it. cuDNN's fused
    attention computes the causal half, but its backward kernel computes the scores again: it has five matmuls where the
    forward kernel has two. Neither count is reduced for a sliding window: XLA computes and masks all scores, and how many blocks
    of scores cuDNN's kernel leaves out isn't known. `ExecutedFlops` counts in the same way. More experts compute each token
    than it is sent to (`experts_that_run`).

    Args:
        config: the model.
        batch: sequences.
        seq_len: tokens in each sequence.
        implementation: `xla` or `cudnn` attention.
    """
    attention = forward_attention_flops(config, batch, seq_len)
    executed = attention // 2 + 5 * attention // 4 if implementation == "cudnn" else 3 * attention
    return 3 * forward_matmul_flops(config, batch, seq_len, experts_that_run(config)) + executed
