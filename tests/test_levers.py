"""Each lever of the train step costs and saves the bytes and FLOPs that it should, in programs compiled for a GPU."""

from dataclasses import replace
from typing import get_args

import jax
import pytest

from jaxremat.config import Optimizer
from jaxremat.model.presets import preset
from jaxremat.model.transformer import count_params, param_shapes
from jaxremat.xla.flops import executed_flops
from tests.decoder_flops import flops_without_recompute
from tests.helpers import BATCH, GPT, LLAMA, SEQ, TRAIN, WORKSPACE, compiled, optimizer_bytes

MODELS = pytest.mark.parametrize("model", [GPT, pytest.param(LLAMA, marks=pytest.mark.slow)], ids=lambda model: model.name)
GRADIENT_BYTES = 4  # a parameter


def total(target, model, **levers):
    return compiled(target, "nothing", model, **levers).memory.total_bytes


@pytest.mark.any_jax
def test_chunked_loss_at_a_vocabulary_of_128256(h100):
    """It saves nearly all the logits, in bfloat16 and in float32; its default chunk costs no more than a small one."""
    model, seq_len = preset("llama3.2-1b").config, 2048
    full, default, small = (total(h100, model, seq_len=seq_len, loss=loss) for loss in ("full", "chunked", "chunked:64"))
    assert full - default > 2.9 * BATCH * seq_len * model.vocab_size
    assert default <= small


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (GPT, "chunked:100"),
        (LLAMA, "chunked"),
        pytest.param(GPT, "chunked", marks=pytest.mark.slow),
        pytest.param(LLAMA, "chunked:100", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_chunked_loss_costs_no_flops(model, loss, h100):
    """The remainder of 12 positions included."""
    executed = executed_flops(compiled(h100, "none", model, loss=loss).module)
    assert executed.total == flops_without_recompute(model, BATCH, SEQ, "cudnn")


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_optimizer_state_is_what_the_list_says(optimizer, h100):
    """The donated arguments are the parameters, the listed state, and a step counter; up to alignment of each array."""
    model = replace(GPT, num_layers=2)
    memory = compiled(h100, "none", model, optimizer=optimizer).memory
    listed = optimizer_bytes(model, replace(TRAIN, optimizer=optimizer))
    num_arrays = 4 * len(jax.tree.leaves(param_shapes(model)))
    assert abs(memory.alias_bytes - 4 * count_params(model) - listed - 4) < 256 * num_arrays


@MODELS
def test_microbatches_cost_one_gradient_buffer(model, h100):
    """The sum of the gradients; no copy of the parameters, and no more for four microbatches than for two."""
    model = replace(model, num_layers=16)
    once, twice, four = (compiled(h100, "nothing", model, accumulate=n) for n in (1, 2, 4))
    tokens = 4 * BATCH * (SEQ + 1)
    gradients = GRADIENT_BYTES * count_params(model)
    extra = [c.memory.temp_bytes - once.memory.temp_bytes for c in (twice, four)]
    assert all(0.9 * gradients <= more <= 1.02 * gradients + tokens for more in extra), (extra, gradients)
    assert [c.memory.argument_bytes - once.memory.argument_bytes for c in (twice, four)] == [tokens, 3 * tokens]


@MODELS
def test_microbatches_execute_what_one_batch_does(model, h100):
    executed = executed_flops(compiled(h100, "none", model, accumulate=3).module)
    assert executed.total == flops_without_recompute(model, 3 * BATCH, SEQ, "cudnn")
    assert executed.num_unknown_loops == 0


@MODELS
@pytest.mark.any_jax
def test_precision_in_bytes(model, h100):
    """With few activations, bytes a parameter: itself, AdamW's moments, its gradient."""
    model = replace(model, num_layers=16)

    def bytes_a_parameter(param_dtype="float32", **levers):
        changed = replace(model, param_dtype=param_dtype)
        return (total(h100, changed, batch=1, seq_len=64, **levers) - WORKSPACE) / count_params(model)

    held = bytes_a_parameter()
    assert held == pytest.approx(4 + 8 + 4, rel=0.06)
    assert bytes_a_parameter("bfloat16") == pytest.approx(2 + 4 + 2, rel=0.12)
    # Gradients in bfloat16 need the weights in bfloat16 beside the float32 ones: nothing gained for one batch, ...
    assert bytes_a_parameter(grad_dtype="bfloat16") == pytest.approx(held, rel=0.03)
    # ... and two bytes of four for the sum over microbatches.
    summed, summed_bf16 = (bytes_a_parameter(accumulate=2, grad_dtype=dtype) for dtype in (None, "bfloat16"))
    assert summed - held == pytest.approx(4, rel=0.06)
    assert summed_bf16 - held == pytest.approx(2, abs=0.4)


@pytest.mark.slow
@MODELS
def test_compute_dtype_in_bytes(model, h100):
    """float32 activations are twice bfloat16's; compared with XLA's attention, as cuDNN's takes no float32."""
    half, single = (
        compiled(h100, "nothing", replace(model, dtype=dtype), attention="xla", batch=32).memory.temp_bytes
        for dtype in ("bfloat16", "float32")
    )
    assert 1.3 < single / half < 2.1


@pytest.mark.parametrize("attention", ["cudnn", "xla"])
def test_the_textbook_s_overhead_of_full_remat(attention, h100):
    """One more forward pass of the layers on top of three passes' worth: +33.3 % of the layers' FLOPs, attention included.

    Exactly so with XLA's attention, under a policy that runs whole groups again. cuDNN's backward kernel computes the
    scores itself, so that the forward is two matmuls of seven there, not of six.
    """
    executed = executed_flops(compiled(h100, "every:2", GPT, attention=attention).module).total
    head = 3 * 2 * BATCH * SEQ * GPT.embed_dim * GPT.vocab_size  # it is outside the layers, and runs once
    layers = flops_without_recompute(GPT, BATCH, SEQ, attention) - head
    if attention == "xla":
        assert 3 * (executed - head) == 4 * layers
    else:
        assert 0.32 < (executed - head) / layers - 1 < 1 / 3
