"""Records that no step was run for."""

from typing import Literal

from jaxremat.trial.record import FailureRecord, TrialRecord


def trial(batch: int, kind: Literal["trial", "probe"] = "trial", fits: bool = True) -> TrialRecord:
    return TrialRecord(
        record=kind,
        model="m",
        num_params=1,
        requested_policy="dots",
        policy="dots",
        target="gpu",
        batch=batch,
        global_batch=batch,
        seq_len=4,
        loss="full",
        optimizer="adamw",
        attention="xla",
        total_bytes=10 * batch,
        budget_bytes=80,
        limit_bytes=80,
        fits=fits,
        num_compiles=3,
        config={"train": {"accumulate": 1}, "target": {"kind": "attached", "description": "A"}},
        xla_flags=None,
        versions={},
    )


def record(number: int = 0) -> FailureRecord:
    """A small record, told from the others by its batch."""
    return FailureRecord(
        model="m",
        requested_policy="dots",
        target="t",
        batch=number,
        outcome="crashed",
        error="e",
        tail=(),
        duration_s=1.0,
        config={},
        xla_flags=None,
        versions={},
    )
