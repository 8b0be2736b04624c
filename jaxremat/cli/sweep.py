"""The command `jaxremat sweep`: many trials, each in processes of its own, in one file.

    jaxremat sweep --model gpt2 gpt2-xl --policy dots nothing auto --target h100-80gb h200 --out sweep.jsonl

There is a trial for each model, policy and target, at each batch, or at the largest batch that fits. If a trial runs out of
memory, hangs or crashes, only its own records in the file are a failure. However a sweep ends, the same command resumes it. A
second sweep that runs over the same file at the same time shares the work.

Exit codes: 0, 1 something failed, 2 usage, 3 nothing that was requested fits, 130 interrupted (finished trials are saved).
"""

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxremat.cli.command import flags_command
from jaxremat.cli.grid import check_sweep, sweep_trials
from jaxremat.cli.many_trials import FAILED, SAVED, run_trials, store_of
from jaxremat.errors import JaxrematError, MissingDependencyError, UsageError
from jaxremat.session.flags import SweepFlags
from jaxremat.system.files import check_outputs

if TYPE_CHECKING:
    from jaxremat.report.sweep import Line
    from jaxremat.trial.queue import SweepTrial
    from jaxremat.trial.store import Store


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return flags_command(SweepFlags, arguments, "sweep", lambda flags: sweep(flags, arguments), saved=SAVED)


def sweep(flags: SweepFlags, arguments: list[str]) -> int:
    """Runs the trials that aren't in the store, shows all, and returns the exit code.

    The finished trials are shown even if an interrupt or an error ends the sweep. With --submit the sweep is only submitted.
    """
    from jaxremat.report.sweep import write_csv

    check_sweep(flags)
    trials = sweep_trials(flags)
    check_outputs(flags)
    if flags.submit:
        return submit(flags, arguments)
    with store_of(flags) as store:
        try:
            run_trials(flags, store, [trials], print)
        finally:
            lines = lines_of(store, trials)
            show(lines)
            if flags.csv and lines:
                write_csv(lines, flags.csv)
    outcomes = [line.outcome for line in lines]
    if any(outcome in FAILED for outcome in outcomes):
        return 1
    return 0 if "ok" in outcomes or not trials else 3


def lines_of(store: "Store", trials: "Sequence[SweepTrial]") -> "list[Line]":
    """The trials that are in the store, in the order of `trials`."""
    from jaxremat.report.sweep import Line
    from jaxremat.trial.queue import outcome_of

    found = [(trial, store.trial(trial.key)) for trial in trials]
    return [Line(trial, outcome_of(records), records) for trial, records in found if records is not None]


def show(lines: "list[Line]") -> None:
    """Prints a table for each model and target, and the trials that failed."""
    from jaxremat.report.policy_text import policies_in_full
    from jaxremat.report.screen import print_text, shared_screen
    from jaxremat.report.sentences import rank_sentence, source_sentence, tied_sentences, unpriced_sentences
    from jaxremat.report.sweep import failure_sentences, sweep_table
    from jaxremat.trial.ranks import rank_records

    console = shared_screen().results
    for _, group in itertools.groupby(lines, key=lambda line: (line.trial.model, line.trial.target)):
        of_one = list(group)
        answers = [line.answer for line in of_one if line.answer]
        console.print(sweep_table(of_one))
        print_text(console, *tied_sentences(answers), *map(rank_sentence, rank_records(answers)))
        for line in policies_in_full(answers):
            console.print(line, soft_wrap=True)
        console.print()
    print_text(console, *failure_sentences(lines))
    if answers := [line.answer for line in lines if line.answer]:
        targets = ", ".join(dict.fromkeys(row.target for row in answers if row.step_source == "predicted"))
        print_text(console, source_sentence(answers, targets), *unpriced_sentences(answers))


def submit(flags: SweepFlags, arguments: list[str]) -> int:
    """Submits the shards as an array job, and returns the exit code as soon as they are queued."""
    from jaxremat.trial.store import Store

    try:
        import submitit
    except ImportError:
        raise MissingDependencyError(
            "--submit needs submitit", cause="the slurm extra isn't installed", next_step='pip install "jaxremat[slurm]"'
        ) from None
    assert flags.submit
    with Store(flags.out):  # which must hold records, or nothing
        pass
    pairs = [word.partition("=") for word in flags.slurm]
    if bad := ["".join(pair) for pair in pairs if not pair[1]]:
        raise UsageError(f"--slurm got {bad[0]!r}", allowed="KEY=VALUE", next_step="--slurm timeout_min=240 cpus_per_task=8")
    own = [sys.executable, "-m", "jaxremat", "sweep", *without_submission(arguments), "--shard"]
    shards = [f"{i + 1}/{flags.num_shards}" for i in range(flags.num_shards)]
    settings = {name: int(value) if value.isdigit() else value for name, _, value in pairs}
    try:
        executor = submitit.AutoExecutor(folder=flags.submit, cluster=flags.cluster)
        executor.update_parameters(name="jaxremat-sweep", **settings)
        with executor.batch():
            submitted = [executor.submit(submitit.helpers.CommandFunction([*own, shard])) for shard in shards]
    except (AssertionError, NameError, TypeError, ValueError, RuntimeError, OSError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, RuntimeError | OSError):
            raise JaxrematError(
                f"submitit rejected the array job: {said}", next_step="see --slurm and --cluster in --help"
            ) from None
        raise UsageError(
            f"--slurm {' '.join(flags.slurm)}: submitit rejected it: {said}",
            allowed="names and values that submitit takes",
            next_step="--slurm timeout_min=240 cpus_per_task=8; names of sbatch begin with slurm_: slurm_partition=gpu",
        ) from None
    print(f"submitted: {', '.join(job.job_id for job in submitted)}; logs in {flags.submit}, records go to {flags.out}")
    print("The same command without --submit shows what is done, and takes part in the rest.")
    return 0


def without_submission(arguments: Sequence[str]) -> list[str]:
    """The command line of a shard: `arguments` without the submission's flags and --csv.

    With --csv all shards would write the same file. `["--out", "f", "--submit", "logs"]` gives `["--out", "f"]`.
    """
    own, drop = list[str](), False
    for argument in arguments:
        if argument.startswith("-"):
            name = argument.partition("=")[0].replace("_", "-")
            drop = name in ("--submit", "--num-shards", "--slurm", "--cluster", "--csv")
        if not drop:
            own.append(argument)
    return own
