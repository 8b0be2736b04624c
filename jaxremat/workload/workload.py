"""`jaxremat.Workload`: what is trained, however it was written.

A loss with its parameters and one batch is enough. Shapes stand for arrays, so nothing is allocated:

    params = jax.eval_shape(init, jax.random.key(0))
    batch = {"x": jax.ShapeDtypeStruct((8, 128), jnp.float32), "y": jax.ShapeDtypeStruct((8,), jnp.int32)}
    workload = jaxremat.Workload(loss=loss, params=params, batch=batch)     # loss(params, batch) -> scalar

A whole train step can be given in place of the loss: `jaxremat.Workload(step=train_step, args=(state, batch))`.
"""

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxremat.errors import UsageError, reject
from jaxremat.mesh.sharding import given_sharding
from jaxremat.policy.jax_private import core
from jaxremat.policy.spec import OWN, Policy
from jaxremat.policy.state import shared_variable, split_trained
from jaxremat.policy.tree import combine, path_text
from jaxremat.policy.with_policy import with_policy
from jaxremat.units import gib
from jaxremat.workload.own_layers import OwnLayers
from jaxremat.workload.samples import Samples, samples_of_one
from jaxremat.workload.trainable import Narrowed, Trainable, trained_paths

if TYPE_CHECKING:
    import optax

#: Concrete arrays of a workload may take so many bytes.
MAX_CONCRETE_BYTES = 2**30
#: The fields that are functions.
_FUNCTIONS = (
    *("loss", "step", "init", "batches", "eval_loss", "eval_batches", "loss_under", "matrix_axes", "logical_axes"),
    *("data_hash", "write_text", "read_weights", "otherwise", "as_config"),
)
#: The fields that go with a loss alone.
_OF_LOSS = (
    *("params", "batch", "init", "batches", "eval_loss", "eval_batches", "measured", "optimizer", "layers", "loss_under"),
    *("matrix_axes", "logical_axes", "own_layers", "as_config", "trainable"),
)
#: The dtypes of quantized parameters.
_QUANTIZED = (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4)
_SHAPES = "give shapes in place of arrays: jax.eval_shape(init, key), or jax.ShapeDtypeStruct(shape, dtype)"


@dataclass(frozen=True)
class Measured:
    """The batches of measured steps, where others than those of a training.

    Attributes:
        batches: makes an iterator of them, from the batch with the number `first` on.
        said: what they are, in words.
    """

    batches: Callable[[int], Iterator[Any]]
    said: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """What is trained: a loss with parameters and a batch, or a whole train step.

    With a loss, the train step around it is made here: gradients, microbatches and the optimizer. With a step, the step is
    compiled as it is.

    Attributes:
        loss: `loss(params, batch)` or `loss(params, batch, key)` with a random key. It returns a float scalar, or
            `(scalar, aux)` with any tree of arrays as its auxiliary values.
        params: the parameters, a tree of arrays or shapes (`jax.ShapeDtypeStruct`). Only its float leaves are differentiated. An
            NNX model, or the state of one, is such a tree: its parameters (`nnx.Param`) are differentiated, and the other
            variables go from step to step as the loss changes them.
        batch: one microbatch, a tree of arrays or shapes (`jax.ShapeDtypeStruct`). Its samples are what grows with the keyword
            `batch` of the function that makes the workload, on any axis of any array. Those of a workload without such a
            function are the leading axis on which its arrays agree.
        step: in place of the loss, a whole train step with the gradient inside.
        args: the arguments of `step`, arrays or shapes (`jax.ShapeDtypeStruct`).
        donate_argnums: the numbers of the arguments of `step` whose buffers its results may reuse.
        microbatches: how many microbatches `step` computes the gradients of, each of `batch` samples. The samples of a step are
            those of all. With a loss, --accumulate says it.
        init: makes real parameters from a random key, to run steps. Without it concrete `params` are used. With neither, steps
            are compiled and never run.
        batches: makes an iterator of real batches, to run steps over. Without it random values of the batch's shapes are used.
            With a keyword `first`, it is called with the number of the batch to begin with, where a training resumes.
        eval_loss: `loss(params, batch)` of the evaluation, which returns a float scalar. By default `loss` evaluates, with the
            same random key each time.
        eval_batches: makes an iterator of batches to evaluate on. Without it nothing is evaluated.
        measured: the batches of measured steps (`Measured`). By default `batches`.
        optimizer: the optimizer. Without it --optimizer chooses one.
        trainable: which parameters are trained: glob patterns of names in their paths, such as `lora_*`, or a function of a path,
            such as `layers/mlp/kernel`, and a shape. The others are frozen: they have no gradients, no optimizer state, and the
            dtype that they come in, which may be an integer one. By default all float leaves are trained.
        frozen_dtype: the dtype that frozen float leaves are stored in. By default their own.
        layers: glob patterns of the scopes of the repeated layers, such as `blocks_*`, where they aren't found without help.
        model_flops: FLOPs of the step of one microbatch without recomputation, for MFU. Default: those under `none`.
        num_tokens: tokens in one microbatch. With it tokens per second are shown, and without it samples per second.
        name: what the workload is called in tables and records. By default what --model said.
        loss_under: makes the loss under a policy, but not under `own`, which is `loss`. By default
            `jaxremat.with_policy(loss, policy, layers)`.
        as_config: the lines that say a policy in the author's own configuration, such as `remat_policy: full`, or None for a
            policy that it can't say. A plan is one of the policies that it can say, and ends with these lines.
        matrix_axes: by a parameter's path and shape, which of its axes make up the rows and columns of a matrix, in the form of
            `optax.contrib.MuonDimensionNumbers`; None for a parameter that is no matrix. Muon and Adafactor use it. By default
            optax's own rules decide.
        logical_axes: by a parameter's path and shape, the logical axis of each of its dimensions, such as `embed`, for a mesh.
            None for a dimension that isn't divided. By default the largest dimension of a parameter is. Shapes may bring a
            `NamedSharding` of their own in its place. Those of `args` must, for a mesh.
        joined_microbatches: whether several microbatches come joined along the axis of samples, `[accumulate x batch, ...]`. By
            default they are stacked on a new first axis, `[accumulate, batch, ...]`. An array that doesn't grow with the batch
            comes once in either case.
        mesh: a mesh of its own, with any axes, over the devices that the workload's function gets by its keyword `devices`. An
            array lies on it by its own `NamedSharding`, and is replicated without one. What the optimizer has of a parameter lies
            as the parameter does. The functions are traced as under `jax.set_mesh(mesh)`, and the batch is that of all devices.
            Without it `--mesh` makes a mesh.
        samples: how the arrays of the batch count samples (`jaxremat.workload.samples`). By default the workloads of two batches
            are compared, where a function with the keyword `batch` makes them.
        own_layers: the repeated layers, where the author says which they are (`jaxremat.workload.own_layers`). By default they
            are found.
        compute_dtype: the dtype that it computes in, if it is one for all.
        attention: what records call its attention, such as `xla`.
        notes: lines for the heading of a command.
        data_hash: makes a hash of what it is trained on. A training that is resumed compares it.
        write_text: `write_text(params, num_tokens)` is a text that the model writes, for `jaxremat train --sample-tokens`.
        read_weights: `read_weights(path, key)` has the parameters with the values of a file or folder, for `jaxremat train
            --weights`. Parameters that aren't there, such as those of adapters, have first values by the random key.
        otherwise: makes another workload that computes the same, tried where XLA rejects a step, and the flag that chooses it.

    Raises:
        UsageError: fields that contradict each other, a loss of other arguments or results, or gigabytes of concrete arrays.
    """

    loss: Callable[..., Any] | None = None
    params: Any = None
    batch: Any = None
    step: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    donate_argnums: int | tuple[int, ...] = ()
    microbatches: int = 1
    init: Callable[[jax.Array], Any] | None = None
    batches: Callable[..., Iterator[Any]] | None = None
    eval_loss: Callable[..., Any] | None = None
    eval_batches: Callable[[], Iterator[Any]] | None = None
    measured: Measured | None = None
    optimizer: "optax.GradientTransformation | None" = None
    trainable: Trainable | Narrowed = None
    frozen_dtype: str = ""
    layers: str | tuple[str, ...] | None = None
    model_flops: int | None = None
    num_tokens: int | None = None
    name: str = ""
    loss_under: Callable[[Policy], Callable[..., Any]] | None = None
    as_config: Callable[[Policy], tuple[str, ...] | None] | None = None
    matrix_axes: Callable[[Any, tuple[int, ...]], Any] | None = None
    logical_axes: Callable[[Any, tuple[int, ...]], Any] | None = None
    joined_microbatches: bool = False
    mesh: Mesh | None = None
    samples: Samples | None = None
    own_layers: OwnLayers | None = None
    compute_dtype: str = ""
    attention: str | None = None
    notes: tuple[str, ...] = ()
    data_hash: Callable[[], str] | None = None
    write_text: Callable[[Any, int], str] | None = None
    read_weights: Callable[[Path, jax.Array], Any] | None = None
    otherwise: "Callable[[], tuple[Workload, str]] | None" = None

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            got = "neither a loss nor a step" if self.loss is None else "both a loss and a step"
            raise _bad_workload(
                got, "Workload(loss=f, params=..., batch=...) or Workload(step=f, args=(...))", "give one of the two"
            )
        for name in _FUNCTIONS:
            if (value := getattr(self, name)) is not None and not callable(value):
                raise _bad_workload(f"{name}={value!r}", "a function", f"give {name} as a function")
        _check_values(self)
        if self.loss is not None:
            _check_loss(self)
        else:
            _check_step(self)
        _check_leaves(self)
        if self.mesh is not None:
            _ = jax.tree.map(self._on_mesh, (self.params, self.batch, self.args))

    @property
    def abstract_params(self) -> Any:
        """The parameters as shapes (`jax.ShapeDtypeStruct`).

        On a mesh of its own, they and the other arrays of the workload have the shardings by which they lie on it.
        """
        return self.stored(jax.tree.map(self._as_struct, self.params))

    @property
    def trained_params(self) -> Any:
        """The parameters that are differentiated, as shapes.

        These are the float leaves, of an NNX model those of its `nnx.Param`, which `trainable` chooses among.
        """
        return self.split(self.abstract_params)[0]

    def split(self, params: Any) -> tuple[Any, Any]:
        """`params` with only the trained leaves, and `params` with only the others.

        The leaves left out are None.
        """
        return split_trained(params, None if self.trainable is None else self._trained.__contains__)

    @property
    def frozen(self) -> list[tuple[Any, jax.ShapeDtypeStruct]]:
        """The paths and shapes of the leaves that `trainable` doesn't choose.

        Empty where all are trained.
        """
        return [] if self.trainable is None else jax.tree.leaves_with_path(self.split(self.abstract_params)[1])

    @functools.cached_property
    def _trained(self) -> frozenset[str]:
        """The paths of the trained parameters."""
        floats, _ = split_trained(jax.tree.map(as_struct, self.params))
        return trained_paths(self.trainable, {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(floats)})

    def stored(self, params: Any) -> Any:
        """`params` as a step's state has them: the frozen float leaves are in `frozen_dtype`."""
        if self.trainable is None or not self.frozen_dtype:
            return params
        floats, others = self.split(params)
        dtype = jnp.dtype(self.frozen_dtype)
        frozen, rest = split_trained(others)
        return combine(floats, combine(jax.tree.map(lambda leaf: _as_dtype(leaf, dtype), frozen), rest))

    @property
    def abstract_batch(self) -> Any:
        """One microbatch as shapes (`jax.ShapeDtypeStruct`)."""
        return jax.tree.map(self._as_struct, self.batch)

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """The arguments of the step as shapes (`jax.ShapeDtypeStruct`)."""
        return jax.tree.map(_as_struct_where_it_lies if self.mesh is None else self._on_mesh, self.args)

    def _as_struct(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return as_struct(leaf) if self.mesh is None else self._on_mesh(leaf)

    def _on_mesh(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """A leaf as a shape, with its sharding on the workload's own mesh.

        Raises:
            UsageError: its sharding is one of another mesh, or divides a dimension unevenly.
        """
        assert self.mesh is not None, "a workload without a mesh has no shardings on it"
        struct, given = as_struct(leaf), getattr(leaf, "sharding", None)
        if not isinstance(given, NamedSharding):
            return struct.update(sharding=NamedSharding(self.mesh, PartitionSpec()))
        is_other = given.mesh != self.mesh if isinstance(given.mesh, Mesh) else given.mesh.shape != self.mesh.shape
        if is_other:
            raise _bad_workload(
                f"mesh={_mesh_text(self.mesh)} and an array {list(struct.shape)} on {_mesh_text(given.mesh)}",
                "NamedShardings on the workload's mesh",
                "make the mesh of the devices that the function gets, once: def workload(batch: int = 8, devices=None)",
            )
        sharding = given_sharding(self.mesh, struct.update(sharding=given))
        return struct.update(sharding=sharding)

    @property
    def num_samples(self) -> int | None:
        """Samples in one microbatch.

        None for a workload that is a step, and where nobody can count them.
        """
        return None if self.loss is None else self.counted.number

    @functools.cached_property
    def counted(self) -> Samples:
        """How the arrays of the batch count samples."""
        return self.samples or samples_of_one(self.abstract_batch)

    @property
    def num_params(self) -> int:
        """The number of values in the float leaves, trained and frozen.

        Where parameters are frozen, integers of at most 8 bits count too: they are quantized parameters. 0 for a workload that is
        a step.
        """
        floats, others = split_trained(self.abstract_params)
        quantized = [leaf for leaf in jax.tree.leaves(others) if leaf.dtype in _QUANTIZED and self.trainable is not None]
        return sum(leaf.size for leaf in (*jax.tree.leaves(floats), *quantized))

    @property
    def num_trained(self) -> int | None:
        """The number of trained values. None where `trainable` chooses none of them."""
        return None if self.trainable is None else sum(leaf.size for leaf in jax.tree.leaves(self.trained_params))

    @property
    def param_dtypes(self) -> tuple[str, ...]:
        """The dtypes of the trained leaves of the parameters, each once."""
        return tuple(dict.fromkeys(str(leaf.dtype) for leaf in jax.tree.leaves(self.trained_params)))

    @property
    def has_evaluation(self) -> bool:
        """Whether there is a batch to evaluate. A text may be too short to hold one out."""
        return self.eval_batches is not None and next(iter(self.eval_batches()), None) is not None

    @property
    def takes_key(self) -> bool:
        """Whether the loss takes a random key as its third argument."""
        return self.loss is not None and _num_arguments(self.loss) == 3

    @functools.cached_property
    def abstract_result(self) -> tuple[jax.ShapeDtypeStruct, tuple[Any, ...]]:
        """The shapes that the loss returns: the scalar, and a tuple of its auxiliary values, if any.

        The loss is traced for it.

        Raises:
            UsageError: the loss returns neither a float scalar nor `(float scalar, aux)`, or no parameter reaches it.
        """
        assert self.loss is not None
        loss = self.loss
        traced, result = jax.make_jaxpr(lambda *args: loss_and_aux(loss(*args)), return_shape=True)(*self.loss_args)
        if not _is_reached(traced.jaxpr, len(jax.tree.leaves(self.loss_args[0]))):
            raise UsageError(
                "Workload got a loss without a gradient: it doesn't depend on params, or only through integers",
                allowed="a loss that floating-point operations make of params",
                cause="a loss and its auxiliary value that are swapped, or a loss that closes over its parameters",
                next_step="return loss, aux; and take the parameters from the first argument",
            )
        return result

    @property
    def loss_args(self) -> tuple[Any, ...]:
        """The shapes of the loss's arguments: parameters, a microbatch, and the key if it takes one."""
        key = (jax.eval_shape(lambda: jax.random.key(0)),) if self.takes_key else ()
        return (self.abstract_params, self.abstract_batch, *key)

    def loss_with(self, policy: Policy) -> Callable[..., Any]:
        """The loss under `policy`.

        Under `none` its layers have no checkpoints, even where the author wrote some. Under `own` it is the loss itself.
        """
        assert self.loss is not None
        if policy == OWN:
            return self.loss
        if self.loss_under is not None:
            return self.loss_under(policy)
        return with_policy(self.loss, policy, self.layers)

    def batches_from(self, first: int) -> Iterator[Any]:
        """The batches from number `first` on.

        Earlier ones are made and dropped, unless `batches` takes `first`.
        """
        assert self.batches is not None
        if any(parameter.name == "first" for parameter in _parameters(self.batches) or ()):
            return iter(self.batches(first=first))
        return itertools.islice(self.batches(), first, None)

    @property
    def obstacle_to_running(self) -> str:
        """Why the step can't be run, only compiled. Empty where it can be run.

        After a semicolon comes what helps. jax 0.10 takes parameters of 4 bits for arrays of another layout, where it calls a
        compiled step.
        """
        if self.loss is None:
            return "" if is_concrete(self.args) else "its args are shapes; give arrays to have it run"
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(self.abstract_params)}
        if dtypes & {jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4)} and jax.__version_info__ < (0, 11):
            return "this jax can't run parameters of 4 bits; pip install -U jax, or give 8 bits (--quantize-base int8)"
        if self.init is not None or is_concrete(self.params):
            return ""
        return "its params are shapes; give init=, or arrays, to have it run"


def with_functions(workload: Workload, wrap: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> Workload:
    """The same workload with `wrap(function, part)` in place of its functions of arrays.

    `part` is such as `loss`. The functions of its optimizer are wrapped, too, and what `loss_under` returns. Iterators of
    batches aren't.
    """
    import optax

    wrapped: dict[str, Any] = {
        part: wrap(function, part)
        for part in ("loss", "step", "init", "eval_loss", "matrix_axes", "loss_under", "write_text")
        if (function := vars(workload)[part]) is not None
    }
    if under := wrapped.get("loss_under"):
        wrapped["loss_under"] = lambda policy: wrap(under(policy), "loss")
    if isinstance(workload.optimizer, optax.GradientTransformation):
        parts = {name: wrap(function, "optimizer") for name, function in workload.optimizer._asdict().items()}
        wrapped["optimizer"] = workload.optimizer._replace(**parts)
    return replace(workload, **wrapped)


def loss_and_aux(found: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    """What a loss returned, in one form: `(loss, ())` for a scalar, `(loss, (aux,))` for a pair.

    Raises:
        UsageError: it is neither a float scalar nor a pair that begins with one.
    """
    value, *aux = found if isinstance(found, tuple) and len(found) == 2 else (found,)
    if not (isinstance(value, jax.Array) and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)):
        raise _bad_workload(
            f"a loss that returns {jax.tree.map(_shown, found)}",
            "a float scalar, or a pair of a float scalar and auxiliary values",
            "reduce the loss to a scalar, with jnp.mean for example",
        )
    return value, tuple(aux)


def _is_reached(jaxpr: Any, num_params: int) -> bool:
    """Whether the first result depends on one of the first arguments by floating-point values."""

    def is_inexact(aval: Any) -> bool:
        return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)

    def floats(variables: Any) -> set[Any]:
        return {var for var in variables if isinstance(var, core.Var) and is_inexact(var.aval)}

    reached = floats(jaxpr.invars[:num_params])
    for equation in jaxpr.eqns:
        if not reached.isdisjoint(floats(equation.invars)):
            reached |= floats(equation.outvars)
    return not reached.isdisjoint(floats(jaxpr.outvars[:1]))


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, jax.Array) else repr(leaf)


def as_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, a number or a `jax.ShapeDtypeStruct`.

    The latter's sharding stays, if it has one.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    found = jax.eval_shape(lambda x: x, leaf)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=found.weak_type)


def _as_dtype(leaf: Any, dtype: jnp.dtype) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    return leaf.astype(dtype) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf, dtype)


def _as_struct_where_it_lies(leaf: Any) -> jax.ShapeDtypeStruct:
    """As `as_struct`. An array on a mesh of devices has its sharding, without the devices."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(sharding, NamedSharding):
        return as_struct(leaf)
    return as_struct(leaf).update(sharding=NamedSharding(sharding.mesh.abstract_mesh, sharding.spec))


def _mesh_text(mesh: Any) -> str:
    """A mesh in words: its axes, and its first device if it has devices."""
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{axes} of {mesh.devices.flat[0]}..." if isinstance(mesh, Mesh) else axes


def is_concrete(tree: Any) -> bool:
    """Whether no leaf of a tree is a `jax.ShapeDtypeStruct`."""
    return not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _bad_workload(got: str, allowed: str, next_step: str) -> UsageError:
    return UsageError(f"Workload got {got}", allowed=allowed, next_step=next_step)


def _num_arguments(function: Callable[..., Any]) -> int | None:
    """How many positional arguments a function needs.

    None where its signature can't be read, or it takes any number. Arguments with a default don't count:
    `loss(params, batch, scale=1.0)` has two.
    """
    parameters = _parameters(function)
    if parameters is None:
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters) and len(positional) < 2:
        return None
    needed = [p for p in positional if p.default is p.empty]
    named_key = [p for p in positional[2:3] if p.default is None and p.name in ("key", "rng")]
    return len(needed) + len(named_key)


def _needed_keywords(function: Callable[..., Any]) -> list[str]:
    """The keyword-only arguments without a default. Empty where the signature can't be read."""
    return [p.name for p in _parameters(function) or () if p.kind == p.KEYWORD_ONLY and p.default is p.empty]


def _unpassed_key(function: Callable[..., Any]) -> str | None:
    """The argument that would be a random key, and isn't passed. It has the default None.

    None where there is none, or where the third argument is passed the key.
    """
    if _num_arguments(function) == 3:
        return None
    optional = (p.name for p in _parameters(function) or () if p.default is None)
    return next((name for name in optional if re.search(r"(^|_)(key|rngs?)$", name)), None)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function.

    None where its signature can't be read, as of some functions written in C.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _check_values(workload: Workload) -> None:
    """Raises UsageError for a field that is no function and no tree and can't be meant."""
    layers, donated, optimizer = workload.layers, workload.donate_argnums, workload.optimizer
    for name in ("model_flops", "num_tokens"):
        value = getattr(workload, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf
        ):
            raise _bad_workload(f"{name}={value!r}", "a number above 0", f"leave {name} out where it isn't known")
    if optimizer is not None and not (callable(getattr(optimizer, "init", 0)) and callable(getattr(optimizer, "update", 0))):
        raise _bad_workload(
            f"optimizer={optimizer!r}",
            "an optax.GradientTransformation",
            "optimizer=optax.adamw(1e-3), or --optimizer adamw",
        )
    if layers is not None and not (isinstance(layers, str) or _is_tuple_of(layers, str)):
        raise _bad_workload(f"layers={layers!r}", "a pattern or a tuple of patterns", "layers='blocks_*'")
    if not isinstance(donated, int) and not _is_tuple_of(donated, int):
        raise _bad_workload(f"donate_argnums={donated!r}", "numbers of the step's arguments", "donate_argnums=0, or (0, 1)")
    trained = workload.trainable
    if not (trained is None or isinstance(trained, str | Narrowed) or _is_tuple_of(trained, str) or callable(trained)):
        raise _bad_workload(
            f"trainable={trained!r}",
            "a pattern, a tuple of patterns, or a function of path and leaf",
            "trainable=('lora_*',)",
        )
    if workload.frozen_dtype:
        try:
            jnp.dtype(workload.frozen_dtype)
        except TypeError:
            raise _bad_workload(
                f"frozen_dtype={workload.frozen_dtype!r}", "the name of a dtype", "frozen_dtype='bfloat16'"
            ) from None
    if not isinstance(workload.name, str):
        raise _bad_workload(f"name={workload.name!r}", "a text", "name='my model'")
    if not isinstance(workload.mesh, Mesh | None):
        raise _bad_workload(
            f"mesh of type {type(workload.mesh).__name__}",
            "a jax.sharding.Mesh",
            "mesh=jax.sharding.Mesh(np.reshape(devices, (2, 4)), ('data', 'model')), with the keyword devices of your function",
        )
    if not isinstance(workload.samples, Samples | None):
        raise _bad_workload(
            f"samples={workload.samples!r}",
            "a jaxremat.workload.samples.Samples",
            "leave it out: samples are what grows with the keyword batch of your function",
        )
    several = workload.microbatches
    if not isinstance(several, int) or isinstance(several, bool) or several < 1:
        raise _bad_workload(f"microbatches={several!r}", "a whole number from 1", "microbatches=4, or leave it out for 1")
    if not isinstance(workload.joined_microbatches, bool):
        raise _bad_workload(
            f"joined_microbatches={workload.joined_microbatches!r}", "True or False", "leave it out for False"
        )


def _is_tuple_of(value: Any, kind: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, kind) for item in value)


def _check_loss(workload: Workload) -> None:
    """Raises UsageError for fields that don't go with a loss."""
    assert workload.loss is not None
    of_step = "args" if workload.args else "donate_argnums" if workload.donate_argnums != () else ""
    empty = next((name for name in ("params", "batch") if not jax.tree.leaves(getattr(workload, name))), "")
    number, names, key = _num_arguments(workload.loss), _needed_keywords(workload.loss), _unpassed_key(workload.loss)
    loss, what = (
        "loss(params, batch) or loss(params, batch, key)",
        "no" if getattr(workload, empty, None) is None else "an empty",
    )
    reject(
        (of_step, f"Workload got a loss and {of_step}", f"leave {of_step} out; give params and batch with a loss", "",
         f"{of_step} with a step"),
        (workload.microbatches > 1, f"Workload got a loss and microbatches={workload.microbatches}",
         "leave microbatches out, and give --accumulate", "", "microbatches with a step"),
        (empty, f"Workload got a loss and {what} {empty}", f"give {empty}=", "", "a tree of arrays or jax.ShapeDtypeStructs"),
        (number not in (None, 2, 3), f"Workload got a loss of {number} arguments",
         "bind the others, with functools.partial for example", "", loss),
        (names, f"Workload got a loss that needs the keyword {[*names, ''][0]!r}",
         "take the key by position, and bind the others, with functools.partial for example", "", loss),
        (key, f"Workload got a loss whose argument {key!r} is given nothing",
         "make the key the third argument; or without random numbers: loss=lambda params, batch: loss(params, batch)",
         "the step would have no random numbers, and no dropout", loss),
    )  # fmt: skip


def _check_step(workload: Workload) -> None:
    """Raises UsageError for fields that don't go with a step."""
    of_loss = next((name for name in _OF_LOSS if getattr(workload, name) is not None), "")
    donated, args = workload.donate_argnums, workload.args
    count = len(args) if isinstance(args, tuple) else 0
    absent = [n for n in (donated if isinstance(donated, tuple) else (donated,)) if n not in range(count)]
    reject(
        (of_loss, f"Workload got a step and {of_loss}", f"leave {of_loss} out; give the step's args", "",
         f"{of_loss} with a loss"),
        (not jax.tree.leaves(args), "Workload got a step and no args", "give args=(state, batch)", "",
         "a tuple of the step's arguments"),
        (not isinstance(args, tuple), f"Workload got args of type {type(args).__name__}", "args=(state, batch)", "",
         "a tuple of the step's arguments"),
        (absent, f"Workload got donate_argnums with {[*absent, 0][0]}, and {count} args", "0 for the first argument", "",
         f"numbers from 0 to {count - 1}"),
    )  # fmt: skip


def _check_leaves(workload: Workload) -> None:
    """Raises UsageError for a leaf that is no array, a scalar batch, and gigabytes of arrays."""
    trees = {"params": workload.params, "batch": workload.batch} if workload.loss else {"args": workload.args}
    num_bytes = 0
    for name, tree in trees.items():
        if paths := shared_variable(tree):
            raise _bad_workload(
                f"{name} that has one NNX variable twice, at {paths}",
                "trees of arrays, where each variable is once",
                "graph, state = nnx.split(model) has it once; give state, and call nnx.merge(graph, state) in the function",
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray | np.generic | int | float | complex):
                raise _bad_workload(
                    f"{name}{jax.tree_util.keystr(path)} of type {type(leaf).__name__}",
                    "arrays, numbers and jax.ShapeDtypeStructs",
                    "put what is no array into the function's closure (Equinox: eqx.partition)",
                )
            if isinstance(leaf, jax.ShapeDtypeStruct) and not all(hasattr(size, "__index__") for size in leaf.shape):
                raise _bad_workload(
                    f"{name}{jax.tree_util.keystr(path)} of shape {leaf.shape}", "whole numbers", "give the shape in numbers"
                )
            if isinstance(leaf, jax.Array | np.ndarray):
                num_bytes += leaf.size * leaf.dtype.itemsize
    if num_bytes > MAX_CONCRETE_BYTES:
        raise _bad_workload(f"{gib(num_bytes)} of arrays", f"up to {gib(MAX_CONCRETE_BYTES)}", _SHAPES)
    if workload.loss and not any(leaf.shape for leaf in jax.tree.leaves(workload.abstract_batch)):
        raise _bad_workload("a batch of scalars", "an array with an axis of samples", "give the batch such an array")
    if workload.loss and not jax.tree.leaves(workload.trained_params):
        raise _bad_workload("params without a float leaf", "parameters to differentiate by", "give the weights in params")
