"""What a policy recomputes, to the FLOP, counted in traced programs and in those that XLA compiled for a GPU.

A table says by hand, per policy, how many layers run which matmuls once more, and how often attention runs. That plus the
closed form without recompute (`tests/decoder_flops.py`) must be what JAX requests. For a policy of each kind it must be what
the compiled HLO executes too, loops multiplied out. Two facts explain the table. The last matmul of a checkpoint (`mlpwo`)
isn't recomputed where only its result leaves the checkpoint: no gradient needs that. Inside a loop over the layers of a group
it is, for the next layer starts from it. And fused attention runs again unless the policy saves it (`+attention`), even where
its output is saved by name: the backward kernel needs the softmax statistics, which have no name.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.chips.target import Target
from jaxremat.config import ModelConfig
from jaxremat.knapsack.evaluate import evaluate
from jaxremat.knapsack.problem import Decision
from jaxremat.model.decoder_workload import decoder_factory, decoder_workload
from jaxremat.model.flops import forward_matmul_flops, model_flops
from jaxremat.model.transformer import Block
from jaxremat.planner.shared_budget import one_of_each
from jaxremat.policy.apply import remat
from jaxremat.policy.grammar import parse
from jaxremat.trial.trials import Trials
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import ExecutedFlops, count_step_flops, executed_flops
from jaxremat.xla.recomputed import saved_and_recomputed
from tests.decoder_flops import flops_without_recompute, forward_attention_flops
from tests.helpers import BATCH, GPT, LLAMA, SEQ, TRAIN, UNROLLED, compiled

QKV = ("query_proj", "key_proj", "value_proj")
#: Matmuls that a recomputed layer runs again; ALL where its output is needed too.
GELU = (*QKV, "out_proj", "mlpwi_0")
SWIGLU = (*GELU, "mlpwi_1")
ALL_GELU, ALL_SWIGLU = (*GELU, "mlpwo"), (*SWIGLU, "mlpwo")


ONE_LAYER = replace(GPT, num_layers=1)


def without(names: tuple[str, ...], *saved: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in saved)


# policy: [(layers, their matmuls run once more), ...], attention runs beyond one per layer.
SCANNED = {
    "none": ([], 0),
    "everything": ([], 0),
    "nothing": ([(8, GELU)], 8),
    "nothing+attention": ([(8, GELU)], 0),
    "dots": ([], 8),
    "dots+attention": ([], 0),
    "dots-no-batch+attention": ([], 0),
    "save:mlpwi_0": ([(8, without(GELU, "mlpwi_0"))], 8),
    "save:context": ([(8, GELU)], 8),
    "offload:mlpwi_0": ([(8, without(GELU, "mlpwi_0"))], 8),
    "save:query_proj+offload:mlpwi_0+attention": ([(8, without(GELU, "query_proj", "mlpwi_0"))], 0),
    "every:1": ([(8, GELU)], 8),
    "every:2": ([(8, ALL_GELU)], 8),
    "every:3": ([(8, ALL_GELU)], 8),
    "every:8": ([(8, ALL_GELU)], 8),
    "every:4+nothing": ([(8, ALL_GELU), (8, GELU)], 16),
    "every:2+dots+attention": ([(8, ALL_GELU)], 8),
    "one-in:2": ([(4, GELU)], 4),
    "one-in:3": ([(3, GELU)], 3),
}
SCANNED_LLAMA = {
    "none": ([], 0),
    "nothing": ([(4, SWIGLU)], 4),
    "dots+attention": ([], 0),
    "save:query_proj,mlpwi_1": ([(4, without(SWIGLU, "query_proj", "mlpwi_1"))], 4),
    "every:3+nothing+attention": (
        [(3, ALL_SWIGLU), (4, SWIGLU)],
        4,
    ),  # the fourth's group is itself: nothing to run up to it
}
UNROLLED_GPT = {
    "none": ([], 0),
    "nothing": ([(3, GELU)], 3),
    "save:mlpwi_0": ([(3, without(GELU, "mlpwi_0"))], 3),
    "every:2": ([(1, ALL_GELU), (2, GELU)], 3),  # straight-line code: only the last layer of a group leaves out mlpwo
    "one-in:2": ([(2, GELU)], 2),
}
# XLA's own attention is two matmuls per layer over the whole score matrix; here their number that runs once more per layer.
XLA_ATTENTION = {
    "none": ([], 0),
    "nothing": ([(8, GELU)], 2),
    "dots": ([], 0),
    "dots-no-batch": ([], 2),
    "save:context": ([(8, GELU)], 1),
}


def matmul_flops(model: ModelConfig, name: str) -> int:
    """FLOPs of one matmul of one layer, from the shapes."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    width = dict(query_proj=queries, key_proj=keys, value_proj=keys, out_proj=queries)
    return 2 * BATCH * SEQ * model.embed_dim * width.get(name, model.mlp_dim)


def recomputed_matmuls(model: ModelConfig, again: list[tuple[int, tuple[str, ...]]]) -> int:
    return sum(layers * sum(matmul_flops(model, name) for name in names) for layers, names in again)


def check_fused(executed: ExecutedFlops, model: ModelConfig, again: list, attention_again: int) -> None:
    layers = model.num_layers
    attention = forward_attention_flops(model, BATCH, SEQ) // layers // 2  # one layer's, causal
    assert executed.num_unknown_loops == 0
    assert executed.num_attention_forward == layers + attention_again
    assert executed.num_attention_backward == layers
    assert executed.matmul_flops == 3 * forward_matmul_flops(model, BATCH, SEQ) + recomputed_matmuls(model, again)
    base = flops_without_recompute(model, BATCH, SEQ, "cudnn")
    assert executed.total == base + recomputed_matmuls(model, again) + attention_again * attention


def check_kept(done: Compilation, model: ModelConfig, again: list, attention_again: int, merged: int = 0) -> None:
    """What the record says of the step: the same numbers, matmul by matmul, and how many XLA `merged` or dropped."""
    matmuls, attention = saved_and_recomputed(done).again
    num_again = sum(layers * len(names) for layers, names in again)
    assert (matmuls.operation, attention.operation) == ("matmul", "attention")
    assert matmuls.num_forward == model.num_layers * len(ALL_SWIGLU if model.mlp == "swiglu" else ALL_GELU) + 1
    assert (matmuls.num_asked, matmuls.num_again) == (num_again + merged, num_again)
    assert matmuls.flops_again == recomputed_matmuls(model, again)
    assert (attention.num_forward, attention.num_again) == (model.num_layers, attention_again)


#: The tables, by the model whose layers they are of.
TABLES: dict[str, tuple[ModelConfig, str, dict[str, tuple[list, int]]]] = {
    "scan": (GPT, "cudnn", SCANNED),
    "llama": (LLAMA, "cudnn", SCANNED_LLAMA),
    "unrolled": (UNROLLED, "cudnn", UNROLLED_GPT),
    "one layer": (ONE_LAYER, "cudnn", {"none": ([], 0), "nothing": ([(1, GELU)], 1)}),
}
#: Matmuls that JAX requests and XLA doesn't run. A layer that is a group for itself is recomputed up to its attention, which is
#: saved, and again: there XLA merges q, k and v, and nothing reads the others.
NOT_RUN = {("llama", "every:3+nothing+attention"): [(1, ALL_SWIGLU)]}


@functools.cache
def requested(model: ModelConfig, policy: str, attention: str) -> ExecutedFlops:
    """What JAX requests of XLA: the FLOPs of the traced gradient."""
    workload = decoder_workload(model, TRAIN, BATCH, attention)
    return count_step_flops(jax.make_jaxpr(jax.grad(workload.loss_with(parse(policy))))(*workload.loss_args))


#: Three policies of each table are in the fast tier, and one-in:N, which no other fast test counts.
ROWS = [
    pytest.param(table, policy, marks=() if number < 3 or policy.startswith("one-in") else pytest.mark.full)
    for table in TABLES
    for number, policy in enumerate(TABLES[table][2])
]


@pytest.mark.parametrize(("table", "policy"), ROWS)
def test_matmuls_that_jax_requests_again(table, policy):
    model, attention, rows = TABLES[table]
    again, attention_again = rows[policy]
    found, not_run = requested(model, policy, attention), recomputed_matmuls(model, NOT_RUN.get((table, policy), []))
    assert found.num_attention_forward == model.num_layers + attention_again
    assert found.num_attention_backward == model.num_layers
    base = 3 * forward_matmul_flops(model, BATCH, SEQ)
    assert found.matmul_flops == base + recomputed_matmuls(model, again) + not_run


@pytest.mark.parametrize("policy", XLA_ATTENTION)
def test_matmuls_of_xla_s_attention_that_jax_requests_again(policy):
    again, attention_matmuls = XLA_ATTENTION[policy]
    recomputed = recomputed_matmuls(GPT, again) + attention_matmuls * forward_attention_flops(GPT, BATCH, SEQ) // 2
    found = requested(GPT, policy, "xla")
    assert (found.total, found.attention_flops) == (flops_without_recompute(GPT, BATCH, SEQ, "xla") + recomputed, 0)


# What the compiled program executes, for a policy of each kind. Others differ in what JAX requests alone.


def check_compiled(table: str, policy: str, target: Target) -> Compilation:
    """Two counts that share no code, the matmuls and attention calls in the HLO and in the jaxpr."""
    model, attention, rows = TABLES[table]
    done = compiled(target, policy, model, attention=attention)
    executed, in_jaxpr = executed_flops(done.module), requested(model, policy, attention)
    check_fused(executed, model, *rows[policy])
    not_run = recomputed_matmuls(model, NOT_RUN.get((table, policy), []))
    assert (executed.total, executed.attention_flops) == (in_jaxpr.total - not_run, in_jaxpr.attention_flops)
    assert executed.num_attention_forward == in_jaxpr.num_attention_forward
    assert executed.num_attention_backward == in_jaxpr.num_attention_backward
    return done


@pytest.mark.full
@pytest.mark.parametrize(
    "policy", ["nothing", "dots+attention", "save:query_proj+offload:mlpwi_0+attention", "every:4+nothing"]
)
def test_scanned(policy, h100):
    check_kept(check_compiled("scan", policy, h100), GPT, *SCANNED[policy])


@pytest.mark.full
@pytest.mark.any_jax
@pytest.mark.parametrize("policy", ["every:3+nothing+attention"])
def test_scanned_llama(policy, h100):
    check_kept(check_compiled("llama", policy, h100), LLAMA, *SCANNED_LLAMA[policy], merged=len(QKV))


@pytest.mark.full
@pytest.mark.parametrize("policy", ["every:2", "one-in:2"])
def test_unrolled(policy, h100):
    check_kept(check_compiled("unrolled", policy, h100), UNROLLED, *UNROLLED_GPT[policy])


@pytest.mark.full
def test_a_loop_of_one_layer_recomputes_too(h100):
    """XLA unrolls such a loop, and would merge the two computations but for the barriers."""
    check_compiled("one layer", "nothing", h100)


@pytest.mark.full
def test_a_compiled_program_with_xla_s_attention(h100):
    policy = "dots-no-batch"
    again, attention_matmuls = XLA_ATTENTION[policy]
    done = compiled(h100, policy, attention="xla")
    executed = executed_flops(done.module)
    assert (executed.attention_flops, executed.num_unknown_loops) == (0, 0)
    assert executed.total == requested(GPT, policy, "xla").total
    (matmuls,) = saved_and_recomputed(done).again  # XLA gives some of attention's matmuls no scope
    assert (matmuls.num_again, matmuls.flops_again) == (
        sum(layers * len(names) for layers, names in again) + attention_matmuls * GPT.num_layers,
        executed.total - flops_without_recompute(GPT, BATCH, SEQ, "xla"),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "policy", ["nothing", "nothing+attention", "save:mlpwi_0", "save:query_proj+offload:mlpwi_0+attention"]
)
def test_the_planner_s_evaluator_counts_what_the_program_recomputes(policy, h100):
    """The decision replayed over one layer's graph, times the layers, against the traced step beyond what `none` runs."""
    run = Trials(decoder_factory(GPT, "cudnn"), TRAIN, h100, 0)
    block, chosen = one_of_each(estimate_workload(run, h100.speed, BATCH)), parse(policy)
    names = {name: v for v, name in block.names.items()}
    fused = {v for op in block.problem.ops if op.together for v in op.outputs} if chosen.saves_attention else set()
    save, offload = getattr(chosen, "save", ()), getattr(chosen, "offload", ())
    decision = Decision(frozenset(names[name] for name in save) | fused, frozenset(names[name] for name in offload))
    recomputed = GPT.num_layers * evaluate(block.problem, decision).recomputed_flops
    assert recomputed == requested(GPT, policy, "cudnn").total - flops_without_recompute(GPT, BATCH, SEQ, "cudnn") > 0


@pytest.mark.full
@pytest.mark.parametrize(("policy", "calls"), [("nothing", 2), ("dots+attention", 1)])
def test_calls_of_the_attention_kernel_in_the_text(policy, calls, h100):
    """The loops' bodies hold each kernel once: one forward call in the forward loop, another only if it is recomputed."""
    text = compiled(h100, policy).hlo_text
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == calls
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


def test_the_closed_form_by_hand():
    """GPT: per token and layer 2 x (4 x 256 x 256 + 2 x 256 x 1024), and the head 2 x 256 x 512."""
    tokens, scores = BATCH * SEQ, BATCH * 4 * SEQ * SEQ
    assert forward_matmul_flops(GPT, BATCH, SEQ) == tokens * (8 * 2 * (4 * 256**2 + 2 * 256 * 1024) + 2 * 256 * 512)
    assert forward_attention_flops(GPT, BATCH, SEQ) == 8 * 2 * (2 * scores * 64)
    assert model_flops(GPT, BATCH, SEQ) == 3 * (forward_matmul_flops(GPT, BATCH, SEQ) + 8 * 2 * scores * 64)
    fused, plain = (flops_without_recompute(GPT, BATCH, SEQ, attention) for attention in ("cudnn", "xla"))
    assert plain - fused == 8 * (6 * 2 - 7) * scores * 64  # 2 + 4 whole matmuls against 2 + 5 halved ones


@pytest.mark.parametrize(
    ("policy", "saved", "offloaded"),
    [
        ("nothing", (), 0),
        ("save:mlpwi_0", ("mlpwi_0",), 0),
        ("save:query_proj,context", ("context", "query_proj"), 0),
        ("save:query_proj+offload:mlpwi_0", ("query_proj",), 1),
        ("offload:context,mlpwi_0", (), 2),
        ("minimal_with_context", sorted((*QKV, "context", "out_proj", "mlpwi_0")), 0),  # mlpwo: no gradient needs it
    ],
)
def test_residuals_of_one_layer(policy, saved, offloaded, capsys):
    """What JAX itself says the layer keeps beside its arguments; an offloaded value has lost its name there."""
    block = remat(Block, policy)(GPT)
    x = jax.ShapeDtypeStruct((BATCH, SEQ, GPT.embed_dim), GPT.dtype)
    variables = jax.eval_shape(block.init, jax.random.key(0), x)
    print_saved_residuals(lambda v, x: jnp.asarray(block.apply(v, x), "float32").sum(), variables, x)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert sorted(found[1] for line in lines if (found := re.search(r"named '(\w+)'", line))) == list(saved)
    assert sum("<host>" in line for line in lines) == offloaded
    assert len(lines) == len(saved) + offloaded, "\n".join(lines)
