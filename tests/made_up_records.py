"""Records that no step was run for. `changes` are fields of the record."""

from dataclasses import replace
from typing import Any, Literal

from jaxremat.trial.record import ExplainRecord, FailureRecord, LargestBatchRecord, PlanRecord, TrialRecord
from jaxremat.xla.step_facts import StepTime

GIB = 2**30
#: What the record of a step that wasn't compiled lacks.
NO_BYTES: dict[str, Any] = dict.fromkeys(
    ("total_bytes", "argument_bytes", "temp_bytes", "recompute_overhead_percent", "mfu")
)


def trial(batch: int, kind: Literal["trial", "probe"] = "trial", fits: bool | None = True, **changes: Any) -> TrialRecord:
    """A step under `dots` on a GPU whose budget is 80 bytes."""
    known: dict[str, Any] = dict(model="m", num_params=1, requested_policy="dots", policy="dots", target="gpu", seq_len=4)
    known |= dict(record=kind, batch=batch, global_batch=batch, loss="full", optimizer="adamw", attention="xla")
    known |= dict(total_bytes=10 * batch, budget_bytes=80, limit_bytes=80, fits=fits, xla_flags=None, num_compiles=3)
    known |= dict(versions={}, config={"train": {"accumulate": 1}, "target": {"kind": "attached", "description": "A"}})
    return TrialRecord(**known | changes)


def predicted(step_s: float) -> StepTime:
    """A predicted step without its terms."""
    return StepTime(step_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0)


def step(policy: str = "dots", batch: int = 8, step_s: float | None = 0.01, **changes: Any) -> TrialRecord:
    """A step of gpt2 that takes 10 of 16 GiB of a GPU that isn't here; its time is predicted."""
    known: dict[str, Any] = dict(model="gpt2", requested_policy=policy, policy=policy, target="h100-80gb", seq_len=1024)
    known |= dict(total_bytes=10 * GIB, argument_bytes=2 * GIB, output_bytes=2 * GIB, alias_bytes=2 * GIB)
    known |= dict(temp_bytes=8 * GIB, budget_bytes=16 * GIB, limit_bytes=None, recompute_overhead_percent=12.5, mfu=0.4)
    if step_s:
        known |= dict(step_s=step_s, step_source="predicted", predicted=predicted(step_s))
        known |= dict(tokens_per_s=1024 * batch / step_s)
    return trial(batch, **known | changes)


def measured(
    policy: str = "dots", batch: int = 8, step_s: float = 0.01, predicted_s: float | None = 0.01, **changes: Any
) -> TrialRecord:
    """A step of gpt2 that was measured on an attached GPU, whose allocator gave out 100 GiB, 1 GiB more than promised."""
    known: dict[str, Any] = dict(target="nvidia-h200", total_bytes=99 * GIB, limit_bytes=100 * GIB, budget_bytes=100 * GIB)
    known |= dict(ran="ok", measured_peak_bytes=100 * GIB, measured_over_total_percent=100 / 99, step_source="measured")
    known |= dict(predicted=predicted_s and predicted(predicted_s))
    return step(policy, batch, step_s, **known | changes)


def unmeasured(policy: str = "dots", batch: int = 8, predicted_s: float | None = 0.01, **changes: Any) -> TrialRecord:
    """The same before it was measured."""
    known: dict[str, Any] = dict(ran=None, measured_peak_bytes=None, measured_over_total_percent=None, tokens_per_s=None)
    known |= dict(step_s=predicted_s, step_source=predicted_s and "predicted")
    return replace(measured(policy, batch, predicted_s=predicted_s), **known | changes)


def record(number: int = 1, **changes: Any) -> FailureRecord:
    """A small record, told from the others by its batch."""
    known: dict[str, Any] = dict(model="m", requested_policy="dots", target="t", batch=number, outcome="crashed", error="e")
    known |= dict(tail=(), duration_s=1.0, config={}, xla_flags=None, versions={})
    return FailureRecord(**known | changes)


def search(policy: str = "dots", **changes: Any) -> LargestBatchRecord:
    """A search that found batch 128: its 99 GiB fit into 100 GiB, and the 101 GiB of batch 129 don't."""
    known: dict[str, Any] = dict(model="gpt2", requested_policy=policy, policy=policy, target="nvidia-h200", seq_len=1024)
    known |= dict(largest_batch=128, largest_batch_total_bytes=99 * GIB, next_batch=129, next_batch_total_bytes=101 * GIB)
    known |= dict(max_batch=4096, budget_bytes=100 * GIB, num_compiles=4, versions={})
    return LargestBatchRecord(**known | changes)


def plan(**changes: Any) -> PlanRecord:
    """A plan for one layer at batch 8, which takes 1 of 2 GiB."""
    known: dict[str, Any] = dict(model="m", num_params=1, target="t", seq_len=None, objective="time", policy="dots")
    known |= dict(loss="own", batch=8, budget_bytes=2 * GIB, total_bytes=GIB, predicted_total_bytes=GIB, step_s=0.25)
    known |= dict(recompute_s=0.01448, bound_s=0.01409, layers=("dots",), prices=(), more=(), tried=(), num_compiles=1)
    known |= dict(config={"model": {}}, versions={})
    return PlanRecord(**known | changes)


def explained(policy: str = "dots", batch: int = 8, **changes: Any) -> ExplainRecord:
    """Who holds the 4 GiB of a step that fits into 8 GiB."""
    known: dict[str, Any] = dict(model="gpt2", num_params=1, requested_policy=policy, policy=policy, target="h100-80gb")
    known |= dict(batch=batch, global_batch=batch, seq_len=1024, loss="full", optimizer="adamw", attention="cudnn")
    known |= dict(budget_bytes=8 * GIB, total_bytes=4 * GIB, fits=True, num_compiles=1, config={}, versions={})
    return ExplainRecord(**known | dict[str, Any](xla_flags=None, host_bytes=0) | changes)
