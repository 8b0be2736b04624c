"""The lint's rules for a step on several devices: replicated, gathered and uneven work.

They read how the state lies on the mesh, and what the collectives of the compiled program exchange (`xla/exchanges.py`). For
example, an all-gather of a value that depends on the batch, over devices with batches of their own, makes each device store the
activations of all: rule `gathers-everything`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from jaxremat.config import divisors
from jaxremat.mesh.sharding import SMALL_BYTES, LeafOnMesh
from jaxremat.units import gib
from jaxremat.xla import hlo
from jaxremat.xla.buffers import Buffer, held
from jaxremat.xla.categories import is_recompute, phase_of, speaks_of_loss
from jaxremat.xla.dump import short_source
from jaxremat.xla.exchanges import Exchange
from jaxremat.xla.flops import NO_FLOPS, executed, executed_flops, instruction_flops
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.lint_input import LintInput, Rule, listed, num_elements
from jaxremat.xla.origin import is_part
from jaxremat.xla.recomputed import operation_path, scope_in
from jaxremat.xla.step_facts import MORE_THAN_ITS_SHARE, Finding
from jaxremat.xla.traced import axes_of_constraints, needed_places

#: So many times its share of the FLOPs is more.
MORE = 1.01
#: The rule on parameters that are saved as they were gathered. A plan has weighed that.
GATHERED_AND_SAVED = "gathered-and-kept"
_UPDATE = "the optimizer's update"
_MOST_NAMES = 3
#: The axis along which devices send tokens of sequences of their own. Along the other axes of a batch no others need them.
_SENT = "expert"


def _replicated(facts: LintInput) -> Iterator[Finding]:
    """Arguments that no axis divides, though a mesh of as many devices could."""
    whole = [leaf for leaf in facts.arguments if not leaf.axes and leaf.num_bytes >= SMALL_BYTES]
    saved = sum(leaf.num_bytes for leaf in whole)
    if saved <= facts.small_bytes:
        return
    sizes = (size for size in divisors(facts.mesh.num_devices)[:0:-1] if _mostly_divisible(whole, size))
    size = next(sizes, None)
    largest = sorted(whole, key=lambda leaf: -leaf.num_bytes)[:_MOST_NAMES]
    names = ", ".join(f"{leaf.name} {list(leaf.shape)} ({gib(leaf.num_bytes)})" for leaf in largest)
    more = f" and {len(whole) - len(largest)} more" if len(whole) > len(largest) else ""
    rest = facts.mesh.num_devices // size if size else 1
    if size is None:
        remedy = "a width that the number of devices divides, as in a longer vocabulary or a wider layer"
    elif facts.mesh.is_own or size == facts.mesh.sizes["fsdp"]:  # only arrays with shardings of their own are whole then
        remedy = f"say how each lies: a sharding NamedSharding(mesh, PartitionSpec({_largest_axis(facts)!r})) of the array"
    else:
        remedy = f"--mesh {f'data={rest},' * (rest > 1)}fsdp={size}"
    if remedy.removeprefix("--mesh ") in facts.compared_meshes:
        return
    yield Finding(
        "lies-whole",
        f"{gib(saved)} of the arguments are replicated on {facts.mesh.num_devices} devices, undivided by {facts.mesh}: "
        f"{names}{more}",
        remedy,
        saved,
    )


def _largest_axis(facts: LintInput) -> str:
    return max(facts.mesh.sizes, key=lambda axis: facts.mesh.sizes[axis]) if facts.mesh.is_own else "fsdp"


def _mostly_divisible(leaves: Iterable[LeafOnMesh], size: int) -> bool:
    """Whether most bytes belong to arrays that have a dimension that `size` divides."""
    of_bytes = Counter[bool]()
    for leaf in leaves:
        of_bytes[any(dim % size == 0 for dim in leaf.shape)] += leaf.num_bytes
    return of_bytes[True] > of_bytes[False]


def _axis_divides_nothing(facts: LintInput) -> Iterator[Finding]:
    used = axes_of_constraints(facts.jaxpr).union(*(leaf.axes for leaf in facts.arguments))
    for axis, size in facts.mesh.sizes.items():
        if size > 1 and facts.arguments and axis not in used:
            yield Finding(
                "axis-divides-nothing",
                f"the axis {axis}={size} divides no parameter, no batch and no activation: {size} devices compute the same",
                f"a mesh without {axis}, or arrays with a NamedSharding over it"
                if facts.mesh.is_own
                else f"leave {axis} out of --mesh, or name dimensions that it divides: Workload(logical_axes=...), with "
                "flax.linen.spmd.with_logical_constraint(x, ...) in each layer",
            )


def _gathered_and_saved(facts: LintInput) -> Iterator[Finding]:
    """Gathered parameters of several layers that are saved, though no policy requests it."""
    if facts.memory_map is None:
        return
    requested = {size for name in facts.traced.policy_names for size in facts.traced.names.get(name, ())}
    phase_at = facts.memory_map.phase_at
    groups: dict[str, list[tuple[Buffer, int]]] = defaultdict(list)
    for buffer, size in held(facts.memory_map, facts.memory_map.peak):
        is_saved = phase_at(buffer.first) == "forward" and phase_at(buffer.last) != "forward"
        is_requested = any(
            is_part(num_elements(buffer) // buffer.num_layers, size, facts.mesh.num_devices) for size in requested
        )
        if buffer.category == "gathered parameters" and is_saved and not is_requested:
            # XLA lists the scopes of gathers that it joined: `Block/(a:b)`.
            scope = plain_scope(buffer.op_name).partition("(")[0].strip("/")
            groups[scope or "parameters"].append((buffer, size))
    several = {label: some for label, some in groups.items() if sum(buffer.num_layers for buffer, _ in some) > 1}
    num_bytes = sum(size for some in several.values() for _, size in some)
    if num_bytes > facts.small_bytes:
        yield Finding(
            GATHERED_AND_SAVED,
            f"{gib(num_bytes)} of gathered parameters are saved from the forward to the backward pass: {listed(several)}",
            facts.under_policy("dots+attention") + ", under which a layer gathers its parameters again",
            num_bytes,
            next(iter(several.values()))[0][0].source,
        )


def _gathered_again(facts: LintInput) -> Iterator[Finding]:
    """What the backward pass gathers more often than the forward pass.

    It gathers parameters for what is recomputed, and for gradients. Values of the batch are those that the recompute gathers.
    """
    forward, backward = Counter[str](), Counter[str]()
    seen: dict[str, Exchange] = {}
    for exchange in facts.exchanges:
        if exchange.what == "parameter":
            path = " and ".join(exchange.arguments)
            (backward if phase_of(exchange.op_name) == "backward" else forward)[path] += exchange.num_bytes * exchange.times
            seen[path] = exchange
    more = {path: backward[path] - forward[path] for path in forward if backward[path] > forward[path]}
    num_bytes = sum(more.values())
    if num_bytes > facts.small_bytes:
        path, most = max(more.items(), key=lambda item: item[1])
        yield Finding(
            "gathered-again",
            f"the backward pass gathers {gib(num_bytes)} more than the forward pass, as the recompute gathers too: of "
            f"{path} {gib(most)} more",
            "jax.ad_checkpoint.checkpoint_name around the gathered parameter, and its name in the policy; or no checkpoint "
            "inside a checkpoint",
            source=facts.frames.source(seen[path].frame),
        )
    values = [exchange for exchange in _gathers_of_values(facts) if is_recompute(exchange.op_name)]
    num_bytes = sum(exchange.num_bytes * exchange.times for exchange in values)
    if num_bytes > facts.small_bytes and facts.remedies != "flags with loss":  # whose layers have no name for such a value
        most = max(values, key=lambda exchange: exchange.num_bytes * exchange.times)
        yield Finding(
            "gathered-again",
            f"the recompute gathers {gib(num_bytes)} of values of the batch, as the forward pass did: {gib(most.num_bytes)} "
            f"{_times_text(most)} at {_place_text(facts, most)}",
            "jax.ad_checkpoint.checkpoint_name around the gathered value, and its name in the policy; or a gather outside of "
            "the checkpoint",
            source=facts.frames.source(most.frame),
        )


def _gathers_everything(facts: LintInput) -> Iterator[Finding]:
    axes = [axis for axis in facts.mesh.batch_axes if axis != _SENT]
    for exchange in _large_gathers(facts):
        if not _is_of_loss(facts, exchange) and len(facts.mesh.places(exchange.groups[0], axes)) > 1:
            yield Finding(
                "gathers-everything",
                f"an array of {gib(exchange.num_bytes)} that was computed from the batch is gathered by each device, "
                f"{_times_text(exchange)}, at {_place_text(facts, exchange)}",
                "say how the array lies before and after: flax.linen.spmd.with_logical_constraint(x, ('batch', None, None))",
                exchange.num_bytes,
                facts.frames.source(exchange.frame),
            )


def _gathers_logits(facts: LintInput) -> Iterator[Finding]:
    for exchange in _large_gathers(facts):
        if _is_of_loss(facts, exchange):
            yield Finding(
                "gathers-logits",
                f"logits of {gib(exchange.num_bytes)} are gathered by each device, {_times_text(exchange)}, at "
                f"{_place_text(facts, exchange)}",
                "a vocabulary that the axis tensor divides (--vocab-size), and --loss chunked"
                if facts.remedies == "flags with loss"
                else "a vocabulary that the axis tensor divides, and a loss that reads each position's own logit where it lies",
                exchange.num_bytes,
                facts.frames.source(exchange.frame),
            )


def _large_gathers(facts: LintInput) -> Iterator[Exchange]:
    """The largest gather of each source line, of values that aren't parameters.

    Its `times` are those of all gathers of the line that are as large.
    """
    large: dict[str, Exchange] = {}
    for exchange in _gathers_of_values(facts):
        if exchange.num_bytes > facts.small_bytes:
            place = _place_text(facts, exchange)
            if place in large and large[place].num_bytes == exchange.num_bytes:
                large[place] = replace(exchange, times=exchange.times + large[place].times)
            elif place not in large or large[place].num_bytes < exchange.num_bytes:
                large[place] = exchange
    yield from large.values()


def _gathers_of_values(facts: LintInput) -> Iterator[Exchange]:
    """The gathers of what the step computes, which depends on more than one argument."""
    for exchange in facts.exchanges:
        if exchange.kind == "all-gather" and exchange.what == "value" and len(exchange.arguments) > 1:
            yield exchange


def _is_of_loss(facts: LintInput, exchange: Exchange) -> bool:
    """Whether a gathered array has logits: it is the loss's, with a dimension of the words.

    An array that no name says to belong to the loss must have all words, and another shape than each argument: a gradient has
    the shape of its parameter. Flax's `Embed.attend` makes such logits.
    """
    functions = tuple(function for _, function, _ in facts.frames.stack(exchange.frame))
    if speaks_of_loss(exchange.op_name, functions):
        return any(is_part(dim, size, facts.mesh.num_devices) for dim in exchange.dims for size in facts.logit_sizes)
    shapes = {tuple(sorted(leaf.shape)) for leaf in facts.arguments}
    return not facts.logit_sizes.isdisjoint(exchange.dims) and tuple(sorted(exchange.dims)) not in shapes


def _place_text(facts: LintInput, exchange: Exchange) -> str:
    return short_source(facts.frames.source(exchange.frame)) or plain_scope(exchange.op_name) or exchange.name


def _times_text(exchange: Exchange) -> str:
    return "once" if exchange.times == 1 else f"{exchange.times} times"


def _more_than_its_share(facts: LintInput) -> Iterator[Finding]:
    """A step in which a device executes more than its share of the FLOPs.

    Where nothing in a program says how its activations are sharded, XLA may shard their features and not their samples. It
    then computes the same on several devices, and says nothing of it.
    """
    requested, done = facts.traced.total.total, executed_flops(facts.module).total * facts.mesh.num_devices
    if done <= MORE * requested:
        return
    requested_at, done_at = _requested_by_path(facts.jaxpr), _done_by_path(facts.module, facts.mesh.num_devices)
    path = max(done_at, key=lambda path: done_at[path] - requested_at[path])
    times = requested_at[path] and done_at[path] / requested_at[path]
    of_path = f", most of them in {path}: {times:.2f} times" if path and times else ""
    yield Finding(
        MORE_THAN_ITS_SHARE,
        f"each device executes {done / requested:.2f} times its share of the step's FLOPs{of_path}",
        "another optimizer: this one computes with whole matrices on each device"
        if path == _UPDATE
        else 'say how activations lie: flax.linen.spmd.with_logical_constraint(x, ("batch", None, None)) in each layer',
    )


def _requested_by_path(jaxpr: Any) -> Counter[str]:
    """FLOPs of the traced step on all devices, by module path."""
    found = Counter[str]()
    for place in needed_places(jaxpr.jaxpr):
        if place.is_leaf and (flops := place.flops.total):
            found[_module_path(f"{place.scope}/{place.eqn.primitive.name}")] += flops * place.times
    return found


def _done_by_path(module: hlo.Module, num_devices: int) -> Counter[str]:
    """FLOPs of the compiled step on all devices, by module path."""
    found = Counter[str]()
    for computation, instruction, times in executed(module):
        if flops := instruction_flops(computation, instruction, lambda name: NO_FLOPS).total:
            found[_module_path(scope_in(module, computation, instruction))] += flops * times * num_devices
    return found


def _module_path(scope: str) -> str:
    """The path of the module around an operation.

    XLA may join siblings such as query and key, so that their parent counts.
    """
    if phase_of(scope) == "update":
        return _UPDATE
    parts = operation_path(scope).split("/")
    return "/".join(parts[:-2] or parts[:1])


#: The rules by name, in the order in which they run. They run for a step on several devices alone.
MESH_RULES: dict[str, Rule] = {
    MORE_THAN_ITS_SHARE: _more_than_its_share,
    "lies-whole": _replicated,
    "axis-divides-nothing": _axis_divides_nothing,
    GATHERED_AND_SAVED: _gathered_and_saved,
    "gathered-again": _gathered_again,
    "gathers-everything": _gathers_everything,
    "gathers-logits": _gathers_logits,
}
