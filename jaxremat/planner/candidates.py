"""What one layer could keep, as policies for all layers: save-sets on the hull, mixes of two, and what each value is worth."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxremat.planner.evaluate import evaluate
from jaxremat.planner.hull import Point, lower_hull
from jaxremat.planner.problem import LEAST_S, Decision, Problem
from jaxremat.planner.solve import solve
from jaxremat.policy.spec import LayerPolicy, Mix, Names, Policy, Rule

MAX_GROUP = 8  # layers of a mix's group, which are compiled one by one
NOTHING_BEYOND: Mapping[int, int] = {}


@dataclass(frozen=True)
class LayerEstimate:
    """One layer at one batch: its problem, and the checkpoint name of each value that is saved by name.

    What recomputing and offloading cost are estimates, and `alternatives` are the same layer by other estimates, among which
    compiled steps choose. `offload_bytes` is what a layer may keep in host memory.
    """

    problem: Problem
    names: dict[int, str]
    alternatives: tuple["LayerEstimate", ...] = ()
    offload_bytes: int = 0

    @functools.cached_property
    def hull(self) -> tuple[Point, ...]:
        """The lower convex hull of saved bytes and cost over all decisions."""
        return lower_hull(self.problem, max_offload_bytes=self.offload_bytes)

    @functools.cached_property
    def families(self) -> tuple["Family", ...]:
        """Its decisions without fused attention kept, and with it where it has some."""
        fused = [op for op in self.problem.ops if op.together]
        outputs = frozenset(v for op in fused for v in op.outputs)
        values = tuple(replace(v, saveable=v.saveable and n not in outputs) for n, v in enumerate(self.problem.values))
        families = [Family(False, replace(self.problem, values=values))]
        if fused:
            families.append(Family(True, self.problem).keeping(Decision(outputs)))
        return tuple(replace(family, hull=replace(self, problem=family.problem).hull) for family in families)

    @functools.cached_property
    def nothing_s(self) -> float:
        """What keeping nothing costs."""
        return evaluate(self.problem, Decision()).cost_s


@dataclass(frozen=True)
class Price:
    """What saving a value is worth beside the rest of the plan: its bytes in all layers, and the seconds that spares.

    In the plan it is saved, offloaded, or neither; the seconds are those of saving it instead of neither.
    """

    name: str
    num_bytes: int
    saved_s: float
    is_saved: bool
    is_offloaded: bool


@dataclass(frozen=True)
class Family:
    """Decisions that keep the same values in every layer, whatever else: fused attention, or what a compiled step kept.

    Attributes:
        attention: whether fused attention is kept: in every layer or in none, as its primitive can't tell layers apart.
        problem: the layer's, with what is kept among its inputs.
        hull: of the problem; empty where single layers aren't told apart.
        kept: in every layer.
        kept_bytes: that takes on the device, in a layer.
        kept_s: that costs, in a layer.
        beyond: bytes that the step of a compiled decision took beyond what it saves (less, where negative); None without one.
    """

    attention: bool
    problem: Problem
    hull: tuple[Point, ...] = ()
    kept: Decision = Decision()
    kept_bytes: int = 0
    kept_s: float = 0.0
    beyond: int | None = None

    def keeping(self, decision: Decision, never: frozenset[int] = frozenset()) -> "Family":
        """Those of its decisions that keep all that `decision` keeps, and nothing of `never`."""
        save, offload = decision.save - self.kept.save, decision.offload - self.kept.offload
        values, problem = self.problem.values, self.problem
        free = tuple(replace(v, saveable=False, offloadable=False) if n in never else v for n, v in enumerate(values))
        saved_bytes, offloaded_bytes = (sum(values[v].num_bytes for v in kept) for kept in (save, offload))
        made = (replace(op, outputs=tuple(v for v in op.outputs if v not in save | offload)) for op in problem.ops)
        ops, inputs = tuple(op for op in made if op.outputs), (*problem.inputs, *sorted(save | offload))
        return replace(
            self,
            problem=replace(problem, values=free, ops=ops, inputs=inputs),
            hull=(),
            kept=Decision(self.kept.save | save, self.kept.offload | offload),
            kept_bytes=self.kept_bytes + saved_bytes,
            kept_s=self.kept_s + problem.save_seconds(save) + offloaded_bytes * problem.offload_s_per_byte,
        )

    def like(self, decision: Decision, beyond: int) -> "Family":
        """Decisions with the working set of a compiled one: they keep all that it keeps, and further values only from before
        the largest ones (half of the largest or more): nothing of those, nor of what is made of them.
        """
        num_bytes = {v: self.problem.values[v].num_bytes for op in self.problem.ops for v in op.outputs}
        after = {v for v, size in num_bytes.items() if size >= max(num_bytes.values()) / 2}
        while more := {v for op in self.problem.ops if after.intersection(op.inputs) for v in op.outputs} - after:
            after |= more
        return replace(self.keeping(decision, frozenset(after)), beyond=beyond)


@dataclass(frozen=True)
class Candidate:
    """A policy of the planner's: bytes it saves in all layers, seconds it costs in all layers, and one layer's decision.

    `layer` is the layer by whose estimates it costs that. `group_size` is the number of layers of a mix's group, 1 for the same
    policy everywhere; `expected_bytes` is what XLA is expected to take for it beyond a step under `nothing`.
    """

    layer: LayerEstimate
    policy: Policy
    saved_bytes: int
    cost_s: float
    decision: Decision
    family: Family
    group_size: int = 1
    expected_bytes: int = 0


def candidates(
    layer: LayerEstimate,
    families: Sequence[Family],
    num_layers: int,
    spare_bytes: int,
    beyond: Mapping[int, int] = NOTHING_BEYOND,
) -> Iterator[Candidate]:
    """What could be saved in `spare_bytes` beyond the layers' inputs: one save-set in all layers, or two in turns.

    Args:
        layer: one layer.
        families: of its decisions.
        num_layers: the layers.
        spare_bytes: what a step under `nothing` leaves of the budget.
        beyond: bytes that a step is known to take beyond what it saves, by the layers of its group; a family's own come first.
            For a group that it doesn't know, that of single layers and a copy of the layer's inputs for each further layer.
    """
    inputs = sum(layer.problem.values[v].num_bytes for v in layer.problem.inputs)
    for family in families:
        known = beyond if family.beyond is None else {1: family.beyond}
        patterns: list[tuple[tuple[int, Point], ...]] = [((1, point),) for point in family.hull]
        budget = (spare_bytes - known.get(1, 0)) // num_layers - family.kept_bytes
        if budget >= 0:
            offloaded_bytes = sum(layer.problem.values[v].num_bytes for v in family.kept.offload)
            left_bytes = max(0, layer.offload_bytes - offloaded_bytes)
            decision = solve(family.problem, budget, max_offload_bytes=left_bytes).decision
            evaluation = evaluate(family.problem, decision)
            patterns.append(((1, Point(evaluation.saved_bytes, evaluation.cost_s, decision)),))
        for size in range(2, MAX_GROUP + 1):
            if num_layers % size == 0:
                patterns += [
                    ((size - n, left), (n, right))
                    for left, right in itertools.pairwise(family.hull)
                    for n in range(1, size)
                    if math.gcd(n, size) == 1
                ]
        for pattern in patterns:
            candidate = _candidate(layer, family, pattern, num_layers)
            size = candidate.group_size
            expected_bytes = candidate.saved_bytes + known.get(size, known.get(1, 0) + (size - 1) * inputs)
            if expected_bytes <= spare_bytes:
                yield replace(candidate, expected_bytes=expected_bytes)


def _candidate(layer: LayerEstimate, family: Family, pattern: tuple[tuple[int, Point], ...], num_layers: int) -> Candidate:
    times = num_layers // sum(count for count, _ in pattern)
    decisions = tuple((count, _both(point.decision, family.kept)) for count, point in pattern)
    policies = tuple((count, _layer_policy(layer, decision, family.attention)) for count, decision in decisions)
    return Candidate(
        layer=layer,
        policy=policies[0][1] if len(policies) == 1 else Mix(policies),
        saved_bytes=num_layers * family.kept_bytes + times * sum(count * point.saved_bytes for count, point in pattern),
        cost_s=num_layers * family.kept_s + times * math.fsum(count * point.cost_s for count, point in pattern),
        decision=max(decisions, key=lambda part: part[0])[1],
        family=family,
        group_size=num_layers // times,
    )


def _both(first: Decision, second: Decision) -> Decision:
    return Decision(first.save | second.save, first.offload | second.offload)


def _layer_policy(layer: LayerEstimate, decision: Decision, attention: bool) -> LayerPolicy:
    save, offload = (
        tuple(layer.names[v] for v in sorted(kept) if v in layer.names) for kept in (decision.save, decision.offload)
    )
    return Names(save, offload, attention) if save or offload else Rule("nothing", attention)


def most_disputed(layer: LayerEstimate, other: LayerEstimate) -> tuple[Policy, float, float]:
    """The policy on whose seconds two estimates of a layer differ most, and what it spares in a layer by either."""

    def saved(estimate: LayerEstimate, decision: Decision) -> float:
        return estimate.nothing_s - evaluate(estimate.problem, decision).cost_s

    made = ((_both(point.decision, family.kept), family.attention) for family in other.families for point in family.hull)
    choices = [(_layer_policy(layer, *kept), saved(layer, kept[0]), saved(other, kept[0])) for kept in made]
    return max(choices, key=lambda choice: abs(choice[1] - choice[2]))


def without_flops(layer: LayerEstimate) -> Policy:
    """The policy of fewest bytes under which nothing with FLOPs (matmuls, attention, convolutions) runs twice."""
    problem = layer.problem
    ops = tuple(replace(op, recompute_s=float(op.flops > 0)) for op in problem.ops)
    all_bytes = sum(value.num_bytes for value in problem.values)
    price = 0.5 / max(1, all_bytes)  # all bytes together weigh less than one operation
    values = tuple(replace(value, save_s=0.0) for value in problem.values)
    weighed = replace(problem, ops=ops, values=values, save_s_per_byte=price)
    decision = solve(weighed, all_bytes).decision
    fused = frozenset(v for op in problem.ops if op.together for v in op.outputs)
    return _layer_policy(layer, decision, attention=bool(fused) and fused <= decision.save)


def named_policies(layer: LayerEstimate) -> dict[Policy, frozenset[int]]:
    """The named policies worth comparing with, and about which values each keeps in a layer."""
    problem = layer.problem
    made = {v: op for op in problem.ops for v in op.outputs}
    fused = frozenset(v for v, op in made.items() if op.together)
    needed = frozenset(v for v in made if problem.values[v].needed)
    read = {*needed}
    free = [op for op in problem.ops if op.recompute_s <= LEAST_S]  # adding a bias, say: what is saved is from before it
    while more := {v for op in free if read.intersection(op.outputs) for v in op.inputs} - read:
        read |= more
    dots = frozenset(v for v, op in made.items() if op.flops and not op.together and v in read)
    plain: dict[Policy, frozenset[int]] = {Rule("none"): needed, Rule("dots"): dots}
    if fused:
        return plain | {Rule("dots", attention=True): dots | fused, Rule("nothing", attention=True): fused}
    # How many of the matmuls' results aren't attention's, a compile tells.
    return plain | {Rule("dots-no-batch"): frozenset()}


def prices(layer: LayerEstimate, decision: Decision, num_layers: int) -> tuple[Price, ...]:
    """Each saveable value beside the rest of `decision`, from the most seconds saved per byte; what spares none is left out."""
    problem = layer.problem
    together = {v: frozenset(op.outputs) for op in problem.ops if op.together for v in op.outputs}
    found: list[Price] = []
    for group in dict.fromkeys(together.get(v, frozenset({v})) for v, value in enumerate(problem.values) if value.saveable):
        offload = decision.offload - group
        saved, dropped = (
            evaluate(problem, Decision(keep, offload)) for keep in (decision.save | group, decision.save - group)
        )
        name = problem.values[min(group)].name + f" +{len(group) - 1}" * (len(group) > 1)
        num_bytes = num_layers * sum(problem.values[v].num_bytes for v in group)
        saved_s = num_layers * (dropped.cost_s - saved.cost_s)
        if saved_s > 0:
            found.append(Price(name, num_bytes, saved_s, group <= decision.save, group <= decision.offload))
    return tuple(sorted(found, key=lambda price: -price.saved_s / max(1, price.num_bytes)))
