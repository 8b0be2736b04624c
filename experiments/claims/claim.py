"""A claim as data: who says it, the steps that it is checked by, and how their rows are judged.

    steps of the claim -> rows, one a step -> Judgement, which the page shows -> Picture, which is drawn

Judgements and pictures are made of the rows alone. So they can be made again from the filed rows, and nothing is compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.claims.steps import Step, for_all_targets
from experiments.common import Row

Size = Literal["full", "tiny"]
#: `open`: it can't be decided without running on a GPU.
Verdict = Literal["holds", "holds under conditions", "refuted", "open"]


@dataclass(frozen=True)
class Judgement:
    """What the rows of a claim say. Every measured number of it is computed from the rows.

    Attributes:
        ours: the numbers that stand beside those of the claim.
        verdict: whether the claim holds.
        sentences: what holds, on what, and under which conditions.
        table: the first line has the columns' titles, and the others have a row each.
    """

    ours: str
    verdict: Verdict
    sentences: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A plot: lines through points, or bars.

    Attributes:
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        series: by label, its points. The first element of a point is a number for lines, and a name for bars.
        kind: `stack` puts the bars of all series on top of each other, `bars` side by side.
        log: the axes with a logarithmic scale: `x`, `y` or `xy`.
        ticks: whether the horizontal axis of lines is marked at the points themselves, if they are few.
        zero: whether the vertical axis of lines begins at 0.
    """

    x: str
    y: str
    series: Mapping[str, Sequence[tuple[Any, float]]]
    kind: Literal["lines", "bars", "stack"] = "lines"
    log: Literal["", "x", "y", "xy"] = ""
    ticks: bool = True
    zero: bool = True


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        name: the name of its module and of its files.
        title: the heading on the page.
        source: who says it.
        says: what they say, with their numbers.
        on: what it is checked on: the models and the lengths.
        steps: the steps to measure, at a size, for the first of the targets. `tiny` takes seconds, and its rows say nothing about
            the claim.
        judge: judges the rows, which are in the order of the steps.
        picture: the plot of the rows, or several that stand side by side.
    """

    name: str
    title: str
    source: str
    says: str
    on: str
    steps: Callable[[Size], Sequence[Step]]
    judge: Callable[[Sequence[Row]], Judgement]
    picture: Callable[[Sequence[Row]], Picture | tuple[Picture, ...]]


def steps_of(claim: Claim, size: Size) -> list[Step]:
    """The steps of a claim for all targets, one target after the other. Toy steps are for the first target alone."""
    steps = list(claim.steps(size))
    return for_all_targets(steps) if size == "full" else steps
