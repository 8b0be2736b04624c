"""The families of models whose `config.json` is known: their keys, with their defaults.

References:
    transformers/models/*/configuration_*.py, version 5.24, for keys and defaults; modeling_*.py beside them, for what the keys
    mean. The tests compare the defaults with these classes, and logits with these models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxremat.config.rope import ROPE_TYPES


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`.

    Attributes:
        defaults: by key, its value where a file leaves it out.
        fields: the fields of `ModelConfig` that all models of the family share.
        only: by key, the values with which it may be there. Another value would change what is computed.
        activation: the key of the activation in the MLP.
        gelu_is_tanh: whether the activation `gelu` means the form with tanh, as Gemma's first files mean it.
        windows: which layers have the sliding window, unless the file's `layer_types` says it: none, all, those from
            `max_window_layers` on, or every other one from the first on.
        rope_types: the kinds of stretched rope.
        has_partial_rope: whether rope may turn a part of each head's features.
        rope_theta: the base of rope where a file leaves it out.
        renamed: by another name of a key, the key's name in `defaults`.
        unread: keys that published files have and that the family's models don't read.
    """

    defaults: Mapping[str, Any]
    fields: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    activation: str = "hidden_act"
    gelu_is_tanh: bool = False
    windows: Literal["none", "all", "last", "alternating"] = "none"
    rope_types: tuple[str, ...] = ROPE_TYPES
    has_partial_rope: bool = False
    rope_theta: float = 10_000.0
    renamed: Mapping[str, str] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    @property
    def has_rope(self) -> bool:
        """Whether position enters by rope."""
        return self.fields.get("positions") == "rope"


_LLAMA: dict[str, Any] = dict(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    hidden_act="silu",
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_dropout=0.0,
)
_QWEN: dict[str, Any] = _LLAMA | dict(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
    layer_types=None,
)
_GEMMA: dict[str, Any] = _LLAMA | dict(
    vocab_size=256000,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    attention_bias=False,
)
_GEMMA2: dict[str, Any] = {key: value for key, value in _GEMMA.items() if key != "hidden_act"} | dict(
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256.0,
    sliding_window=4096,
    layer_types=None,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
)
_GPT2: dict[str, Any] = dict(
    vocab_size=50257,
    n_positions=1024,
    n_embd=768,
    n_layer=12,
    n_head=12,
    n_inner=None,
    activation_function="gelu_new",
    resid_pdrop=0.1,
    embd_pdrop=0.1,
    attn_pdrop=0.1,
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    tie_word_embeddings=True,
)
_PHI3: dict[str, Any] = _LLAMA | dict(
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    max_position_embeddings=4096,
    original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    sliding_window=None,
)
_MIXTRAL: dict[str, Any] = _LLAMA | dict(
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    sliding_window=None,
    num_local_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.001,
    output_router_logits=False,
)
_QWEN3_MOE: dict[str, Any] = {key: value for key, value in _LLAMA.items() if key != "intermediate_size"} | dict(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=24,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    attention_bias=False,
    use_sliding_window=False,
    sliding_window=4096,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=False,
    router_aux_loss_coef=0.001,
    output_router_logits=False,
)
_ROPE: dict[str, Any] = dict(positions="rope", norm="rmsnorm", use_bias=False)
_ROPE_1P: dict[str, Any] = _ROPE | dict(norm="rmsnorm-1p", scale_embeddings=True)
_TANH = ("gelu_pytorch_tanh", "gelu", None)

#: The known families, by `model_type`.
FAMILIES = {
    "gpt2": Family(_GPT2, {}, activation="activation_function"),
    "llama": Family(_LLAMA | dict(attention_bias=False, mlp_bias=False), _ROPE),
    "mistral": Family(
        _LLAMA | dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
        _ROPE,
        windows="all",
    ),
    "qwen2": Family(_QWEN, _ROPE | dict(qkv_bias=True), windows="last"),
    "qwen3": Family(
        _QWEN | dict(head_dim=128, attention_bias=False),
        _ROPE | dict(qk_norm=True),
        {"use_qk_norm": (True,)},
        windows="last",
    ),
    "gemma": Family(_GEMMA, _ROPE_1P, {"hidden_activation": _TANH}, gelu_is_tanh=True),
    "gemma2": Family(
        _GEMMA2,
        _ROPE_1P | dict(norm_placement="both"),
        {"hidden_act": _TANH},
        activation="hidden_activation",
        windows="alternating",
    ),
    "phi3": Family(_PHI3, _ROPE, windows="all", rope_types=("longrope",), has_partial_rope=True),
    "olmo2": Family(
        _LLAMA | dict(vocab_size=50304, rms_norm_eps=1e-5, attention_bias=False),
        _ROPE | dict(norm_placement="post", qk_norm=True, qk_norm_over="projection"),
    ),
    "mixtral": Family(
        _MIXTRAL,
        _ROPE | dict(normalize_routing=True),
        {"router_jitter_noise": (0.0,)},
        windows="all",
        rope_theta=1e6,
        renamed={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Family(
        _QWEN3_MOE,
        _ROPE | dict(qk_norm=True),
        {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "use_qk_norm": (True,)},
        windows="all",
        renamed={"num_local_experts": "num_experts"},
        unread=frozenset({"intermediate_size", "max_window_layers"}),
    ),
}

#: Keys that no known family computes anything with at these values. A family's own table goes first.
ONLY: dict[str, tuple[Any, ...]] = dict(
    attention_bias=(False, None),
    mlp_bias=(False, None),
    sliding_window=(None,),
    layer_types=(None,),
    use_sliding_window=(False, None),
    use_mrope=(False, None),
    use_bidirectional_attention=(False, None),
    scale_attn_by_inverse_layer_idx=(False,),
    reorder_and_upcast_attn=(False,),
    add_cross_attention=(False,),
    is_encoder_decoder=(False,),
    is_decoder=(False, True),
    cross_attention_hidden_size=(None,),
    tie_encoder_decoder=(False,),
    pruned_heads=({}, None),
    quantization_config=(None,),
    rope_interleaved=(False,),
    qkv_bias=(False,),
    lm_head_bias=(False,),
    use_qk_norm=(None,),
    shared_expert_intermediate_size=(0, None),
    full_attn_mod=(1,),
    interpolate_factor=(1,),
)
#: Keys that change nothing of what a training step computes, saves or takes. Transformers doesn't read `n_ctx` of GPT-2 and
#: `sliding_window_size` of Gemma 2, which published files have beside `n_positions` and `sliding_window`.
INERT = frozenset(
    """
    model_type architectures auto_map _name_or_path name_or_path transformers_version _commit_hash torch_dtype dtype use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id tokenizer_class prefix
    initializer_range pretraining_tp return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss
    cache_implementation attn_implementation _attn_implementation _attn_implementation_autoset chunk_size_feed_forward
    problem_type id2label label2id num_labels finetuning_task task_specific_params classifier_dropout tie_last_hidden_states
    n_ctx sliding_window_size summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    is_llama_config transformers.js_config unsloth_fixed unsloth_version _num_labels n_special predict_special_tokens
    max_sequence_length
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905
)
