"""Makes the records of one policy of a session.

    answer_policy(session, session.request.policies[0], Listener(record=print))

Each record is passed on as soon as it is finished. `answers` waits where a search has an estimate.
"""

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from jaxremat.answer.planned import OnCompile, compiled_under, plan_run
from jaxremat.answer.records import answer_batches, answer_frontier, answer_largest, answer_plan
from jaxremat.chips.installed import versions
from jaxremat.errors import CompileError, JaxrematError, MissingDependencyError, TargetError, UsageError
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.report.progress import compile_text
from jaxremat.search.batch import usual_first_batch
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.session.request import Auto, Frontier, Request, RequestedPolicy
from jaxremat.system.ahead import with_next_begun
from jaxremat.system.interrupt import raise_if_interrupted
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.plan_file import PlanFile, differences
from jaxremat.trial.record import FailureRecord, Record, TrialRecord
from jaxremat.trial.row import config_of, first_line
from jaxremat.trial.trials import Trials
from jaxremat.units import gib
from jaxremat.xla.options import with_preset

if TYPE_CHECKING:
    from jaxremat.session.session import Session

T = TypeVar("T")


@dataclass(frozen=True)
class Listener:
    """The functions that are called while an answer is made.

    Attributes:
        record: called with each record as soon as it is finished.
        progress: called with a line of text before each compile and each step.
        note: called with anything else that a person should know, such as that a plan was proven with other versions.
        so_far: called with a function that makes the record of what a search has found so far: the best step for a plan, or the
            meshes that are being compared. It replaces the one before, and the record of the answer replaces it. It is made only
            where the search is ended early, since a record takes about a second.
    """

    record: Callable[[Record], None]
    progress: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    so_far: Callable[[Callable[[], TrialRecord | MeshChoiceRecord]], None] = lambda record: None


#: A function that makes the records of one policy of a session, in this process (`answers`) or in others (`processes.py`).
#: The last argument is the batch that a search tries first. None takes the usual one.
#: The iterator stops before each of its first compiles, which it has begun then. It stops as often as `NOT_ESTIMATED` has items.
#: The last stop gives the largest batch by `ESTIMATED_AFTER` compiles. The others give None, as where nothing is estimated.
Answering = Callable[["Session", RequestedPolicy, Listener, int | None], Iterator[int | None]]
#: The number of compiles before an estimate.
ESTIMATED_AFTER = 2
#: The stops of an answer that estimates nothing.
NOT_ESTIMATED = (None,) * (ESTIMATED_AFTER + 1)
#: Seconds of a first compile above which it is said how an answer takes fewer compiles.
SLOW_S = 30.0


def answer_policy(session: "Session", requested: RequestedPolicy, listener: Listener) -> None:
    """Makes the records of one policy by compiling in this process, as `answers`.

    Raises:
        NoLayersError: the policy needs repeated layers, and the model has none.
    """
    for _ in unless_layers_are_missing(session, requested, answers(session, requested, listener)):
        pass


def unless_layers_are_missing(
    session: "Session", requested: RequestedPolicy, answer: Iterator[int | None]
) -> Iterator[int | None]:
    """The answer of a policy.

    Raises:
        NoLayersError: the policy needs repeated layers, and the model has none.
    """
    if error := session.missing_layers(requested):
        yield from NOT_ESTIMATED  # the answers of the policies before it come first
        raise error
    yield from answer


def answer_or_failure(
    make: Callable[[], T],
    request: Request[Any],
    requested: RequestedPolicy,
    listener: Listener,
    session_of: Callable[[], "Session"],
    show_fault: Callable[[Exception], object] | None = None,
) -> T | None:
    """Makes records of a policy, or a record of its failure. Returns what `make` does, or None.

    The other policies have their records then, too. What is wrong with the machine, or with the only policy, is raised.

    Args:
        make: makes records.
        request: the request of all policies.
        requested: the policy.
        listener: told the record of a failure.
        session_of: gives the session that a failure is of.
        show_fault: prints an error that no user could have caused, whose traceback is in the record. None raises it.
    """
    started_s = time.monotonic()
    try:
        return make()
    except (OSError, MemoryError, MissingDependencyError, TargetError):
        raise
    except Exception as error:
        is_fault = not isinstance(error, JaxrematError)
        if len(request.policies) < 2 or (is_fault and not show_fault):
            raise
        raise_if_interrupted()  # an interrupt can make an assertion in JAX fail
        if is_fault and show_fault:
            show_fault(error)
        listener.record(failure_of(session_of(), requested, error, time.monotonic() - started_s))
        return None


def failure_of(session: "Session", requested: RequestedPolicy, error: Exception, duration_s: float = 0.0) -> FailureRecord:
    """The record of a policy that an error ended."""
    batches, trials = session.request.batches, session.trials
    batch = batches[0] if len(batches) == 1 else None
    is_fault = not isinstance(error, JaxrematError)
    return FailureRecord(
        model=trials.factory.name,
        requested_policy=requested.text,
        target=trials.target.name,
        batch=batch,
        outcome="bad-config" if isinstance(error, UsageError | CompileError) else "crashed",
        error=f"{type(error).__name__}: {first_line(error)}",
        tail=tuple("".join(traceback.format_exception(error)).splitlines()) if is_fault else (),
        duration_s=duration_s,
        config=config_of(trials, batch or 1),
        xla_flags=os.environ.get("XLA_FLAGS"),
        versions=versions(),
    )


def answers(
    session: "Session", requested: RequestedPolicy, listener: Listener, first_batch: int | None = None
) -> Iterator[int | None]:
    """Makes the records of one policy by compiling in this process. Stops as `Answering` says.

    Args:
        session: the model and the target.
        requested: the policy.
        listener: gets the records.
        first_batch: the batch that a search for the largest one tries first. None takes the usual one.
    """
    request = session.request
    if isinstance(requested.policy, Frontier):
        yield from NOT_ESTIMATED
        trials = replace(session.trials, xla_preset=requested.xla_preset)
        answer_frontier(trials, request.batches[0], listener.record, lambda part: _says(listener, f"frontier, {part}"))
        return
    if isinstance(requested.policy, Auto):
        yield from NOT_ESTIMATED
        return _answer_auto(session, requested, requested.policy, listener)
    compiles, policy = Compiles(), policy_of(requested)
    what = with_preset(policy_in_short(str(policy)), requested.xla_preset)
    trials = replace(
        trials_of(session, requested, listener.note),
        on_compile=lambda _, batch: listener.progress(compile_text(what, compiles.next(), f"batch {batch}")),
        on_step=lambda batch, number: listener.progress(f"{what}: batch {batch}, step {number}"),
    )
    if batches := batches_of(session, requested):
        yield from NOT_ESTIMATED
        begin = functools.partial(trials.begin, policy)
        return answer_batches(trials, policy, requested.text, batches, listener.record, compiles, begin)
    first_batch = first_batch or usual_first_batch(session.seq_len)
    search = answer_largest(trials, policy, requested.text, request.flags.max_batch, listener.record, compiles, first_batch)
    for number, estimate in enumerate(search):
        compiles.estimated(estimate)
        if number == 1 and requested == request.policies[0] and compiles.taken_s > SLOW_S:
            listener.note(
                f"{what}: compile 1 took {compiles.taken_s:.0f} s. The search for a largest batch takes about 4 for each policy. "
                f"--batch {first_batch} takes one"
            )
        if number <= ESTIMATED_AFTER:
            with compiles.paused():
                yield estimate if number == ESTIMATED_AFTER else None


def begin_first(
    session: "Session", requested: RequestedPolicy, progress: Callable[[str], None], *, with_dump: bool = False
) -> None:
    """Begins the step of a policy at the first batch of the request, if it has one.

    Several policies are compiled at a time then.

    Args:
        session: the model and the target.
        requested: the policy.
        progress: called with a line of text before the step is traced.
        with_dump: whether it is begun for a map of the memory, as `Trials.with_dump`.
    """
    if isinstance(requested.policy, Auto | Frontier) or session.missing_layers(requested):
        return
    trials, policy = trials_of(session, requested, lambda note: None), policy_of(requested)
    trials = replace(trials, with_dump=with_dump or trials.with_dump)
    for batch in batches_of(session, requested)[: int(trials.begins)]:
        progress(f"{with_preset(policy_in_short(str(policy)), requested.xla_preset)}: tracing batch {batch}")
        trials.begin(policy, batch)


def policies_in_turn(
    session: "Session", progress: Callable[[str], None], *, with_dump: bool = False
) -> Iterator[RequestedPolicy]:
    """The policies of the request, one after the other.

    The first step of each is begun before the policy before it comes. The arguments are those of `begin_first`.
    """

    def begin(requested: RequestedPolicy) -> None:
        begin_first(session, requested, progress, with_dump=with_dump)

    policies = session.request.policies
    begin(policies[0])
    return with_next_begun(policies, begin)


def policy_of(requested: RequestedPolicy) -> Policy:
    """The policy of the steps. Of a plan's file that is the plan's."""
    policy = requested.policy.policy if isinstance(requested.policy, PlanFile) else requested.policy
    assert not isinstance(policy, Auto | Frontier), "a plan is made before there is a policy"
    return policy


def batches_of(session: "Session", requested: RequestedPolicy) -> tuple[int, ...]:
    """The batches of the steps. Empty if the largest one is searched for."""
    request, policy = session.request, requested.policy
    return request.batches_of(policy) if isinstance(policy, PlanFile) else request.batches


def trials_of(session: "Session", requested: RequestedPolicy, note: Callable[[str], None]) -> Trials:
    """The trials with the requested options of XLA, and a plan's loss and layout.

    The loss and the layout are those of the plan's file. Flags that give a loss or a layout come before the plan's. Where `auto`
    is requested too, `nothing` is compiled for a map of the memory, with which a plan begins.

    Args:
        session: the model and the target.
        requested: the policy.
        note: called if a plan's proof doesn't cover these steps, with what differs.
    """
    request, plan = session.request, requested.policy
    has_plan = any(isinstance(one.policy, Auto) for one in request.policies)
    trials = replace(session.trials, xla_preset=requested.xla_preset, with_dump=has_plan and plan == NOTHING)
    if not isinstance(plan, PlanFile):
        return trials
    (loss,) = request.losses_of(plan)
    layout = plan.layout if request.flags.fields.scan_layers is None else None
    trials = trials.with_loss(loss).with_layout(layout)
    changed = differences(
        plan,
        batches=request.batches_of(plan),
        config=config_of(trials, plan.batch),
        versions=versions(),
        target=trials.target.name,
    )
    if changed:
        proven = gib(plan.proven.total_bytes)
        note(f"{plan}: proven at {proven}, and since then {', '.join(changed)}: compiling it again")
    return trials


def _answer_auto(session: "Session", requested: RequestedPolicy, auto: Auto, listener: Listener) -> None:
    def on_best(trials: Trials, policy: Policy, batch: int, num_compiles: int) -> None:
        record = functools.partial(trials.record, requested=requested.text, num_compiles=num_compiles)
        listener.so_far(lambda: record(policy, batch, "probe"))

    request, flags = session.request, session.request.flags
    preset, planned_batch = requested.xla_preset, session.planned_batch
    is_slow = preset in session.trials.target.chip.options.slow_presets
    if len(auto.losses) > 1 or len(auto.layouts) > 1:
        planned_batch = None
    if is_slow:
        listener.note(
            f"auto: searched under XLA's default flags; then its step is compiled under {preset}, for many minutes"
        )
    listener.progress("auto: the layer's values and what recomputing them costs")
    for batch in request.batches or (planned_batch,):
        planned = plan_run(
            replace(session.trials, xla_preset="default" if is_slow else preset),
            losses=auto.losses,
            batch=batch,
            max_batch=flags.max_batch,
            objective=flags.objective,
            offload=flags.offload,
            on_compile=_says(listener, "auto") if batch else _says_how_to_compile_less(listener, "auto"),
            on_best=on_best,
            layouts=auto.layouts,
        )
        try:
            planned = compiled_under(planned, preset) if is_slow else planned
        finally:  # if XLA rejects the step, the plan by the default flags is shown
            answer_plan(planned, flags.objective, listener.record, None if request.batches else flags.max_batch)


def _says(listener: Listener, what: str) -> OnCompile:
    """A function that shows a compile before it begins.

    It shows which compile it is, its policy and its batch.
    """

    def on_compile(policy: str, batch: int, compile: Compile) -> None:
        listener.progress(compile_text(what, compile, f"batch {batch}", policy_in_short(policy)))

    return on_compile


def _says_how_to_compile_less(listener: Listener, what: str) -> OnCompile:
    """`_says` for a plan that chooses the batch.

    After a first compile of more than `SLOW_S` seconds, it says once that a plan for one batch takes fewer compiles.
    """
    says = _says(listener, what)

    def on_compile(policy: str, batch: int, compile: Compile) -> None:
        if compile.number == 2 and compile.taken_s > SLOW_S:
            listener.note(
                f"{what}: compile 1 took {compile.taken_s:.0f} s, of at most {compile.at_most} compiles. "
                "A plan for one batch, such as --batch 8, takes fewer"
            )
        says(policy, batch, compile)

    return on_compile


def policy_in_short(policy: str) -> str:
    """A policy's text in at most 40 characters. The end of a longer text is left out."""
    return policy if len(policy) <= 40 else f"{policy[:37]}..."
