"""What JAX doesn't promise and jaxremat reads all the same."""

from typing import Any

#: The primitive of cuDNN attention (jax/_src/cudnn/fused_attention_stablehlo.py). Beside the output it
#: gives the softmax statistics, which the backward kernel reads. The statistics have no checkpoint name. With a name on the
#: output alone, the kernel would therefore run twice. Saving the results of the primitive prevents that.
FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"


def is_recompute_decision(decision: Any) -> bool:
    """Whether a policy of `jax.checkpoint` answers that a value is recomputed.

    The answer is False, or an object of a private class (jax/_src/interpreters/partial_eval.py).
    """
    return decision is False or type(decision).__name__ == "RecomputeType"
