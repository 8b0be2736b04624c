"""The decoder has the published numbers of parameters and MaxText's names, and a token sees only the tokens before it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxremat.config import ModelConfig
from jaxremat.model.flops import model_flops
from jaxremat.model.layers import rope
from jaxremat.model.presets import PRESETS
from jaxremat.model.transformer import Decoder, count_params, layer_names
from jaxremat.policy.maxtext import MAXTEXT_ALIASES
from tests.helpers import quick_jit

# The number of parameters in the weights their authors publish, tied heads counted once. GPT-3's weights aren't published: 96
# layers of 12 x 12288 x 12288 + 13 x 12288, the embeddings of 50257 tokens and 2048 positions, and the last norm.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama3.2-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2b": 2_506_172_416,
}


#: A preset of each kind of layer. The others are counted in the full tier.
KINDS = ("tiny", "gpt2", "qwen3-0.6b", "mixtral-8x7b", "gemma-2b")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.full) for n in PRESETS])
def test_a_preset_has_its_number_of_parameters(name):
    assert count_params(PRESETS[name].config) == PRESETS[name].num_params


def test_numbers_of_parameters_are_the_published_ones():
    assert {name: PRESETS[name].num_params for name in PRESETS if name != "tiny"} == PUBLISHED


def test_unrolled_layers_have_as_many_parameters():
    config = replace(PRESETS["gpt2"].config, num_layers=2)
    assert count_params(replace(config, scan_layers=False)) == count_params(config)


def test_layers_carry_maxtexts_names():
    names = {value.name for value in layer_names(PRESETS["llama3.2-1b"].config, 1, 8)}
    known = set(",".join(text.partition(":")[2] for text in MAXTEXT_ALIASES.values()).split(",")) | {"decoder_layer_input"}
    assert names == known - {"", "qkv_proj", "mlpwi"}  # MaxText's fused projections, which these layers don't have


GPT = ModelConfig("small", 16, 2, 16, 4, 4, 8, 32, max_seq_len=12, dtype="float32")
LLAMA = replace(GPT, positions="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, num_kv_heads=2, qk_norm=True)
GEMMA = replace(LLAMA, norm="rmsnorm-1p", mlp="geglu", scale_embeddings=True, num_kv_heads=1, qk_norm=False)


EXPERTS = replace(LLAMA, tie_embeddings=False, num_experts=4, dispatch="ragged")


@pytest.mark.full
@pytest.mark.parametrize("config", [GPT, LLAMA, GEMMA, EXPERTS])
def test_a_token_sees_only_what_came_before(config):
    decoder, tokens = Decoder(config), jnp.arange(12)[None] % 7
    params = quick_jit(decoder.init)(jax.random.key(0), tokens)
    logits = quick_jit(decoder.apply)
    before, after = logits(params, tokens), logits(params, tokens.at[0, 8].set(9))
    assert before.shape == (1, 12, config.vocab_size)
    assert jnp.array_equal(before[:, :8], after[:, :8])
    assert not jnp.array_equal(before[:, 8:], after[:, 8:])


def test_rope_depends_on_distance_only():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16), np.float32)
    turn = quick_jit(lambda x: rope(x, 100.0))
    turned_q, turned_k = (np.asarray(turn(np.tile(x, (1, 10, 1, 1))))[0, :, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    assert np.allclose(np.diagonal(scores, 3), scores[0, 3], atol=1e-5)
    assert not np.allclose(scores[0, 3], scores[0, 4], atol=1e-3)


@pytest.mark.parametrize(("window", "pattern"), [(0, "s"), (64, "s"), (16, "s"), (16, "sf"), (1, "sff")])
def test_model_flops_count_the_scores_that_windows_let_through(window, pattern):
    """Against a count of the pairs of tokens, of which a token with itself is half of one."""
    config, length = ModelConfig(num_layers=5, sliding_window=window, window_pattern=pattern), 64
    pairs = 0.0
    for layer in range(5):
        seen = window if window and pattern[layer % len(pattern)] == "s" else length
        pairs += sum(min(token + 1, seen) for token in range(length)) - seen / 2
    others = model_flops(replace(config, num_layers=1, sliding_window=0), 3, length)
    per_layer = model_flops(replace(config, num_layers=2, sliding_window=0), 3, length) - others
    full = 12 * 3 * config.num_heads * config.head_dim * length**2 // 2
    expected = others + 4 * per_layer - 5 * full + 12 * 3 * config.num_heads * config.head_dim * pairs
    assert model_flops(config, 3, length) == expected
