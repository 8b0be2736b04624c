"""Candidates are policies for a stack of equal layers, made of decisions for one layer.

All layers save the same values (`save:a`), or two save-sets alternate: `1*save:a|2*save:a,b` is a group of three layers
that repeats, in which one layer saves `a` and two save `a` and `b`. They are neighbours on the hull (`hull.py`).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jaxremat.knapsack.hull import Point, point_of
from jaxremat.knapsack.problem import Decision, union
from jaxremat.knapsack.solve import Row, solve
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.estimate import Candidate, Family, LayerEstimate, policy_of
from jaxremat.policy.spec import Mix, Policy, Rule

MAX_GROUP = 8  # layers in a group of a mix, which XLA compiles one by one
_MAX_SOLVED = 8  # best decisions of a layer, each with the room that another one leaves


def fastest(found: Iterable[Candidate]) -> Candidate | None:
    """The candidate of the least seconds, and between equal seconds, of the fewest saved bytes."""
    return min(found, key=lambda candidate: (candidate.cost_s, candidate.saved_bytes), default=None)


def candidates(
    layer: LayerEstimate, num_layers: int, corrections: Corrections, *, exact: bool = True
) -> Iterator[Candidate]:
    """The candidates that are expected to fit.

    For each family of decisions they are the vertices of its hull, the mixes of two neighbouring vertices and, if `exact`, the
    exact solution for a layer's share of the bytes that are left. That one takes twelve times as long as all others.
    """
    for family in (*layer.families, *corrections.learned_families):
        for group in _layer_groups(layer, family, num_layers, corrections, exact):
            candidate = _expected(layer, family, group, num_layers, corrections)
            if candidate.expected_bytes <= corrections.left_bytes and layer.allows(candidate.policy):
                yield candidate


def near(layer: LayerEstimate, num_layers: int, corrections: Corrections, known: Sequence[Decision]) -> Iterator[Candidate]:
    """The candidates near to full remat or a known decision that may fit.

    They save one value more or less. Their expected bytes may be wrong, and may exceed the budget by the bytes of all values of
    one layer and by what a compiled candidate took less than expected.
    """
    less_bytes = max((-family.beyond_bytes for family in corrections.learned_families if family.beyond_bytes), default=0)
    most_bytes = corrections.left_bytes + layer.problem.num_bytes(layer.everything.save) + less_bytes
    for family in layer.families:
        free = frozenset(v for v in layer.everything.save - family.always.save if family.problem.values[v].saveable)
        starts = {frozenset[int](), *(one.save & free for one in known if family.always.save <= one.save)}
        for save in {start ^ {v} for start in starts for v in free}:
            point = point_of(family.problem, Decision(save))
            candidate = _expected(layer, family, ((1, point),), num_layers, corrections)
            if candidate.expected_bytes <= most_bytes and layer.allows(candidate.policy):
                yield candidate


#: Numbers of neighbouring layers, and the decision that they share. Repeated, they are all layers.
Group = tuple[tuple[int, Point], ...]


def _layer_groups(
    layer: LayerEstimate, family: Family, num_layers: int, corrections: Corrections, exact: bool
) -> Iterator[Group]:
    """The groups of layers that are worth repeating over the stack."""
    for point in family.hull:
        yield ((1, point),)
    found = set[Decision]()
    waiting = [frozenset[str](), *([layer.run_once(layer.everything)] if corrections.moments else [])] if exact else []
    while waiting and len(found) < _MAX_SOLVED:
        if limits := corrections.limits(layer, family, num_layers, waiting.pop(0)):
            alone = _solution(layer, family, limits)
            if alone.decision not in found:
                yield ((1, alone),)
                found.add(alone.decision)
                waiting += [layer.run_once(union(alone.decision, family.always))] if corrections.moments else []
    sizes = [size for size in range(2, MAX_GROUP + 1) if num_layers % size == 0]
    for size in sizes if corrections.allows_mixes else ():
        for left, right in itertools.pairwise(family.hull):
            for n in range(1, size):
                if math.gcd(n, size) == 1:
                    yield ((size - n, left), (n, right))


def _solution(layer: LayerEstimate, family: Family, limits: tuple[Row, ...]) -> Point:
    """The best decision of the family for one layer within the limits."""
    problem, left_bytes = family.problem, max(0, layer.offload_bytes - layer.problem.num_bytes(family.always.offload))
    all_bytes = problem.num_bytes(range(len(problem.values)))
    return point_of(problem, solve(problem, all_bytes, max_offload_bytes=left_bytes, rows=limits).decision)


def _expected(layer: LayerEstimate, family: Family, group: Group, num_layers: int, corrections: Corrections) -> Candidate:
    """The candidate that repeats `group` over all layers, with its expected bytes.

    The peak is that of the part of the group for which this is the most. The gradient runs through the last part first. In
    unrolled layers, what the last part saved is freed before the gradient comes to the part before it. A scan frees nothing.
    """
    candidate, later_bytes, peaks = candidate_of(layer, family, group, num_layers), 0, []
    for count, decision in reversed(candidate.group):
        peaks.append(corrections.at_peak(layer, decision, candidate.shares, num_layers) - later_bytes)
        later_bytes += 0 if layer.in_scan else count * layer.problem.num_bytes(decision.save)
    peak_bytes = max(peaks)
    expected_bytes = peak_bytes + corrections.expected_beyond(layer, family, candidate.group_size)
    return replace(candidate, peak_bytes=peak_bytes, expected_bytes=expected_bytes)


def candidate_of(layer: LayerEstimate, family: Family, group: Group, num_layers: int) -> Candidate:
    """The candidate that repeats `group` over all layers, without corrections of its bytes."""
    group_size = sum(count for count, _ in group)
    times = num_layers // group_size
    decisions = tuple((count, union(point.decision, family.always)) for count, point in group)
    policies = tuple((count, policy_of(layer, decision, family.attention)) for count, decision in decisions)
    saved_bytes = num_layers * family.always_bytes + times * sum(count * point.saved_bytes for count, point in group)
    return Candidate(
        policy=policies[0][1] if len(group) == 1 else Mix(policies),
        group=decisions,
        family=family,
        saved_bytes=saved_bytes,
        cost_s=num_layers * family.always_s + times * math.fsum(count * point.cost_s for count, point in group),
        expected_bytes=saved_bytes,
    )


def named_policies(layer: LayerEstimate) -> dict[Policy, frozenset[int]]:
    """The named policies that a plan is compared with, and the values of a layer that they save."""
    problem = layer.problem
    made = {v: op for op in problem.ops for v in op.outputs}
    fused = frozenset(v for v, op in made.items() if op.together)
    needed = frozenset(v for v in made if problem.values[v].needed)
    read = {*needed}
    # Operations such as adding a bias cost next to nothing. What is saved in their place is what they read.
    free = [op for op in problem.ops if problem.is_free(op)]
    while more := {v for op in free if read.intersection(op.outputs) for v in op.inputs} - read:
        read |= more
    dots = frozenset(v for v, op in made.items() if op.flops and not op.together and v in read)
    plain: dict[Policy, frozenset[int]] = {Rule("none"): needed, Rule("dots"): dots}
    # Only a compile shows how many matmuls aren't attention's, whose results `dots-no-batch` doesn't save.
    plain |= (
        {Rule("dots", attention=True): dots | fused, Rule("nothing", attention=True): fused}
        if fused
        else {Rule("dots-no-batch"): frozenset()}
    )
    return {policy: saved for policy, saved in plain.items() if layer.allows(policy)}


def named_decision(layer: LayerEstimate, policy: Policy) -> Decision:
    """What a named policy saves of the values that a plan may save."""
    saved = named_policies(layer).get(policy, frozenset())
    return Decision(frozenset(v for v in saved if layer.problem.values[v].saveable))
