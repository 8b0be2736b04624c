"""Gathered kernels, which a policy can save from the forward pass on a mesh.

Each device has a part of every kernel along the axis `fsdp`. XLA gathers a kernel where a matmul reads it: once in the forward
pass, and once in the backward pass. A policy that names the gathered kernel saves it, and it is gathered once:

    save:mlpwi_0,wi_0_gathered     # a [4096, 14336] kernel of a layer: 112 MiB more in bfloat16, and one gather fewer

The gather of a kernel is written into the program only where the policy names it, or where XLA would gather it twice in the
backward pass. Every other program is as it would be without these names. Otherwise the policy `none` would save all gathered
kernels.

XLA gathers twice on a mesh with axes `fsdp` and `tensor`, for the recompute and for the gradient of the layer's input. It
describes the same groups of devices in two forms there, and so doesn't see that the two gathers are one.

References:
    Rajbhandari et al. 2020, "ZeRO", section 7.2.2, which gathers parameters once in each pass.
"""

from collections.abc import Collection
from typing import Any

import jax
from flax.linen.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxremat.config import ModelConfig
from jaxremat.errors import UnknownNameError
from jaxremat.mesh.sharding import AnyMesh, axes_in, param_sharding
from jaxremat.model.param_axes import LOGICAL_AXES
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.spec import Policy, Rule

_SUFFIX = "_gathered"
#: The checkpoint names of the gathered kernels: that of `wi_0` is `wi_0_gathered`.
GATHERED_NAMES = tuple(f"{module}{_SUFFIX}" for module, leaf in LOGICAL_AXES if leaf == "kernel" and module != "router")


def saved_gathered(policy: Policy) -> tuple[str, ...]:
    """The names of the gathered kernels that `policy` saves in some layer."""
    named = policy.names()
    return tuple(name for name in GATHERED_NAMES if name in named)


def gathered_names(policy: Policy | str) -> tuple[str, ...]:
    """The names of the kernels whose gather is written into a program under `policy`."""
    policy, mesh = as_policy(policy), jax.sharding.get_abstract_mesh()
    gathers_twice = not mesh.empty and mesh.shape["tensor"] > 1 and _saves_by_rule_or_name(policy)
    return GATHERED_NAMES if gathers_twice else saved_gathered(policy)


def _saves_by_rule_or_name(policy: Policy) -> bool:
    """Whether each layer is recomputed on its own, and saves results of matmuls or named values."""
    saving_all = {Rule("none", attention=True), Rule("everything", attention=True)}
    return not policy.recomputes_groups and saving_all.isdisjoint(one.with_attention() for one in policy.layer_policies)


def check_gathered(policy: Policy, carried: Collection[str]) -> None:
    """Raises UnknownNameError if `policy` saves a gathered kernel, and kernels aren't gathered.

    Then `carried` has no such name.
    """
    requested = saved_gathered(policy)
    if requested and not set(requested) & set(carried):
        raise UnknownNameError(
            f"policy {str(policy)!r} saves {requested[0]!r}, and no kernel is gathered here",
            allowed="names of gathered kernels on a mesh that divides the kernels over fsdp",
            cause="each device has whole kernels, because there is no mesh or its axis fsdp doesn't divide them",
            next_step="leave the name out, or give a mesh: --mesh fsdp=8",
        )


def gathering(config: ModelConfig, module: str, gathers: Collection[str]) -> Any:
    """The `promote_dtype` of a Flax module such as `nn.Dense`, whose kernel may be gathered.

    It converts the input, the kernel and the bias to the compute dtype, as Flax does. If `gathers` has the kernel's name, it also
    gathers the converted kernel along `fsdp`, and names it. The kernel stays divided over the other axes. Without a mesh, and
    where `fsdp` doesn't divide the kernel, it is Flax's own function.

    Args:
        config: the sizes. Whether a kernel is divided depends on the bytes of all layers' kernels where these are one array.
        module: the module's name, such as `wi_0`.
        gathers: names such as `wi_0_gathered`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    name = f"{module}{_SUFFIX}"
    if mesh.empty or name not in gathers:
        return promote_dtype

    def promote(inputs: jax.Array, kernel: jax.Array, bias: jax.Array | None, **options: Any) -> Any:
        spec = _spec(mesh, config, module, kernel)
        inputs, kernel, bias = promote_dtype(inputs, kernel, bias, **options)
        if "fsdp" in axes_in(spec):
            kernel = checkpoint_name(_gather_kernel(kernel, spec), name)
        return inputs, kernel, bias

    return promote


def gathered_head(kernel: jax.Array, dtype: str, axes: tuple[str | None, ...]) -> jax.Array:
    """The output head's kernel in the compute dtype.

    On a mesh with both axes it is gathered along `fsdp` in the open.

    Args:
        kernel: the head's kernel.
        dtype: the compute dtype.
        axes: the logical axes of the kernel's dimensions.
    """
    mesh, converted = jax.sharding.get_abstract_mesh(), kernel.astype(dtype)
    spec = PartitionSpec() if mesh.empty else param_sharding(mesh, kernel, axes).spec
    return _gather_kernel(converted, spec) if {"fsdp", "tensor"} <= axes_in(spec) else converted


def _spec(mesh: AnyMesh, config: ModelConfig, module: str, kernel: jax.Array) -> PartitionSpec:
    """How the kernel of one layer lies."""
    layers = (config.num_layers,) if config.scan_layers else ()
    leaf = jax.ShapeDtypeStruct((*layers, *kernel.shape), kernel.dtype)
    spec = param_sharding(mesh, leaf, (*(None for _ in layers), *LOGICAL_AXES[module, "kernel"])).spec
    return PartitionSpec(*spec[len(layers) :])


def _gather_kernel(kernel: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The kernel, which lies by `spec`, whole along the dimension that `fsdp` divides.

    Its gradient lies by `spec`.

    The converted kernel is said to lie by `spec` first. Otherwise XLA may gather it before it is converted, in float32.
    """
    whole = PartitionSpec(*(None if "fsdp" in axes_in([part]) else part for part in spec))
    lies = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def gather(kernel: jax.Array) -> jax.Array:
        return lies(lies(kernel, spec), whole)

    gather.defvjp(lambda kernel: (gather(kernel), None), lambda _, gradient: (lies(gradient, spec),))
    return gather(kernel)
