"""Corrections of the expected bytes of a step, fitted to compiled steps.

A step is expected to take as many bytes as the full-remat step, plus the bytes that its policy saves. Where it is known what
is live moment by moment (`Cost.moments`), only what is saved at the peak counts, and what no longer runs a second time is
left out. XLA often takes somewhat more or less than that. The difference of a compiled candidate corrects what is expected
of the next candidates. Where it took 70 bytes more, they are expected to take 70 more, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jaxremat.knapsack.problem import Decision
from jaxremat.knapsack.solve import Row
from jaxremat.planner.estimate import Candidate, Family, LayerEstimate
from jaxremat.planner.steps import Moment

_MUCH_LESS = 0.01  # share of the full-remat step: a step that took so much less than expected has another working set


@dataclass(frozen=True)
class Corrections:
    """What is known about the bytes of steps. `learn` returns new corrections.

    Attributes:
        base_bytes: total bytes of the full-remat step.
        budget_bytes: total bytes that a step may take.
        moments: `Cost.moments` of the full-remat step.
        beyond_bytes: by the number of layers in a group (1 where all layers have the same policy), the bytes that a compiled
            step took beyond those that were expected.
        learned_families: families of decisions with the working set of a compiled step that took much less than expected.
            Each knows its own bytes beyond what it saves.
        allows_mixes: whether layers may have different policies. After a mix that didn't fit, or where each compile takes
            minutes, they may not.
    """

    base_bytes: int
    budget_bytes: int
    moments: Callable[[frozenset[str]], tuple[Moment, ...]] | None = None
    beyond_bytes: Mapping[int, int] = field(default_factory=dict)
    learned_families: tuple[Family, ...] = ()
    allows_mixes: bool = True

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that the full-remat step leaves over."""
        return self.budget_bytes - self.base_bytes

    def at_peak(self, layer: LayerEstimate, decision: Decision, shares: Mapping[int, float], num_layers: int) -> int:
        """Bytes by which the peak of a step is expected to be above that of full remat.

        The layer whose gradient has the peak saves `decision`. `shares` has the share of the layers that save each value.
        """
        values = layer.problem.values
        if self.moments is None:
            return round(num_layers * sum(share * values[v].num_bytes for v, share in shares.items()))
        moments = self.moments(layer.run_once(decision))
        peaks = (at.total_bytes + sum(n * at.saved_bytes(values[v]) for v, n in shares.items()) for at in moments)
        return round(max(peaks)) - self.base_bytes

    def limits(self, layer: LayerEstimate, family: Family, num_layers: int, gone: frozenset[str]) -> tuple[Row, ...] | None:
        """The budgets of a layer where the operations `gone` run once, one for each moment.

        None where nothing may be saved.
        """
        beyond, values = self.expected_beyond(layer, family, 1), family.problem.values
        if self.moments is None:
            live = [(self.base_bytes, tuple(num_layers * value.num_bytes for value in values))]
        else:
            live = [(at.total_bytes, tuple(map(at.saved_bytes, values))) for at in self.moments(gone)]
        always = family.always.save
        rows = tuple(Row(of, self.budget_bytes - total - beyond - sum(of[v] for v in always)) for total, of in live)
        return rows if all(row.budget_bytes >= 0 for row in rows) else None

    def most_saved(self, layer: LayerEstimate) -> int:
        """The bytes that all layers together may save at most.

        It is what is left where all of it is live, and nothing runs a second time.
        """
        if self.moments is None:
            return self.left_bytes
        moments = self.moments(layer.run_once(layer.everything))
        most = max(sum(at.unread.values()) for at in moments)
        return min(self.budget_bytes - at.total_bytes for at in moments if sum(at.unread.values()) == most)

    def expected_beyond(self, layer: LayerEstimate, family: Family, group_size: int) -> int:
        """Bytes expected beyond full remat, what is saved, and the change of the working set.

        If no step with groups of this size was compiled, the number for single layers is taken. In a scan, XLA copies the inputs
        of each further layer of the group out of their stacks. Unrolled layers have no stacks: without a number for single
        layers, the largest one of the other sizes is taken.
        """
        known = self.beyond_bytes if family.beyond_bytes is None else {1: family.beyond_bytes}
        if layer.in_scan:
            return known.get(group_size, known.get(1, 0) + (group_size - 1) * layer.input_bytes)
        return known.get(group_size, known.get(1, max(known.values(), default=0)))

    def learn(self, candidate: Candidate, total_bytes: int) -> "Corrections":
        """The corrections after `candidate` was compiled and its step took `total_bytes`."""
        beyond = total_bytes - self.base_bytes - candidate.peak_bytes
        is_mix, own = candidate.group_size > 1, candidate.family
        learned = replace(self, allows_mixes=self.allows_mixes and (total_bytes <= self.budget_bytes or not is_mix))
        if own.beyond_bytes is not None:
            families = (replace(own, beyond_bytes=beyond) if one == own else one for one in self.learned_families)
            return replace(learned, learned_families=tuple(families))
        if not is_mix and beyond < -_MUCH_LESS * self.base_bytes:
            families = (*self.learned_families, own.with_working_set_of(candidate.decision, beyond))
            return replace(learned, learned_families=families)
        return replace(learned, beyond_bytes={**self.beyond_bytes, candidate.group_size: beyond})
