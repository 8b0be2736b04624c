"""A claim as data: the steps that check it, and a function of their rows that gives its number and its plots."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.claims.steps import TARGETS, step
from experiments.common import Row, only

LAYOUTS = {False: "unrolled", True: "scan"}


@dataclass(frozen=True)
class Picture:
    """A plot: lines through points, or bars.

    Attributes:
        x, y: what the axes show.
        series: by label, its points. The first element of a point is a number for lines, and a name for bars.
        kind: `stack` puts the bars of all series on top of each other, `bars` side by side.
        log: the axes of lines with a logarithmic scale: `x` or `xy`.
        from_zero: whether the vertical axis of lines begins at 0.
    """

    x: str
    y: str
    series: Mapping[str, Sequence[tuple[Any, float]]]
    kind: Literal["lines", "bars", "stack"] = "lines"
    log: Literal["", "x", "xy"] = ""
    from_zero: bool = True


#: The numbers that the rows of one target give, in words, and the plots of these rows, which stand side by side.
Found = tuple[str, tuple[Picture, ...]]
#: A field of rows, or a function of a row.
Of = str | Callable[[Row], Any]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        name: the name of its files.
        title: its heading on the page.
        steps: the steps that check it, for the first of the targets.
        reads: the fields that `found` reads, beside those of the steps. The others of what is found aren't filed.
        found: gives the number and the plots of the rows of one target.
    """

    name: str
    title: str
    steps: Sequence[Row]
    reads: tuple[str, ...]
    found: Callable[[Sequence[Row]], Found]

    def all_steps(self) -> list[Row]:
        """The steps for all targets, one target after the other."""
        return [step(**{**one, "target": target}) for target in TARGETS for one in self.steps]

    def split(self, row: Row) -> tuple[Row, Row]:
        """The step of a filed row, and what was found of it."""
        found = {name: value for name, value in row.items() if name in (*self.reads, "took_s")}
        return {name: value for name, value in row.items() if name not in found}, found


def claim(title: str, steps: Iterable[Row], *reads: str) -> Callable[[Callable[[Sequence[Row]], Found]], Claim]:
    """Makes a claim of the function of its rows. The function's name is the claim's."""
    return lambda found: Claim(found.__name__, title, tuple(steps), reads, found)


def series(rows: Iterable[Row], label: Of, x: Of, y: Of) -> dict[str, list[tuple[Any, float]]]:
    """By label, the points of the rows."""
    points: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        name, at, value = (row[of] if isinstance(of, str) else of(row) for of in (label, x, y))
        points.setdefault(name, []).append((at, value))
    return points


def gib_of(row: Row, field: str = "total_bytes") -> float:
    """A field of a row in GiB."""
    return row[field] / 2**30


def ms_of(row: Row) -> float:
    """The predicted milliseconds of a step."""
    return 1e3 * row["step_s"]


def layout_of(row: Row) -> str:
    """How the layers of a step run."""
    return LAYOUTS[row["scan_layers"]]


def case_of(row: Row) -> str:
    """The model and the layout, on two lines."""
    return f"{row['preset']}\n{layout_of(row)}"


def times_none(rows: Sequence[Row], field: str, row: Row) -> float:
    """A field of a row, times that of the same model in the same layout under `none`."""
    none = only(rows, what=row["what"], preset=row["preset"], scan_layers=row["scan_layers"], policy="none")
    return row[field] / none[field]
