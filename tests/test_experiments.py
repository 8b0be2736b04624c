"""The experiments run at a size of seconds, print their tables, and file their results with the versions in use."""

import json
import os
import sys

import pytest

from experiments import examples, foreign_blocks, layouts, levers, mesh, next_jax, planner, published, search_cost, tables
from experiments.common import other_parts, results_text, write
from jaxremat.machine.process import Deadline

TINY = ["--target", "h100-80gb"]


def run(main, argv, folder, name):
    assert main([*TINY, *argv, "--out", str(folder)]) == 0
    result = json.loads((folder / "h100-80gb" / f"{name}.json").read_text())
    assert result["versions"]["jax"]
    assert result["machine"]["cores"] >= 1
    return result


def test_parts_of_the_same_versions_stay(tmp_path):
    path = tmp_path / "made.json"
    write(path, {"first": [1], "second": [2]})
    assert other_parts(path, ("first", "third")) == {"first": [1]}
    path.write_text(path.read_text().replace('"python":"3.', '"python":"2.'))
    assert other_parts(path, ("first", "third")) == {}
    assert other_parts(tmp_path / "none.json", ("first",)) == {}


def test_a_file_of_results_has_a_row_a_line():
    result = {
        "seed": 0,
        "rows": [{"policy": "dots", "step_s": 0.1234567891}, {"policy": "─", "losses": (1.0, 2)}],
        "none": [],
    }
    lines = results_text(result).splitlines()
    assert [json.loads(lines[n].removesuffix(",")) for n in (3, 4)] == [
        {"policy": "dots", "step_s": 0.1234568},
        {"policy": "─", "losses": [1.0, 2]},
    ]
    assert json.loads("".join(lines)).keys() == result.keys()


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (tables.main, ["--parts", "score"], "experiments.tables: --parts got 'score'. Allowed: published, "),
        (examples.main, ["--parts", "vitt"], "experiments.examples: --parts got 'vitt'. Allowed: "),
        (tables.main, ["--parts", "scores", "--target", "h1000"], "experiments.tables: unknown target"),
        (levers.main, ["--target", "h1000"], "experiments.levers: unknown target"),
        (next_jax.main, ["--tests", "tests/test_none.py"], "experiments.next_jax: --tests got 'tests/test_none.py'"),
        (next_jax.main, ["--python", "python9"], "experiments.next_jax: --python got 'python9'"),
    ],
)
def test_what_cannot_be_meant_is_one_message(main, argv, message, tmp_path, capsys):
    assert main([*argv, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert not list(tmp_path.iterdir())
    assert said[0].startswith(message)
    assert "Next: " in said[0]


TESTS = """
import os
import pytest

def test_passes():
    assert os.environ["SET_FOR_IT"] == "1"

def test_fails():
    assert 1 + 1 == 3, "the sum"

@pytest.mark.skip
def test_is_skipped():
    pass
"""


def test_the_tests_of_a_newer_jax_are_counted(tmp_path):
    (tmp_path / "test_made.py").write_text(TESTS)
    file, environment = str(tmp_path / "test_made.py"), {**os.environ, "SET_FOR_IT": "1"}
    row = next_jax.tested(sys.executable, file, environment, Deadline(60))
    assert (row["passed"], row["skipped"], list(row["failed"])) == (1, 1, ["test_fails"])
    assert "the sum" in row["failed"]["test_fails"]
    assert next_jax.found(row) == "1 of 2"
    (tmp_path / "test_made.py").write_text("import no_such_module")
    broken = next_jax.tested(sys.executable, file, environment, Deadline(60))
    assert (broken["passed"], len(broken["failed"])) == (0, 1)


@pytest.mark.slow
def test_search_cost(tmp_path, h100, capsys):
    argv = ["--model", "tiny", "--policies", "dots", "--max-batch", "4", "--layers", "1", "2", "--repeats", "1"]
    result = run(search_cost.main, argv, tmp_path, "search_cost")
    (row,) = result["search"]["policies"]
    assert row["ours"]["largest_batch"] == row["bisection"]["largest_batch"] == 4
    assert row["ours"]["num_compiles"] == len(row["ours"]["batches"]) <= 2
    assert row["bisection"]["num_compiles"] == 2
    assert result["help"]["median_s"] < result["first-row"]["median_s"]
    assert result["depth"]["ratio"] > 0
    printed = capsys.readouterr().out
    for goal in ("first row", "compiles a policy", "faster than bisection", "compile at 2 layers against 1"):
        assert goal in printed


@pytest.mark.slow
def test_levers(tmp_path, h100, capsys):
    argv = [
        "--models",
        "tiny",
        "--large-vocabulary",
        "tiny",
        "float32",
        "h100-80gb",
        "--policies",
        "nothing",
        "--batch",
        "1",
    ]
    result = run(levers.main, argv, tmp_path, "levers")
    assert {part: len(result[part]) for part in levers.MEASURES} == {
        "loss": 2,
        "optimizers": 6,
        "microbatches": 3,
        "dtypes": 6,
    }
    assert "tiny" in capsys.readouterr().out


TINY_MESH = ["--cases", "tiny", "data=2,fsdp=4", "--policies", "nothing", "--seq-len", "64"]


def test_mesh(tmp_path, h100, capsys):
    rows = run(mesh.main, TINY_MESH, tmp_path, "mesh")["steps"]
    assert [row["flags"] for row in rows] == list(mesh.PRESETS)
    for row in rows:
        assert (row["num_devices"], row["global_batch"]) == (8, 16)
        assert row["step_s"] > row["collective_exposed_s"] >= 0
        assert row["total_bytes"] > row["state_bytes"] > 0
    assert "waits" in capsys.readouterr().out


PUBLISHED = """
[[step]]
name = "tiny"
target = "a100-80gb"
mesh = "fsdp=2"
model = "tiny"
sizes = { num_layers = 1 }
seq_len = 64
batch = 2
policy = "nothing"
measured_s = 1.0
source = "none: made up"
"""


def test_published(tmp_path, h100, capsys):
    (tmp_path / "steps.toml").write_text(PUBLISHED)
    (row,) = run(published.main, ["--file", str(tmp_path / "steps.toml")], tmp_path, "published")["steps"]
    assert (row["num_devices"], row["target"], row["error"]) == (2, "a100-80gb", None)
    assert row["longer"] == pytest.approx(1 / row["predicted_s"] - 1)
    assert "longer" in capsys.readouterr().out


@pytest.mark.slow
def test_planner(tmp_path, h100, capsys):
    argv = ["--models", "tiny", "--batches", "4", "--num-budgets", "1", "--loss", "full"]
    result = run(planner.main, argv, tmp_path, "planner")
    assert {row["kind"] for row in result["frontier"]} == {"named", "planned"}
    for row in result["frontier"]:
        assert row["kind"] == "named" or row["faster_percent"] > -0.1, "no named policy is faster within the same bytes"
    for row in (*result["budgets"], *result["search"]):
        assert row["total_bytes"] <= row["budget_bytes"]
        assert row["tokens_per_s"] >= row["loop_tokens_per_s"]
    assert result["search"][0]["search_s"] > 0
    none, saved, planned = result["no-matmul"]
    assert planned["total_bytes"] <= saved["total_bytes"] < none["total_bytes"]
    assert planned["step_s"] <= saved["step_s"]
    assert saved["recompute_overhead_percent"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_examples(tmp_path, h100, capsys):
    sizes = ["seq_len=16", "vocab_size=64", "num_layers=3", "width=32", "num_heads=2", "chunk=8"]
    result = run(examples.main, ["--parts", "plain_scan", "--batch", "2", "--args", *sizes], tmp_path, "examples")
    assert [row["asked"] for row in result["plain_scan"]] == ["none", "nothing", "dots", "auto"]
    dots, auto = result["plain_scan"][2:]
    assert auto["total_bytes"] <= dots["total_bytes"]
    assert auto["step_s"] <= dots["step_s"]
    assert "plain_scan" in capsys.readouterr().out


@pytest.mark.slow
def test_tables(tmp_path, h100, capsys):
    sizes = "--num-experts 2 --embed-dim 64 --num-heads 2 --num-kv-heads 2 --mlp-dim 64 --vocab-size 128"
    dense, ragged = run(tables.main, ["--parts", "experts-layer", f"--more={sizes}"], tmp_path, "tables")["experts-layer"]
    assert dense["model_flops"] == ragged["model_flops"] < dense["executed_flops"] < ragged["executed_flops"]
    assert "mixtral-8x7b" in capsys.readouterr().out


@pytest.mark.slow
def test_layouts(tmp_path, h100, capsys):
    argv = ["--models", "tiny", "--batches", "2", "--seq-lens", "64", "--policies", "dots+attention", "--unroll", "2"]
    result = run(layouts.main, argv, tmp_path, "layouts")
    assert [row["layers"] for row in result["steps"]] == ["loop", "unrolled"]
    assert [row["layers"] for row in result["between"]] == ["loop", "loop, 2 an iteration", "unrolled"]
    assert len({row["total_bytes"] for row in (*result["steps"], *result["between"])}) > 2
    assert "unrolled" in capsys.readouterr().out


@pytest.mark.slow
def test_foreign_blocks(tmp_path, h100, capsys):
    argv = ["--parts", "blocks", "--blocks", "parallel", "--num-layers", "2", "--shares", "0.5"]
    (row,) = run(foreign_blocks.main, argv, tmp_path, "foreign_blocks")["blocks"]
    assert row["total_bytes"] <= row["budget_bytes"]
    assert row["off_percent"] is None or abs(row["off_percent"]) < 10
    assert "parallel" in capsys.readouterr().out
