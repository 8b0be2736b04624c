"""Ctrl-C and SIGTERM that always end a command, soon, and lose nothing that was found.

Python's handler of a signal runs in the main thread, between two instructions of Python. Two things are in its way:

* While XLA compiles, the main thread is inside C++ for minutes. A thread of this module therefore hears of the signal at once.
  If the main thread hasn't ended the process a moment later, it prints what is known (`says_at_the_end`) and ends the process.
* An exception that is raised while JAX traces is often discarded (in a callback on garbage collections, in a hash or a comparison
  called from C++), and can crash the process. Within `in_xla` a signal is therefore only noted, and raised at its end.
"""

import atexit
import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from jaxremat.system.ahead import is_busy
from jaxremat.system.early import DEFAULTS, EXIT_CODE, end, exit_now, ignore

#: Seconds that the main thread has to end the process before the process ends without it.
GRACE_S = 3.0
#: Seconds after the signal in which the main thread may still print what is known. A large step's record takes several. A second
#: signal ends them.
WORDS_S = 60.0
#: The name of Python's own file of imports.
_IMPORT = "<frozen importlib._bootstrap>"


@dataclass
class Interrupts:
    """Whether a signal came within a context."""

    pending: bool = False


@dataclass
class _Ending(Interrupts):
    """What the process does about a signal.

    Attributes:
        message: what is printed where the process ends without the main thread, after `last_words`.
        num_in_xla: how many contexts `in_xla` the main thread is in.
        last_words: functions that print what is known.
        cleanups: functions that remove what the process leaves behind.
        announce: what is printed at once, where a loop ends in its own way (`deferred`). None outside of one.
        speaker: the thread that prints what is known after a signal. Nothing interrupts it. None where none does.
        speaks: a lock of the thread that prints what is known, so that no other thread ends the process meanwhile.
    """

    message: str = ""
    num_in_xla: int = 0
    last_words: list[Callable[[], None]] = field(default_factory=list)
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    announce: Callable[[], str] | None = None
    speaker: int | None = None
    speaks: threading.RLock = field(default_factory=threading.RLock)


_interrupts = _Ending()


@contextlib.contextmanager
def remembered(message: str = "interrupted") -> Iterator[Interrupts]:
    """A context in which Ctrl-C or SIGTERM raises KeyboardInterrupt once, or ends the process.

    The process ends with `EXIT_CODE`, `GRACE_S` after the signal, if the main thread hasn't ended it.

    This does nothing outside the main thread. A signal that the process ignores or handles in its own way is left alone.

    Args:
        message: what is printed where the process ends without the main thread.
    """
    before = {number: signal.getsignal(number) for number in DEFAULTS}
    heard = [number for number, handler in before.items() if handler in (DEFAULTS[number], end)]
    if not heard or threading.current_thread() is not threading.main_thread():
        yield _interrupts
        return

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        if found.exc_type is not KeyboardInterrupt:
            show(found)

    show, sys.unraisablehook = sys.unraisablehook, unraisable
    _interrupts.message = message
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    try:
        for number in heard:
            signal.signal(number, _interrupt)
        yield _interrupts
    finally:
        for number in heard:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(former)
        os.close(writer)  # which ends the thread
        sys.unraisablehook = show
        _interrupts.pending = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of signals.

    A second signal must not break what the first one has the main thread do, such as printing the results.
    """
    if not _interrupts.pending:
        _interrupts.pending = True
        if not (_interrupts.num_in_xla or _is_importing(frame)):
            raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported.

    An exception within the import of NumPy or JAX can crash the process.
    """
    while frame and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


def _block() -> None:
    """Blocks signals while this process forks."""
    _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, DEFAULTS))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _forget() -> None:
    """Gives a fork of this process the handlers of a new one.

    Ours would tell this process of the fork's signals.

    A user's loader of data may fork, and end its forks by SIGTERM.
    """
    for number, default in DEFAULTS.items():
        if getattr(signal.getsignal(number), "__module__", "") in (__name__, end.__module__):
            signal.signal(number, default)
            signal.set_wakeup_fd(-1)
    _unblock()


_masks: list[set[int]] = []
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)


def _watch(reader: int) -> None:
    """Waits for a signal, and ends the process if the main thread doesn't. Runs in a thread.

    The first signal within `deferred` is announced, and ends nothing here.
    """
    main, signaled, since, was_announced = threading.main_thread().ident, 0.0, None, False
    while True:
        ready, _, _ = select.select([reader], [], [], None if since is None else 0.1)
        numbers = os.read(reader, 16) if ready else b""
        if ready and not numbers:
            os.close(reader)
            return
        for _ in filter(DEFAULTS.__contains__, numbers):
            if _interrupts.announce and not was_announced:
                print(_interrupts.announce(), file=sys.stderr, flush=True)
                was_announced = True
            elif since is None:
                since = signaled = time.monotonic()
            else:  # a second signal waits for no words
                signaled = -math.inf
        now = time.monotonic()
        if since is not None and _interrupts.speaker == main and now < signaled + WORDS_S:
            since = now
        elif since is not None and now > since + GRACE_S:
            _leave()


def _leave() -> None:
    """Prints what is known, and ends the process.

    Where the main thread prints it, and doesn't end, the process ends all the same.
    """
    is_free = _interrupts.speaks.acquire(timeout=GRACE_S)
    try:
        for words in reversed([*_interrupts.last_words] if is_free else []):
            _say(words, is_end=True)
        print(_interrupts.message, file=sys.stderr)
        leave(EXIT_CODE)
    finally:
        if is_free:
            _interrupts.speaks.release()


@contextlib.contextmanager
def in_xla() -> Iterator[None]:
    """A context in which the main thread is inside JAX or XLA.

    A signal in it is only noted, and its end raises KeyboardInterrupt.

    Raises:
        KeyboardInterrupt: a signal came, here or before.
    """
    raise_if_interrupted()
    _interrupts.num_in_xla += 1
    try:
        yield
    finally:
        _interrupts.num_in_xla -= 1
        raise_if_interrupted()


def is_in_xla() -> bool:
    """Whether the main thread is inside JAX or XLA."""
    return _interrupts.num_in_xla > 0


@contextlib.contextmanager
def says_at_the_end(words: Callable[[], None]) -> Iterator[None]:
    """A context whose end calls `words`, which prints what is known.

    It is called also where a signal ends the process inside XLA.
    """
    _interrupts.last_words.append(words)
    try:
        yield
    finally:
        _interrupts.last_words.remove(words)
        _say(words, is_end=_interrupts.pending)


def _say(words: Callable[[], None], *, is_end: bool) -> None:
    """Calls `words`.

    Where a signal ends the process, an error of `words` is only printed, because the exit code is the signal's.
    """
    with _interrupts.speaks:
        _interrupts.speaker = threading.get_ident() if is_end else None
        try:
            words()
        except Exception as error:
            if not is_end:
                raise
            print(f"jaxremat: {error}", file=sys.stderr)
        finally:
            _interrupts.speaker = None


@contextlib.contextmanager
def deferred(announce: Callable[[], str]) -> Iterator[Interrupts]:
    """A context in which the first Ctrl-C or SIGTERM is only noted.

    A loop can then end in its own way.

    The second one raises KeyboardInterrupt. This does nothing outside the main thread, and leaves alone what is ignored.

    Args:
        announce: what is printed at once, such as `finishing step 12`.
    """
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if found.pending:
            _interrupt(number, frame)
        found.pending = True

    heard = [number for number in DEFAULTS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    _interrupts.announce = announce
    try:
        yield found
    finally:
        _interrupts.announce = None
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if a signal came within `remembered`.

    It does nothing in the thread that prints what is known after a signal: making a record enters `in_xla` again.
    """
    if _interrupts.pending and _interrupts.speaker != threading.get_ident():
        raise KeyboardInterrupt


def at_end(cleanup: Callable[[], None]) -> None:
    """Registers a function that removes what the process leaves behind.

    It is called however the process ends by itself.
    """
    atexit.register(cleanup)
    _interrupts.cleanups.append(cleanup)


def leave(code: int) -> None:
    """Ends the process with an exit code.

    It ends at once where threads may still be compiling: after an interrupt, or ahead of what wasn't requested.
    """
    if threading.current_thread() is threading.main_thread():
        ignore()
    if code != EXIT_CODE and not is_busy():
        sys.exit(code)
    for finish in (*_interrupts.cleanups, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            finish()
    exit_now(code)
