"""Finds the values that a traced step saves for the checkpoints of its backward pass.

For example, a scan over 12 checkpointed layers saves `mlp_out` by name. JAX then stacks 12 values with that name in the
forward loop, and the backward loop reads the stack. The walk here follows each value from the equation that makes it, through
loops and inner functions, to the checkpoint that reads it:

    SavedValues("input", "", num_values=12, num_bytes=603979776)
    SavedValues("name", "mlp_out", num_values=12, num_bytes=603979776)

JAX leaves out what no backward operation reads, even where the policy names it. The list is exact for the traced program, and
so are its bytes. XLA may still store a value in another layout or precision.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxremat.mesh.axes import ONE_DEVICE, MeshAxes
from jaxremat.mesh.sharding import num_parts
from jaxremat.policy.calls import split_operands
from jaxremat.policy.jax_private import core, name_in, num_operands, written_name
from jaxremat.xla.categories import is_recompute, phase_of
from jaxremat.xla.step_facts import SavedKind, SavedValues
from jaxremat.xla.traced import STEP, inner_jaxprs, is_call, is_recomputing, saves, saves_elementwise, scope_of

#: Operations whose result has the values of their operand, in the same number of bytes.
_SAME_BYTES = frozenset(
    {"reduce_precision", "optimization_barrier", "reshape", "transpose", "squeeze", "copy", "copy_p"}
    | {"sharding_constraint", "pvary"}
)
#: Operations that cut or cast an argument. The results count as the argument.
_OF_ARGUMENTS = frozenset(
    {"slice", "dynamic_slice", "convert_element_type", "broadcast_in_dim", "concatenate", *_SAME_BYTES}
)


@dataclass(frozen=True)
class Saved:
    """What a traced step saves for its checkpoints.

    Attributes:
        values: the values that the forward pass saves, the most bytes first. Arguments of the step and their slices aren't
            among them, as they are there in any case. Nor are casts of arguments without a name, and random keys.
        read_names: the names that a policy saves, and that a checkpoint reads. Under `every:K` some of them are saved only
            while a group of layers is recomputed, and aren't in `values`.
    """

    values: tuple[SavedValues, ...] = ()
    read_names: frozenset[str] = frozenset()


def saved_values(jaxpr: Any, mesh: MeshAxes = ONE_DEVICE) -> Saved:
    """What a traced step, `jax.jit(step).trace(...).jaxpr`, saves for its checkpoints.

    On a mesh the bytes are those of one device. What the step computes from the batch counts as divided evenly over all devices.
    What it casts of parameters counts as divided over all axes but `data`, unless a constraint says how it lies.
    """
    walk = _Walk(mesh)
    walk.run(jaxpr.jaxpr, _arguments(jaxpr.jaxpr), STEP)
    groups: dict[tuple[SavedKind, str, bool], list[_Value]] = defaultdict(list)
    for value, (kind, name) in walk.saved.items():
        groups[kind, name, value.on_host].append(value)
    found = [
        SavedValues(kind, name, sum(v.num_values for v in values), sum(walk.device_bytes(v) for v in values), on_host)
        for (kind, name, on_host), values in groups.items()
    ]
    return Saved(tuple(sorted(found, key=lambda some: -some.num_bytes)), frozenset(walk.read_names))


#: When a value is made: before differentiation (the arguments and what is made of them), in the forward pass, in a recompute,
#: or in the rest of the backward pass.
_Made = Literal["before", "forward", "again", "backward"]


@dataclass(frozen=True, eq=False)
class _Value:
    """A value of the program, whatever names it has on its way through loops and functions.

    `eqn` is the equation that made it; None for an argument, and for the input of a loop's iteration. `tags` are the equations
    that wrote checkpoint names on it. `num_parts` is the number of devices over which it is divided, where a constraint says so.
    `varies` is whether it is a differentiable function of some argument. A mask that is made of comparisons isn't.
    """

    made: _Made
    eqn: Any = None
    num_bytes: int = 0
    num_values: int = 1
    on_host: bool = False
    tags: list[Any] = field(default_factory=list)
    num_parts: int | None = None
    varies: bool = False


def _arguments(jaxpr: Any) -> list[_Value]:
    return [_Value("before", varies=_is_float(var)) for var in jaxpr.invars]


def _made_in(scope: str) -> _Made:
    if is_recompute(scope):
        return "again"
    phase = phase_of(scope)
    return "before" if phase in (None, "update") else phase


@dataclass
class _Walk:
    """The walk through the program.

    `saved` has each value that a checkpoint reads, with its kind and name.
    """

    mesh: MeshAxes
    saved: dict[_Value, tuple[SavedKind, str]] = field(default_factory=dict)
    read_names: set[str] = field(default_factory=set)

    def run(self, jaxpr: Any, operands: Sequence[_Value], scope: str) -> list[_Value]:
        """Walks through a jaxpr whose operands are known, and returns its results."""
        env = dict(zip(jaxpr.invars, operands, strict=True)) | {var: _Value("before") for var in jaxpr.constvars}

        def value(var: Any) -> _Value:
            return _Value("before") if isinstance(var, core.Literal) else env[var]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [value(var) for var in eqn.invars], scope_of(scope, eqn))
            env.update(zip(eqn.outvars, results, strict=True))
        return [value(var) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[_Value], scope: str) -> list[_Value]:
        made, kind, inner = _made_in(scope), eqn.primitive.name, inner_jaxprs(eqn)
        if is_recomputing(eqn, scope):
            self._read(operands, eqn.params["policy"], "loss" if _has_scalar_result(eqn, operands) else "input")
        elif made == "again":
            # A call of this kind is a checkpoint of the option `jax_remat3`. Its policy is by names, and can't be called.
            self._read(operands, _saves_names if kind == "call_hi_primitive" else None)
        if written_name(eqn):
            (operand,) = operands
            if operand.made == "before" and operand.eqn is not None:  # a cast or a gather of an argument
                parts = operand.num_parts or self.mesh.num_param_parts
                operand = replace(operand, made=made, tags=[], on_host=False, num_parts=parts)
            if operand.made == made:
                operand.tags.append(eqn)
            return [operand]
        if kind == "sharding_constraint" and operands[0].made == "before":
            parts, num_bytes = num_parts(eqn.params["sharding"]), _residual_bytes(eqn.outvars[0])
            return [replace(operands[0], eqn=eqn, num_bytes=num_bytes, num_parts=parts)]
        if kind in _SAME_BYTES:
            return operands[: len(eqn.outvars)]
        if kind == "device_put":
            return [self._moved(operand, var) for operand, var in zip(operands, eqn.outvars, strict=True)]
        if kind == "scan":
            return self._scan(eqn, operands, scope, made)
        if kind == "cond":
            results = zip(*(self.run(branch, operands[1:], scope) for branch in inner), strict=True)
            return [self._of_branches(values, operands, var) for values, var in zip(results, eqn.outvars, strict=True)]
        if len(inner) == 1 and is_call(eqn, inner[0]):
            results = self.run(inner[0], operands, scope)
            if kind != "shard_map":
                return results
            pairs = zip(results, eqn.outvars, strict=True)  # inside, a value has the shape of one device's part
            return [value if value in operands else replace(value, num_bytes=_residual_bytes(var)) for value, var in pairs]
        else:
            for body in inner:
                self.run(body, _arguments(body), scope)
        if kind in _OF_ARGUMENTS and all(operand.made == "before" for operand in operands):
            made = "before"
        varies = any(operand.varies for operand in operands)
        return [_Value(made, eqn, _residual_bytes(var), varies=varies and _is_float(var)) for var in eqn.outvars]

    def device_bytes(self, value: _Value) -> int:
        """Bytes of a value on one device."""
        return value.num_bytes // (value.num_parts or self.mesh.num_devices)

    def _moved(self, operand: _Value, var: Any) -> _Value:
        """The result of a `device_put`.

        A value that comes back from the host is the value that went there.
        """
        to_host = var.aval.memory_space == jax.memory.Space.Host
        return replace(operand, on_host=True) if to_host else operand

    def _of_branches(self, values: Sequence[_Value], operands: Sequence[_Value], var: Any) -> _Value:
        """One result of a `cond`.

        A branch may return an operand, or zeros in place of what another branch saves.
        """
        made = [value for value in values if value not in operands] or [*values]
        return replace(max(made, key=lambda value: value.varies), num_bytes=_residual_bytes(var))

    def _scan(self, eqn: Any, operands: list[_Value], scope: str, made: _Made) -> list[_Value]:
        """The results of a scan: its last state, then the stacks of one slice per iteration."""
        (body,), length = inner_jaxprs(eqn), eqn.params["length"]
        num_carry = num_operands(eqn)[1]
        consts, carry, slices = split_operands(eqn, operands)
        variables, varying = body.invars[len(consts) : len(consts) + len(carry)], [value.varies for value in carry]
        while True:  # what varies in one iteration may make more of the next one's state vary
            states = [_Value(made, None, _residual_bytes(var), varies=v) for var, v in zip(variables, varying, strict=True)]
            walk = replace(self, saved=dict(self.saved), read_names=set(self.read_names))
            inside = walk.run(body, [*consts, *states, *slices], scope)
            grown = [v or value.varies for v, value in zip(varying, inside, strict=False)]
            if grown == varying:
                break
            varying = grown
        self.saved, self.read_names = walk.saved, walk.read_names
        outside: dict[_Value, _Value] = {}
        for n, (value, var) in enumerate(zip(inside, eqn.outvars, strict=True)):
            times = 1 if n < num_carry else length
            whole = replace(value, num_bytes=_residual_bytes(var), num_values=value.num_values * times)
            outside.setdefault(value, whole if value.made != "before" else value)
        return [outside[value] for value in inside]

    def _read(self, values: Sequence[_Value], policy: Any, kind: SavedKind = "input") -> None:
        """Notes that a checkpoint with this policy reads the values.

        `kind` is that of its activations.
        """
        for value in values:
            tags = [] if saves_elementwise(policy) else value.tags
            names = [written_name(tag) for tag in tags if saves(policy, tag)]
            if value.made in ("forward", "again"):
                self.read_names.update(names)
            if value.made == "forward" and value not in self.saved and value.num_bytes:
                by_rule = value.eqn is not None and saves(policy, value.eqn)
                of_input = kind if value.varies else "other"
                self.saved[value] = ("name", names[0]) if names else (_kind_of(value.eqn) if by_rule else of_input, "")


def _saves_names(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that saves all values with a checkpoint name."""
    return bool(name_in(primitive, params))


def _has_scalar_result(eqn: Any, operands: Sequence[_Value]) -> bool:
    """Whether all gradients that a checkpoint gets are scalars.

    A gradient may be a constant, as that of a sum.
    """
    pairs = zip(eqn.invars, operands, strict=True)
    gradients = (v for v, of in pairs if _is_float(v) and (of.made == "backward" or (of.made == "before" and not of.varies)))
    return all(var.aval.size == 1 for var in gradients)


def _kind_of(eqn: Any) -> SavedKind:
    name = eqn.primitive.name
    if name.startswith("dot_product_attention"):
        return "attention"
    kinds: dict[str, SavedKind] = {"dot_general": "matmul", "conv_general_dilated": "convolution"}
    return kinds.get(name, "elementwise")


def _residual_bytes(var: Any) -> int:
    """Bytes of a value; 0 for random keys, which aren't worth counting.

    Raw keys are rows of 2 or 4 numbers.
    """
    is_raw_key = var.aval.dtype == jnp.uint32 and var.aval.shape[-1:] in ((2,), (4,))
    if is_raw_key or jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key):
        return 0
    return var.aval.size * var.aval.dtype.itemsize


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
