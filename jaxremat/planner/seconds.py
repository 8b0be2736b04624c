"""Corrections of the seconds that saving a value takes off a step, fitted to compiled steps.

The planner's seconds are estimates. A compiled step says by how much they are wrong for all that it saves together. Bayesian
linear regression shares the difference between two causes. Recomputing takes another share of its seconds than foreseen, the
same for all operations. Saving a value takes other seconds for its bytes: in part the same for all values, in part for the
results of one kind of operation, and in part its own. So a compiled step says most about the values that it saves.

Example: saving 5 % of all bytes was foreseen to take 4 ms off a step, and takes off 2. Some half of the difference is taken for
recomputing, which takes fewer seconds then, whatever is saved. The rest is a price of the saved bytes.

References:
    Bishop 2006, "Pattern Recognition and Machine Learning", section 3.3.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxremat.planner.estimate import LayerEstimate

_LAYOUT = 0.1  # share of a step's seconds by which unrolled layers may differ from a scan
_RECOMPUTING = 0.1  # share of the seconds of recomputing by which they may be wrong, for all operations alike
_FACTORS = (0.1, 1.5)  # what is left of these seconds, at least and at most
_NOISE = 1e-3  # share of a step's seconds for which no value accounts
#: The scopes around an operation.
_SCOPES = re.compile(r".*/")


@dataclass(frozen=True)
class Seen:
    """A compiled step beside the seconds that were foreseen.

    Attributes:
        saved_bytes: by value, the bytes that it takes in all layers.
        saved_s: seconds that this was foreseen to take off the full-remat step.
        beyond_s: seconds that the step takes beyond those that were foreseen.
        step_s: seconds that the step takes.
        is_beside_scan: whether the full-remat step by which they were foreseen has its layers in a scan, and this one hasn't.
    """

    saved_bytes: Mapping[int, float]
    saved_s: float
    beyond_s: float
    step_s: float
    is_beside_scan: bool = False


def corrected(layer: LayerEstimate, seen: Sequence[Seen]) -> tuple[LayerEstimate, float]:
    """The layer with the seconds of recomputing and saving that compiled steps agree with.

    With it come the seconds by which unrolled layers take longer than a scan. Before anything is compiled, each part of the
    error of a byte's price is expected to be as large as what recomputing a byte costs on average.
    """
    problem = layer.problem
    kinds = {v: _SCOPES.sub("", op.name) for op in problem.ops for v in op.outputs if problem.values[v].saveable}
    all_bytes = sum(problem.values[v].num_bytes for v in kinds)
    if not seen or not all_bytes:
        return layer, 0.0
    names = np.array([*kinds.values()])
    alike = (layer.nothing_s / all_bytes) ** 2 * (1.0 + (names[:, None] == names) + np.eye(len(names)))
    saved = np.array([[one.saved_bytes.get(v, 0.0) for v in kinds] for one in seen])
    others = np.array([(_RECOMPUTING * one.saved_s, _LAYOUT * one.step_s * one.is_beside_scan) for one in seen])
    noise_s = np.array([_NOISE * one.step_s for one in seen])
    variance = saved @ alike @ saved.T + others @ others.T + np.diag(noise_s**2)
    weights = np.linalg.solve(variance, [one.beyond_s for one in seen])
    prices = dict(zip(kinds, alike @ saved.T @ weights + problem.save_s_per_byte, strict=True))
    values = tuple(
        replace(value, save_s=max(0.0, value.save_s + value.num_bytes * prices.get(v, 0.0)))
        for v, value in enumerate(problem.values)
    )
    recomputing, layout = (others.T @ weights).tolist()
    factor = min(max(1 - _RECOMPUTING * recomputing, _FACTORS[0]), _FACTORS[1])
    ops = tuple(replace(op, recompute_s=factor * op.recompute_s) for op in problem.ops)
    of_layer = replace(layer, problem=replace(problem, values=values, ops=ops, save_s_per_byte=0.0))
    return of_layer, _LAYOUT * seen[-1].step_s * layout
