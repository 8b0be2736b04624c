"""The rows of trials: the `TrialRecord` of a compiled step.

A row has the step's bytes, seconds and FLOPs.
"""

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxremat.chips.installed import versions
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.errors import JaxrematError
from jaxremat.policy.spec import Policy
from jaxremat.trial.findings import findings
from jaxremat.trial.measure import StepTiming
from jaxremat.trial.record import TrialRecord, is_out_of_memory, picked
from jaxremat.xla.clock import peak_flops_of, predict_step_time
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import executed_flops
from jaxremat.xla.kernels import unpriced
from jaxremat.xla.options import matmuls_of, preset_options, remat_limit
from jaxremat.xla.recomputed import recomputed_flops, saved_and_recomputed
from jaxremat.xla.step_facts import MORE_THAN_ITS_SHARE

if TYPE_CHECKING:
    from jaxremat.trial.trials import Trials

#: The fields of XLA's memory analysis that a row has.
_OF_MEMORY = """argument_bytes output_bytes alias_bytes temp_bytes host_temp_bytes generated_code_bytes peak_bytes
    total_bytes"""


@dataclass(frozen=True)
class About:
    """What a record is about.

    Attributes:
        trials: the trials that the step is one of.
        policy: the policy.
        requested: the policy as it was requested, such as `auto`.
        batch: sequences of a microbatch.
        kind: the kind of the record.
        num_compiles: how many compiles the answer took. None counts those of the policy.
    """

    trials: "Trials"
    policy: Policy
    requested: str
    batch: int
    kind: Literal["trial", "probe", "explain"]
    num_compiles: int | None = None

    def fields(self) -> dict[str, Any]:
        """The fields that every record of a step has: what was requested, and what it was made with."""
        trials, batch, steps = self.trials, self.batch, self.trials.of(self.policy)
        train, done = trials.train_at(batch), steps.compiled.get(batch)
        facts = trials.factory.facts(train)
        return dict(
            record=self.kind,
            model=trials.factory.name,
            num_params=trials.workload_at().num_params,
            num_trained=trials.workload_at().num_trained,
            requested_policy=self.requested,
            policy=str(self.policy),
            target=trials.target.name,
            batch=batch,
            accumulate=trials.microbatches_at(batch),
            global_batch=trials.global_batch_at(batch),
            num_devices=trials.target.mesh_shape.num_devices,
            mesh=str(trials.target.mesh_shape) if trials.target.mesh else None,
            seq_len=facts.seq_len,
            loss=facts.loss,
            layout=trials.factory.layout(),
            optimizer=trials.optimizer,
            grad_dtype=train.grad_dtype,
            attention=facts.attention,
            matmuls=matmuls_of(trials.target),
            xla_preset=trials.xla_preset,
            disabled_pass=done.disabled_pass if done else None,
            budget_bytes=trials.budget_bytes,
            num_compiles=len(steps.done) if self.num_compiles is None else self.num_compiles,
            config=config_of(trials, batch),
            xla_flags=os.environ.get("XLA_FLAGS"),
            versions=versions(),
        )


def config_of(trials: "Trials", batch: int) -> dict[str, Any]:
    """What was requested, as records have it: the model, the training step, the target."""
    return {
        "model": trials.factory.config(),
        "train": asdict(trials.train_at(batch)),
        "target": {"kind": trials.target.kind, "description": trials.target.description},
        "xla_remat": trials.xla_remat,
        "xla_options": preset_options(trials.xla_preset),
    } | trials.target.layout()


def failed_row(about: About, error: Exception) -> TrialRecord:
    """The row of a step that XLA rejected."""
    terms = about.trials.budget_terms
    return TrialRecord(**about.fields(), budget_terms=terms, error=str(error), error_kind=error_kind(error))


def too_large_row(about: About, compilation: Compilation) -> TrialRecord:
    """The row of a step that XLA rejected as too large, with the bytes that it needs."""
    return TrialRecord(
        **about.fields(),
        budget_terms=about.trials.budget_terms,
        total_bytes=compilation.memory.total_bytes,
        fits=False,
        lower_s=compilation.lower_s,
        compile_s=compilation.compile_s,
    )


def row_of(about: About, compilation: Compilation, timing: StepTiming | None = None) -> TrialRecord:
    """The row of a compiled step.

    Args:
        about: what the row is about.
        compilation: the compiled step.
        timing: what running the step took. None where it wasn't run.
    """
    trials, batch, memory = about.trials, about.batch, compilation.memory
    target, speed, num_devices = trials.target, trials.target.speed, trials.target.mesh_shape.num_devices
    predicted = predict_step_time(compilation.module, speed) if speed else None
    step_s = timing.median_s if timing else predicted.step_s if predicted else None
    workload, accumulate = trials.workload_of(batch), trials.microbatches_at(batch)
    tokens_per_s, samples_per_s = rates(trials, batch, step_s)
    flops = None if workload.model_flops is None else accumulate * workload.model_flops / num_devices
    peak = timing.peak_bytes if timing else None
    outside = timing.outside if timing else None
    arguments = trials.arguments_on_mesh(batch)
    on_mesh = {"arguments": arguments, "compared_meshes": trials.compared_meshes}
    found = findings(compilation, about.requested, about.policy, trials.remedies, target, **on_mesh)
    counted, executed = saved_and_recomputed(compilation), executed_flops(compilation.module).total
    has_base = all(finding.rule != MORE_THAN_ITS_SHARE for finding in found)
    base = executed - recomputed_flops(compilation, counted) if has_base else None
    base = (
        None if base is not None and base < 0 else base
    )  # the counts of a program that isn't understood contradict each other
    flops = base if flops is None else flops
    needed = flops if workload.num_trained is None else base
    return TrialRecord(
        **about.fields(),
        **picked(memory, _OF_MEMORY),
        budget_terms=trials.budget_terms,
        reserve_bytes=trials.reserve_bytes,
        reserve_source=None if trials.reserve_bytes is None else target.chip.outside_needed,
        limit_bytes=target.memory_bytes if target.kind == "attached" else None,
        fits=memory.total_bytes <= trials.budget_bytes,
        ran="ok" if timing else None,
        measured_peak_bytes=peak,
        measured_over_total_percent=100 * (peak / memory.total_bytes - 1) if peak else None,
        outside_bytes=outside.num_bytes if outside else None,
        outside_source=outside.source if outside else None,
        lower_s=compilation.lower_s,
        compile_s=compilation.compile_s,
        step_s=step_s,
        step_source="measured" if timing else "predicted" if predicted else None,
        step_min_s=min(timing.steps_s) if timing else None,
        step_max_s=max(timing.steps_s) if timing else None,
        tokens_per_s=tokens_per_s,
        samples_per_s=samples_per_s,
        model_flops=None if flops is None else round(flops),
        executed_flops=executed,
        base_flops=base,
        recompute_overhead_percent=100 * (executed / base - 1) if base else None,
        mfu=_share_of_peak(needed, step_s, compilation, speed),
        full_training_mfu=None if needed is flops else _share_of_peak(flops, step_s, compilation, speed),
        predicted=predicted,
        predicted_interval=speed.interval if speed else None,
        paired_error=speed.paired_error if speed else None,
        unpriced=unpriced(compilation.module) or None,
        num_xla_remat=compilation.num_xla_remat,
        xla_remat_above_bytes=None
        if trials.xla_remat or trials.speaks_early  # there the pass is part of what XLA says
        else remat_limit(memory, trials.pool_bytes),
        findings=found,
        kept=counted,
    )


def _share_of_peak(flops: float | None, step_s: float | None, done: Compilation, speed: DeviceSpeed | None) -> float | None:
    """FLOPs a second as a share of the device's peak.

    None where the FLOPs or the time aren't known.
    """
    return flops / (step_s * peak_flops_of(done.module, speed)) if flops and step_s and speed else None


def rates(trials: "Trials", batch: int, step_s: float | None) -> tuple[float | None, float | None]:
    """Tokens a second and samples a second, of each device.

    None where their number or the time isn't known.

    Args:
        trials: the trials of the workload.
        batch: sequences of a microbatch.
        step_s: seconds of a step, with all its microbatches.
    """
    share = trials.microbatches_at(batch) / trials.target.mesh_shape.num_devices
    tokens, samples = (
        share * number / step_s if number is not None and step_s else None
        for number in (trials.workload_of(batch).num_tokens, trials.samples_at(batch))
    )
    return tokens, samples


def error_kind(error: Exception) -> str:
    """The kind of a failure, as records name it.

    It is `oom` where a step ran out of memory, else the class of the error.
    """
    if isinstance(error, JaxrematError):
        return type(error).__name__
    return "oom" if is_out_of_memory(f"{type(error).__name__}: {error}") else type(error).__name__


def first_line(error: Exception) -> str:
    """The first line of an error's text.

    That of another library is cut off after 300 characters.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if isinstance(error, JaxrematError) else line[:300]
