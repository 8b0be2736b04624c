"""Plans as files: readable JSON that another run takes up with `--policy plan:FILE`.

    {"record": "plan", "schema": 2, "model": "gpt2", "policy": "save:context,mlpwi_0", "loss": "chunked", "batch": 64, ...}

A plan is proven for one model, target and set of versions. A run that takes it up compiles it again, as every policy is, and
`differences` says in words what the proof doesn't cover.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxremat.chips.installed import COMPILERS
from jaxremat.config import Layout, parse_loss
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.mesh.axes import MeshAxes, axes_of_data
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.system.files import named_by, parse_json, write_whole
from jaxremat.trial.lines import from_row, in_words
from jaxremat.trial.record import PlanRecord
from jaxremat.workload.given import OWN_LOSS
from jaxremat.xla.options import as_flags

_FRESH = "write one with --policy auto --save-plan FILE"


@dataclass(frozen=True)
class ProvenConfig:
    """What a plan's step was compiled with, as the version that wrote the plan had it.

    Attributes:
        model: the fields of the model.
        train: those of the training step.
        mesh: the axes of the mesh; None for one device.
        xla_options: XLA's options.
    """

    model: dict[str, Any]
    train: dict[str, Any]
    mesh: MeshAxes | None = None
    xla_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class PlanFile:
    """A plan read from a file.

    Attributes:
        path: the file.
        policy: the plan's policy.
        loss: the loss that it goes with.
        layout: how the layers run; None where the workload decides that itself.
        batch: sequences per microbatch.
        proven: the record of the plan and its proof.
        config: what it was proven with.
    """

    path: str
    policy: Policy
    loss: str
    layout: Layout | None
    batch: int
    proven: PlanRecord
    config: ProvenConfig

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
    """The plan as its file has it."""
    return json.dumps(asdict(record), indent=1, allow_nan=False) + "\n"


def load_plan(path: str) -> PlanFile:
    """The plan in the file at `path`.

    Raises:
        UsageError: there is no such file, or what is in it isn't a plan.
    """
    try:
        found = parse_json(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no JSON ({error})"
        raise UsageError(f"plan {path!r} cannot be read: {reason}", next_step=_FRESH) from None
    return plan_of(path, found)


def plan_of(path: str, found: Any) -> PlanFile:
    """The plan that is `found` in the file at `path`, as JSON has it.

    Raises:
        UsageError: it isn't a plan.
    """
    try:
        proven = from_row(found)
        if not isinstance(proven, PlanRecord):
            raise UsageError(f"it holds a record of kind {proven.record!r}, and not a plan")
        config = msgspec.convert(proven.config, ProvenConfig, dec_hook=lambda _, mesh: axes_of_data(mesh))
        if proven.loss != OWN_LOSS:
            parse_loss(proven.loss)
        policy = parse(proven.policy)
    except (msgspec.ValidationError, JaxrematError) as error:
        found = (
            error if isinstance(error, JaxrematError) else UsageError(f"config: {in_words(error)}", cause="it was edited")
        )
        parts = {"allowed": found.allowed, "cause": found.cause, "next_step": _FRESH}
        raise UsageError(f"plan {path!r} isn't as it was saved: {found.got}", **parts) from None
    if proven.batch > MAX_BATCH:
        raise UsageError(f"plan {path!r} has batch {proven.batch}", allowed=f"1 to {MAX_BATCH}", next_step=_FRESH)
    return PlanFile(path, policy, proven.loss, proven.layout, proven.batch, proven, config)


def differences(
    plan: PlanFile, *, batches: Sequence[int], config: dict[str, Any], versions: dict[str, str | None], target: str
) -> list[str]:
    """What isn't as it was when the plan was proven, a phrase each.

    Args:
        plan: the plan.
        batches: those that it is compiled at now.
        config: what is requested now, as records have it.
        versions: those of now.
        target: the target's name.
    """
    proven, then = plan.proven, plan.config
    mesh = axes_of_data(config["mesh"]) if "mesh" in config else None
    flags, flags_then = as_flags(config["xla_options"]), as_flags(then.xla_options or {})
    found = [f"target {target} for {proven.target}"] if target != proven.target else []
    found += [f"batch {batch} for {plan.batch}" for batch in batches if batch != plan.batch]
    for now, before in ((config["model"], then.model), (config["train"], then.train)):
        found += [
            f"{key} {now[key]!r} for {before.get(key)!r}" for key in now if now[key] != before.get(key) and key != "seed"
        ]
    found += [f"mesh {mesh} for {then.mesh}"] if mesh != then.mesh else []
    found += [f"XLA's flags {flags or 'None'} for {flags_then or 'None'}"] if flags != flags_then else []
    pairs = [(name, versions.get(name), proven.versions.get(name)) for name in COMPILERS]
    return found + [f"{name} {now} for {before}" for name, now, before in pairs if now != before]
