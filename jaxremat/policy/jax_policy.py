"""A policy as JAX takes it: the callable that `jax.checkpoint(policy=...)` asks about each operation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxremat.policy.spec import LayerPolicy, Names

#: The primitive behind cuDNN attention (jax/_src/cudnn/fused_attention_stablehlo.py). A name on its output doesn't keep
#: the kernel from running twice, since the softmax statistics beside it have no name; saying yes to the primitive does.
FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"


@dataclass(frozen=True)
class JaxPolicy:
    """A `LayerPolicy` as the callable that `jax.checkpoint(policy=...)` asks about each operation.

    Hashable and comparable, so that JAX's caches work across traces, which closures would defeat.
    """

    policy: LayerPolicy

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """What JAX's own policies answer: a bool, or `Offloadable` for a name that goes to pinned host memory."""
        decision = _jax_callable(self.policy)(primitive, *avals, **params)
        # `Recompute` is False-like in meaning but not in type (jax/_src/interpreters/partial_eval.py), hence the class name.
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
    return {
        "everything": jax_policies.everything_saveable,
        "nothing": jax_policies.nothing_saveable,
        "dots": jax_policies.dots_saveable,
        "dots-no-batch": jax_policies.dots_with_no_batch_dims_saveable,
    }[policy.kind]


def to_jax(policy: LayerPolicy) -> JaxPolicy:
    """The callable for `jax.checkpoint(policy=...)` and `nn.remat(policy=...)`; `none` has none, being no wrapper."""
    assert not policy.is_none, "none is no wrapper: apply.py never asks for its callable"
    return JaxPolicy(policy)
