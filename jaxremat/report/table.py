"""Tables of any rows, and numbers as text for their cells.

They fit in 80 columns, and a number that isn't known is `-`.

print(list_table("policies", ("policy", "GiB"), [("dots", gib_number(2**30))]))
"""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table

from jaxremat.report.screen import FittingTable
from jaxremat.units import gib

#: The width that a terminal shows without breaking lines, in characters.
MAX_WIDTH = 80


def table_of(title: str, *columns: str, left: int = 1, last: int = 0, dropped: Collection[str] = ()) -> Table:
    """A table without rows, at least as wide as its title.

    Args:
        title: what is above the table.
        columns: the columns' titles.
        left: the number of first columns that are text. Text is aligned left and may be broken, numbers are neither.
        last: the number of last columns that are text.
        dropped: the titles of columns that drop out where the table is too wide, the first one first.
    """
    width = min(len(title), MAX_WIDTH)
    style = {"title_justify": "left", "title_style": "bold", "min_width": width}
    table = FittingTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False, **style)
    table.dropped = tuple(dropped)
    for i, column in enumerate(columns):
        is_text = i < left or i >= len(columns) - last
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def list_table(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[RenderableType]], left: int = 1, last: int = 0
) -> Table:
    """A table of `rows`.

    The first `left` columns and the `last` ones are text, the others numbers.
    """
    table = table_of(title, *columns, left=left, last=last)
    for row in rows:
        table.add_row(*row)
    return table


def gib_number(num_bytes: int | None) -> str:
    """Bytes in GiB without the unit: `12.34`, or `-` for None.

    It is for a column whose title has the unit.
    """
    return "-" if num_bytes is None else gib(num_bytes).removesuffix(" GiB")


def number(value: float | None, digits: int = 0, unit: float = 1) -> str:
    """A number in this unit, or `-` for None.

    `number(1.2743, 1, 1e-3)` is `1,274.3`, in ms.
    """
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def counted(count: int, what: str, plural: str = "") -> str:
    """A count and its noun: `1 bucket`, `2 buckets`, or `2 meshes` where a plural is given."""
    return f"{count} {what if count == 1 else plural or f'{what}s'}"


def interval_text(interval: tuple[float, float]) -> str:
    """How much longer a real step may take than predicted.

    It is `±16%`, or `-10..+14%` for several GPUs.
    """
    low, high = (100 * share for share in interval)
    return f"±{high:.0f}%" if -low == high else f"{low:+.0f}..{high:+.0f}%"
