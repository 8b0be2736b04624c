"""Splash attention: the values and gradients of XLA's attention, its kernels once where they are saved, and their FLOPs."""

import functools
import importlib.util
import re
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxremat import attribution
from jaxremat.answer.layer_problem import layer_problem, trace_layer
from jaxremat.answer.layer_share import ALONE, Share
from jaxremat.chips import catalog
from jaxremat.chips.catalog import call_kind
from jaxremat.chips.target import Target, load_target
from jaxremat.chips.tpu.attention import SPLASH, splash_attention
from jaxremat.config import ModelConfig, TrainConfig
from jaxremat.errors import UsageError
from jaxremat.mesh.axes import ONE_DEVICE, MeshShape, parse_mesh
from jaxremat.mesh.sharding import abstract_mesh, tracing_on
from jaxremat.model.attention import choose_attention
from jaxremat.model.decoder_workload import decoder_workload
from jaxremat.model.layers import attend
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.jax_private import FUSED_ATTENTION, ResidualName, is_save_decision
from jaxremat.policy.spec import JaxPolicy, LayerPolicy
from jaxremat.step.step import abstract_args, donated, make_step, step_shardings
from jaxremat.xla import hlo
from jaxremat.xla.buffers import held
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.flops import count_step_flops, executed_flops
from jaxremat.xla.memory_map import read_map
from tests.helpers import quick_jit
from tests.roofline import SLOW

B, T, H = 1, 256, 32
MODEL = ModelConfig(
    vocab_size=256, num_layers=2, embed_dim=128, num_heads=2, num_kv_heads=1, head_dim=64, mlp_dim=128, max_seq_len=128
)
TRAIN = TrainConfig(seq_len=128)
TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed: jax[tpu]")


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 4},
        {"num_kv_heads": 2, "sliding_window": 100, "query_pre_attn_scalar": 7.0},
        {"num_kv_heads": 1, "attention_softcap": 1.5, "attention_block": 256},
    ],
)
def test_values_and_gradients_are_those_of_xla_s_attention(changes, monkeypatch):
    """Causal, with grouped queries, a window, a scale and a soft-cap, by the interpreter of Pallas."""
    config = ModelConfig(num_heads=4, head_dim=H, attention="splash", **{"attention_block": 128} | changes)
    monkeypatch.setattr("jaxremat.chips.tpu.attention.splash_attention", functools.partial(splash_attention, interpret=True))
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, n, H) for n in (4, config.num_kv_heads, config.num_kv_heads, 4)]
    *arrays, weights = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    def loss(implementation: str, *arrays: jax.Array) -> jax.Array:
        q, k, v = arrays
        return (attend(q, k, v, config, implementation, None) * weights).sum()

    found, expected = (
        quick_jit(jax.value_and_grad(functools.partial(loss, name), (0, 1, 2)))(*arrays) for name in ("splash", "xla")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), found, expected)


def test_a_length_without_a_block_is_rejected():
    x = jax.ShapeDtypeStruct((1, 130, 2, H), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="130"):
        jax.eval_shape(splash_attention, x, x, x)
    with pytest.raises(UsageError) as caught:
        ModelConfig(attention_block=250)
    assert "250" in caught.value.got


@pytest.mark.full  # it loads Pallas
@pytest.mark.parametrize(
    ("length", "block", "taken"), [(1024, 512, 512), (384, 512, 384), (640, 512, 128), (2048, 2048, 2048)]
)
def test_a_block_is_the_largest_that_divides_the_length(length, block, taken):
    x = jax.ShapeDtypeStruct((1, length, 2, H), jnp.bfloat16)
    program = str(jax.make_jaxpr(functools.partial(splash_attention, block=block))(x, x, x))
    assert set(re.findall(r'"block_\w+": (\d+)', program)) == {str(taken)}


@pytest.mark.full
def test_on_a_mesh_each_device_has_its_sequences_and_heads():
    """A key head for each device of the axis tensor, though there is one."""
    q, k = (jax.ShapeDtypeStruct((4, 128, n, H), jnp.bfloat16) for n in (4, 1))
    with jax.sharding.use_abstract_mesh(abstract_mesh(MeshShape(fsdp=2, tensor=2))):
        (mapped,) = [e for e in jax.make_jaxpr(splash_attention)(q, k, k).eqns if e.primitive.name == "shard_map"]
    assert {var.aval.shape for var in mapped.invars if len(var.aval.shape) == 4} == {(4, 4, 128, H)}
    assert {tuple(spec)[:2] for spec in mapped.params["out_specs"]} == {("fsdp", "tensor")}
    alone = jax.make_jaxpr(splash_attention)(q, k, k)
    assert "shard_map" not in str(alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("batch", "axes", "window"),
    [(2, ONE_DEVICE, 0), (2, MeshShape(fsdp=4), 0), (8, MeshShape(fsdp=4), 100), (2, MeshShape(fsdp=2, tensor=2), 0)],
)
def test_the_planner_saves_the_output_and_the_statistics_together(batch, axes, window):
    """Their bytes and FLOPs are those of the batch on one device, also where the mesh doesn't divide the batch."""
    length, heads, features = 256, 4, 32
    mesh = abstract_mesh(axes) if axes.num_devices > 1 else None
    attend = functools.partial(splash_attention, name=ResidualName("context"), window=window)

    def layer(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with tracing_on(mesh):
            return checkpoint_name(attend(q, k, v), "y")

    x = jax.ShapeDtypeStruct((batch, length, heads, features), jnp.bfloat16)
    problem, _, ways = layer_problem(trace_layer(layer, (x, x, x)), SLOW, share=Share(mesh, axes=axes) if mesh else ALONE)
    (kernel,) = [op for op in problem.ops if op.together]
    alone = count_step_flops(jax.make_jaxpr(attend)(x, x, x)).total
    assert kernel.flops == alone // axes.tensor > 0
    saved = [problem.values[v] for v in kernel.outputs]
    each = batch * length * heads // axes.tensor
    assert [value.num_bytes for value in saved] == [2 * each * features, 4 * each]  # bfloat16, and float32
    assert {ways[value.name].primitive for value in saved} == {FUSED_ATTENTION}
    assert all(value.saveable and value.needed and not value.offloadable for value in saved)
    assert sum(op.flops for op in problem.ops) == kernel.flops
    assert kernel.recompute_s >= kernel.flops / SLOW.flops_per_s("bf16", "attention") > 0


def test_the_values_of_attention_are_the_chips_own():
    assert set(get_args(catalog.Attention)) == {"auto", "xla"} | {chip.attention.name for chip in catalog.CHIPS}
    assert catalog.fused_attention("splash") is SPLASH
    assert catalog.fused_attention("xla") is None
    with pytest.raises(UsageError) as caught:
        catalog.fused_attention("flash")
    assert "splash" in caught.value.allowed


@pytest.mark.parametrize("policy", ["nothing", "dots", "save:query_proj"])
def test_attention_s_residuals_are_saved_by_their_name(policy):
    """And a value with that plain name isn't one of them."""
    written = jax.make_jaxpr(lambda x: checkpoint_name(checkpoint_name(x, ResidualName("context")), "context"))(1.0)
    residual, plain = written.eqns

    def saves(text: str, eqn: Any) -> bool:
        read = as_policy(text)
        assert isinstance(read, LayerPolicy)
        return is_save_decision(JaxPolicy(read)(eqn.primitive, eqn.invars[0].aval, **eqn.params))

    assert [saves(f"{policy}+attention", eqn) for eqn in (residual, plain)] == [True, False]
    assert [saves(policy, eqn) for eqn in (residual, plain)] == [False, False]
    assert [saves("save:context", eqn) for eqn in (residual, plain)] == [True, True]


def test_kernels_are_known_by_their_names():
    kinds = {
        "pallas_call$splash_mha_fwd_residuals": "attention",
        "pallas_call$splash_mqa_fwd_segmented_no_residuals": "attention",
        "pallas_call$splash_mha_dkv_no_residuals": "attention gradient",
        "pallas_call$splash_mha_dq_no_residuals": "attention gradient of queries",
        "pallas_call$somebody_s": None,
        "tpu_custom_call": None,
    }
    assert {target: call_kind(target) for target in kinds} == kinds


TEXT = r"""HloModule jit_step, is_scheduled=true

%condition (c: (s32[], bf16[1,2,256,64])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(7)
  %c = (s32[]{:T(128)}, bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%count, %constant.9), direction=LT
}

%body (b: (s32[], bf16[1,2,256,64])) -> (s32[], bf16[1,2,256,64]) {
  %b = (s32[]{:T(128)}, bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %x = bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%b), index=1
  %mask = s8[1,2,2]{2,1,0:T(4,128)(4,1)} constant({ { { 0, 0 }, { 0, 1 } } })
  %splash.1 = (f32[1,128,64], bf16[1,2,256,64]) custom-call(%mask, %x, %x, %x), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\"block_q\": 128}"
}}, custom_call_target="tpu_custom_call", metadata={op_name="jit(s)/window_100/jit(f)/splash_mha_fwd_residuals/pallas_call"}
  %out = bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%splash.1), index=1
  %old = s32[]{:T(128)} get-tuple-element(%b), index=0
  %copied = s32[]{:T(128)} copy(%old)
  %three = s32[]{:T(128)} constant(3)
  %new = s32[]{:T(128)} add(%copied, %three)
  ROOT %next = (s32[]{:T(128)}, bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)}) tuple(%new, %out)
}

ENTRY %main (p: bf16[1,2,256,64]) -> bf16[1,2,256,64] {
  %p = bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %first = (s32[]{:T(128)}, bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)}) tuple(%start, %p)
  %while.1 = (s32[]{:T(128)}, bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)S(1)}) while(%first), condition=%condition, body=%body
  ROOT %result = bf16[1,2,256,64]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%while.1), index=1
}
"""


def test_a_kernel_s_metadata_ends_no_computation_and_a_loop_without_a_count_is_counted():
    """The counter is 0, 3 and 6, below 7. The kernel of a window of 100 tokens runs 3 times."""
    module = hlo.parse(TEXT)
    body, loop = module.computations["body"], module.entry_computation.by_name["while.1"]
    assert body.root.name == "next"
    assert body.by_name["splash.1"].op_name.endswith("pallas_call")
    assert body.by_name["splash.1"].operands == ("mask", "x", "x", "x")
    assert loop.trip_count == 3
    flops = executed_flops(module)
    assert flops.attention_flops == 3 * 2 * (2 * 64) * 2 * (256 * 100 - 100**2 // 2)
    assert (flops.num_attention_forward, flops.num_unknown_loops) == (3, 0)


def test_a_loop_is_counted_where_operands_name_an_element():
    text = TEXT.replace("compare(%count,", "compare(%c#0,").replace("add(%copied,", "add(%b#0,")
    assert hlo.parse(text).entry_computation.by_name["while.1"].trip_count == 3


@pytest.mark.parametrize(("old", "new"), [("direction=LT", "direction=GT"), ("add(%copied", "multiply(%copied")])
def test_a_loop_that_counts_otherwise_has_no_known_count(old, new):
    module = hlo.parse(TEXT.replace(old, new))
    assert module.entry_computation.by_name["while.1"].trip_count is None
    assert executed_flops(module).num_unknown_loops == 1


# Compiled by libtpu.


@functools.cache
def compiled(policy: str, mesh: str = "") -> Compilation:
    target = load_target("v5e", parse_mesh(mesh) if mesh else None)
    workload = decoder_workload(MODEL, TRAIN, 4, "splash")
    step, args = make_step(workload, TRAIN, as_policy(policy)), abstract_args(workload, TRAIN)
    shardings = step_shardings(target.mesh, workload, TRAIN) if target.mesh else None
    return lower_and_compile(step, args, target, donate_argnums=donated(workload), keep_dump=True, shardings=shardings)


def calls(done: Compilation) -> dict[str, int]:
    """How often each kernel stands in the text, which has each loop's body once."""
    text = done.hlo_text
    return {kind: len(re.findall(rf"%splash_mha_{kind}\S* = .* custom-call\(", text)) for kind in ("fwd", "dkv", "dq")}


@TPU
@pytest.mark.full
def test_saved_by_their_name_the_forward_kernel_runs_once():
    assert calls(compiled("nothing")) == {"fwd": 2, "dkv": 1, "dq": 1}
    assert calls(compiled("nothing+attention")) == {"fwd": 1, "dkv": 1, "dq": 1}
    executed = executed_flops(compiled("nothing+attention").module)
    assert (executed.num_attention_forward, executed.num_attention_backward) == (MODEL.num_layers, MODEL.num_layers)


@TPU
@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=2"])
def test_the_flops_of_kernels_are_those_requested(mesh):
    """Forward twice, and backward; the one key head is repeated where 2 devices have a query head each."""
    done = compiled("nothing", mesh)
    executed, requested = executed_flops(done.module), count_step_flops(done.jaxpr)
    pairs = MODEL.num_layers * 4 * MODEL.num_heads * 128**2 // 2
    assert requested.attention_flops == 2 * pairs * 64 * (2 * 2 + 4 + 3)
    assert executed.attention_flops * done.mesh.num_devices == requested.attention_flops
    assert executed.num_attention_forward == 2 * executed.num_attention_backward == 2 * MODEL.num_layers
    assert executed.num_unknown_loops == executed.convolution_flops == 0
    without_sums = (
        requested.matmul_flops - 2 * MODEL.num_layers * 4 * MODEL.num_heads * 128 * 64
    )  # XLA adds up products of these
    assert executed.matmul_flops * done.mesh.num_devices == without_sums


@TPU
@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=2"])
def test_the_map_s_bytes_are_those_in_the_device_s_memory(mesh):
    """All that XLA allocates there, with the program."""
    done = compiled("nothing+attention", mesh)
    memory_map, dump = done.memory_map, done.dump
    assert dump is not None
    parts = attribution(memory_map)
    sizes = re.findall(r"^allocation \d+: size (\d+)(?!.*(?:color|thread-local)).*$", dump.assignment, re.MULTILINE)
    assert sum(parts.values()) == memory_map.total_bytes == sum(map(int, sizes)) + done.memory.generated_code_bytes
    assert memory_map.total_bytes == done.memory.total_bytes
    assert {loop.trip_count for loop in memory_map.loops} == {MODEL.num_layers}
    assert [phase for phase, _, _ in memory_map.phases] == ["forward", "backward", "update"]
    assert {"parameters", "optimizer state", "workspace"} <= parts.keys()
    assert "state.params['layers']['mlp']['wo']['kernel']" in {buffer.label for buffer in memory_map.buffers}


@TPU
@pytest.mark.full
def test_what_a_kernel_saves_has_its_name_and_its_scratch_has_none():
    done = compiled("nothing+attention")
    assert done.dump is not None
    everywhere = read_map(done.dump, done.names)  # so small a step has most values in the chip's own memory
    results = {one.name[-2]: one.label for one in everywhere.buffers if re.match(r"splash_mha_fwd\S*{\d}", one.name)}
    assert Counter(results.values())["context"] == 1
    assert set(results.values()) == {"context", "attention/splash_mha_fwd_residuals"}
    stacks = [one.label for one in everywhere.buffers if one.num_layers == MODEL.num_layers and "splash" in one.op_name]
    assert "context" in stacks


@TPU
@pytest.mark.full
def test_xla_s_peak_is_that_of_the_memory_space_with_most():
    """Arguments, results and constants, and what is live in one space at once: of this small step, in the chip's memory."""
    done = compiled("nothing+attention")
    assert done.dump is not None
    live = {}
    for space in (0, 1):
        memory_map = read_map(done.dump, done.names, device_spaces=(space,))
        arenas = {one.number for one in memory_map.allocations if one.kind == "temp"}
        live[space] = sum(size for buffer, size in held(memory_map, memory_map.peak) if buffer.allocation in arenas)
    of_device = read_map(done.dump, done.names, device_spaces=(0,))
    always = sum(one.num_bytes for one in of_device.allocations if one.kind != "temp")
    assert done.memory.peak_bytes == always + max(live.values())
    assert 0 < live[0] < live[1]


@TPU
@pytest.mark.full
def test_offloaded_values_are_in_the_host_s_memory():
    done = compiled("offload:mlpwi_0+attention")
    offloaded = MODEL.num_layers * 4 * 128 * MODEL.mlp_dim * 2
    assert done.memory_map.host_bytes == done.memory.host_temp_bytes == offloaded
    assert [(buffer.label, buffer.num_layers) for buffer in done.memory_map.host_buffers] == [("mlpwi_0", MODEL.num_layers)]
    assert calls(done)["fwd"] == 1


@TPU
@pytest.mark.full
def test_auto_takes_splash_attention_where_it_compiles():
    target: Target = load_target("v5e")
    assert target.chip.attention is SPLASH
    assert choose_attention(MODEL, 128, target).implementation == "splash"
    assert (
        choose_attention(replace(MODEL, attention_softcap=30.0, sliding_window=64), 128, target).implementation == "splash"
    )
    refused = choose_attention(MODEL, 100, target)
    assert refused.implementation == "xla"
    assert {"100", "128"} <= set(re.findall(r"\w+", refused.reason))
    with pytest.raises(UsageError) as caught:
        choose_attention(replace(MODEL, attention="splash"), 100, target)
    assert "--seq-len 128" in caught.value.next_step
