"""Model FLOPs: what a training step must multiply and add, in closed form, recompute left out.

Matmuls only, two FLOPs per multiply-add; attention causal (half of the score matrix). The backward pass of a matmul is two
matmuls, so a step is three forwards. This is what MFU divides by.

References:
    Chowdhery et al. 2022 (PaLM), appendix B: model FLOPs utilization.
"""

from jaxremat.config import ModelConfig


def forward_matmul_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """Projections, MLPs and output head of one forward pass; attention's two matmuls apart."""
    c = config
    attention = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    mlp = c.embed_dim * c.mlp_dim * (2 if c.mlp == "gelu" else 3)
    return 2 * batch * seq_len * (c.num_layers * (attention + mlp) + c.embed_dim * c.vocab_size)


def forward_attention_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """Scores and their product with the values, over the whole score matrix, of one forward pass."""
    return 4 * batch * config.num_layers * config.num_heads * config.head_dim * seq_len**2


def model_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs of one training step, attention causal, nothing recomputed."""
    return 3 * forward_matmul_flops(config, batch, seq_len) + 3 * forward_attention_flops(config, batch, seq_len) // 2


def flops_without_recompute(config: ModelConfig, batch: int, seq_len: int, implementation: str) -> int:
    """FLOPs that a step executes under the policy `none`, the base of the recompute overhead.

    More than the model's: plain XLA attention computes the whole score matrix and masks half of it; cuDNN's fused attention
    computes the causal half, but its backward kernel computes the scores again (five matmuls for the forward's two).
    """
    attention = forward_attention_flops(config, batch, seq_len)
    executed = attention // 2 + 5 * attention // 4 if implementation == "cudnn" else 3 * attention
    return 3 * forward_matmul_flops(config, batch, seq_len) + executed
