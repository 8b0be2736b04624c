"""Plans unrolled layers from the compiled steps of the same layers, scanned.

A scanned layer pays for what it saves: XLA copies each value into a stack, and out of the stack again. Unrolled
layers save a value where it is. But an unrolled step compiles several times longer than a scan, of which one layer is compiled.

So the scan is planned first (`plan.py`). Everything around the layers is the same in both layouts. Two results of the scanned
steps are used for the unrolled layers: the bytes and seconds of full remat at each batch, and which estimate of a layer is
right. Only steps that could be the answer are compiled unrolled, and where `Steps.has_own_base` says so, full remat. On a mesh
a scan stores the stack of the layers' gradients from the beginning of the backward pass, and unrolled layers
don't. The difference is large beside what a device stores there.

Example: scanned, the full-remat step takes 10 GiB and the best plan for 30 GiB takes 400 ms, of which 60 ms are for
recomputing and saving. Unrolled, no more than 20 ms are expected for these. The one candidate that is compiled unrolled takes
29 GiB and 365 ms. It is the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxremat.config import Objective
from jaxremat.planner.batch import spaced
from jaxremat.planner.candidates import best_candidate
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.curve import Curve, CurvePoint
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.free_batch import fastest_batch
from jaxremat.planner.hull import lower_bound
from jaxremat.planner.plan import Answer, Plan, Tried, as_plan, could_fit
from jaxremat.planner.steps import Cost, Steps
from jaxremat.policy.spec import NOTHING, Policy, Rule

_MAX_CANDIDATES = 3  # candidates compiled
_MAX_BATCHES = 3  # further batches at which `nothing` is compiled with scanned layers to choose the batch
_WORTH = 0.005  # share of the step's seconds that another candidate must save, by the model, to be compiled


def plan_unrolled(
    steps: Steps,
    looped: Plan,
    loop: Steps,
    *,
    batch: int | None,
    fixed_bytes: int,
    batches: Sequence[int],
    objective: Objective = "time",
) -> Plan | None:
    """The best plan for the unrolled layers whose compiled step fits the budget.

    Args:
        steps: the steps with unrolled layers.
        looped: the plan for the same layers in a scan, and the same objective.
        loop: the steps with the layers in a scan, of which `nothing` is compiled at batches worth a closer look.
        batch: the batch. None to choose it, or for the objective `batch`, to take that of the scan.
        fixed_bytes: bytes of the parameters and the optimizer state.
        batches: the batches to choose among, in rising order.
        objective: as in `find_plan`.

    Returns:
        None where no candidate fits.
    """
    is_free, has_candidates = objective == "time" and batch is None, objective != "memory"
    steps.expect(_MAX_BATCHES * is_free + steps.has_own_base + _MAX_CANDIDATES * has_candidates + 1)
    steps = replace(steps, layer_at=lambda batch, of=steps.layer_at: _assuming(of(batch), looped.assumption))
    curves = _curves(looped.tried, fixed_bytes)
    place = _Place(looped.loss, looped.batch)
    if objective != "memory":
        place = _fastest_place(steps, loop, curves, place, batch if objective == "time" else looped.batch, batches)
    base = _base(steps, place, curves)
    answers = {} if objective == "memory" else _compiled(steps, place, base)
    for policy in [looped.policy] if objective == "memory" else _none_if_it_fits(steps, place, base):
        answers[policy] = Answer(policy, steps.compile(policy, place.loss, place.batch))
    fitting = [answer for answer in answers.values() if steps.fits(answer.cost)]
    if not fitting:
        return None
    best = min(fitting, key=lambda answer: steps.rank(answer.cost))
    tried = tuple(Tried(answer.policy, place.loss, place.batch, answer.cost) for answer in answers.values())
    return replace(as_plan(steps, best, place.loss, place.batch, base), tried=tried)


def is_better(unrolled: Plan, looped: Plan, objective: Objective) -> bool:
    """Whether the unrolled plan has fewer bytes or more samples per second than the scanned one."""
    if objective == "memory":
        return unrolled.cost.total_bytes < looped.cost.total_bytes
    return unrolled.batch / unrolled.cost.step_s > looped.batch / looped.cost.step_s


@dataclass(frozen=True)
class _Place:
    """A loss and a batch."""

    loss: str
    batch: int


def _base(steps: Steps, place: _Place, curves: dict[str, Curve]) -> Cost:
    """The cost of full remat: scanned, or unrolled where the unrolled step is compiled."""
    if steps.has_own_base:
        # What is known of single values is that they lie in memory at the peak of a scan.
        return replace(steps.compile(NOTHING, place.loss, place.batch), without=None)
    return curves[place.loss].at(place.batch)


def _assuming(layer: LayerEstimate, assumption: str) -> LayerEstimate:
    """The one of the layer's estimates that assumes this; the first one if none does."""
    found = (estimate for estimate in (layer, *layer.alternatives) if estimate.assumption == assumption)
    return replace(next(found, layer), alternatives=())


def _curves(tried: tuple[Tried, ...], fixed_bytes: int) -> dict[str, Curve]:
    """By loss, the full-remat step with scanned layers.

    Where it was compiled at one batch, the line begins at the training state.
    """
    points: dict[str, list[CurvePoint]] = {}
    for step in tried:
        if step.policy == NOTHING:
            points.setdefault(step.loss, []).append(CurvePoint(step.batch, step.cost))
    start = CurvePoint(0, Cost(fixed_bytes, 0.0))
    return {
        loss: Curve(tuple(sorted([*of_loss, *([start] if len(of_loss) == 1 else [])], key=lambda point: point.batch)))
        for loss, of_loss in points.items()
    }


def _fastest_place(
    steps: Steps, loop: Steps, curves: dict[str, Curve], looped: _Place, batch: int | None, batches: Sequence[int]
) -> _Place:
    """The loss and the batch of the most tokens per second, by the model. A given batch stays.

    The full-remat step with scanned layers is compiled at the best-looking batch, and added to `curves` until the batch that
    looks best was compiled before.
    """
    if batch is None:
        batches = spaced(batches)
        for _ in range(_MAX_BATCHES):
            fastest = fastest_batch(steps, curves, batches)
            if fastest is None or curves[fastest.loss].is_compiled(fastest.batch):
                break
            loss, at = fastest.loss, fastest.batch
            curves[loss] = curves[loss].with_point(at, loop.compile(NOTHING, loss, at))
        fastest = fastest_batch(steps, curves, batches)
        return _Place(fastest.loss, fastest.batch) if fastest else looped

    def rank(loss: str) -> tuple[bool, float]:
        base = curves[loss].at(batch)
        left_bytes = steps.budget_bytes - base.total_bytes
        if left_bytes < 0:
            return (True, base.total_bytes)
        return (False, base.step_s + lower_bound(steps.layer_at(batch).hull, steps.num_layers, left_bytes))

    compiled = [loss for loss, curve in curves.items() if curve.is_compiled(batch)]
    return _Place(min(compiled, key=rank), batch)


def _compiled(steps: Steps, place: _Place, base: Cost) -> dict[Policy, Answer]:
    """The best candidates, compiled one after the other while the next one could be faster."""
    layer, answers = steps.layer_at(place.batch), dict[Policy, Answer]()
    corrections = Corrections(base.total_bytes, steps.budget_bytes, base.without)
    for _ in range(_MAX_CANDIDATES):
        candidate = best_candidate(layer, steps.num_layers, corrections)
        if candidate is None or candidate.policy in answers:
            break
        known = [answer.candidate.cost_s for answer in answers.values() if answer.candidate and steps.fits(answer.cost)]
        if known and min(known) - candidate.cost_s < _WORTH * base.step_s:
            break
        cost = steps.compile(candidate.policy, place.loss, place.batch)
        answers[candidate.policy] = Answer(candidate.policy, cost, candidate)
        corrections = corrections.learn(candidate, cost.total_bytes)
    return answers


def _none_if_it_fits(steps: Steps, place: _Place, base: Cost) -> list[Policy]:
    """The policy `none`, if the budget has room for everything that it saves.

    No candidate takes fewer operations.
    """
    return [policy for policy in could_fit(steps, place.batch, base, 1.0) if policy == Rule("none")]
