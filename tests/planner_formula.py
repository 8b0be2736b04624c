"""A layer of five values, and a formula for the bytes and seconds of its steps that stands in for XLA in tests of the planner."""

import functools

from jaxremat.knapsack.problem import Op, Problem, Value
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.plan import NoPlan, Plan, find_plans
from jaxremat.planner.steps import SPARSE, Cost, Steps
from jaxremat.policy.spec import Names, Policy, Rule

LAYERS = 12
NAMES = ("a", "b", "c", "d", "fused")
#: A chain x -> a -> b -> c -> d, of which the backward pass reads all, with fused attention (two results) beside it.
BYTES = {"a": 40, "b": 10, "c": 30, "d": 20, "fused": 12}
SECONDS = {"a": 5.0, "b": 4.0, "c": 2.5, "d": 6.0, "fused": 3.0}


@functools.cache  # with its hulls, which take the solver most of a test's time
def layer_at(batch: int) -> LayerEstimate:
    def value(name: str, num_bytes: int, **more) -> Value:
        return Value(name, num_bytes * batch, needed=True, **more)

    values = (
        Value("x", 20 * batch, saveable=False, offloadable=False, needed=True),
        *(value(name, BYTES[name]) for name in NAMES[:4]),
        value("fused", 10, offloadable=False),
        value("stats", 2, offloadable=False),
    )
    ops = [Op(name, (n,), (n + 1,), SECONDS[name] * batch, flops=n) for n, name in enumerate(NAMES[:4])]
    ops.append(Op("attention", (1,), (5, 6), SECONDS["fused"] * batch, flops=9, together=True))
    problem = Problem(values, tuple(ops), (0,), save_s_per_byte=0.01, offload_s_per_byte=1.0)
    return LayerEstimate(problem, {n + 1: name for n, name in enumerate(NAMES[:4])})


def kept_by(policy: Policy) -> set[str]:
    match policy:
        case Rule("none"):
            return set(NAMES)
        case Rule("dots"):
            return {"b", "c", "d", *(["fused"] if policy.attention else [])}
        case Names():
            return {*policy.save, *(["fused"] if policy.attention else [])}
        case Rule():
            return {"fused"} if policy.attention else set()
        case _:
            raise AssertionError(f"{policy} isn't the policy of one layer")


class Xla:
    """Bytes and seconds of a step by formula, with a surprise: `slip` times the saved bytes that the planner expects."""

    def __init__(self, slip: float = 1.0, fixed: int = 1000, *, is_small: bool = False) -> None:
        self.slip, self.fixed, self.is_small, self.calls = slip, fixed, is_small, []

    def __call__(self, policy: Policy, loss: str, batch: int) -> Cost:
        self.calls.append((policy, loss, batch))
        logits, loss_s = {"full": (300, 1.0), "chunked": (20, 3.0)}[loss]
        if policy == SPARSE:
            return Cost(int(self.fixed + batch * (logits + 8 * 20)), batch * (100 + loss_s + 2 * LAYERS * 20.5))
        total, seconds = 0.0, 0.0
        for layer in policy.layers(LAYERS) * (LAYERS // policy.size(LAYERS)):
            kept = kept_by(layer)
            saved = sum(BYTES[name] for name in kept)
            total += 20 + self.slip * saved
            seconds += 0.01 * saved + sum(SECONDS[name] for name in self.recomputed(kept))
        total_bytes = int(self.fixed + batch * (logits + total))
        return Cost(total_bytes, 50.0 + batch * (100 + loss_s + seconds), is_small=self.is_small)

    @staticmethod
    def recomputed(kept: set[str]) -> set[str]:
        return {name for name in NAMES if name not in kept}


def find_plan(steps: Steps, **options) -> Plan | NoPlan:
    """`find_plans` in one layout."""
    (found,) = find_plans([steps], **options)
    assert found.plan is not None, "the layers' own layout has a plan, or a step that doesn't fit"
    return found.plan
