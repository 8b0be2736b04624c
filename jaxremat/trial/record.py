"""Records: what a trial came to, as frozen dataclasses. `trial/lines.py` reads and writes them, `trial/store.py` keeps them.

One record is one JSON object on a line, with the field names of its dataclass as keys:

    {"record": "largest_batch", "schema": 2, "model": "gpt2", "policy": "dots", "largest_batch": 58, ...}

Two kinds of dicts are left inside records. In `attribution`, `sources` and `versions` the keys are data. `config` says what was
asked for in the words of the version that wrote the record: a field that this version doesn't know must not get lost, since
`trial/plan_file.py` compares it, and a value that this version doesn't allow must not make the record unreadable.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from jaxremat.trial.details import (
    AllocatorBytes,
    FurtherBudget,
    HeldBytes,
    LargeBuffer,
    LintFinding,
    PeakPlace,
    PredictedStep,
    TensorPrice,
    TriedStep,
)

#: Schema 1 had other names for some fields: `trial/lines.py` still reads it.
SCHEMA = 2

#: How a trial ended. infeasible: compiled, and over the budget. oom: the device ran out of memory. crashed: its process died or
#: left no result. bad-config: the request can't be meant, or XLA refuses it.
Outcome = Literal["ok", "infeasible", "oom", "timeout", "crashed", "bad-config"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What every record of a compiled step holds: what was asked for, what it was made with, and whether it fits.

    A step takes `accumulate` microbatches of `batch`, `global_batch` sequences in all. `matmuls` says what runs them
    (`xla/options.py`), None on a CPU. `total_bytes`, on the device, against
    `budget_bytes` decides `fits`; `findings` are the lint's. A step that failed has `error`, and without a compile no bytes.
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
    seq_len: int
    loss: str
    optimizer: str
    grad_dtype: str | None = None
    attention: str
    matmuls: Literal["autotuned", "cublas", "triton"] | None = None
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
    """One policy at one batch: `trial` where it was asked for or proves a largest batch, `probe` where it only calibrates.

    Bytes are XLA's own for the compiled step, on the device unless `host_`. `step_s` is the median measured step or the
    roofline's prediction, as `step_source` says. When measured there are `step_min_s` and `step_max_s`, and on a
    GPU, if this step set it, the allocator's high-water mark `measured_peak_bytes`, with how much that is above
    `total_bytes` in `measured_over_total_percent`; `outside_bytes` is what its process held beyond the allocator's pool, by
    NVML's count of the process or, as `outside_source` says, the rise of the whole card's use. `predicted` holds the
    roofline's terms, `findings` what those rules of the lint found that need no dump.

    `ran` says what came of running the step, None where it wasn't run. A search on an attached GPU runs steps to see them
    run out of memory: that is no failure, and what was said then is in `ran_error`. `limit_bytes` is an attached
    allocator's limit, of which the budget is made as `budget_terms` say.
    """

    record: Literal["trial", "probe"]
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_temp_bytes: int | None = None
    generated_code_bytes: int | None = None
    budget_terms: str = ""
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
    model_flops: int | None = None
    executed_flops: int | None = None
    recompute_overhead_percent: float | None = None
    mfu: float | None = None
    predicted: PredictedStep | None = None
    num_xla_remat: int | None = None

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.error is None:
            return "infeasible" if not self.fits else "oom" if self.ran == "oom" else "ok"
        classes: dict[str | None, Outcome] = {"oom": "oom", "timeout": "timeout", "CompileError": "bad-config"}
        return classes.get(self.error_kind, "crashed")

    @property
    def predicted_step_s(self) -> float | None:
        """The roofline's step time, whether or not the step was measured too; None where the target's speed is unknown."""
        return self.predicted.step_s if self.predicted else None

    @property
    def measured_step_s(self) -> float | None:
        """The measured step time, None where there is only a prediction."""
        return self.step_s if self.step_source == "measured" else None


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A trial or search that came to no bytes at all: how it ended, in one row.

    `tail` holds the last lines that its process wrote to stderr; `batch` is None for a search.
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
    """The end of a search: `largest_batch` fits (0: none does), `next_batch` needs `next_batch_total_bytes`.

    With a `global_batch` they are microbatches, and the next one is the next divisor of it. On an attached GPU both are run,
    each in a fresh process: `ran` and `next_ran` say what came of it. Where the largest one by compiled bytes,
    `compiled_largest_batch`, ran out of memory, `largest_batch` is the largest that ran, and the next one ran out of memory.
    """

    record: Literal["largest_batch"] = "largest_batch"
    schema: int = SCHEMA
    model: str
    requested_policy: str
    policy: str
    target: str
    seq_len: int
    global_batch: int | None = None
    largest_batch: int
    largest_batch_total_bytes: int | None
    next_batch: int | None
    next_batch_total_bytes: int | None
    compiled_largest_batch: int | None = None
    ran: Outcome | None = None
    next_ran: Outcome | None = None
    max_batch: int
    budget_bytes: int
    budget_terms: str = ""
    step_s: float | None = None
    step_source: Literal["measured", "predicted"] | None = None
    tokens_per_s: float | None = None
    num_compiles: int
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """What the planner chose, and its proof: the compiled step at `batch` takes `total_bytes` and fits.

    `step_s` is predicted, and so is `recompute_s`, what recomputing, writing and reading residuals takes of it; no choice of
    residuals takes less than `bound_s` within the budget, by the same model. `layers` has each layer's policy, `prices` what
    saving each value of a layer is worth, `more` what further budget could save, `tried` every step compiled.
    `predicted_total_bytes` and `recompute_s` are None where a named policy was the best.
    """

    record: Literal["plan"] = "plan"
    schema: int = SCHEMA
    model: str
    num_params: int
    target: str
    seq_len: int
    objective: str
    requested_policy: str = "auto"
    policy: str
    loss: str
    batch: int
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
    num_compiles: int
    config: dict[str, Any]
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class SuggestionRecord:
    """Flags under which a step fits in place of one that doesn't, compiled: `total_bytes` is within `budget_bytes`."""

    record: Literal["suggestion"] = "suggestion"
    schema: int = SCHEMA
    model: str
    target: str
    flags: str
    policy: str
    loss: str
    optimizer: str
    batch: int
    accumulate: int
    total_bytes: int
    budget_bytes: int
    step_s: float | None
    step_source: Literal["measured", "predicted"] | None
    tokens_per_s: float | None
    num_compiles: int
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class ExplainRecord(StepRecord):
    """Who holds the memory of one compiled step at its peak.

    `attribution` gives device bytes by category, `gaps` included; they sum to `total_bytes`, as do `sources`, the same by the
    seven sources a person knows. Host memory is apart. `held` has the bytes by category and label (a residual's checkpoint
    name), with how many layers' values that is, and `largest` the largest buffers; `peak` says where in the program it is.
    `allocator` is measured, where the step was run on an attached GPU; `findings` are there with `--lint`.
    """

    record: Literal["explain"] = "explain"
    host_bytes: int | None = None
    attribution: dict[str, int] | None = None
    sources: dict[str, int] | None = None
    held: tuple[HeldBytes, ...] | None = None
    largest: tuple[LargeBuffer, ...] | None = None
    peak: PeakPlace | None = None
    allocator: AllocatorBytes | None = None


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """How far predicted and measured step times put the `policies` into the same order, at one `batch` or each at its own.

    `spearman` is the rank correlation of the seconds per sequence: 1 the same order, -1 the reverse.
    """

    record: Literal["rank_correlation"] = "rank_correlation"
    schema: int = SCHEMA
    model: str
    target: str
    batch: int | None
    policies: tuple[str, ...]
    predicted_step_s: tuple[float, ...]
    measured_step_s: tuple[float, ...]
    spearman: float
    versions: dict[str, str | None]


Record = TrialRecord | LargestBatchRecord | PlanRecord | FailureRecord | SuggestionRecord | ExplainRecord | RankRecord

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|ALLOC_FAILED|MemoryAllocation|failed to allocate|"
    r"unable to allocate|std::bad_alloc|\bMemoryError\b",
    re.IGNORECASE,
)


def is_out_of_memory(text: str) -> bool:
    """Whether an error says, in any of the spellings of XLA, CUDA, cuBLAS, cuDNN, C++ and Python, that memory ran out."""
    return bool(_OUT_OF_MEMORY.search(text))
