"""A Flax Linen model on a mesh of its own: twelve axes with the names that MaxText has, and logical axis rules.

    python -m jaxremat.run --model examples/own_mesh.py:workload --devices 8 --policy none dots nothing
    python -m jaxremat.run --model examples/own_mesh.py:whole_step --devices 8 --batch 4

The function `workload` gets the target's devices by its keyword `devices`: 8 devices of a GPU that needn't be in this machine. It
makes whatever `jax.sharding.Mesh` it likes of them, says by `NamedSharding`s how the parameters and the batch lie on it, and
returns the mesh in the workload. Nothing else is to be done: the loss below is the one of any program that runs
under `jax.set_mesh(mesh)`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxremat

#: The axes of the mesh in their order. Most of them have the size 1, and they are there so that one set of rules serves all jobs.
AXES = (
    *("data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "context_autoregressive"),
    *("tensor", "tensor_transpose", "tensor_sequence", "expert", "autoregressive"),
)
#: By the name of a dimension, the axes that divide it.
RULES = (
    ("activation_batch", ("data", "fsdp", "fsdp_transpose", "expert")),
    ("activation_length", ("sequence", "context")),
    ("activation_mlp", ("tensor", "tensor_transpose", "tensor_sequence")),
    ("activation_vocab", ("tensor", "tensor_transpose", "tensor_sequence")),
    ("embed", ("fsdp", "fsdp_transpose", "sequence", "tensor_transpose", "context", "expert")),
    ("mlp", ("fsdp_transpose", "tensor", "tensor_sequence", "autoregressive")),
    ("vocab", ("tensor", "tensor_transpose", "tensor_sequence", "autoregressive")),
)


class Block(nn.Module):
    """An MLP with a residual. Its kernels and its activations have named dimensions."""

    mlp_dim: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = nn.initializers.lecun_normal()
        normed = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        hidden = nn.Dense(
            self.mlp_dim,
            use_bias=False,
            dtype=jnp.bfloat16,
            kernel_init=nn.with_logical_partitioning(kernel, ("embed", "mlp")),
            name="wi",
        )(normed)
        hidden = nn.with_logical_constraint(nn.gelu(hidden), ("activation_batch", "activation_length", "activation_mlp"))
        out = nn.Dense(
            x.shape[-1],
            use_bias=False,
            dtype=jnp.bfloat16,
            kernel_init=nn.with_logical_partitioning(kernel, ("mlp", "embed")),
            name="wo",
        )(hidden)
        return nn.with_logical_constraint(x + out, ("activation_batch", "activation_length", None))


class Model(nn.Module):
    """Words to logits through `num_layers` blocks."""

    vocab_size: int
    width: int
    num_layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        embed = nn.Embed(self.vocab_size, self.width, dtype=jnp.bfloat16, embedding_init=table)
        x = nn.with_logical_constraint(embed(tokens), ("activation_batch", "activation_length", None))
        for number in range(self.num_layers):
            x = Block(4 * self.width, name=f"block_{number}")(x)
        return nn.with_logical_constraint(embed.attend(x), ("activation_batch", "activation_length", "activation_vocab"))


def make_mesh(devices: Sequence[jax.Device], tensor: int) -> Mesh:
    """The mesh: `tensor` devices share their sequences, and `fsdp` has the others."""
    sizes = dict.fromkeys(AXES, 1) | {"tensor": tensor, "fsdp": len(devices) // tensor}
    return Mesh(np.reshape(devices, [sizes[axis] for axis in AXES]), AXES)


def on_mesh(mesh: Mesh, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The shapes of the parameters and of the batch, with their shardings."""
    boxed = jax.eval_shape(model.init, jax.random.key(0), batch["tokens"])["params"]
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    params = jax.tree.map(lambda leaf, of: leaf.update(sharding=of), nn.unbox(boxed), shardings)
    divided = NamedSharding(mesh, nn.logical_to_mesh_axes(("activation_batch", "activation_length"), RULES))
    return params, jax.tree.map(lambda leaf: leaf.update(sharding=divided), batch)


def loss(params: Any, batch: dict[str, Any], *, model: nn.Module) -> jax.Array:
    """Cross entropy of the next word."""
    with nn.logical_axis_rules(RULES):
        logits = model.apply({"params": params}, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"]).mean()


def workload(
    batch: int = 4,
    devices: Sequence[jax.Device] | None = None,
    tensor: int = 2,
    width: int = 512,
    num_layers: int = 4,
    seq_len: int = 512,
) -> jaxremat.Workload:
    """The loss, its parameters and its batch on the mesh. Without devices the mesh has those of this machine.

    `batch` counts the sequences of the devices that share theirs: 4 of them are 16 on 8 devices with `tensor=2`. Any other
    meaning would do, as the batch is what this function makes of it.
    """
    devices = jax.devices() if devices is None else devices
    tensor = math.gcd(tensor, len(devices))
    mesh, model = make_mesh(devices, tensor), Model(vocab_size=8192, width=width, num_layers=num_layers)
    tokens = jax.ShapeDtypeStruct((batch * len(devices) // tensor, seq_len), jnp.int32)
    params, arrays = on_mesh(mesh, model, {"tokens": tokens, "targets": tokens})
    return jaxremat.Workload(
        loss=functools.partial(loss, model=model),
        params=params,
        batch=arrays,
        init=lambda key: nn.unbox(model.init(key, jnp.zeros((1, seq_len), jnp.int32))["params"]),
        optimizer=optax.adamw(1e-3),
        num_tokens=tokens.size,
        mesh=mesh,
    )


def whole_step(batch: int = 4, devices: Sequence[jax.Device] | None = None, **sizes: int) -> jaxremat.Workload:
    """The whole train step as its author jits it: with `in_shardings`, `out_shardings` and `donate_argnums`.

    `sizes` are further arguments of `workload`, whose loss, optimizer and arrays these are.
    """
    of_loss = workload(batch, devices, **sizes)
    loss, optimizer, args = of_loss.loss, of_loss.optimizer, (of_loss.params, of_loss.batch)
    assert loss
    assert optimizer
    assert of_loss.mesh

    def train_step(params: Any, opt_state: Any, batch: dict[str, Any]) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = jax.eval_shape(optimizer.init, of_loss.params)
    replicated = NamedSharding(of_loss.mesh, PartitionSpec())
    of_params, of_batch = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in args)
    of_optimizer = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, opt_state, of_params, transform_non_params=lambda _: replicated
    )
    step = jax.jit(
        train_step,
        in_shardings=(of_params, of_optimizer, of_batch),
        out_shardings=(of_params, of_optimizer, replicated),
        donate_argnums=(0, 1),
    )
    return jaxremat.Workload(step=step, args=(of_loss.params, opt_state, of_loss.batch), mesh=of_loss.mesh)
