"""The targets that a step can be compiled for: an attached GPU, the CPU, or a GPU that isn't in the machine (deviceless).

For example, `load_target("h100-80gb")` gives a deviceless target, and `load_target("gpu")` gives the attached GPU.

No other module uses JAX's topologies. Deviceless compilation needs the wheels of the `aot` extra. It also needs a process in
which JAX was set to use the CPU before JAX's first backend started. The commands set this themselves. A user of the Python
API who hasn't set it gets an error that says so.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.experimental import topologies

from jaxremat.errors import TargetError
from jaxremat.mesh.axes import ONE_DEVICE, MeshShape
from jaxremat.mesh.sharding import make_mesh, replicated
from jaxremat.xla.calibration import load_calibration
from jaxremat.xla.clock import DeviceSpeed
from jaxremat.xla.collectives import Links
from jaxremat.xla.gpu import DEFAULT_DEVICELESS, GpuDescription, bundled_names, load_gpu, nvidia_driver
from jaxremat.xla.installed import check_aot_wheels


@dataclass(frozen=True)
class Target:
    """One device to compile for, or several equal ones.

    `device` is JAX's device, or the first one of `mesh`. It is a real device for an attached GPU, and a compile-only device for
    a deviceless target. `memory_bytes` and `speed` are those of one device. `mesh` is None for one device.
    """

    name: str
    kind: Literal["attached", "cpu", "deviceless"]
    device: Any
    description: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    speed: DeviceSpeed | None
    mesh: jax.sharding.Mesh | None = None
    mesh_shape: MeshShape = ONE_DEVICE

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding that puts every array whole on the one device, or on each of several."""
        return jax.sharding.SingleDeviceSharding(self.device) if self.mesh is None else replicated(self.mesh)

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
    if mesh is not None and name == "gpu":
        raise TargetError(
            f"a mesh of {mesh.num_devices} devices was asked for, on --target gpu",
            cause="a mesh of attached GPUs isn't measured yet",
            next_step=f"--target {DEFAULT_DEVICELESS}, or another name of --list targets",
        )
    if name == "cpu":
        return _cpu(mesh)
    if mesh is not None:
        return _deviceless(*load_gpu(name or DEFAULT_DEVICELESS), mesh)
    if name == "gpu" or (name is None and attached_gpu() is not None):
        return _attached()
    return _deviceless(*load_gpu(name or DEFAULT_DEVICELESS))


def attached_gpu() -> Any | None:
    """JAX's first NVIDIA GPU; None if JAX has none."""
    if not nvidia_driver():
        return None
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


def _cpu(shape: MeshShape | None) -> Target:
    devices = jax.devices("cpu")
    if shape is None:
        return Target("cpu", "cpu", devices[0], "this machine's CPU", None, None, None)
    if len(devices) < shape.num_devices:
        raise TargetError(
            f"a mesh of {shape.num_devices} devices was asked for, on --target cpu",
            allowed=f"up to {len(devices)}, which is how many JAX makes of this machine's CPU",
            next_step=f"set JAX_NUM_CPU_DEVICES={shape.num_devices} before JAX starts, or name a GPU that isn't in this machine, "
            f"such as --target {DEFAULT_DEVICELESS}",
        )
    mesh = make_mesh(devices[: shape.num_devices], shape)
    return Target("cpu", "cpu", devices[0], "devices of this machine's CPU", None, None, None, mesh, shape)


def _attached() -> Target:
    device = attached_gpu()
    if device is None:
        driver = nvidia_driver()
        raise TargetError(
            "--target gpu was asked for, and JAX sees no NVIDIA GPU",
            cause="jax has no CUDA plugin here, or JAX_PLATFORMS hides it"
            if driver
            else "this machine has no NVIDIA driver",
            next_step=(
                'pip install "jaxremat[cuda13]" (or cuda12)'
                if driver
                else f"name a GPU to compile for without having it, such as --target {DEFAULT_DEVICELESS}, or --target cpu"
            ),
        )
    major, _, minor = str(device.compute_capability).partition(".")
    stats = device.memory_stats() or {}
    return Target(
        name=device.device_kind.replace(" ", "-").lower(),
        kind="attached",
        device=device,
        description=device.device_kind,
        memory_bytes=stats.get("bytes_limit"),
        compute_capability=(int(major), int(minor)),
        speed=_speed_of_kind(device.device_kind),
    )


def _deviceless(name: str, gpu: GpuDescription, mesh: MeshShape | None = None) -> Target:
    check_aot_wheels()
    shape = mesh or ONE_DEVICE
    layout = f"{shape.nodes}x1x{shape.num_devices // shape.nodes}"
    try:
        topology = topologies.get_topology_desc(name, platform="cuda", target_config=gpu.to_text(), topology=layout)
    except NotImplementedError:
        raise TargetError(
            f"target {name!r} cannot be compiled for in this process",
            cause="JAX's CUDA plugin gave up for want of a GPU: JAX wasn't told beforehand to use the CPU",
            next_step='set JAX_PLATFORMS=cpu before importing jax (tests: os.environ["JAX_PLATFORMS"] = "cpu" in conftest.py)',
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"XLA refused target {name!r}: {str(error).splitlines()[0]}",
            cause="the target text has a field that this version of XLA doesn't know",
            next_step="write a fresh file with --dump-target FILE, or use a bundled target",
        ) from None
    return Target(
        name,
        "deviceless",
        topology.devices[0],
        gpu.description,
        gpu.device_memory_size,
        gpu.compute_capability,
        speed_of(gpu, mesh),
        make_mesh(topology.devices, mesh) if mesh else None,
        shape,
    )


def speed_of(gpu: GpuDescription, mesh: MeshShape | None = None) -> DeviceSpeed | None:
    """The rates that predicted times need; None if one is unknown: the peak, or the bandwidth of a link that is used."""
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


def _speed_of_kind(device_kind: str) -> DeviceSpeed | None:
    """The speed of an attached GPU whose name starts with that of a bundled GPU; None for other GPUs.

    MFU and the predicted time need the speed.
    """
    for name in bundled_names():
        _, gpu = load_gpu(name)
        if device_kind.startswith(gpu.description):  # some kinds add an edition
            return speed_of(gpu)
    return None
