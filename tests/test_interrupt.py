"""Ctrl-C ends a command even where Python swallows the exception that Ctrl-C raises."""

import gc
import signal
import sys

import jax
import pytest

from jaxremat.command import run_command
from jaxremat.interrupt import raise_if_interrupted
from jaxremat.xla.compile import lower_and_compile


def interrupt_in_a_collection() -> None:
    """As while JAX traces: Ctrl-C within a callback on garbage collections, where Python ignores every exception."""

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def compiles() -> int:
    lower_and_compile(lambda x: x, (jax.ShapeDtypeStruct((1,), "float32"),), "cpu")
    return 0


def fails() -> int:
    raise AssertionError("HALF-WAY")


@pytest.mark.parametrize("then", [pytest.param(compiles, marks=pytest.mark.full), fails])
def test_a_swallowed_interrupt(then, capsys):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    reached = []

    def work() -> int:
        interrupt_in_a_collection()
        reached.append("SWALLOWED")
        return then()

    assert run_command(work, kept="NOTE") == 130
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("jaxremat: ")
    assert "NOTE" in said
    assert reached
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    raise_if_interrupted()


def test_a_failure_of_its_own_is_not_an_interrupt(capsys):
    assert run_command(fails) == 1
    assert "HALF-WAY" in capsys.readouterr().err
