"""MaxText's checkpoint names and `remat_policy` presets, and the text of its config.

They are written here and nowhere else.

The decoder of `jaxremat/model` gives its tensors these names, so that MaxText's presets and its users' lists of names work
unchanged. For example, the preset `save_out_proj` is the policy `save:out_proj`, and `save:query_proj` is in MaxText's config:

    remat_policy: custom
    query_proj: device
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxremat.errors import bad_value, both, reject

if TYPE_CHECKING:
    from jaxremat.policy.spec import Policy

DECODER_LAYER_INPUT = "decoder_layer_input"
QUERY_PROJ = "query_proj"
KEY_PROJ = "key_proj"
VALUE_PROJ = "value_proj"
#: Query, key and value out of one matmul. The decoder here has three matmuls and no tensor of this name.
QKV_PROJ = "qkv_proj"
CONTEXT = "context"
OUT_PROJ = "out_proj"
#: Both input projections of a gated MLP out of one matmul. The decoder here has no tensor of this name.
MLPWI = "mlpwi"
MLPWI_0 = "mlpwi_0"
MLPWI_1 = "mlpwi_1"
MLPWO = "mlpwo"

_QKV = (QUERY_PROJ, KEY_PROJ, VALUE_PROJ, QKV_PROJ)
_DOTS = (*_QKV, OUT_PROJ, MLPWI_0, MLPWI_1, MLPWI, MLPWO)

MAXTEXT_NAMES = frozenset({DECODER_LAYER_INPUT, CONTEXT, *_DOTS})


def _save(*names: str) -> str:
    return f"save:{','.join(names)}"


def _offload(*names: str) -> str:
    return f"offload:{','.join(names)}"


#: Each preset with its text in the policy grammar. A preset may list names that a model doesn't have. Those names are
#: dropped, as MaxText drops them (`resolve` in names.py).
MAXTEXT_ALIASES = {
    "full": "nothing",
    "minimal": _save(*_DOTS),
    "minimal_with_context": _save(*_DOTS, CONTEXT),
    "minimal_flash": _save(*_DOTS, CONTEXT),
    "save_dot_with_context_except_mlp": _save(*_QKV, CONTEXT, OUT_PROJ),
    "save_dot_except_mlpwi": _save(*_QKV, OUT_PROJ, MLPWO),
    "save_dot_except_mlp": _save(*_QKV, OUT_PROJ),
    "save_qkv_proj": _save(*_QKV),
    "save_out_proj": _save(OUT_PROJ),
    "qkv_proj_offloaded": _offload(QUERY_PROJ, KEY_PROJ, VALUE_PROJ),
    "minimal_offloaded": _offload(*_DOTS),
}


def config_lines(policy: "Policy", places: Mapping[str, str]) -> tuple[str, ...] | None:
    """The lines of a MaxText config that say a policy, such as `remat_policy: full`.

    None for a policy that it can't say.

    Args:
        policy: any policy.
        places: where the config has each tensor as it is: `remat`, `device` or `offload`. A line puts each tensor elsewhere that
            the policy has elsewhere. `decoder_layer_input` can't be recomputed, and is on the device where the policy is silent.
    """
    (one, *others) = policy.layer_policies
    if str(policy) == "nothing":
        return ("remat_policy: full",)
    if others or one != policy or not one.by_names or one.attention:
        return None
    if one.alias:
        return (f"remat_policy: {one.alias}",)
    wanted = dict.fromkeys(places, "remat") | {DECODER_LAYER_INPUT: "device"}
    said = dict.fromkeys(one.save, "device") | dict.fromkeys(one.offload, "offload")
    if not said.keys() <= wanted.keys():
        return None
    lines = (f"{name}: {place}" for name, place in (wanted | said).items() if name in said or places.get(name) != place)
    return ("remat_policy: custom", *lines)


def config_words(text: str) -> tuple[str, ...]:
    """The words of MaxText's command line.

    They are the path of a YAML file, `configs/base.yml` by default, and `key=value` each.

    Raises:
        UsageError: a word is neither.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise bad_value("--maxtext", repr(text), "words as in a shell", str(error)) from None
    words = words if words and words[0].endswith(".yml") else ["configs/base.yml", *words]
    if wrong := [word for word in words[1:] if not re.match(r"\w+=", word)]:
        raise bad_value("--maxtext", repr(wrong[0]), "the path of a YAML file first, and key=value", "model_name=qwen3-0.6b")
    return tuple(words)


def config_batch(words: Sequence[str]) -> int | None:
    """The batch of a device that the words have, `per_device_batch_size=4`.

    None where they have none.

    Raises:
        UsageError: it isn't a whole number.
    """
    given = [word.partition("=")[2] for word in words if word.startswith("per_device_batch_size=")]
    if given and not re.fullmatch(r"[1-9]\d{0,8}(\.0*)?", given[-1]):
        raise bad_value(
            "--maxtext", f"per_device_batch_size={given[-1]}", "a whole number from 1 up", "per_device_batch_size=1"
        )
    return int(given[-1].partition(".")[0]) if given else None


def workload_words(text: str, seq_len: int | None = None) -> tuple[str, ...]:
    """The words of a workload, whose batch is an argument of its own.

    `seq_len` becomes `max_target_length`.

    Raises:
        UsageError: the text isn't valid, or it has a batch, or a length beside `seq_len`.
    """
    words = config_words(text)
    batch, length = config_batch(words), next((word for word in words if word.startswith("max_target_length=")), "")
    reject(
        (batch, f"the text of a workload has per_device_batch_size={batch}", f"leave it out, and give --batch {batch}",
         "the batch of a workload is an argument of its own"),
        (seq_len and length, both(length, f"sequences of {seq_len} tokens"), "leave it out beside --seq-len or --lengths"),
    )  # fmt: skip
    return words if seq_len is None else (*words, f"max_target_length={seq_len}")
