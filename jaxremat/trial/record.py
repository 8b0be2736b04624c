"""Records: what a trial came to, as frozen dataclasses. `trial/lines.py` reads and writes them, `trial/store.py` keeps them.

One record is one JSON object on a line, with the field names of its dataclass as keys:

    {"record": "largest_batch", "schema": 2, "model": "gpt2", "policy": "dots", "largest_batch": 58, ...}

Two kinds of dicts are left inside records. In `attribution`, `sources` and `versions` the keys are data. `config` says what
was asked for in the words of the version that wrote the record: a field that this version doesn't know must not get lost,
since `trial/plan_file.py` compares it, and a value that this version doesn't allow must not make the record unreadable.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from jaxremat.config import Layout
from jaxremat.trial.comparisons import LengthsRecord, MeshChoiceRecord, RankRecord
from jaxremat.trial.details import (
    SCHEMA,
    AllocatorBytes,
    FurtherBudget,
    HeldBytes,
    LargeBuffer,
    LintFinding,
    PeakPlace,
    PlannedLayout,
    PredictedStep,
    StateOnMesh,
    TensorPrice,
    TriedStep,
    WhatWasKept,
)

#: How a trial ended. infeasible: compiled, and over the budget. oom: the device ran out of memory. crashed: its process died
#: or left no result. bad-config: the request can't be meant, or XLA refuses it.
Outcome = Literal["ok", "infeasible", "oom", "timeout", "crashed", "bad-config"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What every record of a compiled step holds: what was asked for, what it was made with, and whether it fits.

    A step takes `accumulate` microbatches of `batch` sequences each, `global_batch` sequences in all. `matmuls` says which
    kernels run the matmuls (`xla/options.py`); it is None on a CPU. The step `fits` where its `total_bytes` on the device
    are at most `budget_bytes`. A step that failed has an `error`, and where it wasn't compiled its bytes are None.

    On a `mesh` of several devices, `batch` counts the sequences of one member of its axes, and bytes and FLOPs are those of one
    device. `mesh` is None for one device.

    `layout` says how the layers run (`policy/layout.py`). It is None where the workload decides that itself.

    `attention` is None for a workload of a user's own, and so is `seq_len` unless --seq-len gave it. Its `loss` is `own`.
    `optimizer` is `own` where the workload brings its optimizer, and None where the workload is a whole step.

    `disabled_pass` is the pass of XLA that the compile disabled because the step offloads in a scan (`policy/offload.py`). It is
    None if none was disabled for that.
    """

    record: str
    schema: int = SCHEMA
    model: str
    num_params: int
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
    matmuls: Literal["autotuned", "cublas", "triton"] | None = None
    xla_preset: str = "default"
    disabled_pass: str | None = None
    budget_bytes: int
    total_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool | None = None
    findings: tuple[LintFinding, ...] | None = None
    num_compiles: int
    error: str | None = None
    error_kind: str | None = None
    config: dict[str, Any]
    xla_flags: str | None
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class TrialRecord(StepRecord):
    """One policy at one batch.

    `record` is `trial` where the batch was asked for or proves the largest batch, and `probe` where the search for the
    largest batch only needed its bytes. All bytes are XLA's own numbers for the compiled step, on the device unless the name
    begins with `host_`. `findings` come from the lint's rules that need no dump.

    `tokens_per_s` is None where a workload doesn't say how many tokens a batch has; `samples_per_s` counts the batch's samples.
    On a mesh both are those of one device, as the bytes, the FLOPs and `mfu` are.

    `step_s` is the median of the measured steps, or the predicted time, as `step_source` says; the terms of the prediction
    are in `predicted`. `predicted_interval` says how much longer a real step may take, as shares of the predicted time:
    (-0.12, 0.12) is 12 % shorter to 12 % longer. A measured step has `step_min_s` and `step_max_s` too. On a GPU it has
    `measured_peak_bytes`, the allocator's high-water mark, if this step set the mark; `measured_over_total_percent` says how
    far the mark is above `total_bytes`. `outside_bytes` are what its process held on the card beyond the allocator's pool.
    They come from NVML's count of the process or from the rise of the whole card's use, as `outside_source` says.

    `ran` says what came of running the step; it is None where the step wasn't run. A search on an attached GPU runs the next
    batch in order to see it run out of memory. That is no failure: the error is in `ran_error` then, and `error` is None.
    `limit_bytes` is the limit of an attached GPU's allocator, and `budget_terms` say how the budget follows from it. On a mesh of
    GPUs that aren't here, `reserve_bytes` are what the budget leaves of each, for the CUDA context, NCCL and libraries, and
    `reserve_source` says how much these are known to take.

    `base_flops` are the FLOPs that the step executes under `none` (`trial/base.py`). `recompute_overhead_percent` says how far
    its `executed_flops` are above them. A probe, a training and a step that XLA rejects under `none` have neither. Where a
    workload says no `model_flops`, they are the `base_flops`. `mfu` is of the peak of the type of most of the FLOPs.

    XLA's own rematerialization, which is on in a job that doesn't disable it, changes the step if its `total_bytes` are above
    `xla_remat_above_bytes`. None where the pass ran, where XLA_FLAGS disables it, and for a CPU.

    `kept` says what the compiled step saves for the backward pass and what it runs again. Records of former versions have
    none.
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
    predicted: PredictedStep | None = None
    predicted_interval: tuple[float, float] | None = None
    num_xla_remat: int | None = None
    xla_remat_above_bytes: int | None = None
    kept: WhatWasKept | None = None

    @property
    def outcome(self) -> Outcome:
        """How the trial ended."""
        if self.error is None:
            return "infeasible" if not self.fits else "oom" if self.ran == "oom" else "ok"
        classes: dict[str | None, Outcome] = {"oom": "oom", "timeout": "timeout", "CompileError": "bad-config"}
        return classes.get(self.error_kind, "crashed")

    @property
    def predicted_step_s(self) -> float | None:
        """The predicted step time, whether or not the step was measured too; None where the target's speed is unknown."""
        return self.predicted.step_s if self.predicted else None

    @property
    def measured_step_s(self) -> float | None:
        """The measured step time; None where there is only a prediction."""
        return self.step_s if self.step_source == "measured" else None


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A trial or a search that came to no bytes at all, and how it ended.

    `tail` holds the last lines that its process printed. `batch` is None for a search.
    """

    record: Literal["failure"] = "failure"
    schema: int = SCHEMA
    model: str
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
class LargestBatchRecord:
    """The end of a search: `largest_batch` fits, and `next_batch` needs `next_batch_total_bytes`, which doesn't.

    `largest_batch` is 0 where not even the first batch fits. With a `global_batch` both are microbatches, and the next batch
    is its next divisor. On an attached GPU both are run, each in a fresh process, and `ran` and `next_ran` say what came of
    it. The batch that is the largest by compiled bytes may run out of memory. Then it is in `compiled_largest_batch`,
    `largest_batch` is the largest that ran, and `next_batch` ran out of memory.

    `next_batch` is None where memory didn't end the search: it reached the global batch, `max_batch`, or without that the largest
    dimension of XLA's arrays.
    """

    record: Literal["largest_batch"] = "largest_batch"
    schema: int = SCHEMA
    model: str
    requested_policy: str
    policy: str
    target: str
    seq_len: int | None
    xla_preset: str = "default"
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
class PlanRecord:
    """What the planner chose, and its proof: the compiled step at `batch` takes `total_bytes` and fits.

    `max_batch` is the limit that was given, if the plan's batch reached it, and None otherwise.

    `step_s` is predicted. `recompute_s` is the part of it that recomputing, writing and reading residuals takes; by the same
    model, no choice of residuals within the budget takes less than `bound_s`. Both `recompute_s` and `predicted_total_bytes`
    are None where a named policy was the best. `layers` has the policy of each layer, after the name of its kind if there are
    several kinds (`encoder: save:...`), `prices` what saving each tensor is
    worth, `more` what a larger budget could save, and `tried` every step that was compiled. `layout` says how the layers run;
    it is None where the workload decides that itself. `layouts` has the best plan in each layout that was looked at, and
    `unrolled_error` says why XLA rejected unrolled layers. `disabled_pass` is that of the step.
    """

    record: Literal["plan"] = "plan"
    schema: int = SCHEMA
    model: str
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
    bound_s: float
    layers: tuple[str, ...]
    prices: tuple[TensorPrice, ...]
    more: tuple[FurtherBudget, ...]
    tried: tuple[TriedStep, ...]
    disabled_pass: str | None = None
    num_compiles: int
    config: dict[str, Any]
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class SuggestionRecord:
    """Flags under which a step fits in place of one that doesn't; the step was compiled, and takes `total_bytes`."""

    record: Literal["suggestion"] = "suggestion"
    schema: int = SCHEMA
    model: str
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
    """Who holds the memory of one compiled step at its peak.

    `attribution` gives the bytes on the device by category, `gaps` included, and `sources` the same bytes by the seven
    sources that a person knows. Each of the two sums to `total_bytes`. `host_bytes` are not among them. `held` gives the
    bytes by category and label (the label of a residual is its checkpoint name). `largest` lists the largest buffers, and
    `peak` says where in the program the peak is. `allocator` is there where the step was run on an attached GPU, and
    `findings` with `--lint`. On a mesh `state` says how the parameters and the optimizer's state lie; it is empty for one device.
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
    """Whether an error says, in any of the spellings of XLA, CUDA, cuBLAS, cuDNN, C++ and Python, that memory ran out."""
    return bool(_OUT_OF_MEMORY.search(text))
