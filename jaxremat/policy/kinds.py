"""The layers of a searched program as functions, and the checkpoint names of their values.

A layer's own scope isn't part of its names. The value `Model/block_3/mlp/dot_general` is called `mlp/dot_general` in every
block, so that one policy serves them all. Where a program has several kinds of layers, each kind's names begin with the kind:
`encoder/mlp/dot_general` and `decoder/mlp/dot_general`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxremat.errors import UsageError
from jaxremat.policy.autoname import name_values, names_alone, unused_name
from jaxremat.policy.called import Function, called, comes_from, is_linens, users_lines
from jaxremat.policy.cut import Piece, checkpoints_around, cut, opened, renamed
from jaxremat.policy.find import Level, Stack, inner_program, read_frozen
from jaxremat.policy.found import Kind, Variant
from jaxremat.policy.jax_private import is_transformed, num_operands
from jaxremat.policy.names import all_written_names, users_line
from jaxremat.policy.program import Equation
from jaxremat.policy.scopes import path_of, without_number
from jaxremat.policy.signature import num_bytes, num_heavy


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a stack, or the body of a loop.

    Attributes:
        piece: the layer's equations, with the scopes that are part of its names.
        scopes: the scopes that the layer is in.
        prefix: the beginning of its values' own names.
    """

    piece: Piece
    scopes: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True, eq=False)
class _Group:
    """The layers of one kind in a stack.

    `is_mapped` is true inside a shard_map, whose axes only exist while it runs. `parent` is the path before the layers' names,
    where other layers have these names too. `frozen` has the numbers of the values that are made of frozen parameters alone.
    `in_transform` is true in a scan or other call that a transformation such as vmap is around.
    """

    level: Level
    stack: Stack
    places: tuple[int, ...]
    prefix: str
    is_mapped: bool
    parent: str
    frozen: Set[int]
    in_transform: bool

    @functools.cached_property
    def variants(self) -> dict[int, int]:
        """How many layers have exactly the same operations, the most first.

        The keys are the numbers in the stack of the first such layer.
        """
        if self.stack.in_scan:
            return {0: self.stack.num_layers}
        exact = {i: self.level.facts.exact(self.stack.layers[i]) for i in self.places}
        return {next(i for i in self.places if exact[i] == one): n for one, n in Counter(exact.values()).most_common()}

    @functools.cached_property
    def called(self) -> Function | None:
        """The function that each layer is one call of, which other layers may call too.

        Layers that `vmap` maps have none, as they have no `Kind.module`. Each operation of a mapped layer is mapped. A layer may
        itself map some, as attention does.
        """
        equations = self.level.facts.program.equations
        around = equations[self.stack.span.start]
        layers = [_body(self)] if self.stack.in_scan else [opened(equations[r.start : r.stop]) for r in self.ranges]
        are_mapped = [all(is_transformed(equation.name_stack) for equation in layer) for layer in layers]
        if self.in_transform or any(are_mapped) or (self.stack.in_scan and is_transformed(around.name_stack)):
            return None
        return called(layers)

    @property
    def ranges(self) -> list[range]:
        """The equations of each layer. Those of a scan are the one of the scan."""
        return [self.stack.layers[i] for i in self.places]


@dataclass(frozen=True, eq=False)
class LayerKinds:
    """The kinds of layers of a searched program."""

    groups: tuple[_Group, ...]
    whole: Level

    def layer(self, level: Level, stack: Stack, i: int) -> Layer:
        """Layer number `i` of a stack."""
        prefix = next(group.prefix for group in self.groups if group.stack is stack and i in group.places)
        return _layer(level, stack, i, prefix)

    def named(self, layer: Layer) -> Callable[..., Any]:
        """The layer as a function whose floating-point values all have checkpoint names."""
        shared = self._shared_names

        def run(*values: Any) -> Any:
            return name_values(layer.piece.run, values, prefix=layer.prefix, shared=shared)

        return run

    @functools.cached_property
    def shown(self) -> tuple[Kind, ...]:
        """The kinds, for a person and for the planner."""
        return tuple(map(self._kind, self.groups, _labels(self.groups)))

    @property
    def has_complex(self) -> bool:
        """Whether a layer makes complex values, which JAX fails to save in a checkpoint."""
        layers = [self.layer(group.level, group.stack, i).piece.program for group in self.groups for i in group.variants]
        made = [program.avals[n].dtype for program in layers for e in program.equations for n in e.outputs]
        return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in made)

    @functools.cached_property
    def authors_names(self) -> set[str]:
        """The checkpoint names that the authors of the layers wrote."""
        return set().union(*self._authors_names_by_group)

    @functools.cached_property
    def all_names(self) -> set[str]:
        """The names of the authors and those of `autoname`.

        Inside a shard_map there are only the authors' names.
        """
        traced = [kind for kind, group in zip(self.shown, self.groups, strict=True) if not group.is_mapped]
        return self.authors_names.union(value.name for kind in traced for value in kind.values())

    @functools.cached_property
    def _authors_names_by_group(self) -> list[set[str]]:
        layers = [[self.layer(group.level, group.stack, i).piece for i in group.variants] for group in self.groups]
        return [
            {
                name
                for piece in some
                for name in all_written_names((e.eqn for e in piece.program.equations), not group.is_mapped)
            }
            for group, some in zip(self.groups, layers, strict=True)
        ]

    @functools.cached_property
    def _shared_names(self) -> frozenset[str]:
        """The names that authors wrote in several kinds of layers."""
        times = Counter(name for names in self._authors_names_by_group for name in names)
        return frozenset(name for name, count in times.items() if count > 1)

    @functools.cached_property
    def _called(self) -> dict[_Group, Function | None]:
        """`Kind.called` of each group."""
        by_function = dict[Function, list[_Group]]()
        for group in self.groups:
            if group.called:
                by_function.setdefault(group.called, []).append(group)
        called = dict[_Group, Function | None].fromkeys(self.groups)
        for function, groups in by_function.items():
            own = {e for g in groups for r in g.ranges for e in g.level.facts.program.equations[r.start : r.stop]}
            if not any(comes_from(other, function) for other in self.whole.others(own)):
                called.update(dict.fromkeys(groups, function))
        return called

    def _kind(self, group: _Group, label: str) -> Kind:
        stack = group.stack
        layer, *others = [self.layer(group.level, stack, i) for i in group.variants]
        return Kind(
            label=label,
            found_by=stack.found_by,
            num_layers=sum(group.variants.values()),
            in_scan=stack.in_scan,
            cut_bytes=_carry_bytes(group) if stack.in_scan else _cut_bytes(group),
            function=_refused if group.is_mapped else self.named(layer),
            args=layer.piece.args,
            prefix=layer.prefix,
            frozen=self._frozen(group),
            module=_module(group),
            checkpoint=_checkpoint(group),
            called=lambda: self._called[group],
            is_stack=_is_stack(group),
            names_alone=functools.partial(self._names_alone, group),
            others=tuple(
                Variant(num_layers, _refused if group.is_mapped else self.named(other), other.piece.args)
                for other, num_layers in zip(others, [*group.variants.values()][1:], strict=True)
            ),
        )

    def _names_alone(self, group: _Group) -> dict[str, str]:
        """`Kind.names_alone`. Inside a shard_map there are only the authors' names."""
        names = list[dict[str, str]]()
        for i in group.variants:
            layer = self.layer(group.level, group.stack, i)
            written = all_written_names((e.eqn for e in layer.piece.program.equations), not group.is_mapped)
            args = layer.piece.args
            alone = [piece.run for piece in _alone(group, i, layer, self._called)]
            own = {} if group.is_mapped else names_alone(layer.piece.run, args, layer.prefix, self._shared_names, alone)
            names.append(own | {name: name for name in written})
        first, *others = names
        return {
            name: first.get(name, "") if all(other.get(name) == first.get(name) for other in others) else ""
            for name in {name: None for one in names for name in one}
        }

    def _frozen(self, group: _Group) -> frozenset[int]:
        """The numbers of the arguments of a kind's function that are frozen.

        They are frozen in each layer that the function stands for. None is, where some layers read one value in place of two.
        """
        level, stack, places = group.level, group.stack, [*group.variants][:1]
        if stack.in_scan:
            equation = level.facts.program.equations[stack.span.start]
            program = inner_program(equation)
            inputs, frozen = [program.inputs], read_frozen(equation, program, group.frozen)
        else:
            same = level.facts.exact(stack.layers[places[0]])
            places = [i for i in group.places if level.facts.exact(stack.layers[i]) == same]
            inputs, frozen = [self.layer(level, stack, i).piece.inputs for i in places], group.frozen
        is_alike = len({*map(len, inputs)}) == 1
        return frozenset(n for n, numbers in enumerate(zip(*inputs, strict=is_alike)) if is_alike and frozen >= {*numbers})


def layer_kinds(level: Level, frozen: Set[int] = frozenset()) -> LayerKinds:
    """The kinds of layers of a searched program, in the program's order.

    Args:
        level: the searched program.
        frozen: the numbers of its inputs that are frozen parameters.
    """
    frozen_in = dict(level.frozen(frozen))
    found = [
        (inner, stack, places, is_mapped)
        for inner, is_mapped in level.levels()
        for stack in inner.stacks
        for places in _by_kind(inner, stack)
    ]
    groups, taken, transformed = [], set(), {*_transformed(level)}
    short = [_short_name(stack, places) for _, stack, places, _ in found]
    for (inner, stack, places, is_mapped), own in zip(found, short, strict=True):
        parent = "/".join(stack.parent) + "/" if stack.scopes and stack.parent and short.count(own) > 1 else ""
        name = unused_name(parent + own, taken)
        taken.add(name)
        prefix = f"{name}/" if len(found) > 1 else ""
        groups.append(_Group(inner, stack, places, prefix, is_mapped, parent, frozen_in[inner], inner in transformed))
    return LayerKinds(tuple(groups), level)


def _transformed(level: Level) -> Iterator[Level]:
    """The levels inside scans and other calls that a transformation is around."""
    for n, inner in level.inside.items():
        is_around = is_transformed(level.facts.program.equations[n].name_stack)
        yield from (one for one, _ in inner.levels()) if is_around else _transformed(inner)


def _refused(*_: Any) -> Any:
    raise UsageError(
        "these layers are inside a shard_map, and such layers can't be planned",
        allowed="the named policies, such as dots, and names that the author of the layers wrote",
        next_step="plan the layers on one device, outside of the shard_map",
    )


def _by_kind(level: Level, stack: Stack) -> list[tuple[int, ...]]:
    """The numbers of the layers of each kind in a stack. All layers of a loop are one kind."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for i, layer in enumerate(stack.layers):
        kinds.setdefault(level.facts.kind(layer), []).append(i)
    return [tuple(places) for places in kinds.values()]


def _short_name(stack: Stack, places: Sequence[int]) -> str:
    """A name of a kind of layers, with which the names of its values begin.

    For example, `block` for all the blocks, and `block_1` for some of them.
    """
    if stack.scopes:
        own = stack.scopes[places[0]]
        return (without_number(own) or own) if len(places) == len(stack.layers) else own
    return stack.parent[-1] if stack.parent else "layers"


def _labels(groups: Sequence[_Group]) -> list[str]:
    """What each kind is called.

    Kinds at one place have the line at which they are called, or else the shape of what comes to them, if it tells them apart.
    """
    labels = [_label(group) for group in groups]
    for tell_apart in (_calls, _shapes):
        same: dict[str, list[int]] = {}
        for n, label in enumerate(labels):
            same.setdefault(label, []).append(n)
        for label, places in same.items():
            texts = tell_apart([groups[n] for n in places])
            for n, text in zip(places, texts, strict=True):
                labels[n] = f"{label}, {text}" if len({*texts}) > 1 else label
    return labels


def _calls(groups: Sequence[_Group]) -> list[str]:
    """The outermost line of the user's code at which the calls of these layers part."""
    lines = zip(*(users_lines(_first(group)) for group in groups), strict=False)
    apart = next((some for some in lines if len({*some}) > 1), ())
    return [f"called at {line}" for line in apart] or [""] * len(groups)


def _shapes(groups: Sequence[_Group]) -> list[str]:
    """The shape of the largest value, parameters apart, that comes to a layer."""
    texts = []
    for group in groups:
        facts, place = group.level.facts, group.stack.layers[group.places[0]]
        inputs = cut(facts.program, place.start, place.stop).inputs
        avals = [facts.program.avals[number] for number in inputs if number not in facts.fixed]
        texts.append(f"reading {max(avals, key=num_bytes).str_short()}" if avals else "")
    return texts


def _first(group: _Group) -> Equation:
    """The first operation of the first layer."""
    return group.level.facts.program.equations[group.stack.layers[group.places[0]].start]


def _label(group: _Group) -> str:
    stack = group.stack
    if stack.scopes:
        scopes = [group.parent + stack.scopes[i] for i in group.places]
        return scopes[0] if len(scopes) == 1 else ", ".join(scopes) if len(scopes) < 3 else f"{scopes[0]} to {scopes[-1]}"
    place = users_line(_first(group).eqn)
    return " ".join([f"at {place}"] * bool(place) + [f"in {'/'.join(stack.parent)}"] * bool(stack.parent))


def _layer(level: Level, stack: Stack, i: int, prefix: str) -> Layer:
    program = level.facts.program
    if stack.in_scan:
        body = Piece(inner_program(program.equations[stack.span.start]))
        return Layer(renamed(body, _scopes_within(_common_scopes(body))), (), prefix)
    piece = cut(program, stack.layers[i].start, stack.layers[i].stop)
    if stack.scopes:
        return Layer(
            renamed(piece, lambda equation: _own_scopes(equation, stack, i)), (*stack.parent, stack.scopes[i]), prefix
        )
    common = _common_scopes(piece)
    return Layer(renamed(piece, _scopes_within(common)), common, prefix)


def _module(group: _Group) -> str:
    """The named scope that each layer is all of, as `Kind.module` has it.

    A layer that `vmap` maps isn't: it has other operations than the module alone, so that its values have other names.
    """
    stack, equations = group.stack, group.level.facts.program.equations
    if group.in_transform:
        return ""
    if stack.in_scan:
        inside = _body(group)
        scope = path_of(inside[0])[:1]
        is_mapped = is_transformed(equations[stack.span.start].name_stack)
        return scope[0].partition(".")[0] if _is_within(inside, scope) and not is_mapped else ""
    scopes = zip(stack.scopes, stack.layers, strict=True) if stack.scopes else ()
    are_modules = [_is_within(equations[layer.start : layer.stop], (*stack.parent, scope)) for scope, layer in scopes]
    return _short_name(stack, group.places) if are_modules and all(are_modules) else ""


def _checkpoint(group: _Group) -> str:
    """`Kind.checkpoint`."""
    layer = group.ranges[0]
    inside = group.level.facts.program.equations[layer.start : layer.stop]
    around = checkpoints_around(inner_program(inside[0]).equations if group.stack.in_scan else inside)
    return next((users_line(checkpoint.eqn) for checkpoint in around), "")


def _is_stack(group: _Group) -> bool:
    """`Kind.is_stack`."""
    stack = group.stack
    if not stack.in_scan:
        return len(group.places) == len(stack.layers)
    eqn = group.level.facts.program.equations[stack.span.start].eqn
    return stack.found_by == "scan" and not eqn.params["reverse"] and len(eqn.outvars) == num_operands(eqn)[1]


def _body(group: _Group) -> Sequence[Equation]:
    """The equations of a loop's body.

    They are without the author's checkpoint around them, which a policy replaces.
    """
    return opened(inner_program(group.level.facts.program.equations[group.stack.span.start]).equations)


def _is_within(equations: Sequence[Equation], scope: tuple[str, ...]) -> bool:
    """Whether equations are in a scope that is in no transformation."""
    depth = len(scope)
    return bool(scope) and all(path_of(e)[:depth] == scope and not is_transformed(e.name_stack, depth) for e in equations)


def _common_scopes(piece: Piece) -> tuple[str, ...]:
    """The scopes that all matmuls of a layer are in."""
    return _shared([path_of(equation) for equation in piece.program.equations if num_heavy(equation.eqn)])


def _shared(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The scopes with which all paths begin."""
    first, *others = paths or [()]
    while first and any(path[: len(first)] != first for path in others):
        first = first[:-1]
    return first


def _alone(group: _Group, i: int, layer: Layer, called: Mapping[_Group, Function | None]) -> list[Piece]:
    """Layer number `i` in the scopes in which it is traced alone, in each way that is possible.

    Its call is in the scopes that all its operations are in, but for those that it opens itself. A module of Linen opens one, the
    last. It may be a module of which several kinds of layers are calls, or of a larger one that is of one kind. Else nothing is
    known but that a scope of operations outside of the layers is around the call.

    Scopes inside the author's checkpoint stay. The outermost of all operations isn't part of their names. Empty where that isn't
    enough.
    """
    program, stack, function = group.level.facts.program, group.stack, called[group]
    place = stack.layers[i]
    piece = Piece(inner_program(program.equations[place.start])) if stack.in_scan else cut(program, place.start, place.stop)
    num_outer = len(_shared([path_of(equation) for equation in piece.program.equations]))
    own = _shared([path_of(equation) for equation in opened(piece.program.equations)])
    if any(is_linens(equation) for equation in piece.program.equations) and (function or _module(group)):
        is_shared = sum(other == function for other in called.values()) > 1
        around = [max(len(own) - 1, 0)] * bool(function)
        around += [min(len(stack.parent), num_outer)] * (is_shared or not function)
        is_enough = max(around) <= num_outer
    elif function:
        layers = {n for one in group.level.stacks for n in range(one.span.start, one.span.stop)}
        others = [] if stack.in_scan else [e for n, e in enumerate(program.equations) if n not in layers]
        least = max((len(_shared((own, path_of(e)))) for e in others), default=0)
        around, is_enough = range(min(least, num_outer), num_outer + 1), len(own) <= num_outer + 1
    else:
        return [layer.piece]
    return [renamed(piece, _scopes_within(own[:num])) for num in around] if is_enough else []


def _scopes_within(common: tuple[str, ...]) -> Callable[[Equation], tuple[str, ...]]:
    """A function that gives the scopes of an equation within the scopes `common`."""
    return lambda equation: path[len(common) :] if (path := path_of(equation))[: len(common)] == common else path


def _own_scopes(equation: Equation, stack: Stack, i: int) -> tuple[str, ...]:
    """The scopes of an equation within its layer, without the layer's own scope and number."""
    path, depth = path_of(equation), len(stack.parent)
    if path[:depth] != stack.parent or len(path) == depth:
        return path[depth:]
    own, *rest = path[depth:]
    return tuple(rest) if own == stack.scopes[i] else (without_number(own) or own, *rest)


def _cut_bytes(group: _Group) -> int:
    """The bytes that come to a layer from those before it.

    Of what a layer makes, the first later one that reads it counts it. What was made before all layers, such as a mask, isn't
    counted, but where the one layer of a group is the first of all.
    """
    facts, stack, known, num_bytes_by_layer = group.level.facts, group.stack, set[int](), dict[int, int]()
    equations, is_first = facts.program.equations, group.places == (0,)
    made = {number: n for n, e in enumerate(equations[: stack.span.stop]) for number in e.outputs}
    for i, layer in enumerate(stack.layers):
        read = {atom for e in equations[layer.start : layer.stop] for atom in e.inputs if isinstance(atom, int)}
        start = 0 if is_first else stack.span.start
        new = {n for n in read - facts.fixed - known if start <= made.get(n, -1) < layer.start}
        num_bytes_by_layer[i] = sum(num_bytes(facts.program.avals[n]) for n in new)
        known |= new
    counted = [num_bytes_by_layer[i] for i in group.places if i or is_first]
    return sum(counted) // len(counted)


def _carry_bytes(group: _Group) -> int:
    """The bytes of the values that a loop carries from one iteration to the next."""
    eqn = group.level.facts.program.equations[group.stack.layers[0].start].eqn
    carried = eqn.outvars[: num_operands(eqn)[1]]
    return sum(var.aval.size * var.aval.dtype.itemsize for var in carried)
