"""Google's TPUs as a chip. None is used here: programs are compiled for those that aren't."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxremat.chips.chip import Chip
from jaxremat.chips.tpu.attention import CALLS, SPLASH
from jaxremat.chips.tpu.device import TpuDescription, load_tpu, tpu_names
from jaxremat.chips.tpu.installed import check_libtpu
from jaxremat.chips.tpu.options import OPTIONS
from jaxremat.chips.tpu.refusal import needed_bytes
from jaxremat.chips.tpu.speed import tpu_speed
from jaxremat.mesh.axes import MeshShape

if TYPE_CHECKING:
    from jaxremat.chips.speed import DeviceSpeed


class Tpu(Chip):
    """Google's TPUs.

    Their compiler itself rejects a program that is too large, and says how large it is.
    """

    platform = "tpu"
    title = "TPU"
    is_gpu = False
    attention = SPLASH
    calls = CALLS
    options = OPTIONS
    device_spaces = (0,)  # others are vector and scalar memory, and semaphores
    mem_fraction = 1.0
    has_topologies = True

    def attention_obstacle(self, capability: tuple[int, int] | None) -> str:
        return ""

    def devices_of_node(self, name_or_path: str) -> int | None:
        return None

    def needed_bytes(self, text: str) -> int | None:
        return needed_bytes(text)

    def is_here(self) -> bool:
        return False

    def attached(self) -> list[Any]:
        return []

    def names(self) -> tuple[str, ...]:
        return tpu_names()

    def describe(self, name_or_path: str, known: Sequence[str] = ()) -> tuple[str, TpuDescription]:
        return name_or_path, load_tpu(name_or_path)

    def check_installed(self) -> None:
        check_libtpu()

    def topology(self, name: str, text: str, shape: MeshShape) -> Sequence[Any]:
        from jaxremat.chips.tpu.topology import described_devices

        return described_devices(load_tpu(text), shape)

    def speed(self, described: TpuDescription, mesh: MeshShape | None = None) -> "DeviceSpeed | None":
        return tpu_speed(described, mesh)


TPU = Tpu()
