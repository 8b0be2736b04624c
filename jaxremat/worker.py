"""The process of one trial: `python -m jaxremat.worker TASK RESULT`. Not for people; `run` and `sweep` start it.

It does what `run` would do for one policy and one batch, or the search for the largest batch, and leaves the records in its
result file. Rows that a device here is to measure are left to further processes: each is compiled again and run in a process
that did nothing before, so that the allocator's peak is that step's, and a device that ran out of memory harms nobody else.
"""

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxremat.command import set_up_process
from jaxremat.errors import CompileError, JaxrematError, UsageError
from jaxremat.flags import ModelFlags, Request, RunFlags, TrainFlags, check_run
from jaxremat.flow import Listener, answer, note, start
from jaxremat.machine.outside import reading_or_none
from jaxremat.processes import as_json
from jaxremat.trial.process import write_result
from jaxremat.trial.record import LargestBatchRecord, Record, TrialRecord, is_out_of_memory


def main() -> int:
    """Works on the task. An error that has a name goes into the result; another one is a traceback for the parent to show."""
    task, result = (Path(argument) for argument in sys.argv[1:])
    write_result(result, work(json.loads(task.read_text())))
    return 0


def work(task: dict[str, Any]) -> dict[str, Any]:
    """The result of a task: its outcome, with records or with what went wrong."""
    try:
        flags = _as_flags(task["flags"])
        request = check_run(flags)
        set_up_process(flags)
        found = {"records": _measure(request, task["row"]), "then": []} if "row" in task else _answer(request)
    except JaxrematError as error:
        outcome = "bad-config" if isinstance(error, UsageError | CompileError) else "crashed"
        return {"outcome": outcome, "error": str(error)}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not is_out_of_memory(said):
            raise
        return {"outcome": "oom", "error": said.splitlines()[0][:300]}
    return {"outcome": "ok", **found, "records": [dataclasses.asdict(record) for record in found["records"]]}


def _answer(request: Request) -> dict[str, Any]:
    """The records of the one policy, with a task for each that is to be measured, or with what confirms a search.

    A search on an attached GPU is confirmed by runs, unless the budget was asked for and isn't the device's.
    """
    from jaxremat.xla.target import load_target

    target = load_target(request.flags.target)
    started = start(request, target)
    started = replace(started, run=replace(started.run, measures=False))
    (asked,) = started.request.policies
    records: list[Record] = []
    answer(started, asked, Listener(records.append, progress=_show, note=note))
    found = [record for record in records if isinstance(record, LargestBatchRecord) and record.largest_batch]
    if found and target.kind == "attached" and request.budget_bytes is None:
        return {"records": records, "then": [], "confirm": {"flags": as_json(request.flags)}}
    then = [
        {"row": number, "task": {"flags": as_json(request.flags), "row": dataclasses.asdict(record)}}
        for number, record in enumerate(records)
        if target.kind != "deviceless" and isinstance(record, TrialRecord) and record.record == "trial" and record.fits
    ]
    return {"records": records, "then": then}


def _measure(request: Request, row: dict[str, Any]) -> list[Record]:
    """The record of `row`, with what it takes when run, whether or not it should fit."""
    from jaxremat.config import ModelConfig, TrainConfig
    from jaxremat.policy.grammar import parse
    from jaxremat.trial.attention import AttentionChoice
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.xla.target import load_target

    before = reading_or_none() if request.flags.target != "cpu" else None
    started = start(request, load_target(request.flags.target), AttentionChoice(row["attention"], ""))
    run = replace(
        started.run,
        model=ModelConfig(**row["config"]["model"]),
        train=TrainConfig(**row["config"]["train"]),
        budget_bytes=row["budget_bytes"],
        budget_terms=row["budget_terms"],
        global_batch=None,
    )
    trials = PolicyTrials(
        run,
        row["requested_policy"],
        parse(row["policy"]),
        on_step=lambda batch, number: _show(f"batch {batch}, step {number}"),
        before=before,
    )
    return [trials.record(row["batch"], "trial", anyway=True)]


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the parent shows the last line


def _as_flags(found: dict[str, Any]) -> RunFlags:
    words = {name: tuple(tuple(group) for group in found[name]) for name in ("policy", "batch")}
    return RunFlags(
        **{**found, **words, "training": TrainFlags(**found["training"]), "fields": ModelFlags(**found["fields"])}
    )


if __name__ == "__main__":
    sys.exit(main())
