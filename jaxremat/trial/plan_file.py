"""Plans as files: readable JSON that another run, on this machine or another, takes up with `--policy plan:FILE`.

A plan is proven for one model, target and set of versions. Taken up elsewhere it is compiled again, as every policy is, and
`differences` says in words what the proof doesn't cover any more.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxremat.config import parse_loss
from jaxremat.errors import UsageError
from jaxremat.files import named_by, write_whole
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import Policy
from jaxremat.search.batch import MAX_BATCH
from jaxremat.trial.record import SCHEMA, PlanRecord

_CONFIGS = ("model", "train")
#: Versions that change the compiled program.
_COMPILERS = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13")
#: What a plan must hold.
_KINDS = {
    **dict.fromkeys(("model", "target", "policy", "loss"), str),
    **dict.fromkeys(("seq_len", "batch", "total_bytes", "budget_bytes"), int),
    **dict.fromkeys(("config", "versions"), dict),
}


@dataclass(frozen=True)
class PlanFile:
    """A plan read from a file: the policy, the loss and batch it goes with, and the record it was proven in."""

    path: str
    policy: Policy
    loss: str
    batch: int
    proven: dict[str, Any]

    def __str__(self) -> str:
        return f"plan:{self.path}"


def save_plan(path: Path, record: PlanRecord) -> None:
    """Writes the plan as JSON, whole or not at all.

    Raises:
        JaxrematError: the file can't be written.
    """
    with named_by("--save-plan", path, "give another file; --out keeps the plan as a record too"):
        write_whole(path, json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def load_plan(path: str) -> PlanFile:
    """The plan in the file at `path`.

    Raises:
        UsageError: there is no such file, or what is in it isn't a plan.
    """
    fresh = "write one with --policy auto --save-plan FILE"
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds no text"
        raise UsageError(f"plan {path!r} cannot be read: {reason}", next_step=fresh) from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"plan {path!r} is no JSON: {error.msg} in line {error.lineno}",
            cause="it was cut short or edited",
            next_step=fresh,
        ) from None
    if not isinstance(found, dict) or found.get("record") != "plan":
        raise UsageError(f"{path!r} holds JSON, and not a plan", next_step=fresh)
    if missing := [key for key in _KINDS if key not in found]:
        raise UsageError(f"plan {path!r} has no {', '.join(missing)}", cause="it was edited", next_step=fresh)
    if type(found.get("schema")) is int and found["schema"] > SCHEMA:
        raise UsageError(
            f"plan {path!r} is of schema {found['schema']}, and this jaxremat knows {SCHEMA}",
            cause="a newer jaxremat wrote it",
            next_step="update jaxremat, or " + fresh,
        )
    edited = [key for key, kind in _KINDS.items() if type(found[key]) is not kind]
    edited += [
        f"config.{part}" for part in _CONFIGS if "config" not in edited and type(found["config"].get(part)) is not dict
    ]
    if not edited and not 1 <= found["batch"] <= MAX_BATCH:
        edited = ["batch"]
    if edited:
        said = f"{edited[0]} {json.dumps(found.get(edited[0]))[:60]}" if edited[0] in found else f"no {edited[0]}"
        raise UsageError(f"plan {path!r} has {said}", cause="it was edited", next_step=fresh)
    try:
        parse_loss(found["loss"])
        policy = parse(found["policy"])
    except UsageError as error:
        raise UsageError(f"plan {path!r} isn't as it was saved: {error}") from None
    return PlanFile(path, policy, found["loss"], found["batch"], found)


def differences(
    plan: PlanFile, *, batches: Sequence[int], config: dict[str, Any], versions: dict[str, str | None], target: str
) -> list[str]:
    """What is not as it was when the plan was proven, a phrase each; empty where the proof holds as it stands."""
    proven = plan.proven
    found = [f"target {target} for {proven['target']}"] if target != proven["target"] else []
    found += [f"batch {batch} for {plan.batch}" for batch in batches if batch != plan.batch]
    for part in _CONFIGS:
        now, then = config[part], proven["config"][part]
        found += [f"{key} {now[key]!r} for {then.get(key)!r}" for key in now if now[key] != then.get(key) and key != "seed"]
    then = proven["versions"]
    found += [
        f"{name} {versions.get(name)} for {then.get(name)}" for name in _COMPILERS if versions.get(name) != then.get(name)
    ]
    return found
