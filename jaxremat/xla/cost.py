"""Predicts how long a compiled step takes, from the bytes and FLOPs of every kernel and the roofline of a device.

For example, a kernel of 8e12 FLOPs and 1e9 bytes takes 10 ms on a device that reaches 8e14 FLOP/s and 4e12 bytes/s: the
matmuls need 10 ms, the bytes need 0.25 ms, and the longer time counts.

`jaxremat.xla.flops` counts the FLOPs. This module exports those counts too.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxremat.xla.flops import ExecutedFlops, count_step_flops, executed_flops, flops_counter, instruction_flops
from jaxremat.xla.hlo import Computation, Instruction, Module, Shape

__all__ = [
    "DeviceSpeed",
    "ExecutedFlops",
    "Kernel",
    "StepTime",
    "count_step_flops",
    "executed_flops",
    "kernel_traffic",
    "predict_step_time",
]

_NOT_KERNELS = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|add-dependency|opt-barrier|partition-id|replica-id"
    "|domain|.*-update"
)
_NO_WORK_TARGETS = re.compile(r"AllocateBuffer|Sharding|.*annotate_device_placement|MoveTo(Host|Device)|Pin|Unpin")
_SLICES = ("slice", "dynamic-slice", "gather")
_WHOLE_OPERANDS = re.compile("dot|scaled-dot|convolution|custom-call|reduce-window|sort|scatter|fft|tuple|get-tuple-element")
_PROPORTIONAL = ("reduce", "concatenate", "pad", "dynamic-update-slice")


@dataclass(frozen=True)
class DeviceSpeed:
    """The peak rates of a device, and the share of each peak that real kernels reach.

    Attributes:
        bf16_flops: Peak FLOP/s of dense bf16 and f16 matmuls. Matmuls in f8 are predicted at this rate too.
        f32_flops: Peak FLOP/s of dense f32 matmuls. On NVIDIA GPUs this is the TF32 rate, since TF32 is XLA's default.
        bandwidth_bytes_per_s: Bandwidth of device memory.
        host_link_bytes_per_s: Bandwidth of one direction of the link to pinned host memory.
        matmul_efficiency: Share of the peak FLOP/s that matmuls reach, 0 to 1.
        bandwidth_efficiency: Share of the bandwidth that kernels reach, 0 to 1.
        launch_s: Seconds that each kernel's launch adds to its roofline time.
    """

    bf16_flops: float
    f32_flops: float
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    matmul_efficiency: float
    bandwidth_efficiency: float
    launch_s: float


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy of a step. All numbers but `count` are for one launch.

    Attributes:
        name: Name of the HLO instruction.
        op_name: JAX scope of the instruction; may be empty.
        flops: FLOPs of the matmuls, attention and convolutions in the kernel.
        dtype: Element type that those multiply, `bf16`, `f16`, `f32`, ...; empty if `flops` is 0.
        bytes_read: Bytes read from device memory.
        bytes_written: Bytes written to device memory.
        host_bytes: Bytes of host transfers: from or to pinned host memory, over the link.
        count: Launches per step: the product of the trip counts of the loops around the kernel.
    """

    name: str
    op_name: str
    flops: int
    dtype: str
    bytes_read: int
    bytes_written: int
    host_bytes: int
    count: int


@dataclass(frozen=True)
class StepTime:
    """A predicted step time and its parts. Seconds, bytes and FLOPs are for one step.

    Attributes:
        step_s: Predicted seconds of the step.
        compute_s: Seconds that the FLOPs alone would take.
        memory_s: Seconds that the traffic of device memory alone would take.
        host_s: Seconds of the host transfers.
        exposed_s: Seconds in which the device waits for host transfers.
        launch_s: Seconds of the launches.
        flops: Executed FLOPs.
        bytes_read: Bytes read from device memory.
        bytes_written: Bytes written to device memory.
        host_bytes: Bytes of the host transfers, both directions.
        num_kernels: Number of kernels launched.
    """

    step_s: float
    compute_s: float
    memory_s: float
    host_s: float
    exposed_s: float
    launch_s: float
    flops: int
    bytes_read: int
    bytes_written: int
    host_bytes: int
    num_kernels: int


@dataclass(frozen=True)
class _Wait:
    """A point at which the device waits for the copy that the instruction `name` started."""

    name: str


@dataclass(frozen=True)
class _Traffic:
    read: int = 0
    written: int = 0
    host: int = 0


def predict_step_time(module: Module, speed: DeviceSpeed) -> StepTime:
    """Predicts the seconds of one run of a compiled module; nothing is measured.

    A kernel has two times: its FLOPs at the reachable matmul rate, and its bytes at the reachable bandwidth. The kernel
    takes the longer of the two, plus a launch. Kernels run one after the other.

    Host transfers use the link one at a time. They overlap with the kernels that XLA has scheduled between the start of the
    transfer and the point that waits for it. If the transfer takes longer than those kernels, the device waits.

    The prediction doesn't model the bandwidth that host transfers take from kernels beyond their own bytes, overlapping
    kernels, autotuning and the real quality of one GEMM, occupancy and small-grid effects, cache hits, clock throttling,
    elementwise arithmetic, collectives, or the input pipeline.

    The body of a loop without a known trip count counts once. `ExecutedFlops.num_unknown_loops` counts such loops.

    Args:
        module: The compiled program.
        speed: The device.
    """
    events = _events_of(module, module.entry, 1, flops_counter(module))
    kernels = [event for event in events if isinstance(event, Kernel)]
    awaited = {event.name for event in events if isinstance(event, _Wait)}
    bandwidth = speed.bandwidth_bytes_per_s * speed.bandwidth_efficiency
    compute_s = memory_s = device_s = link_s = exposed_s = 0.0
    arrives_s: dict[str, float] = {}
    # All iterations of a loop are equal, and each iteration waits for its own copies before it ends. So the time of all
    # iterations together equals the sum of their times, and each kernel counts `count` times in one go.
    for event in events:
        if isinstance(event, _Wait):
            late_s = max(0.0, arrives_s.get(event.name, 0.0) - device_s)
        else:
            flops_s = event.flops / (_peak_flops(event.dtype, speed) * speed.matmul_efficiency)
            bytes_s = (event.bytes_read + event.bytes_written) / bandwidth
            compute_s += flops_s * event.count
            memory_s += bytes_s * event.count
            late_s = 0.0
            if event.host_bytes:
                link_s = max(link_s, device_s) + event.host_bytes * event.count / speed.host_link_bytes_per_s
                arrives_s[event.name] = link_s
                late_s = 0.0 if event.name in awaited else link_s - device_s
            device_s += (max(flops_s, bytes_s) + speed.launch_s) * event.count
        exposed_s += late_s
        device_s += late_s
    num_kernels = sum(k.count for k in kernels)
    host_bytes = sum(k.host_bytes * k.count for k in kernels)
    return StepTime(
        step_s=device_s,
        compute_s=compute_s,
        memory_s=memory_s,
        host_s=host_bytes / speed.host_link_bytes_per_s,
        exposed_s=exposed_s,
        launch_s=num_kernels * speed.launch_s,
        flops=sum(k.flops * k.count for k in kernels),
        bytes_read=sum(k.bytes_read * k.count for k in kernels),
        bytes_written=sum(k.bytes_written * k.count for k in kernels),
        host_bytes=host_bytes,
        num_kernels=num_kernels,
    )


def kernel_traffic(module: Module) -> list[Kernel]:
    """The kernels that one run of `module` launches, in program order.

    Each kernel in a loop's body is listed once. Its `count` is its number of launches.
    """
    events = _events_of(module, module.entry, 1, flops_counter(module))
    return [event for event in events if isinstance(event, Kernel)]


def _events_of(module: Module, name: str, count: int, flops: Callable[[str], ExecutedFlops]) -> list[Kernel | _Wait]:
    computation = module.computations[name]
    events: list[Kernel | _Wait] = []
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            events.append(_Wait(instruction.operands[0]))
        elif _NOT_KERNELS.fullmatch(opcode):
            continue
        elif opcode == "while":
            events += _events_of(module, instruction.called[-1], count * (instruction.trip_count or 1), flops)
        elif opcode == "conditional":
            events += max((_events_of(module, c, count, flops) for c in instruction.called), key=_branch_size)
        elif opcode in ("call", "call-start", "async-start"):
            for called in instruction.called:
                events += _events_of(module, called, count, flops)
        elif not _NO_WORK_TARGETS.match(instruction.custom_call_target):
            events.append(_kernel(module, computation, instruction, count, flops))
    return events


def _branch_size(events: Iterable[Kernel | _Wait]) -> tuple[int, int]:
    kernels = (event for event in events if isinstance(event, Kernel))
    sizes = [(k.flops * k.count, (k.bytes_read + k.bytes_written) * k.count) for k in kernels]
    return sum(s[0] for s in sizes), sum(s[1] for s in sizes)


def _kernel(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    count: int,
    flops: Callable[[str], ExecutedFlops],
) -> Kernel:
    num_flops = instruction_flops(computation, instruction, flops).total
    traffic = _traffic(module, computation, instruction)
    return Kernel(
        name=instruction.name,
        op_name=instruction.op_name,
        flops=num_flops,
        dtype=_matmul_dtype(module, computation, instruction, flops) if num_flops else "",
        bytes_read=traffic.read,
        bytes_written=traffic.written,
        host_bytes=traffic.host,
        count=count,
    )


def _matmul_dtype(
    module: Module, computation: Computation, instruction: Instruction, flops: Callable[[str], ExecutedFlops]
) -> str:
    """Element type of the first operand of the first matmul in a kernel; empty if the kernel has no matmul."""
    if instruction.opcode.startswith(("dot", "scaled-dot", "convolution", "custom-call")):
        return computation.operand_shapes(instruction)[0][0].dtype
    for name in instruction.called:
        inner = module.computations[name]
        for candidate in inner.instructions:
            if instruction_flops(inner, candidate, flops).total:
                return _matmul_dtype(module, inner, candidate, flops)
    return ""


def _peak_flops(dtype: str, speed: DeviceSpeed) -> float:
    return speed.f32_flops if dtype in ("f32", "f64", "c64", "c128") else speed.bf16_flops


# Bytes.


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> _Traffic:
    """Bytes that one launch reads and writes.

    A buffer may be larger: a kernel that reads one slice of a buffer reads only the bytes of the slice.
    """
    outside = computation.operand_shapes(instruction)
    if instruction.opcode.startswith("fusion"):
        fused = module.computations[instruction.called[0]]
        demand = _demanded_elements(module, fused)
        reads = []
        for parameter, shapes in zip(fused.parameters, outside, strict=False):
            num_bytes = sum(s.num_bytes for s in shapes) * demand[parameter.name] // max(parameter.num_elements, 1)
            reads.append((num_bytes, _on_host((*shapes, *parameter.shapes))))
        return _sum_traffic(reads, _written(fused, fused.root))
    operands = [(sum(s.num_bytes for s in shapes), _on_host(shapes)) for shapes in outside]
    opcode = instruction.opcode.removesuffix("-start")
    results = [(s.num_bytes, s.on_host) for s in _results(computation, instruction)]
    if opcode == "dynamic-update-slice":
        update = operands[1][0]
        return _sum_traffic(operands[1:], [(update, operands[0][1])])
    if opcode == "scatter":
        num_targets = (len(operands) - 1) // 2
        updates = operands[num_targets + 1 :]
        return _sum_traffic(operands[num_targets:] + updates, updates)
    if opcode in _SLICES:
        return _sum_traffic([(results[0][0], operands[0][1]), *operands[1:]], results)
    return _sum_traffic(operands, results)


def _sum_traffic(reads: Iterable[tuple[int, bool]], writes: Iterable[tuple[int, bool]]) -> _Traffic:
    """Sums reads and writes, each given as (bytes, whether in host memory)."""
    reads, writes = list(reads), list(writes)
    return _Traffic(
        read=sum(num_bytes for num_bytes, on_host in reads if not on_host),
        written=sum(num_bytes for num_bytes, on_host in writes if not on_host),
        host=sum(num_bytes for num_bytes, on_host in reads + writes if on_host),
    )


def _on_host(shapes: Iterable[Shape]) -> bool:
    return any(s.on_host for s in shapes)


def _results(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """The arrays that a launch writes.

    The result of an async start also lists its operands and a context. Those are left out, and so is a library's workspace.
    """
    shapes = instruction.shapes
    if instruction.opcode == "copy-start":  # (destination, source, context)
        return shapes[:1]
    if instruction.opcode.endswith("-start"):  # ((operands), results, context)
        num_operands = sum(len(s) for s in computation.operand_shapes(instruction))
        return shapes[num_operands:-1] if len(shapes) > num_operands + 1 else shapes[num_operands:]
    is_library = instruction.custom_call_target.startswith(("__cublas", "__cudnn"))
    if is_library and len(shapes) > 1 and shapes[-1].dtype in ("s8", "u8"):
        return shapes[:-1]
    return shapes


def _written(fused: Computation, value: Instruction) -> list[tuple[int, bool]]:
    """What a fusion writes for one element of its root tuple: pairs (bytes, whether in host memory)."""
    if value.opcode == "tuple":
        return [pair for name in value.operands for pair in _written(fused, fused.by_name[name])]
    if (updated := _updated_in_place(fused, value)) is not None:
        return [(updated, _on_host(value.shapes))] if updated else []
    if value.opcode == "get-tuple-element":
        source = fused.by_name[value.operands[0]]
        match = re.search(r"index=(\d+)", value.attrs)
        index = int(match[1]) if match else 0
        if source.opcode == "custom-call" and index >= len(_results(fused, source)):
            return []
    return [(s.num_bytes, s.on_host) for s in _results(fused, value)]


def _updated_in_place(fused: Computation, value: Instruction) -> int | None:
    """Bytes written in place, if `value` is an updated parameter of the fusion; None if `value` is a new buffer.

    The result is 0 for a parameter that the fusion returns unchanged. XLA has already copied every buffer that must not be
    overwritten.
    """
    if value.opcode == "parameter":
        return 0
    if value.opcode == "bitcast":
        return _updated_in_place(fused, fused.by_name[value.operands[0]])
    if value.opcode in ("dynamic-update-slice", "scatter"):
        before = _updated_in_place(fused, fused.by_name[value.operands[0]])
        update = fused.by_name[value.operands[1 if value.opcode == "dynamic-update-slice" else -1]]
        return None if before is None else before + update.num_bytes
    return None


def _demanded_elements(module: Module, fused: Computation) -> dict[str, int]:
    """How many elements of each value a fused computation needs, by name.

    The count starts at the root and goes back to the parameters. For example, a fusion whose root slices 10 of 1000 elements
    of a parameter needs 10 elements of that parameter.
    """
    demand = {i.name: 0 for i in fused.instructions}
    demand[fused.root.name] = fused.root.num_elements
    for value in reversed(fused.instructions):  # an instruction comes after its operands
        if demand[value.name] == 0:
            continue
        for position, name in enumerate(value.operands):
            operand = fused.by_name[name]
            needed = _operand_demand(module, fused, value, operand, position, demand[value.name])
            demand[name] = min(operand.num_elements, demand[name] + needed)
    return demand


def _operand_demand(
    module: Module, fused: Computation, value: Instruction, operand: Instruction, position: int, demanded: int
) -> int:
    """How many elements of operand number `position` are needed to compute `demanded` elements of `value`."""
    if value.opcode == "fusion":
        nested = module.computations[value.called[0]]
        return _demanded_elements(module, nested)[nested.parameters[position].name]
    if value.opcode in _SLICES:
        return demanded if position == 0 else operand.num_elements
    if value.opcode == "dynamic-update-slice" and position == 0:
        if _updated_in_place(fused, value) is not None:
            return 0
        return max(demanded - fused.by_name[value.operands[1]].num_elements, 0)
    if value.opcode == "scatter" and position == 0 and _updated_in_place(fused, value) is not None:
        return fused.by_name[value.operands[-1]].num_elements
    if _WHOLE_OPERANDS.fullmatch(value.opcode):
        return operand.num_elements
    if value.opcode in _PROPORTIONAL:
        return -(-operand.num_elements * demanded // max(value.num_elements, 1))
    return demanded  # elementwise, bitcast, transpose, broadcast: at most one element for each; the caller caps the sum
