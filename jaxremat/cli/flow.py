"""The steps of a command from its request to its records. `run`, `explain`, sweeps and the experiments share them.

    flags --check--> Request --start--> Start --answer--> records --> report

`start` makes a run from a request. It chooses the attention and the budget for the target, and checks the policies'
checkpoint names against the model. `answer` takes one policy of the request, and passes each of its records on as soon as
the record is finished. A command reads its flags before these two steps, and shows the records after them:

    start = flow.start(check_run(parse_flags(RunFlags, ["--policy", "dots", "--batch", "8"])), load_target("h100-80gb"))
    flow.answer(start, start.request.policies[0], Listener(record=print))   # one TrialRecord
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxremat.cli.distributed import least_of_all
from jaxremat.cli.flags import StepFlags
from jaxremat.cli.heading import heading
from jaxremat.cli.no_effect import without_effect
from jaxremat.cli.request import Asked, Auto, Frontier, Request
from jaxremat.cli.workloads import factory_for, fitted
from jaxremat.search.batch import FIRST_BATCH, usual_first_batch
from jaxremat.trial.plan_file import PlanFile

if TYPE_CHECKING:
    from jaxremat.answer.planned import OnCompile, Trials
    from jaxremat.model.attention import AttentionChoice
    from jaxremat.policy.spec import Policy
    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.search.budget import Budget
    from jaxremat.search.compiles import Compile
    from jaxremat.trial.comparisons import MeshChoiceRecord
    from jaxremat.trial.record import Record, TrialRecord
    from jaxremat.trial.settings import Run
    from jaxremat.trial.store import Store
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.xla.target import Target


def _ignore(text: str) -> None:
    """Ignores a line of text."""


@dataclass(frozen=True)
class Listener:
    """The functions that are called while an answer is made.

    Attributes:
        record: called with each record as soon as it is finished.
        progress: called with a line of text before each compile and each step.
        note: called with anything else that a person should know, such as that a plan was proven with other versions.
        so_far: called with what a search has found so far, which replaces what it had found before: the best step for a plan, or
            the meshes that are being compared. The record of the answer replaces it.
    """

    record: "Callable[[Record], None]"
    progress: Callable[[str], None] = _ignore
    note: Callable[[str], None] = _ignore
    so_far: "Callable[[TrialRecord | MeshChoiceRecord], None]" = lambda record: None


@dataclass(frozen=True)
class Start:
    """Everything that the answers of a request need.

    Attributes:
        request: the request with its checkpoint names resolved. On a CPU it has batch 1 unless a batch or budget was given.
        run: everything about the steps except policy and batch.
        heading: lines that a person should read before the answers.
        warnings: what couldn't be read of the learnt headroom, and the flags that have no effect.
        first_batch: the batch that a search for the largest one tries first.
        known: the steps that were compiled before, while meshes were compared.
        batch: the batch of the plan that was compared. Under another loss, or in other layouts, another one may be better.
    """

    request: Request[Any]
    run: "Run"
    heading: tuple[str, ...]
    warnings: tuple[str, ...]
    first_batch: int = FIRST_BATCH
    known: "Trials" = field(default_factory=dict)
    batch: int | None = None

    @property
    def seq_len(self) -> int | None:
        """Tokens per sequence, as the records of the answers have them."""
        return self.run.factory.facts(self.run.train).seq_len


#: A function that makes the records of one policy of a request, in this process (`answer`) or in others (`processes.py`).
Answer = Callable[[Start, Asked, Listener], None]


def note(text: str) -> None:
    """Prints a note of the command to stderr."""
    print(text, file=sys.stderr)


def say_notes(store: "Store") -> None:
    """Prints, once, which lines of a store are damaged or can't be right."""
    for text in dict.fromkeys(store.notes):
        note(f"jaxremat: {text}")
    store.notes.clear()


@contextlib.contextmanager
def reporting(flags: StepFlags, *, quiet: bool = False) -> "Iterator[tuple[Report, Progress]]":
    """A context manager that yields the report for the command's results, and its progress. Both are open until it ends.

    With `quiet` neither prints anything.
    """
    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.report.screen import shared_screen
    from jaxremat.trial.store import Store

    with contextlib.ExitStack() as stack:
        out = stack.enter_context(Store(flags.out)) if flags.out else None
        if out:
            say_notes(out)
            stack.callback(say_notes, out)
        screen = shared_screen(quiet=quiet)
        progress = stack.enter_context(Progress(screen.progress))
        progress.show("starting JAX")
        yield Report(screen.results, as_json=flags.json, out=out), progress


def show_heading(start: Start, report: "Report", note: Callable[[str], None] = note, before: Sequence[Start] = ()) -> None:
    """Prints what a person should know before the answers.

    Args:
        start: the start whose heading is printed.
        report: where the results go.
        note: prints what isn't part of the results.
        before: the starts whose headings were printed before. Lines of theirs aren't printed again.
    """
    known = {line for one in before for line in (*one.heading, *one.warnings)}
    for warning in start.warnings:
        if warning not in known:
            note(f"jaxremat: {warning}")
    report.say(*([""] if before else []), *(line for line in start.heading if line not in known))


def start(
    request: Request[Any],
    target: "Target",
    *,
    attention: "AttentionChoice | None" = None,
    factory: "WorkloadFactory | None" = None,
) -> Start:
    """The run of `request` on `target`, and the request's policies with their checkpoint names checked.

    Args:
        request: what the flags ask for.
        target: the device that the steps are compiled for.
        attention: the attention, if it was chosen before. Choosing it takes a compile.
        factory: the factory of the workload, if it was made before.

    Raises:
        UsageError: the request isn't valid for this model or target.
    """
    from jaxremat.trial.settings import Run
    from jaxremat.xla.target import in_pool

    flags, train = request.flags, request.train
    if flags.xla_remat:
        target = in_pool(target, _budget(request, target)[0].pool_bytes)
    factory = factory or factory_for(request, target, attention)
    workload = factory.at(None, train)
    asked_for_batches = bool(request.batches)
    request = fitted(request, factory, workload)
    budget, warning = _budget(request, target)
    run = Run(
        factory,
        train,
        target,
        budget.num_bytes,
        global_batch=flags.global_batch and flags.global_batch // target.mesh_shape.num_members,
        xla_remat=flags.xla_remat,
        num_warmup=2 if target.kind == "attached" else 1,
        num_steps=flags.steps,
        budget_terms=budget.terms,
        own_optimizer=flags.training.optimizer is None,
        pool_bytes=budget.pool_bytes,
    )
    request = replace(request, policies=tuple(_checked(asked, run) for asked in request.policies))
    one_batch = target.kind == "cpu" and not request.batches and request.budget_bytes is None
    if one_batch:
        request = replace(request, batches=(workload.num_samples or 1,))
    lines = [*heading(request, run, budget)]
    if one_batch and not asked_for_batches:
        lines.append(
            f"batch     {request.batches[0]}, as a full memory would run for hours; --batch or --budget ask for more"
        )
    warnings = (*([warning] if warning else []), *without_effect(request, target.kind))
    return Start(request, run, tuple(lines), warnings, usual_first_batch(factory.facts(train).seq_len))


def answer(start: Start, asked: Asked, listener: Listener) -> None:
    """Makes the records of one policy of the request by compiling in this process.

    Args:
        start: what the answers of the request need.
        asked: the policy.
        listener: gets the records.
    """
    from jaxremat.answer.records import answer_batches, answer_frontier, answer_largest

    start = with_options_of(start, asked)
    run, request = start.run, start.request
    match asked.policy:
        case Frontier():
            emit, batch = listener.record, request.batches[0]
            answer_frontier(run, batch, emit, on_compile=lambda part: _says(listener, f"frontier, {part}"))
        case Auto() as auto:
            _answer_auto(start, auto, listener)
        case policy:
            steps = steps_of(start, policy, listener.note)
            trials = _trials(steps.run, asked.text, steps.policy, listener)
            for known in start.known.values():
                trials.done |= known.done  # all of this policy
            if steps.batches:
                answer_batches(trials, steps.batches, listener.record)
            else:
                answer_largest(trials, request.flags.max_batch, listener.record, start.first_batch)


def with_options_of(start: Start, asked: Asked) -> Start:
    """The start whose steps are compiled with XLA's options of `asked`."""
    return replace(start, run=replace(start.run, xla_preset=asked.xla_preset))


@dataclass(frozen=True)
class PolicySteps:
    """The steps of one policy of a request: the run with the loss of the policy, and the batches. Empty batches mean a search."""

    run: "Run"
    policy: "Policy"
    batches: tuple[int, ...]


def steps_of(start: Start, policy: "Policy | PlanFile", note: Callable[[str], None]) -> PolicySteps:
    """The steps of a policy, or those of a plan. `note` is called as in `planned_run`."""
    if isinstance(policy, PlanFile):
        return PolicySteps(planned_run(start, policy, note), policy.policy, start.request.batches_of(policy))
    return PolicySteps(start.run, policy, start.request.batches)


def planned_run(start: Start, plan: PlanFile, note: Callable[[str], None]) -> "Run":
    """The run with the plan's loss and layout, or with those that the flags give.

    Args:
        start: what the answers of the request need.
        plan: the plan, read from a file.
        note: called if the plan's proof doesn't cover this run, with the differences between the run and the proof.
    """
    from jaxremat.trial.plan_file import differences
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.units import gib
    from jaxremat.xla.installed import versions

    (loss,) = start.request.losses_of(plan)
    layout = plan.layout if start.request.flags.fields.scan_layers is None else None
    run = start.run.with_loss(loss).with_layout(layout)
    changed = differences(
        plan,
        batches=start.request.batches_of(plan),
        config=PolicyTrials(run, str(plan), plan.policy).config(plan.batch),
        versions=versions(),
        target=run.target.name,
    )
    if changed:
        proven = gib(plan.proven.total_bytes)
        note(f"{plan}: proven at {proven}, and since then {', '.join(changed)}: compiling it again")
    return run


def _answer_auto(start: Start, auto: Auto, listener: Listener) -> None:
    from jaxremat.answer.planned import plan_run
    from jaxremat.answer.records import answer_plan

    def on_best(trials: "PolicyTrials", batch: int, num_compiles: int) -> None:
        listener.so_far(replace(trials.record(batch, "probe"), num_compiles=num_compiles))

    flags = start.request.flags
    known_batch = start.batch if len(auto.losses) == 1 and not auto.layouts else None
    listener.progress("auto: the layer's values and what recomputing them costs")
    for batch in start.request.batches or (known_batch,):
        planned = plan_run(
            start.run,
            losses=auto.losses,
            batch=batch,
            max_batch=flags.max_batch,
            objective=flags.objective,
            offload=flags.offload,
            on_compile=_says(listener, "auto"),
            on_best=on_best,
            layouts=auto.layouts,
            trials=start.known or None,
        )
        answer_plan(planned, flags.objective, listener.record, None if start.request.batches else flags.max_batch)


def _says(listener: Listener, what: str) -> "OnCompile":
    """A function that shows a compile before it starts: which one it is, its policy and its batch."""
    from jaxremat.report.progress import compile_text

    def on_compile(policy: str, batch: int, compile: "Compile") -> None:
        listener.progress(compile_text(what, compile, f"batch {batch}", shortened(policy)))

    return on_compile


def shortened(policy: str) -> str:
    """A policy's text in at most 40 characters. The end of a longer text is left out."""
    return policy if len(policy) <= 40 else f"{policy[:37]}..."


def _trials(run: "Run", requested: str, policy: "Policy", listener: Listener) -> "PolicyTrials":
    from jaxremat.report.progress import compile_text
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.xla.options import with_preset

    what = with_preset(str(policy), run.xla_preset)
    return PolicyTrials(
        run,
        requested,
        policy,
        on_compile=lambda batch, compile: listener.progress(compile_text(what, compile, f"batch {batch}")),
        on_base=lambda batch: listener.progress(f"{what}: its recomputation is counted from none, batch {batch}"),
        on_step=lambda batch, number: listener.progress(f"{what}: batch {batch}, step {number}"),
    )


def _budget(request: Request[Any], target: "Target") -> "tuple[Budget, str]":
    """The budget of the request on `target`, and a warning if the learnt headroom couldn't be read."""
    from jaxremat.trial.budget import budget_on

    flags = request.flags
    budget, warning = budget_on(
        target, requested_bytes=request.budget_bytes, mem_fraction=flags.mem_fraction, headroom=flags.headroom
    )
    if target.num_processes > 1 and (least := least_of_all(budget.num_bytes)) != budget.num_bytes:
        budget = replace(budget, num_bytes=least, terms=f"the least of {target.num_processes} processes' budgets")
    return budget, warning


def _checked(asked: Asked, run: "Run") -> Asked:
    """The policy, checked against the layers of the model and the names of their values.

    Raises:
        UnknownNameError: the model has no such name.
        UnknownPolicyError: the policy's groups don't fit the number of layers.
        UsageError: there are no layers.
    """
    match asked.policy:
        case Auto() | Frontier():
            return asked
        case PlanFile() as plan:
            return replace(asked, policy=replace(plan, policy=run.factory.checked(plan.policy, run.train, run.target.mesh)))
        case policy:
            return replace(asked, policy=run.factory.checked(policy, run.train, run.target.mesh))
