"""MaxText's checkpoint names and `remat_policy` presets, written here and nowhere else.

The decoder of `jaxremat/model` gives its tensors these names, so that MaxText's presets and its users' lists of names work
unchanged. For example, the preset `save_out_proj` is the policy `save:out_proj`.
"""

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
