"""The targets of a compile: an attached GPU, the CPU, or a GPU that isn't here (deviceless).

For example, `load_target("h100-80gb")` gives a deviceless target, and `load_target("gpu")` gives the attached GPU. With a
mesh, the target is several equal devices.

No other module uses JAX's topologies. Deviceless compilation needs the wheels of the `aot` extra. It also needs a process in
which JAX was set to use the CPU before JAX's first backend started. The commands set this themselves. A user of the Python
API who hasn't set it gets an error that says so.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.experimental import topologies

from jaxremat.chips.chip import MEM_FRACTION
from jaxremat.chips.installed import check_aot_wheels
from jaxremat.chips.nvidia.calibration import load_calibration
from jaxremat.chips.nvidia.gpu import DEFAULT_DEVICELESS, GpuDescription, gpu_of_kind, load_gpu, nvidia_driver
from jaxremat.chips.speed import DeviceSpeed, Links
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
        device: JAX's device, or the first one of `mesh` that this process has. A deviceless one can only be compiled for.
        description: the device in words.
        memory_bytes: bytes of one device's memory; for an attached GPU the limit of JAX's allocator. None if unknown.
        compute_capability: of an NVIDIA GPU, such as (9, 0). None for a CPU, or if unknown.
        speed: the rates of one device, from which times are predicted. None if they aren't known.
        mesh: the devices as a mesh of JAX's. None for one device.
        mesh_shape: the sizes of the mesh's axes.
        text: what XLA is told of a GPU that isn't in this machine.
        pool_bytes: the size of the allocator's pool that XLA is told of (`in_pool`). None for a GPU's whole memory.
    """

    name: str
    kind: Literal["attached", "cpu", "deviceless"]
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
    def is_before_ampere(self) -> bool:
        """Whether it is a GPU of a compute capability below 8.0.

        Such a GPU has no bfloat16 in its tensor cores, and no fused attention.
        """
        return self.compute_capability is not None and self.compute_capability < (8, 0)

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

    @property
    def platform(self) -> Literal["cuda", "cpu"]:
        """JAX's name for the platform to lower for."""
        return "cpu" if self.kind == "cpu" else "cuda"


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
    if name == "gpu" or (name is None and mesh is None and attached_gpus()):
        return _attached(mesh)
    return _deviceless(*load_gpu(name or DEFAULT_DEVICELESS), mesh)


def attached_gpus() -> list[Any]:
    """JAX's NVIDIA GPUs, also those of the other processes that run with this one.

    Empty if JAX has none.
    """
    if not nvidia_driver():
        return []
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def _cpu(shape: MeshShape | None) -> Target:
    devices = jax.devices("cpu")
    if shape is None:
        return Target("cpu", "cpu", devices[0], "this machine's CPU", None, None, None)
    mesh = _mesh_here(
        "cpu",
        devices,
        shape,
        f"set JAX_NUM_CPU_DEVICES={shape.num_devices // jax.process_count()} before JAX starts, or name a GPU that isn't in this "
        f"machine, such as --target {DEFAULT_DEVICELESS}",
    )
    whose = "this machine's CPU" if jax.process_count() == 1 else "the processes' CPUs"
    return Target("cpu", "cpu", mesh.local_devices[0], f"devices of {whose}", None, None, None, mesh, shape)


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


def _attached(shape: MeshShape | None = None) -> Target:
    devices = attached_gpus()
    if not devices:
        driver = nvidia_driver()
        raise TargetError(
            "--target gpu was requested, and JAX sees no NVIDIA GPU",
            cause="jax has no CUDA plugin here, or JAX_PLATFORMS hides it"
            if driver
            else "this machine has no NVIDIA driver",
            next_step=(
                'pip install "jaxremat[cuda13]" (or cuda12)'
                if driver
                else f"name a GPU to compile for without having it, such as --target {DEFAULT_DEVICELESS}, or --target cpu"
            ),
        )
    elsewhere = f"name GPUs to compile for without having them, such as --target {DEFAULT_DEVICELESS}"
    mesh = _mesh_here("gpu", devices, shape, elsewhere) if shape else None
    here = list(mesh.local_devices) if mesh else devices[:1]
    device = here[0]
    major, _, minor = str(device.compute_capability).partition(".")
    limits = [(one.memory_stats() or {}).get("bytes_limit") for one in here]
    return Target(
        name=device.device_kind.replace(" ", "-").lower(),
        kind="attached",
        device=device,
        description=device.device_kind,
        memory_bytes=min((limit for limit in limits if limit is not None), default=None),
        compute_capability=(int(major), int(minor)),
        speed=_speed_of_kind(device.device_kind, shape),
        mesh=mesh,
        mesh_shape=shape or MeshShape(),
    )


def _deviceless(name: str, gpu: GpuDescription, mesh: MeshShape | None = None) -> Target:
    check_aot_wheels()
    text = gpu.to_text()
    devices = _described_devices(name, text, mesh or ONE_DEVICE)
    return Target(
        name,
        "deviceless",
        devices[0],
        gpu.description,
        gpu.device_memory_size,
        gpu.compute_capability,
        speed_of(gpu, mesh),
        make_mesh(devices, mesh) if mesh else None,
        mesh or ONE_DEVICE,
        text,
    )


def in_pool(target: Target, pool_bytes: int | None = None) -> Target:
    """The target as XLA has it in a job whose allocator has `pool_bytes`.

    It is `target` itself if its GPU is here.

    XLA's own rematerialization acts at the pool's size on a GPU that is here, and at 0.8 of the GPU's memory on one that isn't.
    So XLA is told of a GPU whose memory is the pool / 0.8. All else stays, `memory_bytes` too.

    Args:
        target: the target.
        pool_bytes: the size of the pool. None takes the share of the GPU's memory that JAX's allocator takes by default, and a
            target with a pool as it is.

    References:
        XLA, `GetSchedulerMemoryLimit` in `xla/service/gpu/gpu_hlo_schedule.cc`.
    """
    has_pool = target.pool_bytes is not None and pool_bytes in (None, target.pool_bytes)
    if target.kind != "deviceless" or target.memory_bytes is None or has_pool:
        return target
    pool_bytes = pool_bytes or int(MEM_FRACTION * target.memory_bytes)
    text = re.sub(r"(device_memory_size\s*:\s*)\d+", rf"\g<1>{math.ceil(pool_bytes / 0.8)}", target.text)
    devices, shape = _described_devices(target.name, text, target.mesh_shape), target.mesh_shape
    assert isinstance(shape, MeshShape), "a workload makes its mesh of the devices of the pool"
    mesh = make_mesh(devices, shape) if target.mesh else None
    return replace(target, device=devices[0], mesh=mesh, text=text, pool_bytes=pool_bytes)


def _described_devices(name: str, text: str, shape: MeshAxes) -> Any:
    """JAX's devices for GPUs that aren't here, of a description.

    Raises:
        TargetError: JAX is set up in a way that excludes them, or XLA rejects the description.
    """
    layout = f"{shape.nodes}x1x{shape.num_devices // shape.nodes}"
    try:
        return topologies.get_topology_desc(name, platform="cuda", target_config=text, topology=layout).devices
    except NotImplementedError:
        raise TargetError(
            f"target {name!r} cannot be compiled for in this process",
            cause="JAX's CUDA plugin gave up for want of a GPU: JAX wasn't told beforehand to use the CPU; or for a variable",
            next_step='set JAX_PLATFORMS=cpu before importing jax (tests: os.environ["JAX_PLATFORMS"] = "cpu" in conftest.py); '
            "python -m jaxremat doctor looks at all variables",
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"XLA refused target {name!r}: {str(error).splitlines()[0]}",
            cause="the target text has a field that this version of XLA doesn't know",
            next_step="write a fresh file with --dump-target FILE, or use a bundled target",
        ) from None


def speed_of(gpu: GpuDescription, mesh: MeshShape | None = None) -> DeviceSpeed | None:
    """The rates of predicted times; None if the peak or a used link's bandwidth is unknown."""
    if gpu.peak_bf16_flops is None or gpu.host_link_bandwidth is None:
        return None
    links = None
    if mesh is not None:
        if gpu.node_link_bandwidth is None or (mesh.nodes > 1 and gpu.network_bandwidth is None):
            return None
        of_node = mesh.num_devices // mesh.nodes
        links = Links(mesh.num_devices, of_node, gpu.node_link_bandwidth, gpu.network_bandwidth)
    return DeviceSpeed(
        bf16_flops=gpu.peak_bf16_flops,
        f32_flops=gpu.peak_bf16_flops / 2,  # TF32, XLA's default for float32 matmuls
        bandwidth_bytes_per_s=gpu.memory_bandwidth,
        host_link_bytes_per_s=gpu.host_link_bandwidth,
        clocks_per_s=gpu.core_count * gpu.clock_rate_ghz * 1e9,
        calibration=load_calibration(gpu.compute_capability),
        links=links,
    )


def _speed_of_kind(device_kind: str, mesh: MeshShape | None = None) -> DeviceSpeed | None:
    """The speed of attached GPUs that are bundled ones; None for other GPUs.

    MFU and the predicted time need the speed.
    """
    name = gpu_of_kind(device_kind)
    return speed_of(load_gpu(name)[1], mesh) if name else None
