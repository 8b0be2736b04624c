"""What a policy recomputes, to the FLOP, counted in programs that XLA compiled for a GPU.

A table says by hand, per policy, how many layers run which matmuls once more, and how often attention runs. That plus the
closed form without recompute (`tests/decoder_flops.py`) must be what the compiled HLO executes, loops multiplied out. Two
facts explain the table. The last matmul of a checkpoint (`mlpwo`) isn't recomputed where only its result leaves the
checkpoint: no gradient needs that. Inside a loop over the layers of a group it is, for the next layer starts from it. And
fused attention runs again unless the policy saves it (`+attention`), even where its output is saved by name: the backward
kernel needs the softmax statistics, which have no name.
"""

import re
from dataclasses import replace

import jax
import pytest

from jaxremat.answer.workload_estimate import estimate_workload
from jaxremat.config import ModelConfig
from jaxremat.model.decoder_workload import DecoderFactory
from jaxremat.model.flops import forward_matmul_flops, model_flops
from jaxremat.model.transformer import Block
from jaxremat.planner.evaluate import evaluate
from jaxremat.planner.problem import Decision
from jaxremat.planner.shared_budget import one_of_each
from jaxremat.policy.apply import remat
from jaxremat.policy.grammar import parse
from jaxremat.trial.settings import Run
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import ExecutedFlops, count_step_flops, executed_flops
from jaxremat.xla.kept import what_was_kept
from tests.decoder_flops import flops_without_recompute, forward_attention_flops
from tests.helpers import BATCH, GPT, LLAMA, SEQ, TRAIN, UNROLLED, compiled, decoder_args, decoder_step

QKV = ("query_proj", "key_proj", "value_proj")
#: Matmuls that a recomputed layer runs again; ALL where its output is needed too.
GELU = (*QKV, "out_proj", "mlpwi_0")
SWIGLU = (*GELU, "mlpwi_1")
ALL_GELU, ALL_SWIGLU = (*GELU, "mlpwo"), (*SWIGLU, "mlpwo")


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
    """What the record says of the step: the same numbers, matmul by matmul, and how many XLA `merged`."""
    matmuls, attention = what_was_kept(done).again
    num_again = sum(layers * len(names) for layers, names in again)
    assert (matmuls.operation, attention.operation) == ("matmul", "attention")
    assert matmuls.num_forward == model.num_layers * len(ALL_SWIGLU if model.mlp == "swiglu" else ALL_GELU) + 1
    assert (matmuls.num_asked, matmuls.num_again) == (num_again + merged, num_again)
    assert matmuls.flops_again == recomputed_matmuls(model, again)
    assert (attention.num_forward, attention.num_again) == (model.num_layers, attention_again)


def slow(policies, *names):
    """The table's policies, those of `names` marked slow: nearly implied by the others."""
    return [pytest.param(policy, marks=pytest.mark.slow) if policy in names else policy for policy in policies]


#: Slow ones by layout and attention, in both tests that compile them.
SLOW = {
    ("scan", "cudnn"): ("dots-no-batch+attention", "save:context"),
    ("scan", "xla"): ("none", "dots", "save:context"),
}


@pytest.mark.parametrize("policy", slow(SCANNED, *SLOW["scan", "cudnn"]))
def test_scanned(policy, h100):
    done = compiled(h100, policy)
    check_fused(executed_flops(done.module), GPT, *SCANNED[policy])
    check_kept(done, GPT, *SCANNED[policy])


@pytest.mark.parametrize("policy", slow(SCANNED_LLAMA, "none", "every:3+nothing+attention"))
def test_scanned_llama(policy, h100):
    done = compiled(h100, policy, LLAMA)
    check_fused(executed_flops(done.module), LLAMA, *SCANNED_LLAMA[policy])
    # A layer that is a group for itself is recomputed up to its attention, which is saved, and again: XLA merges q, k and v.
    check_kept(done, LLAMA, *SCANNED_LLAMA[policy], merged=3 * policy.startswith("every:3"))


@pytest.mark.parametrize("policy", UNROLLED_GPT)
def test_unrolled(policy, h100):
    done = compiled(h100, policy, UNROLLED)
    check_fused(executed_flops(done.module), UNROLLED, *UNROLLED_GPT[policy])
    check_kept(done, UNROLLED, *UNROLLED_GPT[policy])


@pytest.mark.parametrize("policy", slow(XLA_ATTENTION, *SLOW["scan", "xla"]))
def test_scanned_with_xla_s_attention(policy, h100):
    again, attention_matmuls = XLA_ATTENTION[policy]
    done = compiled(h100, policy, attention="xla")
    executed = executed_flops(done.module)
    assert (executed.attention_flops, executed.num_unknown_loops) == (0, 0)
    recomputed = recomputed_matmuls(GPT, again) + attention_matmuls * forward_attention_flops(GPT, BATCH, SEQ) // 2
    assert executed.total == flops_without_recompute(GPT, BATCH, SEQ, "xla") + recomputed
    (matmuls,) = what_was_kept(done).again  # XLA gives some of attention's matmuls no scope
    assert (matmuls.num_again, matmuls.flops_again) == (
        sum(layers * len(names) for layers, names in again) + attention_matmuls * GPT.num_layers,
        recomputed,
    )


def test_unrolled_none_with_xla_s_attention(h100):
    executed = executed_flops(compiled(h100, "none", UNROLLED, attention="xla").module)
    assert executed.total == flops_without_recompute(UNROLLED, BATCH, SEQ, "xla")


def every_program():
    """Each policy, with both attentions, in a loop and unrolled; slow where no other test compiles the same program."""
    tables = {
        ("scan", "cudnn"): SCANNED,
        ("scan", "xla"): XLA_ATTENTION,
        ("unrolled", "cudnn"): UNROLLED_GPT,
        ("unrolled", "xla"): {"none"},
    }
    for (layout, attention), others in tables.items():
        for policy in (
            SCANNED if layout == "scan" else sorted(SCANNED.keys() - {"every:8", "every:4+nothing"})
        ):  # of 3 layers
            shared = policy in others and policy not in SLOW.get((layout, attention), ())
            marks = () if shared else pytest.mark.slow
            yield pytest.param(layout, attention, policy, marks=marks, id=f"{layout}-{attention}-{policy}")


@pytest.mark.parametrize(("layout", "attention", "policy"), list(every_program()))
def test_the_compiled_program_executes_what_jax_asked_for(layout, attention, policy, h100):
    """Two counts that share no code: matmuls and attention calls times trip counts in the HLO, and the same in the jaxpr."""
    model = GPT if layout == "scan" else UNROLLED
    executed = executed_flops(compiled(h100, policy, model, attention=attention).module)
    step, args = decoder_step(model, TRAIN, policy, attention), decoder_args(model, TRAIN, BATCH)
    asked = count_step_flops(jax.jit(step).trace(*args).jaxpr)
    assert (executed.total, executed.attention_flops) == (asked.total, asked.attention_flops)
    assert (executed.num_attention_forward, executed.num_attention_backward) == (
        asked.num_attention_forward,
        asked.num_attention_backward,
    )
    assert executed.num_unknown_loops == 0


@pytest.mark.parametrize(
    "policy", ["nothing", "nothing+attention", "save:mlpwi_0", "save:query_proj+offload:mlpwi_0+attention"]
)
def test_the_planner_s_evaluator_counts_what_the_program_recomputes(policy, h100):
    """The decision replayed over one layer's graph, times the layers, against the compiled step beyond what `none` runs."""
    run = Run(DecoderFactory(GPT, "cudnn"), TRAIN, h100, 0)
    block, asked = one_of_each(estimate_workload(run, h100.speed, BATCH)), parse(policy)
    names = {name: v for v, name in block.names.items()}
    fused = {v for op in block.problem.ops if op.together for v in op.outputs} if asked.attention else set()
    save, offload = getattr(asked, "save", ()), getattr(asked, "offload", ())
    decision = Decision(frozenset(names[name] for name in save) | fused, frozenset(names[name] for name in offload))
    executed = executed_flops(compiled(h100, policy).module).total
    recomputed = GPT.num_layers * evaluate(block.problem, decision).recomputed_flops
    assert recomputed == executed - flops_without_recompute(GPT, BATCH, SEQ, "cudnn") > 0


@pytest.mark.parametrize(("policy", "again"), [pytest.param("none", (), marks=pytest.mark.slow), ("nothing", GELU)])
def test_a_loop_of_one_layer_recomputes_too(policy, again, h100):
    """XLA unrolls such a loop, and would merge the two computations but for the barriers."""
    model = replace(GPT, num_layers=1)
    executed = executed_flops(compiled(h100, policy, model).module)
    check_fused(executed, model, [(1, again)], int(policy == "nothing"))


@pytest.mark.parametrize(("policy", "calls"), [("none", 1), ("nothing", 2), ("dots", 2), ("dots+attention", 1)])
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
    jax.ad_checkpoint.print_saved_residuals(lambda v, x: block.apply(v, x).astype("float32").sum(), variables, x)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert sorted(found[1] for line in lines if (found := re.search(r"named '(\w+)'", line))) == list(saved)
    assert sum("<host>" in line for line in lines) == offloaded
    assert len(lines) == len(saved) + offloaded, "\n".join(lines)
