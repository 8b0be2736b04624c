"""Counts the floating-point operations of one step twice: in the compiled HLO and the jaxpr.

The HLO count is what runs after XLA's own simplifications. It includes recomputation. The jaxpr count is what JAX requested.
The two counts agree for the programs that this package is made for. If they differ, XLA dropped, merged or padded a matmul.

One multiply-add is two FLOPs. For example, a matmul of `[4, 8]` and `[8, 16]` has `2 * 4 * 8 * 16 = 1024` FLOPs. Elementwise
operations and reductions aren't counted, as memory bandwidth limits them.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxremat.chips.catalog import call_kind
from jaxremat.chips.chip import CallKind
from jaxremat.chips.tables import Attention, Product
from jaxremat.policy.jax_private import attention_sizes, core, shard_map_devices
from jaxremat.xla.hlo import Computation, Instruction, Module, Shape

_CONTRACTING = re.compile(r'"lhs_contracting_dimensions"\s*:\s*\[([^\]]*)\]')
_BATCH = re.compile(r'"lhs_batch_dimensions"\s*:\s*\[([^\]]*)\]')
_SCORES = re.compile(r'"intermediate_tensor_shape"\s*:\s*\{[^}]*?"dimensions"\s*:\s*\[([^\]]*)\]')
_WINDOW = re.compile(r'"sliding_window_length"\s*:\s*"?(\d+)')
_MASK = re.compile(r'"mask_type"\s*:\s*"(\w*)"')
#: The scope around a kernel of attention whose mask isn't in the program (`chips/tpu/attention.py`).
_WINDOW_SCOPE = re.compile(r"window_(\d+)")
#: The bytes at whose multiples rows begin that are loaded many elements at a time.
_ALIGNED_BYTES = 16
#: Operations of JAX that run a kernel of the program's own. A jaxpr inside is the kernel's, for one block of its grid.
KERNELS = frozenset({"pallas_call", "ffi_call"})


@dataclass(frozen=True)
class ExecutedFlops:
    """FLOPs and operation counts of one run of a program.

    A loop's body counts as often as it runs.

    Attributes:
        matmul_flops: FLOPs of dots and GEMM calls.
        attention_flops: FLOPs of fused attention: 2 matmuls forward and 5 backward, halved under a causal mask.
        convolution_flops: FLOPs of convolutions. Multiplications by padding or by the holes of a dilation don't count.
        num_matmuls: Number of dots and GEMM calls. XLA may merge sibling matmuls into fewer calls with the same FLOPs.
        num_attention_forward: Number of fused attention's forward calls. A recomputed call counts again.
        num_attention_backward: Number of fused attention's backward calls.
        num_unknown_loops: Number of loops in the text without a known trip count. Their bodies were counted once.
    """

    matmul_flops: int = 0
    attention_flops: int = 0
    convolution_flops: int = 0
    num_matmuls: int = 0
    num_attention_forward: int = 0
    num_attention_backward: int = 0
    num_unknown_loops: int = 0

    @property
    def total(self) -> int:
        return self.matmul_flops + self.attention_flops + self.convolution_flops

    def repeated(self, times: int) -> "ExecutedFlops":
        """All counts multiplied by `times`, except `num_unknown_loops`, which counts loops of text."""
        counts = {name: count * times for name, count in vars(self).items()}
        return ExecutedFlops(**counts | {"num_unknown_loops": self.num_unknown_loops})


NO_FLOPS = ExecutedFlops()


def add_flops(counts: Iterable[ExecutedFlops]) -> ExecutedFlops:
    """The sum, field by field."""
    rows = [vars(c).values() for c in counts if c is not NO_FLOPS]
    return ExecutedFlops(*(sum(column) for column in zip(*rows, strict=True))) if rows else NO_FLOPS


# From the compiled HLO.


def kind_of_call(instruction: Instruction) -> CallKind | None:
    """What a custom call computes, of a library or a kernel of Pallas. None if unknown."""
    return call_kind(called_name(instruction))


def called_name(instruction: Instruction) -> str:
    """The name of what a custom call calls.

    It is a library's function, or `pallas_call$NAME` of a kernel of Pallas.
    """
    return _pallas_target(instruction.op_name) or instruction.custom_call_target


def _pallas_target(op_name: str) -> str:
    """`pallas_call$NAME` of a kernel of Pallas; empty for other operations."""
    scope, _, operation = op_name.rpartition("/")
    return f"{operation}${scope.rpartition('/')[2]}" if operation == "pallas_call" else ""


def is_matmul(instruction: Instruction) -> bool:
    """Whether an instruction is a matmul, of XLA itself or of a library.

    The first array of its result is the product.
    """
    return instruction.opcode == "dot" or kind_of_call(instruction) == "matmul"


def product_of(computation: Computation, instruction: Instruction) -> Product | None:
    """The shapes of a matmul. None for another instruction."""
    if not is_matmul(instruction):
        return None
    operands = [shapes[0] for shapes in computation.operand_shapes(instruction) if shapes]
    lhs, rhs, out = operands[0], operands[1], instruction.shapes[0]
    if instruction.opcode == "dot":
        summed, of_batch = (instruction.dims_attr(name) for name in ("lhs_contracting_dims", "lhs_batch_dims"))
    else:
        summed, of_batch = (_quoted_ints(pattern, instruction.attrs) for pattern in (_CONTRACTING, _BATCH))
    return _product(lhs.dims, out.dims, summed, of_batch, is_aligned=all(map(_is_aligned, (lhs, rhs, out))))


def _is_aligned(shape: Shape) -> bool:
    """Whether each row of a matrix in memory begins at a multiple of 16 bytes."""
    minor = shape.layout[0] if shape.layout else -1
    return not shape.dims or shape.num_bytes // max(1, shape.num_elements) * shape.dims[minor] % _ALIGNED_BYTES == 0


def attention_of(computation: Computation, instruction: Instruction) -> Attention | None:
    """The shapes of fused attention. None for another instruction."""
    kind = kind_of_call(instruction)
    if kind not in _ATTENTION:
        return None
    if _pallas_target(instruction.op_name):
        query = _floating(computation, instruction)[0]
        window = _WINDOW_SCOPE.search(instruction.op_name)
        return _attention(kind != "attention", query[-1], query[-2], int(window[1]) if window else 0)
    query, scores = computation.operand_shapes(instruction)[0][0], _quoted_ints(_SCORES, instruction.attrs)
    return _attention(kind != "attention", query.dims[-1], scores[-1], _window(instruction))


def _window(instruction: Instruction) -> int:
    match = _WINDOW.search(instruction.attrs)
    return int(match[1]) if match else 0


def executed_flops(module: Module) -> ExecutedFlops:
    """The FLOPs that one run of a compiled module executes.

    Operations inside fusions count. A loop's body counts as often as it runs. Of a conditional the branch with the most
    FLOPs counts.
    """
    return flops_counter(module)(module.entry)


def flops_counter(module: Module) -> Callable[[str], ExecutedFlops]:
    """Returns a function that gives the FLOPs of a computation by its name.

    Each computation is counted once and cached.
    """
    known: dict[str, ExecutedFlops] = {}

    def count(name: str) -> ExecutedFlops:
        if name not in known:
            computation = module.computations[name]
            known[name] = add_flops(instruction_flops(computation, i, count) for i in computation.instructions)
        return known[name]

    return count


def executed(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
    """Every instruction that runs, with its computation and the number of times that it runs.

    Instructions inside fusions and loops are included. An instruction of a loop of 12 iterations runs 12 times. Of a
    conditional's branches the one with the most FLOPs runs, and of equal ones the first. The body of a loop without a known
    trip count runs once.
    """
    count = flops_counter(module)
    waiting = [(module.entry_computation, 1)]
    while waiting:
        computation, times = waiting.pop()
        for i in computation.instructions:
            yield computation, i, times
            if i.opcode == "conditional":
                waiting.append((module.computations[max(i.called, key=lambda name: count(name).total)], times))
            elif i.opcode in ("fusion", "call", "while", "custom-call") or i.opcode.endswith("-start"):
                waiting += [(module.computations[name], times * i.num_trips) for name in i.called]


def instruction_flops(
    computation: Computation, instruction: Instruction, count: Callable[[str], ExecutedFlops]
) -> ExecutedFlops:
    """FLOPs of one instruction of `computation`, including the computations that it calls.

    Args:
        computation: The computation that contains the instruction. It gives the shapes of the operands.
        instruction: The instruction.
        count: Function from the name of a called computation to its FLOPs.
    """
    opcode = instruction.opcode
    if opcode == "ragged-dot":
        lhs = computation.operand_shapes(instruction)[0][0]
        contracting, ragged = (instruction.dims_attr(name) for name in ("lhs_contracting_dims", "lhs_ragged_dims"))
        return _ragged_flops(instruction.shapes[0].dims, lhs.dims, contracting, ragged)
    if opcode in ("dot", "scaled-dot"):
        lhs = computation.operand_shapes(instruction)[0][0]
        return _matmul(instruction.shapes[0].dims, lhs.dims, instruction.dims_attr("lhs_contracting_dims"))
    if opcode == "convolution":
        lhs, rhs = (shapes[0].dims for shapes in computation.operand_shapes(instruction)[:2])
        flops = _hlo_convolution(instruction.attrs, lhs, rhs, instruction.shapes[0].dims)
        # XLA for a TPU writes each matmul as a convolution.
        is_dot = instruction.op_name.endswith("dot_general")
        return ExecutedFlops(matmul_flops=flops.convolution_flops, num_matmuls=1) if is_dot else flops
    if opcode.startswith("custom-call") and (flops := _custom_call(computation, instruction)):
        return flops
    if not instruction.called or opcode.endswith(("-done", "-update")) or instruction.runs_on_host:
        return NO_FLOPS
    if opcode == "while":
        body = count(instruction.called[-1])
        if instruction.trip_count is None:
            return replace(body, num_unknown_loops=body.num_unknown_loops + 1)
        return body.repeated(instruction.trip_count)
    if opcode == "conditional":
        return max((count(name) for name in instruction.called), key=lambda c: c.total)
    if opcode in ("fusion", "call", "custom-call") or opcode.endswith("-start"):
        return add_flops(count(name) for name in instruction.called)
    return NO_FLOPS  # reduce, sort, scatter, map: scalar computations


def _custom_call(computation: Computation, instruction: Instruction) -> ExecutedFlops | None:
    operands = [shapes[0] for shapes in computation.operand_shapes(instruction) if shapes]
    match kind := kind_of_call(instruction):
        case "matmul":
            return _matmul_call(instruction, operands)
        case "attention" | "attention gradient" | "attention gradient of queries":
            if _pallas_target(instruction.op_name):
                results = [shape.dims for shape in instruction.shapes]
                return _splash_flops(kind, _floating(computation, instruction), results, instruction.op_name)
            scores = _quoted_ints(_SCORES, instruction.attrs)
            mask = _MASK.search(instruction.attrs)
            q, v = operands[0].dims, operands[2].dims
            is_gradient = kind == "attention gradient"
            return _attention_flops(scores, q[-1], v[-1], mask[1] if mask else "", _window(instruction), is_gradient)
        case None:
            return None
    result, first, second = instruction.shapes[0].dims, operands[0].dims, operands[1].dims
    match kind:
        case "convolution's filter gradient":  # input, output gradient -> filter gradient
            return _hlo_convolution(instruction.attrs, first, result, second)
        case "convolution's input gradient":  # output gradient, filter -> input gradient
            return _hlo_convolution(instruction.attrs, result, second, first)
        case "convolution":
            return _hlo_convolution(instruction.attrs, first, second, result)


def _floating(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    """The shapes of the operands that are floating-point numbers."""
    shapes = (shapes[0] for shapes in computation.operand_shapes(instruction) if shapes)
    return [shape.dims for shape in shapes if shape.dtype.startswith(("f", "bf"))]


def _matmul_call(instruction: Instruction, operands: Sequence[Shape]) -> ExecutedFlops:
    lhs, rhs, out = operands[0], operands[1], instruction.shapes[0]
    if _CONTRACTING.search(instruction.attrs):
        return _matmul(out.dims, lhs.dims, _quoted_ints(_CONTRACTING, instruction.attrs))
    # [batch, m, k] x [batch, k, n]: the product of the operand sizes is batch^2 m n k^2. The output size times the batch is
    # batch^2 m n. So the quotient is k^2.
    batch = math.prod(out.dims[:-2])
    contracted = math.isqrt(lhs.num_elements * rhs.num_elements // max(out.num_elements * batch, 1))
    return ExecutedFlops(matmul_flops=2 * out.num_elements * contracted, num_matmuls=1)


def _hlo_convolution(attrs: str, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> ExecutedFlops:
    """FLOPs of a convolution, from its forward form's shapes, its `window` and `dim_labels`."""
    window = re.search(r"window=\{([^}]*)\}", attrs)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attrs)
    if not labels:
        return NO_FLOPS
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    spatial = [str(i) for i in range(len(labels[1]) - 2)]

    def per_dim(key: str, default: str) -> list[int]:
        return [int(n.split("_")[0]) for n in fields.get(key, "x".join(default * len(spatial))).split("x") if n]

    orders = ("bf", "oi", "bf")
    specs = [[text.index(c) for c in (*order, *spatial)] for text, order in zip(labels.groups(), orders, strict=True)]
    keys = (("stride", "1"), ("pad", "0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))
    return _convolution((lhs, rhs, out), specs, zip(*(per_dim(*key) for key in keys), strict=True))


# From the jaxpr.


def count_step_flops(jaxpr: Any) -> ExecutedFlops:
    """The FLOPs that JAX requested, counted from a (closed) jaxpr without XLA.

    The body of a `scan` counts `length` times. The body of a `while` counts once (see `num_unknown_loops`). Of a `cond` the
    branch with the most FLOPs counts. The jaxprs inside jit, remat, custom_jvp and custom_vjp count. What is inside a
    shard_map counts for each device. Each row of a ragged product counts for all groups, because XLA expands the product to
    a masked one over all groups (xla/hlo/transforms/expanders/ragged_dot_rewriter.cc). Kernels of the program's own
    (`KERNELS`) don't count, but for splash attention's.

    Args:
        jaxpr: `jax.jit(step).trace(...).jaxpr` or `jax.make_jaxpr(step)(...)`.
    """
    return _jaxpr_flops(jaxpr, "")


def _jaxpr_flops(jaxpr: Any, scope: str) -> ExecutedFlops:
    return add_flops(equation_flops(eqn, scope) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def equation_flops(eqn: Any, scope: str = "") -> ExecutedFlops:
    """The FLOPs of one equation of a jaxpr, counted as in `count_step_flops`.

    `scope` is that of the operation with the jaxpr.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in KERNELS:
        kind = call_kind(f"{name}${params.get('name')}")
        floating = [var.aval.shape for var in eqn.invars if var.aval.dtype.kind not in "iub"]
        return _splash_flops(kind, floating, [var.aval.shape for var in eqn.outvars], scope) if kind else NO_FLOPS
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return _matmul(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, contracting)
    if name == "ragged_dot_general":
        dims = params["ragged_dot_dimension_numbers"]
        (contracting, _), _ = dims.dot_dimension_numbers
        out, lhs, sizes = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
        rows = _ragged_flops(out, lhs, contracting, dims.lhs_ragged_dimensions)
        return replace(rows, matmul_flops=rows.matmul_flops * sizes[-1])
    if name == "conv_general_dilated":
        return _jaxpr_convolution(eqn)
    if sizes := attention_sizes(eqn):
        return _attention_flops(*sizes, "_bwd" in name)
    if name == "shard_map":
        return add_flops(count_step_flops(inner) for inner in core.jaxprs_in_params(params)).repeated(shard_map_devices(eqn))
    if name == "scan":
        return count_step_flops(params["jaxpr"]).repeated(params["length"])
    if name == "while":
        body = count_step_flops(params["body_jaxpr"])
        return replace(body, num_unknown_loops=body.num_unknown_loops + 1)
    if name == "cond":
        return max((count_step_flops(branch) for branch in params["branches"]), key=lambda c: c.total)
    return add_flops(_jaxpr_flops(inner, f"{scope}/{eqn.source_info.name_stack}") for inner in core.jaxprs_in_params(params))


def requested_product(eqn: Any) -> Product | None:
    """The shapes of the matmul that an equation of a jaxpr requests. None for another one."""
    if eqn.primitive.name != "dot_general":
        return None
    (summed, _), (of_batch, _) = eqn.params["dimension_numbers"]
    avals = [var.aval for var in (*eqn.invars[:2], *eqn.outvars)]
    is_aligned = all(not aval.shape or aval.dtype.itemsize * aval.shape[-1] % _ALIGNED_BYTES == 0 for aval in avals)
    return _product(avals[0].shape, avals[-1].shape, summed, of_batch, is_aligned=is_aligned)


def requested_attention(eqn: Any) -> Attention | None:
    """The shapes of the attention that an equation of a jaxpr requests. None for another one."""
    if not (sizes := attention_sizes(eqn)):
        return None
    scores, head_size, _, _, window = sizes
    return _attention("_bwd" in eqn.primitive.name, head_size, scores[-1], window)


def _jaxpr_convolution(eqn: Any) -> ExecutedFlops:
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    pads = (low for low, _ in params["padding"])
    windows = zip(params["window_strides"], pads, params["lhs_dilation"], params["rhs_dilation"], strict=True)
    shapes = [var.aval.shape for var in (*eqn.invars, *eqn.outvars)]
    return _convolution(shapes, (dims.lhs_spec, dims.rhs_spec, dims.out_spec), windows)


def _convolution(
    shapes: Sequence[Sequence[int]], specs: Sequence[Sequence[int]], windows: Iterable[tuple[int, ...]]
) -> ExecutedFlops:
    """FLOPs of a convolution.

    Args:
        shapes: of the input, the filter and the output.
        specs: where each of them has batch, features and the spatial dimensions; the filter has output and input features.
        windows: of each spatial dimension the stride, the lower padding, and the dilations of the input and the filter.
    """
    (_, _, *lhs), (_, of_input, *rhs), (batch, features, *out) = (
        [shape[n] for n in spec] for shape, spec in zip(shapes, specs, strict=True)
    )
    pairs = math.prod(_window_pairs(*sizes, *window) for *sizes, window in zip(lhs, rhs, out, windows, strict=True))
    return ExecutedFlops(convolution_flops=2 * batch * features * of_input * pairs)


def _product(
    lhs: Sequence[int], out: Sequence[int], summed: Iterable[int], of_batch: Iterable[int], *, is_aligned: bool
) -> Product | None:
    k, batch = (math.prod(lhs[d] for d in dims) for dims in (summed, of_batch))
    m = math.prod(lhs) // max(1, k * batch)
    n = math.prod(out) // max(1, m * batch)
    return Product(batch, m, n, k, is_aligned) if min(batch, m, n, k) else None


def _attention(is_gradient: bool, head_size: int, length: int, window: int) -> Attention:
    # A long sequence with a window is as fast, for each FLOP, as one of twice the window.
    length = min(length, 2 * window) if window else length
    return Attention("backward" if is_gradient else "forward", head_size, length)


def _matmul(out: Sequence[int], lhs: Sequence[int], contracting: Iterable[int]) -> ExecutedFlops:
    flops = 2 * math.prod(out) * math.prod(lhs[d] for d in contracting)
    return ExecutedFlops(matmul_flops=flops, num_matmuls=1)


def _ragged_flops(
    out: Sequence[int], lhs: Sequence[int], contracting: Sequence[int], ragged: Sequence[int]
) -> ExecutedFlops:
    """FLOPs of a library's ragged product: each row is multiplied by its own group's matrix.

    Where the rows are summed over, as for the gradient of the kernels, the result has a matrix for each group as its first
    dimension, and each row counts in one of them.
    """
    of_all = _matmul(out, lhs, contracting)
    groups = out[0] if set(ragged) & set(contracting) else 1
    return replace(of_all, matmul_flops=of_all.matmul_flops // groups)


#: By kind, how often a kernel of attention multiplies over the query head dim, and over the value head dim.
_ATTENTION: dict[CallKind | None, tuple[int, int]] = {
    "attention": (1, 1),
    "attention gradient": (2, 2),
    "attention gradient of queries": (2, 1),
}


def _splash_flops(
    kind: CallKind, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], scope: str
) -> ExecutedFlops:
    """FLOPs of a kernel of splash attention, as `_attention_flops` counts them.

    The mask isn't in the program. It is causal, with the window that the scope has.

    Args:
        kind: what the kernel computes.
        operands: the shapes of those that are floating-point numbers: query, key and value come first.
        results: the shapes of the results. The gradients of keys and values may have that of queries beside them.
        scope: JAX's name stack around the kernel.
    """
    q, k, v = operands[:3]
    over_qk, over_v = _ATTENTION[kind]
    over_qk += kind == "attention gradient" and sum(len(shape) >= len(q) for shape in results) > 2
    window = _WINDOW_SCOPE.search(scope)
    pairs = _seen_pairs(q[-2], k[-2], "CAUSAL", int(window[1]) if window else 0)
    return ExecutedFlops(
        attention_flops=2 * math.prod(q[:-2]) * pairs * (over_qk * q[-1] + over_v * v[-1]),
        num_attention_forward=int(kind == "attention"),
        num_attention_backward=int(kind == "attention gradient"),
    )


def _seen_pairs(queries: int, keys: int, mask_type: str, window: int) -> int:
    """The pairs of a query and a key that it sees.

    They are half of all under a causal mask, and fewer with a window.
    """
    pairs = queries * keys
    if "CAUSAL" in mask_type:
        pairs = queries * window - window**2 // 2 if 0 < window < keys == queries else pairs // 2
    return pairs


def _attention_flops(
    scores: Sequence[int], qk_head_dim: int, v_head_dim: int, mask_type: str, window: int, backward: bool
) -> ExecutedFlops:
    """FLOPs of attention over `scores` = (batch, query heads, query length, key length).

    The forward matmuls are QK and PV. The backward matmuls are QK again, dP and dV over the value head dim, and dQ and dK
    over the query head dim. A causal mask halves both, and of a sliding `window` under it only the keys inside count. Grouped
    KV heads don't reduce the FLOPs. Padding or packed segments reduce the work at run time further, but the count doesn't
    include that reduction.
    """
    dims = 3 * qk_head_dim + 2 * v_head_dim if backward else qk_head_dim + v_head_dim
    batch, heads, queries, keys = scores
    flops = 2 * batch * heads * _seen_pairs(queries, keys, mask_type, window) * dims
    return ExecutedFlops(
        attention_flops=flops, num_attention_forward=int(not backward), num_attention_backward=int(backward)
    )


def _window_pairs(lhs: int, rhs: int, out: int, stride: int, pad_low: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Number of pairs (output, kernel position) along a dimension that read an input's element.

    The other pairs read padding or a hole of a dilation.
    """
    num_pairs = 0
    for kernel in range(rhs):
        for position in range(kernel * rhs_dilation - pad_low, out * stride + kernel * rhs_dilation - pad_low, stride):
            num_pairs += position % lhs_dilation == 0 and 0 <= position // lhs_dilation < lhs
    return num_pairs


def _quoted_ints(pattern: re.Pattern[str], text: str) -> tuple[int, ...]:
    match = pattern.search(text)
    return tuple(int(n) for n in re.findall(r"\d+", match[1])) if match else ()
