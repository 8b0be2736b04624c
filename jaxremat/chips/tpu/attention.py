"""Splash attention, the fused attention that JAX has for TPUs.

It is in jax/experimental/pallas/ops/tpu/splash_attention. It has three kernels: the forward one, and two for the gradients of
keys with values, and of queries. The forward kernel's result and its softmax statistics have one checkpoint name, as in MaxText.
A policy that saves that name doesn't run the forward kernel again.

XLA doesn't divide a kernel over devices. On a mesh each device therefore computes its own sequences and heads in a `shard_map`.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from jaxremat.chips.chip import CallKind, FusedAttention

if TYPE_CHECKING:
    import jax

LANES = 128  #: Blocks are multiples of so many tokens.


class Splash(FusedAttention):
    """Splash attention as a value of `--attention`."""

    def attend(self, q_BTNH: Any, k_BTKH: Any, v_BTKH: Any, **how: Any) -> Any:
        """`splash_attention`, whose arguments are those of `FusedAttention.attend`."""
        return splash_attention(q_BTNH, k_BTKH, v_BTKH, **how)


SPLASH = Splash(
    name="splash",
    title="splash attention",
    checked_in="splash_attention",
    takes=f"jax.experimental.pallas.ops.tpu.splash_attention takes lengths in multiples of {LANES}",
    has_softcap=True,
    names_residuals=True,
    block_tokens=LANES,
)
#: What its kernels compute (`Chip.calls`).
CALLS: tuple[tuple[str, CallKind], ...] = (
    (r"pallas_call\$splash_m[hq]a_fwd", "attention"),
    (r"pallas_call\$splash_m[hq]a_dkv", "attention gradient"),
    (r"pallas_call\$splash_m[hq]a_dq", "attention gradient of queries"),
)


def splash_attention(
    q_BTNH: "jax.Array",
    k_BTKH: "jax.Array",
    v_BTKH: "jax.Array",
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    block: int = 512,
    name: str | None = None,
    interpret: bool = False,
) -> "jax.Array":
    """Causal attention `[B, T, N, H]` by the kernels of splash attention.

    On the traced mesh, `B` is divided over the axes of batches and the heads over `tensor`. Keys and values are repeated where
    `tensor` divides the query heads alone.

    Args:
        q_BTNH: the queries.
        k_BTKH: the keys.
        v_BTKH: the values.
        scale: what scores are multiplied by. None takes `H ** -0.5`. The queries are multiplied by it in float32.
        window: the tokens that a token sees, itself included. 0 for all before it.
        softcap: scores become `softcap * tanh(score / softcap)`. 0 for no cap.
        block: the most tokens of a block. The largest multiple of 128 up to it that divides T is taken.
        name: the checkpoint name of what the forward kernel saves.
        interpret: whether Pallas runs the kernels as operations of JAX, on any device.

    Raises:
        NotImplementedError: no block divides T.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from jaxremat.mesh.sharding import divided_by

    length, num_heads, head_dim = q_BTNH.shape[1:]
    size = next((size for size in range(block - block % LANES, 0, -LANES) if length % size == 0), None)
    if size is None:
        raise NotImplementedError(f"its blocks are multiples of {LANES} tokens up to {block}, and none divides {length}")
    scaled_BTNH = q_BTNH.astype(jnp.float32) * (head_dim**-0.5 if scale is None else scale)
    q_BNTH, k_BKTH, v_BKTH = (x.swapaxes(1, 2) for x in (scaled_BTNH.astype(q_BTNH.dtype), k_BTKH, v_BTKH))

    def attend(q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array) -> jax.Array:
        kernel = _kernel(length, q_BNTH.shape[1], window, softcap, size, name, interpret)
        with jax.named_scope(f"window_{window}" if window else "causal"):
            return jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH)

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and not mesh.manual_axes:
        of_q, of_k = (divided_by(mesh, x.shape, ("batch", "heads", None, None)) for x in (q_BNTH, k_BKTH))
        if of_q != of_k:
            groups = num_heads // k_BKTH.shape[1]
            k_BKTH, v_BKTH = (jnp.repeat(x, groups, axis=1) for x in (k_BKTH, v_BKTH))
        spec = PartitionSpec(*of_q)
        attend = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return attend(q_BNTH, k_BKTH, v_BKTH).swapaxes(1, 2)


@functools.cache
def _kernel(length: int, num_heads: int, window: int, softcap: float, block: int, name: str | None, interpret: bool) -> Any:
    """The kernels for sequences of one length, as a function of the arrays of one of them."""
    import jax
    import numpy as np
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    shape = (length, length)
    of_block = (one.name for one in dataclasses.fields(splash_attention_kernel.BlockSizes) if one.name.startswith("block_"))
    sizes: dict[str, Any] = dict.fromkeys(of_block, block)
    mask = splash_attention_mask.CausalMask(shape)
    if window:
        mask = splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    with jax.ensure_compile_time_eval():
        kernel = splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * num_heads),
            block_sizes=splash_attention_kernel.BlockSizes(**sizes),
            attn_logits_soft_cap=softcap or None,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=name,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)
