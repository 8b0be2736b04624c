"""Plans as files: readable JSON that another run, on this machine or another, takes up with `--policy plan:FILE`.

    {"record": "plan", "schema": 2, "model": "gpt2", "policy": "save:context,mlpwi_0", "loss": "chunked", "batch": 64, ...}

A plan is proven for one model, target and set of versions. A run that takes it up compiles it again, as every policy is, and
`differences` says in words what the proof doesn't cover.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jaxremat.config import Layout, parse_loss
from jaxremat.errors import UsageError
from jaxremat.files import named_by, parse_json, write_whole
from jaxremat.mesh.axes import MeshShape
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.trial.details import SCHEMA
from jaxremat.trial.lines import in_words, to_row
from jaxremat.trial.record import PlanRecord
from jaxremat.workload.given import OWN_LOSS
from jaxremat.xla.options import as_flags

#: Versions that change the compiled program.
_COMPILERS = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13")
_FRESH = "write one with --policy auto --save-plan FILE"


@dataclass(frozen=True)
class ProvenConfig:
    """The fields of the model, the training step and the mesh, and XLA's options, as the version that wrote the plan had them."""

    model: dict[str, Any]
    train: dict[str, Any]
    mesh: MeshShape | None = None
    xla_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class Proof:
    """What a plan's file must hold: of its record what another run looks at."""

    model: str
    target: str
    policy: str
    loss: str
    seq_len: int | None
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
    total_bytes: int
    budget_bytes: int
    config: ProvenConfig
    versions: dict[str, str | None]
    layout: Layout | None = None


@dataclass(frozen=True)
class PlanFile:
    """A plan read from a file: the policy, the loss, layout and batch it goes with, and what it was proven for."""

    path: str
    policy: Policy
    loss: str
    layout: Layout | None
    batch: int
    proven: Proof

    def __str__(self) -> str:
        return f"plan:{self.path}"


def save_plan(path: Path, record: PlanRecord) -> None:
    """Writes the plan as JSON, whole or not at all.

    Raises:
        JaxrematError: the file can't be written.
    """
    with named_by("--save-plan", path, "give another file; --out keeps the plan as a record too"):
        write_whole(path, plan_text(record))


def plan_text(record: PlanRecord) -> str:
    """The plan as its file holds it."""
    return json.dumps(to_row(record), indent=1) + "\n"


def load_plan(path: str) -> PlanFile:
    """The plan in the file at `path`.

    Raises:
        UsageError: there is no such file, or what is in it isn't a plan.
    """
    try:
        found = parse_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds no text"
        raise UsageError(f"plan {path!r} cannot be read: {reason}", next_step=_FRESH) from None
    except ValueError as error:
        raise UsageError(
            f"plan {path!r} is no JSON: {error}",
            cause="it was cut short or edited",
            next_step=_FRESH,
        ) from None
    if not isinstance(found, dict) or found.get("record") != "plan":
        raise UsageError(f"{path!r} holds JSON, and not a plan", next_step=_FRESH)
    if type(found.get("schema")) is int and found["schema"] > SCHEMA:
        raise UsageError(
            f"plan {path!r} is of schema {found['schema']}, and this jaxremat knows {SCHEMA}",
            cause="a newer jaxremat wrote it",
            next_step=f"update jaxremat, or {_FRESH}",
        )
    try:
        proven = msgspec.convert(found, Proof)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"plan {path!r} isn't as it was saved ({in_words(error)})", cause="it was edited", next_step=_FRESH
        ) from None
    try:
        if proven.loss != OWN_LOSS:
            parse_loss(proven.loss)
        policy = parse(proven.policy)
    except UsageError as error:
        raise UsageError(f"plan {path!r} isn't as it was saved: {error}", next_step=_FRESH) from None
    return PlanFile(path, policy, proven.loss, proven.layout, proven.batch, proven)


def differences(
    plan: PlanFile, *, batches: Sequence[int], config: dict[str, Any], versions: dict[str, str | None], target: str
) -> list[str]:
    """What is not as it was when the plan was proven, a phrase each; empty where the proof holds as it stands.

    Args:
        plan: the plan.
        batches: those that it is compiled at now.
        config: what is asked for now, as records hold it.
        versions: those of now.
        target: the target's name.
    """
    proven = plan.proven
    found = [f"target {target} for {proven.target}"] if target != proven.target else []
    found += [f"batch {batch} for {plan.batch}" for batch in batches if batch != plan.batch]
    for now, then in ((config["model"], proven.config.model), (config["train"], proven.config.train)):
        found += [f"{key} {now[key]!r} for {then.get(key)!r}" for key in now if now[key] != then.get(key) and key != "seed"]
    mesh = MeshShape(**config["mesh"]) if "mesh" in config else None
    flags, flags_then = as_flags(config["xla_options"]), as_flags(proven.config.xla_options or {})
    found += [f"mesh {mesh} for {proven.config.mesh}"] if mesh != proven.config.mesh else []
    found += [f"XLA's flags {flags or 'None'} for {flags_then or 'None'}"] if flags != flags_then else []
    then = proven.versions
    found += [
        f"{name} {versions.get(name)} for {then.get(name)}" for name in _COMPILERS if versions.get(name) != then.get(name)
    ]
    return found
