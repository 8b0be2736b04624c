"""All chips, and the targets that there are by name. JAX isn't loaded here.

For example, `describe("h200")` gives the description of a bundled GPU, and `target_name(None, on_mesh=False)` is `gpu` where one
is attached.
"""

import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from jaxremat.chips.chip import CallKind, Chip, Description, FusedAttention
from jaxremat.chips.cpu import CPU
from jaxremat.chips.nvidia.chip import NVIDIA
from jaxremat.chips.tpu.chip import TPU
from jaxremat.errors import UsageError

CHIPS: tuple[Chip, ...] = (NVIDIA, TPU, CPU)
#: The chip that `--target gpu` is.
ATTACHED: Chip = NVIDIA
DEFAULT_DEVICELESS = "h100-80gb"
if TYPE_CHECKING:
    Attention = str
else:
    #: The values of `--attention`: chosen by a trial compile, XLA's own, or the fused attention of a chip.
    Attention = Literal[("auto", "xla", *dict.fromkeys(chip.attention.name for chip in CHIPS))]
#: The options of each `--xla-preset`.
PRESETS = {name: dict(options) for chip in CHIPS for name, options in chip.options.presets.items()}


def bundled_names() -> tuple[str, ...]:
    """The names of the devices that can be compiled for without having them."""
    return tuple(sorted(name for chip in CHIPS for name in chip.names()))


def chip_of(name_or_path: str) -> Chip:
    """The chip of a bundled device, of `cpu`, or of a text file.

    Text files describe devices of the chip that `--target gpu` is.
    """
    if name_or_path == CPU.platform:
        return CPU
    return next((chip for chip in CHIPS if name_or_path in chip.names()), ATTACHED)


def describe(name_or_path: str) -> tuple[str, Description]:
    """The name that records show, and the description, of a bundled device or of a text file.

    Raises:
        TargetError: there is no such name or file, or its text is damaged.
    """
    return chip_of(name_or_path).describe(name_or_path, bundled_names())


def fused_attention(name: str) -> FusedAttention | None:
    """The fused attention of this name. None for `xla`.

    Raises:
        UsageError: no chip has one of this name.
    """
    known = {chip.attention.name: chip.attention for chip in CHIPS}
    if name not in ("xla", *known):
        raise UsageError(f"the attention {name!r} was requested", allowed=", ".join(("xla", *known)), next_step="xla")
    return known.get(name)


def check_installed(targets: Iterable[str]) -> None:
    """Checks that what compiling for these targets needs is installed.

    Raises:
        MissingDependencyError: something isn't. The message names it.
    """
    for chip in dict.fromkeys(map(chip_of, targets)):
        chip.check_installed()


def driver_here() -> bool:
    """Whether this machine has the driver of `--target gpu`, by the file system alone."""
    return ATTACHED.is_here()


def target_name(requested: str | None, *, on_mesh: bool) -> str:
    """The target of a command: --target, or else the attached GPU, or else `h100-80gb`.

    On a mesh it is `h100-80gb` too.
    """
    return requested or (DEFAULT_DEVICELESS if on_mesh or not driver_here() else "gpu")


def is_gpu(platform: str) -> bool:
    """Whether JAX's name of a platform is that of GPUs: `gpu`, or that of a maker."""
    return platform == "gpu" or any(chip.is_gpu and chip.platform == platform for chip in CHIPS)


@functools.cache
def call_kind(target: str) -> CallKind | None:
    """What a library computes in a custom call of this target. None if it isn't known."""
    return next((kind for chip in CHIPS for start, kind in chip.calls if re.match(start, target)), None)


@functools.cache
def may_have_workspace(target: str) -> bool:
    """Whether the last result of a custom call may be a workspace of the library."""
    return any(chip.with_workspace and re.match(chip.with_workspace, target) for chip in CHIPS)
