"""A stack of equal layers under any policy, scanned or unrolled: functions that run one.

    x = jaxremat.scan_layers(layer, stacked_params, x, policy="every:4+dots")

`Layers` of `layers.py` is such a stack of Flax modules. The docstring of `apply.py` says when a checkpoint needs `prevent_cse`.

`every:K` isn't a loop of loops over slices. Slicing a remainder off a stack of parameters (13 layers under every:4) copies the
stack. Here each group's parameters are read from the one stack, in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxremat.policy.apply import checkpointed, with_names
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.jax_policy import save_all_but_slices, to_jax
from jaxremat.policy.names import has_names
from jaxremat.policy.offload import check_layers
from jaxremat.policy.spec import NOTHING, Every, Mix, Names, OneIn, Policy, Rule, layer_policy
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
    """

    def layer_fn(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        return function(variables, x, *broadcast), {}

    num_layers = jax.tree.leaves(params)[0].shape[0]
    parsed = as_policy(policy)
    check_layers(parsed, num_layers)
    if has_names(parsed):
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

    def chain(wrap: Callable[[int], LayerFn]) -> LayerFn:
        def run(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
            updates = []
            for i, (layer_variables, layer_keys) in enumerate(zip(variables, keys, strict=True)):
                x, update = wrap(i)(layer_variables, layer_keys, _row_major(x), *broadcast)
                updates.append(update)
            return x, updates

        return run

    match policy:
        case Every():
            size = policy.size(num_layers)
            inner = checkpointed(layer_fn, policy.inner, prevent_cse=True)
            group = checkpointed(chain(lambda _: inner), NOTHING, prevent_cse=True)
            updates = []
            for start in range(0, num_layers, size):
                x, update = group(per_layer[start : start + size], key[start : start + size], x, *broadcast)
                updates += update
        case OneIn():
            size = policy.size(num_layers)
            rematted = checkpointed(layer_fn, NOTHING, prevent_cse=True)
            x, updates = chain(lambda i: rematted if i % size == 0 else layer_fn)(per_layer, key, x, *broadcast)
        case Mix():
            policy.size(num_layers)
            x, updates = chain(lambda i: checkpointed(layer_fn, layer_policy(policy, i), prevent_cse=True))(
                per_layer, key, x, *broadcast
            )
        case _:
            wrapped = checkpointed(layer_fn, policy, prevent_cse=True)
            x, updates = chain(lambda _: wrapped)(per_layer, key, x, *broadcast)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates)


def _row_major(x: Tree) -> Tree:
    """The floating-point values laid out row by row in memory.

    On a mesh `x` itself: XLA would gather it on each device.
    """

    def constrained(leaf: Any) -> Any:
        return with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim)))) if is_float(leaf) and leaf.ndim > 1 else leaf

    return jax.tree.map(constrained, x) if jax.sharding.get_abstract_mesh().empty else x


def run_scanned(
    layer_fn: LayerFn, policy: Policy, num_layers: int, variables: Tree, keys: Tree, x: Tree, broadcast: tuple
) -> tuple[Tree, Tree]:
    """All layers as a scan over `variables` and `keys`, stacked on a leading axis.

    The axis has `num_layers` entries.
    """
    in_loop = num_layers > 1
    match policy:
        case Every() if policy.size(num_layers) > 1:
            size = policy.size(num_layers)
            inner = checkpointed(layer_fn, policy.inner, prevent_cse=False)
            if not all(map(is_float, jax.tree.leaves(x))):
                return _run_nested(_scan_layers(inner), size, num_layers, variables, keys, x, broadcast)
            return _run_groups(_scan_layers(inner), size, num_layers, variables, keys, x, broadcast)
        case Every():
            step = checkpointed(layer_fn, NOTHING, prevent_cse=not in_loop)
        case OneIn():
            pattern = [to_jax(NOTHING), *(policy.size(num_layers) - 1) * [save_all_but_slices]]
            return _run_pattern(layer_fn, pattern, False, num_layers, variables, keys, x, broadcast)
        case Mix():
            policy.size(num_layers)
            # With barriers, XLA runs fewer layers again at once in some patterns. In others the barriers cost the bytes of
            # one group's parameters.
            return _run_pattern(layer_fn, [*map(to_jax, policy.layers)], True, num_layers, variables, keys, x, broadcast)
        case _:
            step = checkpointed(layer_fn, policy, prevent_cse=not in_loop)
    return _scan_layers(step)(variables, keys, x, *broadcast)


def run_loop(
    layer: LayerFn, policy: Policy, slices: Tree, carry: Tree, consts: tuple, *, reverse: bool, unroll: int
) -> tuple[Tree, Tree]:
    """A `jax.lax.scan` whose body is a layer, under a policy.

    Args:
        layer: `layer(slices, keys, carry, *consts)` returns the next carry and what is stacked. `keys` is empty.
        policy: the policy, with its names checked.
        slices: the stacks of which each layer gets a slice.
        carry: what the first layer gets.
        consts: what all layers get.
        reverse: whether the loop runs from the last slice to the first.
        unroll: number of layers in a turn of the loop, for policies of one layer.

    Returns:
        The last layer's carry, and the stacks of what the layers made.
    """
    num_layers = jax.tree.leaves(slices)[0].shape[0]
    check_layers(policy, num_layers)
    if isinstance(policy, Rule | Names):
        step = checkpointed(layer, policy, prevent_cse=num_layers < 2 * unroll)  # XLA unrolls a loop of one turn
        return jax.lax.scan(lambda carry, own: step(own, {}, carry, *consts), carry, slices, reverse=reverse, unroll=unroll)

    def flipped(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jnp.flip(leaf, 0), tree) if reverse else tree

    carry, stacked = run_scanned(layer, policy, num_layers, flipped(slices), {}, carry, consts)
    return carry, flipped(stacked)


def _scan_layers(step: LayerFn) -> GroupFn:
    def run(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
        return jax.lax.scan(lambda x, per_layer: step(*per_layer, x, *broadcast), x, (variables, keys))

    return run


def _run_pattern(
    layer_fn: LayerFn,
    pattern: Sequence[Callable[..., Any]],
    barriers: bool,
    num_layers: int,
    variables: Tree,
    keys: Tree,
    x: Tree,
    broadcast: tuple,
) -> tuple[Tree, Tree]:
    """Groups of layers in a scan. Layer i of each group is checkpointed under `pattern[i]`.

    A layer's slice of the group's parameters is taken *inside* the layer's checkpoint, and is never saved. A slice taken
    outside would be a residual, and all slices together would be a second copy of the parameters. Where the pattern's length
    doesn't divide the number of layers, the remaining layers are split off the stack, which copies the stack.

    In a scan of several groups nothing can be merged with the forward pass, and no barriers are needed. With `barriers` they
    are there all the same.
    """
    size = len(pattern)

    def at(i: int, prevent_cse: bool) -> LayerFn:
        def one(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
            return layer_fn(*jax.tree.map(lambda leaf: leaf[i], (variables, keys)), x, *broadcast)

        recomputes = pattern[i] is not save_all_but_slices
        return jax.checkpoint(one, policy=pattern[i], prevent_cse=prevent_cse and recomputes)

    def group_fn(count: int, prevent_cse: bool) -> GroupFn:
        def run(variables: Tree, keys: Tree, x: Tree, *broadcast: Tree) -> tuple[Tree, Tree]:
            updates = []
            for i in range(count):
                x, update = at(i, prevent_cse)(variables, keys, x, *broadcast)
                updates.append(update)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *updates)

        return run

    num_groups, rest = divmod(num_layers, size)
    whole = num_groups * size
    head, tail = (jax.tree.map(lambda leaf, s=s: leaf[s], (variables, keys)) for s in (slice(whole), slice(whole, None)))
    head = head if rest else (variables, keys)
    grouped = jax.tree.map(lambda leaf: leaf.reshape(num_groups, size, *leaf.shape[1:]), head)
    x, updates = _scan_layers(group_fn(size, prevent_cse=barriers or num_groups == 1))(*grouped, x, *broadcast)
    updates = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), updates)
    if rest:
        x, last = group_fn(rest, prevent_cse=True)(*tail, x, *broadcast)
        updates = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), updates, last)
    return x, updates


def _run_groups(
    group: GroupFn, size: int, num_layers: int, variables: Tree, keys: Tree, x: Tree, broadcast: tuple
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
            return _group_at(group, start, count, floats, others, keys, x)

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
            _, pullback = jax.vjp(lambda own, x: _group_on(group, start, count, own, others, keys, x), own, x)
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


def _run_nested(
    group: GroupFn, size: int, num_layers: int, variables: Tree, keys: Tree, x: Tree, broadcast: tuple
) -> tuple[Tree, Tree]:
    """`_run_groups` for layers that also pass on integers or random keys.

    These aren't differentiated.

    This is a loop of checkpointed loops. A remainder is split off the stack, which copies the stack.
    """
    num_groups, rest = divmod(num_layers, size)
    whole = num_groups * size
    head = jax.tree.map(lambda leaf: leaf[:whole].reshape(num_groups, size, *leaf.shape[1:]), (variables, keys))
    tail = jax.tree.map(lambda leaf: leaf[whole:], (variables, keys))
    x, updates = _scan_layers(checkpointed(group, NOTHING, prevent_cse=num_groups == 1))(*head, x, *broadcast)
    updates = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), updates)
    if rest:
        x, last = checkpointed(group, NOTHING, prevent_cse=True)(*tail, x, *broadcast)
        updates = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), updates, last)
    return x, updates


def _group_at(group: GroupFn, start: Any, count: int, floats: Tree, others: Tree, keys: Tree, x: Tree) -> Any:
    return _group_on(group, start, count, (take(floats[0], start, count), floats[1]), others, keys, x)


def _group_on(group: GroupFn, start: Any, count: int, own: Tree, others: Tree, keys: Tree, x: Tree) -> Any:
    """The group that begins at layer `start`.

    `own` has the group's own floating-point variables and the broadcast ones.

    `others` has the variables and broadcast values that aren't differentiated.
    """
    rest = (take(others[0], start, count), others[1])
    variables, broadcast = combine(own, rest)
    return group(variables, take(keys, start, count), x, *broadcast)
