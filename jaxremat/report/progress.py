"""The progress of a command, on stderr.

A terminal and a notebook show one live line. A pipe and CI get one line per stage.

Lines in a pipe, the last one a minute later, if XLA still compiles:

    [   3.2 s] dots: compile 2 of at most 9, batch 64, the largest that fits is about 64; these take at most about 24 s more
    [  63.2 s] still dots: compile 2 of at most 9, batch 64, the largest that fits is about 64
"""

import math
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxremat.report.screen import LEAST_WIDTH
from jaxremat.search.compiles import Compile
from jaxremat.system.interrupt import is_in_xla

#: Seconds after which a pipe gets a line again, so that nobody takes a long compile for a hanging process.
HEARTBEAT_S = 60.0
#: What begins the estimate of the rest at the end of a line.
_REST = "; these take at most about "


def compile_text(what: str, compile: Compile, *about: str) -> str:
    """What is compiled, which compile it is, the estimated batch, and how long the rest takes.

    Of `"dots", Compile(3, 9, 23.4), "batch 8"`: `dots: compile 3 of at most 9, batch 8; these take at most about 24 s more`.
    """
    of = "" if compile.at_most in (None, 1) else f" of at most {compile.at_most}"
    estimate = [] if compile.estimate is None else [f"the largest that fits is about {compile.estimate}"]
    return ", ".join([f"{what}: compile {compile.number}{of}", *about, *estimate]) + rest_text(compile.rest_s)


def estimate_text(what: str, batch: int) -> str:
    """The largest batch as a search estimates it.

    Of `"dots", 118`: `dots: the largest batch that fits is about 118; the proof follows`.
    """
    found = f"the largest batch that fits is about {batch}" if batch else "it is estimated that no batch fits"
    return f"{what}: {found}; the proof follows"


def rest_text(seconds: float | None, begins: str = _REST) -> str:
    """What ends a line: `; these take at most about 3 min more`, in one or two digits.

    Empty for None.
    """
    if seconds is None:
        return ""
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (60, "min")) if seconds <= 99 * size), (3600, "h"))
    return f"{begins}{math.ceil(seconds / size)} {unit} more"


class Progress:
    """A context manager whose `show(text)` prints what is worked on, and the elapsed seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # At the least width a terminal may be narrower, and a live line that it breaks would stay.
        self._live = console.is_terminal and console.width > LEAST_WIDTH and not os.environ.get("CI")
        self._progress: RichProgress | None = None
        self._in_notebook: Any = None
        self._started = time.monotonic()
        self._text, self._shown = "", threading.Event()
        self._ended = False

    def __enter__(self) -> "Progress":
        if self._live:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            same_screen = sys.stdout.isatty()  # otherwise rich would print here what belongs in a file or a pipe
            self._progress = RichProgress(*columns, console=self._console, transient=True, redirect_stdout=same_screen)
            self._task = self._progress.add_task("", total=None, visible=False)
            self._progress.start()
        elif self._console.is_jupyter:
            from IPython.display import display

            self._in_notebook = display({"text/plain": ""}, raw=True, display_id=True)
        else:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def _beat(self) -> None:
        """Repeats the last line where XLA compiles, and nothing else came for `HEARTBEAT_S` seconds.

        Runs in a thread.
        """
        while not self._ended:
            if self._shown.wait(HEARTBEAT_S):
                self._shown.clear()
            elif self._text and is_in_xla() and not self._ended:
                self.line(f"still {self._text.partition(_REST)[0]}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended = True
        self._shown.set()
        if self._progress:
            self._progress.stop()
        if self._in_notebook:
            self._in_notebook.update({"text/plain": ""}, raw=True)

    def show(self, text: str) -> None:
        """Replaces the live line.

        In a pipe or in CI it prints a line with the seconds since the start.
        """
        if self._progress:
            self._progress.reset(self._task, description=text, visible=True)
        elif self._in_notebook:
            self._in_notebook.update({"text/plain": f"{self._elapsed()} {text}"}, raw=True)
        else:
            self._text = text
            self._shown.set()
            self.line(text)

    def line(self, text: str) -> None:
        """Prints a line that stays on the terminal, with the seconds since the start."""
        self._console.print(f"{self._elapsed()} {text}", soft_wrap=True)

    def _elapsed(self) -> str:
        return f"[{time.monotonic() - self._started:6.1f} s]"

    def status(self, text: str) -> None:
        """Changes the text of the live line without a reset of its seconds.

        A pipe and CI get nothing.
        """
        if self._progress:
            self._progress.update(self._task, description=text, visible=True)
