"""Compares meshes of the same devices in few compiles: `--mesh auto` (`answer/race.py`).

The meshes are compared for one policy, or for plans.

Each mesh has upper bounds of its speed before its answer is known. For a plan they come from its full-remat steps
(`speed_bounds`), and the answer is a plan with the layers as the run has them. For another policy they come from the
straight line through two of its compiled steps, and the answer is its largest batch that fits. A mesh whose bound isn't more
than `SAME_SPEED` above the best answer is left out. Speeds are predicted sequences per second of all devices.

Before anything of a mesh is compiled, its bound comes from the compiled steps of others
(`answer/mesh_bounds.py`), and is `GAIN` more. This is an assumption. It is made where the batch is free, by meshes whose axis
`tensor` is no longer, whose state takes no more bytes, and on which several sequences fit.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxremat.answer.layer_estimate import cost_of, speed_of
from jaxremat.answer.mesh_bounds import most_speed, shorter_by
from jaxremat.answer.planned import OnCompile, Planned, plan_bounds
from jaxremat.answer.race import Reached, Standing, race, still_running
from jaxremat.errors import CompileError
from jaxremat.mesh.axes import MeshShape
from jaxremat.planner.curve import Curve, CurvePoint
from jaxremat.planner.known import SMALLER
from jaxremat.planner.plan import Plan
from jaxremat.planner.steps import Cost
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import GROWTH, at_most, largest_batch
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.trial.details import ComparedMesh
from jaxremat.trial.trials import Trials
from jaxremat.units import gib, percent_up

#: The share by which two meshes' speeds count as equal.
SAME_SPEED = 5e-3
#: How much faster a mesh may be than others say, before anything of it is compiled. Its kernels may have other shapes, and its
#: batches may lie between those of the other mesh.
GAIN = 0.05
#: How many sequences of a data-parallel group fit at least on a mesh whose steps say how fast others can be.
SEVERAL = 4
#: The progress of a comparison: called before each compile with the mesh, the policy, the batch, and which compile it is.
OnMeshCompile = Callable[[str, str, int, Compile], None]


@dataclass
class Entrant:
    """A mesh in a comparison.

    Attributes:
        mesh: the mesh.
        trials: the trials on it, with one loss and one layout. None where the mesh was left out before.
        left_out: why it was left out, or why XLA rejected its step.
        batch: the batch of its answer, or of the step of the fewest bytes if none fits. None before it has one.
        total_bytes: the bytes of that step.
        has_begun: whether its own bound is known, or is being compiled.
        faster: the mesh by which it is left out before anything of it is compiled. None where that isn't so.
        shorter_by_s: of its compiled steps, the seconds of `mesh_bounds.shorter_by` for each sequence. They are by policy, batch
            and size of the other mesh's axis `tensor`.
    """

    mesh: MeshShape
    trials: Trials | None = None
    left_out: str = ""
    batch: int | None = None
    total_bytes: int | None = None
    has_begun: bool = False
    faster: MeshShape | None = None
    shorter_by_s: dict[tuple[Policy, int, int], float] = field(default_factory=dict)

    @functools.cached_property
    def state_bytes(self) -> int | None:
        """Bytes of the state on each device. None for a mesh that was left out before."""
        return self.trials.state_bytes() if self.trials else None

    @property
    def num_compiles(self) -> int:
        return sum(len(steps.done) for steps in self.trials.steps.values()) if self.trials else 0


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison: the best mesh, and what is known of each.

    `best` is the mesh of the fewest bytes where nothing fits. It is None where the state fits on no mesh. While a comparison
    isn't complete, `best` is the best mesh so far, and None where no mesh has an answer that fits yet.
    """

    best: Entrant | None
    meshes: tuple[ComparedMesh, ...]
    num_compiles: int
    is_complete: bool = True


def compare_meshes(
    entrants: Sequence[Entrant],
    policy: Policy | None,
    *,
    batch: int | None,
    max_batch: int | None,
    on_compile: OnMeshCompile,
    on_change: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """Compares the meshes by the speed of their answers.

    Args:
        entrants: the meshes. Those that have trials are compared.
        policy: the policy. None for plans.
        batch: the batch. None to choose it.
        max_batch: no larger batch is chosen. None for no limit.
        on_compile: called before each compile.
        on_change: called with the comparison so far, whenever more of a mesh is known.

    Raises:
        UsageError: a plan was requested, and no repeated layers were found in the workload.
        CompileError: XLA rejected the step on each mesh on which the state fits.
    """
    compiles = Compiles()
    racing: list[Entrant] = []
    for one in entrants:
        if one.trials is None:
            continue
        if (over := (one.state_bytes or 0) - one.trials.budget_bytes) > 0:
            one.left_out = f"state {gib(over)} over"
        else:
            racing.append(one)

    # By mesh, how many compiles are to come at most. None before that is known: the race ends with at most the sum of all.
    further: dict[MeshShape, int | None] = {one.mesh: 1 if batch and policy is not None else None for one in racing}

    def says(one: Entrant) -> OnCompile:
        def on_mesh_compile(policy: str, batch: int, compile: Compile) -> None:
            if compile.at_most is not None:
                further[one.mesh] = compile.at_most - compile.number + 1
            known = [most for most in further.values() if most is not None]
            if len(known) == len(further):
                compiles.expect(sum(known))
            on_compile(str(one.mesh), policy, batch, replace(compiles.next(), estimate=compile.estimate))
            if (most := further[one.mesh]) is not None:
                further[one.mesh] = most - 1

        return on_mesh_compile

    latest = [Standing() for _ in racing]

    def changed(standings: list[Standing]) -> None:
        latest[:] = standings
        running = still_running(standings, SAME_SPEED)
        further.update((one.mesh, 0) for n, one in enumerate(racing) if n not in running)
        on_change(comparison(standings))

    def assumed(one: Entrant) -> float:
        least = math.inf
        for other, standing in zip(racing, latest, strict=True) if batch is None else ():
            if other.has_begun and tells_of(other, one) and 0 < standing.bound < math.inf:
                most = (1 + GAIN) * most_beside(other, standing.bound, one.mesh.tensor)
                if most < least:
                    least, one.faster = most, other.mesh
        return least

    def steps(one: Entrant) -> Iterator[float | Reached]:
        bound = math.inf
        while (least := assumed(one)) < bound:  # those of the other meshes may have fallen since
            yield (bound := least)
        one.has_begun = True
        if policy is None:
            yield from _plans(one, batch, max_batch, says(one))
        else:
            yield from _largest(one, policy, batch, max_batch, says(one))

    def comparison(found: Sequence[Standing], *, is_complete: bool = False) -> Comparison:
        standings = {one.mesh: standing for one, standing in zip(racing, found, strict=True)}
        reached = {mesh: standing.reached or 0.0 for mesh, standing in standings.items()}
        known = [one for one in racing if one.total_bytes is not None and (is_complete or reached[one.mesh])]
        best = max(known, key=lambda one: (reached[one.mesh], -(one.total_bytes or 0)), default=None)
        fastest = max(reached.values(), default=0.0)
        compared = tuple(_compared(one, standings.get(one.mesh), fastest) for one in entrants)
        return Comparison(best, compared, sum(one.num_compiles for one in entrants), is_complete)

    if len(racing) == 1:  # nothing to compare
        return Comparison(racing[0], tuple(_compared(one, None, 0.0) for one in entrants), 0)
    contestants = [_unless_rejected(one, steps(one)) for one in racing]
    found = race(contestants, SAME_SPEED, changed)
    if racing and all(one.total_bytes is None for one in racing):
        raise CompileError(
            f"XLA rejected the step on each of {len(racing)} meshes that hold the state",
            cause=f"{racing[0].mesh}: {racing[0].left_out}",
            next_step="name a mesh, such as --mesh fsdp=8, with a smaller --batch; or take other --devices",
        )
    return comparison(found, is_complete=True)


def tells_of(other: Entrant, one: Entrant) -> bool:
    """Whether the steps of a mesh say how fast another one can be."""
    axes = other.mesh.expert == one.mesh.expert and other.mesh.tensor <= one.mesh.tensor
    return axes and other is not one and (other.state_bytes or 0) <= (one.state_bytes or 0)


def most_beside(one: Entrant, speed: float, tensor: int) -> float:
    """The most sequences per second of a mesh with that axis `tensor`, by `one`.

    The most of that one is `speed`. It isn't known where fewer than `SEVERAL` sequences fit: a batch between two of them can
    then be much faster.
    """
    trials, longest_s, several_fit = one.trials, -math.inf, False
    assert trials is not None
    state_bytes = one.state_bytes or 0
    for steps in trials.steps.values():
        for batch, done in steps.compiled.items():
            of_batch, left_bytes = done.memory.total_bytes - state_bytes, trials.budget_bytes - state_bytes
            several_fit |= batch >= SEVERAL and SEVERAL * of_batch <= batch * left_bytes
            key = steps.policy, batch, tensor
            if key not in one.shorter_by_s:
                seconds = shorter_by(done.module, speed_of(trials.target), one.mesh, tensor)
                one.shorter_by_s[key] = seconds / trials.global_batch_at(batch)
            longest_s = max(longest_s, one.shorter_by_s[key])
    return most_speed(speed, longest_s) if several_fit else math.inf


def _unless_rejected(one: Entrant, steps: Iterator[float | Reached]) -> Iterator[float | Reached]:
    """The steps of a contestant. Where XLA rejects one of them, the mesh is left out."""
    try:
        yield from steps
    except CompileError as error:
        one.left_out = error.got
        yield Reached(0.0)


def _plans(one: Entrant, batch: int | None, max_batch: int | None, on_compile: OnCompile) -> Iterator[float | Reached]:
    """The bounds of a mesh's plans, and the speed of its plan."""
    trials = one.trials
    assert trials is not None, "only meshes with trials are compared"
    loss = trials.factory.facts(trials.train).loss
    batches = [batch] if batch else trials.batches(max_batch)
    times = trials.num_members * trials.train.accumulate
    for found in plan_bounds(trials, loss=loss, batches=batches, on_compile=on_compile):
        if isinstance(found, Planned):
            answer = found.answer
            one.batch, one.total_bytes = answer.batch, answer.cost.total_bytes
            speed = trials.num_members * answer.batch * trials.train_at(answer.batch).accumulate / answer.cost.step_s
            yield Reached(speed if isinstance(found.found, Plan) else 0.0)
        elif found:  # where nothing fits under `nothing`, a plan may still run groups of layers again
            yield times * found


def _largest(
    one: Entrant, policy: Policy, batch: int | None, max_batch: int | None, on_compile: OnCompile
) -> Iterator[float | Reached]:
    """The bound of a policy's speed on a mesh, and its speed at its largest batch that fits.

    Bytes and seconds of a microbatch are taken to lie on the straight lines through two compiled steps. The bound is the speed
    of the batch after the one at which the bytes meet the budget.
    """
    trials = one.trials
    assert trials is not None, "only meshes with trials are compared"
    compiles = Compiles()
    trials = replace(trials, on_compile=lambda policy, batch: on_compile(str(policy), batch, compiles.next()))
    batches, budget_bytes = [batch] if batch else trials.batches(max_batch), trials.budget_bytes

    def speed(batch: int, microbatch: Cost) -> float:
        return trials.num_members * batch / microbatch.step_s

    low = batches[0]
    first = _microbatch(trials, policy, low)
    one.batch, one.total_bytes = low, first.total_bytes
    if first.total_bytes > budget_bytes:
        yield Reached(0.0)
    elif len(batches) == 1:
        yield Reached(speed(low, first))
    else:
        fixed_bytes = trials.state_bytes()
        guess = _reach(CurvePoint(0, Cost(fixed_bytes, 0.0)), CurvePoint(low, first), budget_bytes)
        high = at_most(batches[1:], min(guess, GROWTH * low))
        second = _first_accepted(lambda batch: _microbatch(trials, policy, batch), batches[1:], high)
        points = CurvePoint(low, first), second
        reach = int(_reach(*points, budget_bytes))
        after = min(reach + 1, batches[-1])
        yield speed(after, Curve(points).at(after))
        estimate = at_most(batches, reach)
        compiles.estimated(estimate)
        found = largest_batch(
            lambda batch: trials.compile(policy, batch).memory.total_bytes,
            budget_bytes,
            fixed_bytes=fixed_bytes,
            start=min(estimate, GROWTH * second.batch),
            batches=batches,
            expect=compiles.expect,
        )
        one.batch, one.total_bytes = found.largest, found.largest_bytes
        yield Reached(speed(found.largest, _microbatch(trials, policy, found.largest)))


def _reach(low: CurvePoint, high: CurvePoint, budget_bytes: int) -> float:
    """The batch at which the line through two steps meets the budget."""
    per_sequence = max(1.0, (high.cost.total_bytes - low.cost.total_bytes) / (high.batch - low.batch))
    return low.batch + (budget_bytes - low.cost.total_bytes) / per_sequence


def _first_accepted(compile_step: Callable[[int], Cost], batches: Sequence[int], high: int) -> CurvePoint:
    """The step at `high`, or at the first smaller batch whose step XLA accepts.

    Each batch is a quarter of the one before.

    Raises:
        CompileError: XLA rejects the step at the smallest batch, too.
    """
    while True:
        try:
            return CurvePoint(high, compile_step(high))
        except CompileError:
            if high == batches[0]:
                raise
            high = at_most(batches, high // SMALLER)


def _microbatch(trials: Trials, policy: Policy, batch: int) -> Cost:
    """The bytes of the step at `batch`, and its predicted seconds for each of its microbatches."""
    cost = cost_of(trials.compile(policy, batch), speed_of(trials.target))
    return replace(cost, step_s=cost.step_s / trials.train_at(batch).accumulate)


def _why_left_out(bound: float, fastest: float) -> str:
    """Why a mesh whose speed is at most `bound` has no answer."""
    if bound > fastest * (1 + SAME_SPEED):
        return "not finished"
    return "slower at best" if bound <= fastest else f"at most {percent_up(bound / fastest - 1)} faster"


def _compared(one: Entrant, standing: Standing | None, fastest: float) -> ComparedMesh:
    """What the record says of a mesh. `fastest` is the speed of the best one so far.

    The comparison of a mesh has ended if it has an answer, or if its bound is above `fastest` by at most `SAME_SPEED`.
    """
    state = one.state_bytes
    if one.trials is None or standing is None:
        return ComparedMesh(str(one.mesh), state, left_out=one.left_out)
    samples = one.trials.num_members
    tokens = one.trials.workload_at(samples).num_tokens
    times = (1.0 if tokens is None else tokens / samples) / one.mesh.num_devices
    left_out, finished = one.left_out, standing.reached is not None
    if not finished and not one.has_begun and standing.bound <= fastest * (1 + SAME_SPEED):
        return ComparedMesh(str(one.mesh), state, left_out=f"{one.faster} wins")
    if not finished:
        left_out = _why_left_out(standing.bound, fastest)
    elif not standing.reached and not left_out:
        left_out = f"needs {gib(one.total_bytes or 0)}"
    return ComparedMesh(
        mesh=str(one.mesh),
        state_bytes=state,
        batch=one.batch if finished else None,
        total_bytes=one.total_bytes if finished else None,
        bound_tokens_per_s=times * standing.bound if 0 < standing.bound < math.inf else None,
        tokens_per_s=times * standing.reached if standing.reached else None,
        num_compiles=one.num_compiles,
        left_out=left_out,
    )
