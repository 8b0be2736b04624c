"""What to rent: the file of prices, the rows and their order, the table, and the command on a small model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxremat.chips.tpu.device import tpu_names
from jaxremat.cli.command import parse_flags
from jaxremat.cli.price_file import read_prices
from jaxremat.cli.recommend import Cell, cells_of, main, none_trial, rows_of, show, trials_in_turns, turns
from jaxremat.errors import UsageError
from jaxremat.report.recommend import best_sentences, explanations, ranked
from jaxremat.session.flags import RecommendFlags
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.details import ComparedMesh
from jaxremat.trial.recommendation import RecommendationRecord, recommendation
from jaxremat.trial.record import Record, TrialRecord
from jaxremat.trial.store import Store
from tests.arguments import once
from tests.made_up_records import record, trial
from tests.mesh_runs import SMALL

pytestmark = pytest.mark.any_jax
NAMES = ("h100-80gb", "h200", "a100-80gb")


def step(policy: str, tokens_per_s: float, total_gib: int = 50, **fields: Any) -> TrialRecord:
    """The record of a step on a GPU with a budget of 60 GiB."""
    known: dict[str, Any] = dict(policy=policy, requested_policy=policy, tokens_per_s=tokens_per_s, mesh="fsdp=8")
    sizes = dict(total_bytes=total_gib * 2**30, budget_bytes=60 * 2**30, fits=total_gib <= 60, num_devices=8)
    return replace(trial(2), **(known | sizes | fields))


def row(
    trials: Mapping[str, Sequence[Record]], price: float | None = None, none: Sequence[Record] = ()
) -> RecommendationRecord:
    return recommendation("m", "h100-80gb", 8, trials, price, none=none)


def test_prices_are_read(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text("h100-80gb = 2.5\n'h200' = 4\n")
    assert read_prices(path, NAMES) == {"h100-80gb": 2.5, "h200": 4.0}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("h10-80gb = 2", "'h10-80gb'"),
        ("h200 = -2", "-2"),
        ("h200 = 0", "0"),
        ("h200 = nan", "nan"),
        ("h200 = inf", "inf"),
        ("h200 = true", "True"),
        ("h200 = '2.50 $'", "'2.50 $'"),
        ("[h200]\nprice = 2", "{'price': 2}"),
        ("h200 : 2", "TOML"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_wrong_file_of_prices_is_rejected(text, named, tmp_path):
    path = tmp_path / "prices.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_prices(path, NAMES)
    assert caught.value.got.startswith(f"--price '{path}'")
    assert named in caught.value.got
    assert caught.value.next_step


def test_an_unknown_gpu_s_price_names_those_that_are_known(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text("h10-80gb = 2")
    with pytest.raises(UsageError) as caught:
        read_prices(path, NAMES)
    assert caught.value.allowed.split(", ") == [*NAMES]
    assert "h100-80gb" in caught.value.next_step


def test_the_fastest_policy_counts_for_all_devices_and_what_it_costs():
    found = row({"dots": [step("dots", 900.0)], "nothing": [step("nothing", 1000.0)], "none": [step("none", 800.0)]}, 3.0)
    assert (found.policy, found.fits, found.mesh) == ("nothing", True, "fsdp=8")
    assert (found.tokens_per_s, found.tokens_per_s_per_device) == (8000.0, 1000.0)
    assert (found.checkpointing, found.none_tokens_per_s) == ("faster", 6400.0)
    assert found.hours_per_billion == pytest.approx(1e9 / 8000 / 3600)
    assert found.cost_per_billion == pytest.approx(1e9 / 8000 / 3600 * 8 * 3.0)


@pytest.mark.parametrize(
    ("none", "checkpointing", "policy"),
    [
        ([step("none", 500.0, total_gib=140)], "needed", "nothing"),
        ([step("none", 995.0)], "not needed", "nothing"),
        ([step("none", 1200.0)], "not needed", "nothing"),
        ([record()], None, "nothing"),
    ],
)
def test_whether_checkpointing_is_needed(none, checkpointing, policy):
    """A row's answer is a requested policy, even where `none` is faster."""
    found = row({"nothing": [step("nothing", 1000.0)]}, none=none)
    assert (found.checkpointing, found.policy) == (checkpointing, policy)
    assert found.none_total_bytes == (None if checkpointing is None else none[0].total_bytes)


def test_none_is_an_answer_where_it_was_requested():
    slow, fast = step("nothing", 1000.0), step("none", 1200.0)
    found = row({"nothing": [slow], "none": [fast]})
    assert (found.policy, found.checkpointing, found.none_tokens_per_s) == ("none", "not needed", 9600.0)
    of_mesh = row({"nothing": [slow], "none": [step("none", 900.0, mesh="data=8")]}, none=[step("none", 800.0)])
    assert (of_mesh.policy, of_mesh.none_tokens_per_s) == ("nothing", 6400.0), "on the answer's mesh"
    too_large = row({"nothing": [step("nothing", 9.0, total_gib=75)]}, none=[step("none", 9.0, total_gib=61)])
    assert (too_large.fits, too_large.policy) == (False, "nothing")


def test_the_trial_of_none_is_only_compared(tmp_path):
    argv = ["--model", "tiny", "--target", "h100-80gb", "--devices", "4", "--policy", "nothing"]
    (cell,) = cells_of(parse_flags(RecommendFlags, argv))
    with Store(tmp_path / "rows.jsonl") as store:
        store.append([step("nothing", 1000.0, mesh="fsdp=4")], cell.trials["nothing"].key)
        other = none_trial(store, cell)
        assert other
        store.append([step("none", 1200.0, mesh="fsdp=4")], other.key)
        (found,) = rows_of(store, [cell], {})
    assert (found.policy, found.checkpointing, found.none_tokens_per_s) == ("nothing", "not needed", 4800.0)


def test_what_does_not_fit_says_by_how_much():
    found = row({"nothing": [step("nothing", 9.0, total_gib=75)], "none": [step("none", 9.0, total_gib=90)]})
    assert (found.fits, found.over_bytes, found.policy, found.tokens_per_s) == (False, 15 * 2**30, "nothing", None)
    meshes = tuple(ComparedMesh(f"fsdp={n}", state_bytes=n * 2**30) for n in (90, 70))
    asked: dict[str, Any] = dict(model="m", requested_policy="auto", target="t", seq_len=4, num_devices=8, num_nodes=1)
    known: dict[str, Any] = dict(budget_bytes=60 * 2**30, loss=None, layout=None, mesh=None, num_compiles=0, versions={})
    choice = MeshChoiceRecord(**asked, **known, meshes=meshes)
    found = row({"auto": [choice], "none": [choice]})
    assert (found.fits, found.over_bytes, found.batch, found.error) == (False, 10 * 2**30, None, None)


def test_what_failed_says_why():
    found = row({"auto": [record()]}, none=[record()])
    assert (found.fits, found.error, found.total_bytes) == (False, "crashed: e (auto, none)", None)
    for others in ([step("nothing", 1000.0)], [step("nothing", 9.0, total_gib=75)]):
        beside = row({"nothing": others, "dots": [record()]})
        assert (beside.error, beside.policy) == ("crashed: e (dots)", "nothing")


def test_none_counts_on_the_same_mesh():
    found = row({"nothing": [step("nothing", 1000.0)]}, none=[step("none", 500.0, mesh="data=8")])
    assert (found.checkpointing, found.none_total_bytes) == (None, None)


def rows() -> list[RecommendationRecord]:
    of_trials = {
        "auto": [step("save:a,b,c,d,e,f,g,h,i,j,k,l,m+attention", 1000.0)],
        "none": [step("none", 9.0, total_gib=140)],
    }
    cheap = recommendation("m", "a100-80gb", 8, {**of_trials, "auto": [step("nothing", 400.0)]}, 1.0)
    alone = {
        "auto": [step("dots", 700.0, mesh=None, predicted_interval=(-0.12, 0.12))],
        "none": [step("none", 600.0, mesh=None)],
    }
    return [
        row({"auto": [record()], "none": [record()]}),
        row({"auto": [step("nothing", 1.0, total_gib=75)], "none": [step("none", 9.0, total_gib=90)]}),
        recommendation("m", "h200", 1, alone),
        cheap,
        row(of_trials, 4.0),
    ]


def test_the_order():
    by_speed, by_cost = (ranked(rows(), by_cost=by_cost) for by_cost in (False, True))
    assert [one.tokens_per_s for one in by_speed] == [8000.0, 3200.0, 700.0, None, None]
    assert [one.cost_per_billion is not None for one in by_cost] == [True, True, False, False, False]
    assert [one.target for one in by_cost[:3]] == ["a100-80gb", "h100-80gb", "h200"]
    assert [bool(one.error) for one in by_cost] == [False, False, False, False, True]


@pytest.mark.parametrize(("base", "said"), [(None, "LoRA 16, sequence"), ("nf4", "LoRA 16 on nf4, sequence")])
def test_the_title_has_the_adapters(base, said, capsys):
    flags = parse_flags(RecommendFlags, ["--lora", "16", *(["--quantize-base", base] if base else [])], "recommend")
    show(flags, [row({"dots": [step("dots", 100.0)]})], is_complete=True)
    assert f"what to rent for m, {said}" in capsys.readouterr().out


def test_how_many_are_the_best():
    """The fastest and the cheapest. That nothing fits is said only where nothing failed, and each row is done."""
    found = rows()
    assert [len(best_sentences(found, by_cost=by_cost)) for by_cost in (True, False)] == [2, 1]
    assert [len(best_sentences(some, by_cost=True)) for some in (found[:1], found[1:2], found[:2])] == [0, 1, 0]
    assert best_sentences(found[1:2], by_cost=True, is_complete=False) == []


@pytest.mark.full
def test_the_command(tmp_path, capsys, monkeypatch):
    """Rows of one GPU, whose memory can't hold the state, and of four. With prices the same command compiles nothing."""
    monkeypatch.chdir(tmp_path)
    small = [*SMALL]
    small[small.index("--seq-len") + 1] = "32"
    argv = [
        "--model",
        "tiny",
        *small,
        "--attention",
        "xla",
        "--target",
        "h100-80gb",
        "--devices",
        "1,4",
        "--policy",
        "nothing",
    ]
    argv += ["--vocab-size", "32768", "--global-batch", "4", "--budget", "110MiB"]
    argv = once(*argv)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main([*argv, "--json", "--jobs", "2"]) == 0
    found = {one["num_devices"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found.keys() == {1, 4}
    alone, four = found[1], found[4]
    assert alone["over_bytes"] > 0
    assert (alone["batch"], alone["fits"], alone["mesh"], alone["error"]) == (None, False, None, None)
    assert four["fits"]
    assert four["mesh"] in ("fsdp=4", "fsdp=2,tensor=2")
    assert (four["global_batch"], four["policy"]) == (4, "nothing")
    assert four["tokens_per_s"] == pytest.approx(4 * four["tokens_per_s_per_device"])
    out = tmp_path / "cache/jaxremat/recommend.jsonl"
    assert not (tmp_path / "recommend.jsonl").exists(), "nothing is written unless it was requested"
    size = out.stat().st_size
    unfinished = tmp_path / "unfinished.jsonl"
    unfinished.write_text("".join(line for line in out.open() if json.loads(line)["requested_policy"] != "none"))
    flags = parse_flags(RecommendFlags, [*argv, "--out", str(unfinished)], "recommend")
    with Store(unfinished) as store:
        known = {one.num_devices: one for one in rows_of(store, cells_of(flags), {})}
    assert known.keys() == {1, 4}, "a row isn't shown before the trial of none is done"
    assert (known[4].tokens_per_s, known[4].checkpointing) == (four["tokens_per_s"], None)
    assert four["checkpointing"] is not None
    (tmp_path / "prices.toml").write_text("h100-80gb = 2.5\n")
    assert main([*argv, "--price", "prices.toml", "--json"]) == 0
    priced = {one["num_devices"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert out.stat().st_size == size
    assert priced[4]["cost_per_billion"] == pytest.approx(four["hours_per_billion"] * 4 * 2.5)
    assert priced[1]["cost_per_billion"] is None


#: A step with a call that XLA doesn't know.
REFUSED = """
import jax, jax.numpy as jnp, jaxremat

def loss(params, batch):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)[0]
    return jnp.mean(x * jax.ffi.ffi_call("no_such_call", jax.ShapeDtypeStruct(x.shape, x.dtype))(jax.lax.stop_gradient(x)))

def workload(batch: int = 8) -> jaxremat.Workload:
    params, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16, 16), (batch, 16)))
    return jaxremat.Workload(loss=loss, params=params, batch=batch)
"""


@pytest.mark.full
def test_where_xla_rejects_each_mesh_the_row_says_so(write, capsys):
    path = write("refused.py", REFUSED)
    argv = f"--model {path}:workload --target h100-80gb --devices 2 --policy nothing --global-batch 8 --json"
    assert main(argv.split()) == 1
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["fits"], found["mesh"], found["total_bytes"], found["over_bytes"]) == (False, None, None, None)
    for named in ("bad-config", "no_such_call", "(nothing)"):
        assert named in found["error"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--target h100", "'h100'"),
        ("--target cpu", "--target cpu"),
        ("--target", "--target"),
        ("--devices 1,two", "--devices got '1,two'"),
        ("--devices 0", "--devices got '0'"),
        ("--model llama", "'llama'"),
        ("--model tiny --policy dots nothng", "'nothng'"),
        ("--model tiny --seq-len 1000", "--seq-len got 1000"),
        ("--model tiny --global-batch 0", "--global-batch got 0"),
        ("--model tiny --budget much", "'much'"),
        ("--model tiny --mem-fraction 2", "--mem-fraction got 2"),
        ("--model tiny --jobs 0", "--jobs got 0"),
        ("--model tiny --price none.toml", "--price 'none.toml'"),
        ("--model tiny --xla-preset fast", "--xla-preset got 'fast'"),
        ("--model tiny --fresh --retry-failed", "--retry-failed"),
        ("--hf nowhere.json", "nowhere.json"),
    ],
)
def test_what_cannot_be_meant_is_rejected(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(flags.split()) == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir()), "a file was written"


def test_a_trial_is_named_by_its_devices():
    argv = ["--model", "tiny", "--target", "h100-80gb", "--devices", "1,4", "--policy", "dots"]
    cells = cells_of(parse_flags(RecommendFlags, argv))
    assert [(one.num_devices, one.seq_len) for cell in cells for one in cell.trials.values()] == [(1, None), (4, None)]


def test_tpus_are_compared_where_they_are_named(monkeypatch):
    """On one axis, as each compile takes minutes. Of the makers' other devices the meshes are compared."""
    monkeypatch.setattr("jaxremat.cli.recommend.check_installed", lambda targets: None)
    named = ["--target", "h100-80gb", "v6e", "--model", "tiny", "--policy", "dots", "--devices", "1,8"]
    cells = cells_of(parse_flags(RecommendFlags, named))
    found = [(cell.target, cell.num_devices, cell.flags.mesh, cell.flags.devices) for cell in cells]
    assert found == [
        ("h100-80gb", 1, "auto", 1),
        ("h100-80gb", 8, "auto", 8),
        ("v6e", 1, None, None),
        ("v6e", 8, None, 8),
    ]
    by_default = {cell.target for cell in cells_of(parse_flags(RecommendFlags, named[3:]))}
    assert "h100-80gb" in by_default
    assert not by_default.intersection(tpu_names())


def answered(store: Store, cell: Cell, tokens_per_s: float, total_gib: int = 50) -> None:
    """Stores the cell's answer. A token takes 1e12 FLOPs."""
    flops = round(1e12 * tokens_per_s * 2)
    known = {"target": cell.target, "num_devices": cell.num_devices, "step_s": 2.0, "step_source": "predicted"}
    known |= {"model_flops": flops, "base_flops": 2 * flops, "predicted_interval": (-0.16, 0.16)}
    known |= {"loss": "chunked", "layout": "loop"}
    store.append([step("dots", tokens_per_s, total_gib, **known)], cell.trials["dots"].key)


@pytest.fixture
def of_all_gpus(monkeypatch) -> list[Cell]:
    monkeypatch.setattr("jaxremat.cli.recommend.check_installed", lambda targets: None)
    return cells_of(parse_flags(RecommendFlags, ["--model", "tiny", "--policy", "dots", "--devices", "1,8"]))


def test_gpus_whose_matmuls_are_too_slow_are_left_out(of_all_gpus, tmp_path, capsys):
    """The fastest matmuls of gb200 and gb300 make 1,950 tokens a second, of b200 1,755, of an h100-80gb 813."""
    with Store(tmp_path / "rows.jsonl") as store:
        turn = turns(store, of_all_gpus, {})
        first = next(turn)
        assert {(cell.target, cell.num_devices) for cell in first} == {("gb200", 1), ("gb200", 8), ("gh200", 8)}, (
            "no known link"
        )
        for cell in first:
            answered(store, cell, 1200.0, total_gib=50 if cell.num_devices == 1 else 70)
        second = next(turn)
        alone = [cell.target for cell in second if cell.num_devices == 1]
        assert {*alone} == {"gb300", "b200", "b300"}, "at 0.84 of the time, an h100-80gb is slower than 1,200 / 1.16"
        assert [cell.target for cell in second if cell.num_devices == 8] == ["gb300"], "8 x gb200 don't fit"
        for cell in second:
            answered(store, cell, 500.0 if cell.num_devices == 1 else 20.0)
        assert len(next(turn)) == 18, "8 of none are left out: an answer of 20 is slow"
        rows = rows_of(store, of_all_gpus, {})
        left_out = {row.target: row.bound_tokens_per_s for row in rows if row.bound_tokens_per_s}
        assert len(left_out) == 17
        assert left_out["h100-80gb"] == pytest.approx(989.4e12 * 0.82 / 1e12, rel=0.01)
        show(parse_flags(RecommendFlags, ["--model", "tiny"]), rows, is_complete=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Left out: 1 GPU of 17 other kinds (at most 813 tokens/s, gh200). By their interval" in printed
    assert "a10g" not in printed
    assert "Layers are in a scan, and the loss is chunked." in printed


def test_the_trials_of_none_begin_with_the_next_turn(of_all_gpus, tmp_path):
    alone = {cell.target: cell for cell in of_all_gpus if cell.num_devices == 1}
    with Store(tmp_path / "rows.jsonl") as store:
        turns_of_trials = trials_in_turns(store, [*alone.values()], {})
        assert [str(trial) for trial in next(turns_of_trials)] == ["tiny, dots, largest batch, gb200"]
        answered(store, alone["gb200"], 1200.0)
        first, *second = map(str, next(turns_of_trials))
        assert first == "tiny, none, largest batch, gb200"
        assert second == [f"tiny, dots, largest batch, {target}" for target in ("gb300", "b200", "b300")]
        answered(store, alone["b200"], 1100.0)
        assert [*map(str, next(turns_of_trials))] == ["tiny, none, largest batch, b200"]
        assert next(turns_of_trials, None) is None


def test_with_prices_what_cannot_be_cheaper_is_left_out(of_all_gpus, tmp_path):
    prices, alone = {"gb200": 10.0, "h100-80gb": 3.0, "l4": 0.2}, [cell for cell in of_all_gpus if cell.num_devices == 1]
    with Store(tmp_path / "rows.jsonl") as store:
        turn = turns(store, alone, prices)
        (l4,) = next(turn)
        assert l4.target == "l4", "121e12 FLOP/s for 0.2"
        answered(store, l4, 60.0)
        (h100,) = next(turn)
        assert h100.target == "h100-80gb", (
            "270 for the price of a second may be 322, and 300 may be 258; 195 of gb200 are 232"
        )
        answered(store, h100, 300.0)
        rows = rows_of(store, alone, prices)
    assert sum(row.bound_tokens_per_s is not None for row in rows) == 19, "what has no price is never the cheapest"
    said = " ".join(explanations(rows, by_cost=True))
    assert "Left out: 1 GPU of 1 other kind (at most 1,9" in said
    assert "No price, and so left out: a100-40gb" in said


def test_named_gpus_are_never_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxremat.cli.recommend.check_installed", lambda targets: None)
    argv = ["--model", "tiny", "--policy", "dots", "--devices", "1", "--target", "gb200", "t4"]
    cells = cells_of(parse_flags(RecommendFlags, argv))
    with Store(tmp_path / "rows.jsonl") as store:
        assert [[cell.target for cell in turn] for turn in turns(store, cells, {})] == [["gb200", "t4"]]


def test_a_network_is_of_the_trials_on_several_nodes(capsys):
    argv = ["--model", "tiny", "--target", "h100-80gb", "--policy", "dots", "--devices"]
    several, slow = (
        cells_of(parse_flags(RecommendFlags, [*argv, "8,16", *more])) for more in ([], ["--network-gbps", "100"])
    )
    for before, after in zip(several, slow, strict=True):
        assert before.trials["dots"].key != after.trials["dots"].key
    assert "--network-gbps" not in capsys.readouterr().err
    cells_of(parse_flags(RecommendFlags, [*argv, "1,8", "--network-gbps", "100"]))
    assert "--network-gbps" in capsys.readouterr().err
