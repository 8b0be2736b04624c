"""What every command's `main` does around its own work: errors in one piece, interrupts and closed pipes without a traceback."""

import os
import sys
from collections.abc import Callable

from jaxremat.errors import JaxrematError
from jaxremat.interrupt import remembered


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
