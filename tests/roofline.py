"""A plain roofline, whose times can be computed by hand."""

import math

from jaxremat.chips.speed import Calibration, DeviceSpeed


def uniform(share: float, launch_s: float) -> Calibration:
    """A calibration in which kernels of every class reach the same share of the peaks."""
    return Calibration((("matmul", share),), (("elementwise", share),), launch_s, math.inf, 1, 0.0, "none")


#: A slow device, of which kernels reach half of the peaks: 1e9 bytes and, in float32, 5e11 FLOPs a second.
SLOW = DeviceSpeed(
    bf16_flops=2e12,
    f32_flops=1e12,
    bandwidth_bytes_per_s=2e9,
    host_link_bytes_per_s=1e8,
    clocks_per_s=1e12,
    calibration=uniform(0.5, 1e-6),
)
