"""The report of `jaxremat diff`: tables of steps and of who holds the memory, and lines."""

import textwrap
from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType

from jaxremat.report.explain import short_label
from jaxremat.report.table import counted, gib_number, list_table, number
from jaxremat.trial.difference import Changes, PeakChange, StepChange
from jaxremat.units import signed_gib
from jaxremat.xla.buffers import shape_change
from jaxremat.xla.dump import short_source

#: The fewest bytes that aren't 0.000 GiB.
_SHOWN = 2**30 / 2000
#: The width at which the name of a side breaks above its column.
_HEAD_WIDTH = 12


def changes_report(
    changes: Changes, num_rows: int, names: tuple[str, str] = ("before", "after")
) -> Iterator[RenderableType]:
    """The tables and lines that show `changes`.

    Args:
        changes: the changes.
        num_rows: how many rows of a step the table of what holds the memory has.
        names: what the two sides are called, such as `main` and `the working tree`.
    """
    if changes.versions:
        each = (f"{name} {before or '-'} became {after or '-'}" for name, (before, after) in changes.versions.items())
        yield f"Versions: {', '.join(each)}."
    if changed := [step for step in changes.steps if step.differs]:
        cells: dict[str, Callable[[StepChange], str]] = {
            "GiB": lambda step: _pair(step.total_bytes, gib_number),
            "TFLOP": lambda step: _pair(step.executed_flops, lambda flops: number(flops, 2, 1e12)),
            "predicted ms": lambda step: _pair(step.step_s, lambda seconds: number(seconds, 1, 1e-3)),
            "largest batch": lambda step: _pair(step.largest_batch, number),
        }
        known = {title: cell for title, cell in cells.items() if any(cell(step) != "-" for step in changed)}
        rows = [(step.step, *(cell(step) for cell in known.values())) for step in changed]
        yield list_table(f"what changed from {names[0]} to {names[1]}", ("step", *known), rows)
    if changes.at_peak:
        by_step: dict[str, list[PeakChange]] = {}
        for change in changes.at_peak:
            by_step.setdefault(change.step, []).append(change)
        for step, found in by_step.items():
            yield _peak_table(step, found, num_rows, names)
    for step in changes.steps:
        for side, error in zip(names, step.error, strict=True):
            if error and len({*step.error}) > 1:
                yield f"{step.step}: failed in {side}: {error}"
    for side, steps in zip(names, changes.only, strict=True):
        yield from (f"Only in {side}: {step}." for step in steps)
    same = len(changes.steps) - len(changed)
    yield f"Without a difference: {counted(same, 'step')} of {len(changes.steps)}."


def _peak_table(step: str, found: Sequence[PeakChange], num_rows: int, names: tuple[str, str]) -> RenderableType:
    """Where the bytes at the peak differ, the largest differences first.

    The line and the shape of a name are below it. What differs by 0.000 GiB is counted below the rest, such as buffers that XLA
    has numbered anew.
    """
    num_shown = sum(abs(change.num_bytes[1] - change.num_bytes[0]) >= _SHOWN for change in found)
    num_rows = min(num_rows, num_shown or num_rows)
    rows = [
        (
            change.category,
            "\n".join(filter(None, (short_label(change.label) or "-", short_source(change.source), _shape(change)))),
            *map(gib_number, change.num_bytes),
            signed_gib(change.num_bytes[1] - change.num_bytes[0]).removesuffix(" GiB"),
        )
        for change in found[:num_rows]
    ]
    if rest := found[num_rows:]:
        difference = sum(change.num_bytes[1] - change.num_bytes[0] for change in rest)
        rows.append((f"{len(rest)} more", "", "", "", signed_gib(difference).removesuffix(" GiB")))
    first, second = ("\n".join(textwrap.wrap(name, _HEAD_WIDTH)) for name in (f"GiB {names[0]}", names[1]))
    return list_table(f"who holds the peak: {step}", ("category", "name", first, second, "change"), rows, left=2)


def _shape(change: PeakChange) -> str:
    """The shape of each buffer of a name, and what it became.

    A side without bytes has that of the other.
    """
    before, after = change.shapes
    return shape_change(before if change.num_bytes[0] else after, after if change.num_bytes[1] else before)


def _pair(pair: tuple[float | None, float | None], shown: Callable[..., str]) -> str:
    """The second number, and by how much it is above the first: `3.00 (+50.0%)`."""
    before, after = pair
    if before is None or after is None or not before:
        return " to ".join(dict.fromkeys(map(shown, pair)))
    return shown(after) + (f" ({after / before - 1:+.1%})" if after != before else "")
