"""Lists the kernels that one run of a compiled module launches: class, FLOPs and bytes.

A step of a training program runs a few hundred kernels. How near a kernel comes to the device's peak rates depends on what it
does. A large matmul reaches most of the FLOP/s; a kernel that transposes reaches about two thirds of the bandwidth. So each
kernel has a class, by which `jaxremat.xla.clock` predicts its time.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from jaxremat.chips.speed import F32_HIGHEST, KernelClass
from jaxremat.chips.tables import Attention, Product
from jaxremat.xla.collectives import Collective, collective_of, is_collective
from jaxremat.xla.flops import (
    ExecutedFlops,
    attention_of,
    called_name,
    executed,
    flops_counter,
    instruction_flops,
    is_matmul,
    kind_of_call,
    product_of,
)
from jaxremat.xla.hlo import Computation, Instruction, Module
from jaxremat.xla.traffic import Traffic, traffic_of

#: Elements of the tile of a matmul's product that one multiprocessor computes, 128 x 256 (a library's on an H100).
TILE = 128 * 256
#: A product of fewer tiles leaves multiprocessors idle: an A100 has 108 of them, an H100 132.
FEW_TILES = 128
#: FLOPs for each byte under which a matmul is thin: the bytes take most of its time. An A100 has 201 of both, an H100 295.
THIN = 256

_NOT_KERNELS = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|add-dependency|opt-barrier|partition-id|replica-id"
    "|domain|.*-update"
)
_NO_WORK_TARGETS = re.compile(r"AllocateBuffer|Sharding|.*annotate_device_placement|MoveTo(Host|Device)|Pin|Unpin")
#: The calls in the fusions in which a collective begins and ends.
_BEGINS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"
_CHANNEL = re.compile(r"channel_id=(\d+)")
#: A matmul in float32 without TF32, as XLA writes it for its own operations and for calls of a library.
_HIGHEST = re.compile(r'operand_precision[="]*:?[{\["]*highest|algorithm[=":]*(ALG_)?dot_f32_f32_f32', re.IGNORECASE)
#: Calls whose time is that of their bytes, and calls that take no time.
_BY_BYTES = re.compile(
    r"TopK|__cub\$|ConcatBitcast|GatherScatterIndicesBitpacked|AssumeGatherIndicesInBound|AsyncCollective|SliceToDynamic"
    r"|PadToStatic|X64"
)
_MOVES = frozenset({"parameter", "constant", "bitcast", "copy", "copy-start", "tuple", "get-tuple-element", "reshape"})
#: The scope of an embedding, as the names of libraries have it: `embed_tokens`, `token_embedder`, `wte`.
_EMBEDDING = re.compile("emb|wte|vocab", re.IGNORECASE)
#: What computes the place of a slice.
_INDICES = frozenset(
    {"compare", "add", "subtract", "multiply", "select", "convert", "broadcast", "clamp", "minimum", "maximum"}
)
#: The classes by the operations of a kernel without a matmul. The first that has one of its operations is the class.
_BY_OPERATION: tuple[tuple[KernelClass, frozenset[str]], ...] = (
    ("gather and scatter", frozenset({"gather", "scatter"})),
    ("row reduction", frozenset({"reduce", "reduce-window"})),
    ("transpose", frozenset({"transpose"})),
    ("concatenate", frozenset({"concatenate"})),
    ("slice update", frozenset({"dynamic-update-slice"})),
)


#: An operation of a kernel, with the computation that it is in.
_Operation = tuple[Computation, Instruction]


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy of a step. All numbers but `count` are for one launch.

    Attributes:
        name: Name of the HLO instruction.
        op_name: JAX scope of the instruction; may be empty.
        kernel_class: What the kernel does, which decides how near it comes to the device's peak rates.
        flops: FLOPs of the matmuls, attention and convolutions in the kernel.
        dtype: Element type that those multiply, `bf16`, `f16`, `f32`, ...; empty if `flops` is 0.
        bytes_read: Bytes read from device memory.
        bytes_written: Bytes written to device memory.
        host_bytes: Bytes of host transfers: from or to pinned host memory, over the link.
        elements_written: Elements that a loop fusion writes into slices of larger buffers; 0 for any other kernel.
        cycles: Clock cycles by XLA's own estimate, which a TPU's fusions have. None without one.
        rows_added: Rows that the gradient of an embedding adds in bfloat16, one a token; 0 for any other kernel.
        count: Launches per step: the product of the trip counts of the loops around the kernel.
        collective: What a collective sends to other devices. Its bytes aren't counted as those of device memory. None for any
            other kernel.
        product: The shapes of the largest matmul; None without a matmul.
        attention: The shapes of fused attention; None for any other kernel.
    """

    name: str
    op_name: str
    kernel_class: KernelClass
    flops: int
    dtype: str
    bytes_read: int
    bytes_written: int
    host_bytes: int
    elements_written: int
    count: int
    collective: Collective | None = None
    product: Product | None = None
    attention: Attention | None = None
    cycles: int | None = None
    rows_added: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes read from and written to device memory."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Wait:
    """The end of a copy or collective that the instruction `name` started.

    The device is blocked until then.
    """

    name: str


def kernels_of(module: Module) -> list[Kernel]:
    """The kernels that one run of `module` launches, in program order.

    Each kernel of a loop's body is listed once. Its `count` is its number of launches.
    """
    return [event for event in events_of(module) if isinstance(event, Kernel)]


def events_of(module: Module) -> list[Kernel | Wait]:
    """The kernels of one run, and the points that need a copy or a collective, in order."""
    return _events(module, module.entry, 1, flops_counter(module))


def _events(module: Module, name: str, count: int, flops: Callable[[str], ExecutedFlops]) -> list[Kernel | Wait]:
    computation = module.computations[name]
    events: list[Kernel | Wait] = []
    started: dict[str, str] = {}
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            events.append(Wait(instruction.operands[0]))
        elif _NOT_KERNELS.fullmatch(opcode):
            continue
        elif opcode == "while":
            events += _events(module, instruction.called[-1], count * instruction.num_trips, flops)
        elif opcode == "conditional":
            events += max((_events(module, c, count, flops) for c in instruction.called), key=_branch_size)
        elif opcode in ("call", "call-start", "async-start") and not instruction.runs_on_host:
            for called in instruction.called:
                events += [_started_by(instruction, event) for event in _events(module, called, count, flops)]
        elif is_collective(instruction):
            events.append(_collective(computation, instruction, count))
        elif opcode == "fusion" and (event := _fused_collective(module, instruction, count, started)):
            events.append(event)
        elif not _NO_WORK_TARGETS.match(instruction.custom_call_target):
            events.append(_kernel(module, computation, instruction, count, flops))
    return events


def unpriced(module: Module) -> tuple[str, ...]:
    """What the predicted times and the FLOPs of a module leave out or guess, in words.

    Empty for most steps.

    Examples are `1 loop of unknown length counts once` and `12 calls of te_gemm_ffi count by their bytes alone`.
    """
    calls, dtypes, num_loops, num_on_host, num_sent = Counter[str](), Counter[str](), 0, 0, 0
    for computation, i, _ in executed(module):
        num_loops += i.opcode == "while" and i.trip_count is None
        num_sent += i.opcode == "send"
        num_on_host += i.runs_on_host and not i.opcode.endswith(("-done", "-update"))
        target = "" if i.called or i.runs_on_host or i.cycles is not None else i.custom_call_target
        if target and not (kind_of_call(i) or _NO_WORK_TARGETS.match(target) or _BY_BYTES.match(target)):
            calls[called_name(i)] += 1
        if is_matmul(i) and (dtype := computation.operand_shapes(i)[0][0].dtype) in ("f64", "c64", "c128"):
            dtypes[dtype] += 1
    found = {
        "loop{s} of unknown length count{v} once": num_loops,
        "transfer{s} by send and recv count{v} as kernels": num_sent,
        "computation{s} on the host count{v} by {their} bytes alone": num_on_host,
        **{f"call{{s}} of {name} count{{v}} by {{their}} bytes alone": number for name, number in calls.items()},
        **{f"matmul{{s}} of {dtype} count{{v}} like float32": number for dtype, number in dtypes.items()},
    }
    one, several = {"s": "", "v": "s", "their": "its"}, {"s": "s", "v": "", "their": "their"}
    return tuple(f"{n} {text.format(**(one if n == 1 else several))}" for text, n in found.items() if n)


def _started_by(start: Instruction, event: Kernel | Wait) -> Kernel | Wait:
    """The event, with the name that the point has that waits for it.

    A collective may be called by an `async-start`.
    """
    return replace(event, name=start.name) if isinstance(event, Kernel) and event.collective else event


def _collective(computation: Computation, instruction: Instruction, count: int) -> Kernel:
    sent = collective_of(computation, instruction)
    return Kernel(instruction.name, instruction.op_name, "collective", 0, "", 0, 0, 0, 0, count, sent)


def _fused_collective(module: Module, fusion: Instruction, count: int, started: dict[str, str]) -> Kernel | Wait | None:
    """The collective that a fusion is, begins or ends, as XLA makes such fusions for TPUs.

    None for any other fusion. A collective may begin in one fusion and end in another. Those between them compute, and send
    beside it. A fusion that takes a slice of an all-reduce is a reduce-scatter.

    `started` has the fusion in which a collective began, by its channel.
    """
    fused = module.computations[fusion.called[0]]
    inside = next(filter(is_collective, fused.instructions), None)
    if inside is None:
        return None
    targets = {one.custom_call_target for one in fused.instructions}
    match = _CHANNEL.search(inside.attrs)
    channel = match[1] if match else ""
    if channel in started:
        return Wait(started.pop(channel)) if _ENDS in targets else None
    if _BEGINS in targets:
        started[channel] = fusion.name
    found = _collective(fused, inside, count)
    if found.collective and found.collective.kind == "all-reduce" and fused.root.opcode == "dynamic-slice":
        found = replace(found, collective=replace(found.collective, kind="reduce-scatter"))
    return replace(found, name=fusion.name, op_name=fusion.op_name)


def _branch_size(events: Iterable[Kernel | Wait]) -> tuple[int, int]:
    kernels = [event for event in events if isinstance(event, Kernel)]
    return sum(k.flops * k.count for k in kernels), sum(k.num_bytes * k.count for k in kernels)


def _kernel(
    module: Module, computation: Computation, instruction: Instruction, count: int, flops: Callable[[str], ExecutedFlops]
) -> Kernel:
    counts = instruction_flops(computation, instruction, flops)
    traffic = traffic_of(module, computation, instruction)
    inside = list(_operations(module, computation, instruction))
    return Kernel(
        name=instruction.name,
        op_name=instruction.op_name,
        kernel_class=_class_of(instruction, inside, counts, traffic),
        flops=counts.total,
        dtype=_matmul_dtype(module, computation, instruction, flops) if counts.total else "",
        bytes_read=traffic.read,
        bytes_written=traffic.written,
        host_bytes=traffic.host,
        elements_written=_elements_written(instruction, inside),
        count=count,
        product=max(filter(None, (product_of(*one) for one in inside)), key=lambda one: one.flops, default=None)
        if counts.matmul_flops
        else None,
        attention=next(filter(None, (attention_of(*one) for one in inside)), None) if counts.attention_flops else None,
        cycles=instruction.cycles,
        rows_added=sum(_rows_added(*one) for one in inside),
    )


def _operations(module: Module, computation: Computation, instruction: Instruction) -> Iterator[_Operation]:
    """The operations of a kernel, those in nested fusions too."""
    if not instruction.opcode.startswith("fusion"):
        yield computation, instruction
        return
    fused = module.computations[instruction.called[0]]
    for inner in fused.instructions:
        yield from _operations(module, fused, inner)


def _class_of(instruction: Instruction, inside: list[_Operation], counts: ExecutedFlops, traffic: Traffic) -> KernelClass:
    if traffic.host:
        return "host copy"
    if counts.attention_flops:
        return "attention"
    if counts.convolution_flops:
        return "convolution"
    if counts.total:
        return _class_with_matmul(instruction, inside, counts.total, traffic.read + traffic.written)
    return _class_without_flops(instruction, inside)


def _class_with_matmul(instruction: Instruction, inside: list[_Operation], flops: int, num_bytes: int) -> KernelClass:
    opcodes = {inner.opcode for _, inner in inside}
    if "custom-call" in opcodes and opcodes & {"dynamic-slice", "dynamic-update-slice"}:
        return "library call on slices"
    products = [inner for _, inner in inside if is_matmul(inner)] or [instruction]
    return matmul_class(max(product.shapes[0].num_elements for product in products), flops, num_bytes)


def matmul_class(num_elements: int, flops: int, num_bytes: int) -> KernelClass:
    """The class of a matmul whose product has `num_elements`."""
    if num_elements < FEW_TILES * TILE:
        return "small matmul"
    return "thin matmul" if flops < THIN * num_bytes else "matmul"


def _class_without_flops(instruction: Instruction, inside: list[_Operation]) -> KernelClass:
    opcodes = {inner.opcode for _, inner in inside}
    found: KernelClass | None = next((c for c, operations in _BY_OPERATION if operations & opcodes), None)
    if found == "row reduction" and not any(_is_row_reduction(*operation) for operation in inside):
        return "column reduction"
    if found:
        return found
    if opcodes <= _MOVES or instruction.opcode.startswith("copy"):
        return "copy"
    if "dynamic-slice" in opcodes and opcodes <= _MOVES | _INDICES | {"dynamic-slice"}:
        return "dynamic slice"
    return "elementwise"


def _is_row_reduction(computation: Computation, instruction: Instruction) -> bool:
    """Whether an operation is a reduction over the last dimension, of adjacent elements."""
    if instruction.opcode != "reduce":
        return instruction.opcode == "reduce-window"
    operand = computation.by_name[instruction.operands[0]]
    return len(operand.shapes[0].dims) - 1 in instruction.dims_attr("dimensions")


def _elements_written(instruction: Instruction, inside: list[_Operation]) -> int:
    """The elements that a loop fusion writes into slices of larger buffers."""
    if "kind=kLoop" not in instruction.attrs:
        return 0
    updates = [
        fused.by_name[inner.operands[1]].num_elements for fused, inner in inside if inner.opcode == "dynamic-update-slice"
    ]
    return max(updates, default=0)


def _rows_added(computation: Computation, instruction: Instruction) -> int:
    """The rows that the gradient of an embedding adds, one for each token.

    A GPU adds bfloat16 by comparing and swapping, so that additions to one row wait for each other. float32 is added without.
    """
    if (
        instruction.opcode != "scatter"
        or instruction.shapes[0].dtype != "bf16"
        or "unique_indices=true" in instruction.attrs
    ):
        return 0
    by_row = len(instruction.dims_attr("scatter_dims_to_operand_dims")) == 1
    return (
        computation.by_name[instruction.operands[1]].num_elements if by_row and _EMBEDDING.search(instruction.op_name) else 0
    )


def _matmul_dtype(
    module: Module, computation: Computation, instruction: Instruction, flops: Callable[[str], ExecutedFlops]
) -> str:
    """Element type of the first operand of a kernel's first matmul; empty without a matmul.

    It is `f32 highest` where the program requests float32 without TF32, as `jax_default_matmul_precision="highest"` does.
    """
    if instruction.opcode.startswith(("dot", "scaled-dot", "convolution", "custom-call")):
        dtype = computation.operand_shapes(instruction)[0][0].dtype
        return F32_HIGHEST if dtype == "f32" and _HIGHEST.search(instruction.attrs) else dtype
    for name in instruction.called:
        inner = module.computations[name]
        for candidate in inner.instructions:
            if instruction_flops(inner, candidate, flops).total:
                return _matmul_dtype(module, inner, candidate, flops)
    return ""
