"""Searches a traced program for its repeated layers.

What is looked for:

* loops over stacked parameters, whose body is a layer (`loops.py`);
* checkpoints that the author put around the layers;
* named scopes with numbers (`scopes.py`);
* repeated operations (`repeats.py`).

The find with the most matmuls wins. What lies before and after it is searched again, so that an encoder and a decoder are both
found. Layers follow one another: each reads what the one before made. Heads and experts, which run side by side, are no layers.

Where layers lie inside another part of the program, that part is searched too: a jit with shardings, a `shard_map`, a loop over
microbatches, one checkpoint around all layers.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxremat.policy.cut import checkpoints_around
from jaxremat.policy.found import FoundBy, LeftAlone
from jaxremat.policy.jax_private import callee
from jaxremat.policy.loops import made_of, why_not_layers
from jaxremat.policy.names import users_line
from jaxremat.policy.program import CALLS, DERIVATIVE_CALLS, Equation, Program, flatten
from jaxremat.policy.repeats import find_repeat
from jaxremat.policy.scopes import Family, families, path_of
from jaxremat.policy.signature import Facts, read_facts

#: Layers have at least this share of the matmuls of the program that they are found in.
_LEAST_SHARE = 0.1
#: Checkpoints around layers, and layers inside layers, have at least this share of the matmuls of the whole.
_MOST = 2 / 3
#: Up to this many repeated parts that contain layers themselves are towers or stages. The layers inside them are taken.
_FEW = 3
#: Repeated operations are preferred to named scopes if they have at least this many times the matmuls.
_MORE = 1.5


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers one after another.

    Attributes:
        found_by: how they were found.
        layers: the range of equations of each layer. For a loop it is the one equation of the loop.
        num_layers: number of layers.
        parent: the path of the scope that the layers are in.
        scopes: the scope of each layer. Empty for layers without a scope of their own.
    """

    found_by: FoundBy
    layers: tuple[range, ...]
    num_layers: int
    parent: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()

    @property
    def span(self) -> range:
        """The equations from the first layer to the last."""
        return range(self.layers[0].start, self.layers[-1].stop)


@dataclass(frozen=True, eq=False)
class Level:
    """A program, the stacks of layers in it, and the parts of it that have layers inside.

    Attributes:
        facts: the program.
        stacks: the stacks in the program's order.
        inside: by the number of an equation, the level of the program that it calls. Only those with layers.
        left_alone: the loops, checkpoints and other calls that aren't layers.
        patterns: the numbered scopes that there are, as `layers=` takes them.
    """

    facts: Facts
    stacks: tuple[Stack, ...]
    inside: Mapping[int, "Level"] = field(default_factory=dict)
    left_alone: tuple[LeftAlone, ...] = ()
    patterns: tuple[str, ...] = ()

    def levels(self, is_mapped: bool = False) -> "Iterator[tuple[Level, bool]]":
        """This level and those inside it, each with whether it is inside a shard_map."""
        yield self, is_mapped
        for n, level in self.inside.items():
            yield from level.levels(is_mapped or self.facts.program.equations[n].kind == "shard_map")


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A stack that could be taken, or an equation with a level inside.

    `weight` is its number of matmuls, for comparing.
    """

    span: range
    weight: float
    stack: Stack | None = None


def search_program(program: Program, parameters: Sequence[int], patterns: Sequence[str] = ()) -> Level:
    """The layers of a program.

    Args:
        program: the program, from `flatten`.
        parameters: the numbers of the program's inputs that are parameters.
        patterns: glob patterns of the scopes of the layers. Without patterns all ways of finding layers are tried.
    """
    whole, constants = range(len(program.equations)), dict(program.constants)
    data = set(program.inputs) - set(parameters)
    free = made_of(program, (*parameters, *constants), data)
    facts = read_facts(program, free, fixed=free if data else made_of(program, constants, program.inputs))
    inside = {n: level for n in whole if (level := _called_level(facts, n, patterns)) is not None}
    taken = _select(facts, inside, tuple(patterns), whole)
    stacks = tuple(candidate.stack for candidate in taken if candidate.stack is not None)
    opened = {candidate.span.start: inside[candidate.span.start] for candidate in taken if candidate.stack is None}
    left = dict.fromkeys(_parts_left_alone(facts, stacks, opened))
    found = families(facts, whole)
    return Level(facts, stacks, opened, tuple(left), tuple(dict.fromkeys(family.pattern for family in found)))


def inner_program(equation: Equation) -> Program:
    """The program that an equation calls."""
    return flatten(callee(equation.eqn))


def _called_level(facts: Facts, n: int, patterns: Sequence[str]) -> Level | None:
    """The level of the program that equation number `n` calls.

    None if there are no layers in it, or no policy can get there.
    """
    equation = facts.program.equations[n]
    if equation.kind not in ("scan", "checkpoint", "shard_map", *CALLS) or facts.heavy[n] < 2:
        return None
    program = inner_program(equation)
    pairs = zip(program.inputs, equation.inputs, strict=True)
    parameters = [own for own, atom in pairs if not isinstance(atom, int) or atom in facts.parameters]
    level = search_program(program, parameters, patterns)
    return level if level.stacks or level.inside else None


def _select(facts: Facts, inside: Mapping[int, Level], patterns: tuple[str, ...], within: range) -> list[_Candidate]:
    """The candidates to take in a range of equations, in the program's order."""
    least = _LEAST_SHARE * facts.num_heavy(range(len(facts.heavy)))
    found = [candidate for candidate in _candidates(facts, inside, patterns, within) if candidate.weight >= least]
    best = max(found, key=lambda candidate: candidate.weight, default=None)
    if best is None:
        return []
    before = _select(facts, inside, patterns, range(within.start, best.span.start))
    after = _select(facts, inside, patterns, range(best.span.stop, within.stop))
    return [*before, *(_layers_inside(facts, inside, patterns, best) or [best]), *after]


def _layers_inside(
    facts: Facts, inside: Mapping[int, Level], patterns: tuple[str, ...], best: _Candidate
) -> list[_Candidate]:
    """The layers of a few towers or stages, to be taken in their place.

    Empty if `best` has layers and no towers.
    """
    stack = best.stack
    if stack is None or stack.found_by == "scan" or patterns:
        return []
    kinds = [facts.kind(layer) for layer in stack.layers]
    if len(kinds) > _FEW and len(set(kinds)) < len(kinds):
        return []
    found = [candidate for layer in stack.layers for candidate in _select(facts, inside, patterns, layer)]
    stacks = [candidate.stack for candidate in found if candidate.stack]
    covered = sum(facts.num_heavy(layer) for other in stacks for layer in other.layers)
    num_layers = sum(other.num_layers for other in stacks)
    are_blocks = all(other.found_by == "scan" or facts.num_heavy(other.layers[0]) > 1 for other in stacks)
    is_most = covered >= _MOST * facts.num_heavy(stack.span) and num_layers > stack.num_layers
    return found if stacks and are_blocks and is_most else []


def _candidates(facts: Facts, inside: Mapping[int, Level], patterns: tuple[str, ...], within: range) -> Iterator[_Candidate]:
    """Everything in a range of equations that could be layers.

    Of equal weights the first is the best.
    """
    equations = facts.program.equations
    for family in families(facts, within):
        if _follow_on(facts, family.layers) and (not patterns or family.matches(patterns)):
            stack = Stack("scope", family.layers, len(family.layers), family.parent, family.scopes)
            yield _Candidate(stack.span, sum(facts.num_heavy(layer) for layer in family.layers), stack)
    checkpoints = tuple(range(n, n + 1) for n in within if equations[n].kind == "checkpoint" and facts.heavy[n])
    for chain in _chains(facts, checkpoints) if not patterns else ():
        stack = Stack("checkpoint", chain, len(chain))
        num_inside = sum(facts.num_heavy(layer) for layer in chain)
        if num_inside >= _MOST * facts.num_heavy(stack.span):
            yield _Candidate(stack.span, num_inside, stack)
    for n in within:
        place, weight = range(n, n + 1), int(facts.heavy[n])
        if equations[n].kind == "scan" and not why_not_layers(equations[n].eqn, equations[n].inputs, facts.parameters):
            stack = Stack("scan", (place,), equations[n].eqn.params["length"], path_of(equations[n]))
            if not patterns or Family(stack.parent[:-1], "", stack.parent[-1:], ()).matches(patterns):
                yield _Candidate(place, weight, stack)
        elif n in inside:
            yield _Candidate(place, weight)
    for chain in _chains(facts, find_repeat(facts, within)) if not patterns else ():
        stack = Stack("repeat", chain, len(chain))
        yield _Candidate(stack.span, sum(facts.num_heavy(layer) for layer in chain) / _MORE, stack)


def _chains(facts: Facts, layers: Sequence[range]) -> list[tuple[range, ...]]:
    """The longest runs of layers that follow on.

    An encoder that is called for two inputs has two such runs.
    """
    chains: list[tuple[range, ...]] = []
    for layer in layers:
        if chains and _follow_on(facts, (chains[-1][-1], layer)):
            chains[-1] = (*chains[-1], layer)
        else:
            chains.append((layer,))
    return [chain for chain in chains if len(chain) > 1]


def _follow_on(facts: Facts, layers: Sequence[range]) -> bool:
    """Whether a matmul of each layer depends on the data of the layer before it.

    That is something made from the data since the start of that layer.

    Adding up the results of heads that all read the same value isn't enough.
    """
    equations = facts.program.equations
    for left, right in itertools.pairwise(layers):
        made = {number for n in range(left.start, right.start) for number in equations[n].outputs} - facts.fixed
        for n in right:
            if made.intersection(atom for atom in equations[n].inputs if isinstance(atom, int)):
                if facts.heavy[n]:
                    break
                made.update(equations[n].outputs)
        else:
            return False
    return True


def _parts_left_alone(facts: Facts, stacks: Sequence[Stack], opened: Mapping[int, Level]) -> Iterator[LeftAlone]:
    """The loops, branches, checkpoints and custom derivatives that stay as they are."""
    equations = facts.program.equations
    replaced = {e for s in stacks for layer in s.layers for e in checkpoints_around(equations[layer.start : layer.stop])}
    loops = {stack.layers[0].start for stack in stacks if stack.found_by == "scan"}
    total = facts.num_heavy(range(len(equations)))
    for n, equation in enumerate(equations):
        if n in loops or equation in replaced or not facts.heavy[n]:
            continue
        what, why = "", ""
        match equation.kind:
            case "scan":
                what = f"a loop of {equation.eqn.params['length']} iterations"
                why = why_not_layers(equation.eqn, equation.inputs, facts.parameters) or "other layers were taken"
                why += "; the layers inside it were found" if n in opened else ""
            case "while":
                what, why = "a while loop", "JAX can't differentiate it backwards"
            case "cond":
                what, why = "a branch", "its sides aren't layers"
            case "checkpoint" if n not in opened:
                what, why = "a checkpoint", "it isn't around a layer"
            case kind if kind in DERIVATIVE_CALLS and facts.heavy[n] > total / 2:
                what, why = "a custom derivative", "its own rule says what it saves"
        if what:
            yield LeftAlone(what, users_line(equation.eqn), why)
