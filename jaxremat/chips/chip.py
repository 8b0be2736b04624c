"""What a chip is to the rest of the package: its names, its data, and a few functions.

A `Chip` is one kind of device that JAX has a platform for, such as NVIDIA's GPUs. A target (`chips/target.py`) is one device of
it, or several, and everything else asks `target.chip`. No module outside of `chips/` knows which maker it is. A chip of another
maker is a module with its `Chip`, a TOML for each device, and a row in `chips/catalog.py`.

This module loads no JAX, because flags are checked before JAX is imported.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from jaxremat.errors import JaxrematError, TargetError
from jaxremat.mesh.axes import DEVICES_OF_NODE

if TYPE_CHECKING:
    from jaxremat.chips.speed import DeviceSpeed
    from jaxremat.mesh.axes import MeshShape

#: The share of a device's memory that JAX's allocator takes by default.
MEM_FRACTION = 0.75
MOST_MEMORY = 2**42  #: The most bytes that a device may be described with.
#: The kernels that run a step's matmuls: those that the autotuner chose on the device, a library's, or Triton fusions with
#: default tiles.
Matmuls = Literal["autotuned", "cublas", "triton"]
#: What a call of a library computes, as far as FLOPs are counted. An attention's gradient may have two kernels, of which one is
#: that of queries.
CallKind = Literal[
    "matmul",
    "attention",
    "attention gradient",
    "attention gradient of queries",
    "convolution",
    "convolution's filter gradient",
    "convolution's input gradient",
]


class Description(Protocol):
    """A device as its maker and XLA describe it. It is a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def description(self) -> str:
        """The device in words, as JAX names its kind."""
        ...

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Its generation, such as (9, 0). None where the maker has no such numbers."""
        ...

    @property
    def device_memory_size(self) -> int:
        """Bytes of its memory."""
        ...

    @property
    def peak_bf16_flops(self) -> int | None:
        """Peak FLOP/s of dense bf16 matmuls. None if unknown."""
        ...

    def to_text(self) -> str:
        """What XLA is told of the device where it isn't here."""
        ...


@dataclass(frozen=True)
class FusedAttention:
    """The fused attention that JAX has for a chip.

    Attributes:
        name: the value of `--attention`.
        title: its name in sentences.
        checked_in: the folder of JAX's modules that check whether it takes some shapes.
        takes: what it takes, in words.
        has_softcap: whether its kernel caps scores.
        names_residuals: whether it gives what it saves a checkpoint name.
        block_tokens: the tokens whose multiples its blocks are (`--attention-block`). 0 if a caller can't choose blocks.
    """

    name: str
    title: str
    checked_in: str
    takes: str
    has_softcap: bool = False
    names_residuals: bool = False
    block_tokens: int = 0

    def attend(
        self,
        q_BTNH: Any,
        k_BTKH: Any,
        v_BTKH: Any,
        *,
        scale: float | None,
        window: int,
        softcap: float,
        block: int,
        name: str,
    ) -> Any:
        """Causal attention `[B, T, N, H]`, here that of `jax.nn.dot_product_attention`.

        Args:
            q_BTNH: the queries.
            k_BTKH: the keys.
            v_BTKH: the values.
            scale: what scores are multiplied by. None takes `H ** -0.5`.
            window: the tokens that a token sees, itself included. 0 for all before it.
            softcap: scores become `softcap * tanh(score / softcap)`, if `has_softcap`. 0 for no cap.
            block: the most tokens of a block, if it has `block_tokens`.
            name: the checkpoint name of what it saves, if `names_residuals`.
        """
        import jax

        local, fused = (window - 1, 0) if window else None, self.name
        how: dict[str, Any] = {"is_causal": True, "scale": scale, "local_window_size": local, "implementation": fused}
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, **how)


@dataclass(frozen=True)
class MatmulSwitch:
    """XLA's option that chooses the kernels of matmuls.

    Attributes:
        option: its name.
        on: the kernels where it is set.
        off: the kernels where it isn't.
        autotune: the option that says how much is tried out on a device that is here. `0` is nothing.
    """

    option: str
    on: Matmuls
    off: Matmuls
    autotune: str


@dataclass(frozen=True)
class CompilerOptions:
    """XLA's options for a chip, by what they are for.

    Attributes:
        deviceless: set where the device isn't here.
        repeatable: set so that each process computes the same bits.
        tuned_folder: the name of the one with the folder in which the autotuner's choices are stored.
        kernel_cache: the name of the one with the file in which compiled kernels are stored.
        matmuls: the one that chooses the kernels of matmuls.
        presets: the options of each `--xla-preset`, by its name.
        pool_presets: the presets under which XLA's program depends on the size of the allocator's pool.
        slow_presets: the presets under which a step compiles for many minutes. A plan is searched under the default preset, and
            its step is then compiled under the requested one.
        memory_limit: the name of the one with the MiB that a program may take. XLA rejects a larger program, with the bytes that
            it needs (`Chip.needed_bytes`). None where XLA compiles programs of any size.
    """

    deviceless: Mapping[str, Any] = field(default_factory=dict)
    repeatable: Mapping[str, Any] = field(default_factory=dict)
    tuned_folder: str | None = None
    kernel_cache: str | None = None
    matmuls: MatmulSwitch | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pool_presets: Collection[str] = ()
    slow_presets: Collection[str] = ()
    memory_limit: str | None = None

    @property
    def speaks_early(self) -> bool:
        """Whether XLA says within seconds that a program is too large.

        A program that fits compiles for minutes there.
        """
        return self.memory_limit is not None


class Chip(ABC):
    """One kind of device. There is one value of each kind, in `chips/catalog.py`.

    Attributes:
        platform: JAX's name of the platform to lower for.
        title: a device of it, in sentences.
        is_gpu: whether XLA's compiler of GPUs compiles for it.
        attention: the fused attention that `--attention auto` looks for. `attention_obstacle` says where it can't run.
        options: XLA's options.
        calls: what the calls of libraries compute, by the beginning of their target (a regular expression). The first counts. A
            kernel of Pallas has the target `pallas_call$NAME`.
        with_workspace: the targets of calls whose last result may be a workspace (a regular expression), or None.
        outside: what a process takes of a device beside the allocator's pool, in words.
        outside_needed: how much that is on a mesh, as far as it is known, in words.
        device_spaces: XLA's memory spaces that are the device's memory, where the program's code is in it too. None if all are,
            except for the host's, and the code isn't.
        mem_fraction: the share of a device's memory that a step may take by default.
        has_topologies: whether the chips of a node lie in a layout of their own (`--topology`).
    """

    platform: str
    title: str
    is_gpu: bool
    attention: FusedAttention
    options: CompilerOptions = CompilerOptions()
    calls: Sequence[tuple[str, CallKind]] = ()
    with_workspace: str | None = None
    outside: str = ""
    outside_needed: str = ""
    device_spaces: Collection[int] | None = None
    mem_fraction: float = MEM_FRACTION
    has_topologies: bool = False

    @abstractmethod
    def attention_obstacle(self, capability: tuple[int, int] | None) -> str:
        """What devices of a generation lack that the fused attention needs. Empty if nothing."""

    def devices_of_node(self, name_or_path: str) -> int | None:
        """How many devices a node has at most, unless `--nodes` says otherwise.

        None where one node has all of them.
        """
        return DEVICES_OF_NODE

    def lacks_bf16(self, capability: tuple[int, int] | None) -> bool:
        """Whether devices of a generation have no matmuls of bfloat16."""
        return False

    def passes_to_skip(self, capability: tuple[int, int] | None) -> tuple[str, ...]:
        """XLA's passes that change programs only for devices that aren't here, of a generation."""
        return ()

    def missing(self, text: str, first_line: str, *, is_here: bool) -> JaxrematError | None:
        """The error of what must be installed for the chip and isn't; None for other words.

        Args:
            text: XLA's words.
            first_line: the first line of them, shortened.
            is_here: whether the device is.
        """
        return None

    def rejection(self, text: str) -> tuple[str, str] | None:
        """The cause and the next step of a program that the chip can't run, by XLA's words.

        None if they aren't known.
        """
        return None

    def needed_bytes(self, text: str) -> int | None:
        """The bytes that a program needs which XLA rejected as too large, by XLA's words.

        None for other words.
        """
        return None

    # Devices that are here.

    @abstractmethod
    def is_here(self) -> bool:
        """Whether this machine has the driver. The file system alone is read, before JAX is set up."""

    @abstractmethod
    def attached(self) -> list[Any]:
        """JAX's devices, also those of other processes that run with this one.

        Empty if JAX has none.
        """

    def models(self) -> list[str]:
        """The models of the devices that the driver lists. The file system alone is read."""
        return []

    def capability_of(self, device: Any) -> tuple[int, int] | None:
        """The generation of a device of JAX's."""
        return None

    def speed_of_kind(self, device_kind: str, mesh: "MeshShape | None") -> "DeviceSpeed | None":
        """The rates of a device that is here. None if they aren't known."""
        return None

    def none_attached(self, deviceless: str) -> TargetError:
        """The error of `--target gpu` where JAX sees none.

        `deviceless` is a target that can be compiled for instead.
        """
        raise NotImplementedError(self.title)

    # Devices that aren't here.

    def names(self) -> tuple[str, ...]:
        """The names of those that can be compiled for."""
        return ()

    def describe(self, name_or_path: str, known: Sequence[str] = ()) -> tuple[str, Description]:
        """The name that records show, and the description, of a bundled device or of a text file.

        Args:
            name_or_path: the name, or the path.
            known: the names of all devices, which an error lists.

        Raises:
            TargetError: there is no such name or file, or its text is damaged.
        """
        raise NotImplementedError(self.title)

    def check_installed(self) -> None:
        """Checks that what compiling for devices that aren't here needs is installed.

        Raises:
            MissingDependencyError: something isn't. The message names it.
        """
        return

    def topology(self, name: str, text: str, shape: "MeshShape") -> Sequence[Any]:
        """JAX's devices for those of a description, on a mesh.

        Raises:
            TargetError: JAX is set up in a way that excludes them, or XLA rejects the description.
        """
        raise NotImplementedError(self.title)

    def text_with_pool(self, text: str, pool_bytes: int) -> str:
        """The text of a device on which XLA acts as on one whose allocator has `pool_bytes`."""
        return text

    def speed(self, described: Any, mesh: "MeshShape | None" = None) -> "DeviceSpeed | None":
        """The rates of a described device, from which times are predicted.

        None if one that is needed isn't known.
        """
        return None
