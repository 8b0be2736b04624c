"""Which meshes are worth comparing, and the race that finds the best one. Nothing is compiled."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxremat.answer import mesh_race, planned
from jaxremat.answer.race import Reached, Standing, race
from jaxremat.config import TrainConfig
from jaxremat.errors import CompileError
from jaxremat.mesh.axes import MeshShape, parse_mesh
from jaxremat.mesh.sensible import sensible_meshes
from jaxremat.model.decoder_workload import decoder_factory
from jaxremat.planner.known import Known
from jaxremat.planner.places import possible
from jaxremat.planner.plan import Plan
from jaxremat.planner.shared_budget import EqualLayers
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.grammar import parse
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.search.compiles import Compile
from jaxremat.trial.trials import Trials
from jaxremat.units import percent_up
from tests.planner_formula import LAYERS, Xla, find_plan, layer_at
from tests.small_models import GPT
from tests.small_problems import solve_by_trying_all

pytestmark = pytest.mark.any_jax


@pytest.fixture(autouse=True)
def without_solver(monkeypatch):
    solve_by_trying_all(monkeypatch)


def texts(*args, **options) -> list[str]:
    return [str(mesh) for mesh in sensible_meshes(*args, **options)]


def test_the_meshes_of_a_node():
    assert texts(8, 1) == [
        *("fsdp=8", "data=8", "fsdp=4,tensor=2", "data=4,tensor=2", "fsdp=2,tensor=4", "data=2,tensor=4", "tensor=8")
    ]
    assert texts(8, 1, has_tensor=False) == ["fsdp=8", "data=8"]
    assert texts(6, 1) == ["fsdp=6", "data=6", "fsdp=3,tensor=2", "data=3,tensor=2"]


def test_the_meshes_of_several_nodes():
    assert texts(16, 2)[:5] == ["fsdp=16", "data=2,fsdp=8", "data=16", "fsdp=8,tensor=2", "data=2,fsdp=4,tensor=2"]
    assert texts(4, 4) == ["fsdp=4", "data=4"]


def test_the_meshes_of_experts():
    assert texts(8, 1, num_experts=4, has_tensor=False) == [
        *("fsdp=8", "data=8", "fsdp=4,expert=2", "data=4,expert=2", "fsdp=2,expert=4", "data=2,expert=4")
    ]


@pytest.mark.parametrize(("devices", "nodes"), [(1, 1), (2, 1), (8, 1), (8, 2), (12, 2), (16, 2), (64, 8), (96, 12), (7, 1)])
def test_each_mesh_has_all_devices_with_tensor_and_experts_inside_a_node(devices, nodes):
    meshes = sensible_meshes(devices, nodes, num_experts=8)
    assert len({str(mesh) for mesh in meshes}) == len(meshes)
    for mesh in meshes:
        assert (mesh.num_devices, mesh.nodes) == (devices, nodes)
        assert (devices // nodes) % (mesh.tensor * mesh.expert) == 0
        assert parse_mesh(str(mesh), devices, nodes) == mesh


def test_the_race_of_the_docstring():
    done = []

    def contestant(name: str, *values: float | Reached):
        for value in values:
            done.append(name)
            yield value

    a, b, c = contestant("a", 120, 100, Reached(97)), contestant("b", 110, 98, Reached(95)), contestant("c", 90, Reached(70))
    so_far = []
    found = race([a, b, c], on_change=lambda standings: so_far.append([*standings]))
    assert found == [Standing(97, 97), Standing(95, 95), Standing(90)]
    assert done == ["a", "b", "c", "a", "b", "a", "b"]
    assert so_far[1] == [Standing(120), Standing(110), Standing()]
    assert (so_far[-2], so_far[-1]) == ([Standing(97, 97), Standing(98), Standing(90)], found)


def test_a_race_finds_the_best_and_leaves_out_only_who_is_no_better():
    for seed in range(200):
        numbers = random.Random(seed)
        values = [numbers.randrange(100) for _ in range(5)]

        def contestant(value: int, numbers=numbers):
            bounds = sorted((value + numbers.randrange(40) for _ in range(numbers.randrange(4))), reverse=True)
            return iter([*bounds, Reached(value)])

        same = numbers.choice([0.0, 0.05])
        standings = race([contestant(value) for value in values], same)
        best = max(one.reached for one in standings if one.reached is not None)
        assert best >= max(values) / (1 + same)
        for value, one in zip(values, standings, strict=True):
            assert one.reached == value if one.reached is not None else value <= one.bound <= best * (1 + same)


def test_a_race_of_nobody_and_of_those_that_reach_nothing():
    assert race([]) == []
    assert race([iter([Reached(0.0)]), iter([5.0, Reached(0.0)])]) == [Standing(0.0, 0.0), Standing(0.0, 0.0)]


def that_fits(num_tokens: int) -> Any:
    """Trials of a step of so many tokens."""
    workload = SimpleNamespace(num_tokens=num_tokens)
    return SimpleNamespace(
        state_bytes=lambda: 1, budget_bytes=2, num_members=1, workload_at=lambda _: workload, train=None, steps={}
    )


def test_who_is_left_out_could_be_at_most_so_much_faster(monkeypatch):
    """A mesh is left out although its bound is above the best speed, if it is so by at most 0.5 %; then the record says so."""
    bounds = {"fsdp=2": [Reached(3988)], "data=2": [4005.0, Reached(0)], "tensor=2": [3980.0, Reached(0)]}
    monkeypatch.setattr(mesh_race, "_largest", lambda one, *_: iter([*bounds[str(one.mesh)]][:1]))
    meshes = (MeshShape(fsdp=2), MeshShape(data=2), MeshShape(tensor=2))
    entrants = [mesh_race.Entrant(mesh, that_fits(num_tokens=2), total_bytes=1) for mesh in meshes]
    options: dict[str, Any] = dict(batch=None, max_batch=None, on_compile=lambda *_: None)
    found = mesh_race.compare_meshes(entrants, parse("dots"), **options)
    assert found.best is entrants[0]
    fastest, near, slower = found.meshes
    assert (fastest.left_out, fastest.tokens_per_s) == ("", 3988)
    assert "0.5%" in near.left_out
    assert near.left_out != slower.left_out
    assert slower.bound_tokens_per_s == 3980


@pytest.mark.parametrize(("of_half", "reached"), [(900.0, None), (980.0, 970.0), (0.0, 970.0)])
def test_a_mesh_with_twice_the_tensor_axis_is_compiled_where_it_could_be_faster(of_half, reached, monkeypatch):
    """It is taken to be at most 5 % faster than with half the axis, if that has a step that fits."""
    bounds = {"fsdp=8": [Reached(1000)], "fsdp=4,tensor=2": [Reached(of_half)], "fsdp=2,tensor=4": [Reached(970)]}
    found = compared(monkeypatch, bounds)
    assert found.best
    assert str(found.best.mesh) == "fsdp=8"
    assert found.meshes[2].tokens_per_s == reached
    assert (found.meshes[2].left_out == "fsdp=4,tensor=2 wins") == (reached is None)


def compared(monkeypatch, bounds: dict[str, Any], state_bytes=lambda mesh: 1, **options) -> mesh_race.Comparison:
    """The comparison of meshes of 8 devices whose steps have no exposed collectives."""
    monkeypatch.setattr(mesh_race, "_largest", lambda one, *_: iter(bounds[str(one.mesh)]))
    monkeypatch.setattr(mesh_race, "most_beside", lambda one, speed, tensor: speed)
    entrants = list[mesh_race.Entrant]()
    for text in bounds:
        trials, mesh = that_fits(num_tokens=8), parse_mesh(text, 8)
        assert isinstance(mesh, MeshShape)
        trials.state_bytes = lambda text=text: state_bytes(text)
        entrants.append(mesh_race.Entrant(mesh, trials, total_bytes=1))
    options = {"batch": None, "max_batch": None, "on_compile": lambda *_: None} | options
    return mesh_race.compare_meshes(entrants, parse("dots"), **options)


def test_a_mesh_that_divides_less_of_the_state_is_left_out_by_one_that_divides_more(monkeypatch):
    """So it is where both have an axis `tensor` of the same size."""
    bounds = {"fsdp=8": [Reached(1000)], "fsdp=4,tensor=2": [Reached(940)], "data=4,tensor=2": [Reached(930)]}
    found = compared(monkeypatch, bounds, lambda mesh: 1 + ("data" in mesh))
    assert [one.left_out for one in found.meshes] == ["", "", "fsdp=4,tensor=2 wins"]
    assert [*map(bool, (one.tokens_per_s for one in found.meshes))] == [True, True, False]


@pytest.mark.parametrize(
    ("meshes", "options"),
    [
        (("data=8", "fsdp=8"), {}),  # whose state takes fewer bytes
        (("fsdp=8", "data=4,tensor=2", "fsdp=4,tensor=2"), {}),
        (("fsdp=8", "fsdp=4,expert=2"), {}),
        (("fsdp=8", "fsdp=4,tensor=2", "fsdp=2,tensor=4"), {"batch": 4}),  # each device has fewer sequences
    ],
)
def test_other_meshes_are_compiled_though_one_is_twice_as_fast(meshes, options, monkeypatch):
    bounds = {mesh: [Reached(1000 / 2 ** min(n, 1))] for n, mesh in enumerate(meshes)}
    found = compared(monkeypatch, bounds, lambda mesh: 1 + ("data" in mesh), **options)
    assert [one.tokens_per_s for one in found.meshes] == [1000] + [500] * (len(meshes) - 1)


@pytest.mark.parametrize(("share", "text"), [(0.0, "0.0%"), (0.0001, "0.1%"), (0.0043, "0.5%"), (0.005, "0.5%")])
def test_a_share_that_is_a_bound_is_rounded_up(share, text):
    assert percent_up(share) == text


def known_of(steps: Steps, loss: str, batches: Sequence[int]) -> Known:
    batches = possible(steps, 1000, batches)
    return Known(steps, (loss,), batches, 1000, start=batches[-1])


@pytest.mark.parametrize("budget", [2000, 8000, 40_000])
def test_no_plan_is_faster_than_its_bounds_and_few_compiles_come_near(budget):
    batches = (1, 2, 4, 8, 16)
    xla = Xla()
    known = known_of(Steps(layer_at, xla, LAYERS, budget), "chunked", batches)
    bounds = [*planned.speed_bounds(known)]
    speeds = []
    for batch in batches:
        found = find_plan(Steps(layer_at, Xla(), LAYERS, budget), losses=("chunked",), batch=batch)
        speeds += [batch / found.cost.step_s] if isinstance(found, Plan) else []
    assert all(bound >= max(speeds) for bound in bounds)
    assert [*bounds] == sorted(bounds, reverse=True)
    assert bounds[-1] <= 1.1 * max(speeds)
    assert (best := known.best())
    assert best.speed >= (1 - 5e-3) * max(speeds)
    assert len(xla.calls) == len(bounds)
    assert len([policy for policy, *_ in xla.calls if policy == NOTHING]) <= 4
    assert all(a != b for a, b in itertools.pairwise(xla.calls))


def test_a_step_that_xla_refuses_is_tried_at_a_quarter():
    """The answer is the one without a refusal. What XLA rejects at each batch stays rejected."""

    def bounds(largest: int) -> list[float]:
        formula = Xla()

        def compile_step(policy, loss, batch):
            if batch > largest:
                raise CompileError("too large")
            return formula(policy, loss, batch)

        steps = Steps(layer_at, compile_step, LAYERS, 8000)
        return [*planned.speed_bounds(known_of(steps, "chunked", range(1, 4097)))]

    unrefused, refused = bounds(4096), bounds(20)
    assert refused[-1] == pytest.approx(unrefused[-1])
    with pytest.raises(CompileError):
        bounds(0)


def test_where_nothing_fits_the_bound_is_0():
    xla = Xla()
    found = planned.speed_bounds(known_of(Steps(layer_at, xla, LAYERS, 1100), "full", range(1, 9)))
    assert next(found) == 0.0
    assert len(xla.calls) == 1


def test_a_bound_is_finite():
    """Without a limit of the batch but the budget, and with one that is far above it."""
    for batches in (range(1, 4097), range(1, 2)):
        (first, *_) = planned.speed_bounds(known_of(Steps(layer_at, Xla(), LAYERS, 10**9), "full", batches))
        assert 0 < first < math.inf


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budgets=st.lists(st.integers(1100, 100_000), min_size=2, max_size=4),
    policy=st.sampled_from([None, "dots"]),
    batch=st.sampled_from([None, 4]),
    max_batch=st.sampled_from([None, 64]),
    accepted=st.sampled_from([5, 2**31]),
)
@example(budgets=[2000, 100_000], policy="dots", batch=None, max_batch=64, accepted=2**31)  # the line ends above the limit
def test_a_comparison_takes_no_more_compiles_than_it_said(budgets, policy, batch, max_batch, accepted, monkeypatch, h100):
    """For plans the number is known when the last mesh begins, and for a policy at a given batch from the first compile on."""

    def compile_step(trials: Trials, policy: Policy, batch: int) -> Any:
        if batch > accepted:
            raise CompileError("too large", next_step="a smaller one")
        cost = Xla()(policy, "full", batch)
        return SimpleNamespace(
            memory=SimpleNamespace(total_bytes=cost.total_bytes), module=None, dump=None, step_s=cost.step_s
        )

    def cost_of(done: Any, speed: Any, kinds: Any = ()) -> Cost:
        return Cost(done.memory.total_bytes, done.step_s)

    monkeypatch.setattr(
        planned, "estimate_workload", lambda run, speed, batch, **_: (EqualLayers(layer_at(batch), LAYERS, ""),)
    )
    monkeypatch.setattr(planned, "cost_of", cost_of)
    monkeypatch.setattr(mesh_race, "cost_of", lambda done, speed: replace(cost_of(done, speed), step_s=1.0))
    monkeypatch.setattr(Trials, "compile_anew", compile_step)
    monkeypatch.setattr(Trials, "state_bytes", lambda self: 1000)
    trials = Trials(decoder_factory(GPT, "xla"), TrainConfig(seq_len=8), h100, 0)
    entrants = [
        mesh_race.Entrant(MeshShape(data=n + 1), replace(trials, budget_bytes=size, steps={}))
        for n, size in enumerate(budgets)
    ]
    said: list[tuple[str, Compile]] = []
    mesh_race.compare_meshes(
        entrants,
        parse(policy) if policy else None,
        batch=batch,
        max_batch=max_batch,
        on_compile=lambda mesh, policy, batch, compile: said.append((mesh, compile)),
    )
    meshes, compiles = zip(*said, strict=True)
    assert [one.number for one in compiles] == [*range(1, len(compiles) + 1)]
    assert all(one.at_most is None or len(compiles) <= one.at_most for one in compiles)
    last_begins = max(meshes.index(mesh) for mesh in {*meshes})
    is_known = compiles if policy and batch else () if policy else compiles[last_begins:]
    assert all(one.at_most is not None for one in is_known)
    if policy and not batch and accepted > 5:  # the formula is a straight line, which two compiles show
        for one in entrants:
            estimates = [compile.estimate for mesh, compile in said if mesh == str(one.mesh)]
            assert estimates[:2] == [None, None][: len(estimates)]
            assert {*estimates[2:]} <= {one.batch}
