"""Makes the workload of a run at any batch.

    factory = WorkloadFactory("mlp", lambda batch: make_mlp(batch or 8), has_free_batch=True)
    factory.at(32, TrainConfig())       # the workload whose batch has 32 samples

Commands, records and the planner know a workload only through its factory.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxremat.config import Layout, TrainConfig
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.mesh.sharding import AnyMesh, axes_in, tracing_for, tracing_on
from jaxremat.policy.found import FoundLayers, Kind
from jaxremat.policy.names import NamedValue, named_values
from jaxremat.policy.spec import Policy
from jaxremat.policy.tree import combine, is_float, path_text
from jaxremat.policy.with_policy import NoLayersError, find_layers, layers_in
from jaxremat.workload.given import OWN_LOSS, GivenModel
from jaxremat.workload.samples import Growth, growth
from jaxremat.workload.trainable import Narrowed
from jaxremat.workload.user_code import with_trace
from jaxremat.workload.workload import Workload, with_functions

_WITHOUT_LAYERS = (
    "--policy none; or leave --layers out where it was given; or write jax.named_scope(f'layer_{i}') around each layer, and "
    "name them: --layers 'layer_*', or layers='layer_*' in the Workload"
)


@dataclass(frozen=True)
class Facts:
    """What records say of a step and only some workloads have.

    Attributes:
        seq_len: tokens per sequence. None where samples aren't sequences of one length, or a user's own workload decides it.
        loss: `full`, `chunked` or `chunked:N` where the workload is made with a loss, and `own` for its one loss.
        attention: `xla`, or the name of the chip's fused attention. None where the workload doesn't say it.
    """

    seq_len: int | None = None
    loss: str = OWN_LOSS
    attention: str | None = None


@dataclass(frozen=True)
class WorkloadFactory:
    """Makes the workload of a run at any batch, and describes it for commands and records.

    Attributes:
        given_name: what to call the workload where it has no name itself.
        make: makes the workload at a batch, or for None at the batch that it is written for.
        has_free_batch: whether `make` takes any batch. If not, it has the one batch that it was written for.
        default_batch: the batch that `make` takes for None. None where the batch isn't free or it has no default.
        options: the keywords that `make` takes beside the batch, with their defaults. `seq_len`, `loss` and `seed` are those of
            the training step, and `num_layers` and `scan_layers` say how many layers there are and how they run.
        layers: glob patterns of the layers' scopes in place of the workload's own. Empty leaves those.
        seq_len: the tokens per sequence that --seq-len gave. None where the workload itself decides.
        requested: the workload as records hold it under `config.model`, without its name.
        mesh: the devices that the workload's functions are traced for, whose axes their sharding constraints name. None for one
            device.
        target: the `Target` that they are traced for. None where it isn't known.
        narrowed: the patterns of --train-only and --freeze, among the parameters that the workload trains.
    """

    given_name: str
    make: Callable[..., Workload]
    has_free_batch: bool = False
    default_batch: int | None = field(default=None, kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True, hash=False)
    layers: tuple[str, ...] = ()
    seq_len: int | None = None
    requested: Mapping[str, Any] = field(default_factory=dict, hash=False)
    mesh: AnyMesh | None = None
    target: Any = None
    narrowed: Narrowed = Narrowed()

    @property
    def name(self) -> str:
        """What tables and records call the workload."""
        return self._made(None).name or self.given_name

    def at(self, batch: int | None, train: TrainConfig) -> Workload:
        """The workload whose microbatches have `batch` samples; None is the workload's own number."""
        return self._made(batch, train)

    @functools.cached_property
    def batch_unit(self) -> int:
        """The smallest batch that the axes of the workload's own mesh divide."""
        default = self.default_batch
        if default is None or not self.has_free_batch or self._made(None).mesh is None:
            return 1
        made = self._made(default)
        leaves, dims = jax.tree.leaves(_what_grows(made)), self._grown(made, default, None).dims
        units = [unit for leaf, of in zip(leaves, dims, strict=True) for unit in _units(leaf, of)]
        return math.lcm(*units)

    def rows_at(self, batch: int, train: TrainConfig) -> int | None:
        """The samples that a batch has on all devices of a mesh that the workload brings.

        None where its arrays have different numbers of them.
        """
        made = self._made(batch, train)
        shapes = _what_grows(made)
        counted = made.counted if made.loss else self._grown(made, batch, train).samples(batch, shapes)
        leaves = zip(jax.tree.leaves(shapes), counted.leaves, strict=True)
        sizes = {leaf.shape[of.axis] for leaf, of in leaves if of.axis is not None}
        return next(iter(sizes)) if len(sizes) == 1 else None

    def on(self, mesh: AnyMesh | None) -> Self:
        """The same workload for the devices of another mesh.

        The workload itself if it was made for none: its functions get the mesh when they are traced.
        """
        return self if self.mesh is None and self.target is None else replace(self, mesh=mesh)

    def config(self) -> dict[str, Any]:
        """The requested workload, as records hold it under `config.model`."""
        layout = {name: value for name, value in self.options.items() if name == "scan_layers"}
        return {"name": self.name, **self.requested, **layout, **self.narrowed.config()}

    def facts(self, train: TrainConfig) -> Facts:
        """What records say of a step and only some workloads have."""
        options = self._options(train)
        attention = self._made(None, train).attention
        return Facts(options.get("seq_len", self.seq_len), options.get("loss", OWN_LOSS), attention)

    def losses(self) -> tuple[str, ...]:
        """The losses that a plan chooses among."""
        return ("full", "chunked") if "loss" in self.options else (OWN_LOSS,)

    def layout(self) -> Layout | None:
        """How its repeated layers run. None where only the workload's author can change that."""
        return {True: "loop", False: "unrolled", None: None}[self.options.get("scan_layers")]

    def with_layout(self, layout: Layout) -> Self:
        """The same workload with its layers in this layout.

        The workload itself if they are in it already, or only its author can change that.
        """
        if self.layout() in (None, layout):
            return self
        return replace(self, options={**self.options, "scan_layers": layout == "loop"})

    def with_num_layers(self, num_layers: int) -> Self:
        """The same workload with so many layers. Only where `num_layers` is among its options."""
        return replace(self, options={**self.options, "num_layers": num_layers})

    def lines(self, batch: int | None = None) -> Iterator[str]:
        """Lines of its own for a command's heading, with the bytes at a batch.

        None takes the one that it is written for.
        """
        workload = self._made(batch if self.has_free_batch else None)
        yield from workload.notes
        found = self.found if workload is self._made(None) else _layers_in(workload)
        for number, line in enumerate(found.lines() if found else ()):
            yield f"{'' if number else 'layers':<10}{line}"

    def num_layers(self) -> int:
        """Number of the repeated layers that policies are about. 0 if there are none."""
        if own := self._made(None).own_layers:
            return own.number
        return self.found.num_layers if self.found else 0

    def layer_names(self, train: TrainConfig, batch: int, mesh: AnyMesh | None = None) -> Sequence[NamedValue]:
        """The named values of the layers in program order, with their bytes at a batch.

        Where the author says which layers there are, they are those of one layer.
        """
        batch_made = batch if self.has_free_batch else None
        if own := self._made(batch_made, train).own_layers:
            return own.names(mesh)
        found = self.layers_at(batch_made, train)
        with self._tracing(self._made(None).mesh):
            kinds = found.kinds if found else ()
            return [value for kind in kinds for value in named_values(kind.function, *kind.args)]

    def checked(self, policy: Policy, train: TrainConfig, mesh: AnyMesh | None = None) -> Policy:
        """The policy with its checkpoint names checked, and each alias replaced by its names.

        Raises:
            UnknownNameError: no value of a layer has such a name.
            UnknownPolicyError: the policy's groups don't fit the number of layers.
            UsageError: there are no layers.
        """
        workload = self._made(None, train)
        if workload.own_layers:
            return workload.own_layers.checked(policy, mesh)
        if workload.loss is not None:
            with self._tracing(workload.mesh):
                try:  # the policy is checked while it is traced
                    jax.eval_shape(workload.loss_with(policy), *workload.loss_args)
                except NoLayersError as error:
                    raise error.with_next_step(_WITHOUT_LAYERS) from None
        return policy

    @functools.cached_property
    def found(self) -> FoundLayers | None:
        """The layers that were found in the loss.

        None for a step, and where the author says which layers there are.
        """
        return _layers_in(self._made(None))

    def layers_at(self, batch: int | None, train: TrainConfig, mesh: AnyMesh | None = None) -> FoundLayers | None:
        """Its repeated layers at a batch, for the planner. None for a workload that is a step."""
        workload = self._made(batch, train)
        if workload.own_layers is None:
            return _layers_in(workload)
        found = workload.own_layers.found(mesh)
        return replace(found, kinds=tuple(_with_frozen(workload, kind) for kind in found.kinds))

    def _options(self, train: TrainConfig | None) -> dict[str, Any]:
        """The keywords of `make`, as the training step has them. None leaves the defaults."""
        return {name: getattr(train, name, default) for name, default in self.options.items()}

    def _made(self, batch: int | None, train: TrainConfig | None = None) -> Workload:
        """The workload at a batch, with the options of a training step.

        Those without a batch are stored, and the last one with a batch, because a workload may hold arrays.

        Raises:
            UsageError: nothing grows with the batch, or something grows unevenly.
        """
        options = self._options(train)
        which = (batch, *options.values())
        if which not in self._made_before:
            with self._tracing():
                made = self.make(batch, **options)
            if made.mesh is not None or self.mesh is not None or self.target is not None:
                made = with_functions(made, lambda function, part: self._traced(function, made.mesh))
            if self.layers and made.loss is not None:
                made = replace(made, layers=self.layers)
            if self.narrowed and made.loss is not None:
                made = replace(made, trainable=replace(self.narrowed, own=made.trainable))
            if self.has_free_batch and made.samples is None:
                made = self._counted(made, batch, train)
            for other in [other for other in self._made_before if other[0] is not None]:
                del self._made_before[other]
            self._made_before[which] = made
        return self._made_before[which]

    @contextlib.contextmanager
    def _tracing(self, own: AnyMesh | None = None) -> Iterator[None]:
        """A context, and a decorator of functions, in which the workload's functions are traced.

        `own` is a mesh that the workload has brought.
        """
        with tracing_for(self.target), tracing_on(own or self.mesh, is_own=own is not None):
            yield

    def _traced(self, function: Callable[..., Any], own: AnyMesh | None) -> Callable[..., Any]:
        return with_trace(self._tracing(own)(function), function, lambda trace: self._tracing(own)(trace))

    def _counted(self, made: Workload, batch: int | None, train: TrainConfig | None) -> Workload:
        """The workload with its samples.

        The one without a batch isn't compared, as its own number is known.
        """
        if batch is None:
            counted = replace(made.counted, number=self.default_batch) if made.loss and self.default_batch else None
            return replace(made, samples=counted)
        samples = self._grown(made, batch, train).samples(batch, _what_grows(made))
        return replace(made, samples=samples) if made.loss else made

    def _grown(self, made: Workload, batch: int, train: TrainConfig | None) -> Growth:
        """How the batch grows: the workload at `batch` is compared with one at another batch, once."""
        if not self._growth:
            other = 2 * batch if self.default_batch in (None, batch) else self.default_batch
            name, shapes, others = made.name or self.given_name, _what_grows(made), self._shapes_at(other, batch, train)
            self._growth.append(growth(name, batch, shapes, other, others))
        return self._growth[0]

    def _shapes_at(self, other: int, batch: int, train: TrainConfig | None) -> Any:
        """What grows, at another batch than the requested one.

        Raises:
            UsageError: the workload can't be made at that batch.
        """
        try:
            with self._tracing():
                return _what_grows(self.make(other, **self._options(train)))
        except JaxrematError as error:
            raise UsageError(
                f"{self.given_name} makes batch {batch} and no batch {other}, and two are compared to see what grows",
                cause=str(error),
                next_step="a function that takes any batch, or leave the keyword batch out for one batch",
            ) from error

    @functools.cached_property
    def _made_before(self) -> dict[tuple[Any, ...], Workload]:
        return {}

    @functools.cached_property
    def _growth(self) -> list[Growth]:
        """How the batch grows. Empty before two batches were compared."""
        return []


def _units(leaf: Any, dims: Sequence[tuple[Fraction, Fraction]]) -> Iterator[int]:
    """The batches whose multiples the mesh divides, for each axis of an array that grows.

    Args:
        leaf: the array's shape and sharding.
        dims: for each axis, its size at batch 0 and the rows that a sample adds.
    """
    for (base, rate), divided in zip(dims, leaf.sharding.spec, strict=False):
        parts = math.prod(leaf.sharding.mesh.shape[axis] for axis in axes_in([divided]))
        if rate and base == 0:
            yield (Fraction(parts) / rate).numerator


def _with_frozen(workload: Workload, kind: Kind) -> Kind:
    """The layers with their frozen leaves, which have the dtype that a step stores them in.

    The names of the values depend on it: a kernel that is stored in the compute dtype isn't converted.
    """
    frozen, dtype = _frozen_leaves(workload, kind.args), workload.frozen_dtype
    leaves, tree = jax.tree.flatten(kind.args)
    stored = [
        jax.ShapeDtypeStruct(leaf.shape, dtype) if dtype and number in frozen and is_float(leaf) else leaf
        for number, leaf in enumerate(leaves)
    ]
    return replace(kind, args=tree.unflatten(stored), frozen=frozen)


def _frozen_leaves(workload: Workload, args: Any) -> frozenset[int]:
    """The numbers of the leaves of a Flax layer's arguments that are frozen in every layer."""
    trained_leaves = jax.tree.leaves_with_path(workload.trained_params)
    ends = [[f"/{path_text(path)}" for path, _ in leaves] for leaves in (workload.frozen, trained_leaves)]
    names = [path_text(path).partition("/params")[2] or "." for path, _ in jax.tree.leaves_with_path(args)]
    frozen, trained = ([any(end.endswith(name) for end in some) for name in names] for some in ends)
    return frozenset(number for number in range(len(names)) if frozen[number] and not trained[number])


def _layers_in(workload: Workload) -> FoundLayers | None:
    if workload.loss is None or workload.own_layers:
        return None
    with tracing_on(workload.mesh, is_own=True):
        if workload.trainable is None:
            return find_layers(workload.loss, *workload.loss_args, layers=workload.layers)
        loss, (params, *rest) = workload.loss, workload.loss_args
        parts = workload.split(params)

        def of_parts(parts: Any, *rest: Any) -> Any:
            return loss(combine(*parts), *rest)

        num_trained = len(jax.tree.leaves(parts[0]))
        return layers_in(of_parts, (parts, *rest), {}, workload.layers, num_trained)


def _what_grows(workload: Workload) -> Any:
    """The shapes of what grows with the batch: the batch of a loss, or the arguments of a step."""
    return workload.abstract_args if workload.loss is None else workload.abstract_batch


def given_factory(
    given: GivenModel,
    mesh: AnyMesh | None = None,
    target: Any = None,
    devices: Callable[[], Sequence[Any]] | None = None,
    batch: int | None = None,
) -> WorkloadFactory:
    """The factory of what --model names. The user's code is imported here.

    Args:
        given: what --model names.
        mesh: the devices. None for one device.
        target: the `Target` that it is compiled for. None where it isn't known.
        devices: the devices for a function with the keyword `devices`, which makes a mesh of its own.
        batch: the batch that --batch gives, for a function whose keyword `batch` has no number as default.

    Raises:
        UsageError: there is no such code, or it can't make a workload.
        UserCodeError: the code raised an exception.
    """
    from jaxremat.workload.load import load_factory

    with tracing_for(target), tracing_on(mesh):
        made = load_factory(given.spec, given.words, devices, **given.keywords)
        if made.has_free_batch and made.default_batch is None:
            made = replace(made, default_batch=batch)
        if mesh is not None and jax.sharding.get_abstract_mesh() != mesh.abstract_mesh:
            raise UsageError(
                f"--mesh was given, and the import of {made.name} sets a mesh for the whole process",
                cause="jax.set_mesh(mesh) outside of a with statement",
                next_step="--mesh says which mesh; put the call under if __name__ == '__main__'",
            )
    requested = {"spec": made.name, "arguments": {name: repr(value) for name, value in made.arguments.items()}}
    requested |= {"layers": list(given.layers)}
    return WorkloadFactory(
        made.name,
        made,
        made.has_free_batch,
        given.layers,
        given.keywords.get("seq_len"),
        requested,
        None if made.takes_devices else mesh,
        target,
        default_batch=made.default_batch,
        options=made.options,
    )


def factory_of(workload: Workload, name: str = "workload") -> WorkloadFactory:
    """The factory of one workload with its one batch."""
    return WorkloadFactory(name, lambda batch: workload)


def shape_text(tree: Any) -> str:
    """The shapes of a tree's leaves: `int32[8,1025]` or `float32[8,224,224,3], int32[8]`.

    Of many leaves, the first three.
    """
    leaves = [
        f"{leaf.dtype if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else jnp.dtype(leaf.dtype).name}"
        f"[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(tree)
    ]
    return ", ".join(leaves[:3]) + (f" and {len(leaves) - 3} more" if len(leaves) > 3 else "")
