"""A Hugging Face `config.json` of a known family as the decoder's sizes.

Neither transformers nor the model's own code is needed.

    read_hf("Qwen3-8B/config.json")   # HfModel(config=ModelConfig("Qwen3-8B", num_layers=36, ...), family="qwen3", ...)

The families and their keys are in `families.py`. A key that is in no table there is refused by its name.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxremat.config import ModelConfig
from jaxremat.config.rope import RopeScaling, rope_scaling_text
from jaxremat.errors import UsageError, flag_of, nearest
from jaxremat.model.families import FAMILIES, INERT, ONLY, Family
from jaxremat.system.files import parse_json

#: Tokens per sequence unless the user asks for another number or the model takes fewer.
SEQ_LEN = 2048
_AS_PUBLISHED = "give the model's config.json as its authors publish it"


@dataclass(frozen=True)
class HfModel:
    """A model that a `config.json` describes.

    Attributes:
        config: the sizes.
        family: its `model_type`.
        file: the file.
        seq_len: tokens per sequence where the user asks for no other number: 2048, or fewer where the model takes fewer.
        has_own_code: whether the file names code of the model's own, which isn't run.
        adds_router_loss: whether the loss has the router's loss, with the file's coefficient, though the file's
            `output_router_logits` is false and transformers would leave it out.
    """

    config: ModelConfig
    family: str
    file: Path
    seq_len: int
    has_own_code: bool
    adds_router_loss: bool

    def line(self) -> str:
        """The line of a command's heading, such as `config    Qwen3-8B/config.json (qwen3)`."""
        own = f"; auto_map's code isn't run: the model is transformers' {self.family}" if self.has_own_code else ""
        router = (
            f"; the loss has {self.config.router_loss:g} x the router's loss (--router-loss)"
            if self.adds_router_loss
            else ""
        )
        return f"config    {self.file} ({self.family}){own}{router}"


#: Keys whose values are taken over as they are, with the field of `ModelConfig` that takes them.
_FIELDS = dict(
    vocab_size="vocab_size",
    hidden_size="embed_dim",
    n_embd="embed_dim",
    num_hidden_layers="num_layers",
    n_layer="num_layers",
    num_attention_heads="num_heads",
    n_head="num_heads",
    num_key_value_heads="num_kv_heads",
    head_dim="head_dim",
    intermediate_size="mlp_dim",
    n_inner="mlp_dim",
    moe_intermediate_size="mlp_dim",
    num_local_experts="num_experts",
    num_experts="num_experts",
    num_experts_per_tok="experts_per_token",
    norm_topk_prob="normalize_routing",
    router_aux_loss_coef="router_loss",
    max_position_embeddings="max_seq_len",
    n_positions="max_seq_len",
    rms_norm_eps="norm_eps",
    layer_norm_epsilon="norm_eps",
    tie_word_embeddings="tie_embeddings",
    query_pre_attn_scalar="query_pre_attn_scalar",
    attn_logit_softcapping="attention_softcap",
    final_logit_softcapping="logit_softcap",
)
#: Keys that may be null, with the type of their other values.
_NULLABLE: dict[str, type] = dict(
    num_key_value_heads=int,
    head_dim=int,
    n_inner=int,
    sliding_window=int,
    layer_types=list,
    attention_dropout=float,
    attn_logit_softcapping=float,
    final_logit_softcapping=float,
)
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
#: Activations by name: whether they are GELU, and whether by the error function.
_ACTIVATIONS = {"silu": (False, False), "swish": (False, False), "gelu": (True, True)} | dict.fromkeys(
    ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), (True, False)
)


def hf_config(path: str | Path, **changes: Any) -> ModelConfig:
    """The sizes of the model that a Hugging Face `config.json` describes.

    No code of the model's own is run.

    Args:
        path: the file, or a folder that holds it.
        **changes: fields of `ModelConfig` to take in place of the file's.

    Raises:
        UsageError: the file can't be read, is of no known family, or says something that the decoder can't compute.
    """
    return read_hf(path, changes).config


def read_hf(path: str | Path, changes: Mapping[str, Any] | None = None) -> HfModel:
    """The model that a `config.json` describes, as `hf_config` reads it."""
    file, changes = _file(Path(path)), dict(changes or {})
    found = _json(file)
    name = found.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        near, as_code = nearest(str(name or ""), FAMILIES), "give the model as code of your own: --model FILE.py:ATTR"
        raise UsageError(
            f"{file} has model_type {name!r}" if "model_type" in found else f"{file} has no model_type",
            allowed=", ".join(FAMILIES),
            next_step=f"{near} Else {as_code}" if near else as_code,
        )
    family = FAMILIES[name]
    _check_head(file, found)
    _check_keys(file, name, found)
    try:
        found = _with_family_keys(family, found)
        values = {key: _checked_value(key, found.get(key, default), default) for key, default in family.defaults.items()}
        values_of = _model_fields(family, values, found, "dropout" in changes)
    except _Refusal as refusal:
        raise UsageError(f"{file} has {refusal.got}", **{"next_step": _AS_PUBLISHED, **refusal.parts}) from None
    own_name = file.parent.resolve().name if file.stem == "config" else file.stem
    try:
        config = ModelConfig(**{"name": own_name, **values_of, **changes})
    except UsageError as error:
        if any(error.got.startswith(f"{flag_of(name)} ") for name in changes):
            raise
        raise UsageError(
            f"{file} and the flags beside it make no model: {error.got}",
            allowed=error.allowed,
            cause="a key of the file, or a flag that doesn't go with it",
            next_step=error.next_step,
        ) from None
    is_added = bool(config.router_loss) and "router_loss" not in changes and not values.get("output_router_logits", True)
    return HfModel(config, name, file, min(SEQ_LEN, config.max_seq_len), bool(found.get("auto_map")), is_added)


class _Refusal(Exception):
    """A value that the decoder can't take, and the other parts of the error's message."""

    def __init__(self, got: str, **parts: str) -> None:
        self.got, self.parts = got, parts


def _file(path: Path) -> Path:
    """The file that `path` names, or the `config.json` in the folder that it names."""
    file = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(file):  # False too where the path is too long, or leads into a folder of others
        raise UsageError(
            f"--hf {str(path)!r}: there is no {'config.json in this folder' if file != path else 'such file'}",
            allowed="a config.json, or a folder that holds one",
            next_step="give the path of the model's config.json, as in --hf Qwen3-8B/config.json",
        )
    return file


def _json(file: Path) -> dict[str, Any]:
    try:
        found = parse_json(file.read_text())
    except OSError as error:
        raise UsageError(f"--hf {str(file)!r} cannot be read: {error.strerror}", next_step=_AS_PUBLISHED) from None
    except UnicodeDecodeError:
        raise UsageError(f"--hf {str(file)!r} is no JSON: it holds no text", next_step=_AS_PUBLISHED) from None
    except ValueError as error:
        raise UsageError(f"--hf {str(file)!r} is no JSON: {error}", next_step=_AS_PUBLISHED) from None
    if not isinstance(found, dict):
        raise UsageError(f"--hf {str(file)!r} holds JSON, and not an object with keys", next_step=_AS_PUBLISHED)
    return found


def _check_head(file: Path, found: dict[str, Any]) -> None:
    """Raises UsageError for a model whose head isn't that of the next token.

    It may be one of classes or of a reward, or there is none.
    """
    heads = found.get("architectures") or []
    if isinstance(heads, list) and heads and not any(str(one).endswith(("ForCausalLM", "LMHeadModel")) for one in heads):
        raise UsageError(
            f"{file} has architectures {json.dumps(heads)}",
            allowed="a model of the next token, such as LlamaForCausalLM",
            cause="it has another output head, with other parameters and another loss",
            next_step="give the model as code of your own: --model FILE.py:ATTR",
        )


def _check_keys(file: Path, name: str, found: dict[str, Any]) -> None:
    """Raises UsageError for keys that the family doesn't have, and for values of other models.

    Such a value would change what is computed.
    """
    family = FAMILIES[name]
    only = {**ONLY, **family.only}
    read = {*family.defaults, *family.renamed, *(_ROPE_KEYS if family.has_rope else ())}
    if unknown := [key for key in found if key not in read | INERT | family.unread | only.keys()]:
        raise UsageError(
            f"{file} has {'a key' if len(unknown) == 1 else 'keys'} that {name} doesn't know: {', '.join(unknown)}",
            cause="another model_type, or a newer version of the family: a key that isn't known may change what is computed",
            next_step=nearest(unknown[0], read)
            or f"take {'it' if len(unknown) == 1 else 'them'} out of a copy of the file if nothing depends on it",
        )
    for key in found:
        if key not in read and key in only and found[key] not in only[key]:
            raise UsageError(
                f"{file} has {key} {found[key]!r}",
                allowed=f"{' or '.join(map(json.dumps, only[key]))} in a file of {name}",
                cause="the decoder computes no such thing",
                next_step="give the model as code of your own: --model FILE.py:ATTR",
            )


def _with_family_keys(family: Family, found: dict[str, Any]) -> dict[str, Any]:
    """The file with the names of keys that the family's table has."""
    for other, key in family.renamed.items():
        if {other, key} <= found.keys():
            raise _Refusal(f"both {key} and {other}", allowed="one of the two")
    return {family.renamed.get(key, key): value for key, value in found.items()}


def _checked_value(key: str, value: Any, default: Any) -> Any:
    """The value of a key after a check of its type."""
    if value is None and key in _NULLABLE:
        return None
    kind = _NULLABLE.get(key, type(default))
    if type(value) not in ((int, float) if kind is float else (kind,)):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
        raise _Refusal(f"{key} {value!r}", allowed=names[kind] + (" or null" if key in _NULLABLE else ""))
    return float(value) if kind is float and isinstance(value, int) else value


def _model_fields(family: Family, values: dict[str, Any], found: dict[str, Any], own_dropout: bool) -> dict[str, Any]:
    """The fields of `ModelConfig` that a file's `values` give.

    Args:
        family: the family.
        values: by key of the family's table, the file's value or the default.
        found: the file as it is.
        own_dropout: whether the user chose the dropout, so that the file's doesn't count.
    """
    taken = {_FIELDS[key]: value for key, value in values.items() if key in _FIELDS and value is not None}
    taken.setdefault("num_kv_heads", taken["num_heads"])
    taken.setdefault("head_dim", taken["embed_dim"] // max(1, taken["num_heads"]))
    taken.setdefault("mlp_dim", 4 * taken["embed_dim"])
    for key in ("num_local_experts", "num_experts"):
        if values.get(key, 2) < 2:
            raise _Refusal(
                f"{key} {values[key]}", allowed="2 or more", cause="the decoder has a router only where it can choose"
            )
    if values.get("scale_attn_weights") is False:
        taken["query_pre_attn_scalar"] = 1.0
    if values.get("attention_bias"):
        taken |= dict(qkv_bias=True, out_bias=True)
    if values.get("mlp_bias"):
        taken["mlp_bias"] = True
    taken |= {**family.fields, **_activation(family, values), **_windows(family, values, taken["num_layers"])}
    if family.has_rope:
        taken |= _rope(family, values, found, taken)
    return taken | ({} if own_dropout else {"dropout": _dropout(values)})


def _activation(family: Family, values: dict[str, Any]) -> dict[str, Any]:
    key, is_gated = family.activation, family.has_rope
    name = values[key]
    allowed = [known for known, (is_gelu, _) in _ACTIVATIONS.items() if is_gated or is_gelu]
    if name not in allowed:
        raise _Refusal(f"{key} {name!r}", allowed=", ".join(allowed))
    is_gelu, is_exact = _ACTIVATIONS[name]
    mlp = ("geglu" if is_gelu else "swiglu") if is_gated else "gelu"
    return {"mlp": mlp, "exact_gelu": is_exact and not family.gelu_is_tanh}


def _windows(family: Family, values: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The sliding window, and which layers have it."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    kinds = _kinds_of_layers(family, values, num_layers, window)
    if "s" not in kinds:
        return {}
    if window is None or window < 1:
        raise _Refusal(
            f"sliding_window {window!r} and layers with a sliding window",
            allowed="a number of tokens from 1 up",
            cause="layer_types or the family's default gives layers a window",
        )
    period = next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return {"sliding_window": window, "window_pattern": kinds[:period]}


def _kinds_of_layers(family: Family, values: dict[str, Any], num_layers: int, window: int | None) -> str:
    """For each layer s where it has the sliding window, and f where it has full attention."""
    names = {"sliding_attention": "s", "full_attention": "f"}
    if (types := values.get("layer_types")) is not None:
        if len(types) != num_layers or any(kind not in names for kind in types):
            raise _Refusal(f"layer_types {types!r}", allowed=f"{' or '.join(names)} for each of the {num_layers} layers")
        return "".join(names[kind] for kind in types)
    match family.windows:
        case "alternating":
            return "".join("f" if i % 2 else "s" for i in range(num_layers))
        case "last" if window is not None:
            return "".join("s" if i >= values["max_window_layers"] else "f" for i in range(num_layers))
        case "all" if window is not None:
            return "s" * num_layers
        case _:
            return "f" * num_layers


def _rope(family: Family, values: dict[str, Any], found: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    """Rope's base, its share of the features, and its stretching.

    They are read from transformers' old keys, or from those since version 5.
    """
    old, new = found.get("rope_scaling"), found.get("rope_parameters")
    if old and new:
        raise _Refusal("both rope_scaling and rope_parameters", allowed="one of the two")
    key = "rope_scaling" if old else "rope_parameters"
    given = old or new or {}
    if type(given) is not dict:
        raise _Refusal(f"{key} {given!r}", allowed="an object with keys, or null")
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    theta = _checked_value("rope_theta", given.pop("rope_theta", found.get("rope_theta") or family.rope_theta), 0.0)
    fraction = found.get("partial_rotary_factor")
    fraction = _checked_value(
        "partial_rotary_factor", given.pop("partial_rotary_factor", 1.0 if fraction is None else fraction), 0.0
    )
    if fraction != 1 and not family.has_partial_rope:
        raise _Refusal(f"partial_rotary_factor {fraction:g}", allowed="1.0 in this family")
    if family.rope_types == ("longrope",) and kind in ("su", "yarn"):
        kind = "longrope"  # its names in Phi 3's first files
    result = {"rope_theta": theta, "rotary_fraction": fraction}
    if kind == "default" and not given:
        return result
    if kind not in family.rope_types:
        what = (
            f"keys that rope_type default has no use for: {', '.join(given)}" if kind == "default" else f"rope_type {kind!r}"
        )
        raise _Refusal(
            f"a {key} with {what}",
            allowed=f"default, {', '.join(family.rope_types)}, each with its own keys",
            cause="the decoder doesn't stretch rope in this way",
        )
    longest = taken["max_seq_len"]
    first = values.get("original_max_position_embeddings", given.get("original_max_position_embeddings", longest))
    if kind != "linear":
        given["original_max_position_embeddings"] = longest if kind == "dynamic" else first
    if kind == "longrope":
        given.setdefault("factor", longest / first)
    try:
        scaling = msgspec.convert(given | {"rope_type": kind}, RopeScaling)
    except msgspec.ValidationError as error:
        raise _Refusal(f"a {key} that isn't one of rope_type {kind}: {error}") from None
    return result | {"rope_scaling": rope_scaling_text(scaling)}


def _dropout(values: dict[str, Any]) -> float:
    """The rate on embeddings and on both residual branches.

    Attention's own dropout must be 0, as the decoder has none.
    """
    rates = {
        key: values[key] or 0.0 for key in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop") if key in values
    }
    inside = next((key for key in ("attention_dropout", "attn_pdrop") if rates.get(key)), None)
    residual, embedded = rates.get("resid_pdrop", 0.0), rates.get("embd_pdrop", 0.0)
    if inside:
        raise _Refusal(
            f"{inside} {rates[inside]:g}",
            allowed="0",
            cause="the decoder has dropout on embeddings and on both residual branches, and none inside attention",
            next_step=f"--dropout {residual:g} leaves attention's out" if residual else "--dropout 0 trains without",
        )
    if residual != embedded:
        raise _Refusal(
            f"resid_pdrop {residual:g} and embd_pdrop {embedded:g}",
            allowed="one rate for both",
            next_step=f"--dropout {residual:g}, or another rate for both",
        )
    return residual
