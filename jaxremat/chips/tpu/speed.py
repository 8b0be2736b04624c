"""The rates of TPUs: XLA's cycles, shares of the peaks, and links.

XLA's compiler of TPUs writes beside each fusion how many clock cycles it takes, by its own estimate. A matmul takes those.
Kernels without an estimate, such as those of splash attention, and kernels without a matmul take the longer time of their FLOPs
and their bytes. The estimates of the latter are left aside: they have a broadcast at a seventh of the memory's bandwidth.

The numbers of a generation are fitted to published steps. One without such steps has none, and no times are predicted for it.
"""

import math

from jaxremat.chips.speed import Calibration, DeviceSpeed, Protocol
from jaxremat.chips.tpu.device import TpuDescription, layout_of
from jaxremat.chips.tpu.links import Torus
from jaxremat.mesh.axes import ONE_DEVICE, MeshShape

#: How collectives send inside a slice: at the links' whole bandwidth, after a microsecond for the first hop.
ICI = Protocol(base_s=1e-6, node_hop_s=0.0, network_hop_s=0.0, share=1.0)


def tpu_speed(tpu: TpuDescription, mesh: MeshShape | None = None) -> DeviceSpeed | None:
    """The rates of predicted times.

    None if no published step says how fast the generation is, or if the bandwidth of a used link is unknown.
    """
    fitted = tpu.fitted
    if fitted is None or tpu.host_link_bandwidth is None:
        return None
    shape = mesh or ONE_DEVICE
    of_slice, network = shape.num_devices // shape.nodes, tpu.network_bandwidth
    if shape.network_gbps is not None:
        network = shape.network_gbps * 1e9 / 8 / of_slice
    if tpu.link_bandwidth is None or (shape.nodes > 1 and network is None):
        return None
    layout = tuple(int(size) for size in layout_of(tpu, of_slice, shape.topology).split("x"))
    links = Torus(shape.num_devices, of_slice, tpu.link_bandwidth, network, (ICI,), layout=layout)
    return DeviceSpeed(
        bf16_flops=tpu.peak_bf16_flops,
        f32_flops=tpu.peak_bf16_flops,  # XLA's default for float32 matmuls is bfloat16
        bandwidth_bytes_per_s=tpu.memory_bandwidth,
        host_link_bytes_per_s=tpu.host_link_bandwidth,
        clocks_per_s=fitted.cycles_per_s,
        calibration=Calibration(
            flops_share=(("matmul", fitted.matmul_share), ("attention", fitted.attention_share)),
            bandwidth_share=(("elementwise", fitted.bandwidth_share),),
            launch_s=0.0,
            threads_per_clock=math.inf,
            elements_per_thread=1,
            error=fitted.error,
            source=fitted.source,
        ),
        links=links if mesh else None,
        cycles_per_s=fitted.cycles_per_s,
        several=(-fitted.error, fitted.error),
        paired_error=fitted.paired_error,
    )
