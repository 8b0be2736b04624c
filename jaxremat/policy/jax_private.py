"""What JAX doesn't promise and jaxremat reads all the same, in one place.

Classes and primitives that are known by name, parameters of equations, and modules that JAX may change in any version. Each has
a test in `tests/test_jax_private.py`, which says what is expected of JAX. That test is the first to run with a newer jax
(`experiments/next_jax.py`).

Operations by their name (`dot_general`) and the parameters `jaxpr`, `length`, `reverse` and `unroll` of a scan, which JAX prints
and documents, are read where they are needed.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as core
from jax.extend import source_info_util

NameStack = source_info_util.NameStack

#: The primitive of fused attention on GPUs (`jax.nn.dot_product_attention`). Beside the output it
#: gives the softmax statistics, which the backward kernel reads. The statistics have no checkpoint name. With a name on the
#: output alone, the kernel would therefore run twice. Saving the results of the primitive prevents that.
FUSED_ATTENTION = "dot_product_attention_fwd_wrapper"


class ResidualName(str):
    """The checkpoint name of what a fused attention saves that has no primitive of its own.

    That is its output and its softmax statistics. It equals the plain name, so that policies by names save these values too.
    """


def is_fused_attention(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Whether the results of an operation are what fused attention saves."""
    return primitive.name == FUSED_ATTENTION or (primitive.name == "name" and isinstance(params["name"], ResidualName))


# Policies of `jax.checkpoint` (jax/_src/ad_checkpoint.py).


def is_checkpoint(eqn: Any) -> bool:
    """Whether an equation is a `jax.checkpoint`.

    Its parameters are `policy`, `prevent_cse` and `differentiated`: whether it is one of a backward pass.
    """
    return eqn.primitive.name.startswith(("remat", "checkpoint")) and "prevent_cse" in eqn.params


def is_recompute_decision(decision: Any) -> bool:
    """Whether a policy answers that a value is recomputed: by False, or by JAX's `Recompute`."""
    return decision is False or type(decision).__name__ == "RecomputeType"


def is_save_decision(decision: Any) -> bool:
    """Whether a policy answers that a value is saved or offloaded."""
    return decision is True or type(decision).__name__ in ("SaveableType", "Offloadable")


def inside_policy(policy: Any) -> Iterator[Any]:
    """What is inside a policy, however deep: its closures, its attributes and its collections.

    JAX's own policies by names have their names in closures.
    """
    waiting, seen = [policy], set()
    while waiting:
        if id(thing := waiting.pop()) not in seen:
            seen.add(id(thing))
            yield thing
            if isinstance(thing, set | frozenset | tuple | list):
                waiting += [part for part in thing if not isinstance(part, str)]
            elif callable(thing):
                waiting += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
                waiting += getattr(thing, "__dict__", {}).values()


# Checkpoint names.


def written_name(eqn: Any) -> str:
    """The checkpoint name that an equation writes on its operand. Empty for all other equations."""
    return name_in(eqn.primitive, eqn.params)


def name_in(primitive: Any, params: Any) -> str:
    """`written_name` of an equation with this primitive and these parameters.

    Under the option `jax_remat3` of JAX 0.12, `checkpoint_name` is no primitive of its own, but a call of one.
    """
    if primitive.name == "name":
        return params["name"]
    called = params["_prim"] if primitive.name == "call_hi_primitive" else ""
    return getattr(called, "name") if type(called).__name__ == "CheckpointName" else ""  # noqa: B009


# Equations, and what they call.


def changes_reference(eqn: Any) -> bool:
    """Whether an equation touches an array that is changed in place (`jax.new_ref`).

    The references of a Pallas kernel aren't seen outside of the kernel, and don't count.
    """
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return any(hasattr(aval, "inner_aval") for aval in avals) or any(
        type(effect).__name__ == "InternalMutableArrayEffect" for effect in eqn.effects
    )


def forward_rule(eqn: Any) -> core.ClosedJaxpr | None:
    """What a function of `jax.custom_vjp` computes where it is differentiated.

    None of other equations. A checkpoint name in it is not in the program of the function itself.

    JAX refuses to differentiate by arrays that the function closes over. They are its first operands. Where the equation was
    bound again, it doesn't say how many.
    """
    if eqn.primitive.name != "custom_vjp_call":
        return None
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    floats = [n for n, shape in enumerate(shapes) if jnp.issubdtype(shape.dtype, jnp.inexact)]

    def forward(moving: Sequence[int], *values: Any) -> Any:
        def of_moving(*moved: Any) -> Any:
            known = dict(zip(moving, moved, strict=True))
            return bind(eqn, [known.get(n, value) for n, value in enumerate(values)])

        return jax.vjp(of_moving, *(values[n] for n in moving))[0]

    for first in range(len(floats) + 1):
        try:
            with eqn.ctx.manager:
                return jax.make_jaxpr(functools.partial(forward, floats[first:]))(*shapes)
        except Exception as error:
            if type(error).__name__ != "CustomVJPException":
                raise
    return None


def makes_complex(primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether the results of an operation are complex. JAX fails to save these in a checkpoint."""
    if primitive.name == "fft":
        return "IRFFT" not in str(params["fft_type"]).upper()
    if "new_dtype" in params:
        return jnp.issubdtype(params["new_dtype"], jnp.complexfloating)
    reads = any(jnp.issubdtype(getattr(aval, "dtype", bool), jnp.complexfloating) for aval in avals)
    return primitive.name == "complex" or (reads and primitive.name not in ("real", "imag", "abs", "eq", "ne", "is_finite"))


def bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The equation's results, computed as JAX evaluates a jaxpr (`jax.core.eval_jaxpr`)."""
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def callee(eqn: Any) -> core.ClosedJaxpr:
    """The program that a call runs.

    The call is a jit, a checkpoint, a loop or a function with a derivative of its own.
    """
    jaxpr = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


def called_name(eqn: Any) -> str:
    """The name of the function that a jit, or a function with a derivative of its own, calls."""
    return eqn.params["name"] if "name" in eqn.params else callee(eqn).jaxpr.debug_info.func_name


def num_operands(eqn: Any) -> tuple[int, int]:
    """How many constants a scan reads, and how many values it carries.

    Later versions of JAX have both as trees.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_unspecified(sharding: Any) -> bool:
    """Whether a jit leaves a sharding to the compiler."""
    return type(sharding).__name__ == "UnspecifiedValue"


def pins_shardings(eqn: Any) -> bool:
    """Whether a jit says how some argument or result lies."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return not all(map(is_unspecified, shardings))


def shard_map_as(eqn: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, mapped over devices as a `shard_map` maps what it calls."""
    return jax.shard_map(
        function,
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=tuple(eqn.params["out_specs"]),
        axis_names=eqn.params["newly_manual_axes"],
        check_vma=eqn.params["check_vma"],
    )


def shard_map_devices(eqn: Any) -> int:
    """Number of devices that each run the body of a shard_map on their own part of the arrays."""
    return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])


def attention_sizes(eqn: Any) -> tuple[tuple[int, int, int, int], int, int, str, int] | None:
    """Of fused attention: the scores' shape, the widths of query and value, mask and window.

    None of other equations.

    The shape is "batch heads queries keys". The window is 0 if there is none.
    """
    name, params = eqn.primitive.name, eqn.params
    if not name.startswith("dot_product_attention") or not ("_fwd" in name or "_bwd" in name):
        return None
    q, k, v = (var.aval.shape for var in eqn.invars[:3])
    heads, length = (1, 2) if params["layout"] == 1 else (2, 1)  # BNTH is 1, BTNH is 0
    pages = eqn.invars[9].aval.shape if len(eqn.invars) > 9 else ()
    kv_length = k[length] * pages[2] if len(pages) == 4 and math.prod(pages) else k[length]
    mask = params["mask_type"]
    window = params.get("sliding_window_length") or 0
    return (q[0], q[heads], q[length], kv_length), q[-1], v[-1], getattr(mask, "name", str(mask)), window


# Where an equation was traced.


def named_scopes(stack: NameStack) -> tuple[str, ...]:
    """The names that `jax.named_scope` gave, outermost first.

    Those of transformations (jvp, vmap) are left out.
    """
    return tuple(scope.name for scope in stack.stack if type(scope).__name__ == "Scope")


def is_transposed(stack: NameStack) -> bool:
    """Whether an operation is of a backward pass inside the program."""
    return any(type(scope).__name__ == "Transform" and scope.name == "transpose" for scope in stack.stack)


def is_transformed(stack: NameStack, depth: int | None = None) -> bool:
    """Whether a transformation, such as vmap, is among the outermost `depth` parts of a stack."""
    return any(type(scope).__name__ == "Transform" for scope in stack.stack[:depth])


def stack_of(scopes: Sequence[str] = ()) -> NameStack:
    """A stack of named scopes, outermost first."""
    stack = source_info_util.new_name_stack()
    for scope in scopes:
        stack = stack.extend(scope)
    return stack


@contextlib.contextmanager
def context_of(eqn: Any, stack: NameStack, traceback: Any) -> Iterator[None]:
    """A context to trace in, with a line, scopes, and the equation's configuration."""
    within = source_info_util.current_name_stack() + stack
    with source_info_util.user_context(traceback, name_stack=within), eqn.ctx.manager:
        yield


# The arguments of a traced program, as JAX calls them and XLA too.


def argument_names(jaxpr: core.ClosedJaxpr) -> tuple[str, ...]:
    """The names of a program's arguments: `state.params['w']`.

    The name of an argument may be empty.
    """
    return tuple(name or "" for name in jaxpr.jaxpr.debug_info.arg_names or ())


def result_names(jaxpr: core.ClosedJaxpr) -> tuple[str, ...]:
    """The names of a program's results: `result[0]`."""
    return tuple(jaxpr.jaxpr.debug_info.result_paths or ())


def name_arguments(jaxpr: core.ClosedJaxpr, names: Sequence[str]) -> None:
    """Gives a program's arguments other names.

    Each program that JAX makes of it has these.
    """
    inner: Any = jaxpr.jaxpr
    inner._debug_info = inner.debug_info._replace(arg_names=tuple(names))


# XLA.


def divided_in_python(address: str) -> str | None:
    """The function by which a mesh divides one of JAX's operations, and its static arguments.

    JAX's `custom_partitioning` calls the function while XLA partitions the program. None for an operation of another package.

    Args:
        address: the `backend_config` of the operation in a lowered program that still exists.
    """
    from jax.experimental.custom_partitioning import custom_partitioning

    callbacks = custom_partitioning.__call__.__globals__.get("_sharding_callbacks", {})
    if (called := callbacks.get(address.encode())) is None or not called.partition.__module__.startswith("jax."):
        return None
    return f"{called.partition.__module__}.{called.partition.__qualname__} {called.static_args}"


def xla_flags() -> bytes:
    """The options of a compile, serialized, with what XLA read of XLA_FLAGS.

    XLA reads the variable once, so a later change of it doesn't count.
    """
    from jaxlib import xla_client

    return xla_client.CompileOptions().SerializeAsString()
