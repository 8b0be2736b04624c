"""The meshes of N devices that are worth comparing, for `--mesh auto`.

This module doesn't import JAX.

    sensible_meshes(16, 2)      # fsdp=16; data=2,fsdp=8; data=16; fsdp=8,tensor=2; data=2,fsdp=4,tensor=2; ...

The axes `tensor` and `expert` send data in every layer, while nothing else can be computed. So they stay inside a node, and their
sizes are powers of two. What they leave of the devices divides the parameters in one of three ways:

    fsdp over all of it                            the least state on each device
    data over the nodes, fsdp inside each node     gathers stay inside a node, and gradients are added up between nodes
    data over all of it                            no gathers, and the whole state on each device

References:
    Rajbhandari et al. 2020, "ZeRO"; Zhang et al. 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud",
    for parameters that are divided inside a group of devices and repeated over groups; Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", for tensor parallelism inside a node alone.
"""

from collections.abc import Iterator
from typing import Any

from jaxremat.mesh.axes import MeshShape


def sensible_meshes(
    num_devices: int, num_nodes: int, *, num_experts: int = 1, has_tensor: bool = True
) -> tuple[MeshShape, ...]:
    """The meshes to compare, no two the same.

    Whether a model can be divided over them is checked elsewhere.

    Args:
        num_devices: all devices. `num_nodes` divides it.
        num_nodes: machines over which they are spread evenly.
        num_experts: experts of a layer. More than 1 adds meshes with the axis `expert`.
        has_tensor: whether the axis `tensor` is compared. It divides nothing of a workload whose dimensions have no names.
    """
    of_node = num_devices // num_nodes
    inside: list[dict[str, Any]] = [{"tensor": size} for size in _powers_of_two(of_node if has_tensor else 1)]
    inside += [{"expert": size} for size in _powers_of_two(min(of_node, num_experts)) if size > 1]
    found: dict[str, MeshShape] = {}
    for axes in inside:
        size = max(axes.values())
        for around in _around(num_devices // size, of_node // size, num_nodes):
            mesh = MeshShape(**axes, **around, nodes=num_nodes)
            found.setdefault(str(mesh), mesh)
    return tuple(found.values())


def _powers_of_two(limit: int) -> Iterator[int]:
    """The powers of two that divide `limit`: `1, 2, 4` for 12."""
    size = 1
    while limit % size == 0:
        yield size
        size *= 2


def _around(rest: int, of_node: int, num_nodes: int) -> Iterator[dict[str, Any]]:
    """The sizes of `data` and `fsdp` over `rest` devices or groups; a node has `of_node`."""
    yield {"fsdp": rest}
    if num_nodes > 1 and of_node > 1:
        yield {"data": num_nodes, "fsdp": of_node}
    yield {"data": rest}
