"""Finds layers as repeated operations.

This is for programs without scopes that tell layers apart (Flax NNX, Equinox, plain functions).

The equations of a program are a sequence of tokens. Twelve equal layers of 30 equations are a stretch of 360 tokens that is the
same as itself moved by 30. Where such a stretch begins says nothing about where a layer begins. So all 30 ways to cut the
stretch are compared. The cut is taken at which the fewest bytes go from one layer to the next: for a transformer that is after
a residual connection.

The layers next to them may differ by some operations, such as a cast or dropout, or in their shapes, such as those of another
stage of a convolutional network. They aren't in the stretch, and are looked for next to it. Where nothing repeats, the casts are
left out: of two layers only one may cast its input.
"""

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from jaxremat.policy.signature import Facts

#: A layer next to a stretch is at least so similar to its first or last one (`difflib.SequenceMatcher.ratio`). Where the matmuls
#: are of the same shapes, that is the share of the shorter one's operations that the other has, too.
_SIMILAR = 0.8
#: It has at most so many equations more or fewer, if its matmuls are of other shapes.
_MAX_DIFFERENCE = 12
#: Another cut may give one layer less. It counts only if its bytes are under this share of the best cut's. Values saved
#: for the end of the program, such as each layer's statistics, make the last cuts of a stretch somewhat worse than the first.
_MUCH_BETTER = 0.8


def find_repeat(facts: Facts, within: range, are_layers: Callable[[Sequence[range]], bool]) -> tuple[range, ...]:
    """The layers of the most matmuls in a range of a program, for which `are_layers` holds.

    Empty if none repeat. Of several such stacks, it is the one of the shortest layers.
    """
    tokens, heavy = facts.tokens[within.start : within.stop], np.concatenate([[0], np.cumsum(facts.heavy)])
    found: list[tuple[int, int, range]] = []
    for period in range(1, len(within) // 2 + 1):
        for stretch in _stretches(tokens, period):
            run = range(stretch.start + within.start, stretch.stop + within.start)
            covered = int(heavy[run.start + len(run) // period * period] - heavy[run.start])
            if covered:
                found.append((covered, period, run))
    for _, period, run in sorted(found, key=lambda one: -one[0]):
        layers = _best_cut(facts, run, period)
        if are_layers(layers):
            return tuple(_with_neighbours(facts, layers, within))
    return _but_for_casts(facts, within, are_layers)


def _but_for_casts(facts: Facts, within: range, are_layers: Callable[[Sequence[range]], bool]) -> tuple[range, ...]:
    """The layers of the most matmuls that are the same but for their casts and dtypes.

    Empty if there are none. Of two layers the first of which casts its input, neither is the same as the other. Their matmuls are
    written at the same lines of the user's code.
    """
    uncast = [n for n in within if facts.program.equations[n].kind != "convert_element_type"]
    edges, tokens = np.array([within.start, *(n + 1 for n in uncast)]), facts.rough[uncast]
    found: list[tuple[int, list[range]]] = []
    for period in range(1, len(uncast) // 2 + 1):
        for stretch in _stretches(tokens, period):
            if not facts.num_heavy(range(edges[stretch.start], edges[stretch.stop])):
                continue
            firsts = range(stretch.start, min(stretch.start + period, stretch.stop - 2 * period + 1))
            cuts = min(
                (edges[first : stretch.stop + 1 : period] for first in firsts), key=lambda cut: facts.crossing[cut].mean()
            )
            layers = [range(a, b) for a, b in itertools.pairwise(cuts.tolist())]
            lines = {frozenset(facts.lines(layer)) for layer in layers}
            if len(lines) == 1 and min(lines) and "" not in min(lines) and len({*map(facts.exact, layers)}) > 1:
                found.append((sum(map(facts.num_heavy, layers)), layers))
    return next((tuple(layers) for _, layers in sorted(found, key=lambda one: -one[0]) if are_layers(layers)), ())


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
    """The layers, with those next to them that differ by some operations, or in shapes."""
    like = layers[0]
    lengths = range(1, 2 * len(like) + _MAX_DIFFERENCE + 1)
    while before := _most_similar(facts, like, [range(layers[0].start - n, layers[0].start) for n in lengths], within):
        layers = [*before, *layers]
    while after := _most_similar(facts, like, [range(layers[-1].stop, layers[-1].stop + n) for n in lengths], within):
        layers = [*layers, *after]
    return layers


def _most_similar(facts: Facts, layer: range, places: list[range], within: range) -> list[range]:
    """The place whose operations are the most similar to those of a layer.

    Its matmuls are of the same shapes, or written at the same lines of the user's code. With matmuls of the same shapes the one
    may have many operations that the other lacks, such as dropout. Empty if none is similar enough.
    """
    inside = [place for place in places if within.start <= place.start and place.stop <= within.stop]
    wanted, kind, lines = facts.plain[layer.start : layer.stop].tolist(), facts.kind(layer), facts.lines(layer)
    ratios, shares = dict[range, float](), dict[range, float]()
    for place in inside:
        is_alike = facts.kind(place) == kind
        is_near = abs(len(place) - len(layer)) <= _MAX_DIFFERENCE
        if is_alike or (is_near and "" not in lines and facts.lines(place) >= lines):
            there = facts.plain[place.start : place.stop].tolist()
            ratios[place] = difflib.SequenceMatcher(a=wanted, b=there, autojunk=False).ratio()
            num_same = ratios[place] * (len(place) + len(layer)) / 2
            shares[place] = num_same / min(len(place), len(layer)) if is_alike else ratios[place]
    best = max(ratios, key=lambda place: ratios[place], default=None)
    return [best] if best is not None and shares[best] >= _SIMILAR else []
