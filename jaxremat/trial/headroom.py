"""The headroom: the share of an allocator's limit that compiled bytes must leave free.

It is fitted to steps that were run.

Steps near the limit show it in two ways: the allocator's peak was above the compiled total, or a step that should have
fitted ran out of memory. A step of 60.0 GB whose peak was 60.6 GB needs a headroom of 1 %, which is 1 - 60.0 / 60.6.

What was seen is written to the user's cache directory, a JSON object a line, with the device and the versions. Lines are only
ever appended. Another device or version is fitted anew.

References:
    XDG Base Directory Specification, for `$XDG_CACHE_HOME`.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from jaxremat.chips.installed import PLUGINS
from jaxremat.system.files import cache_folder
from jaxremat.trial.record import Record, TrialRecord

# The shares of the limit from which a step teaches. What the allocator adds to a small step would be nothing beside a large
# one, and a step that ran out of memory far below the limit shared the card with something else.
_PEAK_FROM = 0.5
_OOM_FROM = 0.8
_Bytes = Annotated[int, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class Setup:
    """What a headroom is for: a kind of device, and the versions that decide a step's bytes."""

    device_kind: str
    driver: str | None
    jax: str | None
    jaxlib: str | None
    plugin: str | None


@dataclass(frozen=True)
class Seen:
    """One step that was run near the allocator's limit.

    Attributes:
        schema: of the line in the file.
        setup: the device and the versions.
        total_bytes: XLA's total for the step.
        limit_bytes: the allocator's limit.
        peak_bytes: the allocator's peak; None where the step didn't set the mark.
        ran: whether it ran or ran out of memory.
        what: the model, the policy and the batch, in words.
    """

    schema: Literal[1] = field(default=1, kw_only=True)
    setup: Setup
    total_bytes: _Bytes
    limit_bytes: _Bytes
    peak_bytes: _Bytes | None
    ran: Literal["ok", "oom"]
    what: str


@dataclass(frozen=True)
class Headroom:
    """A share of the allocator's limit, from 0 to below 1, and in words where it comes from."""

    share: float = 0.0
    source: str = ""


NO_HEADROOM = Headroom()


def setup_of(device_kind: str, versions: Mapping[str, str | None]) -> Setup:
    """The setup of a device with these versions."""
    plugin = next((f"{name} {versions[name]}" for name in PLUGINS if versions.get(name)), None)
    return Setup(device_kind, versions.get("driver"), versions.get("jax"), versions.get("jaxlib"), plugin)


def seen(row: TrialRecord) -> Seen | None:
    """What a trial teaches, if it was run on an attached GPU with bytes near the limit."""
    total, limit = row.total_bytes, row.limit_bytes
    if not total or not limit or row.config["target"]["kind"] != "attached":
        return None
    is_near = total >= _PEAK_FROM * limit if row.ran == "ok" else _OOM_FROM * limit <= total <= limit
    if row.ran not in ("ok", "oom") or not is_near:
        return None
    setup = setup_of(row.config["target"]["description"], row.versions)
    peak_bytes = row.measured_peak_bytes if row.ran == "ok" else None
    return Seen(setup, total, limit, peak_bytes, row.ran, f"{row.model}, {row.policy}, batch {row.batch}")


def learnt(found: Sequence[Seen]) -> float:
    """The share to leave free, from 0 to below 1.

    With it, every step that ran out of memory would be over the budget, and every peak would fit.

    A step that ran out of memory doesn't count once a step of as many bytes has run: something else had taken the memory.

    Args:
        found: of one setup, oldest first.
    """
    share = 0.0
    for number, one in enumerate(found):
        if one.peak_bytes is not None:
            share = max(share, 1 - one.total_bytes / one.peak_bytes)
        later = [other.total_bytes for other in found[number + 1 :] if other.ran == "ok"]
        if one.ran == "oom" and max(later, default=0) < one.total_bytes:
            share = max(share, 1 - (one.total_bytes - 1) / one.limit_bytes)
    return share


def choose_headroom(
    requested: float | None,
    kind: Literal["attached", "cpu", "deviceless"],
    device_kind: str,
    versions: Mapping[str, str | None],
) -> tuple[Headroom, str]:
    """The headroom of a target, and a note where lines of the file can't be read.

    Args:
        requested: the value of `--headroom`, if it was given. Otherwise the headroom is fitted.
        kind: of the target. For a GPU that isn't here, steps count that were run on the same kind of device with the same
            versions, with any driver. On an attached GPU the driver counts too.
        device_kind: as JAX names the device.
        versions: those of now.
    """
    if requested is not None:
        return Headroom(requested, "as asked with --headroom"), ""
    if kind == "cpu":
        return NO_HEADROOM, ""
    setup, (found, note) = setup_of(device_kind, versions), load()
    same = [one for one in found if _is_alike(one.setup, setup, has_driver=kind == "attached")]
    share = learnt(same)
    if not share:
        return NO_HEADROOM, note
    steps = f"{len(same)} step{'s' if len(same) > 1 else ''}"
    where = "here" if kind == "attached" else f"on an attached {same[-1].setup.device_kind}"
    return Headroom(share, f"learnt from {steps} run {where}"), note


def _is_alike(seen: Setup, now: Setup, *, has_driver: bool) -> bool:
    """Whether a headroom that was seen under one setup counts under another.

    Some kinds of devices add an edition to the name.
    """
    if has_driver or not seen.device_kind.startswith(now.device_kind):
        return seen == now
    return seen == replace(now, driver=seen.driver, device_kind=seen.device_kind)


def headroom_file() -> Path:
    """The file of what was seen: `headroom.jsonl` in the cache folder of `jaxremat`."""
    return cache_folder() / "headroom.jsonl"


def load() -> tuple[list[Seen], str]:
    """What was seen so far, and a note where lines can't be read.

    Without a file, nothing was seen.
    """
    path = headroom_file()
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"the headroom learnt in {path} can't be read ({error.strerror}), and none is used"
    found = list[Seen]()
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            found.append(msgspec.json.decode(line, type=Seen))
    if len(found) == len(lines):
        return found, ""
    damaged = f"{len(lines) - len(found)} of {len(lines)} lines of {path} can't be read"
    return found, f"{damaged}, and the headroom is learnt from the others; delete it to learn anew"


def learn(records: Iterable[Record]) -> str:
    """Appends what the trials among the records teach to the file.

    Returns:
        A note where that can't be written, else "".
    """
    taught = [one for record in records if isinstance(record, TrialRecord) and (one := seen(record))]
    lines = "".join(json.dumps(asdict(one)) + "\n" for one in taught)
    if not lines:
        return ""
    path = headroom_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            is_cut = not (file.read() or b"\n").endswith(b"\n")  # somebody's last line was cut short
            file.write(("\n" * is_cut + lines).encode())
    except OSError as error:
        return f"what these steps teach can't be kept in {path} ({error.strerror}); XDG_CACHE_HOME names another place"
    return ""
