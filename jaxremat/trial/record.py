"""Records: what a trial came to, one JSON object per line, with a schema version. `trial/store.py` keeps them."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

#: Schema 1 had other names for some fields: `from_row` reads it still.
SCHEMA = 2

#: How a trial ended. infeasible: compiled, and over the budget; oom: the device ran out; crashed: its process died or gave no
#: result; bad-config: it can't be meant, or XLA refuses it.
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
    findings: list[dict[str, Any]] | None = None
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
    predicted: dict[str, Any] | None = None
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
        return self.predicted["step_s"] if self.predicted else None

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
    tail: list[str]
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
    saving each value of a layer is worth, `more` what further budget could spare, `tried` every step compiled.
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
    layers: list[str]
    prices: list[dict[str, Any]]
    more: list[dict[str, Any]]
    tried: list[dict[str, Any]]
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
    held: list[dict[str, Any]] | None = None
    largest: list[dict[str, Any]] | None = None
    peak: dict[str, Any] | None = None
    allocator: dict[str, int | None] | None = None


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
    policies: list[str]
    predicted_step_s: list[float]
    measured_step_s: list[float]
    spearman: float
    versions: dict[str, str | None]


Record = TrialRecord | LargestBatchRecord | PlanRecord | FailureRecord | SuggestionRecord | ExplainRecord | RankRecord
_TYPES: dict[str, type[Record]] = {
    "trial": TrialRecord,
    "probe": TrialRecord,
    "largest_batch": LargestBatchRecord,
    "plan": PlanRecord,
    "failure": FailureRecord,
    "suggestion": SuggestionRecord,
    "explain": ExplainRecord,
    "rank_correlation": RankRecord,
}


def to_json(record: Record) -> str:
    """The record as one line of JSON."""
    return json.dumps(dataclasses.asdict(record), allow_nan=False)


def from_row(row: dict[str, Any]) -> Record:
    """The record that `row` is the JSON of; what a store adds to it is left out.

    Raises:
        KeyError, TypeError: it is none.
    """
    row = _renamed(row) if row.get("schema") == 1 else row
    kind = _TYPES[row["record"]]
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in row.items() if name in known})


#: Names of schema 1, and what they are called now. In schema 1 they stood nowhere else than in the places where they are new.
_RENAMED = {"holes": "gaps", "spared_s": "saved_s"}


def _renamed(found: Any) -> Any:
    """A row of schema 1 with the names of now, at every depth; a new object, the old one stays as it is."""
    if isinstance(found, list):
        return [_renamed(item) for item in found]
    if not isinstance(found, dict):
        return found
    named = {_RENAMED.get(name, name): _renamed(value) for name, value in found.items()}
    return named | {"record": "suggestion"} if named.get("record") == "fix" else named


_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|ALLOC_FAILED|MemoryAllocation|failed to allocate|"
    r"unable to allocate|std::bad_alloc|\bMemoryError\b",
    re.IGNORECASE,
)


def is_out_of_memory(text: str) -> bool:
    """Whether an error says, in any of the spellings of XLA, CUDA, cuBLAS, cuDNN, C++ and Python, that memory ran out."""
    return bool(_OUT_OF_MEMORY.search(text))
