"""Records: what a trial came to, as frozen dataclasses.

`trial/lines.py` reads and writes them, and `trial/store.py` stores them. One record is one JSON object on a line, with the field
names of its dataclass as keys:

    {"record": "largest_batch", "schema": 2, "model": "gpt2", "policy": "dots", "largest_batch": 58, ...}

Two kinds of dicts are left inside records. In `attribution`, `sources` and `versions` the keys are data. `config` says what
was requested in the words of the version that wrote the record: a field that this version doesn't know must not get lost,
since `trial/plan_file.py` compares it, and a value that this version doesn't allow must not make the record unreadable.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxremat.chips.chip import Matmuls
from jaxremat.config import Layout
from jaxremat.knapsack.prices import FurtherBudget, Price
from jaxremat.trial.comparisons import LengthsRecord, MeshChoiceRecord, RankRecord
from jaxremat.trial.details import (
    AllocatorBytes,
    AnyRecord,
    HeldBytes,
    LargeBuffer,
    PeakPlace,
    PlannedLayout,
    StateOnMesh,
    TriedStep,
)
from jaxremat.xla.step_facts import Finding, SavedAndRecomputed, StepTime

#: How a trial ended. infeasible: compiled, and over the budget. oom: the device ran out of memory. crashed: its process died
#: or left no result. bad-config: the request can't be meant, or XLA rejects it.
Outcome = Literal["ok", "infeasible", "oom", "timeout", "crashed", "bad-config"]


@dataclass(frozen=True, kw_only=True)
class StepRecord(AnyRecord):
    """What every record of a compiled step has.

    On a mesh, bytes and FLOPs are those of one device.

    Attributes:
        num_params: number of parameters.
        num_trained: number of those that are trained. None where all are.
        requested_policy: the policy as it was requested, such as `auto`.
        policy: the policy of the step.
        target: name of the target.
        batch: sequences of a microbatch; on a mesh, those of one data-parallel group.
        accumulate: number of microbatches in a step.
        global_batch: sequences of a step on all devices.
        num_devices: number of devices.
        mesh: the mesh, such as `data=2,fsdp=4`; None for one device.
        seq_len: tokens of a sequence; None for a workload of a user's own without --seq-len.
        loss: the loss; `own` for a workload of a user's own.
        layout: how the layers run (`policy/layout.py`); None where the workload decides that itself.
        optimizer: `own` where the workload brings its optimizer; None where the workload is a whole step.
        grad_dtype: dtype of the gradients; None for that of the parameters.
        attention: which attention runs; None for a workload of a user's own.
        matmuls: which kernels run the matmuls (`xla/options.py`); None on a CPU.
        xla_preset: the preset of XLA's options.
        disabled_pass: the pass of XLA that is disabled because the step offloads in a scan (`policy/offload.py`), if any.
        budget_bytes: what a step may take on a device.
        total_bytes: XLA's total on a device; None where the step wasn't compiled.
        peak_bytes: XLA's `peak_memory_in_bytes`, a quantity of its own, which decides nothing.
        fits: whether `total_bytes` are at most `budget_bytes`.
        findings: what the lint found.
        num_compiles: number of compiles that the answer took.
        error: why the step failed, if it did.
        error_kind: `oom`, `timeout`, `crashed`, or the class of the error.
        config: what was requested, in the words of the version that wrote the record: model, training step, target.
        xla_flags: `XLA_FLAGS` of the environment.
        versions: by library, its version; None where it isn't installed.
    """

    num_params: int
    num_trained: int | None = None
    requested_policy: str
    policy: str
    target: str
    batch: int
    accumulate: int = 1
    global_batch: int
    num_devices: int = 1
    mesh: str | None = None
    seq_len: int | None
    loss: str
    layout: Layout | None = None
    optimizer: str | None
    grad_dtype: str | None = None
    attention: str | None
    matmuls: Matmuls | None = None
    xla_preset: str = "default"
    disabled_pass: str | None = None
    budget_bytes: int
    total_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    findings: tuple[Finding, ...] | None = None
    num_compiles: int
    error: str | None = None
    error_kind: str | None = None
    config: dict[str, Any]
    xla_flags: str | None
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class TrialRecord(StepRecord):
    """One policy at one batch.

    All bytes are XLA's own numbers for the compiled step, on the device unless the name begins with `host_`. Rates, FLOPs and
    `mfu` are those of one device. `findings` come from the rules of the lint that need no dump.

    Attributes:
        record: `trial` where the batch was requested or proves the largest batch; `probe` where a search needed its bytes.
        argument_bytes: of the arguments: parameters, optimizer state, batch.
        output_bytes: of the outputs.
        alias_bytes: of the outputs that lie where arguments were.
        temp_bytes: of temporaries.
        host_temp_bytes: of temporaries in the host's memory.
        generated_code_bytes: of the program.
        budget_terms: how the budget is made up.
        reserve_bytes: what the budget leaves of each GPU of a mesh that isn't here, for what a process takes outside of the pool.
        reserve_source: how much these are known to take.
        limit_bytes: limit of an attached GPU's allocator.
        ran: how running the step ended; None where it wasn't run.
        ran_error: the error of a step that was run to see it run out of memory. That is no failure, so `error` is None.
        measured_peak_bytes: the allocator's high-water mark, if this step set it.
        measured_over_total_percent: how far the mark is above `total_bytes`.
        outside_bytes: what the process had on the card outside the allocator's pool.
        outside_source: whether that is the driver's count of the process, or the rise of the whole card's use.
        lower_s: seconds that tracing and lowering took.
        compile_s: seconds that compiling took. Other steps may have been compiled meanwhile (`JAXREMAT_JOBS`).
        step_s: median of the measured steps, or else the predicted seconds.
        step_source: which of the two.
        step_min_s: the fastest of the measured steps.
        step_max_s: the slowest of them.
        tokens_per_s: tokens per second; None where the workload doesn't say how many tokens a batch has.
        samples_per_s: samples per second; None where nobody has counted the samples.
        model_flops: FLOPs that the workload says a step needs that trains all parameters; `base_flops` where it doesn't say.
        executed_flops: FLOPs that the compiled step executes.
        base_flops: `executed_flops` without those of recomputation. None for a training, or more than a device's share.
        recompute_overhead_percent: how far `executed_flops` are above `base_flops`.
        mfu: `model_flops` a second, as a share of the peak of the type of most of the FLOPs. With frozen parameters `base_flops`,
            because a step that computes no gradients of them needs fewer than `model_flops`.
        full_training_mfu: `model_flops` a second, as `mfu`, where parameters are frozen: as if all were trained.
        predicted: the predicted time and its terms.
        predicted_interval: how much longer a real step may take, as shares: (-0.16, 0.16) is 16 % shorter to 16 % longer.
        paired_error: the share by which predicted times of two steps of the model have to differ for one to be the faster.
        unpriced: what the predicted time and the FLOPs leave out or guess, such as `1 loop of unknown length counts once`. None
            for most steps.
        num_xla_remat: number of instructions that XLA's own rematerialization duplicated.
        xla_remat_above_bytes: `total_bytes` above which XLA's own rematerialization may change the step in a job. None where the
            pass ran, where XLA_FLAGS disables it, and for a CPU.
        kept: what the step saves for the backward pass and what it recomputes.
        code: with `--code`, the lines to paste that run the policy. None for `own`, and for a probe that ends no plan early.
    """

    record: Literal["trial", "probe"]
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_temp_bytes: int | None = None
    generated_code_bytes: int | None = None
    budget_terms: str = ""
    reserve_bytes: int | None = None
    reserve_source: str | None = None
    limit_bytes: int | None = None
    ran: Outcome | None = None
    ran_error: str | None = None
    measured_peak_bytes: int | None = None
    measured_over_total_percent: float | None = None
    outside_bytes: int | None = None
    outside_source: Literal["process", "card"] | None = None
    lower_s: float | None = None
    compile_s: float | None = None
    step_s: float | None = None
    step_source: Literal["measured", "predicted"] | None = None
    step_min_s: float | None = None
    step_max_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    model_flops: int | None = None
    executed_flops: int | None = None
    base_flops: int | None = None
    recompute_overhead_percent: float | None = None
    mfu: float | None = None
    full_training_mfu: float | None = None
    predicted: StepTime | None = None
    predicted_interval: tuple[float, float] | None = None
    paired_error: float | None = None
    unpriced: tuple[str, ...] | None = None
    num_xla_remat: int | None = None
    xla_remat_above_bytes: int | None = None
    kept: SavedAndRecomputed | None = None
    code: tuple[str, ...] | None = None

    @property
    def outcome(self) -> Outcome:
        """How the trial ended."""
        if self.error is None:
            return "infeasible" if not self.fits else "oom" if self.ran == "oom" else "ok"
        classes: dict[str | None, Outcome] = {"oom": "oom", "timeout": "timeout", "CompileError": "bad-config"}
        return classes.get(self.error_kind, "crashed")

    @property
    def predicted_step_s(self) -> float | None:
        """The predicted step time; None where the target's speed is unknown."""
        return self.predicted.step_s if self.predicted else None

    @property
    def measured_step_s(self) -> float | None:
        """The measured step time; None where there is only a prediction."""
        return self.step_s if self.step_source == "measured" else None

    @property
    def rate(self) -> float:
        """Tokens per second of a device, or samples where the tokens aren't known; else 0."""
        return self.tokens_per_s or self.samples_per_s or 0.0


@dataclass(frozen=True, kw_only=True)
class FailureRecord(AnyRecord):
    """A trial or a search that came to no bytes at all, and how it ended.

    Attributes:
        requested_policy: the policy as it was requested.
        target: name of the target.
        batch: sequences of a microbatch; None for a search.
        outcome: how it ended.
        error: why.
        tail: the last lines that its process printed, or the traceback of an error that isn't the user's.
        duration_s: seconds until it ended.
        config: what was requested.
        xla_flags: `XLA_FLAGS` of the environment.
        versions: by library, its version.
    """

    record: Literal["failure"] = "failure"
    requested_policy: str
    target: str
    batch: int | None
    outcome: Outcome
    error: str
    tail: tuple[str, ...]
    duration_s: float
    config: dict[str, Any]
    xla_flags: str | None
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class LargestBatchRecord(AnyRecord):
    """The end of a search: `largest_batch` fits, and `next_batch` doesn't.

    With a `global_batch` both are microbatches, and the next batch is its next divisor. On an attached GPU both are run, each in
    a process of its own.

    Attributes:
        requested_policy: the policy as it was requested.
        policy: the policy of the steps.
        target: name of the target.
        seq_len: tokens of a sequence; None where that isn't known.
        xla_preset: the preset of XLA's options.
        loss: the loss; `own` for a workload of a user's own.
        layout: how the layers run; None where the workload decides that itself.
        optimizer: `own` where the workload brings its optimizer; None where the workload is a whole step.
        mesh: the mesh, such as `data=2,fsdp=4`; None for one device.
        global_batch: sequences of a step, if they were requested.
        largest_batch: the largest batch that fits and, where batches are run, runs; 0 where not even the first one does.
        largest_batch_total_bytes: XLA's total at that batch.
        next_batch: the batch after it. None where memory didn't end the search, but the global batch, `max_batch`, or the largest
            dimension of XLA's arrays.
        next_batch_total_bytes: XLA's total at that batch.
        compiled_largest_batch: the largest batch by compiled bytes, where that one ran out of memory.
        ran: how running the largest batch ended; None where it wasn't run.
        next_ran: how running the next batch ended.
        max_batch: where the search stops, if that was requested.
        budget_bytes: what a step may take on a device.
        budget_terms: how the budget is made up.
        step_s: seconds of a step at the largest batch.
        step_source: whether they are measured or predicted.
        tokens_per_s: tokens per second at the largest batch.
        samples_per_s: samples per second at the largest batch.
        num_compiles: number of compiles that the search took.
        versions: by library, its version.
    """

    record: Literal["largest_batch"] = "largest_batch"
    requested_policy: str
    policy: str
    target: str
    seq_len: int | None
    xla_preset: str = "default"
    loss: str | None = None
    layout: Layout | None = None
    optimizer: str | None = None
    mesh: str | None = None
    global_batch: int | None = None
    largest_batch: int
    largest_batch_total_bytes: int | None
    next_batch: int | None
    next_batch_total_bytes: int | None
    compiled_largest_batch: int | None = None
    ran: Outcome | None = None
    next_ran: Outcome | None = None
    max_batch: int | None
    budget_bytes: int
    budget_terms: str = ""
    step_s: float | None = None
    step_source: Literal["measured", "predicted"] | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    num_compiles: int
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class PlanRecord(AnyRecord):
    """What the planner chose, and its proof: the compiled step takes `total_bytes` and fits.

    Attributes:
        num_params: number of parameters.
        target: name of the target.
        seq_len: tokens of a sequence; None where that isn't known.
        objective: what was planned for: `time`, `batch` or `memory`.
        requested_policy: `auto`.
        policy: the plan.
        loss: the loss of its step.
        layout: how the layers run; None where the workload decides that itself.
        layouts: the best plan in each layout that was compared.
        unrolled_error: why there is no plan for unrolled layers, or no further one, if XLA rejected a step or none fits.
        batch: sequences of a microbatch.
        max_batch: the limit that was requested, if the plan's batch reached it.
        budget_bytes: what a step may take on a device.
        total_bytes: XLA's total for the step.
        predicted_total_bytes: the total that was expected; None where a named policy was the best.
        step_s: predicted seconds of the step.
        recompute_s: the part of them for recomputing, writing and reading residuals; None where a named policy was the best.
        paired_error: the share by which predicted times of two steps have to differ for one to be the faster.
        bound_s: no choice of residuals within the budget takes less than that, by the same model. None where compiled steps
            contradict its bytes.
        layers: policy of each layer, after its kind if there are several: `encoder: save:...`.
        prices: what saving each value is worth.
        more: what a larger budget could save.
        tried: every step that was compiled.
        disabled_pass: the pass of XLA that is disabled because the step offloads in a scan, if any.
        as_config: the lines that say the plan in the author's own configuration, if the workload has one.
        as_code: the lines that say it in the framework of a user's own model, or a comment why the framework can't.
        sources: by the name of a value, `file:line` of the user's code that makes it.
        num_compiles: number of compiles that the plan took.
        config: what was requested.
        versions: by library, its version.
    """

    record: Literal["plan"] = "plan"
    num_params: int
    target: str
    seq_len: int | None
    objective: str
    requested_policy: str = "auto"
    policy: str
    loss: str
    layout: Layout | None = None
    layouts: tuple[PlannedLayout, ...] = ()
    unrolled_error: str | None = None
    batch: int
    max_batch: int | None = None
    budget_bytes: int
    total_bytes: int
    predicted_total_bytes: int | None
    step_s: float
    recompute_s: float | None
    paired_error: float | None = None
    bound_s: float | None
    layers: tuple[str, ...]
    prices: tuple[Price, ...]
    more: tuple[FurtherBudget, ...]
    tried: tuple[TriedStep, ...]
    disabled_pass: str | None = None
    as_config: tuple[str, ...] | None = None
    as_code: tuple[str, ...] | None = None
    sources: Mapping[str, str] | None = None
    num_compiles: int
    config: dict[str, Any]
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class SuggestionRecord(AnyRecord):
    """Flags under which a step fits in place of one that doesn't. The step was compiled.

    Attributes:
        target: name of the target.
        flags: the flags, to paste.
        policy: the policy of the step.
        loss: its loss.
        optimizer: its optimizer.
        batch: sequences of a microbatch.
        accumulate: number of microbatches in a step.
        total_bytes: XLA's total for the step.
        budget_bytes: what a step may take on a device.
        step_s: seconds of the step.
        step_source: whether they are measured or predicted.
        tokens_per_s: tokens per second.
        samples_per_s: samples per second.
        num_compiles: number of compiles that all suggestions took.
        versions: by library, its version.
    """

    record: Literal["suggestion"] = "suggestion"
    target: str
    flags: str
    policy: str
    loss: str
    optimizer: str | None
    batch: int
    accumulate: int
    total_bytes: int
    budget_bytes: int
    step_s: float | None
    step_source: Literal["measured", "predicted"] | None
    tokens_per_s: float | None
    samples_per_s: float | None = None
    num_compiles: int
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class ExplainRecord(StepRecord):
    """Which buffers take the memory of one compiled step at its peak.

    Attributes:
        host_bytes: bytes of the host's memory. They are not part of `total_bytes`.
        attribution: bytes on the device by category, `gaps` included. They sum to `total_bytes`.
        sources: the same bytes by the seven sources that a person knows.
        held: the bytes by category and label. The label of a residual is its checkpoint name.
        state: how the parameters and the optimizer's state lie on a mesh; empty for one device.
        largest: the largest buffers.
        peak: where in the program the peak is.
        allocator: what JAX's allocator says, where the step was run on an attached GPU.
    """

    record: Literal["explain"] = "explain"
    host_bytes: int | None = None
    attribution: dict[str, int] | None = None
    sources: dict[str, int] | None = None
    held: tuple[HeldBytes, ...] | None = None
    state: tuple[StateOnMesh, ...] = ()
    largest: tuple[LargeBuffer, ...] | None = None
    peak: PeakPlace | None = None
    allocator: AllocatorBytes | None = None


Record = (
    TrialRecord
    | LargestBatchRecord
    | PlanRecord
    | MeshChoiceRecord
    | FailureRecord
    | SuggestionRecord
    | ExplainRecord
    | RankRecord
    | LengthsRecord
)

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|ALLOC_FAILED|MemoryAllocation|failed to allocate|"
    r"unable to allocate|std::bad_alloc|\bMemoryError\b",
    re.IGNORECASE,
)


def is_out_of_memory(text: str) -> bool:
    """Whether an error says that memory ran out.

    XLA, the libraries of GPUs, C++ and Python spell it differently.
    """
    return bool(_OUT_OF_MEMORY.search(text))


def picked(found: Any, names: str) -> dict[str, Any]:
    """The fields with these names, for a record that has them too."""
    return {name: getattr(found, name) for name in names.split()}
