"""`--policy auto`: a plan for the layers of a run's workload, with JAX and XLA behind the planner."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxremat.answer.layer_estimate import cost_of, speed_of
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.config import Layout, Objective
from jaxremat.errors import CompileError
from jaxremat.planner.candidates import without_flops
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.outlook import SpeedBound, speed_bounds
from jaxremat.planner.plan import NoPlan, Plan, Tried, find_plan, most_compiles
from jaxremat.planner.shared_budget import EqualLayers, as_one
from jaxremat.planner.steps import Cost, Steps
from jaxremat.planner.unrolled import is_better, plan_unrolled
from jaxremat.policy.offload import offloads
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.trial.settings import Run
from jaxremat.trial.trial import PolicyTrials
from jaxremat.xla.clock import predict_step_time

#: The compiled steps of a run, by how the layers run, policy and loss.
Trials = dict[tuple[Layout | None, Policy, str], PolicyTrials]
#: The progress of a plan: called before each compile with the policy, the batch, and which compile it is.
OnCompile = Callable[[str, int, Compile], None]
#: Called with each step that fits and is better than those before, and how many compiles there were.
OnBest = Callable[[PolicyTrials, int, int], None]


@dataclass(frozen=True)
class Planned:
    """What the planner found for a run, and the trials of the policy and loss that it chose.

    Where no step fits, they are the trials of the step of the fewest bytes. `kinds` are the kinds of layers that were planned, at
    the plan's batch. `others` are the best plans in other layouts of the layers. `refused` says why XLA refused unrolled layers;
    it is empty if it didn't.
    """

    found: Plan | NoPlan
    trials: PolicyTrials
    kinds: tuple[EqualLayers, ...]
    others: tuple["Planned", ...] = ()
    refused: str = ""


def trials_of(
    known: Trials, run: Run, policy: Policy, loss: str, requested: str = "auto", *, keep_dump: bool = True
) -> PolicyTrials:
    """The trials of a policy among those that are known. New ones are added if there are none.

    New ones under `nothing` keep XLA's dump of the program with `keep_dump`.
    """
    key = (run.factory.layout(), policy, loss)
    if key not in known:
        known[key] = PolicyTrials(run.with_loss(loss), requested, policy, keep_dump=keep_dump and policy == NOTHING)
    return known[key]


def plan_run(
    run: Run,
    *,
    losses: Sequence[str],
    batch: int | None,
    max_batch: int | None,
    objective: Objective = "time",
    on_compile: OnCompile = lambda policy, batch, compile: None,
    on_best: OnBest = lambda trials, batch, num_compiles: None,
    budget_bytes: int | None = None,
    trials: Trials | None = None,
    offload: bool = False,
    layouts: Sequence[Layout] = (),
    named: bool = True,
) -> Planned:
    """Plans the layers of the workload of `run` within its budget.

    Args:
        run: the run. Its own loss is ignored.
        losses: the losses to choose among.
        batch: the batch, or None to choose it.
        max_batch: no larger batch is chosen; None for no limit. With a global batch, its divisors up to there are the batches
            to choose among.
        objective: what to plan for, as in `find_plan`.
        on_compile: called before each compile with the policy, the batch, and which compile it is. The compiles of each layout,
            and those of the plan that offloads nothing, are counted from 1.
        on_best: called with the trials and the batch of each step that fits and is better than those before, by the objective,
            and with the number of compiles so far.
        budget_bytes: a budget in place of the run's.
        trials: the compiled steps of other plans for the same run. They are used, and new steps are added.
        offload: whether to try plans that offload more. They assume that kernels hide the host transfers of as many bytes as
            the link moves while a layer runs; the compiled schedule shows whether they do. Otherwise a host transfer is priced
            as if no kernel hid it.
        layouts: the layouts of the layers to choose between: empty for that of the run, or both. See `planner/unrolled.py`.
        named: whether the named policies that could fit are compiled too.

    Raises:
        TargetError: the target's speed isn't known, so that nothing has a price.
        UsageError: no repeated layers were found in the workload.
        CompileError: XLA refused a step. If it refuses unrolled layers, the plan for the loop is the answer. If it refuses a
            step that offloads, or compiles one to the wrong layer's values, the answer is a plan that offloads nothing.
    """
    log: list[Policy] = []
    common: dict[str, Any] = {
        "trials": {} if trials is None else trials,
        "budget_bytes": run.budget_bytes if budget_bytes is None else budget_bytes,
        "on_compile": on_compile,
        "log": log,
        "best": _Best(objective, on_best),
    }
    options: dict[str, Any] = {
        "batch": batch,
        "batches": run.batches(max_batch),
        "objective": objective,
    }
    try:
        return _plan(run, losses, common | {"offload": offload}, options, layouts, named=named)
    except CompileError:
        if not (log and offloads(log[-1])):
            raise
    return _plan(run, losses, common | {"offload": None}, options, layouts, named=named)


def _plan(
    run: Run,
    losses: Sequence[str],
    common: dict[str, Any],
    options: dict[str, Any],
    layouts: Sequence[Layout],
    *,
    named: bool,
) -> Planned:
    """`plan_run` with the attributes of `_Compiles` in `common`, and the arguments of `find_plan` in `options`."""
    loop = _Compiles(run.with_layout("loop") if layouts else run, **common)
    options = options | {"fixed_bytes": loop.run.with_loss(losses[0]).state_bytes()}
    batch, objective = options["batch"], options["objective"]
    looped = find_plan(loop.steps(batch), losses=losses, named=named and not layouts, **options)
    if not layouts or isinstance(looped, NoPlan):
        return loop.planned(looped)
    unrolled = _Compiles(run.with_layout("unrolled"), is_other=True, waits=dict(loop.waits), **common)
    found, refused = None, ""
    try:
        compiles = Compiles()  # of this search, in both layouts
        found = plan_unrolled(unrolled.steps(batch, compiles), looped, loop.steps(batch, compiles), **options)
    except CompileError as error:  # the plan for the loop stands
        refused = str(error)
    if found and is_better(found, looped, objective):
        return replace(unrolled.planned(found), others=(loop.planned(looped),))
    # With the named policies. Nothing is compiled twice.
    looped = find_plan(loop.steps(batch), losses=losses, named=named, **options)
    return replace(loop.planned(looped), others=(unrolled.planned(found),) if found else (), refused=refused)


def plan_bounds(
    run: Run, *, loss: str, batches: Sequence[int], trials: Trials, on_compile: OnCompile
) -> Iterator[SpeedBound]:
    """Yields upper bounds of the speed of any plan for `run`, from high to low (`planner/outlook.py`).

    They are those of one member of the mesh. Each takes one more compile, and the compiled steps are added to `trials`. How many
    compiles there are at most counts those of the plan at the batch of the last bound, too.

    Raises:
        TargetError: the target's speed isn't known.
        UsageError: no repeated layers were found in the workload.
        CompileError: XLA refused a step.
    """
    steps = _Compiles(run, trials, run.budget_bytes, False, on_compile, [], _Best("time")).steps(batches[0])
    steps = steps.before(most_compiles(steps, batches[0], named=False))
    return speed_bounds(steps, loss, run.with_loss(loss).state_bytes(), batches)


@dataclass
class _Best:
    """The best of the compiled steps that fit, by an objective. `on_best` is called with each better one."""

    objective: Objective
    on_best: OnBest = lambda trials, batch, num_compiles: None
    rank: tuple[float, ...] = ()

    def look_at(self, trials: PolicyTrials, batch: int, cost: Cost, num_compiles: int) -> None:
        """Compares a step that fits with the best one before."""
        speed = batch / cost.step_s
        rank = {"time": (speed,), "batch": (batch, speed), "memory": (-cost.total_bytes, speed)}[self.objective]
        if rank > self.rank:
            self.rank = rank
            self.on_best(trials, batch, num_compiles)


@dataclass(frozen=True)
class _Compiles:
    """The compiled steps of a run in one layout.

    With a global batch, the number of microbatches depends on the batch. The planner then counts the seconds of one microbatch:
    those of the step, divided by the number of its microbatches.

    Attributes:
        run: the run.
        trials: the compiled steps, to which new ones are added.
        budget_bytes: bytes that a step may take.
        offload: as in `plan_run`. None for plans that offload nothing.
        on_compile: as in `plan_run`.
        log: the policies of all compiles so far, those in other layouts too.
        best: the best compiled step so far, of those in other layouts too.
        waits: on a mesh, the seconds that the device waits for each second of collectives, in the compiled step under `nothing`
            at each batch. Unrolled layers begin with those of a loop.
        is_other: whether the layers are unrolled to be compared with a loop.
        layers: the layers by kind, and as one, at each batch and under each share of `waits`.
    """

    run: Run
    trials: Trials
    budget_bytes: int
    offload: bool | None
    on_compile: OnCompile
    log: list[Policy]
    best: _Best
    waits: dict[int, float] = field(default_factory=dict)
    is_other: bool = False
    layers: dict[tuple[int, float], tuple[EqualLayers, tuple[EqualLayers, ...]]] = field(default_factory=dict)

    def compile(self, policy: Policy, loss: str, batch: int, compiles: Compiles) -> Cost:
        of_policy = trials_of(self.trials, self.run, policy, loss, keep_dump=not self.is_other)
        if batch not in of_policy.done:
            self.log.append(policy)
            how = ["unrolled"] * self.is_other + ["offloading nothing"] * (self.offload is None)
            self.on_compile(", ".join([*how, str(policy)]), batch, compiles.next())
        done, speed = of_policy.compile(batch), speed_of(self.run.target)
        if policy == NOTHING and self.run.target.mesh:
            time = predict_step_time(done.module, speed)
            self.waits[batch] = time.collective_exposed_s / time.collective_s if time.collective_s else 0.0
        cost = cost_of(done, speed)
        cost = replace(cost, step_s=cost.step_s / _num_microbatches(self.run, batch))
        if cost.total_bytes <= self.budget_bytes:
            self.best.look_at(of_policy, batch, cost, len(self.log))
        return cost

    def steps(self, batch: int | None, compiles: Compiles | None = None) -> Steps:
        """The steps for one search of the planner, and what counts its compiles."""
        compiles = compiles or Compiles()
        layers, _ = self.layers_at(batch or self.run.workload_at().num_samples or 1)
        return Steps(
            layer_at=lambda batch: self.layers_at(batch)[0].layer,
            compile=lambda policy, loss, batch: self.compile(policy, loss, batch, compiles),
            expect=compiles.expect,
            num_layers=layers.num_layers,
            budget_bytes=self.budget_bytes,
            has_groups=layers.has_groups,
            has_own_base=self.is_other and self.run.target.mesh is not None,
        )

    def layers_at(self, batch: int) -> tuple[EqualLayers, tuple[EqualLayers, ...]]:
        """The layers at a batch: as one, and by kind.

        Of a gather, as much is hidden as in the step under `nothing` that was compiled at the nearest batch, and nothing before
        one was compiled.
        """
        nearest = min(self.waits, key=lambda compiled: abs(compiled - batch), default=None)
        waits = 1.0 if nearest is None else self.waits[nearest]
        if (batch, waits) not in self.layers:
            speed = speed_of(self.run.target)
            kinds = estimate_workload(self.run, speed, batch, offload=bool(self.offload), waits=waits)
            if self.offload is None:
                kinds = tuple(replace(kind, layer=_without_offload(kind.layer)) for kind in kinds)
            self.layers[batch, waits] = as_one(kinds), kinds
        return self.layers[batch, waits]

    def planned(self, found: Plan | NoPlan) -> Planned:
        """A plan with the trials of its step."""
        answer = found if isinstance(found, Plan) else found.least
        trials = trials_of(self.trials, self.run, answer.policy, answer.loss)
        trials.num_other_compiles = max(0, len(self.log) - len(trials.done))
        return Planned(_of_whole_steps(found, self.run), trials, self.layers_at(answer.batch)[1])


def _without_offload(layer: LayerEstimate) -> LayerEstimate:
    return replace(layer, offload_bytes=0, alternatives=tuple(map(_without_offload, layer.alternatives)))


def _num_microbatches(run: Run, batch: int) -> int:
    """How many microbatches make up the global batch. 1 without one: the planner knows the seconds of the whole step then."""
    return 1 if run.global_batch is None else run.global_batch // batch


def _of_whole_steps(found: Plan | NoPlan, run: Run) -> Plan | NoPlan:
    """The plan with the seconds of whole steps in place of those of one microbatch."""
    if run.global_batch is None:
        return found

    def whole(tried: Tried) -> Tried:
        return replace(tried, cost=replace(tried.cost, step_s=tried.cost.step_s * _num_microbatches(run, tried.batch)))

    tried = tuple(whole(step) for step in found.tried)
    if isinstance(found, NoPlan):
        return NoPlan(whole(found.least), tried)
    times = _num_microbatches(run, found.batch)
    return replace(
        found,
        cost=replace(found.cost, step_s=found.cost.step_s * times),
        recompute_s=None if found.recompute_s is None else found.recompute_s * times,
        bound_s=found.bound_s * times,
        prices=tuple(replace(price, saved_s=price.saved_s * times) for price in found.prices),
        more=tuple(replace(more, saved_s=more.saved_s * times) for more in found.more),
        tried=tried,
    )


def plan_without_flops(run: Run, batch: int) -> Policy:
    """The policy of the fewest bytes under which no matmul, attention or convolution of a layer runs twice.

    Raises:
        TargetError: the target's speed isn't known.
        UsageError: no repeated layers were found in the workload.
    """
    return without_flops(as_one(estimate_workload(run, speed_of(run.target), batch)).layer)
