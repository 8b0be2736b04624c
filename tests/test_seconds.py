"""What compiled steps say of the seconds that saving takes off a step: by hand, and in plans whose model is wrong."""

from dataclasses import replace

import pytest

from jaxremat.knapsack.problem import Op, Problem, Value
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import Plan
from jaxremat.planner.seconds import Seen, corrected
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Names, Policy
from tests.planner_formula import find_plan
from tests.small_problems import solve_by_trying_all

NAMES = ("up", "gate", "act")


def layer(seconds: float = 4.0) -> LayerEstimate:
    """Results of two matmuls and one of another operation, of equal bytes."""
    values = (Value("x", 8, saveable=False), *(Value(name, 8, needed=True) for name in NAMES))
    kinds = ("mlp/up/dot_general", "mlp/gate/dot_general", "mlp/tanh")
    ops = tuple(Op(kind, (0,), (n + 1,), seconds) for n, kind in enumerate(kinds))
    return LayerEstimate(Problem(values, ops, (0,), 0.0, 1.0), {n + 1: name for n, name in enumerate(NAMES)}, in_scan=False)


def test_a_step_says_most_of_what_it_saves():
    """Saving `up` was expected to take 4 s off the step, and takes off 1. `gate` is the result of a matmul, too."""
    of_layer, layout_s = corrected(layer(), [Seen({1: 8}, 0.0, 3.0, step_s=1.0)])
    assert [value.save_s for value in of_layer.problem.values] == pytest.approx([0, 3, 2, 1], rel=1e-3)
    assert layout_s == 0
    assert corrected(layer(), []) == (layer(), 0.0)


def test_further_steps_tell_values_apart():
    seen = [Seen({1: 8}, 0.0, 3.0, 1.0), Seen({1: 8, 2: 8}, 0.0, 3.0, 1.0), Seen({3: 8}, 0.0, 0.5, 1.0)]
    of_layer, _ = corrected(layer(), seen)
    assert [value.save_s for value in of_layer.problem.values] == pytest.approx([0, 3, 0, 0.5], rel=1e-2, abs=1e-2)


def test_what_few_bytes_hardly_explain_is_recomputing():
    """A value of 1 byte was expected to take 4 s off the step, and takes off 2. So recomputing takes half of its seconds."""
    small = layer().problem
    values = (small.values[0], replace(small.values[1], num_bytes=1), *(replace(v, num_bytes=400) for v in small.values[2:]))
    of_layer, _ = corrected(replace(layer(), problem=replace(small, values=values)), [Seen({1: 1}, 4.0, 2.0, step_s=1.0)])
    assert [op.recompute_s for op in of_layer.problem.ops] == pytest.approx([2, 2, 2], rel=1e-2)
    assert of_layer.problem.values[1].save_s < 0.01


def test_both_causes_explain_a_step():
    """`up` was expected to take 4 s off the step, and takes off 3, by the price of its bytes and by recomputing."""
    of_layer, _ = corrected(layer(), [Seen({1: 8}, 4.0, 1.0, step_s=1.0)])
    (again, *_), (_, up, gate, _) = of_layer.problem.ops, of_layer.problem.values
    assert again.recompute_s - up.save_s == pytest.approx(3, rel=1e-3)
    assert 0 < gate.save_s < up.save_s < 1
    assert again.recompute_s < 4


@pytest.mark.parametrize(("beyond_s", "factor"), [(40.0, 0.1), (-40.0, 1.5)])
def test_recomputing_is_never_free(beyond_s, factor):
    of_layer, _ = corrected(layer(), [Seen({}, 4.0, beyond_s, step_s=1.0)])
    assert [op.recompute_s for op in of_layer.problem.ops] == pytest.approx([4 * factor] * 3)


def test_no_price_is_below_nothing():
    of_layer, _ = corrected(layer(), [Seen({1: 8}, 0.0, -3.0, 1.0)])
    assert {value.save_s for value in of_layer.problem.values} == {0.0}


def test_a_difference_between_layouts_is_none_of_a_value():
    """Both steps take 5 s more than those of a scan were foreseen to, whatever they save."""
    seen = [Seen({1: n}, 0.0, 5.0, 100.0, is_beside_scan=True) for n in (8, 16)]
    of_layer, layout_s = corrected(layer(0.01), seen)
    assert layout_s == pytest.approx(5.0, rel=0.01)
    assert max(value.save_s for value in of_layer.problem.values) < 0.01


@pytest.mark.parametrize("slow", ["up", "act"])
def test_what_saves_less_than_foreseen_gives_way(monkeypatch, slow):
    """There is room for two of three values. Saving one of them saves nothing: the plan saves the other two."""
    solve_by_trying_all(monkeypatch)

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        saved = policy.save if isinstance(policy, Names) else ()
        return Cost(1000 + 8 * len(saved), 30.0 - sum(4.0 * (name != slow) for name in saved))

    found = find_plan(Steps(lambda batch: layer(), compiled, 1, 1016), losses=("",), batch=1, named=False)
    assert isinstance(found, Plan)
    assert isinstance(found.policy, Names)
    assert {*found.policy.save} == {*NAMES} - {slow}
    assert len(found.tried) <= 4
    assert found.bound_s is not None
    assert found.recompute_s is not None
    assert found.bound_s <= found.recompute_s * (1 + 1e-9)


def test_no_candidate_is_compiled_that_is_expected_to_be_slower(monkeypatch):
    """Saving anything costs time. One candidate shows it."""
    solve_by_trying_all(monkeypatch)

    def compiled(policy: Policy, loss: str, batch: int) -> Cost:
        saved = policy.save if isinstance(policy, Names) else ()
        return Cost(1000 + 8 * len(saved), 100.0 + 4 * len(saved))

    of_layer = replace(layer(), in_scan=True)
    found = find_plan(Steps(lambda batch: of_layer, compiled, 1, 1024), losses=("",), batch=1, named=False)
    assert isinstance(found, Plan)
    assert found.policy == NOTHING
    assert len(found.tried) == 2
