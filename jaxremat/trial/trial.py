"""One trial: a run's step is compiled at a batch, its time is predicted, or measured where the device is here, and recorded.

Compiled for a GPU that isn't here, a trial at batch 8 is:

    trials = PolicyTrials(run, "dots", parse("dots"))
    trials.record(8, "trial")  # TrialRecord(policy="dots", batch=8, total_bytes=..., step_source="predicted", ...)
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxremat.errors import CompileError, JaxrematError
from jaxremat.machine.nvml import Reading
from jaxremat.policy.spec import NONE, Policy
from jaxremat.search.budget import RESERVE_NEEDED
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.step.inputs import first_state, inputs
from jaxremat.step.step import abstract_args, donated, make_step, step_shardings
from jaxremat.trial.base import base_flops, steps_under_none
from jaxremat.trial.details import PredictedStep
from jaxremat.trial.findings import findings, kept_by
from jaxremat.trial.measure import StepTiming, measure_step
from jaxremat.trial.record import Outcome, TrialRecord, is_out_of_memory
from jaxremat.trial.settings import Run, samples_in
from jaxremat.xla.clock import StepTime, peak_flops_of, predict_step_time
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.flops import executed_flops
from jaxremat.xla.installed import versions
from jaxremat.xla.kept import what_was_kept
from jaxremat.xla.lint_mesh import MORE_THAN_ITS_SHARE
from jaxremat.xla.options import matmuls_of, preset_options, remat_limit


@dataclass
class PolicyTrials:
    """The trials of one policy. Each batch is compiled once, however often it is asked for.

    Attributes:
        run: what all trials share.
        requested_policy: the policy as it was asked for, such as `auto`.
        policy: the policy.
        on_compile: called before each compile with the batch and which compile it is.
        on_base: called with the batch before the step is compiled under `none`, from which its recomputation is counted.
        on_step: called before each measured step with the batch and the number of the step, from 0.
        done: by batch, the compiled step, or why XLA refused it.
        compiles: counts the compiles of this policy here.
        bases: by batch, the `base_flops` that are known from another process.
        num_other_compiles: compiles of other policies that the answer took. Those for the count of recomputation aren't among
            them, because all policies share them.
        keep_dump: whether to keep the compiled program, for a map of the memory.
        options: further options of XLA's compiler.
        before: NVML's reading from before this process began with the device; None where none was taken.
    """

    run: Run
    requested_policy: str
    policy: Policy
    on_compile: Callable[[int, Compile], None] = lambda batch, compile: None
    on_base: Callable[[int], None] = lambda batch: None
    on_step: Callable[[int, int], None] = lambda batch, step: None
    done: dict[int, Compilation | CompileError] = field(default_factory=dict)
    compiles: Compiles = field(default_factory=Compiles)
    bases: dict[int, int | None] = field(default_factory=dict)
    num_other_compiles: int = 0
    keep_dump: bool = False
    options: dict[str, Any] | None = None
    before: Reading | None = None

    @property
    def num_compiles(self) -> int:
        """How many compiles the answer took, with those of other policies that a plan tried."""
        return len(self.done) + self.num_other_compiles

    def compile(self, batch: int) -> Compilation:
        """The step compiled at `batch`.

        Raises:
            CompileError: XLA refused it.
        """
        if batch not in self.done:
            self.on_compile(batch, self.compiles.next())
            try:
                self.done[batch] = self._compiled_once(batch)
            except CompileError as error:
                self.done[batch] = self._with_next_step(batch, error)
        done = self.done[batch]
        if isinstance(done, CompileError):
            raise done
        return done

    def _compiled_once(self, batch: int) -> Compilation:
        """The step compiled at `batch`. One under `none` isn't compiled again if another policy's count needed it."""
        if not self._is_base or self.keep_dump or self.options:
            return self._compiled(batch, self.run)
        known = steps_under_none(self.run).done
        if batch not in known:
            known[batch] = self._compiled(batch, self.run)
        return known[batch]

    @property
    def _is_base(self) -> bool:
        """Whether recomputation is counted from these steps."""
        return self.policy == NONE and not self.run.xla_remat

    def fitting(self) -> list[int]:
        """The batches that were compiled and fit."""
        compiled = {batch: done for batch, done in self.done.items() if not isinstance(done, CompileError)}
        return [batch for batch, done in compiled.items() if done.memory.total_bytes <= self.run.budget_bytes]

    def _compiled(self, batch: int, run: Run, *, suggest: bool = True) -> Compilation:
        workload, train = run.workload_at(batch * run.num_members), run.train_at(batch)
        return lower_and_compile(
            make_step(workload, train, self.policy),
            abstract_args(workload, train),
            run.target,
            donate_argnums=donated(workload),
            xla_remat=run.xla_remat,
            keep_dump=self.keep_dump,
            options=preset_options(run.xla_preset) | (self.options or {}),
            suggest=suggest,
            shardings=step_shardings(run.target.mesh, workload, train) if run.target.mesh else None,
        )

    def _with_next_step(self, batch: int, error: CompileError) -> CompileError:
        """The error with a next step where that was tried and compiles, such as XLA's attention in place of cuDNN's."""
        if error.next_step or (other := self.run.factory.otherwise()) is None:
            return error
        factory, flag = other
        try:
            self._compiled(batch, dataclasses.replace(self.run, factory=factory), suggest=False)
        except CompileError:
            return error
        return error.with_next_step(f"{flag}, with which it was tried and compiles")

    def record(self, batch: int, kind: Literal["trial", "probe"], *, anyway: bool = False) -> TrialRecord:
        """The record of `batch`; a failure is a record too.

        Args:
            batch: sequences per microbatch.
            kind: a `trial` that fits is measured where the device is here; a `probe` is only compiled.
            anyway: measures a trial that doesn't fit too.
        """
        try:
            compilation = self.compile(batch)
        except CompileError as error:
            return self._failed(batch, kind, error)
        fits = compilation.memory.total_bytes <= self.run.budget_bytes
        timing = None
        if (fits or anyway) and kind == "trial" and self.run.measures and self.can_run:
            try:
                timing = self.measure(batch, compilation)
            except Exception as error:  # JAX's own error, where the device runs out of memory: the record says so
                found = error_kind(error)
                ran: Outcome = "oom" if found == "oom" else "crashed"
                row = self._row(batch, kind, compilation)
                return dataclasses.replace(row, ran=ran, error=first_line(error), error_kind=found)
        # Only now, as a compile may raise the mark of a GPU's allocator.
        base = self.base_flops(batch, compilation) if kind == "trial" else None
        return self._row(batch, kind, compilation, timing, base)

    def base_flops(self, batch: int, compilation: Compilation) -> int | None:
        """FLOPs that a device executes at `batch` under `none`, which is compiled if it wasn't.

        None where XLA rejects that, where a device of a mesh executes more than its share, and for a whole step that has
        checkpoints.
        """
        if batch in self.bases:
            return self.bases[batch]
        executed = executed_flops(compilation.module).total
        if self.run.workload_at().step is not None:
            return None if what_was_kept(compilation).num_checkpoints else executed
        if self._is_base:
            return executed

        def compile_none(run: Run, batch: int) -> Compilation:
            self.on_base(batch)
            none = dataclasses.replace(self, policy=NONE, keep_dump=False, options=None)
            return none._compiled(batch, run, suggest=False)

        known = [known for known, done in self.done.items() if not isinstance(done, CompileError)]
        return base_flops(dataclasses.replace(self.run, xla_remat=False), batch, executed, compile_none, min(known))

    @property
    def can_run(self) -> bool:
        """Whether steps can be run: the device is here, and the workload has real parameters."""
        return self.run.target.kind != "deviceless" and not self.run.workload_at().obstacle_to_running

    def measure(self, batch: int, compilation: Compilation) -> StepTiming:
        """Runs the compiled step on the target's device, over real batches where the workload has them."""
        run = self.run
        workload, train = run.workload_at(batch * run.num_members), run.train_at(batch)
        compiled: Any = compilation.compiled
        shardings = step_shardings(run.target.mesh, workload, train)[0] if run.target.mesh else (None, None)
        of_state, of_batch = shardings if workload.step is None else (None, shardings if run.target.mesh else None)
        return measure_step(
            compiled if workload.step is None else lambda _, args: (compiled(*args), None),
            lambda: first_state(workload, train, run.target.device, of_state),
            inputs(workload, train),
            run.target.device,
            others=run.target.local_devices[1:],
            shardings=of_batch,
            num_warmup=run.num_warmup,
            num_steps=run.num_steps,
            on_step=lambda step: self.on_step(batch, step),
            before=self.before,
        )

    def trained(self, batch: int, timing: StepTiming) -> TrialRecord:
        """The record of a training at `batch`, whose steps took what `timing` says. `none` isn't compiled for it."""
        return self._row(batch, "trial", self.compile(batch), timing)

    def config(self, batch: int) -> dict[str, Any]:
        """What was asked for, as records hold it: the model, the training step, the target."""
        run = self.run
        return {
            "model": run.factory.config(),
            "train": dataclasses.asdict(run.train_at(batch)),
            "target": {"kind": run.target.kind, "description": run.target.description},
            "xla_remat": run.xla_remat,
            "xla_options": preset_options(run.xla_preset),
        } | run.target.layout()

    def common(self, batch: int, kind: str) -> dict[str, Any]:
        """The fields that every record of a step has: what was asked for, and what it was made with."""
        run, train, done = self.run, self.run.train_at(batch), self.done.get(batch)
        facts = run.factory.facts(train)
        return dict(
            record=kind,
            model=run.factory.name,
            num_params=run.workload_at().num_params,
            requested_policy=self.requested_policy,
            policy=str(self.policy),
            target=run.target.name,
            batch=batch,
            accumulate=train.accumulate,
            global_batch=batch * train.accumulate * run.num_members,
            num_devices=run.target.mesh_shape.num_devices,
            mesh=str(run.target.mesh_shape) if run.target.mesh else None,
            seq_len=facts.seq_len,
            loss=facts.loss,
            layout=run.factory.layout(),
            optimizer=run.optimizer,
            grad_dtype=train.grad_dtype,
            attention=facts.attention,
            matmuls=matmuls_of(run.target),
            xla_preset=run.xla_preset,
            disabled_pass=done.disabled_pass if isinstance(done, Compilation) else None,
            budget_bytes=run.budget_bytes,
            num_compiles=self.num_compiles,
            config=self.config(batch),
            xla_flags=os.environ.get("XLA_FLAGS"),
            versions=versions(),
        )

    def _failed(self, batch: int, kind: Literal["trial", "probe"], error: Exception) -> TrialRecord:
        return TrialRecord(
            **self.common(batch, kind),
            budget_terms=self.run.budget_terms,
            error=str(error),
            error_kind=error_kind(error),
        )

    def _row(
        self,
        batch: int,
        kind: Literal["trial", "probe"],
        compilation: Compilation,
        timing: StepTiming | None = None,
        base: int | None = None,
    ) -> TrialRecord:
        run, memory, speed = self.run, compilation.memory, self.run.target.speed
        predicted: StepTime | None = predict_step_time(compilation.module, speed) if speed else None
        step_s = timing.median_s if timing else predicted.step_s if predicted else None
        global_batch, num_devices = batch * run.num_members, run.target.mesh_shape.num_devices
        workload, accumulate = run.workload_at(global_batch), run.train_at(batch).accumulate
        of_all = workload.model_flops, workload.num_tokens, samples_in(run, global_batch)
        flops, tokens, samples = (None if number is None else accumulate * number / num_devices for number in of_all)
        flops = base if flops is None else flops
        peak = timing.peak_bytes if timing else None
        executed = executed_flops(compilation.module).total
        arguments = run.arguments_on_mesh(batch)
        found = findings(compilation, self.requested_policy, self.policy, run.remedies, arguments=arguments)
        has_its_share = all(finding.rule != MORE_THAN_ITS_SHARE for finding in found)
        return TrialRecord(
            **self.common(batch, kind),
            argument_bytes=memory.argument_bytes,
            output_bytes=memory.output_bytes,
            alias_bytes=memory.alias_bytes,
            temp_bytes=memory.temp_bytes,
            host_temp_bytes=memory.host_temp_bytes,
            generated_code_bytes=memory.generated_code_bytes,
            peak_bytes=memory.peak_bytes,
            total_bytes=memory.total_bytes,
            budget_terms=run.budget_terms,
            reserve_bytes=run.reserve_bytes,
            reserve_source=None if run.reserve_bytes is None else RESERVE_NEEDED,
            limit_bytes=run.target.memory_bytes if run.target.kind == "attached" else None,
            fits=memory.total_bytes <= run.budget_bytes,
            ran="ok" if timing else None,
            measured_peak_bytes=peak,
            measured_over_total_percent=100 * (peak / memory.total_bytes - 1) if peak else None,
            outside_bytes=timing.outside.num_bytes if timing and timing.outside else None,
            outside_source=timing.outside.source if timing and timing.outside else None,
            lower_s=compilation.lower_s,
            compile_s=compilation.compile_s,
            step_s=step_s,
            step_source="measured" if timing else "predicted" if predicted else None,
            step_min_s=min(timing.steps_s) if timing else None,
            step_max_s=max(timing.steps_s) if timing else None,
            tokens_per_s=_per_second(tokens, step_s),
            samples_per_s=_per_second(samples, step_s),
            model_flops=None if flops is None else round(flops),
            executed_flops=executed,
            base_flops=base,
            recompute_overhead_percent=100 * (executed / base - 1) if base and has_its_share else None,
            mfu=flops / (step_s * peak_flops_of(compilation.module, speed)) if flops and step_s and speed else None,
            predicted=PredictedStep(**dataclasses.asdict(predicted)) if predicted else None,
            predicted_interval=speed.interval if speed else None,
            num_xla_remat=compilation.num_xla_remat,
            xla_remat_above_bytes=None if run.xla_remat else remat_limit(memory, run.pool_bytes),
            findings=found,
            kept=kept_by(compilation),
        )


def _per_second(number: float | None, step_s: float | None) -> float | None:
    """How many a second. None where the number or the time isn't known."""
    return number / step_s if number is not None and step_s else None


def error_kind(error: Exception) -> str:
    """The kind of a failure, as records name it: `oom` where memory ran out, else the class of the error."""
    if isinstance(error, JaxrematError):
        return type(error).__name__
    return "oom" if is_out_of_memory(f"{type(error).__name__}: {error}") else type(error).__name__


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
