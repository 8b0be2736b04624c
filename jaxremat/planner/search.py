"""The one loop of the planner: it compiles what promises the most, and learns from it.

This is a best-first search with optimistic bounds. A candidate is a step: what the layers save, the loss, the batch and, by the
search that it is from, the layout and the mesh. The loop (`find`) compiles one after the other. The next one is always the one
of the most expected samples per second:

1. The full-remat step at a batch. Its bytes and seconds are those of everything around the layers. Before it is compiled,
   they are read off a line through those that are (`curve.py`): to begin with, two of one loss and one of each other loss.
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

Unrolled layers take from a scan of the same layers what both have in common, as a scan compiles several times faster: the
full-remat step at each batch, and the right estimate. They are searched first. In a scan XLA copies what is saved, and its
search ends where no step is expected to be faster than the best unrolled one. On a mesh a scan stores the stack of the layers'
gradients from the beginning of the backward pass, and unrolled layers don't (`Steps.stack_bytes`).
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

_MAX_BASES = 6  # full-remat steps compiled where the batch is free, beside two for the first loss and one for each other
_GROWTH = 4  # a full-remat step has at most so many times the batch of the largest one before
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
    first, fitting = layouts[0], lambda: [step for known in layouts for step in known.fitting()]
    num_known = len(fitting())
    while len(fitting()) - num_known < (first.most_that_fit or math.inf):
        step = next(filter(None, _turns(searches, named)), None)
        if step is None:
            return
        if first.most_that_fit is None:  # else, steps that are rejected in seconds are most of those that `most_left` counts
            first.steps.expect(sum(one.most_left() for one in searches))
        step.begin()
        guesses = filter(None, searches[-1].guesses())
        while first.steps.may_guess() and (guess := next(guesses, None)):
            guess.begin()
        step.known.compile(step.policy, step.place, step.candidate)
        yield


def _turns(searches: Sequence["Search"], named: bool) -> Iterator["Proposal | None"]:
    """What each layout compiles next. Unrolled layers come before a scan that may be faster."""
    scan, *unrolled = searches
    for one in unrolled:
        yield one.next(True)
    if outdone([one.known for one in searches]) is None:
        yield scan.next(named and all(one.known.best_speed <= scan.known.best_speed for one in unrolled))


def outdone(layouts: Sequence[Known]) -> float | None:
    """The most sequences per second expected in a scan. None if unrolled layers have fewer."""
    scan, *unrolled = layouts
    fastest = max((known.best_speed for known in unrolled), default=0.0) * (1 + WORTH)
    if not fastest:
        return None
    bound = max((place.speed for place in highest_speeds(scan, scan.layer_at(scan.reference))), default=math.inf)
    return bound if bound <= fastest else None


@dataclass(frozen=True)
class Proposal:
    """A step to compile in one layout. `candidate` is set for the planner's own choices."""

    known: Known
    policy: Policy
    place: Place
    candidate: Candidate | None = None

    def begin(self) -> None:
        self.known.steps.begin(self.policy, self.place.loss, self.place.batch)


@dataclass
class Search:
    """The search for the fastest step of one layout on one mesh: what to compile next.

    Attributes:
        known: the steps, and what is known of them.
        named: whether named policies may be compiled.
        current: the place at which candidates are compiled.
        finished: the places at which no further candidate is worth a compile.
        num_near: candidates near to compiled ones that were proposed.
    """

    known: Known
    named: bool = True
    current: Place | None = None
    finished: list[Place] = field(default_factory=list)
    num_near: int = 0

    @property
    def scan(self) -> Known:
        """What unrolled layers and a scan build on: full remat, and what tells estimates apart."""
        return self.known.scanned or self.known

    @property
    def _all_bytes(self) -> int:
        """Bytes that all layers save under `none` at the reference batch."""
        layer = self.known.layer_at(self.known.reference)
        return self.known.steps.num_layers * layer.problem.num_bytes(named_decision(layer, NONE).save)

    def next(self, has_named: bool) -> Proposal | None:
        """The step that is expected to be the fastest, of those that are worth a compile.

        With `has_named` the named policies are among them.
        """
        if self.known.rejected:
            return None
        return next(filter(None, self._start()), None) or self.choice(has_named)

    def choice(self, has_named: bool) -> Proposal | None:
        """The next step after those that a search begins with."""
        known = self.known
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

    def guesses(self) -> Iterator[Proposal | None]:
        """Steps that are likely to be proposed, whatever the present one turns out to take."""
        known = self.known
        yield from self._start()
        if self.named and len(known.batches) == 1 and known.fixed_bytes + self._all_bytes <= known.steps.budget_bytes:
            yield Proposal(known, NONE, Place(known.losses[0], known.reference))
        curve = known.curves.get(known.losses[0])
        if curve and (curve.is_line or len(known.batches) == 1) and not known.most_that_fit:
            yield replace(self, finished=[*self.finished]).choice(has_named=False)

    def _start(self) -> Iterator[Proposal | None]:
        """The steps that a search begins with: full remat, and what tells estimates apart."""
        scan, losses = self.scan, self.known.losses
        for loss in losses:
            if loss not in scan.curves:
                other = best_place(scan, False) if any(curve.is_line for curve in scan.curves.values()) else None
                yield Proposal(scan, NOTHING, Place(loss, other.batch if other else scan.start or scan.reference))
        yield self._dispute() if len(scan.batches) > 1 else None
        second = (Place(loss, batch) for loss in losses if loss in scan.curves and (batch := self._second_batch(loss)))
        yield next((Proposal(scan, NOTHING, place) for place in second), None)  # the other losses follow that line

    def _second_batch(self, loss: str) -> int | None:
        """The batch of a loss's second full-remat step. None if its curve is known.

        All values can be saved up to about that batch, if it is twice the first one. A further sequence takes at most what the
        first ones take on average, and at least its layers' inputs. It is guessed by the geometric mean of the two.
        """
        known, steps, curve = self.scan, self.scan.steps, self.scan.curves[loss]
        points = [point for point in curve.accepted if point.batch]
        if curve.is_line or not points or known.start or len(known.batches) == 1 or not steps.fits(points[0].cost):
            return None
        low, first_bytes = points[0].batch, points[0].cost.total_bytes
        rejected = min((point.batch for point in curve.points if point.cost.is_rejected), default=math.inf)
        most, least = (first_bytes - known.fixed_bytes) / low, steps.num_layers * steps.bytes_per_sequence(known.reference)
        further = math.sqrt(max(1.0, most * least))
        roomy = (steps.budget_bytes - first_bytes + low * further) / (further + self._all_bytes / known.reference)
        high = at_most(known.batches, min(max(2 * low, roomy), (low + rejected) / 2))
        return high if high > low else None

    def _dispute(self) -> Proposal | None:
        """The policy on which the right estimate so far and another disagree most. None at last.

        Of two estimates, that is right whose saved seconds are nearer to those of the compiled step.
        """
        known, num_layers = self.scan, self.scan.steps.num_layers
        fits = [place for policy, place in known.tried if policy == NOTHING and known.steps.fits(known.base(place))]
        if not fits:
            return None
        place = max(fits, key=[place for policy, place in known.tried if policy != NOTHING].__contains__)
        at, base_s = place.batch, known.base(place).step_s
        _, *others = known.estimates_at(at)
        while known.num_judged < len(others):
            first, other = known.estimate_at(at), others[known.num_judged]
            most = _largest_dispute(first, other, num_layers)
            known.disputed[most.policy, place] = most
            saved_s, other_s = (num_layers * (one.nothing_s - most.layer_s(one)) for one in (first, other))
            if abs(saved_s - other_s) >= _SAME_SPEED * base_s:
                done = known.tried.get((most.policy, place))
                if done is None:
                    return Proposal(known, most.policy, place)
                compiled_s = base_s - done.cost.step_s
                if abs(compiled_s - other_s) < abs(compiled_s - saved_s):
                    known.estimate = known.num_judged + 1
            known.num_judged += 1
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
            return Proposal(self.scan, NOTHING, replace(place, batch=min(place.batch, most)))
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
        return Proposal(known, candidate.policy, place, candidate)

    def _named(self, place: Place, share: float) -> Proposal | None:
        """The next named policy that is expected to take at most this share of the budget.

        Of unrolled layers it is `none`. If that fits or another step is expected to be as fast, no other one is compiled, as
        none takes fewer operations.
        """
        known, steps = self.known, self.known.steps
        layer, corrections = known.layer_at(place.batch), known.corrections(place)
        none_alone = known.scanned or share < 1 or (not layer.in_scan and self._is_as_fast_as_none(place, layer))
        for policy, values in named_policies(layer).items():
            if (policy, place) not in known.tried and (policy == NONE or not none_alone):
                saved, decision = dict.fromkeys(values, 1.0), named_decision(layer, policy)
                further = corrections.at_peak(layer, decision, saved, steps.num_layers)
                if corrections.base_bytes + further <= share * steps.budget_bytes:
                    return Proposal(known, policy, place)
        return None

    def _is_as_fast_as_none(self, place: Place, layer: LayerEstimate) -> bool:
        """Whether `none` fits at a place, or a choice that fits there is expected to be as fast."""
        known, fits = self.known, {(step.policy, place) for step in self.known.fitting(place)}
        least_s = min((one.layer_s(layer) for at, one in known.own_choices().items() if at in fits), default=math.inf)
        more_s = known.steps.num_layers * (least_s - evaluate(layer.problem, named_decision(layer, NONE)).cost_s)
        return (NONE, place) in fits or more_s < WORTH * known.base(place).step_s

    def _near(self, place: Place) -> Proposal | None:
        """The fastest candidate near to compiled ones. None unless one of the last was the fastest."""
        known = self.known
        if not self._near_left or known.best() not in [*known.fitting(place)][-_PATIENCE:]:
            return None
        decisions = [one.decision for (_, at), one in known.own_choices().items() if at == place]
        found = near(known.layer_at(place.batch), known.steps.num_layers, known.corrections(place), decisions)
        candidate = fastest(one for one in found if (one.policy, place) not in known.tried)
        if candidate is None:
            return None
        self.current = place
        self.num_near += 1
        return Proposal(known, candidate.policy, place, candidate)

    def _of_least_bytes(self) -> Proposal | None:
        """The policies of the least bytes, at the smallest batch, where none is expected to fit.

        `every:sqrt` has the residuals of one group of layers and the inputs of all groups. `nothing` has all layers' inputs.
        """
        known, steps, batch, num_layers = self.known, self.known.steps, self.known.reference, self.known.steps.num_layers
        if known.scanned or known.best():
            return None
        size, input_bytes = GROUPS.size(num_layers), num_layers * batch * steps.bytes_per_sequence(batch)
        is_smaller = size * self._all_bytes / num_layers + input_bytes / size < input_bytes
        groups = [GROUPS] if is_smaller and SPARSE in steps.least and steps.allows(GROUPS) else []
        place = Place(min(known.losses, key=lambda loss: known.curves[loss].at(batch).total_bytes), known.batches[0])
        found = (policy for policy in (NOTHING, *groups, steps.least[-1]) if (policy, place) not in known.tried)
        return next((Proposal(known, policy, place) for policy in found), None)

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
        return max(0, _MAX_BASES + 1 + len(self.known.losses) - self.known.num_bases)

    @property
    def _near_left(self) -> int:
        """How many further candidates near to compiled ones may be compiled."""
        return _MAX_NEAR - self.num_near if self.known.is_small and not self.known.scanned else 0

    def most_left(self) -> int:
        """How many compiles are to come at most."""
        known = self.known
        if known.scanned:
            return _MAX_CANDIDATES - len(known.candidates) + 1
        losses, start = len(known.losses) - len(known.curves), known.start or known.reference
        bases = losses if len(known.batches) == 1 else self._bases_left
        if losses:  # rejected, each at a quarter of the last
            bases += math.ceil(math.log(start / known.batches[0], SMALLER))
        candidates = max(0, self._max_places * self._max_candidates - len(known.candidates))
        disputes = len(known.estimates_at(known.reference)) - 1 - known.num_judged
        named = len(named_policies(known.layer_at(known.reference))) + self._near_left if self.named else 0
        return bases + disputes + candidates + named + 1


def _largest_dispute(layer: LayerEstimate, other: LayerEstimate, num_layers: int) -> Candidate:
    """The candidate that may be chosen on whose saved seconds two estimates differ most."""
    found = (candidate_of(other, one, ((1, point),), num_layers) for one in other.families for point in one.hull)
    allowed = (one for one in found if layer.allows(one.policy))
    return max(allowed, key=lambda one: abs(layer.nothing_s - one.layer_s(layer) - other.nothing_s + one.layer_s(other)))
