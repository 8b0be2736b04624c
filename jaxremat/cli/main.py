"""The command `jaxremat`, also `python -m jaxremat`: it starts one of the commands.

jaxremat run --policy dots          # what `python -m jaxremat.run --policy dots` does
jaxremat --policy dots              # the same: run is the command where none is named
"""

import importlib
import sys
from collections.abc import Sequence

from jaxremat.cli.command import COMMANDS, run_command
from jaxremat.cli.help import HELP
from jaxremat.errors import UsageError, nearest
from jaxremat.system.interrupt import leave


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit code.

    Args:
        argv: the arguments. None takes the process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        print(overview())
        return 0
    if words[0].startswith("-"):
        words = ["run", *words]
    name, *sys.argv[1:] = words
    if name not in COMMANDS:
        return run_command(lambda: _reject_command(name))
    return importlib.import_module(f"jaxremat.cli.{name}").main()


def _reject_command(name: str) -> int:
    raise UsageError(
        f"unknown command {name!r}", allowed=", ".join(COMMANDS), next_step=nearest(name, COMMANDS) or "jaxremat --help"
    )


def overview() -> str:
    """The commands, each with what it answers."""
    rows = (f"  {name:12}{what}" for name, what in COMMANDS.items())
    return "\n".join(
        ["usage: jaxremat COMMAND [FLAG [VALUE ...] ...]", "", *rows, "", "jaxremat COMMAND --help shows its flags."]
    )


def former(name: str) -> None:
    """Runs a command under its former name, `python -m jaxremat.NAME`, with a note.

    Version 0.3 won't have these names.
    """
    print(f"jaxremat: python -m jaxremat.{name} is called jaxremat {name} now", file=sys.stderr)
    leave(main([name, *sys.argv[1:]]))


def script() -> None:
    """The entry point of the script `jaxremat`."""
    leave(main())


if __name__ == "__main__":
    script()
