"""The target of a workload that brings a mesh of its own.

    target = on_mesh_of(workload, load_target("h100-80gb", MeshShape(fsdp=8)), train)
    target.mesh == workload.mesh        # over the target's 8 devices
    str(target.mesh_shape)              # data=2,model=4: axes that the workload's author has named

What an axis divides follows from the shardings of the workload's arrays: `OwnAxes`.
"""

from collections.abc import Iterable
from dataclasses import replace

from jaxremat.chips.target import Target
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import OwnAxes
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.step.step import arguments_on_mesh
from jaxremat.workload.workload import Workload
from jaxremat.xla.categories import role_of


def on_mesh_of(workload: Workload, target: Target, train: TrainConfig) -> Target:
    """The target with the mesh of a workload.

    The target itself for a workload without one, and if it has this mesh already.

    Raises:
        UsageError: the mesh isn't over the target's devices, each once.
    """
    mesh = workload.mesh
    if mesh is None or (target.mesh_shape.is_own and mesh == target.mesh):
        return target
    given, own = target.devices, [*mesh.devices.flat]
    name = workload.name or "the workload"
    takes_devices = "take the target's: def workload(batch: int = 8, devices=None), with mesh = jax.sharding.Mesh("
    takes_devices += "np.reshape(devices, (2, 4)), ('data', 'model')) for --devices 8"
    if others := [device for device in own if device not in given]:
        raise UsageError(
            f"{name} has a mesh over {others[0]}, which is no device of the target {target.name}",
            allowed="a mesh over the devices that the function gets by its keyword devices",
            cause="jax.devices() and jax.make_mesh give the devices of this machine",
            next_step=takes_devices,
        )
    if len({*own}) < len(own):
        raise UsageError(f"{name} has a mesh that names a device twice", allowed="each device once", next_step=takes_devices)
    if len(own) != len(given):
        raise UsageError(
            f"{name} has a mesh over {len(own)} of the target's {len(given)} devices",
            allowed="a mesh over all of them",
            next_step=f"--devices {len(own)}, or another mesh",
        )
    leaves, sizes = arguments_on_mesh(mesh, workload, train), dict(mesh.shape)
    is_batch = [leaf.is_batch if workload.step is None else role_of(leaf.name) == "inputs" for leaf in leaves]
    axes = OwnAxes(
        tuple((str(axis), size) for axis, size in sizes.items()),
        _axes_of(leaf for leaf, is_one in zip(leaves, is_batch, strict=True) if is_one),
        _axes_of(leaf for leaf, is_one in zip(leaves, is_batch, strict=True) if not is_one),
        target.mesh_shape.nodes,
        target.mesh_shape.network_gbps,
        target.mesh_shape.topology,
    )
    numbers = {device: number for number, device in enumerate(given)}
    order = tuple(numbers[device] for device in own)
    links = target.speed.links if target.speed else None
    speed = replace(target.speed, links=replace(links, order=order)) if target.speed and links else target.speed
    return replace(target, mesh=mesh, mesh_shape=axes, speed=speed)


def _axes_of(leaves: Iterable[LeafOnMesh]) -> tuple[str, ...]:
    return tuple(sorted(set[str]().union(*(leaf.axes for leaf in leaves))))
