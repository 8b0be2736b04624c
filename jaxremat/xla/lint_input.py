"""The lint's input and its findings, and the functions that several rules share.

The input joins a compiled step with the requests that its traced program makes, such as checkpoint names and policies.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jaxremat.chips.speed import DeviceSpeed
from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes
from jaxremat.mesh.sharding import LeafOnMesh
from jaxremat.policy.spec import Policy
from jaxremat.units import gib
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Buffer, MemoryMap, held
from jaxremat.xla.compile import Compilation
from jaxremat.xla.dump import Frames, parse_frames, short_source
from jaxremat.xla.exchanges import Exchange
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.memory import CompiledMemory
from jaxremat.xla.step_facts import Finding
from jaxremat.xla.traced import Traced, logit_sizes

#: Who reads the remedies of the rules, and so what a remedy can be. code: whoever wrote the function. with_policy: whoever
#: wrote the loss of a `Workload`. flags: a command's user. flags with loss: a command's user whose workload has
#: the losses of `--loss`.
Remedies = Literal["code", "with_policy", "flags", "flags with loss"]
#: How a policy is applied, by reader.
_UNDER_POLICY: dict[Remedies, str] = {
    "code": "jaxremat.remat(layer, {policy!r})",
    "with_policy": "jaxremat.with_policy(loss, {policy!r})",
    "flags": "--policy {policy}",
    "flags with loss": "--policy {policy}",
}

#: The rules report nothing that takes less than this share of a step's bytes.
SMALL = 0.01
#: A loop's residuals, and attention's scores, are much of a step from this share of its bytes on.
MUCH = 0.3


@dataclass(frozen=True, kw_only=True)
class LintInput:
    """The input of the rules.

    Attributes:
        module: the compiled program.
        memory: the bytes that the program needs.
        traced: the checkpoint names, checkpoints and loops of the traced program.
        memory_map: the buffers of the program; None if no dump was read.
        policy: the policy of the layers; None if it isn't one of the grammar.
        remedies: what a remedy can be: a flag of this package's commands, or code.
        chunked_bytes: `total_bytes` of the same step, compiled with the chunked loss; None if that wasn't compiled.
        jaxpr: the traced program.
        mesh: the devices that the program runs on. The program and the memory are those of one of them.
        arguments: how the arguments lie on the mesh. Empty for one device.
        exchanges: what the collectives of the program exchange. Empty for one device.
        num_elsewhere: constraints on a device of this machine, which were dropped.
        frames: the Python stacks of the instructions of a program for several devices.
        fused_attention: what `jax.nn.dot_product_attention` calls the fused attention of the device. Empty if it has none.
        speed: what the device reaches. None if it isn't known.
        compared_meshes: the meshes among which the command chose this one, so that no other one of them is a remedy.
    """

    module: hlo.Module
    memory: CompiledMemory
    traced: Traced
    memory_map: MemoryMap | None = None
    policy: Policy | None = None
    remedies: Remedies = "code"
    chunked_bytes: int | None = None
    jaxpr: Any = None
    mesh: MeshAxes = ONE_DEVICE
    arguments: tuple[LeafOnMesh, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    num_elsewhere: int = 0
    frames: Frames = Frames({}, {})
    fused_attention: str = ""
    speed: DeviceSpeed | None = None
    compared_meshes: tuple[str, ...] = ()

    @functools.cached_property
    def logit_sizes(self) -> frozenset[int]:
        """The numbers of words, or of classes, in the loss."""
        return logit_sizes(self.jaxpr)

    @property
    def small_bytes(self) -> int:
        """The number of bytes up to which the rules report nothing."""
        return int(SMALL * self.memory.total_bytes)

    @property
    def has_flags(self) -> bool:
        """Whether the step is one of this package's commands."""
        return self.remedies in ("flags", "flags with loss")

    def under_policy(self, policy: object) -> str:
        """The remedy that applies a policy, such as `--policy dots+attention`."""
        return _UNDER_POLICY[self.remedies].format(policy=str(policy))


#: A rule finds what it is named after in a compiled step.
Rule = Callable[[LintInput], Iterable[Finding]]


def lint_input(compilation: Compilation, **known: Any) -> LintInput:
    """The lint's input for a compiled step.

    Args:
        compilation: the compiled step. If its dump was read, the result has the memory map.
        known: values of further fields of `LintInput`, such as `policy`.
    """
    if compilation.dump is not None:
        known.setdefault("memory_map", compilation.memory_map)
    known.setdefault("exchanges", compilation.exchanges)
    mesh = compilation.mesh
    return LintInput(
        module=compilation.module,
        memory=compilation.memory,
        traced=compilation.traced,
        jaxpr=compilation.jaxpr,
        mesh=mesh,
        num_elsewhere=compilation.num_elsewhere,
        frames=parse_frames(compilation.hlo_text) if mesh.num_devices > 1 else Frames({}, {}),
        **known,
    )


def at_peak(memory_map: MemoryMap | None) -> list[tuple[Buffer, int]]:
    """The buffers at the peak, the largest first, each with the number of bytes counted for it."""
    return held(memory_map, memory_map.peak) if memory_map else []


def residuals(facts: LintInput) -> dict[str, list[tuple[Buffer, int]]]:
    """The residuals at the peak that several layers have, by label, the largest first.

    Each buffer comes with the number of bytes counted for it.
    """
    groups: dict[str, list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in at_peak(facts.memory_map):
        if buffer.category == "residuals":
            groups[buffer.label].append((buffer, size))
    of_layers = {label: some for label, some in groups.items() if sum(buffer.num_layers for buffer, _ in some) > 1}
    return dict(sorted(of_layers.items(), key=lambda item: -sum(size for _, size in item[1])))


def num_elements(buffer: Buffer) -> int:
    """Number of elements of a buffer's value. For a stack the elements of all layers count."""
    return sum(shape.num_elements for shape in hlo.parse_shapes(buffer.shape))


def listed(groups: dict[str, list[tuple[Buffer, int]]], most: int = 3) -> str:
    """The first `most` groups of buffers as text: label, layers, bytes, shape and line of each.

    An example of a group's text is `mlp_out x 12 (1.50 GiB, bf16[12,32,1024,768], model/layers.py:63)`.
    """
    parts = [
        f"{label} x {sum(buffer.num_layers for buffer, _ in some)} ({gib(sum(size for _, size in some))}, "
        f"{some[0][0].shape}, {line_of(some[0][0])})"
        for label, some in list(groups.items())[:most]
    ]
    return ", ".join(parts) + (f" and {len(groups) - most} more" if len(groups) > most else "")


def line_of(buffer: Buffer) -> str:
    """The line that made a buffer; its scope if the line is unknown."""
    return short_source(buffer.source) or plain_scope(buffer.op_name)


def largest_logits(memory_map: MemoryMap | None, sizes: Container[int] = ()) -> tuple[Buffer, int] | None:
    """The largest buffer at the peak and its bytes, if it is the logits' or the loss's, or None.

    A buffer with as many elements as a buffer of the logits or the loss counts too. So does one of `sizes` elements that the
    step makes.
    """
    holders = at_peak(memory_map)
    of_loss = {num_elements(buffer) for buffer, _ in holders if buffer.category == "logits and loss"} - {0}
    size = num_elements(holders[0][0]) if holders else 0
    is_made = bool(holders) and holders[0][0].category in ("residuals", "recompute", "working set", "logits and loss")
    return holders[0] if size in of_loss or (is_made and size in sizes) else None
