"""Finds layers by named scopes that differ in a number.

Flax Linen writes such scopes: `Model/block_0/...`, `Model/block_1/...`. Haiku's first one has no number: `block`, `block_1`.

A family is the scopes of one parent that have one name but for the number. Its layers lie one after the other in the program.
Between two of them there may be operations of the parent, such as a residual connection, or the norm before a layer. They
belong to the layers if they are the same between all of them. Where the scopes come again, as in the backward pass of a
gradient inside the program, each pass is a family of its own.

A parent may write two families in turn, `attention_0, mlp_0, attention_1, mlp_1`. Both then make up the layers: layer 0 reaches
from the start of `attention_0` to the start of `attention_1`.
"""

import fnmatch
import glob
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from jaxremat.policy.jax_private import is_transposed
from jaxremat.policy.program import Equation
from jaxremat.policy.signature import Facts

#: A name, any separator, a number, and what closes it: `block_3`, `blocks.3`, `block[3]`, `3`.
_NUMBERED = re.compile(r"(.*?)([\W_]*)(\d+)(\W*)")
#: What a method adds to the name of its module's scope, `.attend`. A scope such as `...qd,...kd->...qk` is an einsum's.
_METHOD = re.compile(r"(?<=[\w\])])\.[^\W\d][\w.]*$")


@dataclass(frozen=True)
class Family:
    """Numbered scopes of one parent.

    Attributes:
        parent: the path of the parent, such as `("Model",)`.
        wildcard: the scopes' names as one glob pattern, such as `block_*`.
        scopes: the names with their numbers, in the program's order.
        layers: for each scope the range of equations that is its layer. No two overlap.
    """

    parent: tuple[str, ...]
    wildcard: str
    scopes: tuple[str, ...]
    layers: tuple[range, ...]

    @property
    def pattern(self) -> str:
        """The family as `layers=` takes it, such as `Model/block_*`."""
        return "/".join((*self.parent, self.wildcard))


def matches(parent: Sequence[str], scopes: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a glob pattern matches one of a parent's scopes, by its name or by its path."""
    names = [name for scope in scopes for name in (scope, "/".join((*parent, scope)))]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def path_of(equation: Equation) -> tuple[str, ...]:
    """The equation's named scopes, outermost first, without the names of methods.

    For example, `Model/block_0.attend` has two.
    """
    return tuple(_METHOD.sub("", part) or part for scope in equation.scopes for part in scope.split("/") if part)


def without_number(scope: str) -> str | None:
    """The name of a scope without its number: `block` for `block_3`.

    None if the scope has no number at its end.
    """
    match = _NUMBERED.fullmatch(scope)
    return match[1] or "layer" if match else None


def families(facts: Facts, within: range) -> list[Family]:
    """All families in a range of the program's equations that have two scopes or more."""
    visits: dict[tuple[tuple[str, ...], str, bool], list[tuple[str, range]]] = defaultdict(list)
    for n in within:
        equation = facts.program.equations[n]
        path, backward = path_of(equation), is_transposed(equation.name_stack)
        for depth, scope in enumerate(path):
            found = _NUMBERED.fullmatch(scope)
            siblings = visits[path[:depth], found[1] if found else scope, backward]
            if siblings and siblings[-1][0] == scope:
                siblings[-1] = (scope, range(siblings[-1][1].start, n + 1))
            else:
                siblings.append((scope, range(n, n + 1)))
    return [
        Family(
            parent,
            wildcard,
            tuple(scope for scope, _ in one),
            tuple(_with_gaps(facts, [run for _, run in one], within)),
        )
        for (parent, base, _), siblings in visits.items()
        for wildcard in _wildcards(base, {scope for scope, _ in siblings})
        for one in _passes(base, siblings)
    ]


def _wildcards(base: str, scopes: Set[str]) -> list[str]:
    """The glob pattern of scopes with numbers, in a list. Empty if none has a number."""
    found = next((found for scope in sorted(scopes) if scope != base and (found := _NUMBERED.fullmatch(scope))), None)
    return [f"{glob.escape(base + found[2])}*{glob.escape(found[4])}"] if found else []


def _passes(base: str, visits: Sequence[tuple[str, range]]) -> Iterator[list[tuple[str, range]]]:
    """Runs of visits in which no scope comes twice, each of two scopes or more.

    A scope without a number is the first layer of those that have numbers from 1.
    """
    numbers = {int(found[3]) for scope, _ in visits if scope != base and (found := _NUMBERED.fullmatch(scope))}
    one: dict[str, range] = {}
    for scope, run in visits:
        if scope == base and 0 in numbers:
            continue
        if scope in one:
            if len(one) > 1:
                yield [*one.items()]
            one = {}
        one[scope] = run
    if len(one) > 1:
        yield [*one.items()]


def _with_gaps(facts: Facts, runs: list[range], within: range) -> list[range]:
    """The runs, with the equations between two of them, if these are always the same.

    A gap goes to the layer before it, up to the place where the fewest bytes cross, and from there to the layer after it.
    """
    gaps = [range(left.stop, right.start) for left, right in itertools.pairwise(runs)]
    (gap, *others), size = {tuple(facts.rough[gap.start : gap.stop].tolist()) for gap in gaps}, len(gaps[0])
    cuts: dict[int, float] = {}
    for cut in range(size, -1, -1) if not others else ():
        first, last = runs[0].start - (size - cut), runs[-1].stop + cut
        is_before = _same(facts, range(first, runs[0].start), gap[cut:], within)
        if is_before and _same(facts, range(runs[-1].stop, last), gap[:cut], within):
            cuts[cut] = float(facts.crossing[[left.stop + cut for left in runs[:-1]]].mean())
    if not cuts:
        return runs
    best = min(cuts, key=lambda cut: cuts[cut])
    edges = [run.start - (size - best) for run in runs]
    return [range(a, b) for a, b in itertools.pairwise((*edges, runs[-1].stop + best))]


def _same(facts: Facts, place: range, tokens: tuple[int, ...], within: range) -> bool:
    is_inside = within.start <= place.start and place.stop <= within.stop
    return is_inside and tuple(facts.rough[place.start : place.stop].tolist()) == tokens
