"""The choice of attention says which one and why, and never picks cuDNN's where the whole step can't compile with it."""

import random
from dataclasses import replace

import pytest

from jaxremat.config import ModelConfig
from jaxremat.errors import CompileError, UsageError
from jaxremat.model.presets import preset
from jaxremat.trial.attention import choose_attention
from jaxremat.xla.target import load_target
from tests.helpers import compiled

SMALL = replace(preset("tiny").config, num_layers=1, vocab_size=64, dropout=0.0)


@pytest.mark.parametrize(
    ("changes", "seq_len", "implementation", "reason"),
    [
        ({}, 64, "cudnn", "it compiles for this target and these shapes"),
        ({}, 77, "xla", "cuDNN can't: Unsupported sequence length Q 77, KV 77"),
        ({"dtype": "float32"}, 64, "xla", "cuDNN can't: Q must be fp16/bf16/fp8_e4m3fn/fp8_e5m2, got float32"),
        ({"head_dim": 256}, 64, "xla", "cuDNN can't: The head dim must be <= 128 and a multiple of 8, but got 256"),
        ({"sliding_window": 32}, 64, "cudnn", "it compiles for this target and these shapes"),
        ({"sliding_window": 64, "window_pattern": "sf"}, 64, "cudnn", "it compiles for this target and these shapes"),
        (
            {"sliding_window": 32, "window_pattern": "sf", "num_layers": 3},
            64,
            "xla",
            "cuDNN can't: its window is a constant, and 2 of 3 layers have a window of 32 tokens",
        ),
        (
            {"attention_softcap": 50.0},
            64,
            "xla",
            "cuDNN can't: its kernel has no soft-cap, and the model caps scores at 50",
        ),
        ({"attention": "xla"}, 64, "xla", "asked for"),
        ({"attention": "cudnn"}, 64, "cudnn", "asked for"),
    ],
)
def test_it_says_which_and_why(changes, seq_len, implementation, reason, h100):
    choice = choose_attention(replace(ModelConfig(), **changes), seq_len, h100)
    assert (choice.implementation, choice.reason) == (implementation, reason)


def test_a_cpu_has_no_cudnn():
    cpu = load_target("cpu")
    choice = choose_attention(ModelConfig(), 64, cpu)
    assert (choice.implementation, choice.reason) == ("xla", "cuDNN can't: the target is a CPU")
    with pytest.raises(UsageError, match="--attention cudnn cannot run here"):
        choose_attention(ModelConfig(attention="cudnn"), 64, cpu)


def test_lengths_beyond_the_position_table_are_named_with_the_flag_that_makes_it_longer(h100):
    with pytest.raises(UsageError, match=r"--seq-len 128 or 130 \(with --max-seq-len\), or --attention auto"):
        choose_attention(replace(SMALL, attention="cudnn"), 129, h100)
    with pytest.raises(UsageError, match="--seq-len 128 or 130, or --attention auto"):
        choose_attention(replace(SMALL, attention="cudnn", positions="rope"), 129, h100)


def drawn(number: int) -> tuple[ModelConfig, int, int]:
    """A model, its sequence length and batch, odd ones among them; the same for the same number."""
    draw = random.Random(number)
    kv_heads = draw.choice([1, 2, 3])
    changes = {
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw.choice([1, 2]),
        "head_dim": draw.choice([8, 16, 40, 64, 72, 128, 136, 20]),
        "dtype": draw.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        "max_seq_len": 300,
    }
    length, batch = draw.choice([1, 2, 6, 31, 64, 77, 128, 197, 200, 256]), draw.choice([1, 3, 8])
    if changes["dtype"] == "float16":
        length = max(2, length)  # XLA refuses float16 at length 1 on each target: "Unsupported dot precision algorithm"
    return replace(SMALL, **changes), length, batch


@pytest.mark.parametrize("number", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 40))])
def test_the_decision_is_that_of_the_whole_step(number, h100):
    """Where the trial says that cuDNN runs, the step with cuDNN compiles; where it says not, that step doesn't."""
    model, seq_len, batch = drawn(number)
    chosen = choose_attention(model, seq_len, h100).implementation
    compiled(h100, "nothing", model, batch=batch, seq_len=seq_len, attention=chosen)
    if chosen == "xla":
        with pytest.raises(CompileError, match="cuDNN"):
            compiled(h100, "nothing", model, batch=batch, seq_len=seq_len, attention="cudnn")
