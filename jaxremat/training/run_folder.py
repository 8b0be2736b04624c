"""The folder of a training run: the requested run, its metrics, its checkpoints, and a lock.

    runs/a/config.json      the requested run, by which a later command is checked
    runs/a/metrics.jsonl    a line for each step
    runs/a/checkpoints/     the last two checkpoints
    runs/a/plan.json        the plan of --policy auto
    runs/a/trial.json       bytes and step time that were promised, beside those that the run showed

A command that finds such a folder resumes its run. What decides the losses must be as it was. What changes at most their
last bits may differ, and is said.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from jaxremat.chips.installed import versions
from jaxremat.errors import UsageError
from jaxremat.system.files import named_by, parse_json, write_whole
from jaxremat.trial.trials import Trials

#: How the random keys follow from the seed (`step/step.py`). A run of other keys has other losses from its next step on.
KEYS = "fold_in(key(seed), purpose)"
#: Fields of the model and of the training step that change at most the last bits of the losses, by the rounding of sums.
_ROUNDING = {"model": ("attention", "dispatch"), "train": ("loss",)}


@dataclass(frozen=True)
class RunConfig:
    """The requested run.

    Attributes:
        decides: by name, what decides the losses.
        rounding: by name, what changes at most the last bits of the losses.
    """

    decides: dict[str, Any]
    rounding: dict[str, Any]


#: JAX's settings that decide random numbers or dtypes, with their defaults.
_SETTINGS = {"jax_default_prng_impl": "threefry2x32", "jax_threefry_partitionable": True, "jax_enable_x64": False}


def config_of(trials: Trials, policy: str, batch: int, weights: Path | None = None, code: str | None = None) -> RunConfig:
    """The configuration of a run.

    Args:
        trials: the trials of the workload.
        policy: the policy.
        batch: sequences of a microbatch of each data-parallel group.
        weights: the file or folder that it begins with.
        code: the hash of a user's own code. None for a preset.
    """
    train, workload = trials.train_at(batch), trials.workload_at()
    fields = {"model": trials.factory.config(), "train": asdict(train)}
    decides: dict[str, Any] = {}
    rounding: dict[str, Any] = {"policy": policy}
    for part, values in fields.items():
        for name, value in values.items():
            (rounding if name in _ROUNDING[part] else decides)[name] = value
    decides |= {
        "optimizer": trials.optimizer,
        "global_batch": trials.global_batch_at(batch),
        "data": workload.data_hash() if workload.data_hash else "",
        "random_keys": KEYS,
    } | ({"weights": str(weights.resolve())} if weights else {})
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    decides |= {name: value for name, value in settings.items() if value != _SETTINGS[name]}
    rounding |= {
        "target": f"{trials.target.name}: {trials.target.description}",
        "mesh": str(trials.target.mesh_shape),
        "processes": trials.target.num_processes,
        "attention": workload.attention,
        "xla_preset": trials.xla_preset,
        "xla_remat": trials.xla_remat or None,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS") or None,
        "code": code,
        "versions": {name: version for name, version in versions().items() if version},
    }
    as_json = json.loads(json.dumps({"decides": decides, "rounding": rounding}, default=str))
    return RunConfig(**as_json)


def differences(now: dict[str, Any], then: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What isn't as it was: by name, the value then and the value now.

    None is a value that isn't there.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*now, *then}):
        a, b = then.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differences(b, a)
        elif a != b:
            found[name] = a, b
    return found


def phrases(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    """The differences as a person reads them: `learning_rate 0.003 then, 0.001 now`."""
    return [
        f"{name} {'none' if a is None else a} then, {'none' if b is None else b} now" for name, (a, b) in changed.items()
    ]


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, which no other process has open."""

    path: Path

    @property
    def config(self) -> Path:
        """The requested run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """A line for each step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def plan(self) -> Path:
        """The plan of --policy auto."""
        return self.path / "plan.json"

    @property
    def has_plan(self) -> bool:
        """Whether a run of this folder was planned.

        A plan without a run may be that of another model.
        """
        return self.config.exists() and self.plan.exists()

    @property
    def trial(self) -> Path:
        """What was promised, beside what the run showed."""
        return self.path / "trial.json"

    def compared(self, config: RunConfig) -> list[str]:
        """Checks that the run can resume with this configuration.

        Returns:
            A line for what differs from before: what changes at most the last bits of the losses, and a user's own code.

        Raises:
            UsageError: something differs that decides the losses, or the folder isn't of a training run.
        """
        before = self._read()
        ours = (self.metrics, self.trial, *(self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()))
        if before is None and (found := [str(path.relative_to(self.path)) for path in ours if path.exists()]):
            raise UsageError(
                f"--run-dir {str(self.path)!r} has no config.json, by which the run could be checked, but {', '.join(found)}",
                cause="config.json was removed, or the folder belongs to another program",
                next_step="put config.json back, or give another --run-dir",
            )
        if before and (changed := differences(config.decides, before.decides)):
            raise UsageError(
                f"--run-dir {str(self.path)!r} has a run of another configuration: {'; '.join(phrases(changed))}",
                allowed="what was requested then; another policy, mesh or --num-steps",
                next_step="give the former flags to resume, or another --run-dir to begin anew",
            )
        changed = differences(config.rounding, before.rounding) if before else {}
        code, _ = changed.pop("code", (None, None))
        return [
            *(["the model's code isn't as it was: from here on the losses are those of the new code"] if code else []),
            *(f"otherwise than before: {one}; the losses may differ in their last bits" for one in phrases(changed)),
        ]

    def keep(self, path: Path, text: str) -> None:
        """Writes a file of the folder, whole or not at all.

        Raises:
            JaxrematError: it can't be written.
        """
        with named_by("--run-dir", path, "give a folder that is yours, on a disk with room"):
            write_whole(path, text)

    def keep_config(self, config: RunConfig) -> None:
        """Writes down the requested run.

        Raises:
            JaxrematError: it can't be written.
        """
        self.keep(self.config, json.dumps(asdict(config), indent=1) + "\n")

    def _read(self) -> RunConfig | None:
        if not self.config.exists():
            return None
        try:
            return msgspec.convert(parse_json(self.config.read_text()), RunConfig)
        except OSError as error:
            raise UsageError(
                f"--run-dir {str(self.path)!r} has a config.json that can't be read: {error.strerror}",
                next_step="give another --run-dir",
            ) from None
        except (ValueError, msgspec.ValidationError):
            raise UsageError(
                f"--run-dir {str(self.path)!r} has a config.json that no training run wrote",
                cause="the folder belongs to another program, or the file was edited",
                next_step="give another --run-dir",
            ) from None


@contextlib.contextmanager
def opened(path: Path, *, locks: bool = True) -> Iterator[RunFolder]:
    """A context with the folder at `path`, made if missing, which no other process has open.

    Of several processes that train together, one `locks` it.

    Raises:
        UsageError: the folder can't be written, or another process trains in it.
    """
    with named_by("--run-dir", path, "give a folder that is yours, on a disk with room", UsageError):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a")
    with lock:
        try:
            if locks:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX leaves open which of the two
            raise UsageError(
                f"--run-dir {str(path)!r} is in use",
                cause="another process trains in it",
                next_step="wait until it ends, or give another --run-dir",
            ) from None
        except OSError as error:
            raise UsageError(
                f"--run-dir {str(path)!r} can't be locked: {error.strerror}",
                cause="a file system without locks",
                next_step="give a folder on another one",
            ) from None
        yield RunFolder(path)
