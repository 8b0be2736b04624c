"""The decoder as a workload: its loss, its parameters' shapes, and text as its batches.

workload = decoder_workload(preset("gpt2").config, TrainConfig(), batch=8, implementation="xla")
workload.loss_with(parse("dots"))      # loss(params, tokens, key) with the layers under dots
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from jaxremat.config import ChunkedLoss, FullLoss, ModelConfig, TrainConfig, check, parse_loss
from jaxremat.config.lora import LINEAR_LAYERS, parse_lora
from jaxremat.errors import UnknownNameError
from jaxremat.mesh.sharding import AnyMesh, tracing_on
from jaxremat.model.data import batches, load_text, split_text, spread_tokens, text_hash
from jaxremat.model.experts import router_loss
from jaxremat.model.flops import model_flops
from jaxremat.model.gathers import GATHERED_NAMES, check_gathered
from jaxremat.model.loss import chunked_cross_entropy, cross_entropy, default_positions
from jaxremat.model.param_axes import logical_axes
from jaxremat.model.sample import sample_text
from jaxremat.model.transformer import (
    Block,
    Decoder,
    every_layer_name,
    head_kernel,
    head_logits,
    layer_args,
    layer_names,
    param_shapes,
)
from jaxremat.model.weights import load_safetensors
from jaxremat.policy.autoname import autoname
from jaxremat.policy.found import FoundLayers, Kind
from jaxremat.policy.linen import module_layer
from jaxremat.policy.names import NamedValue, resolve
from jaxremat.policy.spec import NONE, Policy
from jaxremat.workload.factory import WorkloadFactory
from jaxremat.workload.own_layers import OwnLayers
from jaxremat.workload.samples import LeafSamples, Samples
from jaxremat.workload.workload import Measured, Workload


def make_loss(model: ModelConfig, policy: Policy, implementation: str, loss: str = "full") -> Any:
    """The function `loss(params, tokens, key)`: mean next-token cross-entropy of `tokens`.

    The tokens are `int32[batch, seq_len + 1]`.

    With experts, `router_loss` times their load-balancing loss is added.

    Args:
        model: the model.
        policy: what its layers save for the backward pass.
        implementation: `xla`, or the name of the chip's fused attention.
        loss: `full`, `chunked` or `chunked:N`. All have the same value and gradients.
    """
    decoder = Decoder(model, policy, implementation, deterministic=model.dropout == 0)
    kind = parse_loss(loss)

    def mean_loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        chex.assert_rank(tokens, 2)
        chex.assert_type(tokens, jnp.int32)
        rngs = {"dropout": key} if model.dropout else {}
        sown: Any
        hidden_BTD, sown = decoder.apply({"params": params}, tokens[:, :-1], rngs=rngs, method="hidden", mutable=["router"])
        loss = next_token_loss(params, hidden_BTD, tokens[:, 1:])
        if not (model.has_experts and model.router_loss):
            return loss
        return loss + model.router_loss * router_loss(model, sown["router"]["use"][0])

    def next_token_loss(params: Any, hidden_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        kernel = head_kernel(model, params)
        logits = functools.partial(head_logits, model)
        match kind:
            case FullLoss():
                return cross_entropy(logits(kernel, hidden_BTD), targets_BT)
            case ChunkedLoss(positions):
                if positions is None:
                    positions = default_positions(
                        batch=targets_BT.shape[0],
                        seq_len=targets_BT.shape[1],
                        vocab_size=model.vocab_size,
                        logit_bytes=hidden_BTD.dtype.itemsize,
                        free_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["layers"])),
                    )
                return chunked_cross_entropy(logits, kernel, hidden_BTD, targets_BT, positions)

    return mean_loss


def decoder_workload(
    model: ModelConfig, train: TrainConfig, batch: int, implementation: str, data: str | None = None, *, reason: str = ""
) -> Workload:
    """The training of the decoder on text, at `batch` sequences per microbatch.

    Measured steps are run with random tokens that are as frequent as those of real text, unless `data` is given.

    Args:
        model: the model.
        train: the sequence length and the loss, and the seed of the batches.
        batch: sequences in a microbatch.
        implementation: `xla`, or the name of the chip's fused attention.
        data: path of the text to train on. None takes the default text.
        reason: why it is this attention, in words.

    Raises:
        UsageError: the model and the training don't go together (`config.check`).
    """
    check(model, train)

    def init(key: jax.Array) -> Any:
        return Decoder(model, implementation="xla").init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def loss_under(policy: Policy) -> Any:
        return make_loss(model, policy, implementation, train.loss)

    without_extras = make_loss(replace(model, dropout=0.0, router_loss=0.0), NONE, implementation, train.loss)

    def train_text(first: int = 0) -> Iterator[Any]:
        return batches(split_text(load_text(data), train.seq_len)[0], batch, train.seq_len, train.seed, first)

    def eval_text() -> Iterator[Any]:
        text = split_text(load_text(data), train.seq_len)[1]
        return iter(()) if text is None else batches(text, batch, train.seq_len, seed=0)

    def measured_tokens(first: int = 0) -> Iterator[Any]:
        return spread_tokens(model.vocab_size, batch, train.seq_len, train.seed, first)

    said = f"random tokens, as frequent as in real text, of {model.vocab_size:,}"

    def otherwise() -> tuple[Workload, str]:
        return decoder_workload(model, train, batch, "xla", data), "--attention xla"

    return Workload(
        loss=loss_under(NONE),
        loss_under=loss_under,
        params=_params(model),
        batch=jax.ShapeDtypeStruct((batch, train.seq_len + 1), jnp.int32),
        init=init,
        batches=train_text,
        eval_loss=lambda params, tokens: without_extras(params, tokens, jax.random.key(0)),
        eval_batches=eval_text,
        measured=None if data else Measured(measured_tokens, said),
        model_flops=model_flops(model, batch, train.seq_len),
        num_tokens=batch * train.seq_len,
        name=model.name,
        matrix_axes=matrix_axes,
        logical_axes=logical_axes,
        joined_microbatches=True,
        samples=Samples(batch, (LeafSamples(0),)),
        own_layers=_own_layers(model, batch, train.seq_len, implementation),
        compute_dtype=model.dtype,
        trainable="lora_*" if model.lora else None,
        frozen_dtype=model.dtype,
        attention=implementation,
        notes=(f"attention {implementation}: {reason}", *_lora_notes(model)),
        data_hash=lambda: text_hash(load_text(data)),
        write_text=lambda params, num_tokens: sample_text(model, params, train.seq_len, num_tokens),
        read_weights=lambda path, key: load_safetensors(path, model, key),
        otherwise=otherwise if implementation != "xla" else None,
    )


def _lora_notes(model: ModelConfig) -> Iterator[str]:
    """What a person should know of the adapters of a model, and of what is frozen beside them."""
    lora = parse_lora(model.lora)
    if lora is None:
        return
    layers = ", ".join(lora.layers) if len(lora.layers) < len(LINEAR_LAYERS) else "all linear layers"
    base = model.dtype if model.quantize_base == "none" else f"{model.quantize_base}, and what isn't linear in {model.dtype}"
    yield f"lora      rank {lora.rank} in {layers}; alpha {model.lora_alpha:g}; frozen kernels in {base}"
    if model.has_experts:
        yield f"          experts have no adapters, and their frozen kernels are in {model.dtype}"


#: The shapes of the parameters, which take a while to trace.
_params = functools.lru_cache(maxsize=16)(param_shapes)


def decoder_factory(model: ModelConfig, implementation: str, reason: str = "", data: str | None = None) -> WorkloadFactory:
    """Makes the decoder's workload at any batch, length and loss, and in either layout.

    Args:
        model: the model.
        implementation: `xla`, or the name of the chip's fused attention.
        reason: why it is this attention, in words.
        data: path of the text to train on. None takes the default text.
    """
    shortest = {"seq_len": min(2, model.max_seq_len), "loss": "full", "seed": 0}
    options = shortest | {name: getattr(model, name) for name in ("num_layers", "scan_layers")}
    make = _maker(model, implementation, reason, data)
    return WorkloadFactory(model.name, make, True, default_batch=1, options=options, requested=asdict(model))


@functools.lru_cache(maxsize=64)
def _maker(model: ModelConfig, implementation: str, reason: str, data: str | None) -> Callable[..., Workload]:
    """The function that makes the decoder's workloads. Factories with equal ones are equal."""

    @functools.lru_cache(maxsize=64)
    def make(batch: int | None, *, seq_len: int, loss: str, seed: int, **layers: int | bool) -> Workload:
        train = TrainConfig(seq_len=seq_len, loss=loss, seed=seed)
        return decoder_workload(replace(model, **layers), train, batch or 1, implementation, data, reason=reason)

    return make


def _own_layers(model: ModelConfig, batch: int, seq_len: int, implementation: str) -> OwnLayers:
    """The decoder's layers at a batch. On a mesh they gather their kernels, each under a name."""

    def names(mesh: AnyMesh | None) -> list[NamedValue]:
        with tracing_on(mesh):
            return layer_names(model, batch, seq_len)

    def checked(policy: Policy, mesh: AnyMesh | None) -> Policy:
        if not policy.names():
            return policy
        with tracing_on(mesh):
            authors = {value.name for value in layer_names(model, 1, seq_len)}
            check_gathered(policy, authors)
            with contextlib.suppress(UnknownNameError):
                return resolve(policy, authors)
            every = {value.name for value in every_layer_name(model, 1, seq_len, implementation)}
            return resolve(policy, authors | every, authors)

    def found(mesh: AnyMesh | None) -> FoundLayers:
        layer = autoname(Block)(model, implementation, model.dropout == 0, GATHERED_NAMES)
        x, *own = layer_args(model, batch, seq_len)
        of_layer, args = module_layer(layer, x, *own)

        def function(*args: Any) -> Any:
            with tracing_on(mesh):
                return of_layer(*args)

        found_by, in_scan = "scan" if model.scan_layers else "scope", model.scan_layers
        x_BTD, *_ = jax.tree.leaves(x)
        cut_bytes = x_BTD.size * x_BTD.dtype.itemsize
        return FoundLayers((Kind("the decoder's layers", found_by, model.num_layers, in_scan, cut_bytes, function, args),))

    return OwnLayers(model.num_layers, found, names, checked)


def matrix_axes(path: tuple[Any, ...], shape: tuple[int, ...]) -> MuonDimensionNumbers | None:
    """The axes of a kernel that its matmul sums over, and the axes that the matmul's result has.

    None for parameters that aren't kernels of a decoder layer: embeddings, the output head, norms and biases. The leading
    axes of a stack are in neither group of axes, so that each layer, and each expert in it, is a matrix of its own.

    For example, the query kernel of stacked layers has the shape [layers, embed_dim, heads, head_dim]. Its matmul sums over
    axis 1, and the result has the axes 2 and 3.

    Args:
        path: the parameter's path, as `jax.tree_util.tree_map_with_path` gives it.
        shape: the parameter's shape, stacked or not.
    """
    keys = [getattr(key, "key", str(key)) for key in path]
    of_experts = keys[-1] in ("wi_0", "wi_1", "wo")
    if keys[0] != "layers" or not (keys[-1] == "kernel" or of_experts):
        return None
    projection = keys[-1] if of_experts else keys[-2]
    num_in = 2 if projection == "out" else 1  # attention's output sums over heads and head_dim
    num_out = 2 if projection in ("query", "key", "value") else 1
    first = len(shape) - num_in - num_out
    return MuonDimensionNumbers(tuple(range(first, first + num_in)), tuple(range(first + num_in, len(shape))))
