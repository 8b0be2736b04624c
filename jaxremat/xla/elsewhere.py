"""Sharding constraints on devices of this machine, in a program that is compiled for others.

A loss may say by a mesh of `jax.devices()` how its arrays lie. A GPU that isn't here is no device of that mesh, and JAX rejects
the program. For one device such constraints say nothing, and they are dropped:

    dropped = constraints_elsewhere(traced.jaxpr, target)           # the constraints, in the order of the program
    jitted = without_constraints(step, traced, dropped)             # the same step without them

For several devices the remedy is a workload that makes its mesh of the target's devices (`Workload.mesh`).
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax

from jaxremat.chips.target import Target
from jaxremat.errors import UsageError
from jaxremat.policy.jax_private import core
from jaxremat.xla.traced import places

#: The next step for a map over one device of this machine.
_WITHOUT_MESH = "jax.shard_map(f, in_specs=P('data'), ...) without mesh=, over the axes of --mesh, and --mesh data=1"


def constraints_elsewhere(jaxpr: Any, target: Target) -> tuple[Any, ...]:
    """The sharding constraints of a traced program that lie on a device that isn't the target's.

    Raises:
        UsageError: there are some, and they or the target have several devices.
    """
    found = []
    for place in places(jaxpr.jaxpr):
        if place.eqn.primitive.name == "sharding_constraint" and (others := _others(place.eqn.params["sharding"], target)):
            found.append(place.eqn)
            if len(others) > 1 or len(target.devices) > 1:
                raise _devices_elsewhere(target, f"with_sharding_constraint lies on {min(others, key=lambda one: one.id)}")
    return tuple(found)


def of_shardings(error: ValueError, target: Target) -> UsageError | None:
    """JAX's error about shardings as an error with a remedy; None of any other error.

    It is that arrays lie on other devices, or that a jitted step has other shardings than its arguments.
    """
    text = str(error)
    if "incompatible devices" in text:
        of_devices = _devices_elsewhere(target, text.partition(". ")[2] or text)
        maps_here = len(target.devices) == 1 and "shard_map" in text
        return of_devices.with_next_step(_WITHOUT_MESH) if maps_here else of_devices
    if not text.startswith(("Sharding passed to jit does not match", "Memory kinds passed to jax.jit does not match")):
        return None
    return UsageError(
        "the step is jitted with in_shardings, and they aren't the shardings of its arguments",
        allowed="args with these shardings; or mesh=mesh in the Workload, and args without any",
        cause=text.partition(", axis_types")[0][:300],
        next_step="jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), or mesh=mesh; the mesh is made of the "
        "devices that the function gets: def workload(batch: int = 8, devices=None)",
    )


def _devices_elsewhere(target: Target, cause: str) -> UsageError:
    return UsageError(
        f"the step is compiled for {len(target.devices)} x {target.name}, and it says that arrays lie on other devices",
        allowed="shardings over the target's devices, or PartitionSpecs under --mesh",
        cause=f"{cause}; jax.devices() and jax.make_mesh give the devices of this machine",
        next_step="take the target's devices: def workload(batch: int = 8, devices=None), make the mesh of them, and "
        "return Workload(..., mesh=mesh); --devices 8 gives it eight",
    )


def _others(sharding: Any, target: Target) -> set[Any]:
    """The devices of a sharding that aren't the target's.

    One over the axes of a mesh without devices has none.
    """
    if not isinstance(getattr(sharding, "mesh", None), jax.sharding.Mesh | None):
        return set()
    return {*sharding.device_set}.difference(target.devices)


def without_constraints(function: Callable[..., Any], traced: Any, dropped: Collection[Any]) -> Any:
    """The jitted function of a traced program without some of its constraints.

    Args:
        function: the function that was traced.
        traced: what JAX traced of it, a `jax.stages.Traced`.
        dropped: the constraints.
    """
    numbers = {id(eqn) for eqn in dropped}
    closed = core.ClosedJaxpr(_without(traced.jaxpr.jaxpr, numbers), traced.jaxpr.consts)
    results = jax.tree.structure(traced.out_info)

    @functools.wraps(function, updated=())  # its name and its arguments are those that the program's scopes begin with
    def same(*args: Any) -> Any:
        return results.unflatten(core.jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    donated = [any(leaf.donated for leaf in jax.tree.leaves(arg)) for arg in traced.args_info[0]]
    return jax.jit(same, donate_argnums=tuple(n for n, is_one in enumerate(donated) if is_one))


def _without(value: Any, dropped: Collection[int]) -> Any:
    """A jaxpr, or a parameter of an equation, without the equations of these ids.

    What reads their results reads their operands.
    """
    if isinstance(value, core.ClosedJaxpr) and value.jaxpr is not value:  # JAX 0.12 has one class for both
        return core.ClosedJaxpr(_without(value.jaxpr, dropped), value.consts)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_without(part, dropped) for part in value)
    if not isinstance(value, core.Jaxpr):
        return value
    same: dict[Any, Any] = {}

    def operand(var: Any) -> Any:
        return var if isinstance(var, core.Literal) else same.get(var, var)

    equations = []
    for eqn in value.eqns:
        invars = [operand(var) for var in eqn.invars]
        if id(eqn) in dropped:
            same[eqn.outvars[0]] = invars[0]
        else:
            params = {name: _without(param, dropped) for name, param in eqn.params.items()}
            equations.append(eqn.replace(invars=invars, params=params))
    return value.replace(eqns=equations, outvars=[operand(var) for var in value.outvars])
