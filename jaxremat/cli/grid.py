"""Makes the trials of a sweep from its flags: one for each model, target, length, policy, preset and batch.

This module imports no JAX.

The flags `--policy dots nothing --batch 8,16` make four trials.
"""

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxremat.cli.asked_model import changed_fields
from jaxremat.cli.flags import DEFAULT_MODEL, RunFlags, SweepFlags
from jaxremat.cli.lengths import at_length
from jaxremat.cli.processes import task_of
from jaxremat.cli.request import Auto, Request, check_run, without_planning
from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.model.hf import read_hf
from jaxremat.model.presets import preset
from jaxremat.trial.plan_file import PlanFile
from jaxremat.trial.queue import SweepTrial
from jaxremat.trial.store import content_key
from jaxremat.workload.given import GivenModel
from jaxremat.workload.source import find_source, is_spec
from jaxremat.workload.source import source_hash as source_hash_of_user
from jaxremat.xla.gpu import attached_models, load_gpu, target_name
from jaxremat.xla.installed import check_aot_wheels, versions
from jaxremat.xla.options import PRESETS

PACKAGE = Path(__file__).parent
#: The modules and folders whose source decides what a record says. If their source changes, every trial is a new one.
SOURCES = (
    "config.py",
    "cli/flow.py",
    "cli/meshes.py",
    "cli/request.py",
    "rope.py",
    "cli/worker.py",
    "cli/workloads.py",
    "mesh",
    "policy",
    "workload",
    "search",
    "planner",
    "model",
    "step",
    "xla",
    "trial",
    "answer",
)
ENVIRONMENT = ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
_COMPILE_BYTES = 3 * 2**30  # a little more host memory than compiling a step of 1.5 billion parameters takes


def sweep_trials(flags: SweepFlags) -> list[SweepTrial]:
    """The trials of a sweep, or of its shard, in the order of the flags. No two are the same.

    A combination that isn't valid is a trial that fails, such as a policy of 24 layers on a model of 12 layers.

    Raises:
        UsageError: a value isn't valid in any trial.
        MissingDependencyError: a target isn't in this machine, and the wheels to compile for it aren't installed.
    """
    shard, num_shards = _shard(flags.shard)
    policies, named, files = flags.policy or ("dots",), flags.model, flags.hf
    models = [(name, None) for name in named or [*([] if files else [DEFAULT_MODEL])]] + [(None, file) for file in files]
    batches = flags.batch or (None,)
    lengths = flags.training.seq_len or (None,)
    targets, presets = flags.target or (None,), flags.xla_preset or ("default",)
    shared = {f.name: getattr(flags, f.name) for f in dataclasses.fields(RunFlags) if hasattr(flags, f.name)}
    basis = RunFlags(**{**shared, "out": None, "fresh": False})  # the processes of trials inherit what --fresh sets
    around = surroundings()
    for name, file in models:
        if file is not None:
            read_hf(file, changed_fields(flags.fields))
        elif name is not None:
            find_source(name) if is_spec(name) else preset(name)
    for target in targets:
        if target not in (None, "gpu", "cpu"):
            load_gpu(target)
    trials: dict[str, SweepTrial] = {}
    errors: dict[tuple[str, Any], list[UsageError | None]] = {}
    grid = itertools.product(models, targets, lengths, policies, presets, batches)
    for (model, file), target, length, policy, name, batch in grid:
        given = {"policy": (policy,), "batch": (batch,) if batch else (), "xla_preset": (name,)}
        asked = replace(basis, model=model, hf=file, target=target, **given)
        asked = at_length(asked, length) if length else asked
        trial, error = trial_of(asked, policy, name, around)
        trials.setdefault(trial.key, replace(trial, seq_len=length if len(lengths) > 1 else None))
        for choice in (("policy", policy), ("preset", name), ("batch", batch), ("length", length)):
            errors.setdefault(choice, []).append(error)
    for found in errors.values():
        if found[0] and None not in found:
            raise found[0]
    if not all(_measures(replace(basis, target=target)) for target in targets):
        check_aot_wheels()
    return list(trials.values())[shard - 1 :: num_shards]


def surroundings() -> dict[str, Any]:
    """What records depend on beside what is asked for: variables of the environment, versions, and the package's source."""
    return {
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "versions": versions(),
        "source": source_hash(),
    }


def trial_of(asked: RunFlags, policy: str, xla_preset: str, around: dict[str, Any]) -> tuple[SweepTrial, UsageError | None]:
    """The trial of one policy, batch and preset of XLA's options, and the error of a request that isn't valid.

    Args:
        asked: the flags, with this policy, batch and preset alone.
        policy: the policy as it was typed.
        xla_preset: the preset.
        around: the `surroundings`.
    """
    target = target_name(asked.target, on_mesh=asked.on_mesh)
    if policy != "auto":
        asked = without_planning(asked)
    try:
        request, error = check_run(asked), None
        content = {**_content(request), **around}
        config = {"model": content["model"], "train": content["train"]}
        size = request.batches[0] if request.batches else None
        task = task_of(asked, policy, size, xla_preset)
    except UsageError as refused:
        error, size, task = refused, None, None
        content = config = {"asked": _given(asked)}
    key = content_key(content)
    alone = _measures(asked)
    return SweepTrial(
        key,
        asked.hf or asked.model or DEFAULT_MODEL,
        policy,
        target,
        size,
        task,
        config,
        alone,
        str(error or ""),
        xla_preset,
        num_devices=asked.devices or 1,
    ), error


def _measures(flags: RunFlags) -> bool:
    return target_name(flags.target, on_mesh=flags.on_mesh) in ("gpu", "cpu")


def _content(request: Request) -> dict[str, Any]:
    """Everything in the request that a trial's records depend on. The trial's key in the store is its hash."""
    flags = request.flags
    (asked,) = request.policies
    policy = asked.policy
    measured: dict[str, Any] = {}
    target: Any = target_name(flags.target, on_mesh=flags.on_mesh)
    if _measures(flags):
        measured = {"steps": flags.steps, "data": _file_hash(flags.data), "devices": attached_models()}
    else:
        target = dataclasses.asdict(load_gpu(target)[1])
    planned = (flags.objective, flags.offload, policy.losses, policy.layouts) if isinstance(policy, Auto) else None
    proven = (str(policy.policy), policy.loss, policy.layout, policy.batch) if isinstance(policy, PlanFile) else None
    return {
        "model": _model_content(request.model),
        "train": dataclasses.asdict(request.train),
        "policy": planned or proven or str(policy),
        "batch": request.batches,
        "max_batch": None if request.batches else flags.max_batch,
        "global_batch": flags.global_batch,
        "budget": request.budget_bytes if request.budget_bytes is not None else flags.mem_fraction,
        "headroom": flags.headroom,
        "target": target,
        "measured": measured,
        "xla_remat": flags.xla_remat,
        "xla_options": PRESETS[asked.xla_preset],
    } | _mesh_content(request)


def _mesh_content(request: Request) -> dict[str, Any]:
    """The devices and their axes, or the meshes that are compared. Empty for one device."""
    if request.meshes:
        return {"meshes": [dataclasses.asdict(mesh) for mesh in request.meshes]}
    return {"mesh": dataclasses.asdict(request.mesh)} if request.mesh else {}


def _model_content(model: ModelConfig | GivenModel) -> dict[str, Any]:
    """The model's fields, or for a workload of the user's own what was asked for and a hash of its source."""
    own = {"source": source_hash_of_user(model.spec)} if isinstance(model, GivenModel) else {}
    return dataclasses.asdict(model) | own


def _file_hash(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"--data {path!r} cannot be read: {error.strerror}", next_step="give the path of a text file"
        ) from None


def _given(flags: RunFlags) -> dict[str, Any]:
    """The flags whose values aren't the defaults."""
    plain, default = dataclasses.asdict(flags), dataclasses.asdict(RunFlags())
    return {
        name: value if isinstance(value, dict | tuple) else str(value)
        for name, value in plain.items()
        if value != default[name]
    }


def source_hash() -> str:
    """A hash of the source of `SOURCES`, which decides what a record says."""
    digest = hashlib.sha256()
    for path in sorted(
        path for name in SOURCES for path in (PACKAGE / name, *(PACKAGE / name).rglob("*.py")) if path.is_file()
    ):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def num_jobs(jobs: int | None) -> int:
    """How many compiles run at a time: --jobs, or as many as there are cores for this process and available memory for."""
    if jobs is not None:
        return jobs
    import psutil

    available = psutil.virtual_memory().available
    return max(1, min(len(os.sched_getaffinity(0)), available // _COMPILE_BYTES))


def check_sweep(flags: SweepFlags) -> None:
    """Checks the flags that only a sweep has.

    Raises:
        UsageError: a value isn't valid.
    """
    numbers = {"--jobs": flags.jobs, "--timeout": flags.timeout, "--num-shards": flags.num_shards}
    check_how_trials_run(numbers, fresh=flags.fresh, retry_failed=flags.retry_failed)
    _shard(flags.shard)
    _check_submission(flags)


def _check_submission(flags: SweepFlags) -> None:
    """Raises UsageError for flags of the array job without --submit, and for flags that don't go with it."""
    of_job = {"--num-shards": flags.num_shards != 4, "--slurm": bool(flags.slurm), "--cluster": flags.cluster != "slurm"}
    if given := [flag for flag, is_given in of_job.items() if is_given and not flags.submit]:
        raise UsageError(f"{given[0]} is about --submit, which wasn't given", next_step="add --submit FOLDER")
    if flags.submit and flags.shard:
        raise UsageError(
            f"--shard {flags.shard} and --submit were both given",
            cause="each task of the array job gets a shard of its own",
            next_step="leave --shard out; --num-shards N says how many tasks there are",
        )
    if flags.submit and flags.csv:
        raise UsageError(
            "--csv and --submit were both given",
            cause="the table is written at the end of a sweep, and all tasks would write the same file",
            next_step="leave --csv out; the same command without --submit, with --csv, writes it when the tasks are done",
        )


def check_how_trials_run(numbers: Mapping[str, float | None], *, fresh: bool, retry_failed: bool) -> None:
    """Checks the flags of commands of many trials that say how the trials run.

    Args:
        numbers: by flag, its number, which must be above 0. None if the flag wasn't given.
        fresh: whether --fresh was given.
        retry_failed: whether --retry-failed was given.

    Raises:
        UsageError: a value isn't valid.
    """
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise UsageError(f"{name} got {value:g}", allowed="a number above 0", next_step="leave it out for the default")
    if fresh and retry_failed:
        raise UsageError(
            "--fresh and --retry-failed were both given",
            cause="--fresh does the failed ones again too",
            next_step="leave one of them out",
        )


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
