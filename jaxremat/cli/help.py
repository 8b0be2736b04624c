"""The help of a command: its description, and its flags by group, in 80 columns.

A flag's text is the docstring below its field. A group's title is the beginning of a docstring, too: that of the dataclass that
has the flags as its fields.
"""

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from jaxremat.session.fields import Flag

HELP, HELP_ALL = ("--help", "-h"), "--help-all"
#: The characters of a line, and where its right column begins.
_WIDTH, _COLUMN = 80, 27
#: By command, what its usage line has before and after the flags.
_BESIDE = {"jaxremat diff": ("[A [B]] ", " [-- FLAGS]")}


def help_text(kind: type, flags: "Sequence[Flag]", prog: str, epilogue: str = "", num_more: int = 0) -> str:
    """The help of a command.

    Args:
        kind: the dataclass of the flags, whose docstring is the description.
        flags: those that are shown.
        prog: the command, as it is typed.
        epilogue: the last lines.
        num_more: how many flags aren't shown. Where there are any, each flag's text is one sentence.
    """
    before, after = _BESIDE.get(prog, ("", ""))
    lines = [f"usage: {prog} {before}[FLAG [VALUE ...] ...]{after}", ""]
    for paragraph in (inspect.getdoc(kind) or "").split("\n\n"):
        lines += [*textwrap.wrap(paragraph, _WIDTH), ""]
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(_title(flag, kind), []).append(flag)
    own = groups.pop("", [])
    for title, of_group in (*groups.items(), (f"{prog} alone" if groups else "flags", own)):
        if of_group:
            lines += [f"{title}:", *(line for flag in of_group for line in _lines(flag, is_short=num_more > 0)), ""]
    if num_more:
        lines.append(f"{HELP_ALL} shows {num_more} more flags, and says more of each.")
    return "\n".join([*lines, *textwrap.wrap(epilogue, _WIDTH)])


def help_of(flag: "Flag") -> str:
    """The text of a flag: the docstring below its field, unless its parameter has one."""
    return flag.parameter.help or _docstring(flag.owner, flag.field)


def _lines(flag: "Flag", *, is_short: bool) -> list[str]:
    """The flag with its metavar on the left, and its text on the right or below."""
    text = help_of(flag)
    if flag.default not in (None, (), False, "") and "Default:" not in text:
        text = f"{text.rstrip('.')}. Default: {flag.default}."
    if is_short:
        sentence, default = re.match(r"(.*?)[.;](?: |$)", text), re.search(r" Default: .*", text)
        text = (f"{sentence[1]}." if sentence else text) + (default[0] if default else "")
    right = textwrap.wrap(f"{text} Required." if flag.required else text, _WIDTH - _COLUMN, break_on_hyphens=False)
    names = ", ".join((*flag.parameter.alias, flag.name))  # pyright: ignore[reportOptionalIterable]
    left = f"{names} {flag.parameter.metavar or _metavar(flag.kind)}".rstrip()
    above = []
    if len(left) > _COLUMN - 4:
        above, left = textwrap.wrap(left, _WIDTH, initial_indent="  ", subsequent_indent="      "), ""
    return [*above, f"  {left:{_COLUMN - 2}}{right[0]}", *(" " * _COLUMN + line for line in right[1:])]


def _metavar(kind: Any) -> str:
    """The placeholder of the value where the flag names none."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {bool: "", int: "N", float: "NUMBER"}.get(kind, "VALUE")


def _title(flag: "Flag", kind: type) -> str:
    """The title of the flag's group. Empty for the flags of the command alone."""
    if flag.group:
        return _docstring(*flag.group).partition(".")[0]
    return "" if flag.owner is kind else re.split("[:.\n]", inspect.getdoc(flag.owner) or "", maxsplit=1)[0]


def _docstring(owner: type, name: str) -> str:
    """The docstring below a field of a dataclass, in one line. Empty where there is none."""
    return _docstrings(owner).get(name, "")


@functools.cache
def _docstrings(owner: type) -> dict[str, str]:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(found, ast.ClassDef)
    return {
        node.target.id: " ".join(str(below.value.value).split())
        for node, below in itertools.pairwise(found.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
