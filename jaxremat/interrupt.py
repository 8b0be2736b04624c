"""Ctrl-C that always ends a run.

Python raises KeyboardInterrupt wherever the main thread happens to be. While JAX traces, that is often a place that discards
the exception: jaxlib's callback on garbage collections, or a hash or a comparison called from C++. An interrupt is therefore
also remembered here, and raised again before the next compile.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Interrupts:
    """Whether Ctrl-C was pressed within `remembered`."""

    pending: bool = False


_interrupts = Interrupts()


@contextlib.contextmanager
def remembered() -> Iterator[Interrupts]:
    """Remembers Ctrl-C within this context. Python's messages about a discarded KeyboardInterrupt aren't printed there.

    This does nothing outside the main thread, nor where the process ignores Ctrl-C or handles it in its own way.
    """
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (handled and threading.current_thread() is threading.main_thread()):
        yield _interrupts
        return

    def interrupt(number: int, frame: object) -> None:
        _interrupts.pending = True
        raise KeyboardInterrupt

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        if found.exc_type is not KeyboardInterrupt:
            show(found)

    show, sys.unraisablehook = sys.unraisablehook, unraisable
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield _interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = show
        _interrupts.pending = False


@contextlib.contextmanager
def deferred() -> Iterator[Interrupts]:
    """A context in which the first Ctrl-C or SIGTERM is only noted, so that a loop can end in its own way.

    The second one raises KeyboardInterrupt. This does nothing outside the main thread, and leaves alone what is ignored.
    """
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def interrupt(number: int, frame: object) -> None:
        if found.pending:
            raise KeyboardInterrupt
        found.pending = True

    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was pressed within `remembered`."""
    if _interrupts.pending:
        raise KeyboardInterrupt
