"""MaxText's own config, model, optimizer and loss as a workload.

    jaxremat run --maxtext "configs/base.yml model_name=qwen3-0.6b max_target_length=512" --target t4 --policy own minimal auto

MaxText must be importable. A policy that its config can say is compiled by that config, and every operation is MaxText's own.
The step around the loss is made here, as https://github.com/AI-Hypercomputer/maxtext has it in `trainers/pre_train/train.py`.
"""

import functools
import importlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from jaxremat.errors import MissingDependencyError, UsageError, bad_value, nearest
from jaxremat.policy.maxtext import config_lines, workload_words
from jaxremat.policy.with_policy import with_policy
from jaxremat.workload.workload import Workload

#: With these, a compile needs no cloud and no data. The text may say otherwise.
_DEFAULTS = ("run_name=jaxremat", "dataset_type=synthetic", "enable_checkpointing=false", "log_config=false")
#: Switches of a step that is made otherwise than here.
_REJECTED = ("enable_diloco", "compile_xla_flags")
#: Switches with which the train step is more than a loss and an optimizer. It is then compiled as a whole.
_WHOLE_STEP = (
    *("optimizer_memory_host_offload", "parameter_memory_host_offload", "shard_optimizer_over_data"),
    *("weight_sparsity_n", "use_qk_clip", "skip_step_on_spikes", "routed_bias_update_rate"),
)


def workload(text: str = "", batch: int = 1, devices: Sequence[Any] | None = None, seq_len: int | None = None) -> Workload:
    """The training of a MaxText config.

    Args:
        text: what MaxText's trainer takes on its command line, but for the batch.
        batch: `per_device_batch_size`.
        devices: the devices, over which MaxText makes its mesh. None takes the first one of this machine.
        seq_len: `max_target_length`. None leaves the config's.

    Raises:
        MissingDependencyError: MaxText can't be imported.
        UsageError: MaxText rejects the config, or the text has a batch, or a length beside `seq_len`.
    """
    words = workload_words(text, seq_len)
    devices = tuple(devices or jax.devices()[:1])
    config, (mesh, state, places) = _config(words, batch, devices), _state(words, devices)
    if rejected := next((name for name in _REJECTED if getattr(config, name, None)), None):
        raise UsageError(
            f"MaxText's {rejected} is {getattr(config, rejected)!r}",
            allowed="a step whose optimizer is MaxText's own, and flags of XLA by XLA_FLAGS or --xla-preset",
            cause="MaxText's ahead-of-time compile makes another step of it, which isn't made here",
            next_step=f"leave {rejected} out",
        )
    num_tokens = config.global_batch_size_to_train_on * config.max_target_length
    about: Any = {"name": f"MaxText {config.model_name}", "mesh": mesh, "num_tokens": num_tokens}
    params = state.params if hasattr(state, "params") else state.model
    is_fp8 = "_overwrite_with_gradient" in params  # their gradients are their next values
    if is_fp8 or config.gradient_accumulation_steps > 1 or any(getattr(config, name, None) for name in _WHOLE_STEP):
        step, args = train_step(config, mesh)
        return Workload(**about, step=step, args=args, donate_argnums=0)
    of_data = _trainer().sharding.get_input_data_sharding(config, mesh)
    shapes = _trainer().maxtext_utils.get_shaped_batch(config)
    own = _loss(config, mesh)

    def loss_under(policy: Any) -> Any:
        if (lines := config_lines(policy, places)) is None:
            return with_policy(own, policy)
        return _loss(_config((*words, *(line.replace(": ", "=") for line in lines)), batch, devices), mesh)

    return Workload(
        **about,
        loss=own,
        params=params,
        batch={name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of_data) for name, leaf in shapes.items()},
        optimizer=_optimizer(config, mesh),
        loss_under=loss_under,
        as_config=lambda policy: (lines := config_lines(policy, places)) and (f"per_device_batch_size: {batch}", *lines),
    )


def train_step(config: Any, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """MaxText's train step as its trainer jits it, and the shapes of its arguments."""
    trainer, rules = _trainer(), linen.logical_axis_rules(config.logical_axis_rules)
    args, _, shardings, _, model = trainer.get_shaped_inputs(mesh, config)
    of_params, shardings = trainer.sharding.maybe_update_params_sharding_with_opt(config, shardings)
    of_data, utils = trainer.sharding.get_input_data_sharding(config, mesh), trainer.maxtext_utils
    step, ins, outs, _, donated = utils.get_functional_train_with_signature(
        trainer.train.train_step, of_data, shardings, model, config, of_params
    )
    return jax.jit(rules(step), in_shardings=ins, out_shardings=outs, donate_argnums=donated), args


def _loss(config: Any, mesh: Any) -> Any:
    """The loss of MaxText's trainer, with its checkpoints as the config has them."""
    model, loss_fn, rules = _model(config, mesh), _trainer().train.loss_fn, config.logical_axis_rules

    def loss(params: Any, data: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        key = jax.random.wrap_key_data(jax.random.bits(key, (4,), "uint32"), impl="unsafe_rbg")  # as the trainer's keys
        with linen.logical_axis_rules(rules):
            is_nnx = isinstance(model, nnx.GraphDef)
            given = (nnx.merge(model, params, copy=True), None, None) if is_nnx else (model, key, params)
            value, aux = loss_fn(given[0], config, dict(data), *given[1:])
        return value, {name: one for name, one in aux.items() if isinstance(one, jax.Array) and one.ndim == 0}

    return loss


def _model(config: Any, mesh: Any) -> Any:
    """The model: a module of Flax Linen, or the graph of one of NNX."""
    if not getattr(config, "pure_nnx", True):
        quant = _trainer().quantizations.configure_quantization(config)
        return _trainer().Transformer(config, mesh, quant=quant, model_mode=_trainer().MODEL_MODE_TRAIN)
    return nnx.split(_trainer().model_creation_utils.create_nnx_abstract_model(config, mesh)[1])[0]


def _optimizer(config: Any, mesh: Any) -> Any:
    """MaxText's optimizer, what its train step does to gradients, and the norms it reports."""
    utils, norm, threshold = _trainer().maxtext_utils, _trainer().max_utils.l2norm_pytree, config.gradient_clipping_threshold
    model = _model(config, mesh) if config.opt_type == "muon" else None
    tx = _trainer().optimizers.get_optimizer(config, utils.create_learning_rate_schedule(config), model)
    clip: Any = optax.clip_by_global_norm(threshold) if threshold > 0 else optax.identity()

    def update(raw: Any, state: Any, params: Any = None) -> Any:
        raw = jax.tree.map(lambda leaf: leaf.astype(config.grad_dtype) if leaf.dtype == jnp.float32 else leaf, raw)
        grads, _ = clip.update(raw, clip.init(params))
        updates, inner = tx.update(grads, state[0], params)
        norms = [norm(tree) for tree in (grads, raw, optax.apply_updates(params, updates))]
        return updates, (inner, jnp.stack(norms).astype(jnp.float32))

    return optax.GradientTransformation(lambda params: (tx.init(params), jnp.zeros(3)), update)  # pyright: ignore


class _OnNode:
    """A device whose `slice_index` is its node, the process of a GPU that isn't here."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.slice_index = getattr(device, "slice_index", 0) or (device.process_index if jax.process_count() == 1 else 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


@functools.lru_cache(maxsize=4)
def _state(words: tuple[str, ...], devices: tuple[Any, ...]) -> tuple[Any, Any, dict[str, str]]:
    """What no batch changes: the mesh, the training state's shapes, the tensors of `custom`."""
    config = _config(words, 1, devices)
    laid = _trainer().maxtext_utils.create_device_mesh(config, [*map(_OnNode, devices)])
    kinds = (getattr(jax.sharding.AxisType, config.shard_mode.value.capitalize()),) * laid.ndim
    mesh = jax.sharding.Mesh(np.vectorize(lambda one: one.device)(laid), config.mesh_axes, axis_types=kinds)
    texts = {name: getattr(value, "value", value) for name, value in config.get_keys().items()}
    places = {name: text for name, text in texts.items() if isinstance(text, str) and text in ("remat", "device", "offload")}
    custom = _config((*words, "remat_policy=custom", *(f"{name}=device" for name in places)), 1, devices)
    return mesh, _trainer().get_shaped_inputs(mesh, config)[0][0], {name: places[name] for name in custom.tensors_on_device}


@functools.lru_cache(maxsize=64)
def _config(words: tuple[str, ...], batch: int, devices: tuple[Any, ...]) -> Any:
    """The config of a text."""
    (path, *given), pyconfig = words, _trainer().pyconfig
    folder = os.path.dirname(os.path.dirname(pyconfig.__file__))
    if not (file := next(filter(os.path.isfile, (path, f"{folder}/{path}", f"{folder}/configs/{path}")), "")):
        raise bad_value("--maxtext", path, f"a YAML file, also one of {folder}", "configs/base.yml")
    keys = pyconfig.types.MaxTextConfig.model_fields
    if unknown := [key for word in given if (key := word.partition("=")[0]) not in keys]:
        raise bad_value("--maxtext", unknown[0], f"the keys of {file}", nearest(unknown[0], keys) or "leave it out")
    platform, nodes = devices[0].platform, {_OnNode(device).slice_index for device in devices}
    own = (f"hardware={platform if platform in ('cpu', 'tpu') else 'gpu'}", f"base_output_directory={tempfile.gettempdir()}")
    job = (f"per_device_batch_size={batch}", "skip_jax_distributed_system=true", "internal_compile=true")
    job += (f"internal_compile_num_devices={len(devices)}", f"compile_topology_num_slices={len(nodes)}")
    before, environment = logging.root.manager.disable, dict(os.environ)
    logging.disable(logging.CRITICAL)  # MaxText logs what it raises, and its warnings come once for each batch
    try:
        return pyconfig.initialize(["", file, *_DEFAULTS, *own, *given, *job])
    except (Exception, SystemExit) as error:
        raise _rejected(error.__context__ if isinstance(error, SystemExit) else error) from None
    finally:
        logging.disable(before)
        os.environ.clear()  # MaxText adds flags of XLA to it, for a job
        os.environ |= environment


def _rejected(error: Any) -> UsageError:
    """The error of a config, without long lists of allowed values."""
    said, near = " ".join(str(error).split())[:400], ""
    for one in error.errors()[:1] if hasattr(error, "errors") else ():  # pydantic's
        said = f"{'.'.join(map(str, one['loc']))} is {one['input']!r}"[:200] + f": {one['msg']}"[:200]
        near = nearest(str(one["input"]), re.findall(r"'([^']+)'", one["msg"]))
    return UsageError(f"MaxText rejects --maxtext: {said}", next_step=near or "its configs/base.yml has the keys")


@functools.cache
def _trainer() -> ModuleType:
    """MaxText's module that compiles without a device."""
    try:
        return importlib.import_module("maxtext.trainers.pre_train.train_compile")
    except ImportError as error:
        line = "pip install maxtext, or put the folder src of a checkout on PYTHONPATH and install what it needs"
        raise MissingDependencyError(f"--maxtext needs MaxText: {error}", next_step=line) from error
