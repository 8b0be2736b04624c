"""The lint's rules for the program: what was traced of it, and what XLA made of that.

For example, a jitted step that doesn't donate its state has the old state beside the new one: rule `not-donated`. Where a rule
needs bytes that only the memory map has, it says nothing of them without the map.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from jaxremat.policy.spec import OWN, Names
from jaxremat.units import gib
from jaxremat.xla import hlo
from jaxremat.xla.argument_names import is_of_nnx
from jaxremat.xla.categories import is_recompute, phase_of
from jaxremat.xla.dump import short_source
from jaxremat.xla.flops import NO_FLOPS, add_flops, executed, executed_flops, instruction_flops, kind_of_call
from jaxremat.xla.lint_input import MUCH, LintInput, Rule, at_peak
from jaxremat.xla.origin import Caller, Origin, find_callers, find_origin
from jaxremat.xla.step_facts import Finding


def _constraints_elsewhere(facts: LintInput) -> Iterator[Finding]:
    if facts.num_elsewhere:
        yield Finding(
            "constraints-elsewhere",
            f"{facts.num_elsewhere} sharding constraints lie on a device of this machine, and were dropped: the step is compiled "
            "for one device elsewhere",
            "a mesh of the target's devices, which a function gets by its keyword devices: Workload(..., mesh=mesh)",
        )


def _unmatched_names(facts: LintInput) -> Iterator[Finding]:
    names, policy = sorted(facts.traced.names), facts.policy or OWN
    typed, of_presets = policy.names(typed=True), {*policy.names()}.difference(policy.names(typed=True))
    for name in sorted(facts.traced.policy_names.union(typed).difference(names, of_presets)):
        near = difflib.get_close_matches(name, names, 1)
        yield Finding(
            "unmatched-name",
            f"the policy names {name!r}, which is written nowhere; {len(names)} name{' is' if len(names) == 1 else 's are'}"
            + (f": {', '.join(names[:10])}" + ", ..." * (len(names) > 10) if names else ""),
            f"{near[0]!r} instead of {name!r}" if near else f"x = jax.ad_checkpoint.checkpoint_name(x, {name!r})",
        )


def _attention_twice(facts: LintInput) -> Iterator[Finding]:
    flops = executed_flops(facts.module)
    backward = flops.num_attention_backward
    calls = [(i.op_name, times) for _, i, times in executed(facts.module) if kind_of_call(i) == "attention"]
    num_again = flops.num_attention_forward - backward
    if all(scope for scope, _ in calls):  # attention without a gradient, as of a frozen model, runs forward alone
        num_again = sum(times for scope, times in calls if is_recompute(scope))
    named = sorted(facts.traced.policy_names.intersection(facts.traced.names))
    saves_something = facts.traced.saves_matmuls or named
    if facts.policy not in (None, OWN):
        saver = facts.policy.with_attention()
    elif named and not facts.traced.saves_matmuls and not facts.memory.host_temp_bytes:
        saver = Names(tuple(named), attention=True)
    else:
        saver = "dots+attention"
    # A policy that saves nothing of a layer, or that recomputes whole groups of layers, requests this second run.
    if not backward or num_again <= 0 or not saves_something or saver is None:
        return
    spent = _flops(facts.module, lambda i: kind_of_call(i) == "attention")
    again = spent * num_again // flops.num_attention_forward
    share = 100 * again / flops.total
    yield Finding(
        "attention-twice",
        f"fused attention's forward kernel runs {backward + num_again} times for {backward} backward ones: "
        f"{again / 1e9:,.{0 if again >= 1e10 else 3}f} GFLOP more, {share:.1f}% of the step's"
        + (", as a name on the output doesn't save the kernel's softmax statistics" if named else ""),
        facts.under_policy(saver),
    )


def _nothing_recomputed(facts: LintInput) -> Iterator[Finding]:
    traced = facts.traced
    if not traced.num_mergeable or not traced.num_recomputed or traced.saves_all:
        return
    requested = traced.recompute.total
    done = _flops(facts.module, lambda i: is_recompute(i.op_name)) * facts.mesh.num_devices
    missing = traced.total.total - executed_flops(facts.module).total * facts.mesh.num_devices
    if requested and (2 * done >= requested or 2 * missing < requested):
        return
    seen = (
        f"of {requested / 1e9:,.2f} GFLOP to recompute, the program recomputes {done / 1e9:,.2f}"
        if requested
        else f"{traced.num_recomputed} operations to recompute are in the pass that computed them"
    )
    yield Finding(
        "nothing-recomputed",
        f"{traced.num_mergeable} of {traced.num_checkpoints} checkpoints have prevent_cse=False outside of a loop, and XLA "
        f"merges them with the forward pass, which saves everything: {seen}",
        "jax.checkpoint(layer, prevent_cse=True), or the layers in one jax.lax.scan",
    )


def _xla_remat(facts: LintInput) -> Iterator[Finding]:
    found = [i for c in facts.module.computations.values() for i in c.instructions if i.is_xla_remat]
    if found:
        yield Finding(
            "xla-remat",
            f"XLA's own rematerialization duplicated {len(found)} instructions, so that this isn't the program of the policy; "
            f"bytes aren't affine in the batch here. The first is {found[0].name}, {found[0].op_name or 'without a scope'}",
            "a smaller batch, or a policy that saves less: this compiler has no switch for it"
            if facts.memory.needed_bytes is not None
            else "leave --xla-remat out"
            if facts.has_flags
            else "XLA_FLAGS=--xla_disable_hlo_passes=rematerialization",
            sum(i.num_bytes for i in found),
        )


def _not_donated(facts: LintInput) -> Iterator[Finding]:
    entry = facts.module.entry_computation
    if not any(phase_of(i.op_name) == "backward" for _, i, _ in executed(facts.module)):
        return
    root, taken = entry.root, {output for output, _ in facts.module.aliases}
    callers, new = find_callers(facts.module), Counter[hlo.Shape]()
    for n, shape in enumerate(root.shapes):
        index = (n,) if root.opcode == "tuple" else ()
        # A gradient is a new array of its parameter's shape on purpose. Only results of the update count here.
        if index not in taken and phase_of(_made_in(facts.module, callers, index).op_name) == "update":
            new[shape] += 1
    not_donated: list[hlo.Instruction] = []
    for parameter in entry.parameters:
        donated = any(number == parameter.parameter_index for _, number in facts.module.aliases)
        if not donated and len(parameter.shapes) == 1 and new[parameter.shapes[0]]:
            new[parameter.shapes[0]] -= 1
            not_donated.append(parameter)
    num_bytes = sum(parameter.num_bytes for parameter in not_donated)
    if num_bytes <= facts.small_bytes:
        return
    largest = max(not_donated, key=lambda parameter: parameter.num_bytes)
    paths = [parameter.op_name for parameter in not_donated if parameter.op_name]
    roots = sorted({re.split(r"\W", path)[0] for path in paths})
    jit = "nnx.jit" if facts.jaxpr is not None and is_of_nnx(facts.jaxpr) else "jax.jit"
    yield Finding(
        "not-donated",
        f"{len(not_donated)} arguments are there twice, old and new: {gib(num_bytes)} of {gib(facts.memory.total_bytes)}; "
        f"the largest is {largest.op_name or largest.name}, {gib(largest.num_bytes)}. {gib(facts.memory.alias_bytes)} donated. "
        "Donating saves at most these bytes, as before the update XLA has other values in the memory of the new ones",
        f"{jit}(step, donate_argnames={tuple(roots)!r})",
        num_bytes,
    )


def _made_in(module: hlo.Module, callers: Mapping[str, Caller], index: tuple[int, ...]) -> Origin:
    """The origin of a result of the program. What a loop makes has it in the loop's body."""
    computation = module.entry_computation
    origin = find_origin(module, callers, computation, computation.root, index)
    while (loop := computation.by_name.get(origin.made_by)) and loop.opcode == "while":
        computation = module.computations[loop.called[1]]
        origin = find_origin(module, callers, computation, computation.root, origin.element)
    return origin


def _one_checkpoint(facts: LintInput) -> Iterator[Finding]:
    whole = facts.traced.whole_checkpoint
    num_bytes = sum(size for buffer, size in at_peak(facts.memory_map) if buffer.category == "recompute")
    is_small = facts.memory_map is not None and num_bytes <= facts.small_bytes
    if whole is None or is_small or facts.policy not in (None, OWN):
        return
    there = (
        f": {gib(num_bytes)} of {gib(facts.memory.total_bytes)} at the peak. The remedy saves a part of that, which only a "
    )
    yield Finding(
        "one-checkpoint",
        f"one checkpoint at {short_source(whole) or 'an unknown line'} is around the whole forward pass: all its "
        f"{facts.traced.recompute.num_matmuls} matmuls are recomputed, {facts.traced.recompute.total / 1e9:,.2f} GFLOP, and all "
        "that they make is there at once all the same" + (f"{there}compile of it tells" if num_bytes else ""),
        "a checkpoint around each layer: " + facts.under_policy("nothing"),
        num_bytes,
        whole,
    )


def _loop_without_remat(facts: LintInput) -> Iterator[Finding]:
    loops = facts.traced.loops
    for loop in loops:
        if loop.has_checkpoint or loop.trip_count < 2 or loop.num_bytes <= facts.small_bytes:
            continue
        with_it = [other for other in loops if other.has_checkpoint]
        if loop.is_over_time and loop.num_bytes >= MUCH * facts.memory.total_bytes:
            yield Finding(
                "loop-without-remat",
                f"the loop of {loop.trip_count} at {short_source(loop.source) or 'an unknown line'} has no checkpoint, and its "
                f"residuals are {gib(loop.num_bytes)} of {gib(facts.memory.total_bytes)}",
                f"{facts.under_policy('nothing')}, or every:K for blocks of K"
                if facts.remedies != "code"
                else "jax.lax.scan(jax.checkpoint(step, prevent_cse=False), ...)",
                loop.num_bytes,
                loop.source,
            )
        elif with_it:
            yield Finding(
                "loop-without-remat",
                f"the loop of {loop.trip_count} at {short_source(loop.source) or 'an unknown line'} has no checkpoint and stacks "
                f"{gib(loop.num_bytes)} of residuals, where the one of {with_it[0].trip_count} at "
                f"{short_source(with_it[0].source) or 'an unknown line'} has one and stacks {gib(with_it[0].num_bytes)}",
                "jax.lax.scan(jax.checkpoint(body, prevent_cse=False), ...), or jaxremat.remat(layer, 'dots', in_scan=True)",
                loop.num_bytes,
                loop.source,
            )


def _flops(module: hlo.Module, of: Callable[[hlo.Instruction], bool]) -> int:
    found = (place for place in executed(module) if of(place[1]))
    return add_flops(instruction_flops(c, i, lambda name: NO_FLOPS).repeated(times) for c, i, times in found).total


#: The rules by name, in the order in which they run.
PROGRAM_RULES: dict[str, Rule] = {
    "unmatched-name": _unmatched_names,
    "nothing-recomputed": _nothing_recomputed,
    "attention-twice": _attention_twice,
    "xla-remat": _xla_remat,
    "not-donated": _not_donated,
    "one-checkpoint": _one_checkpoint,
    "loop-without-remat": _loop_without_remat,
    "constraints-elsewhere": _constraints_elsewhere,
}
