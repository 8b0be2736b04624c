"""`--policy auto`: a plan for the layers of a workload, with JAX and XLA behind the planner."""

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxremat.answer.layer_estimate import cost_of, speed_of
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.config import Layout, Objective
from jaxremat.errors import CompileError, UsageError
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.known import REFERENCE_BATCH, Known
from jaxremat.planner.places import highest_speeds, possible
from jaxremat.planner.plan import NoPlan, Plan, Tried, find_plans, found_by
from jaxremat.planner.search import find
from jaxremat.planner.shared_budget import EqualLayers, as_one
from jaxremat.planner.steps import MOST_WHOLE, Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.search.batch import at_most
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.system.ahead import ahead
from jaxremat.trial.trials import Trials
from jaxremat.units import gib
from jaxremat.xla.clock import predict_step_time

_SHORT = (2, 4)  # layers of the short stacks by which many unrolled layers are judged
_DEEP = 8 * sum(_SHORT)  # these take about an eighth of the seconds that compiling all layers takes
_SURELY_OVER = 2  # times the budget, by short stacks; their line was found to be wrong by up to 40 %
#: The progress of a plan: called before each compile with the policy, the batch, and which compile it is.
OnCompile = Callable[[str, int, Compile], None]
#: Called with each step that fits and is better than those before: its trials, policy and batch, and the number of compiles.
OnBest = Callable[[Trials, Policy, int, int], None]


@dataclass(frozen=True)
class Planned:
    """What the planner found.

    Attributes:
        found: the plan. Where no step fits, the compiled step of the fewest bytes.
        trials: the trials with the loss and the layout of that step.
        kinds: the kinds of layers that were planned, at the plan's batch.
        num_compiles: how many compiles the plan took.
        others: the best plans in other layouts of the layers.
        rejected: why there is no plan for unrolled layers, or no further one: XLA rejected a step, or all are over the budget.
        most_share: of a layout whose search ended because another one is faster, the most samples per second that are expected
            of it, as a share of those of that one.
    """

    found: Plan | NoPlan
    trials: Trials
    kinds: tuple[EqualLayers, ...]
    num_compiles: int
    others: tuple["Planned", ...] = ()
    rejected: str = ""
    most_share: float | None = None

    @property
    def answer(self) -> Plan | Tried:
        """The step of the plan. Where no step fits, the compiled one of the fewest bytes."""
        return self.found if isinstance(self.found, Plan) else self.found.least


def plan_run(
    trials: Trials,
    *,
    losses: Sequence[str],
    batch: int | None,
    max_batch: int | None,
    objective: Objective = "time",
    on_compile: OnCompile = lambda policy, batch, compile: None,
    on_best: OnBest = lambda trials, policy, batch, num_compiles: None,
    budget_bytes: int | None = None,
    offload: bool = False,
    layouts: Sequence[Layout] = (),
    named: bool = True,
) -> Planned:
    """Plans the layers of a workload within the budget of its trials.

    Args:
        trials: the trials of the workload. Their own loss is ignored. Steps that they have compiled aren't compiled again.
        losses: the losses to choose among.
        batch: the batch, or None to choose it.
        max_batch: no larger batch is chosen; None for no limit. With a global batch, its divisors up to there are the batches
            to choose among.
        objective: what to plan for, as in `find_plans`.
        on_compile: called before each compile with the policy, the batch, and which compile it is. The compiles of a plan that
            offloads nothing, because XLA rejected one that does, are counted from 1.
        on_best: called with the trials, the policy and the batch of each step that fits and is better than those before, by
            the objective, and with the number of compiles so far.
        budget_bytes: a budget in place of the trials' own.
        offload: whether to try plans that offload more. They assume that kernels hide the host transfers of as many bytes as
            the link moves while a layer runs; the compiled schedule shows whether they do. Otherwise a host transfer is priced
            as if no kernel hid it.
        layouts: the layouts of the layers to choose between, a scan first. Empty for that of the trials. See
            `planner/search.py`.
        named: whether the named policies that could fit are compiled too.

    Raises:
        TargetError: the target's speed isn't known, so that nothing has a price.
        UsageError: no repeated layers were found in the workload.
        CompileError: XLA rejected a step. If it rejects unrolled layers, the plan for the scan is the answer. If it rejects a
            step that offloads, or compiles one to the wrong layer's values, the answer is a plan that offloads nothing.
    """
    log: list[Policy] = []
    common: dict[str, Any] = {
        "budget_bytes": trials.budget_bytes if budget_bytes is None else budget_bytes,
        "on_compile": on_compile,
        "log": log,
        "best": _Best(objective, on_best),
    }
    options: dict[str, Any] = {
        "batch": batch,
        "batches": trials.batches(max_batch),
        "objective": objective,
    }
    try:
        return _plan(trials, losses, common | {"offload": offload}, options, layouts, named=named)
    except CompileError:
        was_rejected = any(one.policy.offloads and one.rejected for one in trials.steps.values())
        if not was_rejected and not (log and log[-1].offloads):
            raise
    return _plan(trials, losses, common | {"offload": None}, options, layouts, named=named)


def _plan(
    trials: Trials,
    losses: Sequence[str],
    common: dict[str, Any],
    options: dict[str, Any],
    layouts: Sequence[Layout],
    *,
    named: bool,
) -> Planned:
    """`plan_run` with its arguments in two groups.

    `common` has the attributes of `_Compiles`, and `options` the arguments of `find_plans`.
    """
    layout, *other_layouts = layouts or (None,)
    first = _Compiles(trials.with_layout(layout), compiles=Compiles(), **common)
    of_scan: dict[str, Any] = {"is_other": True, "short": {}, "over": [], "waits": ChainMap({}, first.waits), "layers": {}}
    all_layouts = [first, *(replace(first, trials=trials.with_layout(other), **of_scan) for other in other_layouts)]
    fixed_bytes = first.trials.with_loss(losses[0]).state_bytes()
    batches = [options["batch"]] if options["batch"] else options["batches"]
    steps = [replace(one.steps(batches), known=one.known(losses)) for one in all_layouts]
    found, *others = find_plans(steps, losses=losses, named=named, fixed_bytes=fixed_bytes, **options)
    assert found.plan is not None, "the layers' own layout has a plan, or a step that doesn't fit"
    answer = first.planned(found.plan)
    for one, unrolled in zip(all_layouts[1:], others, strict=True):
        if unrolled.plan is None:
            return replace(answer, rejected=unrolled.rejected or "; ".join(one.over))
        other = one.planned(unrolled.plan)
        if isinstance(unrolled.plan, Plan) and isinstance(found.plan, Plan):
            if is_better(unrolled.plan, found.plan, options["objective"]):
                if found.bound is not None:
                    answer = replace(answer, most_share=found.bound * unrolled.plan.cost.step_s / unrolled.plan.batch)
                return replace(other, others=(answer,))
            return replace(answer, others=(other,), rejected=unrolled.rejected)
    return answer


def is_better(one: Plan, other: Plan, objective: Objective) -> bool:
    """Whether a plan has fewer bytes or more samples per second than another one."""
    if objective == "memory":
        return one.cost.total_bytes < other.cost.total_bytes
    return one.batch / one.cost.step_s > other.batch / other.cost.step_s


def plan_bounds(trials: Trials, *, loss: str, batches: Sequence[int], on_compile: OnCompile) -> Iterator[float | Planned]:
    """Plans under one loss, and yields an upper bound of the speed after each compile.

    Then it yields the plan. Named policies are left out.
    The speed is in samples a second of one data-parallel group, for one microbatch.

    Raises:
        TargetError: the target's speed isn't known.
        UsageError: no repeated layers were found in the workload.
        CompileError: XLA rejected a step.
    """
    of_plan = _Compiles(trials, trials.budget_bytes, False, on_compile, [], _Best("time"), Compiles())
    steps, fixed_bytes = of_plan.steps(batches), trials.with_loss(loss).state_bytes()
    batches = batches if len(batches) == 1 else possible(steps, fixed_bytes, batches)
    known = Known(steps, (loss,), batches, fixed_bytes, start=batches[-1])
    yield from speed_bounds(known)
    found = found_by(known, "time").plan
    assert found is not None, "the layers' own layout has a plan, or a step that doesn't fit"
    yield of_plan.planned(found)


def speed_bounds(known: Known) -> Iterator[float]:
    """Searches one layout, and yields after each compile the most sequences per second.

    No step has more. Meshes are compared by these bounds. The first full-remat step (`Known.start`) has a batch that no step
    exceeds, or a quarter of it where XLA rejects a step so large. A bound assumes that smaller batches are as fast for each
    sequence, and that their bytes lie on the line from the state. Both make it too high. The named policies are left out. It is
    0 where no full-remat step fits.
    """
    least = math.inf
    for _ in find([known], named=False):
        if known.curves:
            estimates = known.estimates_at(known.reference)
            found = [place.speed for layer in estimates for place in highest_speeds(known, layer)]
            least = min(least, max(found, default=0.0))
        yield least


def compiled_under(planned: Planned, xla_preset: str) -> Planned:
    """The plan with its step compiled under another preset of XLA's options.

    Its bytes and seconds are those of that program. There is no plan if the step doesn't fit under that preset.
    """
    answer, trials = planned.answer, replace(planned.trials, xla_preset=xla_preset)
    cost = cost_of(trials.compile(answer.policy, answer.batch), speed_of(trials.target))
    step, found = Tried(answer.policy, answer.loss, answer.batch, cost), planned.found
    tried = (*found.tried, step)
    if isinstance(found, Plan) and cost.total_bytes <= trials.budget_bytes:
        found = replace(found, cost=cost, tried=tried)
    else:
        found = NoPlan(step, tried)
    return replace(planned, found=found, trials=trials, num_compiles=planned.num_compiles + 1)


@dataclass
class _Best:
    """The best of the compiled steps that fit, by an objective.

    `on_best` is called with each better one.
    """

    objective: Objective
    on_best: OnBest = lambda trials, policy, batch, num_compiles: None
    rank: tuple[float, ...] = ()

    def look_at(self, trials: Trials, policy: Policy, batch: int, cost: Cost, num_compiles: int) -> None:
        """Compares a step that fits with the best one before."""
        speed = batch / cost.step_s
        rank = {"time": (speed,), "batch": (batch, speed), "memory": (-cost.total_bytes, speed)}[self.objective]
        if rank > self.rank:
            self.rank = rank
            self.on_best(trials, policy, batch, num_compiles)


@dataclass(frozen=True)
class _Compiles:
    """The compiled steps of a plan in one layout.

    With a global batch, the number of microbatches depends on the batch. The planner then counts the seconds of one microbatch:
    those of the step, divided by the number of its microbatches.

    Attributes:
        trials: the trials in this layout.
        budget_bytes: bytes that a step may take.
        offload: as in `plan_run`. None for plans that offload nothing.
        on_compile: as in `plan_run`.
        log: the policies of all compiles so far, those in other layouts too.
        best: the best compiled step so far, of those in other layouts too.
        compiles: counts the compiles.
        waits: on a mesh, exposed seconds for each second of collectives, in the compiled full-remat step
            at each batch. Unrolled layers begin with those of a scan, and then have those of their last step at the batch.
        is_other: whether the layers are unrolled to be compared with a scan.
        short: of many unrolled layers, the bytes of full remat in short stacks, by their number of layers.
        over: the steps that don't fit, in words.
        layers: the layers by kind, and as one, at each batch and under each share of `waits`.
    """

    trials: Trials
    budget_bytes: int
    offload: bool | None
    on_compile: OnCompile
    log: list[Policy]
    best: _Best
    compiles: Compiles
    waits: MutableMapping[int, float] = field(default_factory=dict)
    is_other: bool = False
    short: dict[int, int] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)
    layers: dict[tuple[int, float], tuple[EqualLayers, tuple[EqualLayers, ...]]] = field(default_factory=dict)

    def trials_of(self, policy: Policy, loss: str) -> Trials:
        return replace(self.trials.with_loss(loss), with_dump=policy == NOTHING and not self.is_other)

    def begin(self, policy: Policy, loss: str, batch: int) -> None:
        if self.short or not self.is_deep:
            self.trials_of(policy, loss).begin(policy, batch)

    def compile(self, policy: Policy, loss: str, batch: int) -> Cost:
        trials, speed = self.trials_of(policy, loss), speed_of(self.trials.target)
        if batch not in trials.of(policy).done:
            if self.is_deep and not self.short:
                self.judge(loss, batch)
            self.log.append(policy)
            how = ["unrolled"] * self.is_other + ["offloading nothing"] * (self.offload is None)
            self.on_compile(", ".join([*how, str(policy)]), batch, self.compiles.next())
        done = trials.compile(policy, batch)
        if (policy == NOTHING or self.is_other) and trials.target.mesh and not done.is_too_large:
            time = predict_step_time(done.module, speed)
            self.waits[batch] = time.collective_exposed_s / time.collective_s if time.collective_s else 0.0
        cost = cost_of(done, speed, self.layers_at(batch)[1] if done.dump else ())  # tracing the layers may take seconds
        cost = replace(cost, step_s=cost.step_s / _num_microbatches(trials, batch))
        if cost.total_bytes <= self.budget_bytes:
            self.best.look_at(trials, policy, batch, cost, len(self.log))
        else:
            self.over.append(f"batch {batch} takes {gib(cost.total_bytes)}")
        return cost

    @property
    def is_deep(self) -> bool:
        """Whether so many layers are unrolled that short stacks of them are compiled first.

        They aren't where XLA rejects a step that is too large within seconds.
        """
        if not self.is_other or self.trials.speaks_early:
            return False
        factory = self.trials.factory
        return "num_layers" in factory.options and factory.num_layers() >= _DEEP

    def judge(self, loss: str, batch: int) -> None:
        """Compiles full remat in short stacks of unrolled layers.

        Raises:
            CompileError: by their bytes all layers take far more than the budget.
        """
        stacks = {num: self.trials_of(NOTHING, loss).with_num_layers(num) for num in _SHORT}
        self.compiles.add(len(stacks))
        for trials in stacks.values():
            trials.begin(NOTHING, batch)
        for num, trials in stacks.items():
            self.log.append(NOTHING)
            self.on_compile(f"unrolled, {num} layers, {NOTHING}", batch, self.compiles.next())
            self.short[num] = trials.compile(NOTHING, batch).memory.total_bytes
        (low, low_bytes), (high, high_bytes) = self.short.items()
        num_layers = self.trials.factory.num_layers()
        total_bytes = low_bytes + (high_bytes - low_bytes) * (num_layers - low) // (high - low)
        if total_bytes > _SURELY_OVER * self.budget_bytes:
            stacks_take = f"stacks of {low} and {high} layers take {gib(low_bytes)} and {gib(high_bytes)}"
            in_all = f"all {num_layers} take some {total_bytes / 2**30:.0f} GiB"
            raise CompileError(f"under {NOTHING} at batch {batch}, {stacks_take}, so {in_all}")

    def known(self, losses: Sequence[str]) -> tuple[tuple[Policy, str, int], ...]:
        """The steps in this layout that were compiled before."""
        policies = {steps.policy: None for steps in self.trials.steps.values()}
        if self.offload is None:
            policies = {policy: None for policy in policies if not policy.offloads}
        done = {(loss, policy): self.trials.with_loss(loss).of(policy).compiled for loss in losses for policy in policies}
        return tuple((policy, loss, batch) for (loss, policy), compiled in done.items() for batch in compiled)

    def steps(self, batches: Sequence[int]) -> Steps:
        """The steps for one search of the planner."""
        layers, _ = self.layers_at(at_most(batches, REFERENCE_BATCH))
        if not layers.layer.allows(NOTHING):
            raise UsageError(
                f"as_config of {self.trials.factory.name} gives no lines for the policy nothing, which a plan begins with",
                next_step="return the lines of full remat for it, such as ('remat: full',), or () if it needs none",
            )
        return Steps(
            layer_at=lambda batch: self.layers_at(batch)[0].layer,
            compile=self.compile,
            begin=self.begin,
            may_guess=lambda: self.trials.begins and ahead().has_idle_core,
            expect=self.compiles.expect,
            num_layers=layers.num_layers,
            budget_bytes=self.budget_bytes,
            has_groups=layers.has_groups,
            allows=layers.layer.allows,
            stack_bytes=self.trials.gradient_bytes() if self.is_other else 0,
            most_that_fit=MOST_WHOLE if self.trials.speaks_early else None,
        )

    def layers_at(self, batch: int) -> tuple[EqualLayers, tuple[EqualLayers, ...]]:
        """The layers at a batch: as one, and by kind.

        A gather is hidden as far as in the step that `waits` has for the nearest batch, and not at all before it has one.
        """
        nearest = min(self.waits, key=lambda compiled: abs(compiled - batch), default=None)
        waits = 1.0 if nearest is None else self.waits[nearest]
        if (batch, waits) not in self.layers:
            speed = speed_of(self.trials.target)
            kinds = estimate_workload(self.trials, speed, batch, offload=bool(self.offload), waits=waits)
            if self.offload is None:
                kinds = tuple(replace(kind, layer=_without_offload(kind.layer)) for kind in kinds)
            self.layers[batch, waits] = as_one(kinds), kinds
        return self.layers[batch, waits]

    def planned(self, found: Plan | NoPlan) -> Planned:
        """A plan with the trials of its step."""
        answer = found if isinstance(found, Plan) else found.least
        trials = self.trials.with_loss(answer.loss)
        num_compiles = max(len(self.log), len(trials.of(answer.policy).done))
        return Planned(_of_whole_steps(found, trials), trials, self.layers_at(answer.batch)[1], num_compiles)


def _without_offload(layer: LayerEstimate) -> LayerEstimate:
    return replace(layer, offload_bytes=0, alternatives=tuple(map(_without_offload, layer.alternatives)))


def _num_microbatches(trials: Trials, batch: int) -> int:
    """How many microbatches make up the global batch.

    It is 1 without a global batch: the planner knows the seconds of the whole step then.
    """
    return 1 if trials.global_batch is None else trials.global_batch // batch


def _of_whole_steps(found: Plan | NoPlan, trials: Trials) -> Plan | NoPlan:
    """The plan with the seconds of whole steps in place of those of one microbatch."""
    if trials.global_batch is None:
        return found

    def whole(tried: Tried) -> Tried:
        return replace(tried, cost=replace(tried.cost, step_s=tried.cost.step_s * _num_microbatches(trials, tried.batch)))

    tried = tuple(whole(step) for step in found.tried)
    if isinstance(found, NoPlan):
        return NoPlan(whole(found.least), tried)
    times = _num_microbatches(trials, found.batch)
    return replace(
        found,
        cost=replace(found.cost, step_s=found.cost.step_s * times),
        recompute_s=None if found.recompute_s is None else found.recompute_s * times,
        bound_s=None if found.bound_s is None else found.bound_s * times,
        prices=tuple(replace(price, saved_s=price.saved_s * times) for price in found.prices),
        more=tuple(replace(more, saved_s=more.saved_s * times) for more in found.more),
        tried=tried,
    )
