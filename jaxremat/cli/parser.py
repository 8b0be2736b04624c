"""The arguments of a command as a dataclass of flags (`session/fields.py`).

    parse_argv(Flags, ["--batch", "8,16"], "jaxremat run")      # Flags(batch=(8, 16))

Cyclopts splits the arguments. Its errors become a `UsageError`.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.exceptions import (
    CoercionError,
    ConsumeMultipleError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from jaxremat.cli.help import HELP, HELP_ALL, help_of, help_text
from jaxremat.errors import UsageError, bad_value, closest, did_you_mean
from jaxremat.session.fields import Flag, FlagsT, filled, flags_of

#: What other tools call a flag, as patterns, and the flags that mean it here.
_ELSEWHERE = (
    (r"^grad.*acc|^acc.*step|micro-?batches", "accumulate global-batch"),
    (r"micro-?batch|per-device.*batch|^bs$", "batch accumulate"),
    (r"checkpoint|^remat", "policy"),
    (r"^(n|num)?-?gpus?$|^gpus?-(type|name)$|^accelerator", "target devices"),
    (r"context|block-size|seq.*len|max-len", "seq-len"),
    (r"precision|bf16|fp16|weight-dtype", "dtype param-dtype"),
    (r"gpu-mem|memory-limit|^hbm|vram", "budget mem-fraction"),
    (r"^(tp|dp|ddp|fsdp|zero)\b|parallel", "mesh devices"),
)


def parse_argv(
    kind: type[FlagsT],
    argv: Sequence[str],
    prog: str,
    *,
    common: Sequence[str] = (),
    epilogue: str = "",
    whose: Callable[[str], Sequence[str]] = lambda _: (),
) -> FlagsT:
    """The flags that `argv` gives. `--help` and `--help-all` print the help and exit with 0.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments, without the program's name.
        prog: the command's name in its help.
        common: the names of the fields that `--help` shows. Without any it shows all.
        epilogue: the last lines of the help.
        whose: the other commands that have a flag, by its field.

    Raises:
        UsageError: an argument isn't a flag, or a value isn't allowed.
    """
    flags = list(flags_of(kind))
    if helps := {*argv} & {*HELP, HELP_ALL}:
        shown = [flag for flag in flags if HELP_ALL in helps or not common or flag.field in common]
        print(help_text(kind, shown, prog, epilogue, num_more=len(flags) - len(shown)))
        raise SystemExit(0)
    try:
        _, bound, _ = _app(prog, flags).parse_args(list(argv), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        if isinstance(error, UnknownOptionError):
            raise _unknown(error.token.keyword or error.token.value, argv, flags, prog, whose) from None
        raise _usage_error(error, flags, prog) from None
    given = bound.arguments
    if missing := next((flag for flag in flags if flag.required and flag.field not in given), None):
        raise UsageError(f"{missing.name} is required", next_step=_written(missing))
    return filled(kind, {flag.path: given[flag.field] for flag in flags if flag.field in given})


def _app(prog: str, flags: Sequence[Flag]) -> App:
    """The command as cyclopts has it: a function whose arguments are the flags."""

    def command(**values: Any) -> dict[str, Any]:
        return values

    def parameter(flag: Flag) -> inspect.Parameter:
        # Any, as the converter has made a value of the text, and cyclopts checks it by pydantic where that was imported. No type
        # has None in it, which the word none would then be.
        text, unset = (bool, False) if flag.kind is bool else (tuple[Any, ...], ()) if flag.is_several else (Any, None)
        kind: Any = Annotated[text, flag.parameter]
        return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=unset, annotation=kind)

    command.__signature__ = inspect.Signature([*map(parameter, flags)])  # pyright: ignore[reportFunctionMemberAccess]
    return App(prog, default_command=command, version_flags=(), help_flags=(), default_parameter=Parameter(negative=""))


def _written(flag: Flag) -> str:
    return f"write it like {flag.name} {flag.parameter.metavar or 'VALUE'}"


def _meant(word: str, flags: Sequence[Flag]) -> str:
    """The question which flag is meant. Empty where none is near.

    It is one that begins so or has a letter off, one that abbreviates the word, one whose help has the word, or one that is near.

    For `--sequence-length` it is `--seq-len`, and for `--microbatches` `--accumulate`, whose help speaks of microbatches.
    """
    typed = word.partition("=")[0].strip("-").replace("_", "-").lower()
    if len(typed) < 2:
        return ""
    names = {flag.name.strip("-"): flag for flag in flags}
    named = [name for name in names if _abbreviates(name, typed)]
    said = re.compile(rf"\b{re.escape(typed.replace('-', ' '))}\b", re.IGNORECASE)
    speak = {
        name: at.start() for name, flag in names.items() if (at := said.search(f"{help_of(flag)} {flag.parameter.metavar}"))
    }
    elsewhere = [name for pattern, of in _ELSEWHERE if re.search(pattern, typed) for name in of.split() if name in names]
    found = (
        closest(typed, names, alike=0.85)
        or elsewhere
        or named
        or closest(typed, names, alike=0.75)
        or sorted(speak, key=speak.__getitem__)
        or closest(typed, names, alike=0.6)
    )
    return did_you_mean([f"--{name}" for name in found[:2]])


def _abbreviates(name: str, typed: str) -> bool:
    """Whether each word of one begins as that of the other.

    The one may have further words: `mem-fraction` for `memory`.
    """
    words = zip(name.split("-"), typed.split("-"), strict=False)
    return all(min(len(a), len(b)) > 1 and (a.startswith(b) or b.startswith(a)) for a, b in words)


def _unknown(
    word: str, argv: Sequence[str], flags: Sequence[Flag], prog: str, whose: Callable[[str], Sequence[str]]
) -> UsageError:
    """The error of a flag that the command hasn't. It names all such flags of the arguments."""
    see = f"{prog} {HELP_ALL} lists the flags"
    if others := whose(word.partition("=")[0].lstrip("-").replace("-", "_")):
        allowed = f"{word} with jaxremat {', '.join(others)}"
        return UsageError(f"{prog} has no flag {word}", allowed=allowed, next_step=f"leave it out; {see}")
    known = {flag.name for flag in flags}
    typed = (argument.partition("=")[0] for argument in argv if argument.startswith("--"))
    further = [one for one in dict.fromkeys(typed) if one.replace("_", "-") not in known and one != word.partition("=")[0]]
    if not further:
        return UsageError(f"unknown flag {word}", next_step=_meant(word, flags) or see)
    meant = [f"{one}: {question}" for one in (word, *further) if (question := _meant(one, flags))]
    return UsageError(f"unknown flags {', '.join((word, *further))}", next_step=" ".join(meant) or see)


def _usage_error(error: CycloptsError, flags: Sequence[Flag], prog: str) -> UsageError:
    """An error of the parser in our form."""
    flag = (error.argument.name if error.argument else "") or ""
    match error:
        case UnusedCliTokensError():
            word = (error.unused_tokens or [""])[0]
            return UsageError(f"{word!r} belongs to no flag", allowed="flags with their values", next_step=f"{prog} --help")
        case RepeatArgumentError():
            flag = str(error.token.keyword).replace("_", "-")
            return UsageError(f"{flag} was given twice", allowed="one value of this flag", next_step=f"leave one {flag} out")
        case ConsumeMultipleError() | MissingArgumentError():
            known = next(one for one in flags if one.name == flag)
            return UsageError(f"{flag} has no value", next_step=_written(known))
        case CoercionError() if error.token:
            return bad_value(flag, repr(error.token.value), "no value", f"{flag} alone turns it on")
        case _:
            return UsageError(f"{flag or prog}: {error}", next_step=f"{prog} --help")
