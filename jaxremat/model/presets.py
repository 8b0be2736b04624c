"""Model presets by name, with the shapes that their authors published.

    preset("gpt2")  # Preset(config=ModelConfig(name="gpt2", num_layers=12, ...), num_params=124439808, seq_len=1024)

The parameter counts are exact; a test holds them. Two features that change neither parameters nor shapes are left out: the
stretched rope frequencies of Llama 3.1 and 3.2, and Mistral's sliding window, which is plain causal attention up to its 4096
tokens.

References:
    Each model's `config.json` as its authors publish it: openai-community/gpt2*, meta-llama/Llama-*, Qwen/Qwen3-*,
    mistralai/Mistral-7B-v0.1, mistralai/Mixtral-8x7B-v0.1, google/gemma-2b. GPT-3's sizes are those of table 2.1 of
    https://arxiv.org/abs/2005.14165, with GPT-2's vocabulary, and without its layers of sparse attention.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError, nearest


@dataclass(frozen=True)
class Preset:
    """A model with its published sizes.

    Attributes:
        config: the sizes.
        num_params: the number of parameters.
        seq_len: tokens per sequence where the user asks for no other number.
    """

    config: ModelConfig
    num_params: int
    seq_len: int


def _gpt2(name: str, num_layers: int, embed_dim: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        name, 50257, num_layers, embed_dim, num_heads, num_heads, embed_dim // num_heads, 4 * embed_dim, dropout=0.1
    )


_LLAMA = ModelConfig(positions="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, tie_embeddings=False)


def _llama(
    name: str, vocab: int, layers: int, embed: int, heads: int, kv: int, mlp_dim: int, head_dim: int = 128, **other: Any
) -> ModelConfig:
    sizes = dict(vocab_size=vocab, num_layers=layers, embed_dim=embed, num_heads=heads, num_kv_heads=kv, mlp_dim=mlp_dim)
    return replace(_LLAMA, name=name, head_dim=head_dim, **sizes, **other)


_QWEN3: dict[str, Any] = dict(qk_norm=True, rope_theta=1e6, norm_eps=1e-6)
#: The coefficient of the router's loss is that of the models' own files.
_MIXTRAL: dict[str, Any] = dict(num_experts=8, experts_per_token=2, router_loss=0.02, rope_theta=1e6)
_QWEN3_MOE: dict[str, Any] = _QWEN3 | dict(num_experts=128, experts_per_token=8, router_loss=0.001)
_GEMMA: dict[str, Any] = dict(norm="rmsnorm-1p", mlp="geglu", norm_eps=1e-6, scale_embeddings=True, tie_embeddings=True)

PRESETS = {
    preset.config.name: preset
    for preset in (
        Preset(ModelConfig("tiny", max_seq_len=128, dropout=0.1), 124_672, 64),
        Preset(_gpt2("gpt2", 12, 768, 12), 124_439_808, 1024),
        Preset(_gpt2("gpt2-medium", 24, 1024, 16), 354_823_168, 1024),
        Preset(_gpt2("gpt2-large", 36, 1280, 20), 774_030_080, 1024),
        Preset(_gpt2("gpt2-xl", 48, 1600, 25), 1_557_611_200, 1024),
        Preset(replace(_gpt2("gpt3-175b", 96, 12288, 96), max_seq_len=2048, dropout=0.0), 174_604_259_328, 2048),
        Preset(
            _llama("llama3.2-1b", 128256, 16, 2048, 32, 8, 8192, 64, rope_theta=5e5, tie_embeddings=True),
            1_235_814_400,
            2048,
        ),
        Preset(_llama("llama3-8b", 128256, 32, 4096, 32, 8, 14336, rope_theta=5e5), 8_030_261_248, 2048),
        Preset(_llama("llama3-70b", 128256, 80, 8192, 64, 8, 28672, rope_theta=5e5), 70_553_706_496, 2048),
        Preset(_llama("llama3.1-8b", 128256, 32, 4096, 32, 8, 14336, rope_theta=5e5), 8_030_261_248, 2048),
        Preset(_llama("llama3.1-405b", 128256, 126, 16384, 128, 8, 53248, rope_theta=5e5), 405_853_388_800, 2048),
        Preset(_llama("llama2-7b", 32000, 32, 4096, 32, 32, 11008), 6_738_415_616, 2048),
        Preset(_llama("llama2-70b", 32000, 80, 8192, 64, 8, 28672), 68_976_648_192, 2048),
        Preset(_llama("qwen3-0.6b", 151936, 28, 1024, 16, 8, 3072, **_QWEN3, tie_embeddings=True), 596_049_920, 2048),
        Preset(_llama("qwen3-8b", 151936, 36, 4096, 32, 8, 12288, **_QWEN3), 8_190_735_360, 2048),
        Preset(_llama("mistral-7b", 32000, 32, 4096, 32, 8, 14336), 7_241_732_096, 2048),
        Preset(_llama("mixtral-8x7b", 32000, 32, 4096, 32, 8, 14336, **_MIXTRAL), 46_702_792_704, 2048),
        Preset(_llama("qwen3-30b-a3b", 151936, 48, 2048, 32, 4, 768, **_QWEN3_MOE), 30_532_122_624, 2048),
        Preset(_llama("gemma-2b", 256000, 18, 2048, 8, 1, 16384, 256, **_GEMMA), 2_506_172_416, 2048),
    )
}


def preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        UsageError: there is no such preset. The message names the nearest one.
    """
    if name.endswith(".py"):
        raise UsageError(
            f"model {name!r} names a file, and no function in it",
            allowed="FILE.py:ATTR, where ATTR is a jaxremat.Workload or a function that makes one",
            cause="" if Path(name).is_file() else "there is no such file from this folder",
            next_step=f"write it like --model {name}:workload",
        )
    if name not in PRESETS:
        raise UsageError(
            f"unknown model {name!r}", allowed=", ".join(PRESETS), next_step=nearest(name, PRESETS) or "see --list models"
        )
    return PRESETS[name]
