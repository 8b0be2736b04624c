"""Says what a compiled step saves and recomputes, beside what its policy requested.

A policy is a request to JAX, and XLA may do otherwise. For example, XLA merges a recompute with the forward pass if nothing
separates the two (`prevent_cse=False` in unrolled code). Then nothing is recomputed, and the values stay in memory. So the
operations that are recomputed are counted in the compiled program:

    kept = saved_and_recomputed(compilation)
    kept.again[0]   # Recomputed("matmul", num_forward=73, num_asked=60, num_again=60, flops_again=...)
    kept.saved[0]   # SavedValues("input", "", num_values=12, num_bytes=603979776)

The names of recomputed operations alone don't tell, for three reasons. XLA names a merged operation after either of the two
operations. It leaves some matmuls without a name. It computes small matmuls without a matmul. So the count also compares the
compiled program with the traced program, of which it is known where XLA can merge: not between two loops, nor over barriers.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from jaxremat.xla import hlo
from jaxremat.xla.categories import is_recompute, phase_of
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import KERNELS, NO_FLOPS, ExecutedFlops, add_flops, executed, flops_counter, instruction_flops
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.saved import saved_values
from jaxremat.xla.step_facts import Operation, Recomputed, SavedAndRecomputed
from jaxremat.xla.traced import needed_places


def saved_and_recomputed(compilation: Compilation) -> SavedAndRecomputed:
    """What a compiled step saves and recomputes.

    On a mesh, bytes and FLOPs are those of one device.
    """
    traced, saved = compilation.traced, saved_values(compilation.jaxpr, compilation.mesh)
    num_devices = compilation.mesh.num_devices
    uses_host = any(shape.on_host for _, i, _ in executed(compilation.module) for shape in i.shapes)
    named = traced.policy_names & traced.names.keys()
    forward, backward = _gathered_bytes(compilation)
    return SavedAndRecomputed(
        num_checkpoints=traced.num_checkpoints,
        again=tuple(
            replace(some, flops_again=some.flops_again // num_devices)
            for some in _recomputed_by_kind(_requested(compilation.jaxpr), _done(compilation.module, num_devices))
        ),
        saved=tuple(replace(values, on_host=values.on_host and uses_host) for values in saved.values),
        unread_names=tuple(sorted(named - saved.read_names)),
        unmatched_names=tuple(sorted(traced.policy_names - named)),
        gathered_forward_bytes=forward,
        gathered_backward_bytes=backward,
    )


def recomputed_flops(compilation: Compilation, counted: SavedAndRecomputed) -> int:
    """FLOPs that a device executes again: of recomputed operations and of XLA's own copies.

    Under `none` the step would execute so many less. Both counts are of one program. What XLA leaves out of it or rewrites is in
    neither: gradients that nobody reads, such as those of frozen parameters, and the padding of a convolution.
    """
    module = compilation.module
    count = flops_counter(module)
    copies = (instruction_flops(c, i, count).repeated(times) for c, i, times in executed(module) if i.is_xla_remat)
    return sum(some.flops_again for some in counted.again) + add_flops(copies).total


def _gathered_bytes(compilation: Compilation) -> tuple[int, int] | tuple[None, None]:
    """Bytes of the parameters that a device gathers in the forward and in the backward pass.

    None for one device.
    """
    if compilation.mesh.num_devices == 1:
        return None, None
    sums = Counter[bool]()
    for exchange in compilation.exchanges:
        if exchange.what == "parameter":
            sums[phase_of(exchange.op_name) == "backward"] += exchange.num_bytes * exchange.times
    return sums[False], sums[True]


# Counting.


@dataclass(frozen=True)
class _Work:
    """An operation of the forward pass or of a recompute.

    Attributes:
        operation: its kind.
        path: module path and operation, the same in the traced and in the compiled program.
        is_again: whether it belongs to a recompute.
        times: number of times that it runs.
        amount: FLOPs of all those times. For a kernel, whose FLOPs aren't known, it is `times`.
        is_apart: whether it is a recompute in another loop than its forward pass. Known of the traced program alone.
        has_barriers: whether it is a recompute between barriers. Known of the traced program alone.
    """

    operation: Operation
    path: str
    is_again: bool
    times: int
    amount: int
    is_apart: bool = False
    has_barriers: bool = False

    @property
    def module(self) -> str:
        """The path of the module around the operation's own module.

        XLA joins siblings such as query and key.
        """
        return "/".join(self.path.split("/")[:-2])

    @property
    def is_mergeable(self) -> bool:
        """Whether XLA for a GPU may merge it with the forward pass.

        XLA for a CPU merges over barriers, too.
        """
        return self.is_again and not (self.is_apart or self.has_barriers)


def _requested(jaxpr: Any) -> list[_Work]:
    """The operations of the traced program, without those whose results nothing needs.

    XLA leaves these out too.
    """
    return [
        replace(work, is_apart=place.is_apart, has_barriers=place.has_barriers)
        for place in needed_places(jaxpr.jaxpr)
        if place.is_leaf
        for name in [place.eqn.primitive.name]
        for work in _work(f"{place.scope}/{name}", place.times, place.flops, name in KERNELS)
    ]


def _done(module: hlo.Module, num_devices: int) -> list[_Work]:
    """The operations of the compiled program, with the FLOPs of all devices."""
    return [
        work
        for computation, i, times in executed(module)
        for flops in [instruction_flops(computation, i, lambda name: NO_FLOPS)]
        if flops.total or _is_kernel(i)
        for work in _work(scope_in(module, computation, i), times, flops.repeated(num_devices), _is_kernel(i))
    ]


def scope_in(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction, max_steps: int = 4) -> str:
    """The scope of an instruction. XLA makes some matmuls without one.

    Such a matmul gets the scope of an operand: of one from the backward pass if there is any, else of one from a recompute.
    An operation of the backward pass always reads a gradient, and an operation of a recompute never does.
    """
    scope = _scope_in_fusion(module, computation, instruction) or instruction.op_name
    if scope or not max_steps:
        return scope
    operands = (computation.by_name[name] for name in instruction.operands)
    scopes = [scope_in(module, computation, operand, max_steps - 1) for operand in operands]
    return max(scopes, key=lambda scope: (phase_of(scope) == "backward") * (1 if is_recompute(scope) else 2), default="")


def _scope_in_fusion(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> str:
    """The scope of the operation that makes one of a fusion's several results.

    The fusion has the scope of the first.
    """
    source = computation.by_name[instruction.operands[0]] if instruction.opcode == "get-tuple-element" else None
    if source is None or source.opcode != "fusion":
        return ""
    fused = module.computations[source.called[0]]
    return fused.by_name[fused.root.operands[instruction.tuple_index]].op_name if fused.root.opcode == "tuple" else ""


def _is_kernel(instruction: hlo.Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.op_name.rpartition("/")[2] in KERNELS


def _work(scope: str, times: int, flops: ExecutedFlops, is_kernel: bool) -> Iterator[_Work]:
    """The operation at `scope`, if it counts.

    Without a scope it counts as an operation of the forward pass.
    """
    is_again = is_recompute(scope)
    if (flops.total or is_kernel) and (is_again or phase_of(scope) in ("forward", None)):
        yield _Work(_kind_of_flops(flops), operation_path(scope), is_again, times, times * flops.total or times)


def operation_path(scope: str) -> str:
    """The module path and the operation, equal in the forward pass and in its recompute.

    `transpose(jvp(Net))/layers/jvp(Net)/layers/rematted_computation/Block/dot_general` gives `Net/layers/Block/dot_general`.
    """
    parts = scope.split("/")
    last = max((n for n, part in enumerate(parts) if "jvp(" in part), default=0)
    return plain_scope("/".join(parts[last:])).removesuffix("_wrapper")  # JAX lowers an operation called `x_wrapper` to `x`


def _kind_of_flops(flops: ExecutedFlops) -> Operation:
    if flops.attention_flops:
        return "attention"
    return "convolution" if flops.convolution_flops else "matmul" if flops.matmul_flops else "kernel"


def _recomputed_by_kind(requested: list[_Work], done: list[_Work]) -> Iterator[Recomputed]:
    """The operations that are recomputed, numbered as in `requested`."""
    operations = {work.path: work.operation for work in (*done, *requested)}  # XLA may turn a convolution into a matmul
    for operation in get_args(Operation):
        wanted = [work for work in requested if work.operation == operation]
        found = [work for work in done if operations[work.path] == operation]
        if wanted or found:
            yield _of_operation(operation, wanted, found)


def _of_operation(operation: Operation, requested: list[_Work], done: list[_Work]) -> Recomputed:
    """The recomputed operations of one kind.

    What the compiled program has less of is missing in the recompute, whichever of the two names XLA left. XLA also joins
    siblings, such as query and key, under the name of one of them, and leaves some matmuls without a name. Then one path lacks
    what another has in addition, and the sum lacks nothing. XLA pads matmuls, and computes small ones, such as those with a
    vector, without a matmul. So where nothing can be merged, what the program has nowhere at its path and size isn't missing.
    """
    again, forward = _again_and_forward(requested)
    named, _ = _again_and_forward(done)
    may_merge = any(work.is_mergeable for work in again)

    def key(work: _Work) -> Hashable:
        return work.module if may_merge else (work.path, work.amount // work.times)

    of_again, of_forward, of_done, of_named = (_amounts(work, key) for work in (again, forward, done, named))
    counted = of_again.keys() if may_merge else of_again.keys() & of_done.keys()
    lacks = Counter[Hashable]()
    for one in counted:
        found = max(of_done[one] - of_forward[one], 0 if may_merge else of_named[one])
        lacks[one] = max(0, of_again[one] - found)
    all_lack = sum(work.amount for work in requested if may_merge or key(work) in of_done) - of_done.total()
    is_missing = min(1, max(0, all_lack) / max(1, lacks.total()))
    times = {one: sum(work.times for work in again if key(work) == one) for one in counted}
    num_missing = round(is_missing * sum(n * lacks[one] / of_again[one] for one, n in times.items()))
    num_again = sum(work.times for work in again) - num_missing
    beyond = max(0, min(of_done.total() - of_forward.total(), of_again.total()))
    flops = beyond if may_merge and num_missing else max(beyond, of_named.total())
    return Recomputed(
        operation,
        num_forward=sum(work.times for work in forward),
        num_asked=num_again + min(num_missing, sum(work.times for work in again if not work.is_apart)),
        num_again=num_again,
        flops_again=flops * (operation != "kernel" and num_again > 0),
    )


def _again_and_forward(work: list[_Work]) -> tuple[list[_Work], list[_Work]]:
    return [some for some in work if some.is_again], [some for some in work if not some.is_again]


def _amounts(work: list[_Work], key: Callable[[_Work], Hashable]) -> Counter[Hashable]:
    amounts = Counter[Hashable]()
    for some in work:
        amounts[key(some)] += some.amount
    return amounts
