"""How the arguments of a training step lie on a mesh: a sharding for each array of the state and the batch.

    mesh = make_mesh(devices, parse_mesh("data=2,fsdp=8"))
    shardings = state_shardings(mesh, state, axes_of)     # a kernel [4096, 14336]: 4096 over fsdp, 512 on each device

Each dimension of a parameter has a logical axis, such as `embed` or `mlp`. A rule says which axis of the mesh divides it. Where
nothing is known of a parameter's dimensions, its largest one is divided. The optimizer's state lies as its parameters do.

Annotated arguments alone aren't enough. Inside a loop XLA may then choose to divide the features of the residual stream and not
its sequences, so that each device computes a multiple of its share. So the layers say how their residual stream lies
(`on_mesh`). The layers of a user's own model say it with Flax's `nn.with_logical_constraint`, which follows `RULES`, too.

References:
    Rajbhandari et al. 2020, "ZeRO", stage 3, which is the axis `fsdp`; Shoeybi et al. 2019, "Megatron-LM", which is the axis
    `tensor`, and Korthikanti et al. 2022, "Reducing Activation Recomputation", for the positions in between; flax/linen/spmd.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxremat.mesh.axes import AXES, MeshShape

AnyMesh = Mesh | AbstractMesh
#: By a parameter's path and shape, the logical axis of each of its dimensions. None for a dimension that isn't divided.
LogicalAxes = Callable[[tuple[Any, ...], tuple[int, ...]], tuple[str | None, ...]]
#: By logical axis, the axes of the mesh that divide it. An axis of the mesh divides one dimension of an array: that of the first
#: rule whose dimension it divides evenly. So where `tensor` doesn't divide the vocabulary, it divides the positions of logits.
#: The axis `expert` divides experts, and of everything else what `fsdp` divides.
RULES = (
    ("batch", ("data", "fsdp", "expert")),
    ("replica", "data"),
    ("expert", "expert"),
    ("embed", ("fsdp", "expert")),
    ("expert_embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("sequence", "tensor"),
)
_SMALL_BYTES = 64 * 2**10  # of an array that each device holds whole: gathering it would take longer than it is worth


def make_mesh(devices: Sequence[Any], shape: MeshShape) -> Mesh:
    """The mesh of `shape` over as many devices. Neighbours along `tensor`, and then along `fsdp`, are neighbours in `devices`."""
    return Mesh(np.asarray(devices).reshape([getattr(shape, axis) for axis in AXES]), tuple(AXES))


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh of `shape` without devices."""
    return AbstractMesh(tuple(getattr(shape, axis) for axis in AXES), tuple(AXES))


@contextlib.contextmanager
def tracing_on(mesh: Mesh | None) -> Iterator[None]:
    """A context in which the layers' constraints on their residual stream hold. Without a mesh there are none."""
    if mesh is None:
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES):
        yield


def on_mesh(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, divided over the mesh that the step is traced on along those of its logical `axes` that `RULES` has.

    A dimension that its axis of the mesh doesn't divide evenly stays whole. Without a mesh, and inside a shard_map, the result
    is `x` itself.
    For example, logits are `on_mesh(logits, "batch", "sequence", "vocab")`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*divided_by(mesh, x.shape, axes)))


def divided_by(mesh: AnyMesh, shape: tuple[int, ...], axes: Sequence[str | None]) -> list[str | tuple[str, ...] | None]:
    """For each dimension of `shape`, what of the mesh divides it by `RULES`; None for a dimension that stays whole."""
    divided: list[str | tuple[str, ...] | None] = [None] * len(shape)
    taken: set[str] = set()
    for name, of_mesh in RULES:
        wanted = _larger_than_one(mesh, (of_mesh,) if isinstance(of_mesh, str) else of_mesh)
        size = math.prod(mesh.shape[axis] for axis in wanted)
        for n, axis in enumerate(axes):
            if axis == name and wanted and shape[n] % size == 0 and not taken.intersection(wanted):
                divided[n] = _one_or_several(wanted)
                taken.update(wanted)
    return divided


def _larger_than_one(mesh: AnyMesh, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _one_or_several(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def _axes_in(divided: Sequence[Any]) -> set[str]:
    """The axes of the mesh that divide a dimension of an array."""
    return {axis for entry in divided if entry for axis in ((entry,) if isinstance(entry, str) else entry)}


def state_shardings(mesh: Mesh, state: Any, params: Any, axes_of: LogicalAxes | None) -> Any:
    """The sharding of each array of a training state: its parameters, and what the optimizer keeps of them.

    Args:
        mesh: the mesh.
        state: the state's shapes.
        params: the shapes of its parameters.
        axes_of: the logical axes of the parameters. None where nothing is known of them.
    """
    specs = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        axes = axes_of(path, leaf.shape) if axes_of else None
        specs[jax.tree_util.keystr(path), leaf.shape] = _spec(mesh, leaf, axes)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        endings = (jax.tree_util.keystr(path[n:]) for n in range(len(path)))
        known = (specs[ending, leaf.shape] for ending in endings if (ending, leaf.shape) in specs)
        return NamedSharding(mesh, next(known, None) or _spec(mesh, leaf, None))

    return jax.tree_util.tree_map_with_path(sharding, state)


@dataclass(frozen=True)
class ParamSharding:
    """How one parameter lies.

    Attributes:
        name: its path, such as `layers/mlp/wo/kernel`.
        shape: of the whole parameter.
        divided: for each dimension, the axis of the mesh that divides it, or several; None for one that isn't divided.
        num_bytes: of the whole parameter.
        device_bytes: on each device.
        not_divided: why an axis of the mesh that could divide it doesn't. Empty if there is no such axis.
    """

    name: str
    shape: tuple[int, ...]
    divided: tuple[str | tuple[str, ...] | None, ...]
    num_bytes: int
    device_bytes: int
    not_divided: str


def param_shardings(mesh: AnyMesh, params: Any, axes_of: LogicalAxes | None) -> list[ParamSharding]:
    """How each parameter lies, in the order of the tree. `params` are shapes."""
    found = []
    for path, leaf in jax.tree.leaves_with_path(params):
        axes = axes_of(path, leaf.shape) if axes_of else None
        spec = _spec(mesh, leaf, axes)
        divided = tuple(spec) + (None,) * (leaf.ndim - len(spec))
        num_bytes = leaf.size * leaf.dtype.itemsize
        found.append(
            ParamSharding(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=leaf.shape,
                divided=divided,
                num_bytes=num_bytes,
                device_bytes=bytes_of_a_device(leaf, NamedSharding(mesh, spec)),
                not_divided=_not_divided(mesh, leaf, divided, axes or ()),
            )
        )
    return found


def _not_divided(mesh: AnyMesh, leaf: Any, divided: tuple[Any, ...], axes: tuple[str | None, ...]) -> str:
    """Why an axis of the mesh that could divide a parameter doesn't. Empty if there is no such axis."""
    num_bytes = leaf.size * leaf.dtype.itemsize
    if num_bytes < _SMALL_BYTES:
        return f"whole, as it has < {_SMALL_BYTES // 2**10} KiB"
    rules = dict(RULES)
    named = ((rules.get(axis), size) for axis, size in zip(axes, leaf.shape, strict=False) if axis)
    wanted = {axis: size for axis, size in named if isinstance(axis, str)} | {"fsdp": "", "expert": ""}
    missing = [(axis, size) for axis, size in wanted.items() if mesh.shape[axis] > 1 and axis not in _axes_in(divided)]
    return "; ".join(f"{size} no multiple of {axis}={mesh.shape[axis]}".strip() for axis, size in missing)


def batch_shardings(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """The sharding of each array of a batch: the dimension of the samples, number `axis`, is divided over all members."""
    of_batch = ("data", "fsdp", "expert")
    members = math.prod(mesh.shape[name] for name in of_batch)
    divided = PartitionSpec(*axis * [None], _one_or_several(_larger_than_one(mesh, of_batch) or of_batch))

    def sharding(leaf: Any) -> NamedSharding:
        divides = leaf.ndim > axis and leaf.shape[axis] % members == 0
        return NamedSharding(mesh, divided if divides else PartitionSpec())

    return jax.tree.map(sharding, batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that each device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def bytes_of_a_device(tree: Any, shardings: Any) -> int:
    """Bytes of the arrays of `tree` that one device holds."""

    def num_bytes(leaf: Any, sharding: NamedSharding) -> int:
        return int(np.prod(sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, tree, shardings)))


def _spec(mesh: AnyMesh, leaf: Any, axes: tuple[str | None, ...] | None) -> PartitionSpec:
    """How one array lies: by `RULES`, and over `fsdp` and `expert` along its largest dimension that is left, if no rule does so.

    The leading dimension of an array of several dimensions is divided last, as it may count layers.
    """
    if leaf.size * leaf.dtype.itemsize < _SMALL_BYTES:
        return PartitionSpec()
    divided = divided_by(mesh, leaf.shape, axes or (None,) * leaf.ndim)
    left = tuple(axis for axis in _larger_than_one(mesh, ("fsdp", "expert")) if axis not in _axes_in(divided))
    if left:
        size = math.prod(mesh.shape[axis] for axis in left)
        others = sorted(range(leaf.ndim), key=lambda n: (n == 0 and leaf.ndim > 1, -leaf.shape[n]))
        found = next((n for n in others if divided[n] is None and leaf.shape[n] % size == 0), None)
        divided = [_one_or_several(left) if n == found else axis for n, axis in enumerate(divided)]
    return PartitionSpec(*divided) if any(divided) else PartitionSpec()
