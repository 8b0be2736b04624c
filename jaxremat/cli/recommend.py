"""The command `python -m jaxremat recommend`: which GPUs to rent, how many, which mesh and policy, how fast, at what cost.

    python -m jaxremat recommend --model llama3-8b --seq-len 4096 --global-batch 512 --price prices.toml

For each target and number of devices there is a trial of `python -m jaxremat.run --mesh auto` for each policy. Then there is one
for `none` on the best mesh, which says whether checkpointing is needed at all. The trials run in processes of their own, and
their records are kept in --out. However the command ends, the same command goes on from there.

Exit codes: 0, 1 something failed, 2 usage, 3 nothing fits on any of the GPUs, 130 interrupted (finished trials are kept).
"""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxremat.cli.asked_model import asked_model
from jaxremat.cli.command import parse_flags, run_command
from jaxremat.cli.flags import RecommendFlags, RunFlags
from jaxremat.cli.grid import check_how_trials_run, num_jobs, surroundings, trial_of
from jaxremat.cli.many_trials import TrialsProgress, forget_failed, interrupted_once
from jaxremat.cli.output import note, say_notes
from jaxremat.cli.price_file import read_prices
from jaxremat.cli.request import MESH_AUTO
from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.files import cache_folder, check_outputs, named_by
from jaxremat.trial.queue import SweepTrial, answer_of, outcome_of
from jaxremat.trial.recommendation import NONE_TEXT, RecommendationRecord, fastest, recommendation
from jaxremat.trial.record import Record, TrialRecord
from jaxremat.xla.gpu import bundled_names, load_gpu
from jaxremat.xla.installed import check_aot_wheels
from jaxremat.xla.results import ignore_older_results

if TYPE_CHECKING:
    from jaxremat.trial.store import Store

_DEVICES = (1, 8, 16, 64)
#: Outcomes of trials that may end otherwise when they are done again.
_BROKE = ("oom", "timeout", "crashed")


@dataclass(frozen=True)
class Cell:
    """A number of GPUs of one kind, and the trials of its policies, each with `--mesh auto`.

    Attributes:
        target: the name of the GPU.
        num_devices: how many of them.
        flags: the flags of its trials, without a policy.
        trials: by policy, its trial.
    """

    target: str
    num_devices: int
    flags: RunFlags
    trials: dict[str, SweepTrial]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def work() -> int:
        flags = parse_flags(RecommendFlags, list(sys.argv[1:] if argv is None else argv), "recommend")
        flags = replace(flags, out=flags.out or in_cache())
        check_outputs(flags)
        prices = read_prices(flags.price, _known_names(flags)) if flags.price else {}
        cells = cells_of(flags)
        if flags.fresh:
            ignore_older_results()
        with interrupted_once():
            return recommend(flags, cells, prices)

    return run_command(work, kept="finished trials were kept, and the same command goes on from there")


def in_cache() -> Path:
    """The file of the records without --out, in the user's cache.

    Raises:
        UsageError: the folder of the cache can't be made.
    """
    path = cache_folder() / "recommend.jsonl"
    with named_by("--out", path, "give a file that is yours: --out recommend.jsonl", UsageError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _known_names(flags: RecommendFlags) -> list[str]:
    """The names that may have a price: the bundled GPUs, and those of files that are asked for."""
    return list(dict.fromkeys([*bundled_names(), *(load_gpu(name)[0] for name in _targets(flags))]))


def _targets(flags: RecommendFlags) -> list[str]:
    """The targets to compare.

    Raises:
        UsageError: a target isn't known, or is in this machine.
    """
    targets = list(dict.fromkeys(flags.target)) or list(bundled_names())
    for target in targets:
        if target in ("gpu", "cpu"):
            raise UsageError(
                f"--target {target} is in this machine, and GPUs to rent are compared by predicted times",
                next_step="name it, such as --target h100-80gb; measure here with python -m jaxremat.run",
            )
        load_gpu(target)
    return targets


def cells_of(flags: RecommendFlags) -> list[Cell]:
    """The rows of the table with their trials.

    Raises:
        UsageError: a value isn't valid in any trial, or a policy in none of its own.
        MissingDependencyError: the wheels to compile for GPUs that aren't here aren't installed.
    """
    numbers = {"--jobs": flags.jobs, "--timeout": flags.timeout}
    check_how_trials_run(numbers, fresh=flags.fresh, retry_failed=flags.retry_failed)
    policies = list(dict.fromkeys(flags.policy)) or ["auto"]
    shared = {f.name: getattr(flags, f.name) for f in dataclasses.fields(RunFlags) if hasattr(flags, f.name)}
    own = {"out": None, "json": False, "fresh": False, "target": None, "devices": None, "policy": (), "mesh": MESH_AUTO}
    basis = _with_short_compiles(RunFlags(**{**shared, **own, "xla_preset": (flags.xla_preset,)}))
    around, errors = surroundings(), {policy: list[UsageError | None]() for policy in policies}
    cells = []
    for target, num_devices in itertools.product(_targets(flags), flags.devices or _DEVICES):
        asked, trials = replace(basis, target=target, devices=num_devices), {}
        for policy in policies:
            trials[policy], error = trial_of(replace(asked, policy=(policy,)), policy, flags.xla_preset, around)
            errors[policy].append(error)
        cells.append(Cell(load_gpu(target)[0], num_devices, asked, trials))
    for found in errors.values():
        if found[0] and None not in found:
            raise found[0]
    check_aot_wheels()
    return cells


def _with_short_compiles(flags: RunFlags) -> RunFlags:
    """The flags of a decoder with a chunked loss and with its layers in a loop, unless they say otherwise."""
    if not isinstance(asked_model(flags).model, ModelConfig):
        return flags
    training, fields = flags.training, flags.fields
    if training.loss is None:
        training = replace(training, loss="chunked")
    if fields.scan_layers is None:
        fields = replace(fields, scan_layers=True)
    return replace(flags, training=training, fields=fields)


def recommend(flags: RecommendFlags, cells: Sequence[Cell], prices: dict[str, float]) -> int:
    """Runs the trials that aren't in the store, shows the rows, and returns the exit code.

    The rows whose trials are finished are shown even if an interrupt or an error ends the command.
    """
    from jaxremat.trial.store import Store

    assert flags.out
    with Store(flags.out, fresh=flags.fresh) as store:
        say_notes(store)
        compared = {trial.key: trial for cell in cells for trial in cell.trials.values()}
        run_trials = functools.partial(_run_trials, flags, store)
        try:
            run_trials(list(compared.values()))
            run_trials([trial for cell in cells if (trial := none_trial(store, cell))])
        finally:
            store.refresh()
            rows = rows_of(store, cells, prices)
            show(flags, rows, is_complete=len(rows) == len(cells))
            say_notes(store)
        ended = [some for cell in cells for some in (*_records(store, cell).values(), _none_records(store, cell)) if some]
        broke = any(outcome_of(records) in _BROKE for records in ended)
    if any(row.fits for row in rows):
        return int(broke)
    return 1 if any(row.error for row in rows) else 3


def _run_trials(flags: RecommendFlags, store: "Store", trials: Sequence[SweepTrial]) -> None:
    """Runs the trials that aren't in the store.

    Raises:
        JaxrematError: the records of a trial couldn't be stored. They are printed to stderr, so that they aren't lost.
    """
    from jaxremat.cli.processes import COMMAND
    from jaxremat.report.progress import Progress
    from jaxremat.report.screen import shared_screen
    from jaxremat.trial.lines import to_json
    from jaxremat.trial.workers import Workers

    if not trials:
        return
    if flags.retry_failed:
        forget_failed(store, trials)
    with Progress(shared_screen().progress) as progress, Workers(COMMAND) as workers:
        watched = TrialsProgress(progress, trials, store)
        queue = watched.queue(trials, store, num_at_once=num_jobs(flags.jobs), timeout_s=flags.timeout)
        try:
            queue.run(workers)
        finally:
            for record in queue.unwritten:
                note(to_json(record))


def none_trial(store: "Store", cell: Cell) -> SweepTrial | None:
    """The trial of the policy `none` on the mesh of the cell's answer.

    None if there is no answer, or if `none` was asked for and its own answer is on that mesh.
    """
    answers = _answers(store, cell)
    best, asked_none = fastest(answers.values()), answers.get(NONE_TEXT)
    if best is None or (asked_none and asked_none.mesh == best.mesh):
        return None
    on_mesh = {"mesh": best.mesh, "devices": cell.num_devices} if best.mesh else {"mesh": None, "devices": None}
    asked = replace(cell.flags, **on_mesh, policy=(NONE_TEXT,))
    return trial_of(asked, NONE_TEXT, best.xla_preset, surroundings())[0]


def _answers(store: "Store", cell: Cell) -> dict[str, TrialRecord | None]:
    """By policy, the answer of its trial. Those whose trials aren't in the store are left out."""
    found = {policy: store.trial(trial.key) for policy, trial in cell.trials.items()}
    return {policy: answer_of(records) for policy, records in found.items() if records is not None}


def _records(store: "Store", cell: Cell) -> dict[str, tuple[Record, ...]]:
    """By policy, the records of its trial. Trials that aren't in the store are left out."""
    return {policy: found for policy, trial in cell.trials.items() if (found := store.trial(trial.key)) is not None}


def _none_records(store: "Store", cell: Cell) -> tuple[Record, ...]:
    """The records of the `none_trial`. Empty if there is none, or if it isn't in the store."""
    trial = none_trial(store, cell)
    return (trial and store.trial(trial.key)) or ()


def rows_of(store: "Store", cells: Sequence[Cell], prices: dict[str, float]) -> list[RecommendationRecord]:
    """The rows whose trials are in the store. The `none_trial` of a row may still be missing."""
    rows = []
    for cell in cells:
        records = _records(store, cell)
        if records.keys() >= cell.trials.keys():
            (model,) = {trial.model for trial in cell.trials.values()}
            about, none = (model, cell.target, cell.num_devices), _none_records(store, cell)
            rows.append(recommendation(*about, records, prices.get(cell.target), none=none))
    return rows


def show(flags: RecommendFlags, rows: Sequence[RecommendationRecord], *, is_complete: bool) -> None:
    """Prints the rows: a record each with --json, and else the table with its sentences.

    Args:
        flags: the flags.
        rows: the rows.
        is_complete: whether there is a row for each cell.
    """
    from jaxremat.report.recommend import best_sentences, explanations, policies_in_full, ranked, recommend_table
    from jaxremat.report.screen import print_text, shared_screen

    by_cost = flags.price is not None
    rows = ranked(rows, by_cost=by_cost)
    if flags.json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row), allow_nan=False), flush=True)
        return
    if not rows:
        return
    console = shared_screen().results
    seq_len = next((row.seq_len for row in rows if row.seq_len), None)
    parts = [rows[0].model, *([f"sequence {seq_len}"] if seq_len else [])]
    parts += [f"global batch {flags.global_batch}"] if flags.global_batch else []
    print_text(console, *best_sentences(rows, by_cost=by_cost, is_complete=is_complete))
    console.print()
    title = f"what to rent for {', '.join(parts)}"
    console.print(recommend_table(rows, title, by_cost=by_cost, width=console.width))
    print_text(console, *explanations(rows, by_cost=by_cost))
    for line in policies_in_full(rows):
        console.print(line, soft_wrap=True)
