"""What to rent: a row for a number of GPUs of one kind, made from the records of its trials.

The trials of a row are those of the requested policies. One more trial, of `none`, which saves everything, says whether
checkpointing is needed at all, and what it brings. It is only compared: a row's answer is one of the requested policies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxremat.config import Layout
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.details import AnyRecord
from jaxremat.trial.queue import answer_of, error_of, outcome_of
from jaxremat.trial.record import Record, TrialRecord, picked

#: The share by which a policy must be faster than `none` for checkpointing to be worth it, where no `paired_error` is known.
_WORTH = 0.01
#: The policy that saves everything.
NONE_TEXT = "none"


@dataclass(frozen=True, kw_only=True)
class RecommendationRecord(AnyRecord):
    """The fastest answer for a number of GPUs of one target.

    Bytes and `batch` are those of one device. A workload that doesn't say how many tokens a batch has has its samples in place of
    tokens. Where nothing fits, the step is that of the fewest bytes.

    Attributes:
        target: name of the GPU.
        num_devices: number of GPUs.
        mesh: the mesh; None for one device.
        requested_policy: the policy as it was requested.
        policy: the policy of the step.
        loss: its loss.
        layout: how its layers run; None where the workload decides that itself.
        seq_len: tokens of a sequence; None where that isn't known.
        batch: sequences of a microbatch; None where not even the state fits.
        accumulate: number of microbatches in a step.
        global_batch: sequences of a step on all devices.
        counted: what the rates count.
        tokens_per_s: predicted tokens per second of all devices together.
        tokens_per_s_per_device: those of one device.
        predicted_interval: how much longer a real step may take, as shares of the predicted time.
        paired_error: the share by which predicted times on GPUs of this kind have to differ for one to be the faster.
        fits: whether anything fits.
        total_bytes: XLA's total for the step, or bytes of the state alone; None where no trial has an answer.
        budget_bytes: what a step may take.
        over_bytes: by how much that is over the budget, where nothing fits.
        checkpointing: `needed` where nothing fits under `none` on this mesh, `faster` where another policy has more tokens
            per second, by `paired_error` at least. None where the trial of `none` failed or isn't done yet.
        none_total_bytes: XLA's total at the largest batch under `none`, or at the smallest if none fits.
        none_tokens_per_s: tokens per second at that batch.
        price_per_hour: price of one GPU.
        hours_per_billion: hours of all GPUs for a billion tokens.
        cost_per_billion: what these cost.
        bound_tokens_per_s: of a row that was left out, the most tokens per second of all devices. Rows of as many other devices
            have more.
        error: why trials failed.
    """

    record: Literal["recommendation"] = "recommendation"
    target: str
    num_devices: int
    mesh: str | None = None
    requested_policy: str | None = None
    policy: str | None = None
    loss: str | None = None
    layout: Layout | None = None
    seq_len: int | None = None
    batch: int | None = None
    accumulate: int | None = None
    global_batch: int | None = None
    counted: Literal["tokens", "samples"] = "tokens"
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    predicted_interval: tuple[float, float] | None = None
    paired_error: float | None = None
    fits: bool = False
    total_bytes: int | None = None
    budget_bytes: int | None = None
    over_bytes: int | None = None
    checkpointing: Literal["needed", "faster", "not needed"] | None = None
    none_total_bytes: int | None = None
    none_tokens_per_s: float | None = None
    price_per_hour: float | None = None
    hours_per_billion: float | None = None
    cost_per_billion: float | None = None
    bound_tokens_per_s: float | None = None
    error: str | None = None


def recommendation(
    model: str,
    target: str,
    num_devices: int,
    trials: Mapping[str, Sequence[Record]],
    price_per_hour: float | None = None,
    *,
    none: Sequence[Record] = (),
) -> RecommendationRecord:
    """The row of `num_devices` GPUs of `target`.

    Args:
        model: the model, as it was requested.
        target: the name of the GPU.
        num_devices: how many of them.
        trials: by requested policy, the records of its trial.
        price_per_hour: of one GPU.
        none: the records of `none` that the answer is compared with, if those among `trials` aren't.
    """
    answers = {policy: answer_of(records) for policy, records in trials.items()}
    best = fastest(answers.values())
    compared = answer_of(none) if none else answers.get(NONE_TEXT)
    known: dict[str, Any] = {"target": target, "num_devices": num_devices, "price_per_hour": price_per_hour}
    known |= {"model": best.model if best else model, "error": _errors([*trials.items(), (NONE_TEXT, none)])}
    if best is None:
        return _misfit(known, trials, answers)
    of_all = num_devices * best.rate
    hours = 1e9 / of_all / 3600 if of_all else None
    return RecommendationRecord(
        **known,
        **_of_step(best),
        fits=True,
        counted="samples" if best.tokens_per_s is None else "tokens",
        tokens_per_s=of_all or None,
        tokens_per_s_per_device=best.rate or None,
        **picked(best, "predicted_interval paired_error"),
        **_without_checkpointing(best, compared if compared and compared.mesh == best.mesh else None, num_devices),
        hours_per_billion=hours,
        cost_per_billion=hours * num_devices * price_per_hour if hours and price_per_hour else None,
    )


def fastest(answers: Iterable[TrialRecord | None]) -> TrialRecord | None:
    """The answer of the most tokens per second among those that fit. None if none does."""
    return max((row for row in answers if row and row.outcome == "ok"), key=lambda row: row.rate, default=None)


def flops_per_token(row: TrialRecord) -> float | None:
    """The FLOPs that a device needs for a token, without recomputation.

    None where they aren't known.
    """
    needed = min(filter(None, (row.base_flops, row.model_flops)), default=None)
    return needed / (row.step_s * row.rate) if needed and row.step_s and row.rate else None


def share_between(slower: tuple[float, float] | None, faster: tuple[float, float] | None) -> float:
    """By which share one rate may be below another one before it is the lower one for sure.

    Two kinds of devices have errors of their own: a step of the faster one may take the most time of its interval, and that of
    the slower one the least.
    """
    (_, high), (low, _) = faster or (0.0, 0.0), slower or (0.0, 0.0)
    return (1 + high) / (1 + low) - 1


def _of_step(row: TrialRecord) -> dict[str, Any]:
    """What a row has of the record of its step."""
    names = "requested_policy policy loss layout seq_len batch accumulate global_batch total_bytes budget_bytes"
    return picked(row, names) | {"mesh": row.mesh if row.num_devices > 1 else None}


def _without_checkpointing(best: TrialRecord, none: TrialRecord | None, num_devices: int) -> dict[str, Any]:
    """What the policy `none` takes and reaches, and so whether checkpointing is needed."""
    if none is None or none.total_bytes is None:
        return {}
    if not none.fits:
        return {"checkpointing": "needed", "none_total_bytes": none.total_bytes}
    is_faster = best.rate >= (1 + (best.paired_error or _WORTH)) * none.rate
    return {
        "checkpointing": "faster" if is_faster else "not needed",
        "none_total_bytes": none.total_bytes,
        "none_tokens_per_s": num_devices * none.rate,
    }


def _misfit(
    known: dict[str, Any], trials: Mapping[str, Sequence[Record]], answers: Mapping[str, TrialRecord | None]
) -> RecommendationRecord:
    """The row of GPUs on which nothing fits: by how much, or why there is no answer."""
    found: list[tuple[int, int, dict[str, Any]]] = [
        (row.total_bytes, row.budget_bytes, _of_step(row))
        for row in answers.values()
        if row and row.total_bytes is not None and not row.error
    ]
    if not found and known["error"] is None:
        choices = [record for records in trials.values() for record in records if isinstance(record, MeshChoiceRecord)]
        found = [
            (one.state_bytes, choice.budget_bytes, {"seq_len": choice.seq_len})
            for choice in choices
            for one in choice.meshes
            if one.state_bytes is not None
        ]
    if not found:
        known["error"] = known["error"] or "nothing was compiled"
        return RecommendationRecord(**known)
    total_bytes, budget_bytes, fields = min(found, key=lambda one: one[0])
    fields |= {"total_bytes": total_bytes, "budget_bytes": budget_bytes, "over_bytes": total_bytes - budget_bytes}
    return RecommendationRecord(**known, **fields)


def _errors(trials: Iterable[tuple[str, Sequence[Record]]]) -> str | None:
    """How and why trials failed: `crashed: why (dots, none)`. None if none failed."""
    policies: dict[str, list[str]] = {}
    for policy, records in trials:
        if said := error_of(records):
            policies.setdefault(f"{outcome_of(records)}: {said}", []).append(policy)
    return "; ".join(f"{said} ({', '.join(of_them)})" for said, of_them in policies.items()) or None
