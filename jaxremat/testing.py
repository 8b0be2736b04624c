"""Functions for users' own tests of a train step's compiled memory.

The test machine needn't have the GPU.

Set `JAX_PLATFORMS=cpu` before the first import of jax, in the first lines of conftest.py. A test then needs one call::

    memory = memory_of(step, (params, batch), "h100-80gb")
    assert_fits(step, (params, batch), "a100-40gb", "30GiB")
"""

from collections.abc import Callable
from typing import Any

from jaxremat.chips.target import Target
from jaxremat.units import gib, parse_bytes
from jaxremat.xla.compile import lower_and_compile
from jaxremat.xla.memory import CompiledMemory

__all__ = ["assert_fits", "memory_of"]


def memory_of(
    step: Callable[..., Any], args: tuple[Any, ...], target: Target | str, *, donate_argnums: int | tuple[int, ...] = ()
) -> CompiledMemory:
    """The memory that `step(*args)` needs on `target` according to XLA, in bytes.

    Args:
        step: any function that JAX can trace, or an already jitted function. A jitted function keeps its own donation.
        args: the arguments, or a `jax.ShapeDtypeStruct` for each array.
        target: a target or its name, such as `h100-80gb`.
        donate_argnums: as for `jax.jit`. It has an effect only if `step` isn't jitted yet.

    Raises:
        TargetError: the target is unknown, or JAX in this process can't compile for it.
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
    """Asserts that `step(*args)`, compiled for `target`, needs at most `budget`.

    The budget is bytes, or text such as `30GiB`.

    Returns:
        The compiled memory, for further assertions.

    Raises:
        AssertionError: the step needs more than `budget`. The message lists every term of the sum.
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
