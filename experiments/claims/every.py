"""All claims, in the page's order."""

from experiments.claims import (
    accumulation,
    batch_gain,
    batch_linear,
    components,
    cost_aware,
    every_k,
    grouped,
    korthikanti,
    layouts,
    long_context,
    offload,
    one_layer,
    optimizers,
    precision,
    recompute_cost,
    sqrt_n,
    wide_deep,
)

_MODULES = (
    *(components, one_layer, batch_linear, sqrt_n, recompute_cost, korthikanti, batch_gain, every_k, cost_aware, offload),
    *(long_context, wide_deep, precision, optimizers, accumulation, grouped, layouts),
)
CLAIMS = {module.CLAIM.name: module.CLAIM for module in _MODULES}
