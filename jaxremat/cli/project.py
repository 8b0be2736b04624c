"""The defaults of a project: flags in the table `[tool.jaxremat]` of its `pyproject.toml`.

    [tool.jaxremat]
    target = "a100-80gb"
    budget = "70GiB"

    [tool.jaxremat.run]
    policy = ["none", "dots"]

The file is the one of the current folder, or of the nearest folder above it. A flag of the command line wins.
"""

import difflib
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxremat.errors import UsageError, bad_value, flag_of, nearest
from jaxremat.session.fields import Flag, flags_of
from jaxremat.system.files import parse_toml

_FILE, _TABLE = "pyproject.toml", "tool.jaxremat"
#: The names of the tools that a file has tables of.
_TOOLS = re.compile(r"^\s*\[tool\.([\w-]+)", re.MULTILINE)
#: Flags of which a command takes one.
_ONE_OF = ("model", "hf", "maxtext")
#: By a typed flag, the default that it stands in for: a task of an array job submits no job.
_IN_PLACE_OF = {"shard": "submit"}


def project_words(
    kind: type, argv: Sequence[str], name: str, commands: Sequence[str], folder: Path | None = None
) -> list[str]:
    """The words of the project's defaults for a command, without those of typed flags.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments of the command line.
        name: the command, such as `run`.
        commands: all commands, which may have tables of their own.
        folder: where the file is looked for. None takes the current folder.

    Raises:
        UsageError: the file can't be read, or has a flag that no command knows, or a value that no flag has.
    """
    path, table = _table_at(folder or Path.cwd())
    if path is None:
        return []
    of_command = {key: value for key, value in table.items() if isinstance(value, dict)}
    if unknown := next((key for key in of_command if key not in commands), None):
        raise _unknown(path, f"[{_TABLE}.{unknown}]", unknown, commands)
    flags = {flag.field: flag for flag in flags_of(kind)}
    common = {key: value for key, value in table.items() if key not in of_command}
    own = {_field(key): value for key, value in of_command.get(name, {}).items()}
    defaults = {_field(key): value for key, value in common.items()} | own
    if unknown := next(
        (key for key in defaults if key not in flags and not (key not in own and commands_with(key, commands))), None
    ):
        raise _unknown(path, f"{unknown} in [{_TABLE}]", unknown, [*flags])
    typed = {flag.field for flag in flags.values() if _is_typed(flag, argv)}
    typed |= {*_ONE_OF} if typed & {*_ONE_OF} else set()
    typed |= {other for flag, other in _IN_PLACE_OF.items() if flag in typed}
    return [
        word
        for key, value in defaults.items()
        if key in flags and key not in typed
        for word in _words(flags[key], value, path)
    ]


def _table_at(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """The nearest file with the table, and the table."""
    for path in (at / _FILE for at in (folder, *folder.parents)):
        try:
            content = path.read_bytes().decode()
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return None, {}  # another tool's to say
        if near := next((name for name in _TOOLS.findall(content) if _is_misspelt(name)), None):
            raise UsageError(f"{path} has [tool.{near}], which isn't known", next_step=f"did you mean [{_TABLE}]?")
        if "jaxremat" not in content:
            return None, {}
        try:
            table = parse_toml(content).get("tool", {}).get("jaxremat")
        except ValueError as error:
            raise UsageError(f"{path} isn't TOML: {error}", next_step="mend the file") from None
        if table is not None and not isinstance(table, dict):
            raise UsageError(f"{path} has no table [{_TABLE}]: {table!r}", next_step=f"[{_TABLE}] and a line for each flag")
        return (path, table) if table else (None, {})
    return None, {}


def _is_misspelt(name: str) -> bool:
    """Whether a tool's name is nearly ours."""
    return name != "jaxremat" and difflib.SequenceMatcher(None, name, "jaxremat").ratio() > 0.85


def _field(key: str) -> str:
    return key.replace("-", "_")


def _is_typed(flag: Flag, argv: Sequence[str]) -> bool:
    names = (flag.name, *(flag.parameter.alias or ()))
    return any(word.partition("=")[0].replace("_", "-") in names for word in argv)


def commands_with(field: str, commands: Sequence[str]) -> list[str]:
    """Those of `commands` that have a flag."""
    return [command for command in commands if any(field == flag.field for flag in flags_of(_kind_of(command)))]


def _kind_of(command: str) -> type:
    """The dataclass of a command's flags, such as `ExplainFlags` in `cli/explain.py`."""
    found = vars(importlib.import_module(f"jaxremat.cli.{command}"))
    return next(kind for name, kind in found.items() if re.fullmatch(f"{command}(run)?flags", name.lower()))


def _unknown(path: Path, got: str, name: str, known: Sequence[str]) -> UsageError:
    return UsageError(f"{path} has {got}, which isn't known", next_step=nearest(name, known) or "jaxremat run --help-all")


def _words(flag: Flag, value: Any, path: Path) -> Iterator[str]:
    """The words of one default, as they would be typed."""
    values = value if isinstance(value, list) else [value]
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise bad_value(f"{flag.field} in {path}", repr(value), "true or false", f"{flag.field} = true")
        yield from [flag.name] if value else []
    elif not values or not all(isinstance(one, str | int | float) for one in values):
        raise bad_value(f"{flag.field} in {path}", repr(value), "text, a number or a list of them", f'{flag.field} = "..."')
    else:
        yield flag_of(flag.field)
        yield from map(str, values)
