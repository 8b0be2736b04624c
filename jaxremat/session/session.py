"""`jaxremat.Session`: one model on one target, with the steps that were compiled.

A command is a session and what it prints.

session = jaxremat.Session("gpt2", target="h100-80gb")
session.compile("dots", batch=32)                   # the table that `jaxremat run --policy dots --batch 32` prints
session.largest_batch("dots").largest_batch         # 128
session.compare(["none", "dots", "auto"])           # policies side by side
session.plan(batch=64).plan.policy                  # what each layer saves
session.explain("dots", batch=32)                   # what takes the memory
session.page(["none", "dots"], batch=32)            # the memory over the program, to explore

A command opens it from its flags:

    session = Session.of(check_run(RunFlags(policy=("dots",), batch=(8,))), load_target("h100-80gb"))
    answer_policy(session, session.request.policies[0], Listener(record=print))   # one TrialRecord
"""

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxremat.config import Objective, TrainConfig, override
from jaxremat.errors import UsageError, nearest, reject
from jaxremat.policy.spec import NONE, WITHOUT_LAYERS, Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.session.distributed import least_of_all
from jaxremat.session.fields import filled, flags_of
from jaxremat.session.flags import ModelFlags, RunFlags
from jaxremat.session.heading import heading
from jaxremat.session.no_effect import without_effect
from jaxremat.session.printed import Answer
from jaxremat.session.request import Auto, Frontier, Request, RequestedModel, RequestedPolicy, check_run
from jaxremat.session.workloads import fitted, with_own_loss
from jaxremat.trial.plan_file import PlanFile
from jaxremat.trial.record import Record
from jaxremat.units import as_bytes
from jaxremat.workload.given import GivenModel
from jaxremat.workload.model import given_model

if TYPE_CHECKING:
    from jaxremat.chips.target import Target
    from jaxremat.policy.with_policy import NoLayersError
    from jaxremat.search.budget import Budget
    from jaxremat.session.page import Page
    from jaxremat.trial.record import ExplainRecord
    from jaxremat.trial.trials import Trials
    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.workload.workload import Workload

#: The flags that a session's own arguments and methods stand for, and those that have no effect in one.
_NOT_OPTIONS = (
    *("model", "hf", "maxtext", "target", "mesh", "budget", "policy", "batch", "max_batch", "objective"),
    *("frontier", "offload", "lengths", "buckets"),
    # Those of a command's output and of its process.
    *("fresh", "verbose", "json", "out", "version", "list", "dump_target", "plot", "save_plan", "explain_plan", "code"),
    *("distributed", "coordinator", "num_processes", "process_id", "initialization_timeout"),
)


class Session:
    """A model on a target: which policy, which batch, how fast, and who holds the memory.

    A session has the checks, the defaults and the answers of the commands. No step is compiled twice in it. So after a change of
    the model's code, or of a variable that it reads, open a new session. On an attached GPU steps are run in this process, whose
    JAX must not have preallocated the GPU's memory
    (`XLA_PYTHON_CLIENT_PREALLOCATE=false`).

    Args:
        model: the name of a preset, the path of a Hugging Face `config.json`, `FILE.py:ATTR` or `PKG.MOD:ATTR`, the text of
            `--maxtext`, a `jaxremat.Workload`, or a function that returns one, best with a keyword `batch`. With a keyword
            `devices` it makes a mesh of its own over `devices=8`.
        target: as for `--target`, such as `h100-80gb`. None takes the attached GPU, or else `h100-80gb`.
        mesh: several devices, such as `fsdp=8`. None for one device.
        budget: bytes that a step may use, as a number or as text such as `40GiB`. None takes what the allocator has.
        **options: any other flag of `jaxremat run` that is about the model, the training step or the compile, with `_` for `-`:
            `seq_len=2048`, `num_layers=4`, `optimizer="lion"`, `xla_preset="latency-hiding"`.

    Attributes:
        request: what was requested, with the checkpoint names of its policies resolved. On a CPU it has batch 1 unless a batch or
            a budget was given.
        trials: the compiled steps, and the budget that they share.
        heading: lines that a person should read before the answers.
        warnings: what couldn't be read of the fitted headroom, and the flags that have no effect.
        planned_batch: the batch of the plan of `--mesh auto`. Under another loss, or in other layouts, another one may be better.
        no_layers: why policies that need repeated layers have no answer. None if the model has layers, or no policy needs some.

    Raises:
        UsageError: an argument isn't known or isn't valid.
    """

    request: Request[Any]
    trials: "Trials"
    heading: tuple[str, ...]
    warnings: tuple[str, ...]
    planned_batch: int | None = None
    no_layers: "NoLayersError | None" = None
    _given: RequestedModel | None = None

    def __init__(
        self,
        model: "str | Path | Workload | Callable[..., Workload]" = "gpt2",
        *,
        target: str | None = None,
        mesh: str | None = None,
        budget: int | str | None = None,
        **options: Any,
    ) -> None:
        from jaxremat.chips.target import load_target
        from jaxremat.policy.with_policy import NoLayersError

        named: dict[str, Any] = {}
        if isinstance(model, str | Path):
            text = str(model)
            is_maxtext = "=" in text and ".py:" not in text
            named = {"hf" if text.endswith(".json") else "maxtext" if is_maxtext else "model": text}
        bytes_of = None if budget is None else as_bytes(budget)
        flags = replace(_flags_from(options), target=target, mesh=mesh, budget=bytes_of, **named)
        given = None
        if not named:
            name = getattr(model, "__name__", "workload")
            of_presets = [*(f.name for f in dataclasses.fields(ModelFlags)), "seq_len", "loss", "data", "model_arg"]
            unread = next((f"{option}={value!r}" for option, value in options.items() if option in of_presets), "")
            reject((unread, f"Session got {unread} beside a workload of your own",
                    "give it to your function, as functools.partial(workload, seq_len=64) does"))  # fmt: skip
            own = given_model(GivenModel(name, (), flags.layers))
            own = replace(own, factory=lambda _, target, attention: _factory_of(model, name, flags.layers, target))
            given = RequestedModel(own, override(TrainConfig(), **{**vars(flags.training), "seq_len": None}))
        request = check_run(flags, given)
        if request.meshes:
            raise UsageError(
                "Session got mesh='auto'",
                allowed="one mesh, such as 'fsdp=8'",
                next_step="jaxremat run --mesh auto compares meshes",
            )
        on = load_target(target, request.mesh)
        try:
            opened = Session.of(request, on)
        except NoLayersError:  # its policy is the default of the flags, and nobody's request
            opened = Session.of(check_run(replace(flags, policy=(str(NONE),)), given), on)
        vars(self).update(vars(opened), _given=given)
        for warning in self.warnings:
            note(warning)

    @classmethod
    def of(
        cls,
        request: Request[Any],
        target: "Target",
        *,
        attention: str | None = None,
        factory: "WorkloadFactory | None" = None,
    ) -> "Session":
        """The session of a request that a command has checked.

        Args:
            request: what the flags request.
            target: the device that the steps are compiled for.
            attention: the attention, such as `xla`, if it was chosen before. Choosing it takes a compile.
            factory: the factory of the workload, if it was made before.

        Raises:
            UsageError: the request isn't valid for this model or target.
        """
        from jaxremat.chips.target import in_pool
        from jaxremat.trial.trials import Trials
        from jaxremat.xla.own_mesh import on_mesh_of

        flags = request.flags
        if flags.xla_remat or any(one.xla_preset in target.chip.options.pool_presets for one in request.policies):
            target = in_pool(target, _budget(request, target)[0].pool_bytes)  # as XLA has it in the job
        factory = factory or request.model.factory(request, target, attention)
        request = with_own_loss(request, factory)
        workload = factory.at(None, request.train)
        target = on_mesh_of(workload, target, request.train)
        is_batch_given = bool(request.batches)
        request = fitted(request, factory, workload)
        budget, warning = _budget(request, target)
        limits = target.chip.options.memory_limit is not None and budget.num_bytes != target.memory_bytes
        if limits:  # whole MiB, as XLA takes them
            budget = replace(budget, num_bytes=budget.num_bytes // 2**20 * 2**20)
        trials = Trials(
            factory,
            request.train,
            target,
            budget.num_bytes,
            global_batch=flags.global_batch and flags.global_batch // target.mesh_shape.num_members,
            xla_remat=flags.xla_remat,
            num_warmup=2 if target.kind == "attached" else 1,
            num_steps=flags.steps,
            budget_terms=budget.terms,
            pool_bytes=budget.pool_bytes,
            limit_bytes=budget.num_bytes if limits else None,
            own_optimizer=flags.training.optimizer is None,
        )
        for batch in request.batches:
            trials.train_at(batch)
        request = replace(request, policies=tuple(_checked(requested, trials) for requested in request.policies))
        one_batch = target.kind == "cpu" and not request.batches and request.budget_bytes is None
        if one_batch:
            request = replace(request, batches=(workload.num_samples or 1,))
        lines = [*heading(request, trials)]
        if one_batch and not is_batch_given:
            lines.append(
                f"batch     {request.batches[0]}, as a full memory would run for hours; --batch or --budget request more"
            )
        session = cls.__new__(cls)
        session.request, session.trials, session.heading = request, trials, tuple(lines)
        session.warnings = (*([warning] if warning else []), *without_effect(request, target.kind))
        return session

    @classmethod
    def opened(cls, request: Request[Any], target: "Target", *, factory: "WorkloadFactory | None" = None) -> "Session":
        """The session of a request, some of whose policies may have no answer.

        These need repeated layers, and the model has none.

        Raises:
            NoLayersError: no layers were found, and all policies need some.
            UsageError: as for `of`.
        """
        from jaxremat.policy.with_policy import NoLayersError

        try:
            return cls.of(request, target, factory=factory)
        except NoLayersError as error:
            need_none = tuple(one for one in request.policies if one.policy in WITHOUT_LAYERS)
            if not need_none:
                raise
            session = cls.of(replace(request, policies=need_none), target, factory=factory)
            known = iter(session.request.policies)
            policies = tuple(next(known) if one in need_none else one for one in request.policies)
            session.request, session.no_layers = replace(session.request, policies=policies), error
            return session

    def missing_layers(self, requested: RequestedPolicy) -> "NoLayersError | None":
        """Why a policy of the request has no answer. None if it has one."""
        return None if requested.policy in WITHOUT_LAYERS else self.no_layers

    @property
    def seq_len(self) -> int | None:
        """Tokens per sequence, as the records of the answers have them."""
        return self.trials.factory.facts(self.trials.train).seq_len

    def with_trials(self, **changes: Any) -> "Session":
        """The session with these fields of its trials changed. Compiled steps are shared."""
        session = self.__class__.__new__(self.__class__)
        vars(session).update(vars(self), trials=replace(self.trials, **changes))
        return session

    def compile(self, policy: "str | Policy", batch: int) -> Answer:
        """The step under `policy` at `batch`: its bytes, whether it fits, how long it takes.

        Args:
            policy: a policy, or its text, such as `dots` or `save:mlp`.
            batch: sequences per microbatch, and per device that has samples of its own.
        """
        return self._answer([policy], batch)

    def largest_batch(self, policy: "str | Policy", max_batch: int | None = None) -> Answer:
        """The largest batch that fits under `policy`, and the proof that the next one doesn't.

        Args:
            policy: a policy, or its text.
            max_batch: the search stops here. None for no limit.
        """
        return self._answer([policy], None, max_batch=max_batch)

    def plan(
        self, batch: int | None = None, *, objective: Objective = "time", max_batch: int | None = None, offload: bool = False
    ) -> Answer:
        """What each layer is to save within the budget, as `--policy auto`.

        The answer has the step that proves it.

        Args:
            batch: the batch. None has it chosen.
            objective: `time` for the most tokens per second, `batch` for the largest batch, `memory` for the fewest bytes.
            max_batch: no larger batch is chosen.
            offload: whether values may go to host memory as far as kernels hide it.
        """
        return self._answer(["auto"], batch, objective=objective, max_batch=max_batch, offload=offload)

    def compare(self, policies: "Sequence[str | Policy]", batch: int | None = None) -> Answer:
        """The policies side by side, at one batch or each at the largest that fits.

        Where one of several policies has no answer, such as one that needs layers which the model doesn't have, the record of its
        failure says why.

        Args:
            policies: policies, or their texts; `auto` is planned.
            batch: the batch. None searches the largest of each.
        """
        return self._answer(policies, batch)

    def explain(self, policy: "str | Policy", batch: int, *, top: int = 10, lint: bool = True) -> Answer:
        """Who holds the memory of the step at its peak, in numbers that add up to XLA's total.

        Args:
            policy: a policy, or its text.
            batch: sequences per microbatch.
            top: how many of the largest buffers are listed.
            lint: whether the rules of the lint look at the step too.
        """
        ((row, _, _),) = self._explained([policy], batch, num_largest=top, lint=lint)
        return Answer(((row,),), self.trials.target.name)

    def page(
        self, policies: "str | Policy | Sequence[str | Policy]", batch: int, *, lint: bool = True, redact: bool = False
    ) -> "Page":
        """The memory over the program as a page, which a notebook shows inline and `write` files.

        Args:
            policies: a policy, or several for a page that compares them.
            batch: sequences per microbatch.
            lint: whether the page has what the rules of the lint find.
            redact: whether source lines and absolute paths are left out.

        Raises:
            CompileError: XLA rejects a step.

        Example: `session.page(["none", "dots"], batch=32).write("report.html")`.
        """
        from jaxremat.session.page import Page, page_input

        several = [policies] if isinstance(policies, str | Policy) else policies
        steps = self._explained(several, batch, num_largest=0, lint=lint)
        return Page(tuple(page_input(*step) for step in steps), redact)

    def _explained(
        self, policies: "Sequence[str | Policy]", batch: int, *, num_largest: int, lint: bool
    ) -> "Iterator[tuple[ExplainRecord, Trials, Policy]]":
        """For each policy the record of its memory, the trials of its step, and the policy."""
        from jaxremat.report.progress import Progress
        from jaxremat.report.screen import shared_screen
        from jaxremat.session.answers import policies_in_turn, policy_in_short, policy_of, trials_of
        from jaxremat.trial.explain import explain

        session = self._requesting(policies, batch)
        if session.no_layers:
            raise session.no_layers
        if any(isinstance(requested.policy, Auto) for requested in session.request.policies):
            raise UsageError(
                "explain and page take policies, got 'auto'", next_step="session.plan(batch).plan.policy is one"
            )
        with Progress(shared_screen().progress) as progress:
            for requested in policies_in_turn(session, progress.show, with_dump=True):
                policy, trials = policy_of(requested), replace(trials_of(session, requested, note), with_dump=True)
                progress.show(f"{policy_in_short(str(policy))}, batch {batch}")
                row = explain(trials, policy, batch, num_largest, requested=requested.text, lint=lint)
                yield row, trials, policy

    def _requesting(self, policies: "Sequence[str | Policy]", batch: int | None, **more: Any) -> "Session":
        """The session with another request about the same model and target.

        Compiled steps are shared.
        """
        if isinstance(policies, str):
            raise UsageError(
                f"policies got the text {policies!r}", allowed="a list of policies", next_step=f"[{policies!r}]"
            )
        if not policies:
            raise UsageError("policies got an empty list", allowed="a list of policies", next_step="['nothing', 'dots']")
        is_number = not isinstance(batch, bool) and hasattr(type(batch), "__index__")
        if batch is not None and not (is_number and 1 <= operator.index(batch) <= MAX_BATCH):
            raise UsageError(f"batch got {batch!r}", allowed=f"a whole number from 1 to {MAX_BATCH:,}", next_step="batch=8")
        batches = () if batch is None else (operator.index(batch),)
        flags = replace(self.request.flags, policy=tuple(map(str, policies)), batch=batches, **more)
        session = Session.opened(check_run(flags, self._given), self.trials.target, factory=self.trials.factory)
        for warning in session.warnings:
            if warning not in self.warnings:
                note(warning)
        return session.with_trials(steps=self.trials.steps)

    def _answer(self, policies: "Sequence[str | Policy]", batch: int | None, **more: Any) -> Answer:
        from jaxremat.report.progress import Progress
        from jaxremat.report.screen import shared_screen
        from jaxremat.session.answers import Listener, answer_or_failure, answer_policy, policies_in_turn

        session, by_policy = self._requesting(policies, batch, **more), list[tuple[Record, ...]]()
        with Progress(shared_screen().progress) as progress:
            for requested in policies_in_turn(session, progress.show):
                records = list[Record]()
                listener = Listener(records.append, progress.show, note)
                make = functools.partial(answer_policy, session, requested, listener)
                answer_or_failure(make, session.request, requested, listener, lambda: session)
                by_policy.append(tuple(records))
        return Answer(tuple(by_policy), self.trials.target.name)

    def __repr__(self) -> str:
        return "\n".join(line for line in self.heading if line)


def note(text: str) -> None:
    """Prints a note to stderr."""
    print(text, file=sys.stderr)


def _budget(request: Request[Any], target: "Target") -> "tuple[Budget, str]":
    """The budget of the request on `target`, and a warning.

    The warning is empty unless the fitted headroom couldn't be read.
    """
    from jaxremat.trial.budget import budget_on

    flags = request.flags
    budget, warning = budget_on(
        target, requested_bytes=request.budget_bytes, mem_fraction=flags.mem_fraction, headroom=flags.headroom
    )
    if target.num_processes > 1 and (least := least_of_all(budget.num_bytes)) != budget.num_bytes:
        budget = replace(budget, num_bytes=least, terms=f"the least of {target.num_processes} processes' budgets")
    return budget, warning


def _checked(requested: RequestedPolicy, trials: "Trials") -> RequestedPolicy:
    """The policy, checked against the layers of the model and the names of their values.

    Where compiles take minutes, a plan has the loss of the fewest bytes, and its layers in a scan.

    Raises:
        UnknownNameError: the model has no such name.
        UnknownPolicyError: the policy's groups don't fit the number of layers.
        UsageError: there are no layers.
    """
    if isinstance(auto := requested.policy, Auto) and trials.speaks_early:  # there a step that fits compiles for minutes
        return replace(requested, policy=auto.with_short_compiles())
    if isinstance(requested.policy, Auto | Frontier):
        return requested
    if isinstance(plan := requested.policy, PlanFile):
        return replace(requested, policy=replace(plan, policy=_known(plan.policy, trials)))
    return replace(requested, policy=_known(requested.policy, trials))


def _known(policy: Policy, trials: "Trials") -> Policy:
    return trials.factory.checked(policy, trials.train, trials.target.mesh)


def _flags_from(options: dict[str, Any]) -> RunFlags:
    """The flags that the keywords of a session stand for.

    Raises:
        UsageError: there is no such flag, or its value has another type.
    """
    known = {flag.field: flag for flag in flags_of(RunFlags) if flag.path[0] not in _NOT_OPTIONS}
    if unknown := [name for name in options if name not in known]:
        raise UsageError(
            f"Session got {unknown[0]}={options[unknown[0]]!r}",
            next_step=nearest(unknown[0], [*known, "model", "target", "mesh", "budget"])
            or "jaxremat run --help-all lists the flags, which are the names",
        )
    values = dict[tuple[str, ...], Any]()
    for name, value in options.items():
        flag = known[name]
        value = (value,) if flag.is_several and not isinstance(value, tuple | list) else value
        try:
            values[flag.path] = msgspec.convert(value, flag.kind)
        except msgspec.ValidationError as error:
            raise UsageError(f"Session got {name}={value!r}: {error}", next_step="see jaxremat run --help-all") from None
    return filled(RunFlags, values)


def _factory_of(model: Any, name: str, layers: tuple[str, ...], target: "Target") -> "WorkloadFactory":
    """The factory of a workload, or of a function that returns one.

    Raises:
        UsageError: it is neither.
        UserCodeError: the function raised an exception.
    """
    from jaxremat.workload import load
    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.workload.workload import Workload

    if isinstance(model, Workload):
        return WorkloadFactory(name, lambda batch: model, layers=layers, mesh=target.mesh, target=target)
    made = load.called(model, name, lambda: target.devices)
    return WorkloadFactory(
        name,
        made,
        made.has_free_batch,
        layers,
        mesh=None if made.takes_devices else target.mesh,
        target=target,
        default_batch=made.default_batch,
        options=made.options,
    )
