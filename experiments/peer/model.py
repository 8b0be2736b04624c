"""The decoder of `jaxremat.model` in PyTorch: every kind of its layers, written as PyTorch's users would, without a library.

Weights are float32 and cast where they are used, norms run in float32, everything else in the compute dtype: as in the JAX
model. Shapes are written with its letters: B batch, T sequence, D embed_dim, N query heads, K key/value heads, H head_dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jaxremat.config import ModelConfig


class Dense(nn.Module):
    """A linear layer whose float32 weights are cast to the dtype of its input."""

    def __init__(self, num_in: int, num_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * 0.02)
        self.bias = nn.Parameter(torch.zeros(num_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., num_in]` to `[..., num_out]`."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.Module):
    """LayerNorm, RMSNorm, or RMSNorm scaled by 1 + scale; in float32, output in the dtype of the input."""

    def __init__(self, config: ModelConfig, kind: str, size: int) -> None:
        super().__init__()
        self.kind, self.eps, self.one_plus = kind, config.norm_eps, float(kind == "rmsnorm-1p")
        self.scale = nn.Parameter(torch.full((size,), 1.0 - self.one_plus))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layernorm" and config.use_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalized over the last axis."""
        scale, x32 = self.scale + self.one_plus, x.float()
        if self.kind == "layernorm":
            y = F.layer_norm(x32, scale.shape, scale, self.bias, self.eps)
        else:
            y = F.rms_norm(x32, scale.shape, scale, self.eps)
        return y.to(x.dtype)


def rope(x_BNTH: Tensor, theta: float) -> Tensor:
    """Rotary position embedding in Llama's half-split layout."""
    half = x_BNTH.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x_BNTH.device, dtype=torch.float32) / half)
    angles_TH = torch.arange(x_BNTH.shape[-2], device=x_BNTH.device)[:, None] * rates
    sin, cos = angles_TH.sin(), angles_TH.cos()
    a, b = x_BNTH.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BNTH.dtype)


class Attention(nn.Module):
    """Causal self-attention by `scaled_dot_product_attention`, with grouped key/value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.query = Dense(c.embed_dim, c.num_heads * c.head_dim, c.use_bias)
        self.key = Dense(c.embed_dim, c.num_kv_heads * c.head_dim, c.use_bias)
        self.value = Dense(c.embed_dim, c.num_kv_heads * c.head_dim, c.use_bias)
        self.out = Dense(c.num_heads * c.head_dim, c.embed_dim, c.use_bias)
        self.query_norm = Norm(c, "rmsnorm", c.head_dim) if c.qk_norm else nn.Identity()
        self.key_norm = Norm(c, "rmsnorm", c.head_dim) if c.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        c = self.config

        def heads(project: Dense, norm: Callable[[Tensor], Tensor]) -> Tensor:
            return norm(project(x_BTD).unflatten(-1, (-1, c.head_dim))).transpose(1, 2)

        q_BNTH, k_BKTH = heads(self.query, self.query_norm), heads(self.key, self.key_norm)
        v_BKTH = heads(self.value, lambda x: x)
        if c.positions == "rope":
            q_BNTH, k_BKTH = rope(q_BNTH, c.rope_theta), rope(k_BKTH, c.rope_theta)
        grouped = c.num_heads != c.num_kv_heads
        context_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=grouped)
        return self.out(context_BNTH.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """GELU MLP, or a gated one (SwiGLU, GeGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.wi_0 = Dense(c.embed_dim, c.mlp_dim, c.use_bias)
        self.wi_1 = Dense(c.embed_dim, c.mlp_dim, c.use_bias) if c.mlp != "gelu" else None
        self.wo = Dense(c.mlp_dim, c.embed_dim, c.use_bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        h = self.wi_0(x)
        h = F.silu(h) if self.config.mlp == "swiglu" else F.gelu(h, approximate="tanh")
        return self.wo(h if self.wi_1 is None else h * self.wi_1(x))


class Block(nn.Module):
    """One decoder layer: pre-norm attention and MLP on a residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm, self.mlp_norm = (Norm(config, config.norm, config.embed_dim) for _ in range(2))
        self.attention, self.mlp = Attention(config), Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Decoder(nn.Module):
    """A decoder-only language model; `wrap` is put around each layer, for checkpointing and compiling."""

    def __init__(
        self, config: ModelConfig, wrap: Callable[[Block], Callable[[Tensor], Tensor]] = lambda block: block
    ) -> None:
        super().__init__()
        c = self.config = config
        self.embedding = nn.Parameter(torch.randn(c.vocab_size, c.embed_dim) * 0.02)
        self.position = nn.Parameter(torch.randn(c.max_seq_len, c.embed_dim) * 0.02) if c.positions == "learned" else None
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.final_norm = Norm(c, c.norm, c.embed_dim)
        self.output = None if c.tie_embeddings else nn.Parameter(torch.randn(c.vocab_size, c.embed_dim) * 0.02)
        self.dtype = getattr(torch, c.dtype)
        self.run_layers = [wrap(layer) for layer in self.layers if isinstance(layer, Block)]

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Tokens `[B, T]` to the final hidden states `[B, T, D]` in the compute dtype."""
        c = self.config
        x = F.embedding(tokens_BT, self.embedding).to(self.dtype)
        if c.scale_embeddings:
            x = x * c.embed_dim**0.5
        if self.position is not None:
            x = x + self.position[: tokens_BT.shape[1]].to(self.dtype)
        x = F.dropout(x, c.dropout, self.training)
        for layer in self.run_layers:
            x = layer(x)
        return self.final_norm(x)

    @property
    def head(self) -> Tensor:
        """The output head's weights `[V, D]`."""
        return self.embedding if self.output is None else self.output


def cross_entropy(hidden_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats, all logits at once, reduced in float32."""
    logits = F.linear(hidden_BTD, head_VD.to(hidden_BTD.dtype))
    return F.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten())
