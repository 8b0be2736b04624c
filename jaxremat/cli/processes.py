"""Makes answers in other processes.

Each batch of a policy is compiled in one process, and each measured step runs in a process of its own.

There are two reasons. The peak of an allocator never falls, so a second step in a process can't show its own peak. A process
that ran out of device memory can't be trusted to run another step. So on an attached GPU the command itself only finds out
which device it is, and `python -m jaxremat.cli.worker` does the work.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxremat.session.flags import RunFlags
from jaxremat.session.request import RequestedPolicy, without_planning
from jaxremat.session.session import note
from jaxremat.trial.headroom import learn
from jaxremat.trial.queue import SweepTrial, run_trial
from jaxremat.trial.record import Record
from jaxremat.trial.task import Task
from jaxremat.trial.workers import Workers

if TYPE_CHECKING:
    from jaxremat.session.answers import Answering, Listener
    from jaxremat.session.session import Session

COMMAND = (sys.executable, "-m", "jaxremat.cli.worker")


def task_of(flags: RunFlags, policy: str, batch: int | None, xla_preset: str) -> Task:
    """The task of one policy, batch and preset of XLA's options.

    If `batch` is None, it is the search for the largest batch.

    The task leaves out the flags that only the parent process acts on, such as --out and --plot.
    """
    if policy != "auto":
        flags = without_planning(flags)
    one = replace(
        flags,
        policy=(policy,) if policy != "frontier" else (),
        batch=(batch,) if batch else (),
        xla_preset=(xla_preset,),
        explain_plan=False,
        code=False,
        out=None,
        plot=None,
        save_plan=None,
        dump_target=None,
    )
    return Task(dataclasses.asdict(one))


@contextlib.contextmanager
def answers_from_processes(environment: dict[str, str]) -> "Iterator[Answering]":
    """Yields a function that does the same as `answers`, but in other processes.

    The environment of these processes is `environment`.

    The headroom is fitted to the measured steps after all of them, so that the whole command has one budget.
    """
    from jaxremat.session.answers import NOT_ESTIMATED, trials_of

    records: list[Record] = []
    with Workers(COMMAND, environment) as workers:

        def answer(
            session: "Session", requested: RequestedPolicy, listener: "Listener", first_batch: int | None = None
        ) -> Iterator[None]:
            yield from NOT_ESTIMATED  # a process compiles the whole search
            trials = trials_of(session, requested, listener.note)
            config = {"model": trials.factory.config(), "train": dataclasses.asdict(session.trials.train)}
            for batch in session.request.batches or (None,):
                task = task_of(session.request.flags, requested.text, batch, requested.xla_preset)
                trial = SweepTrial(
                    "", trials.factory.name, requested.text, trials.target.name, batch, task, config, alone=True
                )
                for record in run_trial(trial, workers, float("inf"), _changes(listener.progress)):
                    records.append(record)
                    listener.record(record)

        try:
            yield answer
        finally:
            if said := learn(records):
                note(f"jaxremat: {said}")


def _changes(show: Callable[[str], None]) -> Callable[[str], None]:
    """A function that calls `show` with each new line.

    Empty lines, and lines that are the same as the one before, aren't shown.
    """
    last = ""

    def show_change(line: str) -> None:
        nonlocal last
        if line and line != last:
            last = line
            show(line)

    return show_change
