"""Measured times of single kernels, and what is interpolated from them.

A table is of one generation of a maker's chips. The rates in it are of kernels that run alone. For example, a table has bf16
matmuls of 2048 x 2048 x 2048 at 641e12 FLOP/s and of 4096 x 2048 x 2048 at 727e12, so that one of 3000 x 2048 x 2048 is expected
at 687e12. Between two sizes the logarithm of the rate is linear in the logarithm of the size. Above the largest size the rate is
that of the largest one. Below the smallest size the line is extended, but no product takes longer than a padded one.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Direction = Literal["forward", "backward"]
#: Of each collective, the sizes in a table whose bytes take no time, beginning with the smallest.
NUM_SMALL = 5


@dataclass(frozen=True)
class Product:
    """The shapes of a kernel's matmul: `batch` times [m, k] x [k, n].

    Attributes:
        batch: Number of matmuls.
        m: Rows of the product.
        n: Columns of the product.
        k: The dimension that is summed over.
        is_aligned: Whether the rows of all three matrices begin at multiples of 16 bytes. Kernels that load more than one
            element at a time need that. A vocabulary of 50,257 isn't aligned.
    """

    batch: int
    m: int
    n: int
    k: int
    is_aligned: bool = True

    @property
    def flops(self) -> int:
        """One multiply-add is two FLOPs."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """The shapes of a kernel's fused attention that its speed depends on."""

    direction: Direction
    head_size: int
    length: int


@dataclass(frozen=True, eq=False)
class Grid:
    """Rates at each point of a grid of sizes.

    Attributes:
        axes: By dimension, the sizes in rising order.
        rates: The rate at each point.
    """

    axes: tuple[tuple[int, ...], ...]
    rates: Mapping[tuple[int, ...], float]

    def at(self, sizes: Sequence[int]) -> float:
        """The rate at some sizes. Its logarithm is linear in that of each size between two points.

        Below the smallest size the line is extended. But a product takes no longer than one that is padded to that size, and its
        rate is no higher.
        """
        smallest = [max(size, axis[0]) for axis, size in zip(self.axes, sizes, strict=True)]
        most = self._on_line(smallest)
        padded = most * math.prod(sizes) / math.prod(smallest)
        return min(most, max(padded, self._on_line(sizes)))

    def _on_line(self, sizes: Sequence[int]) -> float:
        around = []
        for axis, size in zip(self.axes, sizes, strict=True):
            upper = min(max(bisect_left(axis, min(size, axis[-1])), 1), len(axis) - 1)
            low, high = axis[upper - 1], axis[upper]
            part = math.log(min(size, axis[-1]) / low) / math.log(high / low)
            around.append(((low, 1 - part), (high, part)))
        corners = itertools.product(*around)
        return math.exp(
            sum(
                math.prod(weight for _, weight in corner) * math.log(self.rates[tuple(size for size, _ in corner)])
                for corner in corners
            )
        )


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one generation of chips.

    Attributes:
        peak_flops: By element type, such as `bf16`, the peak FLOP/s of the chip that was measured.
        matmuls: By element type, the FLOP/s of matmuls by (batch, m, n, k), without their launch.
        attention: By direction and head size, and then by length, the FLOP/s of causal attention.
        collectives: By kind and number of devices, and then by bytes of the whole array, the seconds inside a node.
        node_bytes_per_s: The links of the nodes behind `collectives`, as in `Links`. They say nothing of other links.
        unaligned_share: Share of the peak FLOP/s that a matmul reaches that isn't aligned.
        training_share: Share of its speed alone that a kernel has in a training on several devices, where clocks are lower and
            devices wait for each other.
        beside_collective: How many times as long a kernel takes beside a collective.
    """

    peak_flops: Mapping[str, float]
    matmuls: Mapping[str, Grid]
    attention: Mapping[tuple[Direction, int], Mapping[int, float]]
    collectives: Mapping[tuple[str, int], Mapping[int, float]]
    node_bytes_per_s: float | None
    unaligned_share: float
    training_share: float
    beside_collective: float

    @property
    def most_share(self) -> float:
        """The largest share of the peak FLOP/s that a measured kernel reaches."""
        grids = [(kind, grid.rates) for kind, grid in self.matmuls.items()] + [
            ("bf16", of) for of in self.attention.values()
        ]
        return min(1.0, max((max(rates.values()) / self.peak_flops[kind] for kind, rates in grids), default=0.0))

    def matmul_share(self, product: Product, dtype: str) -> float | None:
        """The share of the peak FLOP/s that a matmul reaches alone, without its launch.

        None without a table of its type.
        """
        kind = "bf16" if dtype == "f16" else dtype
        if kind not in self.matmuls:
            return None
        share = self.matmuls[kind].at((product.batch, product.m, product.n, product.k)) / self.peak_flops[kind]
        return min(share, 1.0 if product.is_aligned else self.unaligned_share)

    def attention_share(self, attention: Attention) -> float | None:
        """The share of the peak FLOP/s that causal attention reaches alone.

        None without a table. Of the head sizes in the table, the nearest one counts.
        """
        heads = [head for direction, head in self.attention if direction == attention.direction]
        if not heads:
            return None
        nearest = min(heads, key=lambda head: abs(math.log(head / attention.head_size)))
        rates = self.attention[attention.direction, nearest]
        return _between(rates, min(max(attention.length, min(rates)), max(rates))) / self.peak_flops["bf16"]

    def collective_s(self, kind: str, num_devices: int, num_bytes: int) -> float | None:
        """Seconds of a collective inside a node, alone.

        None without a table of its kind and number of devices. Beyond the largest array the bandwidth is that of the largest one.
        """
        seconds = self.collectives.get((kind, num_devices))
        if not seconds or not num_bytes:
            return None
        largest = max(seconds)
        if num_bytes > largest:
            return seconds[largest] * num_bytes / largest
        return _between(seconds, max(num_bytes, min(seconds)))

    def latency_s(self, kind: str) -> float:
        """Seconds of a collective of few bytes inside a node, over as many devices as were measured.

        A kind without a table has those of the quickest kind. 0 if there is no table.
        """
        of_kind = {key: seconds for key, seconds in self.collectives.items() if key[0] == kind}
        if not of_kind:
            return min((self.latency_s(known) for known, _ in self.collectives), default=0.0)
        seconds = of_kind[max(of_kind)]
        return median(seconds[size] for size in sorted(seconds)[:NUM_SMALL])


def _between(values: Mapping[int, float], at: int) -> float:
    """The value at `at`, linear between two keys in the logarithms."""
    keys = sorted(values)
    above = keys[min(bisect_left(keys, at), len(keys) - 1)]
    below = max((key for key in keys if key < above), default=above)
    if above in (at, below):
        return values[above]
    part = math.log(at / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(values[below]) + part * math.log(values[above]))
