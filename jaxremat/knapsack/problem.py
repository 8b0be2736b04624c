"""A problem describes one layer's forward pass: its values, its operations, and their costs.

For each value that a policy can address there are three decisions: save it on the device, offload it to host memory, or save
it nowhere. The backward pass needs some values. Those that it needs and that aren't saved are recomputed, together with
everything that recomputing them needs.

`answer/layer_problem.py` makes a problem from a traced layer.
"""

import functools
import graphlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

#: The least seconds of any operation. Of two decisions that cost the same otherwise, the one with fewer operations wins.
LEAST_S = 1e-9


@dataclass(frozen=True)
class Value:
    """One intermediate result of the forward pass.

    Attributes:
        name: readable, stable and unique in the problem, for example `mlp/wi_0/dot_general`.
        num_bytes: bytes on the device.
        saveable: whether a policy can save it, by its checkpoint name or by the primitive that makes it.
        offloadable: whether a policy can offload it to host memory, which works by checkpoint name only.
        needed: whether the backward pass reads it.
        save_s: seconds that saving it costs in addition to its bytes times `Problem.save_s_per_byte`.
        is_copied: whether the backward pass of a layer copies the value out of the stack in which it is saved.
        is_read_first: whether the layer's gradient reads the value before anything that is recomputed, and not later. Unrolled
            layers have freed it then before their gradient takes the most memory.
        num_layers: number of layers whose bytes and seconds these are. It is above 1 only where a problem stands for several
            kinds of layers (`shared_budget.py`).
    """

    name: str
    num_bytes: int
    saveable: bool = True
    offloadable: bool = True
    needed: bool = False
    save_s: float = 0.0
    is_copied: bool = False
    is_read_first: bool = False
    num_layers: int = 1


@dataclass(frozen=True)
class Op:
    """One operation. Values are given as indices into the problem's values.

    Attributes:
        name: for people who read it.
        inputs: the values that it reads.
        outputs: the values that it makes. Every value except the problem's inputs has exactly one producer.
        recompute_s: seconds that running it once more costs, with fusion into its neighbours taken into account.
        flops: FLOPs of the matmuls, attention and convolutions in it.
        together: whether its outputs can only be saved all or none. Fused attention is like that: a policy saves its output
            and its softmax statistics by one primitive.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recompute_s: float
    flops: int = 0
    together: bool = False


@dataclass(frozen=True)
class Problem:
    """One layer's forward pass.

    Attributes:
        values: all values, in any order.
        ops: all operations, in any order.
        inputs: the values that exist whatever a policy saves: the layer's input and its parameters. They cost nothing.
        save_s_per_byte: seconds per saved byte, for writing and reading it. `Value.save_s` comes on top.
        offload_s_per_byte: seconds per offloaded byte, for the part of its host transfers that no kernel hides.

    Raises:
        ValueError: bytes, seconds or prices that are negative or not finite; an index that no value has; a value that isn't
            an input and hasn't exactly one producer, or an input that has one; operations that need each other in a circle.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    save_s_per_byte: float
    offload_s_per_byte: float

    def __post_init__(self):
        prices = [self.save_s_per_byte, self.offload_s_per_byte]
        costs = [*prices, *(op.recompute_s for op in self.ops), *(value.save_s for value in self.values)]
        costs += [value.num_bytes for value in self.values]
        if wrong := [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]:
            raise ValueError(f"bytes, seconds and prices are finite and not negative, got {wrong}")
        made, count = sorted([*self.inputs, *(v for op in self.ops for v in op.outputs)]), len(self.values)
        if made != list(range(count)):
            raise ValueError(f"every value is an input or made by exactly one operation, got {made} of {count}")
        for op in self.ops:
            if not all(0 <= v < count for v in op.inputs):
                raise ValueError(f"{op.name} reads {op.inputs}, and there are the values 0 to {count - 1}")
        graphlib.TopologicalSorter(dict(enumerate(self.reads))).prepare()  # its CycleError is a ValueError

    @functools.cached_property
    def producers(self) -> dict[int, int]:
        """For each value that isn't an input, the index of the operation that makes it."""
        return {v: index for index, op in enumerate(self.ops) for v in op.outputs}

    @functools.cached_property
    def reads(self) -> list[set[int]]:
        """For each operation, the operations that make what it reads."""
        return [{self.producers[v] for v in op.inputs if v in self.producers} for op in self.ops]

    def is_free(self, op: Op) -> bool:
        """Whether running an operation once more costs next to nothing, as adding a bias does.

        Corrected seconds may be above the least, by less than twice.
        """
        return op.recompute_s <= 2 * LEAST_S * max((self.values[v].num_layers for v in op.outputs), default=1)

    def num_bytes(self, chosen: Iterable[int]) -> int:
        """Bytes of these values on the device."""
        return sum(self.values[v].num_bytes for v in chosen)

    def save_seconds(self, saved: Iterable[int]) -> float:
        """Seconds that saving these values costs."""
        saved = tuple(saved)
        return self.num_bytes(saved) * self.save_s_per_byte + math.fsum(self.values[v].save_s for v in saved)


@dataclass(frozen=True)
class Decision:
    """The indices of values that a policy saves on the device, and of those that it offloads.

    All other values are recomputed where they are needed.
    """

    save: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()


def union(first: Decision, second: Decision) -> Decision:
    """The decision that saves what either of the two saves."""
    return Decision(first.save | second.save, first.offload | second.offload)
