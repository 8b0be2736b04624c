"""A signal while a command still imports what it needs.

The process then ends at once with exit code 130, and prints no traceback.

`jaxremat/__init__.py` imports this module first. Where jaxremat is imported by another program, nothing is changed.
"""

import atexit
import os
import signal
import sys
from types import FrameType

#: The signals that end a command, each with the handler that it has in a new Python process.
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
EXIT_CODE = 130
#: The modules that a command starts as processes of its own. The command ends them, and sees which signal did.
STARTED = ("worker", "probe")
#: Ends the process. The name in `os` is replaced while a user's code runs (`workload/user_code.py`).
exit_now = os._exit


def end(number: int, frame: FrameType | None) -> None:
    """Ends the process as a handler of signals, before there is a result that could be lost."""
    try:
        os.write(2, b"jaxremat: interrupted\n")
    finally:
        exit_now(EXIT_CODE)


def is_command() -> bool:
    """Whether this process was started as one of the commands.

    While Python looks for the module of `python -m`, `sys.argv[0]` is `-m`, and the words behind it are those of the command.
    """
    if sys.argv[:1] == ["-m"]:
        words = sys.orig_argv[-len(sys.argv)].removeprefix("-m").split(".")
        return words[0] == "jaxremat" and words[-1] not in STARTED
    return os.path.basename("".join(sys.argv[:1])) == "jaxremat" and not sys.flags.interactive


def ignore() -> None:
    """Ignores the signals.

    Python itself, where it ends, would let them kill the process with its exit code.
    """
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_IGN)


def hear() -> None:
    """Installs `end` where this process is a command.

    A signal that is ignored or handled otherwise is left alone.
    """
    if is_command():
        atexit.register(ignore)
        for number, default in DEFAULTS.items():
            if signal.getsignal(number) is default:
                signal.signal(number, end)


hear()
