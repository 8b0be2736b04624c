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

    def callback(phase: str, info: dict) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def compiles() -> None:
    lower_and_compile(lambda x: x, (jax.ShapeDtypeStruct((1,), "float32"),), "cpu")


def fails() -> None:
    raise AssertionError("JAX was interrupted half-way")


@pytest.mark.parametrize("then", [compiles, fails])
def test_a_swallowed_interrupt(then, capsys):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    reached = []

    def work() -> int:
        compiles()
        interrupt_in_a_collection()
        reached.append("the interrupt was swallowed")
        then()
        return 0

    assert run_command(work, kept="all was kept") == 130
    assert capsys.readouterr().err == "jaxremat: interrupted; all was kept\n"
    assert reached
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    raise_if_interrupted()


def test_a_failure_of_its_own_is_not_an_interrupt():
    with pytest.raises(AssertionError, match="half-way"):
        run_command(fails)
