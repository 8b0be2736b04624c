"""HLO text is parsed as XLA writes it: computations, shapes, operands and loops, by hand and of a compiled program."""

import itertools
import time

import jax
import jax.numpy as jnp
import pytest

from jaxremat.xla import hlo
from jaxremat.xla.flops import executed
from jaxremat.xla.origin import find_origin

TEXT = r"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

FileNames
1 "/tmp/{odd}.py"

%fused_add (param_0.1: f32[4,8]) -> f32[4,8] {
  %param_0.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="p[\'w\']"}
  ROOT %add.1 = f32[4,8]{1,0} add(%param_0.1, %param_0.1)
}

%body.1 (arg.1: (s32[], (f32[4,8], bf16[2,3,4]))) -> (s32[], (f32[4,8], bf16[2,3,4])) {
  ROOT %arg.1 = (s32[], (f32[4,8]{1,0}, bf16[2,3,4]{2,1,0:T(8,128)S(5)})) parameter(0)
}

%condition.1 (arg.2: (s32[], (f32[4,8], bf16[2,3,4]))) -> pred[] {
  %arg.2 = (s32[], (f32[4,8]{1,0}, bf16[2,3,4]{2,1,0:T(8,128)S(5)})) parameter(0)
  ROOT %constant.1 = pred[] constant(true)
}, execution_thread="main"

%branch_a (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%branch_b (b: f32[]) -> f32[] {
  ROOT %b = f32[] parameter(0)
}

ENTRY %main.9 (x.1: f32[4,8], /*index=1*/p.1: pred[]) -> f32[4,8] {
  %x.1 = f32[4,8]{1,0} parameter(0), sharding={mesh[], [{}, {}]}, metadata={op_name="x"}
  %p.1 = pred[] parameter(11)
  %constant.2 = f32[2,2]{1,0} constant({ { 1, (2) }, { 3, 4 } })
  %constant.3 = s4[5]{0} constant({...})
  %tuple.1 = (s32[], (f32[4,8]{1,0}, /*index=2*/bf16[2,3,4]{2,1,0:T(8,128)S(5)})) tuple(%constant.3, /*index=1*/%x.1)
  %while.1 = (s32[], (f32[4,8]{1,0}, bf16[2,3,4]{2,1,0})) while(%tuple.1), condition=%condition.1, body=%body.1, metadata={op_name="jit(step)/while \"}, calls=%nothing, body={%x}\""}, backend_config={"known_trip_count":{"n":"13"},"known_init_step":{"init":"0","step":"1"}}
  %while.2 = (s32[], (f32[4,8]{1,0}, bf16[2,3,4]{2,1,0})) while(%while.1), condition=%condition.1, body=%body.1
  %conditional.1 = f32[] conditional(%p.1, %x.1, %x.1), branch_computations={%branch_a, %branch_b}
  %custom-call.1 = (f32[4,8]{1,0}, s8[64]{0}) custom-call(f32[4,8]{1,0:T(8,128)} %x.1, (f32[], f32[]) %tuple.1), custom_call_target="__cublas$gemm", backend_config={"a":"}) calls=%fused_add"}
  %token.1 = token[] after-all()
  ROOT %fusion.1 = f32[4,8]{1,0} fusion(%x.1), kind=kLoop, calls=%fused_add, control-predecessors={%while.1, %while.2}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    return hlo.parse(TEXT)


def entry(module: hlo.Module, name: str) -> hlo.Instruction:
    return module.entry_computation.by_name[name]


def test_every_computation_and_the_entry_is_found(module):
    assert list(module.computations) == ["fused_add", "body.1", "condition.1", "branch_a", "branch_b", "main.9"]
    assert module.entry == "main.9"
    assert [len(c.instructions) for c in module.computations.values()] == [2, 1, 2, 1, 1, 11]


def test_nested_tuples_are_flattened_in_order_with_layouts_and_memory_spaces(module):
    assert entry(module, "tuple.1").shapes == (
        hlo.Shape("s32", ()),
        hlo.Shape("f32", (4, 8)),
        hlo.Shape("bf16", (2, 3, 4), memory_space=5),
    )
    assert [s.on_host for s in entry(module, "tuple.1").shapes] == [False, False, True]


def test_bodies_of_loops_and_one_branch_run_so_often(module):
    ran = {(instruction.name, times) for _, instruction, times in executed(module)}
    assert {("a", 1), ("arg.1", 13), ("arg.1", 1)} <= ran
    assert "b" not in {name for name, _ in ran}, "of branches with equal FLOPs the first runs"


def test_operands_skip_comments_types_and_literals(module):
    assert entry(module, "tuple.1").operands == ("constant.3", "x.1")
    assert entry(module, "custom-call.1").operands == ("x.1", "tuple.1")
    assert entry(module, "constant.2").operands == ()
    assert entry(module, "token.1").operands == ()


def test_called_computations_ignore_quoted_text_and_control_predecessors(module):
    assert entry(module, "while.1").called == ("condition.1", "body.1")
    assert entry(module, "conditional.1").called == ("branch_a", "branch_b")
    assert entry(module, "custom-call.1").called == ()
    assert entry(module, "fusion.1").called == ("fused_add",)


READER = """HloModule step
ENTRY %main.1 (x.1: bf16[4,8]) -> f32[4,4] {
  %x.1 = bf16[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %call.1 = (f32[4,4]{1,0}, s8[64]{0}) custom-call(%x.1, %x.1), custom_call_target="__cublas$gemm"
  %element.1 = f32[4,4]{1,0} get-tuple-element(%call.1), index=0
  ROOT %mul.1 = f32[4,4]{1,0} multiply(%element.1, %element.1), metadata={op_name="jit(f)/jvp()/layer_0/mul" stack_frame_id=7}
}
"""


def test_a_call_without_a_scope_is_where_its_first_reader_is():
    """XLA drops the scope of a matmul into whose call it folds a scale."""
    module = hlo.parse(READER)
    main = module.entry_computation
    origin = find_origin(module, {}, main, main.by_name["call.1"], (0,))
    assert (origin.op_name, origin.frame) == ("jit(f)/jvp()/layer_0/custom-call", 7)
    alone = hlo.parse(READER.replace(', metadata={op_name="jit(f)/jvp()/layer_0/mul" stack_frame_id=7}', ""))
    call = alone.entry_computation.by_name["call.1"]
    assert find_origin(alone, {}, alone.entry_computation, call, (0,)).op_name == ""


def test_trip_count_names_target_root_and_parameters(module):
    assert entry(module, "while.1").trip_count == 13
    assert entry(module, "while.2").trip_count is None
    assert entry(module, "while.1").op_name.startswith("jit(step)/while ")
    assert entry(module, "custom-call.1").custom_call_target == "__cublas$gemm"
    assert module.entry_computation.root.name == "fusion.1"
    assert entry(module, "p.1").parameter_index == 11
    assert module.computations["fused_add"].by_name["param_0.1"].op_name == "p['w']"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[4,8]{1,0}", 128),
        ("bf16[3]{0:S(5)}", 6),
        ("pred[7]", 7),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[9]{0}", 9),
        ("c64[2,2]{1,0}", 32),
        ("f32[]", 4),
        ("u8[0]{0}", 0),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(text, num_bytes):
    (shape,) = hlo.parse_shapes(text)
    assert shape.num_bytes == num_bytes


def test_text_without_an_entry_is_rejected():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule empty\n")


@pytest.mark.full
def test_a_real_module_is_read_whole():
    """Every line that defines a value is one instruction, and every name that is used is defined."""

    def step(w, x):
        loss = lambda w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()  # noqa: E731
        return jax.grad(loss)(w)

    text = jax.jit(step).lower(jnp.ones((3, 16, 16)), jnp.ones((4, 16))).compile().as_text()
    assert text
    module = hlo.parse(text)
    instructions = [i for c in module.computations.values() for i in c.instructions]
    assert len(instructions) == sum(line.startswith("  ") and " = " in line for line in text.splitlines())
    for computation in module.computations.values():
        assert computation.root.is_root
        for instruction in computation.instructions:
            assert set(instruction.operands) <= set(computation.by_name)
            assert set(instruction.called) <= set(module.computations)
    assert sorted(i.trip_count or 0 for i in instructions if i.opcode == "while") == [3, 3]


def test_two_megabytes_take_seconds():
    header, line = TEXT.split("ENTRY")[0], next(row for row in TEXT.splitlines() if "%while.1 =" in row)
    rows = list(itertools.islice(itertools.repeat(line), 2_000_000 // len(line)))
    text = "\n".join([header, "ENTRY %main (x: f32[]) -> f32[] {", *rows, "}"])
    start = time.process_time()
    module = hlo.parse(text)
    assert time.process_time() - start < 2
    assert len(module.entry_computation.instructions) == len(rows)


def test_operands_that_are_elements_of_a_tuple():
    """As newer versions of XLA print them."""
    line = "ENTRY %main (x: f32[4]) -> f32[4] {\n  %fusion.1 = f32[4]{0} fusion(%arg_tuple.1#3, %b, %c#0), kind=kLoop\n}\n"
    (fusion,) = hlo.parse(line).entry_computation.instructions
    assert fusion.operands == ("arg_tuple.1", "b", "c")
    assert fusion.operand_elements == (3, None, 0)
