"""One trial: a run's step is compiled at a batch, its time is predicted, or measured where the device is here, and recorded.

Compiled for a GPU that isn't here, a trial at batch 8 is:

    trials = PolicyTrials(run, "dots", parse("dots"))
    trials.record(8, "trial")  # TrialRecord(policy="dots", batch=8, total_bytes=..., step_source="predicted", ...)
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import CompileError, JaxrematError
from jaxremat.machine.nvml import Reading
from jaxremat.model.flops import flops_without_recompute, model_flops
from jaxremat.model.transformer import count_params
from jaxremat.policy.spec import Policy
from jaxremat.step.data import batches, load_text
from jaxremat.step.optimizer import make_optimizer
from jaxremat.step.step import abstract_args, init_state, make_step
from jaxremat.trial.attention import AttentionChoice
from jaxremat.trial.details import PredictedStep
from jaxremat.trial.findings import findings, kept_by
from jaxremat.trial.measure import StepTiming, measure_step
from jaxremat.trial.record import Outcome, TrialRecord, is_out_of_memory
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.cost import StepTime, predict_step_time
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.installed import versions
from jaxremat.xla.options import matmuls_of
from jaxremat.xla.target import Target


@dataclass(frozen=True)
class Run:
    """Everything about a run but the policy and the batch.

    Attributes:
        model: the model.
        train: the training step; with a `global_batch`, its `accumulate` follows from the batch.
        target: what the step is compiled for.
        attention: which attention the step takes.
        budget_bytes: what a step may take on the device.
        global_batch: sequences per step, in microbatches of whatever batch is tried; None where the batch decides.
        xla_remat: whether XLA's own rematerialization pass runs.
        data: path of the text to train on; None for the default text.
        num_warmup: steps that aren't timed.
        num_steps: steps that are.
        measures: whether steps are run in this process; False where another process does that.
        budget_terms: how the budget is made up, in words.
    """

    model: ModelConfig
    train: TrainConfig
    target: Target
    attention: AttentionChoice
    budget_bytes: int
    global_batch: int | None = None
    xla_remat: bool = False
    data: str | None = None
    num_warmup: int = 2
    num_steps: int = 10
    measures: bool = True
    budget_terms: str = ""

    def train_at(self, batch: int) -> TrainConfig:
        """The training step whose microbatches have `batch` sequences."""
        if self.global_batch is None:
            return self.train
        return dataclasses.replace(self.train, accumulate=self.global_batch // batch)


@dataclass
class PolicyTrials:
    """The trials of one policy. Each batch is compiled once, however often it is asked for.

    Attributes:
        run: what all trials share.
        requested_policy: the policy as it was asked for, such as `auto`.
        policy: the policy.
        on_compile: called before each compile with the batch and the number of the compile, from 1.
        on_step: called before each measured step with the batch and the number of the step, from 0.
        done: by batch, the compiled step, or why XLA refused it.
        num_other_compiles: compiles of other policies that the answer took.
        keep_dump: whether to keep the compiled program, for a map of the memory.
        before: NVML's reading from before this process began with the device; None where none was taken.
    """

    run: Run
    requested_policy: str
    policy: Policy
    on_compile: Callable[[int, int], None] = lambda batch, number: None
    on_step: Callable[[int, int], None] = lambda batch, step: None
    done: dict[int, Compilation | CompileError] = field(default_factory=dict)
    num_other_compiles: int = 0
    keep_dump: bool = False
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
            self.on_compile(batch, len(self.done) + 1)
            try:
                self.done[batch] = self._compiled(batch, self.run.attention.implementation)
            except CompileError as error:
                self.done[batch] = self._with_next_step(batch, error)
        done = self.done[batch]
        if isinstance(done, CompileError):
            raise done
        return done

    def _compiled(self, batch: int, attention: str, *, suggest: bool = True) -> Compilation:
        run = self.run
        train = run.train_at(batch)
        return lower_and_compile(
            make_step(run.model, train, self.policy, attention),
            abstract_args(run.model, train, batch),
            run.target,
            donate_argnums=0,
            xla_remat=run.xla_remat,
            keep_dump=self.keep_dump,
            suggest=suggest,
        )

    def _with_next_step(self, batch: int, error: CompileError) -> CompileError:
        """The error with a next step where that was tried and compiles: XLA's attention in place of cuDNN's."""
        if error.next_step or self.run.attention.implementation != "cudnn":
            return error
        try:
            self._compiled(batch, "xla", suggest=False)
        except CompileError:
            return error
        return error.with_next_step("--attention xla, with which it was tried and compiles")

    def state_bytes(self) -> int:
        """Bytes of the parameters and the optimizer state, from their shapes alone."""
        state, _ = abstract_args(self.run.model, self.run.train, batch=1)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

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
        if (fits or anyway) and kind == "trial" and self.run.measures and self.run.target.kind != "deviceless":
            try:
                timing = self.measure(batch, compilation)
            except Exception as error:  # JAX's own error, where the device runs out of memory: the record says so
                found = error_kind(error)
                ran: Outcome = "oom" if found == "oom" else "crashed"
                row = self._row(batch, kind, compilation, None)
                return dataclasses.replace(row, ran=ran, error=first_line(error), error_kind=found)
        return self._row(batch, kind, compilation, timing)

    def measure(self, batch: int, compilation: Compilation) -> StepTiming:
        """Runs the compiled step on the target's device, over real text."""
        run = self.run
        text = load_text(run.data)
        return measure_step(
            compilation.compiled,
            lambda: init_state(run.model, run.train),
            batches(text, batch * run.train_at(batch).accumulate, run.train.seq_len, run.train.seed),
            run.target.device,
            num_warmup=run.num_warmup,
            num_steps=run.num_steps,
            on_step=lambda step: self.on_step(batch, step),
            before=self.before,
        )

    def config(self, batch: int) -> dict[str, Any]:
        """What was asked for, as records hold it: the model, the training step, the target."""
        run = self.run
        return {
            "model": dataclasses.asdict(run.model),
            "train": dataclasses.asdict(run.train_at(batch)),
            "target": {"kind": run.target.kind, "description": run.target.description},
            "xla_remat": run.xla_remat,
        }

    def common(self, batch: int, kind: str) -> dict[str, Any]:
        """The fields that every record of a step has: what was asked for, and what it was made with."""
        run, train = self.run, self.run.train_at(batch)
        return dict(
            record=kind,
            model=run.model.name,
            num_params=count_params(run.model),
            requested_policy=self.requested_policy,
            policy=str(self.policy),
            target=run.target.name,
            batch=batch,
            accumulate=train.accumulate,
            global_batch=batch * train.accumulate,
            seq_len=train.seq_len,
            loss=train.loss,
            optimizer=train.optimizer,
            grad_dtype=train.grad_dtype,
            attention=run.attention.implementation,
            matmuls=matmuls_of(run.target),
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
        self, batch: int, kind: Literal["trial", "probe"], compilation: Compilation, timing: StepTiming | None
    ) -> TrialRecord:
        run, memory, speed = self.run, compilation.memory, self.run.target.speed
        predicted: StepTime | None = predict_step_time(compilation.module, speed) if speed else None
        step_s = timing.median_s if timing else predicted.step_s if predicted else None
        global_batch = batch * run.train_at(batch).accumulate
        flops = model_flops(run.model, global_batch, run.train.seq_len)
        base = flops_without_recompute(run.model, global_batch, run.train.seq_len, run.attention.implementation)
        base += update_flops(run.model, run.train)
        peak = timing.peak_bytes if timing else None
        executed = executed_flops(compilation.module).total
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
            tokens_per_s=global_batch * run.train.seq_len / step_s if step_s else None,
            model_flops=flops,
            executed_flops=executed,
            recompute_overhead_percent=100 * (executed / base - 1),
            mfu=flops / (step_s * speed.bf16_flops) if step_s and speed else None,
            predicted=PredictedStep(**dataclasses.asdict(predicted)) if predicted else None,
            num_xla_remat=compilation.num_xla_remat,
            findings=findings(compilation, self.requested_policy, self.policy),
            kept=kept_by(compilation),
        )


@functools.cache
def update_flops(model: ModelConfig, train: TrainConfig) -> int:
    """FLOPs of the matmuls in the optimizer's update: 0 for all but Muon, which orthogonalizes."""
    state, _ = abstract_args(model, train, batch=1)
    return count_step_flops(jax.make_jaxpr(make_optimizer(train).update)(state.params, state.opt_state, state.params)).total


def error_kind(error: Exception) -> str:
    """The kind of a failure, as records name it: `oom` where memory ran out, else the class of the error."""
    if isinstance(error, JaxrematError):
        return type(error).__name__
    return "oom" if is_out_of_memory(f"{type(error).__name__}: {error}") else type(error).__name__


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
