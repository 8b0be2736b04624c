"""The rates of NVIDIA's GPUs: peaks, links, and how NCCL sends.

References:
    NCCL, `src/graph/tuning.cc`: latencies of its protocols and the number of steps. `src/graph/topo.h`: bytes/s of one NVLink.
"""

from jaxremat.chips.nvidia.calibration import load_calibration
from jaxremat.chips.nvidia.gpu import GpuDescription
from jaxremat.chips.nvidia.tables import load_tables
from jaxremat.chips.speed import DeviceSpeed, Links, Protocol
from jaxremat.mesh.axes import MeshShape

#: The least compute capability with bfloat16 and TF32 in its tensor cores.
TENSOR_FLOAT = (8, 0)
#: NCCL's protocols LL and Simple in a ring. LL sends a flag beside every 4 bytes: half of what it sends is data.
NCCL = (Protocol(6.6e-6, 0.6e-6, 2.7e-6, 0.5), Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0))

#: Fitted to gradients of embeddings on an H100, of 4,096 to 65,536 tokens (python -m experiments.kernel_tables --parts scatter).
ROW_WAIT_S = 8.2e-10


def speed_of(gpu: GpuDescription, mesh: MeshShape | None = None) -> DeviceSpeed | None:
    """The rates of predicted times; None if the peak or a used link's bandwidth is unknown.

    A GPU below compute capability 8.0 has no TF32, and its bfloat16 matmuls run in float32. Their peak is that of the clock in
    training, which XLA's text doesn't have.
    """
    has_tf32, clock_ghz = gpu.compute_capability >= TENSOR_FLOAT, gpu.sustained_clock_ghz
    plain = 2 * gpu.core_count * gpu.fpus_per_core * 1e9  # for each GHz
    in_float32 = clock_ghz and plain * clock_ghz
    bf16 = gpu.peak_bf16_flops if has_tf32 else in_float32
    if bf16 is None or gpu.host_link_bandwidth is None:
        return None
    links = None
    if mesh is not None:
        of_node, network = mesh.num_devices // mesh.nodes, gpu.network_bandwidth
        if mesh.network_gbps is not None:
            network = mesh.network_gbps * 1e9 / 8 / of_node
        if gpu.node_link_bandwidth is None or (mesh.nodes > 1 and network is None):
            return None
        links = Links(mesh.num_devices, of_node, gpu.node_link_bandwidth, network, NCCL)
    return DeviceSpeed(
        bf16_flops=bf16,
        f32_flops=bf16 / 2 if has_tf32 else bf16,  # TF32 is XLA's default for float32 matmuls
        f16_flops=gpu.peak_f16_flops or bf16,
        plain_f32_flops=plain * gpu.clock_rate_ghz if has_tf32 else None,
        bandwidth_bytes_per_s=gpu.memory_bandwidth,
        host_link_bytes_per_s=gpu.host_link_bandwidth,
        clocks_per_s=gpu.core_count * gpu.clock_rate_ghz * 1e9,
        calibration=load_calibration(gpu.compute_capability),
        links=links,
        tables=load_tables(gpu.compute_capability),
        row_wait_s=ROW_WAIT_S,
    )
