"""Model FLOPs: the multiplications and additions that a training step needs, in closed form.

MFU is computed from them.

Only matmuls count, with two FLOPs per multiply-add. Attention is causal and counts half of the score matrix, and in layers with
a sliding window only the part of it that the window lets through. The backward pass of a matmul is two matmuls, so a step has
three times the FLOPs of its forward pass. Recomputation doesn't count. Of a model with experts, only those count that the router
sends a token to.

References:
    Chowdhery et al. 2022 (PaLM), appendix B: model FLOPs utilization.
"""

from jaxremat.config import ModelConfig


def forward_matmul_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs of the projections, MLPs and output head in one forward pass.

    Attention's own two matmuls aren't among them.

    Args:
        config: the model.
        batch: sequences.
        seq_len: tokens in each sequence.
    """
    c = config
    attention = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = c.embed_dim * c.mlp_dim * (2 if c.mlp == "gelu" else 3)
    if c.has_experts:
        mlp = mlp * c.experts_per_token + c.embed_dim * c.num_experts
    return 2 * batch * seq_len * (c.num_layers * (attention + mlp) + c.embed_dim * c.vocab_size)


def model_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs of one training step with causal attention and without recomputation.

    In a layer with a window of W tokens, attention needs `W * (2 * seq_len - W) / 2` scores of a head and sequence. With W equal
    to `seq_len` that is half of the score matrix.
    """
    twice_the_scores = sum(window * (2 * seq_len - window) for window in config.windows(seq_len))
    twice_the_flops = 4 * batch * config.num_heads * config.head_dim * twice_the_scores
    return 3 * forward_matmul_flops(config, batch, seq_len) + 3 * twice_the_flops // 2
