"""Which layers are found in a traced program, by which of their marks, and what is left as it is.

Each program is a few lines of plain JAX or Flax. It is only traced.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxremat.errors import UsageError
from jaxremat.policy.autoname import autoname
from jaxremat.policy.names import named_values
from jaxremat.policy.with_policy import find_layers, with_policy
from jaxremat.xla.saved import saved_values
from tests.equality import relative_difference
from tests.helpers import quick_jit

WIDTH, NUM = 8, 4
X = jax.ShapeDtypeStruct((2, 4, WIDTH), "float32")
STACKED = {
    "up": jax.ShapeDtypeStruct((NUM, WIDTH, 16), "float32"),
    "down": jax.ShapeDtypeStruct((NUM, 16, WIDTH), "float32"),
}
LAYERS = [{name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in STACKED.items()} for _ in range(NUM)]


def mlp(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def unrolled(params, x, layer=mlp, scope=""):
    for i, p in enumerate(params):
        with jax.named_scope(scope.format(i) or "stack"):
            x = layer(p, x)
    return jnp.mean(x**2)


def looped(params, x, layer=mlp):
    return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0] ** 2)


def microbatches(params, x):
    """The layers' loop inside a loop over the batch."""
    return jax.lax.scan(lambda total, one: (total + looped(params, one[None]), None), 0.0, x)[0]


def in_turn(params, x):
    """Two scopes in turn, and a residual connection of their parent."""
    for i, p in enumerate(params):
        with jax.named_scope(f"up_{i}"):
            h = jnp.tanh(x @ p["up"])
        with jax.named_scope(f"down_{i}"):
            h = h @ p["down"]
        x = x + h
    return jnp.mean(x**2)


def first_differs(params, x):
    """The first layer casts its input, and the others don't."""
    x = x.astype("bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    x = mlp(params[0], x).astype("float32").astype("bfloat16")
    return unrolled(params[1:], x)


def two_pairs(params, x):
    """Each pair is written at lines of its own. The very first layer casts its input, and no other layer does."""
    y = x.astype("bfloat16")
    for p in params[:2]:
        y = mlp(p, y)
    for p in params[2:]:
        y = y + jnp.sin(y @ p["up"]) @ p["down"]
    return jnp.mean(y**2)


def side_by_side(params, x):
    """Heads that all read the same value are no layers."""
    return jnp.mean(sum(jnp.tanh(x @ p["up"]) @ p["down"] for p in params))


def over_time(params, x):
    """A recurrence: each step in time reads the same parameters."""

    def step(h, now):
        return jnp.tanh(h + now @ params["up"] @ params["down"]), None

    return jnp.mean(jax.lax.scan(step, x[:, 0], jnp.moveaxis(x, 1, 0))[0])


def with_layers_inside(params, x):
    """A recurrence whose steps are of two layers."""
    return jnp.mean(
        jax.lax.scan(lambda h, now: (mlp(params, mlp(params, h + now)), None), x[:, 0], jnp.moveaxis(x, 1, 0))[0]
    )


def with_a_checkpoint(params, x):
    """A recurrence whose author has put a checkpoint around the step."""
    step = jax.checkpoint(lambda h, now: (jnp.tanh(h + now @ params["up"] @ params["down"]), None))
    return jnp.mean(jax.lax.scan(step, x[:, 0], jnp.moveaxis(x, 1, 0))[0])


def with_a_head(params, x):
    """Layers, and a checkpointed recurrence that computes the loss of their output."""
    for p in params:
        x = mlp(p, x)
    return with_a_checkpoint(params[0], x)


def chunks(params, x):
    """A loss over one chunk of the data after the other."""
    return jax.lax.scan(lambda total, one: (total + jnp.mean(mlp(params, one) ** 2), None), 0.0, x)[0]


def looked_up_in_time(params, x):
    """Tokens pick rows of a parameter, and data isn't a counter."""
    tokens = jnp.argmax(x[0], -1)
    return jnp.mean(jax.lax.scan(lambda h, token: (jnp.tanh(h + params["up"].T[token]), None), x[0, 0], tokens)[0])


def picked(params, x, loop=False):
    """The counter of a loop picks each layer's parameters."""

    def layer(x, i):
        return mlp({name: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for name, leaf in params.items()}, x)

    if loop:
        return jnp.mean(jax.lax.fori_loop(0, NUM, lambda i, x: layer(x, i), x))
    return jnp.mean(jax.lax.scan(lambda x, i: (layer(x, i), None), x, jnp.arange(NUM))[0])


def first_without_a_number(params, x):
    for i, p in enumerate(params):
        with jax.named_scope(f"block_{i}" if i else "block"):
            x = mlp(p, x)
    return jnp.mean(x**2)


def rounds(params, x):
    """Rounds of two modules that are numbered through, with large values between them."""
    for i, p in enumerate(params):
        wide = jnp.concatenate([x, x**2, x**3], -1)[..., :WIDTH]
        with jax.named_scope(f"mlp_{2 * i}"):
            h = jnp.tanh(wide @ p["up"])
        h = jnp.concatenate([h, jnp.sin(h)], -1)[..., :16]
        with jax.named_scope(f"mlp_{2 * i + 1}"):
            x = x + h @ p["down"]
    return jnp.mean(x**2)


def matmuls_that_differ(params, x):
    """Numbered modules of one matmul each, of shapes that don't repeat."""
    for i, width in enumerate((5, 7, 3)):
        with jax.named_scope(f"dense_{i}"):
            x = x @ jnp.ones((x.shape[-1], width)) * params[0]["up"][0, 0]
        x = jnp.tanh(x)
    return jnp.mean(x**2)


def energy_and_forces(params, x):
    """A gradient inside the program: its backward pass has the layers from the last to the first."""
    return jnp.mean(jax.grad(lambda x: unrolled(params, x, scope="layer_{}"))(x) ** 2)


def simulated(params, x):
    """Checkpoints with arithmetic between them, and no matmul at all."""
    for i in range(NUM):
        steps = jnp.arange(i * 3, i * 3 + 3) * 0.1
        x = jax.checkpoint(
            lambda x, t: jax.lax.scan(lambda x, t: (x + jnp.sin(params[0]["up"][0, 0] * x + t), None), x, t)[0]
        )(x, steps)
    return jnp.mean(x)


def with_inner_checkpoint(p, x):
    return (
        x
        + jax.checkpoint(lambda h: jnp.tanh(h))(jax.checkpoint(lambda x: x @ p["up"] + x @ p["up"])(x))
        @ p["down"]
        @ p["up"]
        @ p["down"]
    )


def towers(params, x):
    """Two scopes with numbers, each a stack of layers: the layers are taken and not the towers."""
    for tower in range(2):
        with jax.named_scope(f"tower_{tower}"):
            for i, p in enumerate(params):
                with jax.named_scope(f"block_{i}"):
                    x = mlp(p, x)
    return jnp.mean(x**2)


def pinned(params, x):
    """The layers in a jit with shardings."""
    one = jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec("data")
    )
    return jax.jit(unrolled, in_shardings=(None, one))(params, x)


def mapped(params, x):
    """The layers in a shard_map."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(lambda p, x: unrolled(p, x)[None], mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"))
    return f(params, x).sum()


def custom(p, x):
    """A layer with a custom derivative in it."""

    @jax.custom_vjp
    def act(h):
        return jnp.tanh(h)

    act.defvjp(lambda h: (jnp.tanh(h), h), lambda h, g: (g * (1 - jnp.tanh(h) ** 2),))
    return x + act(x @ p["up"]) @ p["down"]


def haikus(params, x):
    """Haiku's decoder has scopes of modules alone: a norm, then a numbered one, and no scope of a layer."""
    for i, p in enumerate(params):
        y = jax.nn.standardize(x)
        with jax.named_scope(f"attention_{i}" if i else "attention"):
            h = jnp.tanh(y @ p["up"]) @ p["down"]
        x = x + h
    return jnp.mean(jax.nn.standardize(x) ** 2)


def passes_side_by_side(params, x):
    """Three passes, side by side, of the same layers: they are the longest repetition, and don't follow one another."""
    return sum(unrolled(params, x * n) for n in range(1, 4))


def tapered(params, x):
    """A narrow layer before the stack, on a line of its own, isn't one of its layers."""
    x = x + jnp.tanh(x @ params[0]["up"][:, :4]) @ params[0]["down"][:4]
    return unrolled(params[1:], x)


def stochastic_depth(params, x, rates=(0.0, 0.1, 0.2, 0.3)):
    """Residuals are dropped, except in layers whose rate is 0: these have far fewer operations."""
    for i, (p, rate) in enumerate(zip(params, rates, strict=False)):
        y = jnp.tanh(x @ p["up"]) @ p["down"]
        if rate:
            y = y * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 1 - rate, (x.shape[0], 1, 1)) / (1 - rate)
        x = x + y
    return jnp.mean(x**2)


FOUND = {
    "loop": (looped, STACKED, [("scan", NUM)]),
    "loop in microbatches": (microbatches, STACKED, [("scan", NUM)]),
    "repeated operations": (unrolled, LAYERS, [("repeat", NUM)]),
    "numbered scopes": (functools.partial(unrolled, scope="block_{}"), LAYERS, [("scope", NUM)]),
    "two scopes in turn": (in_turn, LAYERS, [("scope", NUM)]),
    "checkpoints around layers": (functools.partial(unrolled, layer=jax.checkpoint(mlp)), LAYERS, [("checkpoint", NUM)]),
    "checkpoint in the loop's body": (functools.partial(looped, layer=jax.checkpoint(mlp)), STACKED, [("scan", NUM)]),
    "one checkpoint around all": (jax.checkpoint(unrolled), LAYERS, [("repeat", NUM)]),
    "a first layer that casts": (first_differs, LAYERS, [("repeat", NUM)]),
    "two pairs, of which the first begins with a cast": (two_pairs, LAYERS, [("repeat", 2), ("repeat", 2)]),
    "towers of blocks": (towers, LAYERS, [("scope", NUM), ("scope", NUM)]),
    "jit with shardings": (pinned, LAYERS, [("repeat", NUM)]),
    "shard_map": (mapped, LAYERS, [("repeat", NUM)]),
    "a custom derivative in each layer": (functools.partial(unrolled, layer=custom), LAYERS, [("repeat", NUM)]),
    "under vmap": (lambda p, x: jnp.mean(jax.vmap(unrolled, in_axes=(None, 0))(p, x)), LAYERS, [("repeat", NUM)]),
    "heads side by side": (side_by_side, LAYERS, []),
    "a recurrence over time": (over_time, LAYERS[0], [("loop", 4)]),
    "a recurrence of more steps than layers": (with_layers_inside, LAYERS[0], [("loop", 4)]),
    "a checkpointed recurrence": (with_a_checkpoint, LAYERS[0], [("loop", 4)]),
    "a checkpointed recurrence beside layers": (with_a_head, LAYERS, [("repeat", NUM)]),
    "chunks": (chunks, LAYERS[0], [("loop", 2)]),
    "tokens over time": (looked_up_in_time, LAYERS[0], [("loop", 4)]),
    "a counter": (picked, STACKED, [("scan", NUM)]),
    "a counter in a fori_loop": (functools.partial(picked, loop=True), STACKED, [("scan", NUM)]),
    "a first scope without a number": (first_without_a_number, LAYERS, [("scope", NUM)]),
    "a dot before the number": (functools.partial(unrolled, scope="blocks.{}"), LAYERS, [("scope", NUM)]),
    "a number in brackets": (functools.partial(unrolled, scope="blocks[{}]"), LAYERS, [("scope", NUM)]),
    "rounds of two modules": (rounds, LAYERS, [("repeat", NUM)]),
    "matmuls that differ": (matmuls_that_differ, LAYERS, []),
    "a norm before each scope": (haikus, LAYERS, [("scope", NUM)]),
    "passes side by side": (passes_side_by_side, LAYERS, 3 * [("repeat", NUM)]),
    "a narrow layer before": (tapered, LAYERS, [("repeat", NUM - 1)]),
    "a first layer without dropout": (stochastic_depth, LAYERS, [("repeat", NUM)]),
    "a last layer with dropout": (functools.partial(stochastic_depth, rates=(0, 0, 0, 0.1)), LAYERS, [("repeat", NUM)]),
    "a gradient inside": (energy_and_forces, LAYERS, [("scope", NUM), ("scope", NUM)]),
    "checkpoints with arithmetic between them": (simulated, LAYERS, [("checkpoint", NUM)]),
}


@pytest.mark.parametrize(("function", "params", "want"), FOUND.values(), ids=FOUND)
def test_the_layers_that_are_found(function, params, want):
    found = find_layers(function, params, X)
    assert [(kind.found_by, kind.num_layers) for kind in found.kinds] == want, "\n".join(found.lines())
    for kind in found.kinds if function is not mapped and "loop" not in dict(want) else ():
        values = jax.eval_shape(kind.function, *kind.args)
        assert any(value.shape[-2:] == X.shape[-2:] for value in jax.tree.leaves(values))
        assert kind.cut_bytes >= 2 * WIDTH


def test_layers_are_cut_where_the_fewest_bytes_go_from_one_to_the_next():
    """Only the residual stream goes from one layer to the next, not the wider value inside the layers."""
    (kind,) = find_layers(unrolled, LAYERS, X).kinds
    assert kind.cut_bytes == X.size * 4


def with_passers_by(params, data):
    """Each layer reads the mask, a table of its own, and a bias that the first layer makes."""
    x, lengths = data
    mask, tables, bias = jnp.arange(4) < lengths[:, None], [x * n for n in range(NUM)], None
    for p, table in zip(params, tables, strict=True):
        hidden = jnp.tanh(x @ p["up"])
        bias = jnp.sin(hidden) if bias is None else bias
        x = x + jnp.where(mask[..., None], hidden + bias, 0) @ p["down"] + table
    return jnp.mean(x**2)


def test_what_passes_by_the_layers_does_not_go_from_one_to_the_next():
    """The bias does once, to the layer that reads it first."""
    data = X, jax.ShapeDtypeStruct((2,), "int32")
    (kind,) = find_layers(with_passers_by, LAYERS, data).kinds
    assert (kind.found_by, kind.num_layers) == ("repeat", NUM)
    bias_bytes = 2 * X.size * 4
    assert kind.cut_bytes == X.size * 4 + bias_bytes // (NUM - 1)


class Expert(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(self.width)(x)))


class EveryOther(nn.Module):
    """Every other block is wider; a decoder follows the encoder."""

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = Expert(32 if i % 2 else 16, name=f"block_{i}")(x)
        for i in range(3):
            x = Expert(16, name=f"decoder_{i}")(x)
        return jnp.mean(x)


def test_the_stages_of_a_network_without_scopes():
    """Each stage is half as wide as the one before, and its first layer has a matmul more. All layers are found."""

    def layer_of(width, made):
        shapes = {"up": (width, 16), "down": (16, made), **({"project": (width, made)} if width != made else {})}
        return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    def staged(params, x):
        for p in params:
            y = jnp.tanh(jax.nn.standardize(x) @ p["up"]) @ p["down"]
            x = (x @ p["project"] if "project" in p else x) + y
        return jnp.mean(x**2)

    found = find_layers(staged, [layer_of(*widths) for widths in ((8, 8), (8, 8), (8, 4), (4, 4), (4, 2), (2, 2))], X)
    assert [(kind.found_by, kind.num_layers) for kind in found.kinds] == [("repeat", n) for n in (2, 1, 1, 1, 1)]


def test_kinds_at_one_line_are_told_apart():
    """By the line that calls them, and else by the shape that they read."""

    def stacked(params, x):
        for p in params:
            x = mlp(p, x)
        return x

    def twice(params, data):
        x, other = data
        x = stacked(params, x)
        other = stacked(params, other)
        return jnp.mean(x**2) + jnp.mean(other**2)

    def at_one_line(params, data):
        xs = [stacked(params, x) for x in data]
        return sum(jnp.mean(x**2) for x in xs)

    data = X, jax.ShapeDtypeStruct((2, 2, WIDTH), "float32")
    for function, ends in (
        (twice, ("called at", "called at")),
        (at_one_line, ("reading float32[2,4,8]", "reading float32[2,2,8]")),
    ):
        first, second = find_layers(function, LAYERS, data).kinds
        (place, end), (same_place, other_end) = (kind.label.split(", ") for kind in (first, second))
        assert place == same_place
        assert end != other_end
        assert (end.startswith(ends[0]), other_end.startswith(ends[1])) == (True, True)
        assert f", {end}, found as repeated operations" in first.line()


def test_a_norm_before_a_scope_is_in_its_layer():
    """So that one value goes from layer to layer, and not its norm beside it."""
    (kind,) = find_layers(haikus, LAYERS, X).kinds
    assert kind.cut_bytes == X.size * 4


def test_several_kinds_of_layers_have_names_of_their_own():
    model = EveryOther()
    found = find_layers(lambda params, x: model.apply(params, x), jax.eval_shape(model.init, jax.random.key(0), X), X)
    assert [(kind.label, kind.num_layers) for kind in found.kinds] == [
        ("block_0, block_2", 2),
        ("block_1, block_3", 2),
        ("decoder_0 to decoder_2", 3),
    ]
    names = [{value.name for value in named_values(kind.function, *kind.args)} for kind in found.kinds]
    assert [min(some) for some in names] == ["block_0/Dense_0/add", "block_1/Dense_0/add", "decoder/Dense_0/add"]
    assert not names[0] & names[1]
    assert not names[1] & names[2]


def gated_in_places(params, x):
    """Every other layer has a gate, which is a value more and no matmul."""
    for i, p in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            h = checkpoint_name(x @ p["up"], "wide")
            x = x + (checkpoint_name(jnp.sin(h), "gate") if i % 2 else jnp.tanh(h)) @ p["down"]
    return jnp.mean(x**2)


def test_each_value_counts_as_often_as_layers_have_it():
    params = [*LAYERS, LAYERS[0]]
    (kind,) = find_layers(gated_in_places, params, X).kinds
    counts = {value.name: count for value, count in kind.values().items()}
    assert (kind.num_layers, counts["wide"], counts["tanh"], counts["gate"]) == (5, 5, 3, 2)
    model = EveryOther()
    found = find_layers(lambda params, x: model.apply(params, x), jax.eval_shape(model.init, jax.random.key(0), X), X)
    counts = {value.name: count for value, count in found.values().items()}
    outputs = ("block_0/Dense_1/add", "block_1/Dense_1/add", "decoder/Dense_1/add")
    assert [counts[name] for name in outputs] == [2, 2, 3]
    (kind,) = find_layers(looped, STACKED, X).kinds
    assert set(kind.values().values()) == {NUM}


def test_a_policy_may_name_a_value_that_few_layers_have():
    jaxpr = jax.make_jaxpr(jax.grad(with_policy(gated_in_places, "save:gate")))([*LAYERS, LAYERS[0]], X)
    assert {(some.name, some.num_values) for some in saved_values(jaxpr).values} == {("gate", 2), ("", 4)}


def test_what_is_left_as_it_is_is_listed_with_its_line():
    found = find_layers(microbatches, STACKED, X)
    layers, loop = found.lines()
    (left,) = found.kept
    assert f"{NUM} layers at {__file__}:" in layers
    assert f"a loop of 2 iterations at {__file__}:" in loop
    assert left.what in loop
    assert left.why in loop


def test_an_inner_checkpoint_is_left_as_it_is():
    found = find_layers(functools.partial(unrolled, layer=with_inner_checkpoint), LAYERS, X)
    assert [(kind.found_by, kind.num_layers) for kind in found.kinds] == [("repeat", NUM)]
    assert {left.what for left in found.kept} == {"a checkpoint"}


def test_an_einsum_with_an_ellipsis_has_one_name_in_a_model_and_in_the_module_alone():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            scores = jnp.einsum("...qd,...kd->...qk", x, x)
            return nn.Dense(WIDTH)(x + jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores), x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(NUM):
                x = Block(name=f"block_{i}")(x)
            return jnp.mean(x**2)

    params = jax.eval_shape(Model().init, jax.random.key(0), X)
    of_block = {"params": params["params"]["block_0"]}
    in_model, alone = (
        {value.name for value in values}
        for values in (find_layers(Model().apply, params, X).values(), named_values(autoname(Block().apply), of_block, X))
    )
    assert in_model == alone
    assert "qd_kd_qk/dot_general" in alone


def test_where_nothing_is_found_the_error_counts_what_was_looked_at():
    with pytest.raises(UsageError) as rejected:
        with_policy(side_by_side, "dots")(LAYERS, X)
    counts = ("18 operations", "0 loops", "0 checkpoints")
    assert all(count in rejected.value.cause for count in counts)
    assert "layers='layer_*'" in rejected.value.next_step
    (line,) = find_layers(side_by_side, LAYERS, X).lines()
    assert all(count in line for count in counts)


def test_parameters_that_come_second():
    """The layers are the iterations of a loop over data, as far as one can tell."""
    (kind,) = find_layers(lambda x, stacked: looped(stacked, x), X, STACKED).kinds
    assert (kind.found_by, kind.num_layers) == ("loop", NUM)


def test_names_in_a_forward_rule_can_be_saved():
    """JAX saves a value that the forward rule of a `jax.custom_vjp` names, which the function itself doesn't."""

    @jax.custom_vjp
    def act(h):
        return jnp.exp(jnp.sin(h))

    def forward(h):
        return (y := checkpoint_name(act(h), "ruled")), (h, y)

    act.defvjp(forward, lambda saved, g: (g * saved[1] * jnp.cos(saved[0]),))
    for function, params in ((unrolled, LAYERS), (looped, STACKED)):
        loss = functools.partial(function, layer=lambda p, x: x + act(x @ p["up"]) @ p["down"])
        values = saved_values(jax.make_jaxpr(jax.grad(with_policy(loss, "save:ruled")))(params, X)).values
        assert {(some.name, some.num_values) for some in values} >= {("ruled", NUM)}


def test_complex_values_are_recomputed_and_a_line_says_so():
    def layer(p, x):
        return x + jnp.abs((x + 1j * x) @ p["up"]) @ p["down"]

    loss = functools.partial(unrolled, layer=layer)
    found = find_layers(loss, LAYERS, X)
    assert found.has_complex
    assert len(found.lines()) == 2
    plain = num_matmuls(loss, LAYERS, X)
    for policy, again in {"dots": NUM, "everything": NUM, "save:dot_general_1": NUM, "nothing": NUM}.items():
        names = {value.name for value in found.values()}
        assert num_matmuls(with_policy(loss, f"save:{max(names)}" if ":" in policy else policy), LAYERS, X) == plain + again


def two_stacks(params, x):
    for part in ("encoder", "decoder"):
        with jax.named_scope(part):
            x = x + unrolled(params, x, scope="block_{}")
    return jnp.mean(x**2)


def test_two_kinds_of_one_name_have_their_path():
    found = find_layers(two_stacks, LAYERS, X)
    assert [(kind.label, kind.prefix) for kind in found.kinds] == [
        (f"{part}/block_0 to {part}/block_3", f"{part}/block/") for part in ("encoder", "decoder")
    ]
    found = find_layers(energy_and_forces, LAYERS, X)
    assert all(kind.prefix.rstrip("/") in line for kind, line in zip(found.kinds, found.lines(), strict=True))


def test_each_pattern_needs_a_match():
    with pytest.raises(UsageError) as rejected:
        with_policy(functools.partial(unrolled, scope="block_{}"), "none", layers=["block_*", "blok_*"])(LAYERS, X)
    assert "'blok_*'" in rejected.value.got
    assert "'block_*'" not in rejected.value.got


@pytest.mark.parametrize("batch", [np.ones(X.shape, np.float32), None], ids=["numpy", "closed over"])
def test_a_batch_that_is_not_a_jax_array(batch):
    """A data loader's batch is of NumPy, and a loss may close over its batch."""
    function: Any = unrolled if batch is not None else lambda params: unrolled(params, jnp.ones(X.shape))
    args = (ones(LAYERS), *([] if batch is None else [batch]))
    assert find_layers(function, *args).num_layers == NUM
    again, plain = (num_matmuls(of, *args) for of in (with_policy(function, "nothing"), function))
    assert again == plain + NUM


def num_matmuls(function, *args):
    """Matmuls of the traced gradient."""
    return str(jax.make_jaxpr(jax.grad(function))(*args)).count("dot_general[")


def ones(tree):
    return jax.tree.map(lambda leaf: np.full(leaf.shape, 1 / leaf.shape[-1], np.float32), tree)


def test_layers_can_be_named_by_their_scopes():
    function = functools.partial(unrolled, scope="block_{}")
    for pattern in ("block_*", "block_[0-9]", ("nothing_*", "block_*")):
        assert find_layers(function, LAYERS, X, layers=pattern).num_layers == NUM
    with pytest.raises(UsageError) as rejected:
        with_policy(function, "dots", layers="blok_*")(LAYERS, X)
    assert "'blok_*'" in rejected.value.got
    assert "block_*" in str(rejected.value), "the scopes that there are"
    assert find_layers(towers, LAYERS, X, layers="tower_*").num_layers == 2


@pytest.mark.full
def test_gradients_of_layers_in_a_shard_map():
    arrays = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), (LAYERS, X))
    want, got = (quick_jit(jax.grad(function))(*arrays) for function in (mapped, with_policy(mapped, "nothing")))
    assert relative_difference(got, want) <= 1e-6


def test_layers_in_a_shard_map_follow_a_policy_and_cannot_be_planned():
    assert num_matmuls(with_policy(mapped, "nothing"), LAYERS, X) > num_matmuls(mapped, LAYERS, X)
    (kind,) = find_layers(mapped, LAYERS, X).kinds
    with pytest.raises(UsageError) as rejected:
        kind.function(*kind.args)
    assert "shard_map" in str(rejected.value)
