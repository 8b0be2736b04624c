"""What is going on, on stderr: one live line on a terminal, one line per stage in pipes and CI."""

import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    """A context in which `show(text)` says what is being worked on, with the seconds it takes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal and not os.environ.get("CI")
        self._progress: RichProgress | None = None
        self._started = time.monotonic()

    def __enter__(self) -> "Progress":
        if self._live:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            same_screen = sys.stdout.isatty()  # else rich would take what is printed to a file or a pipe, and show it here
            self._progress = RichProgress(*columns, console=self._console, transient=True, redirect_stdout=same_screen)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, text: str) -> None:
        """Replaces the live line, or prints a line with the seconds since the start."""
        if self._progress:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(text, total=None)
        else:
            self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, highlight=False)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(
            f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def status(self, text: str) -> None:
        """What the live line says from now on; pipes and CI don't get it."""
        if self._progress:
            if not self._progress.task_ids:
                self._progress.add_task(text, total=None)
            self._progress.update(self._progress.task_ids[0], description=text)
