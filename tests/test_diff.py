"""`jaxremat diff`: records of two sides, compared."""

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from jaxremat.cli import diff
from jaxremat.cli.diff import main
from jaxremat.cli.machine.facts import PROBE_LIMIT_S
from jaxremat.report.diff import changes_report
from jaxremat.system.process import Deadline, Ended
from jaxremat.trial.details import HeldBytes
from jaxremat.trial.difference import Changes, PeakChange, StepChange, compared
from jaxremat.trial.lines import to_json
from jaxremat.trial.record import Record
from tests.made_up_records import GIB, explained, plan, record, search, step, trial
from tests.user_files import TRAIN

RESIDUALS = HeldBytes(category="residuals", label="mlp/wi", num_bytes=GIB, num_buffers=1, num_layers=12)
OTHER = HeldBytes(category="residuals", label="mlp/wi", num_bytes=2 * GIB, num_buffers=1, num_layers=12)


def stored(folder: Path, name: str, *records: Record) -> str:
    """A store in the folder."""
    path = folder / name
    path.write_text("".join(f"{to_json(one)}\n" for one in records))
    return str(path)


def with_parts(*parts: HeldBytes) -> list[Record]:
    """The record of a step with these parts at its peak."""
    return [explained(held=parts)]


def test_equal_records_have_no_difference():
    records = [step(), search(), explained(held=(RESIDUALS,)), record()]
    changes = compared(records, records)
    assert not changes.differs
    assert len(changes.steps) == 3


def test_bytes_flops_and_times_of_one_request_are_pairs():
    before, after = (
        step(step_s=seconds, total_bytes=GIB, executed_flops=flops) for seconds, flops in ((0.01, 5), (0.02, 6))
    )
    (change,) = compared([before], [after]).steps
    assert (change.total_bytes, change.executed_flops, change.step_s) == ((GIB, GIB), (5, 6), (0.01, 0.02))
    assert change.differs


def test_bytes_differ_by_category_and_name():
    (change,) = compared(with_parts(RESIDUALS), with_parts(OTHER)).at_peak
    assert isinstance(change, PeakChange)
    assert (change.category, change.label, change.num_bytes) == ("residuals", "mlp/wi", (GIB, 2 * GIB))


def test_shapes_and_the_line_of_a_name_are_those_of_the_records():
    before = dataclasses.replace(RESIDUALS, shape="bf16[8]", source="model.py:4")
    after = dataclasses.replace(OTHER, shape="f32[8]", source="model.py:5")
    (change,) = compared(with_parts(before), with_parts(after)).at_peak
    assert (change.shapes, change.source) == (("bf16[8]", "f32[8]"), "model.py:5")
    (gone,) = compared(with_parts(before), with_parts()).at_peak
    assert (gone.shapes, gone.source) == (("bf16[8]", ""), "model.py:4")


def test_a_request_of_one_side_alone_is_named():
    changes = compared([step(batch=8), trial(4, "probe"), plan()], [step(batch=16), record()])
    assert [len(side) for side in changes.only] == [1, 2]
    assert changes.differs


def test_the_largest_batch_of_a_search_is_compared():
    (change,) = compared([search(largest_batch=8)], [search(largest_batch=9)]).steps
    assert change.largest_batch == (8, 9)


def test_versions_that_differ_are_named():
    changes = compared([step(versions={"jax": "0.10.2"})], [step(versions={"jax": "0.12.0"})])
    assert changes.versions == {"jax": ("0.10.2", "0.12.0")}
    assert not changes.differs


def test_a_report_has_a_table_for_each_kind_of_change():
    before, after = (
        [step(total_bytes=GIB), explained(held=(RESIDUALS,))],
        [step(total_bytes=3 * GIB), explained(held=(OTHER,))],
    )
    parts = [*changes_report(compared(before, after), 8)]
    assert [not isinstance(part, str) for part in parts] == [True, True, False]


def test_a_long_path_of_a_parameter_leaves_the_table_a_table():
    path = "state.params['params']['Block_*']['gate']['kernel']"
    change = PeakChange("gpt2, dots, batch 8, h100-80gb", "parameters", path, (GIB, 2 * GIB))
    console = Console(width=80, file=(out := io.StringIO()))
    for part in changes_report(Changes((), (change,), ((), ()), {}), 8):
        console.print(part)
    (row,) = (line for line in out.getvalue().splitlines() if "parameters" in line)
    assert row.split()[1:] == ["state.params.params.Block_*.gate.", "1.00", "2.00", "+1.00"]  # "kernel" is in the next line


def test_a_row_has_the_line_and_the_shapes_and_its_columns_the_sides(snapshot: SnapshotAssertion):
    where = "gpt2, dots, batch 8, h100-80gb"
    became = PeakChange(
        where, "residuals", "block_*/add", (GIB, 2 * GIB), ("bf16[32,512,512]", "f32[32,512,512]"), "/a/mygpt/model.py:47"
    )
    new = PeakChange(where, "working set", "tanh", (0, GIB // 2), ("", "f32[32,512,512]"), "/a/mygpt/model.py:48")
    several = PeakChange(where, "outputs", "y", (GIB // 4, 0), ("", ""), "/a/mygpt/model.py:49")
    changes = Changes((StepChange(where, total_bytes=(GIB, 2 * GIB)),), (became, new, several), ((), ("tiny",)), {})
    console = Console(width=80, file=(out := io.StringIO()))
    for part in changes_report(changes, 8, ("HEAD~1", "the working tree")):
        console.print(part)
    assert out.getvalue() == snapshot


@pytest.mark.parametrize(("first", "rows"), [(GIB, ["parameters", "2"]), (3, ["parameters", "outputs", "other"])])
def test_what_differs_by_nothing_that_is_shown_is_counted(first: int, rows: list[str]):
    """Unless nothing differs by more."""
    changes = tuple(
        PeakChange("gpt2, dots, batch 8, h100-80gb", category, "a", pair)
        for category, pair in (("parameters", (0, first)), ("outputs", (0, 2)), ("other", (2, 0)))
    )
    console = Console(width=80, file=(out := io.StringIO()))
    for part in changes_report(Changes((), changes, ((), ()), {}), 8):
        console.print(part)
    body = out.getvalue().partition("───")[2].splitlines()[1:]
    assert [line.split()[0] for line in body if line.strip()][: len(rows)] == rows
    assert ("2 more" in out.getvalue()) == (first == GIB)


def test_two_stores_are_compared_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = stored(tmp_path, "a.jsonl", step(total_bytes=GIB))
    other = stored(tmp_path, "b.jsonl", step(total_bytes=2 * GIB))
    assert main([one, one]) == 0
    capsys.readouterr()
    assert main([one, other, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["total_bytes"] == [GIB, 2 * GIB]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a"],
        ["a", "b"],
        ["a", "b", "c"],
        ["--python", "p"],
        ["a", "--python", "p", "--", "--model", "tiny"],
        ["--top", "0"],
    ],
    ids=" ".join,
)
def test_nothing_to_compare_is_a_usage_error(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"record": "nothing"}\n', "has a line that is no record"),
        ("[1]\n", "has a line that is no record"),
        ("no JSON\n", "has a line that is no record"),
        ("", "has no record"),
        ("\n", "has no record"),
        (f"{to_json(plan())}\n", "has no step to compare"),
    ],
)
def test_a_file_that_is_no_store_of_steps_is_one_usage_error(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.jsonl").write_text(text)
    assert main([str(tmp_path / "a.jsonl"), stored(tmp_path, "b.jsonl", step())]) == 2
    said = capsys.readouterr().err
    assert f"a.jsonl {named}" in said
    assert said.count("Allowed:") == said.count("Next:") == 1


RUN = ("--", "--model", "tiny", "--policy", "dotz", "--batch", "8")


@pytest.mark.parametrize(
    ("python", "code", "named"),
    [
        ("nope", 0, "isn't there"),
        (".", 0, "a folder"),
        (sys.executable, 0, "no jaxremat"),
        (sys.executable, None, "120 seconds"),
    ],
)
def test_a_python_that_cannot_be_run_is_named_before_any_compile(
    python: str, code: int | None, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def ends(deadline: Deadline, *_: object) -> Ended:
        assert deadline.limit_s == PROBE_LIMIT_S
        return Ended(code, "")

    monkeypatch.setattr(diff, "run_until", ends)
    assert diff.main(["--python", python, *RUN]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "Allowed:" in said
    assert "jaxremat run" not in said


@pytest.mark.parametrize(
    ("ended", "code", "named"),
    [
        (Ended(2, "jaxremat: unknown policy 'dotz'. Next: did you mean 'dots'?"), 2, "unknown policy"),
        (Ended(1, "jaxremat: XLA rejected it."), 1, "run failed: XLA rejected it"),
        (Ended(0, ""), 1, "printed no record"),
        (Ended(0, "", "words"), 1, "printed a line that is no record"),
    ],
)
def test_the_error_of_a_side_is_one(
    ended: Ended, code: int, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(diff, "_check_python", lambda _: None)
    monkeypatch.setattr(diff, "run_until", lambda *_: ended)
    assert diff.main(["--python", "python", *RUN]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("jaxremat: this environment: ")
    assert last.count("jaxremat: ") == last.count("Next:") == 1
    assert named in last


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Makes a repository in the current folder. Each call commits files with their text, and returns the commit."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    diff.git("init", "-q")

    def commit(**files: str) -> str:
        for name, text in files.items():
            Path(f"{name}.py").write_text(text)
        diff.git("add", ".")
        diff.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "a")
        return diff.git("rev-parse", "--short", "HEAD")

    return commit


@pytest.mark.full
@pytest.mark.parametrize("words", [["--model", "{}.py:workload"], ["--model={}:workload"], ["--data", "{}.py"]])
def test_a_file_that_is_here_and_not_in_the_revision_is_named_with_what_to_do(
    words: list[str], commits: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    commits(model="a = 1")
    first = commits(memory="b = 1")
    commits(memory="b = 2")
    Path("new.py").touch()
    Path("../beside.py").touch()

    def said(revision: str, name: str) -> str:
        assert main([revision, "--", *(word.format(name) for word in words), "--policy", "dots"]) == 2
        return capsys.readouterr().err

    newer, uncommitted = said("HEAD~2", "memory"), said("HEAD", "new")
    assert "'memory.py' is here, and isn't in HEAD~2. Allowed:" in newer
    assert f"newer than HEAD~2. Next: jaxremat diff {first} --" in newer
    assert "'new.py' is here, and isn't in HEAD. Allowed:" in uncommitted
    assert "isn't committed. Next: commit it" in uncommitted
    if words[-1].endswith(".py"):
        assert "outside of the repository" in said("HEAD", "../beside")
    assert "jaxremat run" not in newer + uncommitted


@pytest.mark.full
@pytest.mark.any_jax
def test_a_revision_is_compared_with_the_working_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In a folder of a repository; the file names the residual, and one side is wider."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "models")
    Path("train.py").write_text(TRAIN)
    run = ("--", "--model", "train.py:workload", "--policy", "none", "--batch", "512", "--target", "a100-40gb")
    assert main(["HEAD", *run]) == 2  # in no repository
    as_someone = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        subprocess.run([*as_someone, *words], check=True)
    Path("train.py").write_text(TRAIN.replace("width: int = 4", "width: int = 1024"))
    assert main(["nowhere", *run]) == 2
    assert "git branch --all" in capsys.readouterr().err
    Path(".git", "shallow").write_text(f"{diff.git('rev-parse', 'HEAD')}\n")
    assert main(["nowhere", *run]) == 2
    assert "--unshallow" in capsys.readouterr().err
    assert main(["HEAD", "--json", *run]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (changed,) = (row for row in rows if row["record"] == "step")
    assert changed["total_bytes"][1] > changed["total_bytes"][0]
    grown = {row["label"]: row["num_bytes"] for row in rows if row["record"] == "peak"}
    assert grown["state.params['w']"] == [64, 4 * 2**20]
    assert not subprocess.run(["git", "worktree", "list"], capture_output=True, text=True).stdout.count("\n") > 1


@pytest.mark.parametrize(
    ("field", "values"),
    [("seq_len", (1024, 2048)), ("loss", ("full", "chunked")), ("xla_preset", ("default", "jax-toolbox"))],
)
@pytest.mark.parametrize("kind", [step, search])
def test_two_requests_of_one_store_have_titles_of_their_own(
    kind: Callable[..., Record], field: str, values: tuple[Any, Any]
):
    records = [kind(**{field: value}) for value in values]
    titles = [change.step for change in compared(records, records).steps]
    assert len({*titles}) == 2
    assert all(title.endswith(str(value)) for title, value in zip(titles, values, strict=True))


def test_a_step_that_failed_on_one_side_holds_no_bytes_that_became_none():
    before, after = explained(attribution={"gaps": GIB}), explained(attribution=None, error="XLA rejected it")
    changes = compared([before], [after])
    assert not changes.at_peak
    assert [change.error for change in changes.steps] == [(None, "XLA rejected it")]
