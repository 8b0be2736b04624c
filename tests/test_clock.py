"""The bytes that each kernel moves and the seconds that a step takes are predicted as a roofline by hand says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxremat.session.page import seconds_at
from jaxremat.xla import clock, hlo
from jaxremat.xla.buffers import MemoryMap, Operation
from jaxremat.xla.flops import executed_flops
from jaxremat.xla.kernels import kernels_of
from tests.gpu_programs import B, H, L, N, T, array, compile_for, compiled_attention
from tests.roofline import LOOP, SPEED

FAST_LINK = dataclasses.replace(SPEED, host_link_bytes_per_s=1e18)


# Bytes.


@pytest.mark.full
def test_offloaded_queries_cross_the_link_twice(h100):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["q"], offload_src="device", offload_dst="pinned_host"
    )
    module, _ = compiled_attention(h100, policy)
    queries = L * B * T * N * H * 2
    kernels = kernels_of(module)
    assert sum(k.host_bytes * k.count for k in kernels) == 2 * queries
    assert sum(bool(k.host_bytes) * k.count for k in kernels) == 2 * L
    slow_link = dataclasses.replace(SPEED, host_link_bytes_per_s=1e6)
    slow, fast, now = (clock.predict_step_time(module, speed) for speed in (slow_link, FAST_LINK, SPEED))
    assert slow.host_s == pytest.approx(2 * queries / 1e6)
    assert 0.99 * slow.host_s < slow.exposed_s < slow.host_s, "next to such a link the kernels hide nothing"
    assert slow.step_s == pytest.approx(slow.host_s, rel=0.01)
    assert fast.exposed_s < 1e-9
    assert now.step_s == pytest.approx(fast.step_s + now.exposed_s)


OVERLAP = """HloModule overlap, is_scheduled=true

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  %copy-start = (f32[1024,1024]{1,0:S(5)}, f32[1024,1024]{1,0}, u32[]) copy-start(%p)
  %dot.1 = f32[1024,1024]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %copy-done = f32[1024,1024]{1,0:S(5)} copy-done(%copy-start)
  %dot.2 = f32[1024,1024]{1,0} dot(%dot.1, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %back = f32[1024,1024]{1,0} copy(%copy-done)
}
"""


def test_the_seconds_of_instructions_sum_to_the_step():
    """What is exposed of a copy counts for its start."""
    speed, module = dataclasses.replace(SPEED, host_link_bytes_per_s=1e9), hlo.parse(OVERLAP)
    times, step = clock.times_of(module, speed), clock.predict_step_time(module, speed)
    assert sum(times.values()) == pytest.approx(step.step_s)
    assert times["copy-start"] + times["back"] >= step.exposed_s > 0, "both cross the link"
    assert [name for name in times if name.startswith("dot")] == ["dot.1", "dot.2"]
    program = tuple(Operation(name, "", "", "") for name in ("p", "copy-start", "dot.1", "dot.2"))
    seconds = seconds_at(MemoryMap(program, (), (), (), (), (), (), 0, ()), times)
    assert seconds[:3] == [0.0, times["copy-start"], times["dot.1"]]
    assert sum(seconds) == pytest.approx(step.step_s), "the last copy isn't in the program"


@pytest.mark.parametrize("copy_s", [1e-6, 1.0])
def test_a_copy_hides_behind_what_is_scheduled_before_its_wait(copy_s):
    """One dot of two is scheduled beside the copy; the copy back isn't asynchronous, and hides behind nothing."""
    speed = dataclasses.replace(FAST_LINK, host_link_bytes_per_s=4 * 1024 * 1024 / copy_s)
    step, free = (clock.predict_step_time(hlo.parse(OVERLAP), s) for s in (speed, FAST_LINK))
    dot_s = 2 * 1024**3 / (SPEED.flops_per_s("f32"))
    assert step.host_s == pytest.approx(2 * copy_s)
    assert step.exposed_s == pytest.approx(copy_s + max(0.0, copy_s - dot_s), rel=0.05)
    assert step.step_s == pytest.approx(free.step_s + step.exposed_s)


@pytest.mark.full
def test_a_scan_over_stacked_weights_reads_each_slice_not_the_stack_each_time(h100):
    layers, width = 16, 1024
    module, _ = compile_for(
        h100,
        lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        array(layers, width, width),
        array(16, width),
    )
    stack = layers * width * width * 2
    kernels = kernels_of(module)
    assert max(k.bytes_read for k in kernels) < 1.1 * stack / layers
    # Once, or copied out of the stack and then read, and the partial sums of a split matmul; not 16 times.
    assert stack <= sum(k.bytes_read * k.count for k in kernels) < 3 * stack


@pytest.mark.full
def test_a_scan_that_stacks_results_writes_each_slice_not_the_stack_each_time(h100):
    layers, rows, width = 16, 64, 4096
    module, _ = compile_for(
        h100, lambda x: jax.lax.scan(lambda x, _: (y := jnp.tanh(x), y), x, None, length=layers)[1], array(rows, width)
    )
    stack = layers * rows * width * 2
    written = sum(k.bytes_written * k.count for k in kernels_of(module))
    assert 2 * stack <= written < 4.5 * stack  # zeroed, filled; the carry beside it


FUSIONS = """HloModule m, is_scheduled=true

%read_slice (s.0: bf16[8,64,32], i.0: s32[], x.0: bf16[64,32]) -> bf16[64,32] {
  %s.0 = bf16[8,64,32]{2,1,0} parameter(0)
  %i.0 = s32[] parameter(1)
  %x.0 = bf16[64,32]{1,0} parameter(2)
  %zero.0 = s32[] constant(0)
  %wide.0 = f32[8,64,32]{2,1,0} convert(%s.0)
  %slice.0 = f32[1,64,32]{2,1,0} dynamic-slice(%wide.0, %i.0, %zero.0, %zero.0), dynamic_slice_sizes={1,64,32}
  %flat.0 = f32[64,32]{1,0} bitcast(%slice.0)
  %narrow.0 = bf16[64,32]{1,0} convert(%flat.0)
  ROOT %sum.0 = bf16[64,32]{1,0} add(%narrow.0, %x.0)
}

%write_slice (s.1: bf16[8,64,32], x.1: bf16[64,32], i.1: s32[]) -> (bf16[64,32], bf16[8,64,32]) {
  %s.1 = bf16[8,64,32]{2,1,0} parameter(0)
  %x.1 = bf16[64,32]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %double.1 = bf16[64,32]{1,0} add(%x.1, %x.1)
  %row.1 = bf16[1,64,32]{2,1,0} bitcast(%double.1)
  %update.1 = bf16[8,64,32]{2,1,0} dynamic-update-slice(%s.1, %row.1, %i.1, %zero.1, %zero.1)
  ROOT %both.1 = (bf16[64,32]{1,0}, bf16[8,64,32]{2,1,0}) tuple(%double.1, %update.1)
}

%new_buffer (x.2: bf16[1,64,32], i.2: s32[]) -> bf16[8,64,32] {
  %x.2 = bf16[1,64,32]{2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %zero.2 = s32[] constant(0)
  %nil.2 = bf16[] constant(0)
  %zeros.2 = bf16[8,64,32]{2,1,0} broadcast(%nil.2), dimensions={}
  ROOT %update.2 = bf16[8,64,32]{2,1,0} dynamic-update-slice(%zeros.2, %x.2, %i.2, %zero.2, %zero.2)
}

%gemm_of_slice (s.3: bf16[8,64,32], i.3: s32[], x.3: bf16[128,64]) -> (bf16[128,32], s8[4194304]) {
  %s.3 = bf16[8,64,32]{2,1,0} parameter(0)
  %i.3 = s32[] parameter(1)
  %x.3 = bf16[128,64]{1,0} parameter(2)
  %zero.3 = s32[] constant(0)
  %slice.3 = bf16[1,64,32]{2,1,0} dynamic-slice(%s.3, %i.3, %zero.3, %zero.3), dynamic_slice_sizes={1,64,32}
  %w.3 = bf16[64,32]{1,0} bitcast(%slice.3)
  ROOT %gemm.3 = (bf16[128,32]{1,0}, s8[4194304]{0}) custom-call(%x.3, %w.3), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}

%gather_rows (t.4: f32[1000,32], i.4: s32[10,1]) -> f32[10,32] {
  %t.4 = f32[1000,32]{1,0} parameter(0)
  %i.4 = s32[10,1]{1,0} parameter(1)
  ROOT %gather.4 = f32[10,32]{1,0} gather(%t.4, %i.4), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,32}
}

ENTRY %main (stack: bf16[8,64,32], i: s32[], x: bf16[64,32], y: bf16[128,64], t: f32[1000,32], ids: s32[10,1]) -> f32[10,32] {
  %stack = bf16[8,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[64,32]{1,0} parameter(2)
  %y = bf16[128,64]{1,0} parameter(3)
  %t = f32[1000,32]{1,0} parameter(4)
  %ids = s32[10,1]{1,0} parameter(5)
  %read = bf16[64,32]{1,0} fusion(%stack, %i, %x), kind=kLoop, calls=%read_slice
  %write = (bf16[64,32]{1,0}, bf16[8,64,32]{2,1,0}) fusion(%stack, %x, %i), kind=kLoop, calls=%write_slice
  %row = bf16[1,64,32]{2,1,0} bitcast(%read)
  %new = bf16[8,64,32]{2,1,0} fusion(%row, %i), kind=kLoop, calls=%new_buffer
  %gemm = (bf16[128,32]{1,0}, s8[4194304]{0}) fusion(%stack, %i, %y), kind=kCustom, calls=%gemm_of_slice
  %rows = f32[10,32]{1,0} fusion(%t, %ids), kind=kLoop, calls=%gather_rows
  %out.start = (f32[1000,32]{1,0:S(5)}, f32[1000,32]{1,0}, u32[]) copy-start(%t)
  %out.done = f32[1000,32]{1,0:S(5)} copy-done(%out.start)
  %room = bf16[8,64,32]{2,1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %result = f32[10,32]{1,0} copy(%rows)
}
"""  # noqa: E501
SLICE, STACK, INDEX, TABLE = 64 * 32 * 2, 8 * 64 * 32 * 2, 4, 1000 * 32 * 4


@pytest.mark.parametrize(
    ("name", "read", "written", "host"),
    [
        ("read", 2 * SLICE + INDEX, SLICE, 0),
        ("write", SLICE + INDEX, 2 * SLICE, 0),
        ("new", SLICE + INDEX, STACK, 0),
        ("gemm", SLICE + INDEX + 128 * 64 * 2, 128 * 32 * 2, 0),
        ("rows", 10 * 32 * 4 + 10 * 4, 10 * 32 * 4, 0),
        ("out.start", TABLE, 0, TABLE),
        ("result", 10 * 32 * 4, 10 * 32 * 4, 0),
    ],
)
def test_a_kernel_is_charged_what_it_touches(name, read, written, host):
    kernels = {k.name: k for k in kernels_of(hlo.parse(FUSIONS))}
    assert len(kernels) == 7  # no parameter, bitcast, copy-done or AllocateBuffer
    assert (kernels[name].bytes_read, kernels[name].bytes_written, kernels[name].host_bytes) == (read, written, host)
    matmul = kernels["gemm"]  # a cuBLAS call; its workspace is not traffic
    assert (matmul.flops, matmul.dtype) == (2 * 128 * 64 * 32, "bf16")


# Seconds.


def test_a_predicted_step_is_the_sum_of_its_rooflines():
    module = hlo.parse(LOOP.format(trips=', backend_config={"known_trip_count":{"n":"10"}}'))
    step = clock.predict_step_time(module, SPEED)
    flops, size = 2 * 2048**3, 2048 * 2048 * 4
    dot_s, read_and_write_s = flops / 2.5e14, 2 * size / 1.5e12
    assert dot_s > read_and_write_s
    assert step.step_s == pytest.approx(10 * (dot_s + 2e-6 + read_and_write_s + 2e-6))
    assert step.compute_s == pytest.approx(10 * dot_s)
    assert step.memory_s == pytest.approx(10 * 2 * read_and_write_s)
    assert (step.flops, step.num_kernels, step.host_bytes, step.launch_s) == (10 * flops, 20, 0, 20 * 2e-6)
    assert step.bytes_read == step.bytes_written == 20 * size
    # A matmul so fast that its bytes decide.
    fast = clock.predict_step_time(module, dataclasses.replace(SPEED, f32_flops=1e20))
    assert fast.step_s == pytest.approx(20 * (read_and_write_s + 2e-6), rel=1e-3)


def test_f32_matmuls_use_the_f32_rate_and_an_unknown_loop_runs_once():
    module = hlo.parse(LOOP.format(trips=""))
    assert executed_flops(module).num_unknown_loops == 1
    (matmul, copy) = kernels_of(module)
    assert (matmul.count, matmul.dtype, copy.flops, copy.dtype) == (1, "f32", 0, "")
    bf16 = clock.predict_step_time(module, dataclasses.replace(SPEED, bf16_flops=1.0))
    assert bf16 == clock.predict_step_time(module, SPEED)
