"""Searches a traced program for its repeated layers.

What is looked for:

* loops over stacked parameters, whose body is a layer, and loops over time, of which each iteration is one (`loops.py`);
* checkpoints that the author put around the layers;
* named scopes with numbers (`scopes.py`);
* repeated operations (`repeats.py`).

The find with the most matmuls wins, or one of about as many whose layers leave fewer bytes between them: of a round of message
passing, the round and not its MLPs. What lies before and after it is searched again, so that an encoder and a decoder are both
found. Layers follow one another: each reads what the one before made. Heads and experts, which run side by side, are no layers.

Where layers lie inside another part of the program, that part is searched too: a jit with shardings, a `shard_map`, a loop over
microbatches, one checkpoint around all layers. Where a program has no layers at all, the iterations of its other loops, such as
chunks, are taken for layers.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from jaxremat.policy.cut import checkpoints_around
from jaxremat.policy.found import FoundBy, LeftAlone
from jaxremat.policy.jax_private import callee, num_operands
from jaxremat.policy.loops import depending, is_recurrence, made_of, why_not_layers
from jaxremat.policy.names import users_line
from jaxremat.policy.program import CALLS, DERIVATIVE_CALLS, Equation, Program, flatten
from jaxremat.policy.repeats import find_repeat
from jaxremat.policy.scopes import families, matches, path_of
from jaxremat.policy.signature import Facts, num_bytes, read_facts

#: The lines of the user's code that make layers have at least this share of the matmuls of the program that they are found in.
_LEAST_SHARE = 0.1
#: Checkpoints around layers, and layers inside layers, have at least this share of the matmuls of the whole.
_MOST = 2 / 3
#: Up to this many repeated parts that contain layers themselves are towers or stages. The layers inside them are taken.
_FEW = 3
#: Repeated operations are preferred to named scopes if they have at least this many times the matmuls.
_MORE = 1.5
#: Other layers are preferred if they leave at most this share of the bytes.
_MUCH_LESS = 0.8


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers one after another.

    Attributes:
        found_by: how they were found.
        layers: the range of equations of each layer. For a scan it is the one equation of the scan.
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
    def in_scan(self) -> bool:
        """Whether the layers are the iterations of one scan."""
        return self.found_by in ("scan", "loop")

    @property
    def span(self) -> range:
        """The equations from the first layer to the last."""
        return range(self.layers[0].start, self.layers[-1].stop)

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether a glob pattern matches the layers' scopes, or the scope that the scan is in."""
        return (
            matches(self.parent, self.scopes, patterns)
            if self.scopes
            else matches(self.parent[:-1], self.parent[-1:], patterns)
        )


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

    def others(self, own: Set[Equation]) -> Iterator[Equation]:
        """The operations that aren't in `own`, those inside scans and checkpoints included."""
        for n, equation in enumerate(self.facts.program.equations):
            if equation not in own:
                yield equation
                yield from self.inside[n].others(own) if n in self.inside else _inside(equation)

    def frozen(self, inputs: Set[int]) -> "Iterator[tuple[Level, Set[int]]]":
        """This level and those inside it, each with its values made of frozen parameters alone.

        `inputs` has the numbers of those inputs of this level's program that are such values.
        """
        program = self.facts.program
        found = made_of(program, inputs, {*program.inputs} - inputs)
        yield self, found
        for n, level in self.inside.items():
            yield from level.frozen(read_frozen(program.equations[n], level.facts.program, found))


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What is searched for.

    Scopes that match `patterns`, if there are any, and with `any_loop` the iterations of any scan.
    """

    patterns: tuple[str, ...] = ()
    any_loop: bool = False


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
    level = _search(program, parameters, _Wanted(tuple(patterns)))
    found = any(inner.stacks for inner, _ in level.levels())
    return level if found else _search(program, parameters, _Wanted(tuple(patterns), any_loop=True))


def _search(program: Program, parameters: Sequence[int], wanted: "_Wanted") -> Level:
    whole, constants = range(len(program.equations)), dict(program.constants)
    data = set(program.inputs) - set(parameters)
    free = made_of(program, (*parameters, *constants), data)
    untouched = program.avals.keys() - depending(program, program.inputs)
    facts = read_facts(program, free, untouched, fixed=free if data else made_of(program, constants, program.inputs))
    inside = {n: level for n in whole if (level := _called_level(facts, n, wanted)) is not None}
    taken = _select(facts, inside, wanted, whole)
    stacks = tuple(candidate.stack for candidate in taken if candidate.stack is not None)
    opened = {candidate.span.start: inside[candidate.span.start] for candidate in taken if candidate.stack is None}
    left = dict.fromkeys(_parts_left_alone(facts, stacks, opened))
    found = families(facts, whole)
    return Level(facts, stacks, opened, tuple(left), tuple(dict.fromkeys(family.pattern for family in found)))


def read_frozen(equation: Equation, program: Program, frozen: Set[int]) -> Set[int]:
    """The inputs of a called program that are frozen.

    What a scan carries isn't.

    Args:
        equation: the equation that calls the program.
        program: the called program.
        frozen: the frozen values of the program that has the equation.
    """
    first, num_carry = num_operands(equation.eqn) if equation.kind == "scan" else (0, 0)
    carried = program.inputs[first : first + num_carry]
    pairs = zip(program.inputs, equation.inputs, strict=True)
    return {own for own, atom in pairs if isinstance(atom, int) and atom in frozen}.difference(carried)


def inner_program(equation: Equation) -> Program:
    """The program that an equation calls."""
    return flatten(callee(equation.eqn))


def _inside(equation: Equation) -> Iterator[Equation]:
    """The operations inside a scan or a checkpoint."""
    for inner in inner_program(equation).equations if equation.kind in ("scan", "checkpoint") else ():
        yield inner
        yield from _inside(inner)


def _called_level(facts: Facts, n: int, wanted: _Wanted) -> Level | None:
    """The level of the program that equation number `n` calls.

    None if there are no layers in it, or no policy can get there.
    """
    equation = facts.program.equations[n]
    if equation.kind not in ("scan", "checkpoint", "shard_map", *CALLS) or facts.heavy[n] < 2:
        return None
    program = inner_program(equation)
    pairs = zip(program.inputs, equation.inputs, strict=True)
    parameters = [own for own, atom in pairs if not isinstance(atom, int) or atom in facts.parameters]
    level = _search(program, parameters, wanted)
    return level if level.stacks or level.inside else None


def _select(facts: Facts, inside: Mapping[int, Level], wanted: _Wanted, within: range) -> list[_Candidate]:
    """The candidates to take in a range of equations, in the program's order."""
    least = _LEAST_SHARE * facts.num_heavy(range(len(facts.heavy)))
    found = [c for c in _candidates(facts, inside, wanted, within) if facts.num_of_lines(c.span) >= least]
    best = max(found, key=lambda candidate: candidate.weight, default=None)
    if best is None:
        return []
    best = _fewest_left(facts, found, best)
    before = _select(facts, inside, wanted, range(within.start, best.span.start))
    after = _select(facts, inside, wanted, range(best.span.stop, within.stop))
    return [*before, *(_layers_inside(facts, inside, wanted, best) or [best]), *after]


def _fewest_left(facts: Facts, found: Sequence[_Candidate], best: _Candidate) -> _Candidate:
    """Of layers of about as many matmuls, those that leave the fewest bytes between them.

    It is `best` itself if nothing lies between its layers.
    """
    if best.stack is None or not any(left.stop < right.start for left, right in itertools.pairwise(best.stack.layers)):
        return best
    least = _MOST * _num_inside(facts, best.stack)
    rivals = [
        other for other in found if other.stack and not other.stack.in_scan and _num_inside(facts, other.stack) >= least
    ]
    spans = [candidate.span for candidate in (best, *rivals)]
    place = range(min(span.start for span in spans), max(span.stop for span in spans))
    left = {candidate: _left_bytes(facts, candidate.stack, place) for candidate in (best, *rivals) if candidate.stack}
    other = min(left, key=lambda candidate: left[candidate])
    return other if left[other] <= _MUCH_LESS * left[best] else best


def _num_inside(facts: Facts, stack: Stack) -> int:
    return sum(facts.num_heavy(layer) for layer in stack.layers)


def _left_bytes(facts: Facts, stack: Stack, place: range) -> int:
    """The bytes of what is made in a place, without what only its own layer reads."""
    cut = {n: number for number, layer in enumerate(stack.layers) for n in layer}
    equations, made, left = facts.program.equations, dict[int, int](), set[int]()
    for n in place:
        for atom in equations[n].inputs:
            if isinstance(atom, int) and atom in made and made[atom] != cut.get(n, -1):
                left.add(atom)
        made.update(dict.fromkeys(equations[n].outputs, cut.get(n, -1)))
    left.update(number for number, layer in made.items() if layer < 0)
    return sum(num_bytes(facts.program.avals[number]) for number in left - facts.fixed)


def _layers_inside(facts: Facts, inside: Mapping[int, Level], wanted: _Wanted, best: _Candidate) -> list[_Candidate]:
    """The layers of a few towers or stages, to be taken in their place.

    Empty if `best` has layers and no towers.
    """
    stack = best.stack
    if stack is None or stack.in_scan or wanted.patterns:
        return []
    kinds = [facts.kind(layer) for layer in stack.layers]
    if len(kinds) > _FEW and len(set(kinds)) < len(kinds):
        return []
    found = [candidate for layer in stack.layers for candidate in _select(facts, inside, wanted, layer)]
    stacks = [candidate.stack for candidate in found if candidate.stack]
    covered = sum(facts.num_heavy(layer) for other in stacks for layer in other.layers)
    num_layers = sum(other.num_layers for other in stacks)
    are_blocks = all(
        other.in_scan
        or (facts.num_heavy(other.layers[0]) > 1 and len(set(map(facts.kind, other.layers))) < len(other.layers))
        for other in stacks
    )
    is_most = covered >= _MOST * facts.num_heavy(stack.span) and num_layers > stack.num_layers
    return found if stacks and are_blocks and is_most else []


def _candidates(facts: Facts, inside: Mapping[int, Level], wanted: _Wanted, within: range) -> Iterator[_Candidate]:
    """Everything in a range of equations that could be layers.

    Of equal weights the first is the best.
    """
    equations, patterns = facts.program.equations, wanted.patterns
    for family in families(facts, within):
        stack = Stack("scope", family.layers, len(family.layers), family.parent, family.scopes)
        if _follow_on(facts, family.layers) and (
            stack.matches(patterns) if patterns else _saves_something(facts, family.layers)
        ):
            yield _Candidate(stack.span, _num_inside(facts, stack), stack)
    checkpoints = tuple(range(n, n + 1) for n in within if equations[n].kind == "checkpoint" and facts.heavy[n])
    for chain in _chains(facts, checkpoints) if not patterns else ():
        stack = Stack("checkpoint", chain, len(chain))
        if _num_inside(facts, stack) >= _MOST * facts.num_heavy(stack.span):
            yield _Candidate(stack.span, _num_inside(facts, stack), stack)
    for n in within:
        place, weight = range(n, n + 1), int(facts.heavy[n])
        if found_by := _loop_over(facts, n, inside.get(n), wanted):
            stack = Stack(found_by, (place,), equations[n].eqn.params["length"], path_of(equations[n]))
            if not patterns or stack.matches(patterns):
                yield _Candidate(place, weight, stack)
        elif n in inside:
            yield _Candidate(place, weight)
    repeat = () if patterns else find_repeat(facts, within, lambda layers: bool(_chains(facts, layers)))
    for chain in _chains(facts, repeat):
        stack = Stack("repeat", chain, len(chain))
        yield _Candidate(stack.span, _num_inside(facts, stack) / _MORE, stack)


def _saves_something(facts: Facts, layers: Sequence[range]) -> bool:
    """Whether layers are more than single matmuls of shapes that don't repeat.

    The inputs of matmuls are saved in any case.
    """
    return len({facts.kind(layer) for layer in layers}) < len(layers) or any(facts.num_heavy(layer) > 1 for layer in layers)


def _loop_over(facts: Facts, n: int, inside: Level | None, wanted: _Wanted) -> FoundBy | None:
    """Whether equation number `n` scans over layers, or over steps of which each is a layer.

    A recurrence with layers inside it is a loop over layers itself if it has more iterations than they are. One whose steps have
    their author's checkpoint already, such as a loss in chunks, is left as it is beside layers.
    """
    equation = facts.program.equations[n]
    if equation.kind != "scan":
        return None
    if not why_not_layers(equation.eqn, equation.inputs, facts.parameters, facts.constants):
        return "scan"
    num_inside = sum(stack.num_layers for level, _ in inside.levels() for stack in level.stacks) if inside else 0
    is_one = is_recurrence(equation.eqn) and not checkpoints_around(inner_program(equation).equations)
    is_one |= wanted.any_loop and equation.eqn.params["length"] > 1 and not inside
    return "loop" if is_one and equation.eqn.params["length"] > num_inside else None


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
    loops = {stack.layers[0].start for stack in stacks if stack.in_scan}
    total = facts.num_heavy(range(len(equations)))
    for n, equation in enumerate(equations):
        if n in loops or equation in replaced or not facts.heavy[n]:
            continue
        what, why = "", ""
        match equation.kind:
            case "scan":
                what = f"a loop of {equation.eqn.params['length']} iterations"
                why = (
                    why_not_layers(equation.eqn, equation.inputs, facts.parameters, facts.constants)
                    or "other layers were taken"
                )
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
