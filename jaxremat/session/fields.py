"""A dataclass whose fields are flags.

This module says which flags it has, how the text of each is read, and which dataclass the given values make.

    @dataclass(frozen=True)
    class Flags:
        batch: Annotated[tuple[int, ...], Parameter(metavar="N[,N...]", converter=whole_numbers(2**20))] = ()
        \"\"\"Batch sizes.\"\"\"

    [flag.name for flag in flags_of(Flags)]     # ["--batch"]
    filled(Flags, {("batch",): (8, 16)})        # Flags(batch=(8, 16))

The docstring below a field is the flag's help. A field that is a dataclass itself is a group of flags.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from cyclopts import Parameter, Token

from jaxremat.errors import UsageError, bad_value, flag_of, nearest
from jaxremat.units import parse_bytes, shortest_size

FlagsT = TypeVar("FlagsT")
Converter = Callable[[Any, Sequence[Token]], Any]
#: By type, the values that a text can say.
_ALLOWED = {int: "a whole number such as 8", float: "a number"}


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
                is_long = one is int and token.value.lstrip("+-").isdecimal()
                choices.append(f"at most {sys.get_int_max_str_digits():,} digits" if is_long else _ALLOWED[one])
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


def words_of(flags: Any) -> list[str]:
    """The words that give the flags of a command, such as `["--batch", "8", "16"]`.

    Those at their defaults are left out.
    """
    words = list[str]()
    for flag in flags_of(type(flags)):
        value = functools.reduce(getattr, flag.path, flags)
        if value == flag.default:
            continue
        several = value if flag.is_several else () if flag.kind is bool else (value,)
        is_size = flag.parameter.converter is byte_size
        words += [flag.name, *(shortest_size(one) if is_size else str(one) for one in several)]
    return words


def whole_numbers(upto: int, example: str) -> Converter:
    """The converter of a flag of whole numbers from 1 to `upto`, such as `8,16` or `8 16`."""

    def convert(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
        parts = [part.strip() for token in tokens for part in token.value.split(",")]
        for digits in parts:
            if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(upto)) and 1 <= int(digits) <= upto):
                flag = str(tokens[0].keyword)
                examples = dict.fromkeys((example.partition(",")[0], example))
                like = f"write it like {' or '.join(f'{flag} {one}' for one in examples)}"
                raise bad_value(flag, repr(",".join(parts)), f"whole numbers from 1 to {upto:,}", like)
        return tuple(dict.fromkeys(map(int, parts)))

    return convert


def byte_size(_: Any, tokens: Sequence[Token]) -> int:
    """The converter of a flag of a size in bytes, such as `40GiB`."""
    _check_not_empty(tokens[0])
    try:
        return parse_bytes(tokens[0].value)
    except UsageError as error:
        raise bad_value(str(tokens[0].keyword), repr(tokens[0].value), error.allowed, error.next_step) from None


def converted(read: Callable[[str], Any]) -> Converter:
    """The converter of a flag whose one text `read` reads. It may raise a UsageError."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        if read is not str:
            _check_not_empty(tokens[0])
        return read(tokens[0].value)

    return convert
