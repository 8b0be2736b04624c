"""What differs between two lists of records: bytes, FLOPs and predicted times.

    changed = compared(before, after)
    changed.steps[0].total_bytes     # (5433720832, 5701632000)

Records of one request are compared: the same model, policy as it was requested, target, mesh, batch, length, loss and optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from jaxremat.trial.record import ExplainRecord, FailureRecord, LargestBatchRecord, Record, TrialRecord

#: A number of both sides; None where one has none.
Pair = tuple[float | None, float | None]
IntPair = tuple[int | None, int | None]
#: The records that are compared.
Compared = TrialRecord | ExplainRecord | LargestBatchRecord | FailureRecord
_STEP = "batch mesh accumulate num_devices seq_len loss layout optimizer grad_dtype attention xla_preset"
#: By kind of record, what makes its request beside the kind, the model, the policy and the target.
_FIELDS = {
    TrialRecord: _STEP,
    ExplainRecord: _STEP,
    LargestBatchRecord: "mesh global_batch max_batch seq_len loss layout optimizer xla_preset",
    FailureRecord: "batch outcome",
}
#: A request, as JSON has it: its kind, model, policy and target, then the fields of `_FIELDS`.
Request = tuple[object, ...]
Requests = dict[Request, Compared]


@dataclass(frozen=True)
class StepChange:
    """One step on both sides.

    Attributes:
        step: the policy as it was requested, and what else the step is.
        error: why a side has no step; None where both have one.
        total_bytes: XLA's total for a device.
        executed_flops: FLOPs that the step executes on a device.
        step_s: predicted seconds of a step.
        largest_batch: the largest batch, in the row of a search.
        record: `step`.
    """

    step: str
    error: tuple[str | None, str | None] = (None, None)
    total_bytes: IntPair = (None, None)
    executed_flops: IntPair = (None, None)
    step_s: Pair = (None, None)
    largest_batch: IntPair = (None, None)
    record: Literal["step"] = "step"

    @property
    def differs(self) -> bool:
        """Whether anything of the two sides differs."""
        pairs = (self.error, self.total_bytes, self.executed_flops, self.step_s, self.largest_batch)
        return any(before != after for before, after in pairs)


@dataclass(frozen=True)
class PeakChange:
    """The bytes at the peak of one category and label of one step, where they differ.

    Attributes:
        step: the step, as in `StepChange`.
        category: what the bytes are for.
        label: a readable name.
        num_bytes: the bytes on both sides; 0 where a side has none.
        shapes: dtype and dimensions of each buffer on both sides; empty where a side has none, or several.
        source: `file:line` of the later side, or of the first where that has none.
        record: `peak`.
    """

    step: str
    category: str
    label: str
    num_bytes: tuple[int, int]
    shapes: tuple[str, str] = ("", "")
    source: str = ""
    record: Literal["peak"] = "peak"


@dataclass(frozen=True)
class Changes:
    """All that `compared` found.

    Attributes:
        steps: the steps that both sides have, in the order of the first.
        at_peak: where the bytes at the peak differ, the largest difference of a step first.
        only: the steps that one side alone has: those of the first, and those of the second.
        versions: by library, the two versions, where they differ.
    """

    steps: tuple[StepChange, ...]
    at_peak: tuple[PeakChange, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    versions: dict[str, tuple[str | None, str | None]]

    @property
    def differs(self) -> bool:
        """Whether a step differs, or is on one side alone."""
        return bool(any(step.differs for step in self.steps) or self.at_peak or any(self.only))


def compared(before: Sequence[Record], after: Sequence[Record]) -> Changes:
    """Compares two lists of records.

    Of several records of one request the last one counts. Plans and probes aren't compared.
    """
    sides = [_requests(side) for side in (before, after)]
    titles = _titles(sides[0] | sides[1])
    pairs = [(titles[request], record, sides[1][request]) for request, record in sides[0].items() if request in sides[1]]
    only = [tuple(titles[request] for request in sides[n] if request not in sides[1 - n]) for n in (0, 1)]
    one, other = ([*side.values()][-1].versions if side else {} for side in sides)
    return Changes(
        steps=tuple(_step(*pair) for pair in pairs if not isinstance(pair[1], ExplainRecord) or any(_errors(*pair[1:]))),
        at_peak=tuple(
            change
            for title, first, second in pairs
            if isinstance(first, ExplainRecord) and isinstance(second, ExplainRecord) and not any(_errors(first, second))
            for change in _at_peak(title, first, second)
        ),
        only=(only[0], only[1]),
        versions={name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)},
    )


def is_compared(record: Record) -> TypeGuard[Compared]:
    """Whether a record is of a kind that is compared. Plans and probes aren't."""
    return isinstance(record, Compared) and record.record != "probe"


def _requests(records: Sequence[Record]) -> Requests:
    """The records that are compared, by what each answers.

    Those of two sides belong together where that is equal.
    """
    found: Requests = {}
    for record in records:
        if is_compared(record):
            own = (getattr(record, field) for field in _FIELDS[type(record)].split())
            found[record.record, record.model, record.requested_policy, record.target, *own] = record
    return found


def _titles(requests: Requests) -> dict[Request, str]:
    """Each request in words: `gpt2, dots, batch 8, h100-80gb`.

    Where requests would have the same words, the fields in which they differ follow: `seq len 2048`.
    """
    alike: dict[tuple[object, str], list[Request]] = {}
    for request, record in requests.items():
        alike.setdefault((type(record), _title(record)), []).append(request)
    return {
        request: ", ".join([title, *_apart(_FIELDS[type(requests[request])].split(), request, group)])
        for (_, title), group in alike.items()
        for request in group
    }


def _title(record: Compared) -> str:
    batch = f"batch {record.batch}" if isinstance(record, TrialRecord | ExplainRecord) else "largest batch"
    more = [getattr(record, "mesh", None), f"failed: {record.error}" if isinstance(record, FailureRecord) else None]
    return ", ".join([record.model, record.requested_policy, batch, record.target, *filter(None, more)])


def _apart(names: Sequence[str], request: Request, group: Sequence[Request]) -> list[str]:
    """The fields of a request in which those of its group differ."""
    values = [dict(zip(names, other[-len(names) :], strict=True)) for other in group]
    own = values[group.index(request)]
    return [f"{name.replace('_', ' ')} {own[name]}" for name in names if len({value[name] for value in values}) > 1]


def _errors(*records: Compared) -> list[str | None]:
    return [getattr(record, "error", None) for record in records]


def _step(title: str, before: Compared, after: Compared) -> StepChange:
    """The change of a step or of a search."""

    def pair(name: str) -> Any:
        return getattr(before, name, None), getattr(after, name, None)

    is_search = isinstance(before, LargestBatchRecord)
    return StepChange(
        step=title,
        error=pair("error"),
        total_bytes=pair("largest_batch_total_bytes" if is_search else "total_bytes"),
        executed_flops=pair("executed_flops"),
        step_s=pair("predicted_step_s"),
        largest_batch=pair("largest_batch"),
    )


def _at_peak(title: str, before: ExplainRecord, after: ExplainRecord) -> list[PeakChange]:
    """The changes of one step by category and label, gaps too, the largest difference first."""
    sides = [
        {
            **{
                (part.category, part.label): (part.num_bytes, part.shape or "", part.source or "")
                for part in side.held or ()
            },
            ("gaps", ""): ((side.attribution or {}).get("gaps", 0), "", ""),
        }
        for side in (before, after)
    ]
    pairs = {key: [side.get(key, (0, "", "")) for side in sides] for key in {**sides[0], **sides[1]}}
    changed = [
        PeakChange(title, *key, num_bytes=(one[0], other[0]), shapes=(one[1], other[1]), source=other[2] or one[2])
        for key, (one, other) in pairs.items()
        if one[0] != other[0]
    ]
    return sorted(changed, key=lambda change: -abs(change.num_bytes[1] - change.num_bytes[0]))
