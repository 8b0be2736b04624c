"""What a step would take if less ran a second time: read from the map of a step under `nothing`, and used by the planner."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxremat
from experiments.blocks import BLOCKS
from jaxremat.knapsack.problem import Decision, Op, Problem, Value
from jaxremat.planner.candidates import candidates, fastest
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.curve import Curve, CurvePoint
from jaxremat.planner.estimate import Candidate, LayerEstimate
from jaxremat.planner.plan import Plan
from jaxremat.planner.shared_budget import EqualLayers, as_one
from jaxremat.planner.steps import Cost, Moment, Steps
from jaxremat.policy.spec import NOTHING, Names, Policy
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.without import _Window, _windows, moments_of
from tests.planner_formula import find_plan

ROWS, WIDTH, LAYERS = 8192, 1024, 6
HIDDEN_BYTES = ROWS * 4 * WIDTH * 2
SMALL_BYTES = 2**12  # of scalars, which XLA's versions keep at other points of the program


def mlp(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


@pytest.mark.full
def test_what_is_no_longer_recomputed_leaves_the_peak(h100):
    """At the peak of the stack under `nothing` a layer's recomputed matmul and its tanh are live, of `HIDDEN_BYTES` each."""
    shape = jax.ShapeDtypeStruct
    sizes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = {name: shape(size, jnp.bfloat16) for name, size in sizes.items()}

    def loss(params: Any, x: Any) -> Any:
        y = jaxremat.scan_layers(mlp, params, x, policy="nothing")
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    done = lower_and_compile(jax.grad(loss), (params, shape((ROWS, WIDTH), jnp.bfloat16)), h100, keep_dump=True)
    moments, total_bytes = (
        moments_of(done, [EqualLayers(replace(chain(), in_scan=True), LAYERS)]),
        done.memory.total_bytes,
    )
    assert any(moment.layers == {"": LAYERS} for moment in moments(frozenset()))

    def without(gone: frozenset[str]) -> int:
        return max(moment.total_bytes for moment in moments(gone))

    assert without(frozenset()) == without(frozenset({"no/such/operation"})) == total_bytes
    for gone in ({"tanh"}, {"dot_general"}, {"tanh", "dot_general"}):
        assert without(frozenset(gone)) == pytest.approx(total_bytes - len(gone) * HIDDEN_BYTES, abs=SMALL_BYTES)


@pytest.mark.full
@pytest.mark.any_jax
def test_the_bytes_of_a_foreign_block_are_foreseen(h100):
    """Within 3 %, at a budget a third of the way from `nothing` to `none`."""
    block, args = BLOCKS["BatchNorm"]
    tried = {step.policy: step.cost for step in planned(block, args, 2**62, h100).tried}
    least, most = tried[NOTHING].total_bytes, max(cost.total_bytes for cost in tried.values())
    found = planned(block, args, least + (most - least) // 3, h100)
    assert found.predicted_bytes
    assert found.predicted_bytes == pytest.approx(found.cost.total_bytes, rel=0.03)


def planned(block: Any, args: tuple[Any, ...], budget: int, target: Any) -> Plan:
    return jaxremat.plan(block, *args, num_layers=8, budget=budget, target=target)


def test_where_unrolled_layers_begin_and_where_their_gradients_are():
    """Two layers of a first stage and one of a second, whose gradients run in the other order, and a checkpoint of the loss."""
    layers = ("stage0_block_0", "stage0_block_1", "stage1_block_0")
    names = [f"jit(f)/jvp({layer})/dot_general" for layer in layers]
    backward = [f"jit(f)/transpose(jvp({layer}))/jvp({layer})/checkpoint/mul" for layer in reversed(layers)]
    names += [
        "jit(f)/transpose(jvp(loss))/jvp(loss)/checkpoint/exp",
        backward[0],
        "",
        backward[0],
        *backward[1:],
        "jit(f)/add",
    ]
    phases = (("forward", 0, 2), ("backward", 3, len(names) - 2), ("update", len(names) - 1, len(names) - 1))
    program = tuple(SimpleNamespace(op_name=name) for name in names)
    map: Any = SimpleNamespace(program=program, phases=phases, loops=())
    kinds = [EqualLayers(chain(), 2, "stage0_block/"), EqualLayers(chain(), 1, "stage1_block/")]
    assert _windows(map, kinds) == {
        "stage0_block/": [_Window(1, 2, 7, 7), _Window(0, 1, 8, 8)],
        "stage1_block/": [_Window(2, 3, 4, 6)],
    }
    other = _windows(map, [kinds[0], EqualLayers(chain(), 1, "head/")])
    assert other["head/"] == [_Window(0, 0, 0, 8)], "what can't be placed is live all the time"


# The planner. A layer makes three values one after the other, and its backward pass reads all three.


def moment(total_bytes: int, layers: dict[str, int]) -> Moment:
    """A moment at which no layer has read anything that it saved."""
    return Moment(total_bytes, layers, layers)


def chain(is_copied: bool = False) -> LayerEstimate:
    values = (
        Value("x", 10, saveable=False, offloadable=False),
        Value("up", 40, needed=True, is_copied=is_copied),
        Value("act.1", 40, needed=True),
        Value("act.2", 20, needed=True),
    )
    ops = (Op("up", (0,), (1,), 4.0, flops=1), Op("act", (1,), (2,), 1.0), Op("act", (2,), (3,), 3.0))
    return LayerEstimate(Problem(values, ops, (0,), 0.0, 1.0), {1: "up", 2: "act.1", 3: "act.2"}, in_scan=False)


def test_names_of_what_does_run_once():
    layer = chain()
    assert layer.run_once(Decision()) == frozenset()
    assert layer.run_once(Decision(save=frozenset({1}))) == {"up"}
    assert layer.run_once(Decision(save=frozenset({3}))) == {"act.2"}  # another `act` is recomputed
    assert layer.run_once(Decision(save=frozenset({1, 2, 3}))) == {"up", "act", "act.1", "act.2"}
    assert chain(is_copied=True).run_once(Decision(save=frozenset({1, 2, 3}))) == {"act", "act.1", "act.2"}


def test_a_smaller_working_set_is_expected_and_learned_from():
    def moments(gone: frozenset[str]) -> tuple[Moment, ...]:
        return (moment(1000 - 30 * ("up" in gone), {"": 2}),)

    layer, saves_up = chain(), Decision(save=frozenset({1}))
    corrections = Corrections(1000, 1500, moments)
    assert corrections.at_peak(layer, saves_up, {1: 1.0}, 2) == 80 - 30
    assert Corrections(1000, 1500).at_peak(layer, saves_up, {1: 1.0}, 2) == 80
    (family,) = layer.families
    candidate = Candidate(Names(("up",)), ((1, saves_up),), family, 80, 1.0, peak_bytes=50, expected_bytes=50)
    assert corrections.learn(candidate, 1057).expected_beyond(layer, family, 1) == 7


def test_between_two_batches_the_working_set_grows_with_the_batch():
    def moments(gone: frozenset[str]) -> tuple[Moment, ...]:
        return (moment(1600 - 80 * len(gone), {"": 2}),)

    curve = Curve((CurvePoint(0, Cost(800, 0.0)), CurvePoint(8, Cost(1600, 4.0, moments))))
    assert curve.at(8).moments is moments
    between = curve.at(4)
    assert between == Cost(1200, 2.0)
    assert between.moments
    assert between.moments(frozenset()) == (moment(1200, {"": 2}),)
    assert between.moments(frozenset({"up"})) == (moment(1160, {"": 2}),)


def test_the_room_of_a_smaller_working_set_is_used():
    """Two layers save `up` and `act.2`, 120 bytes, in a budget that leaves 90: 30 bytes no longer lie in memory."""

    def cost(policy: Policy, loss: str, batch: int) -> Cost:
        saved = policy.save if isinstance(policy, Names) else ()
        made_again = {(): 8, ("up",): 4, ("act.2",): 5, ("act.1",): 3, ("up", "act.2"): 1, ("act.1", "act.2"): 4}
        total_bytes = 1000 + 2 * sum({"up": 40, "act.1": 40, "act.2": 20}[name] for name in saved) - 30 * ("up" in saved)
        return Cost(total_bytes, 100.0 + 2 * made_again[saved], moments if policy == NOTHING else None)

    def moments(gone: frozenset[str]) -> tuple[Moment, ...]:
        return (moment(1000 - 30 * ("up" in gone), {"": 2}),)

    found = find_plan(Steps(lambda batch: chain(), cost, 2, 1090), losses=("",), batch=1, named=False)
    assert isinstance(found, Plan)
    assert (found.policy, found.predicted_bytes, found.cost.total_bytes) == (Names(("up", "act.2")), 1090, 1090)
    assert [step.policy for step in found.tried] == [NOTHING, Names(("up", "act.2"))]


def test_what_stages_save_counts_where_it_is_live():
    """Two stages. The first one's gradient needs the most memory, when nothing is left of what the second one saved.

    In 1100 bytes both of the second stage's layers save all that fits at its own moment, as the first stage's save nothing.
    """

    def stage(prefix: str, num_bytes: int) -> EqualLayers:
        values = (Value("x", 1, saveable=False), Value(f"{prefix}h", num_bytes, needed=True))
        problem = Problem(values, (Op("h", (0,), (1,), num_bytes / 10, flops=1),), (0,), 0.0, 1.0)
        return EqualLayers(LayerEstimate(problem, {1: f"{prefix}h"}, in_scan=False), 2, prefix)

    one = as_one([stage("first/", 100), stage("second/", 50)])
    moments = (moment(1000, {"first/": 2, "second/": 0}), moment(600, {"first/": 2, "second/": 2}))
    for budget, policy in ((1050, "save:second/h"), (1199, "save:second/h"), (1200, "save:first/h,second/h")):
        corrections = Corrections(1000, budget, lambda gone: moments)
        best = fastest(candidates(one.layer, one.num_layers, corrections))
        assert best
        assert (str(best.policy), best.expected_bytes) == (policy, 200 if "first" in policy else 0)
    assert fastest(candidates(one.layer, one.num_layers, Corrections(1000, 999, lambda gone: moments))) is None
    assert Corrections(1000, 1050, lambda gone: moments).most_saved(one.layer) == 1050 - 600
    values = tuple(replace(value, saveable=False) for value in one.layer.problem.values)
    unsaveable = replace(one.layer, problem=replace(one.layer.problem, values=values))
    assert Corrections(1000, 1050, lambda gone: moments).most_saved(unsaveable) == 1050 - 600
    assert Corrections(1000, 1050).most_saved(one.layer) == 50
    without = fastest(candidates(one.layer, one.num_layers, Corrections(1000, 1050)))
    assert without
    assert str(without.policy) == "nothing"


@pytest.mark.parametrize(("is_read_first", "most"), [(False, 2), (True, 1)])
def test_what_a_gradient_reads_first_is_live_in_the_other_layers(is_read_first, most):
    """Two layers, of which one's gradient runs at the peak. In 45 bytes there is room for `up` in one layer, and not in two."""
    layer = chain()
    values = (replace(value, is_read_first=is_read_first and value.name == "up") for value in layer.problem.values)
    layer = replace(layer, problem=replace(layer.problem, values=tuple(values)))
    moments = (Moment(1000, {"": 2}, {"": 1}), Moment(900, {"": 2}, {"": 2}))
    assert moments[0].saved_bytes(layer.problem.values[1]) == 40 * most
    found = fastest(candidates(layer, 2, Corrections(1000, 1045, lambda gone: moments, allows_mixes=False)))
    assert found
    assert ("up" in found.policy.names()) == is_read_first
    assert Corrections(1000, 1045, lambda gone: moments).most_saved(layer) == 145
