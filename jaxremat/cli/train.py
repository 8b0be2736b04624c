"""The command `jaxremat train`: a training under any policy or plan.

    python -m jaxremat train --model tiny --policy dots

It trains on the attached GPU, or else on this machine's CPU, or on a mesh of either. A policy changes the memory and the time
of a step, and nothing that the model learns. With `--run-dir` metrics and checkpoints are saved, and the same command
resumes the training, however it ended.

Exit codes: 0, 1 something failed or the loss is no number, 2 usage, 3 the step doesn't fit, 130 interrupted (a checkpoint is
saved).
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from jaxremat.chips.catalog import ATTACHED, DEFAULT_DEVICELESS, driver_here
from jaxremat.cli.command import keep_stdout_for_records, step_command
from jaxremat.cli.output import reporting, show_heading
from jaxremat.config import Objective, divisors
from jaxremat.errors import DoesNotFitError, UsageError, flag_of
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.session.distributed import Place, any_of_all, check_alike, check_processes, is_distributed, joined
from jaxremat.session.fields import whole_numbers
from jaxremat.session.flags import POLICY_HELP, ProcessFlags, StepFlags, Words
from jaxremat.session.request import Auto, Request, RequestedPolicy, check_step
from jaxremat.session.session import Session, note
from jaxremat.system.files import check_outputs
from jaxremat.trial.lines import to_json
from jaxremat.trial.plan_file import PlanFile, load_plan, plan_of, plan_text
from jaxremat.trial.record import PlanRecord

if TYPE_CHECKING:
    from jaxremat.chips.target import Target
    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.training.loop import Schedule
    from jaxremat.training.run_folder import RunFolder
    from jaxremat.trial.trials import Trials

#: Settings of the training step in place of `TrainConfig`'s, where no flag gives them. They are for runs from the beginning.
DEFAULTS: dict[str, Any] = {"warmup_steps": 20, "clip_norm": 1.0}
#: The same for single presets. So small a model learns best at so high a rate.
OF_PRESET: dict[str, dict[str, Any]] = {"tiny": {"learning_rate": 5e-3}}
#: Tokens of a step of one device, by the kind of the target, where no --batch was given.
TOKENS = {"cpu": 4096, "attached": 32_768}


@dataclass(frozen=True)
class TrainRunFlags(ProcessFlags, StepFlags):
    """Train a model under a rematerialization policy or a plan.

    On the attached GPU, or else on this machine's CPU, or on a mesh of either; on text, or on the batches of a workload of
    your own. A policy changes the memory and the time of a step, and nothing that is learnt.
    """

    trains: ClassVar[bool] = True

    policy: Annotated[Words, Parameter(metavar="POLICY", help=POLICY_HELP)] = ()
    batch: Annotated[tuple[int, ...], Parameter(metavar="N", converter=whole_numbers(MAX_BATCH, "8"))] = ()
    """Sequences of a microbatch, on each member of a mesh. Default: those of 4096 tokens on a CPU, and of 32,768 on a GPU."""
    target: Annotated[str | None, Parameter(metavar="gpu|cpu")] = None
    """Where the steps run. Default: the attached GPU, else this machine's CPU."""
    data: Annotated[str | None, Parameter(metavar="FILE")] = None
    """Text to train on, bytes as tokens. Its last tenth is held out for the evaluation. Default: Python's own manual."""
    weights: Annotated[Path | None, Parameter(metavar="DIR|FILE")] = None
    """The safetensors that a preset or --hf begins with, with --lora those of the base. Default: random values."""
    num_steps: Annotated[int, Parameter(metavar="N")] = 400
    """The number of the last step. More of them go on with a run that has ended."""
    run_dir: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Keep metrics and checkpoints in this folder, and go on with the run that is there. Default: nothing is kept."""
    checkpoint_every: Annotated[int, Parameter(metavar="N")] = 100
    """Steps from one checkpoint to the next; the last step has one, too."""
    eval_every: Annotated[int, Parameter(metavar="N")] = 100
    """Steps from one evaluation on held-out batches to the next; the last step has one, too. 0 for none."""
    eval_batches: Annotated[int, Parameter(metavar="N")] = 10
    """Batches of an evaluation, the same ones each time."""
    sample_tokens: Annotated[int, Parameter(metavar="N")] = 120
    """Bytes of text that the model writes before and after the training. 0 for none."""
    on_nan: Literal["stop", "continue"] = "stop"
    """What a loss that is no finite number does to the run."""
    fresh: Annotated[bool, Parameter(parse=False)] = False
    steps: Annotated[int, Parameter(parse=False)] = 1
    json: Annotated[bool, Parameter(parse=False)] = False
    out: Annotated[Path | None, Parameter(parse=False)] = None
    max_batch: Annotated[int | None, Parameter(parse=False)] = None
    objective: Annotated[Objective, Parameter(parse=False)] = "time"
    offload: Annotated[bool, Parameter(parse=False)] = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    saved = "the same command begins again, or resumes from the last checkpoint of --run-dir"
    return step_command(TrainRunFlags, argv, "train", check_train, train, saved=saved)


def check_train(flags: TrainRunFlags) -> Request[TrainRunFlags]:
    """The request that the flags of `jaxremat train` make.

    It has one policy, and the defaults of a training.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    for name, least in {
        "num_steps": 1,
        "checkpoint_every": 1,
        "eval_every": 0,
        "eval_batches": 1,
        "sample_tokens": 0,
    }.items():
        if (value := getattr(flags, name)) < least:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} got {value}", allowed=f"a whole number from {least} up", next_step="leave it out")
    if flags.target not in (None, "gpu", "cpu"):
        raise UsageError(
            f"--target {flags.target} was requested, and a training runs its steps",
            allowed="gpu, cpu",
            next_step="leave --target out; jaxremat run compiles for devices that aren't in this machine",
        )
    flags = replace(flags, target=flags.target or ("gpu" if driver_here() else "cpu"))
    is_unclipped = flags.training.clip_norm == 0  # a training clips by default, so that 0 turns it off
    step_flags = replace(flags, training=replace(flags.training, clip_norm=None)) if is_unclipped else flags
    request = replace(check_step(step_flags, one_mesh="a training has one mesh"), flags=flags)
    for flag, values in {"--policy": request.policies, "--batch": request.batches}.items():
        if len(values) > 1:
            raise UsageError(
                f"{flag} got {len(values)} values, and a training has one policy, one set of XLA's flags and one batch",
                next_step=f"give one {flag}, or a run for each with a --run-dir of its own",
            )
    defaults = DEFAULTS | OF_PRESET.get(request.model.name, {})
    if is_unclipped:
        defaults["clip_norm"] = None
    if request.train.schedule != "constant":
        defaults["warmup_steps"] = min(defaults["warmup_steps"], request.train.decay_steps - 1)
    train = replace(request.train, **{name: v for name, v in defaults.items() if getattr(flags.training, name) is None})
    return check_processes(replace(request, train=train))


def train(request: Request[TrainRunFlags]) -> int:
    """Trains, and returns the exit code.

    The first of several processes prints, and writes metrics.
    """
    from jaxremat.training.run_folder import opened

    flags = request.flags
    if is_distributed(flags):
        keep_stdout_for_records(2 if flags.verbose else os.open(os.devnull, os.O_WRONLY))
    with joined(flags) as place, contextlib.ExitStack() as stack:
        check_alike(flags, place)
        check_outputs(flags)
        report, progress = stack.enter_context(reporting(flags, quiet=not place.is_first))
        folder = None
        if flags.run_dir:
            folder = stack.enter_context(opened(flags.run_dir, locks=place.is_first))
        return _train(request, place, folder, report, progress)


def _train(
    request: Request[TrainRunFlags], place: Place, folder: "RunFolder | None", report: "Report", progress: "Progress"
) -> int:
    from jaxremat.chips.target import load_target
    from jaxremat.report.training import TrainingPrinter
    from jaxremat.session.answers import policy_of
    from jaxremat.training import loop
    from jaxremat.training.run_folder import config_of
    from jaxremat.trial.row import About, row_of

    flags = request.flags
    say = note if place.is_first else lambda text: None
    agree = any_of_all if place.count > 1 else bool
    target = load_target(flags.target, request.mesh)
    request = with_default_batch(request, target)
    (requested,) = request.policies
    new_plan: PlanRecord | None = None
    if isinstance(requested.policy, Auto):
        if folder and folder.has_plan:
            plan = load_plan(str(folder.plan))
        else:
            new_plan = planned_now(request, requested, target, progress)
            plan = plan_of("plan.json", json.loads(plan_text(new_plan)))
        request = replace(request, policies=(replace(requested, policy=plan),))
    session = Session.of(request, target)
    (requested,) = session.request.policies
    show_heading(session, report, say)
    policy, trials = policy_of(requested), trials_to_train(session, requested, quiet=new_plan is not None, folder=folder)
    batch = batch_to_train(session, requested)
    report.say(*run_lines(request, trials, policy, batch, folder))
    code = request.model.source_hash() if request.model.source_hash else None
    config = config_of(trials, str(policy), batch, flags.weights, code)
    if folder and place.is_first:
        for changed in folder.compared(config):
            say(changed)
    agree(False)  # every process waits until the first one has checked the folder
    progress.show(f"compiling the step under {policy}")
    check_fit(trials, policy, batch)
    if folder and place.is_first:  # a step that doesn't fit decides nothing
        folder.keep_config(config)
        if new_plan:
            folder.keep(folder.plan, plan_text(new_plan))
    printer = TrainingPrinter(report, progress, flags.num_steps)
    write_text = trials.workload_at().write_text

    def sampled(params: Any) -> str:
        return write_text(params, flags.sample_tokens) if write_text and flags.sample_tokens else ""

    def began(step: int, params: Any) -> None:
        printer.began(step, "" if step else sampled(params))

    listener = loop.Listener(began, printer.step, say, agree)
    ended = loop.Training(trials, policy, batch, schedule_of(flags), listener, folder, place.is_first, flags.weights).run()
    about = About(trials, policy, requested.text, batch, "trial")
    row = row_of(about, trials.compile(policy, batch), ended.timing) if ended.timing else None
    try:
        if row and folder and place.is_first:
            folder.keep(folder.trial, to_json(row) + "\n")
    finally:
        printer.ended(ended.step, row, "" if ended.interrupted else sampled(ended.params))
    if ended.interrupted:
        where = f"the checkpoint of step {ended.step} is saved; the same command resumes" if folder else "nothing is saved"
        say(f"jaxremat: interrupted; {where}")
        return 130
    return 0


def with_default_batch(request: Request[TrainRunFlags], target: "Target") -> Request[TrainRunFlags]:
    """The request with a batch, if none was given and the model has none of its own.

    On an attached GPU a plan has its own batch, and `auto` chooses one.
    """
    (requested,) = request.policies
    is_planned = isinstance(requested.policy, PlanFile | Auto)
    if request.batches or request.model.has_own_batch or (is_planned and target.kind == "attached"):
        return request
    batch = max(1, TOKENS[target.kind] // request.train.seq_len)
    if request.flags.global_batch:
        of_group = request.flags.global_batch // target.mesh_shape.num_members
        batch = max(size for size in divisors(of_group) if size <= batch)
    return replace(request, batches=(batch,))


def planned_now(
    request: Request[TrainRunFlags], requested: RequestedPolicy, target: "Target", progress: "Progress"
) -> PlanRecord:
    """A new plan for --policy auto.

    Planning needs a GPU's speed. Without an attached GPU the plan is for the default GPU that isn't here, with the attention
    that runs on a CPU, whose values have other names.

    Raises:
        DoesNotFitError: no step fits the budget.
    """
    from jaxremat.chips.target import load_target
    from jaxremat.session.answers import Listener, answer_policy

    attention = None if target.kind == "attached" else "xla"
    gpu = target if target.kind == "attached" else load_target(DEFAULT_DEVICELESS, request.mesh)
    session = Session.of(request, gpu, attention=attention).with_trials(measures=False)
    plans: list[PlanRecord] = []
    collect = Listener(lambda row: plans.append(row) if isinstance(row, PlanRecord) else None, progress.show)
    answer_policy(session, requested, collect)
    if not plans:
        raise DoesNotFitError(
            f"no step of {session.trials.factory.name} fits {session.trials.budget_terms}",
            next_step="jaxremat run --policy auto with the same flags says what fits instead",
        )
    return plans[0]


def trials_to_train(session: Session, requested: RequestedPolicy, *, quiet: bool, folder: "RunFolder | None") -> "Trials":
    """The trials of a training, whose step compiles to the same program each time.

    Raises:
        UsageError: the workload can't be trained.
    """
    from jaxremat.session.answers import trials_of
    from jaxremat.xla.options import repeatable_options

    trials = trials_of(session, requested, (lambda text: None) if quiet else note)
    workload, name = trials.workload_at(), trials.factory.name
    if workload.step is not None:
        raise UsageError(
            f"{name} is a whole step, and a training makes the step around a loss",
            next_step="give the loss: Workload(loss=f, params=..., batch=...)",
        )
    weights = session.request.flags.weights
    if weights and workload.read_weights is None:
        raise UsageError(
            f"--weights {weights} was given, and {name} doesn't say how it reads weights",
            allowed="presets, --hf, and a workload with read_weights=",
            next_step="Workload(..., read_weights=read), where read(path, key) returns the parameters",
        )
    if weights and not weights.exists():
        raise UsageError(f"--weights {weights}: there is no such file or folder", next_step="a folder of save_pretrained")
    if obstacle := workload.obstacle_to_running:
        why, _, remedy = obstacle.partition("; ")
        raise UsageError(f"{name} can't be trained", cause=why, next_step=remedy)
    return replace(trials, options=repeatable_options(trials.target, folder.path / "autotuned" if folder else None))


def batch_to_train(session: Session, requested: RequestedPolicy) -> int:
    """The batch of the flags, of the plan, or that the workload is written for."""
    from jaxremat.session.answers import batches_of

    batches = session.request.batches or batches_of(session, requested)
    return batches[0] if batches else session.trials.workload_at().num_samples or 1


def check_fit(trials: "Trials", policy: Policy, batch: int) -> None:
    """Compiles the step.

    Raises:
        DoesNotFitError: it needs more than the budget.
    """
    from jaxremat.units import gib

    total_bytes, budget_bytes = trials.compile(policy, batch).memory.total_bytes, trials.budget_bytes
    if total_bytes > budget_bytes:
        raise DoesNotFitError(
            f"batch {batch} under {policy} needs {gib(total_bytes)}",
            allowed=f"{gib(budget_bytes)} = {trials.budget_terms}",
            next_step="a smaller --batch, or a policy that saves less; jaxremat run finds the largest batch that fits",
        )


def schedule_of(flags: TrainRunFlags) -> "Schedule":
    """When something is done beside the steps."""
    from jaxremat.training.loop import Schedule

    return Schedule(
        flags.num_steps, flags.checkpoint_every, flags.eval_every, flags.eval_batches, flags.on_nan == "continue"
    )


def run_lines(
    request: Request[TrainRunFlags], trials: "Trials", policy: Policy, batch: int, folder: "RunFolder | None"
) -> Iterator[str]:
    """What is particular to a training, for its heading."""
    flags = request.flags
    (requested,) = request.policies
    if flags.target == "cpu" and not driver_here():
        yield f"          no {ATTACHED.title} is attached, so that the steps run on the CPU"
    if isinstance(requested.policy, PlanFile):
        planned = requested.policy.proven
        yield f"policy    {policy}, planned for {planned.target}, {planned.loss} loss, batch {planned.batch}"
    else:
        yield f"policy    {policy}"
    is_free = trials.factory.has_free_batch and not (flags.batch or flags.global_batch)
    given = "; --batch asks for another" if is_free else ""
    groups = f", on each of {trials.num_members} data-parallel groups" if trials.num_members > 1 else ""
    yield f"batch     {batch}{groups}{given}"
    rate = "" if trials.optimizer == "own" else f", learning rate {trials.train.learning_rate:g}"
    yield f"steps     {flags.num_steps}{rate}"
    defaults, workload = TrainRunFlags(), trials.workload_at()
    changed = [name for name in ("eval_every", "eval_batches") if getattr(flags, name) not in (0, getattr(defaults, name))]
    if changed and not workload.has_evaluation:
        why = (
            "there are no eval_batches" if workload.eval_batches is None else "there are too few samples to hold a part out"
        )
        yield f"          {' and '.join(map(flag_of, changed))} without effect: {why}"
    yield (
        f"run       {folder.path}: checkpoints every {flags.checkpoint_every} steps"
        if folder
        else ("run       nothing is kept; --run-dir DIR keeps metrics and checkpoints")
    )
