"""Flags that can't be meant: misspelt, without a value, of a wrong type, no choice, out of bounds, given twice, empty.

The flags are those of the commands' own dataclasses, so that a new flag is drawn as soon as it is there. Each draw makes one
mistake in one flag of one command, beside flags that are right.
"""

import random
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.bad_inputs.case import COMMANDS, OK, Case, kind, module_of
from jaxremat.cli import parser

#: By command, the name of the dataclass of its flags.
FLAGS = {name: f"{name.capitalize()}Flags" for name in COMMANDS} | {"train": "TrainRunFlags"}
#: Flags that are right, and without which a command would complain about something else.
RIGHT = {"sweep": ("--out", "r.jsonl"), "run": ("--list", "policies"), "doctor": ("--limit", "20"), "watch": ("--once",)}
#: The flag whose value may be empty, as the help says.
_MAY_BE_EMPTY = ("--rope-scaling",)
#: Texts that are no number, however one reads them.
NO_NUMBERS = (
    "x",
    "1,5",
    "0x10",
    "1e",
    "--",
    "½",
    "八",
    "1 0",
    "one",
    "[red]1[/red]",
    "\x1b[31m1",
    "$(id)",
    "1;2",
    "None",
    "∞",
)
#: Numbers that no flag takes.
NO_SIZES = ("-1", "-0.5", "-1e30", "nan", "-inf", "-99999999999999999999", "NaN")
#: Texts that are the name of nothing.
NO_NAMES = ("x" * 5000, "speed", "[/red]", "a\nb", "\u202egnp", "../../etc", "gpt2 ", "é", "'", '"', "{}", "%s", "0", "\x07")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Flag:
    """One flag of a command.

    Attributes:
        name: as it is typed, such as `--max-batch`.
        type: the type of its value: int, float, bool, str or Path.
        choices: what it may be, where that is one of a few words.
        several: whether it takes several words and may be given several times.
        is_switch: whether it stands without a value.
    """

    name: str
    type: type
    choices: tuple[Any, ...] = ()
    several: bool = False
    is_switch: bool = False


def flags_of(command: str) -> list[Flag]:
    """The flags of a command."""
    return [_read(flag) for flag in parser.flags_of(getattr(module_of(command), FLAGS[command]))]


def _read(flag: parser.Flag) -> Flag:
    of = [part for part in typing.get_args(flag.kind) if part is not types.NoneType]
    if flag.is_several:
        return Flag(flag.name, str, several=True)
    if typing.get_origin(flag.kind) is Literal:
        return Flag(flag.name, str, typing.get_args(flag.kind))
    if any(typing.get_origin(part) is Literal for part in of):
        return Flag(flag.name, str, tuple(word for part in of for word in typing.get_args(part) or ("True", "False")))
    return Flag(flag.name, of[0] if of else flag.kind, is_switch=flag.kind is bool)


def _value(draw: random.Random, flag: Flag) -> str:
    """A value that the flag may have."""
    if flag.choices:
        return str(draw.choice(flag.choices))
    return {int: "1", float: "0.5", bool: draw.choice(["True", "False"])}.get(flag.type, "1")


def _around(command: str, *words: str, without: str = "") -> tuple[str, ...]:
    """The command with these words after flags that are right."""
    right = RIGHT.get(command, ())
    return (command, *(() if without in right else right), *words)


def misspelt_flag(draw: random.Random, command: str) -> Case:
    """A flag with a letter too many, too few, or another one."""
    names = [flag.name for flag in flags_of(command)]
    while True:
        name = draw.choice(names)
        at, letter = draw.randrange(3, len(name) + 1), draw.choice(_LETTERS + "é-")
        wrong = draw.choice(
            [name[:at] + letter + name[at:], name[: at - 1] + name[at:], name[: at - 1] + letter + name[at:], name.upper()]
        )
        if wrong not in [*names, "--help"] and len(wrong) > 3 and not wrong.endswith("-"):
            break
    return Case(_around(command, wrong, *draw.choice([("1",), (), ("x", "y")])), says=(wrong,))


def missing_value(draw: random.Random, command: str) -> Case:
    """A flag that needs a value, at the end of the line or before another flag."""
    flag = draw.choice([flag for flag in flags_of(command) if not flag.is_switch])
    others = [
        other for other in flags_of(command) if other.is_switch and other.name not in ("--version", *RIGHT.get(command, ()))
    ]
    after = draw.choice([(), (draw.choice(others).name,)]) if others else ()
    return Case(_around(command, flag.name, *after, without=flag.name), says=(flag.name,))


def wrong_type(draw: random.Random, command: str) -> Case:
    """A number that is none, or a yes or no that is neither."""
    numbers = [flag for flag in flags_of(command) if flag.type in (int, float, bool) and not flag.is_switch]
    flag = draw.choice(numbers or flags_of(command))
    if flag.is_switch:
        return Case(_around(command, f"{flag.name}={draw.choice(NO_NUMBERS)}"), says=(flag.name,))
    wrong = draw.choice([*NO_NUMBERS, *(["1.5", "1e3", "inf", "9" * 6000] if flag.type is int else [])])
    return Case(_around(command, f"{flag.name}={wrong}", without=flag.name), says=(flag.name,))


def wrong_choice(draw: random.Random, command: str) -> Case:
    """A value that isn't among those of its flag."""
    flags = [flag for flag in flags_of(command) if flag.choices]
    if not flags:
        return misspelt_flag(draw, command)
    flag = draw.choice(flags)
    near = str(draw.choice(flag.choices))
    wrong = draw.choice([near[:-1], near.upper() + "S", near + "x", f" {near}", *NO_NAMES])
    return Case(_around(command, f"{flag.name}={wrong}", without=flag.name), says=(flag.name,))


def out_of_bounds(draw: random.Random, command: str) -> Case:
    """A number that its flag can't have."""
    numbers = [flag for flag in flags_of(command) if flag.type in (int, float)]
    if not numbers:
        return wrong_type(draw, command)
    flag = draw.choice(numbers)
    whole = [size for size in NO_SIZES if size.lstrip("-").isdigit()]
    wrong = draw.choice(
        [*(whole if flag.type is int else NO_SIZES), *(["99999999999999999999"] if flag.type is int else [])]
    )
    return Case(_around(command, f"{flag.name}={wrong}", without=flag.name), says=(flag.name,))


def repeated_flag(draw: random.Random, command: str) -> Case:
    """A flag of a single value, twice."""
    flag = draw.choice([flag for flag in flags_of(command) if not flag.several])
    if flag.is_switch:
        return Case(_around(command, flag.name, flag.name, without=flag.name), says=(flag.name,))
    words = [draw.choice([(flag.name, _value(draw, flag)), (f"{flag.name}={_value(draw, flag)}",)]) for _ in range(2)]
    underscored = flag.name[:2] + flag.name[2:].replace("-", "_")
    if draw.random() < 0.3:
        words[1] = (underscored, _value(draw, flag))
    return Case(_around(command, *words[0], *words[1], without=flag.name), says=(flag.name,))


def empty_value(draw: random.Random, command: str) -> Case:
    """An empty text in place of a value, as of a variable that isn't set."""
    flag = draw.choice([flag for flag in flags_of(command) if not flag.is_switch and flag.name not in _MAY_BE_EMPTY])
    words = draw.choice([(flag.name, ""), (f"{flag.name}=",)])
    return Case(_around(command, *words, without=flag.name), says=(flag.name,))


MISTAKES: tuple[Callable[[random.Random, str], Case], ...] = (
    misspelt_flag,
    missing_value,
    wrong_type,
    wrong_choice,
    out_of_bounds,
    repeated_flag,
    empty_value,
)


def _of_any_command(mistake: Callable[[random.Random, str], Case]) -> Callable[[random.Random, Path], Case]:
    def drawn(draw: random.Random, folder: Path) -> Case:
        return mistake(draw, draw.choice(COMMANDS))

    return drawn


def _of_one_command(command: str) -> Callable[[random.Random, Path], Case]:
    def drawn(draw: random.Random, folder: Path) -> Case:
        return draw.choice(MISTAKES)(draw, command)

    return drawn


for _mistake in MISTAKES:
    kind("flags", _mistake.__name__)(_of_any_command(_mistake))
for _command in COMMANDS:
    kind("flags", f"flags_of_{_command}")(_of_one_command(_command))


#: Flags of `run` that look odd and are right.
_ODD = (
    ("--max_batch", "3"),
    ("--margin", "0.1"),
    ("--budget", "40 GiB"),
    ("--budget", "1B"),
    ("--policy", " every:04+full"),
    ("--policy", "dots", "--policy", "nothing", "dots"),
    ("--policy", "save:context+attention", "checkpoint_dots"),
    ("--policy", "save:[bold],ünï"),
    ("--seq-len", "128, 64"),
    ("--batch", "8,8, 16"),
    ("--rope-scaling", ""),
    ("--out", "[red] ü $(id).jsonl"),
    ("--out=a=b",),
    ("--save-plan", "-.json", "--policy", "auto"),
    ("-v",),
    ("--learning-rate", "1e-300"),
    ("--dropout", "0"),
    ("--budget", "9007199254740993B"),
    ("--mesh", " fsdp = 4 , data=2"),
    ("--mesh", "fsdp=-1", "--devices", "8"),
    ("--mesh", "ici_fsdp_parallelism=8,dcn_data_parallelism=2"),
    ("--xla-preset", "default", "default"),
    ("--scan-layers", "False"),
    ("--loss", "chunked:256"),
)


@kind("flags")
def odd_and_right(draw: random.Random, folder: Path) -> Case:
    """Flags that look odd and are right."""
    return Case(
        ("run", "--list", draw.choice(["policies", "models", "targets"]), *draw.choice(_ODD)),
        OK,
        check=lambda ended: "" if ended.stdout.strip() else "no list on stdout",
    )
