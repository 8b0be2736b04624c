"""The links of a slice of TPUs.

A slice is a grid of chips, each of which is linked with its neighbours along every axis of the layout. An axis may be closed to
a ring: one of 16 chips in two dimensions, and in three the axes of a slice of whole cubes of 4x4x4. XLA sends along all axes that
a group of devices spans at once, and both ways around a ring. For example, 8 chips of v6e are `2x4`. A device has one link along
each axis at the least, so an all-gather of 1e9 bytes over all 8 takes 4.4 ms at 100e9 bytes/s a link.

References:
    https://jax-ml.github.io/scaling-book/tpus and /sharding, by Google DeepMind.
    https://cloud.google.com/tpu/docs/v5p: slices smaller than a cube have no wrap-around links.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxremat.chips.speed import Links


@dataclass(frozen=True)
class Torus(Links):
    """The links of slices.

    A slice is a node, and `node_bytes_per_s` is what one link moves in one direction.

    Attributes:
        layout: chips along each axis of a slice, such as (2, 4).
    """

    layout: tuple[int, ...] = ()

    def ring_bytes_per_s(self, group: Sequence[int]) -> float:
        return self.node_bytes_per_s * max(1, sum(self._links(axis, size) for axis, size in self._spans(group)))

    def exchange_bytes_per_s(self, group: Sequence[int]) -> float:
        # Half of all bytes cross the middle of each axis. `collective_seconds` divides by it what a device sends to the others.
        shares = [4 * self._links(axis, size) / size for axis, size in self._spans(group)]
        return self.node_bytes_per_s * min(shares, default=1.0) * (len(group) - 1) / len(group)

    def _links(self, axis: int, size: int) -> int:
        """Links of a device along an axis of which a group spans `size` chips.

        They are those in a ring, or at the end of a line.
        """
        closes = all(along % 4 == 0 for along in self.layout) if len(self.layout) == 3 else size % 16 == 0
        is_ring = size == self.layout[axis] and closes
        return 2 if is_ring else 1

    def _spans(self, group: Sequence[int]) -> list[tuple[int, int]]:
        """The axes along which the devices of a group differ, with how many chips they span."""
        places = [place_of(self.number(device) % self.devices_of_node, self.layout) for device in group]
        sizes = [len({*along}) for along in zip(*places, strict=True)]
        return [(axis, size) for axis, size in enumerate(sizes) if size > 1]


def place_of(number: int, layout: Sequence[int]) -> tuple[int, ...]:
    """Where the chip of a number is in a slice, in the order of libtpu's topologies.

    The chips of a host come one after the other, which are 2x2 where the layout has so many. `place_of(4, (4, 4))` is (2, 0).
    """
    host = (2, 2) if all(size % 2 == 0 for size in layout[:2]) else (1, 1)
    number, in_host = divmod(number, math.prod(host))
    place = list[int]()
    for axis, size in enumerate(layout):
        chips = host[axis] if axis < len(host) else 1
        number, of_hosts = divmod(number, size // chips)
        in_host, of_chips = divmod(in_host, chips)
        place.append(of_hosts * chips + of_chips)
    return tuple(place)
