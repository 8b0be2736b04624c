"""LoRA and QLoRA on a model that nobody edited: qwix puts adapters beside the kernels of the GPT in `linen_unrolled.py`.

`base` stores the frozen kernels as they are, in `int8`, or in the 4 bits of `nf4`. `trainable="*_lora_*"` says which parameters
have gradients and an optimizer's state. It needs `pip install ".[lora]"`::

    python -m jaxremat.run --model examples/lora_own_model.py:workload --policy none nothing dots auto --batch 8
"""

import jax
import jax.numpy as jnp
import optax
import qwix
from linen_unrolled import GPT

import jaxremat


def workload(
    batch: int = 8,
    seq_len: int = 1024,
    vocab_size: int = 50257,
    num_layers: int = 12,
    width: int = 768,
    num_heads: int = 12,
    rank: int = 16,
    alpha: float = 16.0,
    base: str = "",
    dtype: str = "bfloat16",
) -> jaxremat.Workload:
    """What is trained: the adapters, on the next token's cross-entropy."""
    quantized = {"weight_qtype": base, "tile_size": min(64, width) if base == "nf4" else None} if base else {}
    provider = qwix.LoraProvider(module_path="Block_.*", rank=rank, alpha=alpha, **quantized)
    model = qwix.apply_lora_to_model(GPT(vocab_size, num_layers, width, num_heads, 0.0, dtype), provider)

    def init(key):
        return model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]

    def loss(params, tokens):
        computed = jax.tree.map(
            lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
        )
        logits = model.apply({"params": computed}, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return jaxremat.Workload(
        loss=loss,
        params=jax.eval_shape(init, jax.random.key(0)),
        batch=jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32),
        init=init,
        trainable="*_lora_*",
        frozen_dtype=dtype,
        num_tokens=batch * seq_len,
    )
