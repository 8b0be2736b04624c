"""The seconds of a TPU's program are those of XLA's cycles, of bytes, and of links, as a person computes them by hand."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxremat.answer.layer_estimate import cost_of
from jaxremat.answer.layer_problem import layer_problem, trace_layer
from jaxremat.chips.speed import DeviceSpeed
from jaxremat.chips.tpu.attention import splash_attention
from jaxremat.chips.tpu.device import Fitted, load_tpu, tpu_names
from jaxremat.chips.tpu.links import Torus, place_of
from jaxremat.chips.tpu.speed import ICI, tpu_speed
from jaxremat.mesh.axes import MeshShape
from jaxremat.planner.steps import Cost
from jaxremat.policy.jax_private import FUSED_ATTENTION, ResidualName
from jaxremat.xla import hlo
from jaxremat.xla.clock import predict_step_time
from jaxremat.xla.collectives import Collective, collective_seconds
from jaxremat.xla.compile import Compilation
from jaxremat.xla.kernels import Wait, events_of, kernels_of
from jaxremat.xla.memory import memory_of_rejected

MB = 10**6
FITTED = Fitted(1e9, 0.8, 0.25, 0.5, 0.2, 0.1, "made up")
#: A device of 1e12 FLOP/s, 1e9 bytes/s of memory, of which kernels without a matmul reach half, and 1e8 bytes/s of other links.
TPU = replace(
    load_tpu("v5e"),
    peak_bf16_flops=10**12,
    memory_bandwidth=10**9,
    link_bandwidth=10**8,
    network_bandwidth=10**7,
    host_link_bandwidth=10**8,
    fitted=FITTED,
)


def speed(mesh: MeshShape | None = None) -> DeviceSpeed:
    found = tpu_speed(TPU, mesh)
    assert found is not None
    return found


HEAD = "HloModule step, is_scheduled=true, entry_computation_layout={(f32[1000,1000]{1,0:T(8,128)})->f32[]{:T(128)}}"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"3000000"}}'
MATMUL = f"""
%fused (a: f32[1000,1000], b: f32[1000,1000]) -> f32[1000,1000] {{
  %a = f32[1000,1000]{{1,0:T(8,128)}} parameter(0)
  %b = f32[1000,1000]{{1,0:T(8,128)}} parameter(1)
  ROOT %product = f32[1000,1000]{{1,0:T(8,128)}} convolution(%a, %b), dim_labels=bf_io->bf, metadata={{op_name="dot_general"}}
}}
%body (t: (s32[], f32[1000,1000])) -> (s32[], f32[1000,1000]) {{
  %t = (s32[]{{:T(128)}}, f32[1000,1000]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  %x = f32[1000,1000]{{1,0:T(8,128)}} get-tuple-element(%t), index=1
  %one = s32[]{{:T(128)}} constant(1)
  %next = s32[]{{:T(128)}} add(%i, %one)
  %y = f32[1000,1000]{{1,0:T(8,128)}} fusion(%x, %x), kind=kOutput, calls=%fused, {CYCLES}
  ROOT %pair = (s32[]{{:T(128)}}, f32[1000,1000]{{1,0:T(8,128)}}) tuple(%next, %y)
}}
%test (t: (s32[], f32[1000,1000])) -> pred[] {{
  %t = (s32[]{{:T(128)}}, f32[1000,1000]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  %limit = s32[]{{:T(128)}} constant(5)
  ROOT %less = pred[]{{:T(512)}} compare(%i, %limit), direction=LT
}}
"""
LOOP = f"""{HEAD}
{MATMUL}
ENTRY %main (x: f32[1000,1000]) -> f32[1000,1000] {{
  %x = f32[1000,1000]{{1,0:T(8,128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(0)
  %first = (s32[]{{:T(128)}}, f32[1000,1000]{{1,0:T(8,128)}}) tuple(%zero, %x)
  %loop = (s32[]{{:T(128)}}, f32[1000,1000]{{1,0:T(8,128)}}) while(%first), condition=%test, body=%body
  %y = f32[1000,1000]{{1,0:T(8,128)}} get-tuple-element(%loop), index=1
  ROOT %z = f32[1000,1000]{{1,0:T(8,128)}} copy(%y), {CYCLES}
}}
"""


def test_a_matmul_takes_its_cycles_in_each_turn_of_its_loop():
    time = predict_step_time(hlo.parse(LOOP), speed())
    # 5 times 3e6 cycles at 1e9 a second; 8 MB of the copy at half of the bandwidth, whatever its cycles are.
    assert time.step_s == pytest.approx(5 * 3e-3 + 8 * MB / 5e8, rel=1e-5)  # the counter's bytes are left aside
    assert time.flops == 5 * 2 * 10**9


def test_what_is_in_memory_on_the_chip_is_no_traffic_of_a_tpu():
    near = LOOP.replace("{1,0:T(8,128)} copy", "{1,0:T(8,128)S(1)} copy")
    assert kernels_of(hlo.parse(near))[-1].num_bytes == 4 * MB
    # On a GPU, that space is memory of the device.
    of_gpu = re.sub(r":T\([\d,]+\)", "", near.replace(":T(8,128)S(1)", ":S(1)"))
    assert kernels_of(hlo.parse(of_gpu))[-1].num_bytes == 8 * MB


def async_copy(between: str) -> str:
    """8 MB that are fetched from the host, and what runs until they are needed."""
    return f"""{HEAD}
{MATMUL}
ENTRY %main (x: f32[1000,1000], h: f32[2,1000,1000]) -> f32[1000,1000] {{
  %x = f32[1000,1000]{{1,0:T(8,128)}} parameter(0)
  %h = f32[2,1000,1000]{{2,1,0:T(8,128)S(5)}} parameter(1)
  %i = s32[]{{:T(128)}} constant(1)
  %start = ((f32[2,1000,1000]{{2,1,0:T(8,128)S(5)}}, s32[]{{:T(128)}}, s32[]{{:T(128)}}, s32[]{{:T(128)}}), \
f32[1,1000,1000]{{2,1,0:T(8,128)}}, u32[]{{:S(2)}}) dynamic-slice-start(%h, %i, %i, %i), dynamic_slice_sizes={{1,1000,1000}}
  {between}
  %done = f32[1,1000,1000]{{2,1,0:T(8,128)}} dynamic-slice-done(%start)
  ROOT %z = f32[1000,1000]{{1,0:T(8,128)}} bitcast(%done)
}}
"""


@pytest.mark.parametrize(
    ("between", "exposed_s"),
    [("", 0.04), (f"%y = f32[1000,1000]{{1,0:T(8,128)}} fusion(%x, %x), kind=kOutput, calls=%fused, {CYCLES}", 0.037)],
)
def test_the_kernels_between_hide_a_host_transfer(between, exposed_s):
    time = predict_step_time(hlo.parse(async_copy(between)), speed())
    assert time.host_s == pytest.approx(0.04)  # 4 MB at 1e8 bytes/s
    assert time.exposed_s == pytest.approx(exposed_s)
    assert time.step_s == pytest.approx(0.04)


def test_a_copy_into_the_chip_runs_beside_kernels():
    start = "(f32[1000,1000]{1,0:T(8,128)S(1)}, f32[1000,1000]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)"
    kernel = f"f32[1000,1000]{{1,0:T(8,128)}} fusion(%x, %x), kind=kOutput, calls=%fused, {CYCLES}"
    text = f"""{HEAD}
{MATMUL}
ENTRY %main (x: f32[1000,1000]) -> f32[1000,1000] {{
  %x = f32[1000,1000]{{1,0:T(8,128)}} parameter(0)
  %start = {start}
  %y = {kernel}
  ROOT %done = f32[1000,1000]{{1,0:T(8,128)S(1)}} copy-done(%start)
}}
"""
    time = predict_step_time(hlo.parse(text), speed())
    assert time.step_s == pytest.approx(4 * MB / 5e8)  # longer than the kernel's 3 ms
    assert time.exposed_s == time.host_s == 0


ASYNC = f"""{HEAD}
{MATMUL}
%begin (p: f32[250,1000]) -> (f32[250,1000], f32[1000,1000], u32[]) {{
  %p = f32[250,1000]{{1,0:T(8,128)}} parameter(0)
  %g = f32[1000,1000]{{1,0:T(8,128)}} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={{0}}
  ROOT %c = (f32[250,1000]{{1,0:T(8,128)}}, f32[1000,1000]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}}
%beside (p: f32[250,1000], a: f32[1000,1000]) -> (f32[1000,1000], f32[1000,1000]) {{
  %p = f32[250,1000]{{1,0:T(8,128)}} parameter(0)
  %a = f32[1000,1000]{{1,0:T(8,128)}} parameter(1)
  %g = f32[1000,1000]{{1,0:T(8,128)}} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={{0}}
  %m = f32[1000,1000]{{1,0:T(8,128)}} convolution(%a, %a), dim_labels=bf_io->bf, metadata={{op_name="dot_general"}}
  ROOT %both = (f32[1000,1000]{{1,0:T(8,128)}}, f32[1000,1000]{{1,0:T(8,128)}}) tuple(%m, %g)
}}
%end (p: f32[250,1000]) -> f32[1000,1000] {{
  %p = f32[250,1000]{{1,0:T(8,128)}} parameter(0)
  %g = f32[1000,1000]{{1,0:T(8,128)}} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={{0}}
  ROOT %c = f32[1000,1000]{{1,0:T(8,128)}} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"
}}
%sliced (p: f32[1000,1000]) -> f32[250,1000] {{
  %p = f32[1000,1000]{{1,0:T(8,128)}} parameter(0)
  %i = s32[]{{:T(128)}} constant(0)
  %r = f32[1000,1000]{{1,0:T(8,128)}} all-reduce(%p), channel_id=9, replica_groups={{{{0,1,2,3}}}}, to_apply=%fused
  ROOT %s = f32[250,1000]{{1,0:T(8,128)}} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={{250,1000}}
}}
ENTRY %main (x: f32[250,1000], a: f32[1000,1000]) -> f32[250,1000] {{
  %x = f32[250,1000]{{1,0:T(8,128)}} parameter(0)
  %a = f32[1000,1000]{{1,0:T(8,128)}} parameter(1)
  %start = (f32[250,1000]{{1,0:T(8,128)}}, f32[1000,1000]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) fusion(%x), kind=kCustom, calls=%begin
  %e = f32[250,1000]{{1,0:T(8,128)}} get-tuple-element(%start), index=0
  %m = (f32[1000,1000]{{1,0:T(8,128)}}, f32[1000,1000]{{1,0:T(8,128)}}) fusion(%e, %a), kind=kOutput, calls=%beside, {CYCLES}
  %done = f32[1000,1000]{{1,0:T(8,128)}} fusion(%e), kind=kCustom, calls=%end
  ROOT %s = f32[250,1000]{{1,0:T(8,128)}} fusion(%done), kind=kCustom, calls=%sliced
}}
"""


def test_collectives_in_fusions_begin_and_end_there():
    events = events_of(hlo.parse(ASYNC))
    assert [event.name for event in events] == ["start", "m", "start", "s"]
    assert isinstance(events[2], Wait)
    time = predict_step_time(hlo.parse(ASYNC), speed(MeshShape(fsdp=4)))
    # 2 x 2 chips: one link along each axis. 3 of 4 MB to gather beside 3 ms of a matmul, and as many to reduce and scatter.
    link_s = 3 * MB / 2e8 + 1e-6
    assert time.num_collectives == 2
    assert time.num_kernels == 1
    assert time.collective_bytes == 6 * MB
    assert time.collective_s == pytest.approx(2 * link_s)
    assert time.collective_exposed_s == pytest.approx(2 * link_s - 3e-3)
    assert time.step_s == pytest.approx(2 * link_s)


@pytest.mark.parametrize(
    ("layout", "group", "num_links"),
    [
        ((2, 4), range(8), 2),
        ((2, 4), range(2), 1),
        ((16, 16), range(256), 4),
        ((8, 16), range(128), 3),
        ((4, 4, 4), range(64), 6),
        ((2, 2, 4), range(16), 3),
        ((2, 4, 4), range(32), 3),
        ((4, 4, 4), range(16), 4),
        ((1, 1), range(1), 1),
    ],
)
def test_a_group_sends_along_every_axis_that_it_spans(layout, group, num_links):
    links = Torus(len(group), 256, 1e8, None, (ICI,), layout=layout)
    assert links.ring_bytes_per_s(group) == num_links * 1e8


def test_an_exchange_is_bound_by_the_middle_of_the_slice():
    links = Torus(16, 16, 1e8, None, (ICI,), layout=(4, 4))
    # Of 16 MB of each of 16 devices, each half of 8 devices sends half over 4 links.
    assert collective_seconds(Collective("all-to-all", 16 * MB, ()), links) == pytest.approx(1e-6 + 8 * 8 * MB / 4e8)


def test_slices_are_linked_by_the_network():
    mesh = MeshShape(fsdp=16, nodes=2)
    links = speed(mesh).links
    assert links is not None
    gather = Collective("all-gather", 16 * MB, ())
    assert collective_seconds(gather, links) == pytest.approx(1e-6 + 15 * MB / (8 * 1e7))
    faster = speed(replace(mesh, network_gbps=64.0)).links  # 1e9 bytes/s a device: the links of the slice are slower
    assert faster is not None
    assert collective_seconds(gather, faster) == pytest.approx(1e-6 + 15 * MB / 2e8)


def test_where_the_chips_of_a_slice_are():
    """As `.coords` of libtpu's topologies have it."""
    assert [place_of(n, (4, 4)) for n in (0, 1, 2, 3, 4, 8, 15)] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (3, 3)]
    assert [place_of(n, (2, 2, 4)) for n in (3, 4, 15)] == [(1, 1, 0), (0, 0, 1), (1, 1, 3)]


def test_no_time_without_steps_or_links():
    assert tpu_speed(replace(TPU, fitted=None)) is None
    assert tpu_speed(replace(TPU, host_link_bandwidth=None)) is None
    assert tpu_speed(replace(TPU, network_bandwidth=None), MeshShape(fsdp=16, nodes=2)) is None
    assert tpu_speed(replace(TPU, network_bandwidth=None), MeshShape(fsdp=16)) is not None
    assert speed().interval == (-0.2, 0.2)
    for name in tpu_names():
        described = load_tpu(name)
        assert (tpu_speed(described) is None) == (described.fitted is None)


def test_a_step_that_is_too_large_takes_its_requested_flops():
    """It has no program, and a planner compares it by its bytes first."""
    w = jax.ShapeDtypeStruct((1000, 1000), jnp.bfloat16)
    done = Compilation(memory_of_rejected(7), "", 0.0, 0.0, jaxpr=jax.make_jaxpr(jnp.dot)(w, w), is_too_large=True)
    assert cost_of(done, speed()) == Cost(7, 2e9 / (FITTED.matmul_share * 1e12))


@pytest.mark.full
def test_a_layer_s_splash_attention_has_the_share_of_attention():
    """Its kernels are Pallas's, and JAX's fused attention isn't there."""

    def layer(x_BTNH: jax.Array) -> jax.Array:
        return splash_attention(x_BTNH, x_BTNH, x_BTNH, block=128, name=ResidualName("context"))

    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    problem, _, ways = layer_problem(trace_layer(layer, (x,)), replace(speed(), bandwidth_bytes_per_s=1e15))
    assert {(way.name, way.primitive) for way in ways.values()} == {("", FUSED_ATTENTION)}
    of_attention = [op for op in problem.ops if op.flops]
    assert [[problem.values[v].name for v in op.outputs] for op in of_attention if op.together] == [[*ways]]
    assert [op.recompute_s for op in of_attention] == pytest.approx([2 * 2 * 256**2 / 2 * 2 * 128 / 0.25e12])
