"""The main command: `python -m jaxremat.run --policy dots`.

It compiles the real training step under each policy, and prints the bytes at each batch that was tried. It finds the largest
batch that fits, and proves that the next one doesn't. It prints how long a step takes: measured if the device is in this
machine, predicted otherwise. The answer in a sentence:

    The largest batch that fits under dots is 128: 58.99 GiB of 59.33 GiB; batch 129 needs 59.44 GiB.

Exit codes: 0, 1 something failed, 2 usage, 3 nothing that was requested fits, 130 interrupted (finished rows are in --out).
"""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from jaxremat.cli.command import keep_stdout_for_records, leave_memory_to_others, show_error, step_command
from jaxremat.cli.explained import lint_line
from jaxremat.cli.no_fit import show_no_fit
from jaxremat.cli.output import reporting, show_heading
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes, OwnAxes
from jaxremat.policy.spec import OWN
from jaxremat.session.distributed import Place, check_alike, check_processes, is_distributed, joined, silent, until_one_fails
from jaxremat.session.flags import Listable, RunFlags
from jaxremat.session.lengths import at_each_length, check_lengths, first_batch
from jaxremat.session.request import Auto, Frontier, Request, RequestedPolicy
from jaxremat.session.session import Session, note
from jaxremat.system.ahead import with_next_begun
from jaxremat.system.files import check_outputs
from jaxremat.system.interrupt import says_at_the_end
from jaxremat.trial.plan_file import save_plan
from jaxremat.xla.options import with_preset
from jaxremat.xla.results import ignore_older_results

if TYPE_CHECKING:
    from jaxremat.chips.target import Target
    from jaxremat.config import TrainConfig
    from jaxremat.report.lists import Listing
    from jaxremat.report.printer import Printer, Report
    from jaxremat.report.progress import Progress
    from jaxremat.session.answers import Answering, Listener
    from jaxremat.trial.comparisons import LengthsRecord, MeshChoiceRecord
    from jaxremat.trial.record import Record, TrialRecord
    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.workload.workload import Workload


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return step_command(RunFlags, argv, "run", check_flags, show_list_or_answers)


def check_flags(flags: RunFlags) -> Request[RunFlags]:
    """The request that the flags make, for one process or for several."""
    return check_processes(check_lengths(flags), for_one={"--list": flags.list, "--dump-target": flags.dump_target})


def show_list_or_answers(request: Request[RunFlags]) -> int:
    """Prints a list if --list was given, or the answers otherwise. Returns the exit code."""
    flags = request.flags
    if flags.fresh:
        ignore_older_results()
    if flags.list:
        return show_list(request, flags.list)
    if is_distributed(flags):
        keep_stdout_for_records(2 if flags.verbose else os.open(os.devnull, os.O_WRONLY))
    with joined(flags) as place:
        check_alike(flags, place)
        return show_answers(request if place.is_first else silent(request), place)


def show_answers(request: Request[RunFlags], place: Place) -> int:
    """Prints the answer of each policy as soon as it is found, and returns the exit code.

    The first of several processes prints.
    """
    from jaxremat.chips.target import load_target
    from jaxremat.report.plot import check_plot, plot_frontier
    from jaxremat.session.answers import Listener
    from jaxremat.xla.compile import dump_target

    flags = request.flags
    if flags.plot:
        check_plot()
    check_outputs(flags)
    environment = None if is_distributed(flags) else leave_memory_to_others(flags)
    say = note if place.is_first else lambda text: None
    with reporting(flags, quiet=not place.is_first) as (report, progress):
        if request.meshes:
            return show_on_best_meshes(request, report, progress)
        target = load_target(flags.target, request.mesh)
        check_speed(request, target)
        if flags.dump_target:
            dump_target(target, flags.dump_target)
            note(f"wrote the description of {target.description} to {flags.dump_target}")
            return 0
        printer = printer_for(flags, report)
        take = until_one_fails(printer.row, place)
        sessions: dict[int | None, Session] = {}
        with (
            says_at_the_end(lambda: plot_frontier(printer.answers, flags.plot) if flags.plot and printer.answers else None),
            says_at_the_end(lambda: say_all(flags, printer, report, target.name, in_buckets(request, printer))),
            answers_for(target, environment) as answer_of,
        ):
            for one in at_each_length(request):
                session = Session.opened(one, target)
                show_heading(session, report, say, before=[*sessions.values()])
                sessions[session.seq_len] = session
                at = f"sequence {session.seq_len}, " if request.lengths else ""
                listener = Listener(take, lambda text, at=at: progress.show(at + text), say, printer.so_far)
                listener = with_code(session, listener)
                answer_all(session, listener, answer_of, printer, lambda text, at=at: progress.line(at + text))
        if not flags.frontier and (no_fit := printer.no_fit()):
            show_no_fit(sessions[no_fit.seq_len], no_fit, report, progress)
    return printer.exit_code()


def answer_all(
    session: Session, listener: "Listener", answer_of: "Answering", printer: "Printer", say: Callable[[str], None]
) -> None:
    """Makes the records of each policy, and of searches the estimates before all proofs.

    Args:
        session: the model and the target.
        listener: gets the records.
        answer_of: makes the answer of a policy.
        printer: prints the answer of each policy as soon as it is found.
        say: prints a line of progress that stays.
    """
    from jaxremat.report.progress import estimate_text
    from jaxremat.session.answers import NOT_ESTIMATED, answer_or_failure, begin_first, unless_layers_are_missing

    policies = session.request.policies

    def is_shared(n: int) -> bool:
        """Whether a plan of a later policy, or of this one, may take up the compiled steps."""
        return any(isinstance(one.policy, Auto) for one in policies[n:])

    sessions = [session if is_shared(n) else session.with_trials(steps={}) for n in range(len(policies))]

    def start(n: int) -> Iterator[int | None]:
        own = sessions[n]
        first = first_batch(printer.answers, policies[n], session.seq_len)
        return unless_layers_are_missing(own, policies[n], answer_of(own, policies[n], listener, first))

    def begin(n: int) -> None:
        begin_first(sessions[n], policies[n], listener.progress)

    def advance(n: int) -> int | None:
        printer.turn_to(n)
        make = functools.partial(next, answers[n], None)
        return answer_or_failure(make, session.request, policies[n], listener, lambda: session, show_error)

    answers = [start(n) for n in range(len(policies))]
    with says_at_the_end(printer.policies_done):
        for n, requested in [*enumerate(policies)] * len(NOT_ESTIMATED):
            if (estimate := advance(n)) is not None:
                say(estimate_text(with_preset(requested.text, requested.xla_preset), estimate))
        begin(0)
        for n in with_next_begun(range(len(policies)), begin):
            with says_at_the_end(functools.partial(printer.policy_done, as_frontier=session.request.flags.frontier)):
                advance(n)
            if not is_shared(n + 1):
                session.trials.forget()


def with_code(session: Session, listener: "Listener") -> "Listener":
    """The listener of the session's records, with code to paste.

    With --code each trial has its policy as code, and so has the best step of a plan whose search is ended early. For a model of
    the user's own, that step has code in any case, as a plan has.
    """
    from jaxremat.answer.records import code_of
    from jaxremat.policy.grammar import parse
    from jaxremat.report.plan import code_to_paste, is_of_own_model
    from jaxremat.trial.record import TrialRecord

    is_requested = session.request.flags.code

    def coded(record: "TrialRecord") -> "TrialRecord":
        policy, trials = parse(record.policy), session.trials.with_loss(record.loss)
        if policy == OWN:
            return record
        as_config = trials.workload_at(record.batch).as_config
        as_code = code_of(policy, trials, record.batch) if is_requested else ()
        return replace(record, code=tuple(code_to_paste(record, as_code, (as_config and as_config(policy)) or ())))

    def take(record: "Record") -> None:
        if is_requested and isinstance(record, TrialRecord) and record.record == "trial" and not record.error:
            record = coded(record)
        listener.record(record)

    def take_so_far(make: "Callable[[], TrialRecord | MeshChoiceRecord]") -> None:
        def made() -> "TrialRecord | MeshChoiceRecord":
            found = make()
            if isinstance(found, TrialRecord) and (is_requested or is_of_own_model(found)):
                return coded(found)
            return found

        listener.so_far(made)

    return replace(listener, record=take, so_far=take_so_far)


def say_all(
    flags: RunFlags, printer: "Printer", report: "Report", target: str, lengths: "LengthsRecord | None" = None
) -> None:
    """Prints what concerns all policies together, and the command of the lint.

    It is called where a command is interrupted, too.
    """
    printer.all_done(target, lengths)
    report.say(*filter(None, [lint_line(flags, printer.fastest())]), wrap=False)


def in_buckets(request: Request[RunFlags], printer: "Printer") -> "LengthsRecord | None":
    """The data set of --lengths with the step of each bucket.

    None without the flag, or if a bucket has no compiled step.
    """
    from jaxremat.trial.bucketed import lengths_record

    if request.bucketed is None or request.flags.lengths is None:
        return None
    return lengths_record(request.bucketed, request.flags.lengths, printer.answers, printer.num_compiles)


def show_on_best_meshes(request: Request[RunFlags], report: "Report", progress: "Progress") -> int:
    """Prints the meshes of `--mesh auto` and the answer on the best one, for each policy.

    The meshes are printed side by side. It returns the exit code.
    """
    from jaxremat.session.answers import Listener, answer_or_failure, answer_policy
    from jaxremat.session.meshes import choose_mesh, on_first_mesh

    printer = printer_for(request.flags, report)
    sessions: dict[tuple[int | None, str], Session] = {}
    listener = Listener(printer.row, progress.show, note, printer.so_far)

    def answer_on_best(one: Request[RunFlags], policy: RequestedPolicy) -> None:
        record, session = choose_mesh(one, policy, listener)
        place = record.seq_len, str(record.mesh)
        if session and place not in sessions:
            show_heading(session, report, before=[*sessions.values()])
        printer.mesh_chosen(record)
        if session:
            sessions[place] = session
            answer_policy(session, session.request.policies[0], with_code(session, listener))
            session.trials.forget()

    def say_at_the_end() -> None:
        say_all(request.flags, printer, report, ", ".join({one.trials.target.name: None for one in sessions.values()}))

    with says_at_the_end(say_at_the_end):
        for one, policy in ((at_length, policy) for at_length in at_each_length(request) for policy in at_length.policies):
            with says_at_the_end(printer.policy_done):
                make = functools.partial(answer_on_best, one, policy)
                answer_or_failure(make, one, policy, listener, functools.partial(on_first_mesh, one), show_error)
    if no_fit := printer.no_fit():
        show_no_fit(sessions[no_fit.seq_len, no_fit.mesh or str(ONE_DEVICE)], no_fit, report, progress)
    return printer.exit_code()


def printer_for(flags: RunFlags, report: "Report") -> "Printer":
    """The printer of the command's records, which saves the plan with --save-plan."""
    from jaxremat.report.printer import Printer

    save = functools.partial(save_plan, flags.save_plan) if flags.save_plan else lambda plan: None
    return Printer(report, explain=flags.explain_plan, on_plan=save)


def check_speed(request: Request[RunFlags], target: "Target") -> None:
    """Checks that the target's speed is known if something is to be planned.

    The check is made before anything is compiled.

    Raises:
        TargetError: a plan was requested, and the target's speed isn't known.
    """
    from jaxremat.answer.layer_estimate import speed_of

    if any(isinstance(requested.policy, Auto | Frontier) for requested in request.policies):
        speed_of(target)


def answers_for(target: "Target", environment: dict[str, str] | None) -> contextlib.AbstractContextManager["Answering"]:
    """A context manager that yields the function which makes the answers.

    For attached GPUs, the answers come from processes with this `environment`. For other targets, and where it is None because
    several processes share a mesh, this process compiles and runs the steps.
    """
    from jaxremat.cli.processes import answers_from_processes
    from jaxremat.session.answers import answers

    if target.kind == "attached" and environment is not None:
        return answers_from_processes(environment)
    return contextlib.nullcontext(answers)


def show_list(request: Request[RunFlags], what: Listable) -> int:
    """Prints the list that --list requests, and returns the exit code.

    It lists policies, models, targets, optimizers, or the model's checkpoint names or shardings.
    With --json it prints one record per line.
    """
    from jaxremat.report import lists
    from jaxremat.report.screen import print_whole, shared_screen

    if what == "names":
        listing = names_listing(request)
    elif what == "optimizers":
        listing = optimizers_listing(request)
    elif what == "shardings":
        listing = shardings_listing(request)
    else:
        listing = {"policies": lists.policies, "models": lists.models, "targets": lists.targets}[what]()
    if request.flags.json:
        print("\n".join(listing.lines()))
    else:
        print_whole(shared_screen().results, listing.table())
    return 0


def _with_loss(request: Request[RunFlags]) -> "tuple[WorkloadFactory, Workload, TrainConfig, MeshAxes | None]":
    """The factory of the model, its workload, the training step and the axes of the mesh.

    They are for a list that a whole step has no part in.
    """
    from jaxremat.session.workloads import with_own_loss

    factory = request.model.factory(request, None, None)
    train = with_own_loss(request, factory).train
    workload = factory.at(None, train)
    if workload.step is not None:
        raise UsageError(
            f"--list {request.flags.list} reads a loss, and {factory.name} is a whole step",
            next_step="give the loss: Workload(loss=f, params=..., batch=...)",
        )
    axes = request.mesh if workload.mesh is None else OwnAxes(tuple(workload.mesh.shape.items()))
    return factory, workload, train, axes


def names_listing(request: Request[RunFlags]) -> "Listing":
    """The checkpoint names of one layer of the model, with their bytes at the first --batch.

    On a mesh, the bytes are those of one device.

    Raises:
        UsageError: the model is a whole step, or no layers were found in it.
    """
    from jaxremat.mesh.sharding import abstract_mesh
    from jaxremat.report import lists

    factory, workload, train, axes = _with_loss(request)
    batch = request.batches[0] if request.batches else workload.num_samples or 1
    values = factory.layer_names(train, batch, abstract_mesh(request.mesh) if request.mesh else None)
    if not values:
        raise UsageError(
            f"no layers were found in {factory.name}, so there are no names",
            cause=f"looked at {'; '.join(factory.found.looked_at)}" if factory.found else "",
            next_step="name the scopes of the layers: --layers 'blocks_*'",
        )
    seq_len = factory.facts(train).seq_len
    sequence = "" if seq_len is None else f", sequence {seq_len}"
    title = f"checkpoint names of {factory.name} at batch {batch}{sequence}" + (f", a device of {axes}" if axes else "")
    found = factory.layers_at(batch if factory.has_free_batch else None, train)
    if found and (len(found.kinds) > 1 or any(kind.others for kind in found.kinds)):
        counts = found.values()
    else:
        counts = {value: n * factory.num_layers() for value, n in Counter(values).items()}
    return lists.names(title, counts, axes.num_devices // axes.num_members if axes else 1)


def optimizers_listing(request: Request[RunFlags]) -> "Listing":
    """The optimizers, with the bytes of their state for the model's parameters.

    Raises:
        UsageError: the model is a whole step.
    """
    from jaxremat.config import Optimizer
    from jaxremat.report import lists
    from jaxremat.step.optimizer import state_bytes

    factory, workload, train, _ = _with_loss(request)
    trains = (replace(train, optimizer=name) for name in get_args(Optimizer))
    ours = replace(workload, optimizer=None)
    return lists.optimizers(factory.name, workload.num_params, {t.optimizer: state_bytes(ours, t) for t in trains})


def shardings_listing(request: Request[RunFlags]) -> "Listing":
    """How each parameter of the model lies on the mesh.

    Raises:
        UsageError: there is no mesh, or the model is a whole step.
    """
    from jaxremat.mesh.sharding import abstract_mesh, param_shardings
    from jaxremat.report import lists

    factory, workload, _, axes = _with_loss(request)
    mesh = abstract_mesh(request.mesh) if request.mesh and workload.mesh is None else workload.mesh
    if mesh is None:
        raise UsageError(
            "--list shardings lists how parameters lie on a mesh, and no mesh was given", next_step="--mesh fsdp=8"
        )
    found = param_shardings(mesh, workload.abstract_params, workload.logical_axes)
    return lists.shardings(f"parameters of {factory.name} on the mesh {axes}", found)
