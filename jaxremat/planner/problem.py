"""The decision a remat policy makes over one layer, as data: values, the operations that produce them, and what each costs.

A problem is a bipartite graph of one layer's forward pass. For each value that a policy can address there are three decisions:
save it, offload it, or neither; what the backward pass needs and isn't kept is recomputed, with everything that recomputing
it needs. `answer/layer_problem.py` makes one of a traced layer, `solve.py` solves it, `evaluate.py` replays a decision.
"""

import graphlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

#: Seconds that any operation takes at least: of equally cheap decisions the one that runs the fewest again is the best.
LEAST_S = 1e-9


@dataclass(frozen=True)
class Value:
    """One intermediate of the forward pass.

    Attributes:
        name: readable, stable, unique in the problem: `mlp/wi_0/dot_general`.
        num_bytes: on the device, of one layer.
        saveable: whether a policy can keep it (by checkpoint name, or by the primitive that makes it).
        offloadable: whether a policy can keep it in host memory (by checkpoint name only).
        needed: whether the backward pass reads it.
        save_s: seconds that saving it costs beside its share of `Problem.save_s_per_byte`.
    """

    name: str
    num_bytes: int
    saveable: bool = True
    offloadable: bool = True
    needed: bool = False
    save_s: float = 0.0


@dataclass(frozen=True)
class Op:
    """One operation: values in, values out (indices into the problem's values).

    Attributes:
        name: for people.
        inputs: values it reads.
        outputs: values it makes; every value but the problem's inputs has exactly one producer.
        recompute_s: seconds that running it once more costs, fusion with its neighbours accounted for.
        flops: of matmuls, attention and convolutions in it.
        together: its outputs are kept all or none (fused attention: output and softmax statistics, by primitive).
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recompute_s: float
    flops: int = 0
    together: bool = False


@dataclass(frozen=True)
class Problem:
    """One layer's forward pass. `inputs` are values that are there in any case (the layer's input, parameters): free.

    `save_s_per_byte` prices writing and reading any saved value, beside what is its own (`Value.save_s`), and
    `offload_s_per_byte` the part of a trip to the host and back that nothing hides. Operations may come in any order.

    Raises:
        ValueError: bytes, seconds or prices that are negative or not finite, an index that no value has, a value without
            exactly one producer (inputs: with any), or operations that need each other in a circle.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    save_s_per_byte: float
    offload_s_per_byte: float

    def __post_init__(self):
        prices = [self.save_s_per_byte, self.offload_s_per_byte]
        costs = [*prices, *(op.recompute_s for op in self.ops), *(value.save_s for value in self.values)]
        if not all(math.isfinite(cost) and cost >= 0 for cost in [*costs, *(value.num_bytes for value in self.values)]):
            raise ValueError("bytes, seconds and prices are finite and not negative")
        made = sorted([*self.inputs, *(v for op in self.ops for v in op.outputs)])
        if made != list(range(len(self.values))):
            raise ValueError("every value is either one of the problem's inputs or made by exactly one operation")
        if not all(0 <= v < len(self.values) for op in self.ops for v in op.inputs):
            raise ValueError(f"an operation reads a value that isn't one of the {len(self.values)}")
        producer = {v: index for index, op in enumerate(self.ops) for v in op.outputs}
        reads = {index: {producer[v] for v in op.inputs if v in producer} for index, op in enumerate(self.ops)}
        graphlib.TopologicalSorter(reads).prepare()  # its CycleError is a ValueError

    def save_seconds(self, saved: Iterable[int]) -> float:
        """What saving these values costs."""
        values = [self.values[v] for v in saved]
        return sum(value.num_bytes for value in values) * self.save_s_per_byte + math.fsum(value.save_s for value in values)


@dataclass(frozen=True)
class Decision:
    """The values (indices) that a policy keeps on the device, and those it keeps in host memory; the rest is recomputed."""

    save: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
