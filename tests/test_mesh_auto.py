"""`--mesh auto`: of the sensible meshes it takes the one whose answer is the fastest, and says why the others aren't."""

import json
from pathlib import Path

import pytest

from jaxremat.command import parse_flags
from jaxremat.explain import main as explain
from jaxremat.flags import RunFlags, SweepFlags
from jaxremat.grid import trials_of
from jaxremat.processes import task_of
from jaxremat.run import main
from jaxremat.trial.lines import to_row
from jaxremat.worker import work
from tests.mesh_runs import SMALL, records

ARGV = ["--model", "tiny", *SMALL]


def rows_of(argv: list[str], path: Path) -> list[dict]:
    assert main([*argv, "--out", str(path)]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.any_jax
def test_the_mesh_of_the_fastest_answer(tmp_path, capsys):
    """Two of the meshes are asked for by themselves, too: the chosen one is as fast as it was said, and the other no faster."""
    argv = [*ARGV, "--devices", "4", "--policy", "dots+attention", "--global-batch", "32", "--budget", "60MiB"]
    rows = rows_of([*argv, "--mesh", "auto"], tmp_path / "auto.jsonl")
    said = " ".join(capsys.readouterr().out.split())
    (choice,) = [row for row in rows if row["record"] == "mesh_choice"]
    meshes = {one["mesh"]: one for one in choice["meshes"]}
    assert meshes.keys() == {"fsdp=4", "data=4", "fsdp=2,tensor=2", "data=2,tensor=2", "tensor=4"}
    assert "divides the 2 key and value heads" in meshes["tensor=4"]["left_out"]
    assert meshes["data=4"]["left_out"].startswith("needs ")
    assert choice["num_compiles"] == sum(one["num_compiles"] for one in meshes.values()) <= 4 * 3
    speeds = {}
    for mesh in (choice["mesh"], "fsdp=2,tensor=2"):
        alone = rows_of([*argv, "--mesh", mesh], tmp_path / f"{mesh}.jsonl")
        (largest,) = [row for row in alone if row["record"] == "largest_batch"]
        speeds[mesh] = largest["tokens_per_s"]
        assert speeds[mesh] <= 1.005 * meshes[mesh]["bound_tokens_per_s"]
    (found,) = [row for row in rows if row["record"] == "largest_batch"]
    assert found["num_compiles"] == meshes[choice["mesh"]]["num_compiles"], "what was compiled before is compiled again"
    assert meshes[choice["mesh"]]["tokens_per_s"] == pytest.approx(speeds[choice["mesh"]]) == found["tokens_per_s"]
    assert found["tokens_per_s"] == max(speeds.values())
    assert f"mesh {choice['mesh']}; all numbers are those of one device" in said
    assert f"{choice['mesh']} is the fastest of 4 meshes for policy dots+attention" in said


@pytest.mark.any_jax
def test_plans_are_compared_in_the_worker_too():
    """As a sweep asks for it: the records are the meshes, and the plan and its step on the best of them."""
    asked = ["--mesh", "auto", "--policy", "auto", "--global-batch", "8", "--budget", "60MiB", "--scan-layers", "True"]
    flags = parse_flags(RunFlags, [*ARGV, "--devices", "2", *asked])
    result = work(task_of(flags, "auto", None, "default"))
    assert result.outcome == "ok", result.error
    choice, plan, trial = map(to_row, result.records)
    assert [choice["record"], plan["record"], trial["record"]] == ["mesh_choice", "plan", "trial"]
    assert (choice["mesh"], plan["policy"]) == (trial["mesh"], trial["policy"])
    assert trial["fits"]
    best = max(one["tokens_per_s"] or 0.0 for one in choice["meshes"])
    assert trial["tokens_per_s"] >= 0.97 * best
    left_out = [one for one in choice["meshes"] if one["left_out"] == "slower at best"]
    assert all(one["bound_tokens_per_s"] <= 1.005 * best for one in left_out)


@pytest.mark.any_jax
def test_no_mesh_holds_the_state(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert (
        main([*ARGV, "--devices", "4", "--mesh", "auto", "--policy", "nothing", "--budget", "5MiB", "--out", str(out)]) == 3
    )
    (choice,) = records(out, "mesh_choice")
    assert (choice["mesh"], choice["num_compiles"]) == (None, 0)
    assert "No mesh of 4 devices holds the state" in " ".join(capsys.readouterr().out.split())


@pytest.mark.any_jax
def test_a_sweep_tells_a_chosen_mesh_from_a_given_one(tmp_path):
    models = (("tiny",),)
    (chosen,), (given,) = (trials_of(SweepFlags(out=tmp_path, model=models, devices=8, mesh=m)) for m in ("auto", None))
    assert chosen.key != given.key
    assert not chosen.refused


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mesh auto", "--devices is missing. Next: --mesh auto --devices 8"),
        ("--mesh atuo --devices 8", "--mesh got 'atuo'"),
        ("--mesh auto --devices 8 --nodes 3", "8 devices on 3 nodes"),
        ("--mesh auto --devices 8 --target cpu", "--mesh auto and --target cpu were both given"),
        ("--mesh auto --devices 8 --dump-target x.txt", "--mesh auto and --dump-target were both given"),
        ("--mesh auto --devices 8 --frontier --batch 8", "--mesh auto and --frontier were both given"),
        ("--mesh auto --devices 8 --batch 1,2", "--mesh auto and --batch 1,2 were both given"),
        ("--mesh auto --devices 8 --policy auto --objective batch", "--mesh auto and --objective batch were both given"),
        ("--mesh auto --devices 8 --policy auto --offload", "--mesh auto and --offload were both given"),
        ("--mesh auto --devices 8 --list shardings", "--mesh auto and --list shardings were both given"),
        ("--mesh auto --devices 8 --global-batch 3", "none of 7 meshes of 8 devices goes with this request"),
        ("--mesh auto --devices 16 --target a6000", "the speed of 16 x 'a6000' on 2 nodes isn't known"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags, said, capsys):
    assert main(["--model", "tiny", *flags.split()]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "Traceback" not in error


@pytest.mark.any_jax
def test_explain_takes_one_mesh(capsys):
    assert explain(["--model", "tiny", "--mesh", "auto", "--devices", "8"]) == 2
    assert "explain takes one mesh. Next: --mesh fsdp=8" in " ".join(capsys.readouterr().err.split())
