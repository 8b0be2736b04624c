"""NVIDIA's GPUs as a chip: those that are attached, and those that aren't here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxremat.chips.chip import Chip
from jaxremat.chips.installed import check_aot_wheels
from jaxremat.chips.nvidia import refusal
from jaxremat.chips.nvidia.attention import CUDNN
from jaxremat.chips.nvidia.gpu import (
    GpuDescription,
    attached_models,
    bundled_names,
    gpu_of_kind,
    load_gpu,
    nvidia_driver,
    text_with_pool,
)
from jaxremat.chips.nvidia.options import OPTIONS, PADDING
from jaxremat.chips.nvidia.speed import TENSOR_FLOAT, speed_of
from jaxremat.errors import JaxrematError, TargetError

if TYPE_CHECKING:
    from jaxremat.chips.speed import DeviceSpeed
    from jaxremat.mesh.axes import MeshShape


class Nvidia(Chip):
    """NVIDIA's GPUs. Generations are compute capabilities: 8.0 is Ampere, and 9.0 Hopper."""

    platform = "cuda"
    title = "NVIDIA GPU"
    is_gpu = True
    attention = CUDNN
    options = OPTIONS
    calls = (
        (r"__cublas\$(gemm|lt\$matmul|lt\$groupedMatmul)", "matmul"),
        (r"__cudnn\$fmha.*Backward", "attention gradient"),
        (r"__cudnn\$fmha", "attention"),
        (r"__cudnn\$conv.*BackwardFilter", "convolution's filter gradient"),
        (r"__cudnn\$conv.*BackwardInput", "convolution's input gradient"),
        (r"__cudnn\$conv", "convolution"),
    )
    with_workspace = "__cublas|__cudnn"
    outside = "the CUDA context and NCCL"
    #: One process on an H200 had the first (experiments/results/nvidia-h200/steps.json). Nothing here measured NCCL.
    outside_needed = "0.6 GiB on one H200, without NCCL; NVIDIA/nccl issues 864 and 1685 report 1 to 6 GB for NCCL"

    def attention_obstacle(self, capability: tuple[int, int] | None) -> str:
        if not self.lacks_bf16(capability):
            return ""
        return f"fused attention needs compute capability 8.0, and the GPU has {'.'.join(map(str, capability or ()))}"

    def lacks_bf16(self, capability: tuple[int, int] | None) -> bool:
        """Whether it is below 8.0: no bfloat16 in its tensor cores, and no fused attention."""
        return capability is not None and capability < TENSOR_FLOAT

    def passes_to_skip(self, capability: tuple[int, int] | None) -> tuple[str, ...]:
        return () if self.lacks_bf16(capability) else (PADDING,)

    def devices_of_node(self, name_or_path: str) -> int | None:
        default = super().devices_of_node(name_or_path)
        return load_gpu(name_or_path)[1].devices_of_node or default if name_or_path in bundled_names() else default

    def missing(self, text: str, first_line: str, *, is_here: bool) -> JaxrematError | None:
        return refusal.missing(text, first_line, is_here=is_here)

    def rejection(self, text: str) -> tuple[str, str] | None:
        return refusal.rejection(text)

    def is_here(self) -> bool:
        return nvidia_driver()

    def attached(self) -> list[Any]:
        from jaxremat.chips.nvidia.topology import attached_devices

        return attached_devices() if nvidia_driver() else []

    def models(self) -> list[str]:
        return attached_models()

    def capability_of(self, device: Any) -> tuple[int, int] | None:
        major, _, minor = str(device.compute_capability).partition(".")
        return int(major), int(minor)

    def speed_of_kind(self, device_kind: str, mesh: "MeshShape | None") -> "DeviceSpeed | None":
        """The rates of attached GPUs that are bundled ones; None for other GPUs."""
        name = gpu_of_kind(device_kind)
        return speed_of(load_gpu(name)[1], mesh) if name else None

    def none_attached(self, deviceless: str) -> TargetError:
        driver = nvidia_driver()
        return TargetError(
            "--target gpu was requested, and JAX sees no NVIDIA GPU",
            cause="jax has no CUDA plugin here, or JAX_PLATFORMS hides it"
            if driver
            else "this machine has no NVIDIA driver",
            next_step=(
                'pip install "jaxremat[cuda13]" (or cuda12)'
                if driver
                else f"name a GPU to compile for without having it, such as --target {deviceless}, or --target cpu"
            ),
        )

    def names(self) -> tuple[str, ...]:
        return bundled_names()

    def describe(self, name_or_path: str, known: Sequence[str] = ()) -> tuple[str, GpuDescription]:
        return load_gpu(name_or_path, known)

    def check_installed(self) -> None:
        check_aot_wheels()

    def topology(self, name: str, text: str, shape: "MeshShape") -> Sequence[Any]:
        from jaxremat.chips.nvidia.topology import described_devices

        return described_devices(name, text, shape)

    def text_with_pool(self, text: str, pool_bytes: int) -> str:
        return text_with_pool(text, pool_bytes)

    def speed(self, described: GpuDescription, mesh: "MeshShape | None" = None) -> "DeviceSpeed | None":
        return speed_of(described, mesh)


NVIDIA = Nvidia()
