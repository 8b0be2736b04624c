"""Finds likely mistakes in a compiled step with a table of rules.

Each finding has evidence in numbers and one remedy. For example, the policy `save:mlp_ot` of a model that writes the
checkpoint name `mlp_out` gives a finding of the rule `unmatched-name`, with the remedy `'mlp_out' instead of 'mlp_ot'`.

The rules read three things: the traced program (what the user requested), the optimized HLO (what XLA made of the program),
and the memory map, if the dump was read. A rule that lacks its input finds nothing.
"""

import difflib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from jaxremat.chips.target import Target, in_pool, load_target
from jaxremat.config import TrainConfig
from jaxremat.errors import UsageError
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.spec import NONE, OWN, Names, Policy
from jaxremat.step.step import abstract_args, arguments_on_mesh, donated, make_step, step_shardings
from jaxremat.units import gib
from jaxremat.workload.workload import Workload
from jaxremat.xla import hlo
from jaxremat.xla.argument_names import is_of_nnx
from jaxremat.xla.buffers import Buffer, Category
from jaxremat.xla.categories import is_recompute, phase_of
from jaxremat.xla.clock import times_of
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.dump import short_source
from jaxremat.xla.exchanges import exchanges
from jaxremat.xla.flops import NO_FLOPS, add_flops, executed, executed_flops, instruction_flops, is_matmul, kind_of_call
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.kernels import kernels_of
from jaxremat.xla.lint_input import (
    LintInput,
    Remedies,
    at_peak,
    largest_logits,
    line_of,
    lint_input,
    listed,
    num_elements,
    residuals,
)
from jaxremat.xla.lint_mesh import MESH_RULES
from jaxremat.xla.origin import Caller, Origin, find_callers, find_origin
from jaxremat.xla.step_facts import Finding
from jaxremat.xla.traced import normalized_sizes, score_shapes

_DRAWN = re.compile(r"dropout|bernoulli|random_bits|threefry|rng_bit_generator", re.IGNORECASE)
#: Scopes of fused attention. On a mesh, JAX wraps it into an operation that says how it is divided.
_FUSED = re.compile("fmha|dot_product_attention|custom_partitioning")

#: A loop's residuals, and attention's scores, are much of a step from this share of its bytes on.
_MUCH = 0.3
#: Kernels that write or read scores are much from this share of a step's time, or of the bytes that it moves, on.
_MUCH_TIME = 0.2
#: The folder of this package, whose decoder has an attention that was requested, or whose choice is said in the heading.
_PACKAGE = str(Path(__file__).parents[1])

Rule = Callable[[LintInput], Iterable[Finding]]
_Kind = TypeVar("_Kind", bound=Hashable)


def find(facts: LintInput) -> tuple[Finding, ...]:
    """The findings of all rules, sorted by bytes from large to small."""
    rules = [*RULES.values(), *(MESH_RULES.values() if facts.mesh.num_devices > 1 else ())]
    found = [finding for rule in rules for finding in rule(facts)]
    return tuple(sorted(found, key=lambda finding: -finding.num_bytes))


def lint(
    function: Callable[..., Any] | Workload,
    args: tuple[Any, ...] | None = None,
    target: Target | str | None = None,
    *,
    donate_argnums: int | tuple[int, ...] = (),
    policy: Policy | str | None = None,
    roles: Mapping[str, Category] | None = None,
    xla_remat: bool = False,
) -> tuple[Finding, ...]:
    """Finds likely mistakes in the memory use of a train step, compiled for `target`.

    Nothing is run. The step is `function(*args)`, or that of a `jaxremat.Workload`:

        jaxremat.lint(step, (state, batch), "h100-80gb", donate_argnums=0)
        jaxremat.lint(workload, target="h100-80gb", policy="dots")

    The rules find checkpoint names that match nothing, recompute that XLA merged away, attention or matmuls that run twice,
    saved dropout masks, parameters that aren't donated, and more. `jaxremat.xla.lint.RULES` lists all rules. Each finding
    has its evidence and a remedy.

    Args:
        function: a train step, or a `Workload`. A jitted function has its own donation. The loss of a workload gets a
            train step with AdamW or the workload's own optimizer.
        args: the arguments of a function, or a `jax.ShapeDtypeStruct` for each array. A workload has its own.
        target: as for `lower_and_compile`.
        donate_argnums: indices of a function's arguments whose memory the outputs may reuse.
        policy: a policy of the grammar. The loss of a workload is compiled under it, as `jaxremat.with_policy` does. Without it
            the loss is compiled as it is written, with the checkpoints of its author. A whole step is always compiled as it
            is, and `policy` says what its layers are meant to follow. The policies of `jax.checkpoint` in the program are
            read in any case.
        roles: categories of arguments whose path doesn't show the category. A key is the beginning of a path:
            `{"w": "parameters"}`.
        xla_remat: whether XLA's own rematerialization pass may run, as it does by XLA's default.

    Raises:
        CompileError: XLA rejected the program, or wrote no files about its buffers.
        MissingDependencyError: a library of the chip's maker couldn't be loaded.
        UnknownNameError: no value of a workload's layers carries a name in `policy`.
        UnknownPolicyError: `policy` doesn't parse.
        UsageError: a function without `args`, or a workload with them; or no layers were found for `policy`.
    """
    requested = None if policy is None else as_policy(policy)
    remedies: Remedies = "code"
    on = target if isinstance(target, Target) else load_target(target)
    on = in_pool(on) if xla_remat else on
    known: dict[str, Any] = {"fused_attention": fused_attention_of(on), "speed": on.speed}
    shardings = None
    if isinstance(function, Workload):
        if args is not None or donate_argnums != ():
            raise UsageError(
                f"lint got a Workload and {'args' if args is not None else 'donate_argnums'}",
                cause="a workload has its own",
                next_step="jaxremat.lint(workload, target='h100-80gb')",
            )
        remedies = "code" if function.loss is None else "with_policy"
        workload, train = _under_policy(function, requested), TrainConfig()
        if on.mesh is not None:
            shardings, known["arguments"] = (
                step_shardings(on.mesh, workload, train),
                arguments_on_mesh(on.mesh, workload, train),
            )
        function = make_step(workload, train, NONE if workload.loss is None or requested is None else requested)
        args, donate_argnums = abstract_args(workload, train), donated(workload)
    if args is None:
        raise UsageError(
            "lint got a function and no args", allowed="a tuple of its arguments", next_step="lint(step, (state, batch))"
        )
    done = lower_and_compile(
        function, args, on, donate_argnums=donate_argnums, xla_remat=xla_remat, keep_dump=True, shardings=shardings
    )
    assert done.dump is not None  # keep_dump=True reads the dump
    memory_map = done.map_with(done.dump, roles)
    known["exchanges"] = exchanges(done.module, done.mesh, roles)
    return find(lint_input(done, policy=requested, memory_map=memory_map, remedies=remedies, **known))


def fused_attention_of(target: Target) -> str:
    """What `jax.nn.dot_product_attention` calls the fused attention of a target.

    Empty if it has none.
    """
    takes_it = target.chip.is_gpu and not target.chip.attention_obstacle(target.compute_capability)
    return target.chip.attention.name if takes_it else ""


def _under_policy(workload: Workload, policy: Policy | None) -> Workload:
    """The workload. Without a policy, its loss is as its author wrote it."""
    loss = workload.loss
    return replace(workload, loss_under=lambda _: loss) if loss is not None and policy is None else workload


# Rules that need no dump.


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
        if loop.is_over_time and loop.num_bytes >= _MUCH * facts.memory.total_bytes:
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


# Rules that read the memory map.


def _recomputed_together(facts: LintInput) -> Iterator[Finding]:
    alive: dict[tuple[str, tuple[int, ...]], list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in at_peak(facts.memory_map) if facts.traced.unordered else ():
        shapes = hlo.parse_shapes(buffer.shape)
        if "/checkpoint/" in buffer.op_name and phase_of(buffer.op_name) == "backward" and shapes:
            alive[f"{buffer.op_name.rpartition('/')[2]} {buffer.source}", shapes[0].dims].append((buffer, size))
    for body in facts.traced.unordered:
        of_one = {what: max(1, body.made[what]) for what in alive if what in body.made}
        num_bytes, example = _beyond(alive, of_one)
        if num_bytes > facts.small_bytes:
            yield Finding(
                "recomputed-together",
                f"{body.num_checkpoints} checkpoints at {short_source(body.source) or 'an unknown line'} are in one body with "
                f"prevent_cse=False, and nothing makes one wait for another: values of several are there at once, "
                f"{gib(num_bytes)} more than those of one, such as {example}",
                "a scan of their own for the layers of the body, or jax.checkpoint(layer) without prevent_cse=False with a "
                "jax before 0.12, whose XLA postpones the gradients of weights",
                num_bytes,
                body.source,
            )


def _microbatches_together(facts: LintInput) -> Iterator[Finding]:
    memory_map, num_rounds = facts.memory_map, facts.traced.num_rounds
    if memory_map is None or num_rounds == 1:
        return

    def kind(buffer: Buffer) -> tuple[str, str, str]:
        return buffer.label, buffer.shape, buffer.source

    def is_residual(buffer: Buffer) -> bool:
        # The category doesn't say so: it takes a program as one forward pass and one backward pass.
        phases = phase_of(buffer.op_name), phase_of(memory_map.program[buffer.last].op_name)
        return phases == ("forward", "backward")

    made = Counter(kind(buffer) for buffer in memory_map.buffers if is_residual(buffer))
    alive: dict[tuple[str, str, str], list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in at_peak(memory_map):
        if is_residual(buffer):
            alive[kind(buffer)].append((buffer, size))
    num_bytes, example = _beyond(alive, {what: math.ceil(made[what] / num_rounds) for what in alive})
    if num_bytes > facts.small_bytes:
        yield Finding(
            "microbatches-together",
            f"{num_rounds} forward passes, each with its backward pass, follow one another as in a Python loop, and nothing "
            f"makes one wait for another: residuals of several are there at once, at least {gib(num_bytes)} more than those of "
            f"one, such as {example}",
            "jax.lax.scan over the microbatches, with the forward and the backward pass of one in its body",
            num_bytes,
        )


def _beyond(alive: Mapping[_Kind, Sequence[tuple[Buffer, int]]], of_one: Mapping[_Kind, int]) -> tuple[int, str]:
    """The bytes of the buffers beyond those of one pass or checkpoint.

    With them comes the kind that has the most of them, in words.

    Args:
        alive: the buffers at the peak by their kind, each with its bytes.
        of_one: by kind, how many buffers one has.
    """
    more = {what: sum(size for _, size in alive[what][number:]) for what, number in of_one.items()}
    if not more:
        return 0, ""
    some = alive[max(more, key=lambda what: more[what])]
    return sum(more.values()), f"{len(some)} x {some[0][0].shape} at {line_of(some[0][0])}"


def _unnamed_residuals(facts: LintInput) -> Iterator[Finding]:
    traced = facts.traced
    if traced.saves_all or traced.policy_names.isdisjoint(traced.names):
        return  # only under a policy by names must every saved value have a name
    groups = residuals(facts)
    attention = facts.policy is not None and facts.policy.saves_attention
    # XLA has no checkpoint names. So an unrecognized value counts as named if it has the size of a saved name that wasn't
    # found.
    unseen = {size for name in traced.policy_names & traced.names.keys() - groups.keys() for size in traced.names[name]}
    unnamed = {
        label: some
        for label, some in groups.items()
        if label not in traced.names
        and label != "layer input"
        and num_elements(some[0][0]) // some[0][0].num_layers not in unseen
        and not (attention and _FUSED.search(some[0][0].op_name))
    }
    num_bytes = sum(size for some in unnamed.values() for _, size in some)
    if num_bytes <= facts.small_bytes:
        return
    named = sorted(label for label in groups if label in traced.policy_names)
    yield Finding(
        "unnamed-residuals",
        f"{gib(num_bytes)} of residuals have no checkpoint name: {listed(unnamed)}",
        (
            f"jax.checkpoint_policies.save_only_these_names({', '.join(map(repr, named))})"
            if facts.remedies == "code"
            else facts.under_policy(f"save:{','.join(named)}")
        )
        if named
        else "x = jax.ad_checkpoint.checkpoint_name(x, 'name'), or jaxremat.autoname(Layer) for all values of a layer",
        num_bytes,
        next(iter(unnamed.values()))[0][0].source,
    )


def _dropout_masks(facts: LintInput) -> Iterator[Finding]:
    drawn = {label: [one for one in some if _is_mask(one[0])] for label, some in residuals(facts).items()}
    masks = {label: some for label, some in drawn.items() if some}
    num_bytes = sum(size for some in masks.values() for _, size in some)
    if num_bytes > facts.small_bytes:
        yield Finding(
            "dropout-masks",
            f"{gib(num_bytes)} of dropout masks are saved for the backward pass, though the key gives them again: "
            f"{listed(masks)}",
            facts.under_policy("dots+attention"),
            num_bytes,
            next(iter(masks.values()))[0][0].source,
        )


def _is_mask(buffer: Buffer) -> bool:
    """Whether a buffer has random bits or a mask made of them.

    Activations that were dropped are floating-point numbers.
    """
    return bool(_DRAWN.search(buffer.op_name)) and not buffer.shape.startswith(("f", "bf"))


def _saved_and_recomputed(facts: LintInput) -> Iterator[Finding]:
    if facts.memory_map is None:
        return
    made, again = Counter[str](), Counter[str]()
    for _, i, times in executed(facts.module):
        if is_matmul(i) and (is_recompute(i.op_name) or phase_of(i.op_name) == "forward"):
            (again if is_recompute(i.op_name) else made)[plain_scope(i.op_name)] += times * i.shapes[0].num_elements
    saved: dict[str, list[tuple[Buffer, int]]] = defaultdict(list)
    for some in residuals(facts).values():
        for buffer, size in some:
            saved[plain_scope(buffer.op_name)].append((buffer, size))
    for scope in saved.keys() & made.keys() & again.keys():
        num_saved = sum(num_elements(buffer) for buffer, _ in saved[scope])
        # Elements are compared, since under a mix of policies some layers save a value that other layers compute again.
        if min(num_saved, made[scope]) + again[scope] > made[scope]:
            (buffer, _), num_bytes = saved[scope][0], sum(size for _, size in saved[scope])
            yield Finding(
                "saved-and-recomputed",
                f"the matmul {buffer.label} at {line_of(buffer)} is saved, {gib(num_bytes)}, and recomputed all the same: "
                "its value is also read without its name",
                "y = jax.ad_checkpoint.checkpoint_name(y, 'name'), and read only that y",
                num_bytes,
                buffer.source,
            )


def _logits_largest(facts: LintInput) -> Iterator[Finding]:
    sizes = normalized_sizes(facts.jaxpr) if facts.memory_map else ()
    largest = largest_logits(facts.memory_map, sizes)
    if largest is None:
        return
    buffer, size = largest
    saved = None if facts.chunked_bytes is None else facts.memory.total_bytes - facts.chunked_bytes
    if saved is not None and saved <= 0:
        return
    yield Finding(
        "logits-largest",
        f"the largest buffer at the peak is {buffer.label}, {buffer.shape}, {gib(size)} of "
        f"{gib(facts.memory.total_bytes)}, made at {line_of(buffer)}"
        + (f"; with the chunked loss the step takes {gib(saved)} less, compiled" if saved is not None else ""),
        "--loss chunked"
        if facts.remedies == "flags with loss"
        else "from jaxremat.model.loss import chunked_cross_entropy, and call it as docs/levers.md does",
        size if saved is None else saved,
        buffer.source,
    )


def _scores_stored(facts: LintInput) -> Iterator[Finding]:
    """Scores of attention that take much of the bytes at the peak, or much of the step's time."""
    shapes = score_shapes(facts.jaxpr) if facts.memory_map and facts.fused_attention else ()
    if not facts.memory_map or not shapes:
        return
    attention = f"jax.nn.dot_product_attention(q, k, v, is_causal=..., implementation={facts.fused_attention!r})"
    remedy = f"{attention}, which stores none (it has no dropout)"
    scores = [(buffer, size) for buffer, size in at_peak(facts.memory_map) if _is_of_scores(buffer, shapes)]
    num_bytes, every = sum(size for _, size in scores), "its scores, every query by every key"
    if num_bytes >= _MUCH * facts.memory.total_bytes:
        peak = f"{gib(num_bytes)} of {gib(facts.memory.total_bytes)} at the peak, such as {_shape_and_line(scores[0][0])}"
        yield Finding("scores-stored", f"attention stores {every}: {peak}", remedy, num_bytes, scores[0][0].source)
        return
    made = [buffer for buffer in facts.memory_map.buffers if _is_of_scores(buffer, shapes)]
    if made and (cost := _cost_of_scores(facts, shapes)):
        largest = max(made, key=lambda buffer: buffer.num_bytes)
        spent = f"{cost}, such as of {_shape_and_line(largest)}"
        yield Finding("scores-stored", f"attention makes {every}, in {spent}", remedy, source=largest.source)


def _cost_of_scores(facts: LintInput, shapes: Iterable[tuple[int, ...]]) -> str:
    """The seconds of the kernels that write or read scores, in words.

    They are the kernels' bytes where the device's speed isn't known. Empty if they aren't much of the step's.
    """
    names = {
        i.name
        for computation, i, _ in executed(facts.module)
        for one in (*i.shapes, *itertools.chain.from_iterable(computation.operand_shapes(i)))
        if any(one.num_elements and one.num_elements % math.prod(of) == 0 and _has_both(one.dims, of) for of in shapes)
    }
    moved = {kernel.name: kernel.num_bytes * kernel.count for kernel in kernels_of(facts.module)}
    costs = times_of(facts.module, facts.speed) if facts.speed else moved
    spent, total = sum(costs.get(name, 0.0) for name in names), sum(costs.values())
    if spent < _MUCH_TIME * total:
        return ""
    if facts.speed:
        return f"kernels that take {1e3 * spent:,.1f} ms of the step's {1e3 * total:,.1f} ms, predicted"
    return f"kernels that read and write {gib(int(spent))} of the step's {gib(int(total))}"


def _is_of_scores(buffer: Buffer, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether a buffer has scores of one of these shapes, of a user's own attention."""
    dims = [dim for one in hlo.parse_shapes(buffer.shape) for dim in one.dims]
    fitting = (shape for shape in shapes if num_elements(buffer) == buffer.num_layers * math.prod(shape))
    return any(_has_both(dims, shape) for shape in fitting) and not buffer.source.startswith(_PACKAGE)


def _has_both(dims: Iterable[int], shape: tuple[int, ...]) -> bool:
    """Whether an array has the queries' and the keys' dimension of scores of this shape."""
    return Counter(shape[-2:]) <= Counter(dims)


def _shape_and_line(buffer: Buffer) -> str:
    return f"{buffer.shape} at {line_of(buffer)}"


#: All rules by name, in the order in which they run.
RULES: dict[str, Rule] = {
    "unmatched-name": _unmatched_names,
    "nothing-recomputed": _nothing_recomputed,
    "attention-twice": _attention_twice,
    "xla-remat": _xla_remat,
    "not-donated": _not_donated,
    "one-checkpoint": _one_checkpoint,
    "loop-without-remat": _loop_without_remat,
    "recomputed-together": _recomputed_together,
    "microbatches-together": _microbatches_together,
    "unnamed-residuals": _unnamed_residuals,
    "dropout-masks": _dropout_masks,
    "saved-and-recomputed": _saved_and_recomputed,
    "logits-largest": _logits_largest,
    "scores-stored": _scores_stored,
    "constraints-elsewhere": _constraints_elsewhere,
}


def _flops(module: hlo.Module, of: Callable[[hlo.Instruction], bool]) -> int:
    found = (place for place in executed(module) if of(place[1]))
    return add_flops(instruction_flops(c, i, lambda name: NO_FLOPS).repeated(times) for c, i, times in found).total
