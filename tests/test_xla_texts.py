"""The parsers of what XLA writes find all that they must in one small program, compiled for a GPU that isn't here.

XLA promises nothing of these texts. Its protos have no schema in Python: jaxlib prints them as text, and the package xprof
reads them in C++. So this is the first test to run with a newer jax: a text that changed fails here by the name of its parser,
and not as a wrong number somewhere else.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxremat.xla import hlo
from jaxremat.xla.compile import Compilation, lower_and_compile
from jaxremat.xla.dump import Dump, parse_assignment, parse_frames, parse_live_ranges
from jaxremat.xla.flops import executed, executed_flops
from jaxremat.xla.kernels import kernels_of

pytestmark = [pytest.mark.full]
LAYERS, WIDTH = 3, 128
NUM_BYTES = LAYERS * WIDTH * WIDTH * 4


def loss(params: Any, x: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        return checkpoint_name(jnp.tanh(x @ weight), "hidden"), None

    return (jax.lax.scan(layer, x, params)[0] ** 2).sum()


def step(params: Any, x: Any) -> Any:
    return params - 0.1 * jax.grad(loss)(params, x)


@pytest.fixture(scope="module")
def done(h100) -> Compilation:
    args = (jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32))
    return lower_and_compile(step, args, h100, donate_argnums=0, keep_dump=True)


@pytest.fixture
def dump(done) -> Dump:
    assert done.dump is not None
    return done.dump


def test_the_program(done):
    """Loops with their trip counts, scopes, calls, matmuls, and what is donated."""
    module = done.module
    assert [parameter for _, parameter in module.aliases] == [0]
    found = list(executed(module))
    loops = [i for _, i, _ in found if i.opcode == "while"]
    assert [i.trip_count for i in loops] == [LAYERS, LAYERS]
    assert all(i.called for i in loops)
    assert any("jit(step)" in i.op_name and "while" in i.op_name for _, i, _ in found)
    assert any(i.op_name.endswith("tanh") and times == LAYERS for _, i, times in found)
    assert any(i.tuple_index > 0 for _, i, _ in found if i.opcode == "get-tuple-element")
    assert any(i.value is not None for _, i, _ in found if i.opcode == "constant")
    assert executed_flops(module).num_matmuls == 3 * LAYERS
    (first,) = [i for i in module.entry_computation.instructions if i.opcode == "parameter" and i.parameter_index == 0]
    assert [(shape.dtype, shape.dims, shape.num_bytes) for shape in first.shapes] == [
        ("f32", (LAYERS, WIDTH, WIDTH), NUM_BYTES)
    ]


def test_the_kernels(done):
    """Each matmul of the loops is in a kernel."""
    found = kernels_of(done.module)
    counts = executed_flops(done.module)
    assert sum(kernel.flops * kernel.count for kernel in found) == counts.total == 3 * LAYERS * 2 * WIDTH**3
    assert {kernel.dtype for kernel in found if kernel.flops} == {"f32"}
    assert all(kernel.num_bytes for kernel in found if kernel.flops)


def test_the_buffers(done, dump):
    """Allocations with their kinds, values and offsets; together they are the bytes of XLA's own analysis."""
    allocations = parse_assignment(dump.assignment)
    assert {allocation.parameter for allocation in allocations} >= {0, 1}
    assert any(a.is_output and a.parameter == 0 and a.num_bytes == NUM_BYTES for a in allocations)
    counted = [a for a in allocations if not a.is_thread_local and not a.is_constant]
    assert abs(sum(a.num_bytes for a in counted) - done.memory.total_bytes) < 4096
    values = [value for a in allocations for value in a.values]
    assert values
    assert any(value.is_phi for value in values)
    assert all(value.offset + value.num_bytes <= a.num_bytes for a in allocations for value in a.values)
    assert {shape.dtype for value in values for shape in hlo.parse_shapes(value.shape)} >= {"f32", "s32"}


def test_the_live_ranges(done, dump):
    schedule, ranges = parse_live_ranges(dump.live_ranges)
    texts = (done.module, hlo.parse(dump.hlo))  # each may have some names of its own
    names = {i.name for module in texts for computation in module.computations.values() for i in computation.instructions}
    assert set(schedule) <= names
    assert len(schedule) > LAYERS
    assert all(0 <= first <= last < len(schedule) + 1 for first, last in ranges.values())
    values = {value.name for a in parse_assignment(dump.assignment) if a.is_temp for value in a.values}
    assert values & ranges.keys()


def test_the_frames(done, dump):
    frames = parse_frames(dump.hlo)
    functions = {function for file, function, _ in frames.locations.values() if file == __file__}
    assert functions >= {"step", "loss", "loss.<locals>.layer"} or functions >= {"step", "loss", "layer"}
    of_layers = {i.frame for _, i, _ in executed(done.module) if i.op_name.endswith("tanh")}
    assert {frames.source(frame).rpartition(":")[0] for frame in of_layers} == {__file__}


def test_the_proto(dump):
    """XProf reads it. It begins with the HloModuleProto, whose first field is the module's name."""
    assert b"jit_step" in dump.proto[:64]
