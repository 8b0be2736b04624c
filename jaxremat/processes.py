"""Answers from other processes: each batch of a policy is compiled in one, and each step that is measured runs in one of its own.

An allocator's peak never falls, and a process that ran out of device memory is no place for another step. So on an attached
GPU the command itself only asks the device what it is, and `python -m jaxremat.worker` does the work.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxremat.flags import RunFlags
from jaxremat.flow import Answer, Listener, Start, note, planned_run
from jaxremat.request import Asked
from jaxremat.trial.headroom import learn
from jaxremat.trial.plan_file import PlanFile
from jaxremat.trial.queue import SweepTrial, run_trial
from jaxremat.trial.record import Record
from jaxremat.trial.task import Task
from jaxremat.trial.workers import Workers

COMMAND = (sys.executable, "-m", "jaxremat.worker")


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
def answers_from_processes(environment: dict[str, str]) -> Iterator[Answer]:
    """Yields what does the same as `flow.answer`, in processes whose environment is `environment`.

    What the runs teach of the headroom is kept after all of them, so that one budget holds for the whole command.
    """
    records: list[Record] = []
    with Workers(COMMAND, environment) as workers:

        def answer(start: Start, asked: Asked, listener: Listener) -> None:
            run = start.run
            if isinstance(asked.policy, PlanFile):
                planned_run(start, asked.policy, listener.note)  # for its note alone
            config = {"model": dataclasses.asdict(run.model), "train": dataclasses.asdict(run.train)}
            for batch in start.request.batches or (None,):
                task = task_of(start.request.flags, asked.text, batch)
                trial = SweepTrial("", run.model.name, asked.text, run.target.name, batch, task, config, alone=True)
                for record in run_trial(trial, workers, float("inf"), _changes(listener.progress)):
                    records.append(record)
                    listener.record(record)

        try:
            yield answer
        finally:
            if said := learn(records):
                note(f"jaxremat: {said}")


def _changes(show: Callable[[str], None]) -> Callable[[str], None]:
    """`show`, called only where the line isn't the one before."""
    last = ""

    def show_change(line: str) -> None:
        nonlocal last
        if line and line != last:
            last = line
            show(line)

    return show_change
