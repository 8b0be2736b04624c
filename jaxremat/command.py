"""What every command's `main` does around its own work: it parses flags, and ends without a traceback."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from jaxremat.errors import JaxrematError
from jaxremat.interrupt import remembered

FlagsT = TypeVar("FlagsT")
#: Flags by the name that they had in version 0.1. Version 0.2 still takes it, with a note; version 0.3 will not.
RENAMED_FLAGS = {"--margin": "--headroom"}


def parse_flags(kind: type[FlagsT], argv: Sequence[str], prog: str = "jaxremat") -> FlagsT:
    """The flags of one command. tyro itself prints help or a usage error, and exits with 0 or 2.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments, without the program's name.
        prog: what the command is called in its help and notes.
    """
    arguments = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        name = RENAMED_FLAGS.get(flag, flag)
        if name != flag:
            print(f"{prog}: {flag} is called {name} now", file=sys.stderr)
        arguments.append(f"{name}{equals}{value}")
    return tyro.cli(kind, args=arguments, prog=prog, config=(tyro.conf.FlagCreatePairsOff,))


def run_command(work: Callable[[], int], *, name: str = "jaxremat", kept: str = "") -> int:
    """Runs `work` and returns the exit code: its own, an error's, 130 when interrupted, 1 where stdout was closed.

    Args:
        work: the command.
        name: what its messages begin with.
        kept: what to say of the results so far when interrupted.
    """
    with remembered() as interrupts:
        try:
            try:
                return work()
            finally:
                sys.stdout.flush()  # a closed pipe must show here, not when Python ends
        except JaxrematError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it closes stdout
            return 1
        except (KeyboardInterrupt, Exception) as error:  # half-interrupted, JAX may fail an assertion of its own
            if not (interrupts.pending or isinstance(error, KeyboardInterrupt)):
                raise
            print(f"{name}: interrupted{kept and '; '}{kept}", file=sys.stderr)
            return 130
