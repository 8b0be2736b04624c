"""Every form of line in XLA's dump of a compile is understood, and becomes the right buffer."""

from dataclasses import replace

import flax.linen.linear
import pytest

from jaxremat.policy.names import WrittenName
from jaxremat.xla.buffers import Category, attribution
from jaxremat.xla.categories import RULES, Evidence, category_of, phase_of, role_of
from jaxremat.xla.dump import Dump, HloValue, parse_assignment, parse_frames, parse_live_ranges
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.memory_map import read_map
from jaxremat.xla.origin import Origin, label_of

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, parameter 1, shape |f32[4,4]| at ShapeIndex {}, maybe-live-out:
 value: <3 p_w.1 @0> (size=64,offset=0): f32[4,4]{1,0}
 value: <9 update{0} @0> (size=64,offset=0): f32[4,4]{1,0}
allocation 1: size 16, output shape is |(f32[4,4], /*index=1*/f32[])|, maybe-live-out:
 value: <10 out{} @0> (size=16,offset=0): (f32[4,4]{1,0}, f32[])
allocation 2: size 4, page 0, constant:
 value: <2 one @0> (size=4,offset=0): f32[]
allocation 3: size 2, thread-local:
 value: <1 add.2 @0> (size=2,offset=0): bf16[]
allocation 4: size 300, color 5, page 0, preallocated-temp:
 value: <7 moved @0> (size=300,offset=0): f32[75]{0:S(5)}
allocation 5: size 256, preallocated-temp:
 value: <4 while.2{1,0} (phi) @0> (size=64,offset=128): f32[4,4]{1,0}

Total bytes used: 640 (640B)

Used values:
allocation 99: size 1, constant:
"""


def test_every_kind_of_allocation():
    found = {a.number: a for a in parse_assignment(ASSIGNMENT)}
    assert list(found) == [0, 1, 2, 3, 4, 5]
    assert [a.parameter for a in found.values()] == [1, None, None, None, None, None]
    assert [n for n, a in found.items() if a.is_output] == [0, 1]
    assert [n for n, a in found.items() if a.is_constant] == [2]
    assert [n for n, a in found.items() if a.is_thread_local] == [3]
    assert [n for n, a in found.items() if a.is_temp] == [4, 5]
    assert [n for n, a in found.items() if a.on_host] == [4]
    assert [v.name for v in found[0].values] == ["p_w.1{}", "update{0}"]
    assert found[5].values == (HloValue("while.2{1,0}", True, 64, 128, "f32[4,4]{1,0}"),)


FRAMES = """HloModule jit_f

FileNames
1 "/home/me/train.py"
2 "FLAX"

FunctionNames
1 "step"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=287 end_line=287 column=1 end_column=2}

StackFrames
PLACES

ENTRY %main (x: f32[]) -> f32[] {
""".replace("FLAX", flax.linen.linear.__file__)


@pytest.mark.parametrize(
    "places",
    [
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}",  # as XLA prints it: one too many
        "1 {file_location_id=1}\n2 {file_location_id=2 parent_frame_id=1}",
    ],
)
def test_the_source_is_the_innermost_line_of_the_users_own(places):
    frames = parse_frames(FRAMES.replace("PLACES", places))
    assert [(function, line) for _, function, line in frames.stack(2)] == [("Dense.__call__", 287), ("step", 30)]
    assert frames.source(2) == frames.source(1) == "/home/me/train.py:30"
    assert frames.source(0) == frames.source(7) == ""


# A step of four operations: two values share bytes in place, a third lies in what they leave, and 32 bytes are a gap.
HLO = """HloModule jit_f, is_scheduled=true

ENTRY %main (x.1: f32[16]) -> f32[16] {
  %x.1 = f32[16]{0} parameter(0), metadata={op_name="x"}
  %a = f32[16]{0} exponential(%x.1), metadata={op_name="jit(f)/jvp(Net)/mlp/exp"}
  %b = f32[16]{0} sine(%a), metadata={op_name="jit(f)/jvp(Net)/mlp/sin"}
  %c = f32[8]{0} slice(%b), slice={[0:8]}, metadata={op_name="jit(f)/transpose(jvp(Net))/mlp/slice"}
  ROOT %d = f32[16]{0} multiply(%b, %c), metadata={op_name="jit(f)/transpose(jvp(Net))/mlp/mul"}
}
"""
SMALL = Dump(
    HLO,
    """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}:
 value: <0 x.1 @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 64, maybe-live-out:
 value: <4 d @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 192, preallocated-temp:
 value: <1 a @0> (size=64,offset=0): f32[16]{0}
 value: <2 b @0> (size=64,offset=0): f32[16]{0}
 value: <3 c @0> (size=32,offset=96): f32[8]{0}
""",
    """HloLiveRange (max 4):
  InstructionSequence:
    0:x.1
    1:a
    2:b
    3:c
    4:d
  BufferLiveRange:
    x.1{}:0-5
    a{}:1-2
    b{}:2-4
    c{}:3-4
    d{}:4-5
  Live ranges at 3 (peak):
    b{}: 64 bytes (cumulative: 64 bytes)
""",
    b"",
)


def test_a_small_map_by_hand():
    memory_map = read_map(SMALL)
    assert [op.name for op in memory_map.program] == ["x.1", "a", "b", "c", "d"]
    assert memory_map.phases == (("forward", 0, 2), ("backward", 3, 4))
    arena = [b for b in memory_map.buffers if b.allocation == 2]
    assert [(b.name, b.label, b.offset, b.first, b.last, b.category) for b in arena] == [
        ("a{}", "mlp/sin", 0, 1, 4, "residuals"),  # b takes a's bytes over
        ("c{}", "mlp/slice", 96, 3, 4, "working set"),
    ]
    assert memory_map.peak == 3
    assert [(h.allocation, h.offset, h.num_bytes) for h in memory_map.gaps] == [(2, 64, 32), (2, 128, 64)]
    assert attribution(memory_map) == {"gradients": 64, "inputs": 64, "residuals": 64, "working set": 32, "gaps": 96}


def test_an_argument_has_its_own_shape():
    """Whatever else is listed in its allocation, as a flag of a copy is for a TPU."""
    own = " value: <0 x.1 @0>"
    flagged = SMALL.assignment.replace(own, f" value: <7 copy-start @2> (size=1,offset=0): pred[]\n{own}")
    (argument,) = [b for b in read_map(replace(SMALL, assignment=flagged)).buffers if b.allocation == 0]
    assert (argument.name, argument.shape, argument.num_bytes) == ("x.1{}", "f32[16]", 64)


def test_ranges_are_read_by_part():
    schedule, ranges = parse_live_ranges(SMALL.live_ranges)
    assert schedule == ("x.1", "a", "b", "c", "d")
    assert ranges == {"x.1{}": (0, 5), "a{}": (1, 2), "b{}": (2, 4), "c{}": (3, 4), "d{}": (4, 5)}


BACKWARD = "jit(f)/transpose(jvp(N))/"
EVIDENCE: list[tuple[Evidence, Category]] = [
    (Evidence(role="parameters"), "parameters"),
    (Evidence(role="optimizer state"), "optimizer state"),
    (Evidence(role="frozen parameters"), "frozen parameters"),
    (Evidence(role="inputs"), "inputs"),
    (Evidence(is_output=True, op_name=f"{BACKWARD}dot_general"), "gradients"),
    (Evidence(is_output=True, op_name="jit(f)/add"), "outputs"),
    (Evidence(is_scratch=True, op_name="jit(f)/jvp(N)/dot_product_attention_fwd"), "workspace"),
    (Evidence(op_name=f"{BACKWARD}dot_general", made="backward", last_read="update", like_parameter=True), "gradients"),
    (Evidence(op_name=f"{BACKWARD}dot_general", made="backward", last_read="backward", like_parameter=True), "working set"),
    (Evidence(op_name="jit(f)/mul", made="update", last_read="update", like_parameter=True), "working set"),
    (Evidence(op_name="jit(f)/jvp(N)/convert_element_type", last_read="update", like_parameter=True), "residuals"),
    (Evidence(op_name="jit(f)/jvp()/exp", functions=("cross_entropy",), is_vocabulary_wide=True), "logits and loss"),
    (Evidence(op_name="jit(f)/jvp()/exp", functions=("mlp",), is_vocabulary_wide=True), "working set"),
    (Evidence(op_name="jit(f)/jvp()/add", functions=("xent",), last_read="backward", like_parameter=True), "gradients"),
    (Evidence(op_name="jit(f)/jvp(N)/dot_general", exchanged="gathered", is_vocabulary_wide=True), "gathered parameters"),
    (Evidence(op_name=f"{BACKWARD}dot_general", made="backward", exchanged="to add up"), "unreduced gradients"),
    (Evidence(made="backward", last_read="backward", exchanged="added up"), "gradients"),
    (Evidence(op_name="jit(f)/jvp(N)/dot_general", last_read="forward", exchanged="exchanged"), "collective buffers"),
    (Evidence(op_name="jit(f)/jvp(N)/dot_general", last_read="backward", exchanged="exchanged"), "residuals"),
    (Evidence(op_name=f"{BACKWARD}checkpoint/rematted_computation/dot_general", made="backward"), "recompute"),
    (Evidence(op_name="jit(f)/jvp(N)/dot_general", last_read="backward"), "residuals"),
    (Evidence(op_name="jit(f)/jvp(N)/dot_general", last_read="forward"), "working set"),
    (Evidence(), "other"),
]


@pytest.mark.parametrize(("evidence", "category"), EVIDENCE)
def test_rules(evidence, category):
    assert category_of(evidence) == category


def test_every_rule_decides_something():
    decided = {next(n for n, (_, holds) in enumerate(RULES) if holds(evidence)) for evidence, _ in EVIDENCE}
    assert decided == set(range(len(RULES)))


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("state.params['mlp']['kernel']", "parameters"),
        ("params[0]", "parameters"),
        ("variables['params']['w']", "parameters"),
        ("state.opt_state[0].mu['mlp']['kernel']", "optimizer state"),
        ("opt_state[0].count", "optimizer state"),
        ("optimizer_state.nu", "optimizer state"),
        ("state.step", "optimizer state"),
        ("state.params['mu']['kernel']", "parameters"),
        ("params['opt']['trace']", "parameters"),
        ("state.opt_state[0].mu['params']['w']", "optimizer state"),
        ("model.states[0][37]", "parameters"),
        ("model.layers[0].bias", "parameters"),
        ("model.layers[0].mu", "parameters"),
        ("model.opt.trace", "parameters"),
        ("optimizer.opt_state[0].mu.layers[0].bias", "optimizer state"),
        ("optimizer.states[0][37]", "optimizer state"),
        ("metrics.states[0][0]", "inputs"),
        ("batch['weights']", "inputs"),
        ("tokens", "inputs"),
        ("batch['options']", "inputs"),
    ],
)
def test_roles_of_arguments(path, role):
    assert role_of(path) == role


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(f)/jvp(Net)/mul", "forward"),
        ("jit(f)/transpose(jvp(Net))/mul", "backward"),
        ("jit(f)/jvp()/while/body/closed_call/transpose(jvp())/mul", "backward"),
        ("checkpoint/rematted_computation/mul", "backward"),
        ("jit(f)/add", "update"),
        ("state.params['w']", None),
        ("", None),
    ],
)
def test_phases_of_scopes(op_name, phase):
    assert phase_of(op_name) == phase


IN_LOOP = "jit(step)/transpose(jvp(Net.hidden))/layers/while/body/closed_call/checkpoint/rematted_computation/Block"


def test_scopes_without_transformations_and_loops():
    assert plain_scope(f"{IN_LOOP}/mlp/jit(silu)/mul") == "Net.hidden/layers/Block/mlp/silu/mul"


NAMES = [
    WrittenName("layer_input", "Block", "", "", 8),
    WrittenName("query", "Block/attention", "Block/attention/q/add", "linear.py:9", 8),
    WrittenName("context", "Block/attention", "Block/attention/fused_wrapper", "", 8),
    WrittenName("act", "Block/mlp", "Block/mlp/custom_jvp_call", "layers.py:7", 8),
]


@pytest.mark.parametrize(
    ("origin", "made_at", "label"),
    [
        (Origin(f"{IN_LOOP}/attention/q/add", num_elements=8), "linear.py:9", "query"),
        (Origin(f"{IN_LOOP}/attention/q/add", num_elements=8), "linear.py:5", "attention/q/add"),
        (Origin(f"{IN_LOOP}/attention/q/add", num_elements=9), "linear.py:9", "attention/q/add"),
        (Origin(f"{IN_LOOP}/attention/fused", num_elements=8), "", "context"),
        (Origin(f"{IN_LOOP}/mlp/silu/mul", num_elements=8), "layers.py:7", "act"),
        (Origin("jit(s)/jvp(Net)/layers/Block/mlp/wi/dot_general"), "", "mlp/wi/dot_general"),
        (Origin("jit(s)/jvp(Net)/layers/Block/Dropout_0/div"), "", "Dropout_0/div"),
        (Origin("jit(s)/jvp()/sub"), "", "sub"),
        (Origin(f"{IN_LOOP}/mlp/reduce_precision", opcode="tanh"), "", "mlp/tanh"),
        (Origin(num_layers=4, is_carried=True, num_elements=8), "", "layer_input"),
        (Origin(num_layers=4, is_carried=True, num_elements=9), "", "layer input"),
        (Origin(), "", ""),
    ],
)
def test_labels(origin, made_at, label):
    assert label_of(origin, NAMES, made_at) == label
