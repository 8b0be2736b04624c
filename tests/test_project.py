"""Defaults in `[tool.jaxremat]` of a project's pyproject.toml."""

from pathlib import Path

import pytest

from jaxremat.cli.command import COMMANDS, parse_flags
from jaxremat.cli.explain import ExplainFlags
from jaxremat.cli.project import project_words
from jaxremat.cli.watch import WatchFlags
from jaxremat.errors import UsageError
from jaxremat.session.flags import RunFlags, SweepFlags

DEFAULTS = """
[tool.jaxremat]
target = "a100-80gb"
seq-len = 512
lint = true
model = "tiny"

[tool.jaxremat.run]
policy = ["none", "dots"]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a project with defaults, the current one."""
    (tmp_path / "pyproject.toml").write_text(DEFAULTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_are_flags_of_the_commands_that_have_them(project: Path):
    run, explain = parse_flags(RunFlags, [], "run"), parse_flags(ExplainFlags, [], "explain")
    assert (run.target, run.training.seq_len, len(run.policy)) == ("a100-80gb", (512,), 2)
    assert (explain.target, explain.lint, len(explain.policy)) == ("a100-80gb", True, 0)
    assert parse_flags(WatchFlags, [], "watch") == WatchFlags()


def test_a_typed_flag_wins(project: Path, capsys: pytest.CaptureFixture[str]):
    run = parse_flags(RunFlags, ["--target=h200", "--policy", "nothing"], "run")
    assert (run.target, run.training.seq_len, len(run.policy)) == ("h200", (512,), 1)
    assert "h200" not in capsys.readouterr().err


def test_a_typed_flag_with_underscores_wins(project: Path):
    assert parse_flags(RunFlags, ["--seq_len", "2048"], "run").training.seq_len == (2048,)


def test_another_source_of_the_model_wins(project: Path):
    assert "--model" not in project_words(RunFlags, ["--hf", "config.json"], "run", [*COMMANDS])


def test_a_task_of_an_array_job_submits_no_job(project: Path):
    with (project / "pyproject.toml").open("a") as file:
        file.write('[tool.jaxremat.sweep]\nsubmit = "logs"\n')
    assert parse_flags(SweepFlags, ["--out", "r.jsonl"], "sweep").submit == Path("logs")
    assert parse_flags(SweepFlags, ["--out", "r.jsonl", "--shard", "1/2"], "sweep").submit is None


def test_the_nearest_file_above_counts(project: Path):
    inside = project / "a" / "b"
    inside.mkdir(parents=True)
    assert project_words(RunFlags, [], "run", [*COMMANDS], inside)[:2] == ["--target", "a100-80gb"]
    (inside.parent / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert project_words(RunFlags, [], "run", [*COMMANDS], inside) == []


def test_other_programs_have_no_defaults(project: Path):
    assert parse_flags(RunFlags, [], "experiments.tables") == RunFlags()


@pytest.mark.parametrize(
    "text",
    [
        "[tool.jaxremat]\ntargt = 'h200'",
        "[tool.jaxremat.rnu]\ntarget = 'h200'",
        "[tool.jaxremat.run]\ninterval = 3",
        "[tool.jaxremat]\nfresh = 'yes'",
        "[tool.jaxremat]\npolicy = []",
        "[tool]\njaxremat = 3",
        "[tool.jaxremat\n",
        "[tool.jaxrmat]\ntarget = 'h200'",
        "[tool.jax-remat.run]\ntarget = 'h200'",
        "[tool.jaxremat]\nseq-len = 'long'",
    ],
)
def test_what_no_flag_is_or_has_is_a_usage_error(text: str, project: Path):
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError):
        parse_flags(RunFlags, [], "run")
