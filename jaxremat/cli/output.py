"""What commands print around their answers.

These are the notes, the heading, and the report with its progress.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxremat.session.flags import StepFlags
from jaxremat.session.session import note

if TYPE_CHECKING:
    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.session.session import Session
    from jaxremat.trial.store import Store


def say_notes(store: "Store") -> None:
    """Prints, once, which lines of a store are damaged or can't be right."""
    for text in dict.fromkeys(store.notes):
        note(f"jaxremat: {text}")
    store.notes.clear()


@contextlib.contextmanager
def reporting(flags: StepFlags, *, quiet: bool = False) -> "Iterator[tuple[Report, Progress]]":
    """A context manager that yields the report for the command's results, and its progress.

    Both are open until it ends.

    With `quiet` neither prints anything.
    """
    from jaxremat.report.printer import Report
    from jaxremat.report.progress import Progress
    from jaxremat.report.screen import shared_screen
    from jaxremat.trial.store import Store

    with contextlib.ExitStack() as stack:
        out = stack.enter_context(Store(flags.out)) if flags.out else None
        if out:
            say_notes(out)
            stack.callback(say_notes, out)
        screen = shared_screen(quiet=quiet)
        progress = stack.enter_context(Progress(screen.progress))
        progress.show("starting JAX")
        yield Report(screen.results, as_json=flags.json, out=out), progress


def show_heading(
    session: "Session", report: "Report", note: Callable[[str], None] = note, before: "Sequence[Session]" = ()
) -> None:
    """Prints what a person should know before the answers.

    Args:
        session: the session whose heading is printed.
        report: where the results go.
        note: prints what isn't part of the results.
        before: the sessions whose headings were printed before. Lines of theirs aren't printed again.
    """
    known = {line for one in before for line in (*one.heading, *one.warnings)}
    for warning in session.warnings:
        if warning not in known:
            note(f"jaxremat: {warning}")
    report.say(*([""] if before else []), *(line for line in session.heading if line not in known))
