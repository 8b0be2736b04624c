"""Files that flags name: none is written for two flags, links and permissions stay, and what isn't ours is left alone."""

import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags
from jaxremat.cli.price_file import read_prices
from jaxremat.cli.train import TrainRunFlags
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.model.hf import read_hf
from jaxremat.session.flags import RecommendFlags, RunFlags, SweepFlags
from jaxremat.system.files import check_outputs, parse_json, parse_toml, write_whole
from jaxremat.trial.lines import from_row
from jaxremat.trial.plan_file import load_plan
from tests.made_up_records import predicted, trial

COMMANDS = (
    (RunFlags, ("--out", "--save-plan", "--plot", "--dump-target", "--lengths", "--data", "--hf")),
    (SweepFlags, ("--out", "--csv", "--hf", "--target")),
    (ExplainFlags, ("--out", "--page", "--plot", "--policy", "--data")),
    (RecommendFlags, ("--out", "--price", "--hf")),
)
READ = {"--lengths", "--data", "--hf", "--target", "--policy", "--price"}
PAIRS = [(kind, pair) for kind, flags in COMMANDS for pair in itertools.combinations(flags, 2) if not {*pair} <= READ]


def named(tmp_path: Path, how: str) -> tuple[Path, Path]:
    """Two names of one file."""
    path, other = tmp_path / "one", tmp_path / "other"
    if how != "new":
        path.write_text("kept\n")
    if how == "link":
        other.symlink_to(path)
    elif how == "hard link":
        os.link(path, other)
    elif how == "link to nothing":
        path.unlink()
        other.symlink_to(path)
    else:
        other = tmp_path / "." / "one"
    return path, other


@pytest.mark.parametrize(
    ("kind", "pair"), PAIRS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else value.__name__
)
def test_two_flags_cannot_name_one_file(kind, pair, tmp_path):
    path, other = named(tmp_path, "same")
    argv = [word for flag, file in zip(pair, (path, other), strict=True) for word in (flag, str(file))]
    extra = [] if kind is not SweepFlags or "--out" in pair else ["--out", str(tmp_path / "rows")]
    with pytest.raises(UsageError) as caught:
        parse_flags(kind, [*argv, *extra])
    assert all(flag in caught.value.got for flag in pair)
    assert path.read_text() == "kept\n"


@pytest.mark.parametrize("how", ["link", "hard link", "link to nothing", "new"])
def test_links_to_one_file_are_one_file(how, tmp_path):
    path, other = named(tmp_path, how)
    with pytest.raises(UsageError):
        parse_flags(SweepFlags, ["--out", str(path), "--csv", str(other)])


def test_files_may_be_read_twice_and_devices_written_twice(tmp_path):
    path, _ = named(tmp_path, "same")
    parse_flags(RunFlags, ["--data", str(path), "--hf", str(path)])
    parse_flags(ExplainFlags, ["--out", "/dev/null", "--page", "/dev/null"])


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path):
    path, link = named(tmp_path, "link")
    path.chmod(0o640)
    write_whole(link, "new\n")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new\n", 0o640)


def test_a_new_file_has_the_usual_mode_and_a_users_part_is_left_alone(tmp_path):
    part = tmp_path / "page.html.part"
    part.write_text("mine")
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "page.html", "ours")
    finally:
        os.umask(before)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640
    assert part.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "page.html.part"}


@pytest.mark.parametrize("kind", [RunFlags, SweepFlags, ExplainFlags, RecommendFlags, TrainRunFlags])
@pytest.mark.parametrize("argv", [["--mem-fraction=0.5", "--mem_fraction", "0.6"], ["--data="], ["--data", ""]])
def test_a_flag_has_one_value_and_no_empty_one(kind, argv):
    argv = [word.replace("--data", "--hf") for word in argv] + (["--out", "rows"] if kind is SweepFlags else [])
    with pytest.raises(UsageError) as caught:
        parse_flags(kind, argv)
    assert caught.value.got.startswith(("--mem-fraction", "--hf"))
    assert caught.value.next_step


def test_flags_of_several_values_may_be_given_again():
    assert parse_flags(RunFlags, ["--policy", "dots", "--policy", "none"]).policy == ("dots", "none")


DEEP = 100_000
BAD_JSON = ["[" * DEEP, '{"a":' * DEEP, "9" * 6000, "NaN", "[Infinity]", '{"a": -Infinity}', "", "{", "\ufeff{}"]


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:8])
def test_json_that_python_cannot_read_is_an_error_of_one_kind(text, tmp_path):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)
    path = tmp_path / "config.json"
    path.write_text(text)
    for read in (read_hf, lambda path: load_plan(str(path))):
        with pytest.raises(UsageError) as caught:
            read(path)
        assert "config.json" in caught.value.got


@pytest.mark.parametrize("text", ["a = " + "[" * DEEP, "a = " + "9" * 6000, "a = ", "a"], ids=lambda text: text[:8])
def test_toml_that_python_cannot_read_is_an_error_of_one_kind(text, tmp_path):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_toml(text)
    (path := tmp_path / "prices.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_prices(path, ["h100-80gb"])
    assert "--price" in caught.value.got


@pytest.mark.parametrize("kind", [[], {}, None, 7, True, "lamma"])
def test_a_model_type_of_any_type_is_refused(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UsageError) as caught:
        read_hf(tmp_path)
    assert "model_type" in caught.value.got
    assert "llama" in caught.value.allowed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("total_bytes", -1), ("batch", 0), ("num_compiles", -1), ("step_s", -0.5), ("mfu", float("nan"))),
        *(("executed_flops", -1), ("seq_len", 0), ("generated_code_bytes", -1)),
        *(("predicted", {"step_s": float("inf")}), ("config", {"train": [float("nan")]})),
    ],
)
def test_a_stored_row_is_checked_for_sense(field, value):
    """Also deep inside. A difference of two measurements may be negative."""
    row = asdict(trial(8, predicted=predicted(1.0), outside_bytes=-1))
    assert from_row(row) == trial(8, predicted=predicted(1.0), outside_bytes=-1)
    value = row[field] | value if isinstance(value, dict) else value
    with pytest.raises(JaxrematError) as caught:
        from_row(row | {field: value})
    assert field in caught.value.got


def test_the_file_of_a_model_is_not_overwritten(tmp_path):
    model = tmp_path / "own.py"
    model.write_text("mine\n")
    with pytest.raises(UsageError) as caught:
        parse_flags(ExplainFlags, ["--model", f"{model}:workload", "--page", str(model)])
    assert all(flag in caught.value.got for flag in ("--model", "--page"))


def test_a_path_that_is_too_long_is_one_error(tmp_path):
    with pytest.raises(UsageError) as caught:
        check_outputs(parse_flags(RunFlags, ["--out", str(tmp_path / ("x" * 5000)), "--hf", "y" * 5000]))
    assert "--out" in caught.value.got
