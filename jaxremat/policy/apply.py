"""`remat` applies a policy to one layer. A stack of layers is in `stack.py`.

    Block = jaxremat.remat(Block, "save:query_proj,mlpwo")

`remat` is `nn.remat` of a Flax Linen class, and `jax.checkpoint` of a function or of the call of an NNX or Equinox module. It
does three things more:

* It checks that the policy's names exist.
* It gives the result the name of the class. Flax would name `Block` automatically as `CheckpointBlock_0`, and the parameter
  tree would then depend on the policy.
* It chooses `prevent_cse`. A checkpointed value is computed twice: in the forward pass, and again for the backward pass.
  XLA's common subexpression elimination would merge the two computations, and the value would stay in memory after all.
  Optimization barriers (`prevent_cse=True`) prevent that, but they also prevent fusions. Inside a loop that runs more than
  once, the second computation is in another loop than the first. Nothing can be merged there, and the barriers are left out.
  In unrolled code they are needed, and also in a scan of one iteration, which XLA unrolls.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxremat.errors import UnknownNameError, UnknownPolicyError, UsageError
from jaxremat.policy.autoname import autoname, check_function
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.names import all_written_names, resolve
from jaxremat.policy.offload import check_scan
from jaxremat.policy.spec import OWN, LayerPolicy, Policy
from jaxremat.policy.state import has_objects, is_linen_class, is_module_class, on_arrays
from jaxremat.policy.tree import combine, is_array, partition

Target = TypeVar("Target", bound=Callable[..., Any])


def remat(
    target: Target, policy: Policy | str, *, in_scan: bool = False, static_argnums: int | tuple[int, ...] = ()
) -> Target:
    """`target`, whose forward pass saves for the backward pass what `policy` says.

    Parameters, initial values, outputs and gradients are those of `target`. Only memory and time change. `policy` may list
    names that the author of `target` wrote, and names that `autoname` writes.

    Args:
        target: a module class of Flax Linen, Flax NNX or Equinox, or a function of arrays and NNX objects.
        policy: a `Policy` or its text. `none` returns `target` itself.
        in_scan: True where the caller applies the result inside `nn.scan` or `lax.scan` over more than one layer. XLA needs
            no barriers then (see the module's text). False is always safe.
        static_argnums: the positions of the arguments that are Python values, as for `jax.checkpoint`. `self` isn't counted.
            Classes of NNX and Equinox don't need it: what isn't an array is a Python value to them.

    Returns:
        A class or a function, as `target`. The class has the name and the parameter tree of `target`, and a checkpoint in each
        call of an instance. Updates of NNX state in a call, such as those of dropout and BatchNorm, are the caller's.

    Raises:
        UnknownPolicyError: `policy` doesn't parse, or it is a policy for several layers (`every:K`, `one-in:K`, a mix),
            or for a whole loss (`own`).
        UnknownNameError: no value of `target` carries a name in `policy`. This is raised at the first call.
        UsageError: `target` is neither a module class nor a function. Or the policy offloads, and a GPU would compute wrong
            gradients if the layer is in a scan (`offload.py`). This is raised at the call, also with `in_scan=False`: the loop
            around the layer can't be seen from here.
    """
    policy = as_policy(policy)
    if not isinstance(policy, LayerPolicy):
        stacked = f"stack the layers with jaxremat.Layers(layer, num_layers=..., policy={str(policy)!r})"
        raise UnknownPolicyError(
            f"policy {str(policy)!r} is about {'a whole loss' if policy == OWN else 'several layers'}, and remat wraps one layer",
            allowed="a policy for one layer, such as nothing, dots or save:NAME",
            next_step="leave remat out, or use none: both leave the layer as it is" if policy == OWN else stacked,
        )
    if policy.is_none:
        return target
    static_argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if is_linen_class(target):
        if any(n < 0 for n in static_argnums):
            raise UsageError(f"static_argnums got {static_argnums} for a class", allowed="numbers from 0, without self")
        from jaxremat.policy.linen import remat_linen

        checked = _with_checked_names(target, policy)
        return remat_linen(checked, policy.to_jax(), prevent_cse=not in_scan, static_argnums=static_argnums)
    if is_module_class(target):
        return _remat_class(target, policy, prevent_cse=not in_scan)
    check_function("remat", target, next_step="wrap the class, then make instances: remat(Block, 'dots')(...)")
    plain = remat_function(target, policy, prevent_cse=not in_scan, static_argnums=static_argnums)
    with_state = _remat_call(target, policy, prevent_cse=not in_scan)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (with_state if has_objects((args, kwargs)) else plain)(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _remat_class(target: Any, policy: LayerPolicy, *, prevent_cse: bool) -> Any:
    """A subclass of an NNX or Equinox class with its name and tree, and checkpointed calls."""
    own = {
        "__call__": _remat_call(target.__call__, policy, prevent_cse=prevent_cse),
        **{name: getattr(target, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    is_pytree = {"pytree": target._pytree__is_pytree} if hasattr(target, "_pytree__is_pytree") else {}
    return types.new_class(target.__name__, (target,), is_pytree, lambda namespace: namespace.update(own))


def _remat_call(function: Any, policy: LayerPolicy, *, prevent_cse: bool) -> Any:
    """`remat` of a function of anything.

    Its arrays are the checkpoint's, and the state of NNX objects is updated.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with on_arrays(function, args, kwargs) as of_arrays:
            return of_arrays.results(remat_function(of_arrays.function, policy, prevent_cse=prevent_cse)(of_arrays.arrays))

    return call


def remat_function(function: Any, policy: LayerPolicy, *, prevent_cse: bool, static_argnums: tuple[int, ...] = ()) -> Any:
    """`remat` of a function.

    The caller knows the loop around the function, and chooses `prevent_cse`.
    """
    if policy.is_none:
        return function
    if not policy.names():
        return jax.checkpoint(function, policy=policy.to_jax(), prevent_cse=prevent_cse, static_argnums=static_argnums)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        static = tuple(n % len(args) for n in static_argnums)

        def dynamic(*a: Any, **k: Any) -> Any:
            return function(*_with_static(args, a, static), **k)

        check_scan(policy, None)
        named, resolved = with_names(dynamic, policy, *_dynamic(args, static), **kwargs)
        wrapped = function if named is dynamic else autoname(function)
        return jax.checkpoint(wrapped, policy=resolved.to_jax(), prevent_cse=prevent_cse, static_argnums=static_argnums)(
            *args, **kwargs
        )

    return checked


def checkpointed(function: Any, policy: LayerPolicy, *, prevent_cse: bool) -> Any:
    """`function` in a checkpoint under a policy whose names were checked before.

    `none` is no checkpoint.
    """
    return function if policy.is_none else jax.checkpoint(function, policy=policy.to_jax(), prevent_cse=prevent_cse)


def with_names(function: Any, policy: Policy, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A function whose values carry the names in `policy`, and `policy` with its names checked.

    The function is `function` itself where its author wrote all the names, else `autoname(function)`.
    """
    authors = checkpoint_names(function, *args, **kwargs)
    with contextlib.suppress(UnknownNameError):
        return function, resolve(policy, authors)
    named = autoname(function)
    return named, resolve(policy, checkpoint_names(named, *args, **kwargs), authors)


def checkpoint_names(function: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
    """The checkpoint names that the values of `function(*args, **kwargs)` carry."""
    # A new lambda, as `named_values` has it.
    return {*all_written_names(jax.make_jaxpr(lambda *a, **k: function(*a, **k))(*args, **kwargs).jaxpr.eqns)}


def _dynamic(args: tuple[Any, ...], static_argnums: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(arg for n, arg in enumerate(args) if n not in static_argnums)


def _with_static(args: tuple[Any, ...], dynamic: tuple[Any, ...], static_argnums: tuple[int, ...]) -> tuple[Any, ...]:
    values = iter(dynamic)
    return tuple(arg if n in static_argnums else next(values) for n, arg in enumerate(args))


def _with_checked_names(target: Any, policy: LayerPolicy) -> Any:
    """The class `target` of Flax Linen, whose values carry the names in `policy`.

    It is `target` itself where `policy` has no names.

    Tracing the result raises UnknownNameError where a name doesn't exist.
    """
    if not policy.names():
        return target
    from jaxremat.policy.linen import lifted

    def checked(layer: Any, dry_run: Any, variables: tuple[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrays, rest = partition((args, kwargs), is_array)

        def pure(variables: Any, rngs: Any, arrays: Any) -> Any:
            inner_args, inner_kwargs = combine(arrays, rest)
            return dry_run(variables, rngs, *inner_args, **inner_kwargs)

        check_scan(policy, None)
        named, _ = with_names(pure, policy, *variables, arrays)
        return (layer if named is pure else autoname(layer))(*variables, *args, **kwargs)

    return lifted(target, "remat", checked)
