"""Every byte of a step's memory belongs to a named buffer: in dumps by hand, random memory maps and compiled steps."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxremat
from jaxremat.config import ModelConfig
from jaxremat.model.transformer import layer_names
from jaxremat.trial.explain import by_label
from jaxremat.xla.buffers import (
    CATEGORIES,
    SOURCES,
    Allocation,
    Buffer,
    MemoryMap,
    attribution,
    by_source,
    gaps_between,
    held,
    holders,
)
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.dump import parse_assignment, parse_live_ranges
from tests.helpers import BATCH, GPT, LLAMA, SEQ, TRAIN, UNROLLED, decoder_args, mapped
from tests.memory_maps import scanned, unrolled

#: Vocabularies large enough for the logits to matter, and no size that another dimension has.
GPT_V, LLAMA_V, UNROLLED_V = (replace(model, vocab_size=3000) for model in (GPT, LLAMA, UNROLLED))


NONE = (LLAMA_V, "none", ())
NOTHING = (GPT_V, "nothing", (("loss", "chunked"), ("optimizer", "muon")))
NAMES = (GPT_V, "save:query_proj+offload:mlpwi_0", (("loss", "chunked"),))
GROUPS = (GPT_V, "every:4+nothing", (("loss", "chunked"), ("accumulate", 2)))
SEPARATE = (UNROLLED_V, "save:mlpwi_0", (("loss", "chunked"), ("grad_dtype", "bfloat16")))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "policy", "levers"), [NONE, pytest.param(*NOTHING, marks=pytest.mark.any_jax), NAMES, GROUPS, SEPARATE]
)
def test_the_bytes_add_up(h100, model, policy, levers):
    """To XLA's total, with the gaps counted here once more, from XLA's own ranges; and to XLA's own peak."""
    done = mapped(h100, model, policy, levers)
    memory_map, memory = done.memory_map, done.memory
    found = attribution(memory_map)
    assert memory_map.total_bytes == memory.total_bytes == sum(found.values()) == sum(by_source(found).values())
    assert memory_map.host_bytes == memory.host_temp_bytes
    live, tables = live_in_arena(done)
    arena = sum(a.num_bytes for a in memory_map.allocations if a.kind == "temp")
    assert found["gaps"] == arena - live[memory_map.peak]
    assert sum(size for name, size in found.items() if name != "gaps") == memory.total_bytes - arena + live[memory_map.peak]
    assert live[memory_map.peak] == max(live)
    # XLA's own peak counts the program's constants, and not the tables of pointers that it has for tuples.
    constants = sum(a.num_bytes for a in memory_map.allocations if a.kind == "constant")
    assert memory.total_bytes - found["gaps"] + constants - tables[memory_map.peak] == memory.peak_bytes
    assert found.get("other", 0) < 0.05 * memory.total_bytes

    state, tokens = decoder_args(model, replace(TRAIN, **dict(levers)), BATCH)
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for name, tree in vars(state).items()}
    assert found["parameters"] == sizes["params"]
    assert found["optimizer state"] == sizes["opt_state"] + sizes["step"]
    assert found["inputs"] == tokens.size * 4

    assert [phase for phase, _, _ in memory_map.phases] == ["forward", "backward", "update"]
    assert memory_map.phases[0][1] == 0
    assert memory_map.phases[-1][2] == len(memory_map.program) - 1
    assert all(before[2] + 1 == after[1] for before, after in itertools.pairwise(memory_map.phases))


def live_in_arena(done: Compilation) -> tuple[list[int], list[int]]:
    """At each position the bytes of the arena that any value covers, and those of them that are tuples' tables."""
    assert done.dump
    schedule, ranges = parse_live_ranges(done.dump.live_ranges)
    values = [v for a in parse_assignment(done.dump.assignment) if a.is_temp and not a.on_host for v in a.values]
    live, tables = [], []
    for position in range(len(schedule)):
        here = [v for v in values if ranges[v.name][0] <= position <= ranges[v.name][1]]
        edges = sorted({edge for v in here for edge in (v.offset, v.offset + v.num_bytes)})
        spans = list(itertools.pairwise(edges))
        is_in = [[v for v in here if v.offset <= low and high <= v.offset + v.num_bytes] for low, high in spans]
        live.append(sum(high - low for (low, high), inside in zip(spans, is_in, strict=True) if inside))
        of_tuples = [bool(inside) and all(v.shape.startswith("(") for v in inside) for inside in is_in]
        tables.append(sum(high - low for (low, high), is_table in zip(spans, of_tuples, strict=True) if is_table))
    return live, tables


def saved(memory_map: MemoryMap) -> dict[str, tuple[int, int]]:
    """Residuals by label: layers and bytes."""
    found: dict[str, tuple[int, int]] = {}
    for buffer in memory_map.buffers:
        if buffer.category == "residuals":
            layers, size = found.get(buffer.label, (0, 0))
            found[buffer.label] = (layers + buffer.num_layers, size + buffer.num_bytes)
    return found


def layer_bytes(model: ModelConfig) -> dict[str, int]:
    return {value.name: value.num_bytes for value in layer_names(model, BATCH, SEQ)}


@pytest.mark.full
def test_residuals_have_their_checkpoint_names(h100):
    """What is offloaded is in host memory, and apart."""
    memory_map, sizes = mapped(h100, *NAMES).memory_map, layer_bytes(GPT_V)
    found = saved(memory_map)
    for name in ("decoder_layer_input", "query_proj"):
        assert found[name] == (GPT.num_layers, GPT.num_layers * sizes[name])
    assert not {"key_proj", "value_proj", "context", "out_proj", "mlpwi_0"} & set(found)
    on_host = sum(buffer.num_bytes for buffer in memory_map.host_buffers)
    assert memory_map.host_bytes == on_host == GPT.num_layers * sizes["mlpwi_0"]
    unrolled = saved(mapped(h100, *SEPARATE).memory_map)["mlpwi_0"]
    assert unrolled == (UNROLLED.num_layers, UNROLLED.num_layers * layer_bytes(UNROLLED_V)["mlpwi_0"])


@pytest.mark.full
@pytest.mark.any_jax
def test_full_remat_saves_the_layers_inputs_alone(h100):
    buffers = mapped(h100, *NOTHING).memory_map.buffers
    stacked = [(b.label, b.num_layers) for b in buffers if b.category == "residuals" and b.num_layers > 1]
    assert stacked == [("decoder_layer_input", GPT.num_layers)]


@pytest.mark.full
def test_logits_gradients_and_loops_are_found(h100):
    """Logits are made in the loss, and a gradient is named by its parameter."""
    memory_map = mapped(h100, *NONE).memory_map
    wide = [b for b in memory_map.buffers if b.category == "logits and loss"]
    largest = max(wide, key=lambda b: b.num_bytes)
    assert largest.num_bytes == BATCH * SEQ * 3000 * 4
    assert largest.source.rpartition("/")[2].partition(":")[0] in ("loss.py", "transformer.py")
    last_dims = {int(b.shape.rstrip("]").rpartition(",")[2].rpartition("[")[2]) for b in wide}
    assert all(3000 <= dim < 3064 for dim in last_dims), "XLA pads a matmul's dimensions"

    kernel = next(b for b in memory_map.buffers if b.label == "gradient of state.params['layers']['mlp']['wi_0']['kernel']")
    assert (kernel.category, kernel.num_layers) == ("gradients", LLAMA.num_layers)
    assert kernel.num_bytes == LLAMA.num_layers * LLAMA.embed_dim * LLAMA.mlp_dim * 4

    layers = [loop for loop in memory_map.loops if loop.trip_count == LLAMA.num_layers]
    assert [memory_map.phase_at(loop.first) for loop in layers[:2]] == ["forward", "backward"]
    nested = mapped(h100, *GROUPS).memory_map.loops
    assert any(loop.parent is not None and nested[loop.parent].trip_count == 2 for loop in nested)


def gradient(p: Any, x: jax.Array) -> Any:
    return jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["params"]["w"]) @ p["params"]["v"]) ** 2))(p)


ARGS = ({"params": {"w": jnp.zeros((64, 128)), "v": jnp.zeros((128, 64))}}, jnp.zeros((512, 64)))


@pytest.mark.full
def test_a_function_of_the_users(h100):
    memory_map = jaxremat.memory_map(gradient, ARGS, h100)
    found = attribution(memory_map)
    assert sum(found.values()) == memory_map.total_bytes
    assert found["parameters"] == 2 * 64 * 128 * 4
    assert found["inputs"] == 512 * 64 * 4
    assert found["gradients"] == 2 * 64 * 128 * 4
    assert any(b.source.endswith(f"test_buffers.py:{gradient.__code__.co_firstlineno + 1}") for b in memory_map.buffers)


@pytest.mark.full
def test_residuals_of_branches_have_their_lines(h100):
    """The values that one side of a branch saves, where the other writes zeros or another value in their place."""
    shape = jax.ShapeDtypeStruct((64, 512), jnp.float32)

    def wide(w, x):
        return x + jnp.sin(jnp.tanh(x @ w) @ w.T)

    def narrow(w, x):
        return x + jnp.cos(x @ w[:, :512])

    def loss(params, x):
        for i, w in enumerate(params):
            x = jax.lax.cond(x.sum() > i, wide, lambda w, x: x, w, x)
            x = jax.lax.switch(jnp.int32(x[0, 0]), [lambda w, x: 2 * x, narrow, wide], w, x)
        return jnp.mean(x**2)

    params = 2 * [jax.ShapeDtypeStruct((512, 4096), jnp.float32)]
    found = jaxremat.memory_map(jax.grad(loss), (params, shape), h100)
    residuals = [b for b in found.buffers if b.category == "residuals" and b.first <= found.peak <= b.last]
    assert sum(buffer.num_bytes == 4 * 64 * 4096 for buffer in residuals) >= 4, "tanh and cos of both kinds of branches"
    assert all(buffer.source.startswith(f"{__file__}:") for buffer in residuals)
    assert not any("branch_" in buffer.label for buffer in residuals)


@pytest.mark.full
def test_arguments_take_the_roles_they_are_given(h100):
    found = attribution(jaxremat.memory_map(lambda a, x: jnp.tanh(x @ a), (ARGS[0]["params"]["w"], ARGS[1]), h100))
    assert found["inputs"] == (512 * 64 + 64 * 128) * 4
    given_roles = jaxremat.memory_map(
        lambda a, x: jnp.tanh(x @ a), (ARGS[0]["params"]["w"], ARGS[1]), h100, roles={"a": "parameters"}
    )
    assert attribution(given_roles)["parameters"] == 64 * 128 * 4


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"xla_no_such_option": True}])
def test_the_dump_leaves_nothing_behind(h100, monkeypatch, tmp_path, options):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(Exception, match="xla_no_such_option") if options else contextlib.nullcontext():
        lower_and_compile(gradient, ARGS, h100, keep_dump=True, options=options)
    assert not list(tmp_path.iterdir())


SPANS = st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(0, 9), st.integers(0, 9))
CATEGORY = st.sampled_from(["parameters", "residuals", "recompute", "working set", "other"])


@given(st.lists(st.tuples(SPANS, CATEGORY), max_size=12), st.integers(0, 9))
def test_every_byte_has_one_holder(drawn, position):
    """Against a byte map painted one byte at a time."""
    buffers = tuple(
        Buffer(str(n), category, "", size, 1, 7, offset, min(a, b), max(a, b), None, "", "", "")
        for n, ((offset, size, a, b), category) in enumerate(drawn)
    )
    arena = Allocation(7, 80, "temp")
    live = [b for b in buffers if b.first <= position <= b.last]
    gaps = gaps_between(arena, [(b.offset, b.offset + b.num_bytes) for b in live])
    memory_map = MemoryMap((), (), (arena,), (), (), buffers, (), position, tuple(gaps))
    order = ["parameters", "residuals", "recompute", "working set", "other"]
    painted = [
        min((b.category for b in live if b.offset <= at < b.offset + b.num_bytes), key=order.index, default="gaps")
        for at in range(80)
    ]
    assert attribution(memory_map) == {"gaps": painted.count("gaps")} | {c: painted.count(c) for c in order if c in painted}
    assert sum(size for _, size in held(memory_map, position)) == 80 - painted.count("gaps")


def one_of(label: str, num_bytes: int = 10, category: Any = "residuals", shape: str = "f32[5]") -> tuple[Buffer, int]:
    buffer = Buffer(f"x.{label}", category, label, num_bytes, 1, 0, 0, 0, 9, None, shape, "", "")
    return buffer, num_bytes - 1


LAYERS = [one_of(f"layers_{n}/mlp/{name}/dot_general") for n in range(12) for name in ("wi_0", "wi_1")]
STATES = [one_of(f"state.opt_state[{n}].mu['Block_{m}'][0]", 7, "optimizer state") for n in range(2) for m in range(5)]
CALLS = [one_of(f"custom-call.{n}{{0}}", 3, "other") for n in (3, 141, 7)]
SAME = [one_of("mlp/wo/dot_general"), one_of("mlp/wo/dot_general"), one_of("mlp/wo/dot_general", 20, shape="f32[10]")]
FEW = [
    one_of("block_0/add"),
    one_of("block_1/add"),
    one_of("block_2/add", shape="f32[6]"),
    one_of("Dense_0"),
    one_of("Dense_1"),
]


def test_equal_layers_hold_their_bytes_as_one():
    live = [*LAYERS, *STATES, *CALLS, *SAME, *FEW]
    groups = holders(live)
    assert {(group.label, len(group.buffers), group.num_bytes) for group in groups} == {
        ("layers_*/mlp/wi_0/dot_general", 12, 12 * 9),
        ("layers_*/mlp/wi_1/dot_general", 12, 12 * 9),
        ("state.opt_state[0].mu['Block_*'][0]", 5, 5 * 6),
        ("state.opt_state[1].mu['Block_*'][0]", 5, 5 * 6),
        ("custom-call.*{0}", 3, 3 * 2),
        ("mlp/wo/dot_general", 2, 2 * 9),
        ("mlp/wo/dot_general", 1, 19),
        *((buffer.label, 1, 9) for buffer, _ in FEW),
    }
    assert [group.num_bytes for group in groups] == sorted((group.num_bytes for group in groups), reverse=True)
    assert by_label(groups)[0].num_layers == 12
    assert {(row.label, row.num_bytes) for row in by_label(groups)} >= {("mlp/wo/dot_general", 37)}
    shapes = {row.label: row.shape for row in by_label(groups)}
    assert shapes["layers_*/mlp/wi_0/dot_general"] == LAYERS[0][0].shape
    assert shapes["mlp/wo/dot_general"] == ""  # it has two


@pytest.mark.parametrize("memory", [scanned(), unrolled(num_layers=4, blocks=1)], ids=["scanned", "unrolled"])
def test_grouping_leaves_no_byte_out(memory):
    live = [(buffer, buffer.num_bytes) for buffer in memory.buffers]
    groups = holders(live)
    assert sum(group.num_bytes for group in groups) == sum(size for _, size in live)
    assert sum(len(group.buffers) for group in groups) == len(live)
    assert sum(row.num_bytes for row in by_label(groups)) == sum(size for _, size in live)


def test_the_seven_sources_have_every_category_once():
    assert sorted(part for parts in SOURCES.values() for part in parts) == sorted([*CATEGORIES, "gaps"])
    assert len(SOURCES) == 7
