"""`--mesh auto`: of the sensible meshes it takes the one whose answer is the fastest, and says why the others aren't."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import main as explain
from jaxremat.cli.grid import sweep_trials
from jaxremat.cli.processes import task_of
from jaxremat.cli.run import main
from jaxremat.cli.worker import work
from jaxremat.errors import CompileError, UsageError
from jaxremat.session.answers import Listener
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.meshes import choose_mesh
from jaxremat.session.request import check_run
from tests.mesh_runs import SMALL, records

pytestmark = pytest.mark.any_jax
ARGV = ["--model", "tiny", *SMALL]


def rows_of(argv: list[str], path: Path) -> list[dict]:
    assert main([*argv, "--out", str(path)]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_the_mesh_of_the_fastest_answer(tmp_path):
    """The chosen one is requested by itself, too: it is as fast as it was said."""
    argv = [*ARGV, "--devices", "2", "--policy", "dots+attention", "--global-batch", "8", "--budget", "60MiB"]
    rows = rows_of([*argv, "--mesh", "auto"], tmp_path / "auto.jsonl")
    (choice,) = [row for row in rows if row["record"] == "mesh_choice"]
    meshes = {one["mesh"]: one for one in choice["meshes"]}
    assert meshes.keys() == {"fsdp=2", "data=2", "tensor=2"}
    assert choice["num_compiles"] == sum(one["num_compiles"] for one in meshes.values()) <= 4 * 3
    alone = rows_of([*argv, "--mesh", choice["mesh"]], tmp_path / "alone.jsonl")
    (found,), (largest,) = ([row for row in all_rows if row["record"] == "largest_batch"] for all_rows in (rows, alone))
    chosen = meshes[choice["mesh"]]
    assert found["num_compiles"] == chosen["num_compiles"], "what was compiled before is compiled again"
    assert chosen["tokens_per_s"] == pytest.approx(largest["tokens_per_s"]) == found["tokens_per_s"]
    assert chosen["tokens_per_s"] <= 1.005 * chosen["bound_tokens_per_s"]
    assert chosen["tokens_per_s"] == max(one["tokens_per_s"] or 0.0 for one in meshes.values())


@pytest.mark.full
def test_a_policy_that_xla_rejects_doesn_t_end_the_others(tmp_path, monkeypatch):
    def choose(request, requested, listener):
        if requested.text == "nothing":
            raise CompileError("rejected")
        return choose_mesh(request, requested, listener)

    monkeypatch.setattr("jaxremat.session.meshes.choose_mesh", choose)
    argv = [*ARGV, "--devices", "2", "--mesh", "auto", "--policy", "nothing", "none", "--batch", "4"]
    assert main([*argv, "--out", str(tmp_path / "rows.jsonl")]) == 1
    failure, *others = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (failure["record"], failure["error"]) == ("failure", "CompileError: rejected.")
    assert [(row["record"], row["requested_policy"]) for row in others] == [("mesh_choice", "none"), ("trial", "none")]


@pytest.mark.full
def test_meshes_are_compared_in_the_worker_too():
    """As a sweep requests it: the records are the meshes, and the step on the best of them."""
    flags = parse_flags(RunFlags, [*ARGV, "--devices", "2", "--mesh", "auto", "--policy", "nothing", "--batch", "4"])
    result = work(task_of(flags, "nothing", 4, "default"))
    assert result.outcome == "ok", result.error
    choice, trial = map(asdict, result.records)
    assert [choice["record"], trial["record"]] == ["mesh_choice", "trial"]
    assert choice["mesh"] == trial["mesh"]
    assert trial["fits"]
    best = max(one["tokens_per_s"] or 0.0 for one in choice["meshes"])
    assert trial["tokens_per_s"] >= 0.97 * best
    left_out = [one for one in choice["meshes"] if one["left_out"] == "slower at best"]
    assert all(one["bound_tokens_per_s"] <= best for one in left_out)


def test_no_mesh_has_room_for_the_state(tmp_path):
    out = tmp_path / "rows.jsonl"
    argv = [*ARGV, "--attention", "xla", "--devices", "4", "--mesh", "auto", "--policy", "nothing", "--budget", "5MiB"]
    assert main([*argv, "--out", str(out)]) == 3
    (choice,) = records(out, "mesh_choice")
    assert (choice["mesh"], choice["num_compiles"]) == (None, 0)
    assert all(one["left_out"] for one in choice["meshes"])


def test_a_sweep_tells_a_chosen_mesh_from_a_given_one(tmp_path):
    models = ("tiny",)
    (chosen,), (given,) = (sweep_trials(SweepFlags(out=tmp_path, model=models, devices=8, mesh=m)) for m in ("auto", None))
    assert chosen.key != given.key
    assert not chosen.refused


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--mesh auto", ["--devices"]),
        ("--mesh atuo --devices 8", ["--mesh", "'atuo'"]),
        ("--mesh auto --devices 8 --nodes 3", ["8", "3"]),
        ("--mesh auto --devices 8 --target cpu", ["--mesh auto", "--target cpu"]),
        ("--mesh auto --devices 8 --dump-target x.txt", ["--mesh auto", "--dump-target"]),
        ("--mesh auto --devices 8 --frontier --batch 8", ["--mesh auto", "--frontier"]),
        ("--mesh auto --devices 8 --batch 1,2", ["--mesh auto", "--batch 1,2"]),
        ("--mesh auto --devices 8 --policy auto --objective batch", ["--mesh auto", "--objective batch"]),
        ("--mesh auto --devices 8 --policy auto --offload", ["--mesh auto", "--offload"]),
        ("--mesh auto --devices 8 --list shardings", ["--mesh auto", "--list shardings"]),
        ("--mesh auto --devices 8 --global-batch 3", ["--mesh auto", "8", "7"]),
        ("--mesh auto --devices 16 --target a6000 --attention xla", ["--mesh auto", "16", "'a6000'", "2"]),
    ],
)
def test_what_cannot_be_compared_is_rejected(flags, named):
    def choose() -> None:
        request = check_run(parse_flags(RunFlags, ["--model", "tiny", *flags.split()]))
        choose_mesh(request, request.policies[0], Listener(record=print))

    with pytest.raises(UsageError) as caught:
        choose()
    assert [word for word in named if word not in caught.value.got] == []
    assert caught.value.next_step


def test_explain_takes_one_mesh(capsys):
    assert explain(["--model", "tiny", "--mesh", "auto", "--devices", "8"]) == 2
    assert "--mesh fsdp=8" in capsys.readouterr().err
