"""Weights in safetensors, as transformers saves them, as the decoder's parameter tree.

Nothing is unpickled.

    config = hf_config("Qwen3-8B")
    params = load_safetensors("Qwen3-8B", config)      # {"embedding": ..., "layers": ..., ...}, arrays of numpy
    Decoder(config).apply({"params": params}, tokens)

A linear layer's tensor is `[out, in]`, but for GPT-2, whose tensors are `[in, out]` as the decoder's kernels are. GPT-2 and Phi 3
have tensors that hold the kernels of several projections one after the other. Each expert has tensors of its own, as published
and as `save_pretrained` writes them, or all experts of a layer share two, as with its `save_original_format=False`.

References:
    transformers/models/*/modeling_*.py, version 5.24, for the tensors' names; safetensors' README.md for the format.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxremat.config import ModelConfig
from jaxremat.errors import MissingDependencyError, UsageError
from jaxremat.model.linear import with_adapters
from jaxremat.model.transformer import param_shapes
from jaxremat.system.files import parse_json

_INDEX = "model.safetensors.index.json"
#: Ends of the names of tensors that older files have and that aren't parameters: causal masks, and rope's frequencies.
_NO_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
#: The most names that an error lists.
_SHOWN = 6


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a file.

    Attributes:
        name: its name there.
        shape: its shape.
        dtype: its type, as safetensors calls it, such as `BF16`.
        read: reads it as an array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class _Source:
    """Where a parameter of one layer or of one expert comes from, or one outside the layers.

    Attributes:
        tensor: the tensor's name, without the prefix of the model.
        shape: the shape that the tensor must have.
        part: the shape of the parameter.
        is_turned: whether the tensor is `[..., out, in]`, and the parameter `[..., in, out]`.
        start: the first of the output features that are the parameter's.
        stop: the feature after the last of them. None where all are the parameter's.
    """

    tensor: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    is_turned: bool = False
    start: int = 0
    stop: int | None = None

    def read(self, tensors: dict[str, _Tensor]) -> np.ndarray:
        """The parameter, of shape `part`."""
        tensor = tensors[self.tensor].read()
        return (tensor.swapaxes(-1, -2) if self.is_turned else tensor)[..., self.start : self.stop].reshape(self.part)


def load_safetensors(path: str | Path, config: ModelConfig, key: jax.Array | None = None) -> Any:
    """The decoder's parameter tree, with the weights that transformers saved.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors`, or with several files and their
            `model.safetensors.index.json`.
        config: the model, as `hf_config` reads it. With `scan_layers` the layers are stacked, and otherwise unrolled.
        key: the random key of the first values of adapters. None is `jax.random.key(0)`.

    Returns:
        The tree that `Decoder(config).init` has under `params`: numpy arrays in `config.param_dtype`. The host needs the bytes of
        the tree, and of one tensor more. With `config.lora` they are those of the base, beside adapters with their first values,
        and with `config.quantize_base` the kernels are quantized.

    Raises:
        UsageError: there is no such file, a tensor is missing, is left over or is there twice, or its shape isn't the model's or
            its type no float type.
        MissingDependencyError: the package safetensors isn't installed.
    """
    if config.lora:
        return with_adapters(config, load_safetensors(path, replace(config, lora="", quantize_base="none")), key)
    with contextlib.ExitStack() as stack:
        tensors = _by_name(str(path), (tensor for file in _files(Path(path)) for tensor in _tensors(file, stack)))
        leaves, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config))
        names = [tuple(key.key for key in keys) for keys, _ in leaves]
        places = _places(config, tensors)
        sources = [[*_sources(config, places, name, leaf.shape)] for name, (_, leaf) in zip(names, leaves, strict=True)]
        _check_tensors(str(path), config, tensors, [source for of_leaf in sources for source in of_leaf])
        arrays = [_array(leaf, of_leaf, tensors) for (_, leaf), of_leaf in zip(leaves, sources, strict=True)]
    return jax.tree.unflatten(tree, arrays)


def _by_name(path: str, found: Iterable[_Tensor]) -> dict[str, _Tensor]:
    """The tensors by their names without the model's prefix.

    Raises:
        UsageError: two have one name.
    """
    tensors = dict[str, _Tensor]()
    for tensor in found:
        name = tensor.name.removeprefix("model.").removeprefix("transformer.")  # files without the head have neither
        if name in tensors:
            raise UsageError(
                f"{path} has {name} twice, as {tensors[name].name} and as {tensor.name}",
                cause="files of two models in one folder, or a file that was put together by hand",
                next_step="save the model again",
            )
        tensors[name] = tensor
    return tensors


def _array(leaf: Any, sources: list[_Source], tensors: dict[str, _Tensor]) -> np.ndarray:
    """The values of one leaf of the tree, stacked of its sources."""
    array = np.empty(leaf.shape, leaf.dtype)
    for part, source in zip(array.reshape(len(sources), *sources[0].part), sources, strict=True):
        part[...] = source.read(tensors)
    return array


def _sources(
    config: ModelConfig, places: dict[str, str], name: tuple[str, ...], shape: tuple[int, ...]
) -> Iterator[_Source]:
    """The sources of one leaf of the tree: one, one a layer, or one for each expert of a layer.

    Args:
        config: the model.
        places: by the path of a module in a layer, the name of its tensors.
        name: the leaf's path, such as `("layers", "mlp", "wo", "kernel")`.
        shape: the leaf's shape.
    """
    is_gpt2 = config.positions == "learned"
    if name[0] != "layers":
        outside = _GPT2_OUTSIDE if is_gpt2 else _OUTSIDE
        is_output = name == ("output",)
        tensor = f"{outside[name[0]]}.{_ENDINGS.get(name[-1], 'weight')}"
        yield _Source(tensor, shape[::-1] if is_output else shape, shape, is_output)
        return
    if config.scan_layers:
        numbers, name, shape = range(config.num_layers), name[1:], shape[1:]
    else:
        numbers, name = (int(name[1].removeprefix("layer_")),), name[2:]
    if name[-1] in _ENDINGS:
        module, kind, experts = name[:-1], name[-1], ()
    else:  # the kernels of all experts, which aren't in modules of their own
        module, kind, experts, shape = name, "kernel", shape[:1], shape[1:]
    place = places["/".join(module)]
    sizes = _tensor_bytes(config, place)
    num_in = {"kernel": 2 if module[-1] == "out" else 1}.get(kind, 0)
    size_in, size_out = (int(np.prod(part)) for part in (shape[:num_in], shape[num_in:]))
    total = (*([size_in] if num_in else []), sum(size for size, _ in sizes) or size_out)
    start = 0
    for size, part in sizes:
        if part == module[-1]:
            break
        start += size
    stop = start + size_out if sizes else None
    is_turned = bool(num_in) and not is_gpt2
    total, ending = total[::-1] if is_turned else total, f".{_ENDINGS[kind]}"
    if experts and "*" not in place:  # one tensor for all experts, a parameter and no module in transformers
        total, shape, experts, ending = experts + total, experts + shape, (), ""
    for number in numbers:
        tensor = f"{'h' if is_gpt2 else 'layers'}.{number}.{place}{ending}"
        for expert in range(experts[0]) if experts else (0,):
            yield _Source(tensor.replace("*", str(expert)), total, shape, is_turned, start, stop)


_ENDINGS = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_OUTSIDE = {"embedding": "embed_tokens", "final_norm": "norm", "output": "lm_head"}
_GPT2_OUTSIDE = {"embedding": "wte", "position": "wpe", "final_norm": "ln_f", "output": "lm_head"}
#: By the path of a module in a layer, the name of its tensors.
_GPT2 = {
    **dict.fromkeys([f"attention/{name}" for name in ("query", "key", "value")], "attn.c_attn"),
    "attention/out": "attn.c_proj",
    "mlp/wi_0": "mlp.c_fc",
    "mlp/wo": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}
_LLAMA = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
    "mlp/wi_0": "mlp.gate_proj",
    "mlp/wi_1": "mlp.up_proj",
    "mlp/wo": "mlp.down_proj",
}
#: What experts have in place of an MLP. The star stands for the expert's number.
_EXPERTS = {
    "mlp/router": "mlp.gate",
    "mlp/wi_0": "mlp.experts.*.gate_proj",
    "mlp/wi_1": "mlp.experts.*.up_proj",
    "mlp/wo": "mlp.experts.*.down_proj",
}
#: The same in Mixtral's files.
_MIXTRAL = {
    "mlp/router": "block_sparse_moe.gate",
    "mlp/wi_0": "block_sparse_moe.experts.*.w1",
    "mlp/wi_1": "block_sparse_moe.experts.*.w3",
    "mlp/wo": "block_sparse_moe.experts.*.w2",
}
#: Tensors that hold all experts of a layer.
_ALL_EXPERTS = {
    **dict.fromkeys(["mlp/wi_0", "mlp/wi_1"], "mlp.experts.gate_up_proj"),
    "mlp/wo": "mlp.experts.down_proj",
}
#: Tensors that hold several projections.
_FUSED = {
    **dict.fromkeys([f"attention/{name}" for name in ("query", "key", "value")], "self_attn.qkv_proj"),
    **dict.fromkeys(["mlp/wi_0", "mlp/wi_1"], "mlp.gate_up_proj"),
}
#: By the placement of norms, the names of their tensors.
_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def _places(config: ModelConfig, tensors: Iterable[str]) -> dict[str, str]:
    """By the path of a module in a layer, the name of its tensors in a file."""
    if config.positions == "learned":
        return _GPT2
    names = _LLAMA | _NORMS[config.norm_placement]
    if config.has_experts:
        names |= _EXPERTS
        others = {".block_sparse_moe.": _MIXTRAL, ".experts.gate_up_proj": _ALL_EXPERTS}
    else:
        others = {".qkv_proj.": _FUSED}
    for part, other in others.items():
        if any(part in tensor for tensor in tensors):
            names |= other
    return names


def _tensor_bytes(config: ModelConfig, place: str) -> list[tuple[int, str]]:
    """The sizes and names of the projections that the tensor `place` holds.

    Empty where it holds one projection.
    """
    c = config
    if place in ("attn.c_attn", "self_attn.qkv_proj"):
        keys = c.num_kv_heads * c.head_dim
        return [(c.num_heads * c.head_dim, "query"), (keys, "key"), (keys, "value")]
    if place.endswith("gate_up_proj"):
        return [(c.mlp_dim, "wi_0"), (c.mlp_dim, "wi_1")]
    return []


def _check_tensors(path: str, config: ModelConfig, tensors: dict[str, _Tensor], sources: list[_Source]) -> None:
    """Raises UsageError unless the file has just the model's tensors, in its shapes."""
    needed = {source.tensor: source for source in sources}
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = [name for name in needed if name not in tensors]
    extra = [
        tensor.name
        for name, tensor in tensors.items()
        if name not in needed and name not in tied and not name.endswith(_NO_PARAMETERS)
    ]
    if missing or extra:
        lacks = [f"lacks {_some(missing)}"] if missing else []
        has = [f"has {_some(extra)}, which the model hasn't"] if extra else []
        raise UsageError(
            f"{path} {' and '.join(lacks + has)}",
            cause=f"the weights aren't those of {config.name}, or its config isn't the one beside them",
            next_step="read the config.json of the same folder",
        )
    if quantized := [tensor for name in needed if "F" not in (tensor := tensors[name]).dtype]:
        raise UsageError(
            f"{path} has {quantized[0].name} of type {quantized[0].dtype}",
            allowed="weights of a float type, such as F32 and BF16",
            cause="the weights are quantized, and their scales aren't read here",
            next_step="get the weights that aren't quantized",
        )
    wrong = [name for name, source in needed.items() if tensors[name].shape != source.shape]
    if wrong:
        tensor = tensors[wrong[0]]
        raise UsageError(
            f"{path} has {tensor.name} of shape {tensor.shape}, and {config.name} takes {needed[wrong[0]].shape}",
            cause=f"{len(wrong)} of {len(needed)} tensors have other shapes: the config has other sizes",
            next_step="read the config.json of the same folder",
        )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _files(path: Path) -> list[Path]:
    """The safetensors files that `path` names."""
    if path.is_file() and path.name != _INDEX:
        return [path]
    folder = path.parent if path.name == _INDEX else path
    if (folder / _INDEX).is_file():
        try:
            names = {*parse_json((folder / _INDEX).read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise UsageError(
                f"{str(folder / _INDEX)!r} is no index of safetensors files", next_step="save the model again"
            ) from None
        files = [folder / str(name) for name in sorted(names, key=str)]
    else:
        files = [folder / "model.safetensors"]
    if absent := [file for file in files if not file.is_file()]:
        raise UsageError(
            f"there is no file {str(absent[0])!r}",
            allowed=f"a .safetensors file, or a folder with model.safetensors or {_INDEX} and its files",
            cause="other formats of weights can run code when they are read, and aren't read here"
            if [*folder.glob("*.bin")]
            else "",
            next_step="model.save_pretrained(folder) of transformers writes such a folder",
        )
    return files


def _tensors(file: Path, stack: contextlib.ExitStack) -> Iterator[_Tensor]:
    """The tensors of one file, which stays open as long as `stack` is."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingDependencyError(
            "weights are read by the package safetensors",
            cause="the hf extra isn't installed",
            next_step='pip install "jaxremat[hf]"',
        ) from None
    try:
        opened = stack.enter_context(safe_open(file, framework="numpy"))
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{str(file)!r} is no safetensors file: {error}", cause="it was cut short", next_step="get it again"
        ) from None
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        yield _Tensor(name, tuple(part.get_shape()), part.get_dtype(), lambda name=name: opened.get_tensor(name))
