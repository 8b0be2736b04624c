"""Experts on a mesh: each device is told which tokens and which experts it computes.

XLA's partitioner divides neither a sort of tokens by expert nor a ragged product. It divides a dense product over experts, but
gathers the tokens of all devices for the gradient of the kernels, and each device then executes more than its share.

Devices along the axis `expert` gather the tokens of all of them. Each computes its own experts for these tokens, and each
gets back its own tokens with the sum of what all experts returned. Tokens aren't sent to single devices (all-to-all).
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxremat.mesh.axes import BATCH_AXES
from jaxremat.mesh.sharding import divided_by

#: The scope of the experts where a mesh divides them, but not at the batch that is traced. A plan traces a layer at the batch of
#: one group. In the compiled step a `shard_map` is in the scope's place, and only the authors' names exist there.
SCOPE = "own_experts"
#: The scope inside it of experts whose rows a device has for the tokens of all devices along `expert`, and not a share of them.
ROWS = "rows_of_all"
#: `(first, tokens, kernels) -> y`: the results `[B, T, D]` of the experts whose kernels are given, of which `first` is the first
#: one's number.
Compute = Callable[[Any, Sequence[jax.Array], Sequence[jax.Array]], jax.Array]


def with_own_experts(
    compute: Compute,
    tokens: Sequence[jax.Array],
    kernels: Sequence[jax.Array],
    axes: Sequence[tuple[str | None, ...]],
    *,
    always: bool,
) -> jax.Array:
    """`compute(0, tokens, kernels)`, of which each device of the traced mesh computes its share.

    Without a mesh it is that call. A batch that the mesh doesn't divide evenly is computed on each device.

    Args:
        compute: sums over the experts it is given. A token's other experts add nothing.
        tokens: arrays `[B, T, ...]`.
        kernels: arrays whose first dimension counts experts.
        axes: the logical axes of the dimensions of each kernel.
        always: whether a mesh that doesn't divide the experts needs it, too. Each device then has rows for all tokens, of which
            those of other devices' experts are zero.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not (always or mesh.shape["expert"] > 1):
        return compute(0, tokens, kernels)
    of_batch = divided_by(mesh, tokens[0].shape[:1], ("batch",))
    if not any(of_batch) and math.prod(mesh.shape[axis] for axis in BATCH_AXES) > 1:
        with jax.named_scope(SCOPE), jax.named_scope(ROWS) if always else contextlib.nullcontext():
            return compute(0, tokens, kernels)
    specs = [PartitionSpec(*divided_by(mesh, kernel.shape, names)) for kernel, names in zip(kernels, axes, strict=True)]
    gathers = mesh.shape["expert"] > 1
    sums = mesh.shape["tensor"] > 1 and any("tensor" in spec for spec in specs)

    def own(tokens: list[jax.Array], kernels: list[jax.Array]) -> jax.Array:
        first = 0
        if gathers:
            tokens = [jax.lax.all_gather(x, "expert", axis=0, tiled=True) for x in tokens]
            first = jax.lax.axis_index("expert") * kernels[0].shape[0]
        y_BTD = compute(first, tokens, kernels)
        if sums:
            y_BTD = jax.lax.psum(y_BTD, "tensor")
        return jax.lax.psum_scatter(y_BTD, "expert", scatter_dimension=0, tiled=True) if gathers else y_BTD

    of_tokens = PartitionSpec(*of_batch)
    return jax.shard_map(own, in_specs=(of_tokens, specs), out_specs=of_tokens)(list(tokens), list(kernels))
