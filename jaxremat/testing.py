"""For a user's own tests: the compiled memory of a train step, for a GPU that the test machine doesn't have.

Set `JAX_PLATFORMS=cpu` before importing jax (first lines of conftest.py); the rest is one call:

    memory = memory_of(step, (params, batch), "h100-80gb")
    assert_fits(step, (params, batch), "a100-40gb", "30GiB")
"""

from collections.abc import Callable
from typing import Any

from jaxremat.units import gib, parse_bytes
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.memory import CompiledMemory
from jaxremat.xla.target import Target

__all__ = ["assert_fits", "memory_of"]


def memory_of(
    step: Callable[..., Any], args: tuple[Any, ...], target: Target | str, *, donate_argnums: int | tuple[int, ...] = ()
) -> CompiledMemory:
    """What XLA needs for `step(*args)` on `target`, in bytes.

    Args:
        step: any function JAX can trace, or a jitted one (which keeps its own donation).
        args: its arguments, or a `jax.ShapeDtypeStruct` for each array.
        target: a target or its name, such as `h100-80gb`.
        donate_argnums: as for `jax.jit`, where `step` isn't jitted yet.

    Raises:
        TargetError: unknown target, or this process's JAX can't compile for it.
        MissingDependencyError: the `aot` extra isn't installed.
        CompileError: XLA refused the program.
    """
    return lower_and_compile(step, args, target, donate_argnums=donate_argnums).memory


def assert_fits(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    target: Target | str,
    budget: int | str,
    *,
    donate_argnums: int | tuple[int, ...] = (),
) -> CompiledMemory:
    """Fails unless `step(*args)` compiled for `target` stays within `budget` (bytes, or text such as `30GiB`).

    Returns:
        The compiled memory, for further assertions.

    Raises:
        AssertionError: it needs more; the message has every term.
    """
    budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
    memory = memory_of(step, args, target, donate_argnums=donate_argnums)
    if memory.total_bytes > budget_bytes:
        name = target.name if isinstance(target, Target) else target
        over = gib(memory.total_bytes - budget_bytes)
        terms = (
            f"arguments {gib(memory.argument_bytes)} + outputs {gib(memory.output_bytes)} - donated {gib(memory.alias_bytes)} "
            f"+ temporaries {gib(memory.temp_bytes)}"
        )
        raise AssertionError(
            f"the step needs {gib(memory.total_bytes)} on {name}, {over} over the budget of {gib(budget_bytes)}: {terms}"
        )
    return memory
