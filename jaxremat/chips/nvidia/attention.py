"""cuDNN's fused attention, as JAX has it (jax/_src/cudnn/fused_attention_stablehlo.py)."""

from jaxremat.chips.chip import FusedAttention

CUDNN = FusedAttention(
    name="cudnn",
    title="cuDNN",
    checked_in="cudnn",
    takes="jax.nn.dot_product_attention(..., implementation='cudnn') takes even lengths, bfloat16 or float16, and "
    "a head_dim in multiples of 8 up to 128 (up to 256 where a GPU of compute capability 9.0 or above is attached)",
)
