"""A policy as JAX takes it, for `jax.checkpoint(policy=...)`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxremat.policy.spec import LayerPolicy, Names, Rule

#: The primitive of cuDNN attention (jax/_src/cudnn/fused_attention_stablehlo.py). Beside the output it
#: gives the softmax statistics, which the backward kernel reads. The statistics have no checkpoint name. With a name on the
#: output alone, the kernel would therefore run twice. Saving the results of the primitive prevents that.
FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"


@dataclass(frozen=True)
class JaxPolicy:
    """A `LayerPolicy` as the function that `jax.checkpoint` calls for each operation.

    Equal policies are equal callables with equal hashes, so that JAX's caches work across traces. Closures wouldn't be.
    """

    policy: LayerPolicy

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """The answer as JAX's policies give it: a bool, or `Offloadable` for pinned host memory."""
        decision = _jax_callable(self.policy)(primitive, *avals, **params)
        # JAX's `Recompute` means False, but it is an object of a private class (jax/_src/interpreters/partial_eval.py).
        recompute = decision is False or type(decision).__name__ == "RecomputeType"
        return True if recompute and self.policy.attention and primitive.name == FUSED_ATTENTION else decision


@functools.cache
def _jax_callable(policy: LayerPolicy) -> Callable[..., Any]:
    from jax import checkpoint_policies as jax_policies

    if isinstance(policy, Names):
        return jax_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=policy.save,
            names_which_can_be_offloaded=policy.offload,
            offload_src="device",
            offload_dst="pinned_host",
        )
    assert isinstance(policy, Rule), "own is no wrapper, as none isn't"
    return {
        "everything": jax_policies.everything_saveable,
        "nothing": jax_policies.nothing_saveable,
        "dots": jax_policies.dots_saveable,
        "dots-no-batch": jax_policies.dots_with_no_batch_dims_saveable,
    }[policy.kind]


def save_all_but_slices(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint` that saves all but slices, such as of stacked parameters."""
    return primitive.name not in ("slice", "dynamic_slice", "squeeze")


def to_jax(policy: LayerPolicy) -> JaxPolicy:
    """The callable for `jax.checkpoint(policy=...)` and `nn.remat(policy=...)`.

    `policy` isn't `none`, which is no wrapper and needs no callable.
    """
    assert not policy.is_none, "none is no wrapper: apply.py never asks for its callable"
    return JaxPolicy(policy)
