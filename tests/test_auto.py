"""Plans by `--policy auto` and `jaxremat.plan` are compiled and fit: for the project's models and for unedited layers.

A whole search of each kind is compiled. What else a search decides is tested with steps whose bytes are made up.
"""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxremat
from jaxremat.answer import any_layer, planned, records
from jaxremat.answer.layer_estimate import speed_of
from jaxremat.answer.layer_problem import layer_problem, trace_layer
from jaxremat.answer.planned import Planned, plan_run
from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.chips.installed import versions
from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.cli.run import main
from jaxremat.config import TrainConfig
from jaxremat.errors import CompileError, DoesNotFitError, TargetError, UsageError
from jaxremat.mesh.axes import MeshShape
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.planner.plan import NoPlan, Plan
from jaxremat.planner.shared_budget import EqualLayers, one_of_each
from jaxremat.planner.steps import Cost
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.report.printer import Printer, Report
from jaxremat.search.compiles import Compile, Compiles
from jaxremat.session.answers import batches_of, policy_of, trials_of
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import check_run
from jaxremat.session.session import Session
from jaxremat.trial.details import SCHEMA
from jaxremat.trial.plan_file import load_plan, save_plan
from jaxremat.trial.record import PlanRecord, Record
from jaxremat.trial.row import config_of
from jaxremat.trial.trials import Steps, Trials
from jaxremat.units import gib, parse_bytes
from tests.arguments import once
from tests.equality import relative_difference
from tests.helpers import quick_jit
from tests.made_up_records import trial
from tests.planner_formula import LAYERS, Xla, layer_at
from tests.small_models import GPT
from tests.small_problems import solve_by_trying_all

SHAPE = ["--model", "tiny", "--num-layers", "2", "--dropout", "0", "--seq-len", "128", "--target", "h100-80gb"]
#: Choosing the attention takes a compile.
XLA = [*SHAPE, "--attention", "xla"]


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


# Whole searches.


class NormBlock(nn.Module):
    """A residual block with BatchNorm and dropout, without a checkpoint name."""

    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False, name="norm")(x)
        h = nn.gelu(nn.Dense(512, name="up")(h))
        h = nn.Dropout(0.1, deterministic=False)(h)
        return x + nn.Dense(128, name="down")(h)


class ConvBlock(nn.Module):
    """Two convolutions and a norm, nobody's names."""

    @nn.compact
    def __call__(self, x):
        h = nn.Conv(64, (3, 3), name="first")(nn.LayerNorm(name="norm")(x))
        return x + nn.Conv(64, (3, 3), name="second")(nn.gelu(h))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layer", "x", "budget"),
    [
        pytest.param(NormBlock(), jax.ShapeDtypeStruct((2048, 128), "float32"), "120MiB", id="BatchNorm, dropout"),
        pytest.param(ConvBlock(), jax.ShapeDtypeStruct((8, 64, 64, 64), "float32"), "200MiB", id="convolutions"),
    ],
)
def test_plan_of_a_module(layer, x, budget, h100):
    """It fits, it saves something, predicted bytes are near the compiled ones, and no compiled step that fits is faster."""
    found = jaxremat.plan(layer, x, num_layers=6, budget=budget, target=h100)
    totals = [step.cost.total_bytes for step in found.tried]
    assert min(totals) < found.cost.total_bytes <= parse_bytes(budget)
    assert found.predicted_bytes is None or found.predicted_bytes == pytest.approx(found.cost.total_bytes, rel=0.03)
    assert found.cost.step_s == min(step.cost.step_s for step in found.tried if step.cost.total_bytes <= parse_bytes(budget))


@pytest.mark.full
def test_offloading_is_tried_where_the_link_is_fast_enough_and_taken_where_it_pays(h100):
    """Priced as if no kernel hid the host transfer. The compiled schedule decides."""
    x, budget = jax.ShapeDtypeStruct((8, 64, 64, 64), "float32"), 112 * 2**20
    target = replace(h100, speed=replace(speed_of(h100), host_link_bytes_per_s=1e14))
    found = jaxremat.plan(ConvBlock(), x, num_layers=6, budget=budget, target=target)
    assert any("offload:" in str(step.policy) for step in found.tried)
    assert found.cost.step_s == min(step.cost.step_s for step in found.tried if step.cost.total_bytes <= budget)


@pytest.mark.full
def test_plan_of_a_function(h100):
    """A layer as a plain function: the plan fits where no checkpointing doesn't, and the gradient is that of a plain scan."""

    def layer(params, x):
        h = jnp.tanh(x @ params["up"])
        return x + (h * jax.nn.sigmoid(h)) @ params["down"]

    params = {"up": jax.ShapeDtypeStruct((256, 1024), "float32"), "down": jax.ShapeDtypeStruct((1024, 256), "float32")}
    x = jax.ShapeDtypeStruct((4096, 256), "float32")
    budget = "250MiB"
    found = jaxremat.plan(layer, params, x, num_layers=8, budget=budget, target=h100)
    totals = {str(step.policy): step.cost.total_bytes for step in found.tried}
    assert totals["nothing"] <= found.cost.total_bytes <= parse_bytes(budget) < max(totals.values())

    ws = jax.tree.map(lambda leaf: np.random.default_rng(0).normal(size=(8, *(n // 32 for n in leaf.shape))), params)
    ws, y = jax.tree.map(lambda leaf: leaf.astype("float32"), ws), np.ones((4, 8), "float32")

    def grads(policy):
        return quick_jit(jax.grad(lambda ws, y: jnp.mean(jaxremat.scan_layers(layer, ws, y, policy=policy) ** 2)))(ws, y)

    want = quick_jit(jax.grad(lambda ws, y: jnp.mean(jax.lax.scan(lambda y, w: (layer(w, y), None), y, ws)[0] ** 2)))(ws, y)
    for policy in {str(found.policy), "every:3+nothing", "1*save:tanh|1*nothing"}:
        assert relative_difference(grads(policy), want) <= 1e-4


@pytest.mark.full
def test_a_command_plans_and_another_takes_up_the_plan(tmp_path, h100, capsys):
    argv = [*SHAPE, "--policy", "auto", "--batch", "16", "--loss", "full", "--budget", "50MiB", "--json"]
    argv += ["--out", str(tmp_path / "rows.jsonl"), "--save-plan", str(tmp_path / "plan.json")]
    assert main(argv) == 0
    plan, trial = rows((tmp_path / "rows.jsonl").read_text())
    assert (plan["record"], trial["record"]) == ("plan", "trial")
    assert (trial["requested_policy"], trial["policy"]) == ("auto", plan["policy"])
    assert trial["total_bytes"] == plan["total_bytes"] <= parse_bytes("50MiB")
    assert trial["step_s"] == plan["step_s"]
    assert len(plan["layers"]) == 2
    assert plan["num_compiles"] == len(plan["tried"]) == trial["num_compiles"]
    fits = [step for step in plan["tried"] if step["total_bytes"] <= plan["budget_bytes"]]
    assert plan["step_s"] == min(step["step_s"] for step in fits)
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    assert plan["layouts"][0]["layout"] == plan["layout"] == trial["layout"]
    assert {one["layout"] for one in plan["layouts"]} == {step["layout"] for step in plan["tried"]} == {"loop", "unrolled"}
    assert plan["layouts"][0]["tokens_per_s"] == max(one["tokens_per_s"] for one in plan["layouts"]) == trial["tokens_per_s"]
    assert sum(step["layout"] == "unrolled" for step in plan["tried"]) <= 4

    capsys.readouterr()
    file = f"plan:{tmp_path / 'plan.json'}"
    assert main([*SHAPE, "--policy", file, "--json"]) == 0
    (again,) = rows(capsys.readouterr().out)
    assert (again["total_bytes"], again["batch"], again["loss"]) == (plan["total_bytes"], 16, "full")
    assert (again["requested_policy"], again["policy"]) == (file, plan["policy"])
    assert again["layout"] == plan["layout"]


@pytest.mark.full
def test_the_frontier_in_a_table_and_a_picture(h100, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FRONTIER_POLICIES", ("nothing", "none"))
    monkeypatch.setattr(records, "FRONTIER_BUDGETS", 1)
    out, plot = tmp_path / "rows.jsonl", tmp_path / "frontier.png"
    argv = once(*SHAPE, "--num-layers", "1", "--frontier", "--batch", "8", "--loss", "full")
    assert main([*argv, "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    trials = rows(out.read_text())
    assert {row["policy"] for row in trials} >= {"none", "nothing"}
    assert {row["batch"] for row in trials} == {8}
    assert plot.read_bytes().startswith(b"\x89PNG")


# Searches whose steps' bytes are made up.


def made_up_plan(
    monkeypatch,
    target,
    *,
    rejects: str = "",
    budget_bytes: int = 9000,
    num_layers: int = GPT.num_layers,
    layer_bytes: int = 0,
    unrolled_bytes: int = 0,
    layers: Callable[..., Any] | None = None,
    **options,
) -> Planned:
    """A plan at batch 8 of the layers of `planner_formula`, whose unrolled steps are faster. `rejects` is what XLA rejects.

    `layer_bytes` are those of a layer in a short stack, and unrolled layers take `unrolled_bytes` more than a scan. `layers`
    takes the place of the estimate of the layers.
    """

    def layers_at(run, speed, batch, *, offload, waits):
        layer = layer_at(batch)
        if offload:
            cheap = replace(layer.problem, offload_s_per_byte=0.001)
            layer = replace(layer, problem=cheap, offload_bytes=10**6)
        return (EqualLayers(layer, LAYERS, ""),)

    def compile_step(self: Trials, policy: Policy, batch: int) -> Any:
        is_unrolled = self.factory.layout() == "unrolled" and bool(options.get("layouts"))
        if rejects and (rejects in str(policy) or (is_unrolled and rejects == "unrolled")):
            raise CompileError("too long")
        memory = SimpleNamespace(total_bytes=layer_bytes * self.factory.num_layers())
        done: Any = SimpleNamespace(
            policy=policy, batch=batch, is_unrolled=is_unrolled, dump=None, memory=memory, is_too_large=False
        )
        done.module = done
        return self.of(policy).done.setdefault(batch, done)

    def cost_of(done: Any, speed: Any, kinds: Any) -> Cost:
        cost = Xla()(done.policy, "full", done.batch)
        return unrolled(cost) if done.is_unrolled else cost

    def unrolled(cost: Cost) -> Cost:
        return replace(cost, step_s=0.9 * cost.step_s, total_bytes=cost.total_bytes + unrolled_bytes)

    solve_by_trying_all(monkeypatch)
    monkeypatch.setattr(planned, "estimate_workload", layers or layers_at)
    monkeypatch.setattr(Trials, "compile", compile_step)
    monkeypatch.setattr(planned, "cost_of", cost_of)
    factory = decoder_factory(replace(GPT, num_layers=num_layers), "xla").on(target.mesh)
    run = Trials(factory, TrainConfig(seq_len=8), target, budget_bytes)
    return plan_run(run, losses=("full",), batch=8, max_batch=8, **options)


def test_the_faster_layout_is_the_answer(monkeypatch, h100):
    found = made_up_plan(monkeypatch, h100, layouts=("loop", "unrolled"))
    assert isinstance(found.found, Plan)
    assert (found.trials.factory.layout(), found.rejected) == ("unrolled", "")
    assert [one.trials.factory.layout() for one in found.others] == ["loop"]


def test_where_unrolled_layers_are_rejected_the_scan_is_the_answer(monkeypatch, h100):
    found = made_up_plan(monkeypatch, h100, layouts=("loop", "unrolled"), rejects="unrolled")
    assert isinstance(found.found, Plan)
    assert found.trials.factory.layout() == "loop"
    assert found.others == ()
    assert "too long" in found.rejected


def test_a_gather_is_hidden_as_far_as_in_the_last_step_of_the_layout(monkeypatch, h100):
    """A tenth of the collectives' seconds is exposed in unrolled layers, and half of them in a scan."""
    exposed = {False: 0.5, True: 0.1}
    seen = {layout: list[float]() for layout in ("loop", "unrolled")}

    def predict_step_time(done: Any, speed: Any) -> Any:
        return SimpleNamespace(collective_s=1.0, collective_exposed_s=exposed[done.is_unrolled])

    def layers_at(run: Trials, speed: Any, batch: int, *, offload: bool, waits: float) -> Any:
        seen[str(run.factory.layout())].append(waits)
        return (EqualLayers(layer_at(batch), LAYERS, ""),)

    monkeypatch.setattr(planned, "predict_step_time", predict_step_time)
    mesh = load_target("h100-80gb", MeshShape(fsdp=2))
    made_up_plan(monkeypatch, mesh, layouts=("loop", "unrolled"), layers=layers_at)
    assert seen == {"loop": [1.0, 0.5], "unrolled": [1.0, 0.5, 0.1]}


@pytest.mark.parametrize(
    ("layer_bytes", "layout", "rejected"),
    [
        (375, "unrolled", ""),
        (376, "loop", "under nothing at batch 8, stacks of 2 and 4 layers take 0.000 GiB and 0.000 GiB, so all 48"),
    ],
)
def test_many_unrolled_layers_that_short_stacks_show_to_be_far_too_large_are_left_out(
    layer_bytes, layout, rejected, monkeypatch, h100
):
    """Twice the budget are 18,000 bytes, and 48 layers of 375 bytes take as many."""
    compiled = list[str]()
    found = made_up_plan(
        monkeypatch,
        h100,
        num_layers=48,
        layer_bytes=layer_bytes,
        layouts=("loop", "unrolled"),
        on_compile=lambda policy, batch, compile: compiled.append(policy),
    )
    assert found.trials.factory.layout() == layout
    assert found.rejected.startswith(rejected)
    assert bool(found.rejected) == bool(rejected)
    unrolled = [policy for policy in compiled if policy.startswith("unrolled")]
    assert unrolled[:2] == ["unrolled, 2 layers, nothing", "unrolled, 4 layers, nothing"]
    assert (len(unrolled) > 2) == (not rejected)


def test_unrolled_layers_of_which_no_step_fits_are_left_out_in_words(monkeypatch, h100):
    found = made_up_plan(monkeypatch, h100, unrolled_bytes=10**9, layouts=("loop", "unrolled"))
    assert found.trials.factory.layout() == "loop"
    assert found.rejected.startswith("batch 8 takes 0.931 GiB")


@pytest.mark.parametrize("rejects", ["", "offload"])
def test_where_a_step_that_offloads_is_rejected_nothing_is_offloaded(rejects, monkeypatch, h100):
    found = made_up_plan(monkeypatch, h100, offload=True, rejects=rejects, budget_bytes=6000).found
    assert isinstance(found, Plan)
    assert any("offload" in str(step.policy) for step in found.tried) == (not rejects)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"objective": "memory"},
        {"layouts": ("loop", "unrolled")},
        {"layouts": ("loop", "unrolled"), "rejects": "unrolled"},
        {"layouts": ("loop", "unrolled"), "num_layers": 48},
        {"offload": True, "rejects": "offload", "budget_bytes": 6000},
    ],
    ids=str,
)
def test_each_search_says_how_many_compiles_it_takes_at_most_and_what_is_best(options, monkeypatch, h100):
    """A search begins with compile 1. The last step that was the best so far is the plan's."""
    searches: list[list[Compile]] = []
    best: list[tuple[Policy, int]] = []

    def on_compile(policy: str, batch: int, compile: Compile) -> None:
        if compile.number == 1:
            searches.append([])
        searches[-1].append(compile)

    def on_best(trials: Trials, policy: Policy, batch: int, num_compiles: int) -> None:
        assert num_compiles == sum(map(len, searches))
        best.append((policy, batch))

    found = made_up_plan(monkeypatch, h100, **options, on_compile=on_compile, on_best=on_best).found
    assert isinstance(found, Plan)
    assert best[-1] == (found.policy, found.batch)
    assert best[0] == (NOTHING, 8)
    for search in searches:
        assert [one.number for one in search] == [*range(1, len(search) + 1)]
        assert all(one.at_most is not None and len(search) <= one.at_most for one in search)


@pytest.mark.parametrize("batches", [(), (8,), (4, 8, 16)])
def test_the_steps_of_a_policy_are_counted(batches, monkeypatch, h100):
    """At given batches, and in a search: 9 bytes a sequence fit into 100 up to batch 11."""
    compiled = {n: SimpleNamespace(memory=SimpleNamespace(total_bytes=9 * n)) for n in range(1, 65)}
    monkeypatch.setattr(Trials, "compile_anew", lambda self, policy, batch: compiled[batch])
    monkeypatch.setattr(Trials, "record", lambda self, policy, n, kind="trial", **_: self.compile(policy, n) and trial(n))
    monkeypatch.setattr(Steps, "compiled", property(lambda self: self.done))
    found, compiles, policy = list[Compile](), Compiles(), parse("dots")
    trials = Trials(decoder_factory(GPT, "xla"), TrainConfig(seq_len=8), h100, 100)
    trials = replace(trials, on_compile=lambda policy, batch: found.append(compiles.next()))
    if batches:
        records.answer_batches(trials, policy, "dots", batches, lambda record: None, compiles)
    else:
        search = records.answer_largest(trials, policy, "dots", 64, lambda record: None, compiles)
        assert [*search][-1] == 11
        assert {11, 12} <= trials.of(policy).done.keys()
    assert [one.number for one in found] == [*range(1, len(trials.of(policy).done) + 1)]
    assert all(one.at_most is not None and len(found) <= one.at_most for one in found)
    assert not batches or {one.at_most for one in found} == {len(batches)}


def test_the_next_step_is_begun_before_the_program_waits_for_one(monkeypatch, h100):
    """One, and not all: where tracing takes minutes, the first answer comes before the last step is traced."""
    events = list[tuple[str, int]]()
    monkeypatch.setattr(Trials, "record", lambda self, policy, n, **_: events.append(("waits", n)))
    trials, policy = Trials(decoder_factory(GPT, "xla"), TrainConfig(seq_len=8), h100, 100), parse("dots")
    begin = lambda n: events.append(("begins", n))  # noqa: E731
    records.answer_batches(trials, policy, "dots", (4, 8, 16), lambda record: None, Compiles(), begin)
    assert events == [("begins", 8), ("waits", 4), ("begins", 16), ("waits", 8), ("waits", 16)]


def test_where_nothing_fits_a_trial_is_the_only_record(monkeypatch, h100):
    found = made_up_plan(monkeypatch, h100, budget_bytes=1000)
    assert isinstance(found.found, NoPlan)
    monkeypatch.setattr(Trials, "record", lambda self, policy, batch, **_: trial(batch, fits=False))
    emitted: list[Record] = []
    records.answer_plan(found, "time", emitted.append)
    assert emitted == [trial(8, fits=False)]


def test_a_budget_below_the_least_of_any_layer(monkeypatch, h100):
    monkeypatch.setattr(any_layer, "lower_and_compile", lambda *_, **__: None)
    monkeypatch.setattr(any_layer, "cost_of", lambda *_: Cost(2**30, 1.0))
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(DoesNotFitError) as caught:
        jaxremat.plan(lambda w, x: jnp.sin(x @ w), x, x, num_layers=4, budget="512MiB", target=h100)
    assert [size for size in (gib(2**29), gib(2**30)) if size not in caught.value.got] == []
    assert caught.value.next_step


def test_a_faster_link_makes_offloading_cheaper(h100):
    speed = speed_of(h100)
    layer = trace_layer(jnp.sin, (jax.ShapeDtypeStruct((8, 8), "float32"),))
    problems = [layer_problem(layer, replace(speed, host_link_bytes_per_s=link))[0] for link in (1e9, 1e12)]
    assert problems[0].offload_s_per_byte == pytest.approx(1000 * problems[1].offload_s_per_byte)


@pytest.mark.full
def test_microbatches_are_priced_all_together(h100):
    """What a layer costs is that of all of a step's microbatches; its bytes are those of one."""
    factory = decoder_factory(GPT, "xla")
    runs = (Trials(factory, TrainConfig(seq_len=8, accumulate=n), h100, 2**30) for n in (1, 8))
    once, eight = (one_of_each(estimate_workload(run, speed_of(h100), 4, offload=True)) for run in runs)
    for one, all_of_them in zip((once, *once.alternatives), (eight, *eight.alternatives), strict=True):
        assert all_of_them.nothing_s == pytest.approx(8 * one.nothing_s, rel=1e-2)  # views take a nanosecond
        assert all_of_them.problem.save_s_per_byte == pytest.approx(8 * one.problem.save_s_per_byte)
        assert all_of_them.offload_bytes == pytest.approx(one.offload_bytes, rel=1e-2)


@pytest.mark.parametrize("requested", ["--policy auto", "--frontier --batch 2"])
def test_a_target_of_unknown_speed_is_rejected_at_once(requested, capsys):
    assert main(["--model", "tiny", "--num-layers", "1", "--target", "cpu", *requested.split()]) == 2
    assert capsys.readouterr().out == ""
    with pytest.raises(TargetError) as caught:
        speed_of(load_target("cpu"))
    assert "'cpu'" in caught.value.got


# A plan's file.


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory, h100):
    """The file of a plan of `XLA` for batch 16, in a loop, that nothing was compiled for."""
    trials = Session.of(check_run(parse_flags(RunFlags, [*XLA, "--batch", "16", "--loss", "full"])), h100).trials
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = PlanRecord(
        model="tiny",
        num_params=1,
        target="h100-80gb",
        seq_len=128,
        objective="time",
        policy="save:query_proj",
        loss="full",
        layout="loop",
        batch=16,
        budget_bytes=2**26,
        total_bytes=2**25,
        predicted_total_bytes=2**25,
        step_s=0.01,
        recompute_s=0.001,
        bound_s=0.001,
        layers=("save:query_proj",) * 2,
        prices=(),
        more=(),
        tried=(),
        num_compiles=4,
        config=config_of(trials, 16),
        versions=versions(),
    )
    save_plan(path, plan)
    return path


def taken_up(plan_file, h100, *flags: str, seq_len: str = "128") -> tuple[Session, Trials, list[str]]:
    """The session that takes up the plan, its trials, and what was noted."""
    argv = [seq_len if word == "128" else word for word in XLA]
    session = Session.of(check_run(parse_flags(RunFlags, [*argv, "--policy", f"plan:{plan_file}", *flags])), h100)
    notes: list[str] = []
    return session, trials_of(session, session.request.policies[0], notes.append), notes


def test_a_plan_is_taken_up_as_it_was_proven(plan_file, h100):
    session, trials, notes = taken_up(plan_file, h100)
    (asked,) = session.request.policies
    assert (str(policy_of(asked)), batches_of(session, asked), notes) == ("save:query_proj", (16,), [])
    assert (trials.factory.facts(trials.train).loss, trials.factory.layout()) == ("full", "loop")


@pytest.mark.parametrize(
    ("flags", "seq_len", "changed"),
    [
        ("--scan-layers False", "128", ["scan_layers"]),
        ("--batch 2", "64", ["batch 2 for 16", "seq_len 64 for 128"]),
        ("--loss chunked", "128", ["loss 'chunked' for 'full'"]),
    ],
)
def test_what_a_plan_wasn_t_proven_for_is_noted(flags, seq_len, changed, plan_file, h100):
    _, trials, (note,) = taken_up(plan_file, h100, *flags.split(), seq_len=seq_len)
    assert [change for change in changed if change not in note] == []
    assert note.count(" for ") == len(changed)
    assert gib(2**25) in note
    assert trials.factory.layout() == ("unrolled" if "False" in flags else "loop")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("config", None, ["config", "object", "null"]),
        ("versions", [], ["versions", "object", "array"]),
        ("batch", True, ["batch", "int", "bool"]),
        ("total_bytes", "x", ["total_bytes", "int", "str"]),
        ("loss", "bogus", ["'bogus'"]),
        ("policy", "dost", ["'dost'"]),
        ("schema", SCHEMA + 97, [str(SCHEMA), str(SCHEMA + 97)]),
    ],
)
def test_an_edited_plan_is_rejected(key, value, named, plan_file, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(plan_file.read_text()) | {key: value}))
    with pytest.raises(UsageError) as caught:
        load_plan(str(path))
    assert [word for word in (str(path), *named) if word not in caught.value.got] == []


@pytest.mark.parametrize(
    "mesh", ["fsdp=8", {"fsdp": "8"}, {"axes": {"d": "8"}}, {"axes": [8]}, {"axes": {"d": 8}, "nodes": None}]
)
def test_an_edited_mesh_of_a_plan_is_rejected(mesh, plan_file, tmp_path):
    found = json.loads(plan_file.read_text())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found | {"config": found["config"] | {"mesh": mesh}}))
    with pytest.raises(UsageError) as caught:
        load_plan(str(path))
    assert "config: " in caught.value.got
    assert caught.value.cause


def test_a_plan_s_batch_divides_a_global_batch(plan_file):
    with pytest.raises(UsageError) as caught:
        check_run(parse_flags(RunFlags, [*XLA, "--policy", f"plan:{plan_file}", "--global-batch", "24"]))
    assert [word for word in (f"plan:{plan_file}", "16", "--global-batch 24") if word not in caught.value.got] == []


def test_plans_of_several_batches_are_told_apart():
    """A table for each policy, and the loss and the layout beside it where these differ."""
    text = io.StringIO()
    printer = Printer(Report(Console(file=text, width=110)))
    row = replace(trial(16), requested_policy="auto", layout="loop")
    printer.row(row)
    printer.row(replace(row, policy="nothing", loss="chunked", batch=8))
    printer.policy_done()
    printer.row(replace(row, policy="none", layout="unrolled"))
    printer.policy_done()
    printer.all_done("h100-80gb")
    labels = "policy auto (dots)", "policy auto (nothing)", "(nothing) (chunked, loop)", "(none) (full, unrolled)"
    assert [label for label in labels if label not in " ".join(text.getvalue().split())] == []
