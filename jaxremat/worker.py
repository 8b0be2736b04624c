"""The process of one trial: `python -m jaxremat.worker TASK RESULT`. Not for people; `run` and `sweep` start it.

It does what `run` would for one policy and one batch, or the search for the largest, and leaves the records in its result
file. Rows that a device here is to measure it leaves to others: each is compiled again and run in a process that did nothing
before, so that the allocator's peak is that step's, and a device that ran out of memory harms nobody.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxremat.errors import CompileError, JaxrematError, UsageError
from jaxremat.flags import ModelFlags, Request, RunFlags, TrainFlags, check_flags
from jaxremat.machine.outside import reading_or_none
from jaxremat.run import (
    Answer,
    Frontier,
    answer_here,
    planned_job,
    prepare,
    resolve_names,
    set_up_process,
    with_default_batch,
)
from jaxremat.trial.headroom import learn
from jaxremat.trial.plan_file import PlanFile
from jaxremat.trial.process import Workers
from jaxremat.trial.queue import SweepTrial, run_trial
from jaxremat.trial.record import LargestBatchRecord, Record, TrialRecord, is_out_of_memory
from jaxremat.trial.task import Result, Task, read_task, write_result

if TYPE_CHECKING:
    from jaxremat.trial.trial import Run

COMMAND = (sys.executable, "-m", "jaxremat.worker")


def main() -> int:
    """Works on the task; what it knows how to name goes into the result, the rest is a traceback for the parent to show."""
    task, result = (Path(argument) for argument in sys.argv[1:])
    write_result(result, work(read_task(task)))
    return 0


def work(task: Task) -> Result:
    """The result of a task: its records, or how it failed."""
    try:
        flags = as_flags(task.flags)
        request = check_flags(flags)
        set_up_process(flags)
        if task.measure:
            return Result(outcome="ok", records=(_measure(request, task.measure),))
        return _answer(request)
    except JaxrematError as error:
        return Result(outcome="bad-config" if isinstance(error, UsageError | CompileError) else "crashed", error=str(error))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not is_out_of_memory(said):
            raise
        return Result(outcome="oom", error=said.splitlines()[0][:300])


def _answer(request: Request) -> Result:
    """The records of the one policy, with those that are to be measured, or with a search that is to be confirmed.

    A search on an attached GPU is confirmed by runs, unless the budget is one's own and not the device's.
    """
    from jaxremat.xla.target import load_target

    target = load_target(request.flags.target)
    job, _ = prepare(request, target)
    request = with_default_batch(request, target)
    ((requested, policy),) = [("frontier", Frontier())] if request.flags.frontier else resolve_names(request, job)
    records: list[Record] = []
    answer_here(replace(job, measures=False), requested, policy, request, records.append, _show)
    found = [record for record in records if isinstance(record, LargestBatchRecord) and record.largest_batch]
    if found and target.kind == "attached" and request.budget_bytes is None:
        return Result(outcome="ok", records=tuple(records), confirm=True)
    to_measure = tuple(
        number
        for number, record in enumerate(records)
        if target.kind != "deviceless" and isinstance(record, TrialRecord) and record.record == "trial" and record.fits
    )
    return Result(outcome="ok", records=tuple(records), to_measure=to_measure)


def _measure(request: Request, trial: TrialRecord) -> TrialRecord:
    """The trial compiled again and run, whether or not it should fit."""
    from jaxremat.config import ModelConfig, TrainConfig
    from jaxremat.policy.spec import parse
    from jaxremat.trial.attention import AttentionChoice
    from jaxremat.trial.trial import PolicyTrials
    from jaxremat.xla.target import load_target

    before = reading_or_none() if request.flags.target != "cpu" else None
    target = load_target(request.flags.target)
    job, _ = prepare(request, target, AttentionChoice(trial.attention, ""))
    job: Run = replace(
        job,
        model=msgspec.convert(trial.config["model"], ModelConfig),
        train=msgspec.convert(trial.config["train"], TrainConfig),
        budget_bytes=trial.budget_bytes,
        budget_terms=trial.budget_terms,
        global_batch=None,
    )
    trials = PolicyTrials(
        job,
        trial.requested_policy,
        parse(trial.policy),
        on_step=lambda batch, n: _show(f"batch {batch}, step {n}"),
        before=before,
    )
    return trials.record(trial.batch, "trial", anyway=True)


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the parent shows the last line


def as_flags(found: dict[str, Any]) -> RunFlags:
    """The flags that a task holds."""
    flags = msgspec.convert(found, RunFlags)
    return replace(
        flags, training=msgspec.convert(flags.training, TrainFlags), fields=msgspec.convert(flags.fields, ModelFlags)
    )


def task_of(flags: RunFlags, policy: str, batch: int | None) -> Task:
    """The task of one policy and batch, or of the search for the largest; what is the parent's alone is left out."""
    if policy != "auto":
        flags = replace(flags, objective="time", offload=False)
    one = replace(
        flags,
        policy=((policy,),) if policy != "frontier" else (),
        batch=((str(batch),),) if batch else (),
        explain_plan=False,
        out=None,
        plot=None,
        save_plan=None,
        dump_target=None,
    )
    return Task(dataclasses.asdict(one))


@contextlib.contextmanager
def in_processes_of_their_own(environment: dict[str, str]) -> Iterator[Answer]:
    """What `answer_here` does, each batch of a policy in processes that begin with `environment`.

    What the runs teach of the device is kept after them all, so that one budget holds for the whole command.
    """
    records: list[Record] = []
    with Workers(COMMAND, environment) as workers:

        def answer(
            job: "Run",
            requested: str,
            policy: Any,
            request: Request,
            emit: Callable[[Record], None],
            show: Callable[[str], None],
        ) -> None:
            if isinstance(policy, PlanFile):
                planned_job(job, policy, request)  # says what its proof doesn't cover
            for batch in request.batches or (None,):
                task = task_of(request.flags, requested, batch)
                config = {"model": dataclasses.asdict(job.model), "train": dataclasses.asdict(job.train)}
                asked = SweepTrial("", job.model.name, requested, job.target.name, batch, task, config, alone=True)
                shown = [""]

                def tell(line: str, shown: list[str] = shown) -> None:
                    if line and line != shown[-1]:
                        shown.append(line)
                        show(line)

                for record in run_trial(asked, workers, float("inf"), tell):
                    records.append(record)
                    emit(record)

        try:
            yield answer
        finally:
            if note := learn(records):
                print(f"jaxremat: {note}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
