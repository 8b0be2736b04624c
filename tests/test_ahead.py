"""Compiles that are begun before they are requested: the same steps and errors as without."""

import os
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxremat import Workload
from jaxremat.errors import UsageError, UserCodeError
from jaxremat.policy.spec import NONE
from jaxremat.session.session import Session
from jaxremat.system.ahead import JOBS, Ahead, num_at_once
from jaxremat.trial import trials as of_trials


@pytest.fixture
def two_threads(monkeypatch):
    """Two compiles at a time, as on two cores, whatever the machine has. The work that was begun."""
    threads, begun = Ahead(2), []
    begin = threads.begin
    monkeypatch.setattr(threads, "begin", lambda work: begun.append(work) or begin(work))
    monkeypatch.setattr(of_trials, "ahead", lambda: threads)
    return begun


def test_a_result_is_waited_for_and_an_error_raised():
    threads = Ahead(2)
    name, fails = threads.begin(lambda: threading.current_thread().name), threads.begin(lambda: 1 // 0)
    assert name().startswith("ahead")
    with pytest.raises(ZeroDivisionError):
        fails()
    assert threads.num_left == 0


def test_a_guess_takes_only_an_idle_core():
    threads, may_end = Ahead(2), threading.Event()
    done = threads.begin(may_end.wait)
    assert threads.has_idle_core
    other = threads.begin(may_end.wait)
    assert not threads.has_idle_core
    may_end.set()
    assert done()
    assert other()
    assert threads.has_idle_core
    assert not Ahead(1).works
    assert not Ahead(1).has_idle_core


def test_how_many_compiles_follows_from_the_machine_or_the_variable(monkeypatch):
    monkeypatch.delenv(JOBS)
    assert 1 <= num_at_once() <= len(os.sched_getaffinity(0))
    monkeypatch.setenv(JOBS, "9")
    assert num_at_once() == 9
    monkeypatch.setenv(JOBS, "all")
    with pytest.raises(UsageError, match="JAXREMAT_JOBS=all"):
        num_at_once()


def of_batches(batch: int = 2) -> Workload:
    """A workload whose loss fails from batch 4 on."""
    w, x = (jax.ShapeDtypeStruct((size, 4), jnp.float32) for size in (4, batch))
    return Workload(loss=lambda w, x: (x @ w).sum() if x.shape[0] < 4 else 1 // 0, params=w, batch=x)


@pytest.mark.full
def test_steps_that_were_begun_are_those_that_are_requested(two_threads):
    """The other session has them from the store, so a program is the same whether it was begun or not."""
    first, second = (Session(of_batches, target="h100-80gb") for _ in range(2))
    for batch in (2, 3, 2):
        first.trials.begin(NONE, batch)
    assert len(two_threads) == 2
    for batch in (2, 3):
        ahead, stored = (session.trials.compile(NONE, batch) for session in (first, second))
        assert (ahead.memory, ahead.hlo_text, ahead.compile_s) == (stored.memory, stored.hlo_text, stored.compile_s)
        first.trials.begin(NONE, batch)
    assert len(two_threads) == 2, "they are compiled"


def test_an_error_is_raised_where_the_step_is_requested(two_threads):
    trials = Session(of_batches, target="h100-80gb").trials
    trials.begin(NONE, 4)
    assert not two_threads
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        trials.compile(NONE, 4)
