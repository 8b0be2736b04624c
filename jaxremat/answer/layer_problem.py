"""Traces one layer to a `Problem`.

The problem has the layer's forward values, the operations that make them, and what each costs.

The layer and its residuals are traced together (`jax.vjp`, without rematerialization). Every forward value, its name and its use
in the backward pass are then in one program.

A policy can save the results of `checkpoint_name`, and the results of fused attention all together. It can't save anything else:
integers, masks, and values inside custom derivatives. These are in the problem because recomputing goes through them.

`checkpoint_name` makes a new value, and JAX saves only this one. If nothing reads the value from before its name, both are one
value here. `autoname` makes sure of that. Otherwise they are two values, with an operation that costs nothing between them.

A layer that computes `checkpoint_name(x @ w, "h")` gives a problem with the values `args[0]`, `args[1]` and `h`, of which `h` can
be saved as `save:h`.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxremat.answer.attention_kernels import with_attention
from jaxremat.answer.layer_share import ALONE, Lies, Share
from jaxremat.chips.speed import F32_HIGHEST, DeviceSpeed, KernelClass
from jaxremat.knapsack.problem import LEAST_S, Op, Problem, Value
from jaxremat.policy.autoname import layer_scope, unused_name, value_path
from jaxremat.policy.jax_private import FUSED_ATTENTION, written_name
from jaxremat.policy.names import OPAQUE
from jaxremat.policy.program import CALLS, DERIVATIVE_CALLS, Equation, Program, flatten
from jaxremat.policy.tree import combine, is_array, is_float, partition, partition_by
from jaxremat.xla.flops import equation_flops, requested_attention
from jaxremat.xla.kernels import matmul_class

#: How an equation of a jaxpr says that float32 is multiplied without TF32.
_HIGHEST = re.compile("HIGHEST|F32_F32_F32")
#: Operations for which XLA makes no kernel of their own, and for which no other kernel writes memory.
_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "name", "stop_gradient", "copy"})
#: Operations that XLA doesn't fuse with their neighbours. Matmuls, attention and convolutions belong to them too. Those sharding
#: constraints that are left are gathers.
_UNFUSED = OPAQUE | {
    "sharding_constraint",
    "sort",
    "top_k",
    "fft",
    "scatter",
    "scatter-add",
    "cholesky",
    "triangular_solve",
    "eigh",
    "svd",
    "ffi_call",
}
#: Operations that libraries compute. A library reads an array of its own, and can't read a slice of a stack of residuals.
_LIBRARY_CALLS = frozenset({FUSED_ATTENTION, "dot_general", "conv_general_dilated", "ffi_call"})


@dataclass(frozen=True)
class TracedLayer:
    """A layer traced with its gradient.

    Attributes:
        program: the forward pass. Its outputs are the results and the residuals, and then what the gradient reads.
        num_results: how many of its outputs are results.
        num_own: how many of its outputs are results or residuals.
        paths: of its arguments, such as `args[0]/params/mlp/wi_0/kernel`.
        gradient: the backward pass.
        read: the constants of `gradient` that are the last outputs of `program`.
    """

    program: Program
    num_results: int
    num_own: int
    paths: tuple[str, ...]
    gradient: Program
    read: tuple[int, ...]


@dataclass(frozen=True)
class Keep:
    """How a policy saves a value: by its checkpoint name or by the primitive that makes it.

    The policy's text is `save:NAME` for a name and `+attention` for a primitive. One of the two fields is empty. A primitive is
    saved everywhere in a layer: a layer with two fused attentions saves the results of both or of none.
    """

    name: str = ""
    primitive: str = ""


def trace_layer(function: Callable[..., Any], args: tuple[Any, ...], frozen: Collection[int] = ()) -> TracedLayer:
    """Traces a layer, `function(*args)`, and its gradient.

    Args:
        function: a function of arrays, such as `autoname(Block)(config).apply`. It returns a pytree of arrays.
        args: its arguments. Leaves may be `jax.ShapeDtypeStruct`s.
        frozen: the numbers of the leaves of `args` that aren't differentiated, beside those that aren't floating-point.
    """
    opened, starts, read = CALLS | DERIVATIVE_CALLS, (0, 0), list[int]()
    gradient: Any = None  # a Program, when the function was traced

    def both(*args: Any) -> list[Any]:
        nonlocal starts, gradient, read
        leaves, tree = jax.tree.flatten(args)
        is_trained = [is_float(leaf) and number not in frozen for number, leaf in enumerate(leaves)]
        floats, rest = partition_by(args, tree.unflatten(is_trained))
        y, pullback = jax.vjp(lambda floats: function(*combine(floats, rest)), floats)
        moved, others = partition(y, is_float)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0), others)
        gradient = flatten(jax.make_jaxpr(lambda moved: pullback(combine(moved, zeros)))(moved), opened)
        traced = {number: value for number, value in gradient.constants if is_array(value)}
        results, residuals, read = jax.tree.leaves(y), jax.tree.leaves(pullback), [*traced]
        starts = len(results), len(results) + len(residuals)
        return [*results, *residuals, *traced.values()]

    program = with_attention(flatten(jax.make_jaxpr(both)(*args), opened))
    paths = (
        f"args[{path[0].idx}]" + "".join(f"/{jax.tree_util.keystr((key,), simple=True)}" for key in path[1:])
        for path, _ in jax.tree.leaves_with_path(args)
    )
    numbers = tuple((number, None) for number, _ in gradient.constants)  # not their tracers, whose trace has ended
    return TracedLayer(program, *starts, tuple(paths), replace(gradient, constants=numbers), tuple(read))


def layer_problem(
    layer: TracedLayer, speed: DeviceSpeed, *, in_scan: bool = True, share: Share = ALONE
) -> tuple[Problem, Problem, dict[str, Keep]]:
    """The problem of one layer by both assumptions on reductions.

    A value that can be saved by its checkpoint name is called by that name. Other values are called by module path and
    operation. If several values share a checkpoint name, none of them can be saved alone, and none is offered; `autoname` gives
    each value a name of its own. The arguments are the problem's inputs, with names such as `args[0]/params/mlp/wi_0/kernel`.
    Operations that lead to no residual and no output are left out.

    `Op.flops` is exact by the rules of `count_step_flops`. `Op.recompute_s` is an estimate:

    * Matmuls, fused attention and convolutions take what the clock predicts for such a kernel (`chips/speed.py`): the longer of
      two times, plus one launch. These are the time of their FLOPs, by the measured table of their shapes or by the share of
      the peak that their class reaches, and that of their operands' and results' bytes. Loops, branches and sorts take the
      same times at a large matmul's rate. A `while` counts as one turn.
    * Reductions over other axes than the last take the time of the bytes that they read and write, plus one launch.
    * Everything else is fused: norms and softmaxes, with what they read and write. If a matmul or another operation of the
      first kind reads the result, itself or through a view, it is written and read once, plus one launch. Otherwise it takes a
      nanosecond. That is so even if the backward pass reads it, because the kernel that reads it makes it again. Views take a
      nanosecond too.

    Saving a byte inside a scan takes three passes over memory: XLA fills the stack of residuals with zeros before the loop, and
    copies each layer's values into it, with one launch per value. A value that a library reads is copied out of the stack
    again, which takes two more passes and another launch. Libraries compute matmuls, convolutions, fused attention, and its
    derivative, which reads the results of fused attention too. XLA's own kernels read the stack itself.

    In unrolled layers, saving a value that is written to memory anyway costs nothing but a nanosecond per operation of the
    layer, so that views alone never make it worth while. Saving another value takes one write and one read. Offloading a byte
    takes one host transfer each way. No kernel hides them, which makes this an upper bound.

    Args:
        layer: the layer.
        speed: the device's speed.
        in_scan: whether the layer is the body of a scan over layers.
        share: of several devices, what one of them stores and computes of the layer, and what its gathers cost.

    Returns:
        Two problems, and how each saveable value is saved, by its name in the problems. In the first problem reductions over the
        last axis cost nothing, and in the second they are kernels of their own. XLA fuses them in many layers, and not in all.
        The problems differ in `Op.recompute_s` alone.

    References:
        jax/_src/ad_checkpoint.py (`saved_residuals`, which finds residuals the same way).
    """
    program, residuals, first, lies = _forward_and_residuals(layer, share)
    merged = _merge_names(program, residuals)
    needed = {merged.value(number) for number in residuals}
    equations = _live(program, merged, needed)
    read_first = {merged.value(number) for number in first} - _leading_to(needed, equations, merged)
    makers = {number: equation for equation in equations for number in equation.outputs}
    read = needed.union(*(merged.operands(equation) for equation in equations))
    given = [number for number in (*program.inputs, *dict(program.constants)) if number in read]
    numbers = [*given, *(number for equation in equations for number in equation.outputs)]

    written = _read_by(equations, merged, _has_a_kernel)
    copied = _copied(equations, merged) if in_scan else set[int]()
    save_s = _save_seconds(lies, equations, written, copied, speed, in_scan)
    ways = {number: way for number in makers if (way := _way_to_keep(makers[number], merged.names.get(number, ()), merged))}
    labels = _labels(program, layer.paths, equations, given, {number: way.name for number, way in ways.items()})
    values = tuple(
        Value(
            name=labels[number],
            num_bytes=lies.num_bytes(number),
            saveable=number in ways,
            offloadable=number in ways and bool(ways[number].name),
            needed=number in needed,
            save_s=save_s.get(number, 0.0),
            is_copied=number in copied,
            is_read_first=number in read_first,
        )
        for number in numbers
    )
    place = {number: n for n, number in enumerate(numbers)}
    scope = layer_scope(program)
    fused_s, unfused_s = (_recompute_seconds(lies, equations, merged, written, speed, fused) for fused in (True, False))
    ops = tuple(
        Op(
            name=value_path(equation, scope),
            inputs=tuple(place[number] for number in merged.operands(equation)),
            outputs=tuple(place[number] for number in equation.outputs),
            recompute_s=cost,
            flops=lies.flops(equation),
            together=equation.kind == FUSED_ATTENTION,
        )
        for equation, cost in zip(equations, fused_s, strict=True)
    )
    problem = Problem(
        values=values,
        ops=ops,
        inputs=tuple(range(len(given))),
        save_s_per_byte=3 / speed.bytes_per_s() if in_scan else 0.0,
        offload_s_per_byte=2 / speed.host_link_bytes_per_s,
    )
    unfused = replace(problem, ops=tuple(replace(op, recompute_s=cost) for op, cost in zip(ops, unfused_s, strict=True)))
    return problem, unfused, {labels[number]: way for number, way in ways.items()}


def _forward_and_residuals(layer: TracedLayer, share: Share) -> tuple[Program, set[int], set[int], Lies]:
    """The program of a layer and its residuals.

    With it come the numbers of the values that are residuals, of those that the gradient reads first, and how all values lie.
    """
    program, lies = share.of(layer.program)
    of_layer = dict(zip(layer.read, program.outputs[layer.num_own :], strict=True))
    program = replace(program, outputs=program.outputs[: layer.num_own])
    residuals = {atom for atom in program.outputs[layer.num_results :] if isinstance(atom, int)}
    given = {*program.inputs, *dict(program.constants)}
    made = {number: atom for number, atom in of_layer.items() if isinstance(atom, int) and atom not in given}
    return program, residuals, _read_first(layer.gradient, made), lies


def _read_first(gradient: Program, made: Mapping[int, int]) -> set[int]:
    """The values that a layer's gradient reads before anything recomputed, and not later.

    Such a value is only read, itself or through an operation on it alone, beside cotangents and the layer's arguments, and
    beside what is made of these.

    Args:
        gradient: the backward pass of the layer.
        made: from the number of a value that it reads to the value's number in the layer's own program.
    """
    there = {*gradient.inputs, *dict(gradient.constants)} - made.keys()
    views, later = dict(made), set[int]()
    for equation in gradient.equations:
        operands = {atom for atom in equation.inputs if isinstance(atom, int)}
        others = operands - there
        if not others:
            there.update(equation.outputs)
        elif len(operands) == 1 and others <= views.keys():
            views.update(dict.fromkeys(equation.outputs, views[others.pop()]))
        elif len(others) > 1 or not others <= views.keys():
            later.update(views[number] for number in others & views.keys())
    return {*made.values()} - later


def _leading_to(needed: set[int], equations: list[Equation], merged: "_Merged") -> set[int]:
    """The values that are read where one that is needed is made."""
    leading = set[int]()
    for equation in reversed(equations):
        if not (needed | leading).isdisjoint(equation.outputs):
            leading.update(merged.operands(equation))
    return leading


@dataclass(frozen=True)
class _Merged:
    """Which values are one with the values that name them.

    Attributes:
        same: from the number of a named value to the number of the value before its name.
        names: from the number of a value to its checkpoint names.
        times: how many values have each checkpoint name.
    """

    same: dict[int, int]
    names: dict[int, tuple[str, ...]]
    times: Counter[str]

    def value(self, number: int) -> int:
        return self.same.get(number, number)

    def operands(self, equation: Equation) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value(atom) for atom in equation.inputs if isinstance(atom, int)))


def _merge_names(program: Program, residuals: set[int]) -> _Merged:
    """Merges each value with the value that names it, if nothing else reads the former.

    Arguments and the results of fused attention are always merged. Arguments exist in any case, and the results of fused
    attention are saved by their primitive.
    """
    readers = Counter(atom for equation in program.equations for atom in equation.inputs if isinstance(atom, int))
    readers.update(atom for atom in program.outputs if isinstance(atom, int) and atom not in residuals)
    readers.update(residuals)
    kinds = {number: equation.kind for equation in program.equations for number in equation.outputs}
    same: dict[int, int] = {}
    names: dict[int, tuple[str, ...]] = {}
    for equation in program.equations:
        if equation.kind != "name":
            continue
        (before,), (after,), name = equation.inputs, equation.outputs, written_name(equation.eqn)
        if not isinstance(before, int):
            continue
        origin = same.get(before, before)
        if readers[before] == 1 or kinds.get(origin) in (None, FUSED_ATTENTION):
            same[after], names[origin] = origin, (*names.get(origin, ()), name)
        else:
            names[after] = (name,)
    return _Merged(same, names, Counter(name for of_value in names.values() for name in of_value))


def _live(program: Program, merged: _Merged, needed: set[int]) -> list[Equation]:
    """The equations that lead to an output or a residual.

    An equation that only names a value and was merged with it is left out.
    """
    wanted = needed | {merged.value(atom) for atom in program.outputs if isinstance(atom, int)}
    live: list[Equation] = []
    for equation in reversed(program.equations):
        if equation.kind == "name" and equation.outputs[0] in merged.same:
            continue
        if wanted.intersection(equation.outputs):
            wanted.update(merged.operands(equation))
            live.append(equation)
    return live[::-1]


def _way_to_keep(maker: Equation, names: tuple[str, ...], merged: _Merged) -> Keep | None:
    if maker.kind == FUSED_ATTENTION:
        return Keep(primitive=FUSED_ATTENTION)
    own = [name for name in names if merged.times[name] == 1]
    # `autoname` writes its own name last. It does so where other kinds of layers have the author's name too.
    return Keep(name=own[-1]) if own else None


def _labels(
    program: Program, paths: Iterable[str], equations: list[Equation], given: list[int], own: dict[int, str]
) -> dict[int, str]:
    """A unique name for each value.

    It is the value's checkpoint name if `own` has one, or else it is made of module path and operation.
    """
    labels = {number: name for number, name in own.items() if name}
    taken = set(labels.values())
    layer = layer_scope(program)
    bases = dict(zip(program.inputs, paths, strict=True))
    for equation in equations:
        base = value_path(equation, layer)
        stats = f"{base.removesuffix('fused')}softmax_stats"
        for position, number in enumerate(equation.outputs):
            bases[number] = stats if equation.kind == FUSED_ATTENTION and position else base
    for number in (*given, *(number for equation in equations for number in equation.outputs)):
        if number not in labels:
            labels[number] = unused_name(bases.get(number, "constant"), taken)
            taken.add(labels[number])
    return labels


# Costs of recomputing and saving.


def _recompute_seconds(
    lies: Lies,
    equations: list[Equation],
    merged: _Merged,
    written: set[int],
    speed: DeviceSpeed,
    fused_reductions: bool,
) -> list[float]:
    """The `Op.recompute_s` of each equation. `written` has the values that kernels read."""

    def traffic(of: Equation, numbers: Iterable[int], kernel_class: KernelClass = "elementwise") -> float:
        return sum(lies.moved_bytes(of, number) for number in numbers) / speed.bytes_per_s(kernel_class)

    def seconds(equation: Equation) -> float:
        moved = [*merged.operands(equation), *equation.outputs]
        if equation.outputs[0] in lies.gathers:
            return lies.gather_seconds(equation.outputs[0], speed)
        if _has_a_kernel(equation):
            product, attention, flops = lies.product(equation), requested_attention(equation.eqn), lies.flops(equation)
            kind: KernelClass = "attention" if equation.kind == FUSED_ATTENTION else "convolution"
            if product:
                num_bytes = sum(lies.moved_bytes(equation, number) for number in moved)
                kind = matmul_class(product.batch * product.m * product.n, flops, num_bytes)
            flops_s = flops / speed.kernel_flops_per_s(_dtype(equation), kind, product, attention)
            return max(flops_s, traffic(equation, moved, kind)) + speed.launch_s
        if equation.kind in _VIEWS:
            return 0.0
        if _is_reduction(equation) and not (fused_reductions and _is_of_rows(equation)):
            reduction: KernelClass = "row reduction" if _is_of_rows(equation) else "column reduction"
            return traffic(equation, moved, reduction) + speed.launch_s
        results = written.intersection(equation.outputs)
        return 2 * traffic(equation, results) + speed.launch_s * bool(results)

    return [max(LEAST_S, seconds(equation)) for equation in equations]


def _copied(equations: list[Equation], merged: _Merged) -> set[int]:
    """The values that are copied out of their stack, because a library reads them."""
    results = {number for equation in equations if equation.kind == FUSED_ATTENTION for number in equation.outputs}
    return _read_by(equations, merged, _is_a_library_call) | results


def _save_seconds(
    lies: Lies, equations: list[Equation], written: set[int], copied: set[int], speed: DeviceSpeed, in_scan: bool
) -> dict[int, float]:
    """The `Value.save_s` of each value.

    `written` has the values that kernels read, `copied` those that are copied out of a stack.
    """

    def seconds(equation: Equation, number: int) -> float:
        passes_s = 2 * lies.num_bytes(number) / speed.bytes_per_s()
        if in_scan:
            return speed.launch_s + (passes_s + speed.launch_s) * (number in copied)
        return max(LEAST_S * len(equations), passes_s * (number not in written and not _has_a_kernel(equation)))

    return {number: seconds(equation, number) for equation in equations for number in equation.outputs}


def _read_by(equations: list[Equation], merged: _Merged, is_reader: Callable[[Equation], bool]) -> set[int]:
    """The values that an equation for which `is_reader` is true reads, itself or through a view."""
    read: set[int] = set()
    for equation in reversed(equations):
        if is_reader(equation) or (equation.kind in _VIEWS and read.intersection(equation.outputs)):
            read.update(merged.operands(equation))
    return read


def _has_a_kernel(equation: Equation) -> bool:
    return equation.kind in _UNFUSED or equation_flops(equation.eqn).total > 0


def _is_a_library_call(equation: Equation) -> bool:
    return equation.kind in _LIBRARY_CALLS


def _is_reduction(equation: Equation) -> bool:
    return equation.kind.startswith(("reduce_", "arg", "cum")) and equation.kind != "reduce_precision"


def _is_of_rows(equation: Equation) -> bool:
    return set(equation.eqn.params.get("axes", ())) == {equation.eqn.invars[0].aval.ndim - 1}


def _dtype(equation: Equation) -> str:
    """The type of the first operand but for masks, as XLA calls it: it decides the peak rate.

    It is `f32 highest` for float32 without TF32, as in a compiled program.
    """
    dtypes = [var.aval.dtype for var in equation.eqn.invars]
    if equation.kind == FUSED_ATTENTION:
        dtypes = [dtype for dtype in dtypes if dtype.kind not in "iub"]
    name = str(next(iter(dtypes), "float32")).replace("bfloat", "bf").replace("float", "f").replace("complex", "c")
    return F32_HIGHEST if name == "f32" and _HIGHEST.search(str(equation.eqn.params.get("precision"))) else name
