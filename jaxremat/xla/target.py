"""Where a step is compiled for: an attached GPU, the CPU, or a GPU that is not in the machine (deviceless).

The only module that touches JAX's topologies. Deviceless compilation needs the wheels of the `aot` extra and a process in
which JAX was told to use the CPU *before* its first backend came up; the commands see to that, and an API user gets one
clear error.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.experimental import topologies

from jaxremat.errors import TargetError
from jaxremat.xla.cost import DeviceSpeed
from jaxremat.xla.gpu import DEFAULT_DEVICELESS, GpuDescription, bundled_names, load_gpu, nvidia_driver
from jaxremat.xla.installed import check_aot_wheels

# What a large kernel reaches of the datasheet: an 8192 x 8192 x 8192 bf16 matmul ran at 788 of 989 TFLOP/s and a device
# copy at 4.3 of 4.8 TB/s on an H200. Taken over to every GPU, so a predicted time is at its best for that generation.
MATMUL_EFFICIENCY = 788 / 989
BANDWIDTH_EFFICIENCY = 4.3 / 4.8
LAUNCH_S = 2e-6


@dataclass(frozen=True)
class Target:
    """One device to compile for. `device` is JAX's: real where attached, compile-only where deviceless.

    Room is left for several devices: everything that compiles takes its shardings from `sharding`.
    """

    name: str
    kind: Literal["attached", "cpu", "deviceless"]
    device: Any
    description: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    speed: DeviceSpeed | None

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """All of every array on the one device."""
        return jax.sharding.SingleDeviceSharding(self.device)

    @property
    def platform(self) -> Literal["cuda", "cpu"]:
        """JAX's name of the platform to lower for."""
        return "cpu" if self.kind == "cpu" else "cuda"


def load_target(name: str | None = None) -> Target:
    """The target called `name`: `gpu` (attached), `cpu`, a bundled GPU (`h100-80gb`), or the path of a target text file.

    None takes the attached GPU, and without one `h100-80gb`.

    Raises:
        TargetError: no such target, or JAX is already set up in a way that rules it out.
        MissingDependencyError: a wheel of the `aot` extra is missing.
    """
    if name == "cpu":
        return Target("cpu", "cpu", jax.devices("cpu")[0], "this machine's CPU", None, None, None)
    if name == "gpu" or (name is None and attached_gpu() is not None):
        return _attached()
    return _deviceless(*load_gpu(name or DEFAULT_DEVICELESS))


def attached_gpu() -> Any | None:
    """JAX's first NVIDIA GPU, None where JAX has none."""
    if not nvidia_driver():
        return None
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


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


def _deviceless(name: str, gpu: GpuDescription) -> Target:
    check_aot_wheels()
    try:
        topology = topologies.get_topology_desc(name, platform="cuda", target_config=gpu.to_text(), topology="1x1x1")
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
        speed_of(gpu),
    )


def speed_of(gpu: GpuDescription) -> DeviceSpeed | None:
    """What the roofline needs, None where the peak is unknown."""
    if gpu.peak_bf16_flops is None or gpu.host_link_bandwidth is None:
        return None
    return DeviceSpeed(
        bf16_flops=gpu.peak_bf16_flops,
        f32_flops=gpu.peak_bf16_flops / 2,  # TF32, XLA's default for float32 matmuls
        bandwidth_bytes_per_s=gpu.memory_bandwidth,
        host_link_bytes_per_s=gpu.host_link_bandwidth,
        matmul_efficiency=MATMUL_EFFICIENCY,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        launch_s=LAUNCH_S,
    )


def _speed_of_kind(device_kind: str) -> DeviceSpeed | None:
    """The speed of an attached GPU whose name is a bundled one's, for MFU and a predicted time; None for others."""
    for name in bundled_names():
        _, gpu = load_gpu(name)
        if device_kind.startswith(gpu.description):  # some kinds add an edition
            return speed_of(gpu)
    return None
