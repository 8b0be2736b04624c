"""The consoles of the commands, tables at any width, and text that breaks at separators.

    screen = shared_screen()
    screen.results.print(table)

Text from outside (paths, names of tensors, what a user's code prints) is never read as rich's markup. No digit is cut: where a
table is too wide, columns drop out, and in a narrow terminal each row becomes a few lines.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

#: Below this width each row of a table is printed as several lines.
CARDS_BELOW = 46
#: No terminal is narrower for us. Narrower ones, such as one of COLUMNS=1, break the lines themselves.
LEAST_WIDTH = 20
#: A width in columns at which no table and no sentence is broken.
_WHOLE = 10**4
#: What a table has in common with the one that is printed in its place.
_STYLES = ("box", "pad_edge", "title_justify", "title_style", "collapse_padding", "padding")
#: Where a long word may be broken: behind a separator, of a shape too (`f32[8,|1024]`), but not within a number such as 131,722.
_BREAKS = re.compile(r"(?<=[/:+;|])(?=.)|(?<=,)(?=\D|[\d,]*\])|(?<=\.)(?=[^\d\s.])")
#: Where a piece may be broken that is too long for a line of its own.
_LAST_BREAKS = re.compile(r"(?<=[_-])(?=[^_-])")


@dataclass(frozen=True)
class Screen:
    """Where a command prints.

    Attributes:
        results: prints results.
        progress: prints the progress. The same as `results` where both are on one terminal, which then has the line of progress
            below what is printed.
    """

    results: Console
    progress: Console


def shared_screen(*, quiet: bool = False) -> Screen:
    """The consoles of stdout and stderr. With `quiet` neither prints anything."""
    results, progress = _console(quiet=quiet), _console(stderr=True, quiet=quiet)
    is_one = results.is_terminal and progress.is_terminal
    return Screen(results, results if is_one else progress)


def print_whole(console: Console, table: Table) -> None:
    """Prints a table that is meant for copying.

    In a pipe or a file its lines are as long as they need to be.
    """
    width = console.width
    console.width = width if console.is_terminal else _WHOLE
    try:
        console.print(table)
    finally:
        console.width = width


def print_text(console: Console, *sentences: str) -> None:
    """Prints sentences, a line each.

    Long ones are broken at the console's width, and no line ends with a blank.
    """
    for sentence in sentences:
        lines = Text(broken(sentence, console.width)).wrap(console, console.width, overflow="fold")
        console.print(Text("\n".join(line.plain.rstrip() for line in lines)), soft_wrap=True)


def _console(*, stderr: bool = False, quiet: bool = False) -> Console:
    width = os.environ.get("COLUMNS", "")
    columns = int(width) if width.isascii() and width.isdigit() and 0 < int(width) < _WHOLE else None
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    where = {"file": sys.stderr if stderr else sys.stdout, "width": columns, "_environ": environment}
    console = Console(quiet=quiet, markup=False, highlight=False, emoji=False, **where)
    console.width = max(console.width, LEAST_WIDTH)
    return console


def broken(text: str, width: int) -> str:
    """The text with line breaks in words longer than `width`, behind separators.

    A piece without separators stays whole.

    Where a piece is longer than `width`, `_` and `-` are separators, too.

    `broken("save:wi_0,wi_1", 10)` is `"save:wi_0,\\nwi_1"`.
    """
    return re.sub(r"\S+", lambda word: "\n".join(_pieces(word[0], width)), text)


def _pieces(word: str, width: int) -> Iterator[str]:
    """The lines of a word: each as long as `width` allows."""
    line, pieces = "", _BREAKS.split(word) if cell_len(word) > width else [word]
    for piece in (part for one in pieces for part in (_LAST_BREAKS.split(one) if cell_len(one) > width else [one])):
        if line and cell_len(line) + cell_len(piece) > width:
            yield line
            line = ""
        line += piece
    yield line


class FittingTable(Table):
    """A table at any width: columns drop out where it is too wide.

    In a narrow terminal each row is some lines.

    A table in a pipe or in a file has no blanks at the ends of its lines.

    Attributes:
        dropped: the titles of the columns that drop out, the first one first.
    """

    dropped: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = None if options.max_width < CARDS_BELOW else self._fitting(console, options.max_width)
        for line in Segment.split_lines(console.render(shown or Group(*self._cards(options.max_width)), options)):
            yield from line if console.is_terminal else [Segment("".join(segment.text for segment in line).rstrip())]
            yield Segment.line()

    def _fitting(self, console: Console, width: int) -> Table | None:
        """The table with as many columns as fit. None where too few columns do."""
        dropped = [column for name in self.dropped for column in self.columns if column.header == name]
        for count in range(len(dropped) + 1):
            columns = [column for column in self.columns if column not in dropped[:count]]
            sizes = [_widths(column) for column in columns]
            widths = [most for _, most in sizes]
            wide = self._with_widths(columns, widths, width)
            over = console.measure(wide, options=console.options.update_width(_WHOLE)).maximum - width
            if over > sum(most - least for least, most in sizes):
                continue
            for _ in range(over):
                _, widest = max((own, number) for number, own in enumerate(widths) if own > sizes[number][0])
                widths[widest] -= 1
            return self._with_widths(columns, widths, width)
        return None

    def _with_widths(self, columns: list[Column], widths: list[int], width: int) -> Table:
        """The same table of some of its columns, each of a fixed width.

        It is at most `width` columns of the terminal wide.
        """
        least = min(self.min_width or 0, width)
        title = broken(str(self.title), least or width) if self.title else None
        shown = Table(title=title, min_width=least, **{name: getattr(self, name) for name in _STYLES})
        for column, own in zip(columns, widths, strict=True):
            shown.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow="fold", width=own)
        for row, cells in zip(self.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
            parts = zip(cells, columns, widths, strict=True)
            texts = (cell if c.no_wrap else Text(broken(str(cell), own), overflow="fold") for cell, c, own in parts)
            shown.add_row(*texts, style=row.style)
        return shown

    def _cards(self, width: int) -> Iterator[Text]:
        """Each row as lines of a title and a value, the first column as a heading."""
        if self.title:
            yield Text(broken(str(self.title), width), style=self.title_style or "")
        titles = [str(column.header).replace("\n", " ") for column in self.columns]
        rows = zip(*(column.cells for column in self.columns), strict=True)
        for row, (heading, *cells) in zip(self.rows, rows, strict=True):
            yield Text(f"\n{broken(str(heading), width)}", style=row.style or "", overflow="fold")
            for title, cell in zip(titles[1:], cells, strict=True):
                text = f"{title} {cell}" if cell_len(title) + cell_len(str(cell)) < width - 2 else f"{title}\n{cell}"
                lines = broken(text, width - 2).replace("\n", "\n  ")
                yield Text(f"  {lines}", style=row.style or "", overflow="fold")


def _widths(column: Column) -> tuple[int, int]:
    """The least width of a column, and the width of its longest line.

    At the least width nothing is broken elsewhere than at separators.
    """
    texts = [str(column.header), *map(str, column.cells)]
    most = max((cell_len(line) for text in texts for line in text.splitlines()), default=0)
    pieces = [piece for text in texts for word in text.split() for piece in _BREAKS.split(word)]
    return (most if column.no_wrap else max(map(cell_len, pieces), default=0)), most
