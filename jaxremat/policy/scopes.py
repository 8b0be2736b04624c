"""Finds layers by named scopes that differ in a number.

Flax Linen writes such scopes: `Model/block_0/...`, `Model/block_1/...`.

A family is the scopes of one parent that have one name but for the number. Its layers lie one after the other in the program.
Between two of them there may be operations of the parent, such as a residual connection. They belong to the layer before them if
they are the same after every layer.

A parent may write two families in turn, `attention_0, mlp_0, attention_1, mlp_1`. Both then make up the layers: layer 0 reaches
from the start of `attention_0` to the start of `attention_1`.
"""

import fnmatch
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxremat.policy.program import Equation
from jaxremat.policy.signature import Facts

_NUMBERED = re.compile(r"(.*?)[_.\-]?(\d+)")


@dataclass(frozen=True)
class Family:
    """Numbered scopes of one parent.

    Attributes:
        parent: the path of the parent, such as `("Model",)`.
        base: the name without the number.
        scopes: the names with their numbers, in the program's order.
        layers: for each scope the range of equations that is its layer. No two overlap.
    """

    parent: tuple[str, ...]
    base: str
    scopes: tuple[str, ...]
    layers: tuple[range, ...]

    @property
    def pattern(self) -> str:
        """The family as `layers=` takes it, such as `Model/block_*`."""
        return "/".join((*self.parent, f"{self.base}_*"))

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether a glob pattern matches one of the scopes, by its name or by its path."""
        names = [name for scope in self.scopes for name in (scope, "/".join((*self.parent, scope)))]
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def path_of(equation: Equation) -> tuple[str, ...]:
    """The equation's named scopes, outermost first, without the names of methods.

    For example, `Model/block_0.attend` has two.
    """
    return tuple(part.partition(".")[0] or part for scope in equation.scopes for part in scope.split("/") if part)


def without_number(scope: str) -> str | None:
    """The name of a scope without its number: `block` for `block_3`.

    None if the scope has no number at its end.
    """
    match = _NUMBERED.fullmatch(scope)
    return match[1] or "layer" if match else None


def families(facts: Facts, within: range) -> list[Family]:
    """All families in a range of the program's equations that have two scopes or more."""
    siblings: dict[tuple[tuple[str, ...], str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n in within:
        path = path_of(facts.program.equations[n])
        for depth, scope in enumerate(path):
            if (base := without_number(scope)) is not None:
                siblings[path[:depth], base][scope].append(n)
    found = []
    for (parent, base), numbers in siblings.items():
        spans = [(range(min(places), max(places) + 1), scope) for scope, places in numbers.items()]
        spans.sort(key=lambda span: span[0].start)
        runs = [run for run, _ in spans]
        if len(runs) > 1 and all(left.stop <= right.start for left, right in itertools.pairwise(runs)):
            layers = _with_what_follows(facts, runs, within)
            found.append(Family(parent, base, tuple(scope for _, scope in spans), tuple(layers)))
    return found


def _with_what_follows(facts: Facts, runs: list[range], within: range) -> list[range]:
    """The runs, each with the equations up to the next one, if these are always the same."""
    gaps = [range(left.stop, right.start) for left, right in itertools.pairwise(runs)]
    last = range(runs[-1].stop, min(runs[-1].stop + len(gaps[0]), within.stop))
    follows = {tuple(facts.rough[gap.start : gap.stop].tolist()) for gap in (*gaps, last)}
    if len(follows) != 1:
        return runs
    return [range(run.start, gap.stop) for run, gap in zip(runs, [*gaps, last], strict=True)]
