"""What of a `config.json` is taken, what is ignored and what is rejected by name, and the commands with --hf."""

import json
from pathlib import Path

import pytest

from jaxremat.cli.command import parse_flags
from jaxremat.cli.grid import sweep_trials
from jaxremat.cli.processes import task_of
from jaxremat.cli.worker import work
from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.model.families import FAMILIES, INERT
from jaxremat.model.hf import hf_config, read_hf
from jaxremat.model.presets import preset
from jaxremat.model.transformer import count_params
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.request import check_run
from jaxremat.trial.record import TrialRecord
from jaxremat.trial.task import read_task

pytestmark = pytest.mark.any_jax
CONFIGS = Path(__file__).parent.parent / "examples/configs"
SMALL = dict(
    model_type="gemma2",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    sliding_window=32,
)
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture
def given(tmp_path):
    """Writes a config.json and returns its path: `given(num_hidden_layers=2)`."""

    def write(**keys) -> str:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(keys))
        return str(file)

    return write


#: Parameters, as their authors publish them, tied heads counted once.
PUBLISHED = {
    "Qwen3-8B": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name):
    found = read_hf(CONFIGS / f"{name}.json")
    assert count_params(found.config) == PUBLISHED[name]
    assert (found.config.name, found.seq_len) == (name, 2048)


def test_what_the_families_have_is_taken():
    gemma, phi = (hf_config(CONFIGS / f"{name}.json") for name in ("gemma-2-9b", "Phi-3-mini-4k-instruct"))
    assert (gemma.sliding_window, gemma.window_pattern, gemma.norm_placement) == (4096, "sf", "both")
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.query_pre_attn_scalar) == (50, 30, 256)
    assert (phi.sliding_window, phi.window_pattern, phi.head_dim) == (2047, "s", 96)
    assert set(phi.windows(2048)) == {2047}
    assert set(phi.windows(1024)) == {1024}
    assert "phi3" in read_hf(CONFIGS / "Phi-3-mini-4k-instruct.json").line()


@pytest.mark.parametrize(("file", "name"), [("Qwen3-8B", "qwen3-8b"), ("Mixtral-8x7B-v0.1", "mixtral-8x7b")])
def test_a_preset_is_the_same_model(file, name):
    """The presets of Qwen 3 and of Mixtral have other names for nothing but themselves, and no length of their own."""
    assert hf_config(CONFIGS / f"{file}.json", name=name, max_seq_len=1024) == preset(name).config


def test_the_routers_loss_is_in_the_heading_where_transformers_leaves_it_out(given):
    """The coefficient of the file or of the flag is in the loss, whatever `output_router_logits` says."""
    file = CONFIGS / "Mixtral-8x7B-v0.1.json"
    assert "0.02" in read_hf(file).line()
    assert "--router-loss" in read_hf(file).line()
    keys = json.loads(file.read_text())
    for found, coefficient in (
        (read_hf(given(**keys | {"output_router_logits": True})), 0.02),
        (read_hf(given(**keys | {"router_aux_loss_coef": 0.0})), 0.0),
        (read_hf(file, {"router_loss": 0.5}), 0.5),
    ):
        assert found.config.router_loss == coefficient
        assert "--router-loss" not in found.line()


def test_the_widths_and_names_of_qwen3_moe(given):
    """The experts' width counts, and that of its layers without experts doesn't. The number of experts has two names."""
    found = hf_config(given(model_type="qwen3_moe", intermediate_size=64, max_window_layers=2, moe_intermediate_size=96))
    assert (found.mlp_dim, found.num_experts, found.dispatch, found.normalize_routing) == (96, 128, "dense", False)
    assert hf_config(given(model_type="qwen3_moe", num_local_experts=16)).num_experts == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_are_ignored(family, given):
    plain = hf_config(given(model_type=family), dropout=0.0)
    assert hf_config(given(**dict.fromkeys(INERT, 7) | {"model_type": family}), dropout=0.0) == plain


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "qwen3_moe", "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        {"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}},
        {"model_type": "llama", "max_sequence_length": 2048, "unsloth_fixed": True, "architectures": ["LlamaForCausalLM"]},
        {"model_type": "gpt2", "n_special": 0, "predict_special_tokens": True, "architectures": ["GPT2LMHeadModel"]},
    ],
)
def test_keys_of_published_files_that_change_nothing_at_their_values(keys, given):
    """Of Qwen3-Coder-30B-A3B, Phi-4-mini, SmolLM2, mirrors of LLaMA and gpt2-medium."""
    plain = given(model_type=keys["model_type"])
    assert hf_config(given(**keys), dropout=0.0) == hf_config(plain, dropout=0.0)


#: What a file has, what the error names, and what is allowed.
REJECTED = [
    ({}, ["model_type"], ", ".join(FAMILIES)),
    ({"model_type": "gemma3"}, ["model_type 'gemma3'"], ", ".join(FAMILIES)),
    ({"model_type": "llama", "alibi": True}, ["llama", "alibi"], ""),
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, ["SequenceClassification"], "CausalLM"),
    ({"model_type": "mistral", "architectures": ["MistralModel"]}, ["MistralModel"], "CausalLM"),
    ({"model_type": "llama", "use_qk_norm": True}, ["use_qk_norm True"], "null"),
    ({"model_type": "llama", "rope_interleaved": True}, ["rope_interleaved True"], "false"),
    ({"model_type": "qwen3", "num_experts": 8, "router": 1, "use_cache": True}, ["num_experts, router"], ""),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, ["router_jitter_noise 0.1"], "0.0"),
    ({"model_type": "mixtral", "num_local_experts": 1}, ["num_local_experts 1"], "2"),
    ({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 8}, ["num_local_experts", "num_experts"], ""),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, ["--experts-per-token", "9"], "8"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ["decoder_sparse_step 2"], "1"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ["mlp_only_layers [0]"], "[]"),
    ({"model_type": "qwen3_moe", "norm_topk_prob": 1}, ["norm_topk_prob 1"], "true"),
    ({"model_type": "llama", "num_layers": 2}, ["num_layers"], ""),
    ({"model_type": "gpt2", "rope_theta": 1e4}, ["gpt2", "rope_theta"], ""),
    ({"model_type": "llama", "hidden_size": "64"}, ["hidden_size '64'"], ""),
    ({"model_type": "llama", "hidden_size": None}, ["hidden_size None"], ""),
    ({"model_type": "llama", "hidden_size": True}, ["hidden_size True"], ""),
    ({"model_type": "mistral", "sliding_window": 4.5}, ["sliding_window 4.5"], "null"),
    ({"model_type": "llama", "hidden_act": "relu2"}, ["hidden_act 'relu2'"], "silu, swish, gelu, gelu_new"),
    ({"model_type": "gpt2", "activation_function": "silu"}, ["activation_function 'silu'"], "gelu, gelu_new"),
    ({"model_type": "llama", "sliding_window": 4}, ["sliding_window 4"], "null"),
    ({"model_type": "qwen2", "use_mrope": True}, ["use_mrope True"], "false"),
    ({"model_type": "llama", "quantization_config": {"bits": 4}}, ["quantization_config {'bits': 4}"], "null"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx True"], ""),
    ({"model_type": "gpt2"}, ["attn_pdrop 0.1"], "0"),
    ({"model_type": "llama", "attention_dropout": 0.2}, ["attention_dropout 0.2"], ""),
    ({"model_type": "phi3", "resid_pdrop": 0.1}, ["resid_pdrop 0.1", "embd_pdrop 0"], ""),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, ["layer_types ['full_attention']"], "32"),
    ({"model_type": "gemma2", "sliding_window": None}, ["sliding_window None"], ""),
    (
        {"model_type": "llama", "rope_scaling": {"rope_type": "axial"}},
        ["rope_scaling", "'axial'"],
        "default, linear, dynamic, llama3, yarn, longrope",
    ),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2}},
        ["rope_scaling", "'linear'"],
        "default, longrope",
    ),
    (
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4]}},
        ["rope_parameters", "mrope_section"],
        "",
    ),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "linear"}}, ["rope_scaling", "linear", "`factor`"], ""),
    ({"model_type": "qwen3", "rope_scaling": YARN | {"attn_factor": 0.8}}, ["yarn", "`attn_factor`"], ""),
    ({"model_type": "llama", "rope_scaling": YARN, "rope_parameters": YARN}, ["rope_scaling", "rope_parameters"], ""),
    ({"model_type": "llama", "rope_scaling": "yarn"}, ["rope_scaling 'yarn'"], "null"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"], "1.0"),
    ({"model_type": "llama", "num_key_value_heads": 5}, ["--num-kv-heads", "5"], ""),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        ["--rope-scaling", "short_factor", "48"],
        "",
    ),
]


@pytest.mark.parametrize(("keys", "got", "allowed"), REJECTED, ids=[str(number) for number in range(len(REJECTED))])
def test_what_cannot_be_computed_is_rejected_by_name(keys, got, allowed, given):
    file = given(**keys)
    with pytest.raises(UsageError) as caught:
        hf_config(file)
    assert file in caught.value.got
    assert [part for part in got if part not in caught.value.got] == []
    assert allowed in caught.value.allowed
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("keys", "next_step"),
    [
        ({"model_type": "gemma3"}, "--model FILE.py:ATTR"),  # another architecture, and no typing mistake
        ({"model_type": "llama", "num_layers": 2}, "'num_hidden_layers'"),
        ({"model_type": "gpt2"}, "--dropout 0.1"),
        ({"model_type": "llama", "attention_dropout": 0.2}, "--dropout 0"),
    ],
)
def test_what_is_near_comes_next(keys, next_step, given):
    with pytest.raises(UsageError) as caught:
        hf_config(given(**keys))
    assert next_step in caught.value.next_step


def error_of(*argv: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_run(parse_flags(RunFlags, argv))
    return caught.value


@pytest.mark.parametrize(("name", "near"), [("qwen33", "'qwen3'"), ("lama", "'llama'"), ("zzz", "")])
def test_a_misspelt_family_is_a_question(name, near, given):
    with pytest.raises(UsageError) as caught:
        hf_config(given(model_type=name))
    assert ("did you mean" in caught.value.next_step) == bool(near)
    assert near in caught.value.next_step
    assert "--model FILE.py:ATTR" in caught.value.next_step


def test_files_that_are_no_config_are_rejected(tmp_path):
    for path in (tmp_path, tmp_path / "no.json"):
        assert f"--hf {str(path)!r}" in error_of("--hf", str(path)).got
    with pytest.raises(UsageError, match="--hf"):
        read_hf("x" * 5000)
    for content in (b"{", b"[]", b"\xff"):
        (tmp_path / "config.json").write_bytes(content)
        assert str(tmp_path / "config.json") in error_of("--hf", str(tmp_path)).got


def test_flags_beside_the_file(given):
    file = given(**SMALL)
    request = check_run(
        parse_flags(RunFlags, ["--hf", file, "--num-layers", "2", "--seq-len", "64", "--window-pattern", "f"])
    )
    config = ModelConfig(**request.model.config)
    assert (request.model.num_layers, config.windows(64), request.train.seq_len) == (2, (64, 64), 64)
    assert check_run(parse_flags(RunFlags, ["--hf", file])).train.seq_len == 2048
    dropout = check_run(parse_flags(RunFlags, ["--hf", given(model_type="gpt2"), "--dropout", "0.1"])).model
    assert dropout.config["dropout"] == 0.1
    for other in (("--model", "gpt2"), ("--model-arg", "a=1")):
        got = error_of("--hf", file, *other).got
        assert f"--hf {file}" in got
        assert other[0] in got


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--window-pattern x", "'x'"),
        ("--sliding-window -1", "-1"),
        ("--logit-softcap -1", "-1.0"),
        ("--rotary-fraction 0.2 --positions rope", "0.2"),
        ("--rope-scaling {}", "'{}'"),
    ],
)
def test_flags_of_the_decoder_are_checked(words, value):
    got = error_of("--model", "tiny", *words.split()).got
    assert words.split()[0] in got
    assert value in got


@pytest.mark.full
def test_a_worker_gets_the_model(given, tmp_path, h100):
    """A task of a file with alternating windows and soft-caps, compiled for a GPU; its records hold every field."""
    flags = parse_flags(RunFlags, ["--hf", given(**SMALL), "--seq-len", "64", "--target", "h100-80gb"])
    file = tmp_path / "task.json"
    file.write_text(task_of(flags, "dots", 2, "default").to_json())
    result = work(read_task(file))
    assert (result.outcome, result.error) == ("ok", "")
    [record] = result.records
    assert isinstance(record, TrialRecord)
    assert record.attention == "xla"
    assert record.config["model"]["window_pattern"] == "sf"
    assert record.config["model"]["attention_softcap"] == 50


def test_a_sweep_takes_files_beside_presets(given, h100):
    flags = ["--hf", given(**SMALL), str(CONFIGS / "Qwen3-8B.json"), "--target", "h100-80gb", "--out", "s.jsonl"]
    trials = sweep_trials(parse_flags(SweepFlags, flags))
    assert [Path(trial.model).name for trial in trials] == ["config.json", "Qwen3-8B.json"]
    assert {trial.config["model"]["name"] for trial in trials} >= {"Qwen3-8B"}
    assert len({trial.key for trial in trials}) == 2
    assert next(trial.model for trial in sweep_trials(parse_flags(SweepFlags, ["--model", "gpt2", *flags]))) == "gpt2"
