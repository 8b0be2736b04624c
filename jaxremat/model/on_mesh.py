"""Whether a mesh can divide the decoder, before anything is traced.

This module doesn't import JAX.
"""

import dataclasses
import math

from jaxremat.config import ModelConfig, divisors
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import MeshShape


def check_mesh(model: ModelConfig, mesh: MeshShape, *, planned: bool) -> None:
    """Raises UsageError where `mesh` can't divide `model`, or a plan can't be made for it there.

    Args:
        model: the model.
        mesh: the mesh.
        planned: whether `--policy auto` was requested.
    """
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
    is_ragged = model.dispatch == "ragged"
    if planned and model.has_experts and (mesh.expert > 1 or is_ragged):
        raise UsageError(
            f"--policy auto got experts on the mesh {mesh}" + (" with --dispatch ragged" if is_ragged else ""),
            allowed="a plan for experts on one device, or for dense ones on a mesh without the axis expert",
            cause="the experts run in a shard_map, where only the authors' names exist",
            next_step="--policy dots+attention nothing save:router_logits,mlpwi_0,mlpwi_1,out_proj",
        )
