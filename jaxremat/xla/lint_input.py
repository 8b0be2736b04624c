"""What the lint looks at: a compiled step with what it asked for, and what several rules want to know of it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxremat.policy.spec import Policy
from jaxremat.units import gib
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Buffer, MemoryMap, held
from jaxremat.xla.compile import Compilation
from jaxremat.xla.dump import short_source
from jaxremat.xla.memory import CompiledMemory
from jaxremat.xla.origin import plain_scope
from jaxremat.xla.traced import Traced, read_traced

#: What takes less of a step's bytes isn't worth a word.
SMALL = 0.01


@dataclass(frozen=True)
class Finding:
    """Something that is likely not meant.

    Attributes:
        rule: its name, a key of `RULES`.
        evidence: what was seen, in numbers.
        remedy: a flag or code to paste.
        num_bytes: on the device, that it is about; 0 where it is about time.
        source: `file:line` of the code it is about, with the whole path; empty where there is none.
    """

    rule: str
    evidence: str
    remedy: str
    num_bytes: int = 0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class LintInput:
    """What the rules look at.

    Attributes:
        module: the compiled program.
        memory: its bytes.
        traced: what it asked for.
        memory_map: who holds the bytes; None where no dump was kept.
        policy: the policy of the layers, where it is one of the grammar.
        flags: whether a remedy can be a flag of this package's commands; else it is code.
        chunked_bytes: `total_bytes` of the same step with the chunked loss, compiled; None where it wasn't.
    """

    module: hlo.Module
    memory: CompiledMemory
    traced: Traced
    memory_map: MemoryMap | None = None
    policy: Policy | None = None
    flags: bool = False
    chunked_bytes: int | None = None

    @property
    def small_bytes(self) -> int:
        """Bytes below which nothing is said."""
        return int(SMALL * self.memory.total_bytes)


def lint_input(compilation: Compilation, **known: Any) -> LintInput:
    """The facts of a compiled step; `known` are fields of `LintInput` beside it. With its dump, the memory map is among them."""
    if compilation.dump is not None:
        known.setdefault("memory_map", compilation.memory_map)
    traced = read_traced(compilation.jaxpr)
    return LintInput(module=compilation.module, memory=compilation.memory, traced=traced, **known)


def executed(module: hlo.Module) -> Iterator[tuple[hlo.Computation, hlo.Instruction, int]]:
    """Every instruction that runs, fusions and loops opened, and how often it does."""
    waiting = [(module.entry_computation, 1)]
    while waiting:
        computation, times = waiting.pop()
        for i in computation.instructions:
            yield computation, i, times
            if i.opcode in ("fusion", "call", "while", "conditional", "custom-call") or i.opcode.endswith("-start"):
                waiting += [(module.computations[name], times * (i.trip_count or 1)) for name in i.called]


def residuals(facts: LintInput) -> dict[str, list[tuple[Buffer, int]]]:
    """The residuals at the peak that several layers have, by label, the largest first."""
    groups: dict[str, list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in held(facts.memory_map, facts.memory_map.peak) if facts.memory_map else []:
        if buffer.category == "residuals":
            groups[buffer.label].append((buffer, size))
    of_layers = {label: some for label, some in groups.items() if sum(buffer.num_layers for buffer, _ in some) > 1}
    return dict(sorted(of_layers.items(), key=lambda item: -sum(size for _, size in item[1])))


def num_elements(buffer: Buffer) -> int:
    """Elements of a buffer's value, all layers' where it is stacked."""
    return sum(shape.num_elements for shape in hlo.parse_shapes(buffer.shape))


def listed(groups: dict[str, list[tuple[Buffer, int]]], most: int = 3) -> str:
    """Groups of buffers in words: label, layers, bytes, shape and line of each; the first `most`."""
    parts = [
        f"{label} x {sum(buffer.num_layers for buffer, _ in some)} ({gib(sum(size for _, size in some))}, "
        f"{some[0][0].shape}, {line_of(some[0][0])})"
        for label, some in list(groups.items())[:most]
    ]
    return ", ".join(parts) + (f" and {len(groups) - most} more" if len(groups) > most else "")


def line_of(buffer: Buffer) -> str:
    """The line that made a buffer, else its scope."""
    return short_source(buffer.source) or plain_scope(buffer.op_name)


def largest_logits(memory_map: MemoryMap | None) -> tuple[Buffer, int] | None:
    """The largest buffer at the peak with its bytes, where it is of the logits or the loss, or as large as one that is."""
    holders = held(memory_map, memory_map.peak) if memory_map else []
    of_loss = {num_elements(buffer) for buffer, _ in holders if buffer.category == "logits and loss"}
    return holders[0] if holders and num_elements(holders[0][0]) in of_loss - {0} else None
