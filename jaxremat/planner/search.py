"""The one loop of the planner: it compiles what promises the most, and learns from it.

This is a best-first search with optimistic bounds. A candidate is a step: what the layers save, the loss, the batch and, by the
search that it is from, the layout and the mesh. The loop (`find`) compiles one after the other. The next one is always the one
of the most expected samples per second:

1. The full-remat step at a batch. Its bytes and seconds are those of everything around the layers. Before it is compiled,
   they are read off a straight line through those that are (`curve.py`). Two are compiled for each loss to begin with.
2. Where two estimates of a layer disagree, the policy on which they disagree most. Its seconds say which estimate is right.
3. The best choice of residuals in the bytes that are left (`candidates.py`), while it is expected to be faster than the
   fastest compiled step that fits, by what a compile is worth. The bytes of a compiled candidate correct what is expected of
   the next ones, at other batches too (`corrections.py`), and its seconds those of recomputing and saving (`seconds.py`).
4. The named policies that may fit, at the batch of the best step. The model may be wrong about `none`, and XLA decides.
5. Where XLA compiles a step within a second or two, candidates near to compiled ones: they save one value more or less, and
   fit if the model is wrong by what a layer saves.

The loop ends where no step is expected to be faster than the best compiled one that fits by what a compile is worth. That one is
the answer: the fastest, and of equally fast steps the one of the fewest bytes.

Example: compiled under `nothing`, batch 8 takes 40 GiB and batch 40 takes 104 GiB. So in 100 GiB up to 38 sequences fit, of
which 18 are expected to be the fastest. The full-remat step of 18 is compiled: 60 GiB and 250 ms, of which the layers spend
50 ms on recomputing. In the 40 GiB that are left, saving `a` and `c` is expected to take 20 ms less. That step is compiled,
and takes 102 GiB. So the next candidates are expected to take 2 GiB more, and saving `a` alone, 15 ms less, is compiled: 90
GiB. `none` would take 180 GiB and isn't tried. The answer is `save:a`.

Unrolled layers take from a scan of the same layers what both have in common: the full-remat step at each batch, and the
right estimate. A scan compiles several times faster, and so it is searched first. On a mesh a scan stores the stack of the
layers' gradients from the beginning of the backward pass, and unrolled layers don't (`Steps.stack_bytes`).
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxremat.knapsack.evaluate import evaluate
from jaxremat.planner.candidates import candidate_of, candidates, fastest, named_decision, named_policies, near
from jaxremat.planner.estimate import Candidate, LayerEstimate
from jaxremat.planner.known import SMALLER, Known, Place
from jaxremat.planner.places import WORTH, best_place, highest_speeds
from jaxremat.planner.steps import GROUPS, SPARSE
from jaxremat.policy.spec import NONE, NOTHING, Policy
from jaxremat.search.batch import at_most

_MAX_BASES = 6  # full-remat steps compiled where the batch is free, beside two for each loss
_GROWTH = 4  # a full-remat step has at most so many times the batch of the largest one before
_MAX_UNROLLED_BASES = 3  # of a scan, for the unrolled layers
_MAX_CANDIDATES = 3  # candidates compiled at a batch and loss
_MAX_ALONE = 6  # the same where the batch is given
_MAX_PLACES = 2  # batches and losses at which candidates are compiled
_MAX_NEAR = 12  # candidates near to compiled ones that are compiled where steps are small
_PATIENCE = 5  # last compiled steps that fit, among which the fastest one is while these are compiled
_SAME_SPEED = 3e-3  # share of a step's seconds by which two estimates of a layer count as equal
_ROOMY = 1.1  # share of the budget that a named policy may be expected to take to be compiled
_SURELY_FITS = 0.97  # share of the budget that `none` is expected to take where it is compiled before any candidate


def find(layouts: Sequence[Known], named: bool = True) -> Iterator[None]:
    """Compiles what promises the most, until no step is worth it. Yields after each compile.

    The layouts are a scan and the same layers, unrolled. The named policies are compiled in the faster one. What was compiled
    before is known from the start. After `Known.most_that_fit` steps that fit, the search ends.
    """
    searches = [Search(known, named or known.scanned is not None) for known in layouts]
    for known in layouts:
        for policy, loss, batch in known.steps.known:
            if batch in known.batches and known.steps.allows(policy):
                known.add(policy, Place(loss, batch))
    first, num_known = layouts[0], _num_fitting(layouts)
    while _num_fitting(layouts) - num_known < (first.most_that_fit or math.inf):
        ahead = max(searches, key=lambda search: best.speed if (best := search.known.best()) else 0.0)
        turns = [*((one, one.known.scanned is not None) for one in searches), *([(ahead, True)] if named else [])]
        found = next(((one.known, step) for one, has_named in turns if (step := one.next(has_named))), None)
        if found is None:
            return
        if first.most_that_fit is None:  # else, steps that are rejected in seconds are most of those that `most_left` counts
            first.steps.expect(sum(one.most_left() for one in searches))
        known, step = found
        known.begin(step.policy, step.place)
        guesses = ((one.known, guess) for one in searches for guess in one.guesses())
        while first.steps.may_guess() and (guess := next(guesses, None)):
            guess[0].begin(guess[1].policy, guess[1].place)
        known.compile(step.policy, step.place, step.candidate)
        yield


def _num_fitting(layouts: Sequence[Known]) -> int:
    return sum(1 for known in layouts for _ in known.fitting())


def speed_bounds(known: Known) -> Iterator[float]:
    """Searches one layout, and yields after each compile the most sequences per second.

    No step has more. Meshes are compared by these bounds. The first full-remat step (`Known.start`) has a batch that no step
    exceeds, or a quarter of it where XLA rejects a step so large. A bound assumes that smaller batches are as fast for each
    sequence, and that their bytes lie on the line from the state. Both make it too high. The named policies are left out. It is
    0 where no full-remat step fits.
    """
    least = math.inf
    for _ in find([known], named=False):
        if known.curves:
            estimates = known.estimates_at(known.reference)
            found = [place.speed for layer in estimates for place in highest_speeds(known, layer)]
            least = min(least, max(found, default=0.0))
        yield least


@dataclass(frozen=True)
class Proposal:
    """A step to compile. `candidate` is the planner's own choice, where it is one."""

    policy: Policy
    place: Place
    candidate: Candidate | None = None


@dataclass
class Search:
    """The search for the fastest step of one layout on one mesh: what to compile next.

    Attributes:
        known: the steps, and what is known of them.
        named: whether named policies may be compiled.
        current: the place at which candidates are compiled.
        finished: the places at which no further candidate is worth a compile.
        num_judged: alternatives that were compared with the right estimate.
        num_near: candidates near to compiled ones that were proposed.
    """

    known: Known
    named: bool = True
    current: Place | None = None
    finished: list[Place] = field(default_factory=list)
    num_judged: int = 0
    num_near: int = 0

    def next(self, has_named: bool) -> Proposal | None:
        """The step that is expected to be the fastest, of those that are worth a compile.

        With `has_named` the named policies are among them.
        """
        known = self.known
        if known.rejected:
            return None
        for loss in () if known.scanned else known.losses:
            if batch := self._start_of_curve(loss):
                return Proposal(NOTHING, Place(loss, batch))
        if len(known.batches) > 1 and (dispute := self._dispute()):
            return dispute
        while len(self.finished) < self._max_places:
            place, best = self.current or best_place(known, self._bases_left > 0), known.best()
            if place is None:
                return None if self.finished else self._of_least_bytes()
            if self.finished and (place in self.finished or best is None or place.speed <= best.speed * (1 + WORTH)):
                break
            if proposal := self._at(place):
                self.current = place if proposal.candidate else self.current
                return proposal
            self.finished.append(place)
            self.current = None
        best = known.best()
        place = Place(best.loss, best.batch) if best else self.finished[0]
        return (self._named(place, _ROOMY) or self._near(place)) if has_named else None

    def guesses(self) -> Iterator[Proposal]:
        """Steps that are likely to be proposed, whatever the present one turns out to take."""
        known, steps = self.known, self.known.steps
        if known.scanned:
            if any(steps.fits(known.scanned.tried[one].cost) for one in known.scanned.candidates):
                yield from filter(None, [replace(self, finished=[*self.finished]).next(False)])
            return
        for loss in known.losses:
            if batch := self._start_of_curve(loss):
                yield Proposal(NOTHING, Place(loss, batch))
        place, layer = Place(known.losses[0], known.reference), known.layer_at(known.reference)
        saved_bytes = steps.num_layers * layer.problem.num_bytes(named_decision(layer, NONE).save)
        if place.loss in known.curves:
            is_free = len(known.batches) > 1
            yield from filter(None, [self._dispute() if is_free else self._named(place, _ROOMY) if self.named else None])
        elif len(known.batches) == 1 and self.named and known.fixed_bytes + saved_bytes <= steps.budget_bytes:
            yield Proposal(NONE, place)

    def _start_of_curve(self, loss: str) -> int | None:
        """The batch of a loss's first or second full-remat step. None if its curve is known.

        A further sequence takes at most what the first ones take on average, and at least its layers' inputs. The second batch
        is guessed by the geometric mean of the two.
        """
        known, steps = self.known, self.known.steps
        if loss not in known.curves:
            return known.start or known.reference
        points = [point for point in known.curves[loss].accepted if point.batch]
        if len(points) != 1 or known.start or len(known.batches) == 1 or not steps.fits(points[0].cost):
            return None
        low, first_bytes = points[0].batch, points[0].cost.total_bytes
        rejected = min((point.batch for point in known.curves[loss].points if point.cost.is_rejected), default=math.inf)
        most = (first_bytes - known.fixed_bytes) / low
        least = steps.num_layers * steps.bytes_per_sequence(known.reference)
        guess = max(2 * low, low + (steps.budget_bytes - first_bytes) / math.sqrt(max(1.0, most * least)))
        high = at_most(known.batches, min(guess, (low + rejected) / 2))
        return high if high > low else None

    def _dispute(self) -> Proposal | None:
        """The policy on which the right estimate so far and another disagree most. None at last.

        Of two estimates, that is right whose saved seconds are nearer to those of the compiled step.
        """
        known, num_layers = self.known, self.known.steps.num_layers
        points = () if known.scanned else known.curves[known.losses[0]].points
        at = next((point.batch for point in points if point.batch and known.steps.fits(point.cost)), None)
        if at is None:
            return None
        _, *others = known.estimates_at(at)
        place = Place(known.losses[0], at)
        base_s = known.base(place).step_s
        while self.num_judged < len(others):
            first, other = known.estimate_at(at), others[self.num_judged]
            most = _largest_dispute(first, other, num_layers)
            known.disputed[most.policy, place] = most
            saved_s, other_s = (num_layers * (one.nothing_s - most.layer_s(one)) for one in (first, other))
            if abs(saved_s - other_s) >= _SAME_SPEED * base_s:
                done = known.tried.get((most.policy, place))
                if done is None:
                    return Proposal(most.policy, place)
                compiled_s = base_s - done.cost.step_s
                if abs(compiled_s - other_s) < abs(compiled_s - saved_s):
                    known.estimate = self.num_judged + 1
            self.num_judged += 1
        return None

    def _at(self, place: Place) -> Proposal | None:
        """The next step at a place: full remat, and then the best candidates.

        Where unrolled layers have room for all values, `none` comes before the candidates. So it does where few steps may be
        compiled, in a scan too. Of these few, two are full-remat steps.
        """
        known, steps = self.known, self.known.steps
        curve = known.curves[place.loss]
        num_on_line = sum(point.batch > 0 and steps.fits(point.cost) for point in curve.points)
        is_foreseen = num_on_line > 1 if known.most_that_fit else curve.is_foreseen(place.batch)
        if not known.is_compiled(place) and not is_foreseen:
            last = curve.points[-1].batch  # a line that is nearly flat leads anywhere
            after = known.batches[min(bisect.bisect_right(known.batches, last), len(known.batches) - 1)]
            most = at_most(known.batches, max(after, _GROWTH * last))
            return Proposal(NOTHING, replace(place, batch=min(place.batch, most)))
        in_scan = known.layer_at(place.batch).in_scan
        if (known.most_that_fit or not in_scan) and self.named and (none := self._named(place, _SURELY_FITS)):
            return none
        fits = {step.policy: step.cost.step_s for step in known.fitting(place)}
        here = [policy for policy, at in known.candidates if at == place]
        if not here and (in_scan or NONE not in fits) and (dispute := self._dispute()):
            return dispute
        if len(here) == self._max_candidates or (known.most_that_fit and fits.keys() & here):
            return None
        # The disputed step alone may raise all prices. What the layer's own prices promise is tried once all the same.
        priced = [known.priced_at(place.batch), *([] if here else [(known.estimate_at(place.batch), 0.0)])]
        return next(filter(None, (self._worth_it(place, fits, *one) for one in priced)), None)

    def _worth_it(self, place: Place, fits: dict[Policy, float], layer: LayerEstimate, layout_s: float) -> Proposal | None:
        """The best candidate by the prices of a layer, if it is worth a compile."""
        known, num_layers, base_s = self.known, self.known.steps.num_layers, self.known.base(place).step_s
        candidate = fastest(candidates(layer, num_layers, known.corrections(place)))
        if candidate is None or (candidate.policy, place) in known.candidates:
            return None
        foreseen_s = base_s + layout_s - num_layers * layer.nothing_s
        fastest_s = [*fits.values()]
        if NONE in fits and not layer.in_scan:  # what is wrong about both seconds makes no difference
            fastest_s.append(foreseen_s + num_layers * evaluate(layer.problem, named_decision(layer, NONE)).cost_s)
        if fastest_s and min(fastest_s) - foreseen_s - candidate.cost_s < WORTH * base_s:
            return None
        return Proposal(candidate.policy, place, candidate)

    def _named(self, place: Place, share: float) -> Proposal | None:
        """The next named policy that is expected to take at most this share of the budget.

        Of unrolled layers it is `none`, and if that fits, no other one: none takes fewer operations.
        """
        known, steps = self.known, self.known.steps
        layer, corrections = known.layer_at(place.batch), known.corrections(place)
        none = known.tried.get((NONE, place))
        none_alone = known.scanned or share < 1 or (not layer.in_scan and none and steps.fits(none.cost))
        for policy, values in named_policies(layer).items():
            if (policy, place) not in known.tried and (policy == NONE or not none_alone):
                saved, decision = dict.fromkeys(values, 1.0), named_decision(layer, policy)
                at_peak = corrections.at_peak(layer, decision, saved, steps.num_layers)
                if corrections.base_bytes + at_peak <= share * steps.budget_bytes:
                    return Proposal(policy, place)
        return None

    def _near(self, place: Place) -> Proposal | None:
        """The fastest candidate near to compiled ones. None unless one of the last was the fastest."""
        known = self.known
        here = [*known.fitting(place)]
        if not self._near_left or known.best() not in here[-_PATIENCE:]:
            return None
        decisions = [one.decision for (_, at), one in known.own_choices().items() if at == place]
        found = near(known.layer_at(place.batch), known.steps.num_layers, known.corrections(place), decisions)
        candidate = fastest(one for one in found if (one.policy, place) not in known.tried)
        if candidate is None:
            return None
        self.current = place
        self.num_near += 1
        return Proposal(candidate.policy, place, candidate)

    def _of_least_bytes(self) -> Proposal | None:
        """The policies of the least bytes, at the smallest batch, where none is expected to fit."""
        known, batch = self.known, self.known.batches[0]
        if known.scanned or known.best():
            return None
        place = Place(min(known.losses, key=lambda loss: known.curves[loss].at(batch).total_bytes), batch)
        policies = (NOTHING, *([GROUPS] if self._has_small_groups(batch) else []), known.steps.least[-1])
        return next((Proposal(policy, place) for policy in policies if (policy, place) not in known.tried), None)

    def _has_small_groups(self, batch: int) -> bool:
        """Whether `every:sqrt` is expected to take fewer bytes than `nothing`.

        It has the residuals of one group of layers and the inputs of all groups, and `nothing` the inputs of all layers.
        """
        steps, layer = self.known.steps, self.known.layer_at(batch)
        if SPARSE not in steps.least or not steps.allows(GROUPS):
            return False
        size = GROUPS.size(steps.num_layers)
        residual_bytes = layer.problem.num_bytes(named_decision(layer, NONE).save)
        input_bytes = batch * steps.bytes_per_sequence(batch)
        return size * residual_bytes + steps.num_layers / size * input_bytes < steps.num_layers * input_bytes

    # How many compiles are to come.

    @property
    def _max_candidates(self) -> int:
        return _MAX_CANDIDATES if self.known.scanned or len(self.known.batches) > 1 else _MAX_ALONE

    @property
    def _max_places(self) -> int:
        known = self.known
        return 1 if known.scanned or len(known.batches) == 1 or known.most_that_fit else _MAX_PLACES

    @property
    def _bases_left(self) -> int:
        """How many further full-remat steps may be compiled."""
        known = self.known
        if len(known.batches) == 1:
            return 0
        most = _MAX_UNROLLED_BASES if known.scanned else _MAX_BASES + 2 * len(known.losses)
        return max(0, most - known.num_bases)

    @property
    def _near_left(self) -> int:
        """How many further candidates near to compiled ones may be compiled."""
        return _MAX_NEAR - self.num_near if self.known.is_small and not self.known.scanned else 0

    def most_left(self) -> int:
        """How many compiles are to come at most."""
        known = self.known
        if known.scanned:
            return self._bases_left + _MAX_CANDIDATES - len(known.candidates) + 1
        bases, start = self._bases_left, known.start or known.reference
        if len(known.batches) == 1:
            bases = len(known.losses) - len(known.curves)
        while start > known.batches[0] and len(known.curves) < len(known.losses):  # rejected, each at a quarter of the last
            bases, start = bases + 1, at_most(known.batches, start // SMALLER)
        candidates = max(0, self._max_places * self._max_candidates - len(known.candidates))
        disputes = len(known.estimates_at(known.reference)) - 1 - self.num_judged
        named = len(named_policies(known.layer_at(known.reference))) + self._near_left if self.named else 0
        return bases + disputes + candidates + named + 1


def _largest_dispute(layer: LayerEstimate, other: LayerEstimate, num_layers: int) -> Candidate:
    """The candidate that may be chosen on whose saved seconds two estimates differ most."""
    found = (candidate_of(other, one, ((1, point),), num_layers) for one in other.families for point in one.hull)
    allowed = (one for one in found if layer.allows(one.policy))
    return max(allowed, key=lambda one: abs(layer.nothing_s - one.layer_s(layer) - other.nothing_s + one.layer_s(other)))
