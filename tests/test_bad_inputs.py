"""The table of bad inputs is whole, its draws vary, and an ending that is wrong is found."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.bad_inputs import __main__ as bad_inputs
from experiments.bad_inputs.case import AREAS, COMMANDS, KINDS, OK, USAGE, Case, Ended, in_fork_of, problems_of
from experiments.bad_inputs.flags import flags_of

#: The areas whose draws are made of the seed alone, not of this machine's terminals and disks.
OWN_AREAS = ("flags", "contradictions", "values", "files", "models", "stores")
RIGHT = Ended(2, "", "jaxremat: --batch got 'x'. Allowed: whole numbers. Next: --batch 8.\n", 0.1)
CASE = Case(("run", "--batch", "x"), says=("--batch",))


def test_each_area_and_each_command_has_kinds():
    assert {kind.area for kind in KINDS.values()} == {*AREAS}
    assert {f"flags_of_{command}" for command in COMMANDS} <= KINDS.keys()
    for command in COMMANDS:
        names = [flag.name for flag in flags_of(command)]
        assert len(names) == len({*names})
        assert names
    by_name = {flag.name: flag for flag in flags_of("run")}
    assert by_name["--max-batch"].type is int
    assert by_name["--policy"].several
    assert by_name["--json"].is_switch
    assert set(by_name["--objective"].choices) == {"time", "batch", "memory"}


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.area in OWN_AREAS])
def test_the_draws_of_a_kind_follow_from_the_seed_and_differ(name, tmp_path):
    def drawn(seed: int, n: int, place: str) -> str:
        folder = tmp_path / place
        folder.mkdir()
        case = KINDS[name].nth(seed, n, folder)
        files = {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()}
        return repr((case.command, case.exit_codes, files)).replace(str(folder), ".")

    first = [drawn(0, n, f"first {n}") for n in range(8)]
    assert first == [drawn(0, n, f"again {n}") for n in range(8)]
    assert first != [drawn(1, n, f"other {n}") for n in range(8)]
    assert len({*first}) > 2


@pytest.mark.parametrize(
    ("case", "ended"),
    [
        (CASE, replace(RIGHT, exit_code=0)),
        (CASE, replace(RIGHT, exit_code=-11)),
        (CASE, replace(RIGHT, timed_out=True)),
        (CASE, replace(RIGHT, stderr="Traceback (most recent call last):\n" + RIGHT.stderr)),
        (CASE, replace(RIGHT, stderr="")),
        (CASE, replace(RIGHT, stderr=2 * RIGHT.stderr)),
        (CASE, replace(RIGHT, stderr="jaxremat: --batch got 'x'.\n")),
        (CASE, replace(RIGHT, stderr=RIGHT.stderr.replace("--batch", "--b"))),
        (CASE, replace(RIGHT, stderr=RIGHT.stderr + "\x1b[2J")),
        (replace(CASE, unchanged={Path(__file__): b"other"}), RIGHT),
        (replace(CASE, unchanged={Path(__file__).with_name("no_such_file"): b""}), RIGHT),
        (replace(CASE, check=lambda ended: "wrong"), RIGHT),
        (replace(CASE, exit_codes=OK), RIGHT),
    ],
)
def test_a_wrong_ending_is_found(case, ended):
    assert problems_of(case, ended)


def test_a_right_ending_has_no_problem():
    assert problems_of(replace(CASE, unchanged={Path(__file__): Path(__file__).read_bytes()}), RIGHT) == []
    died = replace(CASE, exit_codes=frozenset({-15}), says=())
    assert problems_of(died, Ended(-15, "", "", 0.1)) == []
    with_trace = replace(CASE, without=("traceback",))
    assert problems_of(with_trace, replace(RIGHT, stderr=RIGHT.stderr + "Traceback (most recent call last):\n")) == []


def test_the_rows_and_their_failures_are_filed(tmp_path, capsys, monkeypatch):
    """One kind whose case ends as expected, and one whose case doesn't, without a process."""
    ends = {"odd_and_right": Ended(0, "a list", "", 0.1), "wrong_choice": Ended(0, "", "", 0.1)}

    def kind_of(name: str) -> object:
        def draw(draw, folder):
            return Case(("run", str(folder)), OK if name == "odd_and_right" else USAGE, run=lambda case, folder: ends[name])

        return replace(KINDS[name], draw=draw)

    for name in ends:
        monkeypatch.setitem(KINDS, name, kind_of(name))
    assert bad_inputs.main(["--kinds", *ends, "--count", "3", "--seed", "7", "--out", str(tmp_path)]) == 1
    (path,) = (tmp_path / "bad_inputs").iterdir()
    filed = json.loads(path.read_text())
    rows = {row["kind"]: row for row in filed["kinds"]}
    assert (filed["seed"], rows["odd_and_right"]["draws"], rows["odd_and_right"]["failures"]) == (7, 3, [])
    assert (rows["wrong_choice"]["exit_codes"], len(rows["wrong_choice"]["failures"])) == ({"0": 3}, 3)
    assert str(tmp_path) not in path.read_text()
    assert "seed 7" in capsys.readouterr().out
    assert bad_inputs.main(["--kinds", "no_such_kind", "--out", str(tmp_path)]) == 2
    assert "no_such_kind" in capsys.readouterr().err


@pytest.mark.full
def test_a_fork_ends_as_the_command_does(tmp_path):
    case = Case(("run", "--list", "policies"), OK)
    ended = case.run(case, tmp_path)
    assert problems_of(case, ended) == []
    assert "dots" in ended.stdout
    hanging = Case((), OK, run=in_fork_of(lambda: time.sleep(60) or 0), limit_s=0.5)
    assert problems_of(hanging, hanging.run(hanging, tmp_path))
