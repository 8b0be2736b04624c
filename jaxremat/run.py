"""The main job: `python -m jaxremat.run --policy dots`.

Compiles the real training step under each policy, shows the bytes at each batch size tried, proves the largest batch that
fits (and that the next one doesn't), and says how long a step takes: measured where the device is here, predicted else.

Exit codes: 0; 1 something failed; 2 usage; 3 nothing that was asked for fits; 130 interrupted (finished rows are kept).
"""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from jaxremat.command import parse_flags, run_command
from jaxremat.errors import UnknownNameError
from jaxremat.flags import Auto, FlagsT, Request, RunFlags, StepFlags, check_flags
from jaxremat.misfit import show_misfit
from jaxremat.trial.plan_file import PlanFile, save_plan
from jaxremat.xla.gpu import nvidia_driver

if TYPE_CHECKING:
    from jaxremat.config import TrainConfig
    from jaxremat.policy.spec import Policy
    from jaxremat.report.printer import Printer
    from jaxremat.report.progress import Progress
    from jaxremat.trial.attention import AttentionChoice
    from jaxremat.trial.record import Record
    from jaxremat.trial.trial import Run
    from jaxremat.xla.target import Target


@dataclass(frozen=True)
class Frontier:
    """In a policy's place: named policies and plans between them, at one batch."""


#: Job, what was asked for, its policy, the request; then what is told each record, and what it is at.
Answer = Callable[..., None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command(RunFlags, argv, "jaxremat", check_flags, lambda r: show_list(r, r.flags.list) if r.flags.list else run(r))


def command(
    kind: type[FlagsT],
    argv: Sequence[str] | None,
    prog: str,
    check: Callable[[FlagsT], Request[FlagsT]],
    do: Callable[[Request[FlagsT]], int],
) -> int:
    """A command that compiles steps, from its arguments to its exit code."""

    def work() -> int:
        flags = parse_flags(kind, sys.argv[1:] if argv is None else argv, prog)
        if flags.version:
            from jaxremat import __version__

            print(f"jaxremat {__version__}")
            return 0
        request = check(flags)
        set_up_process(flags)
        if flags.json and argv is None:
            keep_stdout_for_records()
        return do(request)

    return run_command(work, kept="the rows finished so far were kept")


def set_up_process(flags: StepFlags) -> None:
    """What must be settled before JAX is imported: which platform it may use, and whether XLA chatters.

    Only here is the environment edited, and only where the user hasn't set the same thing.
    """
    if not flags.verbose:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not nvidia_driver() or flags.target not in (None, "gpu"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("jax").setLevel(logging.INFO if flags.verbose else logging.ERROR)


def keep_stdout_for_records() -> None:
    """Sends what C libraries print to stdout (HiGHS does, now and then) to stderr: with `--json` stdout holds records alone."""
    sys.stdout.flush()
    records = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(records, "w")


def run(request: Request[RunFlags]) -> int:
    """Each policy's answer, printed as it comes; returns the exit code.

    On an attached GPU answers come from processes of their own, and this one only asks the device what it is.
    """
    from rich.console import Console

    from jaxremat.answer.planned import speed_of
    from jaxremat.files import check_writable
    from jaxremat.report.plot import check_plot
    from jaxremat.report.printer import Printer
    from jaxremat.report.progress import Progress
    from jaxremat.trial.store import Store
    from jaxremat.worker import in_processes_of_their_own
    from jaxremat.xla.compile import dump_target
    from jaxremat.xla.target import load_target

    flags = request.flags
    if flags.plot:
        check_plot()
    outputs = {"--dump-target": flags.dump_target, "--save-plan": flags.save_plan, "--plot": flags.plot}
    for flag, path in outputs.items():
        if path:
            check_writable(flag, path)
    environment = dict(os.environ)
    if nvidia_driver() and flags.target in (None, "gpu"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the memory is for the processes that measure
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(Store(flags.out)) if flags.out else None
        progress = stack.enter_context(Progress(Console(stderr=True)))
        progress.show("starting JAX")
        target = load_target(flags.target)
        if flags.frontier or any(isinstance(policy, Auto) for _, policy in request.policies):
            speed_of(target)  # refused before anything is compiled
        if flags.dump_target:
            dump_target(target, flags.dump_target)
            print(f"wrote the description of {target.description} to {flags.dump_target}", file=sys.stderr)
            return 0
        job, notes = prepare(request, target)
        request = with_default_batch(request, target)
        save = functools.partial(save_plan, flags.save_plan) if flags.save_plan else lambda plan: None
        stdout = Console(file=sys.stdout)
        printer = Printer(stdout, as_json=flags.json, out=out, explain=flags.explain_plan, on_plan=save)
        policies = resolve_names(request, job)
        printer.heading(notes)
        if target.kind == "attached":
            answer = stack.enter_context(in_processes_of_their_own(environment))
        else:
            answer = answer_here
        if flags.frontier:
            return show_frontier(job, request, printer, progress, answer)
        for requested, policy in policies:
            try:
                answer(job, requested, policy, request, printer.row, progress.show)
            finally:
                printer.policy_done()  # also when interrupted: the finished rows are shown
        printer.all_done(target.name)
        if misfit := printer.misfit():
            show_misfit(job, misfit, flags, stdout, progress, out)
    return printer.exit_code()


def show_frontier(job: "Run", request: Request[RunFlags], printer: "Printer", progress: "Progress", answer: Answer) -> int:
    """Named policies and plans at one batch, in a table and a picture; returns the exit code."""
    from jaxremat.report.plot import plot_frontier
    from jaxremat.trial.record import TrialRecord

    rows: list[TrialRecord] = []

    def emit(record: "Record") -> None:
        if isinstance(record, TrialRecord):
            rows.append(record)
        printer.row(record)

    try:
        answer(job, "frontier", Frontier(), request, emit, progress.show)
    finally:
        printer.frontier(rows)
        printer.all_done(job.target.name)
    if request.flags.plot:
        plot_frontier(rows, request.flags.plot)
    return printer.exit_code()


def answer_here(
    job: "Run",
    requested: str,
    policy: "Policy | Auto | PlanFile | Frontier",
    request: Request,
    emit: "Callable[[Record], None]",
    show: Callable[[str], None],
) -> None:
    """One policy's records, or those of a frontier, from compiles in this process."""
    from jaxremat.answer.planned import plan_run
    from jaxremat.answer.records import answer_batches, answer_frontier, answer_largest, answer_plan
    from jaxremat.trial.trial import PolicyTrials

    flags, batches = request.flags, request.batches
    if isinstance(policy, Frontier):
        on_compile = lambda text, batch, n: show(f"frontier: {shortened(text)}, batch {batch}")  # noqa: E731
        return answer_frontier(job, batches[0], emit, on_compile)
    if isinstance(policy, Auto):
        show("auto: the layer's values and what recomputing them costs")
        for batch in batches or (None,):
            planned = plan_run(
                job,
                losses=policy.losses,
                batch=batch,
                max_batch=flags.max_batch,
                objective=flags.objective,
                offload=flags.offload,
                on_compile=lambda policy, batch, n: show(f"auto: compile {n}, batch {batch}, {shortened(policy)}"),
            )
            answer_plan(planned, flags.objective, emit)
        return None
    if isinstance(policy, PlanFile):
        job, batches, policy = planned_job(job, policy, request), request.batches_of(policy), policy.policy
    trials = PolicyTrials(
        job,
        requested,
        policy,
        on_compile=lambda batch, n: show(f"{policy}: compile {n}, batch {batch}"),
        on_step=lambda batch, n: show(f"{policy}: batch {batch}, step {n}"),
    )
    if batches:
        return answer_batches(trials, batches, emit)
    return answer_largest(trials, flags.max_batch, emit)


def shortened(policy: str) -> str:
    """A policy's text with the end of a long one left out."""
    return policy if len(policy) <= 40 else f"{policy[:37]}..."


def planned_job(job: "Run", plan: PlanFile, request: Request[Any]) -> "Run":
    """The run with the plan's loss, unless another was asked for; says on stderr what the plan's proof doesn't cover."""
    from jaxremat.trial.plan_file import differences
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.units import gib
    from jaxremat.xla.installed import versions

    (loss,) = request.losses_of(plan)
    job = replace(job, train=replace(job.train, loss=loss))
    config = PolicyTrials(job, str(plan), plan.policy).config(plan.batch)
    asked = {"batches": request.batches_of(plan), "config": config, "target": job.target.name}
    if changed := differences(plan, versions=versions(), **asked):
        print(
            f"{plan}: proven at {gib(plan.proven.total_bytes)}, and since then {', '.join(changed)}: compiling it again",
            file=sys.stderr,
        )
    return job


def prepare(request: Request[Any], target: "Target", attention: "AttentionChoice | None" = None) -> "tuple[Run, list[str]]":
    """The run on `target`, and what a person should know before it starts, a line each.

    An `attention` that was chosen already is taken over; choosing it takes a compile.
    """
    from jaxremat.model.transformer import count_params
    from jaxremat.policy.spec import describe
    from jaxremat.search.budget import make_budget
    from jaxremat.step.data import check_text, load_text
    from jaxremat.trial.attention import choose_attention
    from jaxremat.trial.headroom import choose_headroom
    from jaxremat.trial.trial import Run
    from jaxremat.units import gib
    from jaxremat.xla.installed import versions

    flags, model, train = request.flags, request.model, request.train
    attention = attention or choose_attention(model, train.seq_len, target)
    stats = target.device.memory_stats() if target.kind == "attached" else None
    headroom, damage = choose_headroom(flags.headroom, target.kind, target.description, versions())
    if damage:
        print(f"jaxremat: {damage}", file=sys.stderr)
    budget = make_budget(
        asked_bytes=request.budget_bytes,
        mem_fraction=flags.mem_fraction,
        memory_bytes=target.memory_bytes,
        in_use_bytes=(stats or {}).get("bytes_in_use", 0),
        attached=target.kind == "attached",
        headroom=headroom.share,
        headroom_source=headroom.source,
    )
    if flags.data or target.kind != "deviceless":
        check_text(load_text(flags.data), train.seq_len, model.vocab_size)
    where = {
        "attached": "attached",
        "cpu": "times are real, memory is not a GPU's",
        "deviceless": "not in this machine",
    }[target.kind]
    losses = {loss for _, policy in request.policies for loss in request.losses_of(policy)}
    notes = [
        f"model     {model.name}, {count_params(model):,} parameters in {model.param_dtype}, compute in {model.dtype}",
        f"step      {step_sentence(train, flags.global_batch, losses)}",
        f"target    {target.name}: {target.description}, {where}",
        f"attention {attention.implementation}: {attention.reason}",
        f"budget    {gib(budget.num_bytes)} = {budget.terms}",
    ]
    for _, asked in request.policies:
        policy = asked.policy if isinstance(asked, PlanFile) else asked
        if not isinstance(policy, Auto) and (said := describe(policy, model.num_layers)):
            notes.append(f"policy    {policy}: {said}")
    if attention.implementation == "xla" and any("+attention" in str(policy) for _, policy in request.policies):
        notes.append("          +attention changes nothing here: there is no fused kernel")
    if not request.batches and with_default_batch(request, target).batches:
        notes.append("batch     1, as a full memory would run for hours; --batch or --budget ask for more")
    job = Run(
        model,
        train,
        target,
        attention,
        budget.num_bytes,
        global_batch=flags.global_batch,
        xla_remat=flags.xla_remat,
        data=flags.data,
        num_warmup=2 if target.kind == "attached" else 1,
        num_steps=flags.steps,
        budget_terms=budget.terms,
    )
    return job, notes


def with_default_batch(request: Request, target: "Target") -> Request:
    """The request, with batch 1 on a CPU where none was asked for."""
    if target.kind == "cpu" and not request.batches and request.budget_bytes is None:
        return replace(request, batches=(1,))
    return request


def step_sentence(train: "TrainConfig", global_batch: int | None, losses: set[str]) -> str:
    """The levers that are set, in words."""
    parts = [f"sequence {train.seq_len}", f"{' or '.join(sorted(losses, reverse=True))} loss", train.optimizer]
    if global_batch is not None:
        parts.append(f"global batch {global_batch}")
    if train.accumulate > 1:
        parts.append(f"{train.accumulate} microbatches")
    if train.grad_dtype:
        parts.append(f"gradients in {train.grad_dtype}")
    if train.schedule != "constant" or train.warmup_steps:
        parts.append(f"{train.schedule} schedule, {train.warmup_steps} of warm-up")
    if train.clip_norm:
        parts.append(f"clipped to norm {train.clip_norm:g}")
    return ", ".join(parts)


def resolve_names(request: Request[Any], job: "Run") -> "list[tuple[str, Policy | Auto | PlanFile]]":
    """The policies with their checkpoint names checked against the model's tensors."""
    from jaxremat.model.transformer import every_layer_name, layer_names
    from jaxremat.policy.names import has_names, resolve

    seq_len, implementation = job.train.seq_len, job.attention.implementation

    def resolved(policy: "Policy") -> "Policy":
        if not has_names(policy):
            return policy
        authors = {value.name for value in layer_names(job.model, 1, seq_len)}
        with contextlib.suppress(UnknownNameError):
            return resolve(policy, authors)
        every = {value.name for value in every_layer_name(job.model, 1, seq_len, implementation)}
        return resolve(policy, authors | every, authors)

    found: list[tuple[str, Policy | Auto | PlanFile]] = []
    for requested, policy in request.policies:
        if isinstance(policy, PlanFile):
            found.append((requested, replace(policy, policy=resolved(policy.policy))))
        else:
            found.append((requested, policy if isinstance(policy, Auto) else resolved(policy)))
    return found


def show_list(request: Request[RunFlags], what: str) -> int:
    """`--list`: policies, models, targets, optimizers, or the model's checkpoint names; with `--json`, a record each."""
    from rich.console import Console

    from jaxremat.report import lists

    model = request.model
    if what == "names":
        from jaxremat.model.transformer import layer_names

        batch = request.batches[0] if request.batches else 1
        values = layer_names(model, batch, request.train.seq_len)
        title = f"checkpoint names of {model.name} at batch {batch}, sequence {request.train.seq_len}"
        listing = lists.names(title, values, model.num_layers)
    elif what == "optimizers":
        from jaxremat.config import Optimizer
        from jaxremat.model.transformer import count_params
        from jaxremat.step.optimizer import state_bytes

        trains = (replace(request.train, optimizer=name) for name in get_args(Optimizer))
        num_bytes = {train.optimizer: state_bytes(model, train) for train in trains}
        listing = lists.optimizers(model.name, count_params(model), num_bytes)
    else:
        listing = {"policies": lists.policies, "models": lists.models, "targets": lists.targets}[what]()
    if request.flags.json:
        print("\n".join(listing.lines()))
    else:
        Console().print(listing.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
