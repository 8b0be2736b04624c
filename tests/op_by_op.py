"""Runs a function one operation at a time: no operation is fused with another, so that equal programs give equal bits.

XLA compiles a whole program, and rounds one program otherwise than another that computes the same. `op_by_op` traces a function
as `jax.jit` does, and then binds each operation of the trace on its own. Loops, branches, checkpoints and custom derivatives
are opened: the operations in them are bound one at a time too. `jax.disable_jit` is something else: under it there are no loops
in the trace to begin with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

#: Operations that run a jaxpr as it is.
CALLS = ("jit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")


def op_by_op(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function(*args)`, computed one operation at a time."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), run_jaxpr(jaxpr, jax.tree.leaves(args)))


def run_jaxpr(closed: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr."""
    jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
    consts = closed.consts if isinstance(closed, core.ClosedJaxpr) else ()
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), map(jnp.asarray, (*consts, *values)), strict=True))

    def value(atom: Any) -> Any:
        return jnp.asarray(atom.val) if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _results(eqn, [value(atom) for atom in eqn.invars]), strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, values: list[Any]) -> Sequence[Any]:
    params, name = eqn.params, eqn.primitive.name
    if name in CALLS:
        return run_jaxpr(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], values)
    if name in LOOPS:
        return LOOPS[name](params, values)
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def _scan(params: Any, values: list[Any]) -> list[Any]:
    (num_consts, num_carry), length = _num_operands(params), params["length"]
    consts, carry, slices = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]
    stacked: list[Any] = [None] * length
    for i in reversed(range(length)) if params["reverse"] else range(length):
        results = run_jaxpr(params["jaxpr"], [*consts, *carry, *(leaf[i] for leaf in map(_plain, slices))])
        carry, stacked[i] = results[:num_carry], results[num_carry:]
    return [*carry, *(_stack(leaves) for leaves in zip(*stacked, strict=True))]


def _plain(leaf: Any) -> Any:
    """The array as one of NumPy, which takes slices without compiling anything. Keys stay as they are."""
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def _stack(leaves: Sequence[Any]) -> Any:
    plain = [_plain(leaf) for leaf in leaves]
    return jnp.asarray(np.stack(plain)) if isinstance(plain[0], np.ndarray) else jnp.stack(plain)


def _num_operands(params: Any) -> tuple[int, int]:
    """How many constants a scan reads, and how many values it carries. Later versions of JAX keep them as a tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _while(params: Any, values: list[Any]) -> list[Any]:
    num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body, state = values[:num_test], values[num_test:][:num_body], values[num_test + num_body :]
    while (goes_on := run_jaxpr(params["cond_jaxpr"], [*of_test, *state])[0]).any():
        new = run_jaxpr(params["body_jaxpr"], [*of_body, *state])
        state = [jnp.where(_like(goes_on, a), a, b) for a, b in zip(new, state, strict=True)] if goes_on.ndim else new
    return state


def _like(mask: jax.Array, value: jax.Array) -> jax.Array:
    """`mask` with as many axes as `value`. A vmapped loop has a test for each member."""
    return mask.reshape(*mask.shape, *(1,) * (value.ndim - mask.ndim))


def _cond(params: Any, values: list[Any]) -> list[Any]:
    return run_jaxpr(params["branches"][int(values[0])], values[1:])


LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
