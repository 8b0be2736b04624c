"""Which compile or trial of how many, and how long the rest may take: numbers by a made-up clock."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxremat.cli.many_trials import _REST, TrialsProgress, _result
from jaxremat.report.progress import Progress, compile_text, rest_text
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.session.answers import Listener, _says_how_to_compile_less
from jaxremat.trial.queue import SweepTrial
from jaxremat.trial.store import Store
from jaxremat.trial.task import Task
from tests.made_up_records import step

pytestmark = pytest.mark.any_jax


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_example_of_the_module():
    ticks = iter([0.0, 2.0, 4.0])
    compiles = Compiles(clock=lambda: next(ticks))
    compiles.expect(9)
    assert compiles.next() == Compile(1, 9)
    assert compiles.next() == Compile(2, 9, 16.0)
    compiles.expect(3)
    compiles.estimated(118)
    assert compiles.next() == Compile(3, 5, 6.0, 118)


def test_a_pause_is_no_part_of_the_rest():
    """Two seconds of a compile, and a hundred of other searches."""
    ticks = iter([0.0, 2.0, 102.0, 102.0])
    compiles = Compiles(clock=lambda: next(ticks))
    compiles.expect(9)
    compiles.next()
    with compiles.paused():
        pass
    assert compiles.next() == Compile(2, 9, 16.0)


def test_without_a_bound_there_is_none_and_no_rest():
    compiles = Compiles()
    assert [compiles.next() for _ in range(2)] == [Compile(1), Compile(2)]


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.1, 100)), min_size=1))
def test_a_bound_never_rises_and_the_rest_is_that_of_the_bound(steps):
    """Whatever is said to `expect`, what was said before holds too."""
    now = [0.0]
    compiles, bounds = Compiles(clock=lambda: now[0]), []
    for number, (further, seconds) in enumerate(steps, 1):
        compiles.expect(further)
        found = compiles.next()
        bounds.append(found.at_most)
        assert found.number == number
        if number > 1:
            assert found.rest_s == pytest.approx((bounds[-1] - number + 1) * now[0] / (number - 1))
        now[0] += seconds
    assert bounds == sorted(bounds, reverse=True)


def test_the_seconds_of_a_search_are_without_its_pauses():
    now = [7.0]
    compiles = Compiles(clock=lambda: now[0])
    assert compiles.taken_s == 0.0
    compiles.next()
    now[0] += 30.0
    with compiles.paused():
        now[0] += 100.0
    assert compiles.taken_s == 30.0


def test_a_line_has_the_numbers_that_are_known():
    assert numbers(compile_text("dots", Compile(3, 9, 23.4), "batch 126")) == [3, 9, 126, 24]
    assert numbers(compile_text("dots", Compile(1, 9), "batch 126")) == [1, 9, 126]
    assert numbers(compile_text("dots", Compile(2), "batch 126")) == [2, 126]
    assert numbers(compile_text("dots", Compile(1, 1), "batch 126")) == [1, 126]
    assert numbers(compile_text("dots", Compile(2, 9, 23.4, 118), "batch 126")) == [2, 9, 126, 118, 24]


@pytest.mark.parametrize(("first_s", "expected"), [(152.0, [1, 152, 19]), (29.0, [])])
def test_a_slow_first_compile_says_once_how_a_plan_takes_fewer(first_s, expected):
    now, notes, shown = [7.0], list[str](), list[str]()
    compiles = Compiles(clock=lambda: now[0], at_most=19)
    listener = Listener(lambda record: None, progress=shown.append, note=notes.append)
    on_compile = _says_how_to_compile_less(listener, "auto")
    for _ in range(3):
        on_compile("nothing", 8, compiles.next())
        now[0] += first_s
    assert len(shown) == 3
    assert [numbers(note.partition(". ")[0]) for note in notes] == [expected] * bool(expected)
    assert all("--batch" in note for note in notes)


@pytest.mark.parametrize(
    ("seconds", "number", "unit"),
    [
        (0.2, 1, "s"),
        (99, 99, "s"),
        (99.5, 2, "min"),
        (3600, 60, "min"),
        (99 * 60, 99, "min"),
        (6000, 2, "h"),
        (10**6, 278, "h"),
    ],
)
def test_the_rest_is_rounded_up_in_a_unit_that_goes_with_it(seconds, number, unit):
    assert numbers(rest_text(seconds)) == [number]
    assert unit in rest_text(seconds).split()
    assert rest_text(None) == ""


def test_trials_say_how_long_the_rest_may_take(tmp_path):
    """Two of four ended in 5 and 10 seconds here. The one that runs takes as long as those on average."""
    first, second, third, fourth = trials = [made_up_trial(key, "h100-80gb") for key in "abcd"]
    console = Console(file=(out := io.StringIO()), width=200)
    with Store(tmp_path / "rows.jsonl") as store:
        watched = TrialsProgress(Progress(console), store)
        watched.expect(trials)
        for trial in (first, second, third):
            watched.on_start(trial)
        assert _REST not in out.getvalue()
        watched.on_end(first, "ok", 5.0)
        watched.on_end(second, "ok", 10.0)
        assert out.getvalue().splitlines()[-1].endswith(rest_text(7.5, _REST))
        watched.on_end(fourth, "ok", 0.0)  # by another process
        watched.on_end(third, "ok", 10.0)
    assert numbers(out.getvalue().splitlines()[-1])[-4:] == [4, 4, 0, 0]


@pytest.mark.parametrize(("target", "num_devices", "rest_s"), [("h200", 1, 20.0), ("v6e", 1, None), ("h200", 8, None)])
def test_the_rest_is_unknown_before_a_trial_of_its_kind_has_ended(target, num_devices, rest_s, tmp_path):
    done, *left = trials = [made_up_trial("a", "h100-80gb"), *(made_up_trial(key, target, num_devices) for key in "bc")]
    console = Console(file=(out := io.StringIO()), width=200)
    with Store(tmp_path / "rows.jsonl") as store:
        watched = TrialsProgress(Progress(console), store)
        watched.expect(trials)
        watched.on_start(done)
        watched.on_end(done, "ok", 10.0)
        assert out.getvalue().splitlines()[-1].endswith(f"2 waiting{rest_text(rest_s, _REST)}")
        watched.on_start(left[0])
        watched.on_end(left[0], "ok", 30.0)
        assert out.getvalue().splitlines()[-1].endswith(f"1 waiting{rest_text(20.0 if rest_s else 30.0, _REST)}")


def test_a_trial_that_ended_says_what_it_found():
    """The rows come after the last trial, which may be minutes away."""
    row = step("dots", 3, step_s=0.3, seq_len=1024)
    assert _result([row]) == ": batch 3, 10,240 tokens/s"
    assert _result([replace(row, mesh="fsdp=8")]) == ": batch 3, fsdp=8, 10,240 tokens/s a device"
    assert _result([replace(row, fits=False)]) == _result([]) == ""


def made_up_trial(key: str, target: str, num_devices: int = 1) -> SweepTrial:
    task = Task({})
    return SweepTrial(key, "m", "dots", target, None, task, {}, num_devices=num_devices)
