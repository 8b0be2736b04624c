"""The largest batch, run: compiled bytes say what should fit, a process on the device shows what does.

The largest batch is run in a fresh process, and the next one is watched failing there. Where the largest one runs out of
memory, the search goes down by runs, in doubling steps and then by halves, until one runs and the next one doesn't.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxremat.config import divisors
from jaxremat.trial.record import Outcome

Row = dict[str, Any]


def next_to_run(ran: Mapping[int, Outcome], largest: int, after: int | None, smaller: Sequence[int]) -> int | None:
    """The batch to run next, None when all is said; also after a crash or a timeout, which say nothing of memory.

    Args:
        ran: what came of the batches run so far.
        largest: the largest batch by compiled bytes.
        after: the one after it, over the budget.
        smaller: the batches below `largest`, ascending.
    """
    if not set(ran.values()) <= {"ok", "oom"}:
        return None
    if largest not in ran:
        return largest
    if ran[largest] == "ok":
        return after if after not in ran else None
    worked = max((batch for batch in ran if ran[batch] == "ok"), default=0)
    failed = min(batch for batch in ran if ran[batch] == "oom")
    between = [batch for batch in smaller if worked < batch < failed]
    if not between:
        return None
    return between[len(between) // 2] if worked else between[max(0, len(between) - 2 ** (len(ran) - 1))]


def smaller_batches(found: Row) -> list[int]:
    """The batches below the largest of a `largest_batch` record, ascending."""
    largest, whole = found["largest_batch"], found["global_batch"]
    return [batch for batch in (divisors(whole) if whole is not None else range(1, largest)) if batch < largest]


def settle(found: Row, rows: Mapping[int, Row]) -> Row:
    """What the runs change in a `largest_batch` record.

    Args:
        found: the record, by compiled bytes.
        rows: the trials that were run, by batch.
    """
    ran = {batch: row["ran"] for batch, row in rows.items()}
    largest, after = found["largest_batch"], found["next_batch"]
    if ran[largest] != "oom" or not set(ran.values()) <= {"ok", "oom"}:
        return {"ran": ran[largest], "next_ran": ran.get(after)}
    worked = max((batch for batch in ran if ran[batch] == "ok"), default=0)
    failed = min(batch for batch in ran if ran[batch] == "oom")
    return {
        "compiled_largest_batch": largest,
        "largest_batch": worked,
        "largest_batch_total_bytes": rows[worked]["total_bytes"] if worked else None,
        "next_batch": failed,
        "next_batch_total_bytes": rows[failed]["total_bytes"],
        "ran": "ok" if worked else None,
        "next_ran": "oom",
    }
