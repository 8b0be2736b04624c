"""Measured times of single kernels, and what is interpolated from them.

A table is of one generation of a maker's chips. The rates in it are of kernels that run alone. For example, a table has bf16
matmuls of 2048 x 2048 x 2048 at 641e12 FLOP/s and of 4096 x 2048 x 2048 at 727e12, so that one of 3000 x 2048 x 2048 is expected
at 687e12. Between two sizes the logarithm of the rate is linear in the logarithm of the size. Above the largest size the rate is
that of the largest one. Below the smallest size the line is extended.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]


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
class Tables:
    """The tables of one generation of chips.

    Attributes:
        peak_flops: By element type, such as `bf16`, the peak FLOP/s of the chip that was measured.
        matmuls: By element type, and then by (batch, m, n, k), the FLOP/s of a matmul. The sizes form a grid.
        matmul_launch_s: Seconds of a launch that are in the times behind `matmuls`.
        attention: By direction and head size, and then by length, the FLOP/s of causal attention.
        collectives: By kind and number of devices, and then by bytes of the whole array, the seconds inside a node.
        unaligned_share: Share of the peak FLOP/s that a matmul reaches that isn't aligned.
        training_share: Share of its speed alone that a kernel has in a training on several devices, where clocks are lower and
            devices wait for each other.
        beside_collective: How many times as long a kernel takes beside a collective.
    """

    peak_flops: Mapping[str, float]
    matmuls: Mapping[str, Mapping[tuple[int, int, int, int], float]]
    matmul_launch_s: float
    attention: Mapping[tuple[Direction, int], Mapping[int, float]]
    collectives: Mapping[tuple[str, int], Mapping[int, float]]
    unaligned_share: float
    training_share: float
    beside_collective: float

    def matmul_share(self, product: Product, dtype: str) -> float | None:
        """The share of the peak FLOP/s that a matmul reaches alone, without its launch.

        None without a table of its type.
        """
        kind = "bf16" if dtype == "f16" else dtype
        rates, peak = self.matmuls.get(kind), self.peak_flops.get(kind, 0.0)
        if not rates:
            return None
        sizes = (product.batch, product.m, product.n, product.k)
        flops_per_s = math.exp(
            _interpolated({size: math.log(self._alone(size, rates)) for size in _corners(rates, sizes)}, sizes)
        )
        most = 1.0 if product.is_aligned else self.unaligned_share
        return min(flops_per_s / peak, most)

    def _alone(self, size: tuple[int, ...], rates: Mapping[tuple[int, ...], float]) -> float:
        """FLOP/s without the launch, which is at most 70 % of a measured time."""
        flops = 2 * math.prod(size)
        seconds = flops / rates[size]
        return flops / max(seconds - self.matmul_launch_s, 0.3 * seconds)

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


def _between(values: Mapping[int, float], at: int) -> float:
    """The value at `at`, linear between two keys in the logarithms."""
    keys = sorted(values)
    above = keys[min(bisect_left(keys, at), len(keys) - 1)]
    below = max((key for key in keys if key < above), default=above)
    if above in (at, below):
        return values[above]
    part = math.log(at / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(values[below]) + part * math.log(values[above]))


def _axes(sizes: Sequence[Sequence[int]], at: Sequence[int]) -> list[tuple[int, int, float]]:
    """Of each dimension, the sizes of the grid around `at`, and how far `at` is between them."""
    axes = []
    for known, value in zip(sizes, at, strict=True):
        clamped = min(value, known[-1])
        second = min(max(bisect_left(known, clamped), 1), len(known) - 1)
        low, high = known[second - 1], known[second]
        axes.append((low, high, math.log(clamped / low) / math.log(high / low)))
    return axes


def _grid(rates: Mapping[tuple[int, ...], float]) -> list[list[int]]:
    return [sorted(set(sizes)) for sizes in zip(*rates, strict=True)]


def _corners(rates: Mapping[tuple[int, int, int, int], float], at: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The points of the grid around `at`."""
    return list(itertools.product(*((low, high) for low, high, _ in _axes(_grid(rates), at))))  # type: ignore[arg-type]


def _interpolated(values: Mapping[tuple[int, ...], float], at: Sequence[int]) -> float:
    """The value at `at`, linear in each dimension's logarithm between the corners around it."""
    axes = _axes(_grid(values), at)
    total = 0.0
    for corner in itertools.product((0, 1), repeat=len(axes)):
        weight = math.prod(part if upper else 1 - part for (_, _, part), upper in zip(axes, corner, strict=True))
        total += weight * values[tuple(high if upper else low for (low, high, _), upper in zip(axes, corner, strict=True))]
    return total
