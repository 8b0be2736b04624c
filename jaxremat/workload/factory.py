"""Makes the workload of a run at any batch: a user's factory, or the decoder's in `model/`.

    factory = GivenFactory("mlp", lambda batch: make_mlp(batch or 8), has_free_batch=True)
    factory.at(32, TrainConfig())       # the workload whose batch has 32 samples

Commands, records and the planner know a workload only through its factory.
"""

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxremat.config import Layout, TrainConfig
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.mesh.sharding import AnyMesh, axes_in, tracing_for, tracing_on
from jaxremat.policy.found import FoundLayers
from jaxremat.policy.names import NamedValue, named_values
from jaxremat.policy.spec import Policy
from jaxremat.policy.with_policy import find_layers
from jaxremat.workload.given import OWN_LOSS, GivenModel
from jaxremat.workload.samples import Growth, growth, samples_of_one
from jaxremat.workload.user_code import with_trace
from jaxremat.workload.workload import Workload, with_functions


@dataclass(frozen=True)
class Facts:
    """What records say of a step and only some workloads have.

    Attributes:
        seq_len: tokens per sequence. None where samples aren't sequences of one length, or a user's own workload decides it.
        loss: `full`, `chunked` or `chunked:N` for the decoder, and `own` for any other workload.
        attention: `xla` or `cudnn`. None where the workload itself decides.
    """

    seq_len: int | None = None
    loss: str = OWN_LOSS
    attention: str | None = None


class WorkloadFactory(abc.ABC):
    """Makes the workload of a run at any batch, and describes it for commands and records."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What tables and records call the workload."""

    @property
    @abc.abstractmethod
    def has_free_batch(self) -> bool:
        """Whether the workload can be made at any batch.

        If not, it has the one batch that it was written for.
        """

    @property
    def batch_unit(self) -> int:
        """The workload can be made at the multiples of this batch."""
        return 1

    def rows_at(self, batch: int) -> int | None:
        """The samples at a batch on a mesh that the workload has brought. None where nobody can count them."""
        return None

    @abc.abstractmethod
    def at(self, batch: int | None, train: TrainConfig) -> Workload:
        """The workload whose microbatches have `batch` samples; None is the workload's own number."""

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """The requested workload, as records hold it under `config.model`."""

    def facts(self, train: TrainConfig) -> Facts:
        """What records say of a step and only some workloads have."""
        return Facts()

    def losses(self) -> tuple[str, ...]:
        """The losses that a plan chooses among."""
        return (OWN_LOSS,)

    def layout(self) -> Layout | None:
        """How its repeated layers run. None where only the workload's author can change that."""
        return None

    def with_layout(self, layout: Layout) -> Self:
        """The same workload with its layers in this layout.

        The workload itself if only its author can change that.
        """
        return self

    def on(self, mesh: AnyMesh | None) -> Self:
        """The same workload for the devices of another mesh."""
        return self

    def compute_dtype(self) -> str:
        """The dtype that it computes in, if it is one for all. Empty otherwise."""
        return ""

    def lines(self, batch: int | None = None) -> Iterator[str]:
        """Lines of its own for a command's heading, with the bytes at a batch.

        None takes the one that it is written for.
        """
        return iter(())

    def data_hash(self) -> str:
        """A hash of what is trained on. Empty where only the workload's author knows that."""
        return ""

    def sampled(self, params: Any, train: TrainConfig, num_tokens: int) -> str:
        """A text of `num_tokens` tokens that the model with these parameters writes.

        Empty where it doesn't write text.
        """
        return ""

    def num_layers(self) -> int:
        """Number of the repeated layers that policies are about. 0 if there are none."""
        return 0

    def layer_names(self, train: TrainConfig, batch: int, mesh: AnyMesh | None = None) -> Sequence[NamedValue]:
        """The named values of one layer in program order, with their bytes at a batch.

        On a mesh, the decoder's layers have names for gathered kernels, too.
        """
        return ()

    def checked(self, policy: Policy, train: TrainConfig, mesh: AnyMesh | None = None) -> Policy:
        """The policy with its checkpoint names checked, and each alias replaced by its names.

        The names are those of `layer_names` on the same mesh.

        Raises:
            UnknownNameError: no value of a layer has such a name.
            UnknownPolicyError: the policy's groups don't fit the number of layers.
            UsageError: there are no layers.
        """
        return policy

    def layers_at(self, batch: int | None, train: TrainConfig, mesh: AnyMesh | None = None) -> FoundLayers | None:
        """Its repeated layers at a batch, for the planner. None for a workload that is a step.

        On a mesh, the decoder's layers gather their kernels, each under a name.
        """
        return None

    def otherwise(self) -> tuple[Self, str] | None:
        """Another way to compute the same, where XLA rejects the step, and the flag that chooses it."""
        return None


@dataclass(frozen=True, eq=False)
class GivenFactory(WorkloadFactory):
    """The factory of a workload that somebody else wrote.

    Attributes:
        given_name: what to call the workload where it has no name itself.
        make: makes the workload at a batch, or for None at the batch that it is written for.
        has_free_batch: whether `make` takes any batch.
        default_batch: the batch that `make` takes for None. None where the batch isn't free or it has no default.
        layers: glob patterns of the layers' scopes in place of the workload's own. Empty leaves those.
        seq_len: the tokens per sequence that --seq-len gave. None where the workload itself decides.
        requested: the workload by name and arguments, as records hold it.
        mesh: the devices that the workload's functions are traced for, whose axes their sharding constraints name. None for one
            device.
        target: the `Target` that they are traced for. None where it isn't known.
    """

    given_name: str
    make: Callable[[int | None], Workload]
    has_free_batch: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    default_batch: int | None = field(default=None, kw_only=True)
    layers: tuple[str, ...] = ()
    seq_len: int | None = None
    requested: dict[str, Any] = field(default_factory=dict)
    mesh: AnyMesh | None = None
    target: Any = None

    @property
    def name(self) -> str:
        return self._made(None).name or self.given_name

    def at(self, batch: int | None, train: TrainConfig) -> Workload:
        return self._made(batch)

    @functools.cached_property
    def batch_unit(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The smallest batch that the axes of the workload's own mesh divide, seen at the batch that it is written for."""
        default = self.default_batch
        if default is None or not self.has_free_batch or self._made(None).mesh is None:
            return 1
        made = self._made(default)  # which compares it with another batch
        leaves, dims = jax.tree.leaves(_what_grows(made)), self._growth[0].dims
        units = [unit for leaf, of in zip(leaves, dims, strict=True) for unit in _units(leaf, of)]
        return math.lcm(*units)

    def rows_at(self, batch: int) -> int | None:
        if (made := self._made(batch)).mesh is None:
            return None
        shapes = _what_grows(made)
        counted = self._growth[0].samples(batch, shapes) if self.has_free_batch else samples_of_one(shapes)
        leaves = zip(jax.tree.leaves(shapes), counted.leaves, strict=True)
        sizes = {leaf.shape[of.axis] for leaf, of in leaves if of.axis is not None}
        return next(iter(sizes)) if len(sizes) == 1 else None

    def on(self, mesh: AnyMesh | None) -> Self:
        return replace(self, mesh=mesh)

    def facts(self, train: TrainConfig) -> Facts:
        return Facts(seq_len=self.seq_len)

    def config(self) -> dict[str, Any]:
        return {"name": self.name, **self.requested}

    def lines(self, batch: int | None = None) -> Iterator[str]:
        found = self._layers_at(batch) if batch and self.has_free_batch else self.found
        for number, line in enumerate(found.lines() if found else ()):
            yield f"{'' if number else 'layers':<10}{line}"

    def num_layers(self) -> int:
        return self.found.num_layers if self.found else 0

    def layer_names(self, train: TrainConfig, batch: int, mesh: AnyMesh | None = None) -> Sequence[NamedValue]:
        found = self.layers_at(batch if self.has_free_batch else None, train)
        with self._tracing(self._made(None).mesh):
            return self._values(found)

    def _values(self, found: FoundLayers | None) -> Sequence[NamedValue]:
        return [value for kind in (found.kinds if found else ()) for value in named_values(kind.function, *kind.args)]

    def checked(self, policy: Policy, train: TrainConfig, mesh: AnyMesh | None = None) -> Policy:
        workload = self._made(None)
        if workload.loss is not None:
            with self._tracing(workload.mesh):
                jax.eval_shape(workload.loss_with(policy), *workload.loss_args)  # the policy is checked while it is traced
        return policy

    @functools.cached_property
    def found(self) -> FoundLayers | None:
        """The layers that were found in the loss. None for a workload that is a step."""
        return self._layers_at(None)

    def layers_at(self, batch: int | None, train: TrainConfig, mesh: AnyMesh | None = None) -> FoundLayers | None:
        return self._layers_at(batch)

    def _layers_at(self, batch: int | None) -> FoundLayers | None:
        workload = self._made(batch)
        if workload.loss is None:
            return None
        with self._tracing(workload.mesh):
            return find_layers(workload.loss, *workload.loss_args, layers=workload.layers)

    def _made(self, batch: int | None) -> Workload:
        """The workload at a batch.

        Two are stored, the one without a batch and the last one, because a workload may hold arrays.

        Raises:
            UsageError: nothing grows with the batch, or something grows unevenly.
        """
        if batch not in self._made_before:
            with self._tracing():
                made = self.make(batch)
            if made.mesh is not None or self.mesh is not None or self.target is not None:
                made = with_functions(made, lambda function, part: self._traced(function, made.mesh))
            if self.layers and made.loss is not None:
                made = replace(made, layers=self.layers)
            if self.has_free_batch:
                made = self._counted(made, batch)
            for other in [other for other in self._made_before if other is not None]:
                del self._made_before[other]
            self._made_before[batch] = made
        return self._made_before[batch]

    @contextlib.contextmanager
    def _tracing(self, own: AnyMesh | None = None) -> Iterator[None]:
        """A context, and a decorator of functions, in which the workload's functions are traced.

        `own` is a mesh that the workload has brought.
        """
        with tracing_for(self.target), tracing_on(own or self.mesh, is_own=own is not None):
            yield

    def _traced(self, function: Callable[..., Any], own: AnyMesh | None) -> Callable[..., Any]:
        return with_trace(self._tracing(own)(function), function, lambda trace: self._tracing(own)(trace))

    def _counted(self, made: Workload, batch: int | None) -> Workload:
        """The workload with its samples.

        The one without a batch isn't compared, as its own number is known.
        """
        if batch is None:
            counted = replace(made.counted, number=self.default_batch) if made.loss and self.default_batch else None
            return replace(made, samples=counted)
        name, shapes = made.name or self.given_name, _what_grows(made)
        if not self._growth:
            other = 2 * batch if self.default_batch in (None, batch) else self.default_batch
            self._growth.append(growth(name, batch, shapes, other, self._shapes_at(other, batch)))
        samples = self._growth[0].samples(batch, shapes)
        return replace(made, samples=samples) if made.loss else made

    def _shapes_at(self, other: int, batch: int) -> Any:
        """What grows, at another batch than the requested one.

        Raises:
            UsageError: the workload can't be made at that batch.
        """
        try:
            with self._tracing():
                return _what_grows(self.make(other))
        except JaxrematError as error:
            raise UsageError(
                f"{self.given_name} makes batch {batch} and no batch {other}, and two are compared to see what grows",
                cause=str(error),
                next_step="a function that takes any batch, or leave the keyword batch out for one batch",
            ) from error

    @functools.cached_property
    def _made_before(self) -> dict[int | None, Workload]:
        return {}

    @functools.cached_property
    def _growth(self) -> list[Growth]:
        """How the batch grows. Empty before two batches were compared."""
        return []


def _units(leaf: Any, dims: Sequence[tuple[Fraction, Fraction]]) -> Iterator[int]:
    """For each axis of an array on a mesh that grows with the batch, the batch whose multiples the mesh divides.

    Args:
        leaf: the array's shape and sharding.
        dims: for each axis, its size at batch 0 and the rows that a sample adds.
    """
    for (base, rate), divided in zip(dims, leaf.sharding.spec, strict=False):
        parts = math.prod(leaf.sharding.mesh.shape[axis] for axis in axes_in([divided]))
        if rate and base == 0:
            yield (Fraction(parts) / rate).numerator


def _what_grows(workload: Workload) -> Any:
    """The shapes of what grows with the batch: the batch of a loss, or the arguments of a step."""
    return workload.abstract_args if workload.loss is None else workload.abstract_batch


def given_factory(
    given: GivenModel,
    mesh: AnyMesh | None = None,
    target: Any = None,
    devices: Callable[[], Sequence[Any]] | None = None,
) -> GivenFactory:
    """The factory of what --model names. The user's code is imported here.

    Args:
        given: what --model names.
        mesh: the devices. None for one device.
        target: the `Target` that it is compiled for. None where it isn't known.
        devices: the devices for a function with the keyword `devices`, which makes a mesh of its own.

    Raises:
        UsageError: there is no such code, or it can't make a workload.
        UserCodeError: the code raised an exception.
    """
    from jaxremat.workload.load import load_factory

    with tracing_for(target), tracing_on(mesh):
        made = load_factory(given.spec, given.words, given.seq_len, devices)
        if mesh is not None and jax.sharding.get_abstract_mesh() != mesh.abstract_mesh:
            raise UsageError(
                f"--mesh was given, and the import of {made.name} sets a mesh for the whole process",
                cause="jax.set_mesh(mesh) outside of a with statement",
                next_step="--mesh says which mesh; put the call under if __name__ == '__main__'",
            )
    requested = {"spec": made.name, "arguments": {name: repr(value) for name, value in made.arguments.items()}}
    requested |= {"layers": list(given.layers)}
    return GivenFactory(
        made.name,
        made,
        made.has_free_batch,
        given.layers,
        given.seq_len,
        requested,
        None if made.takes_devices else mesh,
        target,
        default_batch=made.default_batch,
    )


def factory_of(workload: Workload, name: str = "workload") -> GivenFactory:
    """The factory of one workload with its one batch."""
    return GivenFactory(name, lambda batch: workload)


def shape_text(tree: Any) -> str:
    """The shapes of a tree's leaves: `int32[8,1025]` or `float32[8,224,224,3], int32[8]`.

    Of many leaves, the first three.
    """
    leaves = [
        f"{jnp.dtype(leaf.dtype).name if _is_plain(leaf) else leaf.dtype}" + _axes(leaf) for leaf in jax.tree.leaves(tree)
    ]
    return ", ".join(leaves[:3]) + (f" and {len(leaves) - 3} more" if len(leaves) > 3 else "")


def _is_plain(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _axes(leaf: Any) -> str:
    return f"[{','.join(map(str, leaf.shape))}]"
