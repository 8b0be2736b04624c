"""The planner's problem for a layer is right: beside counts by hand, and beside what JAX itself keeps and computes again."""

import functools
import math
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.extend import core

from jaxremat.answer.layer_problem import Keep, layer_problem, trace_layer
from jaxremat.chips.nvidia.gpu import load_gpu
from jaxremat.chips.nvidia.speed import speed_of
from jaxremat.chips.tables import Attention, Product
from jaxremat.knapsack.problem import LEAST_S, Op, Problem, Value
from jaxremat.knapsack.solve import solve
from jaxremat.model.transformer import Block
from jaxremat.policy.autoname import autoname
from jaxremat.policy.jax_private import FUSED_ATTENTION
from jaxremat.policy.spec import Names
from jaxremat.xla.clock import predict_kernel_time
from jaxremat.xla.flops import count_step_flops
from jaxremat.xla.kernels import Kernel, matmul_class
from tests.roofline import SLOW as SPEED
from tests.small_models import GPT
from tests.small_models import LLAMA_NO_DROPOUT as LLAMA


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp(w0, w1, x):
    return jnp.sin(x @ w0) @ w1


MLP_ARGS = (struct(8, 16), struct(16, 8), struct(4, 8))


def test_a_small_mlp_by_hand():
    """Shapes: x [4, 8], hidden [4, 16], float32; 1e9 bytes and 5e11 FLOPs a second are reached."""
    problem, _, keep = layer_problem(trace_layer(autoname(mlp), MLP_ARGS), SPEED, in_scan=False)
    given, free = {"saveable": False, "offloadable": False}, 4 * LEAST_S  # a nanosecond an operation
    assert problem.values == (
        Value("args[0]", 512, **given, needed=True),
        Value("args[1]", 512, **given, needed=True),
        Value("args[2]", 128, **given, needed=True),
        Value("dot_general", 256, save_s=free),
        Value("sin", 256, needed=True, save_s=free, is_read_first=True),
        Value("cos", 256, **given, needed=True, save_s=2 * 256 / 1e9, is_read_first=True),  # of a derivative: has no name
        Value("dot_general.1", 128, save_s=free),
    )
    assert [replace(op, recompute_s=0.0) for op in problem.ops] == [
        Op("dot_general", (2, 0), (3,), 0.0, 2 * 4 * 8 * 16),
        Op("sin", (3,), (4,), 0.0),
        Op("cos", (3,), (5,), 0.0),
        Op("dot_general", (4, 1), (6,), 0.0, 2 * 4 * 16 * 8),
    ]
    up, sin, down = (1e-6 + num_bytes / 1e9 for num_bytes in (128 + 512 + 256, 2 * 256, 256 + 512 + 128))
    cos = LEAST_S  # made again inside the kernel that reads it
    assert [op.recompute_s for op in problem.ops] == pytest.approx([up, sin, cos, down])
    assert problem.inputs == (0, 1, 2)
    assert (problem.save_s_per_byte, problem.offload_s_per_byte) == (0, pytest.approx(2e-8))  # what is there stays there
    scanned, *_ = layer_problem(trace_layer(autoname(mlp), MLP_ARGS), SPEED)
    assert scanned.save_s_per_byte == pytest.approx(3e-9)
    launch, copied = 1e-6, 1e-6 + 2 * 256 / 1e9  # the second matmul reads sin's result: it is copied out of the stack
    assert [value.save_s for value in scanned.values[3:]] == pytest.approx([launch, launch + copied, launch, launch])
    assert keep == {name: Keep(name=name) for name in ("dot_general", "sin", "dot_general.1")}


def test_what_the_gradient_reads_first():
    """`last` meets the cotangent. `first` meets what was multiplied by a derivative, and a matmul is recomputed from `again`."""

    def layer(w, x):
        again = checkpoint_name(jnp.sin(x @ w[0]), "again")
        first = checkpoint_name(jnp.sin(2.0 * (again @ w[1])), "first")
        last = checkpoint_name(jnp.sin(first @ w[2] + 1.0), "last")
        return (last @ w[3]).astype("bfloat16"), jnp.int32(3)

    problem, _, named = layer_problem(trace_layer(layer, ((struct(8, 8),) * 4, struct(4, 8))), SPEED, in_scan=False)
    assert {value.name for value in problem.values if value.name in named and value.is_read_first} == {"last"}
    assert {value.name for value in problem.values if value.name in named and value.needed} == {"again", "first", "last"}


def cost_of(problem: Problem, name: str) -> float:
    return next(op.recompute_s for op in problem.ops if op.name == name)


def test_costs_follow_fusion_and_the_roofline():
    """A chain is charged where it ends; views and what only fused work reads take the least; big matmuls are FLOPs."""

    def function(w, x):
        chain = (jnp.exp(jnp.abs(x) + 1) * 2).astype(w.dtype)
        return jnp.sort(chain.reshape(x.shape[0], -1) @ w, axis=-1).sum()

    w, x = struct(512, 512, dtype="bfloat16"), struct(512, 2, 256)
    problem, *_ = layer_problem(trace_layer(autoname(function), (w, x)), SPEED)
    costs = {op.name: op.recompute_s for op in reversed(problem.ops)}  # the first of each name
    assert costs["abs"] == costs["add"] == costs["reshape"] == LEAST_S
    assert costs["convert_element_type"] == pytest.approx(1e-6 + 2 * 2 * 512 * 512 / 1e9)  # through the view
    assert costs["dot_general"] == pytest.approx(1e-6 + max(2 * 512**3 / 1e12, 3 * 2 * 512 * 512 / 1e9))
    assert costs["sort"] > 2 * 2 * 512 * 512 / 1e9
    wide, *_ = layer_problem(trace_layer(autoname(jnp.matmul), (struct(4096, 4096), struct(4096, 4096))), SPEED)
    assert cost_of(wide, "dot_general") == pytest.approx(1e-6 + 2 * 4096**3 / 5e11)
    rows, columns = (lambda x: jnp.exp(x.sum(-1))), (lambda x: jnp.exp(x.sum(0)))
    for reduction, fused, free in ((rows, True, True), (rows, False, False), (columns, True, False)):
        problem, unfused, _ = layer_problem(trace_layer(autoname(reduction), (struct(64, 64),)), SPEED)
        total = problem if fused else unfused
        assert cost_of(total, "reduce_sum") == (LEAST_S if free else pytest.approx(1e-6 + (64 * 64 * 4 + 64 * 4) / 1e9))


@pytest.mark.parametrize("num_bytes", [512, 1024, 2000])
def test_of_equally_cheap_values_the_last_is_saved(num_bytes):
    """Whatever the budget: before or after the views, the bytes and the matmul saved are the same."""

    def scores(w, x):
        query, key = (jnp.swapaxes((x @ w * scale).reshape(4, 2, 8), 0, 1) for scale in (1, 2))
        return jnp.einsum("hqd,hkd->hqk", jnp.sin(query), jnp.sin(key))

    problem, *_ = layer_problem(trace_layer(autoname(scores), MLP_ARGS[::2]), SPEED)
    saved = solve(problem, num_bytes).decision.save
    assert {problem.values[v].name for v in saved} == {"transpose", "transpose.1"}


of_h100 = speed_of(load_gpu("h100-80gb")[1])
assert of_h100
H100 = of_h100


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("m", "n", "k"), [(16384, 2048, 8192), (512, 512, 512), (8192, 128, 4096), (4096, 50257, 768)])
def test_a_matmul_costs_what_the_clock_predicts(m, n, k, dtype):
    """Also where rows aren't aligned, and where a matmul is small or thin, with the tables and without."""
    args = (struct(m, k, dtype=dtype), struct(k, n, dtype=dtype))
    flops, num_elements = 2 * m * n * k, m * k + k * n + m * n
    short, num_bytes = {"bfloat16": ("bf16", 2), "float32": ("f32", 4)}[dtype]
    product = Product(1, m, n, k, is_aligned=n * num_bytes % 16 == 0)
    for speed in (H100, replace(H100, tables=None)):
        problem, *_ = layer_problem(trace_layer(autoname(jnp.matmul), args), speed)
        kind = matmul_class(m * n, flops, num_elements * num_bytes)
        kernel = Kernel(
            "dot", "", kind, flops, short, (m * k + k * n) * num_bytes, m * n * num_bytes, 0, 0, 1, None, product
        )
        assert cost_of(problem, "dot_general") == pytest.approx(predict_kernel_time(kernel, speed).kernel_s)


@pytest.mark.parametrize(("length", "head_size", "window"), [(2048, 128, 0), (1024, 64, 0), (8192, 128, 1024)])
def test_fused_attention_costs_what_the_clock_predicts(length, head_size, window):
    def attend(q, k, v):
        windowed: dict[str, Any] = {"local_window_size": (window - 1, 0)} if window else {}
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn", **windowed)

    qkv = [struct(2, length, heads, head_size, dtype="bfloat16") for heads in (16, 4, 4)]
    problem, *_ = layer_problem(trace_layer(autoname(attend), tuple(qkv)), H100)
    (op,) = (op for op in problem.ops if op.together)
    shapes = Attention("forward", head_size, min(length, 2 * window) if window else length)
    moved = sum(problem.values[v].num_bytes for v in (*op.inputs, *op.outputs))
    kernel = Kernel("fmha", "", "attention", op.flops, "bf16", moved, 0, 0, 0, 1, attention=shapes)
    assert op.recompute_s == pytest.approx(predict_kernel_time(kernel, H100).kernel_s)
    assert op.recompute_s > 1.2 * op.flops / H100.flops_per_s("bf16"), "slower than a large matmul"


# Whole blocks.


@functools.cache
def block(kind: str) -> tuple[Any, tuple[Any, ...]]:
    config = {"gpt": GPT, "llama": LLAMA, "cudnn": replace(GPT, dtype="bfloat16")}[kind]
    layer = autoname(Block)(config, "cudnn" if kind == "cudnn" else "xla", deterministic=False)
    dtype = "bfloat16" if kind == "cudnn" else "float32"
    x = struct(2, 8, config.embed_dim, dtype=dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(Block(config).init, key, struct(2, 8, config.embed_dim))
    variables = jax.tree.map(lambda leaf: struct(*leaf.shape, dtype=dtype), variables)
    return lambda variables, x, key: layer.apply(variables, x, rngs={"dropout": key}), (variables, x, key)


@functools.cache
def problem_of(kind: str) -> tuple[Problem, dict[str, Keep]]:
    function, args = block(kind)
    problem, _, ways = layer_problem(trace_layer(function, args), SPEED)
    return problem, ways


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_every_block_makes_a_sound_problem(kind):
    function, args = block(kind)
    problem, keep = problem_of(kind)
    names = [value.name for value in problem.values]
    assert len(set(names)) == len(names)
    assert {value.name for value in problem.values if value.saveable} == set(keep)
    known = set(problem.inputs)
    for op in problem.ops:  # in an order in which they can run, each value made once
        assert known.issuperset(op.inputs)
        assert op.outputs
        assert not known.intersection(op.outputs)
        known.update(op.outputs)
    assert known == set(range(len(problem.values)))
    assert all(op.recompute_s > 0 for op in problem.ops if op.flops)
    assert sum(op.flops for op in problem.ops) == count_step_flops(jax.make_jaxpr(function)(*args)).total
    assert {"mlpwi_0", "query_proj", "context", "mlp/wo/dot_general" if kind == "gpt" else "mlpwo"} <= set(keep)
    masks = [value for value in problem.values if value.name.startswith("Dropout_0/lt")]
    assert len(masks) == (2 if kind == "gpt" else 0)
    assert all(mask.needed and not mask.saveable for mask in masks)
    assert "args[0]/params/mlp/wi_0/kernel" in names


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_needed_values_are_jax_s_own_residuals(kind, capsys):
    function, (variables, x, _) = block(kind)
    problem, _ = problem_of(kind)
    concrete = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), (variables, x))
    print_saved_residuals(lambda v, x: function(v, x, jax.random.key(0)), *concrete)
    sizes = []
    for line in capsys.readouterr().out.splitlines():
        (dtype, dims), *_ = re.findall(r"^(\w+)\[([\d,]*)\]", line)
        if "from the argument" not in line and "literal" not in line and "decoder_layer_input" not in line:  # named argument
            sizes.append({"f32": 4, "i32": 4, "bool": 1}[dtype] * math.prod(int(n) for n in dims.split(",") if n))
    made = set(range(len(problem.values))) - set(problem.inputs)
    assert sorted(sizes) == sorted(problem.values[n].num_bytes for n in made if problem.values[n].needed)


def test_fused_attention_is_kept_by_its_primitive():
    function, args = block("cudnn")
    problem, keep = problem_of("cudnn")
    (op,) = [op for op in problem.ops if op.together]
    outputs = [problem.values[number] for number in op.outputs]
    assert [value.name for value in outputs] == ["attention/fused", "attention/softmax_stats"]
    assert all(value.saveable and value.needed and not value.offloadable for value in outputs)
    assert {keep[value.name] for value in outputs} == {Keep(primitive=FUSED_ATTENTION)}
    assert op.flops == 2 * 2 * (2 * 2 * 8 * 8) * 8 // 2
    assert op.recompute_s > 0
    assert sum(o.flops for o in problem.ops) == count_step_flops(jax.make_jaxpr(function)(*args)).total


def test_what_fused_attention_reads_is_copied_out_of_the_stack_of_residuals():
    problem, _ = problem_of("cudnn")
    prices = {value.name: value for value in problem.values}
    for name in ("query_proj", "key_proj", "value_proj", "attention/fused", "attention/softmax_stats"):
        assert prices[name].save_s == pytest.approx(2e-6 + 2 * prices[name].num_bytes / 1e9), name
    for name in ("mlpwi_0", "out_proj"):
        assert prices[name].save_s == 1e-6, name


# The graph says what JAX will compute again.


def recomputed(problem: Problem, kept: set[str]) -> Counter[str]:
    """The operations that run again when the values named `kept` are there, by the graph alone, by kind."""
    maker = {number: op for op in problem.ops for number in op.outputs}
    there = {n for n, value in enumerate(problem.values) if value.name in kept} | set(problem.inputs)
    waiting = [n for n, value in enumerate(problem.values) if value.needed]
    again: dict[int, Op] = {}
    while waiting:
        number = waiting.pop()
        if number not in there and id(maker[number]) not in again:
            again[id(maker[number])] = maker[number]
            waiting += maker[number].inputs
    return Counter(op.name.rpartition("/")[2] for op in again.values())


def equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def in_backward(kind: str, policy: Any) -> Counter[str]:
    """The operations in the backward pass of a checkpointed block, by kind."""
    function, (*moving, key) = block(kind)

    def loss(moving: Any) -> Any:
        y = jax.checkpoint(function, policy=policy)(*moving, key)
        return (y.astype("float32") ** 2).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(moving).jaxpr
    (backward,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("checkpoint", "remat2")]
    inner = [eqn for body in core.jaxprs_in_params(backward.params) for eqn in equations(body)]
    return Counter("fused" if eqn.primitive.name == FUSED_ATTENTION else eqn.primitive.name for eqn in inner)


@functools.cache
def without_recomputing(kind: str) -> Counter[str]:
    return in_backward(kind, jax.checkpoint_policies.everything_saveable)


@pytest.mark.parametrize(
    ("kind", "share", "attention"),
    [
        *[(kind, share, False) for kind, share in (("gpt", 0.02), ("gpt", 0.3), ("llama", 0.05), ("llama", 0.6))],
        *[("cudnn", 0.1, False), ("cudnn", 0.02, True), ("cudnn", 1, True)],
    ],
)
def test_the_graph_predicts_what_jax_computes_again(kind, share, attention):
    problem, keep = problem_of(kind)
    draw = random.Random(str((kind, share)))
    kept = {name for name, way in keep.items() if way.name and draw.random() < share} or {"mlpwi_0"}
    got = in_backward(kind, Names(tuple(kept), attention=attention).to_jax())
    base = without_recomputing(kind)
    want = recomputed(problem, kept | {name for name, way in keep.items() if way.primitive and attention})
    kinds = ("dot_general", "exp", "tanh", "rsqrt", "logistic", "fused", "reduce_max")
    assert {k: got[k] - base[k] for k in kinds} == {k: want[k] for k in kinds}


def test_a_value_read_from_before_its_name_is_another_value():
    """JAX keeps the named one only: exp's own derivative reads the other, so that saving it doesn't save the exp."""

    def by_hand(x):
        return checkpoint_name(jnp.exp(checkpoint_name(jnp.sin(x), "sin")), "e") * 2

    problem, _, keep = layer_problem(trace_layer(by_hand, (struct(4),)), SPEED)
    assert {value.name: value.saveable for value in problem.values if value.name in ("exp", "e")} == {
        "exp": False,
        "e": True,
    }
    assert recomputed(problem, {"e"})["exp"] == 1
    named, *_ = layer_problem(trace_layer(autoname(by_hand), (struct(4),)), SPEED)
    assert recomputed(named, {"e"})["exp"] == 0
    assert keep["e"] == Keep(name="e")


def test_a_name_on_several_values_saves_none_of_them_alone():
    def twice(x):
        return checkpoint_name(jnp.sin(x), "both") * checkpoint_name(jnp.cos(x), "both")

    problem, _, keep = layer_problem(trace_layer(twice, (struct(4),)), SPEED)
    assert keep == {}
    assert "both" not in {value.name for value in problem.values}
    _, _, keep = layer_problem(trace_layer(autoname(twice), (struct(4),)), SPEED)
    assert {"sin", "cos"} <= set(keep)


def test_dead_work_constants_and_integers():
    table = jnp.arange(4.0)

    def function(x, n):
        jnp.exp(x)
        return jnp.sin(x * table)[n]

    problem, _, keep = layer_problem(trace_layer(autoname(function), (struct(4), struct(3, dtype="int32"))), SPEED)
    assert "exp" not in {op.name for op in problem.ops}
    assert "constant" in {problem.values[n].name for n in problem.inputs}
    assert not [value for value in problem.values if value.saveable and value.name not in keep]


def test_float32_of_the_highest_precision_is_priced_without_tf32():
    """As in a compiled program, whose kernels are of the type `f32 highest`."""
    speed = replace(SPEED, plain_f32_flops=SPEED.f32_flops / 8, bandwidth_bytes_per_s=1e15)
    args = struct(512, 512), struct(512, 512)

    def recompute_s(precision: str | None) -> float:
        problem, *_ = layer_problem(trace_layer(autoname(lambda a, b: jnp.dot(a, b, precision=precision)), args), speed)
        return sum(op.recompute_s for op in problem.ops)

    assert recompute_s("highest") == pytest.approx(8 * recompute_s(None), rel=0.05)
