"""Configurations that `experiments.shapes` draws compile (a few of its 200), and its results are filed."""

import json

import pytest

from experiments import shapes
from experiments.shapes import EncoderBlock, compile_drawn, draw, is_accepted, rows_of

#: Of seed 0: odd lengths, widths and batches; 59 is an encoder block.
FEW = (3, 59)


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("number", FEW)
def test_what_is_drawn_compiles(number, h100):
    row = compile_drawn(0, number)
    assert (row["outcome"], row["error"]) == ("ok", None), row["what"]
    assert row["total_bytes"] > 0


def test_a_number_is_the_same_configuration_each_time():
    drawn = [draw(3, number) for number in range(20)]
    assert drawn == [draw(3, number) for number in range(20)]
    assert drawn != [draw(4, number) for number in range(20)]
    assert [n for n, some in enumerate(drawn) if isinstance(some, EncoderBlock)] == [19]
    assert sum(map(is_accepted, drawn[:8])) > 5


def test_the_command_files_what_it_compiled(tmp_path, monkeypatch):
    """Configurations that no compiler takes are drawn anew."""

    def run_child(module, argv, deadline, environment):
        numbers = map(int, argv[argv.index("--numbers") + 1 :])
        rows = tuple({"number": n, "what": "", "outcome": "ok" if n % 2 else "undrawn"} for n in numbers)
        return shapes.Child(rows, "")

    monkeypatch.setattr(shapes, "run_child", run_child)
    assert shapes.main(["--count", "2", "--jobs", "1", "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "shapes").iterdir()
    filed = json.loads(path.read_text())
    assert path.name == f"jax-{filed['versions']['jax']}.json"
    assert len(filed["compiled"]) == 2
    assert {row["outcome"] for row in filed["others"]} == {"undrawn"}


def test_a_process_that_dies_is_one_failure(monkeypatch):
    """The first process dies at its second configuration: that one failed, and the one after it is done in another process."""
    children = iter([([1], "killed"), ([3], "")])

    def run_child(module, argv, deadline, environment):
        numbers, error = next(children)
        rows = tuple({"number": n, "what": "", "outcome": "ok"} for n in numbers)
        return shapes.Child(rows, error)

    monkeypatch.setattr(shapes, "run_child", run_child)
    rows = list(rows_of(shapes.Flags(jobs=1), [1, 2, 3]))
    assert [(row["number"], row["outcome"]) for row in rows] == [(1, "ok"), (2, "failed"), (3, "ok")]
    assert rows[1]["error"].endswith("killed")
