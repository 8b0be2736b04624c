"""Where a policy meets one layer: `remat`. A stack of layers is in `stack.py`.

`remat` is `nn.remat` (or `jax.checkpoint`, for a plain function) with three things settled: the policy's names are checked,
the wrapped class keeps its name (Flax would auto-name `Block` as `CheckpointBlock_0`, and the parameter tree would then
depend on the policy), and `prevent_cse` is chosen here. A checkpointed value is computed twice, and XLA's common
subexpression elimination would merge the two and so keep the value alive after all. Optimization barriers prevent that,
at the price of fusions. Inside a loop that runs more than once the second computation is in another loop than the first,
nothing can be merged, and the barriers are left out; unrolled, or in a loop of one iteration (which XLA unrolls), they
are needed.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_transform

from jaxremat.errors import UnknownNameError, UnknownPolicyError
from jaxremat.policy.autoname import autoname, check_function
from jaxremat.policy.grammar import as_policy
from jaxremat.policy.jax_policy import to_jax
from jaxremat.policy.names import has_names, named_values, resolve
from jaxremat.policy.spec import Every, LayerPolicy, Mix, OneIn, Policy

Target = TypeVar("Target", bound=Callable[..., Any])


def remat(
    target: Target, policy: Policy | str, *, in_scan: bool = False, static_argnums: int | tuple[int, ...] = ()
) -> Target:
    """`target` with `policy` deciding what its forward pass keeps for the backward pass.

    Parameters, initial values, outputs and gradients are those of `target`; only memory and time change. Names in `policy`
    that the author of `target` didn't write are those that `autoname` writes.

    Args:
        target: a Flax Linen module class, or a function of arrays.
        policy: a `Policy` or its text. `none` returns `target` itself.
        in_scan: True where the caller applies the result inside `nn.scan` or `lax.scan` over more than one layer; then XLA
            needs no barriers (see the module's text). False is always safe.
        static_argnums: Python-valued positional arguments, as for `jax.checkpoint` (`self` isn't counted).

    Raises:
        UnknownPolicyError: `policy` doesn't parse, or speaks of several layers (`every:K`, `one-in:K`, a mix).
        UnknownNameError: at the first call, a name in `policy` that no value of `target` carries.
        UsageError: `target` is neither a module class nor a function.
    """
    policy = as_policy(policy)
    if isinstance(policy, Every | OneIn | Mix):
        raise UnknownPolicyError(
            f"policy {str(policy)!r} speaks of several layers, and remat wraps one",
            allowed="a policy for one layer, such as nothing, dots or save:NAME",
            next_step=f"stack the layers with jaxremat.Layers(layer, num_layers=..., policy={str(policy)!r})",
        )
    if policy.is_none:
        return target
    static_argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if isinstance(target, type) and issubclass(target, nn.Module):
        checked = _with_checked_names(target, policy)
        wrapped = nn.remat(
            checked, policy=to_jax(policy), prevent_cse=not in_scan, static_argnums=tuple(1 + n for n in static_argnums)
        )
        wrapped.__name__, wrapped.__qualname__ = target.__name__, target.__qualname__
        return wrapped
    check_function("remat", target, next_step="wrap the class, then make instances: remat(Block, 'dots')(...)")
    return remat_function(target, policy, prevent_cse=not in_scan, static_argnums=static_argnums)


def remat_function(function: Any, policy: LayerPolicy, *, prevent_cse: bool, static_argnums: tuple[int, ...] = ()) -> Any:
    """`remat` of a function, with `prevent_cse` said by a caller that knows the loop around it."""
    if policy.is_none:
        return function
    if not has_names(policy):
        return jax.checkpoint(function, policy=to_jax(policy), prevent_cse=prevent_cse, static_argnums=static_argnums)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        def dynamic(*a: Any, **k: Any) -> Any:
            return function(*_merged(args, a, static_argnums), **k)

        named, resolved = with_names(dynamic, policy, *_dynamic(args, static_argnums), **kwargs)
        wrapped = function if named is dynamic else autoname(function)
        return jax.checkpoint(wrapped, policy=to_jax(resolved), prevent_cse=prevent_cse, static_argnums=static_argnums)(
            *args, **kwargs
        )

    return checked


def with_names(function: Any, policy: Policy, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A function that carries the names `policy` speaks of, and the policy with its names resolved.

    That is `function` itself where its author wrote them all, else `autoname(function)`.
    """
    authors = checkpoint_names(function, *args, **kwargs)
    with contextlib.suppress(UnknownNameError):
        return function, resolve(policy, authors)
    named = autoname(function)
    return named, resolve(policy, checkpoint_names(named, *args, **kwargs), authors)


def checkpoint_names(function: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
    """The checkpoint names that the values of `function(*args, **kwargs)` carry."""
    return {value.name for value in named_values(function, *args, **kwargs)}


def _dynamic(args: tuple[Any, ...], static_argnums: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(arg for n, arg in enumerate(args) if n not in static_argnums)


def _merged(args: tuple[Any, ...], dynamic: tuple[Any, ...], static_argnums: tuple[int, ...]) -> tuple[Any, ...]:
    values = iter(dynamic)
    return tuple(arg if n in static_argnums else next(values) for n, arg in enumerate(args))


def _with_checked_names(target: Any, policy: LayerPolicy) -> Any:
    """`target`, made to carry the names of `policy`, or raising UnknownNameError when traced; untouched if it has no names.

    A lifted transform, as `nn.remat` is (flax/core/lift.py `checkpoint`): it sees the layer as a pure function of its
    variables, keys and arguments, whatever submodules, mutable collections or shared scopes the layer has.
    """
    if not has_names(policy):
        return target

    def check(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            arrays, structure = jax.tree.flatten((args, kwargs))
            is_array = [isinstance(leaf, jax.Array) for leaf in arrays]

            def pure(variables: Any, rngs: Any, traced: list[Any]) -> Any:
                values = iter(traced)
                leaves = [next(values) if dynamic else leaf for dynamic, leaf in zip(is_array, arrays, strict=True)]
                inner_args, inner_kwargs = jax.tree.unflatten(structure, leaves)
                scopes = scope_fn(variables, rngs)
                for scope in jax.tree.leaves(scopes):  # Flax numbers the keys drawn; the layer itself must find them undrawn
                    scope.rng_counters = copy.deepcopy(scope.rng_counters)
                return fn(scopes, *inner_args, **inner_kwargs), repack_fn(scopes)

            def run(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                return fn(scope, *args, **kwargs), repack_fn(scope)

            traced = [leaf for dynamic, leaf in zip(is_array, arrays, strict=True) if dynamic]
            named, _ = with_names(pure, policy, variables, rngs, traced)
            return (run if named is pure else autoname(run))(variables, rngs, *args, **kwargs)

        return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)

    return lift_transform(check, target)
