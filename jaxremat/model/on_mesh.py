"""Whether a mesh can divide the decoder, before anything is traced.

This module doesn't import JAX.
"""

import dataclasses
import math

from jaxremat.config import ModelConfig, divisors
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import MeshShape


def check_mesh(model: ModelConfig, mesh: MeshShape) -> None:
    """Raises UsageError where `mesh` can't divide `model`."""
    if model.num_experts % mesh.expert:
        expert = math.gcd(model.num_experts, mesh.expert)
        raise UsageError(
            f"--mesh {mesh} divides the experts of {model.name} by {mesh.expert}, and it has "
            + (str(model.num_experts) if model.has_experts else "none"),
            allowed=f"expert={', '.join(map(str, divisors(model.num_experts)))}",
            cause="each device computes whole experts" if model.has_experts else "--num-experts was left out",
            next_step=f"--mesh {dataclasses.replace(mesh, fsdp=mesh.fsdp * mesh.expert // expert, expert=expert)}",
        )
    if model.num_kv_heads % mesh.tensor:
        tensor = math.gcd(model.num_kv_heads, mesh.tensor)
        raise UsageError(
            f"--mesh {mesh} divides the {model.num_kv_heads} key and value heads of {model.name} by {mesh.tensor}",
            allowed=f"tensor={', '.join(map(str, divisors(model.num_kv_heads)))}",
            cause="each device computes the attention of whole heads",
            next_step=f"--mesh {dataclasses.replace(mesh, fsdp=mesh.fsdp * mesh.tensor // tensor, tensor=tensor)}",
        )
