"""Made-up memory maps in the shape of real ones: a scanned model of two loops, and one unrolled over many layers."""

import bisect
import heapq
from dataclasses import replace

from jaxremat.xla.buffers import Allocation, Buffer, Category, Gap, Loop, MemoryMap, Operation, Phase

MIB = 2**20
KERNELS = ("query", "key", "value", "out", "wi_0", "wo")
SAVED = ("query_proj", "key_proj", "value_proj", "mlpwi_0")


class Program:
    """Collects instructions and buffers in program order; temporaries get the lowest offset that is free for their life."""

    def __init__(self):
        self.names: list[str] = []
        self.buffers: list[Buffer] = []
        self.allocations: list[Allocation] = []
        self.loops: list[Loop] = []

    def at(self) -> int:
        return len(self.names)

    def step(self, name: str) -> int:
        self.names.append(f"{name}.{len(self.names)}")
        return len(self.names) - 1

    def argument(self, label: str, category: Category, num_bytes: int) -> None:
        number = len(self.allocations)
        self.allocations.append(Allocation(number, num_bytes, "argument"))
        name, shape = f"param_{number}", f"f32[{num_bytes // 4}]"
        self.buffers.append(Buffer(name, category, label, num_bytes, 1, number, 0, 0, 0, None, shape, label, ""))

    def temp(self, first: int, last: int, category: Category, label: str, num_bytes: int, line: int, scope: str) -> None:
        loops = [i for i, loop in enumerate(self.loops) if loop.first <= first and (loop.last < 0 or last <= loop.last)]
        loop = loops[-1] if loops and self.loops[loops[-1]].last < 0 else None
        shape, source = f"bf16[{num_bytes // 1536 or 1},768]", f"/home/someone/model/transformer.py:{line}"
        op = f"jit(train_step)/jit(main)/{scope}/{label}"
        name = self.names[first]
        self.buffers.append(Buffer(name, category, label, num_bytes, 1, -1, -1, first, last, loop, shape, op, source))

    def layer_forward(self, i: int, scope: str, size: int, saved_until: int | None) -> None:
        for j, kernel in enumerate(KERNELS):
            first = self.step("gemm_fusion_dot")
            if saved_until is not None and kernel != "out":
                self.temp(first, saved_until, "residuals", SAVED[j % 4], size, 80 + j, f"{scope}/mlp")
            else:
                self.temp(first, first + 4, "working set", f"{kernel}/dot_general", size, 80 + j, scope)
            for k in range(3):
                first = self.step("loop_multiply_fusion")
                self.temp(first, first + 1 + k, "working set", f"norm_{k}/mul", size // (2 + k), 40 + k, scope)

    def layer_backward(self, scope: str, size: int, gradients_until: int | None) -> None:
        for j, kernel in enumerate(KERNELS):
            first = self.step("loop_gelu_fusion")
            self.temp(first, first + 5, "recompute", f"{kernel}/gelu", size, 120 + j, f"{scope}/rematted_computation")
            first = self.step("gemm_fusion_dot")
            self.temp(first, first + 3, "working set", f"{kernel}/transpose", size, 130 + j, f"transpose({scope})")
            if gradients_until is not None:
                self.temp(first, gradients_until, "gradients", f"{kernel}/kernel", 2 * MIB, 150 + j, f"transpose({scope})")
            first = self.step("custom-call")
            self.temp(first, first, "workspace", "cublas", MIB, 160, f"transpose({scope})")

    def finish(self, forward_end: int, backward_end: int) -> MemoryMap:
        """Lays the temporaries out: of the offsets below and between what lives at the same time, the lowest that fits."""
        last = self.at() - 1
        arena = len(self.allocations)
        temps, fixed = [], []
        for buffer in self.buffers:
            if buffer.allocation >= 0:
                fixed.append(replace(buffer, last=last))
            else:
                temps.append(replace(buffer, allocation=arena, last=min(buffer.last, last)))
        placed: list[Buffer] = []
        free: list[tuple[int, int]] = [(0, 1 << 60)]  # (offset, bytes), by offset
        alive: list[tuple[int, int, int]] = []  # (last, offset, bytes), a heap
        for buffer in sorted(temps, key=lambda b: b.first):
            while alive and alive[0][0] < buffer.first:
                release(free, *heapq.heappop(alive)[1:])
            i = next(i for i, (_, room) in enumerate(free) if room >= buffer.num_bytes)
            offset, room = free.pop(i)
            if room > buffer.num_bytes:
                free.insert(i, (offset + buffer.num_bytes, room - buffer.num_bytes))
            placed.append(replace(buffer, offset=offset))
            heapq.heappush(alive, (buffer.last, offset, buffer.num_bytes))
        top = max(b.offset + b.num_bytes for b in placed)
        live = [0] * (last + 2)
        for b in placed:
            live[b.first] += b.num_bytes
            live[b.last + 1] -= b.num_bytes
        for i in range(1, len(live)):
            live[i] += live[i - 1]
        peak = max(range(last + 1), key=lambda p: live[p])
        gaps, offset = [], 0
        for b in sorted((b for b in placed if b.first <= peak <= b.last), key=lambda b: b.offset):
            if b.offset > offset:
                gaps.append(Gap(arena, offset, b.offset - offset))
            offset = max(offset, b.offset + b.num_bytes)
        if offset < top:
            gaps.append(Gap(arena, offset, top - offset))
        phases: tuple[tuple[Phase, int, int], ...] = (
            ("forward", 0, forward_end - 1),
            ("backward", forward_end, backward_end - 1),
            ("update", backward_end, last),
        )
        allocations = (*self.allocations, Allocation(arena, top, "temp"))
        buffers = tuple(sorted((*fixed, *placed), key=lambda b: (b.allocation, b.offset, b.first)))
        scopes = {b.first: b for b in placed}
        program = tuple(
            Operation(name, "fusion", *((scopes[i].op_name, scopes[i].source) if i in scopes else ("", "")))
            for i, name in enumerate(self.names)
        )
        return MemoryMap(program, phases, allocations, (), tuple(self.loops), buffers, (), peak, tuple(gaps))


def release(free: list[tuple[int, int]], offset: int, size: int) -> None:
    i = bisect.bisect(free, (offset, 0))
    if i < len(free) and offset + size == free[i][0]:
        size += free.pop(i)[1]
    if i and sum(free[i - 1]) == offset:
        i, (offset, size) = i - 1, (free[i - 1][0], free.pop(i - 1)[1] + size)
    free.insert(i, (offset, size))


def start(num_layers: int) -> Program:
    program = Program()
    kinds: tuple[tuple[str, Category], ...] = (
        ("params", "parameters"),
        ("mu", "optimizer state"),
        ("nu", "optimizer state"),
    )
    for kind, category in kinds:
        for leaf in ("embedding", *KERNELS):
            size = 147 if leaf == "embedding" else 4 * num_layers
            program.argument(f"{kind}/{leaf}/kernel", category, size * MIB)
    program.argument("tokens", "inputs", MIB // 8)
    return program


def scanned(saved: bool = True, num_layers: int = 12, size: int = 48 * MIB) -> MemoryMap:
    """A model whose layers are scanned: two loops over `num_layers`, between them stacked residuals if `saved`."""
    program = start(num_layers)
    for i in range(12):
        first = program.step("loop_gather_fusion")
        program.temp(first, first + 2, "working set", f"embed/take_{i}", size // 4, 20, "jvp(Transformer)")
    first = program.at()
    keep = SAVED if saved else ("decoder_layer_input",)
    stacks = [program.step("broadcast") for _ in keep]
    program.loops.append(Loop("while.2", program.at(), -1, num_layers, None))
    program.layer_forward(0, "jvp(Transformer)/while/body/layers", size, None)
    program.layer_forward(1, "jvp(Transformer)/while/body/layers", size, None)
    program.loops[0] = replace(program.loops[0], last=program.at() - 1)
    for i in range(10):
        first = program.step("gemm_fusion_logits")
        bytes_, until = (12 * size, first + 14 - i) if i == 1 else (size, first + 3)
        program.temp(
            first, until, "logits and loss", "logits/dot_general" if i == 1 else f"loss/{i}", bytes_, 210, "jvp(loss)"
        )
    middle = program.at()
    for i in range(14):
        first = program.step("loop_loss_fusion")
        program.temp(first, first + 2, "logits and loss", f"loss/grad_{i}", 3 * size, 220, "transpose(jvp(loss))")
    gradients = [program.step("broadcast") for _ in KERNELS]
    program.loops.append(Loop("while.5", program.at(), -1, num_layers, None))
    program.layer_backward("jvp(Transformer)/while/body/layers", size, None)
    program.layer_backward("jvp(Transformer)/while/body/layers", size, None)
    end = program.at()
    program.loops[1] = replace(program.loops[1], last=end - 1)
    update = program.at()
    for i in range(60):
        first = program.step("loop_add_fusion")
        program.temp(first, first + 1, "working set", f"adamw/update_{i}", 4 * MIB, 300, "optimizer")
    for stack, name in zip(stacks, keep, strict=True):
        program.temp(stack, end - 1, "residuals", name, num_layers * size, 75, "jvp(Transformer)/while/body/layers")
    for i, (first, kernel) in enumerate(zip(gradients, KERNELS, strict=True)):
        program.temp(
            first, update + 10 * i + 9, "gradients", f"{kernel}/kernel", 4 * num_layers * MIB, 150, "transpose(jvp)"
        )
    return program.finish(middle, update)


def unrolled(num_layers: int = 32, blocks: int = 10, size: int = 16 * MIB) -> MemoryMap:
    """A deep model without loops: `blocks` made-up blocks of 42 instructions in each layer."""
    program = start(num_layers)
    num = num_layers * blocks
    for i in range(num):
        layer = f"jvp(Transformer)/layers_{i // blocks}/part_{i % blocks}"
        program.layer_forward(i, layer, size // blocks, 24 * num + 1 + 18 * (num - i))
    first = program.step("gemm_fusion_logits")
    program.temp(first, first + 30, "logits and loss", "logits/dot_general", 40 * size, 210, "jvp(loss)")
    middle = program.at()
    for i in reversed(range(num)):
        program.layer_backward(f"jvp(Transformer)/layers_{i // blocks}/part_{i % blocks}", size // blocks, None)
    update = program.at()
    for i in range(40):
        first = program.step("loop_add_fusion")
        program.temp(first, first + 1, "working set", f"adamw/update_{i}", 4 * MIB, 300, "optimizer")
    return program.finish(middle, update)
