"""The process of one trial: `python -m jaxremat.cli.worker TASK RESULT`.

`run` and `sweep` start it. It isn't for users.

The process reads its task from the file TASK. It does what `run` does for one policy and one batch, or for the search for
the largest batch. It writes the records to the file RESULT.

Such a worker doesn't run the steps that it compiles. Each step to be measured gets a new worker, which compiles the step
again and runs it. So the allocator's peak belongs to that step alone, and running out of device memory harms no other step.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from jaxremat.chips.outside import reading_or_none
from jaxremat.cli.command import set_up_process
from jaxremat.cli.machine.blame import OUT_OF_HOST_MEMORY
from jaxremat.errors import CompileError, JaxrematError, UsageError
from jaxremat.policy.offload import only_our_compiles
from jaxremat.session.flags import ModelFlags, RunFlags, TrainFlags
from jaxremat.session.request import Request, check_run
from jaxremat.session.session import Session, note
from jaxremat.trial.record import LargestBatchRecord, Record, TrialRecord, is_out_of_memory
from jaxremat.trial.task import Result, Task, read_task, write_result


def main() -> int:
    """Does the task and writes the result.

    An unexpected error is a traceback, which the parent process shows.
    """
    task, result = (Path(argument) for argument in sys.argv[1:])
    with only_our_compiles():
        write_result(result, work(read_task(task)))
    return 0


def work(task: Task) -> Result:
    """The result of a task: its records, or how the task failed."""
    try:
        flags = as_flags(task.flags)
        request = check_run(flags)
        set_up_process(flags)
        if task.measure:
            return Result(outcome="ok", records=(_measure(request, task.measure),))
        return _answer(request)
    except JaxrematError as error:
        return Result(outcome="bad-config" if isinstance(error, UsageError | CompileError) else "crashed", error=str(error))
    except Exception as error:
        if isinstance(error, MemoryError):
            return Result(outcome="oom", error=OUT_OF_HOST_MEMORY.got)
        said = f"{type(error).__name__}: {error}"
        if not is_out_of_memory(said):
            raise
        return Result(outcome="oom", error=said.splitlines()[0][:300])


def _answer(request: Request) -> Result:
    """The records of the request's one policy, and which of them are to be measured.

    A search on an attached GPU is confirmed by runs of its batches. If --budget was given, the search isn't confirmed,
    because the budget isn't the device's.
    """
    from jaxremat.chips.target import load_target
    from jaxremat.session.answers import Listener, answer_policy
    from jaxremat.session.meshes import choose_mesh

    listener = Listener((records := list[Record]()).append, progress=_show, note=note)
    if request.meshes:
        record, session = choose_mesh(request, request.policies[0], listener)
        records.append(record)
        if session is None:
            return Result(outcome="ok", records=tuple(records))
    else:
        session = Session.of(request, load_target(request.flags.target, request.mesh))
    target = session.trials.target
    session = session.with_trials(measures=False)
    (requested,) = session.request.policies
    answer_policy(session, requested, listener)
    found = [record for record in records if isinstance(record, LargestBatchRecord) and record.largest_batch]
    can_run = session.trials.can_run
    if found and can_run and target.kind == "attached" and request.budget_bytes is None:
        return Result(outcome="ok", records=tuple(records), confirm=True)
    to_measure = tuple(
        number
        for number, record in enumerate(records)
        if can_run and isinstance(record, TrialRecord) and record.record == "trial" and record.fits
    )
    return Result(outcome="ok", records=tuple(records), to_measure=to_measure)


def _measure(request: Request, trial: TrialRecord) -> TrialRecord:
    """The record of `trial` after its step was compiled again and run.

    The step is run even if it shouldn't fit.
    """
    from jaxremat.chips.target import load_target
    from jaxremat.config import TrainConfig
    from jaxremat.policy.grammar import parse

    before = reading_or_none() if request.flags.target != "cpu" else None
    session = Session.of(request, load_target(request.flags.target, request.mesh), attention=trial.attention)
    session = session.with_trials(
        train=msgspec.convert(trial.config["train"], TrainConfig),
        budget_bytes=trial.budget_bytes,
        budget_terms=trial.budget_terms,
        global_batch=None,
        xla_preset=trial.xla_preset,
        before=before,
        on_step=lambda batch, number: _show(f"batch {batch}, step {number}"),
    )
    trials, policy = session.trials.with_layout(trial.layout), parse(trial.policy)
    return trials.record(policy, trial.batch, requested=trial.requested_policy, anyway=True)


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the parent shows the last line


def as_flags(found: dict[str, Any]) -> RunFlags:
    """The flags of a task, from its dict of plain values."""
    flags = msgspec.convert(found, RunFlags)
    return replace(
        flags, training=msgspec.convert(flags.training, TrainFlags), fields=msgspec.convert(flags.fields, ModelFlags)
    )


if __name__ == "__main__":
    sys.exit(main())
