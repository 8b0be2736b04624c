"""Makes the records of an answer. Each record is emitted as soon as it is finished.

What was asked for decides the records:

    --policy dots --batch 4,8     two trials                                  `answer_batches`
    --policy dots                 probes, trials and the largest batch        `answer_largest`
    --policy auto                 a plan and its trial                        `answer_plan`
    --frontier --batch 8          trials of named policies and of plans       `answer_frontier`
"""

from collections.abc import Callable, Iterator, Sequence

from jaxremat.answer.planned import OnCompile, Planned, Trials, plan_run, trials_of
from jaxremat.config import Objective
from jaxremat.errors import CompileError
from jaxremat.planner.plan import Plan
from jaxremat.planner.shared_budget import EqualLayers, for_kind
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Mix, Policy, layer_policy
from jaxremat.search.batch import FIRST_BATCH, largest_batch
from jaxremat.search.compiles import Compiles
from jaxremat.trial.details import PlannedLayout, TriedStep
from jaxremat.trial.record import LargestBatchRecord, PlanRecord, Record, TrialRecord
from jaxremat.trial.settings import Run
from jaxremat.trial.trial import PolicyTrials
from jaxremat.xla.installed import versions

Emit = Callable[[Record], None]


class RefusedError(Exception):
    """XLA refused the step at `batch`. The step's record says why."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.batch = batch


def answer_batches(trials: PolicyTrials, batches: tuple[int, ...], emit: Emit) -> None:
    """Emits a trial for each batch. If XLA refuses a step, its trial says so."""
    trials.compiles.expect(len({*batches} - trials.done.keys()))
    for batch in batches:
        emit(trials.record(batch, "trial"))


def answer_plan(planned: Planned, objective: Objective, emit: Emit, max_batch: int | None = None) -> None:
    """Emits the plan with its proof, and the trial of the step that it chose.

    If there is no plan, only the trial of the compiled step of the fewest bytes is emitted.

    Args:
        planned: what the planner found.
        objective: what it planned for.
        emit: called with each record.
        max_batch: the largest batch that it could choose. None for no limit, or if the batch was given.
    """
    found, trials = planned.found, planned.trials
    answer = found if isinstance(found, Plan) else found.least
    if isinstance(found, Plan):
        emit(_plan_record(found, planned, objective, max_batch))
    emit(trials.record(answer.batch, "trial"))


#: The named policies of a frontier.
FRONTIER_POLICIES = ("nothing", "dots", "dots-no-batch", "dots+attention", "none", "every:sqrt+nothing")
#: The number of budgets, between the least and the most bytes of the named policies, for which a frontier has a plan.
FRONTIER_BUDGETS = 5


def answer_frontier(run: Run, batch: int, emit: Emit, on_compile: Callable[[str], OnCompile]) -> None:
    """Emits trials at one batch: of each named policy, and of the plans for some budgets between theirs.

    Args:
        run: the run.
        batch: sequences in a step.
        emit: called with each record.
        on_compile: from the name of a part, whose compiles are counted from 1, a function that is called before each of them:
            with the policy, the batch, and which compile it is. The parts are the named policies and each plan.
    """
    loss = run.factory.facts(run.train).loss
    trials: Trials = {}
    totals = []
    compiles = Compiles()
    compiles.expect(len(FRONTIER_POLICIES))
    for text in FRONTIER_POLICIES:
        policy = parse(text)
        on_compile("named policies")(text, batch, compiles.next())
        row = trials_of(trials, run, policy, loss, text).record(batch, "trial")
        totals += [row.total_bytes] if row.total_bytes else []
        emit(row)
    if not totals:
        return
    shown = {policy for _, policy, _ in trials}
    least, most = min(totals), max(totals)
    for n in range(1, FRONTIER_BUDGETS + 1):
        # The budgets are denser at the low end, where a byte saves the most time.
        budget_bytes = least + (most - least) * n**2 // FRONTIER_BUDGETS**2
        planned = plan_run(
            run,
            losses=(loss,),
            batch=batch,
            max_batch=batch,
            on_compile=on_compile(f"plan {n} of {FRONTIER_BUDGETS}"),
            budget_bytes=budget_bytes,
            trials=trials,
        )
        if isinstance(planned.found, Plan) and planned.found.policy not in shown:
            shown.add(planned.found.policy)
            emit(planned.trials.record(batch, "trial"))


def _plan_record(found: Plan, planned: Planned, objective: Objective, max_batch: int | None) -> PlanRecord:
    run, trials = planned.trials.run, planned.trials
    is_limited = max_batch is not None and found.batch == run.batches(max_batch)[-1] != run.global_batch
    return PlanRecord(
        model=run.factory.name,
        num_params=run.workload_at().num_params,
        target=run.target.name,
        seq_len=run.factory.facts(run.train).seq_len,
        objective=objective,
        policy=str(found.policy),
        loss=found.loss,
        layout=run.factory.layout(),
        layouts=tuple(_layout(one) for one in (planned, *planned.others)) if planned.others else (),
        unrolled_error=planned.refused or None,
        batch=found.batch,
        max_batch=max_batch if is_limited else None,
        budget_bytes=run.budget_bytes,
        total_bytes=found.cost.total_bytes,
        predicted_total_bytes=found.predicted_bytes,
        step_s=found.cost.step_s,
        recompute_s=found.recompute_s,
        bound_s=found.bound_s,
        layers=_by_layer(found.policy, planned.kinds),
        prices=found.prices,
        more=found.more,
        tried=tuple(step for one in (*planned.others, planned) for step in _tried(one)),
        disabled_pass=trials.compile(found.batch).disabled_pass,
        num_compiles=trials.num_compiles,
        config=trials.config(found.batch),
        versions=versions(),
    )


def _tried(planned: Planned) -> Iterator[TriedStep]:
    layout = planned.trials.run.factory.layout()
    for tried in planned.found.tried:
        yield TriedStep(str(tried.policy), tried.loss, tried.batch, tried.cost.total_bytes, tried.cost.step_s, layout)


def _layout(planned: Planned) -> PlannedLayout:
    """The plan of one layout. Its step was compiled."""
    found, layout = planned.found, planned.trials.run.factory.layout()
    assert isinstance(found, Plan), "a layout is listed with its plan"
    assert layout is not None, "the planner compares layouts of known names"
    row = planned.trials.record(found.batch, "probe")
    return PlannedLayout(
        layout=layout,
        policy=str(found.policy),
        loss=found.loss,
        batch=found.batch,
        total_bytes=found.cost.total_bytes,
        step_s=found.cost.step_s,
        tokens_per_s=row.tokens_per_s,
        compile_s=(row.lower_s or 0.0) + (row.compile_s or 0.0),
    )


def _by_layer(policy: Policy, kinds: Sequence[EqualLayers]) -> tuple[str, ...]:
    """The policy of each layer in words. With several kinds of layers, the words begin with the kind: `encoder: save:...`."""
    if len(kinds) > 1:
        return tuple(
            f"{kind.prefix.rstrip('/')}: {for_kind(policy, kind)}" for kind in kinds for _ in range(kind.num_layers)
        )
    layers = range(kinds[0].num_layers)
    return tuple(str(layer_policy(policy, i) if isinstance(policy, Mix) else policy) for i in layers)


def answer_largest(trials: PolicyTrials, max_batch: int | None, emit: Emit, first_batch: int = FIRST_BATCH) -> None:
    """Searches the largest batch that fits, or the largest microbatch of a global batch.

    It emits a probe for each batch that is compiled, then the trials that prove the answer, then the `largest_batch` record. A
    batch that XLA refuses ends the search, with a failed trial as its only further record.

    Args:
        trials: the steps of one policy.
        max_batch: the search stops here. None for no limit.
        emit: called with each record.
        first_batch: the batch that is tried first. The nearer it is to the answer, the fewer compiles the search takes.
    """
    run = trials.run

    def total_bytes(batch: int) -> int:
        try:
            total = trials.compile(batch).memory.total_bytes
        except CompileError as error:
            raise RefusedError(batch) from error
        emit(trials.record(batch, "probe"))
        return total

    try:
        found = largest_batch(
            total_bytes,
            run.budget_bytes,
            fixed_bytes=run.state_bytes(),
            start=max(trials.fitting(), default=min(trials.done, default=first_batch)),
            batches=run.batches(max_batch),
            expect=trials.compiles.expect,
        )
    except RefusedError as refused:
        emit(trials.record(refused.batch, "trial"))
        return
    row: TrialRecord | None = None
    if found.largest:
        row = trials.record(found.largest, "trial")
        emit(row)
    if found.next is not None:
        emit(trials.record(found.next, "trial"))
    emit(
        LargestBatchRecord(
            model=run.factory.name,
            requested_policy=trials.requested_policy,
            policy=str(trials.policy),
            target=run.target.name,
            seq_len=run.factory.facts(run.train).seq_len,
            xla_preset=run.xla_preset,
            global_batch=run.global_batch,
            largest_batch=found.largest,
            largest_batch_total_bytes=found.largest_bytes,
            next_batch=found.next,
            next_batch_total_bytes=found.next_bytes,
            max_batch=max_batch,
            budget_bytes=run.budget_bytes,
            budget_terms=run.budget_terms,
            step_s=row.step_s if row else None,
            step_source=row.step_source if row else None,
            tokens_per_s=row.tokens_per_s if row else None,
            samples_per_s=row.samples_per_s if row else None,
            num_compiles=trials.num_compiles,
            versions=versions(),
        )
    )
