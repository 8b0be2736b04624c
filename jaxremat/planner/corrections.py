"""Corrections of the expected bytes of a step, fitted to compiled steps.

A step is expected to take as many bytes as the full-remat step, plus the bytes that its policy saves, less those by which
its working set is smaller, because fewer operations run a second time. XLA often takes somewhat more or less than that. The
difference of a compiled candidate corrects what is expected of the next candidates.

Example: the full-remat step takes 1000 bytes, the budget is 1500, and the best candidate saves 450. It is expected to take
1450, and compiled it takes 1520: 70 bytes beyond what it saves, which is over the budget. From then on, a candidate that saves
n bytes is expected to take 1000 + n + 70, so that only candidates that save up to 430 bytes are proposed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jaxremat.planner.estimate import Candidate, Family, LayerEstimate
from jaxremat.planner.problem import Decision

_MUCH_LESS = 0.01  # share of the full-remat step: a step that took so much less than expected has another working set


@dataclass(frozen=True)
class Corrections:
    """What is known about the bytes of steps. `learn` returns new corrections.

    Attributes:
        base_bytes: total bytes of the full-remat step.
        budget_bytes: total bytes that a step may take.
        without: `Cost.without` of the full-remat step.
        beyond_bytes: by the number of layers in a group (1 where all layers have the same policy), the bytes that a compiled
            step took beyond those that were expected.
        learned_families: families of decisions with the working set of a compiled step that took much less than expected.
            Each knows its own bytes beyond what it saves.
        allows_mixes: whether layers may have different policies. After a mix that didn't fit, they may not.
    """

    base_bytes: int
    budget_bytes: int
    without: Callable[[frozenset[str]], int] | None = None
    beyond_bytes: Mapping[int, int] = field(default_factory=dict)
    learned_families: tuple[Family, ...] = ()
    allows_mixes: bool = True

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that the full-remat step leaves over."""
        return self.budget_bytes - self.base_bytes

    def families(self, layer: LayerEstimate) -> tuple[Family, ...]:
        """The families among whose decisions to look for a candidate."""
        return (*layer.families, *self.learned_families)

    def freed_bytes(self, layer: LayerEstimate, decision: Decision) -> int:
        """Bytes by which the working set is expected to be smaller than under full remat.

        Fewer operations are recomputed then.
        """
        return self.base_bytes - self.without(layer.not_run_again(decision)) if self.without else 0

    def expected_beyond(self, layer: LayerEstimate, family: Family, group_size: int) -> int:
        """Bytes expected beyond full remat, what is saved, and the change of the working set.

        If no step with groups of this size was compiled, the number for single layers is taken, and in a scan a copy of the
        layer's inputs is added for each further layer of the group.
        """
        known = self.beyond_bytes if family.beyond_bytes is None else {1: family.beyond_bytes}
        return known.get(group_size, known.get(1, 0) + (group_size - 1) * layer.copied_bytes)

    def learn(self, candidate: Candidate, total_bytes: int) -> "Corrections":
        """The corrections after `candidate` was compiled and its step took `total_bytes`."""
        beyond = total_bytes - self.base_bytes - candidate.saved_bytes + candidate.freed_bytes
        is_mix = candidate.group_size > 1
        learned = replace(self, allows_mixes=total_bytes <= self.budget_bytes or not is_mix)
        if candidate.family.beyond_bytes is not None:
            corrected = replace(candidate.family, beyond_bytes=beyond)
            families = (corrected if family == candidate.family else family for family in self.learned_families)
            return replace(learned, learned_families=tuple(families))
        if not is_mix and beyond < -_MUCH_LESS * self.base_bytes:
            family = candidate.family.with_working_set_of(candidate.decision, beyond)
            return replace(learned, learned_families=(*self.learned_families, family))
        return replace(learned, beyond_bytes={**self.beyond_bytes, candidate.group_size: beyond})

    def for_next_estimate(self) -> "Corrections":
        """What of it is valid for another estimate of the same layer: the bytes by group size."""
        return replace(self, learned_families=(), allows_mixes=True)
