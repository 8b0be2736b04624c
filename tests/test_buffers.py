"""Every byte of a step's memory belongs to a named buffer: in dumps by hand, random memory maps and compiled steps."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxremat
from jaxremat.model.transformer import layer_names
from jaxremat.xla.buffers import SOURCES, Allocation, Buffer, MemoryMap, attribution, by_source, gaps_between, held
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.dump import parse_assignment, parse_live_ranges
from tests.helpers import BATCH, GPT, LLAMA, SEQ, TRAIN, UNROLLED, decoder_args, mapped

#: Vocabularies large enough for the logits to matter, and no size that another dimension has.
GPT_V, LLAMA_V, UNROLLED_V = (replace(model, vocab_size=3000) for model in (GPT, LLAMA, UNROLLED))


COMBINATIONS = [
    (GPT_V, "none", ()),
    (GPT_V, "dots", ()),
    (GPT_V, "nothing", (("loss", "chunked"),)),
    (GPT_V, "save:query_proj,mlpwi_0", (("loss", "chunked"),)),
    (GPT_V, "every:4+nothing", (("loss", "chunked"), ("accumulate", 2))),
    (GPT_V, "offload:mlpwi_0", (("loss", "chunked"),)),
    (LLAMA_V, "none", (("loss", "chunked"),)),
    (LLAMA_V, "dots+attention", ()),
    (LLAMA_V, "nothing", (("optimizer", "muon"),)),
    (LLAMA_V, "one-in:2", (("grad_dtype", "bfloat16"),)),
    (UNROLLED_V, "none", ()),
    (UNROLLED_V, "save:mlpwi_0", (("loss", "chunked"),)),
]
#: Of those, the ones whose model, policy and levers occur in others too.
SLOW = {(GPT_V, "none"), (LLAMA_V, "dots+attention"), (UNROLLED_V, "none")}
#: The policies whose maps are read on both lines of JAX.
BOTH_LINES = ("dots", "every:4+nothing", "offload:mlpwi_0", "save:mlpwi_0")
CASES = [
    pytest.param(
        *(model, policy, levers),
        id=f"{model.name}{'' if model.scan_layers else '-unrolled'}-{policy}-{dict(levers)}",
        marks=pytest.mark.slow if (model, policy) in SLOW else () if policy in BOTH_LINES else pytest.mark.any_jax,
    )
    for model, policy, levers in COMBINATIONS
]


@pytest.mark.parametrize(("model", "policy", "levers"), CASES)
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
    # XLA's own peak counts the program's constants, and not the tables of pointers that it keeps for tuples.
    constants = sum(a.num_bytes for a in memory_map.allocations if a.kind == "constant")
    assert memory.total_bytes - found["gaps"] + constants - tables[memory_map.peak] == memory.peak_bytes
    assert found.get("other", 0) < 0.05 * memory.total_bytes


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


@pytest.mark.parametrize(("model", "policy", "levers"), CASES)
def test_the_state_is_what_its_shapes_say(h100, model, policy, levers):
    state, tokens = decoder_args(model, replace(TRAIN, **dict(levers)), BATCH)
    found = attribution(mapped(h100, model, policy, levers).memory_map)
    sizes = {name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for name, tree in vars(state).items()}
    assert found["parameters"] == sizes["params"]
    assert found["optimizer state"] == sizes["opt_state"] + sizes["step"]
    assert found["inputs"] == tokens.size * 4


@pytest.mark.parametrize(("model", "policy", "levers"), CASES)
def test_phases_come_in_order_and_cover_the_program(h100, model, policy, levers):
    memory_map = mapped(h100, model, policy, levers).memory_map
    assert [phase for phase, _, _ in memory_map.phases] == ["forward", "backward", "update"]
    assert memory_map.phases[0][1] == 0
    assert memory_map.phases[-1][2] == len(memory_map.program) - 1
    assert all(before[2] + 1 == after[1] for before, after in itertools.pairwise(memory_map.phases))


def saved(memory_map: MemoryMap, host: bool = False) -> dict[str, tuple[int, int]]:
    """Residuals by label: layers and bytes."""
    found: dict[str, tuple[int, int]] = {}
    for buffer in memory_map.host_buffers if host else memory_map.buffers:
        if buffer.category == "residuals":
            layers, size = found.get(buffer.label, (0, 0))
            found[buffer.label] = (layers + buffer.num_layers, size + buffer.num_bytes)
    return found


def layer_bytes(model: Any) -> dict[str, int]:
    return {value.name: value.num_bytes for value in layer_names(model, BATCH, SEQ)}


def test_residuals_carry_their_checkpoint_names(h100):
    found = saved(mapped(h100, GPT_V, "save:query_proj,mlpwi_0", (("loss", "chunked"),)).memory_map)
    sizes = layer_bytes(GPT_V)
    for name in ("decoder_layer_input", "query_proj", "mlpwi_0"):
        assert found[name] == (GPT.num_layers, GPT.num_layers * sizes[name])
    assert not {"key_proj", "value_proj", "context", "out_proj"} & set(found)


def test_nothing_keeps_the_layers_inputs_alone(h100):
    buffers = mapped(h100, GPT_V, "nothing", (("loss", "chunked"),)).memory_map.buffers
    stacked = [(b.label, b.num_layers) for b in buffers if b.category == "residuals" and b.num_layers > 1]
    assert stacked == [("decoder_layer_input", GPT.num_layers)]


def test_residuals_of_unrolled_layers_carry_their_names_too(h100):
    found = saved(mapped(h100, UNROLLED_V, "save:mlpwi_0", (("loss", "chunked"),)).memory_map)
    assert found["mlpwi_0"] == (UNROLLED.num_layers, UNROLLED.num_layers * layer_bytes(UNROLLED_V)["mlpwi_0"])


def test_what_is_offloaded_is_in_host_memory_and_apart(h100):
    done = mapped(h100, GPT_V, "offload:mlpwi_0", (("loss", "chunked"),))
    size = GPT.num_layers * layer_bytes(GPT_V)["mlpwi_0"]
    assert done.memory_map.host_bytes == sum(b.num_bytes for b in done.memory_map.host_buffers) == size
    assert "mlpwi_0" not in saved(done.memory_map)


def test_the_logits_are_found_and_made_in_the_loss(h100):
    memory_map = mapped(h100, GPT_V, "dots").memory_map
    wide = [b for b in memory_map.buffers if b.category == "logits and loss"]
    assert max(b.num_bytes for b in wide) == BATCH * SEQ * 3000 * 4
    last_dims = {int(b.shape.rstrip("]").rpartition(",")[2].rpartition("[")[2]) for b in wide}
    assert all(3000 <= dim < 3064 for dim in last_dims), "XLA pads a matmul's dimensions"
    assert {b.source.rpartition("/")[2].partition(":")[0] for b in wide} <= {"loss.py", "transformer.py"}


def test_gradients_are_named_by_their_parameter(h100):
    memory_map = mapped(h100, LLAMA_V, "none", (("loss", "chunked"),)).memory_map
    kernel = next(b for b in memory_map.buffers if b.label == "gradient of state.params['layers']['mlp']['wi_0']['kernel']")
    assert (kernel.category, kernel.num_layers) == ("gradients", LLAMA.num_layers)
    assert kernel.num_bytes == LLAMA.num_layers * LLAMA.embed_dim * LLAMA.mlp_dim * 4


def test_a_loop_has_its_trip_count_and_its_body(h100):
    memory_map = mapped(h100, GPT_V, "dots").memory_map
    layers = [loop for loop in memory_map.loops if loop.trip_count == GPT.num_layers]
    assert len(layers) == 2
    assert [memory_map.phase_at(loop.first) for loop in layers] == ["forward", "backward"]
    nested = mapped(h100, GPT_V, "every:4+nothing", (("loss", "chunked"), ("accumulate", 2))).memory_map.loops
    assert any(loop.parent is not None and nested[loop.parent].trip_count == 2 for loop in nested)


def gradient(p: Any, x: jax.Array) -> Any:
    return jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["params"]["w"]) @ p["params"]["v"]) ** 2))(p)


ARGS = ({"params": {"w": jnp.zeros((64, 128)), "v": jnp.zeros((128, 64))}}, jnp.zeros((512, 64)))


def test_a_function_of_the_users(h100):
    memory_map = jaxremat.memory_map(gradient, ARGS, h100)
    found = attribution(memory_map)
    assert sum(found.values()) == memory_map.total_bytes
    assert found["parameters"] == 2 * 64 * 128 * 4
    assert found["inputs"] == 512 * 64 * 4
    assert found["gradients"] == 2 * 64 * 128 * 4
    assert any(b.source.endswith(f"test_buffers.py:{gradient.__code__.co_firstlineno + 1}") for b in memory_map.buffers)


def test_arguments_take_the_roles_they_are_given(h100):
    found = attribution(jaxremat.memory_map(lambda a, x: jnp.tanh(x @ a), (ARGS[0]["params"]["w"], ARGS[1]), h100))
    assert found["inputs"] == (512 * 64 + 64 * 128) * 4
    given_roles = jaxremat.memory_map(
        lambda a, x: jnp.tanh(x @ a), (ARGS[0]["params"]["w"], ARGS[1]), h100, roles={"a": "parameters"}
    )
    assert attribution(given_roles)["parameters"] == 64 * 128 * 4


@pytest.mark.parametrize("options", [{}, {"xla_no_such_option": True}])
def test_the_dump_leaves_nothing_behind(h100, monkeypatch, tmp_path, options):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        lower_and_compile(gradient, ARGS, h100, keep_dump=True, options=options)
        assert not options
    except Exception:
        assert options
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


def test_the_seven_sources_have_every_category_once():
    from jaxremat.xla.buffers import CATEGORIES

    assert sorted(part for parts in SOURCES.values() for part in parts) == sorted([*CATEGORIES, "gaps"])
    assert len(SOURCES) == 7
