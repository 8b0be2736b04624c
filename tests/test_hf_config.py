"""What of a `config.json` is taken, what is ignored and what is refused by name, and the commands with --hf."""

import json
import re
from pathlib import Path

import pytest

from jaxremat.command import parse_flags
from jaxremat.config import ModelConfig
from jaxremat.errors import UsageError
from jaxremat.flags import RunFlags, SweepFlags
from jaxremat.grid import trials_of
from jaxremat.model.families import FAMILIES, INERT
from jaxremat.model.hf import hf_config, read_hf
from jaxremat.model.transformer import count_params
from jaxremat.processes import task_of
from jaxremat.request import check_run
from jaxremat.trial.task import read_task
from jaxremat.worker import work

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
    assert read_hf(CONFIGS / "Phi-3-mini-4k-instruct.json").line().endswith("isn't run: the model is transformers' phi3")


@pytest.mark.parametrize(("file", "name"), [("Qwen3-8B", "qwen3-8b"), ("Mixtral-8x7B-v0.1", "mixtral-8x7b")])
def test_a_preset_is_the_same_model(file, name):
    """The presets of Qwen 3 and of Mixtral have other names for nothing but themselves, and no length of their own."""
    from jaxremat.model.presets import preset

    assert hf_config(CONFIGS / f"{file}.json", name=name, max_seq_len=1024) == preset(name).config


def test_the_routers_loss_is_in_the_heading_where_transformers_leaves_it_out(given):
    """The coefficient of the file or of the flag is in the loss, whatever `output_router_logits` says."""
    file = CONFIGS / "Mixtral-8x7B-v0.1.json"
    assert read_hf(file).line().endswith("; the loss has 0.02 x the router's loss (--router-loss)")
    keys = json.loads(file.read_text())
    for found, coefficient in (
        (read_hf(given(**keys | {"output_router_logits": True})), 0.02),
        (read_hf(given(**keys | {"router_aux_loss_coef": 0.0})), 0.0),
        (read_hf(file, {"router_loss": 0.5}), 0.5),
    ):
        assert found.config.router_loss == coefficient
        assert found.line().endswith("(mixtral)")


def test_the_widths_and_names_of_qwen3_moe(given):
    """The experts' width counts, and that of its layers without experts doesn't. The number of experts has two names."""
    found = hf_config(given(model_type="qwen3_moe", intermediate_size=64, max_window_layers=2, moe_intermediate_size=96))
    assert (found.mlp_dim, found.num_experts, found.dispatch, found.normalize_routing) == (96, 128, "dense", False)
    assert hf_config(given(model_type="qwen3_moe", num_local_experts=16)).num_experts == 16


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_are_ignored(family, given):
    plain = hf_config(given(model_type=family), dropout=0.0)
    assert hf_config(given(**dict.fromkeys(INERT, 7) | {"model_type": family}), dropout=0.0) == plain


REFUSED = [
    ({}, "has no model_type. Allowed: gpt2, llama, mistral, qwen2, qwen3, gemma, gemma2, phi3, olmo2, mixtral,"),
    ({"model_type": "gemma3"}, "has model_type 'gemma3'. Allowed: gpt2, .* did you mean 'gemma' or 'gemma2'"),
    ({"model_type": "llama", "alibi": True}, "has a key that llama doesn't know: alibi. .* out of a copy of the file"),
    (
        {"model_type": "qwen3", "num_experts": 8, "router": 1, "use_cache": True},
        "has keys that qwen3 doesn't know: num_experts, router. Likely cause: another model_type",
    ),
    (
        {"model_type": "mixtral", "router_jitter_noise": 0.1},
        "has router_jitter_noise 0.1. Allowed: 0.0 in a file of mixtral.",
    ),
    ({"model_type": "mixtral", "num_local_experts": 1}, "has num_local_experts 1. Allowed: 2 or more."),
    ({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 8}, "has both num_local_experts and num_experts."),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "make no model: --experts-per-token got 9. Allowed: up to the 8"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "has decoder_sparse_step 2. Allowed: 1 in a file of qwen3_moe."),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"has mlp_only_layers \[0\]. Allowed: \[\] or null in a file of"),
    ({"model_type": "qwen3_moe", "norm_topk_prob": 1}, "has norm_topk_prob 1. Allowed: true or false."),
    ({"model_type": "llama", "num_layers": 2}, "doesn't know: num_layers. .* Next: did you mean 'num_hidden_layers'"),
    ({"model_type": "gpt2", "rope_theta": 1e4}, "has a key that gpt2 doesn't know: rope_theta."),
    ({"model_type": "llama", "hidden_size": "64"}, "has hidden_size '64'. Allowed: a whole number."),
    ({"model_type": "llama", "hidden_size": None}, "has hidden_size None. Allowed: a whole number."),
    ({"model_type": "llama", "hidden_size": True}, "has hidden_size True. Allowed: a whole number."),
    ({"model_type": "mistral", "sliding_window": 4.5}, "has sliding_window 4.5. Allowed: a whole number or null."),
    ({"model_type": "llama", "hidden_act": "relu2"}, "has hidden_act 'relu2'. Allowed: silu, swish, gelu, gelu_new"),
    ({"model_type": "gpt2", "activation_function": "silu"}, "has activation_function 'silu'. Allowed: gelu, gelu_new"),
    ({"model_type": "llama", "sliding_window": 4}, "has sliding_window 4. Allowed: null in a file of llama."),
    ({"model_type": "qwen2", "use_mrope": True}, "has use_mrope True. Allowed: false or null"),
    ({"model_type": "llama", "quantization_config": {"bits": 4}}, r"has quantization_config \{'bits': 4\}. Allowed: null"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx True"),
    ({"model_type": "gpt2"}, "has attn_pdrop 0.1. Allowed: 0. .* Next: --dropout 0.1 leaves attention's out."),
    ({"model_type": "llama", "attention_dropout": 0.2}, "has attention_dropout 0.2. .* Next: --dropout 0 trains without."),
    ({"model_type": "phi3", "resid_pdrop": 0.1}, "has resid_pdrop 0.1 and embd_pdrop 0. Allowed: one rate for both."),
    (
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        r"has layer_types \['full_attention'\]. Allowed: sliding_attention or full_attention for each of the 32 layers.",
    ),
    ({"model_type": "gemma2", "sliding_window": None}, "has sliding_window None and layers with a sliding window."),
    (
        {"model_type": "llama", "rope_scaling": {"rope_type": "axial"}},
        "has a rope_scaling with rope_type 'axial'. Allowed: default, linear, dynamic, llama3, yarn, longrope",
    ),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2}},
        "has a rope_scaling with rope_type 'linear'. Allowed: default, longrope",
    ),
    (
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4]}},
        "has a rope_parameters with keys that rope_type default has no use for: mrope_section.",
    ),
    (
        {"model_type": "llama", "rope_scaling": {"rope_type": "linear"}},
        "has a rope_scaling that isn't one of rope_type linear: Object missing required field `factor`.",
    ),
    (
        {"model_type": "qwen3", "rope_scaling": YARN | {"attn_factor": 0.8}},
        "isn't one of rope_type yarn: Object contains unknown field `attn_factor`.",
    ),
    ({"model_type": "llama", "rope_scaling": YARN, "rope_parameters": YARN}, "has both rope_scaling and rope_parameters."),
    ({"model_type": "llama", "rope_scaling": "yarn"}, "has rope_scaling 'yarn'. Allowed: an object with keys, or null."),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5. Allowed: 1.0 in this family."),
    ({"model_type": "llama", "num_key_value_heads": 5}, "make no model: --num-kv-heads got 5. Allowed: a divisor of"),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        "make no model: --rope-scaling has 1 numbers in short_factor, and rope turns 48 pairs of features.",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_what_cannot_be_computed_is_refused_by_name(keys, message, given):
    """In one message, which begins with the file."""
    file = given(**keys)
    with pytest.raises(UsageError, match=re.escape(file) + " .*" + message):
        hf_config(file)


def test_files_that_are_no_config_are_refused(tmp_path, refusal):
    def refused(path: Path) -> str:
        return refusal(["--hf", str(path)])

    assert refused(tmp_path).startswith(f"--hf {str(tmp_path)!r}: there is no config.json in this folder. Allowed: ")
    assert refused(tmp_path / "no.json").startswith(f"--hf {str(tmp_path / 'no.json')!r}: there is no such file. ")
    file = tmp_path / "config.json"
    for text, said in (
        (b"{", "is no JSON: Expecting"),
        (b"[]", "holds JSON, and not an object"),
        (b"\xff", "is no JSON: it"),
    ):
        file.write_bytes(text)
        assert said in refused(tmp_path)


def test_flags_beside_the_file(given, refusal, write):
    file = given(**SMALL)
    request = check_run(
        parse_flags(RunFlags, ["--hf", file, "--num-layers", "2", "--seq-len", "64", "--window-pattern", "f"])
    )
    assert isinstance(request.model, ModelConfig)
    assert (request.model.num_layers, request.model.windows(64), request.train.seq_len) == (2, (64, 64), 64)
    assert check_run(parse_flags(RunFlags, ["--hf", file])).train.seq_len == 2048
    dropout = parse_flags(RunFlags, ["--hf", given(model_type="gpt2"), "--dropout", "0.1"])
    assert check_run(dropout).model.dropout == 0.1
    assert refusal(["--hf", file, "--model", "gpt2"]).startswith(f"--hf {file} and --model gpt2 are two models. Next: ")
    assert f"--model-arg goes with a --model of your own, and --hf {file} is one of" in refusal(
        ["--hf", file, "--model-arg", "a=1"]
    )


def test_flags_of_the_decoder_are_checked(refusal):
    for words, said in (
        ("--window-pattern x", "--window-pattern got 'x'. Allowed: a text of the letters s and f"),
        ("--sliding-window -1", "--sliding-window got -1. Allowed: a whole number from 0 up"),
        ("--logit-softcap -1", "--logit-softcap got -1.0. Allowed: zero or a positive number"),
        ("--positions rope --rotary-fraction 0.2", "--rotary-fraction got 0.2. Allowed: a share that gives an even number"),
        ("--rope-scaling {}", "--rope-scaling got '{}': Object missing required field `rope_type`"),
    ):
        assert said in refusal(["--model", "tiny", *words.split()])


def test_a_worker_gets_the_model(given, tmp_path, h100):
    """A task of a file with alternating windows and soft-caps, compiled for a GPU; its records hold every field."""
    flags = parse_flags(RunFlags, ["--hf", given(**SMALL), "--seq-len", "64", "--target", "h100-80gb"])
    file = tmp_path / "task.json"
    file.write_text(task_of(flags, "dots", 2, "default").to_json())
    result = work(read_task(file))
    assert (result.outcome, result.error) == ("ok", "")
    [record] = result.records
    assert record.attention == "xla"
    assert record.config["model"]["window_pattern"] == "sf"
    assert record.config["model"]["attention_softcap"] == 50


def test_a_sweep_takes_files_beside_presets(given, h100):
    flags = ["--hf", given(**SMALL), str(CONFIGS / "Qwen3-8B.json"), "--target", "h100-80gb", "--out", "s.jsonl"]
    trials = trials_of(parse_flags(SweepFlags, flags))
    assert [Path(trial.model).name for trial in trials] == ["config.json", "Qwen3-8B.json"]
    assert {trial.config["model"]["name"] for trial in trials} >= {"Qwen3-8B"}
    assert len({trial.key for trial in trials}) == 2
    assert next(trial.model for trial in trials_of(parse_flags(SweepFlags, ["--model", "gpt2", *flags]))) == "gpt2"
