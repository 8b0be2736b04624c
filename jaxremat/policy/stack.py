"""A stack of equal layers under any policy, scanned or unrolled: functions that run one.

    x = jaxremat.scan_layers(layer, stacked_params, x, policy="every:4+dots")

`Layers` of `layers.py` is such a stack of Flax modules. The docstring of `apply.py` says when a checkpoint needs `prevent_cse`.

`every:K` isn't a loop of loops over slices. Slicing a remainder off a stack of parameters (13 layers under every:4) copies the
stack. Here each group's parameters are read from the one stack, in place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxremat.errors import UsageError
from jaxremat.policy.apply import checkpointed, with_names
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.jax_private import makes_complex
from jaxremat.policy.offload import check_layers
from jaxremat.policy.spec import NOTHING, LayerPolicy, Policy
from jaxremat.policy.tree import combine, is_float, partition, take

Tree = Any
#: (variables of one layer, its random keys, x, *broadcast) -> (x, the variables it updated)
LayerFn = Callable[..., tuple[Tree, Tree]]
#: The same for a group of layers. Its variables, keys and updates are stacked on a leading axis.
GroupFn = LayerFn
X = TypeVar("X")


def scan_layers(function: Callable[..., X], params: Tree, x: X, *broadcast: Tree, policy: Policy | str = "none") -> X:
    """The output of a stack of layers under a policy.

    It is `x = function(params[i], x, *broadcast)` for each layer i.

    This is `jax.lax.scan` over parameters stacked on a leading axis. `Layers` is the same for modules.

    Args:
        function: `function(params_of_one_layer, x, *broadcast)` returns the next x, of the same shape and dtype.
        params: the layers' parameters, stacked on a leading axis with one entry a layer.
        x: the input of the first layer, floating-point.
        *broadcast: what all layers read.
        policy: a `Policy` or its text. It may list names that the author of `function` wrote, and names of `autoname`. One that
            offloads is refused where a GPU would compute wrong gradients (`offload.py`).

    Raises:
        UsageError: the leaves of `params` don't have one number of layers.
    """

    def layer_fn(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        return function(variables, x, *broadcast), {}

    sizes = sorted({leaf.shape[0] if jnp.ndim(leaf) else 0 for leaf in jax.tree.leaves(params)})
    if len(sizes) != 1 or not sizes[0]:
        raise UsageError(
            f"the leaves of params have first axes of {', '.join(map(str, sizes)) or 'no'} entries",
            allowed="arrays with the layers on their first axis, of one length",
        )
    (num_layers,) = sizes
    parsed = as_policy(policy)
    check_layers(parsed, num_layers)
    if parsed.names():
        first = jax.tree.map(lambda leaf: leaf[0], params), {}, x, *broadcast
        layer_fn, parsed = with_names(layer_fn, parsed, *first)
    return run_scanned(layer_fn, parsed, num_layers, params, {}, x, broadcast)[0]


def run_unrolled(
    layer_fn: LayerFn, policy: Policy, num_layers: int, per_layer: list[Tree], keys: Tree, x: Tree, broadcast: tuple
) -> tuple[Tree, Tree]:
    """All layers as unrolled code. Every checkpoint has its barriers (`prevent_cse`).

    What a layer passes on is laid out row by row, as it would be in a scan. Otherwise XLA may choose another layout for all
    layers, and then transposes it wherever a norm or a matmul reads it.
    """
    key = [jax.tree.map(lambda leaf, i=i: leaf[i], keys) for i in range(num_layers)]

    group = policy.layers(num_layers)
    wrapped = {of_layer: checkpointed(layer_fn, of_layer, prevent_cse=True) for of_layer in group}

    def run(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        updates = []
        for of_layer, *own in zip(group, variables, keys, strict=False):  # the last group may have fewer layers
            x, update = wrapped[of_layer](*own, _row_major(x), *broadcast)
            updates.append(update)
        return x, updates

    run = checkpointed(run, NOTHING, prevent_cse=True) if policy.recomputes_groups else run
    updates = []
    for start in range(0, num_layers, len(group)):
        layers = slice(start, start + len(group))
        x, of_group = run(per_layer[layers], key[layers], x, *broadcast)
        updates += of_group
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates)


def _row_major(x: Tree) -> Tree:
    """The floating-point values laid out row by row in memory.

    On a mesh `x` itself: XLA would gather it on each device.
    """

    def constrained(leaf: Any) -> Any:
        return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim)))) if is_float(leaf) and leaf.ndim > 1 else leaf

    return jax.tree.map(constrained, x) if jax.sharding.get_abstract_mesh().empty else x


def run_scanned(
    layer_fn: LayerFn,
    policy: Policy,
    num_layers: int,
    variables: Tree,
    keys: Tree,
    x: Tree,
    broadcast: tuple,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Tree, Tree]:
    """All layers as a scan over `variables` and `keys`, stacked on a leading axis.

    Args:
        layer_fn: a layer.
        policy: the policy, with its names checked.
        num_layers: number of entries of the axis.
        variables: what each layer gets a slice of.
        keys: random keys, of which each layer gets a slice.
        x: what the first layer gets.
        broadcast: what all layers get.
        reverse: whether the scan runs from the last slice to the first.
        unroll: number of layers in an iteration, for policies of one layer.

    Returns:
        The last layer's output, and the stacks of what the layers made.
    """
    group = policy.layers(num_layers)
    if len(group) == 1:
        of_layer = NOTHING if policy.recomputes_groups else group[0]
        step = checkpointed(layer_fn, of_layer, prevent_cse=num_layers < 2 * unroll)  # XLA unrolls a loop of one iteration
        return _scan_layers(step, num_layers, reverse=reverse, unroll=unroll)(variables, keys, x, *broadcast)

    def flipped(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jnp.flip(leaf, 0), tree) if reverse else tree

    variables, keys = flipped((variables, keys))
    where = len(group), num_layers, variables, keys, x, broadcast
    if not policy.recomputes_groups:
        x, updates = _scan_groups(functools.partial(_layer_by_layer, layer_fn, group), *where)
    else:
        (inner,) = set(group)
        layers = functools.partial(_scan_layers, checkpointed(layer_fn, inner, prevent_cse=False))
        if all(map(is_float, jax.tree.leaves(x))):
            x, updates = _run_groups(layers, *where)
        else:  # integers and random keys aren't differentiated
            x, updates = _scan_groups(lambda count, cse: checkpointed(layers(count), NOTHING, prevent_cse=cse), *where)
    return x, flipped(updates)


def _scan_layers(step: LayerFn, count: int, *, reverse: bool = False, unroll: int = 1) -> GroupFn:
    """`count` layers as a scan."""

    def run(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        def body(x: Tree, per_layer: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            return step(*per_layer, x, *broadcast)

        return jax.lax.scan(body, x, (variables, keys), length=count, reverse=reverse, unroll=unroll)

    return run


def _save_all_but_slices(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint` that saves all but slices and complex values.

    Slices are such as those of stacked parameters.
    """
    return primitive.name not in ("slice", "dynamic_slice", "squeeze") and not makes_complex(primitive, avals, params)


def _layer_by_layer(layer_fn: LayerFn, pattern: Sequence[LayerPolicy], count: int, prevent_cse: bool) -> GroupFn:
    """The first `count` layers of a group, unrolled. Layer i is checkpointed under `pattern[i]`.

    A layer's slice of the group's parameters is taken *inside* the layer's checkpoint, and is never saved. A slice taken
    outside would be a residual, and all slices together would be a second copy of the parameters.

    Several recomputed layers have barriers in any case: with them, XLA recomputes fewer layers at once in some patterns. In
    others the barriers cost the bytes of one group's parameters.
    """
    barriers = prevent_cse or sum(not policy.is_none for policy in pattern) > 1

    def layer(i: int, policy: LayerPolicy) -> LayerFn:
        def one(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
            return layer_fn(*jax.tree.map(lambda leaf: leaf[i], (variables, keys)), x, *broadcast)

        if policy.is_none:
            return jax.checkpoint(one, policy=_save_all_but_slices, prevent_cse=False)
        return checkpointed(one, policy, prevent_cse=barriers)

    layers = [layer(i, policy) for i, policy in enumerate(pattern[:count])]

    def run(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        updates = []
        for one in layers:
            x, update = one(variables, keys, x, *broadcast)
            updates.append(update)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates)

    return run


def _scan_groups(
    group: Callable[[int, bool], GroupFn], size: int, num_layers: int, variables: Tree, keys: Tree, x: Tree, broadcast: tuple
) -> tuple[Tree, Tree]:
    """A scan of groups of `size` layers.

    `group(count, prevent_cse)` is a group of `count` layers. In a scan of several groups nothing can be merged with the forward
    pass, and no barriers are needed. Where `size` doesn't divide the number of layers, the remaining layers are split off the
    stack, which copies the stack.
    """
    num_groups, rest = divmod(num_layers, size)
    whole = num_groups * size
    head, tail = (jax.tree.map(lambda leaf, s=s: leaf[s], (variables, keys)) for s in (slice(whole), slice(whole, None)))
    head = head if rest else (variables, keys)
    grouped = jax.tree.map(lambda leaf: leaf.reshape(num_groups, size, *leaf.shape[1:]), head)
    x, updates = _scan_layers(group(size, num_groups == 1), num_groups)(*grouped, x, *broadcast)
    updates = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), updates)
    if rest:
        x, last = group(rest, True)(*tail, x, *broadcast)
        updates = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), updates, last)
    return x, updates


def _run_groups(
    group: Callable[[int], GroupFn], size: int, num_layers: int, variables: Tree, keys: Tree, x: Tree, broadcast: tuple
) -> tuple[Tree, Tree]:
    """`every:K` over stacked variables, with a backward pass written by hand.

    Each group's input is saved, and the group of `size` layers is recomputed for its gradient.

    The backward pass is written by hand (`jax.custom_vjp`) because of the remainder. Differentiating a loop over part of a
    stack makes XLA copy that part. Here each group's parameters are read from the stack in place, and the group's gradients
    are written into the stack of gradients in place. This supports reverse-mode differentiation only.
    """
    num_groups, rest = divmod(num_layers, size)
    last = num_groups * size
    floats, others = partition((variables, broadcast), is_float)

    def forward(floats: Tree, others: Tree, keys: Tree, x: Tree) -> tuple[Any, Any]:
        def run(x: Tree, start: Any, count: int) -> tuple[Tree, Tree]:
            return _group_on(group(count), start, count, (take(floats[0], start, count), floats[1]), others, keys, x)

        def body(x: Tree, start: jax.Array) -> tuple[Tree, tuple[Tree, Tree]]:
            y, updates = run(x, start, size)
            return y, (x, updates)

        x, (inputs, updates) = jax.lax.scan(body, x, jnp.arange(0, last, size))
        updates = jax.tree.map(lambda leaf: leaf.reshape(last, *leaf.shape[2:]), updates)
        last_input = x
        if rest:
            x, last_updates = run(x, last, rest)
            updates = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), updates, last_updates)
        return (x, updates), (floats, others, keys, inputs, last_input)

    def backward(residuals: Any, cotangents: Any) -> Any:
        floats, others, keys, inputs, last_input = residuals
        x_bar, updates_bar = cotangents

        def run(x_bar: Tree, bars: Tree, x: Tree, start: Any, count: int) -> tuple[Tree, Tree]:
            variables_bar, broadcast_bar = bars
            own = (take(floats[0], start, count), floats[1])
            if num_groups == 1 or count == rest:  # outside a loop XLA would merge this with the forward pass
                own, x = jax.lax.optimization_barrier((own, x))
            _, pullback = jax.vjp(lambda own, x: _group_on(group(count), start, count, own, others, keys, x), own, x)
            (own_bar, new_broadcast_bar), x_bar = pullback((x_bar, take(updates_bar, start, count)))
            variables_bar = jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0), variables_bar, own_bar
            )
            return x_bar, (variables_bar, jax.tree.map(jnp.add, broadcast_bar, new_broadcast_bar))

        bars = jax.tree.map(jnp.zeros_like, floats)
        if rest:
            x_bar, bars = run(x_bar, bars, last_input, last, rest)

        def body(carry: Any, at: Any) -> tuple[Any, None]:
            (x_bar, bars), (start, x) = carry, at
            return run(x_bar, bars, x, start, size), None

        (x_bar, bars), _ = jax.lax.scan(body, (x_bar, bars), (jnp.arange(0, last, size), inputs), reverse=True)
        return bars, None, None, x_bar

    @jax.custom_vjp
    def all_groups(floats: Tree, others: Tree, keys: Tree, x: Tree) -> Any:
        return forward(floats, others, keys, x)[0]

    all_groups.defvjp(forward, backward)
    return all_groups(floats, others, keys, x)


def _group_on(group: GroupFn, start: Any, count: int, own: Tree, others: Tree, keys: Tree, x: Tree) -> Any:
    """The group that begins at layer `start`.

    `own` has the group's own floating-point variables and the broadcast ones.

    `others` has the variables and broadcast values that aren't differentiated.
    """
    rest = (take(others[0], start, count), others[1])
    variables, broadcast = combine(own, rest)
    return group(variables, take(keys, start, count), x, *broadcast)
