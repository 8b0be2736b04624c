"""The trials of one model on one target.

Each is a policy at a batch, compiled once, and measured where the device is in this machine.

    trials = Trials(factory, TrainConfig(), load_target("h100-80gb"), budget_bytes=60 * 2**30)
    trials.compile(parse("dots"), 8)    # the compiled step
    trials.record(parse("dots"), 8)     # TrialRecord(policy="dots", batch=8, total_bytes=..., step_source="predicted", ...)

Trials with another loss, layout or budget share the compiled steps: no step is compiled twice.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxremat.chips.outside import Reading
from jaxremat.chips.target import Target
from jaxremat.config import Layout, TrainConfig, divisors
from jaxremat.errors import CompileError, UsageError
from jaxremat.mesh.sharding import LeafOnMesh, tracing_on
from jaxremat.policy.spec import Policy
from jaxremat.policy.tree import path_text
from jaxremat.search.batch import MAX_BATCH
from jaxremat.step.inputs import first_state, inputs
from jaxremat.step.step import abstract_args, arguments_on_mesh, donated, make_step, state_and_argument_bytes, step_shardings
from jaxremat.system.ahead import ahead
from jaxremat.trial.measure import StepTiming, measure_step
from jaxremat.trial.record import Outcome, TrialRecord
from jaxremat.trial.row import About, error_kind, failed_row, first_line, row_of, too_large_row
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.workload.given import OWN_LOSS
from jaxremat.workload.workload import MAX_CONCRETE_BYTES, Workload
from jaxremat.xla.buffers import Category
from jaxremat.xla.compile import LEAST_LIMIT, Compilation, Result, begin_compile, when_requested
from jaxremat.xla.lint_input import Remedies
from jaxremat.xla.options import preset_options


@dataclass
class Steps:
    """The compiled steps of one policy, by batch.

    Attributes:
        policy: the policy.
        done: the compiled step, or why XLA rejected it.
        early: the bytes that XLA says early, where it does (`Trials.early_bytes`).
        begun: of steps that are compiled ahead, functions that wait for the compiled step. By batch and `Trials.with_dump`.
    """

    policy: Policy
    done: dict[int, Compilation | CompileError] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)
    begun: dict[tuple[int, bool], Callable[[], Compilation]] = field(default_factory=dict)

    @property
    def compiled(self) -> dict[int, Compilation]:
        """The steps that XLA didn't reject."""
        return {batch: one for batch, one in self.done.items() if isinstance(one, Compilation) and not one.is_too_large}

    @property
    def rejected(self) -> list[int]:
        """The batches whose steps XLA rejected, and not as too large."""
        return [batch for batch, one in self.done.items() if isinstance(one, CompileError)]


@dataclass(frozen=True)
class Trials:
    """The trials of one model on one target, of any policy and batch.

    Attributes:
        factory: makes the workload at a batch.
        train: the training step. With a `global_batch`, its `accumulate` follows from the batch.
        target: what the step is compiled for.
        budget_bytes: bytes that a step may take on the device.
        global_batch: samples of a step in each data-parallel group, in microbatches of any batch. None where the batch decides.
        xla_remat: whether XLA's own rematerialization pass runs.
        num_warmup: steps that aren't timed.
        num_steps: steps that are timed.
        measures: whether steps are run in this process. False where another process does that.
        budget_terms: how the budget is made up, in words.
        pool_bytes: the size of the allocator's pool in a job. None where it isn't known.
        limit_bytes: the bytes that XLA lets a step take, where it rejects larger ones. None for what the device has.
        own_optimizer: whether a workload's own optimizer is used, if it has one, and not that of `train`.
        xla_preset: the preset of XLA's options, of `xla/options.py`.
        options: further options of XLA's compiler.
        compared_meshes: the meshes of `--mesh auto`, of which that of the target is the best.
        with_dump: whether XLA's dump of the program is read, for a map of the memory.
        before: the driver's reading from before this process began with the device. None where none was taken.
        steps: the compiled steps, by all that decides them but the batch.
        layers: the layers as they are traced for the planner, by all that decides them (`answer/workload_estimate.py`).
        on_compile: called before each compile with the policy and the batch.
        on_step: called before each measured step with the batch and the number of the step, from 0.
        num_ahead: measured steps that are given to the device while it computes another, as `measure_step` has it.
    """

    factory: WorkloadFactory
    train: TrainConfig
    target: Target
    budget_bytes: int
    global_batch: int | None = None
    xla_remat: bool = False
    num_warmup: int = 2
    num_steps: int = 10
    measures: bool = True
    budget_terms: str = ""
    pool_bytes: int | None = None
    limit_bytes: int | None = None
    own_optimizer: bool = True
    xla_preset: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)
    compared_meshes: tuple[str, ...] = ()
    with_dump: bool = False
    before: Reading | None = None
    steps: dict[Hashable, Steps] = field(default_factory=dict, repr=False)
    layers: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    on_compile: Callable[[Policy, int], None] = lambda policy, batch: None
    on_step: Callable[[int, int], None] = lambda batch, step: None
    num_ahead: int = 1

    # What the trials are of.

    @property
    def num_members(self) -> int:
        """The number of data-parallel groups. The one batch of a whole step is that of all of them."""
        one_batch = self.workload_at().step is not None and not self.factory.has_free_batch
        return 1 if one_batch else self.target.mesh_shape.num_members

    def train_at(self, batch: int) -> TrainConfig:
        """The training step whose microbatches have `batch` samples.

        Raises:
            UsageError: the samples of a step aren't whole microbatches.
        """
        if self.global_batch is None:
            return self.train
        if self.global_batch % batch:
            each = " in each data-parallel group" if self.target.mesh else ""
            raise UsageError(
                f"batch {batch} does not divide the global batch, which is {self.global_batch}{each}",
                allowed=", ".join(map(str, divisors(self.global_batch))),
                next_step="give one of these as --batch",
            )
        return dataclasses.replace(self.train, accumulate=self.global_batch // batch)

    def microbatches_at(self, batch: int) -> int:
        """The microbatches of a step at `batch`. A whole step has as many as its author says."""
        return self.train_at(batch).accumulate * self.workload_of(batch).microbatches

    def batches(self, max_batch: int | None) -> Sequence[int]:
        """The batches to choose among, in rising order: with a `global_batch`, its divisors.

        Without a `max_batch` they end where a workload that is given as arrays, and not as shapes, has too many bytes of them. On
        a mesh that the workload has brought they are those that its axes divide.

        Raises:
            UsageError: there are none, as the axes divide only larger batches.
        """
        unit, total = self.factory.batch_unit, self.global_batch
        last = max(unit, self._largest_made()) if max_batch is None else max_batch
        batches = range(unit, min(MAX_BATCH, last) + 1, unit)
        found = batches if total is None else [batch for batch in divisors(total) if batch in batches]
        if not found:
            limits = {"--global-batch": total, "--max-batch": max_batch}
            raise UsageError(
                f"{self.factory.name} has no batch for "
                + " and ".join(f"{flag} {limit}" for flag, limit in limits.items() if limit is not None),
                allowed=f"multiples of {unit}",
                cause=f"its mesh {self.target.mesh_shape} divides the samples of its batch",
                next_step=f"{unit}, or a multiple",
            )
        return found

    def _largest_made(self) -> int:
        """The largest batch at which the arrays of the workload are within `MAX_CONCRETE_BYTES`."""
        workload = self.workload_at()
        if workload.step is not None or not workload.num_samples:
            return MAX_BATCH
        sizes = [
            sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree) if not isinstance(leaf, jax.ShapeDtypeStruct))
            for tree in (workload.params, workload.batch)
        ]
        if not sizes[1]:
            return MAX_BATCH
        return max(1, (MAX_CONCRETE_BYTES - sizes[0]) * workload.num_samples // sizes[1] // self.num_members)

    def workload_at(self, batch: int | None = None) -> Workload:
        """The workload of a microbatch of `batch` samples.

        None takes the batch that the factory makes by default.
        """
        made = self.factory.at(batch, self.train)
        return made if self.own_optimizer or made.optimizer is None else dataclasses.replace(made, optimizer=None)

    def workload_of(self, batch: int) -> Workload:
        """The workload of the step at `batch`, with the samples of all data-parallel groups."""
        return self.workload_at(batch * self.num_members)

    def samples_at(self, batch: int) -> int | None:
        """Samples in a microbatch of all data-parallel groups.

        None for a step with one batch of its own, which nobody has counted.
        """
        workload = self.workload_of(batch)
        if workload.step is not None and not self.factory.has_free_batch:
            return None
        rows = self.factory.rows_at(batch, self.train) if workload.mesh else None
        return rows or (workload.num_samples if workload.step is None else batch * self.num_members)

    def global_batch_at(self, batch: int) -> int:
        """Samples in a step on all devices."""
        samples = self.samples_at(batch) if self.target.mesh_shape.is_own else None
        return (samples or batch * self.num_members) * self.microbatches_at(batch)

    def with_loss(self, loss: str) -> "Trials":
        """The trials with another loss.

        They are the same trials if the workload has only its own.
        """
        if self.factory.losses() == (OWN_LOSS,) or loss == OWN_LOSS:
            return self
        return dataclasses.replace(self, train=dataclasses.replace(self.train, loss=loss))

    def with_layout(self, layout: Layout | None) -> "Trials":
        """The trials with the layers in another layout. The same ones for None."""
        return self if layout is None else dataclasses.replace(self, factory=self.factory.with_layout(layout))

    def with_num_layers(self, num_layers: int) -> "Trials":
        """The trials of the same workload with so many layers (`WorkloadFactory.with_num_layers`)."""
        return dataclasses.replace(self, factory=self.factory.with_num_layers(num_layers))

    def with_optimizer(self, name: Any) -> "Trials":
        """The trials with another optimizer."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, optimizer=name), own_optimizer=False)

    @property
    def reserve_bytes(self) -> int | None:
        """Bytes that the budget leaves of each GPU of a mesh, for what is outside of XLA's numbers.

        None where that isn't known.
        """
        if self.target.mesh is None or self.target.kind != "deviceless" or self.target.memory_bytes is None:
            return None
        if not self.target.chip.outside:
            return None
        return max(0, self.target.memory_bytes - self.budget_bytes)

    def state_bytes(self) -> int:
        """Bytes of the parameters and the optimizer state on a device, from their shapes alone."""
        if self.target.mesh is None:
            return state_and_argument_bytes(self.workload_at(), self.train)
        return sum(leaf.device_bytes for leaf in self.arguments_on_mesh() if not leaf.is_batch)

    def gradient_bytes(self) -> int:
        """Bytes of the trained parameters' gradients on a device of the mesh. 0 without a mesh."""
        trained = {f"params/{path_text(path)}" for path, _ in jax.tree.leaves_with_path(self.workload_at().trained_params)}
        return sum(leaf.device_bytes for leaf in self.arguments_on_mesh() if leaf.name in trained)

    def arguments_on_mesh(self, batch: int | None = None) -> tuple[LeafOnMesh, ...]:
        """How the arguments of the step at `batch` lie on the mesh. Empty for one device.

        None takes the smallest batch.
        """
        mesh, batch = self.target.mesh, batch or self.factory.batch_unit
        return () if mesh is None else arguments_on_mesh(mesh, self.workload_of(batch), self.train_at(batch))

    @property
    def optimizer(self) -> str | None:
        """What records call the optimizer.

        It is `own` for the workload's own, and None for a workload that is a step.
        """
        workload = self.workload_at()
        if workload.step is not None:
            return None
        return self.train.optimizer if workload.optimizer is None else "own"

    @property
    def remedies(self) -> Remedies:
        """What a remedy of the lint can be: a flag, where the workload has it, or code."""
        if self.workload_at().step is not None:
            return "code"
        return "flags" if self.factory.facts(self.train).loss == OWN_LOSS else "flags with loss"

    @property
    def can_run(self) -> bool:
        """Whether steps can be run: the device is here, and the workload has real parameters."""
        return self.target.kind != "deviceless" and not self.workload_at().obstacle_to_running

    # The compiled steps.

    def of(self, policy: Policy) -> Steps:
        """The steps of a policy that were compiled so far."""
        made = self.factory, self.train, self.global_batch, self.own_optimizer, self.target, policy
        how = self.limit_bytes, self.xla_remat, self.xla_preset, tuple(sorted(self.options.items()))
        return self.steps.setdefault((*made, *how), Steps(policy))

    def forget(self) -> None:
        """Frees the compiled steps. Those that were begun stay."""
        for steps in self.steps.values():
            steps.done.clear()
            steps.early.clear()

    def compile(self, policy: Policy, batch: int) -> Compilation:
        """The step of `policy` compiled at `batch`.

        Raises:
            CompileError: XLA rejected it.
        """
        steps = self.of(policy)
        done = steps.done.get(batch)
        if self.with_dump and isinstance(done, Compilation) and done.dump is None and not done.is_too_large:
            done = done.with_stored_dump()
            steps.done |= {batch: done} if done else {}
        if done is None:
            self.on_compile(policy, batch)
            begun = steps.begun.pop((batch, self.with_dump), None)
            try:
                done = begun() if begun else self.compile_anew(policy, batch)
            except CompileError as error:
                done = self._with_next_step(policy, batch, error)
            steps.done[batch] = done
        if isinstance(done, CompileError):
            raise done
        return done

    @property
    def begins(self) -> bool:
        """Whether steps are begun before they are requested.

        They aren't with one core, on a device that is here, which may measure a step meanwhile, and for a TPU, whose compiler
        has threads of its own.
        """
        return self.target.kind == "deviceless" and self.target.chip.is_gpu and ahead().works

    def begin(self, policy: Policy, batch: int) -> None:
        """Begins to compile a step in another thread, if it `begins` steps. `compile` waits for it.

        An error is raised where the step is requested.
        """
        steps, one = self.of(policy), (batch, self.with_dump)
        if self.begins and batch not in steps.done and one not in steps.begun:
            with contextlib.suppress(Exception):
                steps.begun[one] = self._begin(ahead().begin, policy, batch)

    def compile_anew(
        self,
        policy: Policy,
        batch: int,
        *,
        suggest: bool = True,
        workload: Workload | None = None,
        limit_bytes: int | None = None,
    ) -> Compilation:
        """The step compiled once more, whatever was compiled before.

        Args:
            policy: the policy.
            batch: samples of a microbatch.
            suggest: whether an error of XLA's gets a next step.
            workload: the workload in place of the factory's at this batch.
            limit_bytes: as of the trials.

        Raises:
            CompileError: XLA rejected it.
        """
        return self._begin(when_requested, policy, batch, suggest=suggest, workload=workload, limit_bytes=limit_bytes)()

    def _begin(
        self,
        begin: Callable[[Callable[[], Result]], Callable[[], Result]],
        policy: Policy,
        batch: int,
        *,
        suggest: bool = True,
        workload: Workload | None = None,
        limit_bytes: int | None = None,
    ) -> Callable[[], Compilation]:
        workload, train = workload or self.workload_of(batch), self.train_at(batch)
        compiled = begin_compile(
            begin,
            make_step(workload, train, policy),
            abstract_args(workload, train),
            self.target,
            donate_argnums=donated(workload),
            xla_remat=self.xla_remat,
            with_dump=self.with_dump,
            options=preset_options(self.xla_preset) | dict(self.options),
            suggest=suggest,
            shardings=step_shardings(self.target.mesh, workload, train) if self.target.mesh else None,
            limit_bytes=limit_bytes or self.limit_bytes,
        )
        paths = (jax.tree_util.keystr(path) for path, _ in workload.frozen)
        frozen: dict[str, Category] = {f"state.params{path}": "frozen parameters" for path in paths}
        return lambda: dataclasses.replace(compiled(), roles=frozen or None)

    @property
    def speaks_early(self) -> bool:
        """Whether XLA says a step's bytes long before it is compiled (`early_bytes`)."""
        return self.target.chip.options.speaks_early

    def early_bytes(self, policy: Policy, batch: int) -> int:
        """The total bytes of a step, by what XLA says of it under a limit: the bytes of its state.

        That is a guess and no proof. XLA makes another schedule where it has more memory, which may take half more, or a fifth
        less. Where XLA says nothing early, and for a step that is compiled, the bytes are those of `compile`.

        Raises:
            CompileError: XLA rejected the step, and not as too large.
        """
        steps = self.of(policy)
        if not self.speaks_early or batch in steps.done:
            return self.compile(policy, batch).memory.total_bytes
        if batch not in steps.early:
            self.on_compile(policy, batch)
            limit_bytes = max(LEAST_LIMIT, self.state_bytes())
            steps.early[batch] = self.compile_anew(policy, batch, limit_bytes=limit_bytes).memory.total_bytes
        return steps.early[batch]

    def _with_next_step(self, policy: Policy, batch: int, error: CompileError) -> CompileError:
        """The error with a next step where that was tried and compiles.

        An example is XLA's attention in place of fused attention.
        """
        if error.next_step or (otherwise := self.workload_of(batch).otherwise) is None:
            return error
        workload, flag = otherwise()
        try:
            self.compile_anew(policy, batch, suggest=False, workload=workload)
        except CompileError:
            return error
        return error.with_next_step(f"{flag}, with which it was tried and compiles")

    def record(
        self,
        policy: Policy,
        batch: int,
        kind: Literal["trial", "probe"] = "trial",
        *,
        requested: str | None = None,
        num_compiles: int | None = None,
        anyway: bool = False,
    ) -> TrialRecord:
        """The record of `policy` at `batch`. A failure is a record too.

        Args:
            policy: the policy.
            batch: sequences of a microbatch.
            kind: a `trial` that fits is measured where the device is here. A `probe` is only compiled.
            requested: the policy as it was requested, such as `auto`. None takes the policy's own text.
            num_compiles: how many compiles the answer took. None counts those of this policy.
            anyway: whether a trial that doesn't fit is measured too.
        """
        about = About(self, policy, requested or str(policy), batch, kind, num_compiles)
        try:
            compilation = self.compile(policy, batch)
        except CompileError as error:
            return failed_row(about, error)
        if compilation.is_too_large:
            return too_large_row(about, compilation)
        fits = compilation.memory.total_bytes <= self.budget_bytes
        timing = None
        if (fits or anyway) and kind == "trial" and self.measures and self.can_run:
            try:
                timing = self.measure(batch, compilation)
            except Exception as error:  # JAX's own error, where the device runs out of memory: the record says so
                found = error_kind(error)
                ran: Outcome = "oom" if found == "oom" else "crashed"
                return dataclasses.replace(row_of(about, compilation), ran=ran, error=first_line(error), error_kind=found)
        return row_of(about, compilation, timing)

    def measure(self, batch: int, compilation: Compilation) -> StepTiming:
        """Runs the compiled step on the target's device.

        Its batch is the first that the workload has for measured steps, or else the first of its own.
        """
        workload, train, mesh = self.workload_of(batch), self.train_at(batch), self.target.mesh
        compiled: Any = compilation.compiled
        shardings = step_shardings(mesh, workload, train)[0] if mesh else (None, None)
        of_state, of_batch = shardings if workload.step is None else (None, shardings if mesh else None)

        def state() -> Any:
            with tracing_on(workload.mesh, is_own=True):
                return first_state(workload, train, self.target.device, of_state)

        return measure_step(
            compiled if workload.step is None else lambda _, args: (compiled(*args), None),
            state,
            inputs(workload, train, measured=True),
            self.target.device,
            others=self.target.local_devices[1:],
            shardings=of_batch,
            num_warmup=self.num_warmup,
            num_steps=self.num_steps,
            num_ahead=self.num_ahead,
            on_step=lambda step: self.on_step(batch, step),
            before=self.before,
        )
