"""A policy applied to a function as it is, whichever framework it was written with.

    loss = jaxremat.with_policy(loss, "dots")
    gradients = jax.grad(loss)(params, batch)

The function is traced, and its repeated layers are found in the trace (`find.py`). Then the same operations run, each layer
in a `jax.checkpoint` of its own under the policy. So nobody edits the model, and the parameters are those that it has.

    x = embed(params, tokens)                    x = embed(params, tokens)
    x = layer(params[0], x)       becomes        x = jax.checkpoint(layer, policy=...)(params[0], x)
    x = layer(params[1], x)                      x = jax.checkpoint(layer, policy=...)(params[1], x)
    return head(params, x)                       return head(params, x)

A loop over stacked parameters stays a loop. The policy goes inside its body.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax

from jaxremat.errors import UnknownNameError, UsageError
from jaxremat.policy.apply import checkpointed
from jaxremat.policy.calls import Runner, call_with, split_operands
from jaxremat.policy.cut import Piece, cut
from jaxremat.policy.find import Level, Stack, search_program
from jaxremat.policy.found import FoundLayers
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.jax_private import changes_reference, num_operands
from jaxremat.policy.kinds import Layer, LayerKinds, layer_kinds
from jaxremat.policy.names import resolve
from jaxremat.policy.offload import check_layers, check_scan
from jaxremat.policy.program import Equation, bind_equation, flatten, read, run_equation
from jaxremat.policy.spec import NONE, NOTHING, OWN, LayerPolicy, Policy
from jaxremat.policy.stack import run_scanned
from jaxremat.policy.state import ArrayCall, on_arrays

#: Scope patterns as a caller gives them: one, several, or none.
Patterns = str | Sequence[str] | None
#: What the function takes and returns. Under a policy it takes and returns the same.
Args = ParamSpec("Args")
Result = TypeVar("Result")


def with_policy(function: Callable[Args, Result], policy: Policy | str, layers: Patterns = None) -> Callable[Args, Result]:
    """`function`, whose layers save for the backward pass what `policy` says.

    Results, gradients and the tree of parameters are those of `function`. The result can be differentiated, jitted and mapped as
    `function` can. One thing is left out: `every:K` over scanned layers has no forward mode (`jax.jvp`). The result traces
    `function` at each call: call it under `jax.jit`.

    Args:
        function: a function of arrays, such as a loss. Its first argument has the parameters, as for `jax.grad`.
            Arguments that aren't arrays stay as they are. The state of Flax NNX objects among the arguments, such as a model with
            dropout or BatchNorm, is updated as `function` updates it.
        policy: a `Policy` or its text. A policy of several layers (`every:K`, `one-in:K`, a mix) counts the layers of each stack.
            The policy may list names that the author of the layers wrote, and names of `find_layers`.
        layers: the scopes of the layers as glob patterns, such as `"blocks_*"`. None to have them found.

    Returns:
        A function of the same arguments. With the policy `none` it has no checkpoints around its layers, even where the author
        wrote some, and with `own` it is `function` itself. If no layers are found, it is `function` as it is under `none`, and
        other policies are refused.

    Raises:
        UnknownPolicyError: `policy` doesn't parse, or its groups don't fit the number of layers (raised at the call).
        UnknownNameError: no value of a layer carries a name in `policy` (raised at the call).
        UsageError: `function` isn't callable. At the call: no layers were found; the layers change an array in place; the
            function changes an NNX object that isn't among its arguments; or the policy offloads in a scan where a GPU would
            compute wrong gradients (`offload.py`).

    References:
        jax/_src/ad_checkpoint.py (`checkpoint`); jax/_src/core.py (`eval_jaxpr`).
    """
    policy = as_policy(policy)
    if not callable(function):
        raise UsageError(
            f"with_policy got {type(function).__name__!r} as its function",
            allowed="a function of arrays, such as a loss",
            next_step="with_policy(loss, 'dots')",
        )
    if policy == OWN:
        return function

    @functools.wraps(function)
    def under_policy(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with on_arrays(function, args, kwargs) as call:
            level = _search(call, layers)
            stacks = [stack for inner, _ in level.levels() for stack in inner.stacks]
            missing = [pattern for pattern in _patterns(layers) if not any(stack.matches((pattern,)) for stack in stacks)]
            if missing or (not stacks and policy != NONE):
                raise _nothing_found(level, missing)
            _check_references(level, policy)
            kinds = layer_kinds(level)
            named, resolved = _with_names(kinds, policy)
            return call.results(_Run(resolved, kinds, named).level(level, call.arrays))

    return under_policy


def find_layers(function: Callable[..., Any], *args: Any, layers: Patterns = None, **kwargs: Any) -> FoundLayers:
    """The repeated layers of `function(*args, **kwargs)`, where `with_policy` applies a policy.

    Args:
        function: a function of arrays. Its first argument has the parameters.
        *args: its arguments. A `jax.ShapeDtypeStruct` may stand for an array.
        layers: as for `with_policy`.
        **kwargs: further arguments of the function.
    """
    return layers_in(function, args, kwargs, layers)


def layers_in(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layers: Patterns = None,
    num_trained: int | None = None,
) -> FoundLayers:
    """`find_layers`, where only some parameters are trained.

    Args:
        function: as for `find_layers`.
        args: its arguments.
        kwargs: its arguments by name.
        layers: as for `with_policy`.
        num_trained: how many of the first argument's arrays are trained, the first ones. None where all are.
    """
    with on_arrays(function, args, kwargs) as call:
        level = _search(call, layers)
    inputs = level.facts.program.inputs[: call.num_first]
    kinds = layer_kinds(level, frozenset() if num_trained is None else frozenset(inputs[num_trained:]))
    left = tuple(dict.fromkeys(part for inner, _ in level.levels() for part in inner.left_alone))
    return FoundLayers(tuple(kinds.shown), left, _looked_at(level, layers), kinds.has_complex)


# Tracing.


def _search(call: ArrayCall, layers: Patterns) -> Level:
    program = flatten(jax.make_jaxpr(call.function)(call.arrays))
    return search_program(program, program.inputs[: call.num_first], _patterns(layers))


def _patterns(layers: Patterns) -> tuple[str, ...]:
    found = () if layers is None else (layers,) if isinstance(layers, str) else layers
    if not isinstance(found, Sequence) or not all(isinstance(pattern, str) for pattern in found):
        raise UsageError(
            f"layers= got {layers!r}",
            allowed="the scopes of the layers as a glob pattern, or several in a list",
            next_step="layers='blocks_*'",
        )
    return tuple(found)


def _looked_at(level: Level, layers: Patterns) -> tuple[str, ...]:
    """What was searched, a phrase each."""
    levels = [inner for inner, _ in level.levels()]
    scopes = list(dict.fromkeys(pattern for inner in levels for pattern in inner.patterns))
    equations = [equation for inner in levels for equation in inner.facts.program.equations]
    counts = {kind: sum(equation.kind == kind for equation in equations) for kind in ("scan", "checkpoint")}
    return (
        f"{len(equations)} operations" if not _patterns(layers) else "only scopes that match",
        f"{counts['scan']} loops",
        f"{counts['checkpoint']} checkpoints",
        f"scopes with numbers: {', '.join(scopes) or 'none'}",
    )


class NoLayersError(UsageError):
    """No layers were found in a function, or none match the patterns."""


def _nothing_found(level: Level, layers: Sequence[str]) -> NoLayersError:
    got = f"no layers match {', '.join(map(repr, layers))}" if layers else "no repeated layers were found"
    left = dict.fromkeys(part.line() for inner, _ in level.levels() for part in inner.left_alone)
    return NoLayersError(
        got,
        cause="; ".join((*_looked_at(level, layers), *left)),
        allowed="layers in a lax.scan, in jax.checkpoint, in scopes with numbers, or repeated as they are",
        next_step="give the parameters as the first argument; or write jax.named_scope(f'layer_{i}') around each layer, and name "
        "them: layers='layer_*'",
    )


def _check_references(level: Level, policy: Policy) -> None:
    """Raises UsageError for layers that change an array in place under a checkpoint."""
    spans = [inner.facts.program.equations[s.span.start : s.span.stop] for inner, _ in level.levels() for s in inner.stacks]
    if policy != NONE and any(changes_reference(equation.eqn) for span in spans for equation in span):
        raise UsageError(
            f"policy {policy} for layers that change an array in place (jax.new_ref)",
            allowed="the policy none, or layers that return what they change",
            cause="a checkpoint computes its layer twice, and the array would be changed twice",
            next_step="return the new value from each layer, and write it into the reference after the layers",
        )


def _with_names(kinds: LayerKinds, policy: Policy) -> tuple[bool, Policy]:
    """Whether `policy` needs names of `autoname`, and the policy with its names checked."""
    if not policy.names():
        return False, policy
    authors = kinds.authors_names
    with contextlib.suppress(UnknownNameError):
        return False, resolve(policy, authors)
    return True, resolve(policy, kinds.all_names, authors)


# Running the program again, with its layers under a policy.

#: From the first equation of a range to the function that runs the range on the values so far, and where the range ends.
_Steps = dict[int, tuple[Callable[[dict[Any, Any]], None], int]]


@dataclass(frozen=True, eq=False)
class _Run:
    """How the layers of a program are run.

    Attributes:
        policy: the policy, with its names checked.
        kinds: the layers.
        named: whether the layers' values get names of `autoname`.
    """

    policy: Policy
    kinds: LayerKinds
    named: bool

    def level(self, level: Level, values: Sequence[Any], in_scan: bool = False) -> list[Any]:
        """The outputs of a level for its inputs.

        Its author's checkpoint around layers is dropped where it is the only one, and in no scan: it would recompute all that
        the policy saves. In a scan (`in_scan`) or beside others it bounds what is in memory at once, and only `none` drops it.
        """
        program = level.facts.program
        env = {**dict(program.constants), **dict(zip(program.inputs, values, strict=True))}
        steps: _Steps = {}
        for stack in level.stacks:
            steps |= self._loop(level, stack) if stack.in_scan else self._unrolled(level, stack)
        num_checkpoints = sum(program.equations[n].kind == "checkpoint" for n in level.inside)
        for n, inner in level.inside.items():
            kind, params = program.equations[n].kind, program.equations[n].eqn.params
            if kind == "scan":
                check_scan(self.policy, params["length"])
            inside: Runner = functools.partial(self.level, inner, in_scan=in_scan or kind == "scan")
            if kind == "checkpoint" and self.policy != NONE and (in_scan or num_checkpoints > 1):
                inside = _in_checkpoint(inside, prevent_cse=params["prevent_cse"])
            run = functools.partial(call_with, run=inside)
            steps[n] = (functools.partial(run_equation, program.equations[n], bind=run), n + 1)
        _run_range(level, range(len(program.equations)), env, steps)
        return [read(env, atom) for atom in program.outputs]

    def _unrolled(self, level: Level, stack: Stack) -> _Steps:
        """The steps of unrolled layers."""
        group, num_layers = self.policy.layers(stack.num_layers), stack.num_layers
        steps = dict(self._layer(level, stack, i, group[i % len(group)]) for i in range(num_layers))
        if not self.policy.recomputes_groups:
            return steps
        groups = (stack.layers[start : start + len(group)] for start in range(0, num_layers, len(group)))
        return dict(self._group(level, range(layers[0].start, layers[-1].stop), steps) for layers in groups)

    def _layer(self, level: Level, stack: Stack, i: int, policy: LayerPolicy) -> tuple[int, Any]:
        """The step of one layer."""
        layer = self.kinds.layer(level, stack, i)
        function = checkpointed(self._function(layer), policy, prevent_cse=True)

        run = functools.partial(_run_piece, layer.piece, layer.scopes, function)
        return stack.layers[i].start, (run, stack.layers[i].stop)

    def _group(self, level: Level, place: range, steps: _Steps) -> tuple[int, Any]:
        """The step of a group of layers of which only the inputs are saved."""
        piece = cut(level.facts.program, place.start, place.stop)

        def group(*values: Any) -> list[Any]:
            env = dict(zip(piece.inputs, values, strict=True))
            _run_range(level, place, env, steps)
            return [env[number] for number in piece.outputs]

        run = functools.partial(_run_piece, piece, (), checkpointed(group, NOTHING, prevent_cse=True))
        return place.start, (run, place.stop)

    def _loop(self, level: Level, stack: Stack) -> _Steps:
        """The step of a loop over layers."""
        equation = level.facts.program.equations[stack.span.start]
        body, num_carry = self._function(self.kinds.layer(level, stack, 0)), num_operands(equation.eqn)[1]

        def layer(slices: Any, keys: Any, carry: Any, *consts: Any) -> tuple[Any, Any]:
            results = body(*consts, *carry, *slices)
            return tuple(results[:num_carry]), tuple(results[num_carry:])

        def bind(equation: Equation, values: Sequence[Any]) -> list[Any]:
            consts, carry, slices = split_operands(equation.eqn, values)
            params = equation.eqn.params
            num_layers, how = params["length"], {name: params[name] for name in ("reverse", "unroll")}
            check_layers(self.policy, num_layers)
            carry, stacked = run_scanned(layer, self.policy, num_layers, slices, {}, carry, consts, **how)
            return [*carry, *stacked]

        return {stack.span.start: (functools.partial(run_equation, equation, bind=bind), stack.span.stop)}

    def _function(self, layer: Layer) -> Callable[..., Any]:
        if self.policy == NONE:
            return layer.piece.run_bare
        return self.kinds.named(layer) if self.named else layer.piece.run


def _in_checkpoint(run: Runner, *, prevent_cse: bool) -> Runner:
    """`run` in a checkpoint that saves its inputs alone."""
    checked = checkpointed(lambda *values: tuple(run(values)), NOTHING, prevent_cse=prevent_cse)
    return lambda values: checked(*values)


def _run_range(level: Level, place: range, env: dict[Any, Any], steps: _Steps) -> None:
    """Runs a range of equations, and adds what they make to the values in `env`."""
    equations, n = level.facts.program.equations, place.start
    while n < place.stop:
        run, n = steps.get(n) or (functools.partial(run_equation, equations[n], bind=bind_equation), n + 1)
        run(env)


def _run_piece(piece: Piece, scopes: Sequence[str], function: Callable[..., Sequence[Any]], env: dict[Any, Any]) -> None:
    """Runs `function`, which stands for a piece of the program, in named scopes."""
    with contextlib.ExitStack() as stack:
        for name in scopes:
            stack.enter_context(jax.named_scope(name))
        results = function(*(env[number] for number in piece.inputs))
    env.update(zip(piece.outputs, results, strict=True))
