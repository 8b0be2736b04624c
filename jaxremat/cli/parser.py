"""Flags as typed values: a dataclass becomes a command line, with its help.

    @dataclass(frozen=True)
    class Flags:
        batch: Annotated[tuple[int, ...], Parameter(metavar="N[,N...]", converter=whole_numbers(2**20))] = ()
        \"\"\"Batch sizes.\"\"\"

    parse_argv(Flags, ["--batch", "8,16"], "jaxremat run")      # Flags(batch=(8, 16))

The docstring below a field is the flag's help. A field that is a dataclass itself is a group of flags. Cyclopts splits the
arguments. Its errors become a `UsageError`.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from cyclopts import App, CycloptsError, Parameter, Token
from cyclopts.exceptions import (
    CoercionError,
    ConsumeMultipleError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from jaxremat.cli.help import HELP, HELP_ALL, help_text
from jaxremat.errors import UsageError, bad_value, flag_of, nearest

FlagsT = TypeVar("FlagsT")
Converter = Callable[[Any, Sequence[Token]], Any]
#: By type, the values that a text can say.
_ALLOWED = {int: f"a whole number of at most {sys.get_int_max_str_digits():,} digits", float: "a number"}


@dataclass(frozen=True)
class Flag:
    """One flag of a command.

    Attributes:
        path: the names of the fields that lead to it, such as `("training", "loss")`.
        owner: the dataclass that defines it.
        kind: the type of its value.
        parameter: its names, its metavar and how its text is read.
        default: its value where it isn't given.
        group: the dataclass and the field that its group of flags is. None outside of a group.
        required: whether it must be given.
    """

    path: tuple[str, ...]
    owner: type
    kind: Any
    parameter: Parameter
    default: Any
    group: tuple[type, str] | None
    required: bool

    @property
    def field(self) -> str:
        """The name of its field, such as `seq_len`."""
        return self.path[-1]

    @property
    def name(self) -> str:
        """The flag as it is typed, such as `--seq-len`."""
        return flag_of(self.field)

    @property
    def is_several(self) -> bool:
        """Whether it takes several values, and may be given several times."""
        return get_origin(self.kind) is tuple


def parse_argv(
    kind: type[FlagsT], argv: Sequence[str], prog: str, *, common: Sequence[str] = (), epilogue: str = ""
) -> FlagsT:
    """The flags that `argv` gives. `--help` and `--help-all` print the help and exit with 0.

    Args:
        kind: the dataclass of the command's flags.
        argv: the arguments, without the program's name.
        prog: the command's name in its help.
        common: the names of the fields that `--help` shows. Without any it shows all.
        epilogue: the last lines of the help.

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
        raise _usage_error(error, flags, prog) from None
    given = bound.arguments
    if missing := next((flag for flag in flags if flag.required and flag.field not in given), None):
        raise UsageError(f"{missing.name} is required", next_step=_written(missing))
    return filled(kind, {flag.path: given[flag.field] for flag in flags if flag.field in given})


def whole_numbers(upto: int, example: str) -> Converter:
    """The converter of a flag of whole numbers from 1 to `upto`, such as `8,16` or `8 16`."""

    def convert(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
        parts = [part.strip() for token in tokens for part in token.value.split(",")]
        for digits in parts:
            if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(upto)) and 1 <= int(digits) <= upto):
                flag = str(tokens[0].keyword)
                like = f"write it like {flag} {example.partition(',')[0]} or {flag} {example}"
                raise bad_value(flag, repr(",".join(parts)), f"whole numbers from 1 to {upto:,}", like)
        return tuple(dict.fromkeys(map(int, parts)))

    return convert


def converted(read: Callable[[str], Any]) -> Converter:
    """The converter of a flag whose one text `read` reads. It may raise a UsageError."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        if read is not str:
            _check_not_empty(tokens[0])
        return read(tokens[0].value)

    return convert


def _app(prog: str, flags: Sequence[Flag]) -> App:
    """The command as cyclopts has it: a function whose arguments are the flags."""

    def command(**values: Any) -> dict[str, Any]:
        return values

    def parameter(flag: Flag) -> inspect.Parameter:
        text = bool if flag.kind is bool else tuple[str, ...] if flag.is_several else str
        kind: Any = Annotated[text, flag.parameter]
        return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=kind)

    command.__signature__ = inspect.Signature([*map(parameter, flags)])  # pyright: ignore[reportFunctionMemberAccess]
    return App(prog, default_command=command, version_flags=(), help_flags=(), default_parameter=Parameter(negative=""))


def flags_of(kind: type, path: tuple[str, ...] = (), group: tuple[type, str] | None = None) -> Iterator[Flag]:
    """The flags of a dataclass. A field that is a dataclass has its own flags in its place."""
    owners = {name: owner for owner in reversed(kind.__mro__) for name in getattr(owner, "__annotations__", {})}
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        if dataclasses.is_dataclass(factory):
            yield from flags_of(factory, (*path, field.name), (owners[field.name], field.name))  # pyright: ignore
            continue
        own, *more = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        given = Parameter.combine(*(one for one in more if isinstance(one, Parameter)))
        if given.parse is False:
            continue
        has_none = field.default is dataclasses.MISSING
        default, required = None if has_none else field.default, has_none and factory is dataclasses.MISSING
        yield Flag((*path, field.name), owners[field.name], own, _read_as(own, given), default, group, required)


def _read_as(kind: Any, given: Parameter) -> Parameter:
    """The parameter with a converter to `kind`, where it has none of its own."""
    if kind is bool:
        return given
    is_several = get_origin(kind) is tuple
    one = get_args(kind)[0] if is_several else kind

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        if get_origin(one) is tuple:
            return _groups(get_args(one), tokens)
        values = [_value(one, token) for token in tokens]
        return tuple(dict.fromkeys(values)) if is_several else values[0]

    several = Parameter(consume_multiple=(1, None)) if is_several else Parameter()
    return Parameter.combine(Parameter(converter=convert), several, given)


def _check_not_empty(token: Token) -> None:
    if not token.value:
        raise UsageError(f"{token.keyword} has an empty value", next_step=f"give {token.keyword} a value, or leave it out")


def _groups(kinds: tuple[Any, ...], tokens: Sequence[Token]) -> tuple[tuple[Any, ...], ...]:
    """Texts in groups, such as models, each with a mesh: `tiny fsdp=2 gpt2 fsdp=8`."""
    size = len(kinds)
    if len(tokens) % size:
        raise bad_value(str(tokens[0].keyword), f"{len(tokens)} values", f"values in groups of {size}", "leave it out")
    values = [_value(kinds[i % size], token) for i, token in enumerate(tokens)]
    return tuple(tuple(values[i : i + size]) for i in range(0, len(values), size))


def _value(kind: Any, token: Token) -> Any:
    """The value of one text, of one of the types of `kind`, such as `int | Literal["auto"]`.

    Raises:
        UsageError: it is of none of them.
    """
    flag, choices = str(token.keyword), list[str]()
    _check_not_empty(token)
    for one in (kind,) if get_origin(kind) is Literal else get_args(kind) or (kind,):
        if one is type(None):
            continue
        if get_origin(one) is Literal:
            if token.value in get_args(one):
                return token.value
            choices += get_args(one)
        elif one is bool:
            if token.value.lower() in ("true", "false"):
                return token.value.lower() == "true"
            choices += ["True", "False"]
        else:
            try:
                return one(token.value)
            except ValueError:
                choices.append(_ALLOWED[one])
    shown = token.value if len(token.value) <= 60 else f"{token.value[:57]}..."
    raise bad_value(flag, repr(shown), ", ".join(choices), nearest(token.value, choices) or f"leave {flag} out")


def filled(kind: type[FlagsT], values: dict[tuple[str, ...], Any]) -> FlagsT:
    """The dataclass with these values, by the path to each."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        inner = {path[1:]: value for path, value in values.items() if len(path) > 1 and path[0] == field.name}
        if inner:
            own[field.name] = filled(field.default_factory, inner)  # pyright: ignore
    return kind(**own)


def _written(flag: Flag) -> str:
    return f"write it like {flag.name} {flag.parameter.metavar or 'VALUE'}"


def _usage_error(error: CycloptsError, flags: Sequence[Flag], prog: str) -> UsageError:
    """An error of the parser in our form."""
    flag = (error.argument.name if error.argument else "") or ""
    match error:
        case UnknownOptionError():
            word = error.token.keyword or error.token.value
            see = f"{prog} {HELP_ALL} lists the flags"
            return UsageError(f"unknown flag {word}", next_step=nearest(word, [one.name for one in flags]) or see)
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
