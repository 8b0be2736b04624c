"""A `config.json` makes the same model as transformers: equal logits with the same weights, for each family and feature."""

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxremat.errors import UsageError
from jaxremat.model.families import FAMILIES
from jaxremat.model.hf import hf_config
from jaxremat.model.transformer import Decoder
from jaxremat.model.weights import load_safetensors
from tests.helpers import quick_jit

pytestmark = [pytest.mark.any_jax, pytest.mark.full]  # transformers takes seconds to import
torch = pytest.importorskip("torch", reason='PyTorch is missing: pip install "jaxremat[peer]"')
transformers = pytest.importorskip("transformers", reason='transformers is missing: pip install "jaxremat[peer]"')

from safetensors.numpy import load_file, save_file  # noqa: E402

SIZES = dict(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GPT2 = dict(vocab_size=64, n_positions=64, n_embd=48, n_layer=3, n_head=4, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=0.5)
LONGROPE = dict(type="longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[3.0, 4.0, 5.0])
#: How near logits are, as a share of the largest one. GELU by tanh or by the error function makes a difference of 2e-4.
CLOSE = 2e-5
TOKENS = np.arange(2 * 24).reshape(2, 24) * 7 % 61


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        family: its model_type.
        keys: what its config.json has.
        tokens: the sequence.
    """

    family: str
    keys: dict[str, Any]
    tokens: int = 24

    @property
    def json(self) -> dict[str, Any]:
        return {"model_type": self.family, **(GPT2 if self.family == "gpt2" else SIZES), **self.keys}


def rope(scaling: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Keys of a model with stretched rope, in the style before transformers 5."""
    return {"rope_scaling": scaling, "head_dim": 16, **other}


CASES = {
    "gpt2": Case("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "gpt2-unusual": Case(
        "gpt2", dict(n_inner=72, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False)
    ),
    "llama": Case("llama", {}),
    "llama-biases": Case("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=20)),
    "llama-linear": Case("llama", rope({"type": "linear", "factor": 4.0})),
    "llama-dynamic": Case("llama", rope({"type": "dynamic", "factor": 4.0}, max_position_embeddings=16)),
    "llama-dynamic-short": Case("llama", rope({"type": "dynamic", "factor": 4.0})),
    "llama-llama3": Case("llama", rope(LLAMA3, rope_theta=500_000.0)),
    "llama-yarn": Case("llama", rope(YARN)),
    "llama-longrope": Case(
        "llama", rope({"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.5] * 8, "factor": 4.0})
    ),
    "mistral": Case("mistral", {"sliding_window": 5}),
    "mistral-no-window": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {"sliding_window": 5}),
    "qwen2-windows": Case("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": Case("qwen3", {"head_dim": 16}),
    "qwen3-windows": Case(
        "qwen3",
        dict(
            attention_bias=True,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
    ),
    "qwen3-yarn": Case("qwen3", rope(YARN | dict(mscale=2.0, mscale_all_dim=0.5, truncate=False), rope_theta=1e6)),
    "gemma": Case("gemma", dict(head_dim=16, hidden_act="gelu")),
    "gemma2": Case(
        "gemma2",
        dict(
            head_dim=16, sliding_window=5, query_pre_attn_scalar=9, attn_logit_softcapping=1.0, final_logit_softcapping=4.0
        ),
    ),
    "gemma2-uncapped": Case(
        "gemma2", dict(head_dim=16, sliding_window=5, attn_logit_softcapping=None, final_logit_softcapping=None)
    ),
    "phi3": Case("phi3", dict(sliding_window=7, partial_rotary_factor=0.5)),
    "phi3-longrope-short": Case(
        "phi3", dict(rope_scaling=LONGROPE, partial_rotary_factor=0.5, original_max_position_embeddings=32)
    ),
    "phi3-longrope-long": Case(
        "phi3", dict(rope_scaling=LONGROPE, partial_rotary_factor=0.5, original_max_position_embeddings=16)
    ),
    "olmo2": Case("olmo2", {}),
    "mixtral": Case("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5)),
    "mixtral-gelu": Case("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, hidden_act="gelu")),
    "mixtral-yarn": Case("mixtral", rope(YARN, num_local_experts=3, num_experts_per_tok=1)),
    "qwen3_moe": Case(
        "qwen3_moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16, attention_bias=True)
    ),
    "qwen3_moe-normalized": Case(
        "qwen3_moe",
        dict(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=5,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
    ),
    "olmo2-biases": Case("olmo2", rope(LLAMA3, attention_bias=True)),
}
#: Of these models the logits are compared: the features of each family, and each kind of stretched rope but the plain factors.
#: For each feature, fields of the decoder's config that switch it off: it must make a difference here.
LOGITS: dict[str, tuple[dict[str, Any], ...]] = {
    "gpt2-unusual": ({"exact_gelu": False}, {"query_pre_attn_scalar": 0.0}),
    "llama-biases": (),
    "qwen2-windows": ({"sliding_window": 0}, {"window_pattern": "s"}),
    "qwen3-yarn": ({"rope_scaling": ""}, {"qk_norm": False}),
    "gemma2": ({"window_pattern": "fs"}, {"query_pre_attn_scalar": 0.0}, {"attention_softcap": 0.0}, {"logit_softcap": 0.0}),
    "phi3-longrope-long": ({"rope_scaling": ""},),
    "olmo2-biases": ({"rope_scaling": ""},),
    "mixtral": ({"experts_per_token": 1}, {"normalize_routing": False}, {"sliding_window": 0}),
    "mixtral-gelu": ({"exact_gelu": False},),
}


def peer_model(case: Case) -> Any:
    """The model in transformers, with random weights that aren't near zero, norms and biases among them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**case.json), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3)
    return model.eval()


def distance(found: Any, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


def tensors_of(folder: Path) -> int:
    """How many tensors the folder's file has."""
    return len(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_those_of_transformers(name, tmp_path):
    """With layers in a scan, and with unrolled ones where their windows differ. Without each feature, logits are others."""
    case, tokens = CASES[name], TOKENS[:, : CASES[name].tokens]
    model = peer_model(case)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    model.save_pretrained(tmp_path)

    def found(scan_layers: bool, **off: Any) -> float:
        config = hf_config(tmp_path, dtype="float32", scan_layers=scan_layers)
        params = load_safetensors(tmp_path, config)
        return distance(quick_jit(Decoder(replace(config, **off)).apply)({"params": params}, tokens), expected)

    assert found(scan_layers=True) < CLOSE
    assert name != "gemma2" or found(scan_layers=False) < CLOSE
    for off in LOGITS[name]:
        assert found(scan_layers=True, **off) > 5 * CLOSE, off


@pytest.mark.parametrize("dispatch", ["dense", "ragged"])
def test_experts_are_read_one_by_one_and_all_together(dispatch, tmp_path):
    """The published tensors of each expert, and those of all experts that transformers computes with, make the same tree. Its
    logits are those of transformers under both dispatches.
    """
    model = peer_model(CASES["qwen3_moe"])
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)).logits.numpy()
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "all", save_original_format=False)
    config = hf_config(tmp_path / "each", dtype="float32", dispatch=dispatch)
    each, together = (load_safetensors(tmp_path / folder, config) for folder in ("each", "all"))
    jax.tree.map(np.testing.assert_array_equal, each, together)
    assert tensors_of(tmp_path / "each") > tensors_of(tmp_path / "all")
    assert distance(quick_jit(Decoder(config).apply)({"params": each}, TOKENS), expected) < CLOSE


@pytest.mark.parametrize("name", CASES)
def test_old_and_new_keys_make_the_same_config(name, tmp_path):
    """A file as it was written before transformers 5, as transformers writes it now, and with every key that it knows."""
    case = CASES[name]
    config = transformers.AutoConfig.for_model(**case.json)
    written = {"old": case.json, "new": config.to_diff_dict(), "all": config.to_dict()}
    found = {}
    for style, keys in written.items():
        (tmp_path / "config.json").write_text(json.dumps(keys, default=str))
        found[style] = hf_config(tmp_path)
    assert found["old"] == found["new"] == found["all"]


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers(name):
    """Of each key of each family, but for head_dim where the class has no such field and the model takes it all the same."""
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    defaults = {field.name: field.default for field in dataclasses.fields(classes[name])}
    expected = FAMILIES[name].defaults
    without = {"head_dim"} & (expected.keys() - defaults.keys())
    assert {key: defaults[key] for key in expected.keys() - without} == {
        key: value for key, value in expected.items() if key not in without
    }
    assert without == set() or name in ("qwen2", "phi3", "olmo2", "qwen3_moe")


def test_a_model_of_defaults_is_transformers(tmp_path):
    """A file with a model_type alone has the number of parameters of transformers' class."""
    from jaxremat.model.transformer import count_params

    for name in FAMILIES:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name))
        config = hf_config(tmp_path, dropout=0.0)
        assert count_params(config) == sum(parameter.numel() for parameter in model.parameters()), name


def test_weights_in_several_files_and_in_bfloat16(tmp_path):
    """The tree is equal however the files are cut, and its dtype is the config's."""
    model = peer_model(CASES["phi3"])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert (tmp_path / "many/model.safetensors.index.json").is_file()
    config = hf_config(tmp_path / "one")
    trees = [load_safetensors(tmp_path / name, config) for name in ("one", "many", "many/model.safetensors.index.json")]
    for tree in trees[1:]:
        jax.tree.map(np.testing.assert_array_equal, trees[0], tree)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = load_safetensors(tmp_path / "half", replace(config, param_dtype="bfloat16"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), trees[0], half)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half)} == {"bfloat16"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the weights of a small Qwen 3, and its config."""
    folder = tmp_path_factory.mktemp("saved")
    peer_model(CASES["qwen3"]).save_pretrained(folder)
    return folder, hf_config(folder)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["layers.1.mlp.up_proj.weight"]),
        (lambda t: t.update({"model.layers.0.more.weight": t["model.norm.weight"]}), ["model.layers.0.more.weight"]),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}), ["lm_head.weight", "(63, 48)", "(64, 48)"]),
        (lambda t: [t.pop(name) for name in list(t) if ".0." in name], ["layers.0.", "5"]),
    ],
)
def test_tensors_that_are_not_the_models_are_named(change, got, saved, tmp_path):
    folder, config = saved
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        load_safetensors(tmp_path, config)
    assert [part for part in got if part not in caught.value.got] == []
    assert caught.value.cause


@pytest.mark.parametrize(
    ("name", "tensor"), [("mixtral", "block_sparse_moe.experts.2.w3"), ("qwen3_moe", "mlp.experts.5.up_proj")]
)
def test_a_missing_tensor_of_an_expert_is_named(name, tensor, tmp_path):
    peer_model(CASES[name]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.{tensor}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        load_safetensors(tmp_path, hf_config(tmp_path))
    assert f"layers.1.{tensor}.weight" in caught.value.got


def test_files_that_hold_no_weights_are_rejected(saved, tmp_path):
    folder, config = saved
    index = "model.safetensors.index.json"
    content = (folder / "model.safetensors").read_bytes()
    for name, written in (
        ("model.safetensors", None),
        ("pytorch_model.bin", b""),
        ("model.safetensors", content[: len(content) // 2]),
        (index, b"[]"),
    ):
        if written is not None:
            (tmp_path / name).write_bytes(written)
        with pytest.raises(UsageError) as caught:
            load_safetensors(tmp_path, config)
        assert str(tmp_path if name == "pytorch_model.bin" else tmp_path / name) in caught.value.got
