"""The targets of a compile: an attached GPU, the CPU, or a GPU that isn't here (deviceless).

For example, `load_target("h100-80gb")` gives a deviceless target, and `load_target("gpu")` gives the attached GPU. With a
mesh, the target is several equal devices.

What a target's kind of device is to the rest of the package is `Target.chip`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from jaxremat.chips.catalog import ATTACHED, DEFAULT_DEVICELESS, chip_of, describe
from jaxremat.chips.chip import Chip
from jaxremat.chips.cpu import CPU
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.errors import TargetError
from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes, MeshShape
from jaxremat.mesh.sharding import make_mesh, replicated

_ONE_OF_SEVERAL = "; if this process is one of several, --distributed or --coordinator says so"


@dataclass(frozen=True)
class Target:
    """One device to compile for, or several equal ones.

    Several processes may have the devices of a mesh, each some of them.

    Attributes:
        name: the name of `--target`, or that of the text file that describes the GPU.
        kind: `attached` for a GPU of this machine, `cpu`, or `deviceless` for a GPU that isn't here.
        chip: the kind of device, and what it is to XLA and to JAX.
        device: JAX's device, or the first one of `mesh` that this process has. A deviceless one can only be compiled for.
        description: the device in words.
        memory_bytes: bytes of one device's memory; for an attached GPU the limit of JAX's allocator. None if unknown.
        compute_capability: of a GPU, such as (9, 0). None for a CPU, or if unknown.
        speed: the rates of one device, from which times are predicted. None if they aren't known.
        mesh: the devices as a mesh of JAX's. None for one device.
        mesh_shape: the sizes of the mesh's axes.
        text: what XLA is told of a GPU that isn't in this machine.
        pool_bytes: the size of the allocator's pool that XLA is told of (`in_pool`). None for a GPU's whole memory.
    """

    name: str
    kind: Literal["attached", "cpu", "deviceless"]
    chip: Chip
    device: Any
    description: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    speed: DeviceSpeed | None
    mesh: jax.sharding.Mesh | None = None
    mesh_shape: MeshAxes = ONE_DEVICE
    text: str = ""
    pool_bytes: int | None = None

    @property
    def lacks_bf16(self) -> bool:
        """Whether the device has no matmuls of bfloat16."""
        return self.chip.lacks_bf16(self.compute_capability)

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding that puts every array whole on the one device, or on each of several."""
        return jax.sharding.SingleDeviceSharding(self.device) if self.mesh is None else replicated(self.mesh)

    @property
    def devices(self) -> list[Any]:
        """All devices, in the order of the mesh."""
        return [self.device] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process."""
        return [self.device] if self.mesh is None else list(self.mesh.local_devices)

    @property
    def num_processes(self) -> int:
        """How many processes run a step together. 1 where nothing is run."""
        if self.mesh is None or self.kind == "deviceless":
            return 1
        return len({device.process_index for device in self.mesh.devices.flat})

    def layout(self) -> dict[str, Any]:
        """What records say of a mesh, and of its processes if there are several.

        Empty for one device.
        """
        several = {"num_processes": self.num_processes} if self.num_processes > 1 else {}
        return {"mesh": self.mesh_shape.as_data(), **several} if self.mesh else {}


def load_target(name: str | None = None, mesh: MeshShape | None = None) -> Target:
    """Loads a target by its name.

    Args:
        name: `gpu` for the attached GPU, `cpu`, the name of a bundled GPU (`h100-80gb`), or the path of a target text file.
            None takes the attached GPU, or `h100-80gb` if no GPU is attached or a mesh is given.
        mesh: how many of them, and how arrays lie on them. None for one device.

    Raises:
        TargetError: there is no such target, or JAX is already set up in a way that excludes it.
        MissingDependencyError: a wheel of the `aot` extra is missing.
    """
    if name == "cpu":
        return _cpu(mesh)
    if name == "gpu" or (name is None and mesh is None and ATTACHED.attached()):
        return _attached(ATTACHED, mesh)
    return _deviceless(name or DEFAULT_DEVICELESS, mesh)


def _cpu(shape: MeshShape | None) -> Target:
    devices = CPU.attached()
    if shape is None:
        return Target("cpu", "cpu", CPU, devices[0], "this machine's CPU", None, None, None)
    mesh = _mesh_here(
        "cpu",
        devices,
        shape,
        f"set JAX_NUM_CPU_DEVICES={shape.num_devices // jax.process_count()} before JAX starts, or name a GPU that isn't in this "
        f"machine, such as --target {DEFAULT_DEVICELESS}",
    )
    whose = "this machine's CPU" if jax.process_count() == 1 else "the processes' CPUs"
    return Target("cpu", "cpu", CPU, mesh.local_devices[0], f"devices of {whose}", None, None, None, mesh, shape)


def _mesh_here(name: str, devices: list[Any], shape: MeshShape, next_step: str) -> jax.sharding.Mesh:
    """The mesh over as many of `devices`, which are real.

    Several processes must use all that they have.

    Raises:
        TargetError: there are fewer, or some would belong to no process's part of the mesh.
    """
    num_processes = jax.process_count()
    if len(devices) < shape.num_devices or (num_processes > 1 and len(devices) > shape.num_devices):
        all_of_them = f"{len(devices)}, which is what the {num_processes} processes have together"
        raise TargetError(
            f"a mesh of {shape.num_devices} devices was requested, on --target {name}",
            allowed=all_of_them if num_processes > 1 else f"up to {len(devices)}, which is how many devices JAX has here",
            next_step=next_step + (f"; or give a mesh of {len(devices)} devices" if num_processes > 1 else _ONE_OF_SEVERAL),
        )
    return make_mesh(devices[: shape.num_devices], shape)


def _attached(chip: Chip, shape: MeshShape | None = None) -> Target:
    devices = chip.attached()
    if not devices:
        raise chip.none_attached(DEFAULT_DEVICELESS)
    elsewhere = f"name GPUs to compile for without having them, such as --target {DEFAULT_DEVICELESS}"
    mesh = _mesh_here("gpu", devices, shape, elsewhere) if shape else None
    here = list(mesh.local_devices) if mesh else devices[:1]
    device = here[0]
    limits = [(one.memory_stats() or {}).get("bytes_limit") for one in here]
    return Target(
        name=device.device_kind.replace(" ", "-").lower(),
        kind="attached",
        chip=chip,
        device=device,
        description=device.device_kind,
        memory_bytes=min((limit for limit in limits if limit is not None), default=None),
        compute_capability=chip.capability_of(device),
        speed=chip.speed_of_kind(device.device_kind, shape),
        mesh=mesh,
        mesh_shape=shape or MeshShape(),
    )


def _deviceless(name_or_path: str, mesh: MeshShape | None = None) -> Target:
    chip = chip_of(name_or_path)
    name, described = describe(name_or_path)
    chip.check_installed()
    text = described.to_text()
    devices = chip.topology(name, text, mesh or ONE_DEVICE)
    return Target(
        name,
        "deviceless",
        chip,
        devices[0],
        described.description,
        described.device_memory_size,
        described.compute_capability,
        chip.speed(described, mesh),
        make_mesh(devices, mesh) if mesh else None,
        mesh or ONE_DEVICE,
        text,
    )


def in_pool(target: Target, pool_bytes: int | None = None) -> Target:
    """The target as XLA has it in a job whose allocator has `pool_bytes`.

    It is `target` itself if its GPU is here.

    XLA's own rematerialization acts at the pool's size. So XLA is told of a GPU on which it acts there
    (`Chip.text_with_pool`). All else stays, `memory_bytes` too.

    Args:
        target: the target.
        pool_bytes: the size of the pool. None takes the share of the GPU's memory that JAX's allocator takes by default, and a
            target with a pool as it is.
    """
    has_pool = target.pool_bytes is not None and pool_bytes in (None, target.pool_bytes)
    if target.kind != "deviceless" or target.memory_bytes is None or has_pool:
        return target
    pool_bytes = pool_bytes or int(target.chip.mem_fraction * target.memory_bytes)
    text = target.chip.text_with_pool(target.text, pool_bytes)
    shape = target.mesh_shape
    assert isinstance(shape, MeshShape), "a workload makes its mesh of the devices of the pool"
    devices = target.chip.topology(target.name, text, shape)
    mesh = make_mesh(devices, shape) if target.mesh else None
    return replace(target, device=devices[0], mesh=mesh, text=text, pool_bytes=pool_bytes)
