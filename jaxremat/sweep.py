"""Many trials: `python -m jaxremat.sweep --model gpt2 gpt2-xl --policy dots nothing auto --target h100-80gb h200 --out FILE`.

Each model under each policy, at each batch or at the largest that fits, on each target, in processes of their own, so that
an out-of-memory, a hang or a crash is one row of FILE. However a sweep ends, the same command goes on where it was; a second
one over the same FILE takes part in the work.

Exit codes: 0; 1 something failed; 2 usage; 3 nothing that was asked for fits; 130 interrupted (finished trials are kept).
"""

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxremat.command import parse_flags, run_command
from jaxremat.errors import JaxrematError, MissingDependencyError, UsageError
from jaxremat.grid import SweepFlags, check_sweep, num_jobs, trials_of

if TYPE_CHECKING:
    from jaxremat.report.progress import Progress
    from jaxremat.report.sweep import Line
    from jaxremat.trial.queue import SweepTrial
    from jaxremat.trial.record import Outcome
    from jaxremat.trial.store import Store

FAILED = ("oom", "timeout", "crashed", "bad-config")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        flags = parse_flags(SweepFlags, arguments, "jaxremat.sweep")
        check_sweep(flags)
        trials = trials_of(flags)
        if flags.submit:
            return submit(flags, arguments)
        with interrupted_once():
            return sweep(flags, trials)

    return run_command(work, kept="finished trials were kept, and the same command goes on from there")


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """SIGTERM, which array jobs get before they are killed, is a Ctrl-C; and a second one doesn't disturb the tidying up."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]  # a background job's

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def sweep(flags: SweepFlags, trials: "list[SweepTrial]") -> int:
    """Runs the trials that aren't in the store, shows them all, and returns the exit code; also when interrupted, or stuck."""
    from rich.console import Console

    from jaxremat.files import check_writable
    from jaxremat.report.progress import Progress
    from jaxremat.report.sweep import write_csv
    from jaxremat.trial.lines import to_json
    from jaxremat.trial.process import Workers
    from jaxremat.trial.queue import Queue
    from jaxremat.trial.store import Store
    from jaxremat.worker import COMMAND

    if flags.csv:
        check_writable("--csv", flags.csv)
    ended: list[SweepTrial] = []
    with Store(flags.out, fresh=flags.fresh) as store:
        if flags.retry_failed:
            forget_failed(store, trials)
        queue = None
        try:
            with Progress(Console(stderr=True)) as progress, Workers(COMMAND) as workers:
                queue = Queue(
                    trials,
                    store,
                    num_at_once=num_jobs(flags),
                    timeout_s=flags.timeout,
                    **told(progress, trials, store, flags, ended),
                )
                queue.run(workers)
        finally:
            store.refresh()  # an interrupt may come between writing a row and knowing of it
            lines = lines_of(store, trials)
            show(lines)
            if note := learn_headroom(store, ended):
                print(f"jaxremat: {note}", file=sys.stderr)
            for note in dict.fromkeys(store.notes):
                print(f"jaxremat: {note}", file=sys.stderr)
            for record in queue.unwritten if queue else ():
                print(to_json(record))  # the disk is full: this is where they are not lost
            if flags.csv and lines:
                write_csv(lines, flags.csv)
    outcomes = [line.outcome for line in lines]
    if any(outcome in FAILED for outcome in outcomes):
        return 1
    return 0 if "ok" in outcomes or not trials else 3


def forget_failed(store: "Store", trials: "list[SweepTrial]") -> None:
    """Makes the store take failed trials for undone."""
    from jaxremat.trial.queue import outcome_of

    for trial in trials:
        if (records := store.trial(trial.key)) and outcome_of(records) in FAILED:
            store.forget(trial.key)


def learn_headroom(store: "Store", ended: "list[SweepTrial]") -> str:
    """Keeps what the trials run here teach of the device; after them all, so that one budget holds for the whole sweep."""
    from jaxremat.trial.headroom import learn

    return learn(record for trial in ended for record in store.trial(trial.key) or ())


def told(
    progress: "Progress", trials: "list[SweepTrial]", store: "Store", flags: SweepFlags, ended: "list[SweepTrial]"
) -> dict[str, Any]:
    """What a queue tells, as lines on stderr, and what it is at as the live line; `ended` gets the trials that ran here."""
    running: set[str] = set()
    done = sum(store.trial(trial.key) is not None for trial in trials)
    of_all = f" (shard {flags.shard})" if flags.shard else ""
    progress.line(f"{len(trials)} trials{of_all}, {done} of them done before; records go to {flags.out}")

    def left() -> str:
        waiting = len(trials) - done - len(running)
        return f"{done} of {len(trials)} done, {len(running)} running, {waiting} waiting"

    def on_start(trial: "SweepTrial") -> None:
        running.add(trial.key)
        progress.line(f"started: {trial}; {left()}")

    def on_end(trial: "SweepTrial", outcome: "Outcome", duration_s: float) -> None:
        nonlocal done
        done += 1
        if trial.key in running:
            ended.append(trial)
        how = f"{outcome}, {duration_s:.1f} s" if trial.key in running else f"{outcome}, by another process"
        running.discard(trial.key)
        progress.line(f"{how}: {trial}; {left()}")

    def on_tick(now: "list[tuple[SweepTrial, str]]") -> None:
        doing = "; ".join(f"{trial.model}, {trial.target}, {line or trial.policy}" for trial, line in now)
        progress.status(f"{left()}: {doing or 'waiting for another process'}")

    return {"on_start": on_start, "on_end": on_end, "on_tick": on_tick}


def lines_of(store: "Store", trials: "list[SweepTrial]") -> "list[Line]":
    """The trials that are in the store, in the order asked for."""
    from jaxremat.report.sweep import Line
    from jaxremat.trial.queue import outcome_of

    found = [(trial, store.trial(trial.key)) for trial in trials]
    return [
        Line(trial.key, trial.model, trial.policy, trial.target, trial.batch, outcome_of(records), records)
        for trial, records in found
        if records is not None
    ]


def show(lines: "list[Line]") -> None:
    """A table for each model and target, what failed, and where the times come from."""
    from rich.console import Console

    from jaxremat.report.sweep import failure_sentences, sweep_table
    from jaxremat.report.table import rank_sentence, source_sentence
    from jaxremat.trial.ranks import rank_records

    console = Console(file=sys.stdout)
    for _, group in itertools.groupby(lines, key=lambda line: (line.model, line.target)):
        of_one = list(group)
        console.print(sweep_table(of_one))
        for found in rank_records([line.answer for line in of_one if line.answer]):
            console.print(rank_sentence(found), markup=False, highlight=False)
        console.print()
    for sentence in failure_sentences(lines):
        console.print(sentence, markup=False, highlight=False)
    if answers := [line.answer for line in lines if line.answer]:
        targets = ", ".join(dict.fromkeys(row.target for row in answers if row.step_source == "predicted"))
        console.print(source_sentence(answers, targets), markup=False, highlight=False)


def submit(flags: SweepFlags, arguments: list[str]) -> int:
    """Submits the shards as an array job; returns when they are queued."""
    try:
        import submitit
    except ImportError:
        raise MissingDependencyError(
            "--submit needs submitit", cause="the slurm extra isn't installed", next_step='pip install "jaxremat[slurm]"'
        ) from None
    assert flags.submit
    pairs = [word.partition("=") for group in flags.slurm for word in group]
    if bad := ["".join(pair) for pair in pairs if not pair[1]]:
        raise UsageError(f"--slurm got {bad[0]!r}", allowed="KEY=VALUE", next_step="--slurm timeout_min=240 cpus_per_task=8")
    own = without_submission(arguments)
    try:
        executor = submitit.AutoExecutor(folder=flags.submit, cluster=flags.cluster)
        executor.update_parameters(
            name="jaxremat-sweep", **{name: int(value) if value.isdigit() else value for name, _, value in pairs}
        )
        with executor.batch():
            submitted = [
                executor.submit(
                    submitit.helpers.CommandFunction(
                        [sys.executable, "-m", "jaxremat.sweep", *own, "--shard", f"{i + 1}/{flags.num_shards}"]
                    )
                )
                for i in range(flags.num_shards)
            ]
    except (RuntimeError, OSError, NameError, ValueError, TypeError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise JaxrematError(
            f"submitit refused the array job: {said}", next_step="see --slurm and --cluster in --help"
        ) from None
    print(f"submitted: {', '.join(job.job_id for job in submitted)}; logs in {flags.submit}, records go to {flags.out}")
    print("The same command without --submit shows what is done, and takes part in the rest.")
    return 0


def without_submission(arguments: Sequence[str]) -> list[str]:
    """The command line of a shard: without the flags that are the submission's, and without --csv, which all would write."""
    kept, drop = list[str](), False
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.partition("=")[0].replace("_", "-")
            drop = name in ("--submit", "--num-shards", "--slurm", "--cluster", "--csv")
        if not drop:
            kept.append(argument)
    return kept


if __name__ == "__main__":
    sys.exit(main())
