"""The experiments run at a size of seconds, print their tables, and file their results with the versions in use."""

import json
import os
import shlex
import sys
from dataclasses import replace

import jax
import pytest

from experiments import examples, levers, mesh, next_jax, plan_times, tables, tpu, tpu_step, unchanged
from experiments.children import Child
from experiments.common import other_parts, results_text, write
from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import check_run
from jaxremat.session.session import Session, _flags_from
from jaxremat.system.process import Deadline

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


SAME = {"bytes": 1, "of": [{"name": "a", "step_s": 0.5}]}


@pytest.mark.parametrize(
    ("other", "places"),
    [
        (SAME | {"compile_s": 3.0, "new": None}, []),
        (SAME | {"bytes": 2}, ["[0].bytes"]),
        (SAME | {"of": [{"name": "b", "step_s": 0.6}]}, ["[0].of[0].name", "[0].of[0].step_s"]),
        (SAME | {"of": []}, ["[0].of"]),
        ({"bytes": 1}, ["[0].of"]),
    ],
)
def test_what_became_of_a_record(other, places):
    assert [text.partition(": ")[0] for text in unchanged.differences([SAME], [other])] == places


FAILED = Child((), "unknown name")


@pytest.mark.parametrize(
    ("before", "now", "failed", "num_differences", "code"),
    [
        (Child((SAME,), ""), Child((SAME,), ""), [], 0, 0),
        (Child((SAME,), ""), Child((SAME | {"bytes": 2},), ""), [], 1, 1),
        (Child((SAME,), ""), FAILED, ["now"], 1, 1),
        (FAILED, FAILED, ["before", "now"], 0, 1),
    ],
)
def test_what_became_of_a_request(before, now, failed, num_differences, code, tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "records_at", lambda tree, request: now if tree == unchanged.ROOT else before)
    row = unchanged.compared(tmp_path, "--model tiny")
    assert ([*row["failed"]], len(row["differences"])) == (failed, num_differences)
    monkeypatch.setattr(unchanged, "rows_of", lambda flags: [row])
    monkeypatch.setattr(unchanged, "git", lambda *words, revision: "")
    assert unchanged.main(["--out", str(tmp_path)]) == code
    assert json.loads((tmp_path / "unchanged" / "unchanged.json").read_text())["rows"] == [row]


@pytest.mark.parametrize("words", [one for one in unchanged.REQUESTS if "examples/" not in one])
def test_a_request_that_is_compared_is_one(words, h100):
    """Its names are those of the model's values."""
    flags = parse_flags(RunFlags, shlex.split(words))
    request = check_run(flags)
    assert Session.of(request, load_target(flags.target, request.mesh), attention="xla").request.policies


@pytest.mark.parametrize(
    ("main", "argv", "named"),
    [
        (tables.main, ["--parts", "score"], ["experiments.tables", "--parts", "'score'"]),
        (examples.main, ["--parts", "vitt"], ["experiments.examples", "--parts", "'vitt'"]),
        (tables.main, ["--parts", "scores", "--target", "h1000"], ["experiments.tables", "h1000"]),
        (levers.main, ["--target", "h1000"], ["experiments.levers", "h1000"]),
        pytest.param(unchanged.main, ["--since", "no-such"], ["experiments.unchanged", "'no-such'"], marks=pytest.mark.full),
        (next_jax.main, ["--tests", "tests/test_none.py"], ["experiments.next_jax", "--tests", "'tests/test_none.py'"]),
        (next_jax.main, ["--python", "python9"], ["experiments.next_jax", "--python", "'python9'"]),
    ],
)
def test_what_cannot_be_meant_is_one_message(main, argv, named, tmp_path, capsys):
    assert main([*argv, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not list(tmp_path.iterdir())
    assert [name for name in named if name not in line] == []


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


@pytest.mark.full
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


TINY_MESH = ["--cases", "tiny", "data=2,fsdp=4", "--policies", "nothing", "--seq-len", "64", "--presets", "latency-hiding"]


@pytest.mark.full
def test_mesh(tmp_path, h100, capsys):
    rows = run(mesh.main, TINY_MESH, tmp_path, "mesh")["steps"]
    assert [row["flags"] for row in rows] == ["latency-hiding"]
    for row in rows:
        assert (row["num_devices"], row["global_batch"]) == (8, 16)
        assert row["step_s"] > row["collective_exposed_s"] >= 0
        assert row["total_bytes"] > row["state_bytes"] > 0
    assert len(capsys.readouterr().out.splitlines()) > len(rows)


@pytest.mark.full
def test_tables(tmp_path, h100, capsys):
    sizes = "--num-experts 2 --embed-dim 64 --num-heads 2 --num-kv-heads 2 --mlp-dim 64 --vocab-size 128"
    dense, ragged = run(tables.main, ["--parts", "experts-layer", f"--more={sizes}"], tmp_path, "tables")["experts-layer"]
    assert dense["model_flops"] == ragged["model_flops"] < dense["executed_flops"] < ragged["executed_flops"]
    assert "mixtral-8x7b" in capsys.readouterr().out


@pytest.mark.full
def test_plan_times(tmp_path, h100, monkeypatch):
    size = "--num-layers 1 --seq-len 64 --dropout 0 --attention xla --scan-layers True --loss chunked --batch 8"
    command = f"run --model tiny {size} --policy auto --objective memory --target h100-80gb"
    monkeypatch.setattr(plan_times, "PLANS", (command,))
    (row,) = run(plan_times.main, ["--parts", "plans", "--repeats", "1"], tmp_path, "plan_times")["plans"]
    assert (row["command"], row["runs"], row["batch"], row["num_compiles"]) == (command, 1, 8, 2)
    assert 0 < row["answer_s"] < row["median_s"]


@pytest.mark.full
def test_a_timed_command_that_fails_ends_with_a_sentence():
    with pytest.raises(SystemExit, match="jaxremat run --batch x ended with exit code 2"):
        plan_times.timed("run --batch x")


# Nothing is compiled below: what a case's process prints is made up.


def said_of(batch: int, total_bytes: int, early_bytes: int = 0) -> list[dict[str, object]]:
    fits = {"fits": total_bytes < 100, "total_bytes": total_bytes, "compile_s": 1.0, "peak_bytes": 1, "host_bytes": 2}
    early = [{"record": "early", "batch": batch, "early_bytes": early_bytes, "early_s": 1.0}] * bool(early_bytes)
    return [*early, {"record": "whole", "batch": batch, **fits}]


def test_tpu_s_cases_that_are_filed_are_not_compiled_again(tmp_path, monkeypatch):
    """One that was cut off is, and has its row until then."""
    said, begun = [*said_of(2, 80, early_bytes=60)], list[str]()
    errors = {"full remat": "", "offloading": "cut off"}

    def run_child(module: str, argv: list[str], *_: object) -> Child:
        name = json.loads(argv[1])["name"]
        begun.append(name)
        return Child(tuple(said[:1] if errors[name] else said), errors[name])

    monkeypatch.setattr(tpu, "run_child", run_child)

    def large(*argv: str) -> list[dict[str, object]]:
        assert tpu.main(["--parts", "large", "--out", str(tmp_path), *argv]) == 0
        return json.loads((tmp_path / "tpu" / "tpu.json").read_text())["large"]

    whole, cut_off = large()
    assert (whole["total_bytes"], whole["early_bytes"], whole["early_off"]) == (80, 60, -0.25)
    assert (cut_off["early_bytes"], cut_off["error"], "total_bytes" in cut_off) == (60, "cut off", False)
    assert large("--minutes", "0") == [whole, cut_off]
    errors["offloading"] = ""
    assert "error" not in large()[1]
    assert begun == ["full remat", "offloading", "offloading"]
    large("--fresh")
    assert begun[3:] == ["full remat", "offloading"]


def test_tpu_s_rows_have_both_batches():
    search = {"record": "search", "num_compiles": 4}
    below = {"record": "below", "limit_bytes": 79, "bytes": 82, "fits": False}
    row = tpu.of_boundary(Child((search, *said_of(3, 120), *said_of(2, 80), below), ""))
    assert (row["batch"], row["total_bytes"], row["next_bytes"], row["below_bytes"]) == (2, 80, 120, 82)
    recipe = tpu.of_recipe(Child((*said_of(2, 80, 60), *said_of(3, 120, 130)), ""))
    assert (recipe["total_bytes"], recipe["fits"], recipe["more_total_bytes"], recipe["more_fits"]) == (80, True, 120, False)
    assert (recipe["more_batch"], recipe["more_early_bytes"]) == (3, 130)


def test_tpu_s_plan_is_beside_the_fastest_full_remat_that_fits():
    tried = [
        {"policy": policy, "batch": batch, "step_s": step_s, "total_bytes": total_bytes}
        for policy, batch, step_s, total_bytes in (
            ("nothing", 1, 0.5, 60),
            ("nothing", 4, 1.6, 80),
            ("nothing", 8, 2.4, 120),
            ("save:a", 4, 1.2, 90),
        )
    ]
    plan = {"record": "plan", "tried": tried, **tried[3]}
    row = tpu.of_plan(Child(({"record": "step", "budget_bytes": 100}, plan), ""))
    assert row["nothing"] == tried[1]
    assert row["ms_per_sequence"] == pytest.approx(300)
    assert tpu.of_plan(Child((), "cut off")) == {}
    case, *others = tpu.PLANS
    filed = case.as_row() | row
    assert tpu.is_of(filed, case), "which isn't compiled again"
    assert not any(tpu.is_of(filed, other) for other in (*others, *tpu.POLICIES))


def test_tpu_s_steps_are_drawn_alike_and_are_accepted():
    cases = tpu.early_cases(0, 40)
    assert cases[:10] == tpu.early_cases(0, 10)
    assert cases != tpu.early_cases(1, 40)
    for of_part in (cases, tpu.BOUNDARIES, tpu.RECIPES, tpu.LARGE, tpu.POLICIES, tpu.PLANS):
        assert len({case.name for case in of_part}) == len(of_part)
        for case in of_part[-2:]:
            flags = {"policy": (case.policy,), "model": case.model, "target": case.target, "mesh": case.mesh}
            options = {name: value for name, value in case.options.items() if name != "budget"}
            assert check_run(replace(_flags_from(options), **flags)).policies


@pytest.mark.parametrize("is_unrolled", [False, True])
@pytest.mark.parametrize("attention", ["none", "xla"])
def test_tpu_s_small_step_has_a_gradient_of_each_parameter(attention, is_unrolled):
    sizes = {"num_layers": 2, "length": 128, "width": 128}
    workload = tpu_step.layers(2, attention=attention, is_unrolled=is_unrolled, **sizes)
    assert workload.loss is not None
    gradients = jax.eval_shape(jax.grad(workload.loss), workload.params, workload.batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), gradients) == jax.tree.map(
        lambda x: (x.shape, x.dtype), workload.params
    )
    of_layer = {"wi": 128 * 512, "wo": 512 * 128} | (
        dict.fromkeys(("q", "k", "v", "out"), 128 * 128) if attention == "xla" else {}
    )
    assert workload.num_params == 2 * sum(of_layer.values())
