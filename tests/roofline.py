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
#: A fast device.
SPEED = DeviceSpeed(
    bf16_flops=1e15,
    f32_flops=5e14,
    bandwidth_bytes_per_s=3e12,
    host_link_bytes_per_s=5e10,
    clocks_per_s=1e12,
    calibration=uniform(0.5, 2e-6),
)
#: A loop of a matmul and a copy, whose trip count is `{trips}`.
LOOP = """HloModule m, is_scheduled=true

%square (a.0: f32[2048,2048]) -> f32[2048,2048] {{
  %a.0 = f32[2048,2048]{{1,0}} parameter(0)
  ROOT %dot.0 = f32[2048,2048]{{1,0}} dot(%a.0, %a.0), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%body (b: (s32[], f32[2048,2048])) -> (s32[], f32[2048,2048]) {{
  %b = (s32[], f32[2048,2048]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %m = f32[2048,2048]{{1,0}} get-tuple-element(%b), index=1
  %f = f32[2048,2048]{{1,0}} fusion(%m), kind=kCustom, calls=%square
  %c = f32[2048,2048]{{1,0}} copy(%f)
  ROOT %t = (s32[], f32[2048,2048]{{1,0}}) tuple(%i, %c)
}}

%condition (d: (s32[], f32[2048,2048])) -> pred[] {{
  %d = (s32[], f32[2048,2048]{{1,0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (e: (s32[], f32[2048,2048])) -> (s32[], f32[2048,2048]) {{
  %e = (s32[], f32[2048,2048]{{1,0}}) parameter(0)
  ROOT %w = (s32[], f32[2048,2048]{{1,0}}) while(%e), condition=%condition, body=%body{trips}
}}
"""
