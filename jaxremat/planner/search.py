"""The one loop of the planner: it compiles what promises the most, and learns from it.

This is a best-first search with optimistic bounds.

A candidate is a step: what the layers save, the loss, the batch and, by the search that it is from, the layout and the mesh.
The loop compiles one after the other. The next one is always the one of the most expected samples per second:

1. The full-remat step at a batch. Its bytes and seconds are those of everything around the layers. Before it is compiled,
   they are read off a straight line through those that are (`curve.py`). Two are compiled for each loss to begin with.
2. Where two estimates of a layer disagree, the policy on which they disagree most. Its seconds say which estimate is right.
3. The best choice of residuals in the bytes that are left (`candidates.py`), while it is expected to be faster than the
   fastest compiled step that fits, by what a compile is worth. The bytes of a compiled candidate correct what is expected of
   the next ones, at other batches too (`corrections.py`), and its seconds correct the prices of saving (`seconds.py`).
4. The named policies that may fit, at the batch of the best step. The model may be wrong about `none`, and XLA decides.
5. Where XLA compiles a step within a second or two, candidates near to compiled ones: they save one value more or less, and
   fit if the model is wrong by what a layer saves. Such steps have few kernels, and the model is wrong about how XLA fuses
   them.

The loop ends where no step is expected to be faster than the best compiled one that fits by what a compile is worth. The
answer is the fastest step that fits among all that was compiled. Of equally fast steps it has the fewest bytes.

Example: compiled under `nothing`, batch 8 takes 40 GiB and batch 40 takes 104 GiB. So in 100 GiB up to 38 sequences fit, of
which 18 are expected to be the fastest. The full-remat step of 18 is compiled: 60 GiB and 250 ms, of which the layers spend
50 ms on recomputing. In the 40 GiB that are left, saving `a` and `c` is expected to take 20 ms less. That step is compiled,
and takes 102 GiB. So the next candidates are expected to take 2 GiB more, and saving `a` alone, 15 ms less, is compiled: 90
GiB. `none` would take 180 GiB and isn't tried. The answer is `save:a`.

Unrolled layers take from a scan of the same layers what both have in common: the full-remat step at each batch, and the
right estimate. A scan copies what it saves into stacks and out of them, and it compiles several times faster. So it is
searched first. On a mesh a scan stores the stack of the layers' gradients from the beginning of the backward pass, and
unrolled layers don't. There (`Steps.has_own_base`) the unrolled full-remat step is compiled too.

Upper bounds of the speed (`Search.bounds`) are what meshes are compared by (`race.py`). No plan is faster than the
full-remat step without the seconds of recomputing, plus the least seconds that any choice of residuals takes in the bytes
that are left (`hull.py`). There the first full-remat step (`Search.start`) has a batch that no step exceeds, or a quarter of
it where XLA rejects a step so large. The bound assumes that smaller batches are as fast for each sequence, and that their
bytes lie on the line from the state. Both make it too high.
"""

import bisect
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxremat.errors import CompileError
from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.hull import lower_bound
from jaxremat.planner.candidates import best_candidate, candidate_of, fastest, named_decision, named_policies, near
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.curve import Curve, CurvePoint
from jaxremat.planner.estimate import Candidate, LayerEstimate
from jaxremat.planner.seconds import Seen, corrected
from jaxremat.planner.steps import GROUPS, SPARSE, Cost, Steps
from jaxremat.policy.spec import NONE, NOTHING, Policy
from jaxremat.search.batch import spaced

REFERENCE_BATCH = 8  # at which a layer's problem is made where the batch is free; other batches scale it
_MAX_BASES = 6  # full-remat steps compiled where the batch is free, beside two for each loss
_GROWTH = 4  # a full-remat step has at most so many times the batch of the largest one before
_MAX_UNROLLED_BASES = 3  # of a scan, for the unrolled layers
_MAX_CANDIDATES = 3  # candidates compiled at a batch and loss
_MAX_ALONE = 6  # the same where the batch is given
_MAX_PLACES = 2  # batches and losses at which candidates are compiled
_MAX_LOOKED_AT = 48  # number of batches for which the best candidate is searched
SMALLER = 4  # after a rejection by XLA, the batch is so many times smaller
_MAX_NEAR = 12  # candidates near to compiled ones that are compiled where steps are small
_PATIENCE = 5  # last compiled steps, among which the fastest one is while these are compiled
_SAME_SPEED = 3e-3  # share of a step's seconds by which two estimates of a layer count as equal
_WORTH = 5e-3  # share of the seconds that another step must save, by the model, to be compiled
_ROOMY = 1.1  # share of the budget that a named policy may be expected to take to be compiled
_SURELY_FITS = 0.97  # share of the budget that `none` is expected to take where it is compiled before any candidate


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


@dataclass(frozen=True)
class Proposal:
    """A step to compile. `candidate` is the planner's own choice, where it is one."""

    policy: Policy
    place: Place
    candidate: Candidate | None = None


@dataclass
class Search:
    """The search for the fastest step of one layout on one mesh.

    `next` proposes a step, and `compile` compiles it.

    Attributes:
        steps: the steps to plan.
        losses: the losses to choose among.
        batches: the batches to choose among, in rising order. One that is given, or those at which a step could fit.
        fixed_bytes: bytes of the parameters and the optimizer state.
        named: whether named policies may be compiled.
        scanned: of unrolled layers, the search with the same layers in a scan.
        tried: every compiled step, in order.
        curves: the full-remat step by batch, for each loss that has one.
        corrections: what compiled candidates say of bytes, by the place at which they were compiled.
        candidates: those of the planner's own choices that were compiled.
        disputed: the candidates on which two estimates of a layer disagree.
        estimate: which of the estimates of a layer is right: 0 for the first one.
        num_judged: alternatives that were compared with it.
        current: the place at which candidates are compiled.
        finished: the places at which no further candidate is worth a compile.
        num_bases: full-remat steps that were compiled for this search, those of a scan included.
        num_near: candidates near to compiled ones that were compiled.
        start: the batch of the first full-remat step. 0 for the usual one.
        rejected: why XLA rejected a step, which ended the search. Empty if it didn't.
        memo: what was computed from the model in its present state.
    """

    steps: Steps
    losses: Sequence[str]
    batches: Sequence[int]
    fixed_bytes: int = 0
    named: bool = True
    scanned: "Search | None" = None
    tried: dict[tuple[Policy, str, int], Tried] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    corrections: dict[Place, Corrections] = field(default_factory=dict)
    candidates: dict[tuple[Policy, Place], Candidate] = field(default_factory=dict)
    disputed: dict[tuple[Policy, Place], Candidate] = field(default_factory=dict)
    estimate: int = 0
    num_judged: int = 0
    current: Place | None = None
    finished: list[Place] = field(default_factory=list)
    num_bases: int = 0
    num_near: int = 0
    start: int = 0
    rejected: str = ""
    memo: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.scanned:
            self.curves = self.scanned.curves

    # What is known.

    @property
    def reference(self) -> int:
        """The batch at which a layer's problem is made."""
        return at_most(self.batches, REFERENCE_BATCH)

    def layer_at(self, batch: int) -> LayerEstimate:
        """The layer at a batch, by the estimate that compiled steps agree with."""
        return self._priced_at(batch)[0]

    def _priced_at(self, batch: int) -> tuple[LayerEstimate, float]:
        """`layer_at`, and the seconds that unrolled layers take beyond a scan's, by compiled steps."""
        layer = self._estimate_at(batch)
        key = ("priced", id(layer), len(self.tried), len(self.candidates))
        if key not in self.memo:
            self.memo[key] = corrected(layer, [*self._seen()])
        return self.memo[key]

    def _estimate_at(self, batch: int) -> LayerEstimate:
        """The estimate of the layer that compiled steps agree with, with its own prices."""
        estimates = self._estimates_at(batch)
        if self.scanned:
            right = self.scanned._estimate_at(batch).assumption
            return next((one for one in estimates if one.assumption == right), estimates[0])
        return estimates[self.estimate]

    def _seen(self) -> Iterator[Seen]:
        """The compiled candidates beside the seconds that were foreseen."""
        num_layers = self.steps.num_layers
        for (policy, place), candidate in (self.disputed | self.candidates).items():
            if step := self.tried.get((policy, place.loss, place.batch)):
                layer, step_s = self._estimate_at(place.batch), step.cost.step_s
                values, shares = layer.problem.values, candidate.shares
                foreseen_s = self.base(place).step_s - num_layers * (layer.nothing_s - candidate.layer_s(layer))
                saved_bytes = {v: num_layers * share * values[v].num_bytes for v, share in shares.items()}
                is_beside_scan = (NOTHING, place.loss, place.batch) not in self.tried
                yield Seen(saved_bytes, step_s - foreseen_s, step_s, is_beside_scan)

    def candidate_at(self, policy: Policy, place: Place) -> Candidate | None:
        """The planner's own choice that was compiled as this policy, if it is one."""
        return self.candidates.get((policy, place)) or self.disputed.get((policy, place))

    def _estimates_at(self, batch: int) -> tuple[LayerEstimate, ...]:
        """All estimates of the layer. They may be other ones after a full-remat step."""
        key = (batch, self.num_bases)
        if key not in self.memo:
            first = self.steps.layer_at(batch)
            others = () if self.steps.most_that_fit else first.alternatives  # a compile that tells them apart takes minutes
            self.memo[key] = (first, *others)
        return self.memo[key]

    @property
    def first_batch(self) -> int:
        """The batch of the first full-remat step."""
        return self.start or at_most(self.batches, REFERENCE_BATCH)

    def base(self, place: Place) -> Cost:
        """The full-remat step: compiled, or as its curve has it."""
        key = (NOTHING, place.loss, place.batch)
        if own := self.tried.get(key):
            # What is known of single values is that they lie in memory at the peak of a scan.
            return replace(own.cost, moments=None) if self.scanned else own.cost
        scanned = self.scanned and self.scanned.tried.get(key)
        return scanned.cost if scanned else self.curves[place.loss].at(place.batch)

    def fitting(self, place: Place | None = None) -> Iterator[Tried]:
        """The compiled steps that fit, at a place or at the batches to choose among."""
        fits = (step for step in self.tried.values() if self.steps.fits(step.cost) and step.batch in self.batches)
        return (step for step in fits if place is None or (step.loss, step.batch) == (place.loss, place.batch))

    def best(self) -> Tried | None:
        """The fastest compiled step that fits; of equally fast ones, that of the fewest bytes."""
        return min(self.fitting(), key=lambda step: (-step.speed, step.cost.total_bytes), default=None)

    def least(self) -> Tried:
        """The compiled step of the fewest bytes, at the smallest batch that was compiled."""
        return min(self.tried.values(), key=lambda step: (step.batch, step.cost.total_bytes))

    # The next step.

    def next(self, named: bool = False) -> Proposal | None:
        """The step that is expected to be the fastest, of those that are worth a compile.

        None where there is none. With `named` the named policies are among them.
        """
        if self.rejected:
            return None
        if self.scanned and not self.curves:
            return None
        for loss in () if self.scanned else self.losses:
            if batch := self._start_of_curve(loss):
                return Proposal(NOTHING, Place(loss, batch))
        if len(self.batches) > 1 and (dispute := self._dispute()):
            return dispute
        while len(self.finished) < self._max_places:
            place, best = self.current or self.best_place(), self.best()
            if place is None:
                return None if self.finished else self._of_least_bytes()
            if self.finished and (place in self.finished or best is None or place.speed <= best.speed * (1 + _WORTH)):
                break
            if proposal := self._at(place):
                return proposal
            self.finished.append(place)
            self.current = None
        best = self.best()
        place = Place(best.loss, best.batch) if best else self.finished[0]
        return (self._named(place, _ROOMY) or self._near(place)) if named else None

    def _start_of_curve(self, loss: str) -> int | None:
        """The batch of the first or the second full-remat step under a loss.

        None where its curve is known. Each further sequence takes at most what the first ones take on average, and at least the
        inputs of its layers. The second batch is guessed by the geometric mean of the two.
        """
        if loss not in self.curves:
            return self.first_batch
        points = [point for point in self.curves[loss].accepted if point.batch]
        if len(points) != 1 or self.start or len(self.batches) == 1 or not self.steps.fits(points[0].cost):
            return None
        low, first = points[0].batch, points[0].cost
        rejected = min((point.batch for point in self.curves[loss].points if point.cost.is_rejected), default=math.inf)
        left_bytes, most = self.steps.budget_bytes - first.total_bytes, (first.total_bytes - self.fixed_bytes) / low
        least = self.steps.num_layers * _bytes_per_sequence(self.steps, self.reference)
        guess = max(2 * low, low + left_bytes / math.sqrt(max(1.0, most * least)))
        high = at_most(self.batches, min(guess, (low + rejected) / 2))
        return high if high > low else None

    def _at(self, place: Place) -> Proposal | None:
        """The next step at a place: full remat, and then the best candidates.

        Where unrolled layers have room for all values, `none` comes before the candidates. So it does where few steps may be
        compiled, in a scan too.
        """
        layer = self.layer_at(place.batch)
        needs_own = self.steps.has_own_base and self.scanned and (NOTHING, place.loss, place.batch) not in self.tried
        if needs_own:
            return Proposal(NOTHING, place)
        if not self._is_compiled(place):
            last = self.curves[place.loss].points[-1].batch  # a line that is nearly flat leads anywhere
            next_batch = self.batches[min(bisect.bisect_right(self.batches, last), len(self.batches) - 1)]
            most = max(next_batch, at_most(self.batches, _GROWTH * last))
            return Proposal(NOTHING, replace(place, batch=min(place.batch, most)))
        if (self.steps.most_that_fit or not layer.in_scan) and self.named and (none := self._named(place, _SURELY_FITS)):
            return none
        fits = {step.policy: step.cost.step_s for step in self.fitting(place)}
        here = [policy for policy, at in self.candidates if at == place]
        if not here and (layer.in_scan or NONE not in fits) and (dispute := self._dispute()):
            return dispute
        if len(here) == self._max_candidates:
            return None
        # The disputed step alone may raise all prices. What the layer's own prices promise is tried once all the same.
        priced = [self._priced_at(place.batch), *([] if here else [(self._estimate_at(place.batch), 0.0)])]
        return next(filter(None, (self._worth_it(place, fits, *one) for one in priced)), None)

    def _worth_it(self, place: Place, fits: dict[Policy, float], layer: LayerEstimate, layout_s: float) -> Proposal | None:
        """The best candidate by the prices of a layer, if it is worth a compile."""
        base, num_layers = self.base(place), self.steps.num_layers
        candidate = best_candidate(layer, num_layers, self._corrections(place))
        if candidate is None or (candidate.policy, place) in self.candidates:
            return None
        foreseen_s = base.step_s + layout_s - num_layers * layer.nothing_s
        fastest = [*fits.values()]
        if NONE in fits and not layer.in_scan:  # what is wrong about both seconds makes no difference
            fastest.append(foreseen_s + num_layers * evaluate(layer.problem, named_decision(layer, NONE)).cost_s)
        if fastest and min(fastest) - foreseen_s - candidate.cost_s < _WORTH * base.step_s:
            return None
        return Proposal(candidate.policy, place, candidate)

    def _corrections(self, place: Place) -> Corrections:
        base = self.base(place)
        new = Corrections(base.total_bytes, self.steps.budget_bytes, base.moments, allows_mixes=self._allows_mixes)
        return self.corrections.get(place) or new

    @property
    def _allows_mixes(self) -> bool:
        """Whether layers may have different policies. XLA compiles each layer of a mix's group."""
        return self.steps.most_that_fit is None

    def _named(self, place: Place, share: float) -> Proposal | None:
        """The next named policy that is expected to take at most this share of the budget.

        Of unrolled layers it is `none`, and if that fits, no other one: none takes fewer operations.
        """
        layer, policies = self.layer_at(place.batch), [*named_policies(self.layer_at(place.batch))]
        none = self.tried.get((NONE, place.loss, place.batch))
        if self.scanned or share < 1 or (not layer.in_scan and none and self.steps.fits(none.cost)):
            policies = [policy for policy in policies if policy == NONE]
        limit_bytes = share * self.steps.budget_bytes - self.base(place).total_bytes
        new = (policy for policy in policies if (policy, place.loss, place.batch) not in self.tried)
        found = next((policy for policy in new if self._named_bytes(place, policy) <= limit_bytes), None)
        return found and Proposal(found, place)

    def _near(self, place: Place) -> Proposal | None:
        """Where steps are small: the fastest candidate of those that are near to compiled ones.

        None where none of the last ones was the fastest step.
        """
        here = [step for step in self.tried.values() if (step.loss, step.batch) == (place.loss, place.batch)]
        if not self._near_left or self.best() not in here[-_PATIENCE:]:
            return None
        known = [one.decision for (_, at), one in (self.disputed | self.candidates).items() if at == place]
        found = near(self.layer_at(place.batch), self.steps.num_layers, self._corrections(place), known)
        candidate = fastest(one for one in found if (one.policy, place.loss, place.batch) not in self.tried)
        if candidate is None:
            return None
        self.num_near += 1
        return Proposal(candidate.policy, place, candidate)

    def _named_bytes(self, place: Place, policy: Policy) -> int:
        """Bytes of a named policy beyond full remat's."""
        layer, num_layers = self.layer_at(place.batch), self.steps.num_layers
        decision = named_decision(layer, policy)
        saved = dict.fromkeys(named_policies(layer).get(policy, ()), 1.0)
        return self._corrections(place).at_peak(layer, decision, saved, num_layers)

    def _of_least_bytes(self) -> Proposal | None:
        """The policies of the least bytes, at the smallest batch, where none is expected to fit."""
        if self.scanned or self.best():
            return None
        batch = self.batches[0]
        loss = min(self.losses, key=lambda loss: self.curves[loss].at(batch).total_bytes)
        for policy in (NOTHING, *([GROUPS] if self._has_small_groups(batch) else []), self.steps.least[-1]):
            if (policy, loss, batch) not in self.tried:
                return Proposal(policy, Place(loss, batch))
        return None

    def _has_small_groups(self, batch: int) -> bool:
        """Whether `every:sqrt` is expected to take fewer bytes than `nothing`.

        It has the residuals of one group of layers and the inputs of all groups, and `nothing` the inputs of all layers. It takes
        fewer with the many small steps of a loop over time. Each step is then computed twice, as under `nothing`, where
        `every:sqrt+nothing` computes it three times.
        """
        layer, num_layers = self.layer_at(batch), self.steps.num_layers
        if SPARSE not in self.steps.least or not self.steps.allows(GROUPS):
            return False
        size = GROUPS.size(num_layers)
        residual_bytes = sum(layer.problem.values[v].num_bytes for v in named_decision(layer, NONE).save)
        input_bytes = batch * _bytes_per_sequence(self.steps, batch)
        return size * residual_bytes + num_layers / size * input_bytes < num_layers * input_bytes

    # Compiling.

    def compile(self, proposal: Proposal) -> None:
        """Compiles a step, and learns from it.

        A first full-remat step that XLA rejects is proposed again at a quarter of its batch.

        Raises:
            CompileError: XLA rejects another step.
        """
        policy, place = proposal.policy, proposal.place
        self.num_bases += policy == NOTHING
        if policy == NOTHING and self.scanned and not self._is_compiled(place):
            return self.scanned.compile(proposal)
        try:
            cost = self.add(policy, place).cost
        except CompileError:
            if policy != NOTHING or place.loss in self.curves or place.batch == self.batches[0]:
                raise
            self.start = at_most(self.batches, place.batch // SMALLER)
            return None
        if policy == NOTHING and not self.scanned:
            self._extend(place, cost)
        if candidate := proposal.candidate:
            self.current = place
            self.corrections[place] = self._corrections(place).learn(candidate, cost.total_bytes)
            self.candidates[policy, place] = candidate
        return None

    def attempt(self, proposal: Proposal) -> None:
        """`compile`, where a rejection ends the search of unrolled layers.

        The plan for the scan stands.
        """
        try:
            self.compile(proposal)
        except CompileError as error:
            if self.scanned is None:
                raise
            self.rejected = str(error)

    def add(self, policy: Policy, place: Place) -> Tried:
        """The step, compiled once."""
        key = (policy, place.loss, place.batch)
        if key not in self.tried:
            self.tried[key] = Tried(*key, self.steps.compile(*key))
        return self.tried[key]

    def _extend(self, place: Place, cost: Cost) -> None:
        """Adds a compiled step to the curve of its loss.

        The first one begins at the state, and with two that XLA compiled, the curve does without.
        """
        if place.loss not in self.curves:
            start = CurvePoint(0, Cost(self.fixed_bytes, 0.0))
            self.curves[place.loss] = Curve((start, CurvePoint(place.batch, cost)))
            return
        curve = self.curves[place.loss].with_point(place.batch, cost)
        has_two = sum(point.batch > 0 for point in curve.accepted) > 1
        self.curves[place.loss] = Curve(tuple(point for point in curve.points if point.batch)) if has_two else curve

    # Estimates of a layer.

    def _dispute(self) -> Proposal | None:
        """The policy on which the right estimate so far and the next one disagree.

        None where all were compared.

        Of two estimates, that is right whose saved seconds are nearer to those of the compiled step.
        """
        points = () if self.scanned else self.curves[self.losses[0]].points
        at = next((point.batch for point in points if point.batch and self.steps.fits(point.cost)), None)
        if at is None:
            return None
        others, place, num_layers = self._estimates_at(at)[1:], Place(self.losses[0], at), self.steps.num_layers
        while self.num_judged < len(others):
            first, other, base = self._estimate_at(at), others[self.num_judged], self.base(place)
            most = _largest_dispute(first, other, num_layers)
            self.disputed[most.policy, place] = most
            saved_s, other_s = (num_layers * (one.nothing_s - most.layer_s(one)) for one in (first, other))
            if abs(saved_s - other_s) >= _SAME_SPEED * base.step_s:
                done = self.tried.get((most.policy, place.loss, place.batch))
                if done is None:
                    return Proposal(most.policy, place)
                compiled_s = base.step_s - done.cost.step_s
                if abs(compiled_s - other_s) < abs(compiled_s - saved_s):
                    self.estimate = self.num_judged + 1
            self.num_judged += 1
        return None

    # The place.

    def best_place(self) -> Place | None:
        """The loss and the batch of the most sequences per second, by the model.

        A bound says within microseconds how fast each could be. The best candidate is searched for those that were compiled, and
        for some of the highest bounds. One that was compiled is taken unless another one is faster by what a compile is worth.

        Returns:
            None where not even the smallest batch is expected to fit.
        """
        layer, num_layers, beyond = self.layer_at(self.reference), self.steps.num_layers, self._beyond()
        key = (id(layer), tuple(self.curves.items()), tuple(beyond.items()), self._bases_left > 0)
        if key not in self.memo:
            self.memo[key] = layer, self._best_place(layer, num_layers, beyond)
        return self.memo[key][1]

    def _best_place(self, layer: LayerEstimate, num_layers: int, beyond: dict[int, int]) -> Place | None:
        nothing_s = num_layers * layer.hull[0].cost_s
        looked_at = self._bounds(layer)
        looked_at.sort(key=lambda bound: (-bound.speed, bound.batch))
        compiled = [bound for bound in looked_at if self._is_compiled(bound)]
        left = 0 if self._bases_left <= 0 else _MAX_LOOKED_AT
        reached: list[Place] = []
        for bound in (*compiled, *looked_at[:left]):
            if reached and bound.speed <= _enough(reached):
                continue
            base = self.base(bound)
            left_bytes = int((self.steps.budget_bytes - base.total_bytes) * self.reference / bound.batch)
            best = best_candidate(
                layer, num_layers, Corrections(0, left_bytes, None, beyond, allows_mixes=self._allows_mixes)
            )
            saved_s = nothing_s - best.cost_s if best else 0.0
            reached.append(replace(bound, speed=self._speed(bound.batch, base.step_s, saved_s)))
        if not reached:
            return None
        equal = [place for place in reached if place.speed >= _enough(reached)]
        return min(equal, key=lambda place: (not self._is_compiled(place), place.batch, -place.speed, place.loss))

    def bounds(self) -> Iterator[float]:
        """Searches, and yields after each compile the most sequences per second of any step.

        The named policies are left out.

        It is 0 where no full-remat step fits.
        """
        least = math.inf
        for _ in find([self], named=False):
            found = [place.speed for one in self._estimates_at(self.reference) for place in self._bounds(one)]
            least = min(least, max(found, default=0.0)) if self.curves else least
            yield least

    def _bounds(self, layer: LayerEstimate) -> list[Place]:
        """The places that are expected to fit, with the highest speed that any plan can reach there."""
        num_layers, found = self.steps.num_layers, list[Place]()
        nothing_s = num_layers * layer.hull[0].cost_s
        for loss, curve in self.curves.items():
            for batch in self.batches:
                base = curve.at(batch)
                if base.total_bytes > self.steps.budget_bytes:
                    break
                left_bytes = int((self.steps.budget_bytes - base.total_bytes) * self.reference / batch)
                saved_s = nothing_s - lower_bound(layer.hull, num_layers, left_bytes)
                found.append(Place(loss, batch, self._speed(batch, base.step_s, saved_s)))
        return found

    def _speed(self, batch: int, step_s: float, saved_s: float) -> float:
        return batch / (step_s - batch / self.reference * saved_s)

    def _beyond(self) -> dict[int, int]:
        """The bytes that the last candidates took beyond what was expected, at the reference batch.

        They are by the number of layers in a group.
        """
        for place, learned in reversed(self.corrections.items()):
            return {size: n * self.reference // place.batch for size, n in learned.beyond_bytes.items() if n}
        return {}

    def _is_compiled(self, place: Place) -> bool:
        return self.curves[place.loss].is_compiled(place.batch)

    # How many compiles are to come.

    @property
    def _max_candidates(self) -> int:
        return _MAX_CANDIDATES if self.scanned or len(self.batches) > 1 else _MAX_ALONE

    @property
    def _max_places(self) -> int:
        return 1 if self.scanned or len(self.batches) == 1 else _MAX_PLACES

    @property
    def _bases_left(self) -> int:
        """How many further full-remat steps may be compiled."""
        if len(self.batches) == 1:
            return 0
        return _MAX_UNROLLED_BASES - self.num_bases if self.scanned else _MAX_BASES + 2 * len(self.losses) - self.num_bases

    @property
    def _near_left(self) -> int:
        """How many further candidates near to compiled ones may be compiled."""
        is_small = all(step.cost.is_small for step in self.tried.values())
        return _MAX_NEAR - self.num_near if is_small and not self.scanned else 0

    def most_left(self, named: bool) -> int:
        """How many compiles are to come at most, with those of the named policies or without."""
        least = 1 + len(named_policies(self.layer_at(self.reference))) if named and not self.scanned else 1
        if self.scanned:
            return max(0, self._bases_left) + self.steps.has_own_base + _MAX_CANDIDATES - len(self.candidates) + least
        smaller, start = 0, self.first_batch
        while start > self.batches[0] and len(self.curves) < len(self.losses):
            smaller, start = smaller + 1, at_most(self.batches, start // SMALLER)
        bases = smaller + (max(0, self._bases_left) if len(self.batches) > 1 else len(self.losses) - len(self.curves))
        candidates = self._max_places * self._max_candidates - len(self.candidates)
        disputes = len(self._estimates_at(self.reference)) - 1 - self.num_judged
        return bases + disputes + max(0, candidates) + least + named * self._near_left


def find(searches: Sequence[Search], named: bool = True) -> Iterator[None]:
    """Compiles what promises the most, until no step is worth it. Yields after each compile.

    The searches are those of a scan and of the same layers, unrolled. The named policies are compiled in the faster layout.
    What was compiled before is known from the start. After `Steps.most_that_fit` steps that fit, the search ends.
    """
    for search in searches:
        search.named = named or search.scanned is not None
        for policy, loss, batch in search.steps.known:
            if batch in search.batches and search.steps.allows(policy):
                search.add(policy, Place(loss, batch))
    most_that_fit = searches[0].steps.most_that_fit
    most, known = most_that_fit or math.inf, _num_fitting(searches)
    while _num_fitting(searches) - known < most:
        ahead = max(searches, key=lambda search: best.speed if (best := search.best()) else 0.0)
        steps = [*((one, one.scanned is not None) for one in searches), *([(ahead, True)] if named else [])]
        search, step = next(((one, step) for one, has_named in steps if (step := one.next(has_named))), (ahead, None))
        if step is None:
            return
        if most_that_fit is None:  # else, steps that are rejected in seconds are most of those that `most_left` counts
            searches[0].steps.expect(sum(one.most_left(named) for one in searches))
        search.attempt(step)
        yield


def _num_fitting(searches: Sequence[Search]) -> int:
    return sum(search.steps.fits(step.cost) for search in searches for step in search.tried.values())


def at_most(batches: Sequence[int], limit: float) -> int:
    """The largest batch up to the limit, or the smallest batch if all are above the limit."""
    return batches[max(0, bisect.bisect_right(batches, limit) - 1)]


def possible(steps: Steps, fixed_bytes: int, batches: Sequence[int]) -> Sequence[int]:
    """The batches at which a step could fit, and the smallest one.

    Under `nothing` a step saves the inputs of its layers. Where there are very many batches, some are left out.
    """
    batches = spaced(batches)
    least_bytes = max(1.0, steps.num_layers * _bytes_per_sequence(steps, at_most(batches, REFERENCE_BATCH)))
    return batches[: bisect.bisect_right(batches, at_most(batches, (steps.budget_bytes - fixed_bytes) / least_bytes))]


def _bytes_per_sequence(steps: Steps, batch: int) -> float:
    """Bytes of a layer's input for one sequence, without the layer's parameters."""
    small, large = (steps.layer_at(size).input_bytes for size in (batch, 2 * batch))
    return (large - small) / batch


def _largest_dispute(layer: LayerEstimate, other: LayerEstimate, num_layers: int) -> Candidate:
    """The candidate of the hulls of `other` on whose saved seconds two estimates differ most."""

    def difference_s(candidate: Candidate) -> float:
        return abs((layer.nothing_s - candidate.layer_s(layer)) - (other.nothing_s - candidate.layer_s(other)))

    found = (candidate_of(other, one, point, num_layers) for one in other.families for point in one.hull)
    return max(found, key=difference_s)


def _enough(reached: list[Place]) -> float:
    """The most sequences per second that are reached, less what a compile is worth."""
    most = max(place.speed for place in reached)
    return most - _WORTH * abs(most)
