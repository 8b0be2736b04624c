"""Reads a traced step's rematerialization from its jaxpr: names, checkpoints and scans.

For example, a step that names `mlp_out` and saves it in a scan of 12 checkpointed layers has `policy_names` of
`{"mlp_out"}`, `num_checkpoints` of 12, and one loop with a trip count of 12.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxremat.mesh.sharding import axes_in
from jaxremat.policy.jax_private import (
    core,
    inside_policy,
    is_checkpoint,
    is_save_decision,
    num_operands,
    shard_map_devices,
    written_name,
)
from jaxremat.policy.loops import made_of
from jaxremat.policy.names import written_at
from jaxremat.policy.program import flatten
from jaxremat.policy.spec import Policy
from jaxremat.xla.categories import is_recompute, phase_of, speaks_of_loss
from jaxremat.xla.flops import KERNELS, NO_FLOPS, ExecutedFlops, add_flops, count_step_flops, equation_flops

#: A checkpoint is around the whole forward pass if it recomputes at least this share of its FLOPs.
_MOST = 0.9
#: Operations that pass a value on, in another form.
_PASSING = frozenset({"reshape", "broadcast_in_dim", "squeeze", "abs", "convert_element_type"})
#: The scope of a step's outermost equations, as XLA has it.
STEP = "jit(step)"


@dataclass(frozen=True)
class BackwardLoop:
    """A loop of the backward pass.

    Attributes:
        source: `file:line` of the loop; may be empty.
        trip_count: trip count of the loop.
        has_checkpoint: whether the differentiated code is under `jax.checkpoint`.
        num_bytes: bytes of the values that the forward loops stacked and this loop reads.
        is_over_time: whether a matmul of each iteration reads the same parameters, as in a recurrence over time.
    """

    source: str
    trip_count: int
    has_checkpoint: bool
    num_bytes: int
    is_over_time: bool = False


@dataclass(frozen=True)
class Unordered:
    """Checkpoints of one body of the backward pass, without barriers.

    Nothing makes the recompute of one wait for another.

    Attributes:
        source: `file:line` of the first checkpoint; may be empty.
        num_checkpoints: number of the checkpoints.
        made: how many arrays of a shape one of them makes at most, by the operation with its line.
    """

    source: str
    num_checkpoints: int
    made: Mapping[tuple[str, tuple[int, ...]], int]


@dataclass(frozen=True)
class Traced:
    """What the program requests of rematerialization.

    Attributes:
        names: checkpoint names that the program writes, each with the sizes, in elements, of the values with that name.
        policy_names: checkpoint names in the policies of the checkpoints. Of a preset's names only those that the program
            writes count.
        saves_matmuls: whether one of those policies saves results of matmuls.
        saves_all: whether one of those policies saves results of elementwise operations.
        num_checkpoints: number of checkpoints in the backward pass.
        num_mergeable: number of those checkpoints whose recompute XLA may merge with the forward pass. Such a checkpoint has
            no barriers (`prevent_cse=False`) and is in no loop of its own.
        num_recomputed: number of operations to recompute. An operation of a loop counts as often as it runs.
        recompute: FLOPs of the matmuls and attention kernels among those operations.
        total: FLOPs of the whole program.
        loops: the outermost loops of the backward pass that contain matmuls.
        unordered: the bodies, of loops and of checkpoints, with several checkpoints without barriers.
        whole_checkpoint: `file:line` of the one checkpoint that recomputes the forward pass; may be empty. None if there is none.
        num_rounds: number of forward passes of equal FLOPs, each with its backward pass before the next one. 1 if they differ.
    """

    names: Mapping[str, frozenset[int]] = field(default_factory=dict)
    policy_names: frozenset[str] = frozenset()
    saves_matmuls: bool = False
    saves_all: bool = False
    num_checkpoints: int = 0
    num_mergeable: int = 0
    num_recomputed: int = 0
    recompute: ExecutedFlops = NO_FLOPS
    total: ExecutedFlops = NO_FLOPS
    loops: tuple[BackwardLoop, ...] = ()
    unordered: tuple[Unordered, ...] = ()
    whole_checkpoint: str | None = None
    num_rounds: int = 1


def read_traced(jaxpr: Any) -> Traced:
    """Reads the rematerialization of a program from `jax.jit(step).trace(...).jaxpr`."""
    found = tuple(places(jaxpr.jaxpr))
    checkpoints = [place for place in found if is_checkpoint(place.eqn)]
    differentiated = [place for place in checkpoints if is_recomputing(place.eqn, place.scope)]
    policies = {id(place.eqn.params["policy"]): place.eqn.params["policy"] for place in checkpoints}.values()
    names: dict[str, set[int]] = defaultdict(set)
    for place in found:
        if name := written_name(place.eqn):
            names[name].add(place.eqn.outvars[0].aval.size)
    again = [place for place in found if place.is_recompute]
    recompute = add_flops(place.flops.repeated(place.times) for place in again)
    made = add_flops(p.flops.repeated(p.times) for p in found if p.is_leaf and phase_of(p.scope) == "forward")
    is_whole = len(differentiated) == 1 and recompute.num_matmuls > 2 and recompute.total >= _MOST * made.total
    return Traced(
        names={name: frozenset(sizes) for name, sizes in names.items()},
        policy_names=frozenset(name for policy in policies for name in names_in_jax_policy(policy, names)),
        saves_matmuls=any(_saves_result(policy, "dot_general") for policy in policies),
        saves_all=any(map(saves_elementwise, policies)),
        num_checkpoints=sum(place.times for place in differentiated),
        num_mergeable=sum(place.times for place in differentiated if not (place.is_apart or place.has_barriers)),
        num_recomputed=sum(place.times for place in again),
        recompute=recompute,
        total=add_flops(equation_flops(eqn) for eqn in jaxpr.jaxpr.eqns),
        loops=tuple(_loops(jaxpr.jaxpr)),
        unordered=tuple(_unordered(jaxpr.jaxpr)),
        whole_checkpoint=written_at(differentiated[0].eqn) if is_whole and not differentiated[0].is_apart else None,
        num_rounds=_num_rounds(found),
    )


@dataclass(frozen=True)
class Place:
    """An equation of a jaxpr and its context.

    Attributes:
        eqn: the equation.
        scope: JAX's name stack of the equation, beginning with `jit(step)`, with those of the equations around it.
        times: number of times that the equation runs.
        is_leaf: whether the equation has no jaxprs inside.
        is_apart: whether the equation is in a different loop than its forward pass.
        has_barriers: whether the equation is a checkpoint with barriers (`prevent_cse=True`), or inside one.
        num_devices: number of devices that each run the equation on their own part of the arrays, inside a shard_map.
    """

    eqn: Any
    scope: str
    times: int = 1
    is_leaf: bool = True
    is_apart: bool = False
    has_barriers: bool = False
    num_devices: int = 1

    @property
    def flops(self) -> ExecutedFlops:
        """FLOPs of the equation on all devices, each time that it runs."""
        return equation_flops(self.eqn).repeated(self.num_devices)

    @property
    def is_recompute(self) -> bool:
        """Whether the equation is an operation of a recompute."""
        return self.is_leaf and is_recompute(self.scope)

    def at(self, eqn: Any) -> "Place":
        """The place of an equation of the jaxprs inside this one."""
        barriers = self.has_barriers or (is_checkpoint(eqn) and eqn.params["prevent_cse"])
        return replace(self, eqn=eqn, scope=scope_of(self.scope, eqn), is_leaf=not inner_jaxprs(eqn), has_barriers=barriers)

    @property
    def inside(self) -> "Place":
        """What the equations of the jaxprs inside this one have in common."""
        if self.eqn.primitive.name == "shard_map":
            return replace(self, num_devices=self.num_devices * shard_map_devices(self.eqn))
        if self.eqn.primitive.name != "scan":
            return self
        length, unroll = self.eqn.params["length"], self.eqn.params["unroll"]
        is_loop = length // unroll > 1  # XLA unrolls a loop of one iteration
        return replace(self, times=self.times * length, is_apart=self.is_apart or (is_loop and _is_backward(self.eqn)))


#: The place of a whole step.
_WHOLE = Place(None, STEP)


def places(jaxpr: Any, outer: Place = _WHOLE) -> Iterator[Place]:
    """Every equation of a jaxpr in order, also inside loops, checkpoints and functions."""
    for eqn in jaxpr.eqns:
        place = outer.at(eqn)
        yield place
        for body in inner_jaxprs(eqn):
            yield from places(body, place.inside)


def needed_places(jaxpr: Any) -> list[Place]:
    """Every equation of a jaxpr with a needed result, also inside loops and functions.

    XLA leaves out the others. Of a loop of several iterations it has all that the next iteration needs. Of a conditional's
    branches the one with the most FLOPs counts, as in `executed`.
    """
    return _needed(jaxpr, [True] * len(jaxpr.outvars), _WHOLE)[0]


def _needed(jaxpr: Any, results: Sequence[bool], outer: Place) -> tuple[list[Place], list[bool]]:
    """The equations that `results` of a jaxpr need, the last first, and the needed inputs."""
    needed = {var for var, is_needed in zip(jaxpr.outvars, results, strict=True) if is_needed and _is_variable(var)}
    found: list[Place] = []
    for eqn in reversed(jaxpr.eqns):
        outputs = [var in needed for var in eqn.outvars]
        if any(outputs) or eqn.effects:
            place = outer.at(eqn)
            inner, operands = _needed_inside(place, outputs)
            found += [place, *inner]
            pairs = zip(eqn.invars, operands, strict=True)
            needed.update(var for var, is_needed in pairs if is_needed and _is_variable(var))
    return found, [var in needed for var in jaxpr.invars]


def _needed_inside(place: Place, outputs: list[bool]) -> tuple[list[Place], list[bool]]:
    """The equations inside an equation that its needed outputs need, and its needed operands."""
    eqn, bodies = place.eqn, inner_jaxprs(place.eqn)
    if eqn.primitive.name == "optimization_barrier":
        return [], outputs
    if eqn.primitive.name == "scan":
        return _needed_in_loop(place, outputs)
    if len(bodies) == 1 and is_call(eqn, bodies[0]):
        return _needed(bodies[0], outputs, place.inside)
    if eqn.primitive.name == "cond":
        branch = max(eqn.params["branches"], key=lambda branch: count_step_flops(branch).total)
        return _needed(branch.jaxpr, outputs, place.inside)[0], [True] * len(eqn.invars)
    inside = [_needed(body, [True] * len(body.outvars), place.inside)[0] for body in bodies]
    return [part for found in inside for part in found], [True] * len(eqn.invars)


def _needed_in_loop(place: Place, outputs: list[bool]) -> tuple[list[Place], list[bool]]:
    """The same for a loop. An iteration's state is needed where the next iteration needs it."""
    (body,), (num_consts, num_carry) = inner_jaxprs(place.eqn), num_operands(place.eqn)
    while True:
        found, operands = _needed(body, outputs, place.inside)
        if place.eqn.params["length"] == 1:
            return found, operands
        carried = operands[num_consts : num_consts + num_carry]
        grown = [*(a or b for a, b in zip(outputs, carried, strict=False)), *outputs[num_carry:]]
        if grown == outputs:
            return found, operands
        outputs = grown


def is_call(eqn: Any, body: Any) -> bool:
    """Whether an equation calls `body` with its operands, and has its results."""
    return len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)


def _is_variable(var: Any) -> bool:
    return not isinstance(var, core.Literal)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation: bodies of loops, branches, functions.

    A kernel has none that count.
    """
    return [] if eqn.primitive.name in KERNELS else list(core.jaxprs_in_params(eqn.params))


def scope_of(outer: str, eqn: Any) -> str:
    """The scope of an equation, as XLA has it, inside the scope `outer` around it."""
    inside = f"jit({eqn.params['name']})" if eqn.primitive.name in ("jit", "pjit") else "checkpoint" * is_checkpoint(eqn)
    return "/".join(part for part in (outer, str(eqn.source_info.name_stack), inside) if part)


def is_recomputing(eqn: Any, scope: str) -> bool:
    """Whether an equation at `scope` is a checkpoint of the backward pass, which recomputes."""
    return is_checkpoint(eqn) and eqn.params["differentiated"] and phase_of(scope) == "backward"


def _is_backward(eqn: Any) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _num_rounds(found: Sequence[Place]) -> int:
    """How often the program begins a forward pass, as a Python loop over microbatches does.

    1 unless all of these have equal FLOPs, and a backward pass behind them.
    """
    flops = ((phase_of(place.scope), place.times * place.flops.total) for place in found if place.is_leaf)
    of_passes = ((phase, done) for phase, done in flops if done and phase in ("forward", "backward"))
    passes = [(phase, sum(n for _, n in some)) for phase, some in itertools.groupby(of_passes, key=lambda one: one[0])]
    forward, backward = ([done for one, done in passes if one == phase] for phase in ("forward", "backward"))
    return len(forward) if len(forward) == len(backward) and len(set(forward)) == 1 else 1


def _loops(jaxpr: Any) -> Iterator[BackwardLoop]:
    stacked: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and _is_backward(eqn) and equation_flops(eqn).total:
            read = [var for var in _stacks(eqn.invars, eqn.params["jaxpr"].jaxpr.invars) if var in stacked]
            yield BackwardLoop(
                source=written_at(eqn),
                trip_count=eqn.params["length"],
                has_checkpoint=any(is_checkpoint(place.eqn) for place in places(eqn.params["jaxpr"].jaxpr)),
                num_bytes=sum(var.aval.size * var.aval.dtype.itemsize for var in read),
                is_over_time=_reads_the_same(eqn),
            )
        elif not is_checkpoint(eqn):
            if eqn.primitive.name == "scan":
                stacked.update(_stacks(eqn.outvars, eqn.params["jaxpr"].jaxpr.outvars))
            for body in core.jaxprs_in_params(eqn.params):
                yield from _loops(body)


def _unordered(jaxpr: Any, outer: Place = _WHOLE) -> Iterator[Unordered]:
    """The bodies inside a jaxpr in which several checkpoints recompute without barriers."""
    for place in map(outer.at, jaxpr.eqns):
        eqn = place.eqn
        is_body = (eqn.primitive.name == "scan" and eqn.params["length"] > 1) or is_checkpoint(eqn)
        for body in inner_jaxprs(eqn):
            together = list(_free_checkpoints(body, place.inside)) if is_body else []
            if len(together) > 1:
                made = [Counter(map(_operation, places(one.params["jaxpr"]))) for one in together]
                most = functools.reduce(lambda left, right: left | right, made)
                yield Unordered(written_at(together[0]), len(together), most)
            yield from _unordered(body, place.inside)


def _free_checkpoints(jaxpr: Any, outer: Place) -> Iterator[Any]:
    """The checkpoints that recompute without barriers, of a body and functions it calls."""
    for place in map(outer.at, jaxpr.eqns):
        if is_checkpoint(place.eqn):
            if is_recomputing(place.eqn, place.scope) and not place.eqn.params["prevent_cse"]:
                yield place.eqn
        elif place.eqn.primitive.name != "scan":
            for body in inner_jaxprs(place.eqn):
                yield from _free_checkpoints(body, place.inside)


def _operation(place: Place) -> tuple[str, tuple[int, ...]]:
    """The operation of an equation with its line, and the shape that it makes."""
    made = place.eqn.outvars[0].aval if place.eqn.outvars else None
    return f"{place.eqn.primitive.name} {written_at(place.eqn)}", getattr(made, "shape", ())


def _reads_the_same(eqn: Any) -> bool:
    """Whether a matmul of a scan's body reads something made of what all iterations share."""
    body = flatten(eqn.params["jaxpr"])
    shared = made_of(body, body.inputs[: num_operands(eqn)[0]], body.inputs[num_operands(eqn)[0] :])
    read = [atom for e in body.equations if e.kind == "dot_general" for atom in e.inputs if isinstance(atom, int)]
    return not shared.isdisjoint(read)


def _stacks(outside: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    """The operands or results of a loop of which each iteration has one slice.

    Inside the loop such a value has one dimension less.
    """
    pairs = zip(outside, inside, strict=True)
    return [var for var, part in pairs if _is_variable(var) and var.aval.ndim == part.aval.ndim + 1]


def names_in_jax_policy(policy: Any, written: Container[str]) -> frozenset[str]:
    """The checkpoint names in a policy of `jax.checkpoint`, its closure and inner policies.

    A preset may have names that a model doesn't write. Of a preset's names only those in `written` count.
    """
    found: set[str] = set()
    for thing in inside_policy(policy):
        if isinstance(thing, set | frozenset | tuple | list):
            found.update(name for name in thing if isinstance(name, str))
        elif isinstance(thing, Policy):
            found.update(thing.names(typed=True), (name for name in thing.names() if name in written))
    return frozenset(found)


def saves_elementwise(policy: Any) -> bool:
    """Whether a policy saves elementwise results without a name; False without a policy."""
    return _saves_result(policy, "sin")


def _saves_result(policy: Any, operation: str) -> bool:
    """Whether `policy` saves an unnamed result of `operation` (`sin` or `dot_general`)."""
    return saves(policy, _equation_of(operation))


@functools.cache
def _equation_of(operation: str) -> Any:
    function = {"sin": jax.lax.sin, "dot_general": lambda x: jax.lax.dot(x, x)}[operation]
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2, 2), "float32")).jaxpr
    return next(place.eqn for place in places(jaxpr) if place.eqn.primitive.name == operation)


def saves(policy: Any, eqn: Any) -> bool:
    """Whether a policy saves or offloads the result of an equation; False without a policy."""
    if policy is None:
        return False
    try:
        decision = policy(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
    except Exception:  # a user's own policy may fail on operations that it doesn't expect
        return False
    return is_save_decision(decision)


def axes_of_constraints(jaxpr: Any) -> frozenset[str]:
    """The axes of a mesh over which the program's constraints say that a value is divided."""
    shardings = [
        place.eqn.params["sharding"] for place in places(jaxpr.jaxpr) if place.eqn.primitive.name == "sharding_constraint"
    ]
    return frozenset().union(*(axes_in(sharding.spec) for sharding in shardings if isinstance(sharding, NamedSharding)))


def offloads_in_loop(jaxpr: Any) -> bool:
    """Whether a loop of more than one iteration reads or writes a value in host memory."""

    def on_host(var: Any) -> bool:
        return getattr(var.aval, "memory_space", None) == jax.memory.Space.Host

    loops = (place.eqn for place in places(jaxpr.jaxpr) if place.eqn.primitive.name in ("scan", "while"))
    return any(any(map(on_host, (*eqn.invars, *eqn.outvars))) for eqn in loops if eqn.params.get("length", 2) > 1)


def logit_sizes(jaxpr: Any) -> frozenset[int]:
    """Sizes of the last dimension of what the loss exponentiates: numbers of words or classes."""
    return frozenset(
        operand.aval.shape[-1]
        for place in places(jaxpr.jaxpr)
        if place.eqn.primitive.name == "exp" and speaks_of_loss(place.scope, _functions(place.eqn))
        for operand in place.eqn.invars
        if operand.aval.shape
    )


def normalized_sizes(jaxpr: Any) -> frozenset[int]:
    """Sizes of results of matmuls that a logarithm of summed exponentials is taken of.

    A cross-entropy that is written by hand has one, and no name that says so. Scores of attention come of matmuls in batches.
    """
    found = [place.eqn for place in places(jaxpr.jaxpr)]
    made = {var: eqn for eqn in found for var in eqn.outvars}

    def maker(var: Any) -> Any:
        """The equation that makes a value, before those that only pass it on."""
        eqn = made.get(var) if _is_variable(var) else None
        while eqn is not None and eqn.primitive.name in _PASSING:
            eqn = made.get(eqn.invars[0]) if _is_variable(eqn.invars[0]) else None
        return eqn

    sums = [maker(eqn.invars[0]) for eqn in found if eqn.primitive.name == "log"]
    terms = [maker(eqn.invars[0]) for eqn in sums if eqn is not None and eqn.primitive.name == "reduce_sum"]
    matmuls = [eqn for eqn in found if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][1][0]]
    sizes = {eqn.invars[0].aval.size for eqn in terms if eqn is not None and eqn.primitive.name == "exp"}
    return frozenset(sizes.intersection(eqn.outvars[0].aval.size for eqn in matmuls))


def score_shapes(jaxpr: Any) -> frozenset[tuple[int, ...]]:
    """The shapes [..., queries, keys] of attention's scores that a fused kernel doesn't store.

    They are what a matmul of 16 bits, in batches, makes of vectors of up to 128 numbers in multiples of 8. They are
    exponentiated, and a second matmul reads them. Other types and widths have no fused kernel, and neither have odd lengths.
    """
    found = [place.eqn for place in places(jaxpr.jaxpr)]
    made, read = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for eqn in found:
        if eqn.primitive.name == "dot_general":
            contracted, batched = eqn.params["dimension_numbers"]
            left, right = (var.aval for var in eqn.invars)
            width = math.prod(left.shape[n] for n in contracted[0])
            if batched[0] and left.dtype.itemsize == right.dtype.itemsize == 2 and width <= 128 and width % 8 == 0:
                made.add(tuple(sorted(eqn.outvars[0].aval.shape)))
            read |= {tuple(sorted(left.shape)), tuple(sorted(right.shape))}
    exponents = {eqn.invars[0].aval.shape for eqn in found if eqn.primitive.name == "exp"}
    scores = {shape for shape in exponents if tuple(sorted(shape)) in made & read and len(shape) > 2}
    return frozenset(shape for shape in scores if shape[-1] % 2 == shape[-2] % 2 == 0)


def _functions(eqn: Any) -> tuple[str, ...]:
    """The names of the functions on the stack of an equation."""
    traceback = eqn.source_info.traceback
    return tuple(frame.function_name for frame in traceback.frames) if traceback else ()
