"""Makes the trials of a sweep: one for each model, target, length, policy, preset and batch.

This module imports no JAX.

The flags `--policy dots nothing --batch 8,16` make four trials.
"""

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxremat.chips.catalog import ATTACHED, PRESETS, check_installed, chip_of, describe, target_name
from jaxremat.chips.installed import DECIDING_VARIABLES, versions
from jaxremat.cli.many_trials import check_how_trials_run
from jaxremat.cli.processes import task_of
from jaxremat.errors import UsageError, alone, both, reject
from jaxremat.model.hf import read_hf
from jaxremat.model.presets import preset
from jaxremat.session.flags import DEFAULT_MODEL, RecommendFlags, RunFlags, SweepFlags
from jaxremat.session.lengths import at_length
from jaxremat.session.request import Auto, Request, changed_fields, check_run, without_planning
from jaxremat.trial.plan_file import PlanFile
from jaxremat.trial.queue import SweepTrial
from jaxremat.trial.store import content_key
from jaxremat.workload.source import find_source, is_spec

PACKAGE = Path(__file__).parent.parent
#: The variables that decide what is compiled, and what a job's allocator has.
ENVIRONMENT = (
    *("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    *("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE"),
    *("JAX_NUMPY_DTYPE_PROMOTION", "JAX_DEFAULT_DTYPE_BITS", *DECIDING_VARIABLES),
)
#: A trial with the error of its request. None where the request is valid.
Checked = tuple[SweepTrial, UsageError | None]


def check_sweep(flags: SweepFlags) -> None:
    """Checks the flags that only a sweep has.

    Raises:
        UsageError: a value isn't valid, or two flags contradict each other.
    """
    check_how_trials_run(flags)
    _shard(flags.shard)
    job = {"--num-shards": flags.num_shards != 4, "--slurm": flags.slurm, "--cluster": flags.cluster != "slurm"}
    of_job = next((flag for flag, is_given in job.items() if is_given), "")
    reject(
        (of_job and not flags.submit, alone(of_job, "--submit"), "add --submit FOLDER"),
        (flags.submit and flags.shard, both(f"--shard {flags.shard}", "--submit"),
         "leave --shard out; --num-shards N says how many tasks there are",
         "each task of the array job gets a shard of its own"),
        (flags.submit and flags.csv, both("--csv", "--submit"),
         "leave --csv out; the same command without --submit, with --csv, writes it when the tasks are done",
         "the table is written at the end of a sweep, and all tasks would write the same file"),
    )  # fmt: skip


def sweep_trials(flags: SweepFlags) -> list[SweepTrial]:
    """The trials of a sweep, or of its shard, in the order of the flags. No two are the same.

    A combination that isn't valid is a trial that fails, such as a policy of 24 layers on a model of 12 layers.

    Raises:
        UsageError: a value isn't valid in any trial.
        MissingDependencyError: a target isn't in this machine, and the wheels to compile for it aren't installed.
    """
    shard, num_shards = _shard(flags.shard)
    named = flags.model or ([] if flags.hf else [DEFAULT_MODEL])
    models = [*((name, None) for name in named), *((None, file) for file in flags.hf)]
    for name in named:
        find_source(name) if is_spec(name) else preset(name)
    for file in flags.hf:
        read_hf(file, changed_fields(flags.fields))
    targets, lengths, batches = flags.target or (None,), flags.training.seq_len or (None,), flags.batch or (None,)
    for target in targets:
        if target not in (None, "gpu", "cpu"):
            describe(target)
    basis, around = run_flags(flags), surroundings()
    trials, checked = dict[str, SweepTrial](), list[tuple[Sequence[Any], Checked]]()
    choices = lengths, flags.policy or ("dots",), flags.xla_preset or ("default",), batches
    grid: Any = itertools.product(models, targets, itertools.product(*choices))
    for (model, file), target, one in grid:
        length, policy, xla_preset, batch = one
        given = {"policy": (policy,), "batch": (batch,) if batch else (), "xla_preset": (xla_preset,)}
        requested = replace(basis, model=model, hf=file, target=target, **given)
        trial, error = trial_of(at_length(requested, length) if length else requested, around)
        checked.append((one, (trial, error)))
        trials.setdefault(trial.key, replace(trial, seq_len=length if len(lengths) > 1 else None))
    check_some_valid(checked)
    on = (target_name(target, on_mesh=basis.on_mesh) for target in targets)
    check_installed(target for target in on if target not in ("gpu", "cpu"))
    return list(trials.values())[shard - 1 :: num_shards]


def run_flags(flags: SweepFlags | RecommendFlags, **own: Any) -> RunFlags:
    """The flags of `jaxremat run` that a command of many trials shares with it, and `own` ones."""
    shared = {f.name: getattr(flags, f.name) for f in dataclasses.fields(RunFlags) if hasattr(flags, f.name)}
    return RunFlags(**{**shared, "out": None, "fresh": False, **own})  # the processes of trials inherit what --fresh sets


def check_some_valid(checked: Iterable[tuple[Sequence[Any], Checked]]) -> None:
    """Raises the error of a choice, such as a policy or a batch, that isn't valid in any trial.

    Args:
        checked: the choices of each trial, always as many, with the trial.
    """
    errors: dict[tuple[int, Any], list[UsageError | None]] = {}
    for choices, (_, error) in checked:
        for choice in enumerate(choices):
            errors.setdefault(choice, []).append(error)
    for found in errors.values():
        if found[0] and None not in found:
            raise found[0]


def surroundings() -> dict[str, Any]:
    """What records depend on beside the request: variables, versions, and the package's source."""
    environment = {name: os.environ.get(name) for name in ENVIRONMENT}
    return {"environment": environment, "versions": versions(), "source": source_hash()}


def trial_of(flags: RunFlags, around: dict[str, Any]) -> Checked:
    """The trial of flags with one policy, one preset and at most one batch, with its error.

    Args:
        flags: the flags.
        around: the `surroundings`.
    """
    (policy,), (xla_preset,) = flags.policy, flags.xla_preset
    flags = flags if policy == "auto" else without_planning(flags)
    batch, error = flags.batch[0] if flags.batch else None, None
    task = task_of(flags, policy, batch, xla_preset)
    try:
        content = _content(check_run(flags))
        config = {name: content[name] for name in ("model", "train")}
    except UsageError as found:
        default = asdict(RunFlags())
        content = config = {"requested": {name: value for name, value in task.flags.items() if value != default[name]}}
        task, error = None, found
    key, model = content_key({**content, **around}), flags.hf or flags.model or DEFAULT_MODEL
    target, refused = target_name(flags.target, on_mesh=flags.on_mesh), str(error or "")
    about = (policy, target, batch, task, config, _measures(flags), refused, xla_preset)
    return SweepTrial(key, model, *about, num_devices=flags.devices or 1), error


def _measures(flags: RunFlags) -> bool:
    return target_name(flags.target, on_mesh=flags.on_mesh) in ("gpu", "cpu")


def _content(request: Request[RunFlags]) -> dict[str, Any]:
    """Everything in the request that a trial's records depend on.

    The trial's key in the store is its hash.
    """
    flags, model, (one,) = request.flags, request.model, request.policies
    policy: Any = str(one.policy)
    if isinstance(one.policy, Auto):
        policy = flags.objective, flags.offload, one.policy.losses, one.policy.layouts
    elif isinstance(one.policy, PlanFile):
        policy = str(one.policy.policy), one.policy.loss, one.policy.layout, one.policy.batch
    target = target_name(flags.target, on_mesh=flags.on_mesh)
    share = chip_of(target).mem_fraction if flags.mem_fraction is None else flags.mem_fraction
    measured = {"steps": flags.steps, "data": _file_hash(flags.data), "devices": ATTACHED.models()}
    return {
        "model": {**model.config, **({"source": model.source_hash()} if model.source_hash else {})},
        "train": asdict(request.train),
        "policy": policy,
        "batch": request.batches,
        "max_batch": None if request.batches else flags.max_batch,
        "global_batch": flags.global_batch,
        "budget": share if request.budget_bytes is None else request.budget_bytes,
        "headroom": flags.headroom,
        "target": (target, measured) if _measures(flags) else asdict(describe(target)[1]),
        "mesh": [mesh.as_data() for mesh in (request.meshes or (request.mesh,)) if mesh],
        "is_mesh_auto": bool(request.meshes),
        "xla_remat": flags.xla_remat,
        "xla_options": PRESETS[one.xla_preset],
    }


def _file_hash(path: str | None) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path is not None else None
    except OSError as error:
        raise UsageError(
            f"--data {path!r} cannot be read: {error.strerror}", next_step="give the path of a text file"
        ) from None


def source_hash() -> str:
    """A hash of the package's source, without `report`. If it changes, every trial is a new one."""
    digest = hashlib.sha256()
    for path in sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml", ".csv")):
        if path.parts[0] != "report":
            digest.update(str(path).encode() + b"\0" + (PACKAGE / path).read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--shard got {text!r}",
            allowed="I/N with I from 1 to N",
            cause="an array job that starts at 0" if text.startswith("0/") else "",
            next_step='--shard 1/4, or in an array job (sbatch --array=1-4) --shard "$SLURM_ARRAY_TASK_ID/4"',
        )
    return int(match[1]), int(match[2])
