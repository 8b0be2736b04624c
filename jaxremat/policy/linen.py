"""Flax Linen modules as functions of their variables.

With `layers.py` this is all that `policy` needs of Flax Linen.

    named = lifted(Block, "autoname", lambda layer, _, variables, args, kwargs: ...)

`lifted` is a lifted transform, as `nn.remat` is (flax/core/lift.py `checkpoint`). It sees the layer as a pure function of its
variables, keys and arguments, whatever submodules, mutable collections or shared scopes the layer has.

Nothing else in `policy` imports this module before it has met a class of Flax Linen.
"""

import copy
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_transform

#: `around(layer, dry_run, variables, args, kwargs)` returns `layer(*variables, *args, **kwargs)`, transformed. `dry_run` is the
#: same function for a trace whose result isn't used: Flax counts the random keys that are drawn, and it counts none of these.
Around = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, Any], tuple[Any, ...], dict[str, Any]], Any]


def lifted(target: Any, transform: str, around: Around) -> Any:
    """The class `target` with its name and parameter tree, whose calls go through `around`.

    Args:
        target: the class.
        transform: the name of the transform, for Flax's messages.
        around: the transform.
    """

    def of_scopes(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def layer(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scopes = scope_fn(variables, rngs)
                return fn(scopes, *args, **kwargs), repack_fn(scopes)

            def dry_run(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scopes = scope_fn(variables, rngs)
                for scope in jax.tree.leaves(scopes):
                    scope.rng_counters = copy.deepcopy(scope.rng_counters)
                return fn(scopes, *args, **kwargs), repack_fn(scopes)

            return around(layer, dry_run, (variables, rngs), args, kwargs)

        return lift.pack(inner, (True,), (True,), (True,), name=transform, enable_kwargs=True)

    return _named_as(target, lift_transform(of_scopes, target))


def remat_linen(target: Any, policy: Any, *, prevent_cse: bool, static_argnums: tuple[int, ...]) -> Any:
    """`nn.remat` of the class `target` under a policy of JAX's, with the name of `target`."""
    static_argnums = tuple(1 + n for n in static_argnums)  # nn.remat counts self
    return _named_as(target, nn.remat(target, policy=policy, prevent_cse=prevent_cse, static_argnums=static_argnums))


def _named_as(target: Any, wrapped: Any) -> Any:
    wrapped.__name__, wrapped.__qualname__ = target.__name__, target.__qualname__
    return wrapped


def module_layer(layer: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """A Flax module as a function of its variables, a random key and `args`; and their shapes."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda key, *args: layer.init({"params": key, "dropout": key}, *args), key, *args)
    mutable = [name for name in variables if name != "params"]

    def apply(variables: Any, key: Any, *args: Any) -> Any:
        return layer.apply(variables, *args, rngs={"dropout": key}, mutable=mutable)

    return apply, (variables, key, *args)
