"""Finds layers as repeated operations.

This is for programs without scopes that tell layers apart (Flax NNX, Equinox, plain functions).

The equations of a program are a sequence of tokens. Twelve equal layers of 30 equations are a stretch of 360 tokens that is the
same as itself moved by 30. Where such a stretch begins says nothing about where a layer begins. So all 30 ways to cut the
stretch are compared. The cut is taken at which the fewest bytes go from one layer to the next: for a transformer that is after
a residual connection.

A first or last layer may differ by a few operations, such as a cast. It isn't in the stretch, and is looked for next to it.
"""

import difflib
from collections import defaultdict

import numpy as np

from jaxremat.policy.signature import Facts

#: A first or last layer is at least so similar to the others (`difflib.SequenceMatcher.ratio`).
_SIMILAR = 0.8
#: A first or last layer has at most so many equations more or fewer than the others.
_MAX_DIFFERENCE = 12
#: Another cut may give one layer less. It counts only if its bytes are under this share of the best cut's. Values saved
#: for the end of the program, such as each layer's statistics, make the last cuts of a stretch somewhat worse than the first.
_MUCH_BETTER = 0.8


def find_repeat(facts: Facts, within: range) -> tuple[range, ...]:
    """The layers of the most matmuls in a range of a program. Empty if none repeat.

    Of several such stacks, it is the one of the shortest layers.
    """
    best: tuple[int, int, range] | None = None
    tokens, heavy = facts.tokens[within.start : within.stop], np.concatenate([[0], np.cumsum(facts.heavy)])
    for period in range(1, len(within) // 2 + 1):
        for found in _stretches(tokens, period):
            run = range(found.start + within.start, found.stop + within.start)
            covered = int(heavy[run.start + len(run) // period * period] - heavy[run.start])
            if covered and (best is None or covered > best[0]):
                best = (covered, period, run)
    if best is None:
        return ()
    _, period, run = best
    return tuple(_with_neighbours(facts, _best_cut(facts, run, period), within))


def _stretches(tokens: np.ndarray, period: int) -> list[range]:
    """The stretches of two periods or more that are the same as themselves moved by a period."""
    same = np.concatenate([[False], tokens[:-period] == tokens[period:], [False]])
    edges = np.flatnonzero(np.diff(same.astype(np.int8))).tolist()
    return [range(a, b + period) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= period]


def _best_cut(facts: Facts, run: range, period: int) -> list[range]:
    """The layers of a stretch, cut where the fewest bytes cross.

    At most one layer is given up for a much better cut.
    """
    most = len(run) // period
    cuts: dict[int, list[tuple[float, list[range]]]] = defaultdict(list)
    for offset in range(period):
        starts = range(run.start + offset, run.stop - period + 1, period)
        if len(starts) >= max(2, most - 1):
            edges = [*starts, starts[-1] + period]
            mean = float(facts.crossing[edges].mean())
            cuts[len(starts)].append((mean, [range(start, start + period) for start in starts]))
    (mean, layers), *fewer = (min(cuts[num], key=lambda cut: cut[0]) for num in sorted(cuts, reverse=True))
    return next((others for other, others in fewer if other < _MUCH_BETTER * mean), layers)


def _with_neighbours(facts: Facts, layers: list[range], within: range) -> list[range]:
    """The layers, with a first and a last one that differ by a few operations, if there are any."""
    length, first, last = len(layers[0]), layers[0], layers[-1]
    sizes = range(max(1, length - _MAX_DIFFERENCE), length + _MAX_DIFFERENCE + 1)
    before = [range(first.start - size, first.start) for size in sizes if first.start - size >= within.start]
    after = [range(last.stop, last.stop + size) for size in sizes if last.stop + size <= within.stop]
    return [*_most_similar(facts, first, before), *layers, *_most_similar(facts, last, after)]


def _most_similar(facts: Facts, layer: range, places: list[range]) -> list[range]:
    """The place whose equations are the most similar to those of a layer.

    Empty if none is similar enough.
    """
    wanted, ratios = facts.rough[layer.start : layer.stop].tolist(), {}
    for place in places:
        if facts.num_heavy(place) == facts.num_heavy(layer) and facts.kind(place) == facts.kind(layer):
            there = facts.rough[place.start : place.stop].tolist()
            ratios[place] = difflib.SequenceMatcher(a=wanted, b=there, autojunk=False).ratio()
    best = max(ratios, key=lambda place: ratios[place], default=None)
    return [best] if best is not None and ratios[best] >= _SIMILAR else []
