"""A signal while a command imports what it needs ends it quietly, and a program that imports jaxremat hears signals as before."""

import contextlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxremat
from jaxremat.system import early


def handlers() -> dict[int, Any]:
    """What the process does about the signals that end a command."""
    return {number: signal.getsignal(number) for number in early.DEFAULTS}


def started_as(monkeypatch: pytest.MonkeyPatch, words: list[str], argv: list[str]) -> bool:
    """Whether a process of these words is a command, where Python has this `sys.argv` while it looks for the module."""
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(sys, "argv", argv)
    return early.is_command()


def test_what_a_command_starts_is_no_command():
    texts = [file.read_text() for file in Path(jaxremat.__file__).parent.rglob("*.py")]
    started = {name for text in texts for name in re.findall(r'"-m", "jaxremat\.(?:\w+\.)*(\w+)"', text)}
    assert started >= set(early.STARTED)


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["-m", "jaxremat.run", "--batch", "2"], ["-m", "--batch", "2"]),
        (["-mjaxremat.train"], ["-m"]),
        (["-m", "jaxremat"], ["-m"]),
        (["-X", "dev", "-Im", "jaxremat.watch"], ["-m"]),
        (["/venv/bin/jaxremat", "--list", "models"], ["/venv/bin/jaxremat", "--list", "models"]),
    ],
)
def test_a_command(words, argv, monkeypatch):
    assert started_as(monkeypatch, words, argv)


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["-m", "mine", "jaxremat.run"], ["-m", "jaxremat.run"]),
        (["-m", "jaxremat.cli.worker", "task", "result"], ["-m", "task", "result"]),
        (["-m", "jaxremat.cli.machine.probe", "attached"], ["-m", "attached"]),
        (["-m", "jaxremats.run"], ["-m"]),
        (["-m", "pytest"], ["/venv/pytest/__main__.py"]),
        (["train.py", "jaxremat"], ["train.py", "jaxremat"]),
        (["-c", "import jaxremat"], ["-c"]),
        ([], [""]),
    ],
)
def test_another_program(words, argv, monkeypatch):
    before = handlers()
    assert not started_as(monkeypatch, words, argv)
    early.hear()
    assert handlers() == before


@pytest.mark.parametrize("stderr", ["open", "closed"])
def test_the_end(stderr, monkeypatch):
    """The exit code is 130, also where the message can't be written."""
    codes, written = [], []

    def write(number: int, text: bytes) -> None:
        written.append(number)
        if stderr == "closed":
            raise OSError

    monkeypatch.setattr(early.os, "write", write)
    monkeypatch.setattr(early, "exit_now", codes.append)
    with contextlib.suppress(OSError):  # it comes after the end
        early.end(signal.SIGTERM, None)
    assert (codes, written) == ([early.EXIT_CODE], [2])
