"""This machine's CPU: steps are really run on it, and its memory isn't a GPU's."""

from typing import Any

from jaxremat.chips.chip import Chip
from jaxremat.chips.nvidia.attention import CUDNN


class Cpu(Chip):
    """The CPU, which has no fused attention.

    `auto` looks for a GPU's, and `attention_obstacle` says that the target is none.
    """

    platform = "cpu"
    title = "CPU"
    is_gpu = False
    attention = CUDNN
    calls = ((r"__onednn\$matmul", "matmul"),)

    def attention_obstacle(self, capability: tuple[int, int] | None) -> str:
        return "the target is a CPU"

    def is_here(self) -> bool:
        return True

    def attached(self) -> list[Any]:
        import jax

        return jax.devices("cpu")


CPU = Cpu()
