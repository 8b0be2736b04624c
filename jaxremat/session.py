"""`jaxremat.Session`: what the commands answer about one model on one target, for a notebook or a script.

session = jaxremat.Session("gpt2", target="h100-80gb")
session.compile("dots", batch=32)                   # the table that `jaxremat run --policy dots --batch 32` prints
session.largest_batch("dots").largest_batch         # 128
session.compare(["none", "dots", "auto"])           # policies side by side
session.plan(batch=64).plan.policy                  # what each layer saves
session.explain("dots", batch=32)                   # who holds the memory
"""

import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxremat.cli.flags import RunFlags
from jaxremat.cli.flow import Listener, Start, answer, note, start
from jaxremat.cli.parser import filled, flags_of
from jaxremat.cli.request import RequestedModel, check_run
from jaxremat.cli.workloads import factory_for
from jaxremat.config import Objective, TrainConfig, override
from jaxremat.errors import UsageError, nearest
from jaxremat.mesh.axes import parse_mesh
from jaxremat.policy.spec import Policy
from jaxremat.trial.record import ExplainRecord, LargestBatchRecord, PlanRecord, Record, TrialRecord
from jaxremat.units import parse_bytes
from jaxremat.workload.given import GivenModel

if TYPE_CHECKING:
    from rich.console import Console

    from jaxremat.workload.factory import WorkloadFactory
    from jaxremat.workload.workload import Workload

#: The flags that a session's own arguments and methods stand for.
_NOT_OPTIONS = ("model", "hf", "target", "mesh", "budget", "policy", "batch", "max_batch", "objective")
#: Columns of a printed answer.
_WIDTH = 100


@dataclass(frozen=True, repr=False)
class Answer:
    """The records of an answer. Its `repr` is the table that the command prints.

    Attributes:
        by_policy: for each policy its records, in the order in which they were finished.
        target: the name of the target.
    """

    by_policy: tuple[tuple[Record, ...], ...]
    target: str

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, as `--out` and `--json` have them."""
        return tuple(record for records in self.by_policy for record in records)

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """The compiled steps that answer what was requested: with bytes, seconds of a step, tokens per second."""
        return tuple(one for one in self.records if isinstance(one, TrialRecord) and one.record == "trial")

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits, of the first policy whose batch was searched. None where none was searched."""
        return next((one.largest_batch for one in self.records if isinstance(one, LargestBatchRecord)), None)

    @property
    def plan(self) -> PlanRecord | None:
        """The plan. None where nothing was planned, or nothing fits."""
        return next((one for one in self.records if isinstance(one, PlanRecord)), None)

    @property
    def memory(self) -> ExplainRecord | None:
        """Who holds the bytes at the peak. None unless it is an answer of `Session.explain`."""
        return next((one for one in self.records if isinstance(one, ExplainRecord)), None)

    def __repr__(self) -> str:
        return _printed(self).export_text().strip("\n")

    def _repr_html_(self) -> str:
        return _printed(self).export_html(inline_styles=True, code_format="<pre>{code}</pre>")


class Session:
    """A model on a target: which policy, which batch, how fast, and who holds the memory.

    A session is what a command is: the same checks, defaults and answers. On an attached GPU steps are run in this process, whose
    JAX must not have preallocated the GPU's memory (`XLA_PYTHON_CLIENT_PREALLOCATE=false`).

    Args:
        model: the name of a preset, the path of a Hugging Face `config.json`, `FILE.py:ATTR` or `PKG.MOD:ATTR`, a
            `jaxremat.Workload`, or a function that returns one, best with a keyword `batch`.
        target: as for `--target`, such as `h100-80gb`. None takes the attached GPU, or else `h100-80gb`.
        mesh: several devices, such as `fsdp=8`. None for one device.
        budget: bytes that a step may use, as a number or as text such as `40GiB`. None takes what the allocator has.
        **options: any other flag of `jaxremat run` that is about the model, the training step or the compile, with `_` for `-`:
            `seq_len=2048`, `num_layers=4`, `optimizer="lion"`, `xla_preset="latency-hiding"`.

    Raises:
        UsageError: an argument isn't known or isn't valid.
    """

    def __init__(
        self,
        model: "str | Path | Workload | Callable[..., Workload]" = "gpt2",
        *,
        target: str | None = None,
        mesh: str | None = None,
        budget: int | str | None = None,
        **options: Any,
    ) -> None:
        from jaxremat.xla.target import load_target

        named: dict[str, Any] = {}
        self._given: RequestedModel | None = None
        if isinstance(model, str | Path):
            named = {"hf" if str(model).endswith(".json") else "model": str(model)}
        bytes_of = None if budget is None else parse_bytes(str(budget))
        self._flags = replace(_flags_from(options), target=target, mesh=mesh, budget=bytes_of, **named)
        factory = None
        if not named:
            name = getattr(model, "__name__", "workload")
            self._given = RequestedModel(GivenModel(name, (), self._flags.layers), _train_of(self._flags))
            factory = _factory_of(model, name, self._flags.layers)
        request = check_run(self._flags, self._given)
        self._target = load_target(target, parse_mesh(mesh, self._flags.devices, self._flags.nodes))
        self._factory: WorkloadFactory = factory or factory_for(request, self._target)
        self._start: Start = start(request, self._target, factory=self._factory)

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
        """What each layer is to save within the budget, with the step that proves it, as `--policy auto`.

        Args:
            batch: the batch. None has it chosen.
            objective: `time` for the most tokens per second, `batch` for the largest batch, `memory` for the fewest bytes.
            max_batch: no larger batch is chosen.
            offload: whether values may go to host memory as far as kernels hide it.
        """
        return self._answer(["auto"], batch, objective=objective, max_batch=max_batch, offload=offload)

    def compare(self, policies: "Sequence[str | Policy]", batch: int | None = None) -> Answer:
        """The policies side by side, at one batch or each at the largest that fits.

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
        from jaxremat.cli.flow import steps_of
        from jaxremat.trial.explain import explain
        from jaxremat.trial.trial import PolicyTrials

        started = self._started([policy], batch)
        (one,) = started.request.policies
        steps = steps_of(started, one.policy, note)  # pyright: ignore[reportArgumentType]
        row = explain(PolicyTrials(steps.run, one.text, steps.policy, keep_dump=True), batch, top, lint=lint)
        return Answer(((row,),), started.run.target.name)

    def _started(self, policies: "Sequence[str | Policy]", batch: int | None, **more: Any) -> Start:
        if isinstance(policies, str):
            raise UsageError(
                f"policies got the text {policies!r}", allowed="a list of policies", next_step=f"[{policies!r}]"
            )
        flags = replace(self._flags, policy=tuple(map(str, policies)), batch=() if batch is None else (batch,), **more)
        return start(check_run(flags, self._given), self._target, factory=self._factory)

    def _answer(self, policies: "Sequence[str | Policy]", batch: int | None, **more: Any) -> Answer:
        from jaxremat.report.progress import Progress
        from jaxremat.report.screen import shared_screen

        started, by_policy = self._started(policies, batch, **more), list[tuple[Record, ...]]()
        with Progress(shared_screen().progress) as progress:
            for one in started.request.policies:
                records = list[Record]()
                answer(started, one, Listener(records.append, progress.show, note))
                by_policy.append(tuple(records))
        return Answer(tuple(by_policy), started.run.target.name)

    def __repr__(self) -> str:
        return "\n".join(line for line in self._start.heading if line)


def _flags_from(options: dict[str, Any]) -> RunFlags:
    """The flags that the keywords of a session stand for.

    Raises:
        UsageError: there is no such flag, or its value has another type.
    """
    known = {flag.field: flag for flag in flags_of(RunFlags) if flag.path[0] not in _NOT_OPTIONS}
    if unknown := [name for name in options if name not in known]:
        raise UsageError(
            f"Session got {unknown[0]}={options[unknown[0]]!r}",
            next_step=nearest(unknown[0], known) or "jaxremat run --help-all lists the flags, which are the names",
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


def _train_of(flags: RunFlags) -> TrainConfig:
    """The settings of the training step around a workload of the user's own."""
    return override(TrainConfig(), **{name: value for name, value in vars(flags.training).items() if name != "seq_len"})


def _factory_of(model: Any, name: str, layers: tuple[str, ...]) -> "WorkloadFactory":
    """The factory of a workload, or of a function that returns one.

    Raises:
        UsageError: it is neither.
    """
    from jaxremat.workload.factory import GivenFactory
    from jaxremat.workload.workload import Workload

    if isinstance(model, Workload):
        return GivenFactory(name, lambda batch: model, layers=layers)
    if not callable(model):
        raise UsageError(
            f"Session got {type(model).__name__} {model!r} as its model",
            allowed="the name of a preset, the path of a config.json, FILE.py:ATTR, a Workload, or a function that returns one",
            next_step="Session('gpt2'), or Session(jaxremat.Workload(loss=..., params=..., batch=...))",
        )
    make: Any = model
    has_batch = "batch" in inspect.signature(model).parameters
    return GivenFactory(
        name, lambda batch: make(batch=batch) if has_batch and batch is not None else make(), has_batch, layers
    )


def _printed(found: Answer) -> "Console":
    """A console that has recorded what the command prints of these records."""
    from rich.console import Console

    from jaxremat.report.printer import ExplainPrinter, Printer, Report

    console = Console(file=io.StringIO(), record=True, width=_WIDTH, markup=False, highlight=False, emoji=False)
    report = Report(console)
    if found.memory:
        printer = ExplainPrinter(report)
        for record in found.records:
            if isinstance(record, ExplainRecord):
                printer.row(record)
        return console
    printer = Printer(report)
    for records in found.by_policy:
        for record in records:
            printer.row(record)
        printer.policy_done()
    printer.all_done(found.target)
    return console
