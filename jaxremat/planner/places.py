"""Which loss and batch promise the most, by the model. Nothing is compiled here."""

import bisect
from collections.abc import Sequence
from dataclasses import replace

from jaxremat.knapsack.hull import lower_bound
from jaxremat.planner.candidates import candidates, fastest
from jaxremat.planner.corrections import Corrections
from jaxremat.planner.estimate import LayerEstimate
from jaxremat.planner.known import REFERENCE_BATCH, Known, Place
from jaxremat.planner.steps import Steps
from jaxremat.search.batch import at_most, spaced

WORTH = 5e-3  # share of the seconds that another step must save, by the model, to be compiled
_MAX_LOOKED_AT = 48  # number of batches for which the best candidate is searched


def possible(steps: Steps, fixed_bytes: int, batches: Sequence[int]) -> Sequence[int]:
    """The batches at which a step could fit, and the smallest one.

    Under `nothing` a step saves the inputs of its layers. Where there are very many batches, some are left out.
    """
    batches = spaced(batches)
    least_bytes = max(1.0, steps.num_layers * steps.bytes_per_sequence(at_most(batches, REFERENCE_BATCH)))
    return batches[: bisect.bisect_right(batches, at_most(batches, (steps.budget_bytes - fixed_bytes) / least_bytes))]


def best_place(known: Known, may_compile: bool) -> Place | None:
    """The loss and the batch of the most sequences per second.

    A bound says within microseconds how fast each could be. The best candidate is searched for those whose full-remat step was
    compiled, and for some of the highest bounds. The exact solution, which takes longer, is searched where mixes of save-sets
    don't fill the bytes that are left. A compiled batch is taken unless another one is faster by what a compile is worth, and
    always if no further full-remat step may be compiled (`may_compile`). None if not even the smallest batch is expected to fit.
    """
    layer, beyond = known.layer_at(known.reference), known.beyond()
    key = ("place", id(layer), tuple(known.curves.items()), tuple(beyond.items()), may_compile)
    return known.once(key, lambda: _best_place(known, layer, beyond, may_compile))


def _best_place(known: Known, layer: LayerEstimate, beyond: dict[int, int], may_compile: bool) -> Place | None:
    steps = known.steps
    bounds = sorted(highest_speeds(known, layer), key=lambda bound: (-bound.speed, bound.batch))
    compiled = [bound for bound in bounds if known.is_compiled(bound)]
    reached: list[Place] = []

    def enough() -> float:
        most = max(place.speed for place in reached)
        return most - WORTH * abs(most)

    for bound in (*compiled, *bounds[: _MAX_LOOKED_AT if may_compile else 0]):
        if not reached or bound.speed > enough():
            base = known.base(bound)
            left_bytes = int((steps.budget_bytes - base.total_bytes) * known.reference / bound.batch)
            left = Corrections(0, left_bytes, None, beyond, allows_mixes=steps.allows_mixes)
            best = fastest(candidates(layer, steps.num_layers, left, exact=not steps.allows_mixes))
            saved_s = steps.num_layers * layer.hull[0].cost_s - best.cost_s if best else 0.0
            reached.append(replace(bound, speed=_speed(known, bound.batch, base.step_s, saved_s)))
    order = {
        loss: 1 if curve.is_line else -1 for loss, curve in known.curves.items()
    }  # else small batches are guessed too fast
    equal = (place for place in reached if place.speed >= enough())
    return min(
        equal, key=lambda at: (not known.is_compiled(at), order[at.loss] * at.batch, -at.speed, at.loss), default=None
    )


def highest_speeds(known: Known, layer: LayerEstimate) -> list[Place]:
    """The places that are expected to fit, with the highest speed that any plan can reach there.

    No plan is faster than the full-remat step without the seconds of recomputing, plus the least seconds that any choice of
    residuals takes in the bytes that are left.
    """
    found, num_layers = list[Place](), known.steps.num_layers
    nothing_s = num_layers * layer.hull[0].cost_s
    for loss, curve in known.curves.items():
        for batch in known.batches:
            base = curve.at(batch)
            if base.total_bytes > known.steps.budget_bytes:
                break
            left_bytes = int((known.steps.budget_bytes - base.total_bytes) * known.reference / batch)
            saved_s = nothing_s - lower_bound(layer.hull, num_layers, left_bytes)
            found.append(Place(loss, batch, _speed(known, batch, base.step_s, saved_s)))
    return found


def _speed(known: Known, batch: int, step_s: float, saved_s: float) -> float:
    """Sequences per second at a batch, where saving takes `saved_s` off at the reference batch."""
    return batch / (step_s - batch / known.reference * saved_s)
