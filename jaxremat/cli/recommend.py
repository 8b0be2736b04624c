"""The command `jaxremat recommend`: what to rent, how many, how fast, at what cost.

    jaxremat recommend --model llama3-8b --seq-len 4096 --global-batch 512 --price prices.toml

For each target and number of devices there is a trial of `jaxremat run --mesh auto` for each policy, or without it for
MaxText, whose config has the mesh. On TPUs, where each compile takes minutes, the mesh is `fsdp=N`. Then there is one for
`none` on the best mesh, which says whether checkpointing is needed at all. The trials run in processes of their own, and their
records are saved in --out. However the command ends, the same command resumes it.

Exit codes: 0, 1 something failed, 2 usage, 3 nothing fits on any of the devices, 130 interrupted (finished trials are saved).
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxremat.chips.catalog import bundled_names, check_installed, chip_of, describe
from jaxremat.cli.command import flags_command
from jaxremat.cli.grid import Checked, check_some_valid, run_flags, surroundings, trial_of
from jaxremat.cli.many_trials import SAVED, check_how_trials_run, run_trials, store_of
from jaxremat.cli.price_file import read_prices
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import parse_mesh
from jaxremat.session.flags import RecommendFlags, RunFlags
from jaxremat.session.request import MESH_AUTO, requested_model, without_maxtext
from jaxremat.session.session import note
from jaxremat.system.files import cache_folder, check_outputs, named_by
from jaxremat.trial.queue import SweepTrial, answer_of, outcome_of
from jaxremat.trial.recommendation import (
    NONE_TEXT,
    RecommendationRecord,
    fastest,
    flops_per_token,
    recommendation,
    share_between,
)
from jaxremat.trial.record import Record, TrialRecord

if TYPE_CHECKING:
    from jaxremat.chips.speed import DeviceSpeed
    from jaxremat.trial.store import Store

_DEVICES = (1, 8, 16, 64)
#: Outcomes of trials that may end otherwise when they are done again.
_BROKE = ("oom", "timeout", "crashed")


@dataclass(frozen=True)
class Cell:
    """A number of devices of one kind, and the trials of its policies.

    Attributes:
        target: the name of the device.
        num_devices: how many of them.
        flags: the flags of its trials, without a policy.
        trials: by policy, its trial.
        speed: the rates of one of them, by which a slower cell is left out. None for a cell that has a row in any case.
    """

    target: str
    num_devices: int
    flags: RunFlags
    trials: dict[str, SweepTrial]
    speed: "DeviceSpeed | None" = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return flags_command(RecommendFlags, argv, "recommend", recommend, saved=SAVED)


def recommend(flags: RecommendFlags) -> int:
    """Runs the trials that aren't in the store, shows the rows, and returns the exit code.

    Unless targets are named, cells that can't be the best are left out. The rows whose trials are finished are shown even if an
    interrupt or an error ends the command.
    """
    flags = replace(flags, out=flags.out or in_cache())
    check_outputs(flags)
    prices = read_prices(flags.price, _known_names(flags)) if flags.price else {}
    cells = cells_of(flags)
    with store_of(flags) as store:
        try:
            run_trials(flags, store, trials_in_turns(store, cells, prices), note)
        finally:
            rows = rows_of(store, cells, prices)
            show(flags, rows, is_complete=len(rows) == len(cells))
        ended = [found for cell in cells for found in (*_records(store, cell).values(), _none_records(store, cell)) if found]
    if any(row.fits for row in rows):
        return int(any(outcome_of(records) in _BROKE for records in ended))
    return 1 if any(row.error for row in rows) else 3


def trials_in_turns(store: "Store", cells: Sequence[Cell], prices: dict[str, float]) -> Iterator[list[SweepTrial]]:
    """The trials of the cells to compile.

    The trials of `none` on the best meshes of a turn begin with the next turn, so that no core waits for the last of a turn.
    """
    before: list[Cell] = []
    for turn in itertools.chain(turns(store, cells, prices), [[]]):
        of_none = [trial for cell in before if (trial := none_trial(store, cell))]
        yield [*of_none, *{one.key: one for cell in turn for one in cell.trials.values()}.values()]
        before = turn


def turns(store: "Store", cells: Sequence[Cell], prices: dict[str, float]) -> Iterator[list[Cell]]:
    """The cells to compile, in turns.

    First come those that have a row in any case, and the most promising one of each number of devices. Then come the others that
    may be better than its answer.
    """
    waiting = sorted(
        cells, key=lambda cell: -_worth(cell.target, cell.speed.most_flops_per_s if cell.speed else 0.0, prices)
    )
    while waiting:
        best = best_answers(store, cells, prices)
        waiting = [cell for cell in waiting if _records(store, cell) or bound_of(cell, best, prices) is None]
        first = {cell.num_devices: cell for cell in reversed(waiting)}
        turn = [one for one in waiting if not one.speed or one is first[one.num_devices] or one.num_devices in best]
        if turn:
            yield turn
        waiting = [cell for cell in waiting if cell not in turn]


def _worth(target: str, rate: float, prices: dict[str, float]) -> float:
    """A device's rate, or with prices, its rate for the price. 0 where it has none."""
    return rate / prices[target] if target in prices else 0.0 if prices else rate


def best_answers(store: "Store", cells: Sequence[Cell], prices: dict[str, float]) -> dict[int, tuple[str, TrialRecord]]:
    """By number of devices, the target and the record of the best answer.

    It is the fastest one, or with prices, the cheapest.
    """
    found = [(cell, answer) for cell in reversed(cells) if (answer := _answer(store, cell))]
    found.sort(key=lambda one: _worth(one[0].target, one[1].rate, prices))
    return {cell.num_devices: (cell.target, answer) for cell, answer in found}


def bound_of(cell: Cell, best: dict[int, tuple[str, TrialRecord]], prices: dict[str, float]) -> float | None:
    """The most tokens per second of all devices of a cell that can't be the best.

    None for the others.

    It can't be the best if as many other devices have an answer that is faster for sure, or with prices, cheaper: even if all
    kernels of the cell were as fast as its fastest matmul, and took the least time of its interval.
    """
    target, answer = best.get(cell.num_devices, ("", None))
    needed = flops_per_token(answer) if answer else None
    if cell.speed is None or answer is None or not needed:
        return None
    most = cell.speed.most_flops_per_s / needed
    apart = 1 + share_between(cell.speed.interval, answer.predicted_interval)
    is_worse = apart * _worth(cell.target, most, prices) < _worth(target, answer.rate, prices)
    return cell.num_devices * most if is_worse else None


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
    """The names that may have a price: the bundled devices, and those of requested files."""
    return list(dict.fromkeys([*bundled_names(), *(describe(name)[0] for name in _targets(flags))]))


def _targets(flags: RecommendFlags) -> list[str]:
    """The targets to compare.

    Raises:
        UsageError: a target isn't known, or is in this machine.
    """
    targets = list(dict.fromkeys(flags.target)) or [name for name in bundled_names() if chip_of(name).is_gpu]
    for target in targets:
        if target in ("gpu", "cpu"):
            raise UsageError(
                f"--target {target} is in this machine, and devices to rent are compared by predicted times",
                next_step="name it, such as --target h100-80gb; measure here with jaxremat run",
            )
        describe(target)
    return targets


def cells_of(flags: RecommendFlags) -> list[Cell]:
    """The rows of the table with their trials.

    Raises:
        UsageError: a value isn't valid in any trial, or a policy in none of its own.
        MissingDependencyError: the wheels to compile for devices that aren't here aren't installed.
    """
    check_how_trials_run(flags)
    policies, around = list(dict.fromkeys(flags.policy)) or ["auto"], surroundings()
    own = {"json": False, "target": None, "devices": None, "policy": (), "mesh": None if flags.maxtext else MESH_AUTO}
    basis = _with_short_compiles(without_maxtext(run_flags(flags, **own, xla_preset=(flags.xla_preset,))))
    cells, checked = list[Cell](), list[tuple[tuple[str], Checked]]()
    for target, num_devices in itertools.product(_targets(flags), flags.devices or _DEVICES):
        mesh = None if chip_of(target).options.speaks_early else basis.mesh
        of_cell = replace(basis, target=target, mesh=mesh, devices=num_devices if mesh or num_devices > 1 else None)
        found = {policy: trial_of(replace(of_cell, policy=(policy,)), around) for policy in policies}
        checked += [((policy,), one) for policy, one in found.items()]
        trials = {policy: trial for policy, (trial, _) in found.items()}
        name, described = describe(target)
        speed = (
            None
            if flags.target
            else chip_of(target).speed(described, None if num_devices == 1 else parse_mesh(None, num_devices))
        )
        cells.append(Cell(name, num_devices, of_cell, trials, speed))
    check_some_valid(checked)
    check_installed(_targets(flags))
    nodes = [mesh.nodes for one in cells if (mesh := parse_mesh(None, one.flags.devices))]
    if flags.network_gbps is not None and max(nodes, default=1) == 1:
        note("--network-gbps has no effect: the devices are on one node")
    return cells


def _with_short_compiles(flags: RunFlags) -> RunFlags:
    """The flags with a chunked loss and scanned layers, unless others were given.

    They stay as they are for a model that has neither.
    """
    model, training, fields = requested_model(flags).model, flags.training, flags.fields
    if "chunked" in model.losses and training.loss is None:
        training = replace(training, loss="chunked")
    if model.layouts and fields.scan_layers is None:
        fields = replace(fields, scan_layers=True)
    return replace(flags, training=training, fields=fields)


def none_trial(store: "Store", cell: Cell) -> SweepTrial | None:
    """The trial of the policy `none` on the mesh of the cell's answer.

    None if there is no answer, or if `none` was requested and its own answer is on that mesh.
    """
    best, requested = _answer(store, cell), answer_of(_records(store, cell).get(NONE_TEXT, ()))
    if best is None or (requested and requested.mesh == best.mesh):
        return None
    of_auto = {"mesh": best.mesh, "devices": cell.num_devices if best.mesh else None}
    on_mesh = of_auto if cell.flags.mesh == MESH_AUTO else {}
    flags = replace(cell.flags, **on_mesh, policy=(NONE_TEXT,), xla_preset=(best.xla_preset,))
    return trial_of(flags, surroundings())[0]


def _answer(store: "Store", cell: Cell) -> TrialRecord | None:
    """The fastest answer of a cell."""
    return fastest(answer_of(records) for records in _records(store, cell).values())


def _records(store: "Store", cell: Cell) -> dict[str, tuple[Record, ...]]:
    """By policy, the records of its trial. Trials that aren't in the store are left out."""
    return {policy: found for policy, trial in cell.trials.items() if (found := store.trial(trial.key)) is not None}


def _none_records(store: "Store", cell: Cell) -> tuple[Record, ...]:
    """The records of the `none_trial`. Empty if there is none, or if it isn't in the store."""
    trial = none_trial(store, cell)
    return (trial and store.trial(trial.key)) or ()


def rows_of(store: "Store", cells: Sequence[Cell], prices: dict[str, float]) -> list[RecommendationRecord]:
    """The rows whose trials are in the store. The `none_trial` of a row may still be missing."""
    rows, best = [], best_answers(store, cells, prices)
    for cell in cells:
        records, (model, *_) = _records(store, cell), [trial.model for trial in cell.trials.values()]
        if records.keys() >= cell.trials.keys():
            about, none = (model, cell.target, cell.num_devices), _none_records(store, cell)
            rows.append(recommendation(*about, records, prices.get(cell.target), none=none))
        elif not records and (bound := bound_of(cell, best, prices)) is not None:
            known: dict[str, Any] = {"model": model, "target": cell.target, "num_devices": cell.num_devices}
            rows.append(RecommendationRecord(**known, price_per_hour=prices.get(cell.target), bound_tokens_per_s=bound))
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
            print(json.dumps(asdict(row), allow_nan=False), flush=True)
    if flags.json or not rows:
        return
    console = shared_screen().results
    numbers = {"sequence": next((row.seq_len for row in rows if row.seq_len), None), "global batch": flags.global_batch}
    base = flags.fields.quantize_base or "none"
    adapters = [f"LoRA {flags.fields.lora}{f' on {base}' if base != 'none' else ''}"] if flags.fields.lora else []
    parts = [rows[0].model, *adapters, *(f"{name} {number}" for name, number in numbers.items() if number)]
    print_text(console, *best_sentences(rows, by_cost=by_cost, is_complete=is_complete))
    console.print()
    title = f"what to rent for {', '.join(parts)}"
    console.print(recommend_table(rows, title, by_cost=by_cost, width=console.width))
    print_text(console, *explanations(rows, by_cost=by_cost))
    for line in policies_in_full(rows):
        console.print(line, soft_wrap=True)
