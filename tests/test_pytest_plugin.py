"""The fixture `memory_baseline`: a step that grew fails, and the message has the buffers."""

import json
import re
import threading
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jaxremat.errors import UsageError
from jaxremat.pytest_plugin import (
    Baseline,
    Holding,
    MemoryBaseline,
    _baselines_of,
    _bytes_of,
    _grown,
    _missing,
    _shown,
    _update,
    _within_lines,
    _written_lines,
)

PLACES = ("jax 0.10.2", "h100-80gb")
BEFORE = Baseline(
    1000, 0, (Holding("residuals", "mlp/wi", "model.py:4", 600), Holding("gaps", "", "", 400)), {"jax": "0.10.2"}
)
STEP = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, pytest


def loss(w, x):
    hidden = jnp.tanh(x @ w)
    return (hidden @ w.T).sum()


@pytest.mark.parametrize(("name", "width"), {widths}.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_step(memory_baseline, name, width):
    tolerance = "99%" if name == "within" else 0
    memory_baseline(jax.grad(loss), (jnp.zeros((256, width)), jnp.zeros((8192, 256))), "a100-40gb", tolerance=tolerance)
"""


@pytest.mark.parametrize(("tolerance", "allowed"), [(5, 5), ("1%", 10), ("2.5 %", 25), ("1KiB", 1024)])
def test_tolerances_are_bytes_or_shares(tolerance: int | str, allowed: int):
    assert _bytes_of(tolerance)(1000) == allowed


@pytest.mark.parametrize("tolerance", ["1 percent", "three percent", "40", "-3", "%", 0.01, -3, True, None])
def test_another_tolerance_is_an_error_before_anything_is_compiled(tolerance: Any):
    with pytest.raises(UsageError, match="%"):
        _bytes_of(tolerance)


def test_a_number_may_have_meant_percent():
    with pytest.raises(UsageError) as raised:
        _bytes_of("3")
    assert raised.value.next_step == "did you mean '3%'?"


def test_baselines_of_two_tests_are_in_one_file(tmp_path: Path):
    file = tmp_path / "baselines.json"
    _update(file, "a", PLACES, BEFORE)
    _update(file, "b", PLACES, BEFORE)
    assert _baselines_of(file.read_bytes(), file) == {"jax 0.10.2": {"h100-80gb": {"a": BEFORE, "b": BEFORE}}}


def test_a_full_disk_leaves_the_baselines_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "baselines.json"
    _update(file, "a", PLACES, BEFORE)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        _update(file, "b", PLACES, BEFORE)
    assert file.read_bytes() == before


def test_baselines_of_parallel_tests_are_all_there(tmp_path: Path):
    file = tmp_path / "baselines.json"
    threads = [threading.Thread(target=_update, args=(file, str(n), PLACES, BEFORE)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_baselines_of(file.read_bytes(), file)["jax 0.10.2"]["h100-80gb"]) == 16


def test_a_damaged_file_is_one_error(tmp_path: Path):
    with pytest.raises(UsageError):
        _baselines_of(b'{"jax 0.10.2": 3}', tmp_path / "baselines.json")


def test_the_message_names_what_grew_with_its_line():
    grown = (
        Holding("residuals", "mlp/wi", "model.py:5", 900),
        Holding("gaps", "", "", 400),
        Holding("outputs", "y", "", 100),
    )
    text = _grown("test_a", PLACES, BEFORE, Baseline(1400, 7, grown, {"jax": "0.10.2", "jaxlib": "1"}))
    lines = text.splitlines()
    assert [line.split()[-1] for line in lines if "residuals" in line or "outputs" in line] == ["GiB", "new"]
    assert "model.py:5" in text
    assert "jaxlib None became 1" in text
    assert "gaps" not in text


def test_the_message_has_the_shapes_that_became_others():
    was = (Holding("residuals", "add", "", 100, "bf16[8]"), Holding("residuals", "tanh", "", 100, "f32[8]"))
    now = (
        Holding("residuals", "add", "", 300, "f32[8]"),
        Holding("residuals", "tanh", "", 290, "f32[8]"),
        Holding("outputs", "y", "", 280, "s32[4]"),
        Holding("outputs", "z", "", 270),
    )
    lines = _grown("test_a", PLACES, Baseline(200, 0, was, {}), Baseline(1140, 0, now, {})).splitlines()
    assert [line.split("  ")[-1] for line in lines[3:7]] == ["s32[4]", "new", "bf16[8] became f32[8]", "f32[8]"]


def test_a_baseline_of_a_former_version_has_no_shapes(tmp_path: Path):
    file = tmp_path / "baselines.json"
    _update(file, "a", PLACES, BEFORE)
    rows = json.loads(file.read_text())
    for part in rows[PLACES[0]][PLACES[1]]["a"]["at_peak"]:
        del part["shape"]
    before = _baselines_of(json.dumps(rows).encode(), file)[PLACES[0]][PLACES[1]]["a"]
    assert before == BEFORE
    now = Baseline(1300, 0, (Holding("residuals", "mlp/wi", "model.py:4", 900, "f32[8]"),), {})
    assert "f32" not in _grown("test_a", PLACES, before, now)


def test_what_hardly_grew_is_not_named():
    grown = (Holding("residuals", "a", "model.py:1", 10**6), Holding("outputs", "b", "", 900))
    text = _grown("test_a", PLACES, Baseline(10**6, 0, (), {}), Baseline(2 * 10**6, 0, grown, {}))
    assert ("residuals" in text, "outputs" in text) == (True, False)


def test_the_bytes_that_left_the_peak_are_said_so_that_the_message_adds_up():
    grown = (Holding("working set", "dot_general", "model.py:8", 700), Holding("gaps", "", "", 400))
    text = _grown("test_a", PLACES, BEFORE, Baseline(1100, 0, grown, {}))
    assert "+0.000 GiB  working set" in text
    assert text.splitlines()[4].split(maxsplit=2)[2] == "others, which shrank or are no longer at the peak"
    same = _grown("test_a", PLACES, BEFORE, Baseline(1700, 0, (*BEFORE.at_peak, grown[0]), {}))
    assert "others" not in same


def test_a_missing_baseline_shows_that_of_another_jax():
    text = _missing("a", ("jax 0.12.0", "h100-80gb"), BEFORE, {"jax 0.10.2": {"h100-80gb": {"a": BEFORE}}}, Path("b.json"))
    assert "jax 0.10.2" in text
    assert "jax 0.12.0" in text


def test_sources_are_the_same_on_every_machine():
    assert _shown("/home/a/b/model.py:4", Path("/home/a")) == "b/model.py:4"
    assert _shown("/x/lib/site-packages/flax/linen.py:7", Path("/home/a")) == "flax/linen.py:7"
    assert _shown("", Path("/home/a")) == ""


def test_two_steps_of_a_test_need_names(tmp_path: Path):
    baseline = MemoryBaseline(tmp_path / "b.json", tmp_path, "test_a", False, warn=print, _seen={("h100-80gb", "")})
    with pytest.raises(pytest.fail.Exception, match="name="):
        baseline(lambda x: x, (1.0,), "h100-80gb")


@pytest.mark.parametrize(("target", "tolerance"), [("h100-80", 0), ("h100-80gb", "3")])
def test_a_wrong_argument_fails_the_test_without_a_traceback(target: str, tolerance: Any, tmp_path: Path):
    baseline = MemoryBaseline(tmp_path / "b.json", tmp_path, "test_a", False, warn=print)
    with pytest.raises(pytest.fail.Exception, match=r"test_a: .*did you mean") as raised:
        baseline(lambda x: x, (1.0,), target, tolerance=tolerance)
    assert not raised.value.pytrace


def test_the_message_has_the_tolerance():
    now = Baseline(1400, 0, (), {})
    assert "the tolerance of 3%" in _grown("test_a", PLACES, BEFORE, now, "3%")
    assert "the tolerance of 3 bytes" in _grown("test_a", PLACES, BEFORE, now, 3)
    assert "tolerance" not in _grown("test_a", PLACES, BEFORE, now)


def test_the_written_baselines_are_counted_with_what_changed():
    gib = 2**30
    new, same = ("c", "h100-80gb", None, (gib, 0)), ("b", "h100-80gb", (gib, 0), (gib, 0))
    changed = [("a", "h100-80gb", (2 * gib, 0), (3 * gib, gib)), ("a", "a100-40gb", (4 * gib, 0), (2 * gib, 0))]
    first, *lines = _written_lines([new, *changed, same], "baselines.json")
    assert first == "baselines.json: 4 written, 1 new, 2 changed, 1 with the same bytes"
    assert [line.split(":")[0].strip() for line in lines] == ["a on a100-40gb", "a on h100-80gb"]
    assert ["-50.0%" in line for line in lines] == [True, False]
    assert ["host 0.000 GiB became 1.00 GiB" in line for line in lines] == [False, True]


def test_what_differs_within_its_tolerance_has_a_line_for_each_step():
    gib = 2**30
    lines = _within_lines(
        [
            ("b", "h100-80gb", (gib, 0), (gib, gib // 1024), "4096 bytes"),
            ("a", "h100-80gb", (100 * gib, 0), (99 * gib, 0), "3%"),
            ("c", "h100-80gb", (2 * gib, 0), (2 * gib + 256, 0), "3%"),
        ]
    )
    assert lines == [
        "a on h100-80gb: 100.00 GiB became 99.00 GiB, -1.00 GiB (-1.0%), within 3%",
        "b on h100-80gb: host 0.000 GiB became 0.001 GiB, +0.001 GiB, within 4096 bytes",
        "c on h100-80gb: 2,147,483,648 bytes became 2,147,483,904, +256 bytes, within 3%",
    ]


def test_a_baseline_that_is_replaced_is_returned(tmp_path: Path):
    assert _update(tmp_path / "b.json", "a", PLACES, BEFORE) is None
    assert _update(tmp_path / "b.json", "a", PLACES, Baseline(7, 0, (), {})) == BEFORE


@pytest.mark.full
def test_a_step_that_grows_fails_until_its_baseline_is_written(pytester: pytest.Pytester):
    is_installed = any(point.name == "jaxremat" for point in entry_points(group="pytest11"))
    words = (*(() if is_installed else ("-p", "jaxremat.pytest_plugin")), "-p", "no:cacheprovider", "-n0")

    def run(widths: dict[str, int], *more: str) -> tuple[dict[str, int], str]:
        pytester.makepyfile(test_memory=STEP.format(widths=widths))
        done = pytester.runpytest_subprocess(*words, *more)
        return done.parseoutcomes(), done.stdout.str()

    widths = {"same": 256, "grown": 256, "smaller": 256, "within": 256}
    assert run(widths)[0] == {"failed": 4}
    result, output = run(widths, "--update-baselines")
    assert result == {"passed": 4}
    assert "memory_baselines.json: 4 written, 4 new, 0 changed" in output
    of_target = next(iter(json.loads(Path(pytester.path, "memory_baselines.json").read_text()).values()))
    assert {sum(part["num_bytes"] for part in one["at_peak"]) for one in of_target["a100-40gb"].values()} == {
        one["total_bytes"] for one in of_target["a100-40gb"].values()
    }
    other, several = {"same": 256, "grown": 512, "smaller": 128, "within": 512}, ("-n2",) if find_spec("xdist") else ()
    result, output = run(other, *several)
    assert result == {"failed": 1, "passed": 3, "warnings": 1}
    assert [line.split("(")[-1] for line in output.splitlines() if ", within 99%" in line] == ["+67.0%), within 99%"]
    assert "memory_baselines.json: " not in output
    assert "test_memory.py:" in output.partition("At the peak")[2]
    assert "f32[8192,256] became f32[8192,512]" in output
    assert re.search(r"GiB became .* GiB \(-\d", output)
    output = run(other, "--update-baselines", *several)[1]
    assert "memory_baselines.json: 4 written, 0 new, 3 changed, 1 with the same bytes" in output
    assert sum("on a100-40gb: 0." in line for line in output.splitlines()) == 3
