"""What the collectives of a program exchange: by the arguments that a value depends on, and in the memory of a step on a mesh."""

from dataclasses import replace

import pytest

from jaxremat.chips.target import load_target
from jaxremat.mesh.axes import BATCH_AXES, MeshShape
from jaxremat.policy.grammar import parse
from jaxremat.report.explain import holders_table, state_table
from jaxremat.trial.explain import explain
from jaxremat.xla.buffers import attribution
from jaxremat.xla.dependence import dependences
from jaxremat.xla.exchanges import exchanged_values, exchanges
from jaxremat.xla.hlo import parse as parse_hlo
from tests.mesh_runs import MODEL, make_run

#: Two devices. A loop of 3 layers gathers a slice of the stack `w` and multiplies with it; the gradient of `v` is added up.
PROGRAM = """
HloModule step

%fused (a: bf16[4,8], b: bf16[4,8]) -> (bf16[4,8], bf16[4,8]) {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[4,8]{1,0} parameter(1)
  %neg = bf16[4,8]{1,0} negate(%a)
  ROOT %both = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) tuple(%neg, %b)
}

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%body (carry: (s32[], bf16[4,8], bf16[3,4,8])) -> (s32[], bf16[4,8], bf16[3,4,8]) {
  %carry = (s32[], bf16[4,8]{1,0}, bf16[3,4,8]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %h = bf16[4,8]{1,0} get-tuple-element(%carry), index=1
  %stack = bf16[3,4,8]{2,1,0} get-tuple-element(%carry), index=2
  %zero = s32[] constant(0)
  %layer = bf16[1,4,8]{2,1,0} dynamic-slice(%stack, %n, %zero, %zero), dynamic_slice_sizes={1,4,8}
  %kernel = bf16[4,8]{1,0} bitcast(%layer)
  %start = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%kernel), replica_groups={{0,1}}, dimensions={0}
  %whole = bf16[8,8]{1,0} all-gather-done(%start), metadata={op_name="jit(f)/jvp(N)/layer/dot_general"}
  %next = bf16[4,8]{1,0} dot(%h, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = s32[] constant(1)
  %more = s32[] add(%n, %one)
  ROOT %after = (s32[], bf16[4,8]{1,0}, bf16[3,4,8]{2,1,0}) tuple(%more, %next, %stack)
}

%condition (carry.1: (s32[], bf16[4,8], bf16[3,4,8])) -> pred[] {
  %carry.1 = (s32[], bf16[4,8]{1,0}, bf16[3,4,8]{2,1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%carry.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%n.1, %three), direction=LT
}

ENTRY %main (w: bf16[3,4,8], v: bf16[4,8], batch: bf16[4,8]) -> (bf16[4,8], bf16[4,8]) {
  %w = bf16[3,4,8]{2,1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %v = bf16[4,8]{1,0} parameter(1), metadata={op_name="params[\\'v\\']"}
  %batch = bf16[4,8]{1,0} parameter(2), metadata={op_name="batch"}
  %pair = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) fusion(%v, %batch), kind=kLoop, calls=%fused
  %of_v = bf16[4,8]{1,0} get-tuple-element(%pair), index=0
  %of_batch = bf16[4,8]{1,0} get-tuple-element(%pair), index=1
  %first = s32[] constant(0)
  %init = (s32[], bf16[4,8]{1,0}, bf16[3,4,8]{2,1,0}) tuple(%first, %of_batch, %w)
  %loop = (s32[], bf16[4,8]{1,0}, bf16[3,4,8]{2,1,0}) while(%init), condition=%condition, body=%body, THREE_TIMES
  %h.1 = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
  %grad = bf16[4,8]{1,0} multiply(%h.1, %of_v), metadata={op_name="jit(f)/transpose(jvp(N))/mul"}
  %reduced = bf16[4,8]{1,0} all-reduce(%grad), replica_groups={{0,1}}, to_apply=%add
  %everyone = bf16[8,8]{1,0} all-gather(%h.1), replica_groups={{0,1}}, dimensions={0}
  ROOT %results = (bf16[4,8]{1,0}, bf16[4,8]{1,0}) tuple(%reduced, %h.1)
}
""".replace("THREE_TIMES", 'backend_config={"known_trip_count":{"n":"3"}}')
TWO = MeshShape(fsdp=2)


def test_what_values_depend_on():
    """Through a loop's carry, and through a fusion with two results, element by element."""
    known = dependences(parse_hlo(PROGRAM))
    assert known.of("whole") == known.of("stack") == {0}
    assert known.of("of_v") == {1}
    assert known.of("of_batch") == {2}
    assert known.of("h.1") == known.of("next") == {0, 2}
    assert known.of("loop", 2) == {0}
    assert known.of("n") == known.of("loop", 0) == frozenset()
    assert known.of("reduced") == {0, 1, 2}


def test_what_is_exchanged():
    found = {exchange.name: exchange for exchange in exchanges(parse_hlo(PROGRAM), TWO)}
    gather, total, everyone = found["start"], found["reduced"], found["everyone"]
    assert (gather.what, gather.arguments, gather.num_bytes, gather.times) == ("parameter", ("params['w']",), 8 * 8 * 2, 3)
    assert (total.what, total.read, total.num_bytes) == ("gradient", ("grad", ()), 4 * 8 * 2)
    assert (everyone.what, everyone.num_bytes, everyone.groups) == ("value", 8 * 8 * 2, ((0, 1),))


def test_a_sum_over_devices_that_share_their_sequences_is_no_gradient():
    found = {exchange.name: exchange.what for exchange in exchanges(parse_hlo(PROGRAM), MeshShape(tensor=2))}
    assert found == {"start": "parameter", "reduced": "value", "everyone": "value"}


def test_what_values_are_for_collectives():
    found = {key: value.use for key, value in exchanged_values(parse_hlo(PROGRAM), TWO).items()}
    assert found == {
        ("start", None): "gathered",
        ("whole", None): "gathered",
        ("reduced", None): "added up",
        ("grad", None): "to add up",
        ("everyone", None): "exchanged",
    }


def test_places_of_devices():
    """Devices 0 and 1 share their sequences, and 2 and 3 do."""
    mesh = MeshShape(data=2, fsdp=2, tensor=2)
    assert mesh.places([0, 1], BATCH_AXES) == {(0, 0, 0)}
    assert mesh.places([1, 2], BATCH_AXES) == {(0, 0, 0), (0, 1, 0)}
    assert mesh.places([0, 4], ["data"]) == {(0,), (1,)}
    assert len(mesh.places(range(8), BATCH_AXES)) == 4


@pytest.mark.full
@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.any_jax)])
def test_who_has_the_peak_of_a_step_on_a_mesh(scan_layers):
    """Kernels are gathered whole, their gradients are whole before they are added up, and the bytes are XLA's own."""
    layers = 3
    model = replace(MODEL, num_layers=layers, vocab_size=8192, scan_layers=scan_layers)
    run = make_run(load_target("h100-80gb", MeshShape(fsdp=8)), model)
    trials, policy = replace(run, with_dump=True), parse("save:mlpwi_0")
    row, memory_map = explain(trials, policy, 2, 5), trials.compile(policy, 2).memory_map
    parts = attribution(memory_map)
    assert sum(parts.values()) == row.total_bytes == trials.compile(policy, 2).memory.total_bytes
    assert row.attribution == parts
    assert parts["gathered parameters"] > 0
    head, gate = 256 * 8192 * 2, 256 * 1024 * 2  # whole, in bf16
    gathered = {b.label: b.num_bytes for b in memory_map.buffers if b.category == "gathered parameters"}
    assert gathered["gathered state.params['output']"] == head
    wi_0 = "['layers']['mlp']['wi_0']['kernel']" if scan_layers else "['layers']['layer_0']['mlp']['wi_0']['kernel']"
    assert gathered[f"gathered state.params{wi_0}"] == gate
    assert {head, gate} <= {b.num_bytes for b in memory_map.buffers if b.category == "unreduced gradients"}
    saved = [part for part in row.held or () if part.label == "mlpwi_0"]
    assert [(part.num_layers, part.num_bytes) for part in saved] == [(layers, layers * 2 * 256 * 1024 * 2)]
    by_role = {part.category: part for part in row.state}
    assert by_role["parameters"].num_bytes == run.workload_at().num_params * 4
    assert by_role["optimizer state"].divided_bytes == 2 * by_role["parameters"].divided_bytes
    assert by_role["parameters"].divided_bytes * 8 + by_role["parameters"].whole_bytes == by_role["parameters"].num_bytes
    assert by_role["parameters"].whole_bytes > 0
    assert [len(table.columns) for table in (holders_table(row), state_table(row))] == [3, 4]
