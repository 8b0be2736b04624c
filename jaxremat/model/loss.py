"""Cross-entropy of the next token, over all logits at once or chunk by chunk.

With a vocabulary of 128256, the logits of one sequence of 2048 tokens take 0.5 GiB in bfloat16. The softmax's gradient has
as many elements, in float32. Together that is more than all the layers save. The chunked loss has the logits of a few
positions of each sequence at a time. It computes their gradient in the forward pass, while the logits are there. No matmul
runs twice, so that the chunked loss has no more FLOPs than the full loss.

References:
    Hsu et al. 2024, "Liger Kernel" (gradients of a chunk in the forward pass, section 3.2); Wijmans et al. 2024, "Cut Your
    Losses in Large-Vocabulary Language Models".
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from jaxremat.mesh.sharding import on_mesh, parts_of

#: Each chunk reads and writes the head's gradient once. That is about 12 bytes for each weight, and the matmul has 2 FLOPs
#: for each token and weight. At 4096 tokens that is 680 FLOPs a byte, twice what an H100 computes while it moves a byte. The
#: matmuls then take longer than the traffic. With fewer tokens the traffic would take longer. On a mesh that divides the head,
#: each chunk also gathers the head and adds up its gradient, about 6 bytes a weight that the network moves. At 4096 tokens of
#: each device that takes about as long as the matmuls.
MIN_CHUNK_TOKENS = 4096

Logits = Callable[[jax.Array, jax.Array], jax.Array]


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats, a float32 scalar.

    All logits are in memory at once, in float32 while they are reduced.

    Args:
        logits_BTV: logits `[B, T, V]`, in any floating-point dtype.
        targets_BT: the right tokens `[B, T]`, int.
    """
    chex.assert_shape(logits_BTV, (*targets_BT.shape, None))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV.astype(jnp.float32), targets_BT).mean()


def default_positions(batch: int, seq_len: int, vocab_size: int, logit_bytes: int, free_bytes: int) -> int:
    """Positions of each sequence in a chunk: as many as add no bytes to the step.

    There are at least `MIN_CHUNK_TOKENS` tokens of each device in a chunk.

    The number of positions is then lowered so that all chunks have the same size, or nearly the same.

    Args:
        batch: sequences, those of all devices.
        seq_len: positions in each sequence.
        vocab_size: logits for each position.
        logit_bytes: bytes of one logit in the compute dtype. While a chunk is computed, each logit is there in float32 too.
        free_bytes: bytes that the backward pass uses later but not yet at the loss: those of the layers' gradients.
    """
    tokens = max(free_bytes // (vocab_size * (logit_bytes + 4)), MIN_CHUNK_TOKENS * parts_of("batch", batch))
    num_chunks = -(-seq_len // max(1, min(seq_len, tokens // batch)))
    return -(-seq_len // num_chunks)


def chunked_cross_entropy(
    logits: Logits, kernel: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array, positions: int
) -> jax.Array:
    """The cross-entropy with at most `batch x positions` rows of logits at a time.

    It is that of `cross_entropy(logits(kernel, x_BTD), targets_BT)`.

    Value and gradients are those of the full loss, but for rounding: sums are taken in another order, and the head's
    gradient is summed in float32. Only reverse-mode differentiation works (`jax.custom_vjp`), as the gradients are computed
    in the forward pass.

    Args:
        logits: the output head, `logits(kernel, x[B, N, D]) -> [B, N, V]` for any N.
        kernel: the head's weights. The loss can be differentiated by them.
        x_BTD: the final hidden states. The loss can be differentiated by them.
        targets_BT: the right tokens, int.
        positions: positions of each sequence in a chunk. The last chunk may have fewer.
    """
    chex.assert_shape(x_BTD, (*targets_BT.shape, None))
    seq_len = x_BTD.shape[1]
    size = min(positions, seq_len)

    def chunk_loss(kernel: jax.Array, x_BND: jax.Array, targets_BN: jax.Array) -> jax.Array:
        """The part of the mean that this chunk's N positions add."""
        return cross_entropy(logits(kernel, x_BND), targets_BN) * (targets_BN.shape[1] / seq_len)

    def over_chunks(add: Callable[[Any, Any, int], Any], start: Any) -> Any:
        num_chunks, rest = divmod(seq_len, size)
        at = jnp.arange(num_chunks) * size
        carry, _ = jax.lax.scan(lambda carry, first: (add(carry, first, size), None), start, at)
        return add(carry, seq_len - rest, rest) if rest else carry

    @jax.custom_vjp
    def mean_loss(kernel: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        def add(total: jax.Array, first: Any, count: int) -> jax.Array:
            return total + chunk_loss(kernel, _take(x_BTD, first, count), _take(targets_BT, first, count))

        return over_chunks(add, jnp.zeros((), jnp.float32))

    def forward(kernel: jax.Array, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, Any]:
        def add(carry: Any, first: Any, count: int) -> Any:
            total, kernel_bar, x_bar = carry
            targets_BN = _take(targets_BT, first, count)
            value, (kernel_part, x_part) = jax.value_and_grad(chunk_loss, argnums=(0, 1))(
                kernel, _take(x_BTD, first, count), targets_BN
            )
            x_part = on_mesh(x_part, "batch", None, None)  # or XLA would gather the batches of all devices to write a part
            x_bar = jax.lax.dynamic_update_slice_in_dim(x_bar, x_part, first, 1)
            return total + value, kernel_bar + kernel_part.astype(jnp.float32), x_bar

        zeros = jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32), jnp.zeros_like(x_BTD)
        total, kernel_bar, x_bar = over_chunks(add, zeros)
        return total, (kernel_bar, x_bar)

    def backward(gradients: Any, cotangent: jax.Array) -> Any:
        kernel_bar, x_bar = gradients
        return (cotangent * kernel_bar).astype(kernel.dtype), (cotangent * x_bar).astype(x_bar.dtype), None

    mean_loss.defvjp(forward, backward)
    return mean_loss(kernel, x_BTD, targets_BT)


def _take(array: jax.Array, first: Any, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, first, count, axis=1)
