"""The fast tier: what its tests may not do, so that all of them together take less than a minute on two cores.

A test belongs to the full tier, and has the marker `full`, if it compiles for a GPU that isn't here, jits a training step,
starts a process, or opens a browser (which is a process). `python -m pytest` runs the fast tier, and `--all` both.
"""

import multiprocessing.process
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import pytest

from jaxremat.xla.results import SIZE

#: Seconds that one program of a fast test may take to compile on a slow and busy machine: one operation, or a small function.
MOST_COMPILING = 3.0
#: The functions whose programs were compiled in this process since the running test began, and the seconds that each took.
_compiled: list[tuple[str, float]] = []


def _hear(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event.endswith("/backend_compile_duration"):
        _compiled.append((str(kwargs.get("fun_name")), duration_secs))


jax.monitoring.register_event_duration_secs_listener(_hear)


def _forbid(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail(f"a test of the fast tier {what}: mark it full, or test the same without", pytrace=True)

    return refuse


@contextmanager
def only_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test that runs if it compiles more than a little, or starts a process."""
    _compiled.clear()
    monkeypatch.setenv(SIZE, "0")  # a stored result would hide a compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", _forbid("compiles a program ahead of time"))
    monkeypatch.setattr(subprocess.Popen, "__init__", _forbid("starts a process"))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", _forbid("starts a process"))
    yield
    program, seconds = max(_compiled, key=lambda pair: pair[1], default=("", 0.0))
    if seconds > MOST_COMPILING:
        pytest.fail(f"a test of the fast tier compiled {program} for {seconds:.1f} s: mark it full")
