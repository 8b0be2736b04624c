"""How the arguments of a training step lie on a mesh: a sharding for each array.

    mesh = make_mesh(devices, parse_mesh("data=2,fsdp=8"))
    shardings = state_shardings(mesh, state, axes_of)     # a kernel [4096, 14336]: 4096 over fsdp, 512 on each device

Each dimension of a parameter has a logical axis, such as `embed` or `mlp`. A rule says which axis of the mesh divides it. Where
nothing is known of a parameter's dimensions, its largest one is divided. An array with its own sharding stays so.
The optimizer's state lies as its parameters do.

Annotated arguments alone aren't enough. Inside a loop XLA may then choose to divide the features of the residual stream and not
its sequences, so that each device computes a multiple of its share. So the layers say how their residual stream lies
(`on_mesh`). The layers of a user's own model say it with Flax's `nn.with_logical_constraint`, which follows `RULES`, too.

References:
    Rajbhandari et al. 2020, "ZeRO", stage 3, which is the axis `fsdp`; Shoeybi et al. 2019, "Megatron-LM", which is the axis
    `tensor`, and Korthikanti et al. 2022, "Reducing Activation Recomputation", for the positions in between; flax/linen/spmd.py.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxremat.errors import UsageError
from jaxremat.mesh.axes import AXES, BATCH_AXES, MeshShape

AnyMesh = Mesh | AbstractMesh
#: By a parameter's path and shape, the logical axis of each of its dimensions. None for a dimension that isn't divided.
LogicalAxes = Callable[[tuple[Any, ...], tuple[int, ...]], tuple[str | None, ...]]
#: By logical axis, the axes of the mesh that divide it. An axis of the mesh divides one dimension of an array: that of the first
#: rule whose dimension it divides evenly. So where `tensor` doesn't divide the vocabulary, it divides the positions of logits.
#: The axis `expert` divides experts, and of everything else what `fsdp` divides.
RULES = (
    ("batch", BATCH_AXES),
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
#: An array of fewer bytes is replicated: gathering it would take longer than it is worth.
SMALL_BYTES = 64 * 2**10


def make_mesh(devices: Sequence[Any], shape: MeshShape) -> Mesh:
    """The mesh of `shape` over as many devices.

    Neighbours along `tensor`, and then along `fsdp`, are neighbours in `devices`.
    """
    return Mesh(np.asarray(devices).reshape([getattr(shape, axis) for axis in AXES]), tuple(AXES))


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh of `shape` without devices.

    XLA chooses how values lie that nobody says anything of, as on a `Mesh`.
    """
    return AbstractMesh(tuple(getattr(shape, axis) for axis in AXES), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def tracing_on(mesh: AnyMesh | None, *, is_own: bool = False) -> Iterator[None]:
    """A context in which the layers' constraints on their residual stream hold.

    Without a mesh there are none.

    Args:
        mesh: the mesh.
        is_own: whether a workload has brought it. The rules by which logical axes lie on it are then the workload's own.
    """
    if mesh is None:
        yield
        return
    if is_own:
        with _set_mesh(mesh):
            yield
        return
    import flax.linen as nn

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES):
        yield


@contextlib.contextmanager
def _set_mesh(mesh: AnyMesh) -> Iterator[None]:
    """A context as a program has it under `jax.set_mesh(mesh)`.

    JAX doesn't allow that while it traces. The mesh's axes alone are then set.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(mesh, Mesh):
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        yield


#: What the function that is traced now is compiled for. JAX doesn't take a trace for another target from its caches.
_traced_target: Any = jax.make_user_context(None)


@dataclass(frozen=True, eq=False)
class _Target:
    """A target that is compared by its identity.

    JAX compares it at each call of a jitted function.
    """

    target: Any


_known_target = functools.cache(_Target)


@contextlib.contextmanager
def tracing_for(target: Any) -> Iterator[None]:
    """A context in which functions are traced to be compiled for `target`, a `jaxremat.Target`.

    With None nothing changes.
    """
    with _traced_target(_known_target(target)) if target is not None else contextlib.nullcontext():
        yield


def traced_target() -> Any:
    """The target of the `tracing_for` around this call. None outside of such a context."""
    found = _traced_target.value
    return found.target if found is not None else None


def on_mesh(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, divided over the traced mesh along those of its logical `axes` that `RULES` has.

    A dimension that its axis of the mesh doesn't divide evenly stays whole. Without a mesh, and inside a shard_map, the result
    is `x` itself.
    For example, logits are `on_mesh(logits, "batch", "sequence", "vocab")`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*divided_by(mesh, x.shape, axes)))


def parts_of(axis: str, size: int) -> int:
    """The number of parts that the traced mesh divides a dimension into.

    It is 1 without a mesh, and where the mesh doesn't divide it evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in axes_in(divided_by(mesh, (size,), (axis,))))


def divided_by(mesh: AnyMesh, shape: tuple[int, ...], axes: Sequence[str | None]) -> list[str | tuple[str, ...] | None]:
    """For each dimension of `shape`, what of the mesh divides it by `RULES`.

    It is None for a dimension that stays whole.
    """
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


def _divides(mesh: AnyMesh, part: Any) -> str | tuple[str, ...] | None:
    """The axes of an entry of a `PartitionSpec` that divide a dimension."""
    named = (part,) if isinstance(part, str) else part if isinstance(part, tuple) else ()
    return _one_or_several(axes) if (axes := _larger_than_one(mesh, named)) else None


def _one_or_several(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def axes_in(divided: Iterable[Any]) -> set[str]:
    """The axes of a mesh that divide a dimension of an array.

    A dimension that XLA may divide (`UNCONSTRAINED`) has none.
    """
    entries = [(entry,) if isinstance(entry, str) else entry for entry in divided]
    return {axis for entry in entries if isinstance(entry, tuple) for axis in entry}


def num_parts(sharding: Any) -> int | None:
    """The number of parts that a sharding divides an array into.

    Several devices may have the same part.

    None for a sharding that names no axes, which says nothing here.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    return math.prod(sharding.mesh.shape[axis] for axis in axes_in(sharding.spec))


def state_shardings(
    mesh: Mesh, state: Any, params: Any, axes_of: LogicalAxes | None, *, others: PartitionSpec | None = None
) -> Any:
    """The sharding of each array of a training state.

    The arrays are its parameters, and what the optimizer has of them.

    Args:
        mesh: the mesh.
        state: the state's shapes.
        params: the shapes of its parameters.
        axes_of: the logical axes of the parameters. None where nothing is known of them.
        others: how an array of the optimizer lies that belongs to no parameter of its shape. None divides it by `RULES`.
    """
    known = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        axes = axes_of(path, leaf.shape) if axes_of else None
        known[jax.tree_util.keystr(path), leaf.shape] = param_sharding(mesh, leaf, axes)

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        endings = (jax.tree_util.keystr(path[n:]) for n in range(len(path) + 1))  # the last one is that of a bare array
        found = next((known[ending, leaf.shape] for ending in endings if (ending, leaf.shape) in known), None)
        if found is None and others is not None:
            return NamedSharding(mesh, others)
        return found or param_sharding(mesh, leaf, None)

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
        sharding = param_sharding(mesh, leaf, axes)
        divided = tuple(_divides(mesh, part) for part in sharding.spec) + (None,) * (leaf.ndim - len(sharding.spec))
        num_bytes = array_bytes(leaf)
        found.append(
            ParamSharding(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=leaf.shape,
                divided=divided,
                num_bytes=num_bytes,
                device_bytes=bytes_of_a_device(leaf, sharding),
                not_divided="" if given_sharding(mesh, leaf) else _not_divided(mesh, leaf, divided, axes or ()),
            )
        )
    return found


@dataclass(frozen=True)
class LeafOnMesh:
    """How one array among a step's arguments lies.

    Attributes:
        name: its path, such as `params/layers/mlp/wo/kernel`.
        shape: of the whole array.
        axes: the axes of the mesh that divide it.
        num_bytes: of the whole array.
        device_bytes: on each device.
        is_batch: whether it belongs to the batch, and not to the state.
    """

    name: str
    shape: tuple[int, ...]
    axes: frozenset[str]
    num_bytes: int
    device_bytes: int
    is_batch: bool = False


def leaves_on_mesh(tree: Any, shardings: Any, *, is_batch: bool = False) -> tuple[LeafOnMesh, ...]:
    """How each array of `tree` lies by its sharding, in the order of the tree."""
    found = []
    for (path, leaf), sharding in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(shardings), strict=True):
        found.append(
            LeafOnMesh(
                name=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=leaf.shape,
                axes=frozenset(axis for axis in axes_in(sharding.spec) if sharding.mesh.shape[axis] > 1),
                num_bytes=array_bytes(leaf),
                device_bytes=bytes_of_a_device(leaf, sharding),
                is_batch=is_batch,
            )
        )
    return tuple(found)


def _not_divided(mesh: AnyMesh, leaf: Any, divided: tuple[Any, ...], axes: tuple[str | None, ...]) -> str:
    """Why an axis of the mesh that could divide a parameter doesn't.

    Empty if there is no such axis.
    """
    num_bytes = array_bytes(leaf)
    if num_bytes < SMALL_BYTES:
        return f"whole, as it has < {SMALL_BYTES // 2**10} KiB"
    rules = dict(RULES)
    named = ((rules.get(axis), size) for axis, size in zip(axes, leaf.shape, strict=False) if axis)
    wanted = {axis: size for axis, size in named if isinstance(axis, str)} | {"fsdp": "", "expert": ""}
    missing = [(axis, size) for axis, size in wanted.items() if mesh.shape[axis] > 1 and axis not in axes_in(divided)]
    return "; ".join(f"{size} no multiple of {axis}={mesh.shape[axis]}".strip() for axis, size in missing)


def groups_along(mesh: AnyMesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The numbers of the devices of each group that differ along `axes` alone.

    On the mesh `fsdp=2,tensor=2` and along `fsdp` they are (0, 2) and (1, 3).
    """
    along = [list(mesh.axis_names).index(axis) for axis in axes]
    numbers = np.moveaxis(np.arange(mesh.size).reshape(tuple(mesh.shape.values())), along, range(-len(along), 0))
    return tuple(map(tuple, numbers.reshape(-1, math.prod(mesh.shape[axis] for axis in axes)).tolist()))


def batch_shardings(mesh: Mesh, batch: Any, axes: Sequence[int | None]) -> Any:
    """The sharding of each array of a batch.

    Its axis of samples is divided over all data-parallel groups of the mesh.

    An array without such an axis is replicated, and so is one whose samples aren't a multiple of the groups.

    Args:
        mesh: the mesh.
        batch: the shapes of a batch.
        axes: for each array, the axis that counts samples. None for an array without one.
    """

    def sharding(leaf: Any, axis: int | None) -> NamedSharding:
        if (given := given_sharding(mesh, leaf)) is not None:
            return given
        if axis is None or leaf.shape[axis] % math.prod(mesh.shape[name] for name in BATCH_AXES):
            return NamedSharding(mesh, PartitionSpec())
        of_samples = _one_or_several(_larger_than_one(mesh, BATCH_AXES) or BATCH_AXES)
        return NamedSharding(mesh, PartitionSpec(*axis * [None], of_samples))

    leaves, tree = jax.tree.flatten(batch)
    return tree.unflatten([sharding(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)])


def given_sharding(mesh: AnyMesh, leaf: Any) -> NamedSharding | None:
    """How an array lies on `mesh` by its own sharding, a `NamedSharding` over axes of the mesh.

    None if it has no such sharding.

    Raises:
        UsageError: the sharding names another axis, or divides a dimension unevenly.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    for size, part in zip(leaf.shape, sharding.spec, strict=False):
        axes = sorted(axes_in([part]))
        if unknown := [axis for axis in axes if axis not in mesh.shape]:
            raise UsageError(
                f"an array {list(leaf.shape)} has a sharding over the axis {unknown[0]!r}",
                allowed=f"the axes {', '.join(map(str, mesh.axis_names))}",
                cause="the axes of the mesh divide arrays, and this is none of them",
                next_step="NamedSharding(AbstractMesh((8,), ('fsdp',)), PartitionSpec('fsdp')) with --mesh fsdp=8, or a mesh of "
                "your own: Workload(mesh=mesh)",
            )
        if size % math.prod(mesh.shape[axis] for axis in axes):
            raise UsageError(
                f"an array {list(leaf.shape)} has a sharding that divides {size} over "
                + " and ".join(_larger_than_one(mesh, axes)),
                allowed=f"a dimension that {math.prod(mesh.shape[axis] for axis in axes)} divides",
                next_step="a mesh with another size of that axis, or None for that dimension",
            )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that each device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def array_bytes(leaf: Any, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of an array, or of a part of it that has another shape.

    XLA has two values of 4 bits in a byte.
    """
    bits = 8 * leaf.dtype.itemsize if leaf.dtype not in (jnp.int4, jnp.uint4) else 4
    return -(-math.prod(leaf.shape if shape is None else shape) * bits // 8)


def bytes_of_a_device(tree: Any, shardings: Any) -> int:
    """Bytes of the arrays of `tree` that one device holds."""

    def num_bytes(leaf: Any, sharding: NamedSharding) -> int:
        return array_bytes(leaf, sharding.shard_shape(leaf.shape))

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, tree, shardings)))


def param_sharding(mesh: AnyMesh, leaf: Any, axes: tuple[str | None, ...] | None) -> NamedSharding:
    """How one array lies: as its own sharding says, or else by `RULES`.

    An array that no rule divides over `fsdp` is divided so along its largest dimension that is left. The leading dimension of an
    array of several dimensions is divided last, as it may count layers.
    """
    if (given := given_sharding(mesh, leaf)) is not None:
        return given
    if array_bytes(leaf) < SMALL_BYTES:
        return NamedSharding(mesh, PartitionSpec())
    divided = divided_by(mesh, leaf.shape, axes or (None,) * leaf.ndim)
    left = tuple(axis for axis in _larger_than_one(mesh, ("fsdp", "expert")) if axis not in axes_in(divided))
    if left:
        size = math.prod(mesh.shape[axis] for axis in left)
        others = sorted(range(leaf.ndim), key=lambda n: (n == 0 and leaf.ndim > 1, -leaf.shape[n]))
        found = next((n for n in others if divided[n] is None and leaf.shape[n] % size == 0), None)
        divided = [_one_or_several(left) if n == found else axis for n, axis in enumerate(divided)]
    return NamedSharding(mesh, PartitionSpec(*divided) if any(divided) else PartitionSpec())
