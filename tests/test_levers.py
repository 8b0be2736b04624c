"""Each lever of the train step costs and saves the bytes and FLOPs that it should, in programs compiled for a GPU."""

from dataclasses import replace

import jax
import pytest

from jaxremat.config import ModelConfig, Optimizer
from jaxremat.model.presets import preset
from jaxremat.model.transformer import count_params, param_shapes
from jaxremat.xla.compile import Compilation
from jaxremat.xla.flops import executed_flops
from tests.decoder_flops import flops_without_recompute
from tests.helpers import BATCH, GPT, LLAMA, SEQ, TRAIN, WORKSPACE, compiled, optimizer_bytes, total

pytestmark = pytest.mark.full
GRADIENT_BYTES = 4  # a parameter


def test_chunked_loss_at_a_vocabulary_of_128256(h100):
    """It saves nearly all the logits, in bfloat16 and in float32."""
    model, seq_len = preset("llama3.2-1b").config, 2048
    full, chunked = (total(h100, "nothing", model, seq_len=seq_len, loss=loss) for loss in ("full", "chunked"))
    assert full - chunked > 2.9 * BATCH * seq_len * model.vocab_size


def check_state(done: Compilation, model: ModelConfig, optimizer: Optimizer) -> None:
    """The donated arguments are the parameters, the listed state, and a step counter; up to alignment of each array."""
    listed = optimizer_bytes(model, replace(TRAIN, optimizer=optimizer))
    num_arrays = 4 * len(jax.tree.leaves(param_shapes(model)))
    assert abs(done.memory.alias_bytes - 4 * count_params(model) - listed - 4) < 256 * num_arrays


@pytest.mark.parametrize(
    ("model", "loss", "accumulate", "optimizer"),
    [(GPT, "chunked:100", 1, "adamw-bf16"), (LLAMA, "chunked", 1, "adafactor"), (GPT, "full", 3, "lion")],
    ids=["remainder", "llama", "microbatches"],
)
def test_chunks_and_microbatches_cost_no_flops(model, loss, accumulate, optimizer, h100):
    """A remainder of 12 positions included. The optimizers are of one kind each, without matmuls."""
    done = compiled(h100, "none", model, loss=loss, accumulate=accumulate, optimizer=optimizer)
    executed = executed_flops(done.module)
    assert executed.total == flops_without_recompute(model, accumulate * BATCH, SEQ, "cudnn")
    assert executed.num_unknown_loops == 0
    check_state(done, model, optimizer)


def test_muon_s_state_is_what_the_list_says(h100):
    model = replace(GPT, num_layers=2)
    check_state(compiled(h100, "none", model, optimizer="muon"), model, "muon")


def test_microbatches_cost_one_gradient_buffer(h100):
    """The sum of the gradients, however many there are; no copy of the parameters."""
    model = replace(GPT, num_layers=16)
    once, four = (compiled(h100, "nothing", model, accumulate=n) for n in (1, 4))
    tokens, gradients = 4 * BATCH * (SEQ + 1), GRADIENT_BYTES * count_params(model)
    assert 0.9 * gradients <= four.memory.temp_bytes - once.memory.temp_bytes <= 1.02 * gradients + tokens
    assert four.memory.argument_bytes - once.memory.argument_bytes == 3 * tokens
    check_state(once, model, "adamw")


def test_precision_in_bytes(h100):
    """With few activations, bytes a parameter: itself, AdamW's moments, its gradient."""

    def bytes_a_parameter(param_dtype: str = "float32", **levers: object) -> float:
        model = replace(GPT, num_layers=16, param_dtype=param_dtype)
        return (total(h100, "nothing", model, batch=1, seq_len=64, **levers) - WORKSPACE) / count_params(model)

    single = bytes_a_parameter()
    assert single == pytest.approx(4 + 8 + 4, rel=0.06)
    assert bytes_a_parameter("bfloat16") == pytest.approx(2 + 4 + 2, rel=0.12)
    # The sum over microbatches takes two bytes more, not four.
    assert bytes_a_parameter(accumulate=2, grad_dtype="bfloat16") - single == pytest.approx(2, abs=0.4)


def test_the_textbook_s_overhead_of_full_remat(h100):
    """One more forward pass of the layers on top of three passes' worth: +33.3 % of the layers' FLOPs, attention included.

    Exactly so with XLA's attention, under a policy that recomputes whole groups. cuDNN's backward kernel computes the scores
    itself.
    """
    done = compiled(h100, "every:2", GPT, attention="xla", optimizer="sgd-momentum")
    head = 3 * 2 * BATCH * SEQ * GPT.embed_dim * GPT.vocab_size  # it is outside the layers, and isn't recomputed
    layers = flops_without_recompute(GPT, BATCH, SEQ, "xla") - head
    assert 3 * (executed_flops(done.module).total - head) == 4 * layers
    check_state(done, GPT, "sgd-momentum")
