"""What is known of the steps of one layout: the compiled ones, and what they say of others."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxremat.errors import CompileError
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.curve import Curve, CurvePoint, curves
from jaxremat.planner.estimate import Candidate, LayerEstimate
from jaxremat.planner.seconds import Seen, corrected
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy
from jaxremat.search.batch import at_most

REFERENCE_BATCH = 8  # at which a layer's problem is made where the batch is free; other batches scale it
SMALLER = 4  # after a rejection by XLA, the batch is so many times smaller


@dataclass(frozen=True)
class Tried:
    """A step that was compiled.

    Attributes:
        policy: what its layers save.
        loss: its loss.
        batch: sequences in the step.
        cost: what it takes.
    """

    policy: Policy
    loss: str
    batch: int
    cost: Cost

    @property
    def speed(self) -> float:
        """Sequences per second."""
        return self.batch / self.cost.step_s


@dataclass(frozen=True)
class Place:
    """A loss and a batch, and the sequences per second that are expected there."""

    loss: str
    batch: int
    speed: float = field(default=math.inf, compare=False)


@dataclass
class Known:
    """The steps of one layout on one mesh, as far as they are known.

    Attributes:
        steps: the steps to plan.
        losses: the losses to choose among.
        batches: the batches to choose among, in rising order. One that is given, or those at which a step could fit.
        fixed_bytes: bytes of the parameters and the optimizer state.
        scanned: of unrolled layers, what is known of the same layers in a scan.
        start: the batch of the first full-remat step. 0 for the usual one.
        tried: every compiled step, in order.
        candidates: those of the planner's own choices that were compiled.
        disputed: the candidates on which two estimates of a layer disagree.
        estimate: which of the estimates of a layer is right: 0 for the first one.
        num_judged: alternatives that were compared with the right estimate.
        rejected: why XLA rejected a step of unrolled layers. Empty if it didn't.
        memo: what was computed from the model in its present state.
    """

    steps: Steps
    losses: Sequence[str]
    batches: Sequence[int]
    fixed_bytes: int = 0
    scanned: "Known | None" = None
    start: int = 0
    tried: dict[tuple[Policy, Place], Tried] = field(default_factory=dict)
    candidates: dict[tuple[Policy, Place], Candidate] = field(default_factory=dict)
    disputed: dict[tuple[Policy, Place], Candidate] = field(default_factory=dict)
    estimate: int = 0
    num_judged: int = 0
    rejected: str = ""
    memo: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What `compute` returned when the state was that of `key`."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]

    @property
    def is_small(self) -> bool:
        """Whether XLA has taken seconds for each step so far. True before the first one."""
        return all(step.cost.is_small or step.cost.is_rejected for step in self.tried.values())

    @property
    def most_that_fit(self) -> int | None:
        """How many steps that fit are compiled at most. None for no limit, as for small ones."""
        return None if self.best() and self.is_small else self.steps.most_that_fit

    def add(self, policy: Policy, place: Place) -> Tried:
        """The step, compiled once."""
        if (policy, place) not in self.tried:
            key = (policy, place.loss, place.batch)
            self.tried[policy, place] = Tried(*key, self.steps.compile(*key))
        return self.tried[policy, place]

    def compile(self, policy: Policy, place: Place, candidate: Candidate | None = None) -> None:
        """Compiles a step, and learns from it.

        A rejection ends the search of unrolled layers, and the plan for the scan stands. A first full-remat step that is rejected
        is to be tried at a quarter of its batch.

        Raises:
            CompileError: XLA rejects another step of a scan.
        """
        try:
            self.add(policy, place)
        except CompileError as error:
            if self.scanned:
                self.rejected = str(error)
            elif policy == NOTHING and place.loss not in self.curves and place.batch > self.batches[0]:
                self.start = at_most(self.batches, place.batch // SMALLER)
            else:
                raise
            return
        if candidate:
            self.candidates[policy, place] = candidate

    @property
    def num_bases(self) -> int:
        """Full-remat steps that were compiled, of unrolled layers those in a scan."""
        return sum(policy == NOTHING for policy, _ in (self.scanned or self).tried)

    def fitting(self, place: Place | None = None) -> Iterator[Tried]:
        """The compiled steps that fit, at a place or at the batches to choose among."""
        for (_, at), step in self.tried.items():
            if self.steps.fits(step.cost) and step.batch in self.batches and place in (None, at):
                yield step

    def best(self) -> Tried | None:
        """The fastest compiled step that fits; of equally fast ones, that of the fewest bytes."""
        return min(self.fitting(), key=lambda step: (-step.speed, step.cost.total_bytes), default=None)

    @property
    def best_speed(self) -> float:
        """Sequences per second of the best compiled step that fits. 0 for none."""
        return best.speed if (best := self.best()) else 0.0

    def own_choices(self) -> dict[tuple[Policy, Place], Candidate]:
        """The planner's own choices, those on which estimates disagree included."""
        return self.disputed | self.candidates

    @property
    def curves(self) -> dict[str, Curve]:
        """The full-remat step by batch, for each loss. Unrolled layers have those of a scan."""
        if self.scanned:
            return self.scanned.curves
        bases = ((at.loss, CurvePoint(at.batch, step.cost)) for (one, at), step in self.tried.items() if one == NOTHING)
        return self.once(("curves", self.num_bases), lambda: curves(bases, self.fixed_bytes))

    def is_compiled(self, place: Place) -> bool:
        """Whether the full-remat step was compiled at a place."""
        return any(point.batch == place.batch for point in self.curves[place.loss].points)

    def base(self, place: Place) -> Cost:
        """The full-remat step: compiled, or as its curve has it."""
        if self.scanned is None:
            return self.curves[place.loss].at(place.batch)
        # What is known of single values is that they lie in memory at the peak of a scan.
        if own := self.tried.get((NOTHING, place)):
            return replace(own.cost, moments=None)
        scan, stack_bytes = self.scanned.base(place), self.steps.stack_bytes
        return replace(scan, total_bytes=scan.total_bytes - stack_bytes, moments=None) if stack_bytes else scan

    @property
    def reference(self) -> int:
        """The batch at which a layer's problem is made."""
        return at_most(self.batches, REFERENCE_BATCH)

    def layer_at(self, batch: int) -> LayerEstimate:
        """The layer at a batch, by the estimate and the prices that compiled steps agree with."""
        return self.priced_at(batch)[0]

    def priced_at(self, batch: int) -> tuple[LayerEstimate, float]:
        """`layer_at`, and the seconds that unrolled layers take beyond a scan's, by compiled steps."""
        layer = self.estimate_at(batch)
        key = ("priced", id(layer), len(self.tried), len(self.candidates))
        return self.once(key, lambda: corrected(layer, [*self._seen()]))

    def estimate_at(self, batch: int) -> LayerEstimate:
        """The estimate of the layer that compiled steps agree with, with its own prices."""
        estimates = self.estimates_at(batch)
        if self.scanned:
            right = self.scanned.estimate_at(batch).assumption
            return next((one for one in estimates if one.assumption == right), estimates[0])
        return estimates[self.estimate]

    def estimates_at(self, batch: int) -> tuple[LayerEstimate, ...]:
        """All estimates of the layer. They may be other ones after a compile."""
        first = self.once(("estimate", batch, len(self.tried)), lambda: self.steps.layer_at(batch))
        # A compile that tells estimates apart may take minutes.
        return (first,) if self.most_that_fit else (first, *first.alternatives)

    def _seen(self) -> Iterator[Seen]:
        """The compiled candidates beside the seconds that were foreseen."""
        num_layers = self.steps.num_layers
        for (policy, place), candidate in self.own_choices().items():
            if step := self.tried.get((policy, place)):
                layer, step_s = self.estimate_at(place.batch), step.cost.step_s
                saved_s = num_layers * (layer.nothing_s - candidate.layer_s(layer))
                sizes = [num_layers * value.num_bytes for value in layer.problem.values]
                saved_bytes = {v: share * sizes[v] for v, share in candidate.shares.items()}
                is_beside_scan = self.scanned is not None and (NOTHING, place) not in self.tried
                yield Seen(saved_bytes, saved_s, step_s + saved_s - self.base(place).step_s, step_s, is_beside_scan)

    def corrections(self, place: Place) -> Corrections:
        """The budget at a place, and what the candidates that were compiled there say of bytes."""
        base, steps = self.base(place), self.steps
        found = Corrections(base.total_bytes, steps.budget_bytes, base.moments, allows_mixes=steps.allows_mixes)
        for (policy, at), candidate in self.candidates.items():
            if at == place:
                found = found.learn(candidate, self.tried[policy, at].cost.total_bytes)
        return found

    def beyond(self) -> dict[int, int]:
        """The bytes that candidates took beyond what was expected, at the reference batch.

        They are by the number of layers in a group, and those of the place that was chosen last.
        """
        for place in reversed(dict.fromkeys(place for _, place in self.candidates)):
            learned = self.corrections(place).beyond_bytes
            return {size: n * self.reference // place.batch for size, n in learned.items() if n}
        return {}
