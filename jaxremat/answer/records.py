"""Makes the records of an answer. Each record is emitted as soon as it is finished.

The request decides the records:

    --policy dots --batch 4,8     two trials                                  `answer_batches`
    --policy dots                 probes, trials and the largest batch        `answer_largest`
    --policy auto                 a plan and its trial                        `answer_plan`
    --frontier --batch 8          trials of named policies and of plans       `answer_frontier`
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from jaxremat.answer.planned import OnCompile, Planned, plan_run
from jaxremat.chips.installed import versions
from jaxremat.config import Objective
from jaxremat.errors import CompileError
from jaxremat.planner.plan import Plan
from jaxremat.planner.shared_budget import EqualLayers, for_kind
from jaxremat.policy.code import code_for
from jaxremat.policy.grammar import parse
from jaxremat.policy.names import WrittenName
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.search.batch import FIRST_BATCH, search_from_above, search_upwards
from jaxremat.search.compiles import Compiles
from jaxremat.system.ahead import with_next_begun
from jaxremat.system.whose import PACKAGE, is_within
from jaxremat.trial.details import PlannedLayout, TriedStep
from jaxremat.trial.record import LargestBatchRecord, PlanRecord, Record, TrialRecord, picked
from jaxremat.trial.row import config_of, rates
from jaxremat.trial.trials import Trials

Emit = Callable[[Record], None]
T = TypeVar("T")


class RejectedError(Exception):
    """XLA rejected the step at `batch`. The step's record says why."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.batch = batch


def answer_batches(
    trials: Trials,
    policy: Policy,
    requested: str,
    batches: tuple[int, ...],
    emit: Emit,
    compiles: Compiles,
    begin: Callable[[int], object] = lambda batch: None,
) -> None:
    """Emits a trial for each batch. If XLA rejects a step, its trial says so.

    Args:
        trials: the trials of the workload.
        policy: the policy.
        requested: the policy as it was requested.
        batches: the batches.
        emit: called with each record.
        compiles: told how many compiles there are.
        begin: begins to compile the step of a batch. It is called for the next one before the program waits for a step.
    """
    compiles.expect(len({*batches} - trials.of(policy).done.keys()))
    for batch in with_next_begun(batches, begin):
        emit(trials.record(policy, batch, requested=requested))


def answer_plan(planned: Planned, objective: Objective, emit: Emit, max_batch: int | None = None) -> None:
    """Emits the plan with its proof, and the trial of the step that it chose.

    If there is no plan, only the trial of the compiled step of the fewest bytes is emitted.

    Args:
        planned: what the planner found.
        objective: what it planned for.
        emit: called with each record.
        max_batch: the largest batch that it could choose. None for no limit, or if the batch was given.
    """
    if isinstance(planned.found, Plan):
        emit(_plan_record(planned.found, planned, objective, max_batch))
    emit(_planned_trial(planned, linted=True))


def _planned_trial(planned: Planned, *, linted: bool = False) -> TrialRecord:
    """The trial of a plan's step.

    If it is `linted`, the lint's rules look at its buffers too. For a device that is here, whose results aren't stored, that
    would take one more compile, and they don't.
    """
    answer, trials = planned.answer, planned.trials
    if linted and trials.target.kind == "deviceless":
        trials = replace(trials, with_dump=True)
    return trials.record(answer.policy, answer.batch, requested="auto", num_compiles=planned.num_compiles)


#: The named policies of a frontier.
FRONTIER_POLICIES = ("nothing", "dots", "dots-no-batch", "dots+attention", "none", "every:sqrt+nothing")
#: The number of budgets, between the least and the most bytes of the named policies, for which a frontier has a plan.
FRONTIER_BUDGETS = 5


def answer_frontier(trials: Trials, batch: int, emit: Emit, on_compile: Callable[[str], OnCompile]) -> None:
    """Emits trials at one batch: of each named policy, and of some plans.

    The budgets of the plans lie between the bytes of the named policies.

    Args:
        trials: the trials of the workload.
        batch: sequences in a step.
        emit: called with each record.
        on_compile: from the name of a part, whose compiles are counted from 1, a function that is called before each of them:
            with the policy, the batch, and which compile it is. The parts are the named policies and each plan.
    """
    loss = trials.factory.facts(trials.train).loss
    shown, totals = set[Policy](), list[int]()
    compiles = Compiles()
    compiles.expect(len(FRONTIER_POLICIES))
    named = {text: (policy := parse(text), replace(trials, with_dump=policy == NOTHING)) for text in FRONTIER_POLICIES}
    for policy, of_policy in named.values():
        of_policy.begin(policy, batch)
    for text, (policy, of_policy) in named.items():
        on_compile("named policies")(text, batch, compiles.next())
        row = of_policy.record(policy, batch, requested=text)
        shown.add(policy)
        totals += [row.total_bytes] if row.total_bytes else []
        emit(row)
    if not totals:
        return
    least, most = min(totals), max(totals)
    for n in range(1, FRONTIER_BUDGETS + 1):
        # The budgets are denser at the low end, where a byte saves the most time.
        budget_bytes = least + (most - least) * n**2 // FRONTIER_BUDGETS**2
        planned = plan_run(
            trials,
            losses=(loss,),
            batch=batch,
            max_batch=batch,
            on_compile=on_compile(f"plan {n} of {FRONTIER_BUDGETS}"),
            budget_bytes=budget_bytes,
        )
        if isinstance(planned.found, Plan) and planned.found.policy not in shown:
            shown.add(planned.found.policy)
            emit(_planned_trial(planned))


def _plan_record(found: Plan, planned: Planned, objective: Objective, max_batch: int | None) -> PlanRecord:
    trials, as_config = planned.trials, planned.trials.workload_at(found.batch).as_config
    compiled = trials.compile(found.policy, found.batch)
    is_limited = max_batch is not None and found.batch == trials.batches(max_batch)[-1] != trials.global_batch
    return PlanRecord(
        model=trials.factory.name,
        num_params=trials.workload_at().num_params,
        target=trials.target.name,
        seq_len=trials.factory.facts(trials.train).seq_len,
        objective=objective,
        **picked(found, "loss batch recompute_s bound_s prices more"),
        policy=str(found.policy),
        layout=trials.factory.layout(),
        layouts=tuple(_layout(one) for one in (planned, *planned.others)) if planned.others else (),
        unrolled_error=planned.rejected or None,
        max_batch=max_batch if is_limited else None,
        budget_bytes=trials.budget_bytes,
        total_bytes=found.cost.total_bytes,
        predicted_total_bytes=found.predicted_bytes,
        step_s=found.cost.step_s,
        paired_error=trials.target.speed.paired_error if trials.target.speed else None,
        layers=_by_layer(found.policy, planned.kinds),
        tried=tuple(step for one in (*planned.others, planned) for step in _tried(one)),
        disabled_pass=compiled.disabled_pass,
        as_config=as_config(found.policy) if as_config else None,
        as_code=code_of(found.policy, trials, found.batch),
        sources=_sources(compiled.names),
        num_compiles=planned.num_compiles,
        config=config_of(trials, found.batch),
        versions=versions(),
    )


def _sources(names: Iterable[WrittenName]) -> dict[str, str]:
    """By name, the line of source that leads to its value.

    Lines of this package's own models are left out.
    """
    lines = {written.name: written.users_line for written in names if written.users_line}
    return {name: line for name, line in lines.items() if not is_within(line.rpartition(":")[0], PACKAGE)}


def code_of(policy: Policy, trials: Trials, batch: int) -> tuple[str, ...]:
    """A policy in the framework of a user's own model."""
    workload, found = trials.workload_at(batch), trials.factory.found
    if workload.own_layers or not workload.loss:
        return ()
    return code_for(policy, found.kinds if found else (), workload.loss, *workload.loss_args)


def _tried(planned: Planned) -> Iterator[TriedStep]:
    trials = planned.trials
    for one in planned.found.tried:
        num_microbatches = trials.train_at(one.batch).accumulate
        how = trials.factory.layout(), None if num_microbatches == 1 else num_microbatches
        yield TriedStep(str(one.policy), one.loss, one.batch, one.cost.total_bytes, one.cost.step_s, *how)


def _layout(planned: Planned) -> PlannedLayout:
    """The plan of one layout. Its step was compiled, and isn't measured."""
    found, layout = planned.found, planned.trials.factory.layout()
    assert isinstance(found, Plan), "a layout is listed with its plan"
    assert layout is not None, "the planner compares layouts of known names"
    tokens_per_s, samples_per_s = rates(planned.trials, found.batch, found.cost.step_s)
    compiled = planned.trials.compile(found.policy, found.batch)
    return PlannedLayout(
        layout=layout,
        policy=str(found.policy),
        **picked(found, "loss batch"),
        **picked(found.cost, "total_bytes step_s"),
        tokens_per_s=tokens_per_s,
        samples_per_s=samples_per_s,
        compile_s=compiled.lower_s + compiled.compile_s,
        most_share=planned.most_share,
    )


def _by_layer(policy: Policy, kinds: Sequence[EqualLayers]) -> tuple[str, ...]:
    """The policy of each layer in words.

    With several kinds of layers, the words begin with the kind: `encoder: save:...`.
    """
    if len(kinds) > 1:
        return tuple(
            f"{kind.prefix.rstrip('/')}: {for_kind(policy, kind)}" for kind in kinds for _ in range(kind.num_layers)
        )
    num_layers = kinds[0].num_layers
    group = (policy,) if policy.recomputes_groups else policy.layers(num_layers)
    return tuple(str(group[i % len(group)]) for i in range(num_layers))


def answer_largest(
    trials: Trials,
    policy: Policy,
    requested: str,
    max_batch: int | None,
    emit: Emit,
    compiles: Compiles,
    first_batch: int = FIRST_BATCH,
) -> Iterator[int | None]:
    """Searches the largest batch that fits, or the largest microbatch of a global batch.

    The search stops before each compile, and yields the answer as the compiles so far predict it. None before the first.

    It emits a probe for each batch that is compiled, then the trials that prove the answer, then the `largest_batch` record. A
    batch that XLA rejects ends the search, with a failed trial as its only further record.

    Args:
        trials: the trials of the workload.
        policy: the policy.
        requested: the policy as it was requested.
        max_batch: the search stops here. None for no limit.
        emit: called with each record.
        compiles: told how many compiles the search takes at most.
        first_batch: the batch that is tried first. The nearer it is to the answer, the fewer compiles the search takes.
    """
    steps = trials.of(policy)

    def unless_rejected(made: Callable[[Policy, int], T], batch: int) -> T:
        try:
            return made(policy, batch)
        except CompileError as error:
            raise RejectedError(batch) from error

    def total_bytes(batch: int) -> int:
        total = unless_rejected(trials.compile, batch).memory.total_bytes
        emit(trials.record(policy, batch, "probe", requested=requested))
        return total

    fitting = [at for at, done in steps.compiled.items() if done.memory.total_bytes <= trials.budget_bytes]
    how: dict[str, Any] = {
        "fixed_bytes": trials.state_bytes(),
        "start": max(fitting, default=min(steps.done, default=first_batch)),
        "batches": trials.batches(max_batch),
    }
    try:
        if trials.speaks_early:
            early_bytes = partial(unless_rejected, trials.early_bytes)
            search = search_from_above(total_bytes, trials.budget_bytes, early_bytes=early_bytes, **how)
        else:
            begin = partial(trials.begin, policy)
            search = search_upwards(total_bytes, trials.budget_bytes, expect=compiles.expect, begin=begin, **how)
        found = yield from search
    except RejectedError as rejected:
        emit(trials.record(policy, rejected.batch, requested=requested))
        return
    rows = dict[int, TrialRecord]()
    for batch in filter(None, (found.largest, found.next)):
        rows[batch] = trials.record(policy, batch, requested=requested)
        emit(rows[batch])
    row = rows.get(found.largest)
    emit(
        LargestBatchRecord(
            model=trials.factory.name,
            requested_policy=requested,
            policy=str(policy),
            target=trials.target.name,
            seq_len=trials.factory.facts(trials.train).seq_len,
            xla_preset=trials.xla_preset,
            global_batch=trials.global_batch,
            largest_batch=found.largest,
            largest_batch_total_bytes=found.largest_bytes,
            next_batch=found.next,
            next_batch_total_bytes=found.next_bytes,
            max_batch=max_batch,
            budget_bytes=trials.budget_bytes,
            budget_terms=trials.budget_terms,
            **picked(next(iter(rows.values())), "loss layout optimizer mesh"),
            **(picked(row, "step_s step_source tokens_per_s samples_per_s") if row else {}),
            num_compiles=len(steps.done),
            versions=versions(),
        )
    )
