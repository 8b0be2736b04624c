"""Drawn programs: small training losses of many kinds, for tests that a policy changes nothing that they compute.

A program is a few stacks of repeated layers between an embedding and a loss. What a program is made of is drawn by
Hypothesis as plain data, and `build` makes the functions and arrays from that data:

    drawn = DrawnProgram((Stack(("dense", "dropout"), num_layers=3, written="scan"),), policy="every:2")
    loss, params, batch = build(drawn)
    value, aux = loss(params, batch)

The text of a drawn program is one line of Python. It builds the same program again, so that a failure can be rerun.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxremat.errors import UnknownPolicyError
from jaxremat.policy.grammar import parse
from tests.program_parts import AUTHORS_NAME, LENGTH, PARTS, WIDTH, layer_states

Written = Literal["unrolled", "scopes", "scan", "counter", "nested scan"]
Wrapper = Literal["jit", "vmap", "accumulation", "ensemble"]
VOCABULARY = 11
BATCH = 8
#: Microbatches of an accumulation, parts of a vmapped batch, members of an ensemble, layers of an inner scan.
TWO = 2
SCANS = ("scan", "counter", "nested scan")
#: The scope of the layers of each stack, without the layer's number.
SCOPES = ("block", "decoder")


@dataclass(frozen=True)
class Stack:
    """Repeated layers.

    Attributes:
        parts: what each layer is made of, as keys of `PARTS`.
        num_layers: the number of layers.
        written: how the repetition is written. `scopes` is unrolled code in which layer 3 is under `jax.named_scope("block_3")`.
            Under `counter` a scan's counter picks the parameters. A nested scan has two layers in its inner scan.
        every_other: the parts of the second, fourth, ... layer, if these are of another kind.
        checkpointed: whether each layer is in a `jax.checkpoint` already.
        jitted: whether each layer is called through one `jax.jit`.
        shared: whether all layers have the same parameters.
    """

    parts: tuple[str, ...]
    num_layers: int = 3
    written: Written = "unrolled"
    every_other: tuple[str, ...] = ()
    checkpointed: bool = False
    jitted: bool = False
    shared: bool = False

    def parts_of(self, layer: int) -> tuple[str, ...]:
        """The parts of layer number `layer`."""
        return self.every_other if self.every_other and layer % 2 else self.parts


@dataclass(frozen=True)
class DrawnProgram:
    """A loss, the policy for its layers, and how the layers are found.

    Attributes:
        stacks: the stacks of layers, one after the other.
        policy: the policy's text, in which `NAME` stands for a checkpoint name of a layer.
        name: what `NAME` stands for: the name that the author of the layer wrote, or the number of a name that `autoname`
            writes, counted round.
        layers: the argument `layers=`, if it is given.
        inside: what the program is wrapped in, innermost first: an inner `jax.jit` around the stacks, a `vmap` over parts of
            the batch, a scan over microbatches, a `vmap` over an ensemble of parameters.
        dtype: of what the parts compute. Under `mixed` they compute in bfloat16 and `x` is float32. Parameters are float32.
        casts: whether the embedding is bfloat16 and each layer casts its input to float32, which only the first one has to.
        keys: whether the layers' random keys are split from one key, or folded with the layer's number within the layer.
        raw_key: whether the random key is an array of uint32.
        recurrence: whether there is a scan over the length before the layers.
        chunked: whether the loss is a scan over pieces of the length.
        tied: whether the embedding is the output matrix too.
        aux: whether the loss returns auxiliary values.
        state: whether each layer of the unrolled stacks ends with a `LayerState` of the batch, which the loss changes.
        seed: of the values of parameters and batch.
    """

    stacks: tuple[Stack, ...]
    policy: str = "nothing"
    name: str | int = 0
    layers: tuple[str, ...] = ()
    inside: tuple[Wrapper, ...] = ()
    dtype: Literal["float32", "mixed", "bfloat16"] = "float32"
    casts: bool = False
    keys: Literal["split", "folded"] = "split"
    raw_key: bool = False
    recurrence: bool = False
    chunked: bool = False
    tied: bool = False
    aux: bool = False
    state: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return repr(self)

    @property
    def all_parts(self) -> set[str]:
        """The parts that any layer has."""
        return {part for stack in self.stacks for part in (*stack.parts, *stack.every_other)}

    def reads(self, what: str) -> bool:
        """Whether any layer reads `what`: a mask, positions, a key, a shared matrix, a memory."""
        return any(what in PARTS[part].reads for part in self.all_parts)


# How a program is made from what was drawn.


def build(drawn: DrawnProgram) -> tuple[Callable[..., Any], Any, Any]:
    """The loss, its parameters and a batch.

    `loss(params, batch)` returns a scalar, or with `drawn.aux` a scalar and a tree of arrays. `params` may have integer
    leaves, which aren't differentiated.
    """
    random = np.random.default_rng(drawn.seed)
    program = _whole(drawn)
    for wrapper in drawn.inside:
        program = program if wrapper == "jit" else WRAPPERS[wrapper](program)
    params = _init(drawn, random)
    if "ensemble" in drawn.inside:
        params = jax.tree.map(lambda leaf: jnp.stack([leaf, (leaf * 1.1).astype(leaf.dtype)]), params)
    key = (jax.random.PRNGKey if drawn.raw_key else jax.random.key)(drawn.seed)
    batch = {
        "tokens": jnp.asarray(random.integers(0, VOCABULARY, (BATCH, LENGTH)), jnp.int32),
        "targets": jnp.asarray(random.integers(0, VOCABULARY, (BATCH, LENGTH)), jnp.int32),
        **({"mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool))} if drawn.reads("mask") else {}),
        **({"positions": jnp.arange(LENGTH)} if drawn.reads("positions") else {}),
        **({"key": key} if drawn.reads("key") else {}),
        **({"state": {SCOPES[n]: layer_states(s.num_layers) for n, s in enumerate(drawn.stacks)}} if drawn.state else {}),
    }

    def loss(params: Any, batch: Any) -> Any:
        value, aux = program(params, batch)
        return (value, aux) if drawn.aux else value

    return loss, params, batch


def _init(drawn: DrawnProgram, random: np.random.Generator) -> Any:
    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(0, 0.4, shape), jnp.float32)

    def layer(parts: tuple[str, ...]) -> Any:
        return [PARTS[part].init(random) for part in parts]

    def stack(stack: Stack) -> Any:
        layers = [layer(stack.parts_of(i)) for i in range(1 if stack.shared else stack.num_layers)]
        if stack.written not in SCANS or stack.shared:
            return layers
        kinds = 2 if stack.every_other else 1
        stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[i::kinds]) for i in range(kinds)]
        if stack.written == "nested scan":
            return jax.tree.map(lambda leaf: leaf.reshape(-1, TWO, *leaf.shape[1:]), stacked)
        return stacked

    return {
        "table": matrix(VOCABULARY, WIDTH),
        "stacks": [stack(some) for some in drawn.stacks],
        **({} if drawn.tied else {"head": matrix(WIDTH, VOCABULARY)}),
        **({"shared": matrix(WIDTH, WIDTH)} if drawn.reads("shared") else {}),
        **({"recurrence": matrix(WIDTH, WIDTH)} if drawn.recurrence else {}),
    }


def _whole(drawn: DrawnProgram) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """The program without its wrappers, those around the stacks apart."""

    def trunk(stacks: Any, x: jax.Array, side: Any) -> tuple[jax.Array, Any]:
        auxs = []
        for number, (stack, layers) in enumerate(zip(drawn.stacks, stacks, strict=True)):
            own = {"memory": x} if drawn.reads("memory") else {}
            if number and "key" in side:
                own["key"] = jax.random.fold_in(side["key"], number)
            x, aux = _run_stack(drawn, stack, SCOPES[number], layers, x, {**side, **own})
            auxs.append(aux)
        return x, auxs

    def program(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        x = params["table"][batch["tokens"]]
        if drawn.recurrence:
            x = PARTS["recurrence"].update({"state": params["recurrence"]}, x, {}, {})
        x = x.astype(jnp.bfloat16 if drawn.casts or drawn.dtype == "bfloat16" else jnp.float32)
        sources = {**batch, **params}
        side = {name: sources[name] for name in ("mask", "positions", "key", "shared", "state") if name in sources}
        x, aux = (jax.jit(trunk) if "jit" in drawn.inside else trunk)(params["stacks"], x, side)
        head = params["table"].T if drawn.tied else params["head"]
        value = (_chunked_loss if drawn.chunked else _cross_entropy)(x.astype(jnp.float32), head, batch["targets"])
        router = [leaf.mean() for path, leaf in jax.tree.leaves_with_path(aux) if "router" in jax.tree_util.keystr(path)]
        return value + 0.01 * sum(router), {"layers": aux, "mean": x.astype(jnp.float32).mean()}

    return program


def _run_stack(drawn: DrawnProgram, stack: Stack, scope: str, layers: Any, x: jax.Array, side: Any) -> tuple[jax.Array, Any]:
    """The output of the last layer, and the auxiliary values of all layers."""
    states = side.pop("state", {}).get(scope)
    kinds = [_layer(drawn, stack, parts) for parts in filter(None, (stack.parts, stack.every_other))]
    keys = None
    if "key" in side and drawn.keys == "split":
        keys = jax.random.split(side["key"], stack.num_layers)
        side = {name: value for name, value in side.items() if name != "key"}

    if stack.written not in SCANS:
        auxs = []
        for i in range(stack.num_layers):
            with jax.named_scope(f"{scope}_{i}") if stack.written == "scopes" else contextlib.nullcontext():
                weights = layers[0 if stack.shared else i]
                x, aux = kinds[i % len(kinds)](weights, x, side, i, None if keys is None else keys[i])
                x = states[i](x) if states else x
            auxs.append(aux)
        return x, auxs

    def body(x: jax.Array, of_group: Any) -> tuple[jax.Array, Any]:
        stacked, places, keys = of_group
        if stack.written == "counter" and not stack.shared:
            stacked = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, stacked, keepdims=False), layers)
        auxs = []
        for i, kind in enumerate(kinds):
            weights = layers[0] if stack.shared else stacked[i]
            x, aux = kind(weights, x, side, places[i], None if keys is None else keys[i])
            auxs.append(aux)
        return x, auxs

    groups = (-1, TWO, len(kinds)) if stack.written == "nested scan" else (-1, len(kinds))
    of_places = jax.tree.map(lambda leaf: leaf.reshape(*groups, *leaf.shape[1:]), (jnp.arange(stack.num_layers), keys))
    counter = jnp.arange(stack.num_layers // len(kinds))
    inputs = (None if stack.shared else counter if stack.written == "counter" else layers, *of_places)
    if stack.written == "nested scan":
        return jax.lax.scan(lambda x, of_groups: jax.lax.scan(body, x, of_groups), x, inputs)
    return jax.lax.scan(body, x, inputs)


def _layer(drawn: DrawnProgram, stack: Stack, parts: tuple[str, ...]) -> Callable[..., tuple[jax.Array, Any]]:
    """`layer(weights, x, side, place, key)`, which returns the next `x` and the auxiliary values of the layer."""
    reads_key = any("key" in PARTS[part].reads for part in parts)

    def layer(weights: Any, x: jax.Array, side: Any, place: Any, key: Any) -> tuple[jax.Array, Any]:
        aux: dict[str, Any] = {}
        x = x.astype(jnp.float32) if drawn.casts else x
        if reads_key:
            side = {**side, "key": jax.random.fold_in(side["key"], place) if key is None else key}
        for part, own in zip(parts, weights, strict=True):
            dtype = jnp.float32 if drawn.dtype == "float32" else jnp.bfloat16
            own = {name: leaf.astype(dtype) if name != "order" else leaf for name, leaf in own.items()}
            x = x + PARTS[part].update(own, x.astype(dtype), side, aux).astype(x.dtype)
        return x, aux

    layer = jax.checkpoint(layer) if stack.checkpointed else layer
    return jax.jit(layer) if stack.jitted else layer


def _cross_entropy(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(x @ head)
    return -jnp.take_along_axis(logits, targets[..., None], axis=-1).mean()


def _chunked_loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    pieces = jax.tree.map(lambda leaf: leaf.reshape(TWO, -1, *leaf.shape[1:]), (x, targets))
    body = jax.checkpoint(lambda total, piece: (total + _cross_entropy(piece[0], head, piece[1]), None))
    return jax.lax.scan(body, jnp.zeros(()), pieces)[0] / TWO


# What a program may be wrapped in.


def _vmapped(program: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        parts, common = _in_two(batch)
        values, auxs = jax.vmap(lambda part: program(params, {**part, **common}))(parts)
        return values.mean(), auxs

    return run


def _accumulated(program: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        parts, common = _in_two(batch)

        def step(total: jax.Array, part: Any) -> tuple[jax.Array, Any]:
            value, aux = program(params, {**part, **common})
            return total + value / TWO, aux

        return jax.lax.scan(step, jnp.zeros(()), parts)

    return run


def _of_an_ensemble(program: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        values, auxs = jax.vmap(program, in_axes=(0, None))(params, batch)
        return values.mean(), auxs

    return run


def _in_two(batch: Any) -> tuple[Any, Any]:
    """The parts of the batch, stacked on a leading axis, and what all parts share."""
    parts = {name: batch[name].reshape(TWO, -1, LENGTH) for name in ("tokens", "targets")}
    return parts, {name: value for name, value in batch.items() if name not in parts}


WRAPPERS = {"vmap": _vmapped, "accumulation": _accumulated, "ensemble": _of_an_ensemble}


# What Hypothesis draws.

#: The policies, simple ones first. A policy for groups of layers is drawn where the layers can be grouped so.
POLICIES = (
    *("nothing", "none", "everything", "dots", "dots-no-batch", "dots+attention", "nothing+attention", "save:NAME"),
    *("offload:NAME", "every:2", "every:sqrt+nothing", "every:3+dots", "every:2+save:NAME", "every:2+offload:NAME"),
    *("one-in:2", "one-in:3", "1*nothing|1*save:NAME", "2*save:NAME|1*nothing", "1*nothing|1*offload:NAME"),
)


def counts(stack: Stack) -> set[int]:
    """The numbers of layers that may be found in `stack`.

    There are several where layers of two kinds alternate, which are pairs too, and where a scan is in another scan. Of a few
    layers that are little else than a recurrence, its steps may be taken.
    """
    recurrences = sum("recurrence" in stack.parts_of(i) for i in range(stack.num_layers))
    steps = {LENGTH * recurrences} if recurrences and stack.written not in SCANS else set()
    if stack.written == "nested scan":
        return {stack.num_layers, stack.num_layers // TWO, TWO}
    pairs = {stack.num_layers // 2} if stack.every_other else set()
    return pairs if pairs and stack.written in SCANS else {stack.num_layers} | pairs | steps


def fits(policy: str, num_layers: int) -> bool:
    """Whether so many layers can be grouped as `policy` says."""
    parsed = parse(policy)
    with contextlib.suppress(UnknownPolicyError):
        parsed.size(num_layers)
        return True
    return False


@st.composite
def _layers(draw: st.DrawFn, taken: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a layer: none of `taken`, none twice, and one with a matmul by a parameter of the layer's own."""
    free = [part for part in PARTS if part not in taken]
    first = draw(st.sampled_from([part for part in free if PARTS[part].matmuls and PARTS[part].weights]))
    others = draw(st.lists(st.sampled_from([part for part in free if part != first]), max_size=3, unique=True))
    return tuple(draw(st.permutations([first, *others])))


@st.composite
def _stacks(draw: st.DrawFn, taken: tuple[str, ...]) -> Stack:
    parts = draw(_layers(taken))
    every_other = draw(_layers((*taken, *parts))) if draw(st.integers(0, 5)) == 5 else ()
    num_layers = draw(st.sampled_from((4, 6) if every_other else (3, 4, 5, 6)))
    nests = num_layers % TWO == 0 and not every_other
    ways: tuple[Written, ...] = ("unrolled", "scopes", "scan", "counter", "nested scan")
    written = draw(st.sampled_from(ways if nests else ways[:4]))
    return Stack(
        parts,
        num_layers,
        written,
        every_other,
        checkpointed=draw(st.integers(0, 2)) == 2,
        jitted=draw(st.integers(0, 3)) == 3,
        shared=not every_other and draw(st.integers(0, 7)) == 7,
    )


@st.composite
def drawn_programs(draw: st.DrawFn) -> DrawnProgram:
    """Draws any program."""
    first = draw(_stacks(()))
    several = [first, draw(_stacks((*first.parts, *first.every_other)))] if draw(st.integers(0, 3)) == 3 else [first]
    parts = {part for stack in several for part in (*stack.parts, *stack.every_other)}
    recurrence = draw(st.integers(0, 4)) == 4
    found = {count for stack in several for count in counts(stack)} | ({LENGTH} if recurrence else set())
    scoped, numbers = all(stack.written == "scopes" for stack in several), st.integers(0, 30)
    inside: Any = tuple(draw(st.lists(st.sampled_from(("jit", *WRAPPERS)), max_size=2, unique=True)))
    return DrawnProgram(
        tuple(several),
        policy=draw(st.sampled_from([policy for policy in POLICIES if all(fits(policy, count) for count in found)])),
        name=draw(st.just(AUTHORS_NAME) | numbers if "named" in parts else numbers),
        layers=tuple(f"{scope}_*" for scope in SCOPES[: len(several)]) if scoped and draw(st.booleans()) else (),
        inside=inside,
        dtype=draw(st.sampled_from(("float32", "float32", "mixed", "bfloat16"))),
        casts=first.written not in SCANS and draw(st.integers(0, 4)) == 4,
        keys=draw(st.sampled_from(("split", "folded"))),
        raw_key=draw(st.booleans()),
        recurrence=recurrence,
        chunked=draw(st.integers(0, 4)) == 4,
        tied=draw(st.booleans()),
        aux=draw(st.booleans()),
        state=not inside and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
