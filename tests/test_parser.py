"""Flags as typed values: what a dataclass's command line takes, what it rejects, and its help."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from cyclopts import Parameter

from jaxremat.cli.command import COMMANDS
from jaxremat.cli.main import main
from jaxremat.cli.parser import parse_argv
from jaxremat.errors import UsageError
from jaxremat.session.fields import byte_size, flags_of, whole_numbers
from jaxremat.session.flags import RunFlags


@dataclass(frozen=True)
class Inner:
    """Not a title: the docstring of the field is one."""

    width: Annotated[int | None, Parameter(metavar="N")] = None
    """Of a layer. More on it."""
    scan: bool | Literal["auto"] | None = None
    """Whether layers are scanned; auto compares."""


@dataclass(frozen=True)
class Base:
    """What is shared: more on it."""

    words: tuple[str, ...] = ()
    """Some words."""
    batch: Annotated[tuple[int, ...], Parameter(converter=whole_numbers(100, "8,16"))] = ()
    """Batch sizes."""


@dataclass(frozen=True)
class Flags(Base):
    """What it does.

    And more.
    """

    file: Path = Path("here")
    """A file."""
    share: float = 0.5
    """A share."""
    budget: Annotated[int | None, Parameter(converter=byte_size)] = None
    """Bytes."""
    pairs: tuple[tuple[str, int], ...] = ()
    """Pairs."""
    kind: Literal["one", "two"] = "one"
    """A kind."""
    verbose: Annotated[bool, Parameter(alias="-v")] = False
    """Says more."""
    hidden: Annotated[int, Parameter(parse=False)] = 1
    inner: Any = field(default_factory=Inner)
    """A group of flags. More on it."""


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {}),
        ("--words a b --words c b", {"words": ("a", "b", "c")}),
        ("--words=a", {"words": ("a",)}),
        ("--words none b", {"words": ("none", "b")}),
        ("--words none", {"words": ("none",)}),
        ("--batch 8,16 32", {"batch": (8, 16, 32)}),
        ("--file there --share -1 --kind two", {"file": Path("there"), "share": -1.0, "kind": "two"}),
        ("--budget 1GiB -v", {"budget": 2**30, "verbose": True}),
        ("--width 3 --scan auto", {"inner": Inner(3, "auto")}),
        ("--pairs a 1 b 2", {"pairs": (("a", 1), ("b", 2))}),
        ("--scan false", {"inner": Inner(None, False)}),
    ],
)
@pytest.mark.parametrize("module", ["dataclasses", "pydantic"])
def test_values_have_their_types(line, values, module):
    """Where pydantic was imported, too: cyclopts checks by it what the flags' own converters have made."""
    pytest.importorskip(module)
    assert parse_argv(Flags, line.split(), "x") == Flags(**values)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--wdth", "3"], "--wdth"), (["--width"], "--width"), (["--width", "1.5"], "--width got '1.5'"),
        (["--width", "--verbose"], "--width"), (["--width", "9" * 5000], "--width"), (["--batch", "0"], "--batch"),
        (["--batch", "8,"], "--batch"), (["--batch"], "--batch"), (["--words"], "--words"), (["--kind", "three"], "--kind"),
        (["--scan", "maybe"], "--scan"), (["--share", "x"], "--share"), (["--budget", "lots"], "--budget got 'lots'"),
        (["--budget", "40"], "--budget got '40'"),
        (["--budget="], "--budget has"), (["loose"], "loose"),
        (["--file="], "--file"), (["--file", "a", "--file", "b"], "--file"), (["--verbose=x"], "--verbose"),
        (["--hidden", "2"], "--hidden"), (["--pairs", "a"], "--pairs"), (["--inner.width", "2"], "--inner.width"), (["-x"], "-x"),
        (["--no-verbose"], "--no-verbose"),
    ],
)  # fmt: skip
def test_what_is_no_flag_or_no_value_is_one_error(words, named):
    with pytest.raises(UsageError) as caught:
        parse_argv(Flags, words, "x")
    assert named in caught.value.got
    assert caught.value.next_step
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--microbatches", ["--accumulate"]), ("--microbatches=4", ["--accumulate"]), ("--batch-size", ["--batch"]),
        ("--seq", ["--seq-len"]), ("--dvices", ["--devices"]), ("--sequence_length", ["--seq-len"]),
        ("--memory", ["--mem-fraction"]), ("--gpu", ["--target"]), ("--fsdp", ["--mesh"]), ("--hbm", ["--budget"]),
        ("--xyz", []), ("--micro-batch-size", ["--batch"]), ("--gradient-accumulation-steps", ["--accumulate"]),
        ("--maxext", ["--maxtext"]), ("--norm-placment", ["--norm-placement"]), ("--head-im", ["--head-dim"]),
    ],
)  # fmt: skip
def test_a_flag_is_found_by_its_beginning_or_by_a_word_of_its_help(word, meant):
    with pytest.raises(UsageError) as caught:
        parse_argv(RunFlags, [word, "4"], "x")
    assert re.findall("'(.*?)'", caught.value.next_step)[:1] == meant


def test_all_unknown_flags_are_said_at_once():
    with pytest.raises(UsageError) as caught:
        parse_argv(RunFlags, ["--polcy=dots", "--batch", "8", "--seq_len", "4", "--micro-batch", "4"], "x")
    assert [name for name in ("--polcy", "--micro-batch") if name not in caught.value.got] == []
    assert "--seq" not in str(caught.value)
    assert re.findall("'(.*?)'", caught.value.next_step)[:2] == ["--policy", "--batch"]


def test_a_flag_without_a_default_is_required():
    @dataclass(frozen=True)
    class Needs:
        out: Path

    with pytest.raises(UsageError) as caught:
        parse_argv(Needs, [], "x")
    assert "--out" in caught.value.got
    with pytest.raises(UsageError) as caught:
        parse_argv(Needs, ["--ouut", "a"], "x")
    assert "--ouut" in caught.value.got
    assert "--out" in caught.value.next_step
    assert parse_argv(Needs, ["--out", "a"], "x").out == Path("a")


def test_what_may_be_given_again():
    assert {flag.name for flag in flags_of(Flags) if flag.is_several} == {"--words", "--batch", "--pairs"}


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        parse_argv(Flags, argv, "x", common=("words", "width", "kind"), epilogue="The end.")
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_the_help_shows_common_flags_by_group_and_the_full_one_all(capsys):
    short, full = printed(["--bad", "--help"], capsys), printed(["--help-all"], capsys)
    titles = [line for line in short if line.endswith(":") and not line.startswith(" ")]
    assert [title.rstrip(":") for title in titles] == ["What is shared", "A group of flags", "x alone"]
    flags = [line.split()[0] for line in short if line.startswith("  -")]
    assert flags == ["--words", "--width", "--kind"]
    assert any(line.split() == ["--width", "N", "Of", "a", "layer."] for line in short)
    assert [name for name in ("--share", "--batch", "-v,", "--scan") if not any(f" {name} " in line for line in full)] == []
    assert "Default: 0.5." in " ".join(full)
    assert short[-1] == full[-1] == "The end."


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_that_one_reads(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 80
    assert all(other in lines[-1] for other in COMMANDS if other != name)


def test_the_one_command_lists_the_others(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert [name for name in COMMANDS if f"  {name} " not in out] == []


def test_an_unknown_command_is_an_error(capsys):
    assert main(["swep"]) == 2
    assert "'sweep'" in capsys.readouterr().err
