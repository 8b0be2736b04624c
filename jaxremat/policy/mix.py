"""A group of layers under one checkpoint, each layer with a policy of its own: what `Layers` scans under a `Mix`.

Two checkpointed functions in one loop over stacked parameters would keep each layer's slice of them, all together a second
copy. One checkpoint around the whole group takes the slices inside and keeps none. Its policy is the same for every value
it is asked about, and so the layers are told apart by name: in layer i of the group, `NAME` becomes `i/NAME`. The values
between the layers are named too (`carry/1`, ...) and saved, as a loop over single layers would save them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from jaxremat.policy.apply import remat_function
from jaxremat.policy.program import Equation, bind_equation, evaluate, flatten
from jaxremat.policy.spec import Mix, Names

Tree = Any


def mixed_group(layer_fn: Callable[..., tuple[Tree, Tree]], mix: Mix, *one_layer: Any) -> Callable[..., tuple[Tree, Tree]]:
    """A group of layers as one checkpointed function of stacked variables, stacked keys, x and what all layers read.

    Args:
        layer_fn: (variables, keys, x, *broadcast) -> (x, updated variables), for one layer.
        mix: the policies, their names known to be carried.
        one_layer: arguments for `layer_fn`, of which only the shapes matter.
    """
    jaxpr, shapes = jax.make_jaxpr(lambda *args: layer_fn(*args), return_shape=True)(*one_layer)
    program, structure = flatten(jaxpr), jax.tree.structure(shapes)

    def group(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        updates = []
        for i in range(len(mix.layers)):
            x = jax.tree.map(lambda leaf, i=i: checkpoint_name(leaf, f"carry/{i}"), x) if i else x
            own = jax.tree.map(lambda leaf, i=i: leaf[i], (variables, keys))
            arguments = jax.tree.leaves((*own, x, *broadcast))
            results = evaluate(program, arguments, lambda equation, values, i=i: _bind_renamed(equation, values, f"{i}/"))
            x, update = jax.tree.unflatten(structure, results)
            updates.append(update)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates)

    return remat_function(group, _group_policy(mix), prevent_cse=True)


def _group_policy(mix: Mix) -> Names:
    layers = [policy if isinstance(policy, Names) else Names() for policy in mix.layers]
    carries = (f"carry/{i}" for i in range(1, len(layers)))
    save = (f"{i}/{name}" for i, policy in enumerate(layers) for name in policy.save)
    offload = (f"{i}/{name}" for i, policy in enumerate(layers) for name in policy.offload)
    return Names((*carries, *save), tuple(offload), mix.layers[0].attention)


def _bind_renamed(equation: Equation, values: Sequence[Any], prefix: str) -> Sequence[Any]:
    """The equation's results, with `prefix` before every checkpoint name in it, loops and branches included.

    What `jax.custom_vjp` says keeps its names: its derivative is a function that only JAX calls.
    """
    if equation.kind == "custom_vjp_call" or not any(_names(equation.eqn)):
        return bind_equation(equation, values)
    if equation.kind == "custom_jvp_call":
        return _bind_renamed_rule(equation, values, prefix)
    eqn = _renamed(equation.eqn, prefix)
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _bind_renamed_rule(equation: Equation, values: Sequence[Any], prefix: str) -> Sequence[Any]:
    def bind(inner: Equation, values: Sequence[Any]) -> Sequence[Any]:
        return _bind_renamed(inner, values, prefix)

    @jax.custom_jvp
    def renamed(*operands: Any) -> Any:
        return evaluate(flatten(equation.eqn.params["call_jaxpr"]), operands, bind)

    def derivative(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = {n: tangent for n, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)}

        def along(moved: list[Any], tangents: list[Any]) -> Any:
            def operation(*moved: Any) -> Any:
                new = dict(zip(moving, moved, strict=True))
                return bind_equation(equation, [new.get(n, operand) for n, operand in enumerate(operands)])

            return jax.jvp(operation, tuple(moved), tuple(tangents))

        arguments = [operands[n] for n in moving], list(moving.values())
        results = evaluate(flatten(jax.make_jaxpr(along)(*arguments)), list(itertools.chain(*arguments)), bind)
        return results[: len(equation.outputs)], results[len(equation.outputs) :]

    renamed.defjvp(derivative, symbolic_zeros=True)
    return renamed(*values)


def _names(eqn: Any) -> Iterator[str]:
    if eqn.primitive is core.primitives.name_p:
        yield eqn.params["name"]
    for jaxpr in core.jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from _names(inner)


def _renamed(value: Any, prefix: str) -> Any:
    """`value`, an equation or one of its parameters, with `prefix` before each name in it."""
    match value:
        case core.JaxprEqn():
            params = {key: _renamed(param, prefix) for key, param in value.params.items()}
            if value.primitive is core.primitives.name_p:
                params["name"] = prefix + params["name"]
            return value.replace(params=params)
        case core.ClosedJaxpr():
            return value.replace(jaxpr=_renamed(value.jaxpr, prefix))
        case core.Jaxpr():
            return value.replace(eqns=[_renamed(eqn, prefix) for eqn in value.eqns])
        case tuple() if any(isinstance(item, core.ClosedJaxpr | core.Jaxpr) for item in value):
            return tuple(_renamed(item, prefix) for item in value)
        case _:
            return value
